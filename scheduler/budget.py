"""How many nodes a request may draft in this step.

`DraftBudget.wishes` is called once per step, and may grant nothing; with `adaptive_draft_len`,
lengths follow what was measured (`DraftLengths`). The number of tokens left to emit limits the
useful *depth* of a draft (`Batch.max_depth`). For a chain that is its length; a tree or a lookahead
window has many nodes to a level, and is bounded by the configuration and by the model's positions.
`share_nodes` then divides the rest of the token budget among these requests.
"""

from __future__ import annotations

from collections import abc, defaultdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import SpeculationBase
from ..errors import ConfigError
from .sequence import Sequence
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

    def idle(self) -> None:
        """Nothing was granted in a step that could have drafted."""
        self._num_idle += 1
        if self._num_idle == _RESTED_STEPS and self.state != NEW:
            self.state = _RESTED


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

    def learn(self) -> None:
        """Takes in what was counted."""
        if not self._new:
            return
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


_EXACT = 8  # numbers of requests and rows up to which each has its own mean
_PER_OCTAVE = 4  # means beyond
_COST_SHARE = 0.05  # of the newest step in a mean
_FULL_WEIGHT = 20  # steps of a mean, above which more do not make it weigh more
_OUTLIER = 2.0  # a step counts at most as so many times the mean
_FRESH_STEPS = (128, 1024)  # for which a mean is used without new ones: per step in it, at most
_SLOWER = 0.3  # of that share, of a slower step: other work on the machine passes
_ENOUGH = 2  # steps of a mean that is used
_STEPS_PER_FIT = 64
# What slows all steps alike (other work on the machine, longer contexts) must not seem to be the
# cost of those that it met: steps count as if none had been slower than those before them.
_PACE_SHARE = 0.1  # of the newest step
_KNOWN = 10  # steps of a mean that another is compared with
_NEAR = 4.0  # numbers of requests within this factor tell of each other's steps without drafts
_PER_OCTAVE_APART = 4.0  # times the octaves between numbers of requests: a mean's distance
# Weights, in steps, of what is assumed: that the curve is flat between two knots, so that unknown
# numbers of rows are tried; that drafting and its length cost nothing.
_FLAT, _FREE = 1.0, 10.0
_PASSES = 3  # of a fit; means far from the one before count less
_TYPICAL_ERROR = 0.1


class _Fit(NamedTuple):
    """Costs of steps of about so many requests."""

    knots: Floats  # [num_knots], rows
    curve: Floats  # alike: milliseconds
    drafting: float  # milliseconds, whatever is drafted
    length: float  # milliseconds, of a full draft
    most_rows: float  # that were measured


