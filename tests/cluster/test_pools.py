"""Pools over Ray: engines draft from each other's text; a pool lost or slow costs speed only."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from outrider.config import NGramConfig
from outrider.drafters.drafting import Drafting
from outrider.drafters.lookup.ngram import ngram
from outrider.drafters.lookup.pool import PoolStore
from outrider.drafters.vocabulary import fingerprint as fingerprint_of
from outrider.errors import ConfigError, PoolSnapshotError
from outrider.scheduler.types import ints

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts, tokenizer_at
from ..helpers.toy import VOCAB, continuation

pytestmark = pytest.mark.ray
PROMPTS = random_prompts(4, 96)
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 40}
SECTION = {"decoding_type": "NGram", "pool_scope": "cluster", "max_draft_len": 4}


@pytest.fixture(scope="module")
def plain(tiny):
    return plain_outputs(tiny.target, PROMPTS, SAMPLED)[0]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Of engines: a tokenizer too, which the tiny models lack."""
    words = {str(index): index for index in range(96)}
    folder = tokenizer_at(tmp_path_factory.mktemp("words") / "tokenizer", words)
    return {"executor": "ray", "tokenizer": str(folder)}


@pytest.fixture
def fingerprint(options, cluster):
    """Of the tiny models; their pool is gone afterwards."""
    found = fingerprint_of(Path(options["tokenizer"]), 96)
    yield found
    kill_pool(cluster, found)


@pytest.fixture
def mark(request, cluster):
    """Of no model, for links without an engine."""
    yield request.node.name
    kill_pool(cluster, request.node.name)


@pytest.fixture
def link_of(mark, monkeypatch):
    """Links that exchange when they are told to, and never by themselves."""
    from outrider.cluster import pools

    monkeypatch.setattr(pools, "EXCHANGE_EVERY_S", 1e6)
    links = []

    def make(max_tokens: int = 1000, snapshot: str | None = None):
        links.append(pools.RayPoolLink(mark, max_tokens, VOCAB, snapshot))
        return links[-1]

    yield make
    for link in links:
        link._snapshot = None
        link._closed.set()


def texts(link, tenant: str) -> list[list[int]]:
    """What the link has of a tenant after one more exchange."""
    link.poll(tenant)
    link._exchange()
    return [window.tolist() for window in link.poll(tenant)]


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


@pytest.mark.slow
def test_a_killed_pool_is_a_fault_and_comes_back(cluster, tiny, plain, fingerprint, options):
    with engine_of(tiny.target, SECTION, **options) as engine:

        def strike(count, delta):
            if count == 5:
                assert kill_pool(cluster, fingerprint)

        assert complete(engine, PROMPTS, on_delta=strike, **SAMPLED)[0] == plain

        def noticed() -> bool:
            assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
            return engine.stats()["drafters"]["ngram"]["faults"] == 1

        until(noticed)
        # The pool is made again, and what is served then reaches others.
        with engine_of(tiny.target, SECTION, **options) as other:

            def drafted() -> bool:
                before = accepted(other)
                assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
                assert complete(other, PROMPTS[:1], **SAMPLED)[0]["0"] == plain["0"]
                return accepted(other) - before > 20

            until(drafted)


@pytest.mark.slow
def test_a_snapshot_survives_the_pool(cluster, tiny, plain, fingerprint, options, tmp_path):
    section = {**SECTION, "pool_snapshot": str(tmp_path / "pool.bin")}
    with engine_of(tiny.target, section, **options) as engine:
        assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
    assert (tmp_path / "pool.bin").exists()
    assert kill_pool(cluster, fingerprint)
    until(lambda: not kill_pool(cluster, fingerprint))
    with engine_of(tiny.target, section, **options) as engine:

        def drafted() -> bool:
            before = accepted(engine)
            assert complete(engine, PROMPTS[:1], **SAMPLED)[0]["0"] == plain["0"]
            return accepted(engine) - before > 20

        until(drafted)


@pytest.mark.slow
def test_a_damaged_snapshot_stops_the_engine(cluster, tiny, fingerprint, options, tmp_path):
    (tmp_path / "pool.bin").write_bytes(b"nonsense")
    section = {**SECTION, "pool_snapshot": str(tmp_path / "pool.bin")}
    with (
        pytest.raises(PoolSnapshotError, match="pool_snapshot"),
        engine_of(tiny.target, section, **options),
    ):
        pass


