"""Inputs of kernels at any size: steps over a paged cache, quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...scheduler.types import SamplingRows, StepInput, ints
from ...workers.ops.quantised import Codes, QuantisedTensor

KINDS = ("plain", "fp8", "int8", "int4", "int4 zeros", "uint8 zeros")


def step_of(
    rng: np.random.Generator,
    lengths: Sequence[tuple[int, int]],  # (context, known tokens) of each sequence
    trees: Sequence[list[int]],  # each one's parents
    block_size: int,
) -> tuple[StepInput, int]:
    """A step over shuffled blocks, and the number of blocks."""
    counts = [len(parents) for parents in trees]
    query_lens = np.array([chunk + count for (_, chunk), count in zip(lengths, counts)])
    contexts = np.array([context for context, _ in lengths])
    max_blocks = int((contexts + query_lens).max()) // block_size + 2
    num_blocks = max_blocks * len(lengths)
    tables = rng.permutation(num_blocks).reshape(len(lengths), max_blocks).astype(np.int32)
    positions: list[int] = []
    slots: list[int] = []
    for (context, chunk), parents, table in zip(lengths, trees, tables):
        own = list(range(context, context + chunk))
        root = own[-1]
        for parent in parents:
            own.append((root if parent < 0 else own[chunk + parent]) + 1)
        index = np.arange(context, context + len(own))
        positions += own
        slots += (table[index // block_size] * block_size + index % block_size).tolist()
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    zeros, num = np.zeros(len(lengths), np.float32), len(lengths)
    sampling = SamplingRows(
        zeros, ints(zeros), zeros + 1, zeros, np.zeros(num, np.int64), ints(zeros), ints(zeros) - 1
    )
    step = StepInput(
        step=1,
        token_ids=ints(np.zeros(starts[-1])),
        positions=ints(positions),
        slot_mapping=ints(slots),
        query_start=ints(starts),
        context_lens=ints(contexts),
        block_tables=tables,
        samples=np.ones(num, np.bool_),
        draft_tokens=ints(np.zeros(sum(counts))),
        draft_parents=ints([parent for parents in trees for parent in parents]),
        draft_start=ints(np.concatenate([[0], np.cumsum(counts)])),
        draft_probs=None,
        rows=ints(np.arange(starts[-1])),
        kv_moves=ints(np.zeros((0, 2))),
        sampling=sampling,
    )
    return step, num_blocks


def random_tree(rng: np.random.Generator, num_nodes: int) -> list[int]:
    """Parents of a tree of so many nodes."""
    return [int(rng.integers(-1, node)) for node in range(num_nodes)]


def weight_of(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, group: int = 32
) -> torch.Tensor:
    """Random values of every code, with groups that columns do not divide evenly."""
    if kind == "plain":
        return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)
    num_groups = -(-shape[-1] // group)
    scales = (torch.rand(*shape[:-1], num_groups) + 0.1) / shape[-1] ** 0.5
    zeros, offset = None, 0
    if kind == "fp8":
        values = (torch.randn(shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        values.view(torch.uint8).view(-1)[:5] = torch.tensor([1, 7, 8, 0x81, 0x7E])  # subnormals
        scales = scales / 100
    elif kind == "int8":
        values = torch.randint(-127, 128, shape, dtype=torch.int8)
        scales = scales / 60
    else:
        top = 256 if kind.startswith("uint8") else 16
        values = torch.randint(top, shape, dtype=torch.uint8)
        scales, offset = scales / top, top // 2
        if kind.endswith("zeros"):
            zeros, offset = torch.randint(top, (*shape[:-1], num_groups), dtype=torch.uint8), 0
    codes = Codes(values, scales, zeros, group, shape[-1], offset)
    return QuantisedTensor(codes.packed() if kind.startswith("int4") else codes, dtype)


def wide(weight: torch.Tensor) -> torch.Tensor:
    """In plain values."""
    return weight.wide() if isinstance(weight, QuantisedTensor) else weight


# -- products by inputs in float8


def float8_weight(
    shape: tuple[int, int], dtype: torch.dtype, group: int, device: torch.device | None = None
) -> QuantisedTensor:
    """As of a checkpoint that asks for inputs in float8; `group`: 128, or 0: scales of rows."""
    weight = weight_of("fp8", shape, dtype, group or shape[1])
    assert isinstance(weight, QuantisedTensor), type(weight)
    codes = weight.codes.map(lambda part: part.to(device))
    return QuantisedTensor(replace(codes, input_group=group), dtype)


def float8_inputs(
    states: Tensor,  # [num_rows, size]
    group: int,  # columns that share a scale
) -> tuple[Tensor, Tensor]:  # [num_rows, size] float8; [num_rows, size / group] float32
    """Codes and scales, by torch."""
    parts = states.float().unflatten(1, (-1, group))
    peaks = parts.abs().amax(-1).clamp(min=1e-12)
    factors = torch.full_like(peaks, 448.0) / peaks  # a number over them would be rounded twice
    codes = (parts * factors[..., None]).clamp(-448, 448)
    return codes.flatten(1).to(torch.float8_e4m3fn), peaks / 448.0


def scaled_mm_in_float32(
    left: Tensor,  # [num_rows, size] float8
    right: Tensor,  # [size, out] float8
    left_scales: Tensor,  # [num_rows, num_groups] float32
    left_recipe: object,
    right_scales: Tensor,  # [out, num_groups] float32, or [1, out]
    right_recipe: object,
    *,
    bias: Tensor | None = None,  # [out]
    output_dtype: torch.dtype,
) -> Tensor:  # [num_rows, out]
    """What torch's `scaled_mm` computes on a GPU; on a CPU it has no scales of groups."""
    if right_scales.shape[0] == 1:
        right_scales = right_scales.t()

    def wide(codes: Tensor, scales: Tensor) -> Tensor:
        return (codes.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)

    out = wide(left, left_scales) @ wide(right.t(), right_scales).t()
    return (out if bias is None else out + bias.float()).to(output_dtype)
