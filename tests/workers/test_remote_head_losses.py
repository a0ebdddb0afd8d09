"""Heads on workers of their own that lose what they need, die or are late: no harm but speed."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from outrider.tests.helpers.heads.remote import (
    plain,
    runner,
    separate,
    write_shapes,
)
from outrider.tests.helpers.models import write_guessable
from outrider.tests.helpers.ports import wait_for
from outrider.workers.head import HeadRunner
from outrider.workers.remote_head import SlotValidity
from outrider.workers.transport import features


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By shape: the target and the head's section."""
    folder = tmp_path_factory.mktemp("heads")
    return write_shapes(write_guessable(folder / "target"), folder)


@pytest.fixture
def run(monkeypatch):
    return runner(monkeypatch)


@pytest.fixture
def poisoned(monkeypatch):
    """Fills every row that the head did not see with NaN, right before it could be read.

    Gives the number of hidden rows, step by step; none may show in what the head draws from.
    """
    holes: list[int] = []
    wrong: list[str] = []
    visible = SlotValidity.visible

    def spy(self, step):
        bad = torch.from_numpy(~self.valid)
        bad[0] = False  # what padding reads, behind a mask
        for layer in (*self._cache.keys, *self._cache.values):
            layer[: len(bad)][bad] = torch.nan  # rows of drafts lie behind
        view = visible(self, step)
        holes.append(int((step.context_lens - view.context_lens).sum()))
        return view

    monkeypatch.setattr(SlotValidity, "visible", spy)
    inner, draw = HeadRunner.run, HeadRunner.draw

    def run_checked(self, step, verdict, hidden):
        drafts = inner(self, step, verdict, hidden)
        wrong.extend(filter(None, [drafts.error]))
        return drafts

    def draw_checked(self, logits, *others):
        wrong.extend(["logits are not numbers"] * bool(logits.isnan().any()))
        return draw(self, logits, *others)

    monkeypatch.setattr(HeadRunner, "run", run_checked)
    monkeypatch.setattr(HeadRunner, "draw", draw_checked)
    yield holes
    assert not wrong


@pytest.mark.parametrize("loss", ["features", "steps"])
@pytest.mark.parametrize(
    ("shape", "prepares"),
    [
        ("eagle3-chain", False),
        ("eagle1-chain", True),
        ("mtp", False),
        ("mtp", True),
        ("medusa-chain", False),
    ],
)
def test_lost_features_leave_holes_that_are_not_read(
    made, run, poisoned, monkeypatch, shape, prepares, loss
):
    target, section = made[shape]
    if prepares:
        section = {**section, "speculation_cache": {"adaptive": False}}
    put = features.FeatureQueue.put

    def lossy(self, item):
        if item.serial % 9 != 4:
            put(self, item)
        elif loss == "features":
            put(self, replace(item, hidden=None))

    monkeypatch.setattr(features.FeatureQueue, "put", lossy)
    far = run(target, separate(section, draft_timeout_s=0.2))
    assert far.outputs == plain(target)
    # Where a draft was prepared, nobody waits for the answer that a lost step would have had.
    assert far.drafter["faults"] > 0 or prepares
    assert far.drafter["num_gen_drafts"] > 20
    assert far.drafter["num_acc_tokens"] > 0
    assert sum(poisoned) > 20 or shape.startswith("medusa")  # which keeps no rows


def test_a_dead_head_costs_its_drafts_and_comes_back(made, run):
    target, section = made["eagle3-chain"]
    before = []

    def strike(engine, count):
        group = engine._drafting.drafter._model._group
        if count == 20:
            group.shutdown()
        if count == 60:  # it was missed long since
            wait_for(lambda: group.alive)
            before.append(engine.stats()["drafters"]["eagle3"]["num_gen_drafts"])

    far = run(target, separate(section), strike=strike)
    assert far.outputs == plain(target)
    assert far.drafter["faults"] == 1
    assert far.drafter["num_gen_drafts"] > before[0] + 20


