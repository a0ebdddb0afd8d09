"""The speculation cache: drafts of the next round that a drafter prepared during this one.

While the target verifies a round, a draft model or head in its own workers draws chains behind the
likely outcomes: pairs of (number of accepted nodes, bonus token). An entry belongs to one request
and to the number of its known tokens at the time of the request. A look-up compares the tokens that
the target has emitted since with the entry's chain and finds the outcome, or nothing. An entry only
contains drafts, which the target verifies, so late, lost and stale entries cost speed but never
change a token.
Source: Kumar et al. 2026, arXiv:2603.03251 (Saguaro); the shared noise: arXiv:2408.07978.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..config import PreparingConfig
from ..scheduler import tree
from ..scheduler.types import Batch, Draft, DraftProbs, FloatArray, IntArray, ints
from .lookup.base import num_agreeing
from .protocol import CacheCounts, Drafted, Preparation

_MAX_RANKS = 16  # candidates for the bonus token at one position
_DECAY = 0.995  # of measured rates, per counted outcome
_PRIOR = 2.0  # weight of the initial guesses
_FIRST_ACCEPT_RATE = 0.7
_SHARE = 0.1  # weight of the newest value in a mean
_MORE = 3  # maximum factor of the number of outcomes with shorter chains


class OutcomeRates:
    """Measured rates of accepted nodes, and of the bonus token's rank among the candidates."""

    def __init__(self, num_nodes: int, num_ranks: int) -> None:
        self._accepted = np.full(num_nodes, _PRIOR * _FIRST_ACCEPT_RATE)
        self._tried = np.full(num_nodes, _PRIOR)
        guess = 0.5 ** np.arange(1, num_ranks + 1)
        self._found = np.stack([guess, guess]) * _PRIOR  # after a rejection, after a whole chain
        self._prepared = np.full((2, num_ranks), _PRIOR)
        self.mean_accepted: float | None = None  # of a chain

    @property
    def accept_rates(self) -> FloatArray:  # [num_nodes]
        return (self._accepted / self._tried).astype(np.float32)

    @property
    def rank_rates(self) -> FloatArray:  # [2, num_ranks]
        return (self._found / self._prepared).astype(np.float32)

    def count(
        self, num_nodes: int, num_accepted: int, prepared: Sequence[int], found: int | None
    ) -> None:
        """Counts an outcome: the ranks `prepared` at its position, and the rank `found`."""
        for counts in (self._accepted, self._tried, self._found, self._prepared):
            counts *= _DECAY
        self._tried[: min(num_accepted + 1, num_nodes)] += 1
        self._accepted[:num_accepted] += 1
        is_whole = int(num_accepted == num_nodes)
        self._prepared[is_whole, list(prepared)] += 1
        if found is not None:
            self._found[is_whole, found] += 1
        if num_nodes:
            self.mean_accepted = _mean(self.mean_accepted, num_accepted)


class _Phase:
    """Measurements of rounds with similar numbers of requests (up to a power of two)."""

    def __init__(self) -> None:
        self.best = True  # whether rounds are prepared outside of trials
        self.trying = False  # whether the other way is being tried
        self.left = _FIRST_ROUNDS  # rounds until a trial begins or ends
        self.pause = _PAUSE
        self.round_s: dict[bool, deque[float]] = {
            way: deque(maxlen=_NUM_ROUNDS) for way in (True, False)
        }
        self.drafted: dict[bool, float | None] = {True: None, False: None}  # share of rows

    @property
    def way(self) -> bool:
        """Whether this round is prepared."""
        return self.best != self.trying

    def end_round(self, mean_accepted: float) -> None:
        """Counts a round; at the end of a trial, compares both ways."""
        self.left -= 1
        if self.left > 0:
            return
        self.trying = not self.trying
        if self.trying:
            self.left = _TRIAL
            self.round_s[self.way].clear()
            return
        is_better = self._speed(not self.best, mean_accepted) > _MARGIN * self._speed(
            self.best, mean_accepted
        )
        self.best ^= is_better
        self.pause = _PAUSE if is_better else min(2 * self.pause, _MAX_PAUSE)
        self.left = self.pause

    def _speed(self, way: bool, mean_accepted: float) -> float:
        """Returns tokens per request and second; 0 if unknown."""
        times, drafted = self.round_s[way], self.drafted[way]
        if len(times) < _FEW or drafted is None:
            return 0.0
        return (1 + mean_accepted * drafted) / statistics.median(times)


_FIRST_ROUNDS, _TRIAL, _NUM_ROUNDS, _FEW = 48, 16, 32, 8
_PAUSE, _MAX_PAUSE = 128, 2048  # rounds between trials
_MARGIN = 1.02  # how much faster the other way must be


