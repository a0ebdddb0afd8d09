"""Offline batches: rows in, rows out, and what was written before. `tests/docs` runs Ray Data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.cluster.data import ERROR, ProcessorConfig, _Worker, build_processor, written_ids
from outrider.errors import ConfigError, InvalidRequestError

MODEL = str(Path(outrider.__file__).parent / "demo" / "models" / "draft")
LOCAL = {"executor": "local", "dtype": "float32", "num_kv_blocks": 256}
SETTINGS = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def worker(on_error: Any = "return", pre: Any = None, post: Any = None, output: Any = None) -> Any:
    config = ProcessorConfig(model_source=MODEL, engine_kwargs=LOCAL)
    return _Worker(config.engine(), on_error, pre, post, output)


def test_rows_are_completed_and_failures_stay_with_their_row() -> None:
    rows = [
        {"id": 0, "prompt": "def main", "sampling_params": SETTINGS},
        {"id": 1, "prompt": "def main", "sampling_params": {"max_tokens": -1}},
        {"id": 2, "sampling_params": SETTINGS},
        {"id": 3, "prompt_token_ids": [65, 66], "sampling_params": {**SETTINGS, "seed": None}},
        {"id": 4, "prompt_token_ids": [10**9], "sampling_params": SETTINGS},
        {"id": 5, "prompt": "a", "sampling_params": {"n": 2}},
    ]
    made = worker(post=lambda row: {"id": row["id"], "tokens": row["generated_tokens"]})
    try:
        found = made.completed(rows)
        assert [row["id"] for row in found] == list(range(6)), "a failed row is kept whole"
        assert [len(row["tokens"]) for row in (found[0], found[3])] == [6, 6]
        messages = [row[ERROR] for row in found]
        assert messages[0] == messages[3] == ""
        for index, field in ((1, "max_tokens"), (2, "prompt"), (4, "prompt"), (5, "n")):
            assert messages[index].startswith(f"{field}: ")
            assert found[index]["generated_text"] == ""
        made._postprocess, made._on_error = None, "raise"
        (row,) = made.completed(rows[:1])
        assert row["num_generated_tokens"] == 6
        assert row["num_input_tokens"] > 0
        assert row["finish_reason"] == "length"
        assert row["generated_text"]
        assert row["speculation"]["num_steps"] >= 1
        for bad in rows[1:3]:
            with pytest.raises(InvalidRequestError):
                made.completed([bad])
        assert made.completed([]) == []
    finally:
        made._llm.close()


def test_what_is_written_is_found(tmp_path: Path) -> None:
    made = object.__new__(_Worker)
    made._output = (str(tmp_path), "id")
    made._write([{"id": "a"}, {"id": "b"}])
    made._write([{"id": "c"}])
    (tmp_path / ".part-x.jsonl").write_text('{"id')  # a worker died while it wrote
    assert written_ids(tmp_path, "id") == {"a", "b", "c"}
    with pytest.raises(ConfigError, match="id_column: .* has rows without 'key'"):
        written_ids(tmp_path, "key")
    assert len([json.loads(line) for f in tmp_path.glob("part-*") for line in f.open()]) == 3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"concurrency": 0}, "concurrency: at least 1"),
        ({"concurrency": (3, 2)}, "concurrency: at least 1"),
        ({"engine_kwargs": {"max_num_seq": 3}}, "engine_kwargs.max_num_seq"),
    ],
)
def test_wrong_settings_are_named(fields: dict[str, Any], named: str) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match=named):
        build_processor(ProcessorConfig(model_source=MODEL, **fields))