def test_a_snapshot_that_cannot_be_written_is_said_at_the_start(link_of, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        link_of(snapshot=str(tmp_path / "file" / "pool.bin"))
    assert caught.value.field == "speculative_config.pool_snapshot"


def test_text_is_with_the_others_well_within_a_second(link_of):
    first, second = link_of(), link_of()
    first.publish("x", ints([1, 2, 3]))
    first._exchange()
    assert texts(second, "x") == [[1, 2, 3]]  # after one exchange of each
    assert texts(second, "x") == texts(first, "x") == []


def test_exchanges_are_frequent():
    from outrider.cluster.pools import EXCHANGE_EVERY_S

    assert 2 * EXCHANGE_EVERY_S <= 0.5


def test_the_actor_forgets_what_was_published_longest_ago(link_of):
    first, second = link_of(6), link_of(6)
    for window in ([1, 2], [3, 4], [5, 6]):
        first.publish("x", ints(window))
    first._exchange()
    second.publish("x", ints([1, 2]))  # new again, whoever says it
    second._exchange()
    first.publish("x", ints([7, 8]))
    first._exchange()
    assert texts(link_of(6), "x") == [[1, 2], [5, 6], [7, 8]]
    second.publish("y", ints(range(6)))
    second._exchange()
    assert texts(link_of(6), "x") == []
    assert texts(link_of(6), "y") == [[0, 1, 2, 3, 4, 5]]


def test_the_actor_keeps_tenants_apart(link_of):
    first, second = link_of(), link_of()
    for tenant, window in (("x", [1, 2]), ("y", [1, 2]), ("y", [3]), ("", [4])):
        first.publish(tenant, ints(window))
    first._exchange()
    assert texts(second, "x") == [[1, 2]]
    assert texts(second, "") == [[4]]
    assert texts(second, "stranger") == []
    assert texts(second, "y") == [[1, 2], [3]]


def test_a_pool_that_hangs_costs_speed_only(
    cluster, mark, tmp_path, monkeypatch, make_loop, request_of, drive
):
    from outrider.cluster import pools

    stuck, waiters = tmp_path / "stuck", []
    stuck.touch()

    class Stuck(pools.PoolStore):
        def exchange(self, *args):
            while stuck.exists():
                time.sleep(0.02)
            return super().exchange(*args)

    def told(call):
        def wait(*args, **options):
            waiters.append(threading.current_thread().name)
            return call(*args, **options)

        return wait

    name = {"name": pools.actor_name(mark), "namespace": pools.NAMESPACE, "num_cpus": 0}
    cluster.remote(Stuck).options(**name, lifetime="detached").remote(mark, 10**4, VOCAB)
    for verb in ("get", "wait"):
        monkeypatch.setattr(cluster, verb, told(getattr(cluster, verb)))
    link = pools.RayPoolLink(mark, 10**4, VOCAB, timeout_s=0.3)
    config = NGramConfig(pool_scope="cluster", max_draft_len=6)
    drafting = Drafting(ngram(config, link), VOCAB)
    loop = make_loop(200, drafting=drafting)

    def serve() -> None:
        name = str(time.monotonic_ns())
        loop.add(request_of(name, (1, 2, 3), 40, tenant="x"))
        assert drive(loop) == {name: continuation((1, 2, 3), 40)}

    until(lambda: serve() or drafting.stats.faults)
    unanswered, num_waits = link._unanswered, len(waiters)
    assert unanswered is not None
    for _ in range(2 * pools.MAX_HELD_TOKENS // 1024):
        link.publish("x", ints([1] * 1024))
    until(lambda: serve() or len(waiters) > num_waits + 2)
    assert link._unanswered is unanswered  # and no other call was made
    assert link._outbox_tokens <= pools.MAX_HELD_TOKENS
    assert set(waiters) == {"outrider-pool"}  # the steps' thread never waited
    assert drafting.stats.faults == 1
    assert drafting.stats.num_acc_tokens > 0  # from what it served itself

    stuck.unlink()
    other = pools.RayPoolLink(mark, 10**4, VOCAB)
    link.publish("x", ints([7, 8, 9]))
    until(lambda: [7, 8, 9] in [window.tolist() for window in other.poll("x")])
    drafting.shutdown()
    other.shutdown()


def test_a_snapshot_that_goes_bad_is_a_fault_once(cluster, mark, link_of, tmp_path, caplog):
    path = tmp_path / "pool.bin"
    link = link_of(snapshot=str(path))
    link.publish("x", ints([1]))
    link._exchange()
    link._save()
    path.write_bytes(b"nonsense")
    faults: list[Exception] = []

    def is_back() -> bool:
        link._work()
        faults.extend(iter(link.take_fault, None))
        return bool(faults) and not link._is_down

    for num_snapshot_faults in (1, 0):  # said once, though it is still bad when that is lost too
        assert kill_pool(cluster, mark)
        link.poll("x")
        until(is_back)
        assert len(faults) == 1 + num_snapshot_faults
        assert sum(isinstance(each, PoolSnapshotError) for each in faults) == num_snapshot_faults
        faults.clear()
    assert len([each for each in caplog.records if "without its snapshot" in each.message]) == 1
    link.publish("x", ints([2]))
    link._exchange()
    assert texts(link_of(), "x") == [[2]]
    link._save()
    PoolStore(mark, 100, VOCAB).load(str(path))
