"""PARD-2: a small model with masks that reads states of the target (arXiv:2605.08632).

The input of token t's row is the sum of the token's embedding and the feature of token t - 1, which
is a projection of the target's states there. The first token uses the projection of zeros. A draft
is one forward of the last emitted token and masks behind it, all with the feature of the last token
that has one; row k predicts the next token.

Every computed token, including drafted nodes, stores its keys, values and feature in the target's
slot; the next token's row reads the feature. A rejected node's are freed with its slot, an accepted
one's move with it, and a cached prefix includes them. The rows of a draft lie in slots after the
blocks, so no mask stays in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from ...config import PARD2Config
from ...errors import ConfigError
from ..vocabulary import MASK_KEYS, PROJECTION_FILE, reads_states
from .llama import LayerSizes, LlamaModule, Rope
from .llama_files import LlamaReader
from .load import Tensors
from .protocol import (
    DraftStart,
    Entrance,
    FeatureModule,
    HeadHost,
    HeadLayer,
    HeadRows,
    TargetFacts,
    Trees,
)
from .tree_drafting import a_token_earlier, best_first_tree, ranked

KINDS = ("llama", "qwen2", "qwen3")  # model types whose layers are those of `llama.py`
PROJECTION = "target_proj"
_LAYER_KEYS = ("pard2_target_layers", "target_layers")
_SCALE_KEYS = ("pard2_scale", "pard_scale", "feat_scale")
_BIAS_KEYS = ("pard2_proj_bias", "proj_bias")
SCALE = 0.02  # of a checkpoint that does not name one
_FOUR = (-1, -8, -16, -24)  # layers of a checkpoint that does not name them and reads four states


class PARD2Module(LlamaModule):
    """The model, its embedding and output layer, and the projection of the target's states."""

    def __init__(
        self,
        sizes: LayerSizes,
        num_layers: int,
        rope: Rope,
        *,
        num_features: int,  # number of the target's states
        bias: bool,
        scale: float,  # of the projection
        vocab_size: int,
        draft_vocab_size: int,
    ) -> None:
        super().__init__(
            (sizes,) * num_layers,
            rope,
            embedding_size=sizes.hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
        )
        self.scale = scale
        self.target_proj = nn.Linear(num_features, sizes.hidden_size, bias=bias)

    def entrance(self) -> Entrance:
        return Entrance(adds=True)

    def fuse(self, features: Tensor) -> Tensor:
        return self.target_proj(features) * self.scale


