"""Clients in environments of their own, unchanged, against a real engine behind a socket.

A client is installed at its first use, since clients' pins exclude one another and some of ours. A
client that cannot be installed is a failure. The versions that ran are those of `docs/clients.md`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from outrider.client import ResumingTransport
from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.resuming import ResumePolicy
from outrider.cluster.serve.openai.routes import build_http
from outrider.cluster.serve.resume_tokens import TokenStore
from outrider.engine.frontend import Frontend
from outrider.tests.helpers.adapters import write_adapter
from outrider.tests.helpers.engines import engine_of
from outrider.tests.helpers.head_files import eagle_tensors, write_eagle
from outrider.tests.helpers.models import write_models
from outrider.tests.helpers.pages import BLOCK, PAGES, ROOT

FOLDER = Path(os.environ.get("OUTRIDER_CLIENTS", ROOT / ".clients"))
SCRIPTS = ROOT / "tests/helpers/clients"
PACKAGES = {  # by client: the package whose version counts
    "langchain": "langchain-openai",
    "litellm": "litellm",
    "instructor": "instructor",
    "lm_eval": "lm_eval",
    "vllm": "vllm",
    "guidellm": "guidellm",
}
OFFICIAL = ("openai", "anthropic")  # in the environment of the tests itself
NGRAM = {"decoding_type": "NGram", "max_draft_len": 4}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass
class Served:
    """A real engine, drafting, behind a real socket."""

    url: str
    model: str


@pytest.fixture(scope="module")
def served(tokenizer_path: Path, tmp_path_factory: Any) -> Iterator[Served]:
    sizes = {"num_hidden_layers": 3, "max_position_embeddings": 1024}  # the tokens are short
    models = write_models(tokenizer_path, tmp_path_factory.mktemp("clients"), **sizes)
    keys = {"served_model_name": "tiny", "enable_lora": True}
    with engine_of(models["target"], NGRAM, **keys) as engine:
        frontend = Frontend(engine._config, engine.info)
        client, policy = EngineClient(engine, TokenStore(30.0)), ResumePolicy(enabled=True)
        edge = Edge(client, frontend, EdgeMetrics("tiny"), resuming=policy)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(build_http(edge), log_level="critical"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", str(models["target"]))
        server.should_exit = True
        thread.join(10)


def environment(client: str) -> Path:
    """The client's Python; installs what is not there, or not by the present requirements."""
    requirements = SCRIPTS / f"requirements-{client}.txt"
    folder, mark = FOLDER / client, FOLDER / client / "installed.txt"
    wanted = f"{sys.version}\n{requirements.read_text()}"
    python = folder / "bin" / "python"
    if mark.exists() and mark.read_text() == wanted:
        return python
    venv.create(folder, clear=True, with_pip=True)
    install = (str(python), "-m", "pip", "install", "-q", "--retries", "1", "-r", str(requirements))
    done = subprocess.run(install, capture_output=True, text=True, timeout=1500)
    if done.returncode:
        pytest.fail(f"{client}: its packages cannot be installed: {done.stderr[-2000:]}")
    mark.write_text(wanted)
    return python


def run(client: str, *args: str) -> str:
    """What a client's script prints; it fails by its own asserts."""
    python = environment(client)
    printed = output_of(str(python), str(SCRIPTS / f"{client}_client.py"), *args)
    check_version(client, python)
    return printed


def check_version(client: str, python: Path) -> None:
    """The page of clients has the version that ran."""
    package = PACKAGES[client]
    show = f"from importlib.metadata import version; print(version({package!r}))"
    assert documented()[package] == output_of(str(python), "-c", show).strip()


def documented() -> dict[str, str]:
    """The versions on the page of clients, by package."""
    page = (ROOT / "docs/clients.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| [")]
    names = [*PACKAGES.values(), *OFFICIAL]
    # "openai" is also a part of another's name.
    return {
        max((name for name in names if name in row.lower()), key=len): value.strip()
        for row, value in rows
    }


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
    run(name, served.url)


@pytest.mark.parametrize("package", OFFICIAL)
def test_the_official_clients_of_the_page_are_those_that_tests_use(package: str) -> None:
    assert documented()[package] == version(package)
    assert set(documented()) == {*PACKAGES.values(), *OFFICIAL}


