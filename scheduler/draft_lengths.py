"""Draft lengths that follow measurements: as many nodes as pay, or none (`DraftLengths`).

`Acceptance` holds how often nodes are accepted, `Speeds` which price of a row gives the most tokens
per second. What both have learned can be kept and given to a later engine (`Knowledge`).
"""

from __future__ import annotations

from collections import abc
from math import log, log2
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .types import Batch, Draft, IntArray, Verdict

Floats = NDArray[np.float64]
_NUM_LEVELS = 6
NEW, _RESTED = _NUM_LEVELS, _NUM_LEVELS + 1  # the states beside the levels
NUM_STATES = _NUM_LEVELS + 2
_LEVEL_SHARE = 0.3  # of the newest draft in a request's level
_GOOD = 8  # accepted nodes that make a draft a full success, however many it had
_RESTED_STEPS = 6  # without a draft, after which a level tells nothing
_DECAY = 0.98  # of a count, with each draft that adds to it
_FIRST_DRAFTS = 2.0  # weight of the first guess
_FIRST_GUESS = 0.8  # of a node's acceptance
_RECALLED_DRAFTS = 8.0  # weight of what an earlier run counted, at most
_MOST_RECALLED = 5.0  # of a gain's logarithm


class Lately:
    """One request's state: nothing drafted yet, none for some steps, or a level of its drafts."""

    __slots__ = ("_level", "_num_idle", "state", "tried_at")

    def __init__(self) -> None:
        self.state = NEW
        self.tried_at = -1  # step of the last trial
        self._level = -1.0
        self._num_idle = 0

    def drafted(self, num_nodes: int, num_accepted: int) -> None:
        """A draft was verified."""
        fared = min(num_accepted / min(num_nodes, _GOOD), 1.0)
        self._level = (
            fared if self._level < 0 else self._level + _LEVEL_SHARE * (fared - self._level)
        )
        self._num_idle = 0
        self.state = int(self._level * (_NUM_LEVELS - 1) + 0.5)

    def idle(self) -> bool:
        """Nothing was granted in a step that could have drafted; whether no more changes by it."""
        self._num_idle += 1
        if self._num_idle == _RESTED_STEPS and self.state != NEW:
            self.state = _RESTED
        return self._num_idle >= _RESTED_STEPS


class Acceptance:
    """Nodes that were granted, drafted and accepted, by state and group; older ones count less.

    It is learned from all requests together, so that a new request starts with what they showed.

    Args:
        sizes: nodes of each group, which follow one another in a draft.
    """

    def __init__(self, sizes: NDArray[np.int64]) -> None:
        self._sizes = sizes
        self._starts = np.cumsum(sizes) - sizes
        first = np.tile(_FIRST_DRAFTS * sizes, (NUM_STATES, 1))
        # [3, NUM_STATES, num_groups]
        self._counts: Floats = np.stack([first, first, _FIRST_GUESS * first])
        # Since the last `learn`: state, granted, drafted, accepted.
        self._new: list[tuple[int, int, int, int]] = []
        self._paths: list[IntArray] = []  # accepted nodes of the same, where drafts are trees

    def count(
        self,
        state: int,
        num_granted: int,
        num_nodes: int,
        num_accepted: int,
        path: IntArray | None = None,  # [num_accepted], of a tree; None: the first nodes
    ) -> None:
        """What became of a grant."""
        self._new.append((state, num_granted, num_nodes, num_accepted))
        if path is not None:
            self._paths.append(path)

    def learn(self) -> bool:
        """Takes in what was counted; False: there was nothing."""
        if not self._new:
            return False
        states, *nodes = np.array(self._new).T
        self._new.clear()
        each_state = np.arange(NUM_STATES)[:, None] == states  # [NUM_STATES, num_grants]
        # [3, num_grants, num_groups], nodes
        found = np.clip(np.stack(nodes)[:, :, None] - self._starts, 0, self._sizes)
        if self._paths:
            groups = np.searchsorted(self._starts, np.concatenate(self._paths), side="right") - 1
            found[2] = 0
            np.add.at(found[2], (np.repeat(np.arange(len(states)), nodes[2]), groups), 1)
            self._paths.clear()
        self._counts *= _DECAY ** (each_state @ (found[0] > 0).astype(np.float64))
        self._counts += each_state @ found
        return True

    def per_granted(self) -> tuple[Floats, Floats]:
        """Drafted and accepted of the granted nodes, by state and group.

        A node comes after its ancestors, and a group after those that are worth more, so neither
        rises along a draft.
        """
        granted, *others = self._counts
        drafted, accepted = np.minimum.accumulate(np.stack(others) / granted, axis=2)
        return drafted, accepted

    def stats(self) -> tuple[float, list[float]]:
        """Of all requests: drafted of the granted nodes, and accepted of the drafted by group."""
        granted, drafted, accepted = self._counts.sum(axis=1)
        return float(drafted.sum() / granted.sum()), (accepted / drafted).tolist()

    @property
    def counts(self) -> Floats:  # [3, NUM_STATES, num_groups]
        """Granted, drafted and accepted."""
        return self._counts

    def recall(self, counts: Floats) -> None:
        """Continues from the counts of an earlier run, of the same shape, as if of few drafts."""
        weight = _RECALLED_DRAFTS * self._sizes / np.maximum(counts[:1], 1e-9)
        self._counts = counts * np.minimum(weight, 1.0)


