"""How many draft nodes pay: lengths from measured acceptance and measured step times.

A node is worth the probability that it is accepted, and costs what its row adds to the step. Every
few steps `DraftLengths.plan` sorts the nodes that all running requests could draft next by worth
and grants as many of them as give the most expected tokens per second, which may be none (goodput:
TurboSpec, arXiv:2406.14066). Called by `DraftBudget`. What is emitted does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plan import Batch
from ..types import Draft, Verdict
from .step_costs import Floats, StepCosts

_STEPS_PER_PLAN = 8
_STEPS_PER_TRIAL = 4  # of steps without drafts, and of the first full drafts
_STEPS_BETWEEN_TRIALS = 64  # without drafts: they tell nothing while prompts are in every step
_REST_STEPS = (16, 256)  # without drafts, after which a request drafts once in full: first, longest
_MAX_GROUPS = 16
_DECAY = 0.9  # of a request's counts, with each of its drafts
_DECAY_OF_ALL = 0.98
_PRIOR_NODES = 2.0  # weight of all requests' acceptance in that of one
_FIRST_GUESS = 0.8  # of a node's acceptance before anything is known
_VARIATIONS = (*[1.0] * 7, 0.7, *[1.0] * 7, 1.4)  # of the best number of nodes, so that others
# are measured, too: the curve between two measured points is a guess.
_HIT_SHARE = 0.02  # of the newest step in the share of granted nodes that are drafted


class DraftLengths:
    """Nodes per request, planned anew every few steps.

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
        self._starts, self._sizes = edges[:-1], np.diff(edges)
        self._all = _Acceptance(len(self._sizes), _DECAY_OF_ALL)
        self._all.reached += 1.0
        self._all.accepted += _FIRST_GUESS
        self._requests: dict[str, _Acceptance] = {}
        self._granted: dict[str, int] = {}
        self._costs = StepCosts()
        self._hits = 1.0
        self._step = self._num_plans = 0
        self._tried_at = -_STEPS_BETWEEN_TRIALS  # steps without drafts
        self._steps_left = 0  # of the plan

    def plan(self, request_ids: Sequence[str]) -> None:
        """Once before every step, with all that run."""
        if self._steps_left > 0 and all(each in self._granted for each in request_ids):
            self._steps_left -= 1
            return
        if not request_ids:
            return
        for known in self._requests.values():  # before those that have ended are forgotten
            known.fold(self._starts, self._sizes, self._all)
        self._requests = {
            each: self._requests.get(each) or _Acceptance(len(self._sizes), _DECAY, self._step)
            for each in request_ids
        }
        self._steps_left = _STEPS_PER_PLAN - 1
        tried_lately = self._step - self._tried_at < _STEPS_BETWEEN_TRIALS
        if not self._costs.knows_drafted:
            self._grant_all(self._most)
        elif not self._costs.knows_plain(len(request_ids)) and not tried_lately:
            self._tried_at = self._step
            self._grant_all(0)
        elif not self._costs.knows_any_plain:  # every step has had prompts in it so far
            self._grant_all(self._most)
        else:
            self._choose()

    def most(self, request_id: str) -> int:
        """Nodes that a request may draft under the plan."""
        return self._granted.get(request_id, self._most)

    def count(
        self, batch: Batch, drafts: Sequence[Draft], verdict: Verdict, elapsed_ms: float
    ) -> None:
        """What became of a step's drafts, and the time that the step took."""
        self._step += 1
        ends, granted = verdict.path_start.tolist(), batch.max_nodes.tolist()
        num_nodes = num_granted = 0
        for row, (request_id, draft) in enumerate(zip(batch.request_ids, drafts, strict=True)):
            num_granted += granted[row]
            if draft.num_nodes:
                num_nodes += draft.num_nodes
                known = self._requests.get(request_id)
                if known is not None:
                    known.count(draft.num_nodes, ends[row + 1] - ends[row])
        if num_granted:
            self._hits += _HIT_SHARE * (num_nodes / num_granted - self._hits)
        if batch.num_tokens == batch.num_seqs == sum(batch.samples.tolist()):
            self._costs.count(batch.num_seqs, num_nodes, elapsed_ms, is_plain=not num_granted)

    def stats(self) -> dict[str, Any]:
        """Plain values: what is granted now, and what that is based on."""
        return {
            "granted": sum(self._granted.values()),
            "num_requests": len(self._granted),
            "drafted_of_granted": self._hits,
            "acceptance": self._all.rates(self._all).tolist(),
            "nodes": self._sizes.tolist(),
            "step_ms": self._costs.stats(),
        }

    def _grant_all(self, num_nodes: int) -> None:
        self._granted = dict.fromkeys(self._requests, num_nodes)
        self._steps_left = _STEPS_PER_TRIAL - 1

    def _choose(self) -> None:
        known = list(self._requests.values())
        rates = np.stack([each.rates(self._all) for each in known])
        worth = np.minimum.accumulate(rates, axis=1)  # a node is accepted after its ancestors
        order = np.argsort(-worth, axis=None, kind="stable")
        sizes = np.broadcast_to(self._sizes, worth.shape)
        num_nodes = self._hits * np.cumsum(sizes.ravel()[order])
        gains = self._hits * np.cumsum((worth * sizes).ravel()[order])
        num_requests = len(known)
        speeds = (num_requests + gains) / self._costs.drafted_ms(num_requests, num_nodes)
        best = int(np.argmax(speeds))
        plain = num_requests / self._costs.plain_ms(num_requests)
        self._num_plans += 1
        varied = round((best + 1) * _VARIATIONS[self._num_plans % len(_VARIATIONS)])
        chosen = order[:varied] if speeds[best] > plain else order[:0]
        totals = np.zeros(len(known), dtype=np.int64)
        np.add.at(totals, chosen // worth.shape[1], sizes.ravel()[chosen])
        self._granted = dict(zip(self._requests, totals.tolist(), strict=True))
        for request_id, each in self._requests.items():
            if self._granted[request_id]:
                each.rest(self._step, _REST_STEPS[0])
            elif self._step >= each.rested_at:
                each.forget()  # what is known is of long ago
                each.rest(self._step, min(2 * each.num_rest_steps, _REST_STEPS[1]))
                self._granted[request_id] = self._most
                self._steps_left = 0


class _Acceptance:
    """Nodes that were reached and accepted, by group, older ones counting less."""

    def __init__(self, num_groups: int, decay: float, step: int = 0) -> None:
        self.reached: Floats = np.zeros(num_groups)
        self.accepted: Floats = np.zeros(num_groups)
        self.num_rest_steps = self.rested_at = 0
        self.rest(step, _REST_STEPS[0])
        self._decay = decay
        self._new: list[tuple[int, int]] = []  # drafts since the last `fold`

    def count(self, num_nodes: int, num_accepted: int) -> None:
        """Another draft."""
        self._new.append((num_nodes, num_accepted))

    def rest(self, step: int, num_steps: int) -> None:
        """The next trial, should nothing be granted, is so many steps away."""
        self.num_rest_steps, self.rested_at = num_steps, step + num_steps

    def forget(self) -> None:
        """Back to what is known of all."""
        self.reached[:] = self.accepted[:] = 0.0

    def fold(
        self, starts: NDArray[np.int64], sizes: NDArray[np.int64], overall: _Acceptance
    ) -> None:
        """Adds the new drafts here and to `overall`."""
        for num_nodes, num_accepted in self._new:
            reached = np.clip(num_nodes - starts, 0, sizes)
            accepted = np.clip(num_accepted - starts, 0, sizes)
            for each in (self, overall):
                each.reached *= each._decay
                each.reached += reached
                each.accepted *= each._decay
                each.accepted += accepted
        self._new.clear()

    def rates(self, overall: _Acceptance) -> Floats:
        """Accepted of the nodes of each group."""
        prior = overall.accepted / overall.reached
        return (self.accepted + _PRIOR_NODES * prior) / (self.reached + _PRIOR_NODES)
