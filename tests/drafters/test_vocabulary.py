"""What ids mean: one fingerprint for all kinds of vocabulary, and where two of them differ."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from outrider.drafters.vocabulary import Translation, differing, fingerprint, read, translation
from outrider.errors import CheckpointError

from ..helpers.engines import tokenizer_at


@pytest.fixture
def folder_of(tmp_path):
    return lambda *args, **model: tokenizer_at(
        tmp_path / str(len(list(tmp_path.iterdir()))), *args, **model
    )


def test_equal_where_ids_mean_the_same(folder_of):
    first = folder_of({"a": 0, "b": 1}, [(2, "<s>")])
    same = [
        folder_of({"b": 1, "a": 0}, [(2, "<s>")]),
        folder_of({"a": 0, "b": 1, "<s>": 2}, [(2, "<s>")]),
        folder_of([["a", -1.0], ["b", -2.5]], [(2, "<s>")]),
        folder_of({"a": 0, "b": 1}, [(2, "<s>")], merges=["a b"]),
    ]
    others = [
        folder_of({"a": 1, "b": 0}, [(2, "<s>")]),
        folder_of({"a": 0, "b": 1}),
        folder_of({"a": 0, "b": 1}, [(2, "</s>")]),
        folder_of({"a": 0, "b": 1}, [(3, "<s>")]),
        folder_of([["a", -1.0], ["c", -2.5]], [(2, "<s>")]),
    ]
    assert {fingerprint(folder) for folder in same} == {fingerprint(first)}
    assert len({fingerprint(folder) for folder in [first, *others]}) == 1 + len(others)
    assert fingerprint(first / "tokenizer.json") == fingerprint(first)
    assert len({fingerprint(first, size) for size in (None, 3, 4)}) == 3
    assert not any(differing(read(first), read(folder)) for folder in same)


def test_where_two_differ(folder_of):
    ours = read(folder_of({"a": 0, "b": 1}, [(2, "<s>"), (3, "<x>")]))
    for vocabulary, added, wanted in (
        ({"a": 0, "b": 1}, [(2, "<s>")], []),  # one added token less
        ({"a": 0, "b": 1}, [(2, "<s>"), (3, "<x>"), (4, "<y>")], []),  # one more
        ({"a": 0, "b": 1}, [(2, "<s>"), (3, "<y>")], [3]),  # another
        ({"a": 0, "b": 1}, [(2, "<s>"), (4, "<x>")], [3, 4]),  # in another place
        ({"b": 0, "a": 1}, [(2, "<s>")], [0, 1]),
        ({"a": 0}, [(2, "<s>")], [1]),
        ({"a": 0, "b": 1, "c": 4}, [(2, "<s>")], [4]),
        ([["a", 0.0], ["c", 0.0]], [(2, "<s>")], [1]),
    ):
        theirs = read(folder_of(vocabulary, added))
        assert differing(ours, theirs) == differing(theirs, ours) == wanted


BAD = ["", "[]", "{}", '{"model": {}}', '{"model": {"vocab": 3}}', '{"model": {"vocab": ["a"]}}',
       '{"model": {"vocab": {"a": "0"}}}', '{"model": {"vocab": [[1, 2]]}}', "[" * 10**5,
       '{"model": {"vocab": {"a": 0}}, "added_tokens": [3]}',
       '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}',
       '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": [], "content": "x"}]}']  # fmt: skip


@pytest.mark.parametrize("text", [None, *BAD], ids=range(len(BAD) + 1))
def test_what_is_no_tokenizer_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="tokenizer.json") as caught:
        fingerprint(tmp_path, needed_by="speculative_config.pool_snapshot")
    assert caught.value.field == "tokenizer"
    assert "speculative_config.pool_snapshot needs one" in caught.value.message


# -- translation between two vocabularies


def token_of(found: Translation) -> list[int]:
    return np.frombuffer(found.table, dtype=np.int32).tolist()


def splitting(folder, pieces: list[str], **parts):
    """A tokenizer that splits text, of these pieces."""
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, False))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_tokens_are_the_same_where_their_bytes_are(tmp_path, folder_of):
    """Byte-level BPE beside SentencePiece: spaces, bytes, parts of characters."""
    texts = ["Ġthe", "the", "ä", "ĠÃ¤", "Ã", "Ċ", "q", "Ġdog", "ĠdogÃ"]
    ours = folder_of({token: index for index, token in enumerate(texts)}, [(9, "<e>")])
    data = json.loads((ours / "tokenizer.json").read_text())
    (ours / "tokenizer.json").write_text(json.dumps({**data, "decoder": {"type": "ByteLevel"}}))
    (ours / "tokenizer_config.json").write_text('{"eos_token": {"content": "<e>"}}')
    pieces = ["<unk>", "og", "the", "▁the", "▁ä", "<0x0A>", "<0xC3>", "▁", "d", "</s>", "<0xE4>"]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback()]
    theirs = splitting(
        tmp_path / "theirs",
        pieces,
        normalizer=normalizers.Replace(" ", "▁"),
        decoder=decoders.Sequence(steps),
    )
    (theirs / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    found = translation(ours, theirs, (11, 11))
    # 2 is the byte 0xE4; q is unknown, " dog" ends with "og", "dog\xc3" with a part of a character;
    # 10 is a place of the model's that has no token.
    assert token_of(found) == [3, 2, 10, 4, 6, 5, -1, -1 - 1, -1 - 6, 9, -1]
    assert (found.num_shared, found.sizes, found.is_poor) == (7, (10, 11), False)
    assert str(found) == "another one: 7 tokens are shared, of the target's 10 and 11"
    cut = translation(ours, theirs, (4, 3))  # both models have fewer rows than tokens
    assert token_of(cut) == [-1, 2, -1, -1]
    assert "these are few" in str(cut)


def test_a_tokenizer_that_splits_nothing_is_named(folder_of):
    ours, theirs = folder_of({"a": 0}), folder_of({"b": 0})
    with pytest.raises(CheckpointError, match="cannot split a text") as caught:
        translation(ours, theirs, (1, 1))
    assert str(theirs) in caught.value.message