Ints = NDArray[np.int64]


class Knowledge(NamedTuple):
    """What a run has learned about one target and its drafters on one machine."""

    accepted: Floats  # [3, NUM_STATES, num_groups], of `Acceptance`
    gains: Floats  # [_NUM_CELLS * (_NUM_PRICES - 1)], of `Speeds`
    covariance: Floats  # of the gains

    def fits(self, other: Knowledge) -> bool:
        """Whether it can take the other's place: shapes, and values that a run may have."""
        alike = all(one.shape == two.shape for one, two in zip(self, other, strict=True))
        granted, drafted, accepted = self.accepted if alike else (np.zeros(1),) * 3
        return (
            alike
            and all(bool(np.isfinite(each).all()) for each in self)
            and bool((granted > 0).all() and (accepted > 0).all() and (drafted >= accepted).all())
            and bool((granted >= drafted).all() and (np.abs(self.gains) < _MOST_RECALLED).all())
            and bool((np.diag(self.covariance) > 0).all())
            and float(np.linalg.eigvalsh(self.covariance)[0]) > -1e-3
        )


# Tokens that a row must be expected to bring; the first grants nothing, the last everything.
PRICES = (np.inf, 0.8, 0.6, 0.45, 0.3, 0.15, 0.0)
_NUM_PRICES = len(PRICES)
_CELLS_PER_OCTAVE, _NUM_CELLS = 2, 21  # of numbers of requests: 1 to 1024
# What is assumed before anything is measured, of logarithms of speeds relative to plain decoding:
# their mean, which falls with every octave and rises with every lower price by `_TILT`, and
# deviations that all prices share, that near ones share, and of one price alone.
_FIRST_GAIN, _TILT = 0.1, 0.02
_SPREAD, _PRICE_SPREAD, _OWN_SPREAD = 0.4, 0.15, 0.03
_OCTAVES_ALIKE, _PRICES_ALIKE = 1.5, 1.5  # distances over which speeds resemble each other
_FORGET_STEPS = 20_000.0  # after which little is left of what was measured
_STEPS_BETWEEN_RUNS = 1_000  # that pass for the time between an earlier run and this one
_LEAST_ERROR = 0.03  # of a comparison
_DRIFT = 0.08  # of the machine between two blocks, where it is not measured


class Measured(NamedTuple):
    """What steps of one price gave."""

    cell: int  # of their number of requests
    price: int  # its index
    speed: float  # logarithm of tokens per millisecond
    error: float  # its variance
    step_ms: float


