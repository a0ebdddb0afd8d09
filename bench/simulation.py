"""A deployment in virtual time: real schedulers, loops and draft controllers over modelled models.

Each engine has the scheduler, the loop and the drafter that serve; only the target and the draft
model are stand-ins (`modelled.py`), and time is a number. Requests come at random or in closed
loops, each to an ingress at random, which chooses the engine as ingresses do (`LoadViews`). An
engine's step is simulated as a whole when it begins, so that requests of two engines to one drafter
are served in the order in which their steps begin.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import (
    ComposeConfig,
    DraftModelConfig,
    EngineConfig,
    LookaheadConfig,
    SpeculationBase,
)
from ..drafters.draft_target import DraftTarget
from ..drafters.drafting import Drafting
from ..drafters.members import Members
from ..drafters.protocol import CacheCounts, Drafter, DraftHost, NoDrafter
from ..drafters.registry import build
from ..engine.known_lengths import MadeUpDrafts, measure
from ..errors import ConfigError, OverloadedError
from ..scheduler.loop import Loop
from ..scheduler.sampling import SamplingParams
from ..scheduler.scheduler import Scheduler
from ..scheduler.types import Delta, Request
from .measure import PERCENTS, Load
from .modelled import (
    VOCAB,
    Device,
    DraftLaw,
    DraftTimes,
    ModelledDrafter,
    ModelledDraftModel,
    ModelledMembers,
    ModelledTarget,
    TargetTimes,
    TreeShape,
    VirtualClock,
    text_of,
)
from .traces import TracedRequest

REPORTS_PER_S = 20.0  # most loads that an engine tells an ingress (`cluster/serve/edge.py`)
_EARLY_S = 1e-9  # by which a report may come too early: sums of seconds are not exact


# -- how ingresses choose engines


class LoadViews:
    """What ingresses assume of engines' loads: what these told last, and what each sent since.

    Every engine has an ingress beside it. Cells of `cell` engines have nothing in common.

    Args:
        max_compared: engines of which the least loaded is taken; of more, two are compared
            (`cluster/serve/engines.py`).
    """

    def __init__(self, num_engines: int, cell: int, max_compared: int) -> None:
        self.load = np.zeros(num_engines, np.int32)  # [num_engines], requests
        self._told, self._told_at_s = self.load.copy(), np.zeros(num_engines)
        # Of every ingress: its requests at each engine of its cell, and those since that one told.
        self._own, self._sent = np.zeros((2, num_engines, cell), np.int32)
        self._cell, self._max_compared = cell, max_compared

    def tell(self, now_s: float) -> None:
        """Engines whose load is another than they told, and may tell again, do so."""
        due = now_s - self._told_at_s >= 1 / REPORTS_PER_S - _EARLY_S
        telling = np.flatnonzero((self._told != self.load) & due)
        self._told[telling], self._told_at_s[telling] = self.load[telling], now_s
        for engine in telling.tolist():
            first = engine - engine % self._cell
            self._sent[first : first + self._cell, engine % self._cell] = 0

    def send(self, ingress: int, policy: str, draw: np.random.Generator) -> int:
        """The engine that gets the next request of `ingress`."""
        first = ingress - ingress % self._cell
        told = self._told[first : first + self._cell]
        view = np.maximum(told + self._sent[ingress], self._own[ingress])
        place = self.choose(view, policy, draw)
        self._sent[ingress, place] += 1
        self._own[ingress, place] += 1
        self.load[first + place] += 1
        return first + place

    def end(self, ingress: int, engine: int) -> None:
        """One of the requests of `ingress` at `engine` has ended."""
        self.load[engine] -= 1
        self._own[ingress, engine % self._cell] -= 1

    def choose(self, view: NDArray[np.int32], policy: str, draw: np.random.Generator) -> int:
        """The place in `view` ([cell], assumed loads) of the engine that a policy takes.

        `least` takes the least loaded; `two` the better of two at random; `random` any; `served`
        what ingresses do: `least` of few engines, `two` of many.
        """
        if policy == "least" or (policy == "served" and len(view) <= self._max_compared):
            least = np.flatnonzero(view == view.min())
            return int(least[draw.integers(len(least))])
        first = int(draw.integers(len(view)))
        if policy == "random" or len(view) == 1:
            return first
        second = (first + int(draw.integers(1, len(view)))) % len(view)
        return second if view[second] < view[first] else first


# -- what is simulated


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests and the deployment that serves them."""

    config: EngineConfig
    target: TargetTimes
    draft: DraftTimes
    law: Callable[[int], DraftLaw]  # of an engine, by its number
    load: Load  # streams are those of the whole deployment
    num_requests: int
    input_len: int = 512
    output_len: int = 128
    range_ratio: float = 0.0  # lengths are drawn evenly from 1 - this to 1 + this times the mean
    one_client: bool = False  # it submits for all streams, and waits until each is taken
    think_ms: float = 0.0  # of a stream, from the end of an answer to its next request
    num_engines: int = 1
    num_drafters: int = 1  # devices of separate draft models, of all engines together
    seed: int = 0
    requests: Sequence[TracedRequest] = ()  # replayed, in place of load, number and lengths

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        if self.requests:
            return max(each.num_prompt + each.num_output for each in self.requests)
        return sum(_most(each, self.range_ratio) for each in (self.input_len, self.output_len))


