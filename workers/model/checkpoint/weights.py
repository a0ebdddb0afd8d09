"""Reads a checkpoint folder: finds the file of each tensor and reads only the requested slices.

A `TensorSource` is a tensor that has not been read. Sources can be joined and stacked without
reading. If the checkpoint stores a tensor in pieces, for example one per expert, a rank's shard is
read piece by piece.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import KeysView, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Unpack

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ....errors import CheckpointError
from .gguf_checkpoint import coded_sources
from .hub import (
    INDEX_NAME,
    PICKLED,
    PICKLED_INDEX,
    Trust,
    files_of,
    has_safetensors,
    read_mapping,
    require_checkpoint,
    unreadable,
)
from .quantised import CodedSource, are_many, make_source
from .quantised_formats import find_format

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BITS = re.compile(r"\d+")
_NAMES = {dtype: name for name, dtype in _DTYPES.items()} | {torch.int64: "I64"}


@dataclass(frozen=True, slots=True)
class PickledSlice:
    """One tensor; reading a part of it copies that part."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return _NAMES.get(self.tensor.dtype, str(self.tensor.dtype))

    def __getitem__(self, box: Any) -> Tensor:
        return self.tensor[box].clone()


class PickledFile:
    """The tensors of a `pytorch_model.bin`, with the interface of an open safetensors file.

    It is read by torch's restricted unpickler, which creates tensors and executes nothing. It is
    mapped into memory if the format allows that.

    Raises:
        CheckpointError: it is damaged, or contains anything but tensors by name.
    """

    def __init__(self, file: Path) -> None:
        state = _load(file)
        if not isinstance(state, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
        ):
            raise CheckpointError(f"{file} holds no tensors by name")
        self._state: dict[str, Tensor] = state

    def keys(self) -> KeysView[str]:
        return self._state.keys()

    def get_slice(self, name: str) -> PickledSlice:
        if name not in self._state:
            raise CheckpointError(f"tensor {name!r} is not in its file")
        return PickledSlice(self._state[name])


def _load(file: Path) -> Any:
    for mmap in (True, False):  # files from before torch 1.6 cannot be mapped
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        except pickle.UnpicklingError:
            raise CheckpointError(
                f"{file} is damaged, or holds objects other than tensors"
            ) from None
        except (OSError, EOFError, RuntimeError, ValueError) as error:
            if mmap:
                continue
            reason = str(error).partition(". ")[0]
            raise CheckpointError(
                f"{file} cannot be read, it may be truncated: {reason}"
            ) from error
    raise AssertionError("the second attempt returns or raises")


Box = tuple[tuple[int, int], ...]
"""Begin and end per dimension."""


