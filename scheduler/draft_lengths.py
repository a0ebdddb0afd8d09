"""Draft lengths that follow measurements: as many nodes as pay, or none (`DraftLengths`).

`Acceptance` holds how often nodes are accepted, `Confidences` what drafters' own estimates of that
are worth, `StepCosts` (`step_costs.py`) how long steps take.
What both have learned can be kept and given to a later engine (`Knowledge`).
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
# Acceptance of a request's newest nodes, between levels; and what is guessed of a node in each.
_LEVEL_EDGES = (0.2, 0.4, 0.6, 0.75, 0.87)
_LEVEL_GUESSES = (0.1, 0.3, 0.5, 0.68, 0.81, 0.94)
_NUM_LEVELS = len(_LEVEL_GUESSES)
NEW, _RESTED = _NUM_LEVELS, _NUM_LEVELS + 1  # the states beside the levels
NUM_STATES = _NUM_LEVELS + 2
_STATES = np.arange(NUM_STATES)[:, None]
_NODE_BITS = np.array([32, 16, 0])[:, None]  # of `Acceptance`: where counts of nodes begin
_LEVEL_SHARE = 0.3  # of the newest draft in a request's level
_RESTED_STEPS = 6  # without a draft, after which a level tells nothing
_DECAY = 0.98  # of a count, with each draft that adds to it
_FIRST_GUESS = 0.8  # of a node's acceptance
_FIRST_NODES = 8.0  # weight of that
_GUESS_DRAFTS = 2.0  # of other guesses
_DEPTH_DRAFTS = 8.0  # of what a state and a depth let expect of both together
_MOST_ALIKE = 64.0  # nodes that all other states may weigh
_SUREST = 0.99
_NUM_CONFIDENCES = 10  # kinds of estimates
_CONFIDENCE_NODES = 8.0  # weight of an estimate against counts
_ENDED_SHARE = 0.05  # of the last request in what requests take on the mean
_RECALLED_DRAFTS = 8.0  # weight of what an earlier run counted, at most
_MOST_RECALLED = 40.0  # of a step's time, as a logarithm


class Lately:
    """One request's state: nothing drafted yet, none for some steps, or a level of its drafts.

    The level is the acceptance of a request's newest nodes that came after accepted ones, so that
    it does not depend on where drafts were cut.
    """

    __slots__ = (
        "_accepted", "_reached", "begun_at", "granted", "granted_at", "num_idle", "state",
        "tried_at",
    )  # fmt: skip

    def __init__(self, begun_at: int) -> None:
        self.state, self.begun_at = NEW, begun_at  # step
        self.granted = 0  # nodes of each step, as planned
        self.granted_at = -1  # step of the first of these
        self.tried_at = -1  # step of the last trial
        self.num_idle = _RESTED_STEPS  # steps since a draft
        self._reached, self._accepted = 1.0, _FIRST_GUESS

    def drafted(self, num_nodes: int, num_accepted: int) -> None:
        """A draft was verified."""
        kept = 1.0 - _LEVEL_SHARE
        self._accepted = kept * self._accepted + num_accepted
        self._reached = kept * self._reached + num_accepted + (num_accepted < num_nodes)
        self.num_idle = 0
        self.state = bisect_right(_LEVEL_EDGES, self._accepted / self._reached)

    def idle(self, num_steps: int) -> None:
        """Nothing was granted in so many steps that could have drafted."""
        if self.num_idle < _RESTED_STEPS:
            self.num_idle += num_steps
            if self.num_idle >= _RESTED_STEPS and self.state != NEW:
                self.state = _RESTED


class Acceptance:
    """Nodes that were granted, drafted and accepted, by state and group; older ones count less.

    It is learned from all requests together, so that a new request starts with what they showed.

    Args:
        sizes: nodes of each group, which follow one another in a draft.
        tree_drafts: whether groups are parts of trees, and not depths of chains.
    """

    def __init__(self, sizes: NDArray[np.int64], *, tree_drafts: bool) -> None:
        self._sizes, self._tree_drafts = sizes, tree_drafts
        self._starts = np.cumsum(sizes) - sizes
        self._counts: Floats = np.zeros((3, NUM_STATES, sizes.size))
        # Since the last `learn`, by state, granted, drafted and accepted, 16 bits each: how often.
        self._new: dict[int, int] = {}
        self._paths: list[tuple[int, IntArray]] = []  # of trees: states, and accepted nodes
        self.num_drafts = 0  # counted so far

    def count(
        self,
        state: int,
        num_granted: int,
        num_nodes: int,
        num_accepted: int,
        path: IntArray | None = None,  # [num_accepted], of a tree; None: the first nodes
    ) -> None:
        """What became of a grant."""
        kind = state << 48 | num_granted << 32 | num_nodes << 16 | num_accepted
        self._new[kind] = self._new.get(kind, 0) + 1
        self.num_drafts += num_nodes > 0
        if path is not None:
            self._paths.append((state, path))

    def learn(self) -> bool:
        """Takes in what was counted; False: there was nothing."""
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
        """Drafted and accepted of the granted nodes, by state and group.

        A node comes after its ancestors, and a group after those that are worth more, so neither
        rises along a draft. Groups that no draft reached are guessed to lose as much as those
        before them did: what is behind a cut is not known to be worse, nor better.
        """
        granted, drafted, accepted = self._counts
        hits = np.minimum.accumulate(_guessed(drafted, granted, 1.0), axis=1)
        if self._tree_drafts:
            guess, guesses = _FIRST_GUESS, []  # as those before them, until they are known
            weight = _GUESS_DRAFTS * self._sizes
            for of_group in zip(accepted.sum(axis=0), drafted.sum(axis=0), weight, strict=True):
                guess = (of_group[0] + of_group[2] * guess) / (of_group[1] + of_group[2])
                guesses.append(guess)
            worth = (accepted + weight * np.array(guesses)) / (drafted + weight)
            return hits, hits * np.minimum.accumulate(worth, axis=1)
        # Of drafts that have a group, how many nodes before it were accepted.
        share = np.divide(drafted[:, 1:], drafted[:, :-1], where=drafted[:, :-1] > 0,
                          out=np.zeros_like(drafted[:, 1:]))  # fmt: skip
        reached = np.concatenate([drafted[:, :1], accepted[:, :-1] * share], axis=1)
        each = self._conditional(np.minimum(accepted, reached), reached)
        return hits, hits * np.cumprod(each, axis=1)

    def _conditional(self, accepted: Floats, reached: Floats) -> Floats:
        """Acceptance of nodes that are reached, by state and group.

        States and depths that differ by no more than chance are taken together: the spread between
        states says how many nodes of its own a state needs to be believed (empirical Bayes; Der-
        Simonian and Laird 1986).
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
        """Of all requests: drafted of the granted nodes, and accepted of the drafted by group."""
        granted, drafted, accepted = self._counts.sum(axis=1)
        share = _guessed(drafted.sum(), granted.sum(), 1.0)
        return float(share), _guessed(accepted, drafted, _FIRST_GUESS).tolist()

    @property
    def counts(self) -> Floats:  # [3, NUM_STATES, num_groups]
        """Granted, drafted and accepted."""
        return self._counts

    def recall(self, counts: Floats) -> None:
        """Continues from the counts of an earlier run, of the same shape, as if of few drafts."""
        weight = _RECALLED_DRAFTS * self._sizes / np.maximum(counts[:1], 1e-9)
        self._counts = counts * np.minimum(weight, 1.0)
        self.num_drafts = int(counts[1, :, 0].sum() / self._sizes[0])


