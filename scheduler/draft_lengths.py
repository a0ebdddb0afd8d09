"""Adaptive draft lengths: each request gets the draft nodes that pay, or none (`DraftLengths`).

Three models are learned while serving: `Acceptance` counts how often nodes are accepted,
`Confidences` calibrates the drafters' own acceptance estimates, and `StepCosts` (`step_costs.py`)
predicts step times. `Knowledge` is their state, which can be saved and given to a later engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import abc
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import tree
from .step_costs import Lesson, StepCosts
from .types import Batch, Draft, IntArray, Verdict

Floats = NDArray[np.float64]
# A request's recent acceptance is divided into levels at these edges; the guesses are the prior
# acceptance of a node in each level.
_LEVEL_EDGES = (0.2, 0.4, 0.6, 0.75, 0.87)
_LEVEL_GUESSES = (0.1, 0.3, 0.5, 0.68, 0.81, 0.94)
_NUM_LEVELS = len(_LEVEL_GUESSES)
NEW, _RESTED = _NUM_LEVELS, _NUM_LEVELS + 1  # states of requests without a level
NUM_STATES = _NUM_LEVELS + 2
_STATES = np.arange(NUM_STATES)[:, None]
# Bit offsets of the three node counts in a key of `Acceptance`.
_NODE_BITS = np.array([32, 16, 0])[:, None]
_LEVEL_SHARE = 0.3  # weight of the newest draft in a request's level
_RESTED_STEPS = 6  # steps without a draft after which a level is stale
_DECAY = 0.98  # factor on older counts per draft that is added
_FIRST_GUESS = 0.8  # prior acceptance of a node
_FIRST_NODES = 8.0  # weight of that prior, in nodes
_GUESS_DRAFTS = 2.0  # weight of the other priors, in drafts
_DEPTH_DRAFTS = 8.0  # weight of the product of a state's and a depth's acceptance, in nodes
_MOST_ALIKE = 64.0  # largest weight of all states together in the estimate of one
_SUREST = 0.99  # upper bound of that product
_NUM_CONFIDENCES = 10  # bins of a drafter's estimates
_CONFIDENCE_NODES = 8.0  # weight of a drafter's estimate against counts
_ENDED_SHARE = 0.05  # weight of the last request in the moving means of lengths
_RECALLED_DRAFTS = 8.0  # largest weight of an earlier run's counts
_MOST_RECALLED = 40.0  # largest plausible log step time in a saved state


class Lately:
    """One request's recent drafting: new, rested, or at a level of acceptance.

    The level is computed from nodes whose parent was accepted, so it does not depend on the length
    of the drafts.
    """

    __slots__ = (
        "_accepted", "_reached", "begun_at", "granted", "granted_at", "num_idle", "state",
        "tried_at",
    )  # fmt: skip

    def __init__(self, begun_at: int) -> None:
        self.state, self.begun_at = NEW, begun_at  # step
        self.granted = 0  # draft nodes per step under the current plan
        self.granted_at = -1  # step since which nodes are granted
        self.tried_at = -1  # step of the last trial
        self.num_idle = _RESTED_STEPS  # steps since the last draft
        self._reached, self._accepted = 1.0, _FIRST_GUESS

    def drafted(self, num_nodes: int, num_accepted: int) -> None:
        """Records a verified draft."""
        kept = 1.0 - _LEVEL_SHARE
        self._accepted = kept * self._accepted + num_accepted
        self._reached = kept * self._reached + num_accepted + (num_accepted < num_nodes)
        self.num_idle = 0
        self.state = bisect_right(_LEVEL_EDGES, self._accepted / self._reached)

    def idle(self, num_steps: int) -> None:
        """Records steps in which the request was granted no nodes."""
        if self.num_idle < _RESTED_STEPS:
            self.num_idle += num_steps
            if self.num_idle >= _RESTED_STEPS and self.state != NEW:
                self.state = _RESTED


class Acceptance:
    """Counts granted, drafted and accepted nodes by request state and node group, with decay.

    The counts are shared by all requests, so a new request starts from the others' acceptance.

    Args:
        sizes: nodes of each group; groups are consecutive ranges of a draft's nodes.
        tree_drafts: whether drafts are trees; otherwise a group is a range of depths of a chain.
    """

    def __init__(self, sizes: NDArray[np.int64], *, tree_drafts: bool) -> None:
        self._sizes, self._tree_drafts = sizes, tree_drafts
        self._starts = np.cumsum(sizes) - sizes
        self._counts: Floats = np.zeros((3, NUM_STATES, sizes.size))
        # How often each combination of state, granted, drafted and accepted nodes (16 bits each)
        # occurred since the last `learn`.
        self._new: dict[int, int] = {}
        self._paths: list[tuple[int, IntArray]] = []  # of tree drafts: state, accepted nodes
        self.num_drafts = 0  # counted so far

    def count(
        self,
        state: int,
        num_granted: int,
        num_nodes: int,
        num_accepted: int,
        path: IntArray | None = None,  # [num_accepted], accepted nodes of a tree; None: a chain
    ) -> None:
        """Records the outcome of one request's grant in one step."""
        kind = state << 48 | num_granted << 32 | num_nodes << 16 | num_accepted
        self._new[kind] = self._new.get(kind, 0) + 1
        self.num_drafts += num_nodes > 0
        if path is not None:
            self._paths.append((state, path))

    def learn(self) -> bool:
        """Adds the recorded outcomes to the counts; returns False if there were none."""
        if not self._new:
            return False
        kinds = np.fromiter(self._new, np.int64, len(self._new))
        times = np.fromiter(self._new.values(), np.float64, len(self._new))
        self._new.clear()
        each_state = (kinds >> 48 == _STATES) * times  # [NUM_STATES, num_kinds]
        nodes = (kinds >> _NODE_BITS) & 0xFFFF  # [3, num_kinds]
        # [3, num_kinds, num_groups], nodes
        found = np.minimum(np.maximum(nodes[:, :, None] - self._starts, 0), self._sizes)
        counted = each_state @ found
        if self._paths:
            paths = [path for _, path in self._paths]
            of_paths = np.repeat([state for state, _ in self._paths], [*map(len, paths)])
            groups = np.searchsorted(self._starts, np.concatenate(paths), side="right") - 1
            counted[2] = 0
            np.add.at(counted[2], (of_paths, groups), 1)
            self._paths.clear()
        self._counts *= _DECAY ** (each_state @ (found[0] > 0).astype(np.float64))
        self._counts += counted
        return True

    def per_granted(self) -> tuple[Floats, Floats]:
        """Expected drafted and accepted nodes per granted node, by state and group.

        Both are non-increasing along a draft: a node comes after its ancestors, and groups are in
        order of their value. A group that no draft has reached is assumed to lose as much as the
        group before it.
        """
        granted, drafted, accepted = self._counts
        hits = np.minimum.accumulate(_guessed(drafted, granted, 1.0), axis=1)
        if self._tree_drafts:
            guess, guesses = _FIRST_GUESS, []  # the prior of a group is the group before it
            weight = _GUESS_DRAFTS * self._sizes
            for of_group in zip(accepted.sum(axis=0), drafted.sum(axis=0), weight, strict=True):
                guess = (of_group[0] + of_group[2] * guess) / (of_group[1] + of_group[2])
                guesses.append(guess)
            worth = (accepted + weight * np.array(guesses)) / (drafted + weight)
            return hits, hits * np.minimum.accumulate(worth, axis=1)
        # The number of drafts that have the group and whose nodes before it were all accepted.
        share = np.divide(drafted[:, 1:], drafted[:, :-1], where=drafted[:, :-1] > 0,
                          out=np.zeros_like(drafted[:, 1:]))  # fmt: skip
        reached = np.concatenate([drafted[:, :1], accepted[:, :-1] * share], axis=1)
        each = self._conditional(np.minimum(accepted, reached), reached)
        return hits, hits * np.cumprod(each, axis=1)

    def _conditional(self, accepted: Floats, reached: Floats) -> Floats:
        """Acceptance of a node whose parent was accepted, by state and group.

        Estimates of states are shrunk towards the common mean. The weight of the mean follows from
        the spread between states beyond what chance explains (empirical Bayes; DerSimonian and
        Laird 1986).
        """
        of_state, in_state = accepted.sum(axis=1), reached.sum(axis=1)
        num_reached = max(float(in_state.sum()), 1e-9)
        overall = (of_state.sum() + _FIRST_NODES * _FIRST_GUESS) / (num_reached + _FIRST_NODES)
        chance = overall * (1.0 - overall)
        excess = float(((of_state - in_state * overall) ** 2 / np.maximum(in_state, 1e-9)).sum())
        excess -= chance * (np.count_nonzero(in_state) - 1)
        excess /= max(num_reached - float((in_state**2).sum()) / num_reached, 1e-9)
        weight = min(chance / max(excess, 1e-9), _MOST_ALIKE)
        levels = np.array([*_LEVEL_GUESSES, overall, overall])
        guesses = weight * overall + _GUESS_DRAFTS * levels
        states = (of_state + guesses) / (in_state + weight + _GUESS_DRAFTS)
        of_depth, at_depth = accepted.sum(axis=0), reached.sum(axis=0)
        depths = (of_depth + _DEPTH_DRAFTS * overall) / (at_depth + _DEPTH_DRAFTS) / overall
        guess = np.minimum(np.outer(states, depths), _SUREST)
        return (accepted + _DEPTH_DRAFTS * guess) / (reached + _DEPTH_DRAFTS)

    def stats(self) -> tuple[float, list[float]]:
        """Over all states: drafted per granted node, and accepted per drafted node by group."""
        granted, drafted, accepted = self._counts.sum(axis=1)
        share = _guessed(drafted.sum(), granted.sum(), 1.0)
        return float(share), _guessed(accepted, drafted, _FIRST_GUESS).tolist()

    @property
    def counts(self) -> Floats:  # [3, NUM_STATES, num_groups]
        """Granted, drafted and accepted."""
        return self._counts

    def recall(self, counts: Floats) -> None:
        """Starts from the counts of an earlier run, scaled down to the weight of a few drafts."""
        weight = _RECALLED_DRAFTS * self._sizes / np.maximum(counts[:1], 1e-9)
        self._counts = counts * np.minimum(weight, 1.0)
        self.num_drafts = int(counts[1, :, 0].sum() / self._sizes[0])


