"""The device step emits what the host path emits, token for token, through random lives."""

from __future__ import annotations

import random

import pytest

from outrider.scheduler.loop import Loop, OverlapLoop
from outrider.tests.helpers.device_step.lives import (
    CPU,
    SEATS,
    GuessingDrafting,
    emitted,
    make,
    requests_of,
)
from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.workers.device_step.conftest import RecordedGraphs
from outrider.tests.workers.model.conftest import checkpoint  # noqa: F401
from outrider.workers.collective import Collective
from outrider.workers.device_step.shape import all_shapes
from outrider.workers.model.target import load_model


@pytest.mark.parametrize("kind", [Loop, OverlapLoop])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_random_lives(checkpoint, name, kind):  # noqa: F811
    """Few blocks, so that requests are preempted; plain steps, chains and trees."""
    path, _ = checkpoint(name)
    model = load_model(path, device=CPU, collective=Collective.single(), ops=TensorOps())
    for seed in range(2 if name == "llama" else 1):
        rng = random.Random(seed)
        requests, num_blocks = requests_of(rng), rng.choice([30, 120])
        plain = make(Loop, model, GuessingDrafting({}, seed), 120, on_device=False)
        wanted = emitted(plain, requests, seed)
        for truth in ({}, wanted):
            drafting = GuessingDrafting(truth, seed)
            loop = make(kind, model, drafting, num_blocks, on_device=True)
            assert emitted(loop, requests, seed) == wanted
            assert loop.target.service.device_step.num_steps > 20
            assert loop.target.service.num_beside > 1  # chunks, and penalties without counts
            assert loop.target.num_compacted > 5 or not truth
            # Plain steps are given to the device before the verdict on the one before is taken.
            assert (loop.target.num_behind > 20) == (kind is OverlapLoop and not truth)
            loop.scheduler.check()


def test_random_lives_on_replays(checkpoint):  # noqa: F811
    """Every step of every shape is the replay of a recording made before the first request."""
    path, _ = checkpoint("llama")
    model = load_model(path, device=CPU, collective=Collective.single(),
                       ops=TensorOps())  # fmt: skip
    requests, api = requests_of(random.Random(5)), RecordedGraphs()
    wanted = emitted(make(Loop, model, GuessingDrafting({}, 0), 120, on_device=False), requests, 0)
    first = make(Loop, model, GuessingDrafting({}, 0), 120, on_device=True)
    device_step = first.target.service.device_step
    device_step.capture(api)
    assert device_step.report.num_captured == len(all_shapes(SEATS))
    for truth in ({}, wanted):
        loop = make(Loop, model, GuessingDrafting(truth, 0), 120, on_device=True)
        loop.target, before = first.target, (api.num_replays, device_step.num_steps)
        assert emitted(loop, requests, 0) == wanted
        assert api.num_replays - before[0] == device_step.num_steps - before[1] > 20
