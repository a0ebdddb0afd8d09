"""Two nodes of Ray, and the network between them is gone for a while."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster import rank_actors
from outrider.cluster.drafters import start_group
from outrider.config import EngineConfig
from outrider.errors import WorkerDiedError

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts
from ..helpers.ports import wait_for
from ..helpers.serving.kills import kill
from ..helpers.serving.second_machine import SecondMachine, second_machine

pytestmark = [pytest.mark.ray, pytest.mark.slow]
PARTITION_S = 10.0
PROMPTS = random_prompts(4, 96)
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 40}


@dataclass
class Cluster:
    """Ray with a node here, which has room for one rank, and one on another machine."""

    machine: SecondMachine
    folder: Path
    num_cpus: int  # of the other node
    node: subprocess.Popen[bytes] | None = None

    def start_node(self) -> None:
        """Starts Ray there."""
        import ray

        # `ray start` writes down where the cluster is: for nobody else.
        env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_TMPDIR": str(self.folder)}
        join = f"start --num-cpus {self.num_cpus} --node-ip-address {self.machine.there} --block"
        join += """ --resources {"accelerator_type:there":1}"""
        command = [str(Path(sys.executable).with_name("ray")), *join.split(), "--address"]
        address = ray.get_runtime_context().gcs_address
        self.node = subprocess.Popen(
            [*self.machine.enter, *command, address], env=env, stdout=subprocess.DEVNULL
        )

    def end_node(self) -> None:
        """Ends it while it can still say goodbye."""
        if self.node is not None:
            self.node.terminate()
            self.node.wait()


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    import ray

    with second_machine() as machine:
        ray.init(
            "local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address=machine.here,
            resources={"accelerator_type:here": 1},
        )
        made = Cluster(machine, tmp_path, getattr(request, "param", 2))
        try:
            made.start_node()
            wait_for(lambda: ray.cluster_resources().get("CPU") == 1.0 + made.num_cpus)
            yield made
        finally:
            made.end_node()
            ray.shutdown()


def test_ranks_and_drafter_beyond_a_network_that_fails_for_a_while(
    cluster: Cluster, tiny: Any
) -> None:
    """One of two ranks is there, and so is the drafter: streams wait, and go on as they were."""
    plain = plain_outputs(tiny.target, PROMPTS, SAMPLED)[0]
    section = {"decoding_type": "DraftTarget", "speculative_model": tiny.draft, "max_draft_len": 3}
    options = {"executor": "ray", "tensor_parallel_size": 2}
    with engine_of(tiny.target, section, **options) as engine:
        places = [each["node"] for each in engine.stats()["workers"]]
        assert len(places) == 3
        assert len(set(places)) == 2
        restored = threading.Event()

        def restore() -> None:
            time.sleep(PARTITION_S)
            cluster.machine.plug()
            restored.set()

        def strike(count: int, delta: Any) -> None:
            if count == 5:
                cluster.machine.pull()
                threading.Thread(target=restore, daemon=True).start()

        outputs, last = complete(engine, PROMPTS, on_delta=strike, **SAMPLED)
        assert restored.is_set()  # no step could be made without the other rank
        assert outputs == plain
        assert {delta.finish_reason for delta in last.values()} == {"length"}
        stats = engine.stats()
        assert stats["num_restarts"] == 1
        assert stats["recovering"] is None
        before = stats["drafters"]["draft_target"]["num_gen_drafts"]

        def drafts_again() -> bool:
            assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
            return engine.stats()["drafters"]["draft_target"]["num_gen_drafts"] > before

        wait_for(drafts_again)
        assert engine.stats()["num_restarts"] == 1
        assert len(engine.stats()["workers"]) == 3


@pytest.mark.parametrize("cluster", [1], indirect=True, ids=["one rank on each"])
def test_a_node_that_is_lost_and_comes_back(cluster: Cluster, tiny: Any) -> None:
    """The other rank's place is kept, and so is its process, while tries for a place fail."""
    import ray
    from ray.util import placement_group_table

    def places() -> list[str]:
        return [id for id, group in placement_group_table().items() if group["state"] != "REMOVED"]

    plain = plain_outputs(tiny.target, PROMPTS, SAMPLED)[0]
    options = {
        "executor": "ray",
        "tensor_parallel_size": 2,
        "resources": {"placement_timeout_s": 2.0},
    }
    with engine_of(tiny.target, None, **options) as engine:
        before = places()

        def replace_node() -> None:
            wait_for(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)
            time.sleep(3 * options["resources"]["placement_timeout_s"])
            cluster.start_node()

        def strike(count: int, delta: Any) -> None:
            if count == 5:
                cluster.machine.kill()
                threading.Thread(target=replace_node, daemon=True).start()

        outputs, last = complete(engine, PROMPTS, on_delta=strike, **SAMPLED)
        assert outputs == plain
        assert {delta.finish_reason for delta in last.values()} == {"length"}
        assert engine.stats()["num_restarts"] == 1
        assert places() == before
        assert len({each["node"] for each in engine.stats()["workers"]}) == 2


