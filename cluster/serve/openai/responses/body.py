"""The body of `POST /v1/responses`: OpenAI's fields for text and functions, and extensions.

Documented features that this server lacks (stored responses, built-in tools, images) are rejected
by name, unless the value requests nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from .....errors import InvalidRequestError, renamed, shown_value
from .. import chat
from ..generation import Generation
from ..parse import (
    MANY,
    Strict,
    at_most,
    check_kind,
    check_unserved,
    objects_of,
    validated,
)
from ..protocol import CalledFunction, ChatBody, Effort, FunctionDefinition, SharedFields, Tools

# The output items of an answer are valid input items, so clients can send them back unchanged.

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict):
    """A part of a message, written by the user or generated."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[None] | None = None
    logprobs: list[Any] | None = None  # of an answer that is sent back; ignored


class InputMessage(Strict):
    """One message of the input."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], at_most(MANY)]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(CalledFunction):
    """A call made by an earlier answer."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: None = None
    caller: None = None
    is_async: Literal[False] | None = Field(None, alias="async")
    async_: None = None  # the name that the official client sends


class InputCallOutput(Strict):
    """The result of a call; `call_id` is that of an earlier call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText], at_most(MANY)]
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    namespace: None = None
    caller: None = None


class ReasoningText(Strict):
    """A part of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Strict):
    """Reasoning of an earlier answer; the chat template decides whether the model sees it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], at_most(MANY)] | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: Status | None = None

    @field_validator("summary", "encrypted_content")
    @classmethod
    def _none_here(cls, value: list[Any] | str | None) -> list[Any] | str | None:
        if value:
            raise ValueError("it is not read here; send the reasoning's content")
        return value


KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _kind(item: Any) -> str:
    given = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return given if given in KINDS else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_kind),
]
Input = str | Annotated[list[InputItem], Field(min_length=1), at_most(MANY)]


def text_of(content: str | list[InputText]) -> str:
    """Joins parts by newlines, as in chats."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def check_kinds(items: Any, tools: Any) -> None:
    """Rejects other kinds of items, parts and tools by name, which errors of a union would hide.

    Raises:
        InvalidRequestError: names the item, part or tool.
    """
    rule = f"it has to be one of {', '.join(KINDS)}"
    for index, item in objects_of(items):
        check_kind(f"input.{index}", item, (None, *KINDS), rule)
        kind = item.get("type")
        place = "output" if kind == "function_call_output" else "content"
        for number, part in objects_of(item.get(place) if kind != "reasoning" else None):
            field = f"input.{index}.{place}.{number}"
            check_kind(field, part, ("input_text", "output_text"), "only text is")
    for index, tool in objects_of(tools):
        check_kind(f"tools.{index}", tool, ("function",), "only functions are")


class FunctionTool(FunctionDefinition):
    """A function that the model may call; other kinds of tools are not supported."""

    type: Literal["function"]
    allowed_callers: list[Literal["direct"]] | None = None
    is_async: Literal[False] | None = Field(None, alias="async")
    defer_loading: Literal[False] | None = None
    output_schema: None = None

    def as_chat(self) -> dict[str, Any]:
        """Returns the function as an entry of a chat's `tools`."""
        names = FunctionDefinition.model_fields.keys()
        return {"type": "function", "function": self.model_dump(include=set(names))}

    def shown(self) -> dict[str, Any]:
        """Returns the function in the form that an answer repeats."""
        plain = self.model_dump(include={"name", "description", "parameters"})
        return {"type": "function", **plain, "strict": bool(self.strict)}


class NamedFunction(Strict):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class ReasoningSettings(Strict):
    """Reasoning settings; values other than these are not supported."""

    effort: Effort | None = None  # for templates that support it, like `reasoning_effort` in chats
    summary: Literal["auto"] | None = None  # no summary; the answer has the reasoning
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None  # the chat template decides
    mode: Literal["standard"] | None = None


_LOGPROBS = "message.output_text.logprobs"
# Fields documented by OpenAI that are not supported: values that request nothing.
NOTHING: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "background_options": (None,),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "prompt_cache_options": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "truncation": (None, "disabled"),
}
_STATELESS = "nothing is stored here; send the items of earlier answers as input"
_WHY = dict.fromkeys(("conversation", "previous_response_id", "store"), _STATELESS)


class TextFormat(Strict):
    """Any text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, max_length=256)
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> TextFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("schema belongs to type 'json_schema', and that needs it")
        return self


class TextSettings(Strict):
    """The format of the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Strict):
    """Options of a stream; padding against traffic analysis is never sent."""

    include_obfuscation: bool | None = None


