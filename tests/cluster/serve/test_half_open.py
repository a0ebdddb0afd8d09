"""Peers that vanish without a word: clients, ingresses, engines, ranks behind a pulled cable."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from outrider.cluster.serve.args import ServeConfig
from outrider.cluster.serve.edge import RUN, EngineDoor
from outrider.cluster.serve.front_door import guarded
from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.cluster.serve.resume_tokens import TokenStore
from outrider.config import EngineConfig
from outrider.engine.frontend import Frontend
from outrider.errors import WorkerDiedError
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Request, ints
from outrider.workers.transport import framing
from outrider.workers.transport.socket_channel import SocketChannel, serve
from outrider.workers.transport.wire import encode

from ...helpers.ports import completion, wait_for
from ...helpers.serving.second_machine import SecondMachine, second_machine

LIMITS = ServeConfig(write_timeout_s=4.0)
NOTICED_S = 12.0  # at most; a second more than 6 where nothing else runs
MAX_TOKENS = 50_000  # more than an engine of a test makes meanwhile
SECRET = b"secret"
VANISHES = """
import json, socket, sys, time
ends = []
for host, port, sent in json.load(sys.stdin):
    ends.append(socket.create_connection((host, port)))
    ends[-1].sendall(bytes.fromhex(sent))
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[SecondMachine]:
    with second_machine() as made:
        yield made


def ending(call: Callable[[], Any], ended: dict[str, float], name: str) -> None:
    """Runs `call` in a thread, and notes when it has returned or raised."""

    def run() -> None:
        with contextlib.suppress(WorkerDiedError):
            call()
        ended[name] = time.monotonic()

    threading.Thread(target=run, daemon=True).start()


@pytest.mark.slow
def test_connections_end_and_requests_with_them(
    machine: SecondMachine,
    make_engine: Callable[..., Any],
    config: EngineConfig,
    limits: Any,
) -> None:
    """Two HTTP clients, one of which gets tokens; an ingress; a rank's engine, an engine's rank."""
    limits.max_model_len = 100_000
    engines = [make_engine() for _ in range(2)]
    for engine in engines:
        engine.pause_s = 0.02
    asked, run = engines
    client = Edge(EngineClient(asked), Frontend(config, limits), EdgeMetrics("tiny"))
    door = EngineDoor(run, TokenStore(60.0), run.stats, machine.here)
    servers = [framing.listen(machine.here) for _ in range(3)]
    protocol = guarded(AutoHTTPProtocol, LIMITS)
    http = uvicorn.Server(uvicorn.Config(build_http(client), log_level="critical", http=protocol))
    threading.Thread(target=http.run, args=([servers[0][0]],), daemon=True).start()

    body = {"prompt": "a", "max_tokens": MAX_TOKENS}
    request = Request("r", ints([5, 6]), SamplingParams(max_tokens=MAX_TOKENS), seed=1)
    hello = framing.frame(SECRET)
    ports = [address[2] for _, address in servers]
    sent = [
        (ports[0], completion({**body, "stream": True})),
        (ports[0], completion(body)),
        (
            door.address["tcp"][2],
            framing.frame(bytes.fromhex(door.address["secret"]))
            + framing.frame(msgpack.packb([[RUN, encode(request)]], use_bin_type=True)),
        ),
        (ports[1], hello),
        (ports[2], hello),
    ]
    command = [*machine.enter, sys.executable, "-c", VANISHES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        peer.stdin.write(json.dumps([(machine.here, port, b.hex()) for port, b in sent]).encode())
        peer.stdin.close()
        engine_end, rank_end = (
            framing.accept(server, SECRET, 10.0) for server, _ in servers[1:]
        )  # of an engine that waits for a step, and of a rank that waits for the next
        assert peer.stdout.readline() == b"up\n"
        wait_for(lambda: len(asked.submitted) == 2 and len(run.submitted) == 1)
        ended: dict[str, float] = {}
        channel = SocketChannel([engine_end])
        ending(lambda: channel.receive(1000.0), ended, "engine")
        ending(lambda: serve(rank_end, 0, lambda message: message), ended, "rank")
        time.sleep(0.5)
        assert not ended
        assert not asked.aborted

        machine.pull()
        peer.kill()
        vanished_s = time.monotonic()
    wait_for(
        lambda: len(ended) == 2 and len(asked.aborted) == 2 and run.aborted == ["r"],
        timeout_s=NOTICED_S,
    )
    assert min(ended.values()) - vanished_s > 2.0  # not for a network that is down for a moment
    assert asked.stats()["running"] == run.stats()["running"] == 0
    assert door.num_requests == 0
    http.should_exit = True
    door.shutdown()
