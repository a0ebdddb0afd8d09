"""A server as a contender: by URL, or started by a command and stopped afterwards."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ...errors import ConfigError, OutriderError
from ...scheduler.sampling import SamplingParams
from ..client.load import Endpoint, negotiate, parse, send_all
from ..measure import Load, Run, add_acceptance

_POLL_S = 0.25
_STOP_TIMEOUT_S = 30.0
_END_S = 1.0  # in which a process ends that has closed its connections
_LOG_TAIL_LINES = 4
_HOST = "127.0.0.1"
_PLACEHOLDER = re.compile(r"\{(\w+)\}")  # JSON in a command is left alone
# Where servers say their version: the path, and the key in its JSON.
_VERSIONS = (("/version", "version"), ("/props", "build_info"), ("/get_server_info", "version"))
PRESETS = {
    "vllm": "vllm serve {model} --host 127.0.0.1 --port {port} --dtype {dtype} "
    "--max-model-len {max_model_len} --max-num-seqs {max_num_seqs}",
    "sglang": "python -m sglang.launch_server --model-path {model} --host 127.0.0.1 "
    "--port {port} --dtype {dtype}",
    "tensorrt-llm": "trtllm-serve {model} --host 127.0.0.1 --port {port}",
    "llama-server": "llama-server --model {model} --host 127.0.0.1 --port {port} "
    "--threads {threads} --parallel {max_num_seqs}",
}


class ServerError(OutriderError):
    """A server did not start, died, or answered no request."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to get at a server: `url` of one that runs, or `command` that starts one."""

    name: str
    url: str | None = None
    command: str | None = None  # with {port}, and maybe {model} and others

    @classmethod
    def parse(cls, text: str, values: Mapping[str, Any]) -> ServerSpec:
        """`NAME`, `NAME=URL` or `NAME=COMMAND`; a name alone is one of `PRESETS`.

        Args:
            values: what placeholders of a command stand for; `port` is filled in later.

        Raises:
            ConfigError: not of this form, no such preset, or an unknown placeholder.
        """
        name, _, target = (part.strip() for part in text.partition("="))
        if not target:
            if name not in PRESETS:
                raise ConfigError(
                    f"peer: {text!r} is neither NAME=URL nor NAME=COMMAND, and no preset "
                    f"({', '.join(PRESETS)})",
                    field="peer",
                )
            target = PRESETS[name]
        if target.startswith(("http://", "https://")):
            return cls(name, url=target.rstrip("/").removesuffix("/v1"))
        values = {**values, "port": "{port}"}
        for placeholder in _PLACEHOLDER.findall(target):
            if placeholder not in values:
                allowed = ", ".join(f"{{{key}}}" for key in values)
                raise ConfigError(
                    f"peer: {name}: unknown placeholder {{{placeholder}}}; allowed: {allowed}",
                    field="peer",
                )
        command = _PLACEHOLDER.sub(lambda match: str(values[match[1]]), target)
        if "{port}" not in command:
            raise ConfigError(f"peer: {name}: the command has no {{port}}", field="peer")
        return cls(name, command=command)


class ServerContender:
    """A server on the other end of HTTP.

    Args:
        log: file for what a started server prints.
        env: what its environment has beside ours.
        start_timeout_s: how long it may take until `/v1/models` answers.
        request_timeout_s: how long one request may take.
    """

    def __init__(
        self,
        spec: ServerSpec,
        log: Path,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 600.0,
        request_timeout_s: float = 600.0,
    ) -> None:
        self.name = spec.name
        self.spec = spec
        self.version: str | None = None
        self._log = log
        self._env = dict(env or {})
        self._start_timeout_s = start_timeout_s
        self._request_timeout_s = request_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        url = self.spec.url
        if self.spec.command is not None:
            port = _free_port()
            command = self.spec.command.replace("{port}", str(port))
            self._process = self._launch(shlex.split(command))
            url = f"http://{_HOST}:{port}"
        assert url is not None, self.spec
        with httpx.Client(base_url=url, timeout=10.0, trust_env=False) as http:
            model = self._wait_until_ready(http)
            self.version = _version(http)
        self._endpoint = self._probe(url, model)

    @property
    def endpoint(self) -> Endpoint:
        """Of the server that was started."""
        return self._endpoint

    @property
    def pid(self) -> int:
        """Of the process that `start` started."""
        assert self._process is not None, self.spec
        return self._process.pid

    def takes(self, load: Load) -> bool:
        return True

    def run(self, prompts: Sequence[str], sampling: SamplingParams, load: Load) -> Run:
        bodies = [_body(prompt, sampling, index) for index, prompt in enumerate(prompts)]
        exchanges, wall_s = send_all(self._endpoint, bodies, load)
        answers = [parse(index, exchange) for index, exchange in enumerate(exchanges)]
        failures = tuple(each.failure for each in answers if each.failure is not None)
        is_cut_off = any(not each.startswith("status") for each in failures)
        self._check_alive(_END_S if is_cut_off else 0.0)
        if len(failures) == len(answers):
            raise ServerError(f"no request was answered: {failures[0]}")
        parts = [each.acceptance for each in answers if each.acceptance is not None]
        return Run(
            contender=self.name,
            load=load,
            wall_s=wall_s,
            traces=tuple(each.trace for each in answers if each.trace is not None),
            failures=failures,
            acceptance=add_acceptance(parts) if parts else None,
        )

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
        with suppress(ProcessLookupError, PermissionError):  # its children, if it left any
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _launch(self, command: list[str]) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            try:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._env},
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"cannot start {command[0]}: {error.strerror}") from None

    def _wait_until_ready(self, http: httpx.Client) -> str:
        """The name of the model that is served."""
        deadline = time.monotonic() + self._start_timeout_s
        said = "no answer"
        while time.monotonic() < deadline:
            self._check_alive()
            try:
                response = http.get("/v1/models")
                if response.status_code == httpx.codes.OK:
                    return str(response.json()["data"][0]["id"])
                said = f"status {response.status_code}"
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                said = f"{type(error).__name__}: {error}"
            if self._process is None and "Connect" in said:
                break  # nobody starts a server that is given by URL
            time.sleep(_POLL_S)
        raise ServerError(f"/v1/models did not answer: {said}")

    def _probe(self, url: str, model: str) -> Endpoint:
        """The endpoint with the stream options that the server takes."""
        body = {"prompt": "1, 2, 3,", "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
        plain = Endpoint(url, model, {}, self._request_timeout_s)
        endpoint, failure = negotiate(plain, body)
        if failure is None:
            return endpoint
        self._check_alive()
        raise ServerError(f"the first request failed: {failure}")

    def _check_alive(self, patience_s: float = 0.0) -> None:
        if self._process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        if self._process.returncode is not None:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            tail = " | ".join(line.strip() for line in lines if line.strip())
            last = " | ".join(tail.split(" | ")[-_LOG_TAIL_LINES:])
            raise ServerError(
                f"the server ended with status {self._process.returncode}: {last or 'no output'}"
            )


def _body(prompt: str, sampling: SamplingParams, index: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
    }
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.temperature > 0:
        body["seed"] = (sampling.seed or 0) + index
    return body


def _version(http: httpx.Client) -> str | None:
    for path, key in _VERSIONS:
        with suppress(httpx.HTTPError, ValueError, AttributeError):
            response = http.get(path)
            if response.status_code == httpx.codes.OK and response.json().get(key):
                return str(response.json()[key])
    return None


def _free_port() -> int:
    """One that is free now and outside the range that outgoing connections are given."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return port
