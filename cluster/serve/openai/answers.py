"""The types of answers: endpoints return them, and the OpenAPI document describes them.

Fields that only some requests add are not required.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class ErrorDetail(TypedDict):
    """An error; `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """The body of every error."""

    error: ErrorDetail


class SpeculationSummary(TypedDict):
    """A summary of speculation over all completions of the request."""

    drafter: str
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_accepted_len: float
    num_steps: int
    synthetic: bool


class CachedTokens(TypedDict):
    """Prompt tokens that the prefix cache held."""

    cached_tokens: int


class CompletionTokens(TypedDict):
    """Completion tokens that are reasoning; accepted and rejected tokens of the prediction."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Tokens of prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens
    speculation: SpeculationSummary


class CompletionLogprobs(TypedDict):
    """Parallel lists, one entry per token; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Extras(TypedDict, total=False):
    """Fields that some requests add to a choice or to a chunk of a stream."""

    token_ids: list[int]
    speculation_trace: list[dict[str, Any]]
    weight_versions: list[dict[str, Any]]  # of a finished choice, if weights were replaced


class Choice(Extras):
    """Fields shared by completions and chat choices."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None


class PromptExtras(TypedDict, total=False):
    """Fields about the prompt that some requests add."""

    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int]


class CompletionChoice(Choice, PromptExtras):
    """One completion of one prompt."""

    text: str
    logprobs: CompletionLogprobs | None


class AnswerHead(TypedDict):
    """The fields that identify an answer."""

    id: str
    created: int
    model: str


class Completion(AnswerHead):
    """The answer of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class ChatAnswer(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]  # absent if there is no reasoning; likewise `tool_calls`
    reasoning_content: NotRequired[str]  # the same, under its older name
    tool_calls: NotRequired[list[dict[str, Any]]]


class ChatChoice(Choice):
    """One answer of the assistant."""

    message: ChatAnswer
    logprobs: dict[str, Any] | None


class ChatCompletion(AnswerHead, PromptExtras):
    """The answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class OutputText(TypedDict):
    """The text of a response."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class OutputMessage(TypedDict):
    """A message of a response."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputReasoningText(TypedDict):
    """A part of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    """The model's reasoning; summaries and encrypted text are never produced."""

    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[None]
    encrypted_content: None
    content: list[OutputReasoningText]


class OutputCall(TypedDict):
    """A call of a function; its result is sent with the same `call_id`."""

    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class ResponseUsage(TypedDict):
    """Tokens of input and output."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int
    speculation: SpeculationSummary


class Response(TypedDict):
    """The answer of `/v1/responses`; nothing is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    speculation_trace: NotRequired[list[dict[str, Any]]]


class MessageUsage(TypedDict):
    """Tokens of a message; input tokens exclude those that the prefix cache held."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    speculation: SpeculationSummary


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Message(TypedDict):
    """The answer of `/v1/messages`: blocks of thinking, text and calls."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    speculation_trace: NotRequired[list[dict[str, Any]]]


class PooledUsage(TypedDict):
    """Tokens of inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class EmbeddingItem(TypedDict):
    """An input's embedding."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64 encodes little-endian float32


class EmbeddingList(AnswerHead):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    usage: PooledUsage


class RankedText(TypedDict):
    """A document."""

    text: str


class RankedDocument(TypedDict):
    """A document's index in the request, and its score."""

    index: int
    document: NotRequired[RankedText]
    relevance_score: float


class Reranking(AnswerHead):
    """The answer of `/v1/rerank`: the best documents first."""

    results: list[RankedDocument]
    usage: PooledUsage


class ScoreItem(TypedDict):
    """A pair's score."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(AnswerHead):
    """The answer of `/v1/score`."""

    object: Literal["list"]
    data: list[ScoreItem]
    usage: PooledUsage


class MessageTokens(TypedDict):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class Tokens(TypedDict):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    """The answer of `/detokenize`."""

    prompt: str


class ModelCard(TypedDict):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # folder or id of the checkpoint
    parent: str | None  # for a LoRA adapter: its model
    max_model_len: int
    drafters: list[str]  # drafters that a request may choose
    has_chat_template: bool


class ModelList(TypedDict):
    """The models that can serve requests now."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(TypedDict):
    """The engines' health; `degraded`: the models in `down` cannot serve."""

    status: Literal["ok", "degraded"]
    down: NotRequired[dict[str, str] | None]  # reason by model


class Version(TypedDict):
    """Outrider's version."""

    version: str


class Load(TypedDict):
    """Requests that are running or waiting in the engines."""

    server_load: int


class EngineCount(TypedDict):
    """The number of engines that performed the command."""

    num_engines: int


class DrafterState(TypedDict):
    """One drafter of an engine."""

    name: str
    decoding_type: str
    placement: str  # "engine" for look-ups; otherwise the placement in its section
    speculative_model: str | None
    state: NotRequired[str]
    reason: NotRequired[str]
    last_fault: NotRequired[str]


class EngineDrafters(TypedDict):
    """The drafters of an engine."""

    model: str
    replica: str
    drafters: list[DrafterState]
    speculative_config: dict[str, Any]
    num_changes: int


class Drafters(TypedDict):
    """The drafters of every engine."""

    engines: list[EngineDrafters]


class DraftersUpdate(TypedDict):
    """The number of engines with the new drafters, and the drafters' names."""

    num_engines: int
    drafters: list[str]


class EngineCorpora(TypedDict):
    """The files that an engine's look-ups search."""

    model: str
    replica: str
    corpora: list[str]


class Corpora(TypedDict):
    """The answer of `GET /admin/corpora`."""

    engines: list[EngineCorpora]


class CorporaUpdate(TypedDict):
    """The number of engines that now search these files."""

    num_engines: int
    corpora: list[str]


class EngineAdaptation(TypedDict):
    """Online adaptation of an engine, as in its statistics."""

    model: str
    replica: str
    online_adaptation: dict[str, Any]


class Adaptations(TypedDict):
    """Online adaptation of every engine that has it."""

    engines: list[EngineAdaptation]


class Sent(TypedDict):
    """The result of a trainer's command, in SGLang's form."""

    success: Literal[True]
    message: str
    num_engines: int


class EngineTrace(TypedDict):
    """The steps of an engine with one drafter, and the requests that ended during them."""

    name: str
    decoding_type: str
    columns: dict[str, list[float]]
    drafts: list[list[list[int]]]
    requests: list[list[float]]


class Trace(TypedDict):
    """The input of `outrider simulate --trace`."""

    version: int
    machine: dict[str, Any]
    model: str
    runs: list[EngineTrace]


class WorldSize(TypedDict):
    """The number of ranks of all engines together, or of one engine."""

    world_size: int


class WeightVersion(TypedDict):
    """The version of the engines' weights; during an update, several versions joined by +."""

    weight_version: str


class Paused(TypedDict):
    """Whether an engine is paused."""

    is_paused: bool


class Sleeping(TypedDict):
    """Whether an engine is sleeping."""

    is_sleeping: bool


class Stats(TypedDict):
    """Statistics of every engine replica and its drafters."""

    model: str  # the first model
    models: list[str]
    running: int
    waiting: int
    engines: list[dict[str, Any]]
