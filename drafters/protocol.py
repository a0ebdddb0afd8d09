"""The drafter interface: methods, needs, and statistics.

One file per drafter derives from `Drafter`; `drafting.py` calls, times and guards all of them.
Statistics have the names and format of llama.cpp's (`common/speculative.cpp`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..scheduler import tree
from ..scheduler.timer import Clock, Histogram
from ..scheduler.types import (
    Batch,
    Draft,
    DraftProbs,
    FloatArray,
    IntArray,
    JoinedDrafts,
    NextDrafts,
    Request,
    StepPlan,
    Verdict,
    ints,
)
from .lookup.pool import PoolLink

log = logging.getLogger(__name__)

# Messages between a drafter and its model in the workers: draft models and separate heads.


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One round of a draft model: compute committed tokens, then draw `max_nodes` tokens each.

    The plan uses the draft model's seats, without draft nodes; a sequence's drafted tokens use the
    slots after its known ones. Sampling settings are the target's, since coupled draws only agree
    under equal settings.
    """

    plan: StepPlan  # its `max_nodes` [num_seqs]: tokens to draw; 0: only compute known tokens
    probs_top: int  # width of the distributions to return; 0: only tokens, with coupled noise
    salted: bool = False  # use different noise in every round; only with distributions
    p_min: float = 0.0  # a chain ends where its likeliest token is less probable
    min_probs: FloatArray | None = None  # [num_seqs], replaces `p_min`; None: not given
    # Stands for tokens that are not drawn yet, so that a chain takes one forward; None: one forward
    # per token.
    mask_token: int | None = None
    # Instead draws the chains of the next round, behind likely outcomes of the plan's drafts.
    preparation: Preparation | None = None
    continuation: Continuation | None = None  # requires `preparation`

    @property
    def ends_early(self) -> bool:
        """Whether a chain may end before `max_nodes`."""
        return self.p_min > 0 or self.min_probs is not None

    def least_probs(
        self,
        seqs: NDArray[np.signedinteger],  # [num_rows]
    ) -> FloatArray:  # [num_rows]
        """Returns, per sequence, the probability that the likeliest token needs to continue."""
        if self.min_probs is None:
            return np.full(len(seqs), self.p_min, dtype=np.float32)
        return self.min_probs[seqs]


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a model draws after the verdict on a prepared round, before it is asked.

    The verdict comes from the target's rank 0. Chains are drawn for sequences whose outcome was not
    prepared. The next request uses only those drawn for the same tokens in the same blocks, so no
    verdict and no order of messages changes an answer.
    """

    step: int  # the target's step of the verdict
    rows: IntArray  # [num_seqs], rows of that step
    max_nodes: IntArray  # [num_seqs], tokens to draw
    room: IntArray  # [num_seqs], slots after the known tokens
    least: int  # minimum number of sequences without a draft for which anything is drawn

    def of(self, seqs: NDArray[np.signedinteger]) -> Continuation:  # [num_some]
        """Returns the continuation of some sequences."""
        return replace(
            self, rows=self.rows[seqs], max_nodes=self.max_nodes[seqs], room=self.room[seqs]
        )


@dataclass(frozen=True, slots=True)
class Preparation:
    """The outcomes of a round that the model prepares, and their weights.

    An outcome is the number of accepted nodes of the plan's chain, and the bonus token. Its weight
    is the probability of that number times that of that token. Each is the mean of the measured
    rate and the probability in the model's own distribution.
    """

    depth: int  # maximum number of tokens drawn per outcome
    num_outcomes: IntArray  # [num_seqs], maximum per sequence
    reach: IntArray  # [num_seqs], tokens after the known ones that may still be drafted
    accept_rates: FloatArray  # [max_nodes], for a node whose predecessors were accepted
    # [2, num_ranks], how often the bonus token has a rank: after a rejection, after a whole chain
    rank_rates: FloatArray
    shares_noise: bool  # the bonus token is drawn with noise that the model knows
    # [num_seqs, 2]: index of this model among those that prepare a sequence, and their number.
    # Model i of n prepares the outcomes i, i + n, ...; None: it is the only model.
    shares: IntArray | None = None
    num_rows: IntArray | None = None  # [num_seqs], tokens of all outcomes; None: each has `depth`

    def of(self, seqs: NDArray[np.signedinteger]) -> Preparation:  # [num_some]
        """Returns the preparation of some sequences."""
        parts = {
            name: part[seqs]
            for name in ("num_outcomes", "reach", "shares", "num_rows")
            if (part := getattr(self, name)) is not None
        }
        return replace(self, **parts)

    def lens(
        self,
        seqs: NDArray[np.signedinteger],  # [num_outcomes], ascending
        num_accepted: NDArray[np.signedinteger],  # [num_outcomes]
        chances: NDArray[np.floating],  # [num_outcomes]
    ) -> IntArray:  # [num_outcomes]
        """Returns the tokens to draw behind each outcome: those most likely to be accepted.

        A token is accepted if its outcome occurs and the tokens before it are accepted. The
        probability never rises along a chain, so the best tokens form prefixes of chains.
        """
        room = np.clip(self.reach[seqs] - num_accepted - 1, 0, self.depth)
        if self.num_rows is None:
            return ints(room)
        levels = np.arange(self.depth)
        rates = self.accept_rates[np.minimum(levels, len(self.accept_rates) - 1)]
        worth = np.where(levels < room[:, None], np.outer(chances, np.cumprod(rates)), 0.0).ravel()
        owner = seqs.repeat(self.depth)
        best = np.lexsort((-worth, owner))
        place = np.arange(len(owner)) - np.searchsorted(owner, owner)
        num_rows = self.num_rows if self.shares is None else self.num_rows * self.shares[:, 1]
        taken = best[(place < num_rows[owner]) & (worth[best] > 0)]
        return ints(np.bincount(taken // self.depth, minlength=len(seqs)))


def blocks_per_outcome(depth: int, block_size: int) -> int:
    """Returns the KV blocks that the bonus token and all drafted tokens except the last may use."""
    return (block_size + depth - 2) // block_size + 1


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes that a draft model prepared; outcome i belongs to sequence `seqs[i]`."""

    seqs: IntArray  # [num_outcomes], ascending
    num_accepted: IntArray  # [num_outcomes]
    bonus: IntArray  # [num_outcomes]
    ranks: IntArray  # [num_outcomes], rank of the bonus token among the candidates at its position


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft model's chains: `tokens[start[i]:start[i+1]]` belong to sequence i, or outcome i."""

    tokens: IntArray  # [num_drawn], of all chains
    start: IntArray  # [num_chains + 1]
    probs: DraftProbs | None
    forward_ms: float = 0.0
    step: int = -1  # step of the request's plan
    outcomes: Outcomes | None = None  # of a preparation
    load: float = 0.0  # share of the last second that the model drafted for other engines
    sent_bytes: int = 0  # of the request; both are 0 within one process
    received_bytes: int = 0  # of this answer
    num_begun: int = 0  # chains that were drawn on the verdict, before the request arrived
    begun_ms: float = 0.0  # time of such chains since the last answer, whether or not they are used


