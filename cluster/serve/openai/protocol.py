"""Bodies of completions and chats: OpenAI's documented fields and Outrider's extensions."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    ValidationInfo,
    field_validator,
)

from ....config import LONGEST_DRAFT
from ....engine.chat.lark import Function
from ....engine.chat.template import Message
from ....engine.frontend import RequestOptions
from ....engine.weights import PauseMode
from ....errors import InvalidRequestError, shown_value
from ....scheduler.sampling import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_STOPS,
    SamplingParams,
    StructuredOutputs,
)
from ....scheduler.types import SpeculationOptions
from .parse import MANY, Strict, at_most

# Token ids in JSON keys, which are strings; one spelling per id, so that keys are unique.
_ID = re.compile(r"0|-?[1-9][0-9]{0,99}")
_TokenId = Annotated[int, BeforeValidator(lambda key: int(key) if _ID.fullmatch(str(key)) else key)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_TOOLS = 1024
_MAX_DRAFTERS = 64
# Settings with another name or meaning than in `SamplingParams`.
_OWN_MEANING = ("max_tokens", "logprobs", "structured_outputs", "thinking_budget")
_SAMPLING = [name for name in SamplingParams.model_fields if name not in _OWN_MEANING]


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: the usage so far in every chunk
    include_obfuscation: bool | None = None  # padding against traffic analysis, which is never sent


class Speculation(Strict):
    """An extension: the request's speculation settings."""

    enabled: bool = True
    max_draft_len: int | None = Field(default=None, ge=0, le=LONGEST_DRAFT)
    min_prob: float | None = Field(default=None, ge=0, le=1)  # replaces the drafter's own
    trace: bool = False  # adds drafts and their outcome of every step
    drafters: Annotated[list[str] | None, Field(min_length=1), at_most(_MAX_DRAFTERS)] = None
    isolated: bool = False  # neither uses other requests' text for drafts nor leaves text to them


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = None  # a hint for OpenAI's cache


class Prediction(Strict):
    """OpenAI's predicted output: the text that the completion is expected to be."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], at_most(MANY)]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Resume(Strict):
    """The position at which a resumable stream broke off."""

    request_id: str = Field(max_length=256)  # id of the answer
    num_tokens: Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]]


class SamplingFields(Strict):
    """The fields shared by all bodies that generate text; None always means the default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    request_id: str | None = Field(None, min_length=1, max_length=256)  # part of the answer's id
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field("", max_length=256)  # prefix cache is shared per salt
    speculation: Speculation = Speculation()  # frozen


class ModelBody(Strict):
    """A body that may name a model."""

    model: str | None = None  # None: the only model


class SharedFields(SamplingFields, ModelBody):
    """The fields shared by completions, chats and responses."""

    stop: Annotated[str | list[str] | None, at_most(MAX_STOPS)] = None


class JsonSchema(Strict):
    """A schema with OpenAI's labels; it is enforced even without `strict`."""

    name: str = Field(max_length=256)
    json_schema: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's field: any text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, validate_default=True)
    object_schema: dict[str, Any] | None = Field(None, alias="schema")  # llama-server's

    @field_validator("json_schema")
    @classmethod
    def _with_its_type(cls, schema: JsonSchema | None, info: ValidationInfo) -> JsonSchema | None:
        kind = info.data.get("type")
        if kind is not None and (kind == "json_schema") != (schema is not None):
            raise ValueError("it belongs to type 'json_schema', and that needs it")
        return schema

    @field_validator("object_schema")
    @classmethod
    def _of_an_object(cls, schema: Any, info: ValidationInfo) -> Any:
        if schema is not None and info.data.get("type") not in ("json_object", None):
            raise ValueError("it belongs to type 'json_object'; json_schema has one of its own")
        return schema


