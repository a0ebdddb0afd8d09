"""EAGLE checkpoints: which generation, which variant, how large, and every tensor in its place.

Sizes are read off the tensors, since configurations are often wrong; only what no shape shows
(head counts, rotary base, order of norms) comes from `config.json`, in the flat form or in that
of the speculators library. Defaults that differ between engines are the reference's:

- no `rope_theta` means 10000 (the published trainers ignore the target's);
- `norm_before_residual`, `norm_output`, `fc_norm`, `norm_before_fc` are false unless said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...config import Eagle3Config, EagleConfig
from .eagle import Eagle1Module, Eagle3Module, Eagle3Options, EagleModule
from .llama import LayerSizes, Rope
from .load import Tensors, fail, read_config
from .protocol import TargetFacts

_FILES = ("model", "pytorch_model")
_IGNORED = r".*rotary_emb\.inv_freq"
_RENAMED = {"fusion_fc.": "fc.", "pre_lm_head_layernorm.": "hidden_states_layernorm."}
_FIRST = ("midlayer", "layers.0", "midlayer.0")


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """A loaded head and what goes with it."""

    module: EagleModule
    capture: tuple[int, ...]  # target layers whose inputs it reads, side by side in this order
    target_ids: Tensor | None  # [draft_vocab], the target's id of every draft token; None: alike


def read_eagle(config: EagleConfig, target: TargetFacts) -> EagleCheckpoint:
    """The checkpoint of `config`'s folder.

    Raises:
        CheckpointError: a tensor or key is missing, superfluous, or does not fit the target.
    """
    reader = _Reader(config, target)
    first = reader.first_layer()
    third = f"{first}.hidden_norm.weight" in reader.tensors
    if isinstance(config, Eagle3Config) and not third:
        raise fail(
            f"{str(config.folder)!r} lacks tensor '{first}.hidden_norm.weight': it is EAGLE-1; "
            "use decoding_type Eagle"
        )
    found = _eagle3(reader, first) if third else _eagle1(reader)
    reader.tensors.finish(_IGNORED)
    found.module.load_state_dict(reader.state, assign=True)
    found.module.to(target.device, target.dtype).eval().requires_grad_(False)
    ids = found.target_ids
    return replace(found, target_ids=None if ids is None else ids.to(target.device))


class _Reader:
    """Tensors and configuration of a folder, and the state that a module is given."""

    def __init__(self, config: EagleConfig, target: TargetFacts) -> None:
        raw = read_config(config.folder)
        self.raw = raw
        self.config: dict[str, Any] = {**raw, **raw.get("transformer_layer_config", {})}
        self.inner: dict[str, Any] = raw.get("eagle_config") or {}
        self.user, self.target = config, target
        self.tensors = Tensors(config.folder, _FILES, _own_name)
        self.state: dict[str, Tensor] = {}

    def number(self, key: str) -> int:
        """A whole number that no tensor shows."""
        value = self.config.get(key)
        if not isinstance(value, int) or value < 1:
            raise fail(f"config.json of {str(self.user.folder)!r} lacks {key!r} (it has {value!r})")
        return value

    def flag(self, key: str) -> bool:
        """A variant, wherever it is said."""
        return bool(self.config.get(key) or self.inner.get(key))

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
            self.put(f"{place}.{name}.weight", f"{stored}.{name}.weight", rows, sizes.input_size)
            if sizes.qkv_bias:
                self.put(f"{place}.{name}.bias", f"{stored}.{name}.bias", rows)
        self._put(place, stored, "self_attn.o_proj.weight", hidden, heads)
        if sizes.output_bias:
            self._put(place, stored, "self_attn.o_proj.bias", hidden)
        for part in ("q_norm", "k_norm") if sizes.qk_norm else ():
            self._put(place, stored, f"self_attn.{part}.weight", sizes.head_dim)
        self._put(place, stored, "mlp.gate_proj.weight", wide, hidden)
        self._put(place, stored, "mlp.up_proj.weight", wide, hidden)
        self._put(place, stored, "mlp.down_proj.weight", hidden, wide)
        self._put(place, stored, "post_attention_layernorm.weight", hidden)

    def rope(self, head_dim: int) -> Rope:
        """Rotary frequencies; 10000 where nothing is said."""
        nested = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        theta = self.user.rope_theta or self.config.get("rope_theta") or nested.get("rope_theta")
        return Rope(head_dim, float(theta or 10000.0), nested)

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

    def _put(self, place: str, stored: str, leaf: str, *shape: int) -> None:
        self.put(f"{place}.{leaf}", f"{stored}.{leaf}", *shape)


def _eagle1(reader: _Reader) -> EagleCheckpoint:
    tensors, hidden = reader.tensors, reader.target.hidden_size
    sizes = replace(reader.sizes("layers.0"), hidden_size=hidden, input_size=hidden)
    num_layers = 1 + max(int(m[1]) for m in tensors.matches(r"layers\.(\d+)\.mlp\.up_proj\.weight"))
    para_norm = "hidden_states_layernorm.weight" in tensors
    reader.put("fc.weight", "fc.weight", hidden, 2 * hidden)
    fc_bias = "fc.bias" in tensors
    if fc_bias:
        reader.put("fc.bias", "fc.bias", hidden)
    for layer in range(num_layers):
        reader.put_layer(f"layers.{layer}", f"layers.{layer}", sizes)
        if layer:
            name = f"layers.{layer}.input_layernorm.weight"
            reader.put(name, name, hidden)
    for name in ("embedding_layernorm", "hidden_states_layernorm") if para_norm else ():
        reader.put(f"{name}.weight", f"{name}.weight", hidden)
    with torch.device("meta"):
        module = Eagle1Module(
            sizes,
            num_layers,
            reader.rope(sizes.head_dim),
            fc_bias=fc_bias,
            para_norm=para_norm,
            vocab_size=reader.embedding(hidden),
        )
    return EagleCheckpoint(module, (reader.target.num_layers,), None)


def _eagle3(reader: _Reader, first: str) -> EagleCheckpoint:
    tensors, target = reader.tensors, reader.target
    sizes = reader.sizes(first)
    hidden, embedding = sizes.hidden_size, sizes.input_size - sizes.hidden_size
    capture, options = _features(reader, hidden)
    reader.put_layer("layers.0", first, sizes)
    reader.put("layers.0.hidden_norm.weight", f"{first}.hidden_norm.weight", hidden)
    reader.put("layers.0.input_layernorm.weight", f"{first}.input_layernorm.weight", embedding)
    later = replace(sizes, input_size=hidden)
    more = tensors.matches(r"(?:layers|midlayer)\.([1-9]\d*)\.mlp\.up_proj\.weight")
    for layer in range(1, len(more) + 1):
        stem = f"{first.split('.')[0]}.{layer}"
        reader.put_layer(f"layers.{layer}", stem, later)
        norm = "input_layernorm.weight"
        reader.put(f"layers.{layer}.{norm}", f"{stem}.{norm}", hidden)
    reader.put("norm.weight", "norm.weight", hidden)
    draft_vocab, target_ids = _vocabulary(reader, hidden)
    with torch.device("meta"):
        module = Eagle3Module(
            sizes,
            later,
            1 + len(more),
            reader.rope(sizes.head_dim),
            options,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=draft_vocab,
            vocab_size=reader.embedding(embedding),
        )
    return EagleCheckpoint(module, capture, target_ids)


def _features(reader: _Reader, hidden: int) -> tuple[tuple[int, ...], Eagle3Options]:
    """Which layers are captured, and how their states become one feature."""
    tensors, width = reader.tensors, reader.target.hidden_size
    capture = _capture(reader)
    count = len(capture)
    if "fc.weight" not in tensors and count == 1 and width == hidden:
        count = 0  # `use_aux_hidden_state` false: the state is the feature
    else:
        reader.put("fc.weight", "fc.weight", hidden, count * width)
    if fc_bias := "fc.bias" in tensors:
        reader.put("fc.bias", "fc.bias", hidden)
    if fc_norm := "fc_norm.0.weight" in tensors:
        for index in range(count):
            reader.put(f"fc_norm.{index}.weight", f"fc_norm.{index}.weight", width)
    if norm_before_fc := "input_norm.weight" in tensors:
        reader.put("input_norm.weight", "input_norm.weight", count * width)
    recycles_normed = reader.flag("return_hidden_post_norm")
    if "speculators_model_type" in reader.raw:  # elsewhere `norm_output` means another thing
        recycles_normed = recycles_normed or reader.flag("norm_output")
    return capture, Eagle3Options(
        num_features=count,
        norm_before_residual=reader.flag("norm_before_residual"),
        fc_norm=fc_norm,
        norm_before_fc=norm_before_fc,
        norm_output=recycles_normed,
        fc_bias=fc_bias,
    )


def _capture(reader: _Reader) -> tuple[int, ...]:
    """Layers by the input that is captured; `eagle_config` and TensorRT-LLM name outputs."""
    num_layers, key = reader.target.num_layers, "eagle_aux_hidden_state_layer_ids"
    uses_many = reader.config.get("use_aux_hidden_state", reader.inner.get("use_aux_hidden_state"))
    ids: tuple[int, ...] = (2, num_layers // 2, num_layers - 3)
    if reader.user.eagle3_layers_to_capture is not None:
        key = "eagle3_layers_to_capture"
        ids = tuple(layer + 1 for layer in reader.user.eagle3_layers_to_capture)
    elif reader.config.get(key):
        ids = tuple(reader.config[key])
    elif reader.inner.get(key):
        ids = tuple(layer + 1 for layer in reader.inner[key])
    elif uses_many is False:
        return (num_layers,)
    if not ids or not all(0 <= layer < num_layers for layer in ids):
        raise fail(
            f"{key} asks for the inputs of layers {list(ids)}, the target has layers 0 to "
            f"{num_layers - 1}; set eagle3_layers_to_capture to layers whose outputs to read"
        )
    return ids


def _vocabulary(reader: _Reader, hidden: int) -> tuple[int | None, Tensor | None]:
    """Rows of the output layer (None: the target's) and the target's ids of them."""
    tensors, vocab = reader.tensors, reader.target.vocab_size
    size, ids = None, None
    if "lm_head.weight" in tensors:
        size = tensors.shape("lm_head.weight")[0]
        reader.put("lm_head.weight", "lm_head.weight", size, hidden)
    elif hidden != reader.target.hidden_size:
        raise fail(
            f"{str(reader.user.folder)!r} lacks tensor 'lm_head.weight' of width {hidden}, needed "
            f"since the target's output layer reads {reader.target.hidden_size}"
        )
    if "d2t" in tensors:
        if size is None:
            raise fail(f"{str(reader.user.folder)!r} has 'd2t' but lacks tensor 'lm_head.weight'")
        ids = tensors.take("d2t", size).to(torch.int64) + torch.arange(size)
        if int(ids.min()) < 0 or int(ids.max()) >= vocab or bool((ids.diff() <= 0).any()):
            raise fail(
                f"tensor 'd2t' of {str(reader.user.folder)!r} leads outside the target's {vocab} "
                "tokens, or to one token twice: id = i + d2t[i] must rise within them"
            )
    elif size is not None and size != vocab:
        raise fail(
            f"tensor 'lm_head.weight' of {str(reader.user.folder)!r} has {size} rows, the target "
            f"{vocab} tokens, and there is no 'd2t' of shape [{size}] between them"
        )
    if "t2d" in tensors:
        known = tensors.take("t2d", vocab).to(torch.bool)
        if ids is not None and not torch.equal(known.nonzero()[:, 0], ids):
            raise fail(f"tensors 't2d' and 'd2t' of {str(reader.user.folder)!r} disagree")
    return size, ids


def _own_name(stored: str) -> str:
    """A stored name as the reference has it."""
    name = stored.removeprefix("model.")
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