class ResponsesBody(SharedFields):
    """`POST /v1/responses`; None always means the default."""

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # Reasoning is not encrypted, and can be sent back as it is.
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    text: TextSettings | None = None
    tools: Tools[FunctionTool] | None = None
    tool_choice: Literal["auto", "required", "none"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)  # repeated in the answer
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # an extension of Outrider

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, fine in NOTHING.items():
            check_unserved(name, data.get(name), fine, _WHY.get(name, "leave it out"))
        check_kinds(data.get("input"), data.get("tools"))
        return {name: value for name, value in data.items() if name not in NOTHING}

    @model_validator(mode="after")
    def _results_of_calls(self) -> ResponsesBody:
        """Checks that every result follows its call."""
        called: set[str] = set()
        for index, item in enumerate(self.input if not isinstance(self.input, str) else ()):
            if isinstance(item, InputCall):
                called.add(item.call_id)
            elif isinstance(item, InputCallOutput) and item.call_id not in called:
                raise InvalidRequestError.at(
                    f"input.{index}.call_id",
                    f"no function_call before it has the id {shown_value(item.call_id)}; nothing "
                    "is stored, so the input has to hold the call too",
                )
        return self

    @property
    def wants_logprobs(self) -> bool:
        """True if the text's tokens have log-probabilities."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())


# -- a response's input as a chat's messages. Consecutive reasoning, text and calls are one turn of
# the assistant, because chat templates render a turn as one message.


def messages_of(instructions: str | None, given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Returns the conversation; `instructions` become its system message."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given:
        if isinstance(item, InputMessage) and item.role != "assistant":
            messages.append({"role": item.role, "content": text_of(item.content)})
        elif isinstance(item, InputCallOutput):
            result = {"tool_call_id": item.call_id, "content": text_of(item.output)}
            messages.append({"role": "tool", **result})
        elif not messages or not _add(messages[-1], item):
            messages.append({"role": "assistant"})
            _add(messages[-1], item)
    return messages


def _add(turn: dict[str, Any], item: InputMessage | InputCall | InputReasoning) -> bool:
    """Adds an item of the assistant to a message; False if it belongs to another message."""
    if turn["role"] != "assistant":
        return False
    if isinstance(item, InputCall):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    elif "tool_calls" in turn or "content" in turn:
        return False
    elif isinstance(item, InputReasoning):
        text = "".join(part.text for part in item.content or ())
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    else:
        turn["content"] = text_of(item.content)
    return True


# Maps a chat's field to this body's; the first match is used.
_NAMES = (
    (r"\bresponse_format\.json_schema\.schema", "text.format.schema"),
    (r"\bresponse_format(\.json_schema)?", "text.format"),
    (r"\bmax_completion_tokens|\bmax_tokens", "max_output_tokens"),
    (r"\breasoning_effort", "reasoning.effort"),
    (r"\btools\.(\d+)\.function\b", r"tools.\1"),
    (r"\btool_choice\.function\b", "tool_choice"),
    (r"^messages\b", "input"),
)


def add(generation: Generation, body: ResponsesBody, request_id: str) -> None:
    """Checks the body and adds its conversation.

    Raises:
        InvalidRequestError: names the body's own field.
    """
    try:
        chat.add(generation, as_chat(body), request_id)
    except InvalidRequestError as error:
        raise renamed(error, _NAMES) from None


def as_chat(body: ResponsesBody) -> ChatBody:
    """Returns the chat request that generates the same text."""
    same = (*SharedFields.model_fields, "chat_template_kwargs", "parallel_tool_calls")
    settings: dict[str, Any] = {name: getattr(body, name) for name in same}
    settings["max_completion_tokens"] = body.max_output_tokens
    if body.wants_logprobs:
        settings |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    wanted = body.text.format if body.text is not None else None
    if wanted is not None and wanted.type == "json_schema":
        named = {"name": wanted.name or "schema", "schema": wanted.json_schema}
        settings["response_format"] = {"type": "json_schema", "json_schema": named}
    elif wanted is not None:
        settings["response_format"] = {"type": wanted.type}
    if body.tools:
        settings["tools"] = [tool.as_chat() for tool in body.tools]
    settings["tool_choice"] = body.tool_choice
    if isinstance(body.tool_choice, NamedFunction):
        name = {"name": body.tool_choice.name}
        settings["tool_choice"] = {"type": "function", "function": name}
    if body.reasoning is not None:
        settings["reasoning_effort"] = body.reasoning.effort
    settings["messages"] = messages_of(body.instructions, body.input)
    given = {name: value for name, value in settings.items() if value is not None}
    return validated(ChatBody, given)