@dataclass(frozen=True, slots=True)
class HeadAsk:
    """Requests a separate head's drafts after a verified step.

    The verdict and the features reach the head from the target's worker.
    """

    step: int
    wait_s: float  # longest wait for the features
    wanted: NDArray[np.bool_] | None = None  # [num_seqs], which sequences draft; None: all
    # Instead prepares drafts behind likely outcomes of the next round, whose chains these are.
    chains: JoinedDrafts | None = None
    preparation: Preparation | None = None  # by sequence of the step


@dataclass(frozen=True, slots=True)
class HeadAnswer:
    """A separate head's answer to a `HeadAsk`."""

    step: int
    drafts: NextDrafts | None  # None: no features to draft from
    error: str = ""  # why there are no drafts
    linked: bool = True  # whether the link to the target's worker is open
    took_s: float = 0.0  # from request to answer, measured in the head's worker
    is_preparation: bool = False
    drafted: Drafted | None = None  # prepared drafts


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter requires of the engine."""

    shape: Literal["chain", "tree"] = "chain"  # the largest draft shape that it proposes
    probabilities: bool = False  # whether drafts can carry the distributions they were drawn from


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a drafter drafts, and why not; idle: it rests, or its group is scaled to zero."""

    state: Literal["active", "idle", "late", "down", "disabled"] = "active"
    reason: str = ""


