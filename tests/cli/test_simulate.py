"""`outrider simulate`: tables, JSON, sweeps, files, and mistakes by the name of their option."""

from __future__ import annotations

import json

import pytest

SMALL = ("--num-requests", 12, "--input-len", 32, "--output-len", 16, "--streams", 4)


def results_of(outrider_cli, tmp_path, *args):
    path = tmp_path / "simulated.json"
    result = outrider_cli("simulate", *SMALL, *args, "--json", path)
    assert result.exit_code == 0, result.stderr
    return result.stdout, json.loads(path.read_text())["results"]


def test_a_sweep_is_a_row_per_variant(outrider_cli, tmp_path):
    """Keys of the command, of the engine and of its section; drafters that nobody has to have."""
    sweeps = ("--sweep", "max_draft_len=0,4", "--sweep", "engines=1,2", "--sweep", "max-num-seqs=8")
    shown, rows = results_of(
        outrider_cli, tmp_path, "--draft-model", "none", "--acceptance", "0.9", *sweeps
    )
    assert "Simulated, not measured" in shown
    assert [row["variant"] for row in rows] == [
        f"max_draft_len={length}, engines={engines}, max_num_seqs=8"
        for length in (0, 4)
        for engines in (1, 2)
    ]
    assert {row["engine"]["max_num_seqs"] for row in rows} == {8}
    plain, _, drafted, _ = (row["tokens_per_s"] for row in rows)
    assert drafted > 2 * plain
    assert rows[0]["tokens_per_step"] == 1.0
    for row in rows:
        assert row["num_tokens"] == 12 * 16
        assert row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["e2e_ms"]["p99"]


def test_a_scenario_file_has_the_options_as_keys(outrider_cli, tmp_path, config_file):
    path = config_file("step_ms: {1: 10, 64: 20}\nacceptance: [0.9, 0.5]\nnum_requests: 99\n")
    _, (row,) = results_of(outrider_cli, tmp_path, "--scenario", path, "--spec-type", "ngram")
    assert row["target"]["curve"] == {"rows": [1.0, 64.0], "ms": [10.0, 20.0]}
    assert row["num_finished"] == 12, "an option overrides the file"
    number = config_file("step_ms: 7\n", "number.yaml")
    _, (row,) = results_of(outrider_cli, tmp_path, "--scenario", number)
    assert row["inter_token_ms"]["p50"] == pytest.approx(7.0)


def test_a_speculation_cache_is_that_of_the_engine(outrider_cli, tmp_path, config_file):
    path = config_file(
        "speculative_config:\n  decoding_type: DraftTarget\n  speculative_model: org/some-draft\n"
        "  speculation_cache: {outcomes: 8}\nmodel: org/some-target\n"
    )
    shown, rows = results_of(
        outrider_cli, tmp_path, "--config", path, "--sweep", "speculation_cache.outcomes=1,8"
    )
    assert "hidden" in shown
    few, many = (row["cache"] for row in rows)
    assert 0 < few["num_hits"] / few["num_lookups"] < many["num_hits"] / many["num_lookups"]


def test_the_trace_of_a_bench_is_simulated(outrider_cli, model, tmp_path):
    prompts, trace = tmp_path / "prompts.txt", tmp_path / "trace.json"
    prompts.write_text("def main(\nimport os\nclass Node:\n")
    result = outrider_cli(
        "bench",
        *("-m", model, "--executor", "local", "--dtype", "float32", "--num-kv-blocks", 256),
        *("--prompts", prompts, "--num-prompts", 3, "--max-tokens", 24, "--rounds", 1),
        *("--batch-sizes", "1,2", "--spec-type", "ngram", "--trace", trace),
    )
    assert result.exit_code == 0, result.stderr
    runs = {run["decoding_type"]: run for run in json.loads(trace.read_text())["runs"]}
    assert set(runs) == {"None", "NGram"}
    columns = runs["None"]["columns"]
    assert min(columns["elapsed_ms"]) > 0 == max(columns["num_nodes"])
    assert max(columns["num_seqs"]) == 2
    drafted = sum(nodes * count for each in runs["NGram"]["drafts"] for nodes, _, count in each)
    assert 0 < drafted <= sum(runs["NGram"]["columns"]["num_nodes"])
    _, (row,) = results_of(outrider_cli, tmp_path, "--trace", trace, "--spec-type", "ngram")
    assert row["tokens_per_s"] > 0 < row["num_drafted"]
    result = outrider_cli("simulate", "--trace", trace, "--draft-model", "x")
    assert result.exit_code == 1
    assert "Times are those of draft on" in result.stderr
    assert "trace: it has no drafts of DraftTarget; it has NGram, None" in result.stderr