def _guessed(accepted: Any, reached: Any, guess: Any) -> Any:
    """`accepted / reached`, smoothed with `_GUESS_DRAFTS` counts at the prior `guess`."""
    return (accepted + _GUESS_DRAFTS * guess) / (reached + _GUESS_DRAFTS)


class Confidences:
    """Calibrates a drafter's estimates of a node's acceptance, given that its parent is accepted.

    Nodes are counted in bins of similar estimates, with decay. Where a bin has few counts, the
    estimate is used as it is, so a bin whose nodes are no longer drafted is tried again in time.
    """

    def __init__(self) -> None:
        self._counts: Floats = np.zeros((2, _NUM_CONFIDENCES))  # reached, accepted
        self._new: list[tuple[NDArray[np.floating], int]] = []

    def count(self, chances: NDArray[np.floating], num_accepted: int) -> None:
        """Records a verified chain and its estimates."""
        self._new.append((chances[: num_accepted + 1], num_accepted))

    def learn(self) -> None:
        """Adds the recorded chains to the counts."""
        if not self._new:
            return
        kinds = _kinds(np.concatenate([chances for chances, _ in self._new]))
        is_accepted = [np.arange(len(chances)) < count for chances, count in self._new]
        reached, accepted = (
            np.bincount(each, minlength=_NUM_CONFIDENCES)
            for each in (kinds, kinds[np.concatenate(is_accepted)])
        )
        self._counts *= _DECAY ** (len(self._new) / _NUM_CONFIDENCES)
        self._counts += reached, accepted
        self._new.clear()

    def believed(self, chances: NDArray[np.floating]) -> Floats:
        """Calibrated estimates."""
        reached, accepted = self._counts[:, _kinds(chances)]
        return (accepted + _CONFIDENCE_NODES * chances) / (reached + _CONFIDENCE_NODES)


