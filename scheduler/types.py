"""Types that cross process boundaries: frozen and slotted; arrays are int32 numpy unless noted.

In the order of a step: `Batch` (the requests that run) and `Draft`s -> `StepPlan` (the message to
every rank) -> `StepInput` (a rank's flat arrays) -> `Verdict` (rank 0's answer) -> `Delta`s (what
the edge streams). Dimension names are those of the glossary in ARCHITECTURE.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequestError, OutriderError, WorkerError
from .sampling import SamplingParams

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


def ints(values: object) -> IntArray:
    """`values` as an int32 array."""
    return np.asarray(values, dtype=np.int32)


NO_INTS = ints([])
NO_MOVES = NO_INTS.reshape(0, 2)
NO_SAVES = NO_BLOCKS = NO_INTS.reshape(0, 3)


def starts_of(counts: object) -> IntArray:  # [num_seqs] -> [num_seqs + 1]
    """Offsets of each sequence's part of a flat array, followed by the total length."""
    lens = ints(counts)
    starts = np.zeros(len(lens) + 1, dtype=np.int32)
    lens.cumsum(dtype=np.int32, out=starts[1:])
    return starts


def lens_of(starts: IntArray) -> IntArray:  # [num_seqs + 1] -> [num_seqs]
    """The inverse of `starts_of`; `np.diff` takes several times as long."""
    return starts[1:] - starts[:-1]


def slots_of(
    tables: IntArray,  # [max_blocks], or [num_seqs, max_blocks]
    index: IntArray,  # [num_tokens], or what broadcasts to [num_seqs, num_tokens]
    block_size: int,
) -> IntArray:  # shape of `index`, one row per table
    """Cache slots of the tokens at `index` of their sequences."""
    blocks = np.take_along_axis(tables, index // block_size, axis=-1)
    return blocks * block_size + index % block_size


# `record` is for dataclasses that are constructed in every step, some of them per sequence.

Record = TypeVar("Record")


@dataclass_transform(frozen_default=True)
def record(cls: type[Record]) -> type[Record]:
    """A slotted dataclass that is frozen for the type checker only.

    A dataclass that is frozen at run time takes three times as long to construct.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


# Requests: one completion each, with its tokens as its complete state.


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Speculation settings of one request; None leaves the choice to the engine."""

    enabled: bool = True
    max_draft_len: int | None = None
    trace: bool = False  # whether every delta carries a `StepTrace`
    drafters: tuple[str, ...] | None = None  # members of a composition that may draft; None: all
    # Drafts come from the request's own text, and none of it is kept for other requests.
    isolated: bool = False
    min_prob: float | None = None  # drafts end before a token below this probability


@dataclass(frozen=True, slots=True)
class ResumeKey:
    """Identifies the stream whose tokens a replica keeps after it broke, and its owner."""

    stream: str  # stream id, as sent to the client
    index: int  # index of the completion within the stream
    owner: str  # holder of the API key; empty on servers without keys


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to produce. Its tokens (prompt, then emitted) are its complete state."""

    id: str
    prompt: IntArray  # [prompt_len]
    sampling: SamplingParams
    seed: int  # key of the coupled noise; drawn at the edge if the user gave none
    eos_token_ids: tuple[int, ...] = ()
    speculation: SpeculationOptions = SpeculationOptions()
    priority: int = 0  # lower runs first
    tenant: str = ""
    adapter: str = ""  # name of the LoRA adapter; empty: the model alone
    emitted: IntArray = field(default_factory=NO_INTS.view)  # tokens streamed before a replay
    timeout_s: float | None = None  # time left when the request is sent; None: unlimited
    resume_key: ResumeKey | None = None  # None: its stream cannot be resumed
    was_accepted: bool = False  # accepted earlier by an engine that died; a full queue takes it
    prediction: IntArray = field(default_factory=NO_INTS.view)  # the output that the client expects
    pools: bool = False  # whether it asks for an embedding or score instead of text

    @property
    def sharer(self) -> str:
        """Key under which look-ups share what they learn: the tenant and the adapter."""
        return f"{self.tenant}\0{self.adapter}" if self.adapter else self.tenant

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end the request once `min_tokens` are emitted."""
        stops = frozenset(self.sampling.stop_token_ids)
        return stops if self.ignores_eos else stops | frozenset(self.eos_token_ids)

    @property
    def ignores_eos(self) -> bool:
        """Whether end tokens do not end the request; with a grammar they always do."""
        return self.sampling.ignore_eos and self.sampling.structured_outputs is None

    @property
    def min_tokens(self) -> int:
        """Number of tokens before the first end token; 0 with a grammar, whose masks enforce it."""
        return 0 if self.sampling.structured_outputs is not None else self.sampling.min_tokens


# Drafts: trees of tokens, with the distributions they were drawn from and grammar masks.


@dataclass(frozen=True, slots=True)
class Masks:
    """Tokens allowed at some rows, one bit each: token t is bit t % 32 of word t // 32."""

    rows: IntArray  # [num_masked], ascending: logit rows of a step, or of one sequence (0: root)
    bits: IntArray  # [num_masked, num_words]


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """Sparse distributions that a sampling drafter drew its nodes from (renormalised top-k).

    Row i is the distribution at node i's parent, before any sibling was drawn; siblings are
    drawn from it in order, without replacement.
    """

    ids: IntArray  # [num_nodes, top]
    probs: FloatArray  # [num_nodes, top]


@record
class Draft:
    """A tree of guessed tokens. Node i's parent comes before it; -1 is the root.

    The last `num_window` nodes (the lookahead window) are computed but never accepted; the verdict
    carries the target's most likely token after each of them.
    """

    tokens: IntArray  # [num_nodes]
    parents: IntArray  # [num_nodes]
    probs: DraftProbs | None = None  # None: the tokens were not sampled
    source: str = "none"  # name of the drafter, for statistics
    num_window: int = 0
    masks: Masks | None = None  # by row of the sequence; None: every token is allowed
    origins: tuple[str, ...] = ()  # [num_guesses], name of each guess's source; (): all `source`
    # [num_nodes], the drafter's estimates that a node is accepted, given that its parent is; for
    # sampled nodes they depend only on the node's ancestors. None: no estimates.
    chances: FloatArray | None = None

    @property
    def num_guesses(self) -> int:
        """Number of nodes that may be accepted."""
        return len(self.tokens) - self.num_window

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)


