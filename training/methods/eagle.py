"""Methods `eagle`, `eagle3`, `peagle`: EAGLE's heads, whose files have published keys and names.

EAGLE-1 and EAGLE-2 (arXiv:2401.15077, 2406.16858) guess the target's next feature: the loss is
the distance of that feature, and the target's own distribution through its own output layer, over
several passes as in HASS (2408.15766). EAGLE-3 (2503.01840) reads features of several layers and is
trained by training-time test. P-EAGLE (2602.01469) reads masks in place of its own features.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from ...drafters.heads.eagle import BESIDE, Eagle1Module, Eagle3Module, Eagle3Options
from ...drafters.heads.llama import LayerSizes, LlamaModule, Rope
from ...drafters.heads.load import Tensors
from ...errors import ConfigError
from ..options import Eagle3TrainOptions, EagleOptions, LayerOptions, PEagleOptions
from ..protocol import FrozenTarget
from ..state import target_config, write_tensors
from .distil import checked_mask, output_rows, rarest
from .unroll import UnrolledMethod


class EagleMethod(UnrolledMethod):
    """EAGLE-1 and EAGLE-2: trains one layer over `fc`."""

    module: Eagle1Module

    def __init__(self, options: EagleOptions, target: FrozenTarget) -> None:
        sizes = layer_sizes(options, target, target.facts.hidden_size)
        # Without a bias, which not every engine has a place for.
        module = Eagle1Module(sizes, 1, Rope(sizes.head_dim, options.rope_theta), fc_bias=False)
        super().__init__(target, (target.facts.num_layers,), options)
        self.module, self._options = module, options
        begin(module, target, from_target=options.init_from_target)
        with torch.no_grad():  # the feature is let through, the layer adds what it learns
            hidden, layer = target.facts.hidden_size, module.layers[0]
            module.fc.weight[:, hidden:] += torch.eye(hidden)
            # A residual stream may be many times larger than the normed feature that it ends in.
            layer.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr, operator]
            layer.mlp.down_proj.weight.zero_()  # type: ignore[union-attr, operator]
        module.to(target.facts.device)

    def export(self, folder: Path) -> None:
        tensors = self.module.state_dict()
        architecture = "LlamaForCausalLM"
        if self._options.layout == "sglang":  # which leaves a bias that is missing random
            architecture = "LlamaForCausalLMEagle"
            tensors["fc.bias"] = torch.zeros(self._target.facts.hidden_size)
        keys = {"architectures": [architecture], "bias": False}
        keys = layer_keys(self.module.layer_sizes, self._options, self._target) | keys
        write_tensors(folder, tensors, keys, self._target)

    def _input_features(self, features: Tensor) -> Tensor:
        noise = self._options.feature_noise
        if not noise or not torch.is_grad_enabled():
            return features
        return features + torch.empty_like(features).uniform_(-noise, noise)

    def _feature_loss(self, feature: Tensor, wanted: Tensor, weights: Tensor) -> Tensor | float:
        if not self._options.feature_weight:
            return 0.0
        distance = smooth_l1_loss(feature.float(), wanted, reduction="none").mean(-1)
        mean = (distance * weights).sum() / weights.sum().clamp(min=1e-6)
        return self._options.feature_weight * mean


class Eagle3Method(UnrolledMethod):
    """EAGLE-3: trains `fc`, one layer and an output layer."""

    module: Eagle3Module
    has_masks = False

    def __init__(self, options: Eagle3TrainOptions, target: FrozenTarget) -> None:
        facts = target.facts
        layers = options.layers
        if layers is None:
            layers = tuple(sorted((2, facts.num_layers // 2, facts.num_layers - 3)))
        super().__init__(target, checked_layers(layers, target), options, options.draft_vocab_size)
        self._options = options
        sizes = layer_sizes(options, target, 2 * facts.hidden_size)
        self.module = Eagle3Module(
            sizes,
            1,
            Rope(sizes.head_dim, options.rope_theta),
            Eagle3Options(
                num_features=len(self.capture),
                norm_before_residual=options.norm_before_residual,
                mask_shape=(1, 1, len(self.capture) * facts.hidden_size) if self.has_masks else (),
            ),
            target_hidden_size=facts.hidden_size,
            draft_vocab_size=self.draft_vocab_size,
        )
        begin(self.module, target, from_target=options.init_from_target)
        self.begin_output(output_rows(target))
        self.module.to(facts.device)

    def begin_output(self, rows: Tensor) -> None:  # [draft_vocab, hidden_size]
        if self._options.init_from_target:
            assert self.module.lm_head is not None
            fill(self.module.lm_head.weight, rows)

    def export(self, folder: Path) -> None:
        facts = self._target.facts
        tensors = {
            f"midlayer.{name}"
            if name.startswith(BESIDE)
            else name.replace("layers.0.", "midlayer."): tensor
            for name, tensor in self.module.state_dict().items()
        }
        tensors |= self.vocabulary_tensors()
        inputs, key = list(self.capture), "eagle_aux_hidden_state_layer_ids"
        keys: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "bias": False,
            "draft_vocab_size": len(tensors["lm_head.weight"]),
            "target_hidden_size": facts.hidden_size,
            "num_aux_hidden_states": len(inputs),
            "norm_before_residual": self._options.norm_before_residual,
            # One key, two meanings: at the top the layers whose inputs are read, inside
            # `eagle_config` those whose outputs are. Engines read the one or the other.
            key: inputs,
            "eagle_config": {key: [layer - 1 for layer in inputs], "use_aux_hidden_state": True},
            **self._own_keys(),
        }
        keys = layer_keys(self.module.layer_sizes, self._options, self._target) | keys
        write_tensors(folder, tensors, keys, self._target)

    def _own_keys(self) -> dict[str, Any]:
        """Returns keys of `config.json` that EAGLE-3 does not have."""
        return {}


class PEagleMethod(Eagle3Method):
    """P-EAGLE: also trains the inputs of masks."""

    has_masks = True

    def __init__(self, options: PEagleOptions, target: FrozenTarget) -> None:
        super().__init__(options, target)
        torch.nn.init.normal_(self.module.mask_hidden)
        self._mask_token = checked_mask(options.mask_token_id, target)

    def prepare(self, token_counts: Tensor) -> None:  # [vocab]
        """Uses the rarest token as the mask, unless one was given."""
        super().prepare(token_counts)
        if self._mask_token is None:
            self._mask_token = rarest(token_counts)

    def _mask(self) -> tuple[Tensor, Tensor]:
        assert self._mask_token is not None, "prepare() comes first"
        token = torch.tensor([self._mask_token], device=self.module.mask_hidden.device)
        return self._target.embed(token).float(), self.module.mask_feature()

    def _own_keys(self) -> dict[str, Any]:
        return {"ptd_token_id": self._mask_token}


def checked_layers(layers: tuple[int, ...], target: FrozenTarget) -> tuple[int, ...]:
    """Returns target layers whose inputs a head reads.

    Raises:
        ConfigError: they do not ascend, or the target lacks one.
    """
    num_layers = target.facts.num_layers
    if list(layers) != sorted(layers):  # engines gather them on their way up
        raise ConfigError.at("layers", f"{list(layers)} do not ascend")
    if not layers or not all(0 <= layer < num_layers for layer in layers):
        raise ConfigError.at(
            "layers",
            f"inputs of layers {list(layers)} are asked for, the target has layers 0 to "
            f"{num_layers - 1}",
        )
    return layers


_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
_LAYER = r"(?:.*\.)?layers\.{layer}\.(self_attn\.[qkvo]_proj|mlp\.\w+_proj|\w+_layernorm)\.weight"


def layer_sizes(options: LayerOptions, target: FrozenTarget, input_size: int) -> LayerSizes:
    """Returns the dimensions of the head's layer.

    Raises:
        ConfigError: an option is not given and the target has no such key, or they do not fit.
    """
    config, hidden = target_config(target), target.facts.hidden_size

    def number(key: str, *otherwise: int | None) -> int:
        for found in (getattr(options, key), config.get(key), *otherwise):
            if isinstance(found, int):
                return found
        raise ConfigError.at(key, f"config.json of {str(target.path)!r} lacks it; set it here")

    heads = number("num_attention_heads")
    kv_heads = number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError.at(
            "num_key_value_heads", f"{kv_heads} does not divide num_attention_heads, {heads}"
        )
    return LayerSizes(
        hidden_size=hidden,
        input_size=input_size,
        intermediate_size=number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=number("head_dim", hidden // heads),
        eps=float(config.get("rms_norm_eps") or 1e-6),
    )


def target_layer(target: FrozenTarget, layer: int) -> dict[str, Tensor]:
    """Returns weights of a target's layer under a Llama layer's names; skips what it lacks."""
    stored = Tensors(
        target.path, ("model", "pytorch_model"), allow_pickle=target.facts.allow_pickle
    )
    found = stored.matches(_LAYER.format(layer=layer))
    return {f"{m[1]}.weight": stored.take(m[0], *stored.shape(m[0])).float() for m in found}


@torch.no_grad()
def begin(module: LlamaModule, target: FrozenTarget, *, from_target: bool) -> None:
    """Sets initial weights: random matrices, and the target's last layer if it fits."""
    for weight in module.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.02)
    layer = target_layer(target, target.facts.num_layers - 1) if from_target else {}
    beside = ((name, weight) for name, weight in module.named_parameters() if name in layer)
    for name, weight in (*module.layers[0].named_parameters(), *beside):
        fill(weight, layer.get(name))


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor | None) -> None:
    """Sets initial weights if there are any and they fit."""
    if values is not None and values.shape == parameter.shape:
        parameter.copy_(values)


def layer_keys(
    sizes: Sequence[LayerSizes], options: LayerOptions, target: FrozenTarget
) -> dict[str, Any]:
    """Returns keys of `config.json` that describe a head's layers."""
    theirs, first = target_config(target), sizes[0]
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": first.hidden_size,
        "intermediate_size": first.intermediate_size,
        "num_hidden_layers": len(sizes),
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "rms_norm_eps": first.eps,
        "rope_theta": options.rope_theta,
        "vocab_size": target.facts.vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **{key: theirs[key] for key in _CARRIED if theirs.get(key) is not None},
    }
