"""Stand-ins for models in a simulation: a target and drafters that take time and compute nothing.

The text of a request is given by its first token: each token is the one before plus one, modulo
`VOCAB`. A drafter draws how many of its tokens are right; the target accepts exactly those. Times
are curves over the rows of a forward, given by the user or fitted to the steps that a live engine
recorded (`TraceLog`). Queues form where several engines share a drafter: a drafter does one thing
after another.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..config import Strict, parse
from ..drafters.protocol import Drafted, Drafter, DraftStep, Outcomes, Preparation
from ..errors import ConfigError
from ..scheduler import tree
from ..scheduler.timer import COLUMNS
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

    def rank(self) -> int:
        """Of the bonus token among the candidates; -1: it is none of them."""
        rank = bisect_right(self._rank_ends, self._random.random())
        return rank if rank < len(self._rank_ends) else -1

    def _accepted(self, count: int, budget: int) -> int:
        rates, draw = self.rates, self._random.random
        while count < budget and draw() < rates[min(count, len(rates) - 1)]:
            count += 1
        return count


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

    def work(self, now_s: float, ms: float) -> float:
        """When work that is asked for now is done."""
        self.free_s = max(self.free_s, now_s) + ms / 1e3
        self.busy_ms += ms
        return self.free_s


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
                first, tokens = self._texts[seat] + known, draft.tokens.tolist()
                num_rows += len(tokens)
                count = _num_right(first, tokens)
                path += range(count)
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
    """

    def __init__(
        self, name: str, law: DraftLaw, times: DraftTimes, clock: VirtualClock, device: Device
    ) -> None:
        self.name = name
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
            nodes, right = self._law.draw(budget, text)
            if nodes:
                first = text + lens[row]
                drafts[row] = tree.chain(_guess(first, nodes, right), self.name)
                rows.update(range(nodes))
        if not budgets.any():
            return drafts
        if rows:
            rows[0] += batch.num_tokens
        took_ms = self._times.forwards_ms(rows.values())
        self._clock.wait(self._device.work(self._clock.now_s, took_ms))
        return drafts


class ModelledDraftModel:
    """A draft model (`DraftModel`) on one or several devices, which divide the sequences.

    Args:
        placement: `separate`: messages take time; `colocated`: the device is the target's.
        devices: what computes it; other engines may use separate ones as well.
    """

    vocab_size = VOCAB

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
    ) -> None:
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
        drafted = Drafted(
            drafted.tokens, drafted.start, None, took_ms, step.plan.step, drafted.outcomes
        )
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


# -- traces


_Count = Annotated[int, Field(ge=0)]


class TraceRun(Strict):
    """The steps of one engine with one drafter, and the requests that ended meanwhile."""

    name: str
    """Of the contender, or of the engine."""
    decoding_type: str
    """Of its drafter."""
    columns: dict[str, tuple[float, ...]]
    """[num_steps] each, by the fields of `StepRecord`."""
    drafts: tuple[tuple[tuple[_Count, _Count, Annotated[int, Field(ge=1)]], ...], ...]
    """Of each request: nodes, accepted nodes, and how many such drafts."""
    requests: tuple[
        tuple[
            Annotated[float, Field(ge=0, allow_inf_nan=False)],
            Annotated[int, Field(ge=1)],
            Annotated[int, Field(ge=1)],
            Annotated[int, Field(ge=-1)],
        ],
        ...,
    ] = ()
    """Of each, as they came: second of its arrival, tokens of its prompt, tokens of its answer, and
    its place in `drafts`; -1: it had none."""

    @property
    def recorded(self) -> list[dict[tuple[int, int], int]]:
        """The drafts of each request."""
        return [{(nodes, right): count for nodes, right, count in each} for each in self.drafts]

    def check(self) -> None:
        """Raises `ConfigError` for columns or requests that do not fit together."""
        sizes = {len(self.columns.get(name, ())) for name in COLUMNS}
        if len(sizes) > 1 or sizes == {0}:
            raise ConfigError.at("trace", f"{self.name}: columns of {sorted(sizes)} steps")
        values = np.array([self.columns[name] for name in COLUMNS])
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ConfigError.at("trace", f"{self.name}: columns have negative or infinite values")
        if not (values[COLUMNS.index("num_seqs")] >= 1).all():
            raise ConfigError.at("trace", f"{self.name}: there are steps of no sequence")
        for nodes, right, _ in (pair for each in self.drafts for pair in each):
            if right > nodes:
                raise ConfigError.at("trace", f"{self.name}: {right} of {nodes} nodes accepted")
        if any(place >= len(self.drafts) for *_, place in self.requests):
            raise ConfigError.at("trace", f"{self.name}: a request has drafts that are not there")