def _most(mean: int, ratio: float) -> int:
    return int(mean * (1 + ratio))


@dataclass(slots=True)
class _Life:
    """A request on its way."""

    request: Request
    engine: int
    ingress: int
    arrived_s: float
    times_s: list[float] = field(default_factory=list)  # of its deltas
    counts: list[int] = field(default_factory=list)  # and their tokens


class _ModelledHost:
    """Gives the model, or the members, that a draft model's drafter asks for (`DraftHost`).

    Args:
        make: a model that these devices compute.
        devices: of one model, which divide its sequences; each is a member of a drafter group.
    """

    vocab_size = VOCAB

    def __init__(
        self, make: Callable[[Sequence[Device]], ModelledDraftModel], devices: Sequence[Device]
    ) -> None:
        self._make, self._devices = make, devices

    def draft_model(self, config: Any) -> ModelledDraftModel:
        return self._make(self._devices)

    def draft_members(self, config: Any) -> ModelledMembers:
        return ModelledMembers([self._make([device]) for device in self._devices])


class SimulatedEngine:
    """One engine: the loop that serves, on a clock of its own.

    Args:
        drafters: devices of a separate draft model, which other engines may use as well.
    """

    def __init__(self, scenario: Scenario, number: int, drafters: Sequence[Device]) -> None:
        config, section = scenario.config, scenario.config.speculative_config
        self.clock = VirtualClock()
        self.target = ModelledTarget(scenario.target, self.clock)
        self.is_due = False  # its next step is among the events
        num_blocks = config.num_kv_blocks or _enough_blocks(scenario)
        max_model_len = config.max_model_len or scenario.longest + 1
        law = scenario.law(number)
        drafter: Drafter
        if isinstance(section, DraftModelConfig):

            def make(devices: Sequence[Device]) -> ModelledDraftModel:
                return ModelledDraftModel(
                    section.placement,
                    law,
                    scenario.draft,
                    self.clock,
                    devices,
                    num_blocks=num_blocks,
                    block_size=config.block_size,
                    max_num_batched_tokens=config.max_num_batched_tokens,
                    max_model_len=max_model_len + section.draft_len,
                    asker=number,
                )

            is_own = section.placement == "separate"
            host: Any = _ModelledHost(make, drafters if is_own else [self.target.device])
            drafter = _built(section, host, self.clock)
        elif section.draft_len:
            device = self.target.device if section.has_model else Device()
            name, width = section.label.lower(), getattr(section, "dynamic_tree_max_topK", _WIDEST)
            shape = TreeShape(section.draft_len, width, law) if makes_trees(section) else None
            drafter = ModelledDrafter(name, law, scenario.draft, self.clock, device, shape)
        else:
            drafter = NoDrafter()
        self.drafting = Drafting(drafter, VOCAB, section=section)
        trees = self.drafting.proposes_trees
        scheduler = Scheduler(
            config, num_blocks, max_model_len, clock=self.clock, tree_drafts=trees
        )
        self.loop = Loop(scheduler, self.target, self.drafting)

    def add(self, request: Request, now_s: float) -> None:
        """A request arrives, maybe while a step runs (raises as `Loop.add`)."""
        runs_until_s, self.clock.now_s = self.clock.now_s, now_s
        try:
            self.loop.add(request)
        finally:
            self.clock.now_s = max(runs_until_s, now_s)

    def step(self, now_s: float) -> list[Delta]:
        """A step that begins now; the clock is then at its end."""
        self.clock.wait(now_s)
        return self.loop.step()