class StructuredFields(BaseModel):
    """The fields that constrain the text: OpenAI's `response_format`, vLLM's older and newer ones.

    At most one may be given. It becomes the `structured_outputs` of `SamplingParams`; errors name
    the field that the user wrote.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def structured(self) -> tuple[StructuredOutputs, str] | None:
        """Returns the constraint and the user's name of the field; None if the text is free.

        Raises:
            InvalidRequestError: several are given, or one is invalid; names the field.
        """
        given = self._given()
        if len(given) > 1:
            first, second = list(given)[:2]
            raise InvalidRequestError.at(
                second, f"{first} constrains the text already; give one of them"
            )
        pattern = self.guided_whitespace_pattern
        if pattern is not None and "guided_json" not in given:
            raise InvalidRequestError.at("guided_whitespace_pattern", "it is for guided_json")
        for name, (settings, field) in given.items():
            if pattern is not None:
                settings = {**settings, "whitespace_pattern": pattern}
            try:
                return StructuredOutputs(**settings), field
            except InvalidRequestError as error:
                raise _renamed(error, name, field) from None
        return None

    def _given(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Returns, by body field, the settings of the constraint and the field with the grammar."""
        given: dict[str, tuple[dict[str, Any], str]] = {}
        wanted = self.response_format
        if wanted is not None and wanted.object_schema is not None:
            given["response_format"] = {"json": wanted.object_schema}, "response_format.schema"
        elif wanted is not None and wanted.type == "json_object":
            given["response_format"] = {"json_object": True}, "response_format"
        elif wanted is not None and wanted.json_schema is not None:
            schema = wanted.json_schema.json_schema
            given["response_format"] = {"json": schema}, "response_format.json_schema.schema"
        if self.structured_outputs is not None:
            kinds = [name for name, value in self.structured_outputs.items() if value is not None]
            field = f"structured_outputs.{kinds[0]}" if len(kinds) == 1 else "structured_outputs"
            given["structured_outputs"] = self.structured_outputs, field
        for kind in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{kind}")
            if value is not None:
                given[f"guided_{kind}"] = {kind: value}, f"guided_{kind}"
        return given


def _renamed(error: InvalidRequestError, name: str, field: str) -> InvalidRequestError:
    """Returns the error of `StructuredOutputs` with the field's name that the user wrote."""
    if name == "structured_outputs":
        field = name if error.field == name else f"{name}.{error.field}"
    return InvalidRequestError.at(field, error.message.split(": ", 1)[-1])


