"""The reference backend: gather by slot, then one dense attention per group of sequences.

Grouped heads are folded into the query axis: every key head is read once for all the query heads
that share it (on a CPU 1.1 to 7 times faster than `enable_gqa` at short queries, and no slower
at any). `index_select` gathers about six times faster than advanced indexing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...scheduler.types import StepInput
from .cache import KVCache
from .plan import AttentionPlan, Group, build_plan

MAX_FOLDED_QUERY = 64
"""Longest query whose heads are folded; beyond it, the repeated mask costs more than it saves."""


class SdpaBackend:
    """Runs on any device that torch knows."""

    def plan(self, step: StepInput, block_size: int, device: torch.device) -> AttentionPlan:
        return build_plan(step, block_size, device)

    def attend(
        self,
        plan: AttentionPlan,
        cache: KVCache,
        layer: int,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, value_dim]
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [num_heads]
    ) -> Tensor:  # [num_tokens, num_heads, value_dim]
        cache.write(layer, plan.slot_mapping, key, value)
        keys, values = cache.keys[layer], cache.values[layer]
        outputs = []
        for group in plan.groups:
            rows = query if group.rows is None else query.index_select(0, group.rows)
            padded = rows.view(group.num_seqs, group.query_len, *query.shape[1:]).transpose(1, 2)
            key_pages, value_pages = _gather(keys, group), _gather(values, group)
            if softcap is None and sinks is None:
                out = _fused(padded, key_pages, value_pages, group, scale, window)
            else:
                out = _explicit(
                    padded, key_pages, value_pages, group.mask(window), scale, softcap, sinks
                )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        if plan.restore is None:
            return outputs[0]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, plan.restore)


def _gather(pages: Tensor, group: Group) -> Tensor:
    """[num_slots, num_kv_heads, dim] -> [num_seqs, num_kv_heads, key_len, dim], strided."""
    rows = pages.index_select(0, group.slots)
    return rows.view(group.num_seqs, group.key_len, *pages.shape[1:]).transpose(1, 2)


def _fused(
    query: Tensor,  # [num_seqs, num_heads, query_len, head_dim]
    key: Tensor,  # [num_seqs, num_kv_heads, key_len, head_dim]
    value: Tensor,  # [num_seqs, num_kv_heads, key_len, value_dim]
    group: Group,
    scale: float,
    window: int | None,
) -> Tensor:  # [num_seqs, num_heads, query_len, value_dim]
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    fold = num_heads // num_kv_heads
    kinds: dict[str, Any] = {"scale": scale}
    if group.query_len > MAX_FOLDED_QUERY:
        if fold > 1:
            kinds["enable_gqa"] = True
        if group.causal and group.is_plain(window):
            return scaled_dot_product_attention(query, key, value, is_causal=True, **kinds)
        return scaled_dot_product_attention(query, key, value, group.mask(window), **kinds)
    mask = group.mask(window)
    if fold == 1:
        return scaled_dot_product_attention(query, key, value, mask, **kinds)
    if mask is not None:
        mask = mask.repeat(1, 1, fold, 1)
    shape = (query.shape[0], num_kv_heads, fold * group.query_len, query.shape[3])
    out = scaled_dot_product_attention(query.reshape(shape), key, value, mask, **kinds)
    return out.reshape(query.shape[0], num_heads, group.query_len, value.shape[3])


def _explicit(
    query: Tensor,  # [num_seqs, num_heads, query_len, head_dim]
    key: Tensor,  # [num_seqs, num_kv_heads, key_len, head_dim]
    value: Tensor,  # [num_seqs, num_kv_heads, key_len, value_dim]
    mask: Tensor | None,  # [num_seqs, 1, query_len, key_len] bool
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [num_heads]
) -> Tensor:  # [num_seqs, num_heads, query_len, value_dim]
    """Attention spelled out, for what the fused kernels do not know: soft caps and sinks."""
    num_seqs, num_heads, query_len, _ = query.shape
    grouped = (num_seqs, key.shape[1], num_heads // key.shape[1], query_len)
    scores = torch.matmul(query.reshape(*grouped, -1), key.unsqueeze(2).transpose(3, 4)) * scale
    scores = scores.float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(2), float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, grouped[1], grouped[2], 1, 1)
        scores = torch.cat([scores, column.expand(*grouped, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return torch.matmul(weights, value.unsqueeze(2)).flatten(1, 2)