def _built(section: DraftModelConfig, host: DraftHost, clock: VirtualClock) -> Drafter:
    drafter = build(section, host)
    assert isinstance(drafter, DraftTarget | Members), drafter
    drafter.clock = clock
    return drafter


def _enough_blocks(scenario: Scenario) -> int:
    """KV blocks with which no request waits for one."""
    config = scenario.config
    each = scenario.longest + config.speculative_config.max_nodes + 1
    return config.max_num_seqs * (each // config.block_size + 2)


_WIDEST = 64  # children of a node, where a section does not bound them


def makes_trees(section: SpeculationBase) -> bool:
    """Whether a drafter's drafts branch."""
    return not getattr(section, "is_chain", True) or getattr(section, "shape", "") == "tree"


def check(section: SpeculationBase) -> None:
    """Raises `ConfigError` for a drafter that cannot be modelled."""
    if isinstance(section, (ComposeConfig, LookaheadConfig)):
        raise ConfigError.at(
            "speculative_config",
            "look-ahead and compositions are not modelled: give one drafter, with the acceptance "
            "by depth that they have",
        )


# -- the simulation


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a scenario, in virtual time."""

    seconds: float
    num_finished: int
    num_refused: int  # queues were full
    num_tokens: int
    num_steps: int  # of all engines
    num_row_steps: int  # requests in steps that emitted
    num_drafted: int  # tokens that were verified
    num_accepted: int
    num_preemptions: int
    target_share: float  # of the time in which targets compute, mean
    drafter_share: float  # alike, of separate drafters
    draft_ms: float  # of rounds of draft models
    waited_ms: float  # that steps waited for drafters
    cache: CacheCounts | None  # of all engines together; None: no speculation cache
    ttft_ms: dict[str, float]
    inter_token_ms: dict[str, float]
    e2e_ms: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Of a request."""
        return self.num_tokens / self.num_row_steps if self.num_row_steps else 0.0

    @property
    def hidden_share(self) -> float | None:
        """Of the draft models' time, that in which no step waited; None: nothing was drafted."""
        if not self.draft_ms:
            return None
        return round(max(0.0, 1 - self.waited_ms / self.draft_ms), 6)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        names = [name for name in self.__slots__ if name != "cache"]
        found = {name: getattr(self, name) for name in names}
        counts = None
        if self.cache is not None:
            counts = {name: getattr(self.cache, name) for name in CacheCounts.__slots__}
        derived = ("tokens_per_s", "tokens_per_step", "hidden_share")
        return {**{name: getattr(self, name) for name in derived}, **found, "cache": counts}


def simulate(scenario: Scenario) -> Outcome:
    """Serves all requests.

    Raises:
        ConfigError: no request fits the engine, or the drafter cannot be modelled.
    """
    check(scenario.config.speculative_config)
    run = _Simulation(scenario)
    run.run()
    return run.outcome()


_ARRIVAL, _STEP = range(2)  # events: at one time, requests come before steps
_HANDOVER_S = 1e-6  # of the only client: its next request comes after the engine's step has begun


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._draw = np.random.default_rng(scenario.seed)
        num_engines, num_drafters = scenario.num_engines, scenario.num_drafters
        self._drafters = [Device() for _ in range(num_drafters)]
        shares = [self._drafters[number::num_engines] for number in range(num_engines)]
        if getattr(scenario.config.speculative_config, "drafter_group", None) is not None:
            shares = [self._drafters] * num_engines  # all engines use all members
        self._engines = [
            SimulatedEngine(
                scenario, number, shares[number] or [self._drafters[number % num_drafters]]
            )
            for number in range(num_engines)
        ]
        self._teach()
        self._views = LoadViews(num_engines, num_engines, _max_compared(num_engines))
        self._lives: dict[str, _Life] = {}
        self._ended: list[_Life] = []
        self._events: list[tuple[float, int, int, int]] = []  # time, kind, order, engine
        self._order = count()
        self._num_held = 0  # requests that the only client has not handed over yet
        self._client_free_s = 0.0
        self._num_sent = self._num_refused = self._num_steps = self._num_row_steps = 0

    def _teach(self) -> None:
        """What engines measure as they start; here a spare one does, in no time."""
        budgets = [each.loop.scheduler.budget for each in self._engines]
        if budgets[0].knowledge() is None:
            return
        config = self._scenario.config
        loop = SimulatedEngine(self._scenario, 0, [Device() for _ in self._drafters]).loop
        if not config.speculative_config.has_model:
            loop.drafting = MadeUpDrafts(VOCAB, trees=makes_trees(config.speculative_config))
        costs = measure(loop, VOCAB, config.max_num_seqs, math.inf)
        for budget in budgets:
            budget.teach_opening(costs.opening_ms)
            for lesson in costs.steps:
                budget.teach(lesson)

    def run(self) -> None:
        """Until every request has ended."""
        load, total = self._scenario.load, self._scenario.num_requests
        replayed = self._scenario.requests
        at_once = min(total, load.streams) if load.rate is None and load.streams else total
        times_s = [each.arrived_s for each in replayed] or load.times_s(at_once)
        self._num_planned = total if replayed else at_once
        for arrival_s in times_s:
            self._submit(arrival_s)
        while self._events:
            now_s, kind, _, number = heapq.heappop(self._events)
            if kind == _ARRIVAL:
                self._arrive(now_s)
            else:
                self._step(number, now_s)

    def _push(self, at_s: float, kind: int, number: int = 0) -> None:
        heapq.heappush(self._events, (at_s, kind, next(self._order), number))

    def _arrive(self, now_s: float) -> None:
        scenario, number = self._scenario, self._num_sent
        self._num_sent += 1
        low, high = 1 - scenario.range_ratio, 1 + scenario.range_ratio
        if scenario.requests:
            lens = [scenario.requests[number].num_prompt, scenario.requests[number].num_output]
        else:
            lens = [
                max(1, int(mean * self._draw.uniform(low, high)))
                for mean in (scenario.input_len, scenario.output_len)
            ]
        text = text_of(number)
        prompt = np.arange(text, text + lens[0], dtype=np.int32) % VOCAB
        sampling = SamplingParams(temperature=0.0, max_tokens=lens[1], ignore_eos=True)
        request = Request(str(number), prompt, sampling, seed=number)
        ingress = int(self._draw.integers(scenario.num_engines))
        self._views.tell(now_s)
        engine = self._views.send(ingress, "served", self._draw)
        life = _Life(request, engine, ingress, now_s)
        try:
            self._engines[engine].add(request, now_s)
        except OverloadedError:
            self._num_refused += 1
            self._free_client(engine, now_s)
            self._leave(life, now_s)
            return
        self._lives[request.id] = life
        self._free_client(engine, now_s)
        self._make_due(engine, now_s)

    def _submit(self, at_s: float) -> None:
        """A request arrives then, or once the only client is free."""
        if not self._scenario.one_client:
            self._push(at_s, _ARRIVAL)
            return
        self._num_held += 1
        if self._num_held == 1:
            self._push(max(at_s, self._client_free_s), _ARRIVAL)

    def _free_client(self, number: int, now_s: float) -> None:
        """The engine takes what was submitted between two steps; then the client goes on."""
        if self._scenario.one_client:
            self._client_free_s = max(now_s, self._engines[number].clock.now_s) + _HANDOVER_S
            self._num_held -= 1
            if self._num_held:
                self._push(self._client_free_s, _ARRIVAL)

    def _make_due(self, number: int, now_s: float) -> None:
        engine = self._engines[number]
        if not engine.is_due and engine.loop.has_work:
            engine.is_due = True
            self._push(max(now_s, engine.clock.now_s), _STEP, number)

    def _step(self, number: int, now_s: float) -> None:
        engine = self._engines[number]
        engine.is_due = False
        deltas = engine.step(now_s)
        end_s = engine.clock.now_s
        self._num_steps += 1
        self._num_row_steps += len(deltas)
        for delta in deltas:
            life = self._lives[delta.request_id]
            life.times_s.append(end_s)
            life.counts.append(len(delta.token_ids))
            if delta.finish_reason:
                self._ended.append(self._lives.pop(delta.request_id))
                self._leave(life, end_s)
        self._make_due(number, end_s)

    def _leave(self, life: _Life, now_s: float) -> None:
        """A request has ended; its stream sends the next."""
        self._views.end(life.ingress, life.engine)
        scenario = self._scenario
        if scenario.load.rate is None and self._num_planned < scenario.num_requests:
            self._num_planned += 1
            self._submit(now_s + max(scenario.think_ms / 1e3, _HANDOVER_S * scenario.one_client))

    def outcome(self) -> Outcome:
        seconds = max((life.times_s[-1] for life in self._ended), default=0.0)
        stats = [engine.drafting.stats for engine in self._engines]
        schedulers = [engine.loop.scheduler for engine in self._engines]
        whole = max(seconds * 1e3, 1e-9)
        target_ms = sum(engine.target.device.busy_ms for engine in self._engines)
        drafter_ms = sum(device.busy_ms for device in self._drafters)
        waited_ms = sum(engine.loop.timer.times.propose_ms for engine in self._engines)
        return Outcome(
            seconds=seconds,
            num_finished=len(self._ended),
            num_refused=self._num_refused,
            num_tokens=sum(sum(life.counts) for life in self._ended),
            num_steps=self._num_steps,
            num_row_steps=self._num_row_steps,
            num_drafted=sum(each.num_gen_tokens for each in stats),
            num_accepted=sum(each.num_acc_tokens for each in stats),
            num_preemptions=sum(each.counts.num_preemptions for each in schedulers),
            target_share=target_ms / len(self._engines) / whole,
            drafter_share=drafter_ms / len(self._drafters) / whole,
            draft_ms=drafter_ms,
            waited_ms=waited_ms,
            cache=_summed([each.speculation_cache for each in stats]),
            **self._latencies(),
        )

    def _latencies(self) -> dict[str, dict[str, float]]:
        """As `measure.Trace` has them; with numpy, since there are many."""
        first = [(life.times_s[0] - life.arrived_s) * 1e3 for life in self._ended]
        whole = [(life.times_s[-1] - life.arrived_s) * 1e3 for life in self._ended]
        gaps = [np.diff(life.times_s) * 1e3 for life in self._ended]
        counts = [np.array(life.counts[1:], dtype=np.int64) for life in self._ended]
        every = np.concatenate(counts) if counts else np.zeros(0, np.int64)
        shares = np.concatenate(gaps) / np.maximum(every, 1) if gaps else np.zeros(0)
        values = {"ttft_ms": first, "inter_token_ms": np.repeat(shares, every), "e2e_ms": whole}
        return {name: _percentiles(np.asarray(each)) for name, each in values.items()}


def _percentiles(values: NDArray[np.float64]) -> dict[str, float]:
    if not len(values):
        return {f"p{percent}": 0.0 for percent in PERCENTS}
    found = np.percentile(values, PERCENTS).tolist()
    return {f"p{percent}": value for percent, value in zip(PERCENTS, found, strict=True)}


def _summed(counts: Sequence[CacheCounts | None]) -> CacheCounts | None:
    each = [one for one in counts if one is not None]
    if not each:
        return None
    return CacheCounts(*(sum(getattr(one, name) for one in each) for name in CacheCounts.__slots__))


def _max_compared(num_engines: int) -> int:
    if num_engines == 1:
        return 1  # nothing is chosen; what follows loads Ray
    from ..cluster.serve.engines import MAX_COMPARED

    return MAX_COMPARED
