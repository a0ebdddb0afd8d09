"""Two nodes of Ray, and the network between them is gone for a while."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts
from ..helpers.ports import wait_for
from ..helpers.serving.second_machine import SecondMachine, second_machine

pytestmark = [pytest.mark.ray, pytest.mark.slow]
PARTITION_S = 10.0
PROMPTS = random_prompts(4, 96)
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 40}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SecondMachine]:
    """A Ray with a node here, which has room for one rank, and one there."""
    import ray

    with second_machine() as made:
        ray.init(
            "local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address=made.here,
        )
        try:
            # `ray start` writes down where the cluster is: for nobody else.
            env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_TMPDIR": str(tmp_path)}
            join = f"start --num-cpus 2 --node-ip-address {made.there} --block --address"
            command = [str(Path(sys.executable).with_name("ray")), *join.split()]
            address = ray.get_runtime_context().gcs_address
            with subprocess.Popen(
                [*made.enter, *command, address], env=env, stdout=subprocess.DEVNULL
            ) as node:
                try:
                    wait_for(lambda: ray.cluster_resources().get("CPU") == 3.0)
                    yield made
                finally:  # while it can still say goodbye
                    node.terminate()
        finally:
            ray.shutdown()


def test_ranks_and_drafter_beyond_a_network_that_fails_for_a_while(
    machine: SecondMachine, tiny: Any
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
            machine.plug()
            restored.set()

        def strike(count: int, delta: Any) -> None:
            if count == 5:
                machine.pull()
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
