"""Stand-ins for models in a simulation: a target and drafters that take time and compute nothing.

The text of a request is given by its first token: each token is the one before plus one, modulo
`VOCAB`. A drafter draws how many of its tokens are right; the target accepts exactly those. Times
are curves over the rows of a forward, given by the user or fitted to the steps that a live engine
recorded (`traces.py`). Queues form where several engines share a drafter: a drafter does one thing
after another.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..drafters.protocol import (
    Drafted,
    Drafter,
    DraftModel,
    DraftStep,
    Needs,
    Outcomes,
    Preparation,
)
from ..errors import ConfigError
from ..scheduler import tree
from ..scheduler.types import NO_INTS, Batch, Draft, IntArray, Request, Verdict, ints, starts_of

VOCAB = 1_048_573  # a prime, so that first tokens may be multiples of any number
_WRONG = VOCAB // 2  # from a right token to a wrong one
Floats = NDArray[np.float64]


class VirtualClock:
    """Seconds of a simulation; it stands still unless a model takes time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, until_s: float) -> None:
        """Time passes, unless `until_s` is past."""
        self.now_s = max(self.now_s, until_s)


# -- times


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds by a number of rows: linear between points and beyond the last one."""

    rows: tuple[float, ...]  # [num_points], ascending
    ms: tuple[float, ...]  # [num_points]

    def __call__(self, rows: float) -> float:
        xs, ys = self.rows, self.ms
        if len(xs) == 1 or rows <= xs[0]:
            return ys[0]
        at = min(bisect_right(xs, rows), len(xs) - 1)
        share = (rows - xs[at - 1]) / (xs[at] - xs[at - 1])
        return ys[at - 1] + share * (ys[at] - ys[at - 1])

    @classmethod
    def parse(cls, text: str, field_name: str) -> Curve:
        """Reads `25`, or points such as `1:20,64:30,512:90`.

        Raises:
            ConfigError: it is neither; names the field.
        """
        wanted = "expected milliseconds like 25, or by rows like 1:20,64:30"
        pairs = []
        for part in text.split(","):
            rows, _, ms = part.rpartition(":")
            try:
                pairs.append((float(rows or 1), float(ms)))
            except ValueError:
                raise ConfigError.at(field_name, f"{wanted}, got {text!r}") from None
        xs, ys = zip(*sorted(pairs), strict=True)
        if len(set(xs)) < len(xs) or not all(0 <= each < float("inf") for each in (*xs, *ys)):
            raise ConfigError.at(field_name, f"{wanted}, each number of rows once, got {text!r}")
        return cls(xs, ys)


@dataclass(frozen=True, slots=True)
class TargetTimes:
    """Of a target's step, with what the engine does for it."""

    curve: Curve  # by rows: known tokens and draft nodes
    seq_ms: float = 0.0  # more per sequence
    context_ms: float = 0.0  # more per 1,000 tokens in the KV cache

    def step_ms(self, num_rows: int, num_seqs: int, num_context: int) -> float:
        return self.curve(num_rows) + num_seqs * self.seq_ms + num_context * self.context_ms / 1e3


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Of a drafter's round: a forward for every level of its chains."""

    curve: Curve  # of a forward, by rows
    round_ms: float = 0.0  # more per round
    link_ms: float = 0.0  # of a message to a separate drafter, or of its answer

    def forwards_ms(self, rows: Iterable[int]) -> float:
        """Of a round with these numbers of rows by level."""
        return self.round_ms + sum(map(self.curve, rows))


# -- acceptance


def text_of(number: int) -> int:
    """The text, by its first token, of a request with this number.

    Not 0: a text of it alone would begin like others' at wrong tokens.
    """
    return (1 + number * 8209) % VOCAB


Drafts = Mapping[tuple[int, int], int]  # how many there were, by nodes and accepted nodes