class GenerationBody(StructuredFields, SharedFields):
    """The fields shared by completions and chats."""

    logit_bias: Annotated[dict[_TokenId, float] | None, at_most(MANY)] = None
    max_tokens: int | None = None
    stop_token_ids: Annotated[list[int] | None, at_most(4096)] = None
    allowed_token_ids: Annotated[list[int] | None, at_most(MAX_ALLOWED_IDS)] = None
    bad_words: Annotated[list[str] | None, at_most(MAX_BAD_WORDS)] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # must be False if any are written
    truncate_prompt_tokens: int | None = Field(None, ge=-1)  # keeps the last ones; -1: what fits
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    n: int | None = None
    prompt_logprobs: int | None = None  # vLLM's: alternatives for every token of the prompt
    stream_options: StreamOptions | None = None
    resumable: bool | None = None  # events have ids, and the stream can continue after a reconnect
    resume: Resume | None = None
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)  # seconds
    prediction: Prediction | None = None  # OpenAI's field of chats, also for completions

    def options(self) -> RequestOptions:
        """Returns the request's options other than its sampling settings."""
        asked = self.speculation
        names = None if asked.drafters is None else tuple(asked.drafters)
        wish = SpeculationOptions(
            asked.enabled, asked.max_draft_len, asked.trace, names, asked.isolated, asked.min_prob
        )
        constraint = self.structured()
        field = constraint[1] if constraint else ""
        predicted = self.prediction.text if self.prediction else ""
        return RequestOptions(wish, self.priority, self.cache_salt, field, prediction=predicted)

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _some_tokens(cls, count: int | None) -> int | None:
        if count == 0:
            raise ValueError("at least 1, or -1 for as many as fit")
        return count

    def _settings(self) -> dict[str, Any]:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError.at("prompt_logprobs", "not available with stream = true")
        if self.spaces_between_special_tokens and self.skip_special_tokens is False:
            raise InvalidRequestError.at(
                "spaces_between_special_tokens",
                "special tokens are written without spaces; leave it out, or set it to false",
            )
        given = {name: getattr(self, name) for name in _SAMPLING}
        settings = {name: value for name, value in given.items() if value is not None}
        constraint = self.structured()
        return {**settings, "structured_outputs": constraint[0]} if constraint else settings


Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]
IdLists = Annotated[list[Ids], Field(fail_fast=True)]


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: str | Texts | Ids | IdLists | None = None  # exclusive with `prompt_token_ids`
    prompt_token_ids: Ids | IdLists | None = None
    logprobs: int | None = None
    best_of: int | None = Field(None, ge=1, le=128)  # candidates; the n most likely are returned
    echo: bool | None = None
    add_special_tokens: bool = True

    def sampling(self) -> SamplingParams:
        """Returns the validated settings.

        Raises:
            InvalidRequestError: a setting is out of range.
        """
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequestError.at(
                "best_of", f"at least n = {self.n or 1} (got {self.best_of})"
            )
        if self.chooses and self.stream:
            raise InvalidRequestError.at(
                "best_of", "candidates cannot be compared with stream = true"
            )
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        if max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequestError.at(
                "max_tokens", "0 needs echo or prompt_logprobs; without them nothing is returned"
            )
        settings = self._settings()
        if self.echo and self.logprobs is not None:
            settings["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        logprobs = self.logprobs
        if self.chooses:
            settings["n"], logprobs = self.best_of, logprobs or 0
        return SamplingParams(**settings, max_tokens=max_tokens, logprobs=logprobs)

    @property
    def chooses(self) -> bool:
        """True if more completions are generated than returned."""
        return self.best_of is not None and self.best_of > (self.n or 1)


ToolName = Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")]


class FunctionDefinition(Strict):
    """A function that the model may call; it has no parameters unless `parameters` is given."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition

    @property
    def name(self) -> str:
        return self.function.name

    def render(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        function.setdefault("parameters", {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


class FunctionName(Strict):
    """The function of a named tool choice."""

    name: str


class NamedTool(Strict):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Strict):
    """The function that an assistant's message called."""

    name: str
    arguments: str = "{}"
    parsed_arguments: Any = None  # sent back by helpers of clients; ignored

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, arguments: str) -> str:
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError("it has to be a JSON object as text")
        return arguments


