"""Files become documents with weights; windows are drawn by number."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from outrider.errors import ConfigError
from outrider.training import data
from outrider.training.data import (
    Batches,
    CorpusWindows,
    DocumentWindows,
    Reader,
    in_order,
    micro_batches,
    pack,
    split,
)

from .conftest import EOS, VOCAB_SIZE, ids_of


@pytest.fixture
def read(tokenizer, tmp_path):
    """`read(rows)`: documents of a .jsonl file, as lists."""

    def call(*rows, all_tokens=False, name="a.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
        found = Reader(tokenizer, VOCAB_SIZE, all_tokens=all_tokens).read([path])
        return [(ids.tolist(), weights.tolist()) for ids, weights in found]

    return call


def test_text(read, tokenizer, tmp_path, monkeypatch):
    assert read({"text": "cat", "source": "x"}, "", {"text": "mat"}) == [
        ([*ids_of("cat"), EOS], [1.0] * 4),
        ([*ids_of("mat"), EOS], [1.0] * 4),
    ]
    monkeypatch.setattr(data, "_PIECE_BYTES", 100)
    (tmp_path / "long.txt").write_text("a cat\n" * 300)  # more than one piece
    ((ids, weights),) = Reader(tokenizer, VOCAB_SIZE).read([tmp_path / "long.txt"])
    assert ids.tolist() == ids_of("a cat\n") * 300 + [EOS]
    assert weights.min() == 1


def test_completions_and_tokens(read):
    assert read({"prompt": "the", "completion": " cat"}) == [
        ([*ids_of("the cat"), EOS], [0.0] * 3 + [1.0] * 5)
    ]
    assert read({"tokens": [5, 6, 7]}, {"tokens": [8, EOS], "weights": [0, 0.5]}) == [
        ([5, 6, 7, EOS], [1.0, 1.0, 1.0, 0.0]),
        ([8, EOS], [0.0, 0.5]),
    ]


def test_only_answers_of_conversations_count(read):
    roles = ["user", "assistant", "user", "assistant"]
    row = {"messages": [{"role": r, "content": c} for r, c in zip(roles, ["a", "bb", "c", "d"])]}
    ((ids, weights),) = read(row)
    text = "<user:a><assistant:bb><user:c><assistant:d>"
    assert ids == [*ids_of(text), EOS]
    counted = "".join(c if w else "_" for c, w in zip(text, weights))
    assert counted == "_" * 19 + "bb>" + "_" * 19 + "d>"
    assert weights[-1] == 0
    ((_, every),) = read(row, all_tokens=True)
    assert every == [1.0] * len(text) + [0.0]


def test_a_template_that_rewrites_earlier_answers(read, tokenizer, monkeypatch):
    """Each answer then is a document, as the model sees it when it is to write it."""
    template = (
        "{% for m in messages %}{{ '<' + m.role[0] + ':' + "
        "(m.content if loop.last else m.content[:1]) + '>' }}{% endfor %}"
        "{% if add_generation_prompt %}<a:{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    roles = ["user", "assistant", "user", "assistant"]
    row = {"messages": [{"role": r, "content": c} for r, c in zip(roles, ["x", "long", "y", "z"])]}
    found = ["".join(c if w else "_" for c, w in zip("<u:x><a:long>", read(row)[0][1]))]
    assert found == ["_" * 8 + "long>"]
    assert read(row)[1][0] == [*ids_of("<u:x><a:l><u:y><a:z>"), EOS]


def test_a_conversation_without_a_template(read, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*the target has no chat template; give"):
        read({"messages": [{"role": "assistant", "content": "a"}]})


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("{", r"a\.jsonl:2: not JSON"),
        ("[1]", r"a\.jsonl:2: the line is no object"),
        ({"txet": "a"}, r"a\.jsonl:2: the line has 'txet'; expected exactly one of 'text'"),
        ({"text": "a", "tokens": [1]}, "exactly one of"),
        ({"text": 3}, r"a\.jsonl:2: text: expected a string, got 3"),
        ({"prompt": "a"}, "completion: expected a string, got None"),
        ({"tokens": [1, "2"]}, "tokens: expected a list of token ids"),
        ({"tokens": [1, VOCAB_SIZE]}, rf"a\.jsonl:2: token {VOCAB_SIZE} is outside"),
        ({"tokens": [-1]}, "token -1 is outside"),
        ({"tokens": [10**30]}, "tokens: expected a list of token ids"),
        ({"text": "\ud800"}, r"a\.jsonl:2: the text contains a lone surrogate"),
        ({"tokens": [1, 2], "weights": [1]}, "weights: expected 2 numbers from 0 to 1e"),
        ({"tokens": [1], "weights": [-1]}, "weights: expected 1 numbers"),
        ({"tokens": [1], "weights": [float("nan")]}, "weights: expected 1 numbers"),
        ({"tokens": [1], "weights": [10**400]}, "weights: expected 1 numbers"),
        ({"messages": []}, "messages: expected a list of messages"),
        ({"messages": [{"content": "a"}]}, "needs a 'role'"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "unknown role 'bot'; known: system, "),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message has the role 'assistant'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "chat template refuses"),
    ],
)
def test_bad_lines_are_named(read, row, named):
    with pytest.raises(ConfigError, match=named) as caught:
        read({"text": "fine"}, row)
    assert caught.value.field == "--input"


def test_bad_files_are_named(tokenizer, tmp_path):
    reader = Reader(tokenizer, VOCAB_SIZE)
    for name, content, named in [
        ("a.csv", b"", "ends in '.csv'"),
        ("corpus", b"", "has no ending; allowed: .txt"),
        ("b.txt", None, "No such file"),
        ("c.txt", b"\xff\xfe\xff", "not UTF-8"),
        ("d.txt", b"", "hold no text"),
        ("e.jsonl", b'{"tokens": [4], "weights": [0]}', "no token in the files has a weight"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=named) as caught:
            reader.read([tmp_path / name], "--heldout-file")
        assert caught.value.field == "--heldout-file"


def documents(*lengths: int):
    """Token = its place in the whole."""
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return pack((range(a, b), [1.0] * (b - a)) for a, b in itertools.pairwise(ends))


def test_the_end_is_held_out():
    train, held = split(documents(*[10] * 100), 0.05, 20)
    assert (train.num_tokens, held.num_tokens, len(train), len(held)) == (950, 50, 95, 5)
    assert held[0][0].tolist() == list(range(950, 960))
    train, held = split(documents(500, 500), 0.01, 20)  # one window, out of a long document
    assert (train.num_tokens, held.num_tokens, len(train), len(held)) == (980, 20, 2, 1)
    train, held = split(documents(970, 30), 0.02, 20)  # a short document stays whole
    assert (len(train), held.num_tokens) == (1, 30)
    assert [len(ids) for ids, _ in train] == [970]
    with pytest.raises(ConfigError, match="30 tokens are too few: 20 are held out"):
        split(documents(30), 0.02, 20)


def test_a_part_without_weights_is_refused():
    ids, off, on = list(range(100)), [0.0] * 100, [1.0] * 100
    for first, last, named in [(on, off, "held-out"), (off, on, "first")]:
        with pytest.raises(ConfigError, match=f"no token of the {named} part has a weight"):
            split(pack([(ids, first), (ids, last)]), 0.5, 20)


@pytest.mark.parametrize("lengths", [(103,), (30, 40, 33)])
def test_an_epoch_sees_every_window_once(lengths):
    ring = CorpusWindows(documents(*lengths), 10, seed=3)
    orders = []
    for epoch in range(3):
        drawn = [ring.window(epoch * 10 + place)[0] for place in range(10)]
        seen = torch.cat(drawn).tolist()
        assert len(set(seen)) == 100, "no token twice"
        assert all(torch.equal(w.diff() % 103, torch.ones(9, dtype=w.dtype)) for w in drawn)
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]
    again = CorpusWindows(documents(*lengths), 10, seed=3)
    assert again.window(25)[0].tolist() == orders[2][50:60], "whatever was asked for before"


def test_short_text_is_padded():
    tokens, weights = CorpusWindows(documents(4), 10, seed=0).window(7)
    assert tokens.tolist() == [0, 1, 2, 3] + [0] * 6
    assert weights.tolist() == [1.0] * 4 + [0.0] * 6
    rows = DocumentWindows(documents(4, 12), 10, seed=0)
    assert sorted(len(rows.window(i)[0]) for i in range(2)) == [10, 10]
    assert [int(w.sum()) for _, w in in_order(documents(25), 10, most=5)] == [10, 10]
    assert [int(t[0]) for t, _ in in_order(documents(100), 10, most=3)] == [0, 30, 60]


@pytest.mark.parametrize(("size", "share"), [(1, 0.5), (4, 0.5), (3, 0.25), (2, 1.0), (2, 0.0)])
def test_own_text_has_its_share(size, share):
    def numbered(name):
        class Numbered:
            def window(self, index):
                return (name, index), None

        return Numbered()

    batches = Batches(numbered("corpus"), numbered("own"), share, size)
    drawn = [window for step in range(40) for window, _ in batches.at(step)]
    assert len(drawn) == 40 * size
    own = [index for name, index in drawn if name == "own"]
    assert own == list(range(round(40 * size * share)))
    assert [i for name, i in drawn if name == "corpus"] == list(range(40 * size - len(own)))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_share_a_batch(num_ranks):
    rows = [(torch.full((4,), i), torch.full((4,), float(i % 3))) for i in range(6)]
    found = [
        p
        for r in range(num_ranks)
        for p in micro_batches(rows, 2, r, num_ranks, torch.device("cpu"))
    ]
    assert torch.cat([p.windows.tokens[:, 0] for p in found]).tolist() == list(range(6))
    assert sum(p.share for p in found) == pytest.approx(1)
    for piece in found:
        assert piece.share == pytest.approx(float(piece.windows.weights.sum()) / 24)
        assert piece.first == int(piece.windows.tokens[0, 0])