class DraftLaw:
    """How long a request's draft is, and how many of its nodes are accepted.

    Args:
        rates: [num_depths], acceptance of a node whose predecessors are accepted; the last one
            holds for all deeper nodes.
        drafted: share of the steps in which there is a draft, where one was asked for.
        recorded: [num_requests], drafts of recorded requests, which simulated ones follow in turn;
            (): drafts are as the rates say.
        bonus_ranks: [num_ranks], how often the token after the accepted ones is the drafter's
            first, second, ... candidate there.
        followed: [num_requests], which of `recorded` each simulated request follows; -1, and all
            further ones: in turn.
    """

    def __init__(
        self,
        rates: Sequence[float],
        drafted: float = 1.0,
        recorded: Sequence[Drafts] = (),
        bonus_ranks: Sequence[float] = (),
        seed: int = 0,
        followed: Sequence[int] = (),
    ) -> None:
        self.rates = tuple(rates)
        self._drafted = drafted
        self._random = random.Random(seed)
        # Of every recorded request: pairs of nodes and accepted nodes, and running totals.
        self._recorded = [(list(each), list(accumulate(each.values()))) for each in recorded]
        self._order = list(range(len(self._recorded)))
        self._random.shuffle(self._order)
        # Recorded request, by text.
        self._own = {text_of(number): at for number, at in enumerate(followed) if at >= 0}
        self._in_turn: dict[int, int] = {}
        self._longest = max((nodes for each in recorded for nodes, _ in each), default=0)
        self._rank_ends = list(accumulate(bonus_ranks))
        self.num_ranks = 1 + len(self._rank_ends)  # of the children of a node that may be right

    def draw(self, budget: int, text: int = 0) -> tuple[int, int]:
        """Nodes of a draft with room for `budget` of them, and how many are right.

        Args:
            text: by which requests are told apart.
        """
        if budget <= 0:
            return 0, 0
        if not self._recorded:
            if self._drafted < 1.0 and self._random.random() >= self._drafted:
                return 0, 0
            return budget, self._accepted(0, budget)
        followed = self._own.get(text)
        if followed is None:
            turn = self._order[len(self._in_turn) % len(self._order)]
            followed = self._in_turn.setdefault(text, turn)
        pairs, ends = self._recorded[followed]
        nodes, accepted = pairs[bisect_right(ends, self._random.randrange(ends[-1]))]
        if nodes == self._longest < budget:  # nobody knows how long it might have been
            if accepted == nodes:
                accepted = self._accepted(nodes, budget)
            nodes = budget
        return min(nodes, budget), min(accepted, budget)

    def draw_tree(self, budget: int, shape: TreeShape, text: int = 0) -> tuple[int, list[int]]:
        """Nodes of a tree with room for `budget` of them, and the places of those that are right.

        Of a node's children, the first is right as `rates` say, and one of the others as
        `bonus_ranks` do where it is not. A recorded draft has as many right ones as it had, on the
        path of first children.
        """
        nodes, right = (budget, 0) if not self._recorded else self.draw(budget, text)
        if nodes <= 0 or (self._drafted < 1.0 and self._random.random() >= self._drafted):
            return 0, []
        children, path, at = shape.children(nodes), list[int](), -1
        while at in children:
            rank = 0
            if self._recorded:
                if len(path) == right:
                    break
            elif self._random.random() >= self.rates[min(len(path), len(self.rates) - 1)]:
                rank = 1 + self.rank()
                if rank == 0 or rank >= len(children[at]):
                    break
            at = children[at][rank]
            path.append(at)
        return nodes, path

    def rank(self) -> int:
        """Of the bonus token among the candidates; -1: it is none of them."""
        rank = bisect_right(self._rank_ends, self._random.random())
        return rank if rank < len(self._rank_ends) else -1

    def chance(self, depth: int, rank: int) -> float:
        """Of a node below one that is right: that it is, as its parent's child of that rank."""
        rate = self.rates[min(depth, len(self.rates) - 1)]
        if rank == 0:
            return rate
        begin = self._rank_ends[rank - 2] if rank > 1 else 0.0
        return (1 - rate) * (self._rank_ends[rank - 1] - begin)

    def _accepted(self, count: int, budget: int) -> int:
        rates, draw = self.rates, self._random.random
        while count < budget and draw() < rates[min(count, len(rates) - 1)]:
            count += 1
        return count


