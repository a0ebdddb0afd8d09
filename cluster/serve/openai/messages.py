"""`/v1/messages`, Anthropic's API: its body, answer and events. Nothing is stored.

Documented features that this server lacks (images, documents, tools that run on the server) are
rejected by name, unless the value requests nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ....engine.chat.reader import Arguments, CallBegin, Content, Event, Reasoning
from ....engine.frontend import Frontend
from ....engine.outputs import Chunk
from ....errors import InvalidRequestError, OutriderError, in_words, renamed, shown_value
from ....scheduler.sampling import MAX_STOPS
from . import chat
from .answers import Message, MessageUsage, StopReason
from .errors import messages_error_body
from .generation import Generation
from .parse import MANY, Strict, at_most, check_kind, objects_of, validated
from .protocol import ChatBody, ModelBody, SamplingFields, ToolName, Tools

Cache = Any  # `cache_control`: every prefix is cached, so breakpoints have no effect


class TextBlock(Strict):
    """Text, written by the user or generated."""

    type: Literal["text"]
    text: str
    cache_control: Cache = None
    citations: list[None] | None = None


class ThinkingBlock(Strict):
    """Reasoning of an earlier answer; the chat template decides whether the model sees it."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""  # not checked, because answers are not signed


class RedactedThinkingBlock(Strict):
    """Encrypted reasoning, which no model here can read; it is dropped."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    """A call made by an earlier answer."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: dict[str, Any]
    cache_control: Cache = None
    caller: Any = None  # this field and the next are sent by the official client
    toolset_name: None = None


class ToolResultBlock(Strict):
    """The result of a call. Templates have no place for `is_error`, so it is not rendered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], at_most(MANY)] | None = None
    is_error: bool | None = None
    cache_control: Cache = None


KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class InputMessage(Strict):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], at_most(MANY)]


class InputTool(Strict):
    """A function that the model may call; other kinds of tools are not supported."""

    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Cache = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they are generated
    input_examples: list[None] | None = None


class ToolChoice(Strict):
    """Whether the model calls functions, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name belongs to type 'tool', and that needs it")
        return self


class Thinking(Strict):
    """Whether the model thinks, and the maximum number of tokens for it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None  # omitted: blocks have no text

    @model_validator(mode="after")
    def _budget(self) -> Thinking:
        if self.budget_tokens is not None and self.type != "enabled":
            raise ValueError("budget_tokens belongs to type 'enabled'")
        return self


class OutputFormat(Strict):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The answer's format, and the reasoning effort for templates that support it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Strict):
    """Information about the client's user; ignored."""

    user_id: str | None = None


