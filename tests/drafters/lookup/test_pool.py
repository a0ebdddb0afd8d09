"""Shared pools: what is published reaches the others once, within bounds, and no other tenant."""

from __future__ import annotations

import hashlib
import stat

import msgpack
import pytest

from outrider.config import EngineConfig, NGramConfig
from outrider.drafters.drafting import Drafting
from outrider.drafters.lookup.ngram import ngram
from outrider.drafters.lookup.pool import LocalLink, PoolStore, pack, unpack
from outrider.errors import ConfigError, PoolSnapshotError
from outrider.scheduler.types import ints

from ...helpers.engines import complete, engine_of, plain_outputs, random_prompts, tokenizer_at
from ...helpers.toy import VOCAB, continuation


def texts(link: LocalLink, tenant: str) -> list[list[int]]:
    return [window.tolist() for window in link.poll(tenant)]


def test_windows_reach_the_others_once():
    store = PoolStore("f", 1000)
    first, second = LocalLink(store), LocalLink(store)
    first.publish("x", ints([1, 2, 3]))
    second.publish("x", ints([4, 5]))
    first.publish("y", ints([6]))
    assert texts(first, "x") == [[4, 5]]
    assert texts(second, "x") == [[1, 2, 3]]
    assert texts(first, "x") == texts(second, "x") == []
    first.publish("x", ints([7]))
    assert texts(second, "x") == [[7]]
    assert texts(second, "y") == [[6]]
    assert texts(LocalLink(store), "x") == [[1, 2, 3], [4, 5], [7]]  # a newcomer gets all


def test_a_window_that_comes_again_is_kept_once():
    store = PoolStore("f", 1000)
    first, second = LocalLink(store), LocalLink(store)
    for _ in range(3):
        first.publish("x", ints([1, 2, 3]))
    assert store.num_tokens == 3
    assert texts(second, "x") == [[1, 2, 3]]


def test_memory_is_bounded_and_the_longest_unpublished_go_first():
    store = PoolStore("f", 6)
    link, reader = LocalLink(store), LocalLink(store)
    for window in ([1, 2], [3, 4], [5, 6], [1, 2], [7, 8]):  # [1, 2] is new again
        link.publish("x", ints(window))
    assert store.num_tokens == 6
    assert texts(reader, "x") == [[1, 2], [5, 6], [7, 8]]
    link.publish("y", ints(range(6)))
    assert store.num_tokens == 6
    assert texts(LocalLink(store), "x") == []


def test_answers_are_bounded_and_go_on_where_they_ended():
    store = PoolStore("f", 10**6)
    for index in range(10):
        store.publish("a", "x", pack(ints([index] * 2**14)))
    sizes, cursors = [], {"x": 0}
    while True:
        answer = store.exchange("b", (), store.epoch, cursors)
        if not answer.windows:
            break
        sizes.append(len(answer.windows))
        cursors = answer.cursors
    assert sizes == [4, 4, 2]


def test_another_epoch_counts_from_the_start():
    store = PoolStore("f", 100)
    store.publish("a", "x", pack(ints([1])))
    answer = store.exchange("b", (), "of a store that was lost", {"x": 99})
    assert [unpack(tokens).tolist() for _, tokens in answer.windows] == [[1]]
    assert answer.epoch == store.epoch


def test_a_snapshot_is_read_again(tmp_path):
    path = str(tmp_path / "folder" / "pool.bin")
    store = PoolStore("f", 100)
    link = LocalLink(store, path)
    link.publish("x", ints([1, 2, 3]))
    link.publish("y", ints([4]))
    link.shutdown()
    assert stat.S_IMODE((tmp_path / "folder" / "pool.bin").stat().st_mode) == 0o600
    assert [each.name for each in (tmp_path / "folder").iterdir()] == ["pool.bin"]
    again = LocalLink(PoolStore("f", 100), path)
    assert texts(again, "x") == [[1, 2, 3]]
    assert texts(again, "y") == [[4]]


def test_a_snapshot_larger_than_the_pool_keeps_its_newest(tmp_path):
    path = str(tmp_path / "pool.bin")
    store = PoolStore("f", 100)
    for index in range(10):
        store.publish("", "x", pack(ints([index])))
    store.save(path)
    assert texts(LocalLink(PoolStore("f", 3), path), "x") == [[7], [8], [9]]


def test_snapshots_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "pool.bin"
    store = PoolStore("f", 100)
    store.publish("", "x", pack(ints([1, 2])))
    store.save(str(path))
    good = path.read_bytes()
    with pytest.raises(PoolSnapshotError, match="another tokenizer"):
        PoolStore("g", 100).load(str(path))
    bad = {
        "checksum": [good[:-1], good[:-1] + b"\x07", good[:20], good + b"x"],
        "not a pool snapshot": [b"", b"PK\x03\x04 something else"],
    }
    for message, contents in bad.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(PoolSnapshotError, match=message) as caught:
                LocalLink(PoolStore("f", 100), str(path))
            assert caught.value.field == "speculative_config.pool_snapshot"
    with pytest.raises(PoolSnapshotError, match="cannot be read"):
        PoolStore("f", 100).load(str(tmp_path))