def _kinds(chances: NDArray[np.floating]) -> NDArray[np.int64]:
    """The bin of each estimate."""
    return np.minimum((chances * _NUM_CONFIDENCES).astype(np.int64), _NUM_CONFIDENCES - 1)


class Openings:
    """The cost of a drafter's pass over a request's prompt, spread over the request's output."""

    def __init__(self) -> None:
        self.ms_per_token = 0.0  # per prompt token, measured when the engine starts
        self.num_prompt = self.num_output = 0.0  # tokens per request, moving means

    def ended(self, num_prompt: int, num_output: int) -> None:
        """Records a finished request; `num_prompt` excludes tokens found in the prefix cache."""
        share = _ENDED_SHARE if self.num_output else 1.0
        self.num_prompt += share * (num_prompt - self.num_prompt)
        self.num_output += share * (max(num_output, 1) - self.num_output)

    @property
    def ms(self) -> float:
        """Milliseconds per request."""
        return self.ms_per_token * self.num_prompt

    def ms_per_output(self, age: float) -> float:
        """Milliseconds per emitted token; `age` is the mean number of tokens emitted so far."""
        return self.ms / max(self.num_output, age, 1.0)

    @property
    def values(self) -> Floats:  # [3]
        return np.array([self.ms_per_token, self.num_prompt, self.num_output])

    def recall(self, values: Floats) -> None:
        """Starts from the values of an earlier run."""
        self.ms_per_token, self.num_prompt, self.num_output = values.tolist()


