"""Data-parallel training processes, synchronised by summing gradients.

Every process holds the whole module and processes its part of every batch. `run` starts them and
forwards signals: the first interrupt asks them to save and stop, a second ends them at once.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from ..errors import OutriderError, WorkerDiedError

Value = TypeVar("Value")


class Ranks:
    """This process's rank and collectives; with one process every operation is a no-op."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        self.rank = rank
        self.num_ranks = num_ranks

    @property
    def first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def add(self, values: Tensor) -> None:
        """Sums `values` over all processes, in place."""
        if self.num_ranks > 1:
            distributed.all_reduce(values)

    def gather(self, value: Value) -> list[Value]:
        """Returns every process's value, on all processes."""
        if self.num_ranks == 1:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        distributed.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Waits for all processes."""
        if self.num_ranks > 1:
            distributed.barrier()


class Stop:
    """A stop request; `asked` is true from the first signal on."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self, *signals: signal.Signals) -> Iterator[None]:
        """Handles `signals`: the first sets `asked`, the next raises. Only in main threads."""
        before = {}
        try:
            for number in signals:
                before[number] = signal.signal(number, self._ask)
        except ValueError:  # not in the main thread: signals are left to the program
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


# A picklable function that every process runs.
RankFunction = Callable[[Ranks, Stop], Any]


def run(function: RankFunction, num_processes: int, *, on_gpu: bool) -> Any:
    """Runs `function` in all processes; returns the first process's result.

    Raises:
        OutriderError: raised by `function`.
        WorkerDiedError: a process ended in another way.
    """
    if num_processes == 1:
        stop = Stop()
        with stop.listening(signal.SIGINT, signal.SIGTERM):
            return function(Ranks(), stop)
    with tempfile.TemporaryDirectory() as folder:
        return _run_together(function, num_processes, Path(folder), "nccl" if on_gpu else "gloo")


def _run_together(function: RankFunction, num_processes: int, folder: Path, backend: str) -> Any:
    context: Any = start_processes(
        _rank,
        args=(num_processes, folder, backend, function),
        nprocs=num_processes,
        join=False,
        start_method="spawn",
    )
    stop = Stop()
    try:
        with stop.listening(signal.SIGINT, signal.SIGTERM):
            forwarded = False
            while not context.join(timeout=0.2):
                if stop.asked and not forwarded:
                    forwarded = True
                    for pid in context.pids():
                        os.kill(pid, signal.SIGTERM)
    except ProcessExitedException as error:
        if stop.asked:  # before its handler was installed: there is nothing to save
            raise KeyboardInterrupt from None
        for file in sorted(folder.glob("error.*")):
            raise pickle.loads(file.read_bytes()) from None
        raise WorkerDiedError(f"a training process ended: {error}") from None
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return pickle.loads((folder / "result").read_bytes())


def _rank(rank: int, num_ranks: int, folder: Path, backend: str, function: RankFunction) -> None:
    """Runs in each process. Results are files, since a queue's thread could outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent forwards it
    stop = Stop()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    with stop.listening(signal.SIGTERM):
        distributed.init_process_group(
            backend, init_method=f"file://{folder / 'store'}", rank=rank, world_size=num_ranks
        )
        try:
            result = function(Ranks(rank, num_ranks), stop)
            if rank == 0:
                (folder / "result").write_bytes(pickle.dumps(result))
        except OutriderError as error:
            (folder / f"error.{rank}").write_bytes(pickle.dumps(error))
            raise SystemExit(1) from None
        finally:
            distributed.destroy_process_group()
