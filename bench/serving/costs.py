"""Servers and their processes, for measurements of processor time behind HTTP."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...errors import ConfigError
from ..suite.servers import ServerContender, ServerSpec
from .processes import below

TARGET = Path(__file__).resolve().parents[2] / "demo" / "models" / "target"
COLUMNS = ("rank", "engine", "ingress", "proxy", "others", "client")
# This Outrider, as a command of `ServerSpec`.
THIS = (
    f"this={sys.executable} -m outrider serve {{model}} --dtype {{dtype}} --port {{port}} "
    "--address local"
)


def cpu_s(root: int) -> dict[str, float]:
    """Processor seconds of the process `root` and its descendants so far, by column."""
    found: dict[str, float] = defaultdict(float)
    for process in below(root):
        found[process.role if process.role in COLUMNS else "others"] += process.cpu_s
    return found


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Which servers, and what they serve."""
    parser.add_argument("--model", default=str(TARGET))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--server",
        action="append",
        metavar="NAME=COMMAND",
        help="with {port}, {model} and {dtype}; default: this outrider",
    )


@contextmanager
def servers_of(options: argparse.Namespace) -> Iterator[list[ServerContender]]:
    """The servers of `add_server_options`, started; they end with the block.

    Raises:
        ConfigError: one is no command.
        ServerError: one does not start.
    """
    values = {"model": options.model, "dtype": options.dtype}
    with ExitStack() as stack:
        servers = []
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, text in enumerate(options.server or [THIS]):
            spec = ServerSpec.parse(text, values)
            if spec.command is None:
                raise ConfigError(f"server: {text!r} is no NAME=COMMAND", field="server")
            server = ServerContender(spec, logs / f"{number}.log")
            stack.callback(server.close)
            server.start()
            servers.append(server)
        yield servers
