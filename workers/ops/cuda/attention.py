"""Tile sizes and the number of splits of attention, from shapes alone; launches its kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..plan import PagedStep
from ..protocol import AttentionSpec
from .attend import attend_kernel
from .combine import combine

MAX_SPLITS = 64
MIN_KEYS_PER_SPLIT = 256
PROGRAMS_PER_PROCESSOR = 2
FIXED = 0
"""As `splits`: parts of `FIXED_KEYS` keys from the first key on, and tiles of fixed sizes."""
FIXED_KEYS = 2048
_MIN_TILE = 16  # the smallest side of a matrix product on tensor cores


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block sizes of one launch."""

    queries: int  # BLOCK_M: rows times heads of a group
    keys: int  # BLOCK_N
    dim_low: int
    dim_high: int  # 0: the whole head is in the lower part
    values: int  # BLOCK_V
    num_warps: int
    num_stages: int


def tiles(spec: AttentionSpec, max_query_len: int, itemsize: int) -> Tiles:
    """Block sizes for queries of at most that length.

    A tile of keys and one of values, times the stages, stay below 96 KiB of shared memory.
    """
    low, high = split_dim(spec.head_dim)
    values = max(_MIN_TILE, triton.next_power_of_2(spec.value_dim))
    rows = max_query_len * (spec.num_heads // spec.num_kv_heads)
    widest = max(low + high, values)
    most = 64 if widest <= 256 else 32 if widest <= 512 else 16
    queries = min(max(_MIN_TILE, triton.next_power_of_2(rows)), most)
    bytes_per_key = (low + high + values) * itemsize
    keys = 64
    while keys > _MIN_TILE and keys * bytes_per_key * 2 > 96 << 10:
        keys //= 2
    num_warps = 8 if queries * widest >= 64 * 256 else 4
    return Tiles(queries, keys, low, high, values, num_warps, 2)


def split_dim(head_dim: int) -> tuple[int, int]:
    """A head's columns as one or two parts that are powers of two, padded as little as possible."""
    low = max(_MIN_TILE, triton.next_power_of_2(head_dim))
    if low in (head_dim, _MIN_TILE):
        return low, 0
    low //= 2
    return low, max(_MIN_TILE, triton.next_power_of_2(head_dim - low))


def num_programs(num_rows: int, num_seqs: int, group: int, queries: int) -> int:
    """Blocks of queries that suffice for any distribution of the rows over the sequences."""
    return num_rows * group // queries + num_seqs


def num_splits(programs: int, max_key_len: int, num_processors: int) -> int:
    """Parts to cut contexts into: a power of two that fills the device but leaves parts long."""
    wanted = PROGRAMS_PER_PROCESSOR * num_processors // max(programs, 1)
    most = min(wanted, max_key_len // MIN_KEYS_PER_SPLIT, MAX_SPLITS)
    return 1 if most < 2 else 1 << (most.bit_length() - 1)


def attend(
    query: Tensor,  # [num_rows, num_heads, head_dim]
    keys: Tensor,  # [num_slots, num_kv_heads, head_dim]
    values: Tensor,  # [num_slots, num_kv_heads, value_dim]; unused if the spec shares them
    plan: PagedStep,
    spec: AttentionSpec,
    num_processors: int,
    splits: int | None = None,  # None: chosen from shapes; `FIXED`
) -> Tensor:  # [num_rows, num_heads, value_dim]
    """Attention over keys that are in their slots."""
    num_rows = query.shape[0]
    size = (num_rows, spec.num_heads, spec.value_dim)
    out = torch.empty(size, dtype=query.dtype, device=query.device)
    if num_rows == 0:
        return out
    assert query.is_contiguous(), query.stride()
    assert keys.is_contiguous(), keys.stride()
    group = spec.num_heads // spec.num_kv_heads
    fixed = splits == FIXED
    tile = tiles(spec, 64 if fixed else plan.max_query_len, query.element_size())
    one_block = plan.max_query_len * group <= tile.queries
    blocks = plan.num_seqs
    if not one_block:
        blocks = num_programs(num_rows, plan.num_seqs, group, tile.queries)
    share = FIXED_KEYS if fixed else 0
    if fixed:
        splits = max(1, triton.cdiv(plan.max_key_len, FIXED_KEYS))
    if splits is None:
        bounds = [bound + plan.max_query_len for bound in (spec.window, spec.chunk) if bound]
        reach = min(plan.max_key_len, *bounds) if bounds else plan.max_key_len
        splits = num_splits(blocks * spec.num_kv_heads, reach, num_processors)
    shares_tile = spec.shared_values and tile.dim_low == tile.values == spec.value_dim
    if spec.shared_values:
        values = keys
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty((splits, *size), dtype=torch.float32, device=query.device)
        sums = torch.empty((splits, *size[:2]), dtype=torch.float32, device=query.device)
    attend_kernel[(blocks, spec.num_kv_heads, splits)](
        query, keys, values, parts, sums, spec.sinks,
        plan.positions, plan.row_index, plan.query_start, plan.context_lens, plan.tree_start,
        plan.block_tables, plan.ancestors,
        num_rows, plan.num_seqs, plan.block_tables.shape[1], plan.ancestors.shape[1],
        values.stride(0), values.stride(1), float(spec.scale), float(spec.softcap or 0.0),
        spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim, plan.block_size,
        spec.window or 0, spec.chunk or 0, spec.softcap is not None, shares_tile,
        splits, share, one_block, tile.queries, tile.keys, tile.dim_low, tile.dim_high, tile.values,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        combine(parts, sums, out, in_order=fixed)
    return out
