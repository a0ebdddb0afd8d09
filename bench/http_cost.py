"""CPU time per streamed token of each process behind an HTTP server.

    python -m outrider.bench.http_cost [--streams 1 8 32] [--server NAME=COMMAND]...

Starts the servers, streams completions from each in turn, and reads the processor time of every
process that a server started from /proc (Linux). What an idle server spends in the same time is
measured at the end and taken off; it is shown as well. Unlike wall-clock times, processor time
hardly depends on what else a machine does; the forward's (the rank's) in the same row is the scale.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from .client.load import parse, send_all
from .measure import Load
from .serving.costs import (
    COLUMNS,
    SERVER_COLUMNS,
    add_server_options,
    cpu_s,
    measure_idle,
    servers_of,
)
from .suite.servers import ServerContender, ServerError

_STREAM = {"stream_options": {"include_usage": True}}  # the count of tokens, once


def measure(server: ServerContender, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Milliseconds per token of each column, and `tokens/s`.

    Raises:
        ServerError: a request failed.
    """
    body = {
        "prompt": "def add(a, b):\n    return",
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    endpoint = replace(server.endpoint, fields=_STREAM)
    before, own = cpu_s(server.pid), sum(os.times()[:2])
    exchanges, wall_s = send_all(endpoint, [body] * num_streams, Load(streams=num_streams))
    after = {**cpu_s(server.pid), "client": sum(os.times()[:2])}
    before["client"] = own
    answers = [parse(index, exchange) for index, exchange in enumerate(exchanges)]
    for answer in answers:
        if answer.failure is not None:
            raise ServerError(f"{server.name}: {answer.failure}")
    total = sum(answer.trace.num_tokens for answer in answers if answer.trace is not None)
    row = {name: (after.get(name, 0.0) - before.get(name, 0.0)) * 1e3 / total for name in COLUMNS}
    return {**row, "tokens/s": total / wall_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_server_options(parser)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=400, help="of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-s", type=float, default=5.0, help="how long idling is measured")
    options = parser.parse_args()
    with servers_of(options) as servers:
        for server in servers:
            measure(server, 1, 20)  # warms up
        rounds: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
        for num_streams in options.streams:
            for _ in range(options.rounds):
                for server in servers:
                    row = measure(server, num_streams, options.tokens)
                    rounds[num_streams, server.name].append(row)
        idle = {server.name: measure_idle(server, options.idle_s) for server in servers}
    table = Table(title="CPU milliseconds per streamed token, beyond idling", title_justify="left")
    for column in ("server", "streams", *COLUMNS, "framework / rank", "tokens/s"):
        table.add_column(column, justify="right")
    for (num_streams, name), rows in rounds.items():
        table.add_row(name, str(num_streams), *_cells(rows, idle[name]))
    for name, each in idle.items():
        table.add_row(
            name, "idle", *(f"{each[column] * 1e3:.0f} ms/s" for column in SERVER_COLUMNS)
        )
    Console(width=140).print(table)


def _cells(rows: list[dict[str, float]], idle: dict[str, float]) -> list[str]:
    """Means of the rounds; the ratio is of what is not the forward's or the client's."""
    mean = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
    for column, share in idle.items():
        mean[column] -= share * 1e3 * sum(1 / row["tokens/s"] for row in rows) / len(rows)
    framework = sum(mean[key] for key in COLUMNS if key not in ("rank", "client"))
    ratio = f"{framework / mean['rank']:.2f}" if mean["rank"] else "-"
    cells = [f"{mean[column]:.3f}" for column in COLUMNS]
    return [*cells, ratio, f"{mean['tokens/s']:.0f}"]


if __name__ == "__main__":
    main()
