"""Clients in environments of their own, unchanged, against a real engine behind a socket.

`make clients` installs them; their pins exclude one another and some of ours (`docs/clients.md`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.engine_client import LocalClient
from outrider.cluster.serve.openai.routes import Edge, build_http
from outrider.engine.frontend import Frontend
from outrider.tests.helpers.engines import engine_of
from outrider.tests.helpers.models import write_models

ROOT = Path(__file__).resolve().parents[4]
FOLDER = Path(os.environ.get("OUTRIDER_CLIENTS", ROOT / ".clients"))
pytestmark = pytest.mark.slow


@dataclass
class Served:
    """A real engine, drafting, behind a real socket."""

    url: str
    model: str


@pytest.fixture(scope="module")
def served(tokenizer_path: Path, tmp_path_factory: Any) -> Iterator[Served]:
    models = write_models(tokenizer_path, tmp_path_factory.mktemp("clients"))
    section = {"decoding_type": "NGram", "max_draft_len": 4}
    with engine_of(models["target"], section, served_model_name="tiny") as engine:
        edge = Edge(LocalClient(engine), Frontend(engine._config, engine.info), EdgeMetrics("tiny"))
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(build_http(edge), log_level="critical"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", str(models["target"]))
        server.should_exit = True
        thread.join(10)


def run(environment: str, script: str, *args: str) -> str:
    """What a client's script prints; it fails by its own asserts."""
    python = FOLDER / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"`make clients` installs this client; there is no {python}")
    return output_of(str(python), str(ROOT / "tests/helpers/clients" / script), *args)


def output_of(*command: str, timeout_s: float = 240) -> str:
    """What a program prints; it has neither our packages nor the network."""
    hidden = ("PYTHONPATH", "PYTHONHOME")
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    env |= {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("name", ["langchain", "litellm", "instructor"])
def test_application_clients(served: Served, name: str) -> None:
    run("apps", f"{name}_client.py", served.url)


def test_lm_eval(served: Served, tmp_path: Path) -> None:
    """Its log-likelihoods are those of the model itself, and so is what it generates."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    printed = run("lm_eval", "lm_eval_client.py", served.url, served.model, str(tmp_path))
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    found = json.loads(line.removeprefix("RESULT "))
    model = AutoModelForCausalLM.from_pretrained(served.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(served.model)
    assert len(found["scores"]) == 4
    for text, choice, score, _ in found["scores"]:
        begin, whole = len(tokenizer.encode(text)), tokenizer.encode(text + choice)
        with torch.inference_mode():
            table = model(torch.tensor([whole])).logits[0].log_softmax(1)
        wanted = sum(float(table[at - 1, whole[at]]) for at in range(begin, len(whole)))
        assert score == pytest.approx(wanted, abs=1e-3), (text, choice)
    assert len(found["texts"]) == 2
    assert all(isinstance(text, str) for _, text in found["texts"])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("openai", "completions"),
        ("openai-chat", "chat/completions"),
        ("openai-responses", "responses"),
    ],
)
def test_vllms_benchmark(served: Served, tmp_path: Path, backend: str, path: str) -> None:
    """Its load client counts every token of every request, through each of the endpoints."""
    program = os.environ.get("OUTRIDER_VLLM", str(FOLDER / "vllm" / "bin" / "vllm"))
    if not Path(program).exists():
        pytest.skip(f"`make clients-vllm` installs vLLM's benchmark; there is no {program}")
    output_of(
        *(program, "bench", "serve", "--backend", backend, "--endpoint", f"/v1/{path}"),
        *("--base-url", served.url.removesuffix("/v1"), "--model", "tiny"),
        *("--tokenizer", served.model, "--dataset-name", "random", "--num-prompts", "6"),
        *("--random-input-len", "20", "--random-output-len", "12", "--max-concurrency", "3"),
        *("--temperature", "0", "--ignore-eos", "--disable-tqdm", "--save-result"),
        *("--result-dir", str(tmp_path), "--result-filename", "result.json"),
        timeout_s=600,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result.get("failed", 0)) == (6, 0)
    assert result["total_output_tokens"] == 6 * 12
    assert result["total_input_tokens"] >= 6 * 20
