"""Chat templates: where they come from, and messages rendered by them."""

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
    """The template's text; a value without `{` is a file's path.

    Raises:
        ConfigError: no such file, or no template.
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
        # `{% generation %}` is transformers' own tag; only it knows that.
        if "generation" not in str(error):
            why = f"{where}line {error.lineno}: {error.message}"
            raise ConfigError.at("chat_template", why) from None


def check_stored_template(folder: Path) -> None:
    """Raises `ConfigError` where the template in a tokenizer's folder is none, by field."""
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
    try:  # several have names
        texts = [each["template"] for each in stored] if isinstance(stored, list) else [stored]
    except (TypeError, LookupError):
        texts = [None]
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError.at("chat_template", f"{file} has one that is no text: {text!r}")
        _check_syntax(text, f"{file}: ")


def template_of(tokenizer: Any) -> str:
    """The text of a tokenizer's template; of several, such as one for tools, all."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return "\n".join(str(each) for each in template.values())
    return template or ""


def check_messages(messages: Any) -> None:
    """Raises `InvalidRequestError` where these are no messages, whatever the template makes of
    them."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError.at(
            "messages", f"a list of at least one message, got {shown_value(messages)}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError.at(
                f"messages.{index}", f"a mapping with a `role`, got {shown_value(message)}"
            )


OWN_NAMES = frozenset(
    {
        *("self", "conversation", "messages", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        "tokenizer_kwargs",
    }
)
"""What transformers takes beside a template's variables, which cannot have these names."""


def render(
    tokenizer: Any, messages: Sequence[Message], field: str = "messages", /, **options: Any
) -> str:
    """Messages as text.

    Templates take the arguments of earlier calls as objects, as transformers documents it, or as
    text; a template that cannot use objects gets text.

    Args:
        field: what is at fault where it fails: `chat_template` if the request has brought it.
        options: variables of the template, and transformers' options.

    Raises:
        InvalidRequestError: the template rejects the messages, or fails; then it names `field`.
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
    """Messages as text by a template that ignores tools: a system message presents them, or the
    user's first message where the template has no system messages.

    Args:
        rendered: messages by the template.
        tools: of which one has to be called.

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
    """`message` with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}
