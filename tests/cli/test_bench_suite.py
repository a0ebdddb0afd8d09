"""`outrider bench suite`, small: Outrider, transformers, a started server, and one that cannot."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from ..helpers import fake_server

PROGRAM = [sys.executable, str(Path(fake_server.__file__)), "--port", "{port}"]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("outrider.bench.compare.PAUSE_S", 0.0)


@pytest.mark.slow
def test_everyone_in_one_run(outrider_cli, model, tmp_path):
    out = tmp_path / "report"
    result = outrider_cli(
        *("bench", "suite", "-m", model, "--dtype", "float32", "--num-kv-blocks", 256),
        *("--in-process", "--drafters", "NGram,Suffix", "--workloads", "code,shared"),
        *("--streams", "1,2", "--rates", "50", "--rounds", 2, "--num-prompts", 3),
        *("--max-tokens", 8, "--max-model-len", 600, "--out", out, "--assistant", model),
        *("--peer", f"fake={shlex.join([*PROGRAM, '--speculates', '--per-event', '2'])}"),
        *("--peer", f"broken={sys.executable} -c 'raise SystemExit(\"no wheel\")' {{port}}"),
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads((out / "report.json").read_text())
    for path in ("throughput.png", "latency.png", "tokens_per_step.png"):
        assert (out / path).read_bytes().startswith(b"\x89PNG")
    rows = {(row["contender"], row["workload"], row["load"]): row for row in report["results"]}
    closed = {(kind, load) for kind in ("code", "shared") for load in ("1", "2")}
    everywhere = {"outrider", "outrider NGram", "outrider Suffix", "hf", "fake"}
    for name in everywhere:
        assert {key[1:] for key in rows if key[0] == name} >= closed
    for name in ("hf-lookup", "hf-assisted"):
        assert {key[2] for key in rows if key[0] == name} == {"1"}
    assert {key[0] for key in rows if key[2] == "50/s"} == {"fake"}
    for row in rows.values():
        assert [each["num_tokens"] for each in row["rounds"]] == [24, 24]
        assert row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["e2e_ms"]["p99"]
        assert row["num_failures"] == 0
    assert rows["outrider", "code", "1"]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert rows["hf", "code", "1"]["tokens_per_request_step"] == 1.0
    assert rows["fake", "code", "2"]["tokens_per_request_step"] == 2.0
    same = [row for row in report["equality"] if row["contender"] != "fake" and row["num_prompts"]]
    assert len(same) == 2 * (4 * 2 + 2)
    assert not any(row["num_differing"] for row in same)
    (broken,) = [each for each in report["contenders"] if each["name"] == "broken"]
    assert broken["excluded"] == "the server ended with status 1: no wheel"
    assert "no wheel" in result.stdout
    assert "outrider bench suite" in report["command"] or report["command"]
    table = (out / "report.md").read_text()
    for shown in ("## code", "## shared", "no wheel", "fake (1.2.3)", "outrider Suffix", "cores"):
        assert shown in table


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_outrider_over_http(outrider_cli, model, tmp_path):
    out = tmp_path / "report"
    result = outrider_cli(
        *("bench", "suite", "-m", model, "--dtype", "float32", "--num-kv-blocks", 256),
        *("--drafters", "Suffix", "--baselines", "hf", "--workloads", "code", "--alone"),
        *("--streams", "2", "--rates", "20", "--rounds", 1, "--num-prompts", 3),
        *("--max-tokens", 8, "--out", out, "--threads", 1, "--engine-alone"),
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads((out / "report.json").read_text())
    assert [each["excluded"] for each in report["contenders"]] == [None] * 4
    rows = {(row["contender"], row["load"]): row for row in report["results"]}
    for name in ("outrider", "outrider Suffix"):
        for load in ("2", "20/s"):
            assert rows[name, load]["rounds"][0]["num_tokens"] == 24
    assert rows["outrider", "2"]["tokens_per_request_step"] == 1.0
    assert [row["num_differing"] for row in report["equality"]] == [0] * 6
    (row,) = report["http"]
    assert (row["load"], row["num_rounds"]) == ("2", 1)
    assert "What HTTP adds" in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("--streams", "1,x"), "streams"),
        (("--streams", "1.5"), "streams"),
        (("--streams", "none", "--rates", "none"), "streams"),
        (("--rates", "0"), "rates"),
        (("--workloads", "poems"), "workloads"),
        (("--drafters", "Eagle3"), "drafters"),
        (("--baselines", "vllm"), "baselines"),
        (("--peer", "nobody"), "peer"),
        (("--peer", "hf=http://localhost:1"), "peer"),
        (("--max-tokens", 5000), "max_tokens"),
        (("--model", "/nowhere"), "model"),
        (("--out", "/dev/null/report"), "out"),
    ],
)
def test_mistakes_are_named(outrider_cli, model, tmp_path, args, field):
    result = outrider_cli(
        *("bench", "suite", "-m", model, "--out", tmp_path, "--drafters", "none", *args)
    )
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {field}"), result.stderr


def test_options_before_the_name_are_refused(outrider_cli, model):
    result = outrider_cli("bench", "-m", model, "suite")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: model: options of `suite` come after its name")
