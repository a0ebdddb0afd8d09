"""The file of an n-gram table: there and back, and every way in which it can be wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest

from outrider.drafters.ngram_file import Arrays, fingerprint, load, read_header, save
from outrider.errors import ConfigError, TableFileError

from .lookups import counts_of, drafter_of, propose, request_of

FIELD = "speculative_config.lookup_cache_static"


@pytest.fixture
def tokenizer(tmp_path):
    return tokenizer_at(tmp_path / "model", {"a": 0, "b": 1})


def tokenizer_at(folder, vocabulary):
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return folder


@pytest.fixture
def file(tmp_path, tokenizer):
    keys, counts, pairs = [[1, 2], [2, 3]], [2, 1], [[3, 6], [4, 1], [9, 1]]
    arrays = Arrays("", *(np.array(part, dtype=np.int32) for part in (keys, counts, pairs)))
    path = tmp_path / "corpus.ngrams"
    save(path, [arrays], fingerprint(tokenizer), {"kind": "static"})
    return path


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
    "half a header": (lambda data: data[:60], "truncated within its header"),
    "truncated": (lambda data: data[:-4], "is truncated"),
    "another version": (lambda data: data[:8] + b"\x07" + data[9:], "has version 7"),
    "no header": (lambda data: data[:16] + b"!" + data[17:], "damaged header"),
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
    whole = file.read_bytes()
    for at in range(0, len(whole), 7):
        file.write_bytes(damage(whole, at))
        try:
            load(file, FIELD, fingerprint(tokenizer), 50)
        except TableFileError:
            continue
        assert b'"facts"' in whole[at - 40 : at + 40] or whole[at : at + 1].isspace(), at


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


def test_tokens_outside_the_vocabulary(file, tokenizer):
    with pytest.raises(TableFileError, match="outside the vocabulary of 9"):
        load(file, FIELD, fingerprint(tokenizer), 9)


def test_the_dynamic_table_outlives_the_engine(tmp_path, tokenizer):
    path = tmp_path / "past.ngrams"
    section = {"decoding_type": "NGramCache", "lookup_cache_dynamic": str(path)}
    first = drafter_of(section, 50, tokenizer)
    first.open([request_of("a", [1, 2, 3, 4, 5] * 3, "x")])
    first.close(["a"])
    first.shutdown()
    assert {each["tenant"] for each in read_header(path, "f")[0]["tables"]} == {"x"}
    second = drafter_of(section, 50, tokenizer)
    second.open([request_of("b", [9, 1, 2], "x"), request_of("c", [9, 1, 2], "y")])
    drafts = propose(second, ["b", "c"], [3, 3])
    assert [draft.tokens.tolist() for draft in drafts] == [[3, 4, 5], []]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TableFileError, match="lookup_cache_dynamic"):
        drafter_of(section, 50, tokenizer)