class Drafter:
    """Proposes drafts for the target to verify. An exception only costs drafts.

    A drafter overrides the methods that it needs.
    """

    name: str
    needs = Needs()
    takes_min_prob = False  # whether a request's `min_prob` ends its drafts
    members: Sequence[Any] = ()  # the `Drafting` of each of its drafters, if it is a composition
    cache_counts: CacheCounts | None = None  # of its speculation cache, if it has one
    link_counts: LinkCounts | None = None  # of its messages, if its model has its own workers

    def open(self, requests: Sequence[Request]) -> None:
        """Called before requests are first served; `prompt` and `emitted` are set."""

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        """Returns one draft per row, of at most `budgets[row]` nodes; `EMPTY` for no guess.

        Guesses deeper than `batch.max_depth[row]` are dropped; a chain's budget never exceeds it.
        """
        return [tree.EMPTY] * batch.num_seqs

    def extend(
        self, batch: Batch, chains: Sequence[Sequence[int]], budgets: IntArray
    ) -> list[Draft]:
        """Does the same as `propose`, for text that continues the known tokens by `chains[row]`."""
        return [tree.EMPTY] * batch.num_seqs

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Called with the target's verdict: append emitted tokens, rewind rejected ones."""

    def close(self, request_ids: Sequence[str]) -> None:
        """Called when requests are finished; frees their state."""

    def begin_anew(self) -> None:
        """Called when all requests have ended: resets counts."""

    def detach(self) -> None:
        """Called in the engine's thread before `shutdown`, while the target keeps running."""

    def shutdown(self) -> None:
        """Frees all resources."""

    def health(self) -> Health:
        """Returns the state of its workers, if it has any; called from any thread."""
        return Health()


class MissedDeadlineError(TimeoutError):
    """A drafter's workers have not answered in time, for example because they are stopped."""


LEAST_WAIT_S, SHORT_WAIT_S = 0.1, 0.25
_TIMES = 5  # multiple of the time of drafts that were in time
_NUM_WAITS = 64
_FEW_WAITS = 16  # too few to estimate how long drafts take
_NUM_STEPS = 8


class DraftWait:
    """How long a step waits for drafts.

    It is `draft_timeout_s` if set. Otherwise, it is a multiple of the time that steps have waited
    for drafts that arrived, from `least_s` to `short_s`, or the time of a target's step if that is
    longer: a draft that takes longer than a step seldom pays. The time of a step is the shortest of
    the last ones, so that a long prompt or a target that hangs does not count.
    """

    least_s, short_s = LEAST_WAIT_S, SHORT_WAIT_S

    def __init__(self, configured_s: float | None) -> None:
        self._configured_s = configured_s
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._waits_s: deque[float] = deque(maxlen=_NUM_WAITS)
        self._proposed_at: float | None = None
        self.seconds = self.short_s if configured_s is None else configured_s

    def proposed(self, now_s: float) -> None:
        """Records that the target starts to compute the step."""
        self._proposed_at = now_s

    def observed(self, now_s: float) -> None:
        """Records that the verdict has arrived."""
        if self._configured_s is not None or self._proposed_at is None:
            return
        self._steps_s.append(now_s - self._proposed_at)
        self._proposed_at = None
        self._derive()

    def waited(self, waited_s: float) -> None:
        """Records how long a step has waited for a draft, or would have, up to the longest wait."""
        if self._configured_s is None and waited_s <= self.short_s:
            self._waits_s.append(waited_s)
            self._derive()

    def _derive(self) -> None:
        self.seconds = self.short_s
        if len(self._waits_s) >= _FEW_WAITS:
            self.seconds = min(self.short_s, max(self.least_s, _TIMES * max(self._waits_s)))
        if len(self._steps_s) == _NUM_STEPS:
            self.seconds = max(self.seconds, min(self._steps_s))


class OwnWorkers:
    """Base of drafters whose model has its own workers, which may be slow or lost."""

    _model: Any  # `DraftModel` or `HeadModel`
    wait: DraftWait
    clock: Clock = time.monotonic  # of deadlines; a simulation sets its own
    _late = False  # a deadline was missed: no step waits until an answer is in time
    _missed_at: float | None = None  # by the clock; the answer that missed it has not arrived
    _down = ""  # why the workers are lost
    _misfit = ""  # why restarted workers are not used

    @property
    def _timeout_s(self) -> float:
        """How long a step waits for drafts."""
        return self.wait.seconds

    def health(self) -> Health:
        if self._misfit:
            return Health("down", self._misfit)
        if self._down:
            return Health("down", f"restarted in the background: {self._down}")
        if self._late:
            return Health(
                "late",
                f"no draft within {self._timeout_s:g} s (draft_timeout_s); steps run without "
                "drafts until one is in time",
            )
        return Health()

    def shutdown(self) -> None:
        self._model.shutdown()

    def _missed(self) -> MissedDeadlineError:
        """Returns the error of a missed deadline, which is raised once."""
        self._late, self._missed_at = True, self.clock()
        return MissedDeadlineError(
            f"no draft within {self._timeout_s:g} s (draft_timeout_s); steps run without drafts"
        )

    def _learn_wait(self, waited_s: float) -> None:
        """Records an answer for which a step waited, or which missed its deadline.

        Further answers after a missed deadline are not informative, since the model is catching up.
        """
        if not self._late:
            self.wait.waited(waited_s)
        elif self._missed_at is not None:
            self.wait.waited(self._timeout_s + self.clock() - self._missed_at)
        self._missed_at = None

    def _recovered(self) -> bool:
        """Returns True if the model is up again; its cache is then empty."""
        try:
            is_up = self._model.revive()
        except ConfigError as misfit:
            if self._misfit != misfit.message:
                log.warning("drafter %s: %s", self.name, misfit.message)  # type: ignore[attr-defined]
            self._misfit = misfit.message
            return False
        if is_up:
            self._down = self._misfit = ""
            log.info("drafter %s is available again", self.name)  # type: ignore[attr-defined]
        return not self._down


