"""`make demo`: serve the shipped model on Ray, stream one answer, show what speculation did.

Everything goes through what a user has: the `outrider serve` command and its HTTP API.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
PROMPT = '''class Stack:
    """A last-in, first-out container."""

    def __init__(self):
        self._items = []

    def push(self, item):
        self._items.append(item)

    def pop(self):'''
READY_TIMEOUT_S = 240.0
END_TIMEOUT_S = 90.0  # a killed server would leave its Ray behind
ANNOUNCED = "Ctrl-C ends it."  # the last line of what `outrider serve` prints when it is ready
SPECULATION = {
    "decoding_type": "DraftTarget",
    "speculative_model": str(HERE / "models" / "draft"),
    "max_draft_len": 4,
}


def main() -> int:
    """Runs the demo; 0 if an answer came."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # in a file, ours and the server's lines in order
        sys.stdout.reconfigure(line_buffering=True)
    console = Console(highlight=False)
    reserved = reserve_port()
    port = reserved.getsockname()[1]
    command = [
        sys.executable, "-m", "outrider", "serve", str(HERE / "models" / "target"),
        "--config", str(HERE / "serve.yaml"), "--speculative-config", json.dumps(SPECULATION),
        "--port", str(port), "--stats-interval-s", "0",
    ]  # fmt: skip
    console.rule("outrider serve demo/models/target")
    environment = {**os.environ, "RAY_DEDUP_LOGS": "0"}
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        import httpx  # while the server starts: it takes longer than all other imports here

        url = f"http://127.0.0.1:{port}"
        wait_until_announced(server)
        console.rule("a completion, streamed")
        console.print(PROMPT, end="", style="dim", markup=False)
        usage: dict[str, Any] = {}
        start = time.perf_counter()
        for text, seen in _stream(url):
            console.print(text, end="", markup=False)
            usage = seen or usage
        elapsed_s = time.perf_counter() - start
        console.print()
        console.rule("statistics")
        _report(console, usage, elapsed_s, httpx.get(f"{url}/stats", timeout=10).json())
        return 0
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
        reserved.close()


def reserve_port() -> socket.socket:
    """A socket on a free port, which nothing but our server gets while the socket is open.

    The server listens many seconds later. Until then Ray's processes are given free ports, for what
    they listen on and for connections; one that a socket is bound to is given to none of them.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server sets it as well
    reserved.bind(("127.0.0.1", 0))
    return reserved


def wait_until_announced(server: subprocess.Popen[str]) -> None:
    """Until the server has printed all of its announcement, which would break into the text else.

    What it prints is passed on, then and later.

    Raises:
        RuntimeError: the server ended, or was not ready in time.
    """
    announced, ended = threading.Event(), threading.Event()

    def relay() -> None:
        assert server.stderr is not None
        for line in server.stderr:
            sys.stderr.write(line)
            sys.stderr.flush()
            if line.startswith(ANNOUNCED):
                announced.set()
        ended.set()
        announced.set()

    threading.Thread(target=relay, daemon=True).start()
    if not announced.wait(READY_TIMEOUT_S):
        raise RuntimeError(f"the server was not ready within {READY_TIMEOUT_S:.0f} s")
    if ended.is_set():
        raise RuntimeError(f"the server ended with exit code {server.wait()}")


def _stream(url: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Pieces of text as they come, and the usage block with the last."""
    import httpx

    body = {
        "model": "target", "prompt": PROMPT, "max_tokens": 160, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        response.read() if response.is_error else None
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                text = chunk["choices"][0]["text"] if chunk["choices"] else ""
                yield text, chunk.get("usage")


def _report(
    console: Console, usage: dict[str, Any], elapsed_s: float, stats: dict[str, Any]
) -> None:
    speculation = usage.get("speculation", {})
    table = Table(show_header=False)
    table.add_row("tokens", str(usage.get("completion_tokens")))
    table.add_row("tokens per second", f"{usage.get('completion_tokens', 0) / elapsed_s:.0f}")
    for key, value in speculation.items():
        table.add_row(key, f"{value:.2f}" if isinstance(value, float) else str(value))
    console.print(table)
    for engine in stats["engines"]:
        for line in engine["lines"]:
            console.print(line, markup=False)


if __name__ == "__main__":
    sys.exit(main())