class TreeShape:
    """The trees that a drafter makes if it adds the likeliest node again and again.

    Parents come before children, and a smaller tree is the beginning of a larger one.

    Args:
        depth: levels.
        width: children of a node.
        law: by which nodes are likely.
    """

    def __init__(self, depth: int, width: int, law: DraftLaw) -> None:
        self._depth, self._width, self._law = depth, min(width, law.num_ranks), law
        self.parents: list[int] = []
        self.depths: list[int] = []  # of a node: its ancestors
        self._ranks: list[int] = []
        self._known: dict[int, dict[int, list[int]]] = {}
        self._waiting: list[tuple[float, int, int, int]] = []  # -chance, parent, rank, depth
        self._offer(-1, 0, 0, 1.0)

    def children(self, num_nodes: int) -> dict[int, list[int]]:
        """The children of every node that has some, the likeliest first; -1 is the root."""
        if num_nodes not in self._known:
            found: dict[int, list[int]] = {}
            self._grow(num_nodes)
            for node, parent in enumerate(self.parents[:num_nodes]):
                found.setdefault(parent, []).append(node)
            self._known[num_nodes] = found
        return self._known[num_nodes]

    def ranks(self, num_nodes: int) -> list[int]:
        """Which child of its parent each node is."""
        self._grow(num_nodes)
        return self._ranks[:num_nodes]

    def _grow(self, num_nodes: int) -> None:
        while len(self.parents) < num_nodes and self._waiting:
            negative, parent, rank, depth = heapq.heappop(self._waiting)
            node = len(self.parents)
            self.parents.append(parent)
            self.depths.append(depth)
            self._ranks.append(rank)
            reached = -negative / self._law.chance(depth, rank)
            self._offer(parent, rank + 1, depth, reached)
            self._offer(node, 0, depth + 1, -negative)

    def _offer(self, parent: int, rank: int, depth: int, reached: float) -> None:
        """A node that may be added; `reached` is the chance of its parent."""
        chance = self._law.chance(depth, rank) if rank < self._width else 0.0
        if depth < self._depth and chance > 0:
            heapq.heappush(self._waiting, (-reached * chance, parent, rank, depth))


def rates_of(recorded: Sequence[Drafts]) -> list[float]:
    """Acceptance by depth of recorded drafts, of the nodes that were reached."""
    pairs = sum(map(Counter, recorded), Counter())
    deepest = max((nodes for nodes, _ in pairs), default=0)
    rates = []
    for depth in range(deepest):
        tried = sum(n for (nodes, right), n in pairs.items() if nodes > depth <= right)
        right = sum(n for (_, right), n in pairs.items() if right > depth)
        rates.append(right / tried if tried else 0.0)
    return rates or [0.0]


def _guess(first: int, num_nodes: int, num_right: int) -> IntArray:  # [num_nodes]
    """A chain whose first token, were it right, is `first`."""
    tokens = np.arange(first, first + num_nodes, dtype=np.int32)
    tokens[num_right:] += _WRONG
    tokens %= VOCAB
    return tokens


def _right_path(first: int, draft: Draft) -> Sequence[int]:
    """The nodes from the root down that are right."""
    tokens = draft.tokens.tolist()
    if tree.is_chain(draft.parents):
        return range(_num_right(first, tokens))
    path, at = list[int](), -1
    for node, (token, parent) in enumerate(zip(tokens, draft.parents.tolist(), strict=True)):
        if parent == at and token == (first + len(path)) % VOCAB:
            path.append(node)
            at = node
    return path


def _num_right(first: int, tokens: Sequence[int]) -> int:
    """Leading tokens that are right."""
    for count, token in enumerate(tokens):
        if token != (first + count) % VOCAB:
            return count
    return len(tokens)


# -- models


