"""The only module that calls drafters: it counts, times and validates, and it never raises.

A drafter that raises loses its tokens for that step. Only the malformed or oversized draft is
dropped. Nodes deeper than the request can still emit are removed. Every fault is counted; the first
of its kind is logged with its traceback. The loop holds one `Drafting`, `Compose` one per member.

Predictions by clients take precedence over all drafters and need none: `WithPredictions`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, TypeVar

import numpy as np

from ..config import SpeculationBase
from ..errors import WorkersReplacedError
from ..scheduler import tree
from ..scheduler.types import Batch, Draft, DraftProbs, IntArray, Request, Verdict, ints
from .head_drafters import Colocated
from .lookup.prediction import predictions
from .protocol import (
    Drafter,
    DrafterStats,
    DraftFault,
    Health,
    MissedDeadlineError,
    NoDrafter,
)

log = logging.getLogger(__name__)


_MAX_STEPS = 64  # in flight: at least the number of a target's pipeline stages
_Kept = TypeVar("_Kept")


def remember(steps: dict[int, _Kept], step: int, kept: _Kept) -> None:
    """Keeps what was drafted for a step until it is observed; steps that failed never are."""
    steps[step] = kept
    if len(steps) > _MAX_STEPS:
        del steps[next(iter(steps))]


class AcceptanceGate:
    """TensorRT-LLM's acceptance gate: stops drafting permanently if it does not pay.

    Each finished request counts with the mean number of accepted tokens of its steps that had a
    draft. Once the last `acceptance_window` requests have a mean below the threshold, nothing is
    drafted until the engine is restarted.
    """

    def __init__(self, config: SpeculationBase) -> None:
        self._threshold = config.acceptance_length_threshold
        self._window: deque[float] = deque(maxlen=config.acceptance_window)
        self._accepted: dict[str, list[int]] = {}  # by request, tokens of each draft
        self._drafted: dict[int, set[str]] = {}  # by step in flight, requests with a draft
        self.reason = ""  # why it is closed; empty while it is open

    def proposed(self, batch: Batch, drafts: Sequence[Draft]) -> None:
        """Records the drafts that are verified next."""
        rows = zip(batch.request_ids, drafts, strict=True)
        found = {request_id for request_id, draft in rows if draft.num_guesses}
        remember(self._drafted, batch.step, found)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Records how many of their tokens the target accepted."""
        drafted = self._drafted.pop(batch.step, ())
        for row, request_id in enumerate(batch.request_ids):
            if request_id in drafted:
                self._accepted.setdefault(request_id, []).append(len(verdict.nodes(row)))

    def close(self, request_ids: Sequence[str]) -> None:
        """Records finished requests and closes the gate if acceptance is too low."""
        for request_id in request_ids:
            if accepted := self._accepted.pop(request_id, None):
                self._window.append(sum(accepted) / len(accepted))
        size = len(self._window)
        if not self.reason and size == self._window.maxlen:
            mean = sum(self._window) / size
            if mean < self._threshold:
                self.reason = (
                    f"the last {size} requests had {mean:.2f} tokens accepted a step, below "
                    f"acceptance_length_threshold = {self._threshold:g}"
                )
                log.warning("drafting ends: %s", self.reason)


# Validation: a batch of chains is checked at once; only if that fails is each draft checked alone,
# to find the reason. Rules that use the distributions of drawn nodes are exact only if those are
# correct, so inconsistent distributions are rejected.

MAX_SUM_ERROR = 1e-4  # of a distribution: far above float32's error, far below a truncated one's


def all_chains(drafts: list[Draft], budgets: IntArray, vocab_size: int) -> bool:
    """Returns True if all drafts are valid chains; checks the whole batch's tokens at once."""
    tokens: list[IntArray] = []
    drawn: list[Draft] = []
    for draft, budget in zip(drafts, budgets.tolist(), strict=True):
        if draft is tree.EMPTY:
            continue
        if type(draft) is not Draft or type(draft.source) is not str or draft.num_window != 0:
            return False
        ids, parents = draft.tokens, draft.parents
        if type(ids) is not np.ndarray or ids.ndim != 1 or len(ids) > budget:
            return False
        if parents is not tree.chain_parents(len(ids)) and not _is_chain(parents, len(ids)):
            return False
        if draft.chances is not None and _misjudged(draft):
            return False
        tokens.append(ids)
        if draft.probs is not None:
            drawn.append(draft)
    if not tokens:
        return True
    flat = np.concatenate(tokens)
    if flat.dtype != np.int32:
        return False
    # As unsigned numbers, negative tokens exceed every vocabulary.
    known = int(flat.view(np.uint32).max(initial=0)) < vocab_size
    return known and (not drawn or _all_drawn(drawn, vocab_size))


