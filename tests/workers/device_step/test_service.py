"""Which targets the device step serves, and what it leaves for separate heads."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from outrider.scheduler.loop import Loop
from outrider.scheduler.types import NO_MOVES
from outrider.tests.helpers.device_step import lives
from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.helpers.engines import same
from outrider.tests.workers.device_step.conftest import RecordedGraphs
from outrider.tests.workers.model.conftest import checkpoint  # noqa: F401
from outrider.workers.collective import Collective
from outrider.workers.device_step.service import obstacle
from outrider.workers.model.target import load_model
from outrider.workers.ops.cuda.ops import CudaOps
from outrider.workers.spec import ModelSpec, WorkerSpec
from outrider.workers.transport.channel import LinkOffer, OpenFeatures
from outrider.workers.transport.features import FeatureQueue
from outrider.workers.worker import Worker

CPU = torch.device("cpu")


@pytest.fixture
def load(checkpoint):  # noqa: F811
    def make(name="llama", **options):
        path, _ = checkpoint(name)
        return load_model(path, device=CPU, collective=Collective.single(), **options)

    return make


def test_served(load):
    assert obstacle(load("phi3_longrope", ops=TensorOps()), "coupled") == ""
    assert obstacle(load(ops=TensorOps()), "coupled") == ""
    assert CudaOps(CPU).reads_device_only


def test_not_served(load):
    model = load(ops=TensorOps())
    assert "rule is 'rejection'" in obstacle(model, "rejection")
    bridge = load(forward="bridge")
    assert "transformers' modules" in obstacle(bridge, "coupled")
    assert "'cpu' plan steps" in obstacle(load(), "coupled")


def test_never_on_a_cpu(checkpoint):  # noqa: F811
    path, _ = checkpoint("llama")
    model = ModelSpec(str(path), "auto", 16, 64, 128, 8, 256, 1 << 26, 0.5)
    worker = Worker(WorkerSpec(1, "cpu", None, 60.0, target=model), Collective.single(), CPU)
    worker.load()
    report = worker.allocate(64, 0)
    assert (report.on, report.reason) == (False, "the device is 'cpu'")
    assert worker._target is not None
    assert worker._target.device_step is None


class FedTarget(lives.InProcessTarget):
    """With a link to a separate head; keeps what goes over it, and which way each step took."""

    def __init__(self, model, num_blocks, *, on_device: bool, capture: tuple[int, ...]) -> None:
        super().__init__(model, num_blocks, on_device=on_device, fed_layers=(0, 1, 2))
        self.queue, self.items, self.on_device = FeatureQueue(), [], []
        message = OpenFeatures(7, LinkOffer(queue=self.queue), capture, 20.0)
        self.service.note_feed(message)
        self.service.open_feed(message)

    def collect(self):
        verdict = super().collect()
        self.on_device.append(verdict.compacted)
        self.items.append(self.queue.take(0))
        assert self.queue.take(0) is None
        return verdict


@pytest.mark.parametrize("is_captured", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_separate_head_gets_what_the_host_path_sends(load, is_captured):
    """Steps, verdicts, moves and features; requests with penalties take the host path between."""
    model, requests = load(ops=TensorOps()), lives.requests_of(random.Random(2))[:8]
    truth = lives.emitted(
        lives.make(Loop, model, lives.GuessingDrafting({}, 0), 120, on_device=False), requests, 0
    )
    targets = []
    for on_device in (False, True):
        drafting = lives.GuessingDrafting(truth, 5)
        loop = lives.make(Loop, model, drafting, 40, on_device=False)
        loop.target = FedTarget(model, 40, on_device=on_device, capture=(0, 2))
        if on_device and is_captured:
            loop.target.service.device_step.capture(api := RecordedGraphs())
        assert lives.emitted(loop, requests, 0) == truth
        targets.append(loop.target)
    host, device = targets
    if is_captured:
        assert api.num_replays == device.service.device_step.num_steps
    assert not any(host.on_device)
    assert sum(device.on_device) == device.service.device_step.num_steps > 20
    num_moved = 0
    for one, other, was_on_device in zip(host.items, device.items, device.on_device, strict=True):
        assert one.serial == other.serial
        moves = [sorted(item.step.kv_moves.tolist()) for item in (one, other)]
        assert moves[0] == moves[1]
        num_moved += was_on_device and len(moves[0])
        assert same(replace(one.step, kv_moves=NO_MOVES), replace(other.step, kv_moves=NO_MOVES))
        assert same(one.verdict, other.verdict)
        assert one.rows.tolist() == other.rows.tolist()
        for part, alike in zip(one.hidden, other.hidden, strict=True):
            torch.testing.assert_close(alike, part)
    assert num_moved > 5


def test_layers_that_graphs_do_not_leave_are_captured_on_the_host_path(load, caplog):
    """As where a separate head has come to read others than the one of the start."""
    model, requests = load(ops=TensorOps()), lives.requests_of(random.Random(2))[:2]
    loop = lives.make(Loop, model, lives.GuessingDrafting({}, 0), 40, on_device=False)
    loop.target = FedTarget(model, 40, on_device=True, capture=(0, 1))
    step = loop.target.service.device_step
    step.features.pop(1)
    with caplog.at_level("WARNING"):
        loop.target.service.note_feed(OpenFeatures(7, LinkOffer(), (0, 1), 20.0))
    assert "off while a head reads layers (0, 1), of which it leaves (0, 2)" in caplog.text
    lives.emitted(loop, requests, 0)
    assert step.num_steps == 0
    loop.target.service.note_feed(OpenFeatures(7, None, (), 20.0))
    loop.target.service.open_feed(OpenFeatures(7, None, (), 20.0))
    again = lives.make(Loop, model, lives.GuessingDrafting({}, 0), 40, on_device=False)
    again.target = lives.InProcessTarget(model, 40, on_device=True)
    again.target.service = loop.target.service
    lives.emitted(again, lives.requests_of(random.Random(3))[:2], 0)
    assert step.num_steps > 0
