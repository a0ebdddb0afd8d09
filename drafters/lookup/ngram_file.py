"""The file of counted n-grams: what followed a few tokens, and how often.

Magic, version, lengths of header and tables, SHA-256 of all but itself, a JSON header (the
tokenizer's fingerprint, whose tables, their sizes), then int32 arrays, little-endian. In memory
they are `CountTable`s.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from ...config import NGramCacheConfig
from ...config.files import check_writable, write_whole
from ...errors import TableFileError, in_words
from ...scheduler.types import IntArray
from ..vocabulary import fingerprint

_MAGIC = b"OUTRNGRM"
_VERSION = 2  # 1 had its header outside the checksum
_LENGTHS = struct.Struct("<8sIIQ")  # magic, version, bytes of header and tables
_BEGIN = _LENGTHS.size + 32
MAX_ORDER = 4


_CHECKED = ConfigDict(strict=True, extra="forbid")
_Size = Annotated[int, Field(ge=0, le=2**31)]


@checked_dataclass(frozen=True, slots=True, config=_CHECKED)
class TableInfo:
    """One table of a file."""

    tenant: str  # whose it is; empty for everybody's
    order: Annotated[int, Field(ge=1, le=MAX_ORDER)]  # tokens of a key
    num_keys: _Size
    num_pairs: _Size

    @property
    def num_bytes(self) -> int:
        return 4 * (self.num_keys * (self.order + 1) + 2 * self.num_pairs)


@checked_dataclass(frozen=True, slots=True, config=_CHECKED)
class Header:
    """What a file says of itself."""

    tokenizer: str  # fingerprint
    tables: tuple[TableInfo, ...]
    facts: dict[str, Any]  # how it was made; nothing depends on them


@dataclass(frozen=True, slots=True)
class Arrays:
    """A table as it is stored: `counts[i]` pairs belong to key i."""

    tenant: str
    keys: IntArray  # [num_keys, order]
    counts: IntArray  # [num_keys]
    pairs: IntArray  # [num_pairs, 2], (token, count)


def save(path: Path, tables: list[Arrays], tokenizer: str, facts: dict[str, Any]) -> None:
    """Writes the tables; a reader sees the old file or the new one, never half of it."""
    payload = b"".join(
        part.astype("<i4").tobytes()
        for arrays in tables
        for part in (arrays.keys, arrays.counts, arrays.pairs)
    )
    infos = tuple(
        TableInfo(each.tenant, each.keys.shape[1], len(each.keys), len(each.pairs))
        for each in tables
    )
    header = json.dumps(asdict(Header(tokenizer, infos, facts))).encode()
    lengths = _LENGTHS.pack(_MAGIC, _VERSION, len(header), len(payload))
    write_whole(path, [lengths, _checksum(lengths, header, payload), header, payload])


def read(path: Path, field: str) -> tuple[Header, memoryview]:
    """A file's header and tables, checked against each other.

    Raises:
        TableFileError: unreadable, another format or version, truncated, or damaged.
    """
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise _bad(path, field, f"cannot be read: {error.strerror}") from None
    if data[: len(_MAGIC)] != _MAGIC:
        raise _bad(path, field, "is not an n-gram table (see `outrider ngram build`)")
    if len(data) < _BEGIN:
        raise _bad(path, field, "is truncated within its header")
    _, version, header_bytes, payload_bytes = _LENGTHS.unpack_from(data)
    if version != _VERSION:
        reason = f"has version {version}; this program reads version {_VERSION}; build it again"
        raise _bad(path, field, reason)
    middle, end = _BEGIN + header_bytes, _BEGIN + header_bytes + payload_bytes
    if len(data) < end:
        raise _bad(path, field, f"is truncated: {len(data)} of {end} bytes")
    lengths, checksum = data[: _LENGTHS.size], data[_LENGTHS.size : _BEGIN]
    if len(data) > end or checksum != _checksum(lengths, data[_BEGIN:middle], data[middle:]):
        raise _bad(path, field, "is damaged: its checksum does not match")
    try:
        header = TypeAdapter(Header).validate_json(bytes(data[_BEGIN:middle]))
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}." for part in first["loc"])[:-1] or "the header"
        raise _bad(path, field, f"has a damaged header: {place}: {in_words(first)}") from None
    if sum(info.num_bytes for info in header.tables) != payload_bytes:
        raise _bad(path, field, "has a damaged header: tables: sizes do not add up")
    return header, data[middle:]


def load(path: Path, field: str, tokenizer: str, vocab_size: int) -> list[Arrays]:
    """The tables of a file that was made with this tokenizer.

    Raises:
        TableFileError: as `read`; it belongs to another tokenizer; its content makes no sense.
    """
    header, payload = read(path, field)
    if header.tokenizer != tokenizer:
        raise _bad(
            path,
            field,
            f"was made with another tokenizer (fingerprint {header.tokenizer[:12]}, the model's "
            f"is {tokenizer[:12]}); build it again",
        )
    numbers = np.frombuffer(payload, dtype="<i4").astype(np.int32)
    tables, at = [], 0
    for index, info in enumerate(header.tables):
        parts = []
        for size in (info.num_keys * info.order, info.num_keys, 2 * info.num_pairs):
            parts.append(numbers[at : at + size])
            at += size
        keys, counts, flat = parts[0].reshape(-1, info.order), parts[1], parts[2].reshape(-1, 2)
        arrays = Arrays(info.tenant, keys, counts, flat)
        reason = _problem(arrays, vocab_size)
        if reason is not None:
            raise _bad(path, field, f"holds what cannot be: tables.{index}: {reason}")
        tables.append(arrays)
    return tables


def load_tables(
    config: NGramCacheConfig, tokenizer: Path, vocab_size: int
) -> tuple[list[Arrays], list[Arrays], str]:
    """A section's static and dynamic tables, and the tokenizer's fingerprint if it has files.

    A dynamic file that does not exist yet is a new one.

    Raises:
        TableFileError: as `load`; a static table is a tenant's.
        ConfigError: the dynamic file cannot be written.
    """
    static: list[Arrays] = []
    dynamic: list[Arrays] = []
    if config.lookup_cache_static is None and config.lookup_cache_dynamic is None:
        return static, dynamic, ""
    mark = fingerprint(tokenizer)
    if config.lookup_cache_static is not None:
        path, field = Path(config.lookup_cache_static), "speculative_config.lookup_cache_static"
        static = load(path, field, mark, vocab_size)
        if any(arrays.tenant for arrays in static):
            text = "holds what tenants' requests counted, which is not for everybody"
            raise _bad(path, field, f"{text}; give it as lookup_cache_dynamic")
    if config.lookup_cache_dynamic is not None:
        path, field = Path(config.lookup_cache_dynamic), "speculative_config.lookup_cache_dynamic"
        check_writable(path, field)
        if path.exists():
            dynamic = load(path, field, mark, vocab_size)
    return static, dynamic, mark


def _problem(arrays: Arrays, vocab_size: int) -> str | None:
    """Why a table cannot be used; None if it can."""
    ids = np.concatenate([arrays.keys.ravel(), arrays.pairs[:, 0]])
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        return f"tokens outside the vocabulary of {vocab_size}"
    if bool((arrays.counts < 1).any()):
        return "a key that nothing follows"
    if int(arrays.counts.sum(dtype=np.int64)) != len(arrays.pairs):
        return "counts that do not add up"
    if bool((arrays.pairs[:, 1] < 1).any()):
        return "a token that followed less than once"
    return None


def _checksum(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _bad(path: Path, field: str, reason: str) -> TableFileError:
    return TableFileError.at(field, f"{path} {reason}")
