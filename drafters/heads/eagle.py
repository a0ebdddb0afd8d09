"""EAGLE's modules: one or a few layers that predict the target's next feature, and so its token.

Row j consumes the target's feature f_j and the embedding of token j + 1, stores its keys and
values in token j's slot, and predicts token j + 2. While drafting, the head's own output replaces
the feature.

- EAGLE-1 (arXiv:2401.15077): f is the target's output after its final norm; the layer reads
  fc(embedding, f) without an input norm, and the target's output layer reads the result. EAGLE-2
  differs only in the tree. Llama-4's heads have both norms, and layers without rotary positions.
- EAGLE-3 (arXiv:2503.01840): f is fc over the inputs of three layers, low to high; the attention
  reads the concatenation of both normed halves; the output layer may cover a reduced vocabulary.
  Heads for Kimi-K2 attend over latents, as their target does.
- P-EAGLE (arXiv:2602.01469): EAGLE-3 whose later rows of a draft read the embedding of a mask token
  and a learnt state instead of features, so that all of them are computed at once.

In the worker, every computed token, including drafted nodes, gets a row in the target's slot. A
rejected node's row is freed with its slot, an accepted one's moves with it, and a cached prefix
includes its rows. A row depends on the following token, so blocks are shared only if the token
after them is equal too (`reach` in `config/section.py`). `tree_drafting.py` builds the draft.
P-EAGLE's drafts are one forward of rows of masks, and no row depends on a drafted token. These rows
lie in slots after the blocks, so no mask stays in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...config import Eagle3Config, EagleConfig, PEagleConfig
from ...errors import ConfigError
from ..vocabulary import MASK_KEYS
from .llama import Latents, LayerSizes, LlamaModule, RMSNorm, Rope, Temperature, yarn_scale
from .llama_files import LlamaReader, Origin
from .load import fail
from .protocol import (
    Attend,
    DraftStart,
    Entrance,
    FeatureModule,
    HeadHost,
    HeadLayer,
    HeadRows,
    TargetFacts,
    Trees,
)
from .tree_drafting import Level, TreeDraftingHead, best_first_tree, ranked

BESIDE = ("input_layernorm.", "hidden_norm.")
"""Norms of `Eagle3Module` before layer 0, which checkpoints store with layer 0's tensors."""


class Eagle1Module(LlamaModule):
    """EAGLE-1 and EAGLE-2.

    Args:
        options: options of `LlamaModule`, by default without norms; only Llama-4's heads set more
            than their own embedding.
    """

    def __init__(
        self,
        sizes: LayerSizes,
        num_layers: int,
        rope: Rope,
        *,
        fc_bias: bool,
        para_norm: bool = False,
        **options: Any,
    ) -> None:
        hidden = sizes.hidden_size
        options = {"input_norm": False, "final_norm": False, **options}
        super().__init__((sizes,) * num_layers, rope, embedding_size=hidden, **options)
        self.fc = nn.Linear(2 * hidden, hidden, bias=fc_bias)
        self.para_norm = para_norm
        if para_norm:
            self.embedding_layernorm = RMSNorm(hidden, sizes.eps)
            self.hidden_states_layernorm = RMSNorm(hidden, sizes.eps)

    def entrance(self) -> Entrance:
        if not self.para_norm:
            return Entrance(join=self.fc)
        norms = self.embedding_layernorm, self.hidden_states_layernorm
        return Entrance((), None, None, *norms, self.fc)


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """The published variants of EAGLE-3."""

    num_features: int = 3  # concatenated target states; 0: one state, without fc
    norm_before_residual: bool = False  # the residual is the normed feature
    fc_norm: bool = False  # a norm per captured state, before fc
    norm_before_fc: bool = False  # one norm over all of them
    norm_output: bool = False  # the next feature is the output after the final norm
    fc_bias: bool = False
    # Width of the embedding that `eh_proj` joins to the feature before a plain layer 0
    # (TensorRT-LLM's `eh_proj_before_attn`); 0: layer 0 reads both directly.
    eh_proj: int = 0
    eh_bias: bool = False
    mask_shape: tuple[int, ...] = ()  # shape of P-EAGLE's `mask_hidden`; (): there is none


