"""What a deployment of many nodes carries, from costs per unit that are measured on one machine.

    python -m outrider.bench.scale [--nodes 1000] [--step-ms 25] ...    prints the tables
    python -m outrider.bench.scale --measure                            measures the costs anew

Costs are processor time in microseconds, of the code that serves: the engine's loop without its
forward, frames between engines and ingresses, the choice of an engine, a pool's exchanges, and what
Serve's controller and Ray's control store spend for replicas and nodes that do nothing. They are
kept in `scale.json` and depend on the processor; multiplied, they say when one core is full. How
requests spread over engines whose loads are known late is simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import platform
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..cluster.serve.edge import FromEngine
from ..cluster.serve.engines import MAX_COMPARED, EngineLink, Engines
from ..drafters.lookup.pool import PoolStore, pack
from ..scheduler.sampling import SamplingParams
from ..scheduler.types import Delta, Request, ints
from ..workers.transport import framing
from .serving.costs import below
from .simulation import REPORTS_PER_S, LoadViews

RECORD = Path(__file__).with_name("scale.json")
WINDOW_LEN = 512  # tokens that a drafter publishes together
PUBLISH_EVERY = 32  # tokens of an output
MEAN_WINDOW_LEN = 114  # of prompts and outputs of the default fleet
EXCHANGES_PER_S = 5.0  # of an engine with the pool (`cluster/pools.py`)
FULL = 0.5  # of a core: from here on, queues grow where load comes in bursts


@dataclass(frozen=True)
class Units:
    """Microseconds of one core, and bytes."""

    step_us: float  # the engine's loop and its end of the channel, per step
    step_seq_us: float  # and per sequence of the batch
    step_bytes: float  # to each rank, per step
    step_seq_bytes: float
    frame_us: float  # a frame of tokens to an ingress, in the engine
    delta_us: float  # and per sequence in it
    frame_bytes: float
    delta_bytes: float
    taken_us: float  # such a frame, in the ingress
    taken_delta_us: float
    report_us: float  # a frame with nothing but the load, in the engine
    report_taken_us: float  # in the ingress, and per engine that it is linked to
    report_link_us: float
    pick_us: float  # choosing the engine of a request, and per engine
    pick_link_us: float
    request_engine_us: float  # a request with its first 4 tokens, of 32 at once
    request_ingress_us: float
    event_ingress_us: float  # a streamed event, of 32 streams; with drafts it has several tokens
    exchange_us: float  # with the pool, in its actor
    published_us: float  # per window that comes in
    delivered_us: float  # per window that goes out
    controller_us: float  # Serve's controller, per replica and second
    listed_bytes: float  # per replica, in the list that every ingress gets
    gcs_us: float  # Ray's control store, per node and second
    raylet_us: float  # a node's raylet, per second, beside no others
    raylet_node_us: float  # and per other node


@dataclass(frozen=True)
class Fleet:
    """A deployment: on every node an engine and an ingress."""

    nodes: int = 1000
    seqs: int = 64  # requests that an engine runs at most
    used: float = 0.8  # of them, on average
    step_ms: float = 25.0
    tokens_per_step: float = 2.5  # of a request, with drafts
    prompt_tokens: int = 1000
    output_tokens: int = 300
    ranks: int = 8
    learnt_tokens: int = 400  # that a shared pool's tables take in per step, with patterns up to 4

    @property
    def running(self) -> float:
        """Requests of an engine."""
        return self.seqs * self.used

    @property
    def duration_s(self) -> float:
        """Of a request's decoding."""
        return self.output_tokens / self.tokens_per_step * self.step_ms / 1e3

    @property
    def requests_per_s(self) -> float:
        """Of one engine."""
        return self.running / self.duration_s

    @property
    def served_per_s(self) -> float:
        """Tokens of prompts and outputs of one engine."""
        return self.requests_per_s * (self.prompt_tokens + self.output_tokens)

    @property
    def foreign_per_s(self) -> float:
        """Tokens of other engines that one engine can learn, after its own."""
        spare = self.learnt_tokens * 1e3 / self.step_ms - self.served_per_s
        return min(max(0.0, spare), (self.nodes - 1) * self.served_per_s)

    @property
    def windows_per_s(self) -> float:
        """That one engine publishes, where pools are shared by the cluster."""
        prompt = -(-self.prompt_tokens // WINDOW_LEN)
        return self.requests_per_s * (prompt + self.output_tokens / PUBLISH_EVERY)


def loads(units: Units, fleet: Fleet) -> dict[str, float]:
    """Cores that each process needs, for what grows with the fleet and what does not."""
    steps_per_s, nodes, per_s = 1e3 / fleet.step_ms, fleet.nodes, fleet.requests_per_s
    reports = nodes * min(REPORTS_PER_S, 2 * per_s)  # a load changes as a request starts and ends
    # A step's tokens go to as many ingresses as its requests came from.
    frames = nodes * (1 - (1 - 1 / nodes) ** fleet.running) * steps_per_s
    deltas = fleet.running * steps_per_s
    windows = nodes * fleet.windows_per_s
    fetched = nodes * fleet.foreign_per_s / fleet.served_per_s * fleet.windows_per_s
    rates = {
        "loop": steps_per_s * (units.step_us + fleet.running * units.step_seq_us),
        "door": frames * units.frame_us + deltas * units.delta_us + reports * units.report_us,
        "requests": per_s * units.request_engine_us,
        "ingress, requests": per_s
        * (units.request_ingress_us + units.pick_us + nodes * units.pick_link_us),
        "ingress, events": deltas * units.event_ingress_us,
        "ingress, loads": reports * (units.report_taken_us + nodes * units.report_link_us),
        "pool": nodes * EXCHANGES_PER_S * units.exchange_us
        + windows * units.published_us
        + fetched * units.delivered_us,
        "controller": 2 * nodes * units.controller_us,
        "gcs": nodes * units.gcs_us,
        "raylet": units.raylet_us + (nodes - 1) * units.raylet_node_us,
    }
    return {name: rate / 1e6 for name, rate in rates.items()}


def processes(units: Units, fleet: Fleet) -> dict[str, float]:
    """Cores by process."""
    load = loads(units, fleet)
    return {
        "engine": load["loop"] + load["door"] + load["requests"],
        "ingress": sum(each for name, each in load.items() if name.startswith("ingress")),
        **{name: load[name] for name in ("pool", "controller", "gcs", "raylet")},
    }


def traffic(units: Units, fleet: Fleet) -> dict[str, float]:
    """Bytes per second."""
    steps_per_s, nodes = 1e3 / fleet.step_ms, fleet.nodes
    plan = units.step_bytes + fleet.running * units.step_seq_bytes
    frames = nodes * (1 - (1 - 1 / nodes) ** fleet.running)
    tokens = steps_per_s * (frames * units.frame_bytes + fleet.running * units.delta_bytes)
    return {
        "an engine to its ranks": steps_per_s * fleet.ranks * plan,
        "an engine to all ingresses": tokens,
        "engines to the pool": 4.0 * nodes * fleet.served_per_s,
        "the pool to engines": 4.0 * nodes * fleet.foreign_per_s,
        "a changed list of replicas": nodes * nodes * units.listed_bytes,  # once, not per second
    }


def saturation(units: Units, fleet: Fleet, process: str) -> int | None:
    """The most nodes of which a process serves within `FULL` of a core; None: any number."""
    most = 1 << 20
    if processes(units, replace(fleet, nodes=most))[process] <= FULL:
        return None
    low, high = 0, most  # within, and beyond
    while high - low > 1:
        middle = (low + high) // 2
        full = processes(units, replace(fleet, nodes=middle))[process] > FULL
        low, high = (low, middle) if full else (middle, high)
    return low


@dataclass(frozen=True)
class Spread:
    """How requests stand on engines, over a simulated time."""

    deviation: float  # of the engines' loads, by their mean
    most: float  # the 99th percentile of loads, by their mean
    waiting: float  # share of requests that come to an engine whose batch is full


def simulate(fleet: Fleet, cell: int, policy: str, seconds: float = 5.0) -> Spread:
    """Requests at random times, each to a cell and an ingress of it at random.

    Policies are those of `LoadViews.choose`.
    """
    tick_s, draw = 0.005, np.random.default_rng(0)
    nodes = fleet.nodes
    views = LoadViews(nodes, cell, MAX_COMPARED)
    load = views.load
    ends: dict[int, list[tuple[int, int]]] = defaultdict(list)
    found: list[np.ndarray] = []
    num_sent = num_full = 0
    warm_up = 2 * fleet.duration_s
    for tick in range(round((warm_up + seconds) / tick_s)):
        for ingress, engine in ends.pop(tick, ()):
            views.end(ingress, engine)
        views.tell(tick * tick_s)
        arrivals = draw.poisson(nodes * fleet.requests_per_s * tick_s)
        for ingress in draw.integers(nodes, size=arrivals).tolist():
            engine = views.send(ingress, policy, draw)
            if tick * tick_s > warm_up:
                num_sent += 1
                num_full += int(load[engine] > fleet.seqs)
            end = tick + 1 + round(draw.exponential(fleet.duration_s) / tick_s)
            ends[end].append((ingress, engine))
        if tick * tick_s > warm_up:
            found.append(load.copy())
    all_loads = np.concatenate(found)
    mean = float(all_loads.mean())
    return Spread(
        float(all_loads.std()) / mean,
        float(np.percentile(all_loads, 99)) / mean,
        num_full / max(num_sent, 1),
    )


def tables(units: Units, fleet: Fleet, sizes: Sequence[int], cells: Sequence[int]) -> list[str]:
    """The tables of `docs/scale.md`, as Markdown."""
    return [*arithmetic(units, fleet, sizes, cells), _spread_table(fleet, cells)]


def arithmetic(units: Units, fleet: Fleet, sizes: Sequence[int], cells: Sequence[int]) -> list[str]:
    """Those that take no simulation."""
    return [
        _unit_table(units),
        _fleet_table(fleet),
        _process_table(units, fleet, sizes),
        _traffic_table(units, fleet, sizes),
        _pool_table(fleet, sizes),
        _cell_table(units, fleet, cells),
    ]


def _table(title: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [title, ["---"] * len(title), *rows]
    return "".join(f"|{'|'.join(f' {cell} ' if cell != '---' else cell for cell in line)}|\n"
                   for line in lines)  # fmt: skip


def _unit_table(units: Units) -> str:
    each = {
        "engine: loop, per step": (units.step_us, "us"),
        "engine: loop, per step and sequence": (units.step_seq_us, "us"),
        "engine to a rank, per step": (units.step_bytes, "B"),
        "engine to a rank, per step and sequence": (units.step_seq_bytes, "B"),
        "engine: a step's frame to one ingress": (units.frame_us, "us"),
        "engine: each sequence in it": (units.delta_us, "us"),
        "engine: telling one ingress its load": (units.report_us, "us"),
        "engine: a request, with 4 tokens": (units.request_engine_us, "us"),
        "ingress: a request, with 4 tokens": (units.request_ingress_us, "us"),
        "ingress: a streamed event": (units.event_ingress_us, "us"),
        "ingress: choosing an engine, per engine": (units.pick_link_us, "us"),
        "ingress: taking a load": (units.report_taken_us, "us"),
        "ingress: taking a load, per engine": (units.report_link_us, "us"),
        "pool: an exchange": (units.exchange_us, "us"),
        "pool: a window in": (units.published_us, "us"),
        "pool: a window out": (units.delivered_us, "us"),
        "Serve's controller: a replica, per second": (units.controller_us, "us"),
        "Serve's controller: a replica in a list": (units.listed_bytes, "B"),
        "Ray's control store: a node, per second": (units.gcs_us, "us"),
        "a raylet: another node, per second": (units.raylet_node_us, "us"),
    }
    rows = [[name, f"{_short(value)} {unit}"] for name, (value, unit) in each.items()]
    return _table(["unit", "cost"], rows)


def _fleet_table(fleet: Fleet) -> str:
    whole = fleet.nodes
    ranks, per_s = fleet.ranks, fleet.requests_per_s
    rows = [
        ["nodes, engines, ingresses", "1", f"{whole:,}"],
        ["ranks (GPUs)", f"{ranks}", f"{ranks * whole:,}"],
        ["requests that run", f"{fleet.running:.0f}", f"{fleet.running * whole:,.0f}"],
        ["requests per second", f"{per_s:.1f}", f"{per_s * whole:,.0f}"],
        ["tokens per second", f"{per_s * fleet.output_tokens:,.0f}",
         f"{per_s * fleet.output_tokens * whole:,.0f}"],
        ["connections between ingresses and engines", "1", f"{whole**2:,}"],
        ["threads of an engine for them", "2", f"{2 * whole:,}"],
    ]  # fmt: skip
    return _table(["", "a node", f"{whole:,} nodes"], rows)


def _process_table(units: Units, fleet: Fleet, sizes: Sequence[int]) -> str:
    rows = []
    for name in processes(units, fleet):
        cells = [f"{processes(units, replace(fleet, nodes=nodes))[name]:.3f}" for nodes in sizes]
        most = saturation(units, fleet, name)
        rows.append([name, *cells, "any" if most is None else f"{most:,}"])
    title = ["cores of", *map(_nodes, sizes), f"nodes at {FULL} of a core"]
    return _table(title, rows)


def _traffic_table(units: Units, fleet: Fleet, sizes: Sequence[int]) -> str:
    names = traffic(units, fleet)
    rows = [
        [name, *(_bytes(traffic(units, replace(fleet, nodes=nodes))[name]) for nodes in sizes)]
        for name in names
    ]
    return _table(["bytes per second", *map(_nodes, sizes)], rows)


def _pool_table(fleet: Fleet, sizes: Sequence[int]) -> str:
    rows = []
    for prompt_tokens in (fleet.prompt_tokens, fleet.prompt_tokens // 10):
        for nodes in sizes:
            part = replace(fleet, nodes=nodes, prompt_tokens=prompt_tokens)
            others = (nodes - 1) * part.served_per_s
            share = f"{part.foreign_per_s / others:.1%}" if others else "-"
            rows.append(
                [f"{prompt_tokens:,}", f"{nodes:,}", f"{part.served_per_s:,.0f}",
                 f"{others:,.0f}", f"{part.foreign_per_s:,.0f}", share]
            )  # fmt: skip
    title = ["tokens of a prompt", "nodes", "tokens an engine serves, per second"]
    return _table([*title, "all others serve", "it can learn of others", "share"], rows)


def _cell_table(units: Units, fleet: Fleet, cells: Sequence[int]) -> str:
    rows = []
    for cell in cells:
        part = replace(fleet, nodes=cell)
        cores = processes(units, part)
        fullest = max(cores, key=lambda name: cores[name])
        rows.append(
            [f"{cell:,}", f"{-(-fleet.nodes // cell):,}", f"{cell**2:,}", f"{2 * cell:,}",
             f"{fullest}, {cores[fullest]:.2f}",
             _bytes(traffic(units, part)["a changed list of replicas"])]
        )  # fmt: skip
    title = ["nodes of a cell", "cells", "connections in a cell", "threads of an engine"]
    return _table([*title, "fullest process, cores", "a changed list"], rows)


def _spread_table(fleet: Fleet, cells: Sequence[int]) -> str:
    rows = []
    for cell in cells:
        texts = []
        for policy in ("served", "least", "random"):
            spread = simulate(replace(fleet, nodes=fleet.nodes // cell * cell), cell, policy)
            texts.append(f"{spread.most:.2f}, {spread.waiting:.1%}")
        rows.append([f"{cell:,}", *texts])
    return _table(["nodes of a cell", "as served", "least loaded of all", "random"], rows)


def _nodes(number: int) -> str:
    return f"{number:,} node{'s' if number > 1 else ''}"


def _short(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.01 else "0"


def _bytes(number: float) -> str:
    suffixes = ["B", "kB", "MB", "GB", "TB", "PB"]
    while number >= 1000 and len(suffixes) > 1:
        number /= 1000
        suffixes.pop(0)
    return f"{number:.3g} {suffixes[0]}"


# Measurements.


def _cpu_us(work: Callable[[], object], repeat: int = 200, rounds: int = 7) -> float:
    """Microseconds of this thread per call; of several rounds the quietest."""
    work()
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(repeat):
            work()
        best = min(best, (time.thread_time() - start) / repeat)
    return best * 1e6


def _line(few: float, many: float, num_few: float, num_many: float) -> tuple[float, float]:
    """Intercept and slope, neither below 0."""
    slope = max(0.0, (many - few) / (num_many - num_few))
    return max(0.0, few - slope * num_few), slope


def measure_loop() -> dict[str, float]:
    """By `bench/micro/step_cost.py`, its device step: batches of 8 and of 64."""
    import torch

    from ..workers.collective import Collective
    from ..workers.model.target import load_model
    from ..workers.ops import ReferenceOps
    from .drafters import MODELS
    from .micro import step_cost

    model = step_cost.without_forward(
        load_model(MODELS / "target", device=torch.device("cpu"), collective=Collective.single(),
                   ops=ReferenceOps())
    )  # fmt: skip
    found = []
    for batch in (8, 64):
        costs = [step_cost.measure(model, batch, 1, 60, is_after=True) for _ in range(3)]
        engine = min((cost.total_s - cost.rank_s) / cost.num_steps for cost in costs)
        found.append((engine * 1e6, costs[0].num_bytes / costs[0].num_steps))
    step_us, step_seq_us = _line(found[0][0], found[1][0], 8, 64)
    step_bytes, step_seq_bytes = _line(found[0][1], found[1][1], 8, 64)
    return {"step_us": step_us, "step_seq_us": step_seq_us, "step_bytes": step_bytes,
            "step_seq_bytes": step_seq_bytes}  # fmt: skip


def measure_door() -> dict[str, float]:
    """Frames between an engine and an ingress, over a Unix socket that is drained beside."""
    here, there = socket.socketpair()
    there.settimeout(10.0)

    def sent(frame: FromEngine) -> tuple[float, bytes]:
        body = frame.encoded()
        total, repeat = 0.0, 50
        rounds = []
        for _ in range(20):
            start = time.thread_time()
            for _ in range(repeat):
                here.send(framing.frame(frame.encoded()), socket.MSG_DONTWAIT)
            rounds.append((time.thread_time() - start) / repeat)
            left = repeat * (framing.HEADER.size + len(body))
            while left:
                left -= len(there.recv(1 << 20))
        total = min(rounds)
        return total * 1e6, body

    def frame(size: int) -> FromEngine:
        deltas = [Delta(f"completion-{index:024d}", (17, 23, 99), 2) for index in range(size)]
        return FromEngine(50, deltas)

    (one, one_body), (many, many_body), (report, _) = (
        sent(frame(1)),
        sent(frame(33)),
        sent(frame(0)),
    )
    here.close()
    there.close()
    frame_us, delta_us = _line(one, many, 1, 33)
    frame_bytes, delta_bytes = _line(len(one_body), len(many_body), 1, 33)
    taken_us, taken_delta_us = _line(
        _cpu_us(lambda: FromEngine.decoded(one_body)),
        _cpu_us(lambda: FromEngine.decoded(many_body)), 1, 33,
    )  # fmt: skip
    return {"frame_us": frame_us, "delta_us": delta_us, "frame_bytes": frame_bytes,
            "delta_bytes": delta_bytes, "taken_us": taken_us, "taken_delta_us": taken_delta_us,
            "report_us": report}  # fmt: skip


async def measure_links() -> dict[str, float]:
    """An ingress that is linked to 10 engines, and to 1010: a load told, and a choice."""
    request = Request("r", ints(np.arange(8)), SamplingParams(max_tokens=1), 0)
    taken, picked = [], []
    for num_links in (10, 1010):
        engines = Engines(None, "node")
        for index in range(num_links):
            name = f"engine-{index}"
            engines._links[name] = EngineLink(name, engines._changed)
        link = next(iter(engines._links.values()))
        bodies = [framing.frame(FromEngine(load).encoded()) for load in (3, 4)]

        def take(link: EngineLink = link, bodies: list[bytes] = bodies) -> None:
            for body in bodies:
                link.data_received(body)

        taken.append(_cpu_us(take) / 2)
        picked.append(_cpu_us(lambda engines=engines: engines._best(request)))  # type: ignore[misc]
    report = _line(taken[0], taken[1], 10, 1010)
    pick = _line(picked[0], picked[1], 10, 1010)
    return {"report_taken_us": report[0], "report_link_us": report[1], "pick_us": pick[0],
            "pick_link_us": pick[1]}  # fmt: skip


def measure_requests() -> dict[str, float]:
    """By `bench/http_cost.py`, 32 streams at once: answers of 4 tokens, and of 128."""
    from . import http_cost
    from .serving.costs import add_server_options, servers_of

    parser = argparse.ArgumentParser()
    add_server_options(parser)
    with servers_of(parser.parse_args([])) as (server,):
        http_cost.measure(server, 32, 64)  # warms up
        short = [http_cost.measure(server, 32, 4) for _ in range(20)]
        event_ms = min(http_cost.measure(server, 32, 128)["ingress"] for _ in range(5))
    engine_ms, ingress_ms = (
        4 * statistics.mean(row[name] for row in short) for name in ("engine", "ingress")
    )
    return {
        "request_engine_us": engine_ms * 1e3,
        "request_ingress_us": ingress_ms * 1e3,
        "event_ingress_us": event_ms * 1e3,
    }


@contextmanager
def _local_ray() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=64, num_gpus=0, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def measure_pool() -> dict[str, float]:
    """Windows published to a store in this process; and the process of an actor with a store, for
    calls over Ray that take nothing, and that take 500 windows."""
    import ray

    random = np.random.default_rng(0)
    windows = [("", pack(ints(random.integers(0, 4096, MEAN_WINDOW_LEN)))) for _ in range(4000)]
    store = PoolStore("f", 10**8)
    start = time.thread_time()
    for each in windows:
        store.exchange("a", [each], store.epoch, {})
    published_us = (time.thread_time() - start) / len(windows) * 1e6
    with _local_ray():
        actor: Any = ray.remote(PoolStore).options(num_cpus=0).remote("f", 10**8)
        ray.get(actor.exchange.remote("a", windows[:500], "", {}))
        nothing, many = (_exchange_us(actor, cursors) for cursors in ({}, {"": 0}))
    return {
        "published_us": published_us,
        "delivered_us": (many - nothing) / 500,
        "exchange_us": nothing,
    }


def _exchange_us(actor: Any, cursors: dict[str, int], num_calls: int = 1500) -> float:
    """Processor time of the actor's process per call."""
    import ray

    before = _roles(os.getpid())["pool"]
    for _ in range(num_calls):
        ray.get(actor.exchange.remote("b", (), "", cursors))
    return (_roles(os.getpid())["pool"] - before) / num_calls * 1e6


def _roles(root: int) -> dict[str, float]:
    """Processor seconds by role, of all processes below."""
    found: dict[str, float] = defaultdict(float)
    for process in below(root):
        found[process.role] += process.cpu_s
    return found


def _rates(seconds: float) -> dict[str, float]:
    """Microseconds per second by role, of what runs below this process."""
    before, begun = _roles(os.getpid()), time.monotonic()
    time.sleep(seconds)
    after, passed = _roles(os.getpid()), time.monotonic() - begun
    return {name: (after[name] - before[name]) / passed * 1e6 for name in after}


def measure_controller(
    seconds: float, sizes: tuple[int, int] = (2, 22), settle_s: float = 10.0
) -> dict[str, float]:
    """Serve's controller with few and many replicas that do nothing, checked as engines are."""
    import ray
    from ray import serve
    from ray.serve._private.common import DeploymentID
    from ray.serve._private.constants import SERVE_DEFAULT_APP_NAME
    from ray.serve._private.long_poll import LongPollNamespace
    from ray.serve.context import _get_global_client

    from ..cluster.serve.models import HeldCheck

    class Idle:
        def __init__(self) -> None:
            self._health = HeldCheck(5.5)

        async def check_health(self) -> None:
            await self._health.hold()

    found = []
    key = (LongPollNamespace.DEPLOYMENT_TARGETS, DeploymentID("Idle", SERVE_DEFAULT_APP_NAME))
    with _local_ray():
        for size in sizes:
            deployment = serve.deployment(
                num_replicas=size, health_check_period_s=5.0, ray_actor_options={"num_cpus": 0}
            )(Idle)
            serve.run(deployment.bind(), route_prefix=None)
            time.sleep(settle_s)
            found.append(statistics.median(_rates(seconds)["controller"] for _ in range(3)))
        client: Any = _get_global_client()
        answer: Any = ray.get(client._controller.listen_for_change.remote({key: -1}))
        listed = len(pickle.dumps(answer[key].object_snapshot)) / sizes[1]
        serve.shutdown()
    return {"controller_us": _line(found[0], found[1], *sizes)[1], "listed_bytes": listed}


def measure_nodes(seconds: float, others: int = 6, settle_s: float = 10.0) -> dict[str, float]:
    """Ray's control store and raylets: a head alone, and with other nodes of this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    time.sleep(settle_s)
    alone = _rates(seconds)
    for _ in range(others):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    time.sleep(settle_s)
    several = _rates(seconds)
    cluster.shutdown()
    first, slope = _line(alone["raylet"], several["raylet"] / (others + 1), 0, others)
    return {"gcs_us": _line(alone["gcs"], several["gcs"], 1, 1 + others)[1], "raylet_us": first,
            "raylet_node_us": slope}  # fmt: skip


PARTS: dict[str, Callable[[float], dict[str, float]]] = {
    "loop": lambda _: measure_loop(),
    "door": lambda _: measure_door(),
    "links": lambda _: asyncio.run(measure_links()),
    "requests": lambda _: measure_requests(),
    "nodes": measure_nodes,
    "pool": lambda _: measure_pool(),
    "controller": measure_controller,
}


def measure(parts: Sequence[str], seconds: float) -> dict[str, Any]:
    """Units of these parts, those of the others as recorded, and what they were measured on."""
    units: dict[str, float] = {}
    if set(parts) < set(PARTS):
        units = json.loads(RECORD.read_text(encoding="utf-8"))["units"]
    for name in parts:
        found = PARTS[name](seconds)
        units |= {key: float(f"{value:.4g}") for key, value in found.items()}
    return {"machine": _processor(), "date": time.strftime("%Y-%m-%d"), "units": units}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def recorded() -> Units:
    """The units of `scale.json`."""
    return Units(**json.loads(RECORD.read_text(encoding="utf-8"))["units"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables, or measures."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.scale")
    parser.add_argument(
        "--measure", nargs="*", choices=PARTS, help="these, or all, and write scale.json"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="that idle processes are read")
    for name, value in asdict(Fleet()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64, 250, 1000])
    parser.add_argument("--cells", type=int, nargs="+", default=[8, 16, 32, 64, 125, 250, 1000])
    options = parser.parse_args(arguments)
    if options.measure is not None:
        record = measure(options.measure or list(PARTS), options.seconds)
        Units(**record["units"])  # complete
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    fleet = Fleet(**{name: getattr(options, name) for name in asdict(Fleet())})
    if min(fleet.nodes, fleet.seqs, fleet.output_tokens, *options.sizes, *options.cells) < 1:
        parser.error("nodes, seqs, output tokens, sizes and cells are at least 1")
    if max(options.cells) > fleet.nodes:
        parser.error("--cells: a cell has at most as many nodes as there are")
    sys.stdout.write("\n".join(tables(recorded(), fleet, options.sizes, options.cells)))


if __name__ == "__main__":
    main()
