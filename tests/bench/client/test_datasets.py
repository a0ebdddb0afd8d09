"""Prompts from files and at random; a malformed file is named with its line."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from outrider.bench.client.datasets import (
    Dataset,
    FolderTokens,
    Sample,
    ServerTokens,
    load_dataset,
)
from outrider.errors import ConfigError


@pytest.fixture(scope="module")
def tokens(tokenizer_path):
    return FolderTokens(str(tokenizer_path))


def conversation(question: str, answer: str, first: tuple[str, str] = ("human", "gpt")) -> dict:
    asked = [{"from": first[0], "value": question}, {"from": first[1], "value": answer}]
    return {"conversations": [{"from": "system", "value": "be kind"}, *asked]}


def texts(dataset: Dataset, tokens: Any = None) -> list[str]:
    return [sample.prompt for sample in load_dataset(dataset, tokens).samples]


def test_random_prompts_have_their_lengths_and_their_common_beginning(tokens):
    dataset = Dataset("random", num_prompts=20, input_len=30, prefix_len=10, range_ratio=0.5)
    samples = load_dataset(dataset, tokens).samples
    lengths = [len(tokens.encode(sample.prompt)) for sample in samples]
    assert all(25 <= length <= 55 for length in lengths)
    assert len(set(lengths)) > 3
    assert all(64 <= sample.output_len <= 192 for sample in samples)
    assert len({sample.prompt for sample in samples}) == 20
    assert len({tokens.decode(tokens.encode(each.prompt)[:9]) for each in samples}) == 1
    assert samples == load_dataset(dataset, tokens).samples
    fixed = load_dataset(Dataset("random", num_prompts=9, input_len=30, output_len=7), tokens)
    assert {len(tokens.encode(each.prompt)) for each in fixed.samples} == {30}
    assert {each.output_len for each in fixed.samples} == {7}
    words = load_dataset(Dataset("random", num_prompts=1, input_len=12), None)
    assert len(words.samples[0].prompt.split()) == 12
    assert "words" in words.notes[0]


def test_conversations(tokens, tmp_path):
    entries = [
        conversation("What is a cat that sat on a mat?", "It is the other cat."),
        conversation("x", "too short a question to be of use"),
        conversation("a long question, " * 400, "which is left out"),
        {"conversations": []},
        {"messages": [{"role": "user", "content": "one and two"},
                      {"role": "assistant", "content": "make three of them"}]},
    ]  # fmt: skip
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(entries))
    dataset = Dataset("sharegpt", path, num_prompts=2, shuffle=False)
    found = load_dataset(dataset, tokens).samples
    assert [each.prompt for each in found] == ["What is a cat that sat on a mat?", "one and two"]
    assert found[0].output_len == len(tokens.encode("It is the other cat."))
    lines = tmp_path / "chats.jsonl"
    lines.write_text("\n".join(json.dumps(entry) for entry in entries))
    assert texts(Dataset("sharegpt", lines, num_prompts=2, shuffle=False), tokens) == [
        each.prompt for each in found
    ]
    with pytest.raises(ConfigError, match="--sharegpt-output-len"):
        load_dataset(dataset, None)
    bare = Dataset("sharegpt", path, num_prompts=1, output_len=9, shuffle=False)
    assert load_dataset(bare, None).samples == [Sample("What is a cat that sat on a mat?", 9)]


def test_lines_of_prompts(tmp_path):
    tasks = [{"task_id": f"HumanEval/{place}", "prompt": f"def f{place}("} for place in range(6)]
    content = "\n".join(json.dumps(task) for task in tasks) + "\n"
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(content.encode()))
    in_order = texts(Dataset("humaneval", path, num_prompts=6, shuffle=False))
    assert in_order == [task["prompt"] for task in tasks]
    shuffled = texts(Dataset("humaneval", path, num_prompts=6, seed=3))
    assert shuffled != in_order
    assert sorted(shuffled) == in_order
    assert shuffled == texts(Dataset("humaneval", path, num_prompts=6, seed=3))
    repeated = load_dataset(Dataset("humaneval", path, num_prompts=8, shuffle=False), None)
    assert [each.prompt for each in repeated.samples] == [*in_order, *in_order[:2]]
    assert "repeated" in repeated.notes[0]
    fewer = load_dataset(Dataset("humaneval", path, num_prompts=8, oversample=False), None)
    assert len(fewer.samples) == 6

    plain = tmp_path / "prompts.txt"
    plain.write_text("first\n\nsecond\n")
    assert load_dataset(Dataset("custom", plain, 2, shuffle=False), None).samples == [
        Sample("first", 256),
        Sample("second", 256),
    ]
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "a", "output_tokens": 5}\n{"text": "b"}\n')
    found = load_dataset(Dataset("custom", own, 2, shuffle=False), None).samples
    assert found == [Sample("a", 5), Sample("b", 256)]
    bench = tmp_path / "question.jsonl"
    rows = [{"category": name, "turns": [f"{name}?", "more"]} for name in ("qa", "math", "qa")]
    bench.write_text("\n".join(map(json.dumps, rows)))
    assert texts(Dataset("spec_bench", bench, 9, oversample=False, category="qa")) == ["qa?"] * 2


@pytest.mark.parametrize(
    ("name", "file", "content", "field", "message"),
    [
        ("custom", "a.jsonl", '{"prompt": "a"}\n{"prompt"', "dataset_path", "line 2: not JSON"),
        ("custom", "a.jsonl", '{"prompt": "a"}\n{"x": 1}', "dataset_path", "line 2: no `prompt`"),
        ("custom", "a.jsonl", "[]", "dataset_path", "line 1: expected an object"),
        ("custom", "a.jsonl", '{"prompt": "a", "output_tokens": 0}', "dataset_path", "line 1"),
        ("custom", "a.txt", "\n", "dataset_path", "has none"),
        ("humaneval", "a.jsonl.gz", "no gzip", "dataset_path", "cannot read"),
        ("humaneval", "a.gz", "\x1f\x8b\x08\0\0\0\0\0\0\3abcdefgh", "dataset_path", "cannot read"),
        ("sharegpt", "a.json", "[\n{", "dataset_path", "line 2: not JSON"),
        ("sharegpt", "a.json", "[" * 10**5, "dataset_path", "not JSON"),
        ("custom", "a.jsonl", "[" * 10**5, "dataset_path", "line 1: not JSON"),
        ("sharegpt", "a.json", "{}", "dataset_path", "a list of conversations"),
        ("sharegpt", "a.json", '[{"conversations": 3}]', "dataset_path", "entry 0: no list"),
        ("sharegpt", "a.jsonl", '{"conversations": ["a"]}', "dataset_path", "line 1: no list"),
        ("sharegpt", "a.json", "[]", "dataset_path", "fewer than 4 tokens are left out"),
        ("spec_bench", "a.jsonl", '{"turns": []}', "dataset_path", "line 1: no `turns`"),
        ("spec_bench", "a.jsonl", '{"turns": ["a"], "category": "qa"}', "spec_bench_category",
         "'x' is none of qa"),
        ("custom", None, "", "dataset_path", "needed with"),
        ("custom", "nowhere", None, "dataset_path", "cannot read"),
        ("random", "a.txt", "a", "dataset_path", "not read with"),
        ("poems", None, "", "dataset_name", "none of random"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path, name, file, content, field, message):
    path = None if file is None else tmp_path / file
    if path is not None and content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=message) as caught:
        load_dataset(Dataset(name, path, output_len=9, category="x"), None)
    assert caught.value.field == field


def test_a_servers_tokenizer():
    """It adds a token before every prompt, which is not counted."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [1, *body["prompt"].encode()]})
        return httpx.Response(200, json={"prompt": bytes(body["tokens"]).decode()})

    with httpx.Client(base_url="http://h", transport=httpx.MockTransport(answer)) as http:
        found = ServerTokens.find(http, "m")
        assert found is not None
        assert found.decode(found.encode("abc")) == "abc"
        assert len(found.encode("abc")) == 3
    nothing = httpx.MockTransport(lambda _: httpx.Response(404))
    with httpx.Client(base_url="http://h", transport=nothing) as http:
        assert ServerTokens.find(http, "m") is None