class StepCosts:
    """Milliseconds of a step by requests, rows and draft lengths, measured while serving.

    Steps that only decode are counted, with the time of drafting in them, and similar ones are
    averaged. For a number of requests, a curve over the number of rows, a cost of drafting and one
    of its length are fitted to the averages; other numbers of requests count less with distance.

    Args:
        most: nodes of a full draft.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._means: dict[tuple[int, int, bool], _Mean] = {}
        self._fits: dict[int, _Fit] = {}  # by number of requests
        self._step = self._fitted_at = 0
        self._pace = 1.0  # of late: times of steps to their means
        self._is_new = False  # a mean has come into use since the last fit

    def count(self, num_requests: int, num_nodes: int, longest: int, elapsed_ms: float) -> None:
        """Another step, in which `longest` nodes were granted at most to one request."""
        self._step += 1
        key = (_bucket(num_requests), _bucket(num_requests + num_nodes), longest > 0)
        mean = self._means.get(key)
        if mean is None:
            mean = self._means[key] = _Mean()
        pace = self._pace
        if mean.num_steps >= _KNOWN:
            slowness = min(elapsed_ms / mean.ms, _OUTLIER)
            self._pace += _PACE_SHARE * (slowness - pace)
        at_pace_ms = elapsed_ms / pace
        mean.count(num_requests, num_requests + num_nodes, longest, at_pace_ms, self._step)
        self._is_new |= mean.num_steps == _ENOUGH

    def knows_any(self, *, drafts: bool) -> bool:
        """Whether steps with drafts, or without any, have been measured, of any size."""
        return any(each is drafts for _, _, each in self._means)

    def knows_plain(self, num_requests: int) -> bool:
        """Whether such a step without drafts, or one near it, has been measured lately."""
        return any(
            num_requests / _NEAR < mean.num_requests < num_requests * _NEAR
            for (_, _, drafts), mean in self._means.items()
            if not drafts and mean.num_steps >= _ENOUGH
        )

    def learn(self) -> None:
        """Takes in what was measured, where that is due."""
        if self._is_new or self._step - self._fitted_at >= _STEPS_PER_FIT:
            self._is_new, self._fitted_at = False, self._step
            means = self._means.items()
            self._means = {key: mean for key, mean in means if mean.is_fresh(self._step)}
            self._fits.clear()

    def step_ms(self, num_requests: int, num_nodes: Floats, longest: Floats) -> Floats:
        """Of steps with so many nodes; beyond what was measured, half of a step grows with them."""
        bucket = _bucket(num_requests)
        fit = self._fits.get(bucket)
        if fit is None:
            fit = self._fits[bucket] = self._fit(num_requests)
        rows = num_requests + num_nodes
        clipped = np.minimum(rows, max(fit.most_rows, num_requests))
        ms = np.interp(clipped, fit.knots, fit.curve) * (0.5 + 0.5 * rows / clipped)
        ms += (longest > 0) * fit.drafting + fit.length / self._most * longest
        return np.asarray(ms * self._pace)

    def stats(self) -> dict[str, dict[str, float]]:
        """Means by number of rows, the newest of each."""
        found: dict[str, dict[int, float]] = {"plain": {}, "drafted": {}}
        means = sorted(self._means.items(), key=lambda item: item[1].last_step)
        for (_, _, drafts), mean in means:
            found["drafted" if drafts else "plain"][round(mean.num_rows)] = mean.ms * self._pace
        return {
            kind: {str(rows): ms for rows, ms in sorted(each.items())}
            for kind, each in found.items()
        }

    def _fit(self, num_requests: int) -> _Fit:
        """Least squares of relative errors."""
        used = [mean.values() for mean in self._means.values() if mean.num_steps >= _ENOUGH]
        if not used:
            return _Fit(np.ones(1), np.ones(1), 0.0, 0.0, 1.0)
        requests, rows, longest, ms, weights = np.array(used).T
        distances = np.log2(requests / num_requests) * _PER_OCTAVE_APART
        weights /= 1 + distances**2
        knots = _knots(float(rows.max()))
        unit = float(np.average(ms, weights=weights))
        at = np.clip(np.searchsorted(knots, rows, side="right") - 1, 0, len(knots) - 2)
        upper = np.clip((rows - knots[at]) / (knots[at + 1] - knots[at]), 0.0, 1.0)
        size, each = len(knots), np.arange(len(rows))
        terms = np.zeros((len(rows), size + 2))
        terms[each, at] = 1 - upper
        terms[each, at + 1] += upper
        terms[:, size], terms[:, size + 1] = longest > 0, longest / self._most
        flat = np.diff(np.eye(size), axis=0)
        prior = np.diag([1e-6] * size + [_FREE] * 2)
        # Less of it with more rows, so that what is between two measured points is convex.
        stiffness = _FLAT * num_requests**2 / np.diff(knots) / knots[1:]
        prior[:size, :size] += flat.T * stiffness @ flat
        now = weights
        for _ in range(_PASSES):
            weighted = terms * (now * (unit / ms) ** 2)[:, None]
            found = unit * np.linalg.solve(weighted.T @ terms + prior, weighted.T @ (ms / unit))
            now = weights / np.maximum(abs(terms @ found / ms - 1) / _TYPICAL_ERROR, 1.0)
            terms[:, size:] *= found[size:] > 0  # no such cost is negative
        curve, (drafting, length) = found[:size], np.maximum(found[size:], 0.0).tolist()
        rising = np.maximum.accumulate(curve) + np.minimum.accumulate(curve[::-1])[::-1]
        return _Fit(knots, np.maximum(rising / 2, 1e-3 * unit), drafting, length, float(rows.max()))


class _Mean:
    """Of similar steps, newer ones counting more."""

    __slots__ = ("last_step", "longest", "ms", "num_requests", "num_rows", "num_steps")

    def __init__(self) -> None:
        self.num_requests = self.num_rows = self.longest = self.ms = 0.0
        self.num_steps = self.last_step = 0

    def count(
        self, num_requests: int, num_rows: int, longest: int, elapsed_ms: float, step: int
    ) -> None:
        self.num_steps += 1
        self.last_step = step
        share = max(_COST_SHARE, 1 / self.num_steps)
        if self.num_steps == _ENOUGH:  # the lower of two: a bad one must not end further trials
            self.ms = elapsed_ms = min(elapsed_ms, self.ms)
        elif self.num_steps > 1:
            elapsed_ms = min(elapsed_ms, _OUTLIER * self.ms)
        self.num_requests += share * (num_requests - self.num_requests)
        self.num_rows += share * (num_rows - self.num_rows)
        self.longest += share * (longest - self.longest)
        slower = elapsed_ms > self.ms and self.num_steps > _ENOUGH
        self.ms += share * (_SLOWER if slower else 1.0) * (elapsed_ms - self.ms)

    def is_fresh(self, step: int) -> bool:
        per_step, most = _FRESH_STEPS
        return step - self.last_step < min(per_step * self.num_steps, most)

    def values(self) -> tuple[float, float, float, float, float]:
        weight = min(self.num_steps, _FULL_WEIGHT)
        return self.num_requests, self.num_rows, self.longest, self.ms, weight


def _knots(most_rows: float) -> Floats:
    """1, 2, 3, 4, 6, 8, 12 and so on, up to one that is not below `most_rows`."""
    knots = [1.0, 2.0]
    while knots[-1] < most_rows:
        octave = 2.0 ** int(np.log2(knots[-1]))
        knots.append(1.5 * octave if knots[-1] == octave else 2 * octave)
    return np.array(knots)


def _bucket(number: int) -> int:
    if number <= _EXACT:
        return number
    return _EXACT + int(np.log2(number / _EXACT) * _PER_OCTAVE)


Ints = NDArray[np.int64]

_STEPS_PER_TREE_PLAN = 4  # a head drafts a step ahead, for what it was granted then
_STEPS_PER_LESSON = 16  # after which what was measured is taken in
_STEPS_PER_TRIAL = 4  # of steps without drafts
_STEPS_BETWEEN_TRIALS = 64  # without drafts: they tell nothing while prompts are in every step
_MAX_GROUPS = 16
_TREE_GROUPS = 4
_TRIAL_NODES = 2  # of a request that nothing would be granted
_TRIAL_SHARE = 0.01  # of the time, for such trials
_LEAST_DRAFTED = 1e-3  # of the nodes that are granted
_MARGIN = 1.015  # times as fast, at least, where a choice is neither all nor nothing
_LEAST_COST = 0.5  # of a row, in those of a request: what is measured may say less by mistake


class _Choice(NamedTuple):
    """What the requests of a step are granted."""

    nodes: list[int]  # by state
    trial_cost: float  # what a trial in the same step adds to its time, of 1


class _Sorted(NamedTuple):
    """Nodes of all states, group by group, those that are worth most per row first."""

    states: Ints  # [NUM_STATES * num_groups]
    sizes: Ints  # alike: nodes
    ends: Ints  # alike: length of a draft that has them
    rows: Floats  # alike: nodes that are drafted if they are granted
    gains: Floats  # alike: nodes that are accepted then


class DraftLengths:
    """Nodes per request, planned before every step, or every few where trees are drafted.

    A node is worth the probability that it is accepted, and costs what its row adds to the step.
    `plan` sorts the nodes that all running requests could draft next by worth and grants as many
    of them as give the most expected tokens per second, which may be none (goodput: TurboSpec,
    arXiv:2406.14066). The output does not depend on it.

    A chain's nodes are weighed one by one (long ones in groups). The first nodes of a tree are a
    tree as well: it is cut to a quarter, a half or three quarters of its nodes.

    Args:
        most: nodes of a full draft.
        tree_drafts: whether a draft may have several nodes to a level.
    """

    def __init__(self, most: int, *, tree_drafts: bool) -> None:
        self._most = most
        num_groups = min(most, _TREE_GROUPS if tree_drafts else _MAX_GROUPS)
        edges = np.unique(np.linspace(0, most, num_groups + 1).round().astype(np.int64))
        self._ends, self._sizes = edges[1:], np.diff(edges)
        self._tree_drafts = tree_drafts
        self._trial_nodes = int(self._ends[0]) if tree_drafts else min(most, _TRIAL_NODES)
        self._steps_per_plan = _STEPS_PER_TREE_PLAN if tree_drafts else 1
        self._acceptance = Acceptance(self._sizes)
        self._costs = StepCosts(most)
        self._requests: dict[str, Lately] = {}
        self._granted: dict[str, int] = {}
        self._granted_first = most  # to a request that comes before the next plan
        self._choices: dict[tuple[int, ...], _Choice] = {}  # by requests of each state
        self._step = self._num_lessons = 0
        self._steps_left = 0  # until the next lesson
        self._plan_left = 0  # steps for which the plan holds
        self._plain_steps_left = 0  # of a trial without drafts
        self._tried_at = -_STEPS_BETWEEN_TRIALS
        self._trial_time = 0.0  # that trials may take, in plans

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
        if self._plain_steps_left > 0:
            self._plain_steps_left -= self._steps_per_plan
            self._grant_all(0)
        elif not self._costs.knows_any(drafts=False):  # every step has had prompts in it so far
            self._grant_all(self._most)
        else:
            self._choose()

    def most(self, request_id: str) -> int:
        """Nodes that a request may draft under the plan."""
        return self._granted.get(request_id, self._granted_first)

    def count(
        self, batch: Batch, drafts: abc.Sequence[Draft], verdict: Verdict, elapsed_ms: float
    ) -> None:
        """What became of a step's drafts, and the time that the step took."""
        self._step += 1
        ends, granted = verdict.path_start.tolist(), batch.max_nodes.tolist()
        samples, known, counted = batch.samples.tolist(), self._requests, self._acceptance.count
        num_nodes = 0
        for row, request_id in enumerate(batch.request_ids):
            nodes = drafts[row].num_nodes
            num_nodes += nodes
            lately = known.get(request_id)
            if lately is None or not samples[row]:
                continue
            if not granted[row]:
                lately.idle()
                continue
            num_accepted = ends[row + 1] - ends[row]
            path = verdict.nodes(row) if self._tree_drafts else None
            counted(lately.state, granted[row], nodes, num_accepted, path)
            if nodes:
                lately.drafted(nodes, num_accepted)
        if batch.num_tokens == batch.num_seqs == sum(samples):
            self._costs.count(batch.num_seqs, num_nodes, max(granted), elapsed_ms)

    def stats(self) -> dict[str, Any]:
        """Plain values: what is granted now, and what that is based on."""
        drafted_of_granted, acceptance = self._acceptance.stats()
        return {
            "granted": sum(self._granted.values()),
            "num_requests": len(self._granted),
            "drafted_of_granted": drafted_of_granted,
            "acceptance": acceptance,
            "nodes": self._sizes.tolist(),
            "step_ms": self._costs.stats(),
        }

    def _learn(self) -> None:
        """Takes in what was measured; at first after every step, then less often."""
        self._num_lessons += 1
        self._steps_left = min(self._num_lessons, _STEPS_PER_LESSON)
        self._acceptance.learn()
        self._costs.learn()
        self._choices.clear()
        self._sort()
        num_requests, costs = len(self._requests), self._costs
        tried_lately = self._step - self._tried_at < _STEPS_BETWEEN_TRIALS
        needs_plain = costs.knows_any(drafts=True) and not costs.knows_plain(num_requests)
        if needs_plain and not tried_lately:
            self._tried_at = self._step
            self._plain_steps_left = _STEPS_PER_TRIAL

    def _grant_all(self, num_nodes: int) -> None:
        self._granted = dict.fromkeys(self._requests, num_nodes)
        self._granted_first = num_nodes

    def _choose(self) -> None:
        """Grants what pays most, and a few nodes to a request without any now and then."""
        requests = self._requests
        counts = [0] * NUM_STATES
        for lately in requests.values():
            counts[lately.state] += 1
        choice = self._choices.get(tuple(counts))
        if choice is None:
            choice = self._choices[tuple(counts)] = self._best(counts)
        nodes, trial_cost = choice
        self._granted_first = nodes[NEW]
        self._granted = granted = {name: nodes[each.state] for name, each in requests.items()}
        if trial_cost:
            self._trial_time += _TRIAL_SHARE
            if self._trial_time >= trial_cost:
                self._trial_time = 0.0
                idle = [name for name, num_nodes in granted.items() if not num_nodes]
                tried = min(idle, key=lambda name: requests[name].tried_at)
                requests[tried].tried_at = self._step
                granted[tried] = self._trial_nodes

    def _sort(self) -> None:
        """All nodes that a request may draft next, by what they are worth per row."""
        drafted, accepted = self._acceptance.per_granted()
        worth = np.minimum.accumulate(accepted / np.maximum(drafted, _LEAST_DRAFTED), axis=1)
        order = np.argsort(-worth, axis=None, kind="stable")
        states, groups = np.divmod(order, len(self._sizes))
        sizes = self._sizes[groups]
        rows, gains = drafted.ravel()[order] * sizes, accepted.ravel()[order] * sizes
        self._sorted = _Sorted(states, sizes, self._ends[groups], rows, gains)

    def _best(self, counts: list[int]) -> _Choice:
        """How many of the sorted nodes give the most tokens per second."""
        states, sizes, ends, rows, gains = self._sorted
        per_state = np.array(counts)[states]
        num_nodes, num_gained, longest = np.zeros((3, len(states) + 1))
        np.cumsum(per_state * rows, out=num_nodes[1:])
        np.cumsum(per_state * gains, out=num_gained[1:])
        np.maximum.accumulate(np.where(per_state, ends, 0), out=longest[1:])
        num_requests = sum(counts)
        step_ms = self._costs.step_ms(num_requests, num_nodes, longest)
        speeds = (num_requests + num_gained) / step_ms
        best = int(speeds.argmax())
        for known in (0, len(states)):  # nothing, or all: what is measured is not exact
            if speeds[known] * _MARGIN >= speeds[best]:
                best = known
        nodes = np.bincount(states[:best], sizes[:best], NUM_STATES).astype(np.int64).tolist()
        trial_cost = 0.0
        if any(count and not granted for count, granted in zip(counts, nodes)):
            tried = np.array([self._trial_nodes])
            with_trial = self._costs.step_ms(
                num_requests, num_nodes[best] + tried, np.maximum(longest[best], tried)
            )
            added = float(with_trial[0] / step_ms[best]) - 1.0
            trial_cost = max(added, _LEAST_COST * self._trial_nodes / num_requests)
        return _Choice(nodes, trial_cost)