@pytest.mark.parametrize("cluster", [1], indirect=True, ids=["one rank on each"])
def test_a_node_that_is_lost_while_ranks_load(
    cluster: Cluster, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a start it is named; behind a rank's death, streams wait for it."""
    import ray

    answers_of, joins = rank_actors.answers_of, iter(range(100))

    def lose_node(refs: list[Any]) -> list[Any]:
        if next(joins) == 1:  # places are known, the ranks meet
            cluster.machine.kill()
        return answers_of(refs)

    def is_alone() -> bool:
        return sum(node["Alive"] for node in ray.nodes()) == 1

    options = {
        "executor": "ray",
        "tensor_parallel_size": 2,
        "resources": {"placement_timeout_s": 30.0},
    }
    monkeypatch.setattr(rank_actors, "answers_of", lose_node)
    named = rf"rank 1 of 2 died while it loaded, on {cluster.machine.there}"
    with (
        pytest.raises(WorkerDiedError, match=named),
        engine_of(tiny.target, None, **options),
    ):
        pass
    wait_for(is_alone)
    monkeypatch.undo()
    cluster.start_node()
    plain = plain_outputs(tiny.target, PROMPTS, SAMPLED)[0]
    with engine_of(tiny.target, None, **options) as engine:
        joins = iter(range(100))

        def replace_node() -> None:
            wait_for(is_alone)
            cluster.start_node()

        def strike(count: int, delta: Any) -> None:
            if count == 5:
                monkeypatch.setattr(rank_actors, "answers_of", lose_node)
                kill(engine._host.target_group.reports[0].location.process)
                threading.Thread(target=replace_node, daemon=True).start()

        outputs, last = complete(engine, PROMPTS, on_delta=strike, **SAMPLED)
        assert outputs == plain
        assert {delta.finish_reason for delta in last.values()} == {"length"}
        assert engine.stats()["recovering"] is None


def test_a_node_of_drafters_that_is_lost_and_comes_back(cluster: Cluster, tiny: Any) -> None:
    """Of an engine's own drafter and of a group's member: streams go on, and drafts come back."""
    import ray

    plain = plain_outputs(tiny.target, PROMPTS, SAMPLED)[0]
    there: dict[str, Any] = {"accelerator_type": "there", "cpus_per_worker": 0.5}
    settings = {"model": tiny.draft, "dtype": "float32", "num_kv_blocks": 256, "resources": there}
    start_group("small", EngineConfig.load(settings), max_engines=1)
    here = {**there, "accelerator_type": "here", "drafter_accelerator_type": "there"}
    section = {"decoding_type": "DraftTarget", "max_draft_len": 3, "draft_timeout_s": 5.0}
    own = {"speculative_model": tiny.draft, "speculation_cache": {"outcomes": 4}}

    def engine(**keys: Any) -> Any:
        return engine_of(tiny.target, {**section, **keys}, executor="ray", resources=here)

    with engine(**own) as one, engine(drafter_group="small") as other:
        engines, is_lost = (one, other), threading.Event()
        assert len({each["node"] for each in one.stats()["workers"]}) == 2

        def counts(each: Any) -> Any:
            return each.stats()["drafters"]["draft_target"]

        def all_draft() -> bool:
            before = [counts(each)["num_acc_tokens"] for each in engines]
            assert all(complete(each, PROMPTS, **SAMPLED)[0] == plain for each in engines)
            after = [counts(each)["num_acc_tokens"] for each in engines]
            return all(new > old for new, old in zip(after, before, strict=True))

        def strike(count: int, delta: Any) -> None:
            if count == 5:
                cluster.machine.kill()
                is_lost.set()

        def hold(count: int, delta: Any) -> None:
            assert count < 5 or is_lost.wait(60)

        wait_for(all_draft)
        found: list[Any] = []
        beside = threading.Thread(
            target=lambda: found.append(complete(other, PROMPTS, on_delta=hold, **SAMPLED))
        )
        beside.start()
        found.append(complete(one, PROMPTS, on_delta=strike, **SAMPLED))
        beside.join()
        assert [outputs for outputs, _ in found] == [plain, plain]
        assert {delta.finish_reason for _, last in found for delta in last.values()} == {"length"}
        wait_for(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)
        assert not all_draft()
        assert [counts(each)["health"]["state"] for each in engines] == ["down", "down"]
        cluster.start_node()
        wait_for(all_draft, 240)
        assert [each.stats()["num_restarts"] for each in engines] == [0, 0]
        assert len({each["node"] for each in one.stats()["workers"]}) == 2
