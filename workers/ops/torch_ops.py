"""Torch's fused attention, sequence by sequence, where there are no kernels.

A step is cut into passes, one for each sequence, whose keys and values are gathered once a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from ...scheduler.types import StepInput
from ..attention import KVCache, KVCode
from .plan import PagedStep, part_of
from .protocol import AttentionSpec, Norm
from .reference import ReferenceOps, visible


def suits_torch(spec: AttentionSpec) -> bool:
    """Whether torch's fused attention computes such a layer; a soft cap and sinks it has not."""
    return spec.softcap is None and spec.sinks is None


MAX_FOLDED = 64  # rows; the repeated mask of more costs more than it saves


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's new rows."""

    begin: int  # the first row of the step
    plan: PagedStep  # of this sequence alone
    slots: Tensor  # [key_len] int64, of all its keys
    _masks: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)

    def attend(
        self,
        query: Tensor,  # [num_tokens of the step, num_heads, head_dim], prepared
        keys: Tensor,  # [num_slots, num_kv_heads, head_dim]
        values: Tensor,  # [num_slots, num_kv_heads, value_dim]
        spec: AttentionSpec,
        out: Tensor,  # [num_tokens of the step, num_heads, value_dim], written
        code: KVCode | None = None,  # of keys and values
    ) -> None:
        """Attention to keys and values that are in their slots.

        Heads of a short query are folded into its rows: every key head is then read once for all
        that share it.
        """
        num_rows, num_keys = self.plan.num_tokens, len(self.slots)
        rows = slice(self.begin, self.begin + num_rows)
        is_near = all(each is None or num_keys <= each for each in (spec.window, spec.chunk))
        is_plain = is_near and num_keys == int(self.plan.tree_start[0])
        is_triangle = is_plain and MAX_FOLDED < num_rows == num_keys
        mask = None if is_triangle or (is_plain and num_rows == 1) else self._mask(spec, query)
        shape = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, num_rows)
        lines = query[rows].transpose(0, 1)
        is_folded = num_rows <= MAX_FOLDED and shape[1] > 1
        if is_folded:
            lines = lines.reshape(shape[0], shape[1] * num_rows, -1)
            mask = None if mask is None else mask.repeat(shape[1], 1)
        keys, values = keys.index_select(0, self.slots), values.index_select(0, self.slots)
        if code is not None:
            keys, values = code.keys(keys, query.dtype), code.values(values, query.dtype)
        found = functional.scaled_dot_product_attention(
            lines[None],
            keys[None].transpose(1, 2),
            values[None].transpose(1, 2),
            mask,
            is_causal=is_triangle,
            scale=spec.scale,
            enable_gqa=shape[1] > 1 and not is_folded,
        )
        out[rows].copy_(found.reshape(spec.num_heads, num_rows, -1).transpose(0, 1))

    def _mask(self, spec: AttentionSpec, query: Tensor) -> Tensor:  # [num_tokens, key_len]
        """Zero for what a row sees, minus infinity for the rest; once a step and kind of layer."""
        reach = (spec.window, spec.chunk)
        if reach not in self._masks:
            device = self.slots.device
            rows = torch.arange(self.plan.num_tokens, device=device)
            index = torch.arange(len(self.slots), device=device)
            seen = visible(self.plan, rows[None], index, spec)[0]
            zeros = torch.zeros(seen.shape, dtype=query.dtype, device=device)
            self._masks[reach] = zeros.masked_fill(~seen, -torch.inf)
        return self._masks[reach]


def passes_of(plan: PagedStep) -> Iterator[SequenceRows]:
    """A step cut into its sequences."""
    for seq, (begin, end) in enumerate(pairwise(plan.query_start.tolist())):
        if begin == end:
            continue
        num_keys = int(plan.context_lens[seq]) + end - begin
        index = torch.arange(num_keys, device=plan.slots.device)
        blocks = plan.block_tables[seq].long()[index // plan.block_size]
        slots = blocks * plan.block_size + index % plan.block_size
        yield SequenceRows(begin, part_of(plan, begin, end), slots)


class TorchOps(ReferenceOps):
    """Torch's fused attention and norm, for devices without kernels. Plans are made on the host."""

    name = "torch"
    max_latent_heads = 0  # keys are expanded

    def plan(self, step: StepInput, cache: KVCache) -> PagedStep:
        plan = super().plan(step, cache)
        return replace(plan, passes=tuple(passes_of(plan)))

    def norm(self, states: Tensor, norm: Norm) -> Tensor:
        # Torch's one call wants states and weight of one dtype; float32 is also the precision.
        out = functional.rms_norm(states.float(), states.shape[-1:], norm.weight, norm.eps)
        return out.to(states.dtype)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedStep, spec: AttentionSpec,
        code: KVCode | None = None,
    ) -> Tensor:  # fmt: skip
        """Sequence by sequence, so that none is padded."""
        out = query.new_empty(plan.num_tokens, spec.num_heads, spec.value_dim)
        for each in plan.passes or passes_of(plan):
            if suits_torch(spec):
                each.attend(query, keys, values, spec, out, code)
                continue
            rows = slice(each.begin, each.begin + each.plan.num_tokens)
            out[rows] = super().attend(query[rows], keys, values, each.plan, spec, code)
        return out