# The step on a rank: flat arrays, without draft nodes and with them.


@dataclass(frozen=True, slots=True)
class Penalties:
    """Token history of one row, sent only if a penalty is set."""

    row: int
    repetition: float
    presence: float
    frequency: float
    prompt_ids: IntArray  # [num_prompt_unique]
    output_ids: IntArray  # [num_output_unique]
    output_counts: IntArray  # [num_output_unique]


@dataclass(frozen=True, slots=True)
class Bias:
    """Additive logit biases of one row."""

    row: int
    ids: IntArray  # [num_biased]
    values: FloatArray  # [num_biased]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling settings, one row per sequence of the batch."""

    temperature: FloatArray  # [num_seqs], 0 is greedy
    top_k: IntArray  # [num_seqs], 0 is off
    top_p: FloatArray  # [num_seqs], 1 is off
    min_p: FloatArray  # [num_seqs], 0 is off
    seeds: NDArray[np.int64]  # [num_seqs]
    min_new_tokens: IntArray  # [num_seqs], tokens still owed before `ends` may be sampled
    num_logprobs: IntArray  # [num_seqs], -1 is none
    ends: tuple[IntArray, ...] = ()  # per row, ids forbidden while min_new_tokens > 0
    penalties: tuple[Penalties, ...] = ()
    biases: tuple[Bias, ...] = ()
    thinking: NDArray[np.bool_] | None = None  # [num_seqs], the root is in a thinking phase
    # [num_seqs], rivals of every known token that the step computes, the root excepted; -1 is none
    num_prompt_logprobs: IntArray | None = None  # None: no request asks for them
    pools: NDArray[np.bool_] | None = None  # [num_seqs], embeddings or scores; None: of none
    min_probs: FloatArray | None = None  # [num_seqs], as of `SeatSettings`; None: all negative


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step's flat arrays on a rank: known tokens with the draft nodes joined on.

    Sequence i's query is its known chunk followed by its draft nodes. Draft node j of sequence
    i is `draft_tokens[draft_start[i] + j]` and attends to the whole context, to its chunk and to
    its own ancestors. Logit rows are, for each sampled sequence in order, the root's then the
    nodes': `rows` indexes them in the flat query.
    """

    step: int
    token_ids: IntArray  # [num_tokens], chunks with nodes
    positions: IntArray  # [num_tokens]
    slot_mapping: IntArray  # [num_tokens]
    query_start: IntArray  # [num_seqs + 1]
    context_lens: IntArray  # [num_seqs]
    block_tables: IntArray  # [num_seqs, max_blocks]
    samples: NDArray[np.bool_]  # [num_seqs]
    draft_tokens: IntArray  # [num_nodes], of all sequences
    draft_parents: IntArray  # [num_nodes], within the sequence; -1 is the root
    draft_start: IntArray  # [num_seqs + 1]
    draft_probs: DraftProbs | None  # rows of zeros for deterministic nodes
    rows: IntArray  # [num_rows]
    kv_moves: IntArray  # [num_moves, 2]
    sampling: SamplingRows
    num_window: IntArray | None = None  # [num_seqs], trailing nodes never accepted; None: none
    max_nodes: IntArray | None = None  # [num_seqs], nodes that the sequence might have drafted
    next_tokens: IntArray | None = None  # [num_seqs], the known token after the chunk; -1: none
    masks: Masks | None = None  # of constrained sequences, by logit row; None: there are none
    adapters: IntArray | None = None  # [num_seqs], 0: the model alone; None: of all
    seats: IntArray | None = None  # [num_seqs]; None: numbered in order
    # [num_loads, 2], (sequence, checkpoint that its state begins with)
    state_loads: IntArray = field(default_factory=NO_MOVES.view)
    # [num_saves, 3], (sequence, known tokens, checkpoint that takes the state behind them)
    state_saves: IntArray = field(default_factory=NO_SAVES.view)

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    @property
    def num_nodes(self) -> IntArray:  # [num_seqs]
        """Number of draft nodes of every sequence."""
        return lens_of(self.draft_start)

    @property
    def query_lens(self) -> IntArray:  # [num_seqs]
        """Number of tokens of every sequence, chunk and nodes."""
        return lens_of(self.query_start)

    @property
    def root_rows(self) -> IntArray:  # [num_seqs]
        """Flat row of every chunk's last token; a sequence's nodes come after it."""
        return self.query_start[1:] - 1 - self.num_nodes


# Answers of the ranks: accepted tokens, and a head's next drafts.


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of emitted tokens under the model's own distribution."""

    chosen: FloatArray  # [num_emitted]
    top_ids: IntArray  # [num_emitted, top]
    top: FloatArray  # [num_emitted, top]
    ranks: IntArray  # [num_emitted], of the chosen among the vocabulary; the most likely has 1

    @property
    def columns(self) -> tuple[FloatArray, IntArray, FloatArray, IntArray]:
        return self.chosen, self.top_ids, self.top, self.ranks

    def part(self, begin: int, end: int) -> Logprobs:
        """The part for tokens [begin, end)."""
        some = slice(begin, end)
        return Logprobs(self.chosen[some], self.top_ids[some], self.top[some], self.ranks[some])

    def by_token(self, num_top: int | None = None) -> tuple[TokenLogprobs, ...]:
        """Yields one entry per token, with `num_top` alternatives each (None: all)."""
        tops = zip(self.top_ids[:, :num_top].tolist(), self.top[:, :num_top].tolist(), strict=True)
        return tuple(
            TokenLogprobs(chosen, tuple(zip(ids, values, strict=True)), rank)
            for chosen, (ids, values), rank in zip(
                self.chosen.tolist(), tops, self.ranks.tolist(), strict=True
            )
        )