class Eagle3Module(LlamaModule):
    """EAGLE-3 in its published variants."""

    def __init__(
        self,
        sizes: LayerSizes,  # of layer 0; the others read hidden_size
        num_layers: int,
        rope: Rope,
        options: Eagle3Options,
        *,
        target_hidden_size: int,
        draft_vocab_size: int | None,
        vocab_size: int | None = None,
    ) -> None:
        hidden, eps = sizes.hidden_size, sizes.eps
        width, count = target_hidden_size, options.num_features
        embedding_size = options.eh_proj or sizes.input_size - hidden
        later = replace(sizes, input_size=hidden)
        super().__init__(
            (later if options.eh_proj else sizes, *(later,) * (num_layers - 1)),
            rope,
            embedding_size=embedding_size,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            input_norm=bool(options.eh_proj),
            norm_output=options.norm_output,
        )
        self.options = options
        if options.eh_proj:
            self.enorm = RMSNorm(embedding_size, eps)
            self.eh_proj = nn.Linear(embedding_size + hidden, hidden, bias=options.eh_bias)
        else:
            self.input_layernorm = RMSNorm(embedding_size, eps)
            self.hidden_norm = RMSNorm(hidden, eps)
        if count:
            self.fc = nn.Linear(count * width, hidden, bias=options.fc_bias)
        if options.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(count))
        if options.norm_before_fc:
            self.input_norm = RMSNorm(count * width, eps)
        if options.mask_shape:
            self.mask_hidden = nn.Parameter(torch.zeros(options.mask_shape))

    def entrance(self) -> Entrance:
        options = self.options
        fuse = self.fc if options.num_features else None
        state_norms = tuple(self.fc_norm) if options.fc_norm else ()
        fused_norm = self.input_norm if options.norm_before_fc else None
        if options.eh_proj:
            return Entrance(state_norms, fused_norm, fuse, self.enorm, None, self.eh_proj)
        norms = self.input_layernorm, self.hidden_norm
        return Entrance(state_norms, fused_norm, fuse, *norms, None, options.norm_before_residual)

    def mask_feature(self) -> Tensor:  # [1, hidden_size]
        """The feature of P-EAGLE's masks, which stand for tokens without states of the target."""
        return self.fuse(self.mask_hidden.reshape(1, -1))


_RENAMED = {
    "fusion_fc.": "fc.",
    "pre_lm_head_layernorm.": "hidden_states_layernorm.",
    "transformer.": "layers.0.",  # the speculators library's older layout
    "draft_id_to_target_id": "d2t",  # offsets too
}
_LATENTS = "kv_a_proj_with_mqa"
_FIRST = ("midlayer", "layers.0", "midlayer.0")
_QUERIES = ("q_proj", "q_a_proj", _LATENTS)
_LLAMA4_THETA = 500_000.0
_REFUSED = {
    r".*\.mlp\.(experts|router|shared_expert)\..*": "a mixture of experts, which heads do not "
    "support; expected gate_proj, up_proj, down_proj",
    r"mask_embedding": "a head that drafts all tokens at once in another way than P-EAGLE's; use "
    "decoding_type DFlash or DSpark, or an EAGLE-3 head",
}
"""What tensors with these names belong to."""


