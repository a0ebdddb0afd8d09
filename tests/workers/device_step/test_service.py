"""Which targets the device step serves."""

from __future__ import annotations

import pytest
import torch

from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.workers.model.conftest import checkpoint  # noqa: F401
from outrider.workers.collective import Collective
from outrider.workers.device_step.service import obstacle
from outrider.workers.model.target import load_model
from outrider.workers.ops.cuda.ops import CudaOps
from outrider.workers.spec import ModelSpec, WorkerSpec
from outrider.workers.worker import Worker

CPU = torch.device("cpu")


@pytest.fixture
def load(checkpoint):  # noqa: F811
    def make(name="llama", **options):
        path, _ = checkpoint(name)
        return load_model(path, device=CPU, collective=Collective.single(), **options)

    return make


def test_served(load):
    assert obstacle(load(ops=TensorOps()), "coupled") == ""
    assert CudaOps(CPU).reads_device_only


def test_not_served(load):
    model = load(ops=TensorOps())
    assert "rule is 'rejection'" in obstacle(model, "rejection")
    bridge = load(forward="bridge")
    assert "transformers' modules" in obstacle(bridge, "coupled")
    assert "'cpu' plan steps" in obstacle(load(), "coupled")
    long = load("phi3_longrope", ops=TensorOps())
    assert "rotary frequencies" in obstacle(long, "coupled")


@pytest.mark.parametrize(
    ("feeds_heads", "reason"),
    [(False, "the device is 'cpu'"), (True, "a separate head reads hidden states")],
)
def test_never_on_a_cpu_nor_beside_a_separate_head(checkpoint, feeds_heads, reason):  # noqa: F811
    path, _ = checkpoint("llama")
    model = ModelSpec(str(path), "auto", 16, 64, 128, 8, 256, 1 << 26, 0.5)
    spec = WorkerSpec(1, "cpu", None, 60.0, target=model, feeds_heads=feeds_heads)
    worker = Worker(spec, Collective.single(), CPU)
    worker.load()
    report = worker.allocate(64, 0)
    assert (report.on, report.reason) == (False, reason)
    assert worker._target is not None
    assert worker._target.device_step is None
