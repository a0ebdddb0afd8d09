"""`outrider serve`: starts or joins Ray, deploys the Serve application, watches over it.

What can be wrong is looked for in the order of its price: options, port, checkpoints, and only
then Ray. Ctrl-C and SIGTERM take the application down, and Ray if it was started here.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import ConfigError, EngineDeadError, OutriderError
from .console import err, note
from .options import EngineOptions
from .session import prepare

if TYPE_CHECKING:
    from ...config import EngineConfig
    from .client import Client

_READY_TIMEOUT_S = 1800.0
_POLL_S = 0.5
_SERVE = "Server"


def serve(
    engine: EngineOptions,
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Checkpoint folder.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVE)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on.", min=1, max=65535, rich_help_panel=_SERVE)
    ] = 8000,
    num_replicas: Annotated[
        int, typer.Option(help="Engines behind one endpoint.", min=1, rich_help_panel=_SERVE)
    ] = 1,
    name: Annotated[
        str, typer.Option(help="Of the Serve application.", rich_help_panel=_SERVE)
    ] = "outrider",
    route_prefix: Annotated[
        str, typer.Option(help="Path before /v1.", rich_help_panel=_SERVE)
    ] = "/",
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to join (auto, or host:port); default: start one here.",
            rich_help_panel=_SERVE,
        ),
    ] = None,
    stats_interval_s: Annotated[
        float,
        typer.Option(help="Between statistics lines; 0: none.", min=0.0, rich_help_panel=_SERVE),
    ] = 30.0,
) -> None:
    """Serves a model over an OpenAI-compatible API."""
    if engine.executor == "local":
        raise ConfigError("executor: serve runs on Ray; leave it out", field="executor")
    config = (replace(engine, model=checkpoint) if checkpoint else engine).resolve(executor="ray")
    check_port(host, port)
    url = _url(host, port, route_prefix)
    with ExitStack() as stack, _terminable():
        prepare(config, stack, address)
        with err().status("Starting the workers..."):
            _deploy(config, host, port, num_replicas, name, route_prefix, stack)
        from .client import Client

        client = Client(url, timeout_s=10.0)
        stack.callback(client.close)
        served = _wait_until_ready(client)
        err().print(_panel(config, url, served, num_replicas))
        _watch(client, stats_interval_s)


def check_port(host: str, port: int) -> None:
    """Raises `ConfigError` naming the field where nobody could listen there."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"host: {host!r} is no address: {error.strerror}", field="host") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
            probe.listen()
        except OSError as error:
            raise ConfigError(
                f"port: cannot listen on {host}:{port}: {error.strerror}; "
                "stop what uses it or choose another with --port",
                field="port",
            ) from None


def _url(host: str, port: int, route_prefix: str) -> str:
    """Where a client on this machine finds the server."""
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"http://{here}:{port}{route_prefix.rstrip('/')}"


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is treated like Ctrl-C, so that everything is taken down."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _deploy(
    config: EngineConfig,
    host: str,
    port: int,
    num_replicas: int,
    name: str,
    route_prefix: str,
    stack: ExitStack,
) -> None:
    """Deploys the application and waits for its replicas.

    Raises:
        EngineDeadError: a replica did not come up; says why.
    """
    from ray import serve as ray_serve

    from ..app import build_app

    application = build_app(
        {"engine": config.model_dump(mode="json"), "num_replicas": num_replicas}
    )
    ray_serve.start(http_options={"host": host, "port": port})
    stack.callback(_quietly, lambda: ray_serve.delete(name))
    try:
        ray_serve.run(application, name=name, route_prefix=route_prefix)
    except RuntimeError as error:
        raise EngineDeadError(f"the application did not come up: {error}") from None


def _quietly(call: Callable[[], Any]) -> None:
    """Clean-up must not hide why it is done."""
    try:
        call()
    except (RuntimeError, OSError) as error:
        note(f"while shutting down: {error}")


def _wait_until_ready(client: Client) -> list[str]:
    """Names of the served models.

    Raises:
        EngineDeadError: nothing answered in time.
    """
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while True:
        try:
            return client.models()
        except OutriderError as error:
            if time.monotonic() > deadline:
                raise EngineDeadError(
                    f"the server was not ready within {_READY_TIMEOUT_S:.0f} s: {error.message}"
                ) from None
        time.sleep(_POLL_S)


def _panel(config: EngineConfig, url: str, models: list[str], num_replicas: int) -> Any:
    """What the user has to know now."""
    from rich.panel import Panel

    section = config.speculative_config
    drafter = section.decoding_type
    if section.max_draft_len:
        drafter += f", up to {section.max_draft_len} tokens"
    curl = (
        f"curl {url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{models[0]}", "prompt": "def main(", "max_tokens": 64}}\''
    )
    text = (
        f"URL      {url}/v1\n"
        f"Model    {models[0]} ({config.model})\n"
        f"Drafter  {drafter}\n"
        f"Ranks    {config.tensor_parallel_size} x {num_replicas} replica(s)\n\n"
        f"{curl}\n\nCtrl-C ends it."
    )
    from rich.text import Text

    return Panel(Text(text), title="Outrider is ready", border_style="green", expand=False)


def _watch(client: Client, interval_s: float) -> None:
    """Until Ctrl-C: the drafters' lines whenever they have changed."""
    shown: list[str] = []
    while True:
        time.sleep(interval_s or 3600.0)
        if interval_s == 0:
            continue
        try:
            lines = client.stats_lines()
        except OutriderError as error:
            note(f"no statistics: {error.message}")
            continue
        if lines != shown:
            for line in lines:
                note(line)
        shown = lines
