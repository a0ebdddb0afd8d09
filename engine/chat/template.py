"""Chat templates: reads and checks them, and renders messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import ConfigError, InvalidRequestError, shown_value
from ..checkpoints import mapping_of

Message = dict[str, Any]


def read_template(template: str | None) -> str | None:
    """Returns the template's text; a value without `{` is the path of a file.

    Raises:
        ConfigError: the file cannot be read, or the template's syntax is invalid.
    """
    if template is None:
        return None
    if "{" not in template:
        try:
            template = Path(template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError.at("chat_template", f"cannot read {template!r}: {error}") from None
    _check_syntax(template)
    return template


def _check_syntax(template: str, where: str = "") -> None:
    import jinja2

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError as error:
        # `{% generation %}` is a tag of transformers, unknown to plain jinja2.
        if "generation" not in str(error):
            why = f"{where}line {error.lineno}: {error.message}"
            raise ConfigError.at("chat_template", why) from None


def check_stored_template(folder: Path) -> None:
    """Raises `ConfigError` if the template in a tokenizer's folder is invalid."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            stored: Any = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError.at("chat_template", f"cannot read {str(file)!r}: {error}") from None
    else:
        file = folder / "tokenizer_config.json"
        stored = mapping_of(file, "tokenizer").get("chat_template")
    if stored is None:
        return
    try:  # a list holds several named templates
        texts = [each["template"] for each in stored] if isinstance(stored, list) else [stored]
    except (TypeError, LookupError):
        texts = [None]
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError.at("chat_template", f"{file} has one that is no text: {text!r}")
        _check_syntax(text, f"{file}: ")


def template_of(tokenizer: Any) -> str:
    """Returns the text of a tokenizer's template; named templates are joined."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return "\n".join(str(each) for each in template.values())
    return template or ""


def check_messages(messages: Any) -> None:
    """Raises `InvalidRequestError` if `messages` has the wrong form for any template."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError.at(
            "messages", f"a list of at least one message, got {shown_value(messages)}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError.at(
                f"messages.{index}", f"a mapping with a `role`, got {shown_value(message)}"
            )
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
            is_text = isinstance(part, Mapping) and part.get("type", "text") == "text"
            if not is_text or not isinstance(part.get("text"), str):
                raise InvalidRequestError.at(
                    f"messages.{index}.content.{number}",
                    f"only parts of type 'text' are supported, got {shown_value(part)}",
                )


OWN_NAMES = frozenset(
    {
        *("self", "conversation", "messages", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        "tokenizer_kwargs",
    }
)
"""Parameters of transformers, which variables of a template may therefore not be named after."""


def render(
    tokenizer: Any, messages: Sequence[Message], field: str = "messages", /, **options: Any
) -> str:
    """Renders messages as text.

    Templates expect the arguments of earlier calls either as objects, as transformers documents, or
    as text. A template that rejects objects is called again with text.

    Args:
        field: the field that errors name; `chat_template` if the request has brought the template.
        options: variables of the template, and options of transformers.

    Raises:
        InvalidRequestError: the template rejects the messages or fails; a failure names `field`.
    """
    import jinja2

    def rendered(these: Sequence[Message]) -> str:
        text: str = tokenizer.apply_chat_template(list(these), tokenize=False, **options)
        return text

    rejected = (jinja2.TemplateError, ValueError, TypeError, KeyError)
    try:
        return rendered(messages)
    except rejected as error:
        first = error
    except (ArithmeticError, LookupError, AttributeError) as error:
        raise InvalidRequestError.at(
            field, f"the chat template fails on these messages: {error}"
        ) from None
    if any(message.get("tool_calls") for message in messages):
        with suppress(*rejected):
            return rendered([_with_text_arguments(message) for message in messages])
    raise InvalidRequestError.at("messages", f"the chat template rejects them: {first}") from None


_CALL = (
    "Answer with a call of a function: one JSON object and nothing else, of the form "
    '{"name": NAME, "arguments": OBJECT}, whose arguments match the function\'s parameters. '
    "The functions are:"
)


def render_with_calls(
    rendered: Callable[[Sequence[Message]], str],
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
) -> str:
    """Renders messages and tools with a template that ignores tools.

    The tools are described in a system message or, if the template has no system messages, in the
    first message of the user.

    Args:
        rendered: renders messages with the template.
        tools: the tools, one of which has to be called.

    Raises:
        InvalidRequestError: the template rejects the messages.
    """
    shown = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    told = "\n".join([_CALL, *shown])
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}
        systems = [first, *messages[1:]]
    else:
        systems = [{"role": "system", "content": told}, *messages]
    users = list(messages)
    for index, message in enumerate(messages):
        if message["role"] == "user":
            users[index] = {**message, "content": f"{told}\n\n{message['content']}"}
            break
    with suppress(InvalidRequestError):
        text = rendered(systems)
        if told in text:
            return text
    return rendered(users)


def _with_text_arguments(message: Message) -> Message:
    """Returns `message` with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}
