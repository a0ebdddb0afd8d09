"""Files and JSON that a user hands to a command; a mistake in them names the option."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config.strict import read_json, read_mapping
from ..errors import ConfigError

# A mapping with one of these on top is a speculative section, not a whole configuration.
SECTION_KEYS = {"decoding_type", "method", "spec_type", "num_speculative_tokens"}


def read_section(text: str) -> dict[str, Any]:
    """The value of `--speculative-config`: JSON, or a file with the section or a configuration.

    Raises:
        ConfigError: neither; says where the JSON breaks.
    """
    field = "speculative_config"
    if not text.lstrip().startswith(("{", "[", '"')):
        data = read_mapping(Path(text), field)
        return data if SECTION_KEYS & data.keys() else data.get(field, data)
    section = read_json(text, field)
    if not isinstance(section, dict):
        raise ConfigError.at(field, f"expected a mapping, got {text!r}")
    return section


def check_writable(path: Path, field: str) -> None:
    """Before a long run: whether its results can be written to `path` in the end.

    Raises:
        ConfigError: they cannot; names `field`.
    """
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError.at(field, f"cannot write {path}: {error.strerror}") from None


def write_json(path: Path, data: Any, field: str, indent: int | None = 2) -> None:
    """Writes the results of a long run.

    Raises:
        ConfigError: they cannot be written; names `field`.
    """
    try:
        path.write_text(json.dumps(data, indent=indent) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError.at(field, f"cannot write {path}: {error.strerror}") from None


def make_folder(path: Path, field: str) -> None:
    """Before a long run: the folder for its results.

    Raises:
        ConfigError: it cannot be made, or not be written to; names `field`.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError.at(field, f"cannot write to {path}: {error.strerror}") from None


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