class EagleReader(LlamaReader):
    """Tensors and configuration of a folder.

    Defaults that differ between engines are the reference's; the user can override the first three
    (`config/heads.py`):

    - a missing `rope_theta` means 10000 (the published trainers ignore the target's), but 500000
      in a Llama-4 head, as in its configuration class;
    - rotary pairs are halves of a head; in EAGLE-1's Llama-4 heads they are neighbours;
    - `norm_before_residual` and `norm_output` default to false;
    - `fc_norm` and `norm_before_fc` default to false.
    """

    def __init__(self, config: EagleConfig, target: TargetFacts) -> None:
        super().__init__(config, target, _RENAMED)
        self.user = config
        self.inner = self.raw.section("eagle_config")
        kind = str(self.config.values.get("model_type", ""))
        names = str(self.raw.values.get("architectures", ""))
        self.is_llama4 = kind.startswith("llama4") or "Llama4" in names
        if self.is_llama4:
            self.default_theta = _LLAMA4_THETA
        self.refuse(_REFUSED)
        if "mask_hidden" in self.tensors and not isinstance(config, PEagleConfig):
            raise self.tensors.bad(
                "mask_hidden",
                "belongs to a head that drafts all tokens at once (P-EAGLE); use decoding_type "
                "PEagle",
            )

    def flag(self, key: str) -> bool:
        """A boolean of the top level or of `eagle_config`."""
        return self.config.flag(key) or self.inner.flag(key)

    def recycles_normed(self, default: bool) -> bool:
        """Returns True if the next feature is the output after the final norm."""
        recycle = self.user.recycle
        return default if recycle is None else recycle == "post_norm"

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

        self.load(module, module.layer_sizes[0].head_dim, stored_name)

    def first_layer(self) -> str:
        for name in _FIRST:
            if any(f"{name}.self_attn.{part}.weight" in self.tensors for part in _QUERIES):
                return name
        raise self.tensors.fault(
            "has neither 'midlayer.self_attn.q_proj.weight' nor "
            "'layers.0.self_attn.q_proj.weight': it is not an EAGLE head"
        )

    def sizes(self, layer: str) -> LayerSizes:
        """Returns a layer's dimensions; raises as `LlamaReader.sizes` does."""
        if f"{layer}.self_attn.{_LATENTS}.weight" not in self.tensors:
            return super().sizes(layer)
        compressed = ("q_a_proj", "q_b_proj")
        is_compressed = f"{layer}.self_attn.{compressed[0]}.weight" in self.tensors
        query = compressed if is_compressed else ("q_proj", "q_proj")
        parts = (*query, _LATENTS, "kv_b_proj", "o_proj")
        names = [f"{layer}.self_attn.{part}.weight" for part in parts]
        names.append(f"{layer}.mlp.gate_proj.weight")
        self.require_matrices(names)
        first, queries, kept, expanded, output, gate = map(self.tensors.shape, names)
        heads, rank = self.config.number("num_attention_heads"), expanded[1]
        rotary_dim, head_dim, value_dim = kept[0] - rank, queries[0] // heads, output[1] // heads
        plain_dim = head_dim - rotary_dim
        if (
            rotary_dim < 2
            or rotary_dim % 2
            or plain_dim < 1
            or heads * head_dim != queries[0]
            or heads * value_dim != output[1]
            or heads * (plain_dim + value_dim) != expanded[0]
        ):
            shapes = (f"{name!r} {list(self.tensors.shape(name))}" for name in names[1:5])
            raise fail(
                f"tensors {', '.join(shapes)} of {str(self.folder)!r} do not fit together as an "
                f"attention over latents of {heads} heads (num_attention_heads)"
            )
        self.config.only("hidden_act", "silu", "swish", why="heads are run with silu")
        layout, by_file = self.user.rope_layout, self.config.flag("rope_interleave", True)
        return LayerSizes(
            hidden_size=output[0],
            input_size=kept[1],
            intermediate_size=gate[0],
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            eps=self.config.real("rms_norm_eps", 1e-6),
            qkv_bias=f"{layer}.self_attn.{_LATENTS}.bias" in self.tensors,
            output_bias=f"{layer}.self_attn.o_proj.bias" in self.tensors,
            latents=Latents(
                rank,
                first[0] if is_compressed else 0,
                rotary_dim,
                value_dim,
                neighbours=by_file if layout is None else layout == "interleaved",
            ),
        )

    def later_layers(self) -> list[str]:
        """Returns the layers after the first, under any of the names that engines use."""
        found: list[str] = []
        while True:
            index = len(found) + 1
            stems = (f"layers.{index}", f"midlayer.{index}", f"additional_layers.{index - 1}")
            stem = [name for name in stems if f"{name}.mlp.up_proj.weight" in self.tensors]
            if not stem:
                return found
            found.append(stem[0])

    def no_rope_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns Llama-4's layers without rotary positions: zeros in `no_rope_layers`."""
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
        """Returns Llama-4's scaling of queries in layers without rotary positions."""
        if not self.config.flag("attn_temperature_tuning", True):
            return None
        return Temperature(
            self.config.real("attn_scale", 0.1), self.config.real("floor_scale", 8192)
        )

    def mask(self, width: int) -> tuple[int, tuple[int, ...]]:
        """Returns P-EAGLE's mask token, and the shape of `mask_hidden`, whose width is `width`."""
        name, vocab = "mask_hidden", self.target.vocab_size
        shape: tuple[int, ...] = (1, width)
        if name not in self.tensors:
            raise self.tensors.fault(
                f"lacks tensor {name!r} of shape [1, 1, {width}]: it is no P-EAGLE head; use "
                "decoding_type Eagle3"
            )
        if len(self.tensors.shape(name)) != len(shape):
            shape = (1, *shape)  # the speculators library's shape
        self.tensors.expect(name, *shape)
        return self.mask_token(MASK_KEYS, self.config, limit=vocab), shape