class ConversationBody(ModelBody):
    """The fields shared by `POST /v1/messages/count_tokens` and `POST /v1/messages`."""

    messages: Annotated[list[InputMessage], Field(min_length=1), at_most(MANY)]
    system: str | Annotated[list[TextBlock], at_most(MANY)] | None = None
    tools: Tools[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Cache = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[None] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # an extension of Outrider

    @model_validator(mode="before")
    @classmethod
    def _kinds(cls, data: Any) -> Any:
        """Rejects other kinds of blocks and tools by name, which errors of a union would hide."""
        if isinstance(data, dict):
            for index, message in objects_of(data.get("messages")):
                _check_blocks(f"messages.{index}.content", message.get("content"), KINDS)
            _check_blocks("system", data.get("system"), ("text",))
            for index, tool in objects_of(data.get("tools")):
                check_kind(f"tools.{index}", tool, (None, "custom"), "only functions are")
        return data

    @model_validator(mode="after")
    def _blocks_where_they_belong(self) -> ConversationBody:
        """Checks that results follow their calls, and the kinds of blocks of each role."""
        called: set[str] = set()
        for index, message in enumerate(self.messages):
            is_user = message.role == "user"
            for number, block in _blocks(message):
                field = f"messages.{index}.content.{number}"
                if is_user != isinstance(block, ToolResultBlock) and block.type != "text":
                    other = "an assistant's" if is_user else "a user's"
                    raise InvalidRequestError.at(f"{field}.type", f"only {other} message has it")
                if isinstance(block, ToolUseBlock):
                    called.add(block.id)
                elif isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                    raise InvalidRequestError.at(
                        f"{field}.tool_use_id",
                        f"no tool_use before it has the id {shown_value(block.tool_use_id)}",
                    )
        edits = (self.context_management or {}).get("edits") or []
        # The chat template decides whether earlier thinking is kept.
        kept = {"type": "clear_thinking_20251015", "keep": "all"}
        if not isinstance(edits, list) or any(edit != kept for edit in edits):
            raise InvalidRequestError.at(
                "context_management.edits",
                "nothing is removed from messages here; send those that the model should get",
            )
        return self

    @classmethod
    def complaint(cls, errors: Sequence[Any]) -> InvalidRequestError | None:
        """Returns the error for a block or a choice, which names its own field."""
        nested = max(errors, key=lambda each: len(each["loc"]))
        if nested["loc"][:1] not in (("messages",), ("system",), ("tool_choice",)):
            return None
        field = _field(nested["loc"])
        if nested["type"] == "extra_forbidden":
            return InvalidRequestError.at(field, "unknown field; there is no such field here")
        if nested["loc"][-1] in ("str", "content") or field.endswith(".content"):
            return InvalidRequestError.at(field, "it has to be a string or a list of blocks")
        return InvalidRequestError.at(field, in_words(nested))

    def conversation(self) -> dict[str, Any]:
        """Returns the fields of a chat that renders the same prompt."""
        fields: dict[str, Any] = {"messages": list(self._chat_messages()), "model": self.model}
        if self.messages[-1].role == "assistant":  # the answer continues this message
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.tools]
        choice = self.tool_choice
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        settings = dict(self.chat_template_kwargs)
        if self.thinking is not None and self.thinking.type == "enabled":
            settings.setdefault("enable_thinking", True)
        elif self.thinking is not None and self.thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        elif self.output_config is not None and self.output_config.effort is not None:
            fields["reasoning_effort"] = self.output_config.effort
        return {**fields, "chat_template_kwargs": settings}

    def _chat_messages(self) -> Iterator[dict[str, Any]]:
        system = [self.system] if isinstance(self.system, str) else []
        if isinstance(self.system, list):
            # This line differs in every request, and would keep the prompt out of the prefix cache.
            system = [each.text for each in self.system if not each.text.startswith(_BILLING)]
        if system:
            yield {"role": "system", "content": "\n".join(system)}
        for message in self.messages:
            if isinstance(message.content, str):
                yield {"role": message.role, "content": message.content}
            elif message.role == "assistant":
                yield _assistant(message.content)
            else:
                yield from _user(message.content)


class MessagesBody(ConversationBody, SamplingFields):
    """`POST /v1/messages`; penalties and other fields unknown to Anthropic are extensions."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str], at_most(MAX_STOPS)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    inference_geo: None = None

    @model_validator(mode="after")
    def _room_for_text(self) -> MessagesBody:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise InvalidRequestError.at(
                "thinking.budget_tokens",
                f"it has to be less than max_tokens, {self.max_tokens} (got {budget})",
            )
        return self

    @property
    def hides_thinking(self) -> bool:
        """True if thinking blocks are sent without their text."""
        return self.thinking is not None and self.thinking.display == "omitted"


class CountBody(ConversationBody):
    """`POST /v1/messages/count_tokens`."""


_BILLING = "x-anthropic-billing-header"


def _field(location: Sequence[int | str]) -> str:
    """Returns the field at pydantic's location, without the members of unions."""
    parts: list[str] = []
    in_union = False
    for part in location:
        if str(part).startswith(("list[", "function-")):
            in_union = "union" in str(part)
        elif in_union and part in KINDS:
            in_union = False  # the union's member, followed by its fields
        elif part != "str":
            parts.append(str(part))
    return ".".join(parts)


def _check_blocks(field: str, blocks: Any, allowed: Sequence[str]) -> None:
    rule = f"it has to be one of {', '.join(allowed)}" if allowed[1:] else "only text is"
    for number, block in objects_of(blocks):
        check_kind(f"{field}.{number}", block, allowed, rule)
        if block["type"] == "tool_result":
            _check_blocks(f"{field}.{number}.content", block.get("content"), ("text",))


def _blocks(message: InputMessage) -> Iterator[tuple[int, Any]]:
    return enumerate(() if isinstance(message.content, str) else message.content)