def _guessed(accepted: Any, reached: Any, guess: Any) -> Any:
    """Shares, with a guess in the place of a few of those that were counted."""
    return (accepted + _GUESS_DRAFTS * guess) / (reached + _GUESS_DRAFTS)


class Confidences:
    """What a drafter's estimates that a node is accepted if its parent is are worth.

    Nodes of like estimates are counted together; older ones count less. A count that is small, or
    has become so, leaves the estimate as it is, so that nodes which are drafted no more are again.
    """

    def __init__(self) -> None:
        self._counts: Floats = np.zeros((2, _NUM_CONFIDENCES))  # reached, accepted
        self._new: list[tuple[NDArray[np.floating], int]] = []

    def count(self, chances: NDArray[np.floating], num_accepted: int) -> None:
        """A chain with these estimates was verified."""
        self._new.append((chances[: num_accepted + 1], num_accepted))

    def learn(self) -> None:
        """Takes in what was counted."""
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
        """What the estimates let expect."""
        reached, accepted = self._counts[:, _kinds(chances)]
        return (accepted + _CONFIDENCE_NODES * chances) / (reached + _CONFIDENCE_NODES)


def _kinds(chances: NDArray[np.floating]) -> NDArray[np.int64]:
    """Which estimates are alike."""
    return np.minimum((chances * _NUM_CONFIDENCES).astype(np.int64), _NUM_CONFIDENCES - 1)


