"""Corpora: files of texts that every request of an engine is looked up in.

A `.txt` file is one text; a line of a `.jsonl` file is one, as a string or under `text`, or token
ids, under `tokens`. Texts become tokens with the target's `tokenizer.json`, without special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...config import SuffixConfig
from ...errors import CheckpointError, ConfigError, InvalidRequestError
from ...scheduler.types import IntArray

_FIELD = "speculative_config.corpora"
_KINDS = (".txt", ".jsonl")


def texts(config: SuffixConfig, tokenizer: Path, vocab_size: int) -> Iterator[IntArray]:
    """The texts of all corpora.

    Raises:
        ConfigError: a file cannot be read or has too many tokens; names the file and the line.
        CheckpointError: the target has no `tokenizer.json`.
    """
    num_tokens, most = 0, config.max_corpus_tokens
    for document in _documents(config, tokenizer, vocab_size):
        num_tokens += len(document)
        if num_tokens > most:
            raise ConfigError.at(
                "speculative_config.max_corpus_tokens", f"the corpora have more than {most} tokens"
            )
        yield document


def check(config: SuffixConfig, tokenizer: Path, vocab_size: int) -> None:
    """Reads the corpora (raises as `texts`)."""
    for _ in texts(config, tokenizer, vocab_size):
        pass


def corpora_of(section: dict[str, Any]) -> list[str]:
    """The corpora of a `speculative_config`, each once."""
    suffixes = [each for each in section.get("members", [section]) if _takes_corpora(each)]
    return list(dict.fromkeys(path for each in suffixes for path in each.get("corpora", ())))


def with_corpora(
    section: dict[str, Any], add: Sequence[str], remove: Sequence[str]
) -> dict[str, Any]:
    """A `speculative_config` whose drafters look up more corpora, or fewer.

    Raises:
        InvalidRequestError: none of its drafters takes corpora, or one that goes is not there, or
            comes as well.
    """
    if not any(map(_takes_corpora, section.get("members", [section]))):
        raise InvalidRequestError.at("model", "no drafter of it takes corpora; Suffix does")
    known = corpora_of(section)
    for path in remove:
        if path not in known:
            listed = ", ".join(map(repr, known)) or "none"
            raise InvalidRequestError.at(
                "remove", f"there is no corpus {path!r}; there is {listed}"
            )
        if path in add:
            raise InvalidRequestError.at(
                "add", f"remove has {path!r} too; remove it first, then add it by another call"
            )
    corpora = [each for each in dict.fromkeys([*known, *add]) if each not in remove]

    def changed(each: dict[str, Any]) -> dict[str, Any]:
        return {**each, "corpora": corpora} if _takes_corpora(each) else each

    if "members" not in section:
        return changed(section)
    return {**section, "members": [changed(each) for each in section["members"]]}


def _takes_corpora(section: dict[str, Any]) -> bool:
    return section.get("decoding_type") == "Suffix"


def _documents(config: SuffixConfig, tokenizer: Path, vocab_size: int) -> Iterator[IntArray]:
    if not config.corpora:
        return
    encode = _Encoder(tokenizer)
    for name in config.corpora:
        path = Path(name)
        if path.suffix not in _KINDS:
            raise _bad(path, f"expected a file of the kind {' or '.join(_KINDS)}")
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a path may have a zero byte
            reason = getattr(error, "strerror", None) or error
            raise _bad(path, f"cannot be read: {reason}") from None
        if path.suffix == ".txt":
            yield encode(content)
            continue
        for number, line in enumerate(content.split("\n"), start=1):
            if line.strip():
                yield _document(path, number, line, encode, vocab_size)


def _document(path: Path, number: int, line: str, encode: _Encoder, vocab_size: int) -> IntArray:
    """A line of a `.jsonl` file."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"line {number} is not JSON: {error}") from None
    match record:
        case {"text": str() as text} | (str() as text):
            if not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text):
                raise _bad(path, f"line {number}: half of a surrogate pair, which is not text")
            return encode(text)
        case {"tokens": [*ids]} if all(type(each) is int for each in ids):
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                raise _bad(path, f"line {number}: tokens outside the vocabulary of {vocab_size}")
            return np.array(ids, dtype=np.int32)
    raise _bad(path, f"line {number}: expected `text`, or `tokens`, which are whole numbers")


class _Encoder:
    """Makes tokens of texts; reads the tokenizer when the first one comes."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json" if folder.is_dir() else folder
        self._tokenizer: Any = None

    def __call__(self, text: str) -> IntArray:
        from tokenizers import Tokenizer

        if self._tokenizer is None:
            try:
                self._tokenizer = Tokenizer.from_file(str(self._file))
            except Exception as error:  # of no narrower type
                raise CheckpointError.at(
                    "tokenizer",
                    f"{self._file} is not a readable tokenizer.json; {_FIELD} needs one",
                ) from error
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=np.int32)


def _bad(path: Path, reason: str) -> ConfigError:
    return ConfigError.at(_FIELD, f"{str(path)!r}: {reason}")