@dataclass(frozen=True, slots=True)
class NextDrafts:
    """A head's drafts for the next step.

    Sequence i's tree is `tokens[start[i]:start[i+1]]`; it follows `lens[i]` known tokens and is
    stale once more tokens are known.
    """

    tokens: IntArray  # [num_nodes], of all sequences
    parents: IntArray  # [num_nodes], within the sequence; -1 is the root
    start: IntArray  # [num_seqs + 1]
    lens: IntArray  # [num_seqs]
    error: str = ""  # why the head failed, if it did
    chances: FloatArray | None = None  # [num_nodes], as `Draft.chances`

    @classmethod
    def empty(cls, num_seqs: int, error: str = "") -> NextDrafts:
        """No guess for any sequence."""
        none, starts = ints([]), np.zeros(num_seqs + 1, dtype=np.int32)
        return cls(none, none, starts, starts[1:], error)


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """Threads that rank 0 uses for steps of `min_tokens` or more tokens, and measured times."""

    min_tokens: int
    num_threads: int  # threads that most such steps use
    one_ms: float  # time with one thread
    all_ms: float  # time with all threads of the rank


@record
class Verdict:
    """The outcome of a step. Sequence i emits `emitted[emitted_start[i]:emitted_start[i+1]]`.

    `num_accepted[i] = num_emitted - 1` (0 when nothing was sampled) excludes the bonus token;
    the accepted node ids are `path[path_start[i]:path_start[i+1]]`, root to leaf.
    """

    step: int
    emitted: IntArray  # [num_emitted], of all sequences
    emitted_start: IntArray  # [num_seqs + 1]
    path: IntArray  # [num_accepted], of all sequences
    path_start: IntArray  # [num_seqs + 1]
    logprobs: Logprobs | None = None
    forward_ms: float = 0.0
    window: IntArray | None = None  # [num_window], most likely token after each window node
    window_start: IntArray | None = None  # [num_seqs + 1]
    next_drafts: NextDrafts | None = None  # with a head inside the workers
    prompt_logprobs: Logprobs | None = None  # of `SamplingRows.num_prompt_logprobs`' rows
    compacted: bool = False  # the ranks have moved the accepted nodes' keys and values into place
    thread_choices: tuple[ThreadChoice, ...] | None = None  # on a CPU, when they have changed
    pooled: FloatArray | None = None  # [num_pooled, width], embeddings or scores
    pooled_rows: IntArray = field(default_factory=NO_INTS.view)  # [num_pooled], of the batch

    @classmethod
    def empty(cls, step: int, num_seqs: int) -> Verdict:
        """The verdict on a step in which no sequence was sampled."""
        none, starts = ints([]), np.zeros(num_seqs + 1, dtype=np.int32)
        return cls(step, none, starts, none, starts)

    @property
    def num_accepted(self) -> IntArray:  # [num_seqs]
        return lens_of(self.path_start)

    @property
    def num_emitted(self) -> IntArray:  # [num_seqs]
        return lens_of(self.emitted_start)

    def accepted_rows(self, step: StepInput) -> IntArray:  # [num_accepted], of all sequences
        """Flat rows of the accepted nodes."""
        return np.repeat(step.root_rows, self.num_accepted) + 1 + self.path

    def window_tokens(self, row: int) -> IntArray:
        """The target's most likely token after each of the row's window nodes."""
        if self.window is None or self.window_start is None:
            return ints([])
        return self.window[self.window_start[row] : self.window_start[row + 1]]

    def tokens(self, row: int) -> IntArray:
        return self.emitted[self.emitted_start[row] : self.emitted_start[row + 1]]

    def nodes(self, row: int) -> IntArray:
        return self.path[self.path_start[row] : self.path_start[row + 1]]