def read_eagle(config: EagleConfig, target: TargetFacts) -> EagleHead:
    """Loads the head of `config`'s folder.

    Raises:
        CheckpointError: a tensor or key is missing, superfluous, or does not fit the target.
        ConfigError: `config` sets an option that this head does not have.
    """
    reader = EagleReader(config, target)
    first = reader.first_layer()
    is_eagle3 = _is_eagle3(reader, first)
    latents = f"{first}.self_attn.{_LATENTS}.weight"
    if latents in reader.tensors and (isinstance(config, PEagleConfig) or not is_eagle3):
        raise reader.tensors.bad(
            latents, "belongs to latent attention (MLA), which only EAGLE-3 heads may have"
        )
    if isinstance(config, Eagle3Config | PEagleConfig) and not is_eagle3:
        raise reader.tensors.fault(
            f"lacks tensor '{first}.hidden_norm.weight': it is EAGLE-1; use decoding_type Eagle"
        )
    return _eagle3(reader, first) if is_eagle3 else _eagle1(reader)


def _is_eagle3(reader: EagleReader, first: str) -> bool:
    """Returns True if any trace of EAGLE-3 is present, so that errors can name missing tensors."""
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
    head = EagleHead(reader.user, module, (reader.target.num_layers,), target_ids)
    head.origin = reader.origin
    return head


def _eagle3(reader: EagleReader, first: str) -> EagleHead:
    target = reader.target
    sizes = reader.sizes(first)
    rope = reader.rope(sizes.rotary_dim)
    if sizes.latents is not None:
        reader.interleaved = False  # the layer rotates pairs of either order itself
        scale = yarn_scale(reader.scaling, of_scores=True)
        sizes = replace(sizes, latents=replace(sizes.latents, scale=scale))
    hidden = sizes.hidden_size
    capture, options = _features(reader, hidden, has_latents=sizes.latents is not None)
    embedding = options.eh_proj or sizes.input_size - hidden
    is_parallel, mask_token = isinstance(reader.user, PEagleConfig), 0
    if is_parallel:
        reader.without("recycle", "P-EAGLE reads no output of its own")
        width = max(1, options.num_features) * target.hidden_size
        mask_token, shape = reader.mask(width)
        options = replace(options, mask_shape=shape)
    stems = [first, *reader.later_layers()]
    draft_vocab, target_ids = reader.vocabulary(hidden)
    with torch.device("meta"):
        module = Eagle3Module(
            sizes,
            len(stems),
            rope,
            options,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=draft_vocab,
            vocab_size=reader.embedding(embedding),
        )
    reader.fill(module, stems)
    if isinstance(reader.user, PEagleConfig):
        return PEagleHead(reader.user, module, capture, target_ids, mask_token)
    head = EagleHead(reader.user, module, capture, target_ids)
    head.origin = reader.origin
    return head


def _features(
    reader: EagleReader, hidden: int, *, has_latents: bool
) -> tuple[tuple[int, ...], Eagle3Options]:
    """Returns the captured layers, and how their states are combined into one feature."""
    tensors, width = reader.tensors, reader.target.hidden_size
    capture = _capture(reader)
    count = len(capture)
    if "fc.weight" not in tensors and count == 1 and width == hidden:
        count = 0  # `use_aux_hidden_state` false: the state is the feature
    else:  # checked before the vocabulary: a head of another target fails here first
        tensors.expect("fc.weight", hidden, count * width)
    eh_proj = _embedding_width(reader)
    before = reader.user.norm_before_residual
    before = reader.flag("norm_before_residual") if before is None else before
    recycles_normed = reader.flag("return_hidden_post_norm")
    # In other layouts, `norm_output` has another meaning.
    if "speculators_model_type" in reader.raw or has_latents:
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
    """Returns the width of the embedding that `eh_proj` reads; 0 if there is no `eh_proj`."""
    if "eh_proj.weight" not in reader.tensors and not reader.flag("eh_proj_before_attn"):
        return 0
    reader.without("norm_before_residual", "its first layer, after eh_proj, is like any other")
    shape = reader.tensors.shape("enorm.weight") if "enorm.weight" in reader.tensors else ()
    return next(iter(shape), reader.target.hidden_size)