def _is_chain(parents: Any, count: int) -> bool:
    """Returns True if `parents` (any object) are those of a chain of `count` nodes."""
    is_array = _is_array(parents, 1, "i") and parents.dtype == np.int32
    return is_array and len(parents) == count and tree.is_chain(parents)


def problem(draft: Any, budget: int, vocab_size: int) -> str | None:
    """Returns why `draft` (any object) cannot be used; None if it can."""
    if not isinstance(draft, Draft):
        return f"expected a Draft, got {draft!r}"
    for name, part in (("tokens", draft.tokens), ("parents", draft.parents)):
        if not _is_array(part, 1, "i"):
            return f"{name} must be a 1-D int32 array, got {part!r}"
    if not isinstance(draft.source, str) or not isinstance(draft.num_window, (int, np.integer)):
        return f"expected str and int, got {draft.source=} and {draft.num_window=}"
    if draft.num_nodes > budget:
        return f"{draft.num_nodes} nodes exceed the budget of {budget}"
    return (
        _misshapen(draft)
        or _misjudged(draft)
        or tree.problem(draft, vocab_size)
        or (_misdrawn(draft.tokens, draft.probs, vocab_size, draft.num_guesses))
    )


def _all_drawn(drawn: list[Draft], vocab_size: int) -> bool:
    """Returns True if the distributions of well-formed chains, all drawn, are valid."""
    if any(_misshapen(draft) for draft in drawn):
        return False
    every = [draft.probs for draft in drawn if draft.probs is not None]
    if len({probs.ids.shape[1] for probs in every}) > 1:
        return False
    tokens = np.concatenate([draft.tokens for draft in drawn])
    ids, weights = [probs.ids for probs in every], [probs.probs for probs in every]
    joined = DraftProbs(np.concatenate(ids), np.concatenate(weights))
    return _misdrawn(tokens, joined, vocab_size, len(tokens)) is None


def _misjudged(draft: Draft) -> str | None:
    """Returns why the draft's estimates are malformed; None if they are not."""
    chances = draft.chances
    if chances is None:
        return None
    if not _is_array(chances, 1, "f") or len(chances) != draft.num_nodes:
        return f"chances must be an array of {draft.num_nodes} floats, got {chances!r}"
    if not bool(((chances >= 0) & (chances <= 1)).all()):
        return "chances must be from 0 to 1"
    return None


def _misshapen(draft: Draft) -> str | None:
    """Returns why the arrays of the draft's distributions are malformed; None if they are not."""
    probs = draft.probs
    if probs is None:
        return None
    if not isinstance(probs, DraftProbs) or not _is_array(probs.ids, 2, "i"):
        return f"probabilities must be `DraftProbs` with int32 ids, got {probs!r}"
    if not _is_array(probs.probs, 2, "f"):
        return f"probabilities must be a 2-D float32 array, got {probs.probs!r}"
    if probs.ids.shape != probs.probs.shape:
        return f"probabilities of shape {probs.probs.shape} for ids of {probs.ids.shape}"
    if len(probs.ids) != draft.num_nodes:
        return f"{draft.num_nodes} nodes but {len(probs.ids)} rows of probabilities"
    return None


def _misdrawn(
    tokens: IntArray,  # [num_nodes]
    probs: DraftProbs | None,
    vocab_size: int,
    num_guesses: int,
) -> str | None:
    """Returns why `tokens` cannot be drawn from `probs`; a row of zeros marks a fixed token."""
    if probs is None:
        return None
    weights = probs.probs
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        return "a probability is negative or not a number"
    if ((probs.ids < 0) | (probs.ids >= vocab_size)).any():
        return f"probabilities of tokens outside the vocabulary of {vocab_size}"
    weights, ids = weights[:num_guesses], probs.ids[:num_guesses]
    drawn = (weights > 0).any(axis=1)
    sums = weights.sum(axis=1, dtype=np.float64)
    bad = np.flatnonzero(drawn & (np.abs(sums - 1.0) > MAX_SUM_ERROR))
    if len(bad):
        return f"the probabilities of node {bad[0]} sum to {sums[bad[0]]:.6g}, not to 1"
    own = ((ids == tokens[:num_guesses, None]) & (weights > 0)).any(axis=1)
    bad = np.flatnonzero(drawn & ~own)
    if len(bad):
        return f"node {bad[0]} has token {tokens[bad[0]]}, which has probability 0 in its own row"
    return None


