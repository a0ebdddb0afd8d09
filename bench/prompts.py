"""Prompts of a benchmark: a file's, or the demo's held-out ones."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import ConfigError

HELDOUT = Path(__file__).resolve().parent.parent / "demo" / "heldout.jsonl"


def load_prompts(path: Path | None, num_prompts: int) -> list[str]:
    """The first `num_prompts` prompts: lines of a text file, or `text`/`prompt` of a JSON line.

    Raises:
        ConfigError: unreadable, or a line without a prompt; names the line.
    """
    source = path or HELDOUT
    try:
        lines = source.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts: cannot read {source}: {error}", field="prompts") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_of_json(source, number, line) if source.suffix == ".jsonl" else line)
        if len(prompts) == num_prompts:
            break
    if not prompts:
        raise ConfigError(f"prompts: {source} has none", field="prompts")
    return prompts


def _of_json(source: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"prompts: {source}, line {number}: not JSON: {error.msg}", field="prompts"
        ) from None
    prompt = (record.get("text") or record.get("prompt")) if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise ConfigError(
            f"prompts: {source}, line {number}: no `text` and no `prompt`", field="prompts"
        )
    return prompt
