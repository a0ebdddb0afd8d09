"""Initial knowledge of draft lengths: loaded from an earlier engine's file, or measured at start.

There is one file per target, drafters, device and parallel layout, in the user's cache folder or in
`OUTRIDER_LENGTHS_DIR` (if that is empty, nothing is stored). A file only saves measurements. Its
content cannot change the output, and outdated values are measured again. A file that cannot be read
or written is therefore not an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterable, Sequence
from math import log as logarithm
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import numpy as np

from ..config import EngineConfig
from ..config.files import write_whole
from ..errors import WorkerError
from ..scheduler import tree
from ..scheduler.budget import DraftBudget
from ..scheduler.draft_lengths import Knowledge
from ..scheduler.loop import Loop
from ..scheduler.sampling import SamplingParams
from ..scheduler.sequence import Sequence as Running
from ..scheduler.step_costs import Lesson
from ..scheduler.types import Batch, Draft, Request, Verdict, ints
from ..workers.spec import ModelReport

log = logging.getLogger(__name__)
FOLDER: Final = "OUTRIDER_LENGTHS_DIR"
_LAYOUT: Final = 3  # version of the file layout
_DIGEST_BYTES: Final = 32
_LEAST_NEW: Final = 8  # new measurements that are worth writing a file


class KnownLengths:
    """Reads the file when an engine starts, and writes it when the engine is idle or ends.

    A file consists of a digest and the arrays of a `Knowledge` in float32, whose shapes follow from
    the configuration. The digest also covers the key. A file that is damaged, or that belongs to
    another kind of engine or another version, is therefore rejected without being parsed.

    Args:
        budget: the budget at the engine's start; knowledge of later drafters is not stored.
    """

    def __init__(self, config: EngineConfig, report: ModelReport, budget: DraftBudget) -> None:
        self._budget, self._num_kept = budget, 0
        folder = _folder() if budget.knowledge() is not None else None
        self._key = _key(config, report)
        self._file = folder / f"{self._key}.lengths" if folder is not None else None

    def recall(self) -> bool:
        """Loads what earlier engines learned into the budget; returns False if there is nothing."""
        if self._file is None:
            return False
        first = self._budget.knowledge()
        assert first is not None, "there is a file only if lengths are measured"
        sizes = [each.size for each in first]
        try:
            with self._file.open("rb") as file:
                data = file.read(_DIGEST_BYTES + 4 * sum(sizes) + 1)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("%s cannot be read (%s): draft lengths start anew", self._file, error)
            return False
        values = data[_DIGEST_BYTES:]
        if len(values) == 4 * sum(sizes) and data[:_DIGEST_BYTES] == self._digest(values):
            parts = np.split(np.frombuffer(values, "<f4").astype(np.float64), np.cumsum(sizes)[:-1])
            known = (part.reshape(each.shape) for part, each in zip(parts, first, strict=True))
            if self._budget.recall(Knowledge(*known)):
                return True
        log.warning("%s is damaged or foreign: draft lengths start anew", self._file)
        return False

    def keep(self, budget: DraftBudget) -> None:
        """Writes what `budget` has learned since the last call, if it is still the first budget."""
        num_new = budget.num_lessons - self._num_kept
        if self._file is None or budget is not self._budget or num_new < _LEAST_NEW:
            return
        known = budget.knowledge()
        assert known is not None, "there is a file only if lengths are measured"
        self._num_kept = budget.num_lessons
        values = b"".join(each.astype("<f4").tobytes() for each in known)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, [self._digest(values), values])
        except OSError as error:
            log.warning("what draft lengths learn is not kept (%s): %s", FOLDER, error)
            self._file = None

    def _digest(self, values: bytes) -> bytes:
        return hashlib.sha256(self._key.encode() + values).digest()


def _folder() -> Path | None:
    chosen = os.environ.get(FOLDER)
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path("~/.cache").expanduser()) / "outrider" / "lengths"
    except RuntimeError:  # there is no home folder
        return None


def _key(config: EngineConfig, report: ModelReport) -> str:
    """Returns a digest of everything constant in an engine that the speed of drafts depends on."""
    facts: dict[str, Any] = {
        "layout": _LAYOUT,
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "device": config.device,
        "executor": config.executor,
        "model": str(config.model),
        "architecture": report.architecture,
        "vocab_size": report.vocab_size,
        "dtype": report.dtype,
        "operations": report.operations,
        "ranks": [config.tensor_parallel_size, config.pipeline_parallel_size],
        "overlap": config.overlap_scheduling,
        "drafters": config.speculative_config.model_dump(mode="json"),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# -- measuring the cost of steps

_SIZES: Final = (1, 8, 32, 4, 16, 64, 2)  # requests per step, in the order of measurement
_MOST_LENGTHS: Final = 5  # number of draft lengths that are measured
_ROUNDS: Final = 3
_STEPS: Final = 3  # measured steps per length and round
_SKIPPED: Final = 2  # steps before them, whose drafts may still have another length
_MOST_STEPS: Final = 4 * (_SKIPPED + _STEPS)  # including those for prompts
_PROMPT_TOKENS, _MOST_TOKENS = 16, 512  # prompt of a made-up request; its whole text
_MOST_READ, _READINGS = 272, 5  # tokens of a long prompt, and number of measurements


class Costs(NamedTuple):
    """The measured costs."""

    steps: list[Lesson]
    opening_ms: float  # extra time per prompt token if the request drafts


def measure(loop: Loop, vocab_size: int, most_requests: int, seconds: float) -> Costs:
    """Measures the cost of steps with made-up requests.

    For each number of requests, all draft lengths are measured in alternating rounds, so that a
    temporary slowdown of the machine does not favour a length.

    Args:
        loop: loop of a scheduler that serves nothing else; it is not used afterwards.
        most_requests: maximum number of concurrent requests.
        seconds: time after which no further step starts; compiling kernels may take as long before.

    Raises:
        WorkerError: a step failed; drafters keep nothing of the requests.
    """
    crowd, found, opening_ms = _Crowd(loop, vocab_size), list[Lesson](), 0.0
    try:
        if crowd.fits(1):
            crowd.measure(1, time.monotonic() + seconds, rounds=1)  # compiles kernels
        until = time.monotonic() + seconds
        for size in _SIZES:
            if size <= most_requests and crowd.fits(size) and time.monotonic() < until:
                found += crowd.measure(size, until, _ROUNDS)
                if size == 1 and not isinstance(loop.drafting, MadeUpDrafts):
                    opening_ms = crowd.opening_ms(until)
    except WorkerError:
        loop.drop()
        crowd.end()
        raise
    return Costs(found, opening_ms)


class _Crowd:
    """A set of concurrent made-up requests."""

    def __init__(self, loop: Loop, vocab_size: int) -> None:
        scheduler = loop.scheduler
        self._loop, self._pool = loop, scheduler.pool
        self._fixed = scheduler.budget = _FixedLengths(scheduler.budget)
        self._limit = min(scheduler.max_model_len - 1, _MOST_TOKENS)
        most = self._fixed.max_draft_len
        even = np.linspace(0, most, min(_MOST_LENGTHS, most + 1)).round().astype(int).tolist()
        self._lengths = sorted({*even, min(most, 1), min(most, 2)})
        # If time is short, the longest drafts are compared with none first.
        self._first_order = [0, *self._lengths[:0:-1]]
        self._tokens = vocab_size // 4, max(vocab_size // 2, 1)
        self._rng, self._num_begun = np.random.default_rng(0), 0
        self._running: set[str] = set()

    def fits(self, size: int) -> bool:
        """Returns True if the KV cache and the context have room for `size` requests."""
        room = self._pool.num_blocks >= size * self._pool.blocks_for(self._limit)
        return room and self._limit > _PROMPT_TOKENS + 1

    def measure(self, size: int, until: float, rounds: int) -> list[Lesson]:
        """Measures steps of `size` requests with each draft length, while time is left."""
        found = {length: _Steps([], []) for length in self._lengths}
        for turn in range(rounds):
            for length in self._lengths if turn % 2 else self._first_order:
                kept = self._fixed.begin(found[length], length, size)
                for _ in range(_MOST_STEPS):
                    if kept.num_left <= 0 or time.monotonic() > until:
                        break
                    self._fill(size)
                    deltas = self._loop.step()
                    self._running -= {each.request_id for each in deltas if each.finish_reason}
        self._settle()
        steps = ((len(each.logs), each) for each in found.values() if each.logs)
        return [Lesson(size, fmean(each.nodes), median(each.logs), num) for num, each in steps]

    def opening_ms(self, until: float) -> float:
        """Returns the extra time in ms per prompt token of a request that drafts.

        Long and short prompts are compared, so that the cost of the steps after them cancels. The
        second smallest measurement is used: overestimating the cost would disable drafts that pay
        off.
        """
        most, found = self._fixed.max_draft_len, list[float]()
        sizes = min(_MOST_READ, self._limit - 1 - most - _STEPS), _PROMPT_TOKENS
        for turn in range(_READINGS if sizes[0] >= 2 * _PROMPT_TOKENS else 0):
            lengths = (most, 0) if turn % 2 else (0, most)
            ms = {each: [self._begin_ms(size, each) for size in sizes] for each in lengths}
            more = [long - short for long, short in map(ms.__getitem__, (most, 0))]
            found.append((more[0] - more[1]) / (sizes[0] - sizes[1]))
            if time.monotonic() > until:
                break
        return max(sorted(found)[1], 0.0) if len(found) > 2 else 0.0

    def _begin_ms(self, num_prompt: int, length: int) -> float:
        """Returns the time in ms of one request: its prompt and a few steps that may draft."""
        self._fixed.begin(_Steps([], []), length, 1)
        clock, num_left = self._loop.scheduler.clock, _STEPS
        start = clock()
        self._add(num_prompt)
        while num_left:
            num_left -= bool(self._loop.step()) or num_left < _STEPS
        self._settle()
        return (clock() - start) * 1e3

    def _settle(self) -> None:
        """Collects posted steps and ends all requests."""
        while self._loop.has_posted:
            self._loop.settle()
        self.end()

    def end(self) -> None:
        """Ends the running requests; requires that no step is posted."""
        for name in self._running:
            self._loop.abort(name)
        self._running.clear()

    def _fill(self, size: int) -> None:
        while len(self._running) < size:
            self._add(_PROMPT_TOKENS)

    def _add(self, num_prompt: int) -> None:
        name, self._num_begun = f"made-up-{self._num_begun}", self._num_begun + 1
        prompt = ints(self._rng.integers(*self._tokens, num_prompt))
        most = self._limit - num_prompt
        sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        self._running.add(name)
        self._loop.add(Request(name, prompt, sampling, seed=0))


class _Steps(NamedTuple):
    logs: list[float]  # logarithms of milliseconds
    nodes: list[float]  # mean draft nodes per request


class _FixedLengths(DraftBudget):
    """Grants every request the same draft length, and records the times of such steps."""

    def __init__(self, budget: DraftBudget) -> None:
        self.__dict__.update(vars(budget))
        self.num_left = 0  # steps to measure

    def begin(self, steps: _Steps, length: int, size: int) -> _FixedLengths:
        """Sets the draft length; times of steps with `size` requests are added to `steps`."""
        self._steps, self._length, self._size = steps, length, size
        self._num_skipped, self.num_left = _SKIPPED, _STEPS
        return self

    def rests(self, num_running: int) -> bool:
        return self._length == 0

    def wishes(self, sequences: Iterable[Running], num_running: int) -> dict[Running, int]:
        room = {each: each.limit - each.tokens.size - 1 for each in sequences}
        return {each: min(left, self._length) for each, left in room.items() if left > 0}

    def end_step(
        self, batch: Batch, drafts: Sequence[Draft], verdict: Verdict, elapsed_ms: float
    ) -> None:
        if batch.num_tokens != batch.num_seqs or batch.num_seqs != self._size:
            return
        self._num_skipped -= 1
        if self._num_skipped < 0 and elapsed_ms > 0:
            self.num_left -= 1
            self._steps.logs.append(logarithm(elapsed_ms))
            self._steps.nodes.append(sum(each.num_nodes for each in drafts) / batch.num_seqs)


class MadeUpDrafts:
    """Replaces look-ups, which find nothing in made-up text; drafting costs no time.

    Args:
        trees: whether drafts are binary trees; otherwise they are chains.
    """

    may_rest, ranks_draft = True, False

    def __init__(self, vocab_size: int, *, trees: bool) -> None:
        self._vocab_size, self._trees = vocab_size, trees

    def open(self, requests: Sequence[Request]) -> None:
        pass

    def propose(self, batch: Batch) -> list[Draft]:
        return [self._draft(each) for each in batch.max_nodes.tolist()]

    def _draft(self, num_nodes: int) -> Draft:
        tokens = ints(np.arange(num_nodes) % self._vocab_size)
        if self._trees:
            return Draft(tokens=tokens, parents=ints((np.arange(num_nodes) - 1) // 2))
        return tree.chain(tokens, "")

    def drafted(self, batch: Batch) -> list[Draft]:
        raise AssertionError("ranks do not draft")

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        pass

    def close(self, request_ids: Sequence[str]) -> None:
        pass