class Pace:
    """Measures rounds, and decides whether and how much to prepare.

    A round is prepared unless rounds without preparation yield more tokens per second, which is
    tested from time to time, by number of requests. The number of outcomes is reduced if steps wait
    for the drafter.
    """

    def __init__(self, *, adaptive: bool) -> None:
        self._adaptive = adaptive
        self._phases: defaultdict[int, _Phase] = defaultdict(_Phase)
        self._last: tuple[tuple[str, ...], bool, float] | None = None  # requests, way, time
        self.share = 1.0  # share of the allowed outcomes
        self.round_ms: float | None = None
        self.draft_ms: float | None = None  # of drafts for which a step waited

    def begin_round(self, batch: Batch, now_s: float) -> bool:
        """Returns whether this round is prepared; times the last round if the same requests run."""
        phase, last = self._phases[batch.num_seqs.bit_length()], self._last
        way = phase.way or not self._adaptive
        is_plain = bool(batch.samples.all()) and bool((batch.plan.chunk_lens == 1).all())
        self._last = (batch.request_ids, way, now_s) if is_plain else None
        if is_plain and last is not None and last[:2] == (batch.request_ids, way):
            phase.round_s[way].append(now_s - last[2])
            self.round_ms = _mean(self.round_ms, (now_s - last[2]) * 1e3)
        return way

    def end_round(self, batch: Batch, num_drafted: int, mean_accepted: float) -> None:
        """Called when all drafts of the round are known."""
        if self._adaptive and self._last is not None:
            phase, way = self._phases[batch.num_seqs.bit_length()], self._last[1]
            phase.drafted[way] = _mean(phase.drafted[way], num_drafted / batch.num_seqs)
            phase.end_round(mean_accepted)

    def waited(self, waited_ms: float, drafting_ms: float) -> None:
        """Records that a step waited for a preparation that took `drafting_ms`."""
        if self._adaptive:
            lags = waited_ms > _LAG * drafting_ms + _LAG_MS
            self.share = max(0.01, self.share * 0.9) if lags else min(1.0, self.share * 1.05)

    def pays_to_wait(self, num_missed: int, num_rows: int, mean_accepted: float) -> bool:
        """Returns True if drafts of `num_missed` requests are worth the wait of all requests."""
        if self.draft_ms is None or self.round_ms is None:
            return True
        going = num_rows + (num_rows - num_missed) * mean_accepted  # tokens without waiting
        return num_missed * mean_accepted * self.round_ms > going * self.draft_ms


_LAG, _LAG_MS = 0.15, 0.3


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _SHARE * (value - mean)


@dataclass(slots=True)
class _Entry:
    """The prepared drafts of one request."""

    base: int  # number of known tokens at the time of the request
    chain: list[int]  # the tokens that the target verifies after them
    drafted: Drafted
    # By (number of accepted nodes, bonus token): the chain's index in `drafted`, and its rank.
    found: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)