@pytest.mark.parametrize("transport", ["auto", "socket"])
def test_a_target_that_is_restarted_finds_its_head_again(made, run, poisoned, transport):
    target, section = made["eagle3-chain"]

    def strike(engine, count):
        if count == 20:
            engine._host.target_group.shutdown()

    far = run(target, separate(section, feature_transport=transport), strike=strike)
    assert far.outputs == plain(target)
    assert far.stats["num_restarts"] == 1
    assert far.drafter["faults"] <= 1
    assert far.drafter["num_gen_drafts"] > 40
    assert sum(poisoned) == 0  # every request was computed again, and the head saw all of it


def test_a_late_head_is_not_waited_for(made, run, monkeypatch):
    """One draft hangs: its step and the next ones go out without, then all is well again."""
    target, section = made["medusa-chain"]
    inner, go, calls = HeadRunner.run, threading.Event(), []

    def slow(self, step, verdict, hidden):
        calls.append(time.monotonic())
        if len(calls) == 5:
            go.wait(20)
        return inner(self, step, verdict, hidden)

    monkeypatch.setattr(HeadRunner, "run", slow)
    rest = []

    def strike(engine, count):
        rest.append(count)
        if len(calls) >= 5 and len(rest) > 60:
            go.set()

    far = run(target, separate(section, draft_timeout_s=0.05), strike=strike)
    assert far.outputs == plain(target)
    assert 1 <= far.drafter["faults"] < 10
    assert len(calls) > 10


def test_a_head_that_is_always_late_is_waited_for_once(made, run, monkeypatch):
    target, section = made["medusa-chain"]
    inner = HeadRunner.run

    def slow(self, step, verdict, hidden):
        time.sleep(0.06)
        return inner(self, step, verdict, hidden)

    monkeypatch.setattr(HeadRunner, "run", slow)
    far = run(target, separate(section, draft_timeout_s=0.03))
    assert far.outputs == plain(target)
    assert far.drafter["faults"] == 1


def test_a_head_that_hears_of_no_step_is_linked_again(made, run, monkeypatch):
    """The first line is never connected: nobody waits for it, and the next one works."""
    target, section = made["eagle3-chain"]
    take, receivers = features.SocketReceiver.take, []

    def impatient(self, timeout_s):
        if self not in receivers:
            receivers.append(self)
        patience_s = 0.05 if self is receivers[0] else 60.0
        monkeypatch.setattr(features, "CONNECT_TIMEOUT_S", patience_s)
        return take(self, timeout_s)

    monkeypatch.setattr(features.SocketReceiver, "take", impatient)
    inner, tries = features.FeatureSender._connect, []

    def connect(self):
        tries.append(self)
        if len(tries) > 1:
            inner(self)
        else:
            raise OSError("no route to the head")

    monkeypatch.setattr(features.FeatureSender, "_connect", connect)
    socket = separate(section, feature_transport="socket", draft_timeout_s=1.0)
    far = run(target, socket)
    assert far.outputs == plain(target)
    assert len(tries) == 2
    assert 1 <= far.drafter["faults"] <= 3
    assert far.drafter["num_gen_drafts"] > 40


def test_a_step_that_fails_halfway_counts_as_missed(made, run, monkeypatch):
    """Its moves may not have run: no row of before can be vouched for."""
    target, section = made["eagle3-chain"]
    move, forget = SlotValidity.apply_moves, SlotValidity.invalidate_all
    moved, forgot = [], []

    def fail_once(self, kv_moves):
        moved.append(len(kv_moves))
        if len(moved) == 12:
            raise RuntimeError("out of memory")
        move(self, kv_moves)

    def count(self):
        forgot.append(len(moved))
        forget(self)

    monkeypatch.setattr(SlotValidity, "apply_moves", fail_once)
    monkeypatch.setattr(SlotValidity, "invalidate_all", count)
    far = run(target, separate(section))
    assert far.outputs == plain(target)
    assert far.drafter["faults"] == 1
    assert forgot == [0, 12]  # as the link was opened; then before the thirteenth step moved
