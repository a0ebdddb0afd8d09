"""`outrider serve` over the demo models with every kind of process, for benches of its failures."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import yaml

from ..suite.servers import ServerContender, ServerError, ServerSpec
from .costs import Process, below

_DEMO = Path(__file__).resolve().parents[2] / "demo" / "models"
_SPECULATION = {
    "decoding_type": "Compose",
    "members": [
        {
            "decoding_type": "NGram",
            "max_draft_len": 4,
            "pool_scope": "cluster",
            "pool_max_patterns": 8192,  # full within the warm-up of a soak
        },
        {
            "decoding_type": "DraftTarget",
            "speculative_model": str(_DEMO / "draft"),
            "max_draft_len": 3,
        },
    ],
}
_POLL_S = 0.25


class DemoServer:
    """A running server and its processes."""

    def __init__(self, contender: ServerContender, *, has_spares: bool) -> None:
        self.has_spares = has_spares
        self.url = contender.endpoint.url
        self._root = contender.pid

    def processes(self) -> list[Process]:
        """All that the command started, and itself."""
        return below(self._root)

    def pids(self, kind: str) -> list[int]:
        """Processes of a kind: a role of `Process`, or `drafter` and `spare`, which are workers."""
        if kind not in ("rank", "drafter", "spare"):
            return [each.pid for each in self.processes() if each.role == kind]
        wanted = {"rank": ("target", "active"), "drafter": ("draft", "active")}.get(kind)
        return [
            worker["process"]
            for worker in self.workers()
            if wanted == (worker["role"], worker["state"])
            or (wanted is None and worker["state"] == "spare")
        ]

    def stats(self) -> dict[str, Any]:
        """`/stats`."""
        with httpx.Client(timeout=10.0, trust_env=False) as http:
            return dict(http.get(f"{self.url}/stats").raise_for_status().json())

    def engines(self) -> list[dict[str, Any]]:
        """The statistics of every engine."""
        return [each for each in self.stats()["engines"] if "error" not in each]

    def workers(self) -> list[dict[str, Any]]:
        """Workers and spare workers of all engines."""
        return [worker for engine in self.engines() for worker in engine["workers"]]

    def counts(self, kinds: Sequence[str]) -> dict[str, int]:
        """How many processes of each kind there are, or will be: a spare for every worker."""
        found = {kind: len(self.pids(kind)) for kind in kinds}
        if self.has_spares:
            found["spare"] = sum(worker["state"] == "active" for worker in self.workers())
        return found

    def is_whole(self, counts: dict[str, int]) -> bool:
        """Whether requests are answered and every kind has as many processes as in `counts`."""
        try:
            # A request first: a drafter is looked at, and restarted, where one wants its drafts.
            body = {"prompt": "def", "max_tokens": 8, "ignore_eos": True}
            with httpx.Client(timeout=10.0, trust_env=False) as http:
                if not http.post(f"{self.url}/v1/completions", json=body).is_success:
                    return False
            engines = self.engines()
            drafters = [each["drafters"].values() for each in engines]
            if not engines or any(
                one["health"]["state"] != "active" for each in drafters for one in each
            ):
                return False
            return all(len(self.pids(kind)) >= count for kind, count in counts.items())
        except (httpx.HTTPError, LookupError, TypeError, ValueError):
            return False

    def wait_until_whole(self, counts: dict[str, int], timeout_s: float) -> float:
        """Seconds until `is_whole` (raises `ServerError`)."""
        begun = time.monotonic()
        while not self.is_whole(counts):
            if time.monotonic() - begun > timeout_s:
                raise ServerError(f"the server was not whole again within {timeout_s:.0f} s")
            time.sleep(_POLL_S)
        return time.monotonic() - begun


@contextmanager
def demo_server(
    settings: dict[str, Any] | None = None, log: Path | None = None
) -> Iterator[DemoServer]:
    """Starts a server on a Ray of its own and stops it at the end.

    Args:
        settings: keys of the engine and a `serve` section, over those of the demo.
        log: where the server's output goes.
    """
    config: dict[str, Any] = {
        "model": str(_DEMO / "target"),
        "dtype": "float32",
        "kv_cpu_bytes": 2**28,
        "max_restarts": 1000,
        "tool_call_parser": "hermes",
        "resources": {"spare_workers": True},
        "speculative_config": _SPECULATION,
        **(settings or {}),
    }
    with TemporaryDirectory() as folder:
        file = Path(folder) / "server.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "outrider", "serve", "--config", str(file)]
        command += ["--address", "local", "--stats-interval-s", "0"]
        spec = ServerSpec("demo", command=shlex.join(command) + " --port {port}")
        contender = ServerContender(spec, log or Path(folder) / "server.log")
        try:
            contender.start()
            yield DemoServer(contender, has_spares=config["resources"]["spare_workers"])
        finally:
            contender.close()
