"""Turns text, token ids or messages into `Request`s.

All checks of a request happen here, before anything is queued. Errors name the field, the value and
the limit.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..config import EngineConfig
from ..config.files import needs_folder
from ..errors import InvalidRequestError, PromptTooLongError, shown_value
from ..scheduler.sampling import SamplingParams
from ..scheduler.types import FloatArray, IntArray, Request, SpeculationOptions, ints
from ..workers.model.checkpoint.pooling import Pooling, read_pooling
from .chat.chat_text import ChatText
from .chat.template import (
    Message,
    check_messages,
    read_template,
    render,
    render_with_calls,
    template_of,
)
from .checkpoints import load_tokenizer, resolved, sampling_defaults
from .outputs import Assembler, Vocabulary

if TYPE_CHECKING:
    from ..workers.model.info import ModelOutline
    from .statistics import EngineInfo

MAX_TEMPLATE_CHARS = 2**16  # longest chat template in a request
MAX_KEPT_TOKENS = 2**16  # longer token lists, counted above the context, are rejected unread
_KINDS = {"embed": "embeddings", "score": "scores of pairs"}
_UNDRAFTED = SpeculationOptions(enabled=False)
POOLED = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""Settings of a request for an embedding or a score; it ends with the step that ends its text."""
_QWEN3_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt for a pair, from Qwen3-Reranker's model card."""
_PREFIX_CHARS = 8  # size of a long text's prefix that is encoded first, per token of context
_CUT = 1024  # tokens that cutting off a prefix may have added at its end


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens; `text` is None if the user gave token ids."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request other than its sampling settings."""

    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    priority: int = 0
    tenant: str = ""
    structured_field: str = ""  # the user's name of `structured_outputs`, for messages
    shown_ids: frozenset[int] = frozenset()  # special tokens that `LLM` keeps in the text
    prediction: str | Sequence[int] = ()  # expected completion, as text or token ids
    adapter: str = ""  # name of a LoRA adapter; empty: none
    pools: bool = False  # whether an embedding or score is requested instead of text


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """One of the configuration's `lora_modules`, with the fields of vLLM's `LoRARequest`."""

    lora_name: str
    lora_int_id: int = 1  # for compatibility with vLLM; only the name selects the adapter
    lora_path: str = ""  # the folder in the configuration, or empty