class Openings:
    """What it costs that a model that drafts reads a request's prompt, spread over its output."""

    def __init__(self) -> None:
        self.ms_per_token = 0.0  # of a prompt, measured at an engine's start
        self.num_prompt = self.num_output = 0.0  # tokens of a request, on the mean of the last ones

    def ended(self, num_prompt: int, num_output: int) -> None:
        """A request has ended; what the prefix cache had of its prompt is left out."""
        share = _ENDED_SHARE if self.num_output else 1.0
        self.num_prompt += share * (num_prompt - self.num_prompt)
        self.num_output += share * (max(num_output, 1) - self.num_output)

    @property
    def ms(self) -> float:
        """Of a request."""
        return self.ms_per_token * self.num_prompt

    def ms_per_output(self, age: float) -> float:
        """Of each token that a request emits; requests that run longer than others did count."""
        return self.ms / max(self.num_output, age, 1.0)

    @property
    def values(self) -> Floats:  # [3]
        return np.array([self.ms_per_token, self.num_prompt, self.num_output])

    def recall(self, values: Floats) -> None:
        """Continues from an earlier run's."""
        self.ms_per_token, self.num_prompt, self.num_output = values.tolist()


class Knowledge(NamedTuple):
    """What a run has learned about one target and its drafters on one machine."""

    accepted: Floats  # [3, NUM_STATES, num_groups], of `Acceptance`
    costs: Floats  # of `StepCosts`
    covariance: Floats  # of the costs
    opening: Floats  # [3], of `Openings`

    def fits(self, other: Knowledge) -> bool:
        """Whether it can take the other's place: shapes, and values that a run may have."""
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


_STEPS_PER_PLAN = 8  # a head drafts a step ahead, and its first step computes what was put off
_MAX_GROUPS = 16
_TREE_GROUPS = 4
_MOST_PRICES = 24  # that are weighed
_MOST_STEPS_PER_CHOICE = 64  # of a price; the first ones come sooner
_ROWS_PER_COUNT = 16  # requests of a step beyond which not every step is counted
_LEAST_CHANCE = 1e-9
_MARGIN = 0.01  # by which drafting must be faster, as a logarithm
_KEPT = 0.004  # by which another price must be
_FIRST_DRAFTS = 4  # until so many were verified, some requests draft, whether it pays or not
_FIRST_MODEL_DRAFTS = 16  # alike: behind short texts they are worse than later ones
_FIRST_WHOLE_DRAFTS = 32  # alike: of a window, the first ones guess nothing yet
_REQUESTS_PER_FIRST = 4  # of which one does
_TRIAL_NODES = 2  # of a request that nothing would be granted
_TRIAL_SHARE = 0.004  # of the time, for such trials, at least
_STEPS_PER_TRIAL = 4
_LEAST_TRIAL_COST = 0.05  # by which these steps take longer, in steps
_FIRST_SUCCESS, _SUCCESS_SHARE = 0.1, 0.1  # of trials: that they lead to drafting