class ToolCall(Strict):
    """A call of an assistant's message, in the form of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of deltas in a stream

    def render(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect: the arguments are an object."""
        arguments = json.loads(self.function.arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def _names_once(tools: list[Any]) -> list[Any]:
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise ValueError(f"two functions have the name {tool.name!r}")
        names.add(tool.name)
    return tools


Entry = TypeVar("Entry")  # has a function's name
Tools = Annotated[list[Entry], at_most(MAX_TOOLS), AfterValidator(_names_once)]


class ChatMessage(Strict):
    """One message; fields that SDKs echo from an answer must be empty, except `parsed`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], at_most(MANY)] | None = Field(
        None, validate_default=True
    )
    name: str | None = None
    refusal: None = None
    audio: None = None
    annotations: list[None] | None = None
    function_call: None = None
    parsed: Any = None  # result of the client's `parse`; `content` is used instead
    tool_calls: Annotated[list[ToolCall], at_most(MANY)] | None = None
    tool_call_id: str | None = Field(None, validate_default=True)
    # Reasoning of an earlier answer, for templates that render it.
    reasoning_content: str | None = None
    reasoning: str | None = None

    @field_validator("content")
    @classmethod
    def _said(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError("only an assistant's message may be without")
        return content

    @field_validator("tool_calls", "reasoning_content", "reasoning")
    @classmethod
    def _assistants(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role") not in ("assistant", None):
            raise ValueError("only an assistant's message has it")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _of_a_result(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (info.data.get("role") == "tool") != (value is not None) and "role" in info.data:
            raise ValueError("messages of role 'tool' have it, and no others")
        return value

    def render(self) -> Message:
        """Returns the message for chat templates: one text, with parts joined by newlines."""
        content = self.content if isinstance(self.content, str) else ""
        if isinstance(self.content, list):
            content = "\n".join(part.text for part in self.content)
        # Templates distinguish a call without text (None) from an empty text.
        no_text = self.content is None and bool(self.tool_calls)
        message: Message = {"role": self.role, "content": None if no_text else content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.render() for call in self.tool_calls]
        thought = self.reasoning_content or self.reasoning
        if thought:  # the names used by Qwen and by gpt-oss
            message["reasoning_content"] = message["thinking"] = thought
        return message


class Conversation(Strict):
    """How messages are rendered, and the tools that may be called."""

    tools: Tools[Tool] | None = None
    tool_choice: Literal["auto", "required", "none"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # None: added to a text, but not to a template's output, which includes special tokens.
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    # For templates that support it; "none" becomes `enable_thinking: false` for those that have
    # that.
    reasoning_effort: Effort | None = None
    # Replaces the model's template, if the configuration sets trust_request_chat_template.
    chat_template: str | None = None

    def callable_tools(self) -> list[Tool]:
        """Returns the tools that may be called."""
        return [] if self.tool_choice == "none" else self.tools or []

    def required_tools(self) -> list[Tool]:
        """Returns the tools of which one has to be called; empty if none is required."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.callable_tools() if tool.name == name]
        return self.callable_tools() if self.must_call else []

    def functions(self) -> list[Function]:
        """Returns the functions that the answer may call.

        Raises:
            InvalidRequestError: `tool_choice` names a function that does not exist.
        """
        tools = self.required_tools() if self.must_call else self.callable_tools()
        if isinstance(self.tool_choice, NamedTool) and not tools:
            name = self.tool_choice.function.name
            raise InvalidRequestError.at(
                "tool_choice.function.name", f"tools have no function {shown_value(name)}"
            )
        if self.tool_choice == "required" and not tools:
            raise InvalidRequestError.at("tool_choice", "it needs tools")
        return [
            Function(tool.name, tool.function.parameters, strict=bool(tool.function.strict))
            for tool in tools
        ]

    @property
    def must_call(self) -> bool:
        """True if the answer has to be calls."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def is_parallel(self) -> bool:
        """True if an answer may have several calls."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)


class ChatBody(GenerationBody, Conversation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1), at_most(MANY)]
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    max_completion_tokens: int | None = None
    include_reasoning: bool | None = None  # vLLM's: False omits reasoning from the answer
    # vLLM's field: maximum tokens of thinking, after which it is closed and the answer follows.
    # Then the names of Qwen's own service and of llama-server, where -1 means no limit.
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31)
    thinking_budget: int | None = Field(None, ge=0, lt=2**31)
    thinking_budget_tokens: int | None = Field(None, ge=-1, lt=2**31)

    def budget(self) -> tuple[int, str] | None:
        """Returns the maximum tokens of thinking and the field that sets it; None: no limit.

        Raises:
            InvalidRequestError: two fields differ.
        """
        names = ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens")
        given = [(getattr(self, name), name) for name in names]
        given = [(most, name) for most, name in given if most is not None]
        for most, name in given[1:]:
            if most != given[0][0]:
                first, other = given[0]
                raise InvalidRequestError.at(name, f"{other} is {first} (got {most})")
        return given[0] if given and given[0][0] >= 0 else None

    def sampling(self) -> SamplingParams:
        """Returns the validated settings.

        Raises:
            InvalidRequestError: a setting is out of range.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError.at("top_logprobs", "it needs logprobs = true")
        limit = self.max_completion_tokens
        if limit is not None and self.max_tokens not in (None, limit):
            raise InvalidRequestError.at(
                "max_tokens",
                f"max_completion_tokens, which replaces it, is {limit} (got {self.max_tokens})",
            )
        for name in ("max_completion_tokens", "max_tokens"):
            given = getattr(self, name)
            least = 1 if self.prompt_logprobs is None else 0
            if given is not None and given < least:
                raise InvalidRequestError.at(name, f"at least {least} (got {given})")
        return SamplingParams(
            **self._settings(),
            max_tokens=self.max_tokens if limit is None else limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class TokenizeBody(Conversation, ModelBody):
    """`POST /tokenize`: a text, or messages."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], at_most(MANY)] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(ModelBody):
    """`POST /detokenize`."""

    tokens: Ids


