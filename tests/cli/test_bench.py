"""`outrider bench`, small: every table, the JSON, and outputs that agree."""

from __future__ import annotations

import json

import pytest
import torch


def test_bench_compares_in_one_run(outrider_cli, model, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.bench.compare.PAUSE_S", 0.0)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def main(\nimport os\nclass Node:\n")
    report_path = tmp_path / "report.json"
    result = outrider_cli(
        "bench",
        *("-m", model, "--executor", "local", "--dtype", "float32", "--num-kv-blocks", 256),
        *("--prompts", prompts, "--num-prompts", 3, "--max-tokens", 12, "--rounds", 2),
        *("--batch-sizes", "1,2", "--spec-type", "ngram"),
        *("--baseline", "hf", "--baseline", "hf-lookup", "--json", report_path),
    )
    assert result.exit_code == 0, result.stderr
    for shown in ("Throughput", "Latency", "Pace", "Drafts", "0 of 3 prompts differ"):
        assert shown in result.stdout
    report = json.loads(report_path.read_text())
    rows = {(row["contender"], row["streams"]): row for row in report["results"]}
    assert set(rows) == {
        *(("plain", 1), ("plain", 2), ("NGram", 1), ("NGram", 2)),
        *(("hf", 1), ("hf", 2), ("hf-lookup", 1)),
    }
    for row in rows.values():
        assert [each["num_tokens"] for each in row["rounds"]] == [36, 36]
        assert row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["e2e_ms"]["p99"]
    assert rows["plain", 1]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert rows["plain", 1]["tokens_per_step"] == 1.0
    assert rows["plain", 1]["acceptance"] is None
    drafts = rows["NGram", 1]["acceptance"]
    assert 0 <= drafts["num_accepted"] <= drafts["num_draft_tokens"]
    # At one stream a step emits what is accepted and one more; a prompt's last may be cut off.
    assert drafts["num_steps"] <= 72 <= drafts["num_steps"] + drafts["num_accepted"]
    assert drafts["num_accepted"] == sum(drafts["accepted_per_pos"])
    assert [row["num_differing"] for row in report["equality"]] == [0] * 7


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("--batch-sizes", "1,x"), "batch_sizes"),
        (("--batch-sizes", "0"), "batch_sizes"),
        (("--prompts", "/nowhere.txt"), "prompts"),
        (("--temperature", -1), "temperature"),
        ((), "model"),
    ],
)
def test_mistakes_are_named(outrider_cli, args, field):
    result = outrider_cli("bench", "-m", "/nowhere", "--executor", "local", *args)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {field}")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--parts", "machine,sums"), "parts: 'sums' is none of machine, checks"),
        (("--model", "/nowhere"), "model: /nowhere is no folder"),
    ],
)
def test_mistakes_of_the_gpu_proof_are_named(outrider_cli, args, named, tmp_path):
    result = outrider_cli("bench", "gpu-proof", "--dry-run", "--out", tmp_path, *args)
    assert result.exit_code == 1
    assert named in " ".join(result.stderr.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_proof_needs_a_device(outrider_cli, tmp_path):
    result = outrider_cli("bench", "gpu-proof", "--out", tmp_path)
    assert result.exit_code == 1
    assert "--dry-run" in result.stderr
