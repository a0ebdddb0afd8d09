"""The file of an n-gram table: there and back, and every way in which it can be wrong."""

from __future__ import annotations

import hashlib
import json
import struct

import numpy as np
import pytest

from outrider.drafters.lookup import ngram_file
from outrider.drafters.lookup.ngram_cache import ORDERS
from outrider.drafters.lookup.ngram_file import Arrays, load, read, save
from outrider.drafters.vocabulary import fingerprint
from outrider.errors import ConfigError, TableFileError
from outrider.tests.helpers.lookups import counts_of, drafter_of, propose, request_of

from ...helpers.engines import tokenizer_at

FIELD = "speculative_config.lookup_cache_static"


@pytest.fixture
def tokenizer(tmp_path):
    return tokenizer_at(tmp_path / "model", {"a": 0, "b": 1})


def write(path, tokenizer, tenant="", keys=((1, 2), (2, 3)), counts=(2, 1), pairs=None):
    pairs = [[3, 6], [4, 1], [9, 1]] if pairs is None else pairs
    arrays = Arrays(tenant, *(np.array(part, dtype=np.int32) for part in (keys, counts, pairs)))
    save(path, [arrays], fingerprint(tokenizer), {"kind": "static"})
    return path


@pytest.fixture
def file(tmp_path, tokenizer):
    return write(tmp_path / "corpus.ngrams", tokenizer)


def test_there_and_back(file, tokenizer):
    (arrays,) = load(file, FIELD, fingerprint(tokenizer), 50)
    assert counts_of(arrays) == {(1, 2): {3: 6, 4: 1}, (2, 3): {9: 1}}


def test_a_drafter_uses_it(file, tokenizer):
    section = {"decoding_type": "NGramCache", "lookup_cache_static": str(file)}
    drafter = drafter_of(section, 50, tokenizer)
    drafter.open([request_of("a", [7, 1, 2])])
    assert propose(drafter, ["a"], [5])[0].tokens.tolist() == [3]


