"""`outrider train`: trains heads and draft models for a target.

Every method of `training/options.py` has a command. Its options are the fields of the run's
settings and of the method's settings.
"""

from __future__ import annotations

import inspect
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError, OutriderError
from .console import Command, Group, err, note
from .options import parameters_of, signed, spelling

_ARGUMENTS = {"target": "TARGET", "out": "OUT"}
_DATA = ("inputs", "window", "heldout", "heldout_file", "all_tokens", "generate", "own_share",
         "temperature")  # fmt: skip
_MACHINE = ("device", "trust_remote_code", "allow_pickle", "dtype", "micro_batch", "num_processes",
            "threads")  # fmt: skip
_PANELS = dict.fromkeys(_DATA, "Data") | dict.fromkeys(_MACHINE, "Machine")

Target = Annotated[Path, typer.Argument(metavar="TARGET", help="Checkpoint folder.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder for what is trained.")]


class Methods(Group):
    """A group with a command per training method, which is created when called."""

    def list_commands(self, ctx: Any) -> list[str]:
        from ..training.options import METHODS

        return list(METHODS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from ..training.options import METHODS

        if cmd_name not in METHODS:
            return None
        single = typer.Typer(add_completion=False)
        single.command(cmd_name, cls=Command)(_command(cmd_name))
        return typer.main.get_command(single)


app = typer.Typer(
    cls=Methods, help="Trains heads and draft models for a target.", no_args_is_help=True
)


def _command(method: str) -> Any:
    """Returns the function of a method's command, with a parameter per field of its settings."""
    from ..training.options import METHODS, TrainingOptions

    entry = METHODS[method]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("target", keyword, annotation=Target),
        inspect.Parameter("out", keyword, annotation=Out),
        *parameters_of(TrainingOptions, "Optimization", _PANELS, skip=_ARGUMENTS),
        *parameters_of(entry.options, "Method", _PANELS, skip=_ARGUMENTS),
    ]

    def call(**values: Any) -> None:
        given = {name: value for name, value in values.items() if value not in (None, [])}
        own = {name: given.pop(name) for name in list(given) if name in entry.options.model_fields}
        _train(method, given, own)

    call.__doc__ = entry.summary
    return signed(call, parameters)


def _train(method: str, given: dict[str, Any], own: dict[str, Any]) -> None:
    """Runs a method; prints a table at the end, or the resume command."""
    from ..config import parse
    from ..training.loop import acceptance_table, train
    from ..training.options import METHODS, TrainingOptions
    from ..workers.model.checkpoint.hub import require_name

    out = given["out"]
    for name, value in {**given, **own}.items():
        for path in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(path, Path):
                require_name(str(path), _ARGUMENTS.get(name) or spelling(name)[0])
    target = _folder(given)
    try:
        settings = parse(TrainingOptions, {**given, "target": target})
        outcome = train(method, settings, parse(METHODS[method].options, own))
    except ConfigError as error:
        raise _named(error) from None
    if not outcome.finished:
        words = [word for word in sys.argv[1:] if word != "--resume"]
        note(f"Saved after step {outcome.step}. Resume with:")
        note(shlex.join(["outrider", *words, "--resume"]))
        raise typer.Exit(128 + signal.SIGINT)
    note(f"{out}: {method}, {outcome.step} steps, {outcome.tokens_per_s:,.0f} tokens/s")
    err().print(acceptance_table("", outcome.scores))


def _folder(given: dict[str, Any]) -> Path:
    """Returns the target's folder; resolves an id, an address or a GGUF file."""
    target: Path = given["target"]
    from ..config.files import needs_folder

    if not needs_folder(str(target)):
        return target
    from ..workers.model.checkpoint.hub import local_folder

    return Path(
        local_folder(
            *(str(target), "TARGET"),
            needs_tokenizer=True,
            trust_remote_code=bool(given.get("trust_remote_code")),
            allow_pickle=bool(given.get("allow_pickle")),
        )
    )


def _named(error: OutriderError) -> OutriderError:
    """Replaces a setting at the beginning of an error's message by its option."""
    field = error.field
    if field is None or field.startswith("--") or not error.message.startswith(f"{field}:"):
        return error
    option = _ARGUMENTS.get(field) or spelling(field)[0]
    return type(error)(option + error.message.removeprefix(field), field=option)
