"""Llama-like decoder layers with injected attention, which EAGLE's heads consist of.

Sizes come from a checkpoint's shapes. Rotary positions are those of the target's tokens; the
frequencies are computed here, since a head's may differ from the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from .protocol import Attend, FeatureModule

SCALING = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Supported kinds of `rope_scaling` and the keys that each requires."""


@dataclass(frozen=True, slots=True)
class Latents:
    """An attention over latents (DeepSeek's MLA, arXiv:2405.04434, section 2.1)."""

    rank: int  # width of the latent that is expanded to a token's keys and values
    query_rank: int  # 0: queries are not compressed
    rotary_dim: int  # last dimensions of a head; all keys share one rotated part
    value_dim: int
    neighbours: bool = True  # rotation pairs dimension 2i with 2i + 1, not i with i + dim / 2
    scale: float = 1.0  # of scores, in addition to the root of a head's size


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """One layer's dimensions."""

    hidden_size: int
    input_size: int  # of the attention's projections
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    unit_qk: bool = False  # Llama-4: RMSNorm without weights, in layers with rotary positions
    latents: Latents | None = None  # None: keys and values are projected from the states

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latents is None else self.latents.value_dim

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.latents is None else self.latents.rotary_dim


class RMSNorm(nn.RMSNorm):
    """RMSNorm, with its weight in the dtype of the states."""

    def forward(self, states: Tensor) -> Tensor:  # [..., size], same shape
        # In training, weights are float32 and states bfloat16.
        return rms_norm(states, self.normalized_shape, self.weight.to(states.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `attend` stores keys and values."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        heads, kv_heads = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.input_size, heads, bias=sizes.qkv_bias)
        self.k_proj = nn.Linear(sizes.input_size, kv_heads, bias=sizes.qkv_bias)
        self.v_proj = nn.Linear(sizes.input_size, kv_heads, bias=sizes.qkv_bias)
        self.o_proj = nn.Linear(heads, sizes.hidden_size, bias=sizes.output_bias)
        if sizes.qk_norm:
            self.q_norm = RMSNorm(sizes.head_dim, sizes.eps)
            self.k_norm = RMSNorm(sizes.head_dim, sizes.eps)
        self.qk_norm = None
        if sizes.unit_qk:
            self.qk_norm = nn.RMSNorm(sizes.head_dim, sizes.eps, elementwise_affine=False)

    def forward(
        self,
        states: Tensor,  # [num_tokens, input_size]
        rotation: tuple[Tensor, Tensor] | None,  # cos and sin, [num_tokens, 1, head_dim]
        layer: int,
        attend: Attend,
        factors: Tensor | None = None,  # [num_tokens] float32, of the queries
    ) -> Tensor:  # [num_tokens, hidden_size]
        query = self._heads(self.q_proj, states)
        if self.sizes.qk_norm:
            query = self.q_norm(query)
        if rotation is not None:
            query = rotate(query, rotation)
        if self.qk_norm is not None:
            query = self.qk_norm(query)
        key, value = self.keys_values(states, rotation)
        if factors is not None:
            query = (query * factors[:, None, None]).to(query.dtype)
        out = attend(layer, query, key, value, self.sizes.head_dim**-0.5)
        return self.o_proj(out.flatten(-2))

    def keys_values(
        self,
        states: Tensor,  # [num_tokens, input_size]
        rotation: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:  # [num_tokens, num_kv_heads, head_dim] each
        """Returns the keys and values that the rows of `states` store."""
        key, value = self._heads(self.k_proj, states), self._heads(self.v_proj, states)
        if self.sizes.qk_norm:
            key = self.k_norm(key)
        if rotation is not None:
            key = rotate(key, rotation)
        return (key if self.qk_norm is None else self.qk_norm(key)), value

    def _heads(self, project: nn.Linear, states: Tensor) -> Tensor:
        return project(states).unflatten(-1, (-1, self.sizes.head_dim))


class LatentAttention(nn.Module):
    """Attention whose keys and values are expanded from a latent per token, for each query head.

    The family decoder caches the latents (`workers/model/family/latent.py`).
    """

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        assert sizes.latents is not None, sizes
        self.sizes, self.latents, bias = sizes, sizes.latents, sizes.qkv_bias
        latents, width = sizes.latents, sizes.num_heads * sizes.head_dim
        self.plain_dim = sizes.head_dim - latents.rotary_dim
        expanded = sizes.num_heads * (self.plain_dim + latents.value_dim)
        if latents.query_rank:
            self.q_a_proj = nn.Linear(sizes.input_size, latents.query_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(latents.query_rank, sizes.eps)
            self.q_b_proj = nn.Linear(latents.query_rank, width, bias=False)
        else:
            self.q_proj = nn.Linear(sizes.input_size, width, bias=False)
        kept = latents.rank + latents.rotary_dim
        self.kv_a_proj_with_mqa = nn.Linear(sizes.input_size, kept, bias=bias)
        self.kv_a_layernorm = RMSNorm(latents.rank, sizes.eps)
        self.kv_b_proj = nn.Linear(latents.rank, expanded, bias=False)
        values = sizes.num_heads * latents.value_dim
        self.o_proj = nn.Linear(values, sizes.hidden_size, bias=sizes.output_bias)

    def forward(
        self,
        states: Tensor,  # [num_tokens, input_size]
        rotation: tuple[Tensor, Tensor] | None,  # cos and sin, [num_tokens, 1, rotary_dim]
        layer: int,
        attend: Attend,
        factors: Tensor | None = None,
    ) -> Tensor:  # [num_tokens, hidden_size]
        assert rotation is not None, "a part of every head is rotated"
        assert factors is None, "temperatures are of layers without positions"
        sizes, latents = self.sizes, self.latents
        if latents.query_rank:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(states)))
        else:
            query = self.q_proj(states)
        parts = self.plain_dim, latents.rotary_dim
        plain, turned = query.unflatten(-1, (sizes.num_heads, -1)).split(parts, dim=-1)
        query = torch.cat([plain, self._rotated(turned, rotation)], dim=-1)
        kept = self.kv_a_proj_with_mqa(states)
        latent, shared = kept.split((latents.rank, latents.rotary_dim), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (sizes.num_heads, -1))
        key, value = expanded.split((self.plain_dim, latents.value_dim), dim=-1)
        shared = self._rotated(shared[:, None], rotation).expand(-1, sizes.num_heads, -1)
        key = torch.cat([key, shared], dim=-1)
        out = attend(layer, query, key, value, sizes.head_dim**-0.5 * latents.scale)
        return self.o_proj(out.flatten(-2))

    def _rotated(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates; pairs are reordered to halves, which does not change scores."""
        if self.latents.neighbours:
            states = torch.cat([states[..., 0::2], states[..., 1::2]], dim=-1)
        return rotate(states, rotation)


class Mlp(nn.Module):
    """Gated linear unit."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:  # [num_tokens, hidden_size], same shape
        return self.down_proj(silu(self.gate_proj(states)) * self.up_proj(states))


class Layer(nn.Module):
    """A pre-norm layer; layer 0 may have no first norm."""

    def __init__(self, sizes: LayerSizes, *, input_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(sizes) if sizes.latents is None else LatentAttention(sizes)
        self.mlp = Mlp(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.eps)
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.eps) if input_norm else None

    def forward(
        self,
        states: Tensor,  # [num_tokens, hidden_size]
        read: Tensor | None,  # [num_tokens, input_size], by the attention; None: normed states
        rotation: tuple[Tensor, Tensor] | None,
        layer: int,
        attend: Attend,
        factors: Tensor | None = None,  # [num_tokens] float32
    ) -> Tensor:  # [num_tokens, hidden_size]
        if read is None:
            read = states if self.input_layernorm is None else self.input_layernorm(states)
        states = states + self.self_attn(read, rotation, layer, attend, factors)
        return states + self.mlp(self.post_attention_layernorm(states))


class LlamaModule(FeatureModule):
    """A `FeatureModule` of such layers.

    Args:
        sizes: sizes of each layer.
        input_norm: whether layer 0 has a norm of its attention's input.
        no_rope_layers: layers without rotary positions.
        temperature: scaling of the queries in those layers.
    """

    def __init__(
        self,
        sizes: Sequence[LayerSizes],
        rope: Rope,
        *,
        embedding_size: int,
        vocab_size: int | None = None,  # rows of its own embedding
        draft_vocab_size: int | None = None,  # None: the target's output layer
        input_norm: bool = True,
        final_norm: bool = True,
        norm_output: bool = False,
        no_rope_layers: tuple[int, ...] = (),
        temperature: Temperature | None = None,
    ) -> None:
        super().__init__()
        hidden, still = sizes[0].hidden_size, no_rope_layers
        self.hidden_size, self.embedding_size = hidden, embedding_size
        self.layer_sizes, self.rope, self.norm_output = tuple(sizes), rope, norm_output
        self.no_rope_layers, self.temperature = still, temperature
        self.layers = nn.ModuleList(
            Layer(
                replace(each, unit_qk=each.unit_qk and i not in still),
                input_norm=input_norm or i > 0,
            )
            for i, each in enumerate(sizes)
        )
        self.norm = RMSNorm(hidden, sizes[0].eps) if final_norm else None
        self.embed_tokens = None if vocab_size is None else nn.Embedding(vocab_size, embedding_size)
        self.lm_head = (
            None if draft_vocab_size is None else nn.Linear(hidden, draft_vocab_size, bias=False)
        )

    def decode(
        self, states: Tensor, read: Tensor | None, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        rotation, factors = self.rope(positions), None
        if self.temperature is not None:
            factors = self.temperature.factors(positions)
        for index, layer in enumerate(self.layers):
            turned = index not in self.no_rope_layers
            how = (rotation, index, attend) if turned else (None, index, attend, factors)
            states = layer(states, None if index else read, *how)
        return states, states if self.norm is None else self.norm(states)


class Rope(nn.Module):
    """Rotary embedding; not limited to the training length of the configuration."""

    def __init__(self, head_dim: int, theta: float, scaling: dict[str, Any] | None = None) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
        # Not a buffer: a cast of the module must leave these in float32.
        self.frequencies = scaled(theta**-exponents, scaling or {}, theta).float()
        self.scale = yarn_scale(scaling or {})  # of cosines and sines

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # [num_tokens, 1, head_dim]
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions.float()[:, None, None] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scale == 1 else (cos * self.scale, sin * self.scale)


def rotate(
    states: Tensor,  # [num_tokens, num_heads, head_dim]
    rotation: tuple[Tensor, Tensor],
) -> Tensor:
    """Rotates `states` by their positions; computed in float32."""
    cos, sin = rotation
    wide = states.float()
    first, second = wide.chunk(2, dim=-1)
    turned = wide * cos + torch.cat([-second, first], dim=-1) * sin
    return turned.to(states.dtype)


@dataclass(frozen=True, slots=True)
class Temperature:
    """Query scaling by position, for layers without rotary positions (arXiv:2501.19399)."""

    scale: float
    floor: float  # number of positions with the same factor

    def factors(
        self,
        positions: Tensor,  # [num_tokens]
        log1p: Callable[[Tensor], Tensor] = torch.log1p,
    ) -> Tensor:  # [num_tokens] float32
        """Returns the factors of the queries."""
        spans = torch.floor((positions.float() + 1) / self.floor)
        return log1p(spans) * self.scale + 1


def halves(
    rows: Tensor,  # [num_heads * head_dim, ...]
    head_dim: int,
) -> Tensor:
    """Reorders rows from interleaved rotary pairs to halves: 0, 2, .., 1, 3, ..

    Scores do not change as long as queries and keys have the same order.
    """
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def neighbours(
    rows: Tensor,  # [num_heads * head_dim, ...]
    head_dim: int,
) -> Tensor:
    """Reverses `halves`."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def scaled(
    frequencies: Tensor,  # [head_dim / 2]
    scaling: dict[str, Any],
    theta: float,
) -> Tensor:  # [head_dim / 2]
    """Scales frequencies by a `rope_scaling` section, with the keys of its type in `SCALING`."""
    kind = scaling.get("rope_type", "default")
    assert kind in SCALING, kind
    if kind == "default":
        return frequencies
    factor = float(scaling["factor"])
    if kind == "linear":
        return frequencies / factor
    if kind == "yarn":
        return _yarn(frequencies, scaling, theta)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / factor)


def _yarn(
    frequencies: Tensor,  # [head_dim / 2]
    scaling: dict[str, Any],
    theta: float,
) -> Tensor:  # [head_dim / 2]
    """Keeps high frequencies, divides low ones, with a ramp between (arXiv:2309.00071, 3.2)."""
    length, count = float(scaling["original_max_position_embeddings"]), len(frequencies)

    def place(num_turns: float) -> float:
        """Returns the index of the frequency that turns this often within the original length."""
        return count * math.log(length / (num_turns * 2 * math.pi)) / math.log(theta)

    first, last = place(scaling.get("beta_fast") or 32), place(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    ahead = torch.arange(count, dtype=frequencies.dtype, device=frequencies.device) - first
    divided = (ahead / (last - first or 0.001)).clamp(0, 1)
    return frequencies * (1 - divided) + frequencies / float(scaling["factor"]) * divided


def yarn_scale(scaling: dict[str, Any], *, of_scores: bool = False) -> float:
    """Returns YaRN's factor of cosines and sines, or of the scores in DeepSeek's attention."""
    if scaling.get("rope_type") != "yarn":
        return 1.0
    factor = float(scaling["factor"])
    own, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

    if of_scores:
        return grown(of_all) ** 2 if of_all else 1.0
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    return grown(own) / grown(of_all) if own and of_all else grown(1)
