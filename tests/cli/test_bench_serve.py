"""`outrider bench serve` against servers of several makers, and against Outrider's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.engine.frontend import Frontend

from ..helpers import fake_server
from ..helpers.browser import serving
from ..helpers.engines import engine_of
from ..helpers.models import write_models


@pytest.fixture
def server() -> Iterator[Callable[..., str]]:
    """A stand-in with these words; its URL."""
    started = []

    def start(*words: str) -> str:
        started.append(fake_server.serve(*words))
        return f"http://127.0.0.1:{started[-1].server_address[1]}"

    yield start
    for each in started:
        each.shutdown()
        each.server_close()


@pytest.fixture(scope="module")
def outriders(tokenizer_path: Path, tmp_path_factory: Any) -> Iterator[tuple[str, Path]]:
    """A real engine that drafts, behind a socket; its URL and its model."""
    folder = write_models(tokenizer_path, tmp_path_factory.mktemp("served"))["target"]
    section = {"decoding_type": "NGram", "max_draft_len": 4}
    with engine_of(folder, section, served_model_name="tiny") as engine:
        edge = Edge(
            EngineClient(engine), Frontend(engine._config, engine.info), EdgeMetrics("tiny")
        )
        with serving(build_http(edge)) as url:
            yield url, folder


def lengths(num_prompts: int, num_tokens: int) -> tuple[object, ...]:
    return ("--num-prompts", num_prompts, "--random-input-len", 20, "--output-len", num_tokens)


def test_outriders_own_server(outrider_cli, outriders, tmp_path):
    url, _ = outriders
    for backend, name in (("openai", "a.json"), ("openai-chat", "b.json")):
        result = outrider_cli(
            *("bench", "serve", "--base-url", f"{url}/v1", "--backend", backend, *lengths(6, 12)),
            *("--max-concurrency", 3, "--num-warmups", 2, "--ignore-eos", "--save-detailed"),
            *("--goodput", "ttft:60000", "e2el:60000", "--metadata", "gpu=none", "run=1"),
            *("--result-dir", tmp_path, "--result-filename", name, "--plot", tmp_path / "run.svg"),
        )
        assert result.exit_code == 0, result.stderr
        for shown in ("output tokens/s", "Time to first token", "Drafts (by vllm)"):
            assert shown in result.stdout
        found = json.loads((tmp_path / name).read_text())
        assert (found["completed"], found["failed"], found["model_id"]) == (6, 0, "tiny")
        assert found["total_output_tokens"] == 6 * 12
        assert found["output_lens"] == [12] * 6
        if backend == "openai":
            assert found["input_lens"] == [20] * 6, "by the server's tokenizer"
        assert found["request_goodput"] == found["request_throughput"]
        assert (found["gpu"], found["run"], found["max_concurrency"]) == ("none", "1", 3)
        assert found["spec_decode_num_drafts"] > 0
        assert found["max_concurrent_requests"] <= 3
        assert found["p50_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
        assert "<svg" in (tmp_path / "run.svg").read_text()
    compared = outrider_cli(
        *("bench", "serve", "--compare", tmp_path / "a.json", tmp_path / "b.json"),
        *("--plot", tmp_path / "compared.png"),
    )
    assert compared.exit_code == 0, compared.stderr
    assert "last to first" in compared.stdout
    assert "backend: openai, openai-chat" in compared.stderr
    assert (tmp_path / "compared.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_server_with_openais_fields_only(outrider_cli, server, tmp_path, tokenizer_path, backend):
    """No usage in the stream, no tokenizer, no metrics: tokens are events, or those of the text."""
    newer = ("--newer",) if backend == "openai-chat" else ()
    url = server("--plain", "--per-event", "3", *newer)
    words = ("bench", "serve", "--base-url", url, "--backend", backend, *lengths(4, 6))
    words += ("--request-rate", 200, "--result-dir", tmp_path, "--save-result")
    result = outrider_cli(*words, "--label", "bare")
    assert result.exit_code == 0, result.stderr
    assert "counts no tokens" in result.stderr
    assert "Lengths of prompts are words" in result.stderr
    (path,) = tmp_path.glob("bare-200.0qps-fake-*.json")
    found = json.loads(path.read_text())
    assert found["total_output_tokens"] == 4 * 2, "events"
    assert "spec_decode_num_drafts" not in found
    assert "generated_texts" not in found
    seen = httpx.get(f"{url}/seen").json()["bodies"][-1]
    assert (seen["temperature"], seen["stream"]) == (0.0, True)
    counted = outrider_cli(*words, "--tokenizer", tokenizer_path, "--result-filename", "counted")
    assert counted.exit_code == 0, counted.stderr
    assert "counts no tokens" not in counted.stderr
    found = json.loads((tmp_path / "counted").read_text())
    assert found["total_input_tokens"] == 4 * 20
    assert found["total_output_tokens"] == 4 * 6 * 5, "of the text, whose words are no tokens here"


def test_counters_of_drafts_are_those_of_the_run(outrider_cli, server):
    url = server("--metrics", "outrider", "--per-event", "3")
    words = ("bench", "serve", "--base-url", url, *lengths(4, 6), "--num-warmups", 3)
    result = outrider_cli(*words, "--percentile-metrics", "ttft", "--metric-percentiles", "99.5")
    assert result.exit_code == 0, result.stderr
    rows = [line.split("│")[1:3] for line in result.stdout.splitlines() if "│" in line]
    shown = {name.strip(): value.strip() for name, value in rows}
    assert shown["drafts"] == "8.00", "4 requests of 2 steps; neither the first nor the warm-up"
    assert shown["accepted, %"] == "66.67"
    assert "p99.5" in result.stdout
    assert "End to end" not in result.stdout


def test_failures_are_counted_and_the_first_is_shown(outrider_cli, server):
    some = outrider_cli(
        *("bench", "serve", "--base-url", server("--fail-every", "3"), *lengths(6, 3)),
        *("--max-concurrency", 1, "--disable-tqdm"),
    )
    assert some.exit_code == 0
    assert "2 of 6 requests failed; the first: status 500: a bad day" in some.stderr
    url = server("--fail-every", "2")  # the first request passes
    every = outrider_cli("bench", "serve", "--base-url", url, *lengths(1, 3))
    assert every.exit_code == 1
    assert "none of 1 requests was answered; the first: status 500: a bad day" in every.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "other"), "model: 'other' is not served: fake"),
        (("--ignore-eos",), "the first request failed: status 400: Unrecognized"),
        (("--endpoint", "/v2/completions"), "the first request failed: status 404: no such"),
        (("--dataset-name", "custom"), "dataset_path: needed"),
        (("--dataset-name", "custom", "--random-input-len", 9), "random_input_len: only with"),
        (("--dataset-name", "poems"), "dataset_name: "),
        (("--goodput", "ttft:1", "speed:2"), "goodput: 'speed'"),
        (("--percentile-metrics", "ttft,speed"), "percentile_metrics: 'speed'"),
        (("--metric-percentiles", "101"), "metric_percentiles: "),
        (("--request-rate", 0), "request_rate: "),
        (("--extra-body", "[]"), "extra_body: expected an object"),
        (("--header", "x"), "header: expected KEY=VALUE"),
        (("--metadata", "x"), "metadata: expected KEY=VALUE"),
        (("--plot", "plot.gif"), "plot: plot.gif: the suffix"),
        (("--result-filename", "no/such/folder"), "result_filename: "),
        (("--compare", "/nowhere.json"), "compare: cannot read"),
        (("--base-url", "http://127.0.0.1:9"), "base_url: no server answers"),
        (("--base-url", "http://127.0.0.1:x"), "base_url: "),
        (("--tokenizer", "/nowhere"), "tokenizer: "),
    ],
)
def test_mistakes_are_named(outrider_cli, server, words, message):
    url = server("--plain")
    result = outrider_cli("bench", "serve", "--base-url", url, "--num-prompts", 2, *words)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {message}"), result.stderr
