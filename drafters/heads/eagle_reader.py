"""What an EAGLE head's folder says, tensor by tensor and key by key; used by `eagle_load.py`.

Sizes are read off the tensors, since configurations are often wrong; only what no shape shows
(head counts, rotary positions, order of norms) comes from `config.json`, in the flat form or in
that of the speculators library, or from the user.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...config import EagleConfig
from ...errors import ConfigError
from .llama import LayerSizes, Rope, Temperature, halves
from .load import Tensors, fail, read_config
from .protocol import TargetFacts

_FILES = ("model", "pytorch_model")
_RENAMED = {"fusion_fc.": "fc.", "pre_lm_head_layernorm.": "hidden_states_layernorm."}
_FIRST = ("midlayer", "layers.0", "midlayer.0")
_THETA, _LLAMA4_THETA = 10_000.0, 500_000.0
_MIXTURE = r".*\.mlp\.(experts|router|shared_expert)\..*"
_TURNED = [f"{part}.{leaf}" for part in ("q_proj", "k_proj") for leaf in ("weight", "bias")]
_TURNED += ["q_norm.weight", "k_norm.weight"]


class EagleReader:
    """Tensors and configuration of a folder, and the state that a module is given."""

    def __init__(self, config: EagleConfig, target: TargetFacts) -> None:
        raw = read_config(config.folder)
        self.raw = raw
        self.config: dict[str, Any] = {**raw, **raw.get("transformer_layer_config", {})}
        self.inner: dict[str, Any] = raw.get("eagle_config") or {}
        self.user, self.target = config, target
        self.tensors = Tensors(config.folder, _FILES, _own_name)
        self.state: dict[str, Tensor] = {}
        names = [str(name) for name in raw.get("architectures") or ()]
        kind = str(self.config.get("model_type", ""))
        self.is_llama4 = kind.startswith("llama4") or any("Llama4" in name for name in names)
        self.interleaved = config.rope_layout == "interleaved"
        if mixture := self.tensors.matches(_MIXTURE):
            raise fail(
                f"tensor {mixture[0][0]!r} of {str(config.folder)!r} belongs to a mixture of "
                "experts, which heads are not run with; wanted are gate_proj, up_proj, down_proj"
            )

    def number(self, key: str) -> int:
        """A whole number that no tensor shows."""
        value = self.config.get(key)
        if not isinstance(value, int) or value < 1:
            raise fail(f"config.json of {str(self.user.folder)!r} lacks {key!r} (it has {value!r})")
        return value

    def flag(self, key: str) -> bool:
        """A variant, wherever it is said."""
        return bool(self.config.get(key) or self.inner.get(key))

    def recycles_normed(self, default: bool) -> bool:
        """Whether the next feature is the output after the final norm."""
        recycle = self.user.recycle
        return default if recycle is None else recycle == "post_norm"

    def without(self, key: str, why: str) -> None:
        """Raises `ConfigError` if the user decides what this head has no place for."""
        if (value := getattr(self.user, key)) is not None:
            raise ConfigError(
                f"speculative_config.{key}: {value!r} has no meaning for "
                f"{str(self.user.folder)!r}: {why}",
                field=f"speculative_config.{key}",
            )

    def refuse(self, key: str, why: str) -> None:
        """Raises `CheckpointError` if the configuration asks for what heads are not run with."""
        if (value := self.config.get(key)) not in (None, []):
            raise fail(f"{key} of {str(self.user.folder)!r} is {value!r}: {why}")

    def put(self, name: str, stored: str, *shape: int) -> None:
        """One tensor into the module's state."""
        self.state[name] = self.tensors.take(stored, *shape)

    def first_layer(self) -> str:
        for name in _FIRST:
            if f"{name}.self_attn.q_proj.weight" in self.tensors:
                return name
        raise fail(
            f"{str(self.user.folder)!r} has neither 'midlayer.self_attn.q_proj.weight' nor "
            "'layers.0.self_attn.q_proj.weight': it is no EAGLE head"
        )

    def later_layers(self) -> list[str]:
        """Layers after the first, by any of the names that engines give them."""
        found: list[str] = []
        while True:
            index = len(found) + 1
            stems = (f"layers.{index}", f"midlayer.{index}", f"additional_layers.{index - 1}")
            stem = [name for name in stems if f"{name}.mlp.up_proj.weight" in self.tensors]
            if not stem:
                return found
            found.append(stem[0])

    def sizes(self, layer: str) -> LayerSizes:
        """A layer's dimensions, from its shapes and the number of heads."""
        shape, has = self.tensors.shape, self.tensors.__contains__
        names = [f"{layer}.self_attn.{part}_proj.weight" for part in "qko"]
        names.append(f"{layer}.mlp.gate_proj.weight")
        for name in names:
            if name not in self.tensors:
                raise fail(f"{str(self.user.folder)!r} lacks tensor {name!r} (two dimensions)")
        query, key, output, gate = (shape(name) for name in names)
        heads = self.number("num_attention_heads")
        head_dim = self.config.get("head_dim") or query[0] // heads
        if head_dim * heads != query[0] or key[0] % head_dim:
            raise fail(
                f"tensors {names[0]!r} {list(query)} and {names[1]!r} {list(key)} do not fit "
                f"{heads} heads of {head_dim}"
            )
        return LayerSizes(
            hidden_size=output[0],
            input_size=query[1],
            intermediate_size=gate[0],
            num_heads=heads,
            num_kv_heads=key[0] // head_dim,
            head_dim=head_dim,
            eps=float(self.config.get("rms_norm_eps", 1e-6)),
            qkv_bias=has(f"{layer}.self_attn.q_proj.bias"),
            output_bias=has(f"{layer}.self_attn.o_proj.bias"),
            qk_norm=has(f"{layer}.self_attn.q_norm.weight"),
        )

    def put_layer(self, place: str, stored: str, sizes: LayerSizes) -> None:
        """Attention, MLP and the norm between them."""
        hidden, wide = sizes.hidden_size, sizes.intermediate_size
        heads, kv_heads = (n * sizes.head_dim for n in (sizes.num_heads, sizes.num_kv_heads))
        for part, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            name = f"self_attn.{part}"
            self._put(place, stored, f"{name}.weight", rows, sizes.input_size)
            if sizes.qkv_bias:
                self._put(place, stored, f"{name}.bias", rows)
        self._put(place, stored, "self_attn.o_proj.weight", hidden, heads)
        if sizes.output_bias:
            self._put(place, stored, "self_attn.o_proj.bias", hidden)
        for part in ("q_norm", "k_norm") if sizes.qk_norm else ():
            self._put(place, stored, f"self_attn.{part}.weight", sizes.head_dim)
        if self.interleaved:
            for name in (f"{place}.self_attn.{leaf}" for leaf in _TURNED):
                if name in self.state:
                    self.state[name] = halves(self.state[name], sizes.head_dim)
        self._put(place, stored, "mlp.gate_proj.weight", wide, hidden)
        self._put(place, stored, "mlp.up_proj.weight", wide, hidden)
        self._put(place, stored, "mlp.down_proj.weight", hidden, wide)
        self._put(place, stored, "post_attention_layernorm.weight", hidden)

    def put_norm(self, place: str, stored: str, hidden: int) -> None:
        """The one norm before attention of a layer like any other; some engines call it another."""
        theirs = f"{stored}.input_layernorm.weight"
        if theirs not in self.tensors:
            theirs = f"{stored}.hidden_norm.weight"
        self.put(f"{place}.input_layernorm.weight", theirs, hidden)

    def rope(self, head_dim: int) -> Rope:
        """Rotary frequencies; where nothing is said, the base is 10000, Llama-4's 500000."""
        nested = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        theta = self.user.rope_theta or self.config.get("rope_theta") or nested.get("rope_theta")
        return Rope(head_dim, float(theta or (_LLAMA4_THETA if self.is_llama4 else _THETA)), nested)

    def still_layers(self, num_layers: int) -> tuple[int, ...]:
        """Llama-4's layers without rotary positions: zeros in `no_rope_layers`."""
        turned = self.config.get("no_rope_layers")
        if not turned:
            interval = self.config.get("no_rope_layer_interval") or 4
            turned = [(layer + 1) % interval for layer in range(num_layers)]
        if not isinstance(turned, list) or len(turned) < num_layers:
            raise fail(
                f"no_rope_layers of {str(self.user.folder)!r} is {turned!r}, wanted is a 1 (rotary "
                f"positions) or 0 (none) for each of {num_layers} layers"
            )
        return tuple(layer for layer in range(num_layers) if not turned[layer])

    def temperature(self) -> Temperature | None:
        """Llama-4's growth of queries where there are no rotary positions."""
        if not self.config.get("attn_temperature_tuning", True):
            return None
        found = {"attn_scale": 0.1, "floor_scale": 8192}
        for key in found:
            found[key] = value = self.config.get(key, found[key])
            if not isinstance(value, int | float) or value <= 0:
                raise fail(f"{key} of {str(self.user.folder)!r} is {value!r}, not a number above 0")
        return Temperature(found["attn_scale"], found["floor_scale"])

    def embedding(self, width: int) -> int | None:
        """Rows of an embedding of its own, if the head has one."""
        if "embed_tokens.weight" not in self.tensors:
            if width != self.target.hidden_size:
                raise fail(
                    f"{str(self.user.folder)!r} lacks tensor 'embed_tokens.weight' of shape "
                    f"{[self.target.vocab_size, width]}, needed since the target's is "
                    f"{self.target.hidden_size} wide"
                )
            return None
        self.put("embed_tokens.weight", "embed_tokens.weight", self.target.vocab_size, width)
        return self.target.vocab_size

    def vocabulary(self, hidden: int) -> tuple[int | None, Tensor | None]:
        """Rows of the output layer (None: the target's) and the target's ids of them."""
        tensors, vocab = self.tensors, self.target.vocab_size
        size, ids = None, None
        if "lm_head.weight" in tensors:
            size = tensors.shape("lm_head.weight")[0]
            self.put("lm_head.weight", "lm_head.weight", size, hidden)
        elif hidden != self.target.hidden_size:
            raise fail(
                f"{str(self.user.folder)!r} lacks tensor 'lm_head.weight' of width {hidden}, "
                f"needed since the target's output layer reads {self.target.hidden_size}"
            )
        if "d2t" in tensors:
            if size is None:
                raise fail(f"{str(self.user.folder)!r} has 'd2t' but lacks tensor 'lm_head.weight'")
            ids = tensors.take("d2t", size).to(torch.int64) + torch.arange(size)
            if int(ids.min()) < 0 or int(ids.max()) >= vocab or bool((ids.diff() <= 0).any()):
                raise fail(
                    f"tensor 'd2t' of {str(self.user.folder)!r} leads outside the target's {vocab} "
                    "tokens, or to one token twice: id = i + d2t[i] must rise within them"
                )
        elif size is not None and size != vocab:
            raise fail(
                f"tensor 'lm_head.weight' of {str(self.user.folder)!r} has {size} rows, the target "
                f"{vocab} tokens, and there is no 'd2t' of shape [{size}] between them"
            )
        if "t2d" in tensors:
            known = tensors.take("t2d", vocab).to(torch.bool)
            if ids is not None and not torch.equal(known.nonzero()[:, 0], ids):
                raise fail(f"tensors 't2d' and 'd2t' of {str(self.user.folder)!r} disagree")
        return size, ids

    def _put(self, place: str, stored: str, leaf: str, *shape: int) -> None:
        self.put(f"{place}.{leaf}", f"{stored}.{leaf}", *shape)


def _own_name(stored: str) -> str:
    """A stored name as the reference has it."""
    name = stored.removeprefix("model.").replace(".feed_forward.", ".mlp.")
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