def _text(blocks: Sequence[Any]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


def _assistant(blocks: Sequence[Any]) -> dict[str, Any]:
    """Returns one turn: thinking, text and calls; redacted thinking is dropped."""
    text = _text(blocks)
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if calls:
        message["tool_calls"] = calls
    if thought:
        message["reasoning_content"] = thought
    return message


def _user(blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yields results first, because templates expect them after the calls."""
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            content = block.content or ""
            text = content if isinstance(content, str) else _text(content)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    if texts or not blocks:
        yield {"role": "user", "content": "\n".join(texts)}


def _chat_tool(tool: InputTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


# Maps a chat's field to this body's; the first match is used.
_NAMES = (
    (r"\bresponse_format\.json_schema\.schema", "output_config.format.schema"),
    (r"\bresponse_format(\.json_schema)?", "output_config.format"),
    (r"\bmax_completion_tokens", "max_tokens"),
    (r"^thinking_token_budget", "thinking.budget_tokens"),
    (r"\breasoning_effort", "output_config.effort"),
    (r"\btools\.(\d+)\.function\.parameters\b", r"tools.\1.input_schema"),
    (r"\btools\.(\d+)\.function\b", r"tools.\1"),
    (r"\btool_choice\.function\b", "tool_choice"),
    (r"^messages\.\d+", "messages"),  # results and the system's text become separate messages
    (r"\bstop\b", "stop_sequences"),
)


def add(generation: Generation, body: MessagesBody, request_id: str) -> None:
    """Checks the body and adds its conversation.

    Raises:
        InvalidRequestError: names the body's own field.
    """
    asked = as_chat(body)
    if not generation.frontend.chat.has_reasoning:  # agents send a budget to every model
        asked = asked.model_copy(update={"thinking_token_budget": None})
    try:
        chat.add(generation, asked, request_id)
    except InvalidRequestError as error:
        raise _renamed(error, body) from None


def as_chat(body: MessagesBody) -> ChatBody:
    """Returns the chat request that generates the same text."""
    same = ("max_tokens", *(SamplingFields.model_fields.keys() - {"stream", "request_id"}))
    settings = {**body.conversation(), **{name: getattr(body, name) for name in same}}
    settings["stop"] = body.stop_sequences
    if body.thinking is not None:
        settings["thinking_token_budget"] = body.thinking.budget_tokens
    wanted = body.output_config.format if body.output_config is not None else None
    if wanted is not None:
        named = {"name": "answer", "schema": wanted.json_schema}
        settings["response_format"] = {"type": "json_schema", "json_schema": named}
    given = {name: value for name, value in settings.items() if value is not None}
    return validated(ChatBody, given)


def counted(frontend: Frontend, body: CountBody) -> int:
    """Returns the number of tokens in the prompt of the body's conversation.

    Raises:
        InvalidRequestError: names the body's own field.
    """
    fields = {name: value for name, value in body.conversation().items() if value is not None}
    try:
        chat_body = validated(ChatBody, fields)
        return len(chat.rendered(frontend, chat_body, chat_body.messages).token_ids)
    except InvalidRequestError as error:
        raise _renamed(error, body) from None


def _renamed(error: InvalidRequestError, body: ConversationBody) -> InvalidRequestError:
    """Returns `error` with the body's own name of the field."""
    if error.field == "reasoning_effort" and body.thinking is not None:
        return InvalidRequestError.at("thinking.type", "the chat template cannot switch it off")
    return renamed(error, _NAMES)


# -- the answer, whole or as events in Anthropic's order
#
# message_start; for each block content_block_start, its deltas, content_block_stop; message_delta
# with the stop reason and the usage; message_stop. A block ends when another kind of text begins.

Fields = dict[str, Any]


class MessageMaker:
    """Builds one message from chunks: a list of finished blocks, and the open block."""

    def __init__(self, generation: Generation, body: MessagesBody, message_id: str) -> None:
        self._generation = generation
        self._body = body
        self._id = message_id
        self.job = generation.jobs[0]  # its only completion
        choice = body.tool_choice
        self._parallel = choice is None or not (
            choice.disable_parallel_tool_use or choice.type == "tool"
        )
        self._blocks: list[Fields] = []
        self._open: Fields | None = None
        self._pieces: list[str] = []
        self._space = ""  # between blocks, held back until text follows

    def message(self, *, ended: bool) -> Message:
        """Returns the message with the finished blocks."""
        reason: StopReason | None = None
        sequence: str | None = None
        if ended:
            reason, sequence = self._stop()
        message: Message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model_name,
            "content": list(self._blocks),
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self.usage(),
        }
        if ended and self.job.request.speculation.trace:
            message["speculation_trace"] = self.job.trace()
        return message

    def usage(self) -> MessageUsage:
        """Returns the token counts so far; as in Anthropic's API, input excludes cached tokens."""
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "speculation": usage["speculation"],
        }

    def delta(self) -> Fields:
        """Returns the message's stop reason."""
        reason, sequence = self._stop()
        return {"stop_reason": reason, "stop_sequence": sequence}

    def push(self, chunk: Chunk, *, last: bool) -> list[Fields]:
        """Returns the events of a chunk."""
        events: list[Fields] = []
        for event in self.job.read(chunk.text, last=last, parallel=self._parallel):
            events += self._add(event)
        if last and self._space and self._open is None and not self._blocks:
            space = self._space
            events += self._begin({"type": "text", "text": ""})
            events += self._piece("text_delta", "text", space)
        if last:
            events += self._end()
        return events

    def _add(self, event: Event) -> list[Fields]:
        if isinstance(event, CallBegin):
            call_id = event.id or self._generation.frontend.chat.new_id()
            return self._begin({"type": "tool_use", "id": call_id, "name": event.name, "input": {}})
        if isinstance(event, Arguments):
            return self._piece("input_json_delta", "partial_json", event.text)
        kind, text = "thinking" if isinstance(event, Reasoning) else "text", event.text
        events: list[Fields] = []
        if self._open is None or self._open["type"] != kind:
            if isinstance(event, Content):
                text = self._space = self._space + text
                if not text.strip():  # white space around thinking and calls is not a block
                    return []
            empty = {"signature": ""} if kind == "thinking" else {}
            events += self._begin({"type": kind, kind: "", **empty})
        if kind == "thinking" and self._body.hides_thinking:
            return events
        return events + self._piece(f"{kind}_delta", kind, text)

    def _begin(self, block: Fields) -> list[Fields]:
        events = self._end()
        self._open, self._space = block, ""
        index = len(self._blocks)
        return [
            *events,
            {"type": "content_block_start", "index": index, "content_block": dict(block)},
        ]

    def _piece(self, kind: str, name: str, text: str) -> list[Fields]:
        if not text:
            return []
        self._pieces.append(text)
        return [self._block_delta({"type": kind, name: text})]

    def _block_delta(self, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": len(self._blocks), "delta": delta}

    def _end(self) -> list[Fields]:
        """Ends the open block, if there is one."""
        block, text = self._open, "".join(self._pieces)
        if block is None:
            return []
        events: list[Fields] = []
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
            if block["type"] == "thinking":  # clients expect a signature; it is empty
                events.append(self._block_delta({"type": "signature_delta", "signature": ""}))
        events.append({"type": "content_block_stop", "index": len(self._blocks)})
        self._blocks.append(block)
        self._open, self._pieces = None, []
        return events

    def _stop(self) -> tuple[StopReason, str | None]:
        """Returns the stop reason in Anthropic's terms, and the matched stop sequence."""
        assembler = self.job.assembler
        if assembler.finish_reason == "length":
            return "max_tokens", None
        if any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use", None
        met = assembler.stop_reason
        return ("stop_sequence", met) if isinstance(met, str) else ("end_turn", None)


def _arguments(text: str) -> Any:
    """Parses a call's arguments; arguments cut off by `max_tokens` are returned as text."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"incomplete_json": text}


async def answer(generation: Generation, body: MessagesBody, message_id: str) -> Message:
    """Returns the whole message, after everything has finished."""
    made = MessageMaker(generation, body, message_id)
    made.push(made.job.assembler.chunk(), last=True)
    return made.message(ended=True)


async def events(
    generation: Generation, body: MessagesBody, message_id: str
) -> AsyncGenerator[Fields, None]:
    """Yields every event of the message.

    Raises:
        OutriderError: only before the first event; later errors become an `error` event, which ends
            the stream.
    """
    made, begun = MessageMaker(generation, body, message_id), False
    traced: list[Fields] = []
    async with generation.running() as steps:
        try:
            async for step in steps:
                if not begun:
                    begun = True
                    message = made.message(ended=False)
                    message["usage"]["output_tokens"] = 0
                    yield {"type": "message_start", "message": message}
                traced += step.job.chunk_extras(step.chunk).get("speculation_trace", ())
                for event in made.push(step.chunk, last=step.last):
                    if traced and event["type"] == "content_block_delta":
                        event["speculation_trace"], traced = traced, []
                    yield event
        except OutriderError as error:
            if not begun:
                raise
            yield messages_error_body(error)
            return
    yield {"type": "message_delta", "delta": made.delta(), "usage": made.usage()}
    yield {"type": "message_stop"}
