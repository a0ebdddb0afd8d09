"""The engine over Ray actors: the same tokens, and nothing lost when workers are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray

from outrider.cluster import rank_actors
from outrider.cluster.keeper import OwnedRanks
from outrider.config import ResourcesConfig
from outrider.errors import CheckpointError, ResourcesError, WorkerDiedError
from outrider.tests.helpers.head_files import (
    eagle_tensors,
    medusa_tensors,
    write_eagle,
    write_medusa,
)
from outrider.workers.spec import WorkerSpec
from outrider.workers.transport.socket_channel import routes

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts
from ..helpers.ports import wait_for
from ..helpers.serving.kills import is_dead, kill, kill_all, stop

pytestmark = pytest.mark.ray
PROMPTS = random_prompts(4, 96)
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 40}


@pytest.fixture(scope="module")
def plain(tiny):
    return plain_outputs(tiny.target, PROMPTS, SAMPLED)[0]


def process_of(group, rank: int = 0) -> int:
    return group.reports[rank].location.process


def end(cluster, group, rank: int = 0) -> None:
    """Ends a rank as Ray ends actors; it is dead when this returns."""
    process = process_of(group, rank)
    cluster.kill(group._ranks[rank])
    wait_for(lambda: is_dead(process))


def surroundings(_: Any) -> tuple[str, str]:
    """What a rank's process was told about threads, and the environment that Ray made for it."""
    return os.environ["OMP_WAIT_POLICY"], ray.get_runtime_context().get_runtime_env_string()


def draft_section(tiny) -> dict:
    return {"decoding_type": "DraftTarget", "speculative_model": tiny.draft, "max_draft_len": 3}


@pytest.mark.slow
def test_ranks_and_drafter_may_die_and_no_client_sees_it(cluster, tiny, plain):
    options = {"executor": "ray", "tensor_parallel_size": 2}
    with engine_of(tiny.target, draft_section(tiny), **options) as engine:

        def strike(count, delta):
            if count == 5:
                end(cluster, engine._host.target_group, 1)
            if count == 15:
                end(cluster, engine._drafting.drafter._model._group)

        outputs, last = complete(engine, PROMPTS, on_delta=strike, **SAMPLED)
        assert outputs == plain
        assert {delta.finish_reason for delta in last.values()} == {"length"}
        stats = engine.stats()
        assert stats["num_restarts"] == 1
        assert stats["all_reduce"] == "gloo"
        assert stats["drafters"]["draft_target"]["faults"] >= 1
        # The drafter comes back by itself and is used again.
        before = stats["drafters"]["draft_target"]["num_gen_drafts"]

        def drafts_again() -> bool:
            assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
            return engine.stats()["drafters"]["draft_target"]["num_gen_drafts"] > before

        wait_for(drafts_again)


@pytest.mark.slow
def test_a_leader_and_its_follower_may_die(cluster, tiny, plain, monkeypatch):
    """Ranks are led as those of another node are: the engine connects to rank 0 alone."""
    monkeypatch.setattr(rank_actors, "routes", lambda nodes, here: routes(nodes, "elsewhere"))
    with engine_of(tiny.target, executor="ray", tensor_parallel_size=2) as engine:
        group = engine._host.target_group
        wait_for(lambda: len(group._source.amounts()) == 2)
        verbs, read, total = zip(*group._source.amounts(), strict=True)
        assert verbs == ("read", "read")
        assert read == total
        assert min(total) > 0
        for lost in (0, 1):
            assert len(group._channel._connections) == 1

            def strike(count, delta, lost=lost):
                if count == 5:
                    kill(process_of(group, lost))

            assert complete(engine, PROMPTS, on_delta=strike, **SAMPLED)[0] == plain
            assert engine.stats()["num_restarts"] == lost + 1


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "size", "lost"), [(2, 1, (1, 0)), (2, 2, (3,))])
def test_a_rank_of_any_stage_may_die(cluster, tiny, plain, stages, size, lost):
    """Each stage has a bundle; the first stage's ranks come last."""
    options = {"pipeline_parallel_size": stages, "tensor_parallel_size": size}
    section = {"decoding_type": "NGram", "max_draft_len": 3}
    with engine_of(tiny.target, section, executor="ray", **options) as engine:
        group = engine._host.target_group
        assert len(group.reports) == stages * size
        assert group._source._formed.placement.bundle_count == stages
        for round_, rank in enumerate(lost, 1):

            def strike(count, delta, rank=rank):
                if count == 5:
                    kill(process_of(group, rank))

            outputs, last = complete(engine, PROMPTS, on_delta=strike, **SAMPLED)
            assert outputs == plain
            assert {delta.finish_reason for delta in last.values()} == {"length"}
            assert engine.stats()["num_restarts"] == round_