def sealed(body: bytes) -> bytes:
    """A snapshot whose checksum is right, whatever it holds."""
    return b"outrider-pool\n" + hashlib.sha256(body).digest() + body


GOOD = {
    "version": 2,
    "fingerprint": "f",
    "is_common": False,
    "windows": [["x", pack(ints([1, 2]))], ["\ud800", pack(ints([3]))]],
}


def test_a_sealed_snapshot_is_one(tmp_path):
    path = tmp_path / "pool.bin"
    path.write_bytes(sealed(msgpack.packb(GOOD, unicode_errors="surrogatepass")))
    link = LocalLink(PoolStore("f", 100), str(path))
    assert texts(link, "x") == [[1, 2]]
    whole = path.read_bytes()
    link.shutdown()  # also where a tenant's name is no proper text
    assert path.read_bytes() == whole


CONTENTS = {
    "nothing": (b"", "damaged"),
    "half a map": (b"\x82\x01", "damaged"),
    "a reserved byte": (b"\xc1", "damaged"),
    "very deep": (b"\x91" * 10**5, "damaged"),
    "keys that are lists": (b"\x81\x90\x01", "damaged"),
    "no text": (b"\xa1\xff", "damaged"),
    "a list": ([], "no keys"),
    "a number": (3, "no keys"),
    "no version": ({"version": None}, "has version None, not 2"),
    "another version": ({"version": 1}, "has version 1, not 2"),
    "no fingerprint": ({"fingerprint": None}, "another tokenizer"),
    "a list for it": ({"fingerprint": ["f"]}, "another tokenizer"),
    "a replica's": ({"is_common": True}, "pool_scope"),
    "no windows": ({"windows": None}, "windows: a list"),
    "a map of them": ({"windows": {"x": b""}}, "windows: a list"),
    "a number for one": ({"windows": [["x", b"\0\0\0\0"], 3]}, "windows.1:"),
    "three parts": ({"windows": [["x", b"\0\0\0\0", 0]]}, "windows.0:"),
    "a number for a tenant": ({"windows": [[3, b"\0\0\0\0"]]}, "windows.0:"),
    "text for tokens": ({"windows": [["x", "abcd"]]}, "windows.0:"),
    "half a token": ({"windows": [["x", b"abc"]]}, "windows.0:"),
    "no tokens": ({"windows": [["x", b""]]}, "windows.0:"),
    "a negative token": ({"windows": [["x", pack(ints([1, -1]))]]}, "windows: tokens outside"),
    "a token too large": ({"windows": [["x", pack(ints([50]))]]}, "vocabulary of 50"),
}


@pytest.mark.parametrize(("content", "words"), CONTENTS.values(), ids=CONTENTS.keys())
def test_a_sound_checksum_over_bad_content(tmp_path, content, words):
    path = tmp_path / "pool.bin"
    if isinstance(content, dict):
        content = {**GOOD, "windows": [], **content}
    path.write_bytes(sealed(content if isinstance(content, bytes) else msgpack.packb(content)))
    store = PoolStore("f", 100, 50)
    with pytest.raises(PoolSnapshotError, match=words) as caught:
        LocalLink(store, str(path))
    assert caught.value.field == "speculative_config.pool_snapshot"
    assert str(path) in caught.value.message
    assert store.num_tokens == 0


def test_a_pool_without_tenants_is_no_other_scopes(tmp_path):
    path = str(tmp_path / "pool.bin")
    store = PoolStore("f", 100, is_common=True)
    store.publish("", "", pack(ints([1])))
    store.save(path)
    assert texts(LocalLink(PoolStore("f", 100, is_common=True), path), "") == [[1]]
    with pytest.raises(PoolSnapshotError, match="pool_scope"):
        PoolStore("f", 100).load(path)


@pytest.mark.parametrize("place", ["file/below/pool.bin", "folder"])
def test_a_snapshot_that_cannot_be_written_is_said_at_the_start(tmp_path, place):
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot be (read|written)") as caught:
        LocalLink(PoolStore("f", 100), str(tmp_path / place))
    assert caught.value.field == "speculative_config.pool_snapshot"
    assert place in caught.value.message
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


def test_a_snapshot_that_fails_leaves_nothing_behind(tmp_path):
    link = LocalLink(PoolStore("f", 100), str(tmp_path / "pool.bin"))
    link.publish("x", ints([1]))
    (tmp_path / "pool.bin").mkdir()  # since the start
    with pytest.raises(OSError, match="regular file"):
        link.shutdown()
    assert [each.name for each in tmp_path.iterdir()] == ["pool.bin"]


def drafting_of(store: PoolStore, **options) -> Drafting:
    config = NGramConfig(pool_scope="cluster", max_draft_len=6, **options)
    return Drafting(ngram(config, LocalLink(store)), VOCAB)


