"""CPU time of one request in each process behind an HTTP server, and when its first token comes.

    python -m outrider.bench.serving.request_cost [--server NAME=COMMAND]... [--streams 8] [--whole]

Starts the servers and sends each, in turn, requests one after the other over every connection. What
an idle server spends in the same time is measured before and taken off; it is shown as well.
Processor time is read from /proc (Linux).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from ..suite.servers import ServerContender, ServerError
from .costs import SERVER_COLUMNS, add_server_options, cpu_s, measure_idle, servers_of

_FRAMEWORK = tuple(name for name in SERVER_COLUMNS if name != "rank")


class Client:
    """Sends completions over a connection that is kept open.

    Args:
        number: among the clients of this server.
    """

    def __init__(
        self, server: ServerContender, number: int, num_tokens: int, *, whole: bool
    ) -> None:
        self._endpoint = server.endpoint
        self._name = server.name
        self._fields = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        self._whole = whole
        self._connection = http.client.HTTPConnection(urlsplit(server.endpoint.url).netloc)
        self._number = number
        self._num_sent = 0

    def connect(self) -> None:
        """Opens a connection anew: a server closes those that were idle."""
        self._connection.close()
        self.send()

    def send(self) -> tuple[float, float]:
        """Seconds to the first token and to the end of an answer.

        Raises:
            ServerError: the request failed.
        """
        self._num_sent += 1
        body: dict[str, Any] = {
            "model": self._endpoint.model,
            # No two begin alike: nothing comes from the prefix cache.
            "prompt": f"# {self._number}.{self._num_sent}\ndef add(a, b):\n    return",
            "stream": not self._whole,
            **self._fields,
        }
        begun_s = time.perf_counter()
        self._connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body),
            {"content-type": "application/json"},
        )
        response = self._connection.getresponse()
        first = response.readline() if response.status == http.client.OK else b""
        first_s = time.perf_counter() - begun_s
        rest = response.read()
        if response.status != http.client.OK:
            raise ServerError(f"{self._name}: status {response.status}: {rest[:200]!r}")
        if not self._whole and (not first.startswith(b"data:") or b'"error"' in first):
            raise ServerError(f"{self._name}: {first[:200]!r}")
        return first_s, time.perf_counter() - begun_s


def measure(
    server: ServerContender, clients: Sequence[Client], num_each: int, idle: dict[str, float]
) -> dict[str, float]:
    """Milliseconds per request: CPU of each column, and medians of the wall's clock.

    Args:
        num_each: requests of each client; clients send at the same time.

    Raises:
        ServerError: a request failed.
    """
    for client in clients:
        client.connect()

    def send_all(client: Client) -> list[tuple[float, float]]:
        return [client.send() for _ in range(num_each)]

    with ThreadPoolExecutor(len(clients)) as threads:
        before, own = cpu_s(server.pid), sum(os.times()[:2])
        begun_s = time.perf_counter()
        times = [each for given in threads.map(send_all, clients) for each in given]
        wall_s = time.perf_counter() - begun_s
        after = cpu_s(server.pid)
    num_requests = len(times)
    row = {
        name: (after[name] - before[name] - idle[name] * wall_s) * 1e3 / num_requests
        for name in SERVER_COLUMNS
    }
    row["client"] = (sum(os.times()[:2]) - own) * 1e3 / num_requests
    row["framework"] = sum(row[name] for name in _FRAMEWORK)
    row["first token"] = statistics.median(first for first, _ in times) * 1e3
    row["whole"] = statistics.median(whole for _, whole in times) * 1e3
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_server_options(parser)
    parser.add_argument("--requests", type=int, default=50, help="per round and connection")
    parser.add_argument("--streams", type=int, default=1, help="connections at the same time")
    parser.add_argument("--tokens", type=int, default=4, help="of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-s", type=float, default=5.0, help="how long idling is measured")
    parser.add_argument("--whole", action="store_true", help="without streaming")
    options = parser.parse_args()
    with servers_of(options) as started:
        servers: list[tuple[ServerContender, list[Client], dict[str, float]]] = []
        for server in started:
            clients = [
                Client(server, number, options.tokens, whole=options.whole)
                for number in range(options.streams)
            ]
            for _ in range(10):  # warms up
                clients[0].send()
            servers.append((server, clients, {}))
        for server, _, idle in servers:
            idle.update(measure_idle(server, options.idle_s))
        rounds: dict[str, list[dict[str, float]]] = {each.name: [] for each, _, _ in servers}
        for _ in range(options.rounds):
            for server, clients, idle in servers:
                rounds[server.name].append(measure(server, clients, options.requests, idle))
        _print(rounds, {server.name: idle for server, _, idle in servers})


def _print(rounds: dict[str, list[dict[str, float]]], idle: dict[str, dict[str, float]]) -> None:
    names = (*SERVER_COLUMNS, "client", "framework", "first token", "whole")
    table = Table(title="CPU milliseconds per request, beyond idling", title_justify="left")
    for name in ("server", *names):
        table.add_column(name, justify="right")
    for server, rows in rounds.items():
        table.add_row(
            server, *(f"{statistics.median(row[name] for row in rows):.1f}" for name in names)
        )
        first = [row["first token"] for row in rows]
        whole = [row["whole"] for row in rows]
        extremes = [f"{min(each):.1f} to {max(each):.1f}" for each in (first, whole)]
        shares = [f"{idle[server][name] * 1e3:.0f} ms/s" for name in SERVER_COLUMNS]
        table.add_row("idle, range", *shares, "", "", *extremes)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
