"""The Serve application for real: one deployment on a local Ray, spoken to over HTTP."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outrider.cluster.serve.args import read_args
from outrider.config import DraftTargetConfig
from outrider.config.access import hash_of
from outrider.errors import ConfigError
from outrider.tests.helpers.adapters import write_adapter
from outrider.tests.helpers.ports import completion, connect, free_port, wait_for
from outrider.tests.helpers.serving.kills import below
from outrider.tests.helpers.serving.metrics import num_aborted

MODEL = Path(__file__).parents[2] / "demo" / "models" / "target"


@pytest.fixture(scope="module")
def url(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> str:
    from ray import serve

    from outrider.cluster.app import build_app

    port = free_port()
    folder = write_adapter(tmp_path_factory.mktemp("adapter") / "a", str(MODEL), alpha=8.0)
    adapters = [{"name": "tuned", "path": folder}]
    args = {**ARGS, "lora_modules": adapters, "serve": {"port": port}}
    serve.run(build_app(args), name="test")
    return f"http://127.0.0.1:{port}"


ARGS: dict[str, Any] = {
    "model": str(MODEL),
    "served_model_name": "demo",
    "dtype": "float32",
    "max_model_len": 2048,
    "kv_cpu_bytes": 2**26,
    "speculative_config": {"decoding_type": "NGram", "max_draft_len": 4},
    "serve": {"port": None},  # files of tests run side by side
}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_serving(url: str) -> None:
    """One start, one walk through everything that needs it."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    http = httpx.Client(base_url=url, timeout=120)
    options: dict[str, Any] = {"model": "demo", "prompt": "def main(", "temperature": 0}

    assert http.get("/health").json() == {"status": "ok"}
    assert [model.id for model in client.models.list()] == ["demo", "tuned"]

    whole = client.completions.create(**options, max_tokens=24)
    usage = {"include_usage": True}
    chunks = list(
        client.completions.create(**options, max_tokens=24, stream=True, stream_options=usage)
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.model_dump()["speculation"]["num_steps"] > 0

    adapted = client.completions.create(**{**options, "model": "tuned"}, max_tokens=24)
    assert adapted.model == "tuned"
    assert adapted.choices[0].text != whole.choices[0].text

    def ask(_: int) -> str:
        return client.completions.create(**options, max_tokens=24).choices[0].text

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(ask, range(4))) == {whole.choices[0].text}

    stop = whole.choices[0].text[5:8]
    stopped = client.completions.create(**options, max_tokens=400, stop=stop)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == whole.choices[0].text.split(stop)[0]

    chat = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "hello"}], max_tokens=8
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens <= 8

    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"name": "answer", "schema": {**schema, "additionalProperties": False}}
    held = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": form},
    )
    assert json.loads(held.choices[0].message.content or "")["ok"] in (True, False)
    unknown = {"guided_grammar": 'start: <|no_such_token|> "a"'}  # found by the engine alone
    with pytest.raises(openai.BadRequestError, match="no_such_token"):
        client.completions.create(**options, extra_body=unknown)

    def running() -> int:
        return int(http.get("/stats").json()["running"])

    def aborted() -> int:
        return num_aborted(http.get("/metrics").text)

    # Seconds of work, also for a fast machine: none of the completions comes to its end.
    long: dict[str, Any] = {**options, "temperature": 1, "n": 8, "max_tokens": 1900}
    stream = client.completions.create(**long, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_for(lambda: (running(), aborted()) == (0, 8))
    with connect(int(url.rpartition(":")[2])) as connection:
        connection.sendall(completion({**long, "ignore_eos": True}))
        wait_for(lambda: running() == 8)
    wait_for(lambda: (running(), aborted()) == (0, 16))
    (engine,) = http.get("/stats").json()["engines"]
    assert engine["kv"]["num_free_blocks"] == engine["kv"]["num_blocks"]

    for content in (b"{", b"\xff"):
        answer = http.post("/v1/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")
    answer = http.post("/v1/completions", json={**options, "max_tokens": 9999})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")

    traced = {**options, "max_tokens": 24, "speculation": {"trace": True}}
    (choice,) = http.post("/v1/completions", json=traced).json()["choices"]
    tokens = [token for step in choice["speculation_trace"] for token in step["tokens"]]
    assert "".join(token["text"] for token in tokens) == whole.choices[0].text
    assert {token["origin"] for token in tokens} <= {"ngram", "target"}
    assert "<title>Outrider</title>" in http.get("/").text
    assert http.get("/page/app.js").headers["content-type"].startswith("text/javascript")

    text = http.get("/metrics").text
    assert "outrider:request_queue_time_seconds_count" in text
    assert 'outrider:spec_decode_num_drafts_total{drafter="ngram"' in text
    # Both edges are in it, whichever was asked.
    assert (
        len(
            {
                line
                for line in text.splitlines()
                if "outrider:time_to_first_token_seconds_count" in line
            }
        )
        == 2
    )
    # vLLM's names in our text, and in what Ray's agent on this node exports.
    wait_for(lambda: in_ray("ray_vllm_generation_tokens_total") == given(text), timeout_s=60)
    assert in_ray("ray_vllm_time_to_first_token_seconds_count") > 0
    assert in_ray("ray_vllm_spec_decode_num_accepted_tokens_per_pos_total") > 0
    assert in_ray("ray_vllm_num_requests_running") == 0
    labels = re.findall(r"ray_vllm_prompt_tokens_total{(.*)}", exported_by_ray())
    assert labels
    for label in ("WorkerId", "replica", "deployment", "model_name"):  # of Ray's own panels
        assert f'{label}="' in labels[0]
    assert http.post("/reset_prefix_cache").json() == {"num_engines": 1}
    replicas = below("ray::ServeReplica:")
    assert len(replicas) == 3, "an engine and two ingresses"
    for each in replicas:
        assert "libtorch" not in Path(f"/proc/{each}/maps").read_text(), "it computes nothing"


def given(text: str, name: str = "vllm:generation_tokens_total") -> float:
    """The sum of a metric's series in Prometheus' text."""
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def in_ray(name: str) -> float:
    return given(exported_by_ray(), name)


def exported_by_ray() -> str:
    import ray

    (node,) = ray.nodes()
    place = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
    return httpx.get(f"http://{place}/metrics", trust_env=False).text


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({}, "model"),
        ({"model": "m", "num_replicas": 2}, "num_replicas"),
        ({"model": "m", "serve": {"num_replica": 2}}, "serve.num_replica"),
        ({"model": "m", "serve": {"num_replicas": 0}}, "serve.num_replicas"),
        ({"model": "m", "serve": {"num_ingress_replicas": 0}}, "serve.num_ingress_replicas"),
        ({"model": "m", "serve": {"num_ingress_replicas": "two"}}, "serve.num_ingress_replicas"),
        ({"model": "m", "serve": 3}, "serve"),
        ({"model": "m", "server": {}}, "server"),
        ({"model": "m", "speculative_config": {"decoding_type": "X"}}, "speculative_config"),
    ],
)
def test_wrong_arguments(args: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_args(args)
    assert str(caught.value.field).startswith(field)


@pytest.mark.parametrize(
    ("access", "count"),
    [
        ({}, 2),
        ({"keys": [{"hash": hash_of("a"), "max_request_tokens": 9}]}, 2),
        ({"keys": [{"hash": hash_of("a"), "tokens_per_minute": 9}]}, 1),
        ({"keys_file": "keys.yaml"}, 1),
    ],
)
def test_a_second_ingress_where_limits_need_not_be_shared(
    access: dict[str, Any], count: int
) -> None:
    section = read_args({"model": "m", "serve": {"access": access}})[1]
    assert (section.num_ingress_replicas, section.num_ingresses) == ("auto", count)
    both = {"access": access, "num_ingress_replicas": 3}
    assert read_args({"model": "m", "serve": both})[1].num_ingresses == 3


def test_arguments_of_a_command_line_are_text() -> None:
    config, section = read_args(
        {
            "model": "m",
            "tensor_parallel_size": "2",
            "serve.num_replicas": "3",
            "serve.request_timeout_s": "null",
            "speculative_config": '{"method": "draft_model", "model": "d"}',
        }
    )
    assert (config.tensor_parallel_size, section.num_replicas) == (2, 3)
    assert section.request_timeout_s is None
    assert isinstance(config.speculative_config, DraftTargetConfig)
    both = {"model": "m", "serve": {"num_replicas": 2}, "serve.request_timeout_s": 5}
    _, section = read_args(both)
    assert (section.num_replicas, section.request_timeout_s) == (2, 5)
    assert both["serve"] == {"num_replicas": 2}  # the caller's stays as it was
