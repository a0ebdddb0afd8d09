"""The command tree, and the only place where errors become messages.

A user's mistake (`OutriderError`) becomes a short message on stderr with exit code 1. A usage error
is reported by typer with exit code 2. Any other exception is a bug and keeps its traceback. A
command's module is imported when the command is called, so `outrider --help` imports none of them;
no command's module imports torch or ray at its top.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main

from ..errors import OutriderError
from .console import Group, fail, say

# OpenMP and Ray read these variables when they are loaded, so they are set first. Spinning torch
# threads make a busy machine ten times slower.
_ENV = {
    "GOMP_SPINCOUNT": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_INTERRUPTED = 128 + signal.SIGINT


class ErrorBoundary(Group):
    """Loads and runs a subcommand, and converts its `OutriderError` to a message."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        from .foreign import canonical

        ctx.token_normalize_func = canonical  # the command's context inherits it
        return name, _load(name) if name and found else found, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (OutriderError, KeyboardInterrupt) as error:
            if _debugging(ctx):
                raise
            if isinstance(error, KeyboardInterrupt):
                raise typer.Exit(_INTERRUPTED) from None
            fail(error)
            raise typer.Exit(1) from None


def _hyphenated(name: str) -> str:
    return name.replace("_", "-")


def _debugging(ctx: Any) -> bool:
    flag = os.environ.get("OUTRIDER_DEBUG", "")
    return bool(ctx.params.get("debug")) or flag.lower() not in ("", "0", "false")


app = typer.Typer(
    name="outrider",
    cls=ErrorBoundary,
    help="Serves large language models with speculative decoding, on Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": _hyphenated,
        "max_content_width": 120,
    },
)
# By command; the module has the same name with underscores.
SUMMARIES: Mapping[str, str] = {
    "serve": "Serves a model over an OpenAI-compatible API.",
    "generate": "Completes prompts and prints the text; statistics go to stderr.",
    "explain": "Shows each step's draft on a prompt, and what speculation gains.",
    "run-batch": "Answers a file of requests in OpenAI's batch format, resumable.",
    "chat": "Chats with a model, several turns, streaming.",
    "calibrate": "Checks a head, tries variants of it, searches for the best tree.",
    "check": "Checks a configuration and its files; prints it in full.",
    "bench": "Measures throughput, latency and acceptance.",
    "simulate": "Plans a deployment: the schedulers that serve, over modelled models.",
    "drafter": "Starts, lists and ends draft models that engines of a cluster share.",
    "ngram": "Builds and shows static tables for the n-gram cache.",
    "key": "Makes API keys.",
    "train": "Trains heads and draft models for a target.",
}
for _name, _summary in SUMMARIES.items():
    app.command(_name, help=_summary)(lambda: None)  # for the list of commands; loaded on use


def _load(name: str) -> Any:
    """Returns the command or the group of commands with that name."""
    from .foreign import EPILOG, ForeignCommand
    from .options import expand

    function = name.replace("-", "_")
    module = import_module(f".{function}", __package__)
    if hasattr(module, "app"):
        return typer.main.get_group(module.app)
    single = typer.Typer(add_completion=False)
    single.command(name, epilog=EPILOG, cls=ForeignCommand)(expand(getattr(module, function)))
    return typer.main.get_command(single)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        say(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (also OUTRIDER_DEBUG=1).")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Serves large language models with speculative decoding, on Ray."""
    for name, value in _ENV.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )


def run() -> None:
    """Parses `sys.argv` and exits."""
    app(prog_name="outrider")
