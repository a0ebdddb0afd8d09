"""`outrider serve`: starts or joins Ray, deploys the Serve application, and monitors it.

Checks run in order of cost: options, port, presence of the checkpoints, contents of small files.
Weights and models are compared while the command's own Ray starts, or before an existing cluster is
joined. Nothing is deployed before all checks have passed. Ctrl-C and SIGTERM drain the application
for a bounded time, take it down, and stop Ray if it was started here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from ..cluster.serve.args import ServeConfig, check_acceptance
from ..cluster.serve.front_door import check_certificate, check_port
from ..errors import ConfigError, EngineDeadError, OutriderError
from .console import err, note
from .options import EngineOptions, Options, options_of, serve_section
from .session import prepare, terminable

if TYPE_CHECKING:
    from ..config import EngineConfig
    from .running_server import RunningServer


class AccessOptions(Options):
    """Keys and origins in addition to those of the file's `serve.access` section."""

    panel = "Access"
    api_key: list[str] = Field(
        [], json_schema_extra={"envvar": "OUTRIDER_API_KEY", "show_envvar": True}
    )
    """A key that clients have to send; may be repeated. Other processes can read options, so prefer
    the variable or --keys-file."""
    admin_key: list[str] = Field(
        [], json_schema_extra={"envvar": "OUTRIDER_ADMIN_KEY", "show_envvar": True}
    )
    """A key that may use every route (statistics, metrics, resets); may be repeated. Without one, a
    single --api-key may read statistics and metrics."""
    keys_file: Path | None = None
    """YAML with keys and admin_keys, as printed by `outrider key new`; read again when changed."""
    cors_allowed_origin: list[str] = Field([])
    """Origin of browser pages that may call the server; may be repeated."""
    log_prompts: bool | None = Field(None, description="Write prompts to the log.")

    def apply(self, section: ServeConfig) -> tuple[ServeConfig, str | None]:
        """Returns `section` with these options, and the key for this command's own calls, if any.

        Raises:
            ConfigError: the file of keys is invalid, or a key is empty.
        """
        from ..cluster.serve.access.access import Access
        from ..config.access import AccessConfig, hash_of, new_key
        from ..config.strict import parse

        access = section.access.model_dump()
        for field in ("api_key", "admin_key"):
            if not all(getattr(self, field)):
                raise ConfigError.at(field, "it is empty")
        for key in self.admin_key:
            if key in self.api_key:
                raise ConfigError.at("admin_key", "it is also an --api-key; choose another")
        # All of these keys share a tenant, because they belong to one user, as with vLLM's option.
        access["keys"] += [
            {"hash": hash_of(key), "name": "api_key", "tenant": "default"}
            for key in dict.fromkeys(self.api_key)
        ]
        access["admin_keys"] += [hash_of(key) for key in dict.fromkeys(self.admin_key)]
        access["cors_allowed_origins"] += self.cors_allowed_origin
        if self.keys_file is not None:
            access["keys_file"] = str(self.keys_file)
        if self.log_prompts is not None:
            access["log_prompts"] = self.log_prompts
        own = None
        if parse(AccessConfig, access).has_keys:
            own = new_key()
            access["command_key"] = hash_of(own)
        config = parse(AccessConfig, access)
        Access(config)  # reads the file of keys to report its errors here
        return section.model_copy(update={"access": config}), own


_READY_TIMEOUT_S = 1800.0
_POLL_S = 0.5
_PORT = 8000
_SERVE = "Server"
_STARTING = "Starting the workers..."


_DeployFields: Any = options_of(
    ServeConfig,
    _SERVE,
    (
        "host", "port", "ssl_certfile", "ssl_keyfile", "num_replicas", "name", "route_prefix",
        "graceful_shutdown_timeout_s",
    ),
    defaults={"port": _PORT},
)  # fmt: skip


class DeployOptions(_DeployFields):
    """Address and deployment of the server; None leaves a value to the file's `serve:` section."""