def test_text_served_by_one_is_drafted_by_the_other(make_loop, request_of, drive):
    store = PoolStore("f", 10_000)
    wanted = continuation((1, 2, 3), 60)
    gained = {}
    for name, tenant in (("first", "x"), ("stranger", "y"), ("second", "x")):
        drafting = drafting_of(store)  # an engine of its own
        loop = make_loop(200, drafting=drafting)
        loop.add(request_of(name, (1, 2, 3), 60, tenant=tenant))
        assert drive(loop) == {name: wanted}
        assert drafting.stats.faults == 0
        gained[name] = drafting.stats.num_acc_tokens
    assert gained["second"] > gained["first"] + 20
    assert gained["stranger"] == gained["first"]


def test_tables_stay_within_their_bound(make_loop, request_of, drive):
    drafting = drafting_of(PoolStore("f", 10_000), pool_max_patterns=1024)
    loop = make_loop(400, drafting=drafting)
    for index in range(12):
        prompt = (index, index + 1, 5)
        loop.add(request_of(str(index), prompt, 150, tenant=str(index % 3)))
        assert drive(loop)[str(index)] == continuation(prompt, 150)
        pools = drafting.drafter._pools
        assert sum(map(len, pools.values())) <= 1024
    assert list(pools)[-1] == "2"


def test_a_link_that_fails_costs_its_text_only(make_loop, request_of, drive):
    class Failing(LocalLink):
        def take_fault(self):
            return ConnectionError("gone")

    config = NGramConfig(pool_scope="cluster", max_draft_len=6)
    drafting = Drafting(ngram(config, Failing(PoolStore("f", 100))), VOCAB)
    loop = make_loop(drafting=drafting)
    loop.add(request_of("a", (1, 2, 3), 40))
    assert drive(loop) == {"a": continuation((1, 2, 3), 40)}
    assert drafting.stats.faults > 0


@pytest.fixture
def tokenizer(tmp_path):
    """Of the tiny models, which have none."""
    return str(tokenizer_at(tmp_path / "tokenizer", {str(index): index for index in range(96)}))


@pytest.mark.parametrize("scope", ["tenant", "replica", "cluster"])
def test_the_engine_emits_what_it_does_without(tiny, tmp_path, tokenizer, scope):
    prompts = random_prompts(6, 96)
    section = {
        "decoding_type": "NGram",
        "pool_scope": scope,
        "pool_snapshot": str(tmp_path / "pool.bin"),
    }
    for sampling in ({"temperature": 0.0}, {"temperature": 0.9}):
        (plain,) = plain_outputs(tiny.target, prompts, sampling)
        for start in ("cold", "warm"):
            with engine_of(tiny.target, section, tokenizer=tokenizer) as engine:
                assert complete(engine, prompts, at_once=2, **sampling)[0] == plain
                stats = engine.stats()["drafters"]["ngram"]
                assert stats["faults"] == 0
                if start == "warm":
                    assert stats["num_acc_tokens"] > 40


def test_a_snapshot_belongs_to_the_tokenizer_that_is_used(tiny, tmp_path, tokenizer):
    section = {
        "decoding_type": "NGram",
        "pool_scope": "tenant",
        "pool_snapshot": str(tmp_path / "pool.bin"),
    }
    with engine_of(tiny.target, section, tokenizer=tokenizer):
        pass
    unigram = [[str(95 - index), -1.0] for index in range(96)]
    added = [(95, "<pad>")]
    same = {str(index): index for index in range(96)}
    for name, vocabulary, extra in (("unigram", unigram, []), ("added", same, added)):
        other = str(tokenizer_at(tmp_path / name, vocabulary, extra))
        with (
            pytest.raises(PoolSnapshotError, match="another tokenizer"),
            engine_of(tiny.target, section, tokenizer=other),
        ):
            pass


def test_a_snapshot_of_another_model_stops_the_engine(tiny, tmp_path, tokenizer):
    path = tmp_path / "pool.bin"
    PoolStore("of another", 100).save(str(path))
    section = {"decoding_type": "NGram", "pool_scope": "tenant", "pool_snapshot": str(path)}
    with (
        pytest.raises(PoolSnapshotError, match="tokenizer"),
        engine_of(tiny.target, section, tokenizer=tokenizer),
    ):
        pass


def test_without_a_tokenizer_nothing_is_kept(tiny, tmp_path):
    section = {"decoding_type": "NGram", "pool_scope": "cluster"}
    with engine_of(tiny.target, section):  # alone, and nothing is saved
        pass
    section["pool_snapshot"] = str(tmp_path / "pool.bin")
    with (
        pytest.raises(ConfigError, match="speculative_config.pool_snapshot needs one") as caught,
        engine_of(tiny.target, section),
    ):
        pass
    assert caught.value.field == "tokenizer"


def test_scopes_that_contradict_are_refused():
    for section, message in (
        ({"is_public_pool": True, "pool_scope": "cluster"}, "is_public_pool"),
        ({"pool_snapshot": "x"}, "pool_snapshot"),
        ({"pool_scope": "world"}, "pool_scope"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.load(
                {"model": "m", "speculative_config": {"decoding_type": "NGram", **section}}
            )
    section = {"decoding_type": "NGram", "is_public_pool": True}
    for more in ({}, {"pool_scope": "tenant"}):
        config = EngineConfig.load({"model": "m", "speculative_config": {**section, **more}})
        assert config.speculative_config == NGramConfig(pool_scope="tenant")