class Trace(Strict):
    """What live engines recorded: `outrider bench --trace FILE`, or `GET /admin/trace`."""

    version: Literal[1] = Field(description="Of the form of traces.")
    machine: dict[str, Any] = Field(description="Where it was recorded.")
    model: str = Field(description="Its folder or name.")
    runs: tuple[TraceRun, ...] = Field(description="Of each engine and drafter.")

    @classmethod
    def read(cls, data: dict[str, Any]) -> Trace:
        """Raises `ConfigError` for what is no trace, or has no steps; names `trace`."""
        try:
            trace = parse(cls, data)
        except ConfigError as error:
            raise ConfigError.at("trace", f"not a trace of this version: {error.message}") from None
        for run in trace.runs:
            run.check()
        if not trace.runs:
            raise ConfigError.at("trace", "it has no steps")
        return trace

    def run_of(self, decoding_type: str) -> TraceRun:
        """The steps and drafts of all runs with this drafter, without their requests.

        Raises:
            ConfigError: there is none; says which there are.
        """
        runs = [run for run in self.runs if run.decoding_type == decoding_type]
        if not runs:
            there = ", ".join(sorted({run.decoding_type for run in self.runs}))
            raise ConfigError.at("trace", f"it has no drafts of {decoding_type}; it has {there}")
        return TraceRun(
            name=runs[0].name,
            decoding_type=decoding_type,
            columns={name: sum((run.columns[name] for run in runs), ()) for name in COLUMNS},
            drafts=sum((run.drafts for run in runs), ()),
        )

    def requests(self, decoding_type: str = "") -> list[TracedRequest]:
        """Of all runs, as they came.

        Args:
            decoding_type: of the drafter whose drafts, as `run_of` has them, they follow.

        Raises:
            ConfigError: there are none.
        """
        found, num_drafts = [], 0
        for run in self.runs:
            is_of = run.decoding_type == decoding_type
            for arrived_s, num_prompt, num_output, place in run.requests:
                at = num_drafts + place if is_of and place >= 0 else -1
                found.append(TracedRequest(arrived_s, num_prompt, num_output, at))
            num_drafts += len(run.drafts) if is_of else 0
        if not found:
            raise ConfigError.at(
                "trace", "it has no requests: record one of a server, by POST /admin/trace"
            )
        return sorted(found, key=lambda each: each.arrived_s)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request of a trace."""

    arrived_s: float
    num_prompt: int  # tokens
    num_output: int
    drafts: int = -1  # place of its drafts among those of the drafter; -1: it has none


_FAR = 5.0  # times the median of similar steps: warming up, or another process's work
_FEW = 3  # steps of a kind that is no point of a curve
_SMOOTH = 1e-3  # weight of a straight curve against the measured steps


def fit_target(runs: Sequence[TraceRun]) -> TargetTimes:
    """Least squares of relative errors: a curve over rows, and costs per sequence and context.

    Steps that took many times as long as similar ones are left out.
    """
    joined = {name: np.concatenate([_column(run, name) for run in runs]) for name in COLUMNS}
    rows, seqs = joined["num_tokens"] + joined["num_nodes"], joined["num_seqs"]
    ms = joined["elapsed_ms"] - joined["draft_ms"]
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, kind in enumerate(zip(_octaves(rows), _octaves(seqs), strict=True)):
        kinds.setdefault(kind, []).append(index)
    means = []  # rows, sequences, context, milliseconds, steps
    for members in kinds.values():
        near = [each for each in members if ms[each] <= _FAR * np.median(ms[members])]
        values = (rows, seqs, joined["num_context"], ms)
        means.append([*(float(each[near].mean()) for each in values), len(near)])
    table = np.array(means)
    common = table[table[:, 4] >= _FEW] if (table[:, 4] >= _FEW).sum() > 1 else table
    knots = np.unique(common[:, 0].round())
    hats = np.stack([np.interp(table[:, 0], knots, unit) for unit in np.eye(len(knots))], axis=1)
    beyond = np.maximum(table[:, 0] / knots[-1], 1.0)[:, None]
    rises = np.tri(len(knots))  # the curve from its first value and its rises, which are positive
    terms = np.column_stack([hats * beyond @ rises, table[:, 1], table[:, 2] / 1e3])
    weights = np.sqrt(table[:, 4]) / table[:, 3]
    bends = np.zeros((max(len(knots) - 2, 0), terms.shape[1]))
    for place in range(len(bends)):
        left, right = np.diff(knots[place : place + 3])
        bends[place, place : place + 3] = right, -left - right, left
        bends[place] /= left + right
    bends[:, : len(knots)] = bends[:, : len(knots)] @ rises
    stiffness = np.sqrt(_SMOOTH * table[:, 4].sum()) / table[:, 3].mean()
    found = _non_negative(
        np.vstack([terms * weights[:, None], bends * stiffness]),
        np.concatenate([table[:, 3] * weights, np.zeros(len(bends))]),
    )
    curve = found[: len(knots)].cumsum()
    return TargetTimes(
        Curve(tuple(knots.tolist()), tuple(curve.tolist())), float(found[-2]), float(found[-1])
    )


def fit_draft(run: TraceRun) -> DraftTimes:
    """A cost of a round, of each level and of each row, from the steps that asked the drafter."""
    asked = _column(run, "num_asked") > 0
    if not asked.any():
        return DraftTimes(Curve((1.0,), (0.0,)))
    levels = _column(run, "longest")[asked]
    rows = (_column(run, "num_tokens") + _column(run, "num_nodes"))[asked]
    ms = _column(run, "draft_ms")[asked]
    near = ms <= _FAR * np.median(ms)
    terms = np.column_stack([np.ones(near.sum()), levels[near], rows[near]])
    round_ms, level_ms, row_ms = _non_negative(terms, ms[near]).tolist()
    return DraftTimes(Curve((0.0, 1.0), (level_ms, level_ms + row_ms)), round_ms)


def _column(run: TraceRun, name: str) -> Floats:  # [num_steps]
    return np.array(run.columns[name])


def _octaves(values: Floats) -> list[int]:
    """Each value below 16, and quarters of an octave above."""
    large = 16 + 4 * np.log2(np.maximum(values, 16) / 16)
    found: list[int] = np.where(values < 16, values, large).astype(int).tolist()
    return found


def _non_negative(terms: Floats, values: Floats) -> Floats:
    """Least squares without the terms that would be negative."""
    used = np.ones(terms.shape[1], dtype=np.bool_)
    found = np.zeros(terms.shape[1])
    while used.any():
        solved = np.linalg.lstsq(terms[:, used], values, rcond=None)[0]
        if (solved >= 0).all():
            found[used] = solved
            break
        used[np.flatnonzero(used)[solved.argmin()]] = False
    return found