class Knowledge(NamedTuple):
    """The learned state for one target and its drafters on one machine."""

    accepted: Floats  # [3, NUM_STATES, num_groups], of `Acceptance`
    costs: Floats  # of `StepCosts`
    covariance: Floats  # of the costs
    opening: Floats  # [3], of `Openings`

    def fits(self, other: Knowledge) -> bool:
        """Whether it can replace `other`: the shapes are equal and all values are plausible."""
        alike = all(one.shape == two.shape for one, two in zip(self, other, strict=True))
        granted, drafted, accepted = self.accepted if alike else (np.zeros(1) - 1,) * 3
        return (
            alike
            and all(bool(np.isfinite(each).all()) for each in self)
            and bool((self.opening >= 0).all())
            and bool((accepted >= 0).all() and (drafted >= accepted).all())
            and bool((granted >= drafted).all() and (np.abs(self.costs) < _MOST_RECALLED).all())
            and bool((np.diag(self.covariance) > 0).all())
            and float(np.linalg.eigvalsh(self.covariance)[0]) > -1e-3
        )


_STEPS_PER_PLAN = 8  # several, since a head drafts one step ahead and first has to catch up
_MAX_GROUPS = 16
_TREE_GROUPS = 4
_MOST_PRICES = 24  # prices that one choice compares
_MOST_STEPS_PER_CHOICE = 64  # steps between choices of a price; fewer at first
_ROWS_PER_COUNT = 16  # with more requests than this, only every n-th step is counted
_LEAST_CHANCE = 1e-9
_MARGIN = 0.01  # log speed-up that drafting must reach before it is used
_KEPT = 0.004  # log speed-up that another price must reach before it replaces the current one
# Until so many drafts are verified, some requests draft in any case. Models need more, since their
# drafts after short contexts are worse than later ones, and windows (Lookahead) even more, since
# their first guesses are empty.
_FIRST_DRAFTS, _FIRST_MODEL_DRAFTS, _FIRST_WHOLE_DRAFTS = 4, 16, 32
_REQUESTS_PER_FIRST = 4  # one of so many requests drafts during that time
_TRIAL_NODES = 2  # nodes of a trial: a draft of a request that would otherwise get none
_TRIAL_SHARE = 0.004  # least share of the time that trials may take
_STEPS_PER_TRIAL = 4
_LEAST_TRIAL_COST = 0.05  # least cost of a trial, in steps
_FIRST_SUCCESS, _SUCCESS_SHARE = 0.1, 0.1  # trials after which drafting pays: prior, weight


