"""Operations whose result for a row does not depend on other rows of the step.

With these, a sequence has the same bits alone or in a batch, whatever the draft length, the cuts of
its prompt and the cached part of it (`deterministic: true`). Differences from `CpuOps`:

- Every product uses the kernel, at any size: oneDNN chooses its implementation, and with it the
  order of additions, by the number of rows.
- Attention sums keys in tiles whose bounds are multiples of a fixed number, and not relative to the
  first visible key of the rows that are computed together.
- Torch's vectorized functions with a scalar remainder (angles, activations) are computed one
  row at a time, so that an element's place in its vector never changes.

In a tree, siblings lie between a node and its ancestors, and would shift the tiles. So each node of
a branching draft attends as a separate sequence, to the context and its path (`spread`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ConfigError
from ...scheduler.types import slots_of, starts_of
from ..attention import KVCache
from .cpu import (
    GATE_KERNELS,
    KERNEL_DTYPES,
    CodedProjection,
    CpuOps,
    PanelProjection,
    has_attention_kernel,
    kernel_codes,
)
from .plan import PagedStep
from .protocol import AttentionSpec, Gate, Projection, Rotation
from .quantised import QuantisedTensor


class InvariantOps(CpuOps):
    """`CpuOps` with bits that do not depend on other rows."""

    name = "cpu, batch-invariant"
    is_invariant = True
    max_latent_heads = 0  # products per head are torch's

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._angles: dict[int, _AngleTable] = {}

    def adopt(self, plan: PagedStep) -> PagedStep:
        adopted = super().adopt(plan)
        paths = None if plan.host is None else spread(plan)  # a head's levels have no host plan
        if paths is None:
            return adopted
        return replace(adopted, spread=super().adopt(paths))

    def pack(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if weight.dtype not in KERNEL_DTYPES:
            raise refused(f"a weight of type {weight.dtype} has no invariant product")
        if isinstance(weight, QuantisedTensor):
            if (codes := kernel_codes(weight)) is not None:
                return CodedProjection(codes, bias)
            weight = weight.wide()
        return PanelProjection(weight, bias)

    def rotation(self, positions: Tensor, frequencies: Tensor, scale: float) -> Rotation:
        if frequencies.dim() == 2:  # one set per row
            pairs = zip(positions.tolist(), frequencies, strict=True)
            return _stacked(_angles(position, row, scale) for position, row in pairs)
        key = id(frequencies)
        if key not in self._angles:
            self._angles[key] = _AngleTable(frequencies, scale)
        return self._angles[key].at(positions)

    def rope_store_attend(
        self, joined: Tensor, rotation: Rotation | None, temperature: Tensor | None,
        plan: PagedStep, cache: KVCache, layer: int, spec: AttentionSpec,
    ) -> Tensor:  # fmt: skip
        if spec.shared_values or not has_attention_kernel(spec, self._kernels.width):
            raise refused("its attention (latents, tiny or odd heads, very many per key) varies")
        return super().rope_store_attend(joined, rotation, temperature, plan, cache, layer, spec)

    def gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        if gate.kind in GATE_KERNELS:
            return super().gate(gate_up, gate)
        return by_row(lambda row: super(InvariantOps, self).gate(row, gate), gate_up)


def spread(plan: PagedStep) -> PagedStep | None:
    """Returns the same rows, with every node of a branching draft as a sequence of one row.

    Its block tables name slots. Its keys are those below `tree_start`, followed by its path.
    Returns None if no draft branches.
    """
    starts, contexts = plan.query_start.numpy(), plan.context_lens.numpy()
    ends = contexts + starts[1:] - starts[:-1]
    below = np.minimum(plan.tree_start.numpy(), ends)  # beyond, where a prompt was cut
    if (below == ends).all():
        return None
    tables, slots = plan.block_tables.numpy(), plan.slots.numpy()
    bits = np.unpackbits(plan.ancestors.numpy().view(np.uint8), axis=1, bitorder="little")
    index, sizes, paths = plan.row_index.numpy().copy(), list[int](), list[NDArray[np.int32]]()
    for seq, root_end in enumerate(below.tolist()):
        keys = slots_of(tables[seq], np.arange(ends[seq], dtype=np.int32), plan.block_size)
        first = int(starts[seq] + root_end - contexts[seq])  # node
        if first > starts[seq]:  # a part may begin after the root
            sizes.append(first - int(starts[seq]))
            paths.append(keys[:root_end])
        for row in range(first, int(starts[seq + 1])):
            nodes = np.flatnonzero(bits[row])
            paths.append(np.concatenate([keys[:root_end], slots[first + nodes]]))
            sizes.append(1)
            index[row] = len(paths[-1]) - 1
    lens = np.array([len(path) for path in paths], dtype=np.int32)
    listed = np.zeros((len(paths), int(lens.max())), dtype=np.int32)
    for line, path in zip(listed, paths, strict=True):
        line[: len(path)] = path
    rows = np.array(sizes, dtype=np.int32)
    return replace(
        plan,
        row_seq=torch.from_numpy(np.arange(len(rows), dtype=np.int32).repeat(rows)),
        row_index=torch.from_numpy(index),
        query_start=torch.from_numpy(starts_of(rows)),
        context_lens=torch.from_numpy(lens - rows),
        tree_start=torch.from_numpy(lens),
        block_tables=torch.from_numpy(listed),
        ancestors=torch.zeros_like(plan.ancestors),
        block_size=1,
        max_query_len=int(rows.max()),
        max_key_len=int(lens.max()),
    )


class _AngleTable:
    """Cosines and sines of every position up to the largest requested one."""

    def __init__(self, frequencies: Tensor, scale: float) -> None:
        self._frequencies = frequencies  # [rotary_dim / 2] float32; kept alive: its id is a key
        self._scale = scale
        self._cos = self._sin = frequencies.new_empty(0, len(frequencies))

    def at(self, positions: Tensor) -> Rotation:  # [num_tokens] -> two [num_tokens, rotary_dim / 2]
        have, needed = len(self._cos), int(positions.max()) + 1 if len(positions) else 0
        if needed > have:
            needed = max(needed, min(2 * have, have + 1024))
            rows = (_angles(each, self._frequencies, self._scale) for each in range(have, needed))
            cos, sin = _stacked(rows)
            self._cos, self._sin = torch.cat([self._cos, cos]), torch.cat([self._sin, sin])
        rows_of = positions.long()
        return self._cos.index_select(0, rows_of), self._sin.index_select(0, rows_of)


def _angles(position: int, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of one position in a new tensor, for equal alignment."""
    angles = frequencies * float(position)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def _stacked(rows: Iterable[Rotation]) -> Rotation:  # [rotary_dim / 2] each
    cos, sin = zip(*rows, strict=True)
    return torch.stack(cos), torch.stack(sin)


def by_row(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:  # [num_rows, ...]
    """Applies `function` to every row separately."""
    if len(rows) <= 1:
        return function(rows)
    return torch.cat([function(row.contiguous()).clone() for row in rows.split(1)])


def refused(why: str) -> ConfigError:
    return ConfigError.at("deterministic", f"{why}; leave `deterministic` out")