def serve(
    engine: EngineOptions,
    deploy: DeployOptions,
    access: AccessOptions,
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Checkpoint: a folder or a GGUF file.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to join: host:port, auto (one that runs here), or local (a new one). "
            "Default: RAY_ADDRESS, else auto, else local.",
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
        raise ConfigError.at("executor", "serve runs on Ray; leave it out")
    if checkpoint:
        engine = engine.with_argument("model", checkpoint)
    config = engine.resolve(executor="ray")
    check_acceptance(config)
    section, own_key = access.apply(serve_section(engine, {"port": _PORT, **deploy.given()}))
    if section.port is None:
        raise ConfigError.at("port", "the command serves on a port of its own; leave null out")
    check_certificate(section)
    check_port(section.host, section.port)
    url = _url(section)
    from ..cluster.local_ray import set_ray_variables

    with ExitStack() as stack, terminable():
        replicas = section.num_replicas if isinstance(section.num_replicas, int) else 1
        set_ray_variables()  # for a Ray started here
        begin = partial(_start_serve, section, stack)
        prepare(
            config,
            stack,
            address=address,
            num_engines=replicas,
            groups=section.drafter_groups,
            on_ray=begin,
        )
        with suppress(KeyboardInterrupt):  # the usual end of a server
            _deploy(config, section)
            from .running_server import RunningServer

            # The certificate need not be for this machine's name.
            server = RunningServer(url, timeout_s=10.0, api_key=own_key, verify=False)
            stack.callback(server.close)
            models = _wait_until_ready(server)
            _announce(config, section, url, models[0])
            _watch(server, stats_interval_s)
        note(
            "Shutting down: running requests have "
            f"{section.graceful_shutdown_timeout_s:g} s to end (again: at once)..."
        )


def _url(section: ServeConfig) -> str:
    """Returns the server's URL for a client on this machine."""
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(section.host, section.host)
    scheme = "http" if section.ssl_certfile is None else "https"
    return f"{scheme}://{here}:{section.port}{section.route_prefix.rstrip('/')}"


def _start_serve(section: ServeConfig, stack: ExitStack) -> None:
    """Starts Serve unless it runs; without proxies, because the ingresses listen themselves.

    Raises:
        ConfigError: the application conflicts with another one that the cluster serves.
    """
    from ..cluster.serve.deployment import check_room, running_serve, start_serve, undeploy

    stack.enter_context(terminable())  # again, because Ray has replaced the handler
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    running = running_serve()
    if running is not None:
        check_room(running, section)
    stack.callback(_quietly, lambda: undeploy(section))
    start_serve()


def _deploy(config: EngineConfig, section: ServeConfig) -> None:
    """Deploys the application and waits for its replicas.

    Raises:
        ConfigError: it cannot start.
        EngineDeadError: a replica did not start; has the reason.
    """
    from ..cluster.app import application
    from ..cluster.serve.deployment import deploy

    with err().status(_STARTING) as status:

        def tell(lines: list[str]) -> None:
            if status.console.is_terminal:
                status.update(f"{_STARTING} {'; '.join(lines)}")
            else:
                for line in lines:
                    note(line)

        try:
            deploy(application(config, section), section, tell)
        except RuntimeError as error:
            raise EngineDeadError(f"the application did not come up: {error}") from None


def _quietly(call: Callable[[], Any]) -> None:
    """Calls a clean-up; its errors must not hide the reason for the clean-up."""
    try:
        call()
    except (RuntimeError, OSError) as error:
        note(f"while shutting down: {error}")


def _wait_until_ready(server: RunningServer) -> list[str]:
    """Returns the names of the served models once the server is ready.

    Raises:
        EngineDeadError: the server did not answer in time.
    """
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while True:
        try:
            return server.models()
        except OutriderError as error:
            if time.monotonic() > deadline:
                raise EngineDeadError(
                    f"the server was not ready within {_READY_TIMEOUT_S:.0f} s: {error.message}"
                ) from None
        time.sleep(_POLL_S)


def _announce(config: EngineConfig, section: ServeConfig, url: str, model: str) -> None:
    """Prints the address, the model, and an example request."""
    from rich.panel import Panel
    from rich.text import Text

    speculative = config.speculative_config
    drafter: str = speculative.decoding_type
    if speculative.max_nodes:
        drafter += f", up to {speculative.max_nodes} tokens"
    text = (
        f"URL       {url}/v1\n"
        f"Model     {model} ({config.model})\n"
        f"Drafter   {drafter}\n"
        f"Ranks     {config.num_ranks}\n"
        f"Replicas  {section.num_replicas}"
    )
    panel = Panel(Text(text), title="Outrider is ready", border_style="green", expand=False)
    err().print(panel)
    # Printed outside the panel, so that the command can be copied without frame or line breaks.
    note(
        f"curl {url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{model}", "prompt": "def main(", "max_tokens": 64}}\'\n\n'
        "Ctrl-C ends it."
    )


def _watch(server: RunningServer, interval_s: float) -> None:
    """Prints the drafters' lines whenever they have changed, until Ctrl-C."""
    shown: list[str] = []
    while True:
        time.sleep(interval_s or 3600.0)
        if interval_s == 0:
            continue
        try:
            lines = server.stats_lines()
        except OutriderError as error:
            note(f"no statistics: {error.message}")
            continue
        if lines != shown:
            for line in lines:
                note(line)
        shown = lines
