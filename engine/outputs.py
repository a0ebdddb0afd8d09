"""Detokenization and a request's outputs, in the shape of vLLM's.

`Detokenizer` and `StopMatcher` process a few tokens at a time; their results do not depend on how a
completion is cut into deltas. `Assembler` turns the deltas of one request into text. Stop strings
are found here, not in the engine. If `Assembler.finished` is True although the delta has no finish
reason, the caller has to abort the engine's request; its last delta then carries the statistics.
"""

from __future__ import annotations

import codecs
import html
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from ..drafters.vocabulary import BYTE_LEVEL
from ..scheduler.sampling import SamplingParams
from ..scheduler.types import Delta, FloatArray, SpeculationUsage, StepTrace, TokenLogprobs, record
from .chat.reader import overlap

_CONTEXT = 24  # last prompt tokens; if all are special, the completion begins the text
TARGET = "target"  # origin of tokens that the target drew itself
REPLACEMENT = "\ufffd"  # replaces bytes that do not (yet) form a character
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The parts of a tokenizer that detokenization needs: texts of ids, and special ids.

    Fast tokenizers are called directly, because transformers' own `decode` takes ten times as long.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.decode: Callable[[Sequence[int]], str]  # for ids of the tokenizer
        if backend is not None:
            added = backend.get_added_tokens_decoder()
            self.special_ids = frozenset(id for id, token in added.items() if token.special)
            ids = backend.get_vocab(with_added_tokens=True)
            self.decode = partial(backend.decode, skip_special_tokens=False)
        else:
            self.special_ids = frozenset(tokenizer.all_special_ids)
            ids = tokenizer.get_vocab()
            self.decode = partial(
                tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        self._ids = frozenset(ids.values())
        self._anchor = [ids.get("a", min(ids.values()))]
        self._before = self.decode(self._anchor)
        self._behind = self.decode(self._anchor * 2).removeprefix(self._before)
        self._tokenizer = tokenizer
        self.token_bytes: Callable[..., bytes] = cache(self._find_bytes)

    def knows(self, token_id: int) -> bool:
        """Returns True if the tokenizer has this id; ids have gaps, and models are often padded."""
        return token_id in self._ids

    def text(self, token_ids: Iterable[int]) -> str:
        """Returns the text of a whole sequence, the same as a `Detokenizer` gives in pieces."""
        detokenizer = Detokenizer(self, skip_special_tokens=False)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def token_text(self, token_id: int, first: bool = False) -> str:
        """Returns the text of one token, as in OpenAI's `logprobs.tokens`.

        The token is decoded between two others, because some decoders drop a space at the beginning
        or end of a text.

        Args:
            first: whether the token begins the text.
        """
        if not self.knows(token_id):
            return ""
        start = 0 if first else len(self._before)
        text = self.decode([*self._anchor[: 0 if first else 1], token_id, *self._anchor])
        end = len(text) - len(self._behind)
        if start <= end and text.startswith(self._before[:start]) and text[end:] == self._behind:
            return text[start:end]
        return self.decode([token_id])

    def token_name(self, token_id: int) -> str:
        """Returns `token_text`, or OpenAI's `bytes:\\xe2` for a token that is part of a character.

        Unlike texts, names differ between tokens whose bytes differ.
        """
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token_id))

    def _find_bytes(self, token_id: int, first: bool = False) -> bytes:
        """Returns the bytes of a token, even if they are only a part of a character."""
        text = self.token_text(token_id, first)
        if REPLACEMENT not in text:
            return text.encode("utf-8")
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        byte = _BYTE_TOKEN.fullmatch(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        if all(char in BYTE_LEVEL for char in piece):
            return bytes(BYTE_LEVEL[char] for char in piece)
        return text.encode("utf-8")


class Detokenizer:
    """Converts a growing token sequence to text; text that was returned never changes.

    The text is the UTF-8 decoding of the tokens' bytes. Bytes of an unfinished character are held
    back, and invalid bytes become U+FFFD.

    Args:
        context: tokens before the sequence; their text is not returned.
        shown_ids: special tokens that are not skipped.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids - shown_ids if skip_special_tokens else frozenset()
        self._begins = self._skipped.issuperset(context)  # whether no text comes before
        self._held = b""  # the beginning of a character
        self.num_chars = 0  # returned in total

    def push(self, token_ids: Iterable[int], *, final: bool = False) -> str:
        """Returns the text that these tokens complete; if `final`, also what was held back."""
        data = self._held
        for token_id in token_ids:
            if token_id not in self._skipped:
                data += self._vocabulary.token_bytes(token_id, self._begins)
                self._begins = False
        text, num_read = codecs.utf_8_decode(data, "replace", final)
        self._held = data[num_read:]
        self.num_chars += len(text)
        return text

    def finish(self) -> str:
        """Ends the sequence and returns what was held back."""
        return self.push((), final=True)


class StopMatcher:
    """Finds the first completed stop string in a stream of text.

    Only text that could be the beginning of a stop string is held back. If one character completes
    several stop strings, the longest counts. The result does not depend on how the text is cut into
    chunks.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Returns the text that is safe to emit after `text`; sets `matched` at a stop string.

        Unless `may_stop`, stop strings that `text` completes are ignored. Text that could be the
        beginning of a stop string is held back even then, because later text may complete it.
        """
        if not self._stops:
            return text
        buffer = self._held + text
        found = []
        for stop in self._stops if may_stop else ():
            # Matches that ended within the held text were complete when stopping was not allowed.
            start = buffer.find(stop, max(0, len(self._held) + 1 - len(stop)))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return buffer[: end if self._include else start]
        cut = len(buffer) - overlap(buffer, self._stops)
        self._held = buffer[cut:]
        return buffer[:cut]

    def finish(self) -> str:
        """Returns the text that was held back; no stop string followed."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token, and its rank in the vocabulary (1: most likely)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None while it runs
    stop_reason: int | str | None = None  # the stop string or token; None: the text ended
    logprobs: list[dict[int, Logprob]] | None = None
    speculation: SpeculationUsage = field(default_factory=SpeculationUsage)
    # By step, if the request asked for a trace: `step`, `tokens` (`id`, `text`, `origin`) and
    # `draft` (`id`, `text`, `parent`, `origin`, `accepted`).
    speculation_trace: list[dict[str, Any]] | None = None
    # If weights were replaced: each version in order, and the number of tokens it produced.
    weight_versions: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Embedding:
    """A text's embedding."""

    embedding: list[float]  # [size]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class Score:
    """The relevance of a document to a query, on the model's own scale."""

    score: float


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """A prompt with its embedding, or a pair with its score."""

    request_id: str
    outputs: Embedding | Score
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt with its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    # Per token of the prompt; None for the first token.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None  # why the prompt was refused or failed

    @property
    def speculation(self) -> SpeculationUsage:
        """The usage of all completions together."""
        return add_usage([output.speculation for output in self.outputs])

    def _repr_html_(self) -> str:
        """Renders notebook output: the prompt, and completions with drafted tokens coloured.

        Colours require `speculation_trace`; without it, the text is plain.
        """
        prompt = self.prompt if self.prompt is not None else f"{len(self.prompt_token_ids)} tokens"
        parts = [f'<span style="opacity:0.6">{html.escape(prompt)}</span>']
        if self.error is not None:
            parts.append(f'<div style="color:#c62828">{html.escape(self.error)}</div>')
        parts += [_completion_html(output) for output in self.outputs]
        style = "white-space:pre-wrap;font-family:monospace"
        return f'<div style="{style}">{"<hr>".join(parts)}</div>'


_ORIGIN_COLOURS = ("46,125,50", "2,119,189", "106,27,154", "239,108,0", "0,131,143")


def _completion_html(output: CompletionOutput) -> str:
    """Renders a completion: tokens coloured by origin, rejected guesses on hover, and counts."""
    usage = output.speculation
    counts = (
        f"{len(output.token_ids)} tokens in {usage.num_steps} steps; "
        f"accepted {usage.num_accepted_tokens} of {usage.num_draft_tokens} drafted"
    )
    legend: dict[str, str] = {}
    spans = []
    for step in output.speculation_trace or ():
        rejected = [guess["text"] for guess in step["draft"] if not guess["accepted"]]
        title = f' title="{html.escape("rejected: " + " | ".join(rejected))}"' if rejected else ""
        for token in step["tokens"]:
            text = html.escape(token["text"])
            if token["origin"] == TARGET:
                spans.append(f"<span{title}>{text}</span>")
                continue
            colour = _ORIGIN_COLOURS[len(legend) % len(_ORIGIN_COLOURS)]
            colour = legend.setdefault(token["origin"], colour)
            spans.append(f'<span style="background:rgba({colour},0.25)"{title}>{text}</span>')
    names = "".join(
        f' <span style="background:rgba({colour},0.25)">{html.escape(origin)}</span>'
        for origin, colour in legend.items()
    )
    body = "".join(spans) or html.escape(output.text)
    return f'<div>{body}</div><div style="font-size:0.85em;opacity:0.7">{counts}{names}</div>'


def add_usage(usages: list[SpeculationUsage]) -> SpeculationUsage:
    """Sums usages; `drafter` is the first that proposed, otherwise the first that was asked."""
    asked = [usage for usage in usages if usage.drafter != "none"]
    asked.sort(key=lambda usage: usage.num_drafts == 0)
    return SpeculationUsage(
        drafter=asked[0].drafter if asked else "none",
        num_steps=sum(usage.num_steps for usage in usages),
        num_drafts=sum(usage.num_drafts for usage in usages),
        num_draft_tokens=sum(usage.num_draft_tokens for usage in usages),
        num_accepted_tokens=sum(usage.num_accepted_tokens for usage in usages),
        synthetic=any(usage.synthetic for usage in usages),
    )


@record
class Chunk:
    """The part of a completion that one delta added."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()  # characters of the text before each token
    pieces: tuple[str, ...] = ()  # text that each token adds, including stop strings
    trace: StepTrace | None = None
    step: int = -1  # number of the request's emitting step, from 0


def traced(chunk: Chunk, vocabulary: Vocabulary) -> dict[str, Any]:
    """Describes one step: the emitted tokens, and the draft as a tree."""
    trace = chunk.trace
    assert trace is not None, chunk
    accepted = frozenset(trace.path)
    origins = [trace.origins[node] for node in trace.path]
    origins += [TARGET] * (len(chunk.token_ids) - len(origins))
    tokens = zip(chunk.token_ids, chunk.pieces, origins, strict=False)
    draft = zip(trace.tokens, trace.parents, trace.origins, strict=True)
    return {
        "step": chunk.step,
        "tokens": [
            {"id": token_id, "text": text, "origin": origin} for token_id, text, origin in tokens
        ],
        "draft": [
            {
                "id": token_id,
                "text": vocabulary.token_text(token_id),
                "parent": parent,
                "origin": origin,
                "accepted": node in accepted,
            }
            for node, (token_id, parent, origin) in enumerate(draft)
        ],
    }


@dataclass(slots=True)
class Assembler:
    """Assembles text and tokens of one completion from its deltas.

    Tokens are processed one at a time: tokens after the one that completed a stop string are
    dropped, even if the same draft brought them.

    Args:
        eos_token_id: the token that ends a text; any other end token is a `stop_reason`.
        prompt: tokens that the completion continues; some decoders need them for the first space.
        shown_ids: special tokens whose text is not skipped.
    """

    vocabulary: Vocabulary
    sampling: SamplingParams
    eos_token_id: int | None = None
    index: int = 0
    prompt: Sequence[int] = ()
    shown_ids: frozenset[int] = frozenset()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # as in `Chunk`
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationUsage = field(default_factory=SpeculationUsage)
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of all prompt tokens but the first
    traced: list[Chunk] = field(default_factory=list)  # if the request asked for a trace
    pooled: FloatArray | None = None  # [width], an embedding or a score
    weight_versions: list[tuple[str, int]] = field(default_factory=list)  # as in `CompletionOutput`
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopMatcher = field(init=False)
    _pieces: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        sampling = self.sampling
        self._detokenizer = Detokenizer(
            self.vocabulary,
            skip_special_tokens=sampling.skip_special_tokens,
            context=self.prompt[-_CONTEXT:],
            shown_ids=self.shown_ids,
        )
        self._stops = StopMatcher(sampling.stop, include=sampling.include_stop_str_in_output)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, delta: Delta) -> Chunk:
        """Applies a delta. After the completion is finished, only statistics are recorded."""
        if delta.usage is not None:
            self.speculation = delta.usage
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs.by_token()
        if delta.pooled is not None:
            self.pooled = delta.pooled
        if self.finish_reason is not None:
            return Chunk("", ())
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        ids, stop, sampling = delta.token_ids, delta.stop_token_id, self.sampling
        hidden = stop is not None and ids[-1:] == (stop,)
        num_shown = len(ids) - (hidden and not sampling.include_stop_str_in_output)
        text, detokenizer, stops = "", self._detokenizer, sampling.stop
        offsets: list[int] = []
        pieces: list[str] = []
        for count, token_id in enumerate(ids, start=1):
            offsets.append(detokenizer.num_chars)
            piece = detokenizer.push((token_id,)) if count <= num_shown else ""
            pieces.append(piece)
            text += self._until_stop(piece, len(self.token_ids) + count) if stops else piece
            if stops and self._stops.matched is not None:
                ids = ids[:count]
                break
        logprobs = delta.logprobs[: len(ids)]
        self.token_ids.extend(ids)
        if ids and (delta.weight_version or self.weight_versions):
            self._count_version(delta.weight_version, len(ids))
        if self.finish_reason is None and delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            if delta.finish_reason == "stop" and stop != self.eos_token_id:
                self.stop_reason = stop
            # The held-back bytes may still complete a stop string.
            text += self._until_stop(self._detokenizer.finish(), len(self.token_ids))
            text += self._stops.finish()
        self.logprobs.extend(logprobs)
        self.offsets.extend(offsets)
        self._pieces.append(text)
        step = self.speculation.num_steps - 1
        chunk = Chunk(text, ids, logprobs, tuple(offsets), tuple(pieces), delta.trace, step)
        if delta.trace is not None:
            self.traced.append(chunk)
        return chunk

    def _count_version(self, version: str, count: int) -> None:
        """Counts tokens by weight version; tokens before the first update have version ""."""
        versions, known = self.weight_versions, len(self.token_ids) - count
        if not versions and known:
            versions.append(("", known))
        if versions and versions[-1][0] == version:
            count += versions.pop()[1]
        versions.append((version, count))

    def _until_stop(self, piece: str, num_tokens: int) -> str:
        """Returns the text of `piece` up to a stop string, which ends the completion there."""
        text = self._stops.push(piece, may_stop=num_tokens > self.sampling.min_tokens)
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
        return text

    @property
    def text(self) -> str:
        """The completion's text so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def chunk(self) -> Chunk:
        """Returns everything so far as one chunk."""
        return Chunk(self.text, tuple(self.token_ids), tuple(self.logprobs), tuple(self.offsets))

    def output(self) -> CompletionOutput:
        """Returns the completion so far."""
        logprobs: list[dict[int, Logprob]] | None = None
        if self.sampling.logprobs is not None:
            entries = zip(self.token_ids, self.logprobs, strict=False)
            logprobs = [_table_row(self.vocabulary, *entry) for entry in entries]
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=logprobs,
            speculation=self.speculation,
            speculation_trace=[traced(each, self.vocabulary) for each in self.traced] or None,
            weight_versions=tuple(self.weight_versions),
        )


def prompt_table(assembler: Assembler) -> list[dict[int, Logprob] | None] | None:
    """Returns the prompt's log-probabilities by token (the first: None), or None if missing."""
    if assembler.prompt_logprobs is None:
        return None
    pairs = zip(assembler.prompt[1:], assembler.prompt_logprobs, strict=True)
    return [None, *(_table_row(assembler.vocabulary, token_id, entry) for token_id, entry in pairs)]


def _table_row(
    vocabulary: Vocabulary, token_id: int, logprobs: TokenLogprobs
) -> dict[int, Logprob]:
    """Returns vLLM's mapping of ids to log-probabilities: the top tokens and the chosen one."""
    text = vocabulary.token_text
    row = {
        id: Logprob(value, rank, text(id)) for rank, (id, value) in enumerate(logprobs.top, start=1)
    }
    row.setdefault(token_id, Logprob(logprobs.chosen, logprobs.rank, text(token_id)))
    return row
