"""Prompts of a benchmark: a file's, or the demo's held-out ones."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from ..errors import ConfigError

HELDOUT = Path(__file__).resolve().parent.parent / "demo" / "heldout.jsonl"


def load_prompts(path: Path | None, num_prompts: int) -> list[str]:
    """The first `num_prompts` prompts: lines of a text file, or `text`/`prompt` of a JSON line.

    Raises:
        ConfigError: unreadable, or a line without a prompt; names the line.
    """
    source, field = path or HELDOUT, "prompts"
    prompts = []
    for number, line in read_lines(source, field)[:num_prompts]:
        if not is_json_lines(source):
            prompts.append(line)
            continue
        record = json_record(source, number, line, field)
        prompts.append(string_of(record, ("text", "prompt"), source, number, field))
    return prompts


def is_json_lines(source: Path) -> bool:
    """Whether a file holds a JSON object on each line, by its name."""
    return source.name.removesuffix(".gz").endswith(".jsonl")


def read_text(source: Path, field: str) -> str:
    """The content of a file, which may be gzipped.

    Raises:
        ConfigError: unreadable, or no text.
    """
    try:
        if source.suffix == ".gz":
            return gzip.decompress(source.read_bytes()).decode("utf-8")
        return source.read_text(encoding="utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError.at(field, f"cannot read {source}: {error}") from None


def read_lines(source: Path, field: str) -> list[tuple[int, str]]:
    """The lines that are not empty, each with its number in the file.

    Raises:
        ConfigError: unreadable, or there is none.
    """
    lines = read_text(source, field).split("\n")
    found = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise ConfigError.at(field, f"{source} has none")
    return found


def json_record(source: Path, number: int, line: str, field: str) -> dict[str, Any]:
    """A line's JSON object.

    Raises:
        ConfigError: it is none; names the line.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError.at(field, f"{source}, line {number}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError.at(field, f"{source}, line {number}: expected an object")
    return record


def string_of(
    record: dict[str, Any], keys: tuple[str, ...], source: Path, number: int, field: str
) -> str:
    """The text under the first of `keys` that the record has.

    Raises:
        ConfigError: there is none; names the line.
    """
    found = next((record[key] for key in keys if record.get(key)), None)
    if not isinstance(found, str):
        wanted = " and ".join(f"no `{key}`" for key in keys)
        raise ConfigError.at(field, f"{source}, line {number}: {wanted}")
    return found