class DraftLengths:
    """Nodes per request, as many as pay.

    A node is worth the probability that it is accepted. A price decides: the tokens that a row must
    be expected to bring. Every request is granted the nodes that are worth it, so that nodes go to
    the requests and depths where they are accepted, and one number is left to be chosen: the price
    of most expected tokens in the expected time of a step (`StepCosts`), drafting and all that is
    around it included; an infinite one drafts nothing. The output does not depend on it.

    A chain's nodes are weighed one by one (long ones in groups). Where the drafter has estimates of
    its own, a chain is cut once it is there, before the first node that is not worth the price by
    them (`shorten`): whether a node is left depends on the tokens before it, not on its own. The
    first nodes of a tree are a tree as well: it is cut to a quarter, a half or three quarters of
    its nodes.

    Args:
        most: nodes of a full draft.
        tree_drafts: whether a draft may have several nodes to a level.
        has_model: whether drafts are computed with weights, which takes a step to begin again.
        whole: whether a draft that is cut would be of no use: all is granted, or nothing.
    """

    def __init__(
        self, most: int, *, tree_drafts: bool, has_model: bool = False, whole: bool = False
    ) -> None:
        self._most = most
        num_groups = 1 if whole else min(most, _TREE_GROUPS if tree_drafts else _MAX_GROUPS)
        self._first_drafts = _FIRST_MODEL_DRAFTS if has_model else _FIRST_DRAFTS
        if whole:
            self._first_drafts = _FIRST_WHOLE_DRAFTS
        edges = np.unique(np.linspace(0, most, num_groups + 1).round().astype(np.int64))
        self._sizes = np.diff(edges)
        self._weights = self._sizes.astype(np.float64)  # alike, for products
        self._tree_drafts, self._has_model = tree_drafts, has_model
        self._trial_nodes = int(edges[1]) if tree_drafts or whole else min(most, _TRIAL_NODES)
        self._follows = not tree_drafts and not has_model  # grants change with every draft
        self._acceptance = Acceptance(self._sizes, tree_drafts=tree_drafts)
        self._confidences = Confidences()
        self._costs = StepCosts(most, has_model=has_model)
        self._openings = Openings()
        self._requests: dict[str, Lately] = {}
        self._ended: dict[str, Lately] = {}  # since the last step was counted
        self._planned_ids: abc.Sequence[str] = ()  # of the last plan
        self._grants_any, self.granted_first = True, most  # to a request that comes meanwhile
        self._step = self._forgotten_at = self._learned_at = 0
        self._plan_left = 0  # steps for which the plan holds
        self._choice_left = 0  # until the price is chosen anew
        self._num_choices = 0
        self._price = 0.0  # inf: nothing is drafted
        self._num_chosen_for = 0  # requests for which it was chosen
        self._gain = 1.0  # by it, of tokens per second, as expected
        self._num_unmeasured = 0  # next steps, which are no measurement
        self._num_measured = 0  # steps
        self._measured = [0.0, 0.0, 0.0]  # their sums of requests, of nodes, of times' logarithms
        self._is_trial = False  # a request was granted nodes for a trial
        self._tried = ""  # which one, until that has shown whether it should draft
        self._trial_time = 0.0  # that trials may take, in steps
        self._success = _FIRST_SUCCESS  # of trials
        self._trial_share, self._trial_cost = _TRIAL_SHARE, 1.0
        self._gains_alone = [0.0] * NUM_STATES
        # Nodes of one request alone: none, of a trial, of the first groups; and of the latter, how
        # many are accepted where nothing but the first guess is known.
        self._alone = np.array([0, self._trial_nodes, *edges[1:]], dtype=np.float64)
        self._hopes = _FIRST_GUESS * (1.0 - _FIRST_GUESS ** self._alone[2:]) / (1.0 - _FIRST_GUESS)
        self._update()
        self._reprice()

    # -- before a step

    def plan(self, request_ids: abc.Sequence[str]) -> None:
        """Once before every step, with all that run; the same list only with the same requests."""
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
        """Of a request that comes while a plan holds."""
        found = Lately(self._step)
        found.granted, found.granted_at = self.granted_first, self._step
        self._grants_any = self._grants_any or self.granted_first > 0
        return found

    def rests(self) -> bool:
        """Once before a step, in place of `plan`: whether nothing is granted in it."""
        if self._plan_left <= 1 or self._grants_any or self.granted_first:
            return False
        self._plan_left -= 1
        self._choice_left -= 1
        return True

    @property
    def grants_none(self) -> bool:
        """Whether the plan has no nodes for any request."""
        return not self._grants_any and not self.granted_first

    @property
    def requests(self) -> abc.Mapping[str, Lately]:
        """By request, whose `granted` nodes it may draft; another object where others run."""
        return self._requests

    def shorten(self, request_ids: abc.Sequence[str], drafts: list[Draft]) -> list[Draft]:
        """The drafts of a step, without nodes that by the drafter's estimates are not worth it."""
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
        sums -= np.repeat(sums[starts] - logs[starts], lens)  # along each draft
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
        """What became of a step's drafts, and the time that the step took."""
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
        """What became of a step's drafts; their nodes."""
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
                continue  # its draft is made for the next step
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
        """A request has ended; its last step may still be counted.

        Args:
            num_prompt: tokens that were not in the prefix cache.
        """
        if num_output:
            self._openings.ended(num_prompt, num_output)
        lately = self._requests.pop(request_id, None)
        if lately is not None:
            self._ended[request_id] = lately

    # -- what is known

    def teach(self, lesson: Lesson) -> None:
        """Takes in the time of steps that were measured before any request came."""
        self._costs.learn(lesson, apart=0)

    def teach_opening(self, ms_per_token: float) -> None:
        """Takes in by how much a prompt's token takes longer where its request drafts."""
        self._openings.ms_per_token = ms_per_token

    def follow(self, before: DraftLengths) -> None:
        """Takes the place of `before`, of the same target and other drafters."""
        for lesson in before._costs.plain():
            self.teach(lesson)
        found = self._openings
        _, found.num_prompt, found.num_output = before._openings.values.tolist()

    @property
    def num_lessons(self) -> int:
        """About times, in this run."""
        return self._costs.num_lessons

    def knowledge(self) -> Knowledge:
        """What was learned, to be kept."""
        return Knowledge(self._acceptance.counts, *self._costs.belief, self._openings.values)

    def recall(self, known: Knowledge) -> bool:
        """Begins with what an earlier run learned, before any step; False: it does not fit."""
        if not known.fits(self.knowledge()):
            return False
        self._acceptance.recall(known.accepted)
        self._costs.recall(known.costs, known.covariance)
        self._openings.recall(known.opening)
        self._update()
        self._reprice()
        return True

    def stats(self) -> dict[str, Any]:
        """Plain values: what is granted now, and what that is based on."""
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
        """What nodes are worth, by what was accepted so far."""
        self._hits, self._accepted = self._acceptance.per_granted()
        self._worth = self._accepted / self._hits

    def _reprice(self) -> None:
        self._nodes: list[int] = ((self._worth >= self._price) @ self._sizes).tolist()  # by state

    # -- the price

    def _choose(self) -> None:
        """Chooses the price of the next steps, by all that was measured."""
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
        """What was measured since the last time, of steps alike."""
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
        # The price that serves, none, and prices between those at which grants change.
        prices = np.array([self._price, np.inf, *np.sqrt(worth[:-1] * worth[1:]), 0.0])
        pays = (self._worth >= prices[:, None, None]).astype(np.float64)
        num_prices, num_requests = len(prices), float(num_by_state.sum())
        nodes = pays.reshape(-1, self._weights.size) @ self._weights
        nodes = nodes.reshape(num_prices, NUM_STATES)
        # One product for all sums: calls take the time here, not the arithmetic.
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
        """Of a token of a request that drafts."""
        if not self._openings.ms:
            return 0.0
        begun = [each.begun_at for each in self._requests.values()]
        return self._openings.ms_per_output(self._step - sum(begun) / len(begun))

    def _grant(self) -> None:
        """Grants what is worth the price, and a few nodes to a request without any now and then."""
        nodes, requests = self._nodes, self._requests
        if self._is_trial:  # what its steps took is known apart from the others
            self._take_in()
            self._tried, self._is_trial = "", False
        grants_any, firsts = False, 0  # requests that draft so that anything is known
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
            self._num_unmeasured = int(self._has_model)  # its first draft is made for the next step
            self._is_trial = True
            self._tried = min(idle, key=lambda name: requests[name].tried_at)
            tried = requests[self._tried]
            tried.tried_at = tried.granted_at = self._step
            tried.granted, self._grants_any = self._trial_nodes, True
            self._trial_time -= self._trial_cost
            self._plan_left = _STEPS_PER_TRIAL

    def _end_trial(self, state: int) -> None:
        """A trial has shown whether its request should draft; if so, it begins at once."""
        self._tried = ""
        pays = self._gains_alone[state] > _MARGIN
        self._success += _SUCCESS_SHARE * (pays - self._success)
        if pays:
            self._choice_left = 0
            self._plan_left = 0 if self._follows else self._plan_left

    def _weigh_trials(self) -> None:
        """What a request that is granted nothing would gain in each state, and trials cost.

        Looking every `t` steps whether a request has become predictable, at the cost `c`, loses
        `c / t` to looking and half of what the share `p` that turns out to be so would gain: least
        where both are equal.
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
        # What is known may be of few drafts, and worse ones than the next.
        hoped = 0.0
        if not self._tree_drafts:
            hoped = float((self._hopes * (1.0 / num_requests - opening) - costs).max())
        gain = max(*self._gains_alone, hoped)
        self._trial_share = max(0.5 * self._success * gain, _TRIAL_SHARE)
