"""Driving engines in tests: submit, collect, compare."""

from __future__ import annotations

import dataclasses
import json
import queue
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from outrider.cluster.backend import backend_of
from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Delta, Request, ints

Outputs = dict[str, tuple[int, ...]]


class Box:
    """A sink that keeps deltas until they are asked for.

    Args:
        on_delta: called with every delta and its number, from 1. The engine waits until it returns,
            so that requests which have tokens left are certain to run meanwhile.
    """

    def __init__(self, on_delta: Callable[[int, Delta], None] | None = None) -> None:
        self.deltas: queue.Queue[Delta] = queue.Queue()
        self._on_delta = on_delta
        self._count = 0

    def deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._count += 1
            try:
                if self._on_delta is not None:
                    self._on_delta(self._count, delta)
            finally:
                self.deltas.put(delta)

    def last(self) -> Delta:
        """Its request's last delta."""
        while (delta := self.deltas.get(timeout=30)).finish_reason is None:
            pass
        return delta


@contextmanager
def engine_of(model: str, speculative: dict[str, Any] | None = None, **options: Any):
    """A running engine in float32 with a small cache, shut down afterwards.

    Drafts have their fixed lengths, unless `speculative` says otherwise.
    """
    if speculative is not None:
        speculative = {"adaptive_draft_len": False, **speculative}
    options = {"executor": "local", "dtype": "float32", "num_kv_blocks": 256, **options}
    config = EngineConfig.load({"model": model, "speculative_config": speculative, **options})
    engine = Engine.start(config, backend_of(config))
    try:
        yield engine
    finally:
        engine.shutdown()


def tokenizer_at(
    folder: Path, vocabulary: Any, added: Sequence[tuple[int, str]] = (), **model: Any
) -> Path:
    """A new folder with a `tokenizer.json` that says what ids mean, and little else."""
    folder.mkdir()
    extra = [{"id": index, "content": token} for index, token in added]
    data = {"model": {"vocab": vocabulary, **model}, "added_tokens": extra}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def random_prompts(count: int, vocab: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab, rng.integers(1, longest)).tolist() for _ in range(count)]


def complete(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    at_once: int = 8,
    on_delta: Callable[[int, Delta], None] | None = None,
    together: bool = False,
    **sampling: Any,
) -> tuple[Outputs, dict[str, Delta]]:
    """Tokens and last delta of every prompt, `at_once` running at a time.

    Args:
        on_delta: as of `Box`.
        together: whether the engine waits until the first are all there, so that two runs take the
            same steps.
    """
    box, outputs, last = Box(on_delta), {}, {}
    waiting = list(enumerate(prompts))
    sampling = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True, **sampling}

    def submit() -> None:
        index, prompt = waiting.pop(0)
        request = Request(str(index), ints(prompt), SamplingParams(**sampling), seed=100 + index)
        outputs[str(index)] = ()
        engine.submit(request, box)

    if together:
        engine.pause("keep")
    for _ in range(min(at_once, len(waiting))):
        submit()
    if together:
        engine.resume()
    while len(last) < len(prompts):
        delta = box.deltas.get(timeout=120)
        outputs[delta.request_id] += delta.token_ids
        if delta.finish_reason:
            last[delta.request_id] = delta
            if waiting:
                submit()
    return outputs, last


def plain_outputs(
    model: str, prompts: Sequence[Sequence[int]], *samplings: dict[str, Any]
) -> list[Outputs]:
    """What `complete` gives without a drafter, by sampling settings; computed once a process."""
    return _plain_outputs(json.dumps([model, list(map(list, prompts)), samplings]))


@cache
def _plain_outputs(arguments: str) -> list[Outputs]:
    model, prompts, samplings = json.loads(arguments)
    with engine_of(model) as engine:
        return [complete(engine, prompts, **sampling)[0] for sampling in samplings]


def check_plain_tokens(
    model: str, fields: dict[str, Any], *, placement: str | None = None, **options: Any
) -> None:
    """A section's greedy and sampled tokens are the model's own: alone and eight at once, with
    prefix hits, and preempted. The vocabulary has 96 tokens."""
    prefix = list(range(2, 14))
    prompts = [prefix + prompt for prompt in random_prompts(9, 96, longest=16)]
    hot = {"max_tokens": 40, "temperature": 0.8}
    greedy, sampled = plain_outputs(model, prompts, {"max_tokens": 40}, hot)
    if placement is not None:
        fields = fields | {"placement": placement, "draft_timeout_s": 30}
    small = {"max_num_batched_tokens": 32, "block_size": 4, "num_kv_blocks": 28}
    with engine_of(model, fields, max_model_len=96, **small, **options) as engine:
        assert complete(engine, prompts, max_tokens=40)[0] == greedy
        assert complete(engine, prompts, at_once=1, **hot)[0] == sampled
        stats = engine.stats()
    (drafter,) = stats["drafters"].values()
    assert drafter["faults"] == 0
    assert drafter["num_acc_tokens"] > 0
    assert stats["requests"]["num_hit_tokens"] > 0
    assert stats["requests"]["num_preemptions"] > 0


def collect_all(engine: Engine, requests: list[Request]):
    box, last = Box(), {}
    outputs = {request.id: tuple(request.emitted.tolist()) for request in requests}
    engine.submit_all(requests, box)
    while len(last) < len(requests):
        delta = box.deltas.get(timeout=120)
        outputs[delta.request_id] += delta.token_ids
        if delta.finish_reason:
            last[delta.request_id] = delta
    return outputs, last


def same(left, right) -> bool:
    """Equality that looks into arrays and records."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and bool(np.array_equal(left, right))
    if dataclasses.is_dataclass(left):
        fields = dataclasses.fields(left)
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right