def test_a_client_that_cannot_be_installed_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FOLDER", tmp_path)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(pytest.fail.Exception, match=r"litellm: .* cannot be installed: .*litellm"):
        environment("litellm")
    assert not (tmp_path / "litellm" / "installed.txt").exists()


def test_lm_eval(served: Served, tmp_path: Path) -> None:
    """Its log-likelihoods are those of the model itself, and so is what it generates."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    printed = run("lm_eval", served.url, served.model, str(tmp_path))
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


def load_client(name: str) -> str:
    """A client where it is: one that is named, one that its target installed, one on the PATH."""
    own = FOLDER / name / "bin" / name
    found = str(own) if own.exists() else shutil.which(name)
    program = os.environ.get(f"OUTRIDER_{name.upper()}", found)
    if program is None or not Path(program).exists():
        pytest.skip(f"`make clients-{name}` installs this client; there is no {program or own}")
    return program


def test_load_clients_are_run_where_they_are(tmp_path: Path, monkeypatch: Any) -> None:
    program = tmp_path / "guidellm"
    monkeypatch.setattr(f"{__name__}.FOLDER", tmp_path / "clients")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("OUTRIDER_GUIDELLM", raising=False)
    with pytest.raises(pytest.skip.Exception, match="make clients-guidellm"):
        load_client("guidellm")
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert load_client("guidellm") == str(program)
    own = tmp_path / "clients" / "guidellm" / "bin" / "guidellm"
    own.parent.mkdir(parents=True)
    own.touch()
    assert load_client("guidellm") == str(own)
    monkeypatch.setenv("OUTRIDER_GUIDELLM", str(program))
    assert load_client("guidellm") == str(program)


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_guidellm(served: Served, tmp_path: Path, path: str) -> None:
    """Its counts of every request's tokens are those that it asked for."""
    program, target = load_client("guidellm"), served.url.removesuffix("/v1")
    output_of(
        *(program, "run", "--disable-console", "--profile", "kind=concurrent,streams=3"),
        *("--backend", f"kind=openai_http,target={target},model=tiny,request_format=/v1/{path}"),
        *("--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=huggingface_auto,model={served.model}"),
        *("--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=12"),
        *("--output", f"kind=json,path={tmp_path / 'result.json'}"),
    )
    if Path(program).is_relative_to(FOLDER):
        check_version("guidellm", Path(program).parent / "python")
    (benchmark,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert metrics["request_totals"] == totals
    counted = metrics["output_token_count"]["successful"]
    assert (counted["min"], counted["max"]) == (12, 12)
    assert metrics["time_to_first_token_ms"]["successful"]["count"] == 6


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
    program = load_client("vllm")
    output_of(
        *(program, "bench", "serve", "--backend", backend, "--endpoint", f"/v1/{path}"),
        *("--base-url", served.url.removesuffix("/v1"), "--model", "tiny"),
        *("--tokenizer", served.model, "--dataset-name", "random", "--num-prompts", "6"),
        *("--random-input-len", "20", "--random-output-len", "12", "--max-concurrency", "3"),
        *("--temperature", "0", "--ignore-eos", "--disable-tqdm", "--save-result"),
        *("--result-dir", str(tmp_path), "--result-filename", "result.json"),
        timeout_s=600,
    )
    if Path(program).is_relative_to(FOLDER):
        check_version("vllm", Path(program).parent / "python")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result.get("failed", 0)) == (6, 0)
    assert result["total_output_tokens"] == 6 * 12
    assert result["total_input_tokens"] >= 6 * 20
    assert result["spec_decode_num_drafts"] > 0, "it reads how drafts fare at /metrics"
    assert result["spec_decode_draft_tokens"] >= result["spec_decode_num_drafts"]


# -- what the pages show of the official clients


CODE = "def add(a, b):\n    return a + b\n"
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["cat"]}}, "required": ["name"]}
NOT_RUN = {
    "lm_eval --model": "the task's questions are a download; `test_lm_eval` runs the client",
    "curl localhost:8000/init_weights": "a trainer takes part: tests/cluster/test_weights.py",
    "curl localhost:8000/admin/adaptation": "a round of training: tests/engine/test_adaptation.py",
}
"""Blocks that are shown and not run, by how they begin, and why."""


