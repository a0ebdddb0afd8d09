"""EAGLE in the worker: computes rows for committed tokens, then drafts from the head's own output.

Every computed token, drafted nodes included, gets a row (`eagle.py`) in the target's slot: a
rejected node's row is freed with its slot, an accepted one's moves with it, and a cached prefix
includes its rows. A row depends on the following token, so blocks are shared only if the token
after them is equal too (`reach` in `config/section.py`). `tree_drafting.py` builds the draft.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...config import Eagle3Config, EagleConfig
from ...errors import ConfigError
from .eagle import BESIDE, Eagle1Module, Eagle3Module, Eagle3Options
from .llama import SCALING, LayerSizes, LlamaModule, Rope, Temperature, halves
from .load import ConfigReader, Tensors, fail, read_config
from .protocol import Attend, HeadHost, HeadLayer, HeadRows, TargetFacts
from .tree_drafting import TreeDraftingHead

_FILES = ("model", "pytorch_model")
_RENAMED = {
    "fusion_fc.": "fc.",
    "pre_lm_head_layernorm.": "hidden_states_layernorm.",
    "transformer.": "layers.0.",  # the speculators library's older layout
    "draft_id_to_target_id": "d2t",  # offsets too
}
_FIRST = ("midlayer", "layers.0", "midlayer.0")
_THETA, _LLAMA4_THETA = 10_000.0, 500_000.0
_REFUSED = {
    r".*\.mlp\.(experts|router|shared_expert)\..*": "a mixture of experts, which heads do not "
    "support; expected gate_proj, up_proj, down_proj",
    r"mask_hidden|mask_embedding": "a head that drafts all tokens at once (P-EAGLE), which is not "
    "implemented; use an EAGLE-3 head",
    r".*\.self_attn\.kv_a_proj_with_mqa\..*": "latent attention (MLA), which EAGLE heads do not "
    "support; expected q_proj, k_proj, v_proj",
}
"""What tensors of some names belong to."""
_TURNED = re.compile(r".*\.([qk]_proj\.(weight|bias)|[qk]_norm\.weight)")
_IGNORED = r".*rotary_emb\.inv_freq"


class EagleReader:
    """Tensors and configuration of a folder.

    Sizes come from tensor shapes, since configurations are often wrong. What no shape shows (head
    counts, rotary positions, order of norms) comes from `config.json`, in the flat form or in that
    of the speculators library, or from the user. Defaults that differ between engines are the
    reference's; the user can override the first three (`config/heads.py`):

    - a missing `rope_theta` means 10000 (the published trainers ignore the target's), but 500000
      in a Llama-4 head, as in its configuration class;
    - rotary pairs are halves of a head; in EAGLE-1's Llama-4 heads they are neighbours;
    - `norm_before_residual` and `norm_output` default to false;
    - `fc_norm` and `norm_before_fc` default to false.
    """

    def __init__(self, config: EagleConfig, target: TargetFacts) -> None:
        self.user, self.target, self.folder = config, target, config.folder
        raw = read_config(config.folder)
        if not raw:
            raise fail(f"{str(config.folder)!r} has no config.json with 'num_attention_heads'")
        self.raw = ConfigReader(config.folder, raw)
        layer = self.raw.section("transformer_layer_config")
        self.config = ConfigReader(config.folder, {**raw, **layer.values})
        self.inner = self.raw.section("eagle_config")
        self.tensors = Tensors(config.folder, _FILES, _own_name, target.device)
        kind = str(self.config.values.get("model_type", ""))
        names = str(raw.get("architectures", ""))
        self.is_llama4 = kind.startswith("llama4") or "Llama4" in names
        self.interleaved = config.rope_layout == "interleaved"
        for pattern, owner in _REFUSED.items():
            if found := self.tensors.matches(pattern):
                raise self.tensors.bad(found[0][0], f"belongs to {owner}")

    def flag(self, key: str) -> bool:
        """A boolean of the top level or of `eagle_config`."""
        return self.config.flag(key) or self.inner.flag(key)

    def recycles_normed(self, default: bool) -> bool:
        """Whether the next feature is the output after the final norm."""
        recycle = self.user.recycle
        return default if recycle is None else recycle == "post_norm"

    def without(self, key: str, why: str) -> None:
        """Raises `ConfigError` if the user set `key`, which this head does not have."""
        if (value := getattr(self.user, key)) is not None:
            raise ConfigError.at(
                f"speculative_config.{key}",
                f"{value!r} has no meaning for {str(self.folder)!r}: {why}",
            )

    def fill(self, module: LlamaModule, stems: Sequence[str]) -> None:
        """Loads the weights of `module`, whose layers are stored under `stems`."""

        def stored_name(name: str) -> str:
            if name.startswith(BESIDE):
                return f"{stems[0]}.{name}"
            if not name.startswith("layers."):
                return name
            _, index, leaf = name.split(".", 2)
            stored = f"{stems[int(index)]}.{leaf}"
            if leaf == "input_layernorm.weight" and stored not in self.tensors:
                return f"{stems[int(index)]}.hidden_norm.weight"  # an engine's name for it
            return stored

        state = self.tensors.state_of(module, stored_name)
        self.tensors.finish(_IGNORED)
        if self.interleaved:
            dim = module.layer_sizes[0].head_dim
            for name in filter(_TURNED.fullmatch, state):
                state[name] = halves(state[name], dim)
        module.load_state_dict(state, assign=True)
        module.to(self.target.device, self.target.dtype).eval().requires_grad_(False)

    def first_layer(self) -> str:
        for name in _FIRST:
            if f"{name}.self_attn.q_proj.weight" in self.tensors:
                return name
        raise self.tensors.fault(
            "has neither 'midlayer.self_attn.q_proj.weight' nor "
            "'layers.0.self_attn.q_proj.weight': it is not an EAGLE head"
        )

    def later_layers(self) -> list[str]:
        """Layers after the first, under any of the names that engines use."""
        found: list[str] = []
        while True:
            index = len(found) + 1
            stems = (f"layers.{index}", f"midlayer.{index}", f"additional_layers.{index - 1}")
            stem = [name for name in stems if f"{name}.mlp.up_proj.weight" in self.tensors]
            if not stem:
                return found
            found.append(stem[0])

    def sizes(self, layer: str) -> LayerSizes:
        """A layer's dimensions, from tensor shapes and the number of heads."""
        shape, has = self.tensors.shape, self.tensors.__contains__
        names = [f"{layer}.self_attn.{part}_proj.weight" for part in "qko"]
        names.append(f"{layer}.mlp.gate_proj.weight")
        for name in names:
            if name not in self.tensors:
                raise self.tensors.fault(f"lacks tensor {name!r} (two dimensions)")
            if len(shape(name)) != 2 or 0 in shape(name):
                raise self.tensors.bad(
                    name, f"has shape {list(shape(name))}, expected two dimensions"
                )
        query, key, output, gate = (shape(name) for name in names)
        heads = self.config.number("num_attention_heads")
        head_dim = self.config.number("head_dim", max(1, query[0] // heads))
        if head_dim * heads != query[0] or key[0] % head_dim:
            raise fail(
                f"tensors {names[0]!r} {list(query)} and {names[1]!r} {list(key)} of "
                f"{str(self.folder)!r} do not fit {heads} heads of {head_dim} "
                "(num_attention_heads, head_dim)"
            )
        self.config.only("hidden_act", "silu", "swish", why="heads are run with silu")
        return LayerSizes(
            hidden_size=output[0],
            input_size=query[1],
            intermediate_size=gate[0],
            num_heads=heads,
            num_kv_heads=key[0] // head_dim,
            head_dim=head_dim,
            eps=self.config.real("rms_norm_eps", 1e-6),
            qkv_bias=has(f"{layer}.self_attn.q_proj.bias"),
            output_bias=has(f"{layer}.self_attn.o_proj.bias"),
            qk_norm=has(f"{layer}.self_attn.q_norm.weight"),
        )

    def rope(self, head_dim: int) -> Rope:
        """Rotary frequencies; the default base is 10000, for Llama-4 500000."""
        scaling = self.config.section("rope_parameters")
        scaling = scaling if scaling.values else self.config.section("rope_scaling")
        theta = scaling.real("rope_theta", _LLAMA4_THETA if self.is_llama4 else _THETA)
        theta = self.config.real("rope_theta", theta)
        kind = str(scaling.values.get("rope_type") or scaling.values.get("type") or "default")
        if kind not in SCALING:
            raise fail(
                f"rope_scaling of {str(self.folder)!r} is of type {kind!r}; allowed: "
                f"{', '.join(SCALING)}"
            )
        for key in SCALING[kind]:
            scaling.real(key)
        return Rope(head_dim, self.user.rope_theta or theta, {**scaling.values, "rope_type": kind})

    def no_rope_layers(self, num_layers: int) -> tuple[int, ...]:
        """Llama-4's layers without rotary positions: zeros in `no_rope_layers`."""
        turned = self.config.values.get("no_rope_layers")
        if not turned:
            interval = self.config.number("no_rope_layer_interval", 4)
            turned = [(layer + 1) % interval for layer in range(num_layers)]
        if not isinstance(turned, list) or len(turned) < num_layers:
            raise self.config.wrong(
                "no_rope_layers",
                f"a 1 (rotary positions) or 0 (none) for each of {num_layers} layers",
            )
        return tuple(layer for layer in range(num_layers) if not turned[layer])

    def temperature(self) -> Temperature | None:
        """Llama-4's scaling of queries in layers without rotary positions."""
        if not self.config.flag("attn_temperature_tuning", True):
            return None
        return Temperature(
            self.config.real("attn_scale", 0.1), self.config.real("floor_scale", 8192)
        )

    def embedding(self, width: int) -> int | None:
        """Rows of the head's own embedding; None if it uses the target's."""
        if "embed_tokens.weight" not in self.tensors:
            if width != self.target.hidden_size:
                raise self.tensors.fault(
                    f"lacks tensor 'embed_tokens.weight' of shape "
                    f"{[self.target.vocab_size, width]}, needed since the target's is "
                    f"{self.target.hidden_size} wide"
                )
            return None
        return self.target.vocab_size

    def vocabulary(self, hidden: int) -> tuple[int | None, Tensor | None]:
        """Rows of the output layer (None: the target's) and their target ids (None: the same)."""
        tensors, vocab = self.tensors, self.target.vocab_size
        size, ids = None, None
        if "lm_head.weight" in tensors:
            size = next(iter(tensors.shape("lm_head.weight")), 0)
            tensors.expect("lm_head.weight", size, hidden)
        elif hidden != self.target.hidden_size:
            raise self.tensors.fault(
                f"lacks tensor 'lm_head.weight' of width {hidden}, "
                f"needed since the target's output layer reads {self.target.hidden_size}"
            )
        elif "draft_vocab_size" in self.config and self.config.number("draft_vocab_size") != vocab:
            raise self.tensors.fault(
                "lacks tensor 'lm_head.weight', needed since its draft_vocab_size is "
                f"{self.config.number('draft_vocab_size')} and the target's vocabulary {vocab}"
            )
        if "d2t" in tensors:
            if size is None:
                raise self.tensors.fault("has 'd2t' but lacks tensor 'lm_head.weight'")
            ids = tensors.take_ids("d2t", size) + torch.arange(size)
            self._check_ids(ids, vocab)
        elif size is not None and size != vocab:
            raise self.tensors.bad(
                "lm_head.weight",
                f"has {size} rows, the target "
                f"{vocab} tokens, and there is no 'd2t' of shape [{size}] between them",
            )
        if "t2d" in tensors:
            known = tensors.take_ids("t2d", vocab).to(torch.bool)
            if ids is not None and not torch.equal(known.nonzero()[:, 0], ids):
                raise fail(f"tensors 't2d' and 'd2t' of {str(self.folder)!r} disagree")
        if not any(n in tensors for n in ("lm_head.weight", "embed_tokens.weight", "t2d")):
            self.config.check_vocabulary(vocab)
        return size, None if ids is None else ids.to(self.target.device)

    def _check_ids(self, ids: Tensor, vocab: int) -> None:  # [draft_vocab]
        """Checks that they are ids of the target, strictly ascending."""
        wrong = (ids < 0) | (ids >= vocab)
        wrong[1:] |= ids.diff() <= 0
        if bool(wrong.any()):
            index = int(wrong.nonzero()[0, 0])
            raise self.tensors.bad(
                "d2t",
                f"makes draft token {index} token {int(ids[index])}: outside the target's {vocab} "
                "tokens, or not above the one before; id = i + d2t[i] must rise within them",
            )


def _own_name(stored: str) -> str:
    """The reference's name of a stored tensor."""
    name = stored.removeprefix("model.").replace(".feed_forward.", ".mlp.")
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def read_eagle(config: EagleConfig, target: TargetFacts) -> EagleHead:
    """Loads the head of `config`'s folder.

    Raises:
        CheckpointError: a tensor or key is missing, superfluous, or does not fit the target.
        ConfigError: `config` sets an option that this head does not have.
    """
    reader = EagleReader(config, target)
    first = reader.first_layer()
    is_eagle3 = _is_eagle3(reader, first)
    if isinstance(config, Eagle3Config) and not is_eagle3:
        raise reader.tensors.fault(
            f"lacks tensor '{first}.hidden_norm.weight': it is EAGLE-1; use decoding_type Eagle"
        )
    return _eagle3(reader, first) if is_eagle3 else _eagle1(reader)


def _is_eagle3(reader: EagleReader, first: str) -> bool:
    """Whether any trace of EAGLE-3 is present, so that errors can name the missing tensors."""
    sizes = reader.sizes(first)
    return (
        f"{first}.hidden_norm.weight" in reader.tensors
        or not first.startswith("layers")
        or sizes.input_size != sizes.hidden_size
    )


def _eagle1(reader: EagleReader) -> EagleHead:
    tensors, config, hidden = reader.tensors, reader.config, reader.target.hidden_size
    reader.without("norm_before_residual", "EAGLE-1 has no normed feature")
    reader.without("eagle3_layers_to_capture", "EAGLE-1 reads the target's last state")
    why = "heads with a mixture of experts are not run; allowed: null, []"
    config.only("moe_layers", [], why=why)
    for key in ("yoco_global_kv_layer", "yoco_local_kv_layer"):
        config.only(key, why="heads whose layers share keys are not run; allowed: null")
    if reader.user.rope_layout is None:
        reader.interleaved = reader.is_llama4
    sizes = replace(reader.sizes("layers.0"), hidden_size=hidden, input_size=hidden)
    if reader.is_llama4:
        sizes = replace(sizes, unit_qk=config.flag("use_qk_norm", True))
    stems = ["layers.0", *reader.later_layers()]
    final_norm = "norm.weight" in tensors
    if not final_norm:
        reader.without("recycle", "it has no final norm")
    still = reader.no_rope_layers(len(stems)) if reader.is_llama4 else ()
    draft_vocab, target_ids = reader.vocabulary(hidden)
    with torch.device("meta"):
        module = Eagle1Module(
            sizes,
            len(stems),
            reader.rope(sizes.head_dim),
            fc_bias="fc.bias" in tensors,
            para_norm="hidden_states_layernorm.weight" in tensors,
            vocab_size=reader.embedding(hidden),
            draft_vocab_size=draft_vocab,
            input_norm="layers.0.input_layernorm.weight" in tensors,
            final_norm=final_norm,
            norm_output=final_norm and reader.recycles_normed(reader.is_llama4),
            no_rope_layers=still,
            temperature=reader.temperature() if still else None,
        )
    reader.fill(module, stems)
    return EagleHead(reader.user, module, (reader.target.num_layers,), target_ids)


def _eagle3(reader: EagleReader, first: str) -> EagleHead:
    target = reader.target
    sizes = reader.sizes(first)
    hidden = sizes.hidden_size
    capture, options = _features(reader, hidden)
    embedding = options.eh_proj or sizes.input_size - hidden
    stems = [first, *reader.later_layers()]
    draft_vocab, target_ids = reader.vocabulary(hidden)
    with torch.device("meta"):
        module = Eagle3Module(
            sizes,
            len(stems),
            reader.rope(sizes.head_dim),
            options,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=draft_vocab,
            vocab_size=reader.embedding(embedding),
        )
    reader.fill(module, stems)
    return EagleHead(reader.user, module, capture, target_ids)


def _features(reader: EagleReader, hidden: int) -> tuple[tuple[int, ...], Eagle3Options]:
    """The captured layers, and how their states are combined into one feature."""
    tensors, width = reader.tensors, reader.target.hidden_size
    capture = _capture(reader)
    count = len(capture)
    if "fc.weight" not in tensors and count == 1 and width == hidden:
        count = 0  # `use_aux_hidden_state` false: the state is the feature
    else:  # before the checks of the vocabulary: of another target this fails first
        tensors.expect("fc.weight", hidden, count * width)
    eh_proj = _embedding_width(reader)
    before = reader.user.norm_before_residual
    before = reader.flag("norm_before_residual") if before is None else before
    recycles_normed = reader.flag("return_hidden_post_norm")
    if "speculators_model_type" in reader.raw:  # elsewhere `norm_output` means another thing
        recycles_normed = recycles_normed or reader.flag("norm_output")
    return capture, Eagle3Options(
        num_features=count,
        norm_before_residual=before,
        fc_norm="fc_norm.0.weight" in tensors or reader.flag("fc_norm"),
        norm_before_fc="input_norm.weight" in tensors or reader.flag("norm_before_fc"),
        norm_output=reader.recycles_normed(recycles_normed),
        fc_bias="fc.bias" in tensors,
        eh_proj=eh_proj,
        eh_bias="eh_proj.bias" in tensors,
    )


def _embedding_width(reader: EagleReader) -> int:
    """Width of the embedding that `eh_proj` reads; 0: there is no `eh_proj`."""
    if "eh_proj.weight" not in reader.tensors and not reader.flag("eh_proj_before_attn"):
        return 0
    reader.without("norm_before_residual", "its first layer, after eh_proj, is like any other")
    shape = reader.tensors.shape("enorm.weight") if "enorm.weight" in reader.tensors else ()
    return next(iter(shape), reader.target.hidden_size)


def _capture(reader: EagleReader) -> tuple[int, ...]:
    """Layers whose inputs are captured; `eagle_config` and TensorRT-LLM list outputs instead."""
    num_layers, key = reader.target.num_layers, "eagle_aux_hidden_state_layer_ids"
    asked = reader.user.eagle3_layers_to_capture
    if asked is not None:
        if max(asked) >= num_layers - 1:
            name = "speculative_config.eagle3_layers_to_capture"
            raise ConfigError.at(
                name,
                f"{list(asked)} names layers that the target lacks: it has {num_layers} "
                f"layers; allowed are 0 to {num_layers - 2}, and -1 for the normed final state",
            )
        return tuple(num_layers if layer == -1 else layer + 1 for layer in asked)
    many = reader.config if "use_aux_hidden_state" in reader.config else reader.inner
    ids: tuple[int, ...] = (2, num_layers // 2, num_layers - 3)
    if inputs := reader.config.layers(key):
        ids = inputs
    elif outputs := reader.inner.layers(key):
        ids = tuple(layer + 1 for layer in outputs)
    elif not many.flag("use_aux_hidden_state", True):
        return (num_layers,)
    if not all(0 <= layer < num_layers for layer in ids):
        raise fail(
            f"{key} of {str(reader.folder)!r} names the inputs of layers {list(ids)}, but the "
            f"target has layers 0 to {num_layers - 1}; set eagle3_layers_to_capture to the layers "
            "whose outputs the head reads"
        )
    return ids


class EagleHead(TreeDraftingHead):
    """Runs the module over a step."""

    def __init__(
        self,
        config: EagleConfig,
        module: LlamaModule,
        capture: tuple[int, ...],  # target layers whose inputs are concatenated, in this order
        target_ids: Tensor | None,
    ) -> None:
        super().__init__(config)
        self.module, self.capture, self.target_ids = module, capture, target_ids
        self.layers = tuple(
            HeadLayer(sizes.num_kv_heads, sizes.head_dim, num_draft_rows=self.room)
            for sizes in module.layer_sizes
        )

    @property
    def outputs(self) -> tuple[nn.Linear, ...]:
        own = self.module.lm_head
        return () if own is None else (own,)

    def rows(self, step: HeadRows, host: HeadHost) -> tuple[Tensor, Tensor]:
        states = torch.cat([step.hidden[layer] for layer in self.capture], dim=-1)
        return self.module(
            self._embed(step.next_tokens, host),
            self.module.fuse(states),
            step.positions,
            step.attend,
        )

    def advance(
        self,
        level: int,
        token_ids: Tensor,  # [num_rows]
        feature: Tensor,  # [num_rows, hidden_size]
        positions: Tensor,  # [num_rows]
        attend: Attend,
        host: HeadHost,
    ) -> tuple[Tensor, Tensor]:  # [num_rows, hidden_size] each
        return self.module(self._embed(token_ids, host), feature, positions, attend)

    def _embed(self, token_ids: Tensor, host: HeadHost) -> Tensor:
        own = self.module.embed_tokens
        return host.embed(token_ids) if own is None else own(token_ids)