class SpeculationCache:
    """The newest entry of each request; decides what to prepare, and counts the results.

    Args:
        config: the drafter's section, with a speculation cache.
        source: name of the drafter.
        max_outcomes: maximum per round, if the drafter can compute fewer than the budget.
    """

    def __init__(
        self, config: PreparingConfig, source: str, max_outcomes: int | None = None
    ) -> None:
        own = config.speculation_cache
        assert own is not None, "the caller looked"
        self._config, self._source = own, source
        self._depth, self._max_nodes = config.prepared_len, config.draft_len
        self._budget = own.budget if max_outcomes is None else min(own.budget, max_outcomes)
        self._shares_noise = config.shares_noise  # the target's draws are predictable
        self.begin_anew()

    def begin_anew(self) -> None:
        """Drops all entries, measurements and counts."""
        self._entries: dict[str, _Entry] = {}
        self._rates = OutcomeRates(self._max_nodes, min(self._config.outcomes, _MAX_RANKS))
        self.pace = Pace(adaptive=self._config.adaptive)
        self.counts = CacheCounts()

    @property
    def mean_accepted(self) -> float:
        """Mean number of accepted nodes of a chain."""
        mean = self._rates.mean_accepted
        return 1.0 if mean is None else mean

    def drafts_misses(self, num_missed: int, num_rows: int) -> bool:
        """Returns True if a step waits for the drafts of requests without a prepared one."""
        on_miss = self._config.on_miss
        if on_miss != "auto":
            return on_miss == "draft"
        return self.pace.pays_to_wait(num_missed, num_rows, self.mean_accepted)

    def least_missed(self, num_rows: int) -> int:
        """Returns how many unprepared requests make a step of `num_rows` wait; 0: never."""
        counts = range(1, num_rows + 1)
        return next((each for each in counts if self.drafts_misses(each, num_rows)), 0)

    def preparation(self, can_draft: Sequence[bool], reach: Sequence[int]) -> Preparation:
        """Returns what to prepare for the rows of a plan; some are not computed to their end."""
        most = max(1, round(self._config.outcomes * self.pace.share))
        each, more = divmod(self._budget, max(1, sum(can_draft)))
        room = each + (np.cumsum(can_draft) <= more)  # share of the budget
        counts = np.where(can_draft, np.minimum(most, room), 0)
        num_rows = None
        if self._shares_noise:  # otherwise, a prepared draft equals one that would be drawn
            num_rows, counts = ints(counts * self._depth), np.minimum(_MORE * counts, room)
        return Preparation(
            depth=self._depth,
            num_outcomes=ints(counts),
            reach=ints(reach),
            accept_rates=self._rates.accept_rates,
            rank_rates=self._rates.rank_rates,
            shares_noise=self._shares_noise,
            num_rows=num_rows,
        )

    def store(
        self,
        drafted: Drafted,
        request_ids: Sequence[str | None],  # None: closed
        bases: Sequence[int],
        chains: Sequence[IntArray],
    ) -> None:
        """Stores the prepared drafts of the plan's rows, replacing older entries."""
        outcomes, counts = drafted.outcomes, self.counts
        if outcomes is None:
            return
        rows = [
            _Entry(base, chain.tolist(), drafted) for base, chain in zip(bases, chains, strict=True)
        ]
        columns = (outcomes.seqs, outcomes.num_accepted, outcomes.bonus, outcomes.ranks)
        table = zip(*(column.tolist() for column in columns), strict=True)
        for index, (row, num_accepted, bonus, rank) in enumerate(table):
            rows[row].found[num_accepted, bonus] = (index, rank)
        for request_id, row_entry in zip(request_ids, rows, strict=True):
            if request_id is not None:
                self._entries[request_id] = row_entry
        counts.num_rounds += 1
        counts.num_outcomes += len(outcomes.seqs)
        counts.num_tokens += len(drafted.tokens)

    def look_up(self, request_id: str, tokens: IntArray, *, helps: bool = False) -> Draft | None:
        """Returns the draft after the known `tokens`; None: it was not prepared.

        Args:
            helps: another model's cache is looked up, too, and counts misses.
        """
        counts = CacheCounts() if helps else self.counts
        found = self._look_up(request_id, tokens, counts)
        if helps and found is not None:
            self.counts.num_hits += 1
            self.counts.num_unprepared -= 1
            self.counts.num_used_tokens += found.num_nodes
        return found

    def _look_up(self, request_id: str, tokens: IntArray, counts: CacheCounts) -> Draft | None:
        counts.num_lookups += 1
        entry = self._entries.pop(request_id, None)
        if entry is None:
            counts.num_absent += 1
            return None
        emitted = tokens[entry.base :].tolist()
        num_accepted = num_agreeing(emitted, entry.chain)
        if len(emitted) != num_accepted + 1:  # the target's step failed, or there were several
            counts.num_stale += 1
            return None
        place = entry.found.get((num_accepted, emitted[-1]))
        ranks = [rank for (count, _), (_, rank) in entry.found.items() if count == num_accepted]
        found = None if place is None else place[1]
        self._rates.count(len(entry.chain), num_accepted, ranks, found)
        if place is None:
            counts.num_unprepared += 1
            return None
        draft = chain_of(entry.drafted, place[0], self._source)
        counts.num_hits += 1
        counts.num_used_tokens += draft.num_nodes
        return draft

    @property
    def is_empty(self) -> bool:
        """Returns True if there is no entry."""
        return not self._entries

    def clear(self) -> None:
        """Drops all entries."""
        self._entries.clear()

    def close(self, request_ids: Sequence[str]) -> None:
        """Drops the entries of requests."""
        for request_id in request_ids:
            self._entries.pop(request_id, None)

    def count_wait(
        self, waited_ms: float, took_ms: float, *, prepared: bool, begun_ms: float = 0.0
    ) -> None:
        """Counts a draft or a preparation, and how long a step waited for it.

        Args:
            begun_ms: time of drafts that were begun before; not included in `took_ms`.
        """
        counts = self.counts
        counts.draft_ms += took_ms + begun_ms
        counts.waited_ms += waited_ms
        if prepared or begun_ms:
            counts.hidden_ms += max(0.0, took_ms + begun_ms - waited_ms)
        if prepared:
            self.pace.waited(waited_ms, took_ms)
        else:
            counts.num_waited_drafts += 1
            counts.missed_ms += waited_ms
            self.pace.draft_ms = _mean(self.pace.draft_ms, waited_ms)

    def end_round(
        self, batch: Batch, drafts: Sequence[Draft], waited_ms: float, *, has_missed: bool
    ) -> None:
        """Called when all drafts of a step are known, after it waited `waited_ms` for the last one.

        Args:
            has_missed: not all of them were prepared.
        """
        num_drafted = sum(draft.num_nodes > 0 for draft in drafts)
        if num_drafted and not has_missed and self.pace.draft_ms is not None:
            self.counts.saved_ms += max(0.0, self.pace.draft_ms - waited_ms)
        self.pace.end_round(batch, num_drafted, self.mean_accepted)


def chain_of(drafted: Drafted, index: int, source: str) -> Draft:
    """Returns one of the chains that a model drew."""
    begin, end = int(drafted.start[index]), int(drafted.start[index + 1])
    if begin == end:
        return tree.EMPTY
    probs = drafted.probs
    if probs is not None:
        probs = DraftProbs(probs.ids[begin:end], probs.probs[begin:end])
    return tree.chain(drafted.tokens[begin:end], source, probs)
