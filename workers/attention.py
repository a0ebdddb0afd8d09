"""One rank's keys and values in paged storage.

A slot holds one token: `slot = block * block_size + offset`. The scheduler assigns slots to
sequences (`scheduler/blocks.py`); every rank stores its own heads of the same slots.

A layer may store one-byte codes instead of the model's dtype (`KVCode`). A written value is encoded
as `code = round(clamp(value / scale))`. A read returns `code * scale`, rounded to the model's
dtype. This includes rows that the same step has written, so a row's result does not depend on the
step that computes it. A GPU's kernels use the same codes, but multiply scores and results by the
scales and do not round the values that they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..scheduler.types import IntArray
from .states import StateCache


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A one-byte floating-point format: a sign, an exponent and `mantissa_bits`."""

    dtype: torch.dtype
    mantissa_bits: int

    @property
    def largest(self) -> float:
        """The largest finite value; larger values saturate to it."""
        return torch.finfo(self.dtype).max

    def encode(self, values: Tensor, scale: float) -> Tensor:  # uint8, of the same shape
        """Rounds to nearest even; divides by `scale` by multiplying with its float32 inverse."""
        scaled = values.float() * inverse(scale)
        return scaled.clamp(-self.largest, self.largest).to(self.dtype).view(torch.uint8)

    def decode(self, codes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Returns the values that attention reads, in the same shape."""
        return (codes.view(self.dtype).float() * float(np.float32(scale))).to(dtype)


def inverse(scale: float) -> float:
    """Returns the factor by which values are multiplied before they are rounded."""
    return float(np.float32(1) / np.float32(scale))


KV_FORMATS = {
    "fp8_e4m3": KVFormat(torch.float8_e4m3fn, 3),
    "fp8_e5m2": KVFormat(torch.float8_e5m2, 2),
}
"""Formats by their names in the configuration."""


@dataclass(frozen=True, slots=True)
class KVCode:
    """How one layer's keys and values are encoded if they are not stored in the model's dtype."""

    format: KVFormat
    key_scale: float = 1.0
    value_scale: float = 1.0

    def keys(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the keys that attention reads, in the same shape."""
        return self.format.decode(codes, self.key_scale, dtype)

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the values that attention reads, in the same shape."""
        return self.format.decode(codes, self.value_scale, dtype)


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer stores per token on this rank. MLA's values are narrower than its keys."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    num_spare: int = 0  # slots after those of the blocks, for rows that later steps do not read
    format: KVFormat | None = None  # None: the model's dtype

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one token in a model of that dtype."""
        return self.num_elements * (dtype.itemsize if self.format is None else 1)


def moves_whole_words(shape: KVShape) -> bool:
    """Returns True if a token's keys and values are whole 4-byte words (for `KVCache.places`)."""
    dims = (shape.head_dim, shape.value_dim)
    return shape.format is None or all(shape.num_kv_heads * dim % 4 == 0 for dim in dims)


def coded_layers(
    shapes: Sequence[KVShape], codes: Sequence[KVCode]
) -> tuple[tuple[KVShape, ...], tuple[KVCode | None, ...]]:
    """Returns the shapes and codes of layers that store codes.

    An MLA latent is both key and value, and uses the key's scale.
    """
    kept: list[KVCode | None] = []
    for shape, code in zip(shapes, codes, strict=True):
        own = code if shape.value_dim else replace(code, value_scale=code.key_scale)
        kept.append(own if shape.num_elements else None)
    forms = (None if code is None else code.format for code in kept)
    coded = [replace(shape, format=form) for shape, form in zip(shapes, forms, strict=True)]
    return tuple(coded), tuple(kept)


class KVCache:
    """Keys and values of every layer. Initialized to zero, since padding reads unwritten slots."""

    def __init__(
        self,
        shapes: Sequence[KVShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateCache | None = None,
        codes: Sequence[KVCode | None] = (),  # of the first layers; others have none
    ) -> None:
        self.states = states  # of layers without keys and values
        self.codes = [*codes, *[None] * (len(shapes) - len(codes))]
        """Per layer; None: stored in the model's dtype."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self.device = device
        self.keys: list[Tensor] = [torch.empty(0)] * len(shapes)
        """Per layer [num_slots + its spare ones, num_kv_heads, head_dim]: views of `_storages`."""
        self.values: list[Tensor] = [torch.empty(0)] * len(shapes)
        """Per layer [num_slots + its spare ones, num_kv_heads, value_dim]: views of `_storages`."""
        self._storages: list[Tensor] = []  # [num_layers of one shape, num_slots, heads, dim]
        for shape, code in zip(shapes, self.codes, strict=True):
            assert shape.format == (None if code is None else code.format), (shape, code)
        for shape in dict.fromkeys(shapes):
            layers = [index for index, other in enumerate(shapes) if other == shape]
            for views, dim in ((self.keys, shape.head_dim), (self.values, shape.value_dim)):
                num_slots = self.num_slots + shape.num_spare
                size = (len(layers), num_slots, shape.num_kv_heads, dim)
                kept = dtype if shape.format is None else torch.uint8
                storage = torch.zeros(size, dtype=kept, device=device)
                self._storages.append(storage)
                for layer, view in zip(layers, storage.unbind(0), strict=True):
                    views[layer] = view

    @property
    def num_bytes(self) -> int:
        return sum(storage.numel() * storage.element_size() for storage in self._storages)

    @property
    def places(self) -> Tensor:  # [num_layers * 2 at most, 2] int64, on the device
        """Address and bytes per slot of every layer's keys and values."""
        views = [view for storage in self._storages for view in storage if storage.numel()]
        sizes = [(view.data_ptr(), view[0].numel() * view.element_size()) for view in views]
        assert all(size % 4 == 0 for _, size in sizes), sizes  # the kernel moves whole words
        return torch.tensor(sizes, dtype=torch.int64).view(-1, 2).to(self.device)

    def write(
        self,
        layer: int,
        slots: Tensor,  # [num_tokens] int64
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor | None,  # None: the key is also the value
    ) -> None:
        """Writes new tokens' keys and values of one layer to their slots."""
        if (code := self.codes[layer]) is not None:
            key = code.format.encode(key, code.key_scale)
            value = None if value is None else code.format.encode(value, code.value_scale)
        self.keys[layer].index_copy_(0, slots, key)
        if value is not None:
            self.values[layer].index_copy_(0, slots, value)

    def apply_moves(self, kv_moves: IntArray) -> None:  # [num_moves, 2], (source, destination)
        """Copies slots to slots in every layer; all reads happen before all writes."""
        if not len(kv_moves):
            return
        if self.states is not None:
            self.states.apply_moves(kv_moves)
        source, destination = torch.as_tensor(kv_moves, dtype=torch.int64).T.to(self.device)
        self.move(source, destination)

    def move(
        self,
        source: Tensor,  # [num_moves] int64, slots
        destination: Tensor,  # [num_moves] int64
    ) -> None:
        """Does the same as `apply_moves` for tensors on the device."""
        for storage in self._storages:
            if not storage.numel():
                continue
            storage.index_copy_(1, destination, storage.index_select(1, source))