class Speeds:
    """How fast each price of a row is, relative to plain decoding, by the number of requests.

    Both are measured alike, as tokens over time, in blocks of steps that take turns: the price that
    serves, another, and the price that serves again, so that what slows the machine for a while
    falls out. What is believed is a Gaussian process over loads and prices; every comparison is an
    observation of the difference of two of its values (Kalman update), and with time the belief
    returns to its first uncertainty.
    """

    def __init__(self) -> None:
        octaves = np.arange(_NUM_CELLS) / _CELLS_PER_OCTAVE
        prices = np.arange(_NUM_PRICES - 1)
        near = np.exp(-0.5 * ((octaves[:, None] - octaves) / _OCTAVES_ALIKE) ** 2)
        alike = np.exp(-0.5 * ((prices[:, None] - prices) / _PRICES_ALIKE) ** 2)
        size = _NUM_CELLS * (_NUM_PRICES - 1)
        of_prices = _SPREAD**2 + _PRICE_SPREAD**2 * alike
        self._first = np.kron(near, of_prices) + _OWN_SPREAD**2 * np.eye(size)
        self._covariance = self._first.copy()
        self._mean = np.add.outer(-_TILT * octaves, _TILT * prices).ravel() + _FIRST_GAIN
        self.num_comparisons = 0

    def compare(self, one: Measured, other: Measured, error: float) -> None:
        """Takes in the difference of two prices, measured with the variance `error`."""
        size = _NUM_PRICES - 1
        used, signs = [], []
        for block, sign in ((one, 1.0), (other, -1.0)):
            if block.price:
                used.append(block.cell * size + block.price - 1)
                signs.append(sign)
        if not used:
            return
        towards = self._covariance[:, used] @ signs
        expected = float(self._mean[used] @ signs)
        spread = float(towards[used] @ signs) + error + _LEAST_ERROR**2
        surprise = one.speed - other.speed - expected
        self._mean += towards * (surprise / spread)
        self._covariance -= np.outer(towards, towards / spread)
        self.num_comparisons += 1

    def forget(self, num_steps: int) -> None:
        """With time, as requests and the machine change, less is certain."""
        kept = float(np.exp(-num_steps / _FORGET_STEPS))
        self._covariance *= kept
        self._covariance += (1.0 - kept) * self._first

    @property
    def belief(self) -> tuple[Floats, Floats]:
        """Of all cells and prices: means, and their covariance."""
        return self._mean, self._covariance

    def recall(self, gains: Floats, covariance: Floats) -> None:
        """Continues from the belief of an earlier run, with a part of its certainty."""
        self._mean, self._covariance = gains.copy(), covariance.copy()
        self.forget(_STEPS_BETWEEN_RUNS)

    def gains(self, cell: int) -> list[float]:  # [num_prices]
        """Logarithms of gains; the first is plain decoding's, 0."""
        size = _NUM_PRICES - 1
        return [0.0, *self._mean[cell * size : (cell + 1) * size].tolist()]

    def uncertainty(self, cell: int) -> Floats:  # [num_prices, num_prices]
        """The covariance of `gains`."""
        size, covariance = _NUM_PRICES - 1, np.zeros((_NUM_PRICES, _NUM_PRICES))
        part = slice(cell * size, (cell + 1) * size)
        covariance[1:, 1:] = self._covariance[part, part]
        return covariance

    def stats(self) -> dict[str, dict[str, float]]:
        """Gains over plain decoding by requests and price, where they are known at all."""
        found: dict[str, dict[str, float]] = {}
        for cell in range(0, _NUM_CELLS, _CELLS_PER_OCTAVE):
            known = np.sqrt(np.diag(self.uncertainty(cell))) < 0.5 * _SPREAD
            gains = {
                str(price): float(np.exp(gain))
                for price, gain, is_known in zip(PRICES[1:], self.gains(cell)[1:], known[1:])
                if is_known
            }
            if gains:
                found[str(2 ** (cell // _CELLS_PER_OCTAVE))] = gains
        return found


_STEPS_PER_TREE_PLAN = 4  # a head drafts a step ahead, for what it was granted then
_STEPS_PER_MODEL_PLAN = 8  # its first step computes what was put off, and may have no draft yet
_STEPS_PER_REST = 8  # where nothing is granted
_STEPS_PER_LESSON = 16  # after which what was accepted is taken in
_MAX_GROUPS = 16
_TREE_GROUPS = 4
_LEAST_DRAFTED = 1e-3  # of the nodes that are granted
_BLOCK_STEPS, _BLOCK_TOKENS = 8, 24  # of a measurement, at least
_MOST_BLOCK_STEPS = 4  # times the steps of a block, after which it ends whatever was measured
_OUTLIER = 2.0  # a step counts at most as so many times the median of its block
_MARGIN = 0.015  # by which drafting must be faster, as a logarithm
# Of the time, what may be lost on prices that are slower as far as is known, and steps' time that
# may be lost so at once.
_EXPLORED, _FIRST_EXPLORED = 0.006, 16.0
_LEAST_LOSS = 0.03  # of a comparison's time, as unknown prices may be slower than believed
_MOST_GAIN = 0.3  # that counts as time saved by exploring
_BEGINNING = 1.0  # steps' time that it takes to begin to draft with a model, and to end it
_CALIBRATION_SHARE = 0.005  # of the newest step in what corrects expectations
_TRIAL_NODES = 2  # of a request that nothing would be granted
_TRIAL_SHARE = 0.004  # of the time, for such trials
_LEAST_TRIAL_COST, _FIRST_TRIAL_COST = 0.05, 0.3  # by which a step with one takes longer
_TRIAL_COST_SHARE, _SLOWEST_TRIAL = 0.1, 3.0  # of the newest step in that cost; times a step


class _Block:
    """Steps of one price that are being measured.

    Args:
        step_ms: of the price that serves; as many steps of another may take less than half as long
            again together. 0: it is unknown.
    """

    def __init__(self, price: int, num_unmeasured: int, step_ms: float = 0.0) -> None:
        self.price = price
        self._most_ms = 1.5 * step_ms
        self._spent_ms = 0.0
        self.num_steps = 0
        self._num_unmeasured = num_unmeasured  # first steps, which others' drafts may be in
        self._tokens: list[float] = []
        self._ms: list[float] = []
        self._num_requests: list[int] = []

    @property
    def step_ms(self) -> float:
        """Of its last step; 0: none has been measured."""
        return self._ms[-1] if self._ms else 0.0

    def count(self, num_requests: int, num_tokens: float, elapsed_ms: float) -> None:
        """A step that only decoded."""
        if self._num_unmeasured > 0:
            self._num_unmeasured -= 1
        elif elapsed_ms > 0:
            self._tokens.append(num_tokens)
            self._ms.append(elapsed_ms)
            self._spent_ms += elapsed_ms
            self._num_requests.append(num_requests)

    def is_whole(self, num_requests: int) -> bool:
        wanted = max(_BLOCK_STEPS, _BLOCK_TOKENS // num_requests)
        if self._most_ms and len(self._ms) >= _BLOCK_STEPS // 2:
            return self._spent_ms >= self._most_ms * wanted or len(self._ms) >= wanted
        return len(self._ms) >= wanted or self.num_steps >= _MOST_BLOCK_STEPS * wanted

    def measured(self) -> Measured | None:
        """None: too few steps."""
        num = len(self._ms)
        if num < _BLOCK_STEPS // 2:
            return None
        most_ms = _OUTLIER * median(self._ms)
        step_ms, ms_error = _mean_and_error([min(each, most_ms) for each in self._ms])
        num_tokens, tokens_error = _mean_and_error(self._tokens)
        requests = sum(self._num_requests) / num
        # Of what requests add to a step's time, half may be shared.
        speed = log(num_tokens / step_ms) - 0.5 * log(requests)
        return Measured(_cell(requests), self.price, speed, ms_error + tokens_error, step_ms)


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    """And the mean's relative variance. Of so few values numpy takes three times as long."""
    mean = sum(values) / len(values)
    variance = sum([(each - mean) ** 2 for each in values]) / len(values)
    return mean, variance / mean**2 / len(values)


def _cell(num_requests: float) -> int:
    octaves = log2(max(num_requests, 1.0))
    return min(int(octaves * _CELLS_PER_OCTAVE + 0.5), _NUM_CELLS - 1)


class DraftLengths:
    """Nodes per request, planned before every step, or every few where drafts are computed ahead.

    A node is worth the probability that it is accepted. A price decides: the tokens that a row must
    be expected to bring. Every request is granted the nodes that are worth it, so that nodes go to
    the requests and depths where they are accepted, and one number is left to be chosen. Which
    price serves best under a load is measured as tokens over time (`Speeds`), drafting and all that
    is around it included; the highest drafts nothing. The output does not depend on it.

    A chain's nodes are weighed one by one (long ones in groups). The first nodes of a tree are a
    tree as well: it is cut to a quarter, a half or three quarters of its nodes.

    Args:
        most: nodes of a full draft.
        tree_drafts: whether a draft may have several nodes to a level.
        has_model: whether drafts are computed with weights, which takes a step to begin again.
    """

    def __init__(self, most: int, *, tree_drafts: bool, has_model: bool = False) -> None:
        self._most = most
        num_groups = min(most, _TREE_GROUPS if tree_drafts else _MAX_GROUPS)
        edges = np.unique(np.linspace(0, most, num_groups + 1).round().astype(np.int64))
        self._sizes = np.diff(edges)
        self._tree_drafts, self._has_model = tree_drafts, has_model
        self._trial_nodes = int(edges[1]) if tree_drafts else min(most, _TRIAL_NODES)
        self._steps_per_plan = _STEPS_PER_TREE_PLAN if tree_drafts else 1
        if has_model:
            self._trial_nodes, self._steps_per_plan = most, _STEPS_PER_MODEL_PLAN
        self._acceptance = Acceptance(self._sizes)
        self._speeds = Speeds()
        self._rng = np.random.default_rng(0)  # of explorations
        self._requests: dict[str, Lately] = {}
        self._ended: dict[str, Lately] = {}  # since the last step was counted
        self._granted: dict[str, int] = {}
        self._granted_first = most  # to a request that comes before the next plan
        self._drafted_before: set[str] = set()  # requests that were granted nodes in the last step
        self._restless: set[str] = set()  # requests whose state changes if they go on without
        self._step = self._forgotten_at = 0
        self._num_lessons = self._steps_left = 1  # until the next lesson
        self._plan_left = 0  # steps for which the plan holds
        self._num_unmeasured = 1 + has_model
        self._serving = _NUM_PRICES - 1
        self._block = _Block(self._serving, 0)
        self._before: Measured | None = None  # the last block of the price that serves
        self._challenge: Measured | None = None  # a block of another, since then
        self._expected_loss = 0.0  # of a step of the price that is explored
        self._explored_steps = 0
        self._explorable = _FIRST_EXPLORED  # steps' time that may be lost by exploring
        self._expected = 0.0  # accepted nodes of the next step
        self._accepted = self._foreseen = 1.0  # of a step, on average: what was, what was expected
        self._is_trial = False  # a request was granted nodes for a trial
        self._trial_time = 0.0  # that trials may take, in steps of a plan
        self._trial_cost = _FIRST_TRIAL_COST  # by which they are slower, alike
        self._cell = -1  # of the requests for which the price was chosen; -1: none was
        self._is_recalled = False  # what is known is an earlier run's; the first block chooses
        self._update()

    def plan(self, request_ids: abc.Sequence[str]) -> None:
        """Once before every step, with all that run."""
        if not request_ids:
            return
        known = self._requests
        if len(known) != len(request_ids) or not all(map(known.__contains__, request_ids)):
            known = {each: known.get(each) or Lately() for each in request_ids}
            self._requests = known
        self._steps_left -= 1
        self._plan_left -= 1
        if self._plan_left > 0:
            return
        self._plan_left = self._steps_per_plan
        if self._steps_left <= 0:
            self._learn()
        if self._is_recalled or self._has_moved(len(known)):
            self._begin_again(len(known))
        elif self._block.is_whole(len(known)):
            self._next_block()
        self._grant()

    def rests(self) -> bool:
        """Once before a step, in place of `plan`: whether nothing is granted in it."""
        if self._plan_left <= 1 or self._granted or self._granted_first:
            return False
        self._plan_left -= 1
        self._steps_left -= 1
        return True

    @property
    def grants_none(self) -> bool:
        """Whether the plan has no nodes for any request."""
        return not self._granted and not self._granted_first

    def most(self, request_id: str) -> int:
        """Nodes that a request may draft under the plan."""
        return self._granted.get(request_id, self._granted_first)

    def count(
        self, batch: Batch, drafts: abc.Sequence[Draft], verdict: Verdict, elapsed_ms: float
    ) -> None:
        """What became of a step's drafts, and the time that the step took."""
        self._step += 1
        self._block.num_steps += 1
        if not self._restless and not self._drafted_before and not batch.max_nodes.any():
            self._ended.clear()
            self._measure(batch, 0, elapsed_ms)
            return
        ends, granted = verdict.path_start.tolist(), batch.max_nodes.tolist()
        samples, known, counted = batch.samples.tolist(), self._requests, self._acceptance.count
        before = self._drafted_before.intersection(batch.request_ids)
        self._drafted_before -= before
        if self._ended:  # by this step
            known, self._ended = {**self._ended, **known}, {}
        for row, request_id in enumerate(batch.request_ids):
            lately = known.get(request_id)
            if lately is None or not samples[row]:
                continue
            if not granted[row]:
                if lately.idle():
                    self._restless.discard(request_id)
                continue
            if self._has_model:
                if request_id in self._requests:
                    self._drafted_before.add(request_id)
                if request_id not in before:  # its draft is made for the next step
                    continue
            nodes, num_accepted = drafts[row].num_nodes, ends[row + 1] - ends[row]
            path = verdict.nodes(row) if self._tree_drafts else None
            counted(lately.state, granted[row], nodes, num_accepted, path)
            if nodes:
                lately.drafted(nodes, num_accepted)
                if request_id in self._requests:
                    self._restless.add(request_id)
        self._measure(batch, ends[-1], elapsed_ms)

    def _measure(self, batch: Batch, num_accepted: int, elapsed_ms: float) -> None:
        """Counts a step that only decoded."""
        if batch.num_tokens == batch.num_seqs == np.count_nonzero(batch.samples):
            if not self._is_trial:
                self._accepted += _CALIBRATION_SHARE * (num_accepted - self._accepted)
                self._foreseen += _CALIBRATION_SHARE * (self._expected - self._foreseen)
                num_tokens = batch.num_seqs + self._expected * self._accepted / self._foreseen
                self._block.count(batch.num_seqs, num_tokens, elapsed_ms)
            elif self._block.step_ms:
                slower = min(elapsed_ms / self._block.step_ms, _SLOWEST_TRIAL) - 1.0
                self._trial_cost += _TRIAL_COST_SHARE * (max(slower, 0.0) - self._trial_cost)

    def forget(self, request_id: str) -> None:
        """A request has ended; its last step may still be counted."""
        self._granted.pop(request_id, None)
        self._drafted_before.discard(request_id)
        self._restless.discard(request_id)
        lately = self._requests.pop(request_id, None)
        if lately is not None:
            self._ended[request_id] = lately

    @property
    def num_comparisons(self) -> int:
        """Of prices, in this run."""
        return self._speeds.num_comparisons

    def knowledge(self) -> Knowledge:
        """What was learned, to be kept."""
        return Knowledge(self._acceptance.counts, *self._speeds.belief)

    def recall(self, known: Knowledge) -> bool:
        """Begins with what an earlier run learned, before any step; False: it does not fit."""
        if not known.fits(self.knowledge()):
            return False
        self._acceptance.recall(known.accepted)
        self._speeds.recall(known.gains, known.covariance)
        self._is_recalled, self._explorable = True, 0.0
        self._update()
        return True

    def stats(self) -> dict[str, Any]:
        """Plain values: what is granted now, and what that is based on."""
        drafted_of_granted, acceptance = self._acceptance.stats()
        return {
            "granted": sum(self._granted.values()),
            "num_requests": len(self._requests),
            "drafted_of_granted": drafted_of_granted,
            "acceptance": acceptance,
            "nodes": self._sizes.tolist(),
            "price": PRICES[self._serving] if self._serving else None,
            "speed": self._speeds.stats(),
        }

    def _learn(self) -> None:
        """Takes in what was accepted; at first after every step, then less often."""
        self._num_lessons += 1
        self._steps_left = min(self._num_lessons, _STEPS_PER_LESSON)
        if self._acceptance.learn():
            self._update()

    def _update(self) -> None:
        """What each price grants, by what was accepted so far."""
        drafted, accepted = self._acceptance.per_granted()
        worth = np.minimum.accumulate(accepted / np.maximum(drafted, _LEAST_DRAFTED), axis=1)
        pays = worth >= np.array(PRICES)[:, None, None]  # [num_prices, NUM_STATES, num_groups]
        self._nodes: list[list[int]] = (pays @ self._sizes).tolist()  # by price and state
        self._gains: list[list[float]] = (pays * accepted @ self._sizes).tolist()  # alike

    def _has_moved(self, num_requests: int) -> bool:
        return self._cell >= 0 and abs(_cell(num_requests) - self._cell) > _CELLS_PER_OCTAVE

    def _begin_again(self, num_requests: int) -> None:
        """Under another load, or with what another run learned, another price may serve."""
        self._is_recalled = False
        self._cell, self._before, self._challenge = _cell(num_requests), None, None
        price = self._choose()
        self._block = _Block(price, self._num_unmeasured if price != self._block.price else 0)

    def _next_block(self) -> None:
        """Compares what was measured; chooses the price of the next steps."""
        block = self._block
        self._explorable = min(self._explorable + _EXPLORED * block.num_steps, _FIRST_EXPLORED)
        found, price = block.measured(), self._serving
        self._cell = _cell(len(self._requests))
        if block.price != price:
            self._challenge = found
            self._explored_steps = block.num_steps
            self._explorable -= self._expected_loss * block.num_steps
        else:
            self._compare(found)
            price = self._choose()
        step_ms = self._before.step_ms if self._before and price != self._serving else 0.0
        self._block = _Block(price, self._num_unmeasured if price != block.price else 0, step_ms)

    def _compare(self, found: Measured | None) -> None:
        """What another price gave, with what the price that serves gave before and after it.

        Of these two, only those under about the same load count.
        """
        other, before = self._challenge, self._before
        self._challenge, self._before = None, found
        if other is None:
            return
        near = [each for each in (before, found) if each and abs(other.cell - each.cell) <= 1]
        if not near:
            return
        first, last = near[0], near[-1]
        served = last._replace(cell=other.cell, speed=(first.speed + last.speed) / 2)
        loss = 1.0 - float(np.exp(min(other.speed - served.speed, _MOST_GAIN)))
        loss *= other.step_ms / served.step_ms
        self._explorable -= (loss - self._expected_loss) * self._explored_steps
        if self._has_model:
            self._explorable -= _BEGINNING
        drift = (last.speed - first.speed) / 2 if len(near) > 1 else _DRIFT
        error = other.error + sum([each.error for each in near]) / len(near) ** 2 + drift**2
        self._speeds.compare(other, served, error)

    def _choose(self) -> int:
        """The price of the next block: the one that serves, or one that may be better."""
        self._speeds.forget(self._step - self._forgotten_at)
        self._forgotten_at = self._step
        cell = _cell(len(self._requests))
        gains = self._speeds.gains(cell)
        scores = [gains[0], *[gain - _MARGIN for gain in gains[1:]]]
        scores[self._serving] += _MARGIN / 2
        best = scores.index(max(scores))
        if best != self._serving:
            self._serving, self._before = best, None
            return best
        deviations = self._rng.standard_normal(_NUM_PRICES)
        if self._explorable <= 0 or self._before is None:
            return best
        # A draw from what is believed: prices are tried as often as they may be the best.
        mean = np.array(gains)
        variances, axes = np.linalg.eigh(self._speeds.uncertainty(cell))
        noise = deviations * np.sqrt(np.maximum(variances, 0.0))
        other = int((mean + axes @ noise).argmax())
        used = {lately.state for lately in self._requests.values()}
        if all(self._nodes[other][state] == self._nodes[best][state] for state in used):
            return best
        self._expected_loss = max(1.0 - float(np.exp(mean[other] - mean[best])), _LEAST_LOSS)
        return other

    def _grant(self) -> None:
        """Grants what is worth the price, and a few nodes to a request without any now and then."""
        price, requests = self._block.price, self._requests
        self._is_trial = False
        nodes = self._nodes[price]
        self._granted_first = nodes[NEW]
        granted: dict[str, int] = {}
        self._granted = granted
        self._expected = 0.0
        if price:  # the first grants nothing
            granted.update((name, nodes[each.state]) for name, each in requests.items())
            gains = self._gains[price]
            self._expected = sum([gains[each.state] for each in requests.values()])
        if price != self._serving:
            return
        if not price:
            self._plan_left = max(self._plan_left, _STEPS_PER_REST)
        self._trial_time += _TRIAL_SHARE * self._plan_left / self._steps_per_plan
        if self._trial_time < max(self._trial_cost, _LEAST_TRIAL_COST):
            return
        idle = [name for name in requests if not granted.get(name)]
        if idle:
            self._trial_time, self._is_trial = 0.0, True
            tried = min(idle, key=lambda name: requests[name].tried_at)
            requests[tried].tried_at = self._step
            granted[tried] = self._trial_nodes
            self._plan_left = self._steps_per_plan