# Deltas, which the edge streams: one request's tokens from one step, and their statistics.


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one emitted token, with the most likely alternatives."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first
    rank: int | None = None  # rank in the vocabulary; 1 is the most likely token


@record
class SpeculationUsage:
    """Speculation statistics of one request so far."""

    drafter: str = "none"  # the last one that proposed, or else the last one that was asked
    num_steps: int = 0  # target steps that emitted tokens
    num_drafts: int = 0  # drafts with at least one guess
    num_draft_tokens: int = 0  # guesses, without the nodes of lookahead windows
    num_accepted_tokens: int = 0
    synthetic: bool = False  # whether acceptance was simulated and not decided by the target

    @property
    def mean_accepted_len(self) -> float:
        """Accepted draft tokens per step; 0 before the first."""
        return self.num_accepted_tokens / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The guesses of one request's draft in one step, and which of them were accepted."""

    tokens: tuple[int, ...]  # [num_guesses]
    parents: tuple[int, ...]  # [num_guesses]; -1 is the root
    origins: tuple[str, ...]  # [num_guesses], name of the drafter
    path: tuple[int, ...]  # [num_accepted], accepted guesses, root to leaf


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times before a request's first token, on the engine's clock."""

    queue_s: float  # from arrival to the seat
    prefill_s: float  # from the seat to the first token


@record
class Delta:
    """One request's output from one step. `finish_reason` is None while it runs."""

    request_id: str
    token_ids: tuple[int, ...]
    num_accepted: int = 0  # number of leading tokens that came from the draft
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_token_id: int | None = None  # the end token that stopped it, if one did
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    usage: SpeculationUsage | None = None  # totals so far
    error: str | None = None
    # For all prompt tokens but the first; sent with the first tokens, if the request asks for them.
    prompt_logprobs: Logprobs | None = None
    trace: StepTrace | None = None  # if the request asks for it
    times: RequestTimes | None = None  # with the first tokens
    pooled: FloatArray | None = None  # [width], the embedding or score that was asked for
    field: str | None = None  # on an error, the field of the request that caused it
    weight_version: str = ""  # version of the weights that made the tokens; "": the initial ones

    @property
    def failure(self) -> OutriderError:
        """The exception that the caller gets if `finish_reason` is "error"."""
        reason = self.error or "the step of this request failed"
        return InvalidRequestError(reason, field=self.field) if self.field else WorkerError(reason)


