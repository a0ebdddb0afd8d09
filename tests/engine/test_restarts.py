"""Steps that raise, workers that die and places that are missing."""

from __future__ import annotations

import threading
import time

import pytest

from outrider.engine import engine as engine_module
from outrider.engine import statistics
from outrider.errors import (
    EngineDeadError,
    ResourcesError,
    WorkerDiedError,
    WorkerError,
)
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Request, ints

from ..helpers.engines import Box, complete, engine_of, random_prompts

PROMPTS = random_prompts(8, 96)


@pytest.fixture(scope="module")
def greedy(tiny):
    """What no drafter emits at temperature 0, one request at a time."""
    with engine_of(tiny.target) as engine:
        return complete(engine, PROMPTS, at_once=1)[0]


def test_a_step_that_raises_fails_its_requests_and_no_others(tiny, greedy):
    with engine_of(tiny.target, {"decoding_type": "NGram", "max_draft_len": 4}) as engine:
        group = engine._host.target_group
        call, calls = group.call, []

        def sometimes(message):
            calls.append(message)
            if len(calls) == 3:
                raise WorkerError("Traceback ...\nRuntimeError: out of luck")
            return call(message)

        group.call = sometimes
        _, last = complete(engine, PROMPTS[:2])
        assert {delta.finish_reason for delta in last.values()} == {"error"}
        assert "out of luck" in last["0"].error
        assert complete(engine, PROMPTS)[0] == greedy
        assert engine.stats()["num_failed_steps"] == 1
        assert engine.stats()["running"] == 0


def test_a_rank_that_fails_again_and_again_is_replaced(tiny, greedy):
    with engine_of(tiny.target) as engine:
        group = engine._host.target_group
        call, failures = group.call, [WorkerError("Traceback ...\nRuntimeError: context lost")] * 3

        def broken(message):
            if failures:
                raise failures.pop()
            return call(message)

        group.call = broken
        for _ in range(3):
            _, last = complete(engine, PROMPTS[:1])
            assert last["0"].finish_reason == "error"
        assert complete(engine, PROMPTS)[0] == greedy
        assert engine.stats()["num_restarts"] == 1


