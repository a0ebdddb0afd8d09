"""How many draft nodes pay: lengths from measured acceptance and measured step times.

A node is worth the probability that it is accepted, and costs what its row adds to the step.
Before every step `DraftLengths.plan` sorts the nodes that all running requests could draft next by
worth and grants as many of them as give the most expected tokens per second, which may be none
(goodput: TurboSpec, arXiv:2406.14066). Called by `DraftBudget`. What is emitted does not depend on
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plan import Batch
from ..types import Draft, Verdict
from .acceptance import NEW, NUM_STATES, Acceptance, Floats, Lately
from .step_costs import StepCosts

Ints = NDArray[np.int64]

_STEPS_PER_TREE_PLAN = 4  # a head drafts a step ahead, for what it was granted then
_STEPS_PER_LESSON = 16  # after which what was measured is taken in
_STEPS_PER_TRIAL = 4  # of steps without drafts
_STEPS_BETWEEN_TRIALS = 64  # without drafts: they tell nothing while prompts are in every step
_MAX_GROUPS = 16
_TRIAL_NODES = 2  # of a request that nothing would be granted
_TRIAL_SHARE = 0.02  # of the time, for such trials
_LEAST_DRAFTED = 1e-3  # of the nodes that are granted
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
    """Nodes per request, planned anew before every step, or every few where trees are drafted.

    A chain's nodes are weighed one by one (long ones in groups); a tree is drafted whole or not
    at all, since its nodes are no levels and its shape may be fixed.

    Args:
        most: nodes of a full draft.
        tree_drafts: whether a draft may have several nodes to a level.
    """

    def __init__(self, most: int, *, tree_drafts: bool) -> None:
        self._most = most
        num_groups = 1 if tree_drafts else min(most, _MAX_GROUPS)
        edges = np.unique(np.linspace(0, most, num_groups + 1).round().astype(np.int64))
        self._ends, self._sizes = edges[1:], np.diff(edges)
        self._trial_nodes = most if tree_drafts else min(most, _TRIAL_NODES)
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

    def plan(self, request_ids: Sequence[str]) -> None:
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
        elif not self._costs.knows_any_plain:  # every step has had prompts in it so far
            self._grant_all(self._most)
        else:
            self._choose()

    def most(self, request_id: str) -> int:
        """Nodes that a request may draft under the plan."""
        return self._granted.get(request_id, self._granted_first)

    def count(
        self, batch: Batch, drafts: Sequence[Draft], verdict: Verdict, elapsed_ms: float
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
            counted(lately.state, granted[row], nodes, num_accepted)
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
        if costs.knows_drafted and not tried_lately and not costs.knows_plain(num_requests):
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
        best = int(((num_requests + num_gained) / step_ms).argmax())
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