class TensorSource(Protocol):
    """A tensor that can be read in part."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, as it is stored."""

    def read(self, box: Box) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is already in memory."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def read(self, box: Box) -> Tensor:
        return self.tensor[tuple(slice(begin, end) for begin, end in box)]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor in an open file."""

    stored: Any
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        bits = _BITS.search(self.stored.get_dtype())  # of "BF16", "F8_E4M3"; not of "BOOL"
        return math.prod(self.shape) * (8 if bits is None else int(bits[0])) // 8

    def read(self, box: Box) -> Tensor:
        return self.stored[tuple(slice(begin, end) for begin, end in box)]


@dataclass(frozen=True, slots=True)
class Stacked:
    """Sources of one shape, stacked along a new dimension 0."""

    parts: Sequence[TensorSource]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def read(self, box: Box) -> Tensor:
        begin, end = box[0]
        return torch.stack([part.read(box[1:]) for part in self.parts[begin:end]])


@dataclass(frozen=True, slots=True)
class Joined:
    """Sources concatenated along `dim`."""

    parts: Sequence[TensorSource]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def read(self, box: Box) -> Tensor:
        begin, end = box[self.dim]
        pieces, offset = [], 0
        for part in self.parts:
            length = part.shape[self.dim]
            low, high = max(begin - offset, 0), min(end - offset, length)
            if low < high:
                pieces.append(part.read((*box[: self.dim], (low, high), *box[self.dim + 1 :])))
            offset += length
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)


# Names that vLLM reads, including its older names: in a layer's attention or in the linears
# around it; and `output_scale` of llm-compressor's calibration.
_KV_SCALE = re.compile(
    r"\blayers\.(?P<layer>\d+)\.(?:self_attn|attention|attn|mixer)\.(?:attn\.)?"
    r"(?:(?:[kv]_proj\.|qkv_proj\.)?(?P<which>k|v|kv)_scale|(?P<projection>[kv])_proj\.output_scale)$"
)


def is_kv_scale(name: str) -> bool:
    """Returns True if a tensor is a scale of the KV cache and not a weight."""
    return _KV_SCALE.search(name) is not None


class Checkpoint:
    """The weight files of one folder.

    Quantised weights read as float32, those of mxfp4 as bfloat16; tensors that belong to them are
    not listed.

    Args:
        keeps_quantised: quantised weights read as `QuantisedTensor` if they can stay quantised.
        keeps_codes: likewise for integer codes, if they are many, and for codes of the GGUF file
            from which the folder was unpacked, if it still exists.
    """

    def __init__(
        self,
        path: Path,
        *,
        keeps_quantised: bool = False,
        keeps_codes: bool = False,
        **trust: Unpack[Trust],
    ) -> None:
        self.path = require_checkpoint(path, **trust)
        self._is_pickled = not has_safetensors(path)
        self._files: dict[str, Any] = {}
        self.format = find_format(self.path)
        # By name, including a tied output layer, which is otherwise not listed.
        self.coded: dict[str, CodedSource] = (
            coded_sources(files_of(self.path)) if keeps_codes else {}
        )
        self._index = self._read_index()
        own = self.format.weights(self._index) if self.format else None
        stored = {name: name for name in self._index} if own is None else own
        self._stored = {name: each for name, each in stored.items() if not is_kv_scale(name)}
        # Tensors of a quantised format.
        self.keeps = keeps_quantised and (self.format is None or self.format.is_kept)
        if keeps_codes and (kind := self.format) is not None and not kind.is_float:
            coded = [each for each in self._stored if kind.stored_name(each, self._index)]
            self.keeps = are_many(map(self.source, coded))

    @property
    def names(self) -> list[str]:
        return sorted(self._stored)

    def source(self, name: str) -> TensorSource:
        kind = self.format
        if name in self.coded:
            return self.coded[name]
        if kind is None or kind.stored_name(name, self._index) is None:
            weight = self._piece(name)
            self._require_plain(name)
            return weight
        return make_source(name, kind, self._index, self._piece, self.path, keeps=self.keeps)

    def kv_scales(self) -> dict[int, tuple[float, float]]:
        """Divisors of keys and values in a cache of codes, by layer.

        Raises:
            CheckpointError: a scale is not one finite number above 0; names it.
        """
        found: dict[int, list[float]] = {}
        for name, tensor in self.kv_scale_tensors().items():
            scale = float(tensor) if tensor.numel() == 1 else math.nan
            if not 0 < scale < math.inf:
                raise CheckpointError(
                    f"tensor {name!r} of {str(self.path)!r} is a scale of the KV cache, and must "
                    f"be one number above 0; it has shape {list(tensor.shape)}, and begins with "
                    f"{tensor.flatten()[:1].tolist()}"
                )
            match = _KV_SCALE.search(name)
            assert match is not None, name
            layer, which = int(match["layer"]), match["which"] or match["projection"]
            pair = found.setdefault(layer, [1.0, 1.0])
            for place, key in enumerate("kv"):
                if key in which:
                    pair[place] = scale
        return {layer: (keys, values) for layer, (keys, values) in found.items()}

    def kv_scale_tensors(self) -> dict[str, Tensor]:
        """Returns the stored scales of the KV cache."""
        pieces = {name: self._piece(name) for name in self._index if is_kv_scale(name)}
        return {name: each.read(whole_box(each.shape)) for name, each in pieces.items()}

    def _require_plain(self, name: str) -> None:
        """Raises `CheckpointError` for values that are meaningless without a scale."""
        stored = self._dtype_of(name)
        if stored.startswith("F8") or (self.format and stored in ("I8", "U8", "I32")):
            raise CheckpointError(
                f"tensor {name!r} of {str(self.path)!r} is quantised ({stored}), and it has no "
                "scale that is read beside it"
            )

    def _piece(self, name: str) -> TensorSource:
        file = self._open(self._index[name])
        try:
            piece = file.get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"tensor {name!r} is in the index of {self.path} but not in "
                f"{self._index[name]!r}: {error}"
            ) from error
        return Piece(piece, tuple(piece.get_shape()))

    def outline(self, name: str) -> TensorSource:
        """Returns the tensor's shape and dtype without its values: it reads as a meta tensor."""
        shape = self.source(name).shape
        dtype = _DTYPES.get(self._dtype_of(self._stored[name]), torch.float32)
        return Whole(torch.empty(shape, dtype=dtype, device="meta"))

    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point tensor; the default if the configuration has none."""
        for name in self.names:
            stored = self._dtype_of(self._stored[name])
            if stored in _DTYPES:
                return _DTYPES[stored]
        return torch.float32

    def _dtype_of(self, name: str) -> str:
        return self._open(self._index[name]).get_slice(name).get_dtype()

    def _read_index(self) -> dict[str, str]:
        index = self.path / (PICKLED_INDEX if self._is_pickled else INDEX_NAME)
        if index.is_file():
            weight_map = read_mapping(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index} is not an index: it has no mapping 'weight_map'")
            for name in sorted({str(each) for each in weight_map.values()}):
                if not (self.path / name).is_file():
                    raise CheckpointError(f"{index} names {name!r}, which is not in the folder")
            return weight_map
        found = sorted(file.name for file in self.path.glob("*.safetensors"))
        if self._is_pickled:
            found = [PICKLED]
        if len(found) > 1 and "model.safetensors" in found:
            found = ["model.safetensors"]
        return {tensor: file for file in found for tensor in self._open(file).keys()}  # noqa: SIM118

    def _open(self, name: str) -> Any:
        if name not in self._files:
            if self._is_pickled:
                self._files[name] = PickledFile(self.path / name)
                return self._files[name]
            try:
                self._files[name] = safe_open(self.path / name, framework="pt", device="cpu")
            except (SafetensorError, OSError, RuntimeError) as error:  # torch cannot map it
                raise CheckpointError(unreadable(self.path / name, error)) from error
        return self._files[name]


class Received(Checkpoint):
    """Weights in memory that replace those of a folder; its other files still apply.

    If they have no scales of the KV cache, the folder's scales are used.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], **trust: Unpack[Trust]) -> None:
        self.path, self._tensors, self.format, self.coded = path, tensors, None, {}
        self._trust = trust

    @property
    def names(self) -> list[str]:
        return sorted(name for name in self._tensors if not is_kv_scale(name))

    def kv_scale_tensors(self) -> dict[str, Tensor]:
        own = {name: each for name, each in self._tensors.items() if is_kv_scale(name)}
        return own or Checkpoint(self.path, **self._trust).kv_scale_tensors()

    def source(self, name: str) -> TensorSource:
        return Whole(self._tensors[name])

    def outline(self, name: str) -> TensorSource:
        return Whole(self._tensors[name].to("meta"))

    def dtype(self) -> torch.dtype:
        floating = (each.dtype for each in self._tensors.values() if each.is_floating_point())
        return next(floating, torch.float32)


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)
