"""Features arrive as they were captured, in order, over every kind of link; none is waited for."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from outrider.errors import WorkerDiedError
from outrider.scheduler.types import Draft, Verdict, ints
from outrider.tests.helpers.engines import same
from outrider.workers.target import Feed, kept_rows
from outrider.workers.transport import features
from outrider.workers.transport.channel import LinkOffer, OpenFeatures
from outrider.workers.transport.features import FeatureQueue, Features, SocketReceiver

CPU = torch.device("cpu")
CAPTURE = (1, 4)


@pytest.fixture
def judged(part, build_step):
    """Two sequences, a tree below the first; its nodes 1 and 2 are accepted."""
    draft = Draft(ints([20, 21, 22, 23]), ints([-1, -1, 1, 2]))
    step = build_step([part([10, 11], 3, [4, 2, 7], draft=draft), part([30], 5, [1, 3])], 4)
    verdict = Verdict(
        0,
        emitted=ints([21, 22, 40, 41]),
        emitted_start=ints([0, 3, 4]),
        path=ints([1, 2]),
        path_start=ints([0, 2, 2]),
    )
    return step, verdict


def linked(kind: str):
    """A feed's offer and the inlet behind it."""
    if kind == "queue":
        outbox = FeatureQueue()
        return LinkOffer(queue=outbox), outbox
    inlet = SocketReceiver("127.0.0.1" if kind == "tcp" else None, CPU, 20.0)
    return inlet.offer(b"s" * 32, "127.0.0.1" if kind == "group" else None), inlet


def states(dtype: torch.dtype, seed: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {layer: torch.randn(7, 6, generator=generator).to(dtype) for layer in (0, *CAPTURE)}


def test_rows_of_rejected_nodes_stay_behind(judged):
    # 10 11 | 20 21 22 23 | 30: the accepted 21 and 22 are rows 3 and 4
    assert kept_rows(*judged).tolist() == [0, 1, 3, 4, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["queue", "unix", "tcp", "group"])
def test_what_was_captured_arrives(judged, kind, dtype):
    step, verdict = judged
    offer, inlet = linked(kind)
    feed = Feed(OpenFeatures(0, offer, CAPTURE, 20.0), CPU)
    assert inlet.take(0.001) is None
    for seed in range(4):
        feed.push(step, verdict, states(dtype, seed))
    for seed in range(4):
        item = inlet.take(20.0)
        assert item.serial == seed
        assert same(item.step, step)
        assert same(item.verdict, verdict)
        assert item.rows.tolist() == [0, 1, 3, 4, 6]
        for part, layer in zip(item.hidden, CAPTURE, strict=True):
            assert part.dtype == dtype
            assert torch.equal(part, states(dtype, seed)[layer][[0, 1, 3, 4, 6]])
    feed.close()
    with pytest.raises(WorkerDiedError):
        inlet.take(20.0)
    inlet.close()


@pytest.mark.parametrize("kind", ["unix", "tcp", "group"])
def test_a_head_that_is_gone_holds_nobody_up(judged, kind):
    """Before it was connected, and after: the target pushes on, and keeps nothing."""
    step, verdict = judged
    for takes in (0, 1):
        offer, inlet = linked(kind)
        feed = Feed(OpenFeatures(0, offer, CAPTURE, 5.0), CPU)
        for _ in range(takes):
            feed.push(step, verdict, states(torch.float32, 0))
            assert inlet.take(20.0) is not None
        inlet.close()
        begin = time.monotonic()
        deadline = begin + 20
        while not feed._queue._closed:
            assert time.monotonic() < deadline
            feed.push(step, verdict, states(torch.float32, 0))
            time.sleep(0.001)
        feed.push(step, verdict, states(torch.float32, 0))
        assert not feed._queue._items
        feed.close()


def test_a_head_that_nobody_connects_to_says_so(monkeypatch):
    monkeypatch.setattr(features, "CONNECT_TIMEOUT_S", 1000.0)
    _, inlet = linked("unix")
    assert inlet.take(0.001) is None
    inlet._connect_by -= 1000.0
    with pytest.raises(WorkerDiedError, match="did not connect"):
        inlet.take(0.001)
    inlet.close()


def test_a_feed_that_fails_is_closed_and_fails_no_step(judged):
    step, verdict = judged
    offer, inlet = linked("queue")
    feed = Feed(OpenFeatures(0, offer, CAPTURE, 5.0), CPU)
    feed.push(step, verdict, {})  # as if there were no memory for the states
    with pytest.raises(WorkerDiedError):
        inlet.take(0.0)
    feed.push(step, verdict, {})


def test_a_full_outbox_loses_features_first_and_then_steps(judged):
    step, verdict = judged
    hidden = (torch.zeros(5, 6),)  # 120 bytes
    box = FeatureQueue(max_bytes=300, max_steps=4)

    def put(serial):
        box.put(Features(serial, step, verdict, kept_rows(step, verdict), hidden))

    for serial in range(4):
        put(serial)
    item = box.take(0)
    assert item.serial == 0
    assert item.hidden is hidden  # handed over, not copied
    put(4)
    kept = [box.take(0) for _ in range(4)]
    assert [each.serial for each in kept] == [1, 2, 3, 4]
    assert [each.hidden is not None for each in kept] == [True, False, False, True]
    for serial in range(5, 10):
        put(serial)
    assert box.take(0).serial == 9  # the four before it had to go
    assert box.take(0) is None
    box.put(Features(10, step, verdict, ints([]), (torch.zeros(1000, 6),)))
    assert box.take(0).hidden is not None  # however large: nothing else waits


def test_what_only_the_rule_reads_does_not_travel(judged, build_step):
    from dataclasses import replace

    step, verdict = judged
    verdict = replace(verdict, window=ints([1]), window_start=ints([0, 1, 1]))
    sampling = replace(step.sampling, ends=(ints([1]), ints([])))
    outbox = FeatureQueue()
    feed = Feed(OpenFeatures(0, LinkOffer(queue=outbox), CAPTURE, 5.0), CPU)
    feed.push(replace(step, sampling=sampling), verdict, states(torch.float32, 0))
    item = outbox.take(0)
    assert item.step.sampling.ends == ()
    assert item.verdict.window is None
    assert np.array_equal(item.step.sampling.seeds, step.sampling.seeds)