@pytest.mark.slow
def test_a_stopped_rank_is_replaced_and_so_is_one_that_dies_idle(cluster, tiny, plain, caplog):
    """SIGSTOP: no connection closes. Then SIGKILL without a request that could meet it.

    The watchdog ends the first rank that is stopped. Of the second it is gone, as if the machine
    were, and only heartbeats are missed.
    """
    options = {"executor": "ray", "step_timeout_s": 10_000, "resources": {"spare_workers": True}}
    with engine_of(tiny.target, **options) as engine:
        group = engine._host.target_group
        for round_ in range(2):
            wait_for(group.spares)
            stopped, at_s = process_of(group), []

            def strike(count, delta, stopped=stopped, at_s=at_s, alone=round_ == 1):
                if count == 5:
                    stop(stopped)
                    if alone:
                        kill_all(f"watch_parent.py\0{stopped}\0")
                at_s.append(time.monotonic())

            assert complete(engine, PROMPTS, on_delta=strike, **SAMPLED)[0] == plain
            stall_s = max(late - early for early, late in pairwise(at_s))
            assert engine.stats()["num_restarts"] == round_ + 1
            assert ("has sent no heartbeat" in caplog.text) == bool(round_)
            assert stall_s < (15.0 if round_ else 10.0)  # 8 and 3 where nothing else runs
            wait_for(lambda stopped=stopped: not Path(f"/proc/{stopped}").exists())

        assert engine.stats()["recovering"] is None
        os.kill(process_of(group), signal.SIGKILL)
        wait_for(lambda: engine.stats()["recovering"] is not None)
        engine.check()  # it is not down
        wait_for(lambda: engine.stats()["recovering"] is None)
        assert engine.stats()["num_restarts"] == 3
        assert complete(engine, PROMPTS, **SAMPLED)[0] == plain


@pytest.mark.slow
def test_spare_workers_take_over_and_are_replaced_themselves(cluster, tiny, plain):
    """A step meets the first death, and a message tells of the second before the next step."""
    with engine_of(tiny.target, executor="ray", resources={"spare_workers": True}) as engine:
        group = engine._host.target_group
        told = list(group.on_death)
        for round_ in range(2):
            group.on_death[:] = told if round_ else []
            wait_for(group.spares)
            (spare,), lost = group.spares(), process_of(group)

            def strike(count, delta, lost=lost):
                if count == 5:
                    kill(lost)

            assert complete(engine, PROMPTS, on_delta=strike, **SAMPLED)[0] == plain
            assert group.reports[0].location == spare
            assert engine.stats()["num_restarts"] == round_ + 1
            assert sum(engine.stats()["recovery_seconds"]["counts"]) == round_ + 1
        wait_for(group.spares)
        (spare,) = group.spares()
        os.kill(spare.process, signal.SIGKILL)  # harmless, and replaced
        assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
        wait_for(lambda: group.spares() not in ([], [spare]))
        roles = [(each["role"], each["state"]) for each in engine.stats()["workers"]]
        assert roles == [("target", "active"), ("target", "spare")]
        assert engine.stats()["num_restarts"] == 2