@dataclass(frozen=True, slots=True)
class JoinedDrafts:
    """The drafts of a step's sequences, end to end."""

    tokens: IntArray  # [num_nodes], of all sequences
    num_nodes: IntArray  # [num_seqs]
    parents: IntArray | None = None  # [num_nodes], within the sequence; None: chains only
    probs: DraftProbs | None = None  # rows of zeros for deterministic nodes
    num_window: IntArray | None = None  # [num_seqs], trailing nodes never accepted; None: none
    masks: Masks | None = None  # of constrained sequences, by logit row; None: there are none


@dataclass(frozen=True, slots=True)
class SeatSettings:
    """Sampling settings that are constant while a request keeps its seat."""

    seed: int
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    num_logprobs: int = -1  # -1 is none
    num_prompt_logprobs: int = -1  # for prompt tokens, until one is emitted; -1 is none
    min_tokens: int = 0  # `ends` may not be sampled before so many
    ends: IntArray = field(default_factory=NO_INTS.view)  # [num_ends]; empty without min_tokens
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: IntArray = field(default_factory=NO_INTS.view)  # [num_biased]
    bias_values: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))  # alike
    adapter: str = ""  # name of the LoRA adapter; empty: none
    pools: bool = False  # whether it asks for an embedding or score
    min_prob: float = -1.0  # `SpeculationOptions.min_prob`, for a head; negative: the head's own

    @classmethod
    def of(cls, request: Request) -> SeatSettings:
        """The settings that the target's ranks keep for a request."""
        sampling = request.sampling
        biases, least = sampling.logit_bias, request.speculation.min_prob
        return cls(
            seed=request.seed,
            temperature=sampling.temperature,
            top_k=max(0, sampling.top_k),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            num_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            num_prompt_logprobs=(
                -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
            ),
            min_tokens=request.min_tokens,
            ends=ints(sorted(request.ends) if request.min_tokens else []),
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            bias_ids=ints(list(biases)),
            bias_values=np.array(list(biases.values()), dtype=np.float32),
            adapter=request.adapter,
            pools=request.pools,
            min_prob=-1.0 if least is None else least,
        )

    @classmethod
    def for_drafting(cls, request: Request) -> SeatSettings:
        """The settings by which a draft model draws: cuts and noise, without edits by history."""
        full = cls.of(request)
        return cls(full.seed, full.temperature, full.top_k, full.top_p, full.min_p)

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class Opening:
    """A request takes a seat, which replaces the seat's former request."""

    seat: int
    tokens: IntArray  # [num_tokens], all that are known
    num_prompt: int  # number of leading tokens that are the prompt
    settings: SeatSettings