class NoDrafter(Drafter):
    """No speculation: proposes nothing, so that the loop needs no special case."""

    name = "none"


class DraftFault(Exception):
    """A partial failure; `drafts` are still valid.

    A drafter raises it so that a fault is counted and logged, with its cause, without losing the
    drafts of other requests.
    """

    def __init__(self, message: str, drafts: list[Draft] | None = None) -> None:
        super().__init__(message)
        self.drafts = drafts


class DraftModel(Protocol):
    """A draft model behind a channel, in its own workers or in the target's."""

    vocab_size: int
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    reads_verdicts: bool  # whether the target's rank 0 sends it every verdict

    def ask(self, step: DraftStep) -> None:
        """Requests a round: compute known tokens, draw chains. One request at a time.

        Raises:
            WorkerDiedError: the model is gone.
        """

    def answer(self, timeout_s: float) -> Drafted | None:
        """Returns the chains; None if a separate model has not answered yet.

        Raises:
            WorkerError: the model raised; nothing was drawn.
            WorkerDiedError: the model is gone.
        """

    def revive(self) -> bool:
        """Returns True if the model is up; otherwise starts its restart, with an empty cache.

        Raises:
            ConfigError: the restarted model is smaller than the one the drafter was made for.
        """

    def detach(self) -> None:
        """Stops the target from sending verdicts to it."""

    def shutdown(self) -> None:
        """Shuts its workers down, if it owns them."""


class DraftMembers(Protocol):
    """The members of a drafter group of the cluster: each is a draft model that engines share."""

    folder: str  # of the draft model; this node need not have it
    vocab_size: int
    reason: str  # why none of them is used; "": no reason
    num_members: int  # members of the group, up or not
    num_requests: int  # output: requests of the engine, by which the group is scaled

    def changes(self) -> Sequence[tuple[str, DraftModel | None]]:
        """Returns members by id that have joined, or left (None), since the last call."""

    def shutdown(self) -> None:
        """Stops looking for members; the caller shuts down those that joined."""


class HeadModel(Protocol):
    """A head in its own workers; features reach it directly from the target's workers."""

    @property
    def num_outstanding(self) -> int:
        """Unanswered requests; 0 after the head died."""

    def ask(self, ask: HeadAsk) -> None:
        """Requests drafts after a step, without waiting.

        Raises:
            WorkerDiedError: the head is gone, or not linked.
        """

    def answer(self, timeout_s: float) -> HeadAnswer | None:
        """Returns the answer to the oldest request; None if there is none within `timeout_s`.

        Raises:
            WorkerError: the head raised; that request has no answer.
            WorkerDiedError: the head is gone.
        """

    def revive(self) -> bool:
        """Returns True if the head is up and linked; otherwise starts a restart or opens a link."""

    def detach(self) -> None:
        """Closes the link to the target for good."""

    def shutdown(self) -> None:
        """Shuts its workers down."""


class DraftHost(Protocol):
    """Starts the models that drafters need; implemented by the engine."""

    vocab_size: int  # of the target
    tokenizer: Path  # folder of the target's tokenizer

    def draft_model(self, config: Any) -> DraftModel:
        """Returns the draft model of a configuration section.

        Raises:
            ConfigError: the model does not exist or does not fit the target.
        """

    def draft_members(self, config: Any) -> DraftMembers:
        """Returns the drafter group that a configuration section names.

        Raises:
            ConfigError: there is no such group, or it does not fit the target.
        """

    def head_model(self, config: Any) -> HeadModel:
        """Returns the separate head of a configuration section.

        Raises:
            CheckpointError: its tensors are missing, superfluous or of the wrong shape.
        """

    def pool_link(self, config: Any) -> PoolLink:
        """Returns the link to the shared pool of a configuration section.

        Raises:
            PoolSnapshotError: the initial snapshot is malformed or of another vocabulary.
        """