def test_requests_of_a_trace_are_replayed(outrider_cli, tmp_path):
    columns = {"num_seqs": 1, "num_tokens": 1, "num_context": 9, "num_asked": 1, "num_nodes": 4,
               "longest": 4, "elapsed_ms": 10.0, "draft_ms": 0.1}  # fmt: skip
    run = {
        "name": "one", "decoding_type": "NGram", "drafts": [[[4, 4, 9]], [[4, 0, 50]]],
        "columns": {name: [value] * 8 for name, value in columns.items()},
        "requests": [[0.0, 30, 40, 0], [5.0, 30, 40, 1]],
    }  # fmt: skip
    trace, path = tmp_path / "trace.json", tmp_path / "simulated.json"
    trace.write_text(json.dumps({"version": 1, "machine": {}, "model": "m", "runs": [run]}))
    given = ("simulate", "--trace", trace, "--spec-type", "ngram", "--replay")
    result = outrider_cli(*given, "--spec-key", "adaptive_draft_len=false", "--json", path)
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(path.read_text())["results"]
    assert (row["num_finished"], row["num_tokens"]) == (2, 80)
    assert 5.0 < row["seconds"] < 6.0
    for args, named in (
        ((*given, "--rate", 2), "rate: --replay takes the requests of the trace"),
        ((*given, "--sweep", "input_len=8"), "input_len: --replay takes the requests"),
        ((*given, "--max-model-len", 60), "trace: prompt and answer have up to 70 tokens"),
        (("simulate", "--replay"), "replay: there is no trace"),
    ):
        result = outrider_cli(*args)
        assert result.exit_code == 1, result.output
        assert named in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--step-ms", "fast"), "step_ms: expected milliseconds like 25"),
        (("--draft-ms", "1:1,1:2"), "draft_ms: expected milliseconds"),
        (("--acceptance", "0.5,1.5"), "acceptance: expected numbers from 0 to 1"),
        (("--bonus-ranks", "0.6,0.6"), "bonus_ranks: they sum to 1.2"),
        (("--sweep", "drafters"), "sweep: expected KEY=VALUE,VALUE, got 'drafters'"),
        (("--sweep", "engines=1", "--sweep", "engines=2"), "sweep: a key is given twice"),
        (("--sweep", "engines=0"), "sweep: engines=0: engines: at least 1"),
        (("--sweep", "step_ms=1,x"), "sweep: step_ms=x: step_ms: expected milliseconds"),
        (("--spec-type", "ngram", "--sweep", "outcomes=4"), "sweep: outcomes=4: "),
        (("--sweep", "model=a,b"), "sweep: model: no checkpoint is read here"),
        (("--sweep", "num_request=1,2"), "sweep: unknown key; did you mean 'num_requests'?"),
        (("--scenario", "/nowhere.yaml"), "scenario: cannot read"),
        (("--trace", "/nowhere.json"), "trace: cannot read"),
        (("--max-model-len", 100), "input_len: prompt and answer have up to 640 tokens"),
        (("--num-kv-blocks", 4), "input_len: prompt and answer have up to 640 tokens; the KV"),
        (("--rate", 5, "--streams", 4), "streams: it is of closed loops"),
        (("--rate", 5, "--think-ms", 4), "think_ms: it is of closed loops"),
        (("--spec-type", "lookahead"), "speculative_config: look-ahead and compositions"),
        (("--json", "/nowhere/at.json"), "json: cannot write"),
    ],
)
def test_mistakes_are_named(outrider_cli, args, named):
    result = outrider_cli("simulate", *args)
    assert result.exit_code == 1, result.output
    assert named in " ".join(result.stderr.split())


def test_an_unknown_key_of_a_scenario_is_named(outrider_cli, config_file):
    result = outrider_cli("simulate", "--scenario", config_file("stepms: 3\n"))
    assert (result.exit_code, "did you mean 'step_ms'?" in result.stderr) == (1, True)
    result = outrider_cli("simulate", "--scenario", config_file("scenario: x.yaml\n"))
    assert "scenario: scenario is no key of such a file" in result.stderr
    result = outrider_cli("simulate", "--scenario", config_file("trace: 5\n"))
    assert "trace: expected a path (got 5)" in result.stderr