@dataclass(slots=True)
class Device:
    """What does one thing after another."""

    free_s: float = 0.0  # when it has done all that it was asked for
    busy_ms: float = 0.0
    # Of the last second or so, by who asked; as of when.
    _recent_s: dict[int, float] = field(default_factory=dict)
    _counted_s: float = 0.0

    def work(self, now_s: float, ms: float) -> float:
        """When work that is asked for now is done."""
        self.free_s = max(self.free_s, now_s) + ms / 1e3
        self.busy_ms += ms
        return self.free_s

    def load(self, asker: int, ms: float) -> float:
        """Counts an asker's work; the share of the last second that others had, as members of a
        drafter group report it (`SharedDrafts` in `workers/draft.py`)."""
        kept = math.exp(min(0.0, self._counted_s - self.free_s))
        self._recent_s = {each: busy * kept for each, busy in self._recent_s.items()}
        self._counted_s = self.free_s
        own = self._recent_s.get(asker, 0.0)
        others = min(1.0, sum(self._recent_s.values()) - own)
        self._recent_s[asker] = own + ms / 1e3
        return others


class ModelledTarget:
    """The loop's target: accepts what is right, and takes the time that it should."""

    def __init__(self, times: TargetTimes, clock: VirtualClock) -> None:
        self.device = Device()
        self._times = times
        self._clock = clock
        self._texts: dict[int, int] = {}  # first token by seat

    def verify(self, batch: Batch, drafts: Sequence[Draft]) -> Verdict:
        plan = batch.plan
        for opening in plan.openings:
            self._texts[opening.seat] = int(opening.tokens[0])
        lens = batch.known_lens.tolist()
        num_rows = sum(plan.chunk_lens.tolist())
        emitted: list[int] = []
        path: list[int] = []
        emitted_start, path_start = [0], [0]
        columns = zip(plan.seats.tolist(), lens, batch.samples.tolist(), drafts, strict=True)
        for seat, known, samples, draft in columns:
            if samples:
                first = self._texts[seat] + known
                num_rows += draft.num_nodes
                right = _right_path(first, draft)
                count = len(right)
                path += right
                emitted += [(first + each) % VOCAB for each in range(count + 1)]
            emitted_start.append(len(emitted))
            path_start.append(len(path))
        step_ms = self._times.step_ms(num_rows, len(lens), sum(lens))
        self._clock.wait(self.device.work(self._clock.now_s, step_ms))
        return Verdict(
            batch.step,
            ints(emitted),
            ints(emitted_start),
            ints(path),
            ints(path_start),
            forward_ms=step_ms,
        )


class ModelledDrafter(Drafter):
    """A look-up or a head: its drafts are there when it is asked, after the time that they take.

    Args:
        device: what computes them; the loop waits.
        shape: of its trees; None: it makes chains.
    """

    def __init__(
        self,
        name: str,
        law: DraftLaw,
        times: DraftTimes,
        clock: VirtualClock,
        device: Device,
        shape: TreeShape | None = None,
    ) -> None:
        self.name, self.needs = name, Needs(shape="chain" if shape is None else "tree")
        self._shape = shape
        self._law, self._times, self._clock, self._device = law, times, clock, device
        self._texts: dict[str, int] = {}  # first token by request

    def open(self, requests: Sequence[Request]) -> None:
        self._texts.update((request.id, int(request.prompt[0])) for request in requests)

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._texts.pop(request_id, None)

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        drafts = [tree.EMPTY] * batch.num_seqs
        lens = batch.known_lens.tolist()
        rows: Counter[int] = Counter()
        for row, budget in enumerate(budgets.tolist()):
            text = self._texts[batch.request_ids[row]]
            first = text + lens[row]
            if self._shape is not None:
                drafts[row] = self._tree(self._shape, budget, text, first)
                rows.update(self._shape.depths[: drafts[row].num_nodes])
                continue
            nodes, right = self._law.draw(budget, text)
            if nodes:
                drafts[row] = tree.chain(_guess(first, nodes, right), self.name)
                rows.update(range(nodes))
        if not budgets.any():
            return drafts
        if rows:
            rows[0] += batch.num_tokens
        took_ms = self._times.forwards_ms(rows.values())
        self._clock.wait(self._device.work(self._clock.now_s, took_ms))
        return drafts

    def _tree(self, shape: TreeShape, budget: int, text: int, first: int) -> Draft:
        """A tree whose right nodes are on one path."""
        nodes, path = self._law.draw_tree(budget, shape, text)
        ranks = shape.ranks(nodes)
        if not ranks:
            return tree.EMPTY
        tokens = first + np.array(shape.depths[: len(ranks)]) + _WRONG + ranks
        tokens[path] = first + np.arange(len(path))
        parents = ints(shape.parents[: len(ranks)])
        return Draft(ints(tokens % VOCAB), parents, source=self.name)