def damage(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


WRONG = {
    "not one": (lambda data: b"GGUF" + data, "is not an n-gram table"),
    "empty": (lambda data: b"", "is not an n-gram table"),
    "only a beginning": (lambda data: data[:10], "truncated within its header"),
    "half a header": (lambda data: data[:60], "is truncated"),
    "truncated": (lambda data: data[:-4], "is truncated"),
    "too long": (lambda data: data + b"\0", "is damaged"),
    "another version": (lambda data: data[:8] + b"\x01" + data[9:], "has version 1; this"),
    "a flipped bit": (lambda data: damage(data, len(data) - 3), "checksum"),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG.keys())
def test_damage_is_named(file, tokenizer, change, words):
    file.write_bytes(change(file.read_bytes()))
    section = {"decoding_type": "NGramCache", "lookup_cache_static": str(file)}
    with pytest.raises(TableFileError, match=words) as caught:
        drafter_of(section, 50, tokenizer)
    assert caught.value.field == FIELD
    assert str(file) in caught.value.message


def test_every_flipped_bit_is_an_error(file, tokenizer):
    whole = write(file, tokenizer, "somebody").read_bytes()
    assert b"somebody" in whole
    mark = fingerprint(tokenizer)
    for at in range(len(whole)):
        for bit in range(8):
            flipped = whole[at] ^ 1 << bit
            file.write_bytes(whole[:at] + bytes([flipped]) + whole[at + 1 :])
            with pytest.raises(TableFileError):
                load(file, FIELD, mark, 50)


def sealed(header: bytes, payload: bytes) -> bytes:
    """A file whose checksum is right, whatever it says."""
    lengths = struct.pack("<8sIIQ", b"OUTRNGRM", 2, len(header), len(payload))
    digest = hashlib.sha256(lengths + header + payload).digest()
    return lengths + digest + header + payload


def test_a_sealed_file_is_a_file(file):
    header, payload = read(file, FIELD)
    content = ngram_file.asdict(header)
    assert sealed(json.dumps(content).encode(), bytes(payload)) == file.read_bytes()
    assert ngram_file.MAX_ORDER == ORDERS


HEADERS = {
    "a list": ([], "the header: expected a mapping"),
    "another key": ({"x": 1}, "x: Unexpected keyword argument"),
    "a key less": ({"facts": None}, "facts: it is required"),
    "a mark of another kind": ({"tokenizer": 3}, "tokenizer: expected a string"),
    "tables of another kind": ({"tables": {}}, "tables: expected a list"),
    "a table that is a number": ({"tables": [3]}, "tables.0: expected a mapping"),
    "order 0": ({"order": 0}, "tables.0.order"),
    "order 9": ({"order": 9}, "tables.0.order"),
    "a float": ({"num_keys": 2.0}, "tables.0.num_keys"),
    "a truth": ({"num_keys": True}, "tables.0.num_keys"),
    "less than none": ({"num_pairs": -1}, "tables.0.num_pairs"),
    "a list for a tenant": ({"tenant": ["x"]}, "tables.0.tenant"),
    "sizes that do not add up": ({"num_pairs": 2}, "sizes do not add up"),
}


@pytest.mark.parametrize(("change", "words"), HEADERS.values(), ids=HEADERS.keys())
def test_a_sound_checksum_over_a_bad_header(file, tokenizer, change, words):
    found, payload = read(file, FIELD)
    header = ngram_file.asdict(found)
    for key, value in change.items() if change else ():
        if key in header["tables"][0]:
            header["tables"][0][key] = value
        elif value is None:
            del header[key]
        else:
            header[key] = value
    file.write_bytes(sealed(json.dumps(header if change else change).encode(), bytes(payload)))
    with pytest.raises(TableFileError, match=words) as caught:
        load(file, FIELD, fingerprint(tokenizer), 50)
    assert caught.value.field == FIELD
    assert str(file) in caught.value.message


@pytest.mark.parametrize("header", [b"!", b"\xff", b"[" * 10**5, b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_sound_checksum_over_no_header(file, tokenizer, header):
    file.write_bytes(sealed(header, b""))
    with pytest.raises(TableFileError, match="damaged header"):
        load(file, FIELD, fingerprint(tokenizer), 50)


CONTENTS = {
    "less than none follow": ({"counts": [4, -1]}, "a key that nothing follows"),
    "nothing follows": ({"counts": [3, 0]}, "a key that nothing follows"),
    "too few": ({"counts": [1, 1]}, "do not add up"),
    "more than an int32 holds": ({"counts": [2**31 - 1, 2**31 - 1]}, "do not add up"),
    "negative times": ({"pairs": [[3, -6], [4, 1], [9, 1]]}, "less than once"),
    "never": ({"pairs": [[3, 6], [4, 0], [9, 1]]}, "less than once"),
    "a negative token": ({"keys": [[1, 2], [2, -3]]}, "outside the vocabulary"),
    "a padded key": ({"keys": [[1, 2], [2, -1]]}, "outside the vocabulary"),
    "a token too large": ({"pairs": [[50, 6], [4, 1], [9, 1]]}, "outside the vocabulary of 50"),
}


@pytest.mark.parametrize("key", ["lookup_cache_static", "lookup_cache_dynamic"])
@pytest.mark.parametrize(("parts", "words"), CONTENTS.values(), ids=CONTENTS.keys())
def test_a_sound_checksum_over_bad_tables(file, tokenizer, key, parts, words):
    write(file, tokenizer, **parts)
    with pytest.raises(TableFileError, match=f"tables.0: .*{words}") as caught:
        drafter_of({"decoding_type": "NGramCache", key: str(file)}, 50, tokenizer)
    assert caught.value.field == f"speculative_config.{key}"
    assert str(file) in caught.value.message


def test_what_a_tenant_said_is_not_for_everybody(file, tokenizer):
    write(file, tokenizer, "somebody")
    section = {"decoding_type": "NGramCache", "lookup_cache_static": str(file)}
    with pytest.raises(TableFileError, match="not for everybody") as caught:
        drafter_of(section, 50, tokenizer)
    assert caught.value.field == FIELD


def test_another_tokenizer(file, tmp_path):
    other = tokenizer_at(tmp_path / "other", {"a": 1, "b": 0})
    section = {"decoding_type": "NGramCache", "lookup_cache_static": str(file)}
    with pytest.raises(TableFileError, match="another tokenizer"):
        drafter_of(section, 50, other)


def test_missing_files(tmp_path, tokenizer):
    section = {"decoding_type": "NGramCache", "lookup_cache_static": str(tmp_path / "none")}
    with pytest.raises(TableFileError, match="cannot be read"):
        drafter_of(section, 50, tokenizer)
    with pytest.raises(ConfigError, match="tokenizer"):
        drafter_of(section, 50, tmp_path)


def test_the_dynamic_table_outlives_the_engine(tmp_path, tokenizer):
    path = tmp_path / "past.ngrams"
    section = {"decoding_type": "NGramCache", "lookup_cache_dynamic": str(path)}
    first = drafter_of(section, 50, tokenizer)
    first.open([request_of("a", [1, 2, 3, 4, 5] * 3, "x")])
    first.close(["a"])
    first.shutdown()
    assert {each.tenant for each in read(path, "f")[0].tables} == {"x"}
    assert [each.name for each in tmp_path.iterdir() if each.name != "model"] == [path.name]
    second = drafter_of(section, 50, tokenizer)
    second.open([request_of("b", [9, 1, 2], "x"), request_of("c", [9, 1, 2], "y")])
    drafts = propose(second, ["b", "c"], [3, 3])
    assert [draft.tokens.tolist() for draft in drafts] == [[3, 4, 5], []]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TableFileError, match="lookup_cache_dynamic"):
        drafter_of(section, 50, tokenizer)


@pytest.mark.parametrize("place", ["no/such/folder", "a/file/below", "folder"])
def test_a_dynamic_table_that_cannot_be_written_is_said_at_the_start(tmp_path, tokenizer, place):
    (tmp_path / "a").write_text("a file")
    (tmp_path / "folder").mkdir()
    path = tmp_path / place
    section = {"decoding_type": "NGramCache", "lookup_cache_dynamic": str(path)}
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        drafter_of(section, 50, tokenizer)
    assert caught.value.field == "speculative_config.lookup_cache_dynamic"
    assert str(path) in caught.value.message
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "folder", "model"]
