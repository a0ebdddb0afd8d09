"""The file of counted n-grams: what followed a few tokens, and how often.

Magic, version, length of a JSON header, the header (the tokenizer's fingerprint, sizes, SHA-256 of
the rest), then int32 arrays, little-endian. In memory they are `CountTable`s.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TableFileError
from ..scheduler.types import IntArray

_MAGIC = b"OUTRNGRM"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class TableInfo:
    """One table of a file."""

    tenant: str  # whose it is; empty for everybody's
    order: int  # tokens of a key
    num_keys: int
    num_pairs: int


@dataclass(frozen=True, slots=True)
class Arrays:
    """A table as it is stored: `counts[i]` pairs belong to key i."""

    tenant: str
    keys: IntArray  # [num_keys, order]
    counts: IntArray  # [num_keys]
    pairs: IntArray  # [num_pairs, 2], (token, count)


def fingerprint(tokenizer: Path) -> str:
    """Hash of the vocabulary in a folder's `tokenizer.json`: equal where ids mean the same.

    Raises:
        TableFileError: there is none, or it is not one.
    """
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = data["model"]["vocab"]
        added = [[each["id"], each["content"]] for each in data.get("added_tokens") or []]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TableFileError(
            f"tokenizer: {path} is not a readable tokenizer.json ({type(error).__name__}), by "
            "which an n-gram table is bound to its vocabulary",
            field="tokenizer",
        ) from None
    text = json.dumps([vocabulary, sorted(added)], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def save(path: Path, tables: list[Arrays], tokenizer: str, facts: dict[str, Any]) -> None:
    """Writes the tables; a reader sees the old file or the new one, never half of it."""
    payload = b"".join(
        part.astype("<i4").tobytes()
        for arrays in tables
        for part in (arrays.keys, arrays.counts, arrays.pairs)
    )
    infos = [
        TableInfo(each.tenant, each.keys.shape[1], len(each.keys), len(each.pairs))
        for each in tables
    ]
    header = json.dumps(
        {
            "tokenizer": tokenizer,
            "sha256": hashlib.sha256(payload).hexdigest(),
            "payload_bytes": len(payload),
            "tables": [asdict(info) for info in infos],
            "facts": facts,
        }
    ).encode()
    sizes = np.array([_VERSION, len(header)], dtype="<u4").tobytes()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(_MAGIC + sizes + header + payload)
    partial.replace(path)


def read_header(path: Path, field: str) -> tuple[dict[str, Any], bytes]:
    """A file's header and payload, checked against each other.

    Raises:
        TableFileError: unreadable, another format or version, truncated, or damaged.
    """

    def fail(reason: str) -> TableFileError:
        return TableFileError(f"{field}: {path} {reason}", field=field)

    try:
        data = path.read_bytes()
    except OSError as error:
        raise fail(f"cannot be read: {error.strerror}") from None
    if data[: len(_MAGIC)] != _MAGIC:
        raise fail("is not an n-gram table (see `outrider ngram build`)")
    begin = len(_MAGIC) + 8
    if len(data) < begin:
        raise fail("is truncated within its header")
    version, size = np.frombuffer(data, dtype="<u4", count=2, offset=len(_MAGIC)).tolist()
    if version != _VERSION:
        raise fail(f"has version {version}; this program reads version {_VERSION}")
    if len(data) < begin + size:
        raise fail("is truncated within its header")
    try:
        header = json.loads(data[begin : begin + size])
        infos = [TableInfo(**each) for each in header["tables"]]
        wanted = int(header["payload_bytes"])
        checksum, _, _ = header["sha256"], header["tokenizer"], header["facts"]
        sizes = [4 * (i.num_keys * (i.order + 1) + 2 * i.num_pairs) for i in infos]
    except (ValueError, KeyError, TypeError):
        raise fail("has a damaged header") from None
    payload = data[begin + size :]
    if len(payload) < wanted:
        raise fail(f"is truncated: {len(payload)} of {wanted} bytes of tables")
    if hashlib.sha256(payload).hexdigest() != checksum:
        raise fail("is damaged: its checksum does not match")
    if sum(sizes) != wanted:
        raise fail("has a damaged header: sizes do not add up")
    return header, payload


def load(path: Path, field: str, tokenizer: str, vocab_size: int) -> list[Arrays]:
    """The tables of a file that was made with this tokenizer.

    Raises:
        TableFileError: as `read_header`; or it belongs to another tokenizer.
    """
    header, payload = read_header(path, field)
    if header["tokenizer"] != tokenizer:
        raise TableFileError(
            f"{field}: {path} was made with another tokenizer (fingerprint "
            f"{header['tokenizer'][:12]}, the model's is {tokenizer[:12]}); build it again",
            field=field,
        )
    numbers = np.frombuffer(payload, dtype="<i4").astype(np.int32)
    tables, at = [], 0
    for each in header["tables"]:
        info = TableInfo(**each)
        parts = []
        for size in (info.num_keys * info.order, info.num_keys, 2 * info.num_pairs):
            parts.append(numbers[at : at + size])
            at += size
        keys, counts, flat = parts[0].reshape(-1, info.order), parts[1], parts[2].reshape(-1, 2)
        ids = np.concatenate([keys.ravel(), flat[:, 0]])
        if int(counts.sum()) != info.num_pairs or bool(((ids < 0) | (ids >= vocab_size)).any()):
            raise TableFileError(
                f"{field}: {path} holds tokens outside the vocabulary of {vocab_size}, or counts "
                "that do not add up",
                field=field,
            )
        tables.append(Arrays(info.tenant, keys, counts, flat))
    return tables