@pytest.mark.slow
def test_a_stopped_draft_worker_costs_speed_only(cluster, tiny, plain):
    """Every timeout that could end the wait is out of reach, but for the drafter's own."""
    options = {"executor": "ray", "step_timeout_s": 10_000, "heartbeat_timeout_s": 10_000}
    section = {**draft_section(tiny), "draft_timeout_s": 3}
    with engine_of(tiny.target, section, **options) as engine:
        process = process_of(engine._drafting.drafter._model._group)

        def strike(count, delta):
            if count == 5:
                stop(process)

        assert complete(engine, PROMPTS, on_delta=strike, **SAMPLED)[0] == plain
        stats = engine.stats()["drafters"]["draft_target"]
        assert stats["faults"] == 1
        os.kill(process, signal.SIGCONT)

        def drafts_again() -> bool:
            assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
            now = engine.stats()["drafters"]["draft_target"]
            return now["num_gen_drafts"] > stats["num_gen_drafts"]

        wait_for(drafts_again)
        assert engine.stats()["num_restarts"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft model", "head"])
def test_a_drafter_with_a_cache_is_killed_and_stopped_again_and_again(
    cluster, tiny, plain, tmp_path, kind
):
    """At other places of the requests each time; no error, no other token, and it drafts again."""
    cache = {"outcomes": 8, "adaptive": False}
    section = {**draft_section(tiny), "draft_timeout_s": 0.5, "speculation_cache": cache}
    if kind == "head":
        head = write_eagle(tmp_path / "head", *eagle_tensors(tiny.target, 1))
        own = {"decoding_type": "Eagle", "speculative_model": head, "placement": "separate"}
        section = {"max_draft_len": 3, "draft_timeout_s": 0.5, "speculation_cache": cache, **own}
    options = {"executor": "ray", "step_timeout_s": 10_000, "heartbeat_timeout_s": 10_000}
    with engine_of(tiny.target, section, **options) as engine:
        group = engine._drafting.drafter._model._group

        def counts() -> dict:
            (found,) = engine.stats()["drafters"].values()
            return found

        def hits_again() -> bool:
            before = counts()["speculation_cache"]
            assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
            after = counts()["speculation_cache"]
            # A draft model gets the target's verdicts again, too.
            begins = after["num_begun"] > before["num_begun"] or kind == "head"
            return begins and after["num_hits"] > before["num_hits"]

        assert hits_again()
        for round_ in range(4):
            process, faults = process_of(group), counts()["faults"]
            strike = (kill, stop)[round_ % 2]

            def struck(count, delta, strike=strike, process=process, place=3 + 6 * round_):
                if count == place:
                    strike(process)

            outputs, last = complete(engine, PROMPTS, on_delta=struck, **SAMPLED)
            assert outputs == plain
            assert {delta.finish_reason for delta in last.values()} == {"length"}
            assert counts()["faults"] > faults
            if strike is stop:
                os.kill(process, signal.SIGCONT)
            wait_for(hits_again)
        assert engine.stats()["num_restarts"] == 0


@pytest.mark.slow
def test_a_head_comes_back_with_its_rank(cluster, tiny, plain, tmp_path):
    heads = write_medusa(tmp_path, medusa_tensors(tiny.target, 3), "safetensors")
    section = {"method": "medusa", "model": heads, "num_speculative_tokens": 3}
    with engine_of(tiny.target, section, executor="ray", tensor_parallel_size=2) as engine:

        def strike(count, delta):
            if count == 5:
                end(cluster, engine._host.target_group)

        assert complete(engine, PROMPTS, on_delta=strike, **SAMPLED)[0] == plain
        stats = engine.stats()
    assert stats["num_restarts"] == 1
    assert stats["drafters"]["medusa"]["faults"] == 0
    assert stats["drafters"]["medusa"]["num_gen_drafts"] > 10


@pytest.mark.slow
def test_a_separate_head_and_its_target_may_die(cluster, tiny, plain, tmp_path):
    """Killed hard, the head is missed and comes back; a target that comes back finds it."""
    head = write_eagle(tmp_path / "head", *eagle_tensors(tiny.target, 1))
    section = {"decoding_type": "Eagle", "speculative_model": head, "max_draft_len": 3}
    section |= {"placement": "separate", "draft_timeout_s": 10}
    with engine_of(tiny.target, section, executor="ray") as engine:
        group, target = engine._drafting.drafter._model._group, engine._host.target_group
        assert process_of(group) != process_of(target)

        def drafted() -> int:
            return engine.stats()["drafters"]["eagle"]["num_gen_drafts"]

        def strike(count, delta):
            if count == 5:
                kill(process_of(group))

        assert complete(engine, PROMPTS, on_delta=strike, **SAMPLED)[0] == plain
        stats = engine.stats()
        assert stats["num_restarts"] == 0
        assert stats["drafters"]["eagle"]["faults"] == 1
        assert stats["drafters"]["eagle"]["num_gen_drafts"] > 0
        before = drafted()

        def drafts_again() -> bool:
            assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
            return drafted() > before

        wait_for(drafts_again)

        def strike_again(count, delta):
            if count == 5:
                kill(process_of(target))

        before = drafted()
        assert complete(engine, PROMPTS, on_delta=strike_again, **SAMPLED)[0] == plain
        assert engine.stats()["num_restarts"] == 1
        assert engine.stats()["drafters"]["eagle"]["faults"] <= 2  # a link that broke is one
        assert drafted() > before + 20


def test_colocated_drafter_over_two_ranks(cluster, tiny, plain):
    section = {**draft_section(tiny), "placement": "colocated"}
    with engine_of(tiny.target, section, executor="ray", tensor_parallel_size=2) as engine:
        assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
        assert engine.stats()["drafters"]["draft_target"]["num_acc_tokens"] > 0
        for rank in engine._host.target_group._ranks:  # a worker that Ray had waiting does
            assert cluster.get(rank.__ray_call__.remote(surroundings)) == ("PASSIVE", "{}")


def test_too_many_deaths_end_the_engine_with_a_reason(cluster, tiny):
    with engine_of(tiny.target, executor="ray", max_restarts=0) as engine:

        def strike(count, delta):
            if count == 2:
                end(cluster, engine._host.target_group)

        _, last = complete(engine, PROMPTS[:2], on_delta=strike, **SAMPLED)
        assert {delta.finish_reason for delta in last.values()} == {"error"}
        assert "max_restarts" in last["0"].error
        with pytest.raises(Exception, match="max_restarts"):
            engine.check()


def test_what_the_cluster_cannot_give_is_said(cluster, tiny):
    resources = {"cpus_per_worker": 3, "placement_timeout_s": 2}
    with (
        pytest.raises(ResourcesError, match="the cluster has") as caught,
        engine_of(tiny.target, executor="ray", tensor_parallel_size=2, resources=resources),
    ):
        pass
    assert caught.value.field == "tensor_parallel_size"


def test_a_rank_that_cannot_load_says_why(cluster, tiny, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(tiny.target, broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    with (
        pytest.raises((CheckpointError, WorkerDiedError)) as caught,
        engine_of(str(broken), executor="ray"),
    ):
        pass
    assert isinstance(caught.value, CheckpointError), caught.value


def test_an_engine_comes_after_what_the_one_before_it_asked_for(monkeypatch):
    """Two at once would wait for one another's place."""
    group = rank_actors.RankActors(WorkerSpec(1, "cpu", None, 1.0), ResourcesConfig())
    begun, may_end, found = threading.Event(), threading.Event(), []

    def start(node):
        begun.set()
        assert may_end.wait(60)
        group._formed.ranks = ["rank"]

    monkeypatch.setattr(group, "_start", start)
    monkeypatch.setattr(group, "_renew", lambda: True)
    monkeypatch.setattr(group, "_start_spares", lambda: None)
    threads = [
        threading.Thread(target=lambda r=reuse: found.append(group.form("", r, group._spec)))
        for reuse in (False, True)
    ]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.1)
    assert found == []
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert [each.ranks for each in found] == [["rank"], ["rank"]]
    assert group._formed.generation == 1


def test_a_keeper_that_hangs_holds_up_no_step():
    """Ranks are let go of in a step; new ones come after that, so that these are not ended."""
    may_end, done = threading.Event(), []

    class Link:
        is_up = True

        def call(self, method, key, spec, resources, verb, *arguments, **limits):
            if verb is rank_actors.RankActors.drop:
                assert may_end.wait(60)
            done.append(verb.__name__)
            return rank_actors.Formed(spec)

        def holds(self, ranks, formed): ...

    spec = WorkerSpec(1, "cpu", None, 1.0)
    owned = OwnedRanks(Link(), "key", spec, ResourcesConfig())
    for _ in range(2):
        owned.drop()
    forming = threading.Thread(target=owned.form, args=("", False, spec))
    forming.start()
    forming.join(0.1)
    assert done == []
    may_end.set()
    forming.join(60)
    assert done == ["drop", "form"]