class Frontend:
    """Tokenizer, chat template and limits of one model.

    Args:
        tokenizer: the result of `load_tokenizer` for `config`; None: it is loaded.

    Raises:
        CheckpointError: the tokenizer cannot be loaded from local files.
        ConfigError: the chat template does not compile.
    """

    def __init__(
        self, config: EngineConfig, limits: EngineInfo | ModelOutline, tokenizer: Any = None
    ) -> None:
        self.model_name, self.source = config.model_name, config.model
        self.lora_modules = config.lora_modules
        config = resolved(config)
        self._sampling_defaults = sampling_defaults(config)
        self.max_model_len = limits.max_model_len
        self.vocab_size = limits.vocab_size
        self.pooling = read_pooling(Path(config.model), config.hf_overrides.given())
        # `ModelOutline`, which describes a checkpoint, has no drafters.
        self.drafters: tuple[str, ...] = getattr(limits, "drafters", ())
        self.adapters = {each.name: each.path for each in config.lora_modules}  # folders
        self._eos_token_ids = tuple(limits.eos_token_ids)
        self.tokenizer = load_tokenizer(config) if tokenizer is None else tokenizer
        self.vocabulary = Vocabulary(self.tokenizer)
        own = getattr(self.tokenizer, "eos_token_id", None)
        known = own in self._eos_token_ids
        self._eos_token_id = own if known else next(iter(self._eos_token_ids), None)
        self._template = read_template(config.chat_template)
        self.chat = ChatText(
            config.tool_call_parser,
            config.reasoning_parser,
            self._template or template_of(self.tokenizer),
            self.tokenizer,
        )
        self._trusts_templates = config.trust_request_chat_template
        self._backend = _plain_backend(self.tokenizer)
        # Seeds of requests that give none.
        self._seeds = SystemRandom() if config.seed is None else Random(config.seed)

    @property
    def has_chat_template(self) -> bool:
        """True if messages can be rendered as a prompt."""
        return self._template is not None or bool(getattr(self.tokenizer, "chat_template", None))

    def text_prompt(
        self, text: str, *, add_special_tokens: bool = True, field: str = "prompt"
    ) -> Prompt:
        """Tokenizes a prompt given as text.

        Raises:
            PromptTooLongError: it exceeds the context; for a long text, a prefix decides.
            InvalidRequestError: it is not valid text.
        """
        check_text(field, text)
        at_least = self._least_tokens(text, add_special_tokens)
        if at_least is not None:
            raise too_long(f"at least {at_least}", self.max_model_len, field)
        encoding = self._encode(text, add_special_tokens)
        if len(encoding) > MAX_KEPT_TOKENS + self.max_model_len:
            raise too_long(str(len(encoding)), self.max_model_len, field)
        return Prompt(tuple(encoding if self._backend is None else encoding.ids), text)

    def token_prompt(self, token_ids: Sequence[int], field: str = "prompt") -> Prompt:
        """Checks a prompt given as token ids.

        Raises:
            InvalidRequestError: it is not a list of token ids, or an id is not in the vocabulary.
        """
        token_ids = as_array(token_ids)
        if isinstance(token_ids, np.ndarray):
            token_ids = token_ids.tolist()
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sized):
            raise InvalidRequestError.at(field, f"a list of token ids, got {token_ids!r}")
        if len(token_ids) > MAX_KEPT_TOKENS + self.max_model_len:
            raise too_long(str(len(token_ids)), self.max_model_len, field)
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                raise InvalidRequestError.at(field, f"{token_id!r} is no token id")
        self._check_ids(field, token_ids)
        return Prompt(tuple(int(token_id) for token_id in token_ids))

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = False,
        chat_template: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
        required: Sequence[dict[str, Any]] = (),
    ) -> Prompt:
        """Renders messages and tools with the chat template.

        Args:
            chat_template: replaces the model's template, if requests may bring one.
            tools: the tools that may be called.
            required: the tools of which one has to be called. If the model has no format of calls
                and its template ignores tools, a message describes the call to the model.

        Raises:
            InvalidRequestError: the template rejects the messages, is missing, or is not allowed.
        """
        if chat_template is not None and not self._trusts_templates:
            raise InvalidRequestError.at(
                "chat_template",
                "requests may not bring a chat template; the server's configuration "
                "has to set trust_request_chat_template: true",
            )
        if chat_template is not None and not 0 < len(chat_template) <= MAX_TEMPLATE_CHARS:
            raise InvalidRequestError.at(
                "chat_template", f"1 to {MAX_TEMPLATE_CHARS} characters (got {len(chat_template)})"
            )
        if chat_template is None and not self.has_chat_template:
            raise InvalidRequestError.at(
                "messages",
                f"the tokenizer of {self.model_name} has no chat template; set "
                "chat_template in the configuration, or use /v1/completions",
            )

        def rendered(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
            return render(
                self.tokenizer,
                messages,
                "messages" if chat_template is None else "chat_template",
                chat_template=chat_template or self._template,
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )

        check_messages(messages)
        text = rendered(messages, tools)
        if required and not self.chat.has_calls and text == rendered(messages):
            text = render_with_calls(rendered, messages, required)
        # The template writes the special tokens itself.
        return self.text_prompt(text, add_special_tokens=add_special_tokens, field="messages")

    def shortened_text(self, text: str, num_tokens: int, field: str) -> str:
        """Returns the first `num_tokens` tokens of a text as text; raises as `text_prompt`."""
        ids = self.text_prompt(text, add_special_tokens=False, field=field).token_ids
        return text if len(ids) <= num_tokens else self.vocabulary.text(ids[:num_tokens])

    def require(self, kind: Literal["embed", "score"]) -> Pooling:
        """Returns the checkpoint's pooling; raises `InvalidRequestError` if it is not `kind`."""
        found, wanted = self.pooling, _KINDS[kind]
        if isinstance(found, str):
            raise InvalidRequestError.at(
                "model", f"{self.model_name!r} gives no {wanted}: {found}; it generates text"
            )
        if found.kind != kind:
            raise InvalidRequestError.at(
                "model", f"{self.model_name!r} gives no {wanted}; it gives {_KINDS[found.kind]}"
            )
        return found

    def cut_of(self, dimensions: int | None) -> Callable[[FloatArray], FloatArray]:
        """Returns a function that cuts an embedding to `dimensions` and normalises it again.

        Raises:
            InvalidRequestError: the model gives no embeddings, or the size is not allowed.
        """
        pooling = self.require("embed")
        if dimensions is None:
            return lambda vector: vector
        sizes = pooling.dimensions
        if sizes is None and dimensions != pooling.size:
            raise InvalidRequestError.at(
                "dimensions",
                f"{dimensions}, but the embeddings of {self.model_name!r} have {pooling.size}, and "
                "its config.json declares no others (matryoshka_dimensions, is_matryoshka)",
            )
        if not 1 <= dimensions <= pooling.size or (sizes and dimensions not in sizes):
            allowed = ", ".join(map(str, sizes)) if sizes else f"1 to {pooling.size}"
            raise InvalidRequestError.at("dimensions", f"{dimensions}; allowed: {allowed}")

        return partial(pooling.cut, dimensions)

    def pair_prompt(
        self, query: str, document: str, instruction: str | None = None, field: str = "documents"
    ) -> Prompt:
        """Returns a pair of query and document in the form that the model scores.

        If the chat template accepts messages of the roles query and document (as in
        sentence-transformers and vLLM), it renders the pair. Models of Qwen3-Reranker's type use
        the form of its model card. All others use the tokenizer's form for pairs.

        Args:
            instruction: the task, if the form includes one; None: the form's default.

        Raises:
            InvalidRequestError: query or document is not valid text, or the form has no
                instruction.
            PromptTooLongError: the pair exceeds the context.
        """
        pooling = self.require("score")
        check_text("query", query)
        check_text(field, document)
        own = self._template or template_of(self.tokenizer)
        if "query" in own and "document" in own:
            roles = [("system", instruction)] if instruction is not None else []
            roles += [("query", query), ("document", document)]
            messages = [{"role": role, "content": text} for role, text in roles]
            text = render(self.tokenizer, messages, chat_template=self._template,
                          add_generation_prompt=True)  # fmt: skip
            return self.text_prompt(text, add_special_tokens=False, field=field)
        if pooling.model_type == "qwen3":
            task = _QWEN3_TASK if instruction is None else instruction
            text = _QWEN3_PAIR.format(instruction=task, query=query, document=document)
            return self.text_prompt(text, add_special_tokens=False, field=field)
        if instruction is not None:
            raise InvalidRequestError.at(
                "instruction", f"the form of {self.model_name!r} for pairs has no place for it"
            )
        for text in (query, document):  # a long text is rejected before the pair is encoded
            self.text_prompt(text, field=field)
        ids = self.tokenizer(query, document)["input_ids"]
        return Prompt(tuple(ids), None)

    def truncated(self, prompt: Prompt, limit: int | None, sampling: SamplingParams) -> Prompt:
        """Returns the last `limit` tokens of a prompt; -1 leaves room for `max_tokens`."""
        if limit == -1:
            limit = max(1, self.max_model_len - (sampling.max_tokens or 1))
        if limit is None or len(prompt.token_ids) <= limit:
            return prompt
        return Prompt(prompt.token_ids[-limit:])

    def requests(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        options: RequestOptions | None = None,
        *,
        field: str = "prompt",
    ) -> list[Request]:
        """Creates the `sampling.n` requests of a prompt, checked and ready to be queued.

        Raises:
            PromptTooLongError: prompt, or prompt and `max_tokens`, exceed the context.
            InvalidRequestError: the prompt is empty, an id is outside the vocabulary, or an option
                is invalid.
        """
        options = options or RequestOptions()
        _check_options(options)
        check_text("cache_salt", options.tenant)
        if options.pools and not isinstance(self.pooling, Pooling):
            raise InvalidRequestError.at("pools", f"{self.model_name!r} generates text alone")
        if not options.pools and isinstance(self.pooling, Pooling) and not self.pooling.generates:
            raise InvalidRequestError.at(
                "model",
                f"{self.model_name!r} has no output layer to generate text with; it gives "
                f"{_KINDS[self.pooling.kind]}",
            )
        self._check_speculation(options.speculation)
        if options.adapter:
            self._check_adapter(options.adapter)
        if sampling.structured_outputs is not None:
            from .structured.grammar import check

            check(sampling, self._eos_token_ids, options.structured_field)
        max_tokens = self._room(len(prompt.token_ids), sampling.max_tokens, field)
        self._check_ids("logit_bias", sampling.logit_bias)
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        if sampling.bad_words:
            from .structured.constraints import spellings

            for word in sampling.bad_words:
                check_text("bad_words", word)
            spellings(self.tokenizer, sampling.bad_words, self.vocab_size)
        for stop in sampling.stop:
            check_text("stop", stop)
        if sampling.min_tokens > max_tokens:
            raise InvalidRequestError.at(
                "min_tokens", f"{sampling.min_tokens} is above max_tokens ({max_tokens})"
            )
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        one = sampling.model_copy(update={"max_tokens": max_tokens, "n": 1})
        token_ids, prediction = ints(prompt.token_ids), self._predicted(options.prediction)
        ends = not sampling.ignore_eos or sampling.structured_outputs is not None
        return [
            Request(
                id=request_id if sampling.n == 1 else f"{request_id}-{index}",
                prompt=token_ids,
                sampling=one,
                seed=derive_seed(seed, index),
                eos_token_ids=self._eos_token_ids if ends else (),
                speculation=_UNDRAFTED if options.pools else options.speculation,
                priority=options.priority,
                tenant=options.tenant,
                adapter=options.adapter,
                prediction=prediction,
                pools=options.pools,
            )
            for index in range(sampling.n)
        ]

    def adapter_of(self, wish: LoRARequest | str | None) -> str:
        """Returns an adapter's name (empty: none); raises `InvalidRequestError` if unknown."""
        if wish is None:
            return ""
        if isinstance(wish, str):
            wish = LoRARequest(wish)
        if not isinstance(wish, LoRARequest) or not isinstance(wish.lora_name, str):
            raise InvalidRequestError.at("lora_request", f"a LoRARequest or a name, got {wish!r}")
        self._check_adapter(wish.lora_name)
        given, known = wish.lora_path, self.adapters[wish.lora_name]
        if given and not needs_folder(given) and Path(given).resolve() != Path(known).resolve():
            raise InvalidRequestError.at(
                "lora_request",
                f"{shown_value(wish.lora_name)} is served from {known!r}, not from {given!r}",
            )
        return wish.lora_name

    def _check_adapter(self, name: str) -> None:
        if name not in self.adapters:
            known = ", ".join(map(repr, self.adapters)) or "none: set lora_modules"
            raise InvalidRequestError.at(
                "lora_request", f"{shown_value(name)} is not served; there is {known}"
            )

    def _check_speculation(self, wish: SpeculationOptions) -> None:
        least = wish.min_prob
        if least is not None and not (type(least) in (int, float) and 0 <= least <= 1):
            raise InvalidRequestError.at(
                "speculation.min_prob", f"{shown_value(least)} is not within 0 to 1"
            )
        for name in wish.drafters or ():
            if name not in self.drafters:
                known = ", ".join(map(repr, self.drafters)) or "none: it decodes plainly"
                raise InvalidRequestError.at(
                    "speculation.drafters", f"{shown_value(name)} is not served; there is {known}"
                )

    def assembler(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        index: int,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Assembler:
        """Returns the assembler of a completion; `index` is its number in the prompt's completions.

        As in vLLM, an end of text without a `stop_reason` is the tokenizer's own end token, unless
        that is ignored. Further end tokens of a checkpoint count as stop tokens.
        """
        end = None if sampling.ignore_eos else self._eos_token_id
        return Assembler(self.vocabulary, sampling, end, index, prompt.token_ids, shown_ids)

    def with_defaults(self, sampling: SamplingParams) -> SamplingParams:
        """Returns `sampling` with the model's defaults for settings that were not given."""
        given = sampling.model_fields_set
        missing = {key: value for key, value in self._sampling_defaults.items() if key not in given}
        return sampling.model_copy(update=missing) if missing else sampling

    def _least_tokens(self, text: str, add_special_tokens: bool) -> int | None:
        """Returns a lower bound of a text's tokens if a prefix exceeds the context, else None."""
        size = _PREFIX_CHARS * self.max_model_len
        while size < len(text):
            prefix = text[:size].rstrip()  # some tokens include the white space before them
            at_least = len(self._encode(prefix, add_special_tokens)) - _CUT
            if at_least >= self.max_model_len:
                return at_least
            size *= 4
        return None

    def _predicted(self, prediction: str | Sequence[int]) -> IntArray:
        """Returns the tokens of a prediction; rejects more than the context holds."""
        limit = self.max_model_len
        if isinstance(prediction, str):
            check_text("prediction", prediction)
            at_least = self._least_tokens(prediction, add_special_tokens=False)
            if at_least is not None:
                raise _prediction_too_long(f"at least {at_least}", limit)
            encoding = self._encode(prediction, add_special_tokens=False)
            token_ids = encoding if self._backend is None else encoding.ids
        else:
            token_ids = self.token_prompt(prediction, "prediction").token_ids
        if len(token_ids) > limit:
            raise _prediction_too_long(str(len(token_ids)), limit)
        return ints(token_ids)

    def _encode(self, text: str, add_special_tokens: bool) -> Any:
        """Returns token ids, or the backend's `Encoding`, which creates its list lazily."""
        if self._backend is None:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # Among the tokenizer's methods, this one releases the GIL.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _room(self, num_prompt: int, max_tokens: int | None, field: str) -> int:
        """Returns the maximum number of tokens to generate."""
        if num_prompt == 0:
            raise InvalidRequestError.at(field, "it is empty; at least one token")
        if num_prompt >= self.max_model_len:
            raise too_long(str(num_prompt), self.max_model_len, field)
        room = self.max_model_len - num_prompt
        if max_tokens is None:
            return room
        if max_tokens > room:
            raise PromptTooLongError.at(
                "max_tokens",
                f"This model's maximum context length is {self.max_model_len} tokens. "
                f"However, you requested {num_prompt + max_tokens} tokens ({num_prompt} in the "
                f"{field}, {max_tokens} in the completion); at most {room} are left.",
            )
        return max_tokens

    def _check_ids(self, field: str, token_ids: Sequence[int] | dict[int, float]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError.at(
                    field,
                    f"token id {token_id} is not in the vocabulary (0 to {self.vocab_size - 1})",
                )


_SWITCHES = ("enabled", "trace", "isolated")  # boolean fields of `SpeculationOptions`


def _check_options(options: RequestOptions) -> None:
    """Rejects invalid values before the scheduler uses them.

    Only requests from Python need this, because HTTP bodies are validated by type.
    """
    wish = options.speculation
    names, length = getattr(wish, "drafters", None), getattr(wish, "max_draft_len", None)
    switches = {f"speculation.{each}": getattr(wish, each, True) for each in _SWITCHES}
    for name, value, is_right, wanted in (
        *(
            (name, value, isinstance(value, bool), "true or false")
            for name, value in {"pools": options.pools, **switches}.items()
        ),
        ("priority", options.priority, _is_int(options.priority), "an integer"),
        ("tenant", options.tenant, isinstance(options.tenant, str), "a text"),
        ("adapter", options.adapter, isinstance(options.adapter, str), "a text"),
        ("shown_ids", options.shown_ids, isinstance(options.shown_ids, frozenset), "a frozenset"),
        ("speculation", wish, isinstance(wish, SpeculationOptions), "SpeculationOptions"),
        (
            "speculation.max_draft_len",
            length,
            length is None or (_is_int(length) and length >= 0),
            "an integer of at least 0, or None",
        ),
        (
            "speculation.drafters",
            names,
            names is None
            or (isinstance(names, (list, tuple)) and all(isinstance(each, str) for each in names)),
            "a tuple of names, or None",
        ),
    ):
        if not is_right:
            raise InvalidRequestError.at(name, f"expected {wanted} (got {shown_value(value)})")


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**31


def paired(
    queries: str | Sequence[str],
    documents: str | Sequence[str],
    names: tuple[str, str] = ("queries", "documents"),
) -> list[tuple[str, str]]:
    """Pairs every document with its query; one query may serve all documents.

    Raises:
        InvalidRequestError: a list is empty or has other items than texts, or their lengths differ;
            the message names the field.
    """
    lists: list[list[str]] = []
    for name, given in zip(names, (queries, documents), strict=True):
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, Sequence) or not all(isinstance(each, str) for each in texts):
            raise InvalidRequestError.at(name, f"a text or a list of them, got {given!r}")
        if not texts:
            raise InvalidRequestError.at(name, "the list is empty")
        lists.append(list(texts))
    first, second = lists
    if len(first) not in (1, len(second)):
        raise InvalidRequestError.at(
            names[0], f"{len(first)} for {len(second)} {names[1]}; expected one, or as many"
        )
    return list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True))