class DraftBudget:
    """The configured length, narrowed by the request's own wish and by the load.

    Args:
        max_model_len: no node lies beyond, whatever it is below.
        tree_drafts: whether a draft may have several nodes to a level.
    """

    def __init__(self, config: SpeculationBase, max_model_len: int, *, tree_drafts: bool) -> None:
        self._config = config
        self.max_draft_len = config.max_nodes  # nodes of a draft, before load and requests count
        self._max_model_len = max_model_len
        self._tree_drafts = tree_drafts
        self._last: tuple[tuple[int, int], int] = ((-1, -1), 0)  # arguments and `nodes_at`
        self.enabled = True
        self._lengths: DraftLengths | None = None
        if config.adaptive_draft_len and config.max_nodes:
            self._lengths = DraftLengths(config.max_nodes, tree_drafts=tree_drafts)

    def reconfigure(self, speculative: abc.Mapping[str, Any]) -> None:
        """Switches speculation: `enabled`, `max_draft_len`; what is left out is as configured.

        Raises:
            ConfigError: an unknown key, a length above the configured one, or no boolean; names
                the field.
        """
        allowed = {"enabled", "max_draft_len"}
        for key in speculative:
            if key not in allowed:
                raise ConfigError.at(key, f"unknown key; allowed: {sorted(allowed)}")
        enabled = speculative.get("enabled", True)
        if not isinstance(enabled, bool):
            raise ConfigError.at("enabled", f"{enabled!r} is not true or false")
        configured = self._config.max_nodes
        length = speculative.get("max_draft_len")
        if length is None:
            length = configured
        if type(length) is not int or not 0 <= length <= configured:
            raise ConfigError.at(
                "max_draft_len", f"{length!r} is not within 0 to the configured {configured}"
            )
        self.enabled, self.max_draft_len = enabled, length

    def wishes(self, sequences: abc.Iterable[Sequence], num_running: int) -> dict[Sequence, int]:
        """Nodes that each of `sequences` may draft; those are left out that may have none."""
        wishes: dict[Sequence, int] = {}
        lengths = self._lengths
        if lengths is not None:
            sequences = list(sequences)
            unpredicted = [each.request for each in sequences if not each.request.prediction.size]
            lengths.plan([request.id for request in unpredicted])
        most = self._nodes_at(num_running) if self.enabled else 0
        if most <= 0:
            return wishes
        for sequence in sequences:
            wish, num_tokens = sequence.request.speculation, sequence.tokens.size
            depth = sequence.limit - num_tokens - 1  # the bonus token is on top
            if depth <= 0 or not wish.enabled:  # nothing that is drafted could be emitted
                continue
            room = self._max_model_len - num_tokens if self._tree_drafts else depth
            nodes = most if most < room else room
            if wish.max_draft_len is not None:
                nodes = min(nodes, wish.max_draft_len)
            if lengths is not None:
                nodes = min(nodes, lengths.most(sequence.request.id))
            if nodes > 0:
                wishes[sequence] = nodes
        return wishes

    def forced_wishes(self, sequences: abc.Iterable[Sequence]) -> dict[Sequence, int]:
        """Nodes for what grammars force, of requests that speculate; no drafter is needed."""
        wishes: dict[Sequence, int] = {}
        for sequence in sequences:
            request = sequence.request
            if request.sampling.structured_outputs is None or not request.speculation.enabled:
                continue
            most = request.speculation.max_draft_len
            depth = sequence.limit - sequence.tokens.size - 1  # the bonus token is on top
            nodes = min(depth, _FORCED_NODES if most is None else most)
            if nodes > 0:
                wishes[sequence] = nodes
        return wishes

    def predicted_wishes(
        self, sequences: abc.Iterable[Sequence], wishes: dict[Sequence, int]
    ) -> dict[Sequence, int]:
        """`wishes` of drafters with the nodes for what clients predict, which need no drafter."""
        wishes = dict(wishes)
        for sequence in sequences if self.enabled else ():
            request = sequence.request
            if not request.prediction.size or not request.speculation.enabled:
                continue
            most = request.speculation.max_draft_len
            depth = sequence.limit - sequence.tokens.size - 1  # the bonus token is on top
            nodes = min(depth, _PREDICTED_NODES if most is None else min(most, _PREDICTED_NODES))
            if nodes > wishes.get(sequence, 0):
                wishes[sequence] = nodes
        return wishes

    def end_step(
        self, batch: Batch, drafts: abc.Sequence[Draft], verdict: Verdict, elapsed_ms: float
    ) -> None:
        """A step was committed, and took so long with all that the engine did for it."""
        if self._lengths is not None and batch.drafter_nodes is None:
            self._lengths.count(batch, drafts, verdict, elapsed_ms)

    def stats(self) -> dict[str, Any] | None:
        """What measured lengths are based on; None where they are not measured."""
        return None if self._lengths is None else self._lengths.stats()

    def _nodes_at(self, num_running: int) -> int:
        """The configured length under this load; the same for all requests of a step."""
        key = (num_running, self.max_draft_len)
        if self._last[0] != key:
            self._last = (key, self._config.nodes_at(*key))
        return self._last[1]


_FORCED_NODES = 16  # of a request without a drafter: tokens that its grammar forces
_PREDICTED_NODES = 32  # of a request whose client predicts its text
_STEPS_PER_TURN = 16  # a head drafts a step ahead, so that a share should last longer than one


def share_nodes(wishes: dict[Sequence, int], left: int, step: int) -> dict[Sequence, int]:
    """At most `left` nodes in all, the better priorities first and evenly within each.

    A row gets fewer than another of its priority only if it wished for fewer, or by one where the
    division leaves a remainder; who is favoured by that changes with the step. The result is in
    the order in which rows are served.
    """
    classes: dict[int, list[Sequence]] = defaultdict(list)
    for sequence in wishes:
        classes[sequence.request.priority].append(sequence)
    granted: dict[Sequence, int] = {}
    for _, rows in sorted(classes.items()):
        first = step // _STEPS_PER_TURN % len(rows)
        # The smallest wish first: what it leaves of an even share goes to those after it.
        queue = sorted(rows[first:] + rows[:first], key=wishes.__getitem__)
        for num_before, sequence in enumerate(queue):
            share, wish = left // (len(queue) - num_before), wishes[sequence]
            granted[sequence] = share = share if share < wish else wish
            left -= share
    return granted