def shown_blocks() -> list[tuple[str, str, str]]:
    """Page, language and text of the blocks of clients that the tests of pages leave out."""
    server = re.compile(r"localhost:8000|127\.0\.0\.1:8000|\bclient\.\w+\.")
    return [
        (page.relative_to(ROOT).as_posix(), language, text)
        for page in PAGES
        if page.name != "transcripts.md"  # test_transcripts.py runs it as a whole
        for language, info, text in BLOCK.findall(page.read_text())
        if server.search(text)
        and ("notest" in info or (language in ("sh", "bash") and "curl " in text))
    ]


RUN = [each for each in shown_blocks() if not each[2].startswith(tuple(NOT_RUN))]


@dataclass
class Shown:
    """What stands for the server, the model and the folders that pages name."""

    url: str  # without /v1
    folder: Path
    files: dict[str, str]

    def of(self, text: str) -> str:
        """The block, for this server."""
        for name, own in self.files.items():
            text = text.replace(name, own)
        text = re.sub(r"(http://)?(localhost|127\.0\.0\.1):8000", self.url, text)
        return text.replace('"target"', '"tiny"')

    def run_python(self, text: str) -> None:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        assumed = {"client": client, "schema": SCHEMA, "code": CODE, "openai": openai}
        assumed |= {"httpx": httpx, "ResumingTransport": ResumingTransport}
        exec(compile(self.of(text), "page", "exec"), assumed)
        if (stream := assumed.get("stream")) is not None:
            for _ in stream if isinstance(stream, openai.Stream) else ():
                pass

    def draft_by(self, section: dict[str, Any]) -> None:
        """Replaces all drafters of the server."""
        body = {"speculative_config": section}
        answer = httpx.post(f"{self.url}/admin/drafters", json=body, timeout=60)
        assert answer.is_success, answer.text

    def run_shell(self, text: str) -> None:
        """Line by line, as a user's shell; a trace that has begun gets a request."""
        for line in self.of(text).replace("\\\n", " ").splitlines():
            word, _, rest = line.partition(" ")
            command = {
                "curl": f"curl -sS --fail-with-body {rest}",
                "outrider": f"{sys.executable} -m outrider {rest}",
            }[word]
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            if '"action": "start"' in line:
                self.run_python("client.completions.create(model='tiny', prompt='the cat')")


@pytest.fixture
def shown(served: Served, tmp_path: Path) -> Shown:
    head = write_eagle(tmp_path / "head", *eagle_tensors(served.model, 3))
    adapter = write_adapter(tmp_path / "adapter", served.model)
    url = served.url.removesuffix("/v1")
    files = {"/checkpoints/step-200": served.model, "/heads/v2": head, "/loras/sql": adapter}
    for name, text in (("product.jsonl", '{"text": "the cat sat"}\n'), ("old.txt", "a dog ran\n")):
        file = tmp_path / name
        file.write_text(text)
        files[f"/data/{name}"] = str(file)
    return Shown(url, tmp_path, files)


@pytest.mark.parametrize(("page", "language", "text"), RUN)
def test_what_a_page_shows_runs(shown: Shown, page: str, language: str, text: str) -> None:
    """A block of Python, or a shell's, against this server; the page may assume a client."""
    run_block = shown.run_python if language == "python" else shown.run_shell
    files, section = shown.files, None
    if '"replaces": "eagle3"' in text:
        section = {"decoding_type": "Eagle3", "speculative_model": files["/heads/v2"]}
    if "/admin/corpora" in text:
        section = {"decoding_type": "Suffix", "corpora": [files["/data/old.txt"]]}
    if section is not None:
        shown.draft_by(section)
    run_block(text)
    if section is not None:
        shown.draft_by(NGRAM)


def test_blocks_that_are_not_run_are_on_pages() -> None:
    texts = [text for _, _, text in shown_blocks()]
    assert all(any(text.startswith(begin) for text in texts) for begin in NOT_RUN)
    assert len(RUN) == len(texts) - len(NOT_RUN)
