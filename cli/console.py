"""What the commands write with, and read: results to stdout, everything about them to stderr.

Consoles are made when they are needed, so that rich is loaded only by commands that show
something and a test's captured streams are the ones written to. A mistake in a file or in JSON that
a user hands to a command names the option.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

from ..errors import ConfigError, OutriderError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_WIDTH = 140


def out() -> Console:
    """Results; in a file or a pipe, wide enough for our tables."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(highlight=False, width=width)


def err(*, wide: bool = False) -> Console:
    """Tables, statistics, errors: about the results; `wide` as `out` in a file or a pipe."""
    from rich.console import Console

    width = _PIPE_WIDTH if wide and not sys.stderr.isatty() else None
    return Console(stderr=True, highlight=False, width=width)


def say(text: str) -> None:
    """A line of result, as it is."""
    write(text + "\n")


def write(text: str) -> None:
    """A piece of result, at once and as it is; what stdout cannot encode, as escapes."""
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:  # halves of surrogates, of a path whose name is no text
        encoding = sys.stdout.encoding
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def aside(text: str) -> None:
    """A piece of what is not the result, on stderr, dimmed and at once."""
    err().print(text, style="dim", end="", markup=False, soft_wrap=True)


class Origins:
    """A style for each origin of tokens, in the order in which they come; the target's is plain."""

    _COLOURS = ("green", "cyan", "magenta", "yellow", "blue")

    def __init__(self) -> None:
        self.styles: dict[str, str] = {}

    def style(self, origin: str) -> str:
        """Rich's style of an origin; of the target: bold."""
        if origin == "target":
            return "bold"
        colour = self._COLOURS[len(self.styles) % len(self._COLOURS)]
        return self.styles.setdefault(origin, colour)


def note(text: str) -> None:
    """A line on stderr, as it is."""
    err().print(text, markup=False, soft_wrap=True)


def fail(error: OutriderError) -> None:
    """An error, on one screen, with its field in front; then those found beside it."""
    from rich.text import Text

    for each in (error, *error.others):
        # Most messages begin with their field already.
        named = each.field is None or each.message.startswith(each.field)
        message = each.message if named else f"{each.field}: {each.message}"
        text = Text.assemble(("error: ", "bold red"), message)
        err().print(text, soft_wrap=True)


def table(title: str, rows: dict[str, Any]) -> None:
    """Names and values, on stderr."""
    shown = grid(title, ("", ""), [(name, str(value)) for name, value in rows.items()])
    shown.show_header = False
    err().print(shown)


def grid(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table of names, in the first column, and figures."""
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(
            column, style=None if index else "cyan", justify="right" if index else "left"
        )
    for row in rows:
        made.add_row(*row)
    return made


# Help on narrow terminals: plain lines, since rich's panels cut the names of options there.

_PANELS_FROM = 100  # columns
ENGINE_PANEL = "Engine"  # options in panels whose names begin so are shown by `--help-all` only
SHOWS_ENGINE = "outrider.shows_engine"  # in a context's `meta`: `--help-all` was given


class _FullHelp:
    """Help that shows every option in full; the engine's only where they are asked for."""

    rich_markup_mode: Any
    params: list[Any]
    epilog: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        columns = shutil.get_terminal_size().columns
        if columns < _PANELS_FROM:
            self.rich_markup_mode = None
        engine = [each for each in self.params if _panel(each).startswith(ENGINE_PANEL)]
        if engine and SHOWS_ENGINE not in ctx.meta:
            for option in engine:  # a command is made for one call, so this lasts no longer
                option.hidden = True
            self.epilog = f"--help-all shows {len(engine)} more options: every key of the engine."
        if self.epilog and columns < _PANELS_FROM:  # as it stands: names are not cut at hyphens
            lines = textwrap.fill(self.epilog, max(20, columns - 4), break_on_hyphens=False)
            self.epilog = f"\b\n{lines}"
        super().format_help(ctx, formatter)  # type: ignore[misc]


def _panel(param: Any) -> str:
    return getattr(param, "rich_help_panel", None) or ""


class Command(_FullHelp, TyperCommand):
    """A command whose help shows every option in full."""


class Group(_FullHelp, TyperGroup):
    """A group of such commands."""


# -- files and JSON that a user hands to a command


# A mapping with one of these on top is a speculative section, not a whole configuration.
SECTION_KEYS = {"decoding_type", "method", "spec_type", "num_speculative_tokens"}


def read_section(text: str) -> dict[str, Any]:
    """The value of `--speculative-config`: JSON, or a file with the section or a configuration.

    Raises:
        ConfigError: neither; says where the JSON breaks.
    """
    from ..config.strict import read_json, read_mapping  # with pydantic

    field = "speculative_config"
    if not text.lstrip().startswith(("{", "[", '"')):
        data = read_mapping(Path(text), field)
        return data if SECTION_KEYS & data.keys() else data.get(field, data)
    section = read_json(text, field)
    if not isinstance(section, dict):
        raise ConfigError.at(field, f"expected a mapping, got {text!r}")
    return section


@contextmanager
def writing(path: Path, field: str) -> Iterator[None]:
    """What writes to `path`; raises `ConfigError`, which names `field`, where it cannot."""
    if "\0" in str(path):
        raise ConfigError.at(field, f"cannot write {str(path)!r}: no name has a zero byte")
    try:
        yield
    except OSError as error:
        raise ConfigError.at(field, f"cannot write {path}: {error.strerror}") from None


def check_writable(path: Path | None, field: str) -> None:
    """Before a long run: whether its results can be written to `path` in the end, if there is one.

    Raises:
        ConfigError: they cannot; names `field`.
    """
    if path is None:
        return
    with writing(path, field):
        is_new = not path.exists()  # raises where the name is too long
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()


def write_json(path: Path | None, data: Any, field: str, indent: int | None = 2) -> None:
    """Writes the results of a long run to `path`, if there is one, and notes where they are.

    Raises:
        ConfigError: they cannot be written; names `field`.
    """
    if path is None:
        return
    with writing(path, field):
        path.write_text(json.dumps(data, indent=indent) + "\n", encoding="utf-8")
    note(f"Wrote {path}.")


def make_folder(path: Path, field: str) -> None:
    """Before a long run: the folder for its results.

    Raises:
        ConfigError: it cannot be made, or not be written to; names `field`.
    """
    with writing(path, field):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


def read_stdin() -> str:
    """All of stdin.

    Raises:
        ConfigError: it is not text.
    """
    return "".join(stdin_lines())


def stdin_lines() -> Iterator[str]:
    """Stdin line by line.

    Raises:
        ConfigError: a line is not text.
    """
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "strict":
        # In the C locale Python passes on bytes that are no UTF-8 as halves of surrogates.
        sys.stdin.reconfigure(errors="strict")
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise ConfigError.at(
            "stdin",
            f"byte {error.object[error.start]:#04x} is not {error.encoding.upper()}: "
            f"{error.reason}",
        ) from None
