"""Corpora: what a file may hold, how they change while an engine serves, and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import outrider
from outrider import LLM
from outrider.config import SuffixConfig, parse
from outrider.drafters.lookup.corpus import check, corpora_of, texts, with_corpora
from outrider.errors import CheckpointError, ConfigError, InvalidRequestError
from outrider.scheduler.sampling import SamplingParams

DEMO = Path(outrider.__file__).resolve().parent / "demo" / "models" / "target"
TEXT = "def main():\n    return 0\n"


def section(*paths: Path, **fields) -> SuffixConfig:
    return parse(SuffixConfig, {"corpora": list(map(str, paths)), **fields})


def test_texts_and_tokens(tmp_path):
    wanted = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(TEXT).ids
    (tmp_path / "a.txt").write_text(TEXT)
    lines = [{"text": TEXT}, TEXT, {"tokens": [5, 6], "weights": [1, 1]}, {"tokens": []}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    found = texts(section(tmp_path / "a.txt", tmp_path / "b.jsonl"), DEMO, 4096)
    assert [each.tolist() for each in found] == [wanted, wanted, wanted, [5, 6], []]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "none.txt.*No such file"),
        ("a.csv", "x", "'.*a.csv': expected a file of the kind .txt or .jsonl"),
        ("a\0.txt", None, "null byte"),
        ("a.txt", b"\xff", "cannot be read"),
        ("a.jsonl", '"x"\n{', "line 2 is not JSON"),
        ("a.jsonl", '{"prompt": "x"}', "line 1: expected `text`, or `tokens`"),
        ("a.jsonl", '{"text": "\\ud800"}', "line 1: half of a surrogate pair"),
        ("a.jsonl", '{"tokens": [true]}', "line 1: expected `text`, or `tokens`"),
        ("a.jsonl", '{"tokens": [1, 4096]}', "line 1: tokens outside the vocabulary of 4096"),
        ("a.jsonl", '{"tokens": [-1]}', "line 1: tokens outside the vocabulary of 4096"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        check(section(tmp_path / name), DEMO, 4096)
    assert caught.value.field == "speculative_config.corpora"


def test_bounds_and_a_tokenizer_that_is_missing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"tokens": [1, 2, 3]}')
    (tmp_path / "b.txt").write_text("x")
    check(section(tmp_path / "a.jsonl", max_corpus_tokens=3), tmp_path, 9)
    with pytest.raises(ConfigError, match="more than 2 tokens") as caught:
        check(section(tmp_path / "a.jsonl", max_corpus_tokens=2), tmp_path, 9)
    assert caught.value.field == "speculative_config.max_corpus_tokens"
    with pytest.raises(CheckpointError, match=r"tokenizer.json.*corpora needs one"):
        check(section(tmp_path / "b.txt"), tmp_path, 9)


def test_sections_with_other_corpora():
    head = {"decoding_type": "Eagle3", "speculative_model": "h"}
    alone = {"decoding_type": "Suffix", "corpora": ["a"]}
    both = {"decoding_type": "Compose", "members": [alone, head]}
    changed = with_corpora(both, ["b", "a"], [])
    assert corpora_of(changed) == ["a", "b"]
    assert changed["members"][1] == head
    assert with_corpora(alone, ["c"], ["a"]) == {"decoding_type": "Suffix", "corpora": ["c"]}
    with pytest.raises(InvalidRequestError, match=r"no corpus 'x'; there is 'a'"):
        with_corpora(alone, [], ["x"])
    with pytest.raises(InvalidRequestError, match="Suffix does"):
        with_corpora(head, ["a"], [])


def test_a_corpus_is_drafted_from(tmp_path):
    """The model's own answer as a corpus: its drafts are right, and no token changes."""
    prompt, greedy = "def main():", SamplingParams(max_tokens=40, temperature=0.0)
    suffix = {"decoding_type": "Suffix", "max_cached_requests": 0, "adaptive_draft_len": False}
    with LLM(str(DEMO), executor="local", dtype="float32", speculative_config=suffix) as llm:
        counts = []
        for round_of in range(2):
            (output,) = llm.generate([prompt], greedy)
            accepted = llm.stats()["drafters"]["suffix"]["num_acc_tokens"]
            counts.append((output.outputs[0].token_ids, accepted))
            if round_of == 0:
                (tmp_path / "own.txt").write_text(prompt + output.outputs[0].text)
                files = [str(tmp_path / "own.txt")]
                llm.load_drafter({**suffix, "corpora": files}, replaces="suffix")
    (first, before), (second, after) = counts
    assert first == second
    assert after > before, "counted anew"
