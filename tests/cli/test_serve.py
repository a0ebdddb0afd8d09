"""`outrider serve` before anything heavy is started, and once as a whole."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from outrider.cli.serve import _url
from outrider.cluster.serve.args import ServeConfig
from outrider.cluster.serve.front_door import check_port
from outrider.errors import ConfigError

from ..helpers import ports


@pytest.fixture
def busy_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture
def free_port():
    return ports.free_port()


def test_port_in_use_is_said_at_once(outrider_cli, busy_port, model, monkeypatch):
    monkeypatch.setattr("outrider.cli.serve.prepare", lambda *_, **__: pytest.fail("too late"))
    result = outrider_cli("serve", model, "--port", busy_port)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: port: cannot listen on 127.0.0.1:")
    assert "--port" in result.stderr


def test_host_that_is_no_address():
    with pytest.raises(ConfigError) as caught:
        check_port("no.such.host.invalid", 8000)
    assert caught.value.field == "host"


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("/nowhere",), "model"),
        (("--config", "/nowhere.yaml"), "config"),
        (("m", "--executor", "local"), "executor"),
        (("m", "--route-prefix", "v2"), "serve.route_prefix"),
        (("m", "--num-replicas", "many"), "serve.num_replicas: expected an integer"),
        (("/nowhere", "--num-replicas", "auto"), "model path"),
        (("m", "--cors-allowed-origin", "https://a.org/"), "cors_allowed_origins"),
        (("demo/models/target", "--ssl-certfile", "/nowhere.pem"), "ssl_certfile"),
        (("m", "--ssl-keyfile", "/nowhere.pem"), "serve.ssl_certfile"),
    ],
)
def test_mistakes_are_named(outrider_cli, free_port, args, field):
    result = outrider_cli("serve", *args, "--port", free_port)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {field}")


def test_a_port_that_is_none_is_named(outrider_cli):
    result = outrider_cli("serve", "m", "--port", "0")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: serve.port")


def test_url_is_one_that_a_client_can_use():
    assert _url(ServeConfig(host="0.0.0.0", port=80)) == "http://127.0.0.1:80"
    section = ServeConfig(host="::", port=443, route_prefix="/llm/", ssl_certfile="cert.pem")
    assert _url(section) == "https://[::1]:443/llm"


@pytest.mark.slow
def test_serves_until_it_is_terminated_and_leaves_nothing(free_port, model):
    """SIGTERM in the middle of a stream: the stream ends as it should, then everything does."""
    args = ["serve", str(model), "--port", str(free_port), "--spec-type", "ngram"]
    server = subprocess.Popen(
        [sys.executable, "-m", "outrider", *args, "--stats-interval-s", "1"],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    url = f"http://127.0.0.1:{free_port}"
    said: list[str] = []
    listener = threading.Thread(target=lambda: said.extend(server.stderr), daemon=True)
    listener.start()
    try:
        _wait_until_ready(server, url, said)
        body = {"prompt": "def main(", "max_tokens": 24, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).json()
        assert answer["usage"]["completion_tokens"] == 24
        talk = subprocess.run(
            [sys.executable, "-m", "outrider", "chat", "--url", url, "--max-tokens", "8"],
            input="hello\n/stats\n",
            capture_output=True,
            text=True,
            check=True,
        )
        assert "statistics ngram" in talk.stderr
        ports.wait_for(lambda: "draft acceptance rate" in "".join(said))
        started = _descendants(server.pid)
        assert any("Rank" in command for command in started.values()), started
        body = {"prompt": "def main(", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120.0) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            server.send_signal(signal.SIGTERM)
            late = []
            for line in lines:
                late += [line] if "Shutting down" in "".join(said) else []
        assert len(late) > 1, "the stream was over before the server began to shut down"
        assert late[-1] == "data: [DONE]"
        server.wait(90.0)
        listener.join(30.0)
        assert server.returncode == 0, said
        assert not [line for line in said if "raylet" in line]
        left = {pid: name for pid, name in started.items() if Path(f"/proc/{pid}").exists()}
        assert not left
        assert f"{url}/v1" in "".join(said)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)


def _descendants(pid: int) -> dict[int, str]:
    """All processes below `pid`, with their command lines."""
    found: dict[int, str] = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        for child in (folder / "children").read_text().split():
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            found |= _descendants(int(child))
    return found


def _wait_until_ready(server: subprocess.Popen, url: str, said: list[str]) -> None:
    deadline = time.monotonic() + 240.0
    while time.monotonic() < deadline:
        assert server.poll() is None, said
        try:
            if httpx.get(f"{url}/v1/models", timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError("the server did not come up")


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("-tp", 5), "tensor_parallel_size"),
        (("--max-model-len", 10**6), "max_model_len"),
        (("--chat-template", "{% if %}"), "chat_template"),
        (("--tokenizer", "/nowhere"), "tokenizer"),
        (("--drafter", "no_such:Drafter"), "speculative_config.drafter"),
        (("--device", "cuda"), "device"),
        (("--num-kv-blocks", 2, "--max-model-len", 100), "num_kv_blocks"),
        (("--speculative-config", '{"method": "eagle", "model": "/nowhere"}'),
         "speculative_config"),
    ],
)  # fmt: skip
def test_what_files_show_is_found_before_ray_starts(outrider_cli, target, monkeypatch, args, field):
    monkeypatch.setattr("outrider.cli.session.find_ray", lambda _: None)
    monkeypatch.setattr("outrider.cli.session.start_ray", lambda *_, **__: pytest.fail("too late"))
    result = outrider_cli("serve", target, "--port", 18431, *args)
    assert result.exit_code == 1, result.output
    assert result.stderr.splitlines()[-1].startswith(f"error: {field}")


@pytest.mark.parametrize(
    ("file", "content", "field"),
    [
        ("config.json", b"{", "model"),
        ("generation_config.json", b"[]", "model"),
        ("tokenizer.json", b"{", "tokenizer"),
        ("tokenizer_config.json", b"[]", "tokenizer"),
        ("chat_template.jinja", b"{% for m in messages %}", "chat_template"),
        ("model.safetensors", b"", "model"),
    ],
)
def test_a_damaged_file_is_found_before_ray_starts(
    outrider_cli, tmp_path, model, monkeypatch, file, content, field
):
    monkeypatch.setattr("outrider.cli.session.find_ray", lambda _: None)
    monkeypatch.setattr("outrider.cli.session.start_ray", lambda *_, **__: pytest.fail("too late"))
    folder = shutil.copytree(model, tmp_path / "copy")
    (folder / file).write_bytes(content)
    result = outrider_cli("serve", folder, "--port", 18431)
    assert result.exit_code == 1, result.output
    assert result.stderr.splitlines()[-1].startswith(f"error: {field}: ")
