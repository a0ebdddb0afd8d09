"""What it costs that a rank is a process of its own: a step's message there and its verdict back.

    python -m outrider.bench.micro.channel_cost [--batch 1 8 32] [--nodes 0 4] [--steps 600]

The step channel of a server (`SocketChannel`, `serve`) between this process and a child; beside it
the channel within one process, inline. Both take turns. In place of a forward the rank reads as
many bytes as the demo target's weights have, so that caches are as cold, and threads as fast
asleep, as in a server; that time is subtracted. The design allows 0.25 ms more over processes.
Microseconds of a step: the wall's clock (median and tenth percentile), and CPU time of both ends
together, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from dataclasses import dataclass, replace

import numpy as np

from ...scheduler.types import StepPlan, Verdict, ints, starts_of
from ...workers.transport.channel import Channel, ThreadChannel
from ...workers.transport.socket_channel import SocketChannel, serve
from ..measure import Rows
from .operations import decode_plan

_ROUND = 50  # steps before the other takes its turn
_WEIGHTS_MIB = 22  # of the demo target in bfloat16
_TIMEOUT_S = 60.0
BUDGET_US = 250


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of a step."""

    median: float
    tenth: float
    cpu: float


def verdict_of(batch_size: int, num_accepted: int) -> Verdict:
    """Every sequence emits its accepted nodes and one more."""
    emitted, path = (np.full(batch_size, count) for count in (num_accepted + 1, num_accepted))
    return Verdict(
        step=0,
        emitted=ints(np.arange(emitted.sum())),
        emitted_start=starts_of(emitted),
        path=ints(np.tile(np.arange(num_accepted), batch_size)),
        path_start=starts_of(path),
    )


class _Rank:
    """Judges every plan alike, after what stands for a forward; a negative step asks for its CPU
    seconds, of which forwards are none."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._weights = np.ones(_WEIGHTS_MIB << 18, dtype=np.float32)
        self.forward_s = 0.0  # CPU time

    def handle(self, plan: StepPlan) -> Verdict | float:
        if plan.step < 0:
            return time.process_time() - self.forward_s
        start_s, cpu_s = time.perf_counter(), time.process_time()
        self._weights.max()
        forward_ms = (time.perf_counter() - start_s) * 1e3
        self.forward_s += time.process_time() - cpu_s
        return replace(self._verdict, forward_ms=forward_ms)


def _serve(connection: socket.socket, verdict: Verdict) -> None:
    """The child process."""
    serve(connection, 0, _Rank(verdict).handle)


def _timed(channel: Channel, plan: StepPlan, times_s: list[float]) -> float:
    """Adds the times of a round's steps, forwards left out; returns CPU seconds of this process."""
    cpu_s = time.process_time()
    for _ in range(_ROUND):
        start_s = time.perf_counter()
        verdict = channel.call(plan, _TIMEOUT_S)
        times_s.append(time.perf_counter() - start_s - verdict.forward_ms / 1e3)
    return time.process_time() - cpu_s


def measure(batch_size: int, num_nodes: int, num_steps: int) -> tuple[Cost, Cost]:
    """Of a rank in another process, and of one in this thread."""
    plan, verdict = decode_plan(batch_size, 200, num_nodes), verdict_of(batch_size, num_nodes // 2)
    near, far = socket.socketpair()
    child = multiprocessing.get_context("fork").Process(target=_serve, args=(far, verdict))
    child.start()
    far.close()
    here = _Rank(verdict)
    apart, inline = SocketChannel([near]), ThreadChannel([here.handle])
    ask = replace(plan, step=-1)
    walls_s: tuple[list[float], list[float]] = ([], [])
    cpus_s = [-apart.call(ask, _TIMEOUT_S), 0.0]
    try:
        for _ in range(num_steps // _ROUND):
            channels: tuple[Channel, ...] = (apart, inline)
            for index, channel in enumerate(channels):
                cpus_s[index] += _timed(channel, plan, walls_s[index])
        cpus_s[0] += apart.call(ask, _TIMEOUT_S)
        cpus_s[1] -= here.forward_s
    finally:
        apart.close()
        child.join()
    return tuple(  # type: ignore[return-value]
        Cost(
            statistics.median(times_s) * 1e6,
            statistics.quantiles(times_s, n=10)[0] * 1e6,
            cpu_s * 1e6 / len(times_s),
        )
        for times_s, cpu_s in zip(walls_s, cpus_s, strict=True)
    )


def main(arguments: list[str] | None = None) -> None:
    """Prints a row per batch and number of nodes."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.micro.channel_cost")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--nodes", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args(arguments)
    if min(*options.batch, options.steps // _ROUND) < 1 or min(options.nodes) < 0:
        parser.error(f"--batch must be at least 1, --nodes 0, --steps {_ROUND}")
    table = Rows(
        *("batch", "nodes each", "processes, median us", "tenth percentile", "CPU"),
        *("inline, median us", "CPU", "more, median", "more, CPU", "budget"),
    )
    for batch_size in options.batch:
        for num_nodes in options.nodes:
            apart, inline = measure(batch_size, num_nodes, options.steps)
            cells = (apart.median, apart.tenth, apart.cpu, inline.median, inline.cpu)
            more = (apart.median - inline.median, apart.cpu - inline.cpu, BUDGET_US)
            table.add(batch_size, num_nodes, *(f"{each:.0f}" for each in (*cells, *more)))


if __name__ == "__main__":
    main()