def _is_array(part: Any, num_dims: int, kind: str) -> bool:
    """Returns True if `part` is a plain array; a masked array would pass every comparison."""
    return type(part) is np.ndarray and part.ndim == num_dims and part.dtype.kind == kind


_FAILED: Final = object()  # result of a call that raised
_MAX_FAULT_CHARS: Final = 300
_MAX_LOGGED: Final = 32  # kinds of fault that are logged per drafter


class Drafting:
    """One drafter behind the methods of `Drafter` and the loop's protocol (`scheduler/loop.py`).

    Args:
        vocab_size: size of the target's vocabulary; drafts with other tokens are dropped.
        name: name in statistics; default: the drafter's own.
        section: the engine's section; its acceptance limits decide when drafting stops permanently.
        ranks_draft: whether the target's ranks keep the drafts of a head in them.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        name: str | None = None,
        section: SpeculationBase | None = None,
        *,
        ranks_draft: bool = False,
    ) -> None:
        self.drafter = drafter
        self.name = name or drafter.name
        self.is_idle = type(drafter) is NoDrafter  # its methods do nothing
        self.may_rest = True
        # Shortens a step's drafts by the estimated value of their nodes.
        self.shorten: Callable[[Batch, list[Draft]], list[Draft]] | None = None
        self.proposes_trees = drafter.needs.shape == "tree"
        self.stats = self._new_stats()
        self.rests = ""  # why its composition does not ask it for drafts
        self._no_guess = replace(tree.EMPTY, source=self.name)
        self._section = section
        self._gate = AcceptanceGate(section) if section and section.acceptance_window else None
        self._vocab_size = vocab_size
        self._colocated = drafter if ranks_draft and isinstance(drafter, Colocated) else None
        self._last_fault = ""
        self._drafted: list[Draft] = []  # drafts of the step that was drafted last
        # By step in flight: its drafts, and by row the remaining nodes if some were too deep.
        self._steps: dict[int, tuple[list[Draft], dict[int, IntArray]]] = {}
        self._logged: set[tuple[str, type[BaseException]]] = set()  # kinds of fault

    def begin_anew(self) -> None:
        """Resets all counts; all requests must have ended."""
        self._attempt("begin_anew", self.drafter.begin_anew)
        self.stats = self._new_stats()
        if self._section is not None and self._section.acceptance_window:
            self._gate = AcceptanceGate(self._section)

    def _new_stats(self) -> DrafterStats:
        counts = self.drafter.cache_counts, self.drafter.link_counts
        return DrafterStats(speculation_cache=counts[0], link=counts[1])

    def open(self, requests: Sequence[Request]) -> None:
        start = time.perf_counter()
        self.stats.num_calls[0] += len(requests)
        self._attempt("open", self.drafter.open, requests)
        self.stats.begin_ms += (time.perf_counter() - start) * 1e3

    @property
    def parts(self) -> Sequence[Drafting]:
        """The `Drafting` of each of its drafters: itself, or the members of a composition."""
        return self.drafter.members or (self,)

    def all_stats(self) -> dict[str, DrafterStats]:
        """Returns statistics by drafter."""
        return {each.name: each.stats for each in self.parts}

    def all_health(self) -> dict[str, dict[str, str]]:
        """Returns `state`, `reason`, and `last_fault` if there was one, by drafter.

        A gate of the whole composition stops all of its members.
        """
        closed = self._gate.reason if self._gate is not None else ""
        found: dict[str, dict[str, str]] = {}
        for member in self.drafter.members:
            found |= member.all_health()
        if not found:
            health = self.drafter.health()
            if self.rests and health.state == "active":
                health = Health("idle", self.rests)
            found[self.name] = {**asdict(health), "last_fault": self._last_fault}
        if closed:
            for each in found.values():
                each.update(state="disabled", reason=closed)
        return found

    def propose(self, batch: Batch, budgets: IntArray | None = None) -> list[Draft]:
        """Returns one draft per row, of at most `budgets[row]` nodes (None: `batch.max_nodes`).

        An empty draft of a row that had a budget has the drafter's name, so that a request's
        statistics name it although it proposed nothing.
        """
        self._drafted = [tree.EMPTY] * batch.num_seqs
        budgets = batch.plan.max_nodes if budgets is None else budgets
        if not any(budgets.tolist()) or (self._gate is not None and self._gate.reason):
            return self._drafted
        kept: dict[int, IntArray] = {}
        remember(self._steps, batch.step, (self._drafted, kept))
        if not self.proposes_trees:
            budgets = np.minimum(budgets, batch.max_depth)
        asked = int((budgets > 0).sum())
        if asked == 0:
            return self._drafted
        start = time.perf_counter()
        self.stats.num_calls[1] += asked
        drafts = self._attempt("propose", self.drafter.propose, batch, budgets)
        if drafts is not _FAILED:
            drafts = self._attempt("propose", self._checked, drafts, budgets)
        shorten = self.shorten
        if drafts is not _FAILED and shorten and any(d.chances is not None for d in drafts):
            drafts = self._attempt("propose", shorten, batch, drafts)
        if drafts is not _FAILED:
            self._drafted = self._pruned(drafts, batch, kept) if self.proposes_trees else drafts
            self._steps[batch.step] = self._drafted, kept
        self._count_drafted(batch)
        self.stats.gen_ms += (time.perf_counter() - start) * 1e3
        return [
            self._no_guess if draft is tree.EMPTY and budget else draft
            for draft, budget in zip(self._drafted, (budgets > 0).tolist(), strict=True)
        ]

    def extend(
        self, batch: Batch, chains: Sequence[Sequence[int]], budgets: IntArray
    ) -> list[Draft]:
        """Does the same as `propose` of the same step, for rows without a draft; see `Drafter`."""
        asked, none = int((budgets > 0).sum()), [tree.EMPTY] * batch.num_seqs
        if asked == 0:
            return none
        start = time.perf_counter()
        self.stats.num_calls[1] += asked
        drafts = self._attempt("extend", self.drafter.extend, batch, chains, budgets)
        if drafts is not _FAILED:
            drafts = self._attempt("extend", self._checked, drafts, budgets)
        drafts = none if drafts is _FAILED else drafts
        for row, draft in enumerate(drafts):
            if draft.num_nodes:
                self._drafted[row] = draft
                self.stats.num_gen_drafts += 1
                self.stats.num_gen_tokens += draft.num_guesses
        self.stats.gen_ms += (time.perf_counter() - start) * 1e3
        return list(drafts)

    @property
    def ranks_draft(self) -> bool:
        """Whether steps may be planned with the drafts that the target's ranks keep."""
        return self._colocated is not None and not (self._gate and self._gate.reason)

    def drafted(self, batch: Batch) -> list[Draft]:
        """Returns the drafts of a step that was planned with them, from the verdict before it."""
        assert self._colocated is not None, "such a step is planned only if the ranks draft"
        self._drafted = self._colocated.drafted(batch)
        remember(self._steps, batch.step, (self._drafted, {}))
        self.stats.num_calls[1] += int((batch.max_nodes > 0).sum())
        self._count_drafted(batch)
        return self._drafted

    def _count_drafted(self, batch: Batch) -> None:
        if self._gate is not None:
            self._gate.proposed(batch, self._drafted)
        counts = [draft.num_guesses for draft in self._drafted if draft is not tree.EMPTY]
        self.stats.num_gen_drafts += sum([count > 0 for count in counts])
        self.stats.num_gen_tokens += sum(counts)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        if self.is_idle:
            return
        start = time.perf_counter()
        if self._gate is not None:
            self._gate.observe(batch, verdict)
        if (found := self._steps.pop(batch.step, None)) is not None:
            ends = verdict.path_start.tolist()
            for row, draft in enumerate(found[0]):
                if draft is not tree.EMPTY and draft.num_guesses:
                    self.stats.num_calls[2] += 1
                    self.stats.num_expected_tokens += tree.num_expected(draft)
                    self.stats.count_accepted(ends[row + 1] - ends[row])
            if found[1]:
                verdict = _as_drafted(verdict, found[1])
        self._attempt("observe", self.drafter.observe, batch, verdict)
        self.stats.acc_ms += (time.perf_counter() - start) * 1e3

    def close(self, request_ids: Sequence[str]) -> None:
        if self._gate is not None:
            self._gate.close(request_ids)
        self._attempt("close", self.drafter.close, request_ids)

    def shutdown(self) -> None:
        self._attempt("shutdown", self.drafter.shutdown)

    def _attempt(self, verb: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the call's result; if it raised, the drafts of a `DraftFault` or `_FAILED`."""
        try:
            return call(*arguments)
        except Exception as error:
            if isinstance(error.__cause__ or error, WorkersReplacedError):  # it was requested
                log.info("drafter %s: %s", self.name, error.__cause__ or error)
                left = error.drafts if isinstance(error, DraftFault) else None
                return _FAILED if left is None else left
            self.stats.faults += 1
            cause = error.__cause__ or error
            self._last_fault = f"{verb}: {cause}"[:_MAX_FAULT_CHARS]
            kind = (verb, type(cause))
            is_new = kind not in self._logged and len(self._logged) < _MAX_LOGGED
            if is_new:
                self._logged.add(kind)
            if isinstance(cause, MissedDeadlineError):  # expected from workers that may be stopped
                log.log(
                    logging.WARNING if is_new else logging.DEBUG, "drafter %s: %s", self.name, cause
                )
            else:
                level, text = logging.ERROR if is_new else logging.DEBUG, "its drafts are lost"
                log.log(level, "drafter %s failed in %s; %s", self.name, verb, text, exc_info=True)
            left = error.drafts if isinstance(error, DraftFault) else None
            return _FAILED if left is None else left

    def _checked(self, drafts: Any, budgets: IntArray) -> list[Draft]:
        """Returns `drafts` if all are valid.

        Raises:
            DraftFault: some are invalid; it carries the valid ones.
        """
        if not isinstance(drafts, (list, tuple)):
            raise TypeError(
                f"propose must return a list with one draft per row, `EMPTY` for no guess, got "
                f"{drafts!r}"
            )
        if len(drafts) != len(budgets):
            raise ValueError(f"{len(drafts)} drafts for {len(budgets)} rows")
        checked = list(drafts)
        if all_chains(checked, budgets, self._vocab_size):
            return checked
        first = ""
        for row, draft in enumerate(drafts):
            reason = problem(draft, int(budgets[row]), self._vocab_size)
            if reason is not None:
                checked[row] = tree.EMPTY
                first = first or f"row {row}: {reason}"
        if first:
            raise DraftFault(first, checked)
        return checked

    def _pruned(
        self, drafts: list[Draft], batch: Batch, nodes_left: dict[int, IntArray]
    ) -> list[Draft]:
        """Returns `drafts` without guesses deeper than the request can still emit.

        `nodes_left` gets the remaining nodes of each row that loses some.
        """
        pruned: list[Draft] = []
        for row, (draft, depth) in enumerate(zip(drafts, batch.max_depth.tolist(), strict=True)):
            left, kept = tree.prune(draft, depth)
            pruned.append(left)
            if kept is not None:
                nodes_left[row] = kept
        return pruned


def _as_drafted(verdict: Verdict, nodes_left: dict[int, IntArray]) -> Verdict:
    """Returns `verdict` with the drafter's own node numbers."""
    path = verdict.path.copy()
    for row, kept in nodes_left.items():
        nodes = slice(verdict.path_start[row], verdict.path_start[row + 1])
        path[nodes] = kept[path[nodes]]
    return replace(verdict, path=path)


class WithPredictions:
    """Wraps the engine's `Drafting` with the same protocol; predictions draft if they can.

    A request's prediction drafts wherever the output is known to follow it; the engine's drafters
    draft elsewhere. Requests without a prediction are not affected.
    """

    def __init__(self, drafting: Drafting, vocab_size: int) -> None:
        self.drafter, self.proposes_trees = drafting.drafter, drafting.proposes_trees
        self._drafting = drafting
        self._predictions = Drafting(predictions(), vocab_size)
        self._open: set[str] = set()  # requests with a prediction
        # By step in flight, if a request in it may have a prediction: the drafts of both parts, and
        # which part's window was kept.
        self._drafted: dict[int, tuple[list[Draft], list[Draft], list[bool]]] = {}

    @property
    def may_rest(self) -> bool:
        return not self._open

    @property
    def ranks_draft(self) -> bool:
        return not self._open and self._drafting.ranks_draft

    @property
    def parts(self) -> Sequence[Drafting]:
        """The same as `Drafting.parts`; predictions belong to no drafter."""
        return self._drafting.parts

    def open(self, requests: Sequence[Request]) -> None:
        predicted = [request for request in requests if request.prediction.size]
        if predicted:
            self._open.update(request.id for request in predicted)
            self._predictions.open(predicted)
        self._drafting.open(requests)

    def propose(self, batch: Batch) -> list[Draft]:
        if not self._open:
            return self._drafting.propose(batch)
        own = [request_id in self._open for request_id in batch.request_ids]
        predicted = self._predictions.propose(batch, np.where(own, batch.max_nodes, np.int32(0)))
        left = batch.max_nodes if batch.drafter_nodes is None else batch.drafter_nodes
        has_draft = [draft.num_nodes > 0 for draft in predicted]
        drafts = self._drafting.propose(batch, np.where(has_draft, np.int32(0), left))
        rides = [not has and draft.num_window > 0 for has, draft in zip(has_draft, drafts)]
        remember(self._drafted, batch.step, (predicted, drafts, rides))
        return [
            first if has or second is tree.EMPTY else second
            for first, second, has in zip(predicted, drafts, has_draft, strict=True)
        ]

    def drafted(self, batch: Batch) -> list[Draft]:
        return self._drafting.drafted(batch)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        drafted = self._drafted.pop(batch.step, None)
        if drafted is None:
            if self._open:
                self._predictions.observe(batch, verdict)
            self._drafting.observe(batch, verdict)
            return
        predicted, drafts, rides = drafted
        no_window = [False] * batch.num_seqs
        self._predictions.observe(batch, own_verdict(verdict, predicted, no_window))
        self._drafting.observe(batch, own_verdict(verdict, drafts, rides))

    def close(self, request_ids: Sequence[str]) -> None:
        predicted = [request_id for request_id in request_ids if request_id in self._open]
        if predicted:
            self._open.difference_update(predicted)
            self._predictions.close(predicted)
        self._drafting.close(request_ids)

    def replace(self, drafting: Drafting) -> None:
        """Replaces the engine's drafters; no step may be in flight."""
        self.drafter, self.proposes_trees = drafting.drafter, drafting.proposes_trees
        self._drafting = drafting
        self._drafted.clear()

    def shutdown(self) -> None:
        self._drafting.shutdown()
        self._predictions.shutdown()

    def all_stats(self) -> dict[str, DrafterStats]:
        """Returns statistics by drafter, including predictions once a request has had one."""
        stats, own = self._drafting.all_stats(), self._predictions
        return {**stats, own.name: own.stats} if own.stats.num_calls[0] else stats

    def all_health(self) -> dict[str, dict[str, str]]:
        """Returns the same as `Drafting.all_health`."""
        return self._drafting.all_health() | self._predictions.all_health()


def own_verdict(
    verdict: Verdict,
    drafts: Sequence[Draft],
    has_window: Sequence[bool],
    extended: Sequence[list[int]] = (),
) -> Verdict:
    """Returns `verdict` for one member's `drafts`: same emitted tokens, path in its own nodes.

    A member's nodes are closed under parents, so its accepted path is the prefix of the accepted
    tokens that its own tree contains, no matter which member's nodes were verified. A truncated or
    unused draft is counted in the same way.

    Args:
        extended: [num_seqs], the path of another member's tokens that each draft follows; (): all
            drafts follow the root.
    """
    path: list[int] = []
    path_start = [0]
    ends = verdict.path_start.tolist()
    window: list[IntArray] = []
    window_start = [0]
    for row, draft in enumerate(drafts):
        num_accepted = ends[row + 1] - ends[row]
        if num_accepted and draft.num_guesses:
            accepted = verdict.tokens(row)[:num_accepted].tolist()
            above = extended[row] if extended else []
            if accepted[: len(above)] == above:
                path += tree.follow(draft, accepted[len(above) :])
        path_start.append(len(path))
        if has_window[row]:
            window.append(verdict.window_tokens(row))
        window_start.append(window_start[-1] + (len(window[-1]) if has_window[row] else 0))
    found = verdict.window is not None
    return replace(
        verdict,
        path=ints(path),
        path_start=ints(path_start),
        window=np.concatenate([ints([]), *window]) if found else None,
        window_start=ints(window_start) if found else None,
    )