class ModelledMembers:
    """A drafter group (`DraftMembers`), whose members are all up from the start."""

    folder, vocab_size, reason, num_requests = "m", VOCAB, "", 0

    def __init__(self, members: Sequence[DraftModel]) -> None:
        self.num_members = len(members)
        self._news = [(str(number), member) for number, member in enumerate(members)]

    def changes(self) -> Sequence[tuple[str, DraftModel | None]]:
        news, self._news = self._news, []
        return news

    def shutdown(self) -> None:
        """Nothing was started."""


class ModelledDraftModel:
    """A draft model (`DraftModel`) on one or several devices, which divide the sequences.

    Args:
        placement: `separate`: messages take time; `colocated`: the device is the target's.
        devices: what computes it; other engines may use separate ones as well.
        asker: number of the engine.
    """

    vocab_size = VOCAB
    reads_verdicts = False  # every draft is asked for

    def __init__(
        self,
        placement: str,
        law: DraftLaw,
        times: DraftTimes,
        clock: VirtualClock,
        devices: Sequence[Device],
        *,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        asker: int = 0,
    ) -> None:
        self._asker = asker
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_num_batched_tokens, self.max_model_len = max_num_batched_tokens, max_model_len
        self._law, self._times, self._clock, self._devices = law, times, clock, devices
        self._is_separate = placement == "separate"
        self._texts: dict[int, int] = {}  # first token by seat
        self._answer: tuple[float, Drafted] | None = None  # and when it is there

    def ask(self, step: DraftStep) -> None:
        assert self._answer is None, "one request at a time"
        for opening in step.plan.openings:
            self._texts[opening.seat] = int(opening.tokens[0])
        if step.preparation is None:
            drafted, budgets = self._drawn(step)
            # Known tokens and, if all is drawn from one forward, masks for all tokens but one.
            first = step.plan.chunk_lens
        else:
            drafted, budgets = self._prepared(step, step.preparation)
            nodes = step.plan.drafts
            first = step.plan.chunk_lens + (0 if nodes is None else nodes.num_nodes)
        ready_s, took_ms = self._compute(step, first, budgets)
        load = max(device.load(self._asker, took_ms) for device in self._devices)
        drafted = replace(drafted, forward_ms=took_ms, step=step.plan.step, load=load)
        self._answer = ready_s, drafted

    def answer(self, timeout_s: float) -> Drafted | None:
        if self._answer is None:
            return None
        ready_s, drafted = self._answer
        if ready_s > self._clock.now_s + timeout_s:
            self._clock.wait(self._clock.now_s + timeout_s)
            return None
        self._clock.wait(ready_s)
        self._answer = None
        return drafted

    def revive(self) -> bool:
        return True

    def detach(self) -> None: ...

    def shutdown(self) -> None:
        """Nothing was started."""

    def _compute(
        self,
        step: DraftStep,
        first: IntArray,  # [num_seqs], rows of the forward of known tokens
        budgets: list[list[int]],  # [num_seqs], tokens of each chain behind them
    ) -> tuple[float, float]:
        """When all devices are done with their sequences, and the time of the slowest."""
        link_s = self._times.link_ms / 1e3 if self._is_separate else 0.0
        now_s, done_s, slowest_ms = self._clock.now_s + link_s, 0.0, 0.0
        count = len(self._devices)
        for place, device in enumerate(self._devices):
            known = int(first[place::count].sum())
            if not known:
                continue
            chains = [length for each in budgets[place::count] for length in each]
            levels = _levels(chains, at_once=step.mask_token is not None)
            if step.preparation is None:  # the first level is that of the known tokens
                levels = [known + levels[0] - len(chains), *levels[1:]] if levels else [known]
            else:
                levels = [known, *levels]
            took_ms = self._times.forwards_ms(levels)
            done_s = max(done_s, device.work(now_s, took_ms))
            slowest_ms = max(slowest_ms, took_ms)
        return done_s + link_s, slowest_ms

    def _drawn(self, step: DraftStep) -> tuple[Drafted, list[list[int]]]:
        """A chain behind the known tokens of each sequence."""
        plan, chains = step.plan, []
        ends = (plan.context_lens + plan.chunk_lens).tolist()
        for seat, end, budget in zip(plan.seats.tolist(), ends, plan.max_nodes.tolist()):
            nodes, right = self._law.draw(budget, self._texts[seat])
            chains.append(_guess(self._texts[seat] + end, nodes, right))
        lens = [len(chain) for chain in chains]
        tokens = np.concatenate([NO_INTS, *chains])
        return Drafted(tokens, starts_of(lens), None), [[each] if each else [] for each in lens]

    def _prepared(
        self, step: DraftStep, preparation: Preparation
    ) -> tuple[Drafted, list[list[int]]]:
        """A chain behind each of the likeliest outcomes of each sequence's draft."""
        plan = step.plan
        ends = (plan.context_lens + plan.chunk_lens).tolist()
        counts = [0] * len(ends) if plan.drafts is None else plan.drafts.num_nodes.tolist()
        nodes = [] if plan.drafts is None else plan.drafts.tokens.tolist()
        rooms = preparation.num_outcomes.tolist()
        orders: dict[int, list[tuple[int, int, float]]] = {}
        table: list[tuple[int, int, int, int]] = []
        lens: list[int] = []
        found: list[tuple[int, IntArray]] = []  # outcomes that come true, and their chains
        budgets: list[list[int]] = []
        at = 0
        for row, (seat, end, count) in enumerate(zip(plan.seats.tolist(), ends, counts)):
            first = self._texts[seat] + end
            right = _num_right(first, nodes[at : at + count])
            at += count
            if count not in orders:
                orders[count] = _by_chance(preparation, count)
            true_rank, begun = self._law.rank(), len(lens)
            places, _, chances = np.array(orders[count]).T
            seqs = np.full(len(places), row)
            depths = preparation.lens(seqs, places.astype(np.int32), chances).tolist()
            for (place, rank, _), room in zip(orders[count], depths, strict=True):
                if len(lens) - begun >= rooms[row]:
                    break
                if room <= 0:
                    continue
                bonus = first + place
                if (place, rank) == (right, true_rank):
                    drawn, agreed = self._law.draw(room, self._texts[seat])
                    found.append((len(lens), _guess(bonus + 1, drawn, agreed)))
                    room = drawn
                else:
                    bonus += _WRONG + 1 + rank
                table.append((row, place, bonus % VOCAB, rank))
                lens.append(room)
            budgets.append(lens[begun:])
        starts = starts_of(lens)
        tokens = np.zeros(int(starts[-1]), dtype=np.int32)
        for index, chain in found:
            tokens[starts[index] : starts[index + 1]] = chain
        outcomes = Outcomes(*ints(table).reshape(-1, 4).T.copy())
        return Drafted(tokens, starts, None, outcomes=outcomes), budgets


def _levels(chains: Sequence[int], *, at_once: bool) -> list[int]:
    """Rows of each forward of chains of these lengths; one for all tokens where they have masks."""
    if not chains:
        return []
    if at_once:
        return [sum(chains)]
    return np.bincount(chains)[:0:-1].cumsum()[::-1].tolist()  # those longer than each level


def _by_chance(preparation: Preparation, num_nodes: int) -> list[tuple[int, int, float]]:
    """Outcomes of a chain, accepted nodes, rank of the bonus token and chance; likeliest first."""
    rates, ranks = preparation.accept_rates, preparation.rank_rates
    scored, reached = [], 1.0
    for place in range(num_nodes + 1):
        is_whole = place == num_nodes
        rate = 0.0 if is_whole else float(rates[min(place, len(rates) - 1)])
        chance = reached * (1 - rate)
        for rank, share in enumerate(ranks[int(is_whole)].tolist()):
            scored.append((-chance * share, place, rank))
        reached *= rate
    return [(place, rank, -score) for score, place, rank in sorted(scored)]