@dataclass(slots=True)
class CacheCounts:
    """Counts of a speculation cache's preparations and look-ups (one per request and step).

    `draft_ms` is the model's time, and `waited_ms` the part for which steps waited. `saved_ms`
    estimates the time that the same steps would have waited for unprepared drafts.
    """

    num_rounds: int = 0  # prepared
    num_lookups: int = 0
    num_hits: int = 0
    num_unprepared: int = 0  # look-ups of an outcome that was not prepared
    num_stale: int = 0  # look-ups whose entry belonged to another state of the request
    num_absent: int = 0  # look-ups without an entry: the first of a request, late or lost
    num_outcomes: int = 0  # prepared
    num_tokens: int = 0  # prepared
    num_used_tokens: int = 0  # prepared tokens that were drafted
    num_waited_drafts: int = 0  # rounds in which a step waited for a draft after a miss
    num_begun: int = 0  # drafts after a miss that the model began on the target's verdict
    num_dropped: int = 0  # answers without an open request
    draft_ms: float = 0.0
    waited_ms: float = 0.0
    missed_ms: float = 0.0  # waited for drafts after a miss
    hidden_ms: float = 0.0  # of preparations, during which no step waited
    saved_ms: float = 0.0


_LINK_BOUNDS_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0,
)  # fmt: skip
_LINK_BOUNDS = (256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)


class LinkCounts:
    """Counts of an engine's messages to a draft model in its own workers, and of the answers.

    A message has the tokens of the last verdict and requests drafts. Times are those of answers for
    which a step waited, from the request on, without the model's own time; the arrival of other
    answers is not observed.
    """

    def __init__(self) -> None:
        self.sent_bytes, self.received_bytes = Histogram(_LINK_BOUNDS), Histogram(_LINK_BOUNDS)
        self.link_s = Histogram(_LINK_BOUNDS_S)

    def count(self, drafted: Drafted, took_s: float | None) -> None:
        """Counts an answer, and its time since the request; None: unknown."""
        self.sent_bytes.observe(drafted.sent_bytes)
        self.received_bytes.observe(drafted.received_bytes)
        if took_s is not None:
            self.link_s.observe(max(0.0, took_s - drafted.forward_ms / 1e3))

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values: histograms by name."""
        return {name: counted.as_dict() for name, counted in vars(self).items()}


@dataclass(slots=True)
class DrafterStats:
    """Counts and times of one drafter; a call is one request in one method."""

    num_calls: list[int] = field(default_factory=lambda: [0, 0, 0])  # begin, generate, accept
    num_gen_drafts: int = 0
    num_acc_drafts: int = 0
    num_gen_tokens: int = 0
    num_acc_tokens: int = 0
    num_expected_tokens: float = 0.0  # accepted, by the drafter's own estimates; 0: it makes none
    acc_tokens_per_pos: list[int] = field(default_factory=list)
    begin_ms: float = 0.0
    gen_ms: float = 0.0
    acc_ms: float = 0.0
    faults: int = 0
    num_chosen: int = 0  # requests that a composition's mode `choose` assigned to it
    tokens_per_s: float = 0.0  # of these, as that mode measures it
    speculation_cache: CacheCounts | None = None  # of drafters that have one
    link: LinkCounts | None = None  # likewise

    def count_accepted(self, num_accepted: int) -> None:
        """Counts one verified draft."""
        if num_accepted == 0:
            return
        self.num_acc_drafts += 1
        self.num_acc_tokens += num_accepted
        missing = num_accepted - len(self.acc_tokens_per_pos)
        self.acc_tokens_per_pos += [0] * max(0, missing)
        for position in range(num_accepted):
            self.acc_tokens_per_pos[position] += 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"link": None if self.link is None else self.link.as_dict()}

    def lines(self, name: str) -> list[str]:
        """Returns the two lines that llama-server prints for a drafter."""
        rate = self.num_acc_tokens / self.num_gen_tokens if self.num_gen_tokens else 0.0
        begin, generate, accept = self.num_calls
        return [
            f"draft acceptance rate = {rate:.5f} ({self.num_acc_tokens:5d} accepted / "
            f"{self.num_gen_tokens:5d} generated)",
            f"statistics {name}: #calls(b,g,a) = {begin} {generate} {accept}, "
            f"#gen drafts = {self.num_gen_drafts}, #acc drafts = {self.num_acc_drafts}, "
            f"#gen tokens = {self.num_gen_tokens}, #acc tokens = {self.num_acc_tokens}, "
            f"dur(b,g,a) = {self.begin_ms:.3f}, {self.gen_ms:.3f}, {self.acc_ms:.3f} ms",
        ]