class PARD2Reader(LlamaReader):
    """Tensors and configuration of a model's folder, with the projection in a separate file."""

    def __init__(self, config: PARD2Config, target: TargetFacts) -> None:
        super().__init__(config, target, {})
        self.user = config
        why = f"drafts by PARD-2 are computed for models of {', '.join(KINDS)}"
        self.config.only("model_type", *KINDS, why=why)
        self.config.only("use_sliding_window", False, why="layers with a window are not run")
        self.config.only("mlp_bias", False, why="biases of an MLP are not run")

    @cached_property
    def warp(self) -> Tensors:
        """The projection's tensors."""
        if not reads_states(self.folder):
            raise self.tensors.fault(
                f"has no {PROJECTION_FILE}.bin, which projects the target's states: it is no "
                "checkpoint of PARD-2; use decoding_type PARD, or DraftTarget"
            )
        device, allow_pickle = self.target.device, self.target.allow_pickle
        return Tensors(self.folder, (PROJECTION_FILE,), device=device, allow_pickle=allow_pickle)

    @property
    def num_layers(self) -> int:
        count = 0
        while f"layers.{count}.self_attn.q_proj.weight" in self.tensors:
            count += 1
        return count

    def capture(self) -> tuple[int, ...]:
        """Returns target layers whose inputs are read, in order; num_layers is the final state."""
        count, asked = self.target.num_layers, self.user.pard2_target_layers
        found = next((key for key in _LAYER_KEYS if key in self.config), None)
        if asked is not None:
            layers = asked
        elif found is not None:
            layers = self.config.layers(found)
        else:
            layers = _FOUR if self.width == len(_FOUR) * self.target.hidden_size else _FOUR[:1]
        if asked is not None:
            return states_of(asked, count, "speculative_config.pard2_target_layers")
        try:
            return states_of(layers, count, found or _LAYER_KEYS[0])
        except ConfigError:
            raise self.config.wrong(found or _LAYER_KEYS[0], _states(count)) from None

    @property
    def width(self) -> int:
        """Input size of the projection."""
        name = f"{PROJECTION}.weight"
        shape = self.warp.shape(name) if name in self.warp else ()
        return shape[-1] if len(shape) == 2 else 0

    def scale(self) -> float:
        """Factor of the projection."""
        if self.user.pard2_scale is not None:
            return self.user.pard2_scale
        key = next((key for key in _SCALE_KEYS if key in self.config), _SCALE_KEYS[0])
        return self.config.real(key, SCALE)

    def projection(self, hidden: int, num_states: int) -> dict[str, Tensor]:
        """Returns the projection's tensors by the module's names."""
        shapes: dict[str, tuple[int, ...]] = {
            "weight": (hidden, num_states * self.target.hidden_size)
        }
        if self.has_bias:
            shapes["bias"] = (hidden,)
        names = {f"{PROJECTION}.{part}": shape for part, shape in shapes.items()}
        taken = {name: self.warp.take(name, *shape) for name, shape in names.items()}
        self.warp.finish()
        return taken

    @property
    def has_bias(self) -> bool:
        """Whether the projection has a bias."""
        key = next((key for key in _BIAS_KEYS if key in self.config), _BIAS_KEYS[0])
        return self.config.flag(key)

    def ends(self, hidden: int) -> tuple[Tensor, Tensor]:
        """Returns the embedding [at least the target's vocabulary, hidden] and the output layer.

        Rows of the output layer without a token of the target are left out.
        """
        vocab, name, own = self.target.vocab_size, "embed_tokens.weight", "lm_head.weight"
        for each in (name, own):
            shape = self.tensors.shape(each) if each in self.tensors else (vocab, hidden)
            if len(shape) != 2 or shape[0] < vocab:
                raise self.tensors.bad(
                    each,
                    f"has shape {list(shape)}, expected at least {vocab} rows, the target's "
                    "vocabulary: it is a draft model of another target",
                )
        rows = self.tensors.shape(name)[0] if name in self.tensors else vocab
        table = self.tensors.take(name, rows, hidden)
        if own in self.tensors:
            return table, self.tensors.take(own, self.tensors.shape(own)[0], hidden)[:vocab]
        if not self.config.flag("tie_word_embeddings", True):
            raise self.tensors.fault(
                f"lacks tensor {own!r} of shape {[vocab, hidden]}, and tie_word_embeddings is false"
            )
        return table, table[:vocab]


def states_of(layers: Sequence[int], num_layers: int, field: str) -> tuple[int, ...]:
    """Returns layers whose inputs are the target's states `layers`; `num_layers` is the final one.

    Raises:
        ConfigError: the target lacks one; names `field`.
    """
    if all(-num_layers <= layer + 1 <= num_layers + 1 for layer in layers):
        return tuple(layer if layer >= 0 else layer + 1 + num_layers for layer in layers)
    raise ConfigError.at(field, f"{list(layers)} are not {_states(num_layers)}")


def _states(count: int) -> str:
    return (
        f"states of a target of {count} layers: 0, the embedding, to {count}, the final one, "
        f"or from the end -1 to {-count - 1}"
    )


