"""Workers that outlive their engine."""

from __future__ import annotations

import os
import signal
import time

import pytest

from outrider.config import EngineConfig
from outrider.engine.engine import Engine

from ..helpers.engines import complete, engine_of, random_prompts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = random_prompts(4, 96)
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 40}


def wait_for(condition, timeout_s=400.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class Server:
    """Starts engines as replicas of one deployment do, and takes them away as a kill does."""

    def __init__(self, ray, model, deployment, **options):
        self._settings = {
            "model": model,
            "executor": "ray",
            "dtype": "float32",
            "num_kv_blocks": 256,
        }
        self._settings |= options
        self._deployment, self._ray = deployment, ray

    def start(self, settings="same"):
        from outrider.cluster.backend import RayBackend
        from outrider.cluster.keeper import Successors

        backend = RayBackend(Successors(self._deployment, settings, 60.0))
        engine = Engine.start(EngineConfig.load(self._settings), backend)
        return engine, backend._keeper

    def lose(self, engine, keeper):
        """The sockets of a killed process are closed, and nothing else happens."""
        engine._closed.set()
        engine._thread.join()
        engine._host.target_group._hang_up()
        keeper.leave()

    def keepers(self):
        return [each["name"] for each in self._ray.util.list_named_actors(all_namespaces=True)]


def is_any_alive(processes):
    return any(os.path.exists(f"/proc/{each}") for each in processes)


def ranks_of(engine):
    return [each["process"] for each in engine.stats()["workers"] if each["state"] == "active"]


def spares_of(engine):
    return [each["process"] for each in engine.stats()["workers"] if each["state"] == "spare"]


def test_an_engine_takes_over_the_workers_of_the_one_before(cluster, tiny):
    """Two; the test of a keeper's death hands one worker on."""
    with engine_of(tiny.target) as local:
        plain = complete(local, PROMPTS, **SAMPLED)[0]
    server = Server(cluster, tiny.target, "app#both", tensor_parallel_size=2)
    first, keeper = server.start()
    ranks = ranks_of(first)
    assert len(ranks) == 2
    source = first._host.target_group._source
    wait_for(lambda: [each.verb for each in source.amounts()] == ["read", "read"])
    assert complete(first, PROMPTS, **SAMPLED)[0] == plain
    server.lose(first, keeper)
    second, keeper = server.start()
    assert ranks_of(second) == ranks
    assert second._host.vocab_size == first._host.vocab_size
    assert complete(second, PROMPTS, **SAMPLED)[0] == plain

    second.shutdown()
    wait_for(lambda: not server.keepers())


def test_the_death_of_a_keeper_costs_nothing(cluster, tiny):
    """Another one owns the workers: it replaces them, hands them on, and ends them."""
    server = Server(cluster, tiny.target, "app#keeper", resources={"spare_workers": True})
    first, link = server.start()
    wait_for(lambda: spares_of(first))
    spares = spares_of(first)
    ranks, plain = ranks_of(first), complete(first, PROMPTS, **SAMPLED)[0]
    (name,) = server.keepers()
    cluster.kill(cluster.get_actor(name, namespace="outrider"))
    assert complete(first, PROMPTS, **SAMPLED)[0] == plain
    wait_for(lambda: link.is_up and name not in server.keepers())
    wait_for(lambda: not is_any_alive(spares) and spares_of(first))  # the next keeper has others
    assert complete(first, PROMPTS, **SAMPLED)[0] == plain
    assert ranks_of(first) == ranks
    assert first.stats()["num_restarts"] == 0

    server.lose(first, link)
    second, _ = server.start()
    assert ranks_of(second) == ranks
    assert complete(second, PROMPTS, **SAMPLED)[0] == plain
    os.kill(ranks[0], signal.SIGKILL)
    wait_for(lambda: second.stats()["num_restarts"] == 1 and not second.stats()["recovering"])
    assert complete(second, PROMPTS, **SAMPLED)[0] == plain
    second.shutdown()
    wait_for(lambda: not server.keepers() and not is_any_alive(ranks_of(second)))


def test_workers_without_keeper_and_engine_end_and_free_their_place(cluster, tiny):
    server = Server(cluster, tiny.target, "app#orphans")
    first, link = server.start()
    ranks = ranks_of(first)
    (name,) = server.keepers()
    link._has_left = True  # the engine's process is gone before it can act
    cluster.kill(cluster.get_actor(name, namespace="outrider"))
    server.lose(first, link)
    wait_for(lambda: not is_any_alive(ranks))
    wait_for(lambda: cluster.available_resources().get("CPU") == 4)


def test_workers_that_cannot_continue_are_replaced(cluster, tiny):
    server = Server(cluster, tiny.target, "app#dead")
    first, keeper = server.start()
    (rank,) = ranks_of(first)
    server.lose(first, keeper)
    os.kill(rank, signal.SIGKILL)
    second, _ = server.start()
    assert ranks_of(second) != [rank]
    complete(second, PROMPTS, **SAMPLED)
    second.shutdown()
    wait_for(lambda: not server.keepers())


def test_workers_of_other_settings_and_of_living_engines_are_not_taken(cluster, tiny):
    server = Server(cluster, tiny.target, "app#other", resources={"cpus_per_worker": 2})
    first, keeper = server.start()
    second, _ = server.start()
    assert ranks_of(first) != ranks_of(second)
    assert len(server.keepers()) == 2
    server.lose(first, keeper)
    changed, _ = server.start("changed")  # has room as soon as the first one's workers end
    assert not set(ranks_of(changed)) & {*ranks_of(first), *ranks_of(second)}
    for engine in (second, changed):
        complete(engine, PROMPTS, **SAMPLED)
        engine.shutdown()
    wait_for(lambda: not server.keepers())


def test_a_keeper_without_an_engine_ends(cluster):
    from outrider.cluster.keeper import KeeperLink, Successors

    link = KeeperLink(Successors("app#lonely", "same", 0.5))
    assert link.recall() is None
    link.note(96)
    link.call("recall", timeout_s=60, may_start=True)
    assert link.recall() == 96
    link.leave()
    wait_for(lambda: not cluster.util.list_named_actors(all_namespaces=True))