def test_lost_moves_are_not_trusted(tiny):
    """A step that fails before it compacted the cache leaves KV out of place, also of others."""
    lookahead = {"decoding_type": "Lookahead", "max_window_size": 3, "max_ngram_size": 3}
    options = {"max_num_seqs": 8, "block_size": 4}
    with engine_of(tiny.target, lookahead, **options) as engine:
        group = engine._host.target_group
        call, failed = group.call, []

        def sometimes(message):
            hashes = engine._loop.scheduler.pool._hashes
            if not failed and any(hashes[slot // 4] for slot in message.kv_moves[:, 1].tolist()):
                failed.append(message)
                raise WorkerError("RuntimeError: out of memory")
            return call(message)

        group.call = sometimes
        begun, _ = complete(engine, PROMPTS, max_tokens=64)
        assert failed
        longer = [[*prompt, *begun[str(index)], 7] for index, prompt in enumerate(PROMPTS)]
        found, _ = complete(engine, longer)
    with engine_of(tiny.target, block_size=4) as engine:
        assert found == complete(engine, longer)[0]


def test_a_restart_that_fails_is_tried_again(tiny, greedy):
    with engine_of(tiny.target, max_restarts=3) as engine:
        group = engine._host.target_group
        call, restart, failures = group.call, group.restart, []

        def dies(message):
            group.call = call
            raise WorkerDiedError("gone")

        def fails_twice():
            if len(failures) < 2:
                failures.append(1)
                raise WorkerDiedError("a worker died while it loaded")
            restart()

        group.call, group.restart = dies, fails_twice
        assert complete(engine, PROMPTS)[0] == greedy
        assert engine.stats()["num_restarts"] == 3


def dying_once(engine, restart):
    """The workers die in the next step; `restart` stands in for their restart."""
    group = engine._host.target_group
    call, again = group.call, group.restart

    def dies(message):
        group.call = call
        raise WorkerDiedError("gone")

    group.call, group.restart = dies, lambda: restart(again)


def test_requests_wait_for_a_place_for_the_workers(tiny, greedy):
    tried, aborted = [], Box()

    def has_no_place(restart):
        tried.append(1)
        if len(tried) == 1:
            engine.abort("unwanted")
        if len(tried) < 3:
            raise ResourcesError("no node", field="tensor_parallel_size")
        restart()

    with engine_of(tiny.target, max_restarts=1) as engine:
        dying_once(engine, has_no_place)
        engine.submit(Request("unwanted", ints([3, 4]), SamplingParams(max_tokens=200), 1), aborted)
        assert complete(engine, PROMPTS)[0] == greedy
        assert aborted.last().finish_reason == "abort"
        assert len(tried) == 3
        assert engine.stats()["num_restarts"] == 1


def test_a_restart_is_told_and_again_where_it_takes_long(tiny, greedy, monkeypatch):
    for module in (engine_module, statistics):
        monkeypatch.setattr(module, "LATE_S", 0.05)
    told, late = [], threading.Event()

    def takes_long(restart):
        assert late.wait(60)
        restart()

    def lack_changed():
        told.append((engine.is_recovering, engine.lacks_workers))
        if engine.lacks_workers:
            late.set()

    with engine_of(tiny.target) as engine:
        engine.on_lack.append(lack_changed)
        assert not engine.lacks_workers
        dying_once(engine, takes_long)
        assert complete(engine, PROMPTS)[0] == greedy
        assert told == [(True, False), (True, True), (False, False)]


def test_a_place_that_never_comes_ends_the_engine(tiny):
    def has_no_place(restart):
        time.sleep(0.02)
        raise ResourcesError("no node", field="tensor_parallel_size")

    with engine_of(tiny.target, restart_window_s=0.1) as engine:
        dying_once(engine, has_no_place)
        box = Box()
        engine.submit(Request("a", ints([3, 4]), SamplingParams(), 1), box)
        assert "no place for the workers within 0 s" in box.last().error
        with pytest.raises(EngineDeadError, match="no node"):
            engine.submit(Request("b", ints([3, 4]), SamplingParams(), 1), Box())


def test_nothing_is_restarted_once_the_engine_is_shut_down(tiny, monkeypatch):
    with engine_of(tiny.target) as engine:
        group = engine._host.target_group
        entered, ended = threading.Event(), threading.Event()
        restarts = []

        def hangs(message):
            entered.set()
            ended.wait(30)
            raise WorkerDiedError("its socket was closed")

        group.call, group.restart = hangs, lambda: restarts.append(1)
        monkeypatch.setattr(group, "shutdown", ended.set)
        join = engine._thread.join
        monkeypatch.setattr(engine._thread, "join", lambda timeout: join(timeout=0.1))
        engine.submit(Request("a", ints([3, 4]), SamplingParams(), seed=1), Box())
        assert entered.wait(30)
        engine.shutdown()
        join(timeout=30)
        assert not restarts


def test_a_broken_sink_hurts_nobody_else(tiny, greedy):
    class Broken:
        def deliver(self, deltas):
            raise RuntimeError("Event loop is closed")

    with engine_of(tiny.target) as engine:
        engine.submit(Request("x", ints([3, 4]), SamplingParams(), seed=1), Broken())
        assert complete(engine, PROMPTS)[0] == greedy


@pytest.mark.parametrize("num_blocks", [256, 12], ids=["roomy", "tight"])
def test_a_request_that_ends_its_workers_is_refused_and_the_others_go_on(tiny, num_blocks):
    with engine_of(
        tiny.target, max_restarts=3, num_kv_blocks=num_blocks, max_model_len=128
    ) as engine:
        wanted, _ = complete(engine, PROMPTS)
        verify, crashed = engine._loop.target.verify, []

        def poisoned(batch, drafts):
            if "poison" in batch.request_ids:
                crashed.append(batch.request_ids)
                raise WorkerDiedError("an illegal instruction")
            return verify(batch, drafts)

        engine._loop.target.verify = poisoned
        box = Box()
        engine.submit(Request("poison", ints([3, 4]), SamplingParams(max_tokens=9), 1), box)
        found, last = complete(engine, PROMPTS)
        assert found == wanted
        assert {delta.finish_reason for delta in last.values()} == {"length"}
        refused = box.last()
        assert refused.finish_reason == "error"
        assert "refused: an illegal instruction" in refused.error
        assert crashed[-1] == ("poison",)
        assert len(crashed) == engine.stats()["num_restarts"] <= 3
