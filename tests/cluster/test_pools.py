"""Pools over Ray: two engines draft from each other's text, and a lost pool costs speed only."""

from __future__ import annotations

import time

import pytest

from outrider.cluster.host import vocabulary_fingerprint
from outrider.errors import PoolSnapshotError

from ..engines import complete, engine_of, random_prompts

pytestmark = pytest.mark.ray
PROMPTS = random_prompts(4, 96)
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 40}
SECTION = {"decoding_type": "NGram", "pool_scope": "cluster", "max_draft_len": 4}


@pytest.fixture(scope="module")
def cluster():
    """A Ray of four CPUs, whatever the machine has."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def plain(tiny):
    with engine_of(tiny.target) as engine:
        return complete(engine, PROMPTS, **SAMPLED)[0]


@pytest.fixture
def fingerprint(tiny, cluster):
    """Of the tiny model; its pool is gone afterwards."""
    from pathlib import Path

    found = vocabulary_fingerprint(Path(tiny.target), 96)
    yield found
    kill_pool(cluster, found)


def kill_pool(cluster, fingerprint: str) -> bool:
    from outrider.cluster.pools import NAMESPACE, actor_name

    try:
        cluster.kill(cluster.get_actor(actor_name(fingerprint), namespace=NAMESPACE))
    except ValueError:
        return False
    return True


def accepted(engine) -> int:
    return engine.stats()["drafters"]["ngram"]["num_acc_tokens"]


def until(condition, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def test_text_served_by_one_engine_is_drafted_by_the_other(cluster, tiny, plain, fingerprint):
    with (
        engine_of(tiny.target, SECTION, executor="ray") as first,
        engine_of(tiny.target, SECTION, executor="ray") as second,
    ):
        assert complete(first, PROMPTS, **SAMPLED)[0] == plain

        def drafted() -> bool:
            before = accepted(second)
            assert complete(second, PROMPTS[:1], **SAMPLED)[0]["0"] == plain["0"]
            return accepted(second) - before > 20

        assert accepted(second) == 0
        until(drafted)
        assert second.stats()["drafters"]["ngram"]["faults"] == 0


def test_a_killed_pool_is_a_fault_and_comes_back(cluster, tiny, plain, fingerprint):
    with engine_of(tiny.target, SECTION, executor="ray") as engine:

        def strike(count, delta):
            if count == 5:
                assert kill_pool(cluster, fingerprint)

        assert complete(engine, PROMPTS, on_delta=strike, **SAMPLED)[0] == plain

        def noticed() -> bool:
            assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
            return engine.stats()["drafters"]["ngram"]["faults"] == 1

        until(noticed)
        # The pool is made again, and what is served then reaches others.
        with engine_of(tiny.target, SECTION, executor="ray") as other:

            def drafted() -> bool:
                before = accepted(other)
                assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
                assert complete(other, PROMPTS[:1], **SAMPLED)[0]["0"] == plain["0"]
                return accepted(other) - before > 20

            until(drafted)


def test_a_snapshot_survives_the_pool(cluster, tiny, plain, fingerprint, tmp_path):
    section = {**SECTION, "pool_snapshot": str(tmp_path / "pool.bin")}
    with engine_of(tiny.target, section, executor="ray") as engine:
        assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
    assert (tmp_path / "pool.bin").exists()
    assert kill_pool(cluster, fingerprint)
    until(lambda: not kill_pool(cluster, fingerprint))
    with engine_of(tiny.target, section, executor="ray") as engine:

        def drafted() -> bool:
            before = accepted(engine)
            assert complete(engine, PROMPTS[:1], **SAMPLED)[0]["0"] == plain["0"]
            return accepted(engine) - before > 20

        until(drafted)


def test_a_damaged_snapshot_stops_the_engine(cluster, tiny, fingerprint, tmp_path):
    (tmp_path / "pool.bin").write_bytes(b"nonsense")
    section = {**SECTION, "pool_snapshot": str(tmp_path / "pool.bin")}
    with (
        pytest.raises(PoolSnapshotError, match="pool_snapshot"),
        engine_of(tiny.target, section, executor="ray"),
    ):
        pass
