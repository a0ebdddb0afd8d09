"""The properties that distinguish architectures of the family, read from their configurations.

An architecture is described by the places of its norms, its rotation, which layers are mixtures,
and how those route. The arguments of attention (scale, window, soft cap, sinks) are not read here:
`load.py` takes them from a forward of the bridge, where they were observed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from ....drafters.heads.llama import Temperature
from ...ops.protocol import Gate, GateKind, Router, Scoring


class Placement(Enum):
    """The places of a layer's norms, by the modules' names."""

    BEFORE = auto()  # of each block's input: Llama
    AFTER = auto()  # of each block's output: OLMo-2
    AROUND = auto()  # both: Gemma 2


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """The properties of one architecture that are equal on every rank."""

    gate: Gate
    placement: Placement = Placement.BEFORE
    unit_offset: bool = False  # norms multiply by 1 + weight
    neighbours: bool = False  # rotation pairs dimension 2i with 2i + 1, not i with i + dim / 2
    rotated: tuple[bool, ...] | None = None  # per layer; None: all
    temperature: Temperature | None = None  # for layers without rotation
    rope_kinds: tuple[str, ...] | None = None  # kind per layer; None: there is only one
    gated_attention: bool = False  # query rows of a head are followed by gate rows of its output
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    router: Router | None = None
    wide_router: bool = False  # router logits are computed in float32
    expert_gate: Gate | None = None  # None: same as `gate`
    scores_input: bool = False
    gates_interleaved: bool = False  # rows of gate and up alternate in the experts' tensors
    experts_transposed: bool = False  # experts' tensors are [num_experts, in, out]


_GATES = {
    "silu": GateKind.SILU,
    "swish": GateKind.SILU,
    "gelu": GateKind.GELU,
    "gelu_pytorch_tanh": GateKind.GELU_TANH,
    "relu": GateKind.RELU,
}
_ROPES = ("default", "linear", "llama3", "yarn", "longrope")


def recurrent_layers(config: Any) -> frozenset[int]:
    """Returns the layers that keep a state in place of keys and values."""
    if config.model_type not in _RECURRENT:
        return frozenset()
    kinds = enumerate(config.layer_types)
    return frozenset(layer for layer, kind in kinds if kind in ("linear_attention", "hybrid"))


def without_attention(config: Any) -> frozenset[int]:
    """Returns the layers that have no keys and values: those with only a state, or with neither."""
    if config.model_type not in _RECURRENT:
        return frozenset()
    kinds = enumerate(config.layer_types)
    return frozenset(layer for layer, kind in kinds if kind not in ("full_attention", "hybrid"))


def read_spec(config: Any) -> FamilySpec | str:
    """Returns the family's description of `config`, or why there is none."""
    reader = _READERS.get(config.model_type)
    if reader is None:
        return f"{config.model_type!r} is not of the family"
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
    if name not in _GATES:
        return f"its activation {name!r} is not one of {', '.join(_GATES)}"
    if kinds := _rope_types(config) - set(_ROPES):
        return f"its rotary positions are of type {', '.join(sorted(kinds))}"
    return reader(config, FamilySpec(Gate(_GATES[name])))


def _rope_types(config: Any) -> set[str]:
    ropes = getattr(config, "rope_parameters", None) or {}
    sections = [ropes] if "rope_type" in ropes else [part for part in ropes.values() if part]
    return {section["rope_type"] for section in sections if isinstance(section, dict)}


def _plain(config: Any, spec: FamilySpec) -> FamilySpec:
    return spec


