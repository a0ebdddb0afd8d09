"""Attention of long chunks by torch's fused operation, beside the kernel's of all other rows.

Where a processor has tiles for products (AMX), torch's attention reaches them and the kernel does
not. A step is cut into passes: every sequence with a long chunk is one of its own, its keys and
values gathered once a layer; the rows between are left to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..attention import Reach
from .plan import PagedStep, part_of
from .protocol import AttentionSpec
from .reference import visible


def suits_torch(spec: AttentionSpec) -> bool:
    """Whether torch's fused attention computes such a layer; a soft cap and sinks it has not."""
    is_plain = spec.softcap is None and spec.sinks is None
    return is_plain and spec.value_dim == spec.head_dim and not spec.shared_values


@dataclass(frozen=True, slots=True)
class KernelRows:
    """Neighbouring rows for the kernel."""

    begin: int  # the first row of the step
    plan: PagedStep


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """One sequence's new rows."""

    begin: int  # the first row of the step
    plan: PagedStep  # of this sequence alone
    slots: Tensor  # [key_len] int64, of all its keys
    _masks: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)

    def attend(
        self,
        joined: Tensor,  # [num_tokens and more, spec.joined_width], queries first, prepared
        keys: Tensor,  # [num_slots, num_kv_heads, head_dim]
        values: Tensor,  # alike
        spec: AttentionSpec,
        out: Tensor,  # [num_tokens and more, num_heads * head_dim], written
    ) -> None:
        """Attention to keys and values that are in their slots."""
        num_rows, num_keys = self.plan.num_tokens, len(self.slots)
        heads = (1, num_rows, spec.num_heads, spec.head_dim)
        is_near = Reach(spec.window, spec.chunk).covers(num_keys)
        is_triangle = is_near and num_rows == num_keys == int(self.plan.tree_start[0])
        found = scaled_dot_product_attention(
            joined[:num_rows, : spec.key_begin].reshape(heads).transpose(1, 2),
            keys.index_select(0, self.slots)[None].transpose(1, 2),
            values.index_select(0, self.slots)[None].transpose(1, 2),
            None if is_triangle else self._mask(spec, joined.dtype),
            is_causal=is_triangle,
            scale=spec.scale,
            enable_gqa=spec.num_heads > spec.num_kv_heads,
        )
        out[:num_rows].view(heads).copy_(found.transpose(1, 2))

    def _mask(self, spec: AttentionSpec, dtype: torch.dtype) -> Tensor:  # [num_tokens, key_len]
        """Zero for what a row sees, minus infinity for the rest; once a step and kind of layer."""
        reach = (spec.window, spec.chunk)
        if reach not in self._masks:
            rows, index = torch.arange(self.plan.num_tokens), torch.arange(len(self.slots))
            seen = visible(self.plan, rows[None], index, spec)[0]
            self._masks[reach] = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
        return self._masks[reach]


def passes_of(
    plan: PagedStep, fewest_rows: int, adopt: Callable[[PagedStep], PagedStep]
) -> tuple[PromptChunk | KernelRows, ...]:
    """A step cut around the sequences of at least so many rows."""
    return tuple(_passes(plan, fewest_rows, adopt))


def _passes(
    plan: PagedStep, fewest_rows: int, adopt: Callable[[PagedStep], PagedStep]
) -> Iterator[PromptChunk | KernelRows]:
    starts, done = plan.query_start.tolist(), 0
    for seq, (begin, end) in enumerate(pairwise(starts)):
        if end - begin < fewest_rows:
            continue
        if done < begin:
            yield KernelRows(done, adopt(part_of(plan, done, begin)))
        num_keys = int(plan.context_lens[seq]) + end - begin
        index = torch.arange(num_keys)
        blocks = plan.block_tables[seq].long()[index // plan.block_size]
        slots = blocks * plan.block_size + index % plan.block_size
        yield PromptChunk(begin, part_of(plan, begin, end), slots)
        done = end
    if done < plan.num_tokens:
        yield KernelRows(done, adopt(part_of(plan, done, plan.num_tokens)))