def read_pard2(config: PARD2Config, target: TargetFacts) -> PARD2Head:
    """Loads the model of `config`'s folder.

    Raises:
        CheckpointError: a tensor or key is missing, superfluous, or does not fit the target.
        ConfigError: `config` names layers or a mask token that do not exist.
    """
    reader = PARD2Reader(config, target)
    sizes = reader.sizes("layers.0")
    hidden, capture = sizes.hidden_size, reader.capture()
    projection = reader.projection(hidden, len(capture))
    table, output = reader.ends(hidden)
    mask = reader.mask_token(MASK_KEYS, reader.config, limit=len(table))
    with torch.device("meta"):
        module = PARD2Module(
            sizes,
            reader.num_layers,
            reader.rope(sizes.head_dim),
            num_features=len(capture) * target.hidden_size,
            bias=reader.has_bias,
            scale=reader.scale(),
            vocab_size=len(table),
            draft_vocab_size=target.vocab_size,
        )
    ends = {"embed_tokens.weight": table, "lm_head.weight": output}
    reader.load(module, sizes.head_dim, beside=projection | ends)
    if "lm_head.weight" not in reader.tensors:  # one shared table, also on a device
        assert module.embed_tokens is not None, "it is the model's own"
        assert module.lm_head is not None, "it is the model's own"
        tied = module.embed_tokens.weight[: target.vocab_size]
        module.lm_head.weight = nn.Parameter(tied, requires_grad=False)
    return PARD2Head(config, module, capture, mask)


class PARD2Head:
    """Runs the model over a step, and over every draft's token and masks."""

    branches = False  # a draft's rows are a chain, whatever the shape of the draft
    reads_device_only = has_chances = False
    only_module: FeatureModule | None = None
    target_ids: Tensor | None = None

    def __init__(
        self, config: PARD2Config, module: PARD2Module, capture: tuple[int, ...], mask_token: int
    ) -> None:
        self.module, self.capture, self._mask_token = module, capture, mask_token
        self.room = self._length = config.draft_len
        # Nodes of a best-first tree; 0: drafts are chains.
        self._num_best = config.max_nodes if config.shape == "tree" else 0
        # The model's layers, then the stored features.
        self.layers: tuple[HeadLayer, ...] = (
            *(
                HeadLayer(sizes.num_kv_heads, sizes.head_dim, num_draft_rows=self.room)
                for sizes in module.layer_sizes
            ),
            HeadLayer(1, module.hidden_size, 0),
        )
        size, weight = module.target_proj.in_features, module.target_proj.weight
        self._first = module.fuse(weight.new_zeros(1, size))  # read at the first token

    @property
    def outputs(self) -> Sequence[nn.Linear]:
        own = self.module.lm_head
        return () if own is None else (own,)

    def rows(self, step: HeadRows, host: HeadHost) -> tuple[Tensor, Tensor]:
        assert step.attend is not None, "it has layers"
        assert step.earlier is not None, "rows read features of the token before"
        feature = self.module.fuse(torch.cat([step.hidden[each] for each in self.capture], dim=-1))
        before = a_token_earlier(len(self.layers) - 1, feature, step.earlier(), host)
        before = torch.where((step.positions == 0)[:, None], self._first, before)
        self.module(self._embed(step.tokens), before, step.positions, step.attend)
        return feature, feature[:, :0]

    def expand(self, start: DraftStart, depth: int, host: HeadHost) -> Trees:
        if not self._num_best:
            return Trees(start.draw(self._read(start, min(depth, self._length)), 0), None)
        read = self._read(start, self._length)
        logits = host.draft_logits(read.flatten(0, 1)).unflatten(0, read.shape[:2])
        return best_first_tree(
            lambda level, _: ranked(logits[:, level, None], self._num_best),
            start.emitted,
            self._length,
            self._num_best,
        )

    def _read(self, start: DraftStart, width: int) -> Tensor:
        """Returns the output layer's input of a draft's rows: [num_drafts, width, hidden_size]."""
        assert start.levels is not None, "there is room for a draft"
        attend, count = start.levels.chain(width), len(start.emitted)
        ids = start.emitted[:, None]
        ids = torch.cat([ids, ids.new_full((1, 1), self._mask_token).expand(count, width - 1)], 1)
        feature = start.feature.repeat_interleave(width, dim=0)
        _, read = self.module(self._embed(ids.flatten()), feature, attend.positions, attend)
        return read.unflatten(0, (count, width))

    def _embed(self, token_ids: Tensor) -> Tensor:
        own = self.module.embed_tokens
        assert own is not None, "it is the model's own"
        return own(token_ids)