def derive_seed(seed: int, index: int) -> int:
    """Returns the seed of a prompt's completion `index`; completion 0 has the prompt's seed."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def too_long(how_many: str, max_model_len: int, field: str) -> PromptTooLongError:
    """Returns the error for a prompt that leaves no room for output."""
    return PromptTooLongError.at(
        field,
        f"This model's maximum context length is {max_model_len} tokens. "
        f"However, your prompt has {how_many} tokens, which leaves no room for output.",
    )


def _prediction_too_long(how_many: str, max_model_len: int) -> InvalidRequestError:
    return InvalidRequestError.at(
        "prediction", f"{how_many} tokens; at most the model's context of {max_model_len}"
    )


def check_text(field: str, text: str) -> None:
    """Rejects a lone surrogate (JSON allows "\ud800"), which has no UTF-8 encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError.at(
            field, f"character {error.start} is half of a surrogate pair, which is not text"
        ) from None


def _plain_backend(tokenizer: Any) -> Any:
    """Returns the underlying `tokenizers.Tokenizer` if it encodes the same as `tokenizer`."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return None
    for name in ("encode", "_encode_plus"):
        if getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name):
            return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


Kind = TypeVar("Kind")
PromptLike = str | Sequence[int] | NDArray[np.integer] | dict[str, Any] | Prompt


def as_array(given: Any) -> Any:
    """Returns a torch tensor of any device and dtype as an array; other values unchanged."""
    torch = sys.modules.get("torch")  # tensors exist only if torch is loaded
    is_tensor = torch is not None and isinstance(given, torch.Tensor)
    return np.array(given.tolist()) if is_tensor else given


def prompt_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """Returns the prompts of a call as a list; raises `InvalidRequestError`."""
    prompts = as_array(prompts)
    if isinstance(prompts, (str, dict, Prompt)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise InvalidRequestError.at(
            "prompts", f"a text, a list of token ids, a dict, or a list of those, got {prompts!r}"
        )
    if isinstance(prompts, np.ndarray):  # token ids of one prompt or a row per prompt, or texts
        texts = prompts.dtype.kind in "UO" and all(isinstance(item, str) for item in prompts.flat)
        allowed = (1,) if texts else (1, 2)
        if prompts.ndim not in allowed or not (texts or np.issubdtype(prompts.dtype, np.integer)):
            raise InvalidRequestError.at(
                "prompts",
                "an array has integers in one or two dimensions, or texts in one; got "
                f"{prompts.dtype} of shape {prompts.shape}",
            )
        rows: list[Any] = prompts.tolist()
        return rows if texts or prompts.ndim > 1 else [rows]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [items]
    return items


def per_prompt(
    field: str, kind: type[Kind], given: Kind | Sequence[Kind], num_prompts: int
) -> list[Kind]:
    """Returns one `kind` per prompt; `given` is one for all, or a list with one per prompt."""
    if isinstance(given, kind):
        return [given] * num_prompts
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, kind) for one in given):
        name = kind.__name__
        raise InvalidRequestError.at(field, f"one {name}, or one per prompt, got {given!r}")
    if len(given) != num_prompts:
        raise InvalidRequestError.at(field, f"{len(given)} for {num_prompts} prompts")
    return list(given)
