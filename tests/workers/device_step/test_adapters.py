"""Steps with an adapter's request take the host path, the others the device's: the same tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outrider.scheduler.loop import Loop, OverlapLoop
from outrider.tests.helpers.adapters import write_adapter
from outrider.tests.helpers.device_step.lives import (
    CPU,
    GuessingDrafting,
    emitted,
    make,
    requests_of,
)
from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.workers.model.conftest import checkpoint  # noqa: F401
from outrider.workers.collective import Collective
from outrider.workers.model.target import load_model


@pytest.mark.parametrize("kind", [Loop, OverlapLoop])
def test_random_lives(checkpoint, tmp_path, kind):  # noqa: F811
    path, _ = checkpoint("llama")
    adapters = [("a", write_adapter(tmp_path / "a", str(path), seed=1, alpha=2.0))]
    keys = {"lora_modules": [f"{name}={folder}" for name, folder in adapters]}
    host, device = (
        load_model(path, device=CPU, collective=Collective.single(), adapters=adapters, **ops)
        for ops in ({}, {"ops": TensorOps()})
    )
    for seed in range(2):
        requests = requests_of(random.Random(seed))
        requests = [
            replace(each, adapter="a" if index % 5 == 2 else "")
            for index, each in enumerate(requests)
        ]
        plain = make(Loop, host, GuessingDrafting({}, seed), 120, on_device=False, **keys)
        wanted = emitted(plain, requests, seed)
        for truth in ({}, wanted):
            drafting = GuessingDrafting(truth, seed)
            loop = make(kind, device, drafting, 30, on_device=True, **keys)
            assert emitted(loop, requests, seed) == wanted
            assert loop.target.service.device_step.num_steps > 20
            loop.scheduler.check()