def _capture(reader: EagleReader) -> tuple[int, ...]:
    """Returns layers whose inputs are captured; `eagle_config` and TensorRT-LLM list outputs."""
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

    origin: Origin | None = None  # of its weights

    def __init__(
        self,
        config: EagleConfig,
        module: LlamaModule,
        capture: tuple[int, ...],  # target layers whose inputs are concatenated, in this order
        target_ids: Tensor | None,
    ) -> None:
        super().__init__(config)
        self.module, self.capture, self.target_ids = module, capture, target_ids
        self.only_module: FeatureModule | None = module
        self.layers = tuple(
            HeadLayer(sizes.num_kv_heads, sizes.head_dim, sizes.value_dim, self.room)
            for sizes in module.layer_sizes
        )

    @property
    def outputs(self) -> tuple[nn.Linear, ...]:
        own = self.module.lm_head
        return () if own is None else (own,)

    def published(self) -> dict[str, Tensor] | None:
        """Returns its weights by the names of its checkpoint; None: it has none."""
        return None if self.origin is None else self.origin.published(self.module)

    def rows(self, step: HeadRows, host: HeadHost) -> tuple[Tensor, Tensor]:
        states = torch.cat([step.hidden[layer] for layer in self.capture], dim=-1)
        return self.module(
            self._embed(step.next_tokens, host),
            self.module.fuse(states),
            step.positions,
            step.attend,
        )

    def advance(
        self, level: int, token_ids: Tensor, feature: Tensor, positions: Tensor, attend: Attend,
        host: HeadHost,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return self.module(self._embed(token_ids, host), feature, positions, attend)

    def _embed(self, token_ids: Tensor, host: HeadHost) -> Tensor:
        own = self.module.embed_tokens
        return host.embed(token_ids) if own is None else own(token_ids)


class PEagleHead(EagleHead):
    """Drafts from one forward of masks; positions are independent given the text.

    Level 0 is the last committed row's output, as in other heads; level d is the output of mask d
    after it. All nodes of a level share its distribution, whatever the shape of the tree, so the
    best tree needs no further forward.
    """

    module: Eagle3Module

    def __init__(
        self,
        config: PEagleConfig,
        module: Eagle3Module,
        capture: tuple[int, ...],
        target_ids: Tensor | None,
        mask_token: int,
    ) -> None:
        super().__init__(config, module, capture, target_ids)
        self.branches, self.room = False, config.draft_len - 1  # rows of masks are a chain
        self.only_module = None
        self.layers = tuple(replace(each, num_draft_rows=self.room) for each in self.layers)
        self._num_best = config.max_nodes if config.shape == "tree" else 0
        self._mask_token = mask_token
        self._mask_feature = module.mask_feature()

    def expand(self, start: DraftStart, depth: int, host: HeadHost) -> Trees:
        num_levels = self._config.draft_len
        num_masks = (num_levels if self.is_tree else min(depth, num_levels)) - 1
        ahead = self._masks(start, num_masks, host) if num_masks else start.read[:, None]
        if self._num_best:
            levels = torch.cat([start.read[:, None], ahead], dim=1)  # the last is not used alone
            return best_first_tree(
                lambda level, _: self._likeliest(levels[:, level : level + 1], host),
                start.emitted,
                num_levels,
                self._num_best,
            )
        return super().expand(replace(start, feature=ahead.flatten(1)), depth, host)

    def _likeliest(
        self,
        read: Tensor,  # [num_drafts, 1, hidden_size]
        host: HeadHost,
    ) -> tuple[Tensor, Tensor]:  # [num_drafts, 1, num_ranks] each
        best, columns = ranked(self._logits(read, host), self._num_best)
        return best, self._ids(columns)

    def _masks(
        self, start: DraftStart, num_masks: int, host: HeadHost
    ) -> Tensor:  # [num_drafts, num_masks, hidden_size]
        """Returns the output layer's input of masks behind every last row."""
        assert start.levels is not None, "there is room for masks"
        num_drafts = len(start.base)
        count = num_drafts * num_masks
        attend = start.levels.chain(num_masks)
        embedded = self._embed(start.base.new_full((1,), self._mask_token), host)
        _, read = self.module(
            embedded.expand(count, -1).contiguous(),
            start.feature.new_empty(count, start.feature.shape[1]).copy_(self._mask_feature),
            attend.positions,
            attend,
        )
        return read.unflatten(0, (num_drafts, num_masks))

    def _advance(
        self, start: DraftStart, state: Level, tokens: Tensor, above: Tensor | None, host: HeadHost,
    ) -> Level:  # fmt: skip
        size = start.read.shape[1]
        begin = state.depth * size
        return Level(state.feature, state.feature[:, :, begin : begin + size], state.depth + 1)
