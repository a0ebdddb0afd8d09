"""Prompts of a benchmark: a file's, the demo's held-out ones, and kinds of them.

A kind gives texts that every contender gets alike.

*code* continues held-out Python; *edit* shows a piece of code and asks for it again with type
hints, so that the output copies; *prose* continues English text (docstrings); *chat* asks for
something through the model's chat template; *long* fills the model's context; *shared* gives all
prompts of a run one long beginning. Every prompt begins with a line made of the run's salt, so that
no prefix cache holds it from an earlier run.
"""

from __future__ import annotations

import argparse
import gzip
import inspect
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from ...errors import ConfigError
from ..compare import Workload

HELDOUT = Path(__file__).resolve().parents[2] / "demo" / "heldout.jsonl"
_MARGIN_TOKENS = 32  # a text that was cut by tokens may be split into a few more
_MOST_SHARED_TOKENS = 1024
_ALL = 10**6
_DOCUMENTED = (argparse.ArgumentParser, inspect, json, Path, dict, str, list, int, set, Console)
_TASKS = (
    "Write a function that parses an ISO 8601 date without using a library.",
    "What is the difference between a list and a tuple?",
    "Explain how a hash table handles two keys with the same hash.",
    "Rewrite this loop as a comprehension: for x in xs: if x > 0: out.append(x * 2)",
    "Give me a class for a stack with push, pop and peek, with docstrings.",
    "Why is reading a file line by line better than reading it whole?",
    "Write unit tests for a function that reverses the words of a sentence.",
    "Name three ways to make a slow database query faster, with an example of each.",
    "Summarise what a context manager does, in two sentences.",
    "Write a command line program that counts the lines of all files in a folder.",
    "How do threads and processes differ, and when is each the better choice?",
    "Show a binary search over a sorted list and say what it returns for a missing value.",
)


class TextCutter:
    """Texts of at most so many tokens."""

    def __init__(self, folder: str, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer: {error}", field="tokenizer") from None

    def cut(self, text: str, max_tokens: int) -> str:
        """The beginning of the text."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if len(token_ids) <= max_tokens:
            return text
        return str(self.tokenizer.decode(token_ids[:max_tokens], skip_special_tokens=True))

    def chat(self, text: str) -> str:
        """A user's message as the model's template has it; a plain dialogue without one."""
        if not self.tokenizer.chat_template:
            return f"User: {text}\nAssistant:"
        message = [{"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True
        )
        # Servers put the beginning-of-text token before a prompt themselves.
        return str(prompt).removeprefix(self.tokenizer.bos_token or "")


def workloads(
    names: list[str], cutter: TextCutter, max_prompt_tokens: int, own: Path | None = None
) -> list[Workload]:
    """The workloads of these names; `own` is the file of *own*.

    Raises:
        ConfigError: there is no such workload, or no file for *own*.
    """
    room = max_prompt_tokens - _MARGIN_TOKENS
    if room < 1:
        raise ConfigError(
            f"max_tokens: only {max_prompt_tokens} of the model's positions are left for prompts",
            field="max_tokens",
        )
    code = load_prompts(None, _ALL)
    edit = [
        f"{_lines(text, 14)}\n\n\n# The same again, with type hints.\n{_lines(text, 3)}"
        for text in code
    ]
    body = "\n\n\n".join(code)
    common = cutter.cut(body, min(_MOST_SHARED_TOKENS, room // 2))
    known: dict[str, Callable[[str, int], str]] = {
        "code": lambda salt, index: f"# {salt} {index}\n{_at(code, index)}",
        "edit": lambda salt, index: f"# {salt} {index}\n{_at(edit, index)}",
        "prose": lambda salt, index: f"# {salt} {index}\n{_at(_prose(), index)}",
        "chat": lambda salt, index: cutter.chat(f"({salt} {index}) {_at(_TASKS, index)}"),
        "long": lambda salt, index: f"# {salt} {index}\n{_long(code, index, room)}",
        "shared": lambda salt, index: f"# {salt}\n{common}\n\n\n# {index}\n{_at(code, index)}",
    }
    if own is not None:
        texts = load_prompts(own, _ALL)
        known["own"] = lambda salt, index: f"# {salt} {index}\n{_at(texts, index)}"
    for name in names:
        if name not in known:
            hint = " (give --prompts)" if name == "own" else ""
            raise ConfigError(
                f"workloads: {name!r} is none of {', '.join(known)}{hint}", field="workloads"
            )

    def build(prompt_of: Callable[[str, int], str]) -> Callable[[str, int], list[str]]:
        return lambda salt, count: [
            cutter.cut(prompt_of(salt, index), room) for index in range(count)
        ]

    return [Workload(name, build(known[name])) for name in names]


def _at(texts: tuple[str, ...] | list[str], index: int) -> str:
    return texts[index % len(texts)]


def _lines(text: str, count: int) -> str:
    return "\n".join(text.splitlines()[:count])


def _prose() -> list[str]:
    """Two thirds of docstrings of the standard library and others."""
    docs = [inspect.getdoc(each) or "" for each in _DOCUMENTED]
    methods = [inspect.getdoc(getattr(str, name)) or "" for name in sorted(dir(str))]
    pieces = [doc for doc in docs if len(doc) > 80] + [doc for doc in methods if len(doc) > 120]
    return [f'"""{piece[: len(piece) * 2 // 3]}' for piece in pieces]


def _long(code: list[str], index: int, num_tokens: int) -> str:
    """At least so many tokens of code (a token is never more than a few characters on average)."""
    texts: list[str] = []
    num_chars = 0
    while num_chars < 8 * num_tokens:
        texts.append(_at(code, index + len(texts)))
        num_chars += len(texts[-1])
    return "\n\n\n".join(texts)


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
