"""GGUF files: metadata and tensors, checked before any library reads the file.

The `gguf` library and transformers trust the counts and offsets in a file. Here, every number is
checked against the file, so an invalid file causes an error without using much memory.

The format: ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ....errors import CheckpointError

_MAGIC: Final = b"GGUF"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

# Limits of a header. The largest known ones have 1,500 tensors and 1.4 million strings.
_MAX_HEADER_BYTES, _MAX_STRING_BYTES, _MAX_ELEMENTS = 2**28, 2**24, 2**22
_MAX_KEYS, _MAX_TENSORS, _MAX_ALIGNMENT = 2**16, 2**18, 2**16

# Types by number: those that the `gguf` library dequantises.
READABLE: Final = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K"),
    *("Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL"),
    *("IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Unquantised types and their names in torch."""
_SCALARS = {kind: f"<{letter}" for kind, letter in [*enumerate("BbHhIif?"), *enumerate("Qqd", 10)]}
_FLOAT, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]  # outermost first
    kind: str
    file: Path
    offset: int  # offset of its first byte in the file
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Values per row; an unquantised vector has rows of one value."""
        return 1 if len(self.shape) == 1 and self.kind in PLAIN else self.shape[-1]

    @property
    def num_rows(self) -> int:
        return self.num_elements // self.width


@dataclass(slots=True)
class _Cursor:
    """Reads values of a mapped file in order, but never beyond its end."""

    data: mmap.mmap
    at: int = 0
    elements: int = 0  # array elements read so far
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = min(len(self.data), _MAX_HEADER_BYTES)

    def take(self, num_bytes: int, what: str) -> int:
        """Returns the offset of the next `num_bytes`, after a bounds check."""
        begin = self.at
        if num_bytes > self.end - begin:
            if begin + num_bytes > len(self.data):
                raise CheckpointError(f"it ends within {what}; it may be truncated")
            raise CheckpointError(f"its header is longer than {_MAX_HEADER_BYTES:,} bytes")
        self.at += num_bytes
        return begin

    def number(self, form: str, what: str) -> Any:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]

    def text(self, what: str, most: int = _MAX_STRING_BYTES) -> str:
        length = self.number("<Q", what)
        if length > most:
            raise CheckpointError(f"{what} is {length:,} bytes long; at most {most:,}")
        begin = self.take(length, what)
        try:
            return self.data[begin : self.at].decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{what} is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        if kind == _FLOAT:  # the decimal that was rounded to float32: 0.6, not 0.6000000238
            return float(str(np.float32(self.number(_SCALARS[kind], key))))
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind == _STRING:
            return self.text(key)
        if kind != _ARRAY:
            raise CheckpointError(f"{key} has the unknown type {kind}")
        inner, count = self.number("<I", key), self.number("<Q", key)
        self.elements += count
        if self.elements > _MAX_ELEMENTS:
            raise CheckpointError(f"its arrays have more than {_MAX_ELEMENTS:,} elements ({key})")
        if inner == _STRING:
            return [self.text(key) for _ in range(count)]
        if inner not in _SCALARS:
            raise CheckpointError(f"{key} is an array of the unknown type {inner}")
        form = np.dtype(_SCALARS[inner])
        return np.frombuffer(self.data, form, count, self.take(count * form.itemsize, key)).tolist()


def _read_header(file: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Reads metadata and tensors of one file.

    Raises:
        CheckpointError: it is not a GGUF file, is truncated, or contradicts itself.
    """
    if file.stat().st_size < 24:
        raise CheckpointError(f"it has {file.stat().st_size} bytes; it may be truncated")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != _MAGIC:
            raise CheckpointError("it does not begin with the letters GGUF")
        cursor = _Cursor(data, 4)
        version = cursor.number("<I", "the version")
        if version not in (2, 3):
            reason = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
            raise CheckpointError(f"it is {reason}; versions 2 and 3, little-endian, are read")
        num_tensors, num_keys = (cursor.number("<Q", "its counts") for _ in range(2))
        for count, most, what in (
            (num_keys, _MAX_KEYS, "keys"),
            (num_tensors, _MAX_TENSORS, "tensors"),
        ):
            if count > most:
                raise CheckpointError(f"it states {count:,} {what}; at most {most:,}")
        meta: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.text("the name of a key", 2**16)
            if key in meta:
                raise CheckpointError(f"the key {key!r} occurs twice")
            meta[key] = cursor.value(cursor.number("<I", repr(key)), repr(key))
        found = [_tensor_info(cursor) for _ in range(num_tensors)]
        return meta, _placed(file, len(data), cursor.at, meta, found)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Reads name, shape (outermost first), type and offset of the next tensor."""
    name = cursor.text("the name of a tensor", 63)
    num_dims = cursor.number("<I", name)
    if not 1 <= num_dims <= 4:
        raise CheckpointError(f"{name} has {num_dims} dimensions; 1 to 4 are possible")
    shape = tuple(cursor.number("<Q", name) for _ in range(num_dims))[::-1]
    return name, shape, cursor.number("<I", name), cursor.number("<Q", name)


def _placed(
    file: Path,
    size: int,
    header_bytes: int,
    meta: Mapping[str, Any],
    found: Iterable[tuple[str, tuple[int, ...], int, int]],
) -> list[Tensor]:
    """Returns the tensors; checks that their bytes are consecutive and within the file."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    alignment = meta.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise CheckpointError(f"general.alignment is {alignment!r}; at most {_MAX_ALIGNMENT}")
    if alignment & (alignment - 1):
        raise CheckpointError(f"general.alignment is {alignment}, no power of two")
    start, expected = -(-header_bytes // alignment) * alignment, 0
    tensors: dict[str, Tensor] = {}
    for name, shape, number, offset in found:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise CheckpointError(f"{name} has the unknown type {number}") from None
        if kind.name not in READABLE:
            raise CheckpointError(
                f"{name} has the type {kind.name}, which is not read; read: {', '.join(READABLE)}"
            )
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block or not all(shape):
            raise CheckpointError(f"{name}: {kind.name} has no shape {list(shape)}")
        num_bytes = math.prod(shape) // block * block_bytes
        if name in tensors:
            raise CheckpointError(f"the tensor {name} occurs twice")
        if offset != expected:
            raise CheckpointError(f"{name} begins at byte {offset:,} of the data, not {expected:,}")
        if start + offset + num_bytes > size:
            raise CheckpointError(
                f"{name} ends at byte {start + offset + num_bytes:,} of {size:,}; "
                "it may be truncated"
            )
        tensors[name] = Tensor(name, shape, kind.name, file, start + offset, num_bytes)
        expected += -(-num_bytes // alignment) * alignment
    return list(tensors.values())


def shards_of(file: Path) -> list[Path]:
    """Returns all files of the model to which `file` belongs, in order."""
    found = _SHARD.fullmatch(file.name)
    if found is None:
        return [file]
    stem, count = found[1], int(found[3])
    files = []
    for index in range(1, count + 1):
        files.append(file.with_name(f"{stem}-{index:05}-of-{count:05}.gguf"))
        if not files[-1].is_file():
            raise CheckpointError(f"{files[-1].name}, a part of the model, is not beside it")
    if not files:
        raise CheckpointError("its name is that of a part of none")
    return files


def read_files(files: list[Path]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the first file's metadata, and the tensors of all files."""
    meta: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for index, file in enumerate(files):
        try:
            own, found = _read_header(file)
            count, number = own.get("split.count", 0) or 1, own.get("split.no", 0)
            if count != len(files) or (count > 1 and number != index):
                raise CheckpointError(
                    f"split.no is {number!r} and split.count {count!r}, and by its name it is part "
                    f"{index} of {len(files)}, counted from 0"
                )
            for tensor in found:
                if tensor.name in tensors:
                    raise CheckpointError(f"{tensor.name} occurs in two parts")
                tensors[tensor.name] = tensor
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error.message}" if index else error.message) from None
        meta = meta or own
    total = meta.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"split.tensors.count is {total!r}, and the parts have {len(tensors)}"
        )
    return meta, tensors


def read_rows(tensor: Tensor, rows: slice | np.ndarray) -> np.ndarray:
    """Dequantises some rows by the `gguf` library; returns float32 [rows, width]."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    shape = (tensor.num_rows, tensor.num_bytes // tensor.num_rows)
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.offset, shape)
    return dequantize(np.array(raw[rows]), GGMLQuantizationType[tensor.kind])


CODED = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), (4, 32)),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q8_0"), (8, 32)),
    "Q6_K": (8, 16),
}
"""Types whose codes can be read, with the bits per code and the columns per group."""
WITH_MINIMA: Final = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
"""Types whose groups have minima."""
_NUM_SCALES = 12  # bytes of the scales and minima of a Q4_K or Q5_K block


def read_codes(
    tensor: Tensor, rows: slice | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns codes, scales and minima of some rows.

    code * scale - minimum is the value that `read_rows` returns.

    Returns:
        Codes [rows, width]: uint8 below 16 (minus 8 in `Q4_0`), or int8 for codes of eight bits.
        Scales in float32 [rows, groups]. Minima of the same shape, or None.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import Q4_K, dequantize

    kind, (bits, _) = GGMLQuantizationType[tensor.kind], CODED[tensor.kind]
    shape = (tensor.num_rows, tensor.num_bytes // tensor.num_rows)
    raw = np.array(np.memmap(tensor.file, np.uint8, "r", tensor.offset, shape)[rows])
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[kind][1])

    def half(begin: int) -> np.ndarray:  # [blocks, 1]
        return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16).astype("f4")

    one, minima = np.frombuffer(np.float16(1).tobytes(), np.uint8), None
    plain = blocks.copy()  # with scales of 1 and minima of 0
    if tensor.kind == "Q6_K":
        begin = blocks.shape[1] - 2 - 16
        scales = half(begin + 16) * blocks[:, begin : begin + 16].view(np.int8).astype("f4")
        plain[:, begin : begin + 16], plain[:, begin + 16 :] = 1, one
    elif tensor.kind in ("Q4_K", "Q5_K"):
        found, least = Q4_K.get_scale_min(blocks[:, 4 : 4 + _NUM_SCALES].copy())
        scales, minima = half(0) * found.astype("f4"), half(2) * least.astype("f4")
        plain[:, :2], plain[:, 2:4] = one, 0
        plain[:, 4 : 4 + _NUM_SCALES] = [*[1] * 4, *[0] * 4, *[1] * 4]
    else:
        scales = half(0)
        plain[:, :2] = one
        if tensor.kind in ("Q4_1", "Q5_1"):
            minima, plain[:, 2:4] = -half(2), 0
    values = dequantize(plain.reshape(raw.shape), kind).astype(np.int8)
    if bits == 4:
        values = (values + 8 * (tensor.kind == "Q4_0")).astype(np.uint8)
    wide = (len(raw), -1)
    return values, scales.reshape(wide), None if minima is None else minima.reshape(wide)
