"""The longest gap in a running stream while the HTTP edge deals with large bodies.

    python -m outrider.bench.edge_stall [--mb 10]

One process serves the demo target over the edge's own HTTP server, without Ray; this one streams
a completion and meanwhile sends each body once. A gap is the time between two events.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import socket
import sys
import threading
import time
from pathlib import Path

import httpx

_TARGET = Path(__file__).parent.parent / "demo" / "models" / "target"
_LEAD_S = 1.0  # of undisturbed streaming before and after each body


def serve(listener: socket.socket) -> None:
    """An edge over an engine in this process, until it is killed."""
    import uvicorn

    from ..cluster.serve.metrics import EdgeMetrics
    from ..cluster.serve.openai.calls import Edge
    from ..cluster.serve.openai.engine_client import EngineClient
    from ..cluster.serve.openai.routes import build_http
    from ..config import EngineConfig
    from ..engine.engine import Engine
    from ..engine.frontend import Frontend

    config = EngineConfig.load({"model": str(_TARGET), "executor": "local"})
    engine = Engine.start(config)
    edge = Edge(EngineClient(engine), Frontend(config, engine.info), EdgeMetrics("demo"))
    uvicorn.Server(uvicorn.Config(build_http(edge), log_level="error")).run([listener])


def bodies(num_bytes: int) -> dict[str, bytes]:
    """What is sent beside the stream, by name."""
    line = "def main(argument): return argument + 1  # and so on\n"
    text = (line * (num_bytes // len(line) + 1))[:num_bytes].replace("\n", "\\n").encode()
    return {
        "text prompt": b'{"prompt": "' + text + b'"}',
        "chat message": b'{"messages": [{"role": "user", "content": "' + text + b'"}]}',
        "token ids": b'{"prompt": [' + b"7," * (num_bytes // 2) + b"7]}",
        "one key": b'{"' + b"k" * num_bytes + b'": 1}',
    }


class Stream(threading.Thread):
    """Reads one completion after the other; keeps when each event arrived."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.events_s: list[float] = []
        self.running = True

    def run(self) -> None:
        body = {"prompt": "def main(", "stream": True, "max_tokens": 200, "ignore_eos": True}
        with httpx.Client(base_url=self._url, timeout=300) as client:
            while self.running:
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        self.events_s.append(time.perf_counter())
                        if not self.running:
                            return

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """Between two events, of those that overlap with the interval."""
        events = [begin_s, *(at for at in self.events_s if begin_s < at < end_s), end_s]
        return max(later - earlier for earlier, later in itertools.pairwise(events))


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=10.0, help="size of each body")
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(listener,))
    server.start()
    try:
        stream = Stream(url)
        stream.start()
        while len(stream.events_s) < 50:
            time.sleep(0.1)
        _line(
            f"{'body':14} {'status':>6} {'answer s':>9} {'gap before s':>13} {'gap during s':>13}"
        )
        with httpx.Client(base_url=url, timeout=300) as client:
            for name, body in bodies(int(options.mb * 1e6)).items():
                start_s = time.perf_counter()
                time.sleep(_LEAD_S)
                sent_s = time.perf_counter()
                path = "/v1/chat/completions" if name == "chat message" else "/v1/completions"
                status = client.post(path, content=body).status_code
                answered_s = time.perf_counter()
                time.sleep(_LEAD_S)
                before = stream.longest_gap_s(start_s, sent_s)
                during = stream.longest_gap_s(sent_s, time.perf_counter())
                took_s = answered_s - sent_s
                _line(f"{name:14} {status:6} {took_s:9.2f} {before:13.2f} {during:13.2f}")
        stream.running = False
        stream.join()
    finally:
        server.kill()


if __name__ == "__main__":
    main()