WeightVersion = Annotated[str, Field(min_length=1, max_length=256)]


class UpdateWeightsBody(ModelBody):
    """`POST /admin/update_weights`: folders that all engines can read."""

    path: Annotated[str, Field(min_length=1)] | None = None
    drafter: Annotated[str, Field(min_length=1)] | None = None
    mode: PauseMode = "keep"
    weight_version: WeightVersion | None = None


class InitGroupBody(ModelBody):
    """`POST /init_weights_update_group`: a process group whose rank 0, the trainer, listens."""

    master_address: Annotated[str, Field(min_length=1)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1)] = 1
    world_size: Annotated[int, Field(ge=2, le=2**16)]
    group_name: Annotated[str, Field(min_length=1)] = "weights"
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 300.0


class SentWeightsBody(ModelBody):
    """`POST /update_weights_from_distributed`: all of the target's tensors, in order of sending."""

    names: Annotated[list[str], Field(min_length=1)]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0)]]]
    group_name: Annotated[str, Field(min_length=1)] = "weights"
    mode: PauseMode = "keep"
    abort_all_requests: bool = False
    flush_cache: Literal[True] = True
    weight_version: WeightVersion | None = None


class DestroyGroupBody(ModelBody):
    """`POST /destroy_weights_update_group`."""

    group_name: Annotated[str, Field(min_length=1)] = "weights"


class DraftersBody(ModelBody):
    """`POST /admin/drafters`: adds a drafter, removes one, or replaces all."""

    drafter: dict[str, Any] | None = None
    replaces: Annotated[str, Field(min_length=1)] | None = None
    speculative_config: dict[str, Any] | None = None
    make_room: bool = False


class CorporaBody(ModelBody):
    """`POST /admin/corpora`: adds or removes files that every engine's look-ups search."""

    add: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    remove: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)


class AdaptationBody(ModelBody):
    """`POST /admin/adaptation`: begins a round of training, or pauses or resumes them."""

    action: Literal["run", "pause", "resume"]


class TraceBody(ModelBody):
    """`POST /admin/trace`: begins or ends a trace of steps and requests."""

    action: Literal["start", "stop"]
    max_steps: Annotated[int, Field(ge=1, le=200_000)] = 20_000


class LoadAdapterBody(ModelBody):
    """`POST /v1/load_lora_adapter`: an adapter in a folder that all engines can read."""

    lora_name: Annotated[str, Field(min_length=1, pattern=r"^[^:\s]+$")]
    lora_path: Annotated[str, Field(min_length=1)]


class UnloadAdapterBody(ModelBody):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_int_id: int | None = None  # vLLM's; only the name selects the adapter


_MARKS = (
    rb'"response_format" "structured_outputs" "json_schema" "json_object" "guided_ '
    rb'"bad_words" "chat_template" "tools" \u'
).split()


def may_compile(raw: bytes) -> bool:
    """Returns True if `raw` may contain grammars, bad words or templates, which take long."""
    return any(mark in raw for mark in _MARKS)
