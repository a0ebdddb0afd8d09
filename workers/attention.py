"""One rank's keys and values in paged storage.

A slot holds one token: `slot = block * block_size + offset`. Which slots belong to whom is the
scheduler's business (`scheduler/blocks.py`); every rank holds its own heads of the same slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..scheduler.types import IntArray
from .states import StateCache


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer stores for one token on this rank. MLA's values are narrower than its keys."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    num_spare: int = 0  # slots after those of the blocks, for rows that no later step reads

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.value_dim)


class KVCache:
    """Keys and values of every layer. Zeroed, since padding reads slots that none has written."""

    def __init__(
        self,
        shapes: Sequence[KVShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateCache | None = None,
    ) -> None:
        self.states = states  # of layers without keys and values
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self.device = device
        self.keys: list[Tensor] = [torch.empty(0)] * len(shapes)
        """Per layer [num_slots + its spare ones, num_kv_heads, head_dim]: views of `_storages`."""
        self.values: list[Tensor] = [torch.empty(0)] * len(shapes)
        """Per layer [num_slots + its spare ones, num_kv_heads, value_dim]: views of `_storages`."""
        self._storages: list[Tensor] = []  # [num_layers of one shape, num_slots, heads, dim]
        for shape in dict.fromkeys(shapes):
            layers = [index for index, other in enumerate(shapes) if other == shape]
            for views, dim in ((self.keys, shape.head_dim), (self.values, shape.value_dim)):
                num_slots = self.num_slots + shape.num_spare
                size = (len(layers), num_slots, shape.num_kv_heads, dim)
                storage = torch.zeros(size, dtype=dtype, device=device)
                self._storages.append(storage)
                for layer, view in zip(layers, storage.unbind(0), strict=True):
                    views[layer] = view

    @property
    def num_bytes(self) -> int:
        return sum(storage.numel() * storage.element_size() for storage in self._storages)

    @property
    def places(self) -> Tensor:  # [num_layers * 2 at most, 2] int64, on the device
        """Every layer's address of keys or of values, and the bytes of a slot there."""
        views = [view for storage in self._storages for view in storage if storage.numel()]
        sizes = [(view.data_ptr(), view[0].numel() * view.element_size()) for view in views]
        assert all(size % 4 == 0 for _, size in sizes), sizes  # whole words are moved
        return torch.tensor(sizes, dtype=torch.int64).view(-1, 2).to(self.device)

    def write(
        self,
        layer: int,
        slots: Tensor,  # [num_tokens] int64
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, value_dim]
    ) -> None:
        """Put new tokens' keys and values of one layer into their slots."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)

    def apply_moves(self, kv_moves: IntArray) -> None:  # [num_moves, 2], (source, destination)
        """Copy slots to slots in every layer; every read comes before every write."""
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
        """`apply_moves` of tensors on the device."""
        for storage in self._storages:
            if not storage.numel():
                continue
            storage.index_copy_(1, destination, storage.index_select(1, source))