class DraftLengths:
    """Grants each request the draft nodes that pay.

    The worth of a node is the probability that it is accepted. A *price* is the least worth for
    which a node is granted, the same for all requests, so that nodes go to the requests and depths
    where they are accepted. The price is chosen to maximise expected tokens per expected step time
    (`StepCosts`, which includes drafting); at an infinite price nothing is drafted. The output of
    a request does not depend on the price.

    The nodes of a chain are decided one by one, those of a long chain in groups. If the drafter
    reports estimates, a chain is also cut after drafting, before the first node whose estimate is
    below the price (`shorten`); that decision depends on the tokens before the node and not on the
    node's own token. A tree is cut to its first quarter, half or three quarters, which are trees.

    Args:
        most: nodes of a full draft.
        tree_drafts: whether drafts are trees.
        has_model: whether the drafter computes with weights; it then takes a step to resume.
        whole: whether a shortened draft would be useless: a request gets all nodes or none.
    """

    def __init__(
        self, most: int, *, tree_drafts: bool, has_model: bool = False, whole: bool = False
    ) -> None:
        self._most = most
        self.ranks_choose = False  # which nodes are verified, as many as are granted to all
        num_groups = 1 if whole else min(most, _TREE_GROUPS if tree_drafts else _MAX_GROUPS)
        self._first_drafts = _FIRST_MODEL_DRAFTS if has_model else _FIRST_DRAFTS
        if whole:
            self._first_drafts = _FIRST_WHOLE_DRAFTS
        edges = np.unique(np.linspace(0, most, num_groups + 1).round().astype(np.int64))
        self._sizes = np.diff(edges)
        self._weights = self._sizes.astype(np.float64)  # as floats, for products
        self._tree_drafts, self._has_model = tree_drafts, has_model
        self._trial_nodes = int(edges[1]) if tree_drafts or whole else min(most, _TRIAL_NODES)
        self._follows = not tree_drafts and not has_model  # grants change after every draft
        self._acceptance = Acceptance(self._sizes, tree_drafts=tree_drafts)
        self._confidences = Confidences()
        self._costs = StepCosts(most, has_model=has_model)
        self._openings = Openings()
        self._requests: dict[str, Lately] = {}
        self._ended: dict[str, Lately] = {}  # since the last step was counted
        self._planned_ids: abc.Sequence[str] = ()  # of the last plan
        # `granted_first`: nodes of a request that arrives while a plan holds.
        self._grants_any, self.granted_first = True, most
        self._step = self._forgotten_at = self._learned_at = 0
        self._plan_left = 0  # steps until the next plan
        self._choice_left = 0  # steps until the next choice of a price
        self._num_choices = 0
        self._price = 0.0  # inf: nothing is drafted
        self._num_chosen_for = 0  # running requests at the time of that choice
        self._gain = 1.0  # expected ratio of tokens per second to plain decoding
        self._num_unmeasured = 0  # upcoming steps whose times are not representative
        self._num_measured = 0  # steps in `_measured`
        self._measured = [0.0, 0.0, 0.0]  # sums of requests, of nodes, of log times
        self._is_trial = False  # whether the plan includes a trial
        self._tried = ""  # the request on trial, until its first draft is verified
        self._trial_time = 0.0  # time saved up for trials, in steps
        self._success = _FIRST_SUCCESS  # share of trials after which drafting pays
        self._trial_share, self._trial_cost = _TRIAL_SHARE, 1.0
        self._gains_alone = [0.0] * NUM_STATES
        # Draft lengths considered for a single request: none, a trial's, and up to each group's
        # end; and the accepted nodes of the latter under the prior alone.
        self._alone = np.array([0, self._trial_nodes, *edges[1:]], dtype=np.float64)
        self._hopes = _FIRST_GUESS * (1.0 - _FIRST_GUESS ** self._alone[2:]) / (1.0 - _FIRST_GUESS)
        self._update()
        self._reprice()

    # -- before a step

    def plan(self, request_ids: abc.Sequence[str]) -> None:
        """Called before every step with the running requests.

        The same list object must be passed only if the requests are the same.
        """
        if not request_ids:
            return
        known = self._requests
        if len(known) != len(request_ids) or (
            request_ids is not self._planned_ids and not all(map(known.__contains__, request_ids))
        ):
            known = self._requests = {each: known.get(each) or self._new() for each in request_ids}
        self._planned_ids = request_ids
        self._plan_left -= 1
        self._choice_left -= 1
        if self._plan_left > 0:
            return
        self._plan_left = _STEPS_PER_PLAN
        if self._choice_left <= 0 or not 0.6 < len(known) / self._num_chosen_for < 1.6:
            self._choose()
        self._grant()

    def _new(self) -> Lately:
        """The record of a request that arrives while a plan holds."""
        found = Lately(self._step)
        found.granted, found.granted_at = self.granted_first, self._step
        self._grants_any = self._grants_any or self.granted_first > 0
        return found

    def rests(self) -> bool:
        """Called before a step instead of `plan`; returns whether the step is granted no nodes."""
        if self._plan_left <= 1 or self._grants_any or self.granted_first:
            return False
        self._plan_left -= 1
        self._choice_left -= 1
        return True

    @property
    def grants_none(self) -> bool:
        """Whether the plan grants no nodes to any request."""
        return not self._grants_any and not self.granted_first

    @property
    def requests(self) -> abc.Mapping[str, Lately]:
        """Records by request id; a new object whenever the set of requests changes."""
        return self._requests

    def shorten(self, request_ids: abc.Sequence[str], drafts: list[Draft]) -> list[Draft]:
        """Cuts chains before the first node whose calibrated estimate is below the price."""
        rows = [
            row
            for row, draft in enumerate(drafts)
            if draft.chances is not None and len(draft.chances) and tree.is_chain(draft.parents)
        ]
        if not rows or not 0.0 < self._price < np.inf:
            return drafts
        chances = [drafts[row].chances for row in rows]
        lens = np.array([len(each) for each in chances])  # type: ignore[arg-type]
        starts = np.cumsum(lens) - lens
        believed = self._confidences.believed(np.concatenate(chances))  # type: ignore[arg-type]
        logs = np.log(np.maximum(believed, _LEAST_CHANCE))
        sums = np.cumsum(logs)
        sums -= np.repeat(sums[starts] - logs[starts], lens)  # cumulative within each draft
        counts = np.add.reduceat(sums >= log(self._price), starts)
        left = list(drafts)
        for row, count in zip(rows, counts.tolist()):
            if request_ids[row] != self._tried:
                left[row] = tree.truncate(drafts[row], count)
        return left

    # -- after a step

    def count(
        self, batch: Batch, drafts: abc.Sequence[Draft], verdict: Verdict, elapsed_ms: float
    ) -> None:
        """Records the outcome of a step's drafts and the step's time."""
        self._step += 1
        stride = 1 + (batch.num_seqs - 1) // _ROWS_PER_COUNT
        if self._step % stride:
            self._num_unmeasured -= self._num_unmeasured > 0
            return
        num_nodes = 0
        if self._grants_any or batch.max_nodes.any():
            num_nodes = self._count_rows(batch, drafts, verdict, stride)
        elif self._num_unmeasured <= 0:
            for lately in self._requests.values():
                lately.idle(stride)
        self._ended.clear()
        if self._num_unmeasured > 0:
            self._num_unmeasured -= 1
        elif elapsed_ms > 0 and batch.num_tokens == batch.num_seqs:
            measured = self._measured
            self._num_measured += 1
            measured[0] += batch.num_seqs
            measured[1] += num_nodes
            measured[2] += log(elapsed_ms)

    def _count_rows(
        self, batch: Batch, drafts: abc.Sequence[Draft], verdict: Verdict, num_steps: int
    ) -> int:
        """Records the outcome of a step's drafts; returns the number of their nodes."""
        ends, granted = verdict.path_start.tolist(), batch.max_nodes.tolist()
        samples, counted, num_all = batch.samples.tolist(), self._acceptance.count, 0
        known = {**self._ended, **self._requests} if self._ended else self._requests
        for row, request_id in enumerate(batch.request_ids):
            lately, nodes = known.get(request_id), drafts[row].num_nodes
            num_all += nodes
            if lately is None or not samples[row]:
                continue
            if not granted[row]:
                lately.idle(num_steps)
                continue
            if self._has_model and not nodes and self._step <= lately.granted_at + 2:
                continue  # the grant takes effect in the next step
            if self.ranks_choose:  # what they have verified of a draft is its grant
                granted[row] = nodes
                if not nodes:
                    lately.idle(num_steps)
                    continue
            num_accepted = ends[row + 1] - ends[row]
            path = verdict.nodes(row) if self._tree_drafts else None
            counted(lately.state, granted[row], nodes, num_accepted, path)
            if nodes:
                if (chances := drafts[row].chances) is not None and not self._tree_drafts:
                    self._confidences.count(chances, num_accepted)
                lately.drafted(nodes, num_accepted)
                if request_id == self._tried:
                    self._end_trial(lately.state)
                elif self._follows and lately.granted:
                    lately.granted = self._nodes[lately.state]
        return num_all

    def forget(self, request_id: str, num_prompt: int, num_output: int) -> None:
        """Records the end of a request, whose last step may not be counted yet.

        Args:
            num_prompt: prompt tokens that were not in the prefix cache.
        """
        if num_output:
            self._openings.ended(num_prompt, num_output)
        lately = self._requests.pop(request_id, None)
        if lately is not None:
            self._ended[request_id] = lately

    # -- what is known

    def teach(self, lesson: Lesson) -> None:
        """Learns the time of steps that were measured when the engine started."""
        self._costs.learn(lesson, apart=0)

    def teach_opening(self, ms_per_token: float) -> None:
        """Sets the time that drafting adds per prompt token."""
        self._openings.ms_per_token = ms_per_token

    def follow(self, before: DraftLengths) -> None:
        """Takes over what does not depend on the drafter from `before`, of the same target."""
        for lesson in before._costs.plain():
            self.teach(lesson)
        found = self._openings
        _, found.num_prompt, found.num_output = before._openings.values.tolist()

    @property
    def num_lessons(self) -> int:
        """Lessons about step times in this run."""
        return self._costs.num_lessons

    def knowledge(self) -> Knowledge:
        """The learned state, to be saved."""
        return Knowledge(self._acceptance.counts, *self._costs.belief, self._openings.values)

    def recall(self, known: Knowledge) -> bool:
        """Starts from a saved state, before any step; returns False if it does not fit."""
        if not known.fits(self.knowledge()):
            return False
        self._acceptance.recall(known.accepted)
        self._costs.recall(known.costs, known.covariance)
        self._openings.recall(known.opening)
        self._update()
        self._reprice()
        return True

    def stats(self) -> dict[str, Any]:
        """Plain values: the current grants and the measurements behind them."""
        drafted_of_granted, acceptance = self._acceptance.stats()
        return {
            "granted": sum([each.granted for each in self._requests.values()]),
            "num_requests": len(self._requests),
            "drafted_of_granted": drafted_of_granted,
            "acceptance": acceptance,
            "nodes": self._sizes.tolist(),
            "price": self._price if self._price < np.inf else None,
            "gain": self._gain,
            "opening_ms": self._openings.ms,
            "step_ms": self._costs.stats(),
        }

    def _update(self) -> None:
        """Recomputes the worth of nodes from the counts."""
        self._hits, self._accepted = self._acceptance.per_granted()
        self._worth = self._accepted / self._hits

    def _reprice(self) -> None:
        """Recomputes the nodes that a request of each state is granted at the price."""
        self._nodes: list[int] = ((self._worth >= self._price) @ self._sizes).tolist()

    # -- the price

    def _choose(self) -> None:
        """Learns from the steps since the last choice, and chooses the price of the next ones."""
        self._take_in()
        self._costs.forget(self._step - self._forgotten_at)
        self._forgotten_at = self._step
        self._confidences.learn()
        if self._acceptance.learn():
            self._update()
        states = [each.state for each in self._requests.values()]
        num_by_state = np.bincount(states, minlength=NUM_STATES).astype(np.float64)
        price = self._best_price(num_by_state)
        if (price < np.inf) != (self._price < np.inf) and self._has_model:
            self._num_unmeasured = 2
        self._num_chosen_for = len(states)
        self._num_choices += 1
        self._choice_left = min(1 + self._num_choices, _MOST_STEPS_PER_CHOICE)
        self._price = price
        self._reprice()
        if not all(self._nodes[:_NUM_LEVELS]):
            self._weigh_trials()

    def _take_in(self) -> None:
        """Learns the mean time of the steps in `_measured`, which had similar grants."""
        num_requests, num_nodes, log_ms = self._measured
        if num_steps := self._num_measured:
            apart, self._learned_at = self._step - self._learned_at, self._step
            nodes, requests = num_nodes / num_requests, num_requests / num_steps
            self._costs.learn(Lesson(requests, nodes, log_ms / num_steps, num_steps), apart=apart)
        self._num_measured, self._measured = 0, [0.0, 0.0, 0.0]

    def _best_price(self, num_by_state: Floats) -> float:
        worth = np.unique(self._worth[num_by_state > 0])[::-1]
        if worth.size > _MOST_PRICES:
            worth = worth[np.linspace(0, worth.size - 1, _MOST_PRICES).round().astype(int)]
        # The current price, the infinite one, and one price between each two distinct worths.
        prices = np.array([self._price, np.inf, *np.sqrt(worth[:-1] * worth[1:]), 0.0])
        pays = (self._worth >= prices[:, None, None]).astype(np.float64)
        num_prices, num_requests = len(prices), float(num_by_state.sum())
        nodes = pays.reshape(-1, self._weights.size) @ self._weights
        nodes = nodes.reshape(num_prices, NUM_STATES)
        # One product for all sums: the number of numpy calls dominates, not the arithmetic.
        each = num_by_state[:, None] * self._weights
        expected = np.array([(each * self._hits).ravel(), (each * self._accepted).ravel()])
        drafted, accepted = expected @ pays.reshape(num_prices, -1).T
        deepest = (nodes * (num_by_state > 0)).max(axis=1)
        ms = np.exp(self._costs.expect(int(num_requests), drafted / num_requests, deepest))
        if opening_ms := self._opening_ms():
            ms += ((nodes > 0) @ num_by_state + accepted) * opening_ms
        speeds = np.log((num_requests + accepted) / ms)
        scores = speeds - _MARGIN * (prices < np.inf)
        scores[0] += _KEPT
        best = int(scores.argmax())
        self._gain = exp(speeds[best] - speeds[1])
        return float(prices[best])

    def _opening_ms(self) -> float:
        """Milliseconds that drafting a prompt adds per emitted token of a running request."""
        if not self._openings.ms:
            return 0.0
        begun = [each.begun_at for each in self._requests.values()]
        return self._openings.ms_per_output(self._step - sum(begun) / len(begun))

    def _grant(self) -> None:
        """Grants the nodes that are worth the price; from time to time begins a trial."""
        nodes, requests = self._nodes, self._requests
        if self._is_trial:  # the times of its steps are learned apart from the others
            self._take_in()
            self._tried, self._is_trial = "", False
        grants_any, firsts = False, 0  # `firsts`: requests that draft so that there are counts
        if self._acceptance.num_drafts < self._first_drafts:
            firsts = 1 + (len(requests) - 1) // _REQUESTS_PER_FIRST
            nodes, self._plan_left = [0] * NUM_STATES, _STEPS_PER_TRIAL
        for each in requests.values():
            granted = nodes[each.state]
            if firsts:
                firsts -= 1
                granted = self._nodes[each.state] or self._trial_nodes
            if granted != each.granted:
                if not each.granted:
                    each.granted_at = self._step
                each.granted = granted
            grants_any = grants_any or granted > 0
        self._grants_any, self.granted_first = grants_any, nodes[NEW]
        saved = self._trial_time + self._trial_share * self._plan_left
        self._trial_time = min(saved, 2.0 * self._trial_cost)
        if self._trial_time < self._trial_cost or all(self._nodes[:_NUM_LEVELS]):
            return
        idle = [name for name, each in requests.items() if not each.granted]
        if idle:
            self._take_in()
            self._num_unmeasured = int(self._has_model)  # a model drafts from the next step on
            self._is_trial = True
            self._tried = min(idle, key=lambda name: requests[name].tried_at)
            tried = requests[self._tried]
            tried.tried_at = tried.granted_at = self._step
            tried.granted, self._grants_any = self._trial_nodes, True
            self._trial_time -= self._trial_cost
            self._plan_left = _STEPS_PER_TRIAL

    def _end_trial(self, state: int) -> None:
        """Ends a trial by its verified draft; if drafting pays, a new plan is made at once."""
        self._tried = ""
        pays = self._gains_alone[state] > _MARGIN
        self._success += _SUCCESS_SHARE * (pays - self._success)
        if pays:
            self._choice_left = 0
            self._plan_left = 0 if self._follows else self._plan_left

    def _weigh_trials(self) -> None:
        """Estimates what one resting request gains by drafting, by state, and what a trial costs.

        With a trial of cost `c` every `t` steps, trials lose `c / t` per step, and drafting begins
        `t / 2` steps late on average in the share `p` of trials after which it pays. The sum of
        both losses is least where they are equal, which gives the share of time for trials.
        """
        num_requests, nodes = len(self._requests), self._alone
        log_ms = self._costs.expect(num_requests, nodes / num_requests, nodes)
        times = np.exp(log_ms)
        plain_ms = float(times[0])
        slower = times / plain_ms - 1.0
        accepted = (self._accepted * self._weights).cumsum(axis=1)
        opening = self._opening_ms() / plain_ms
        costs = slower[2:] + opening
        gains = accepted * (1.0 / num_requests - opening) - costs
        self._gains_alone = gains.max(axis=1).tolist()
        trial = float(slower[1]) * _STEPS_PER_TRIAL + self._openings.ms / plain_ms
        self._trial_cost = max(trial, _LEAST_TRIAL_COST)
        # The counts may come from few and unusually bad drafts, so the prior is considered, too.
        hoped = 0.0
        if not self._tree_drafts:
            hoped = float((self._hopes * (1.0 / num_requests - opening) - costs).max())
        gain = max(*self._gains_alone, hoped)
        self._trial_share = max(0.5 * self._success * gain, _TRIAL_SHARE)