@record
class StepPlan:
    """The message of a step to every rank: differences, by seat.

    A rank keeps a request's tokens, block table and settings under its seat (`workers/seats.py`),
    so the size of the message does not depend on context lengths. Sequence i computes the known
    tokens `[context_lens[i], context_lens[i] + chunk_lens[i])` and then its draft nodes.
    """

    step: int
    seats: IntArray  # [num_seqs]
    context_lens: IntArray  # [num_seqs], tokens in the KV cache; -1: all but the seat's last token
    chunk_lens: IntArray  # [num_seqs], known tokens to compute
    max_nodes: IntArray  # [num_seqs], slots reserved for draft nodes
    tokens: IntArray  # [num_new], known since the seats' last plan: up to the ends of the chunks
    blocks: IntArray  # [num_blocks, 3], new in block tables: (seat, index, block)
    kv_moves: IntArray  # [num_moves, 2], (source slot, destination slot), before the forward
    openings: tuple[Opening, ...] = ()
    closings: IntArray = field(default_factory=NO_INTS.view)  # [num_closed], seats
    drafts: JoinedDrafts | None = None  # None: no sequence has nodes or masks
    thinking: NDArray[np.bool_] | None = None  # [num_seqs], the root is in a thinking phase
    own_drafts: bool = False  # ranks use their own drafts, up to `max_nodes`; `drafts` is None
    num_kept: int = -1  # nodes of all next drafts that ranks keep, the likeliest; -1: all with room
    appends: bool = False  # ranks append what they emit to the seats; it is not sent again
    # As in `StepInput`.
    state_loads: IntArray = field(default_factory=NO_MOVES.view)  # [num_loads, 2]
    state_saves: IntArray = field(default_factory=NO_SAVES.view)  # [num_saves, 3]

    @property
    def num_tokens(self) -> int:
        """Number of rows of the forward: chunks and nodes."""
        num_nodes = 0 if self.drafts is None else len(self.drafts.tokens)
        return int(self.chunk_lens.sum()) + num_nodes


@record
class Batch:
    """One step as the engine plans it; drafts are added later.

    `samples[i]` says that the chunk ends with the last known token (the root), so that a token is
    emitted; only then is `max_nodes[i]` above zero.
    """

    request_ids: tuple[str, ...]
    plan: StepPlan  # without drafts
    samples: NDArray[np.bool_]  # [num_seqs]
    max_depth: IntArray  # [num_seqs], deeper guesses could not be emitted
    # [num_seqs], prompt tokens that the step gives log-probabilities of; None: of none
    num_scored: IntArray | None = None
    # [num_seqs], of `max_nodes`, those that drafters may use; None: all. Predictions may use more.
    drafter_nodes: IntArray | None = None

    @property
    def step(self) -> int:
        return self.plan.step

    @property
    def num_seqs(self) -> int:
        return len(self.request_ids)

    @property
    def num_tokens(self) -> int:
        """Number of known tokens that the step computes."""
        return int(self.plan.chunk_lens.sum())

    @property
    def most_tokens(self) -> int:
        """`num_tokens` plus the draft nodes that the step has room for."""
        return self.num_tokens + int(self.plan.max_nodes.sum())

    @property
    def max_nodes(self) -> IntArray:  # [num_seqs]
        return self.plan.max_nodes

    @property
    def known_lens(self) -> IntArray:  # [num_seqs]
        """Number of tokens in the KV cache after the step, without draft nodes."""
        return self.plan.context_lens + self.plan.chunk_lens
