"""Input and output of the commands: results go to stdout, all other output to stderr.

Consoles are created when needed. Only commands that print something therefore load rich, and output
goes to streams captured by a test. Errors in files or JSON that a user passes name the option.
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
    """Returns the console for results; in files and pipes it is wide enough for tables."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(highlight=False, width=width)


def err(*, wide: bool = False) -> Console:
    """Returns the console for tables, statistics and errors; `wide` as for `out`."""
    from rich.console import Console

    width = _PIPE_WIDTH if wide and not sys.stderr.isatty() else None
    return Console(stderr=True, highlight=False, width=width)


def say(text: str) -> None:
    """Writes a line of the result unchanged."""
    write(text + "\n")


def write(text: str) -> None:
    """Writes a part of the result and flushes; escapes what stdout cannot encode."""
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:  # lone surrogates, from a path that is not valid text
        encoding = sys.stdout.encoding
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def aside(text: str) -> None:
    """Writes dimmed text that is not part of the result to stderr."""
    err().print(text, style="dim", end="", markup=False, soft_wrap=True)


class Origins:
    """Assigns a style to each origin of tokens in order of appearance; the target's is plain."""

    _COLOURS = ("green", "cyan", "magenta", "yellow", "blue")

    def __init__(self) -> None:
        self.styles: dict[str, str] = {}

    def style(self, origin: str) -> str:
        """Returns rich's style of an origin; bold for the target."""
        if origin == "target":
            return "bold"
        colour = self._COLOURS[len(self.styles) % len(self._COLOURS)]
        return self.styles.setdefault(origin, colour)


def note(text: str) -> None:
    """Writes a line to stderr without markup."""
    err().print(text, markup=False, soft_wrap=True)


def fail(error: OutriderError) -> None:
    """Prints an error with its field, then the other errors found with it."""
    from rich.text import Text

    for each in (error, *error.others):
        # Most messages already begin with their field.
        named = each.field is None or each.message.startswith(each.field)
        message = each.message if named else f"{each.field}: {each.message}"
        text = Text.assemble(("error: ", "bold red"), message)
        err().print(text, soft_wrap=True)


def table(title: str, rows: dict[str, Any]) -> None:
    """Prints names and values to stderr."""
    shown = grid(title, ("", ""), [(name, str(value)) for name, value in rows.items()])
    shown.show_header = False
    err().print(shown)


def grid(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Returns a table with names in the first column and figures in the others."""
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(
            column, style=None if index else "cyan", justify="right" if index else "left"
        )
    for row in rows:
        made.add_row(*row)
    return made


# Help on narrow terminals uses plain lines, because rich's panels would cut off option names.

_PANELS_FROM = 100  # columns
ENGINE_PANEL = "Engine"  # options in panels with this prefix are only shown by `--help-all`
SHOWS_ENGINE = "outrider.shows_engine"  # key in a context's `meta`; set by `--help-all`


class _FullHelp:
    """Help that shows options in full; the engine's options are shown only on request."""

    rich_markup_mode: Any
    params: list[Any]
    epilog: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        columns = shutil.get_terminal_size().columns
        if columns < _PANELS_FROM:
            self.rich_markup_mode = None
        engine = [each for each in self.params if _panel(each).startswith(ENGINE_PANEL)]
        if engine and SHOWS_ENGINE not in ctx.meta:
            for option in engine:  # this only affects the current call's command
                option.hidden = True
            self.epilog = f"--help-all shows {len(engine)} more options: every key of the engine."
        if self.epilog and columns < _PANELS_FROM:  # verbatim: names are not split at hyphens
            lines = textwrap.fill(self.epilog, max(20, columns - 4), break_on_hyphens=False)
            self.epilog = f"\b\n{lines}"
        super().format_help(ctx, formatter)  # type: ignore[misc]


def _panel(param: Any) -> str:
    return getattr(param, "rich_help_panel", None) or ""


class Command(_FullHelp, TyperCommand):
    """A command whose help shows every option in full."""


class Group(_FullHelp, TyperGroup):
    """A group of such commands."""


# -- files and JSON that a user passes to a command


# A mapping with one of these keys is a speculative section, not a whole configuration.
SECTION_KEYS = {"decoding_type", "method", "spec_type", "num_speculative_tokens"}


def read_section(text: str) -> dict[str, Any]:
    """Reads `--speculative-config`: JSON, or a file with the section or a whole configuration.

    Raises:
        ConfigError: it is neither; has the position of the JSON error.
    """
    from ..config.strict import read_json, read_mapping  # imports pydantic

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
    """Converts write errors within the context to `ConfigError`, which names `field`."""
    if "\0" in str(path):
        raise ConfigError.at(field, f"cannot write {str(path)!r}: no name has a zero byte")
    try:
        yield
    except OSError as error:
        raise ConfigError.at(field, f"cannot write {path}: {error.strerror}") from None


def check_writable(path: Path | None, field: str) -> None:
    """Checks before a long run that its results can be written to `path`, if there is one.

    Raises:
        ConfigError: they cannot be written; names `field`.
    """
    if path is None:
        return
    with writing(path, field):
        is_new = not path.exists()  # raises if the name is too long
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()


def write_json(path: Path | None, data: Any, field: str, indent: int | None = 2) -> None:
    """Writes the results of a long run to `path`, if there is one, and prints the path.

    Raises:
        ConfigError: they cannot be written; names `field`.
    """
    if path is None:
        return
    with writing(path, field):
        path.write_text(json.dumps(data, indent=indent) + "\n", encoding="utf-8")
    note(f"Wrote {path}.")


def make_folder(path: Path, field: str) -> None:
    """Creates the folder for the results of a long run before it starts.

    Raises:
        ConfigError: it cannot be created or written to; names `field`.
    """
    with writing(path, field):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


def read_stdin() -> str:
    """Reads all of stdin.

    Raises:
        ConfigError: it is not valid text.
    """
    return "".join(stdin_lines())


def stdin_lines() -> Iterator[str]:
    """Yields the lines of stdin.

    Raises:
        ConfigError: a line is not valid text.
    """
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "strict":
        # In the C locale, Python would decode bytes that are not UTF-8 as lone surrogates.
        sys.stdin.reconfigure(errors="strict")
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise ConfigError.at(
            "stdin",
            f"byte {error.object[error.start]:#04x} is not {error.encoding.upper()}: "
            f"{error.reason}",
        ) from None
