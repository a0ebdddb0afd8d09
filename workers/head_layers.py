"""A head's layers on the operations of the target's: packed products, eight calls a layer.

The modules of `drafters/heads/llama.py` are what training differentiates. Here each layer, norm and
rotary embedding of one is replaced by the operations of `workers/ops/`, after both were compared
on a short text and a tree; layers that differ, or that the operations cannot express, stay modules.
Called by `head_loading.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ..drafters.heads import llama
from ..drafters.heads.protocol import Attend
from ..scheduler.types import Draft, StepInput, ints
from .attention import KVCache, KVShape, SdpaBackend
from .head_attention import PagedAttend
from .model.family.builder import Reduce, as_is, joined_weight
from .model.family.compare import BLOCK_SIZE, PARENTS, PROMPT_LEN, mismatch
from .model.family.sample_step import sample_step
from .model.head_shards import WHOLE, HeadShards
from .ops import Ops, PlannedOps
from .ops.protocol import AttentionSpec, Gate, GateKind, Norm, Projection, Rotation

_SILU = Gate(GateKind.SILU)
SAMPLE_TABLE = (2, 0, 3)


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    """`llama.Layer.decode` in operations."""

    ops: Ops
    joined: Projection
    output: Projection
    rotated: AttentionSpec
    unrotated: AttentionSpec
    norm: Norm
    gate_up: Projection
    down: Projection
    reduce: Reduce = as_is

    def __call__(
        self,
        residual: Tensor,  # [num_tokens, hidden_size]
        read: Tensor,  # [num_tokens, input_size]
        rotation: Rotation | None,
        layer: int,
        attend: Attend,
        factors: Tensor | None = None,  # [num_tokens] float32
    ) -> Tensor:  # [num_tokens, hidden_size]
        assert isinstance(attend, PagedAttend), type(attend)
        ops = self.ops
        out = ops.rope_store_attend(
            self.joined(read),
            rotation,
            factors,
            attend.plan,
            attend.cache,
            attend.first + layer,
            self.unrotated if rotation is None else self.rotated,
        )
        states = residual.clone()  # the caller's, which `add_norm` would overwrite
        inner = ops.add_norm(states, self.reduce(self.output(out)), None, 1.0, self.norm)
        update = self.reduce(self.down(ops.gate(self.gate_up(inner), _SILU)))
        return ops.add_norm(states, update, None, 1.0, None)


def fuse_layers(
    module: nn.Module, planned: PlannedOps, dtype: torch.dtype, shards: HeadShards
) -> tuple[str, bool]:
    """Replaces the layers of `module`, if all of them agree with their replacements.

    Returns the reason why they stay modules, or nothing, and whether a rank has a part of them.
    Plain weights are freed.
    """
    layers = [part for part in module.modules() if isinstance(part, llama.Layer)]
    ropes = [part for part in module.modules() if isinstance(part, llama.Rope)]
    if not layers or len(ropes) != 1:
        return "its layers are not of the kind that is fused", False
    is_cut = all(_can_cut(layer, shards) for layer in layers)
    device = layers[0].self_attn.o_proj.weight.device
    fused = []
    for index, layer in enumerate(layers):
        found = _fused(layer, planned.ops, shards if is_cut else None)
        if why := _difference(layer, found, ropes[0], planned, dtype, shards):
            return f"layer {index} differs from its module: {why}", False
        fused.append(found)
    for layer, found in zip(layers, fused, strict=True):
        object.__setattr__(layer, "decode", found)
        for name in ("self_attn", "mlp", "post_attention_layernorm"):
            setattr(layer, name, nn.Identity())
    for part in module.modules():
        if isinstance(part, llama.Norm):
            object.__setattr__(part, "forward", _Normed(planned.ops, _norm(part)))
    frequencies = ropes[0].frequencies.to(device)
    object.__setattr__(ropes[0], "forward", _Rotation(planned.ops, frequencies))
    return "", is_cut


def _can_cut(layer: llama.Layer, shards: HeadShards) -> bool:
    """Whether its weights can be divided, and two sums over the ranks cost less than they save."""
    weights = [weight for weight in layer.parameters() if weight.dim() == 2]
    if not shards.pays(sum(each.numel() * each.element_size() for each in weights), 2):
        return False
    sizes, size = layer.sizes, shards.size
    shared = sizes.num_kv_heads % size == 0 or size % sizes.num_kv_heads == 0
    return shared and sizes.num_heads % size == 0 and sizes.intermediate_size % size == 0


class _Normed:
    """`llama.Norm.forward` in one operation."""

    def __init__(self, ops: Ops, norm: Norm) -> None:
        self._ops, self._norm = ops, norm

    def __call__(self, states: Tensor) -> Tensor:  # [num_tokens, size], alike
        return self._ops.norm(states, self._norm).clone()  # the next norm reuses its buffer


class _Rotation:
    """`llama.Rope.forward` in the form that the operations read."""

    def __init__(self, ops: Ops, frequencies: Tensor) -> None:
        self._ops, self._frequencies = ops, frequencies

    def __call__(self, positions: Tensor) -> Rotation:  # [num_tokens]
        return self._ops.rotation(positions, self._frequencies, 1.0)


def _fused(layer: llama.Layer, ops: Ops, shards: HeadShards | None) -> FusedLayer:
    """The layer in operations; with `shards`, this rank's part of it."""
    attention, mlp, sizes = layer.self_attn, layer.mlp, layer.sizes
    heads = (shards or WHOLE).heads(sizes.num_heads, sizes.num_kv_heads)
    begin, end = heads.kv_range
    spec = AttentionSpec(
        heads.local,
        end - begin,
        sizes.head_dim,
        sizes.head_dim,
        sizes.head_dim**-0.5,
    )
    if sizes.qk_norm:
        norms = _norm(attention.q_norm), _norm(attention.k_norm)
        spec = replace(spec, query_norm=norms[0], key_norm=norms[1])
    rotated = replace(spec, rotary_dim=sizes.head_dim)
    if sizes.unit_qk:
        unit = Norm(None, sizes.eps)
        rotated = replace(rotated, query_norm=unit, key_norm=unit, norms_after_rotation=True)
    first = heads.rank * heads.local
    queries = slice(first * sizes.head_dim, (first + heads.local) * sizes.head_dim)
    keys = slice(begin * sizes.head_dim, end * sizes.head_dim)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    joined = [
        _rows(linear, rows) for linear, rows in zip(projections, (queries, keys, keys), strict=True)
    ]
    width = sizes.intermediate_size // heads.size
    inner = slice(heads.rank * width, (heads.rank + 1) * width)
    return FusedLayer(
        ops,
        ops.pack(*joined_weight(joined)),
        ops.pack(*_columns(attention.o_proj, queries, heads.rank)),
        rotated,
        spec,
        _norm(layer.post_attention_layernorm),
        ops.pack(*joined_weight([_rows(part, inner) for part in (mlp.gate_proj, mlp.up_proj)])),
        ops.pack(*_columns(mlp.down_proj, inner, heads.rank)),
        as_is if shards is None else shards.collective.all_reduce,
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a linear layer."""

    weight: Tensor  # [num_rows, in_features]
    bias: Tensor | None  # [num_rows]


def _rows(linear: nn.Linear, rows: slice) -> _Rows:
    return _Rows(linear.weight[rows], None if linear.bias is None else linear.bias[rows])


def _columns(linear: nn.Linear, columns: slice, rank: int) -> tuple[Tensor, Tensor | None]:
    """Columns of a linear layer whose results are summed over the ranks: one adds the bias."""
    weight = linear.weight.detach()[:, columns].contiguous()
    bias = None if linear.bias is None else linear.bias.detach()
    return weight, bias if bias is None or rank == 0 else torch.zeros_like(bias)


def _norm(module: llama.Norm) -> Norm:
    return Norm(module.weight.detach().float(), module.eps)


@torch.inference_mode()
def _difference(
    layer: llama.Layer,
    fused: FusedLayer,
    rope: llama.Rope,
    planned: PlannedOps,
    dtype: torch.dtype,
    shards: HeadShards,
) -> str:
    """How far module and replacement are apart on random rows, if it is too far."""
    sizes, device = layer.sizes, layer.self_attn.o_proj.weight.device
    caches = [
        KVCache(
            [KVShape(num_kv_heads, sizes.head_dim, sizes.head_dim)],
            len(SAMPLE_TABLE) + 1,
            BLOCK_SIZE,
            dtype,
            device,
        )
        for num_kv_heads in (sizes.num_kv_heads, fused.rotated.num_kv_heads)
    ]
    source = torch.Generator().manual_seed(0)
    wanted, found = [], []
    for step in sample_steps():
        count = len(step.token_ids)
        residual, read = (
            torch.randn(count, width, generator=source).to(device, dtype)
            for width in (sizes.hidden_size, sizes.input_size)
        )
        positions = torch.from_numpy(step.positions).to(device, torch.int64)
        module_attend = SdpaBackend().begin(step, caches[0]).attend
        attend = PagedAttend(planned, planned.plan(step, caches[1]), caches[1], 0)
        rotation = _Rotation(planned.ops, rope.frequencies.to(device))(positions)
        factors = 1 + positions / 8
        wanted.append(layer.decode(residual, read, rope(positions), 0, module_attend))
        found.append(fused(residual, read, rotation, 0, attend))
        wanted.append(layer.decode(residual, read, None, 0, module_attend, factors))
        found.append(fused(residual, read, None, 0, attend, factors))
    return mismatch(torch.cat(found).float(), torch.cat(wanted).float(), dtype, shards.collective)


def sample_steps() -> tuple[StepInput, StepInput]:
    """A short text, and a tree after it."""
    draft = Draft(ints(np.zeros(len(PARENTS))), ints(PARENTS))
    return (
        sample_step([0] * (PROMPT_LEN - 1), 0, SAMPLE_TABLE, block_size=BLOCK_SIZE),
        sample_step([0], PROMPT_LEN - 1, SAMPLE_TABLE, draft, block_size=BLOCK_SIZE),
    )