def _granite(config: Any, spec: FamilySpec) -> FamilySpec:
    return replace(
        spec,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def _granite_hybrid(config: Any, spec: FamilySpec) -> FamilySpec:
    """Reads Granite 4, which has no positions unless the configuration sets them."""
    spec = _granite(config, spec)
    if config.position_embedding_type != "rope":
        spec = replace(spec, rotated=(False,) * config.num_hidden_layers)
    if not config.num_local_experts:
        return spec
    return replace(spec, router=Router(config.num_experts_per_tok, Scoring.SOFTMAX_OF_TOP))


def _gemma(config: Any, spec: FamilySpec) -> FamilySpec:
    several = "rope_type" not in config.rope_parameters
    return replace(
        spec,
        placement=Placement.AROUND,
        unit_offset=True,
        rope_kinds=tuple(config.layer_types) if several else None,
        logit_softcap=config.final_logit_softcapping,
    )


def _olmo2(config: Any, spec: FamilySpec) -> FamilySpec:
    return replace(spec, placement=Placement.AFTER)


def _smollm3(config: Any, spec: FamilySpec) -> FamilySpec:
    return replace(spec, rotated=tuple(map(bool, config.no_rope_layers)))


def _softmax_router(config: Any, spec: FamilySpec) -> FamilySpec:
    """Reads Mixtral, which always normalises, and Qwen3-MoE, whose configuration decides."""
    normalise = bool(getattr(config, "norm_topk_prob", True))
    router = Router(config.num_experts_per_tok, Scoring.SOFTMAX, normalise=normalise)
    return replace(spec, router=router)


def _qwen3_next(config: Any, spec: FamilySpec) -> FamilySpec:
    return replace(_softmax_router(config, spec), unit_offset=True, gated_attention=True)


def _qwen3_5(config: Any, spec: FamilySpec) -> FamilySpec:
    return replace(spec, unit_offset=True, gated_attention=True)


def _gpt_oss(config: Any, spec: FamilySpec) -> FamilySpec:
    return replace(
        spec,
        router=Router(config.num_experts_per_tok, Scoring.SOFTMAX_OF_TOP),
        expert_gate=Gate(GateKind.CLAMPED_SILU, config.swiglu_limit, config.swiglu_alpha),
        gates_interleaved=True,
        experts_transposed=True,
    )


def _llama4(config: Any, spec: FamilySpec) -> FamilySpec:
    tuning = None
    if config.attn_temperature_tuning:
        tuning = Temperature(config.attn_scale, config.floor_scale)
    return replace(
        spec,
        neighbours=True,
        rotated=tuple(map(bool, config.no_rope_layers)),
        temperature=tuning,
        router=Router(config.num_experts_per_tok, Scoring.SIGMOID_OF_TOP),
        scores_input=True,
        experts_transposed=True,
    )


def _sigmoid_groups(config: Any, spec: FamilySpec) -> FamilySpec:
    """Reads GLM-4-MoE and DeepSeek-V3."""
    router = Router(
        config.num_experts_per_tok,
        Scoring.SIGMOID,
        num_groups=config.n_group,
        top_groups=config.topk_group,
        group_top=2,
        normalise=bool(config.norm_topk_prob),
        scale=config.routed_scaling_factor,
    )
    return replace(spec, router=router, wide_router=True)


def _ernie(config: Any, spec: FamilySpec) -> FamilySpec:
    return replace(spec, neighbours=True)


def _ernie_moe(config: Any, spec: FamilySpec) -> FamilySpec:
    router = Router(
        config.num_experts_per_tok,
        Scoring.SOFTMAX,
        normalise=True,
        norm_min=config.moe_norm_min,
    )
    return replace(_ernie(config, spec), router=router, wide_router=True)


def _nemotron_h(config: Any, spec: FamilySpec) -> FamilySpec | str:
    """Reads Nemotron-H: no positions; one block per layer; MLPs without gates."""
    if config.mlp_hidden_act != "relu2" or config.mamba_hidden_act not in ("silu", "swish"):
        return f"its activations are {config.mlp_hidden_act!r} and {config.mamba_hidden_act!r}"
    if config.moe_latent_size is not None and config.mlp_bias:
        return "its experts' outer products have biases"
    spec = replace(spec, rotated=(False,) * config.num_hidden_layers)
    return _sigmoid_groups(config, spec)


def _falcon_h1(config: Any, spec: FamilySpec) -> FamilySpec | str:
    """Reads Falcon-H1, whose multipliers are applied to products, which must not have biases."""
    has_bias = config.attention_bias or config.mamba_proj_bias
    if has_bias and (config.attention_in_multiplier, config.ssm_in_multiplier) != (1.0, 1.0):
        return "its products have biases, and what they read is multiplied"
    return replace(
        spec, embedding_scale=config.embedding_multiplier, logit_scale=config.lm_head_multiplier
    )


def _deepseek_v3(config: Any, spec: FamilySpec) -> FamilySpec:
    return replace(_sigmoid_groups(config, spec), neighbours=bool(config.rope_interleave))


def _deepseek_v2(config: Any, spec: FamilySpec) -> FamilySpec:
    router = Router(config.num_experts_per_tok, Scoring.SOFTMAX, scale=config.routed_scaling_factor)
    if config.topk_method == "group_limited_greedy":
        router = replace(router, num_groups=config.n_group, top_groups=config.topk_group)
    return replace(spec, router=router, wide_router=True, neighbours=True)


_READERS: dict[str, Callable[[Any, FamilySpec], FamilySpec | str]] = {
    "llama": _plain,
    "mistral": _plain,
    "qwen2": _plain,
    "qwen3": _plain,
    "phi3": _plain,
    "granite": _granite,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "mixtral": _softmax_router,
    "qwen3_moe": _softmax_router,
    "bamba": _plain,
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_next,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "glm4_moe": _sigmoid_groups,
    "ernie4_5": _ernie,
    "ernie4_5_moe": _ernie_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
"""The reader of each model type's configuration; every type here has a test of equality."""

_RECURRENT = frozenset(
    {
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        *("bamba", "granitemoehybrid", "nemotron_h", "falcon_h1"),
    }
)
