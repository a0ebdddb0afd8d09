"""DFlash and DSpark in the worker: context rows for committed tokens, and a block for each draft.

Every computed token, including drafted nodes, gets a row of keys and values (`dflash.py`) in the
target's slot, which depends only on its own states. A rejected node's row is freed with its slot,
an accepted one's moves with it, and a cached prefix includes its rows. The rows of a block lie in
slots after the blocks, so no mask stays in the cache.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...config import BlockConfig, DSparkConfig
from ...errors import ConfigError
from ..vocabulary import MASK_KEYS
from .dflash import BlockModule, BlockOptions, Convolutions, even_layers, views_of
from .llama_files import LlamaReader
from .load import fail
from .protocol import DraftStart, FeatureModule, HeadHost, HeadLayer, HeadRows, TargetFacts, Trees
from .tree_drafting import best_first_tree, ranked

_RENAMED = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "midlayer.": "layers.0.",
    "draft_id_to_target_id": "d2t",  # offsets too
}
_REFUSED = {
    r"mask_hidden": "P-EAGLE; use decoding_type PEagle",
    r".*\.attention_sink_bias|.*\.sinks": "attention with sinks, which block drafters do not "
    "support",
    r".*\.mlp\.(experts|router|shared_expert)\..*": "a mixture of experts, which heads do not "
    "support; expected gate_proj, up_proj, down_proj",
    r"(prefix_gru|embed_proj)\..*": "Domino, which is not implemented",
    r"markov_head\.(?!markov_w[12]\.weight).*": "a gated or recurrent Markov head, which is not "
    "implemented; expected markov_w1.weight and markov_w2.weight",
}
_MASK_FILE = "mask_embedding.pt"
_SLIDING = "sliding_attention"
_BLOCK_SIZE = 8  # of a checkpoint that does not name one, as in the speculators library


class BlockReader(LlamaReader):
    """Tensors and configuration of a folder, in z-lab's or the speculators library's layout.

    Where trainers and engines disagree, the user can override these defaults (`config/heads.py`):

    - `target_layer_ids` name layers whose outputs are read; `aux_hidden_state_layer_ids`, of the
      speculators library, name layers whose inputs are read;
    - layers with a window are causal within the block, and others are not, unless `is_causal` or
      `dflash_config.causal` is set; in transformers' `muse_glimmer_assistant`, none is causal;
    - a missing `rope_theta` means 1000000, as in Qwen3's configuration class, or 500000 in
      `muse_glimmer_assistant`.
    """

    default_theta = 1_000_000.0

    def __init__(self, config: BlockConfig, target: TargetFacts) -> None:
        super().__init__(config, target, _RENAMED)
        self.user = config
        self.inner = self.raw.section("dflash_config")
        self.refuse(_REFUSED)
        if self.config.values.get("projector_type") == "domino":
            raise fail(f"{str(self.folder)!r} is a checkpoint of Domino, which is not implemented")
        self.is_muse = self.config.values.get("model_type") == "muse_glimmer_assistant"
        if self.is_muse:
            self.default_theta = 500_000.0
        if not config.rope_layout and not self.config.flag("is_neox_style", True):
            self.interleaved = True

    @property
    def num_layers(self) -> int:
        count = 0
        while f"layers.{count}.self_attn.q_proj.weight" in self.tensors:
            count += 1
        if not count or "fc.weight" not in self.tensors:
            name = "fc.weight" if count else "layers.0.self_attn.q_proj.weight"
            raise self.tensors.fault(f"lacks tensor {name!r}: it is no block drafter")
        return count

    @property
    def block_size(self) -> int:
        reader = self.config if "block_size" in self.config else self.inner
        return reader.number("block_size", _BLOCK_SIZE)

    @property
    def from_anchor(self) -> bool:
        """Whether a block's first row drafts too, as in DSpark."""
        if self.user.sample_from_anchor is not None:
            return self.user.sample_from_anchor
        return self.config.flag("sample_from_anchor", isinstance(self.user, DSparkConfig))

    def capture(self, num_layers: int) -> tuple[int, ...]:
        """Returns target layers whose inputs are read, in order; the last output is normed."""
        count, asked = self.target.num_layers, self.user.target_layer_ids
        if asked is not None:
            name, outputs = "speculative_config.target_layer_ids", asked
        elif outputs := self.inner.layers("target_layer_ids"):
            name = "target_layer_ids of dflash_config"
        elif outputs := self.config.layers("target_layer_ids"):
            name = "target_layer_ids"
        elif inputs := self.config.layers("aux_hidden_state_layer_ids"):
            name, outputs = "aux_hidden_state_layer_ids", tuple(each - 1 for each in inputs)
        else:
            # The speculators library's default, as outputs; z-lab's is evenly spaced.
            name, outputs = "the default of target_layer_ids", even_layers(count, num_layers)
            if "speculators_model_type" in self.raw:
                outputs = tuple(each - 1 for each in (2, count // 2, count - 3))
        # A final state is normed, others are not; an input of layer 0 is the embedding.
        if all(-1 <= layer < count for layer in outputs):
            return tuple(layer + 1 for layer in outputs)
        message = (
            f"{name} names the outputs of layers {list(outputs)}, but the target has layers 0 to "
            f"{count - 1}"
        )
        if asked is not None:
            raise ConfigError.at(name, message)
        raise fail(f"{message}; of {str(self.folder)!r}: is it a head of another target?")

    def views(self, num_layers: int) -> Any:
        """Returns what the rows of each layer see."""
        kinds = self.config.values.get("layer_types") or ["full_attention"] * num_layers
        if not isinstance(kinds, list) or len(kinds) < num_layers:
            raise self.config.wrong("layer_types", f"a kind for each of {num_layers} layers")
        sliding = [kind == _SLIDING for kind in kinds[:num_layers]]
        if self.inner.flag("use_swa") and not any(sliding):
            sliding = [True] * num_layers
        window = None
        if any(sliding):
            inner = "swa_window_size" in self.inner
            window = (
                self.inner.number("swa_window_size")
                if inner
                else self.config.number("sliding_window")
            )
        causal = self.user.causal
        for reader, key in (
            (self.config, "is_causal"),
            (self.inner, "causal"),
            (self.inner, "causal_head"),
        ):
            if causal is None and key in reader:
                causal = reader.flag(key)
        across = self.config.flag("sliding_window_non_causal") or self.is_muse
        views = views_of(sliding, window, causal=causal, causal_windows=not across)
        if (limit := self.user.draft_window) is None:
            return views
        return tuple(replace(view, window=min(view.window or limit, limit)) for view in views)

    def convolutions(self, hidden: int) -> Convolutions | None:
        """Returns the sizes of DFlash2's convolutions; None if there are none."""
        if "layers.0.attention_conv.base_kernel" not in self.tensors:
            return None
        shape = self.tensors.shape("layers.0.attention_conv.base_kernel")
        taps = shape[1] if len(shape) == 3 else 0
        source = self.inner if "conv_group_size" in self.inner else self.config
        group = source.number("conv_group_size", 16)
        if not taps or hidden % group:
            raise self.tensors.bad(
                "layers.0.attention_conv.base_kernel",
                f"has shape {list(shape)}, expected [2, taps, {hidden}], with groups of "
                f"{group} channels (conv_group_size)",
            )
        return Convolutions(taps, group)

    def selector(self) -> tuple[int, int] | None:
        """Returns rank and number of candidates of DFlash2's selector, if there is one."""
        name = "candidate_selector.predecessor_codebook"
        if name not in self.tensors:
            return None
        source = self.inner if "selector_top_k" in self.inner else self.config
        shape = self.tensors.shape(name)
        return shape[-1], source.number("selector_top_k", 16)

    def markov_rank(self) -> int:
        """Rank of the Markov head; 0: there is none."""
        self.config.only(
            "markov_head_type", "vanilla", why="only the kind 'vanilla' is implemented"
        )
        name = "markov_head.markov_w1.weight"
        return self.tensors.shape(name)[-1] if name in self.tensors else 0

    def mask_embedding(self, hidden: int) -> Tensor | None:
        """Returns the masks' embedding if it is in a separate file."""
        file = self.folder / _MASK_FILE
        if not file.is_file():
            return None
        if not self.target.allow_pickle:
            raise fail(
                f"{str(file)!r} is in torch's own format, which is read with allow_pickle: true"
            )
        try:
            held: Any = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, OSError, EOFError, RuntimeError) as error:
            raise fail(f"{str(file)!r} cannot be read: {str(error).partition('. ')[0]}") from None
        if isinstance(held, dict):
            held = held.get("embedding")
        if not isinstance(held, Tensor) or held.numel() != hidden or not held.is_floating_point():
            raise fail(f"{str(file)!r} must hold the embedding of masks, {hidden} numbers")
        return held.reshape(-1)

    def embedding(self, width: int) -> int | None:
        """Returns the rows of the head's own embedding; they may exceed the target's tokens."""
        name, vocab = "embed_tokens.weight", self.target.vocab_size
        if name not in self.tensors or self.tensors.shape(name)[0] < vocab:
            return super().embedding(width)
        return self.tensors.shape(name)[0]

    def output(self, hidden: int) -> tuple[int | None, Tensor | None]:
        """Does the same as `vocabulary`; without `lm_head.weight`, a `d2t` is ignored.

        Such files are published for heads that draft with the target's output layer.
        """
        asked, own = self.user.output_layer, "lm_head.weight" in self.tensors
        key = "speculative_config.output_layer"
        if asked == "own" and not own:
            what = f"'own', but {str(self.folder)!r} has no tensor 'lm_head.weight'"
            raise ConfigError.at(key, what)
        if asked == "target" and hidden != self.target.hidden_size:
            raise ConfigError.at(
                key,
                f"'target', whose output layer reads {self.target.hidden_size} numbers, but "
                f"the head is {hidden} wide",
            )
        if asked == "own" or (asked is None and own):
            return self.vocabulary(hidden)
        if not own:
            self.check_target_output(hidden)
        for name in ("lm_head.weight", "d2t", "t2d"):
            if name in self.tensors:
                self.tensors.reader(name)
        return None, None


def read_block(config: BlockConfig, target: TargetFacts) -> BlockHead:
    """Loads the head of `config`'s folder.

    Raises:
        CheckpointError: a tensor or key is missing, superfluous, or does not fit the target.
        ConfigError: `config` sets an option that this head does not have.
    """
    reader = BlockReader(config, target)
    num_layers = reader.num_layers
    sizes = reader.sizes("layers.0")
    hidden = sizes.hidden_size
    capture = reader.capture(num_layers)
    _check_features(reader, capture, hidden)
    options = _options(reader, num_layers, hidden, len(capture))
    rows = reader.embedding(hidden)
    mask, own_mask = 0, reader.mask_embedding(hidden) if options.own_mask else None
    if not options.own_mask:
        keys = (reader.inner, reader.config)
        mask = reader.mask_token(MASK_KEYS, *keys, limit=rows or target.vocab_size)
    draft_vocab, target_ids = reader.output(hidden)
    with torch.device("meta"):
        module = BlockModule(
            sizes,
            num_layers,
            reader.rope(sizes.head_dim),
            options,
            target_hidden_size=target.hidden_size,
            target_vocab_size=target.vocab_size,
            vocab_size=rows,
            draft_vocab_size=draft_vocab,
        )
    beside = {} if own_mask is None else {"mask_embedding": own_mask.to(target.device)}
    reader.load(module, sizes.head_dim, beside=beside)
    return BlockHead(config, module, capture, target_ids, mask, _length(reader, options))


def _check_features(reader: BlockReader, capture: tuple[int, ...], hidden: int) -> None:
    """Checks `fc` before the rest, since a head of another target fails there."""
    shape, width = reader.tensors.shape("fc.weight"), reader.target.hidden_size
    if shape != (hidden, len(capture) * width):
        raise reader.tensors.bad(
            "fc.weight",
            f"has shape {list(shape)}, expected {[hidden, len(capture) * width]}: {len(capture)} "
            f"layers of the target's width {width} (target_layer_ids)",
        )


def _options(reader: BlockReader, num_layers: int, hidden: int, count: int) -> BlockOptions:
    """Returns the variant, according to the tensors that are present."""
    is_spark = isinstance(reader.user, DSparkConfig)
    markov, selector = reader.markov_rank(), reader.selector()
    confidence = (
        reader.tensors.shape("confidence_head.proj.weight")
        if ("confidence_head.proj.weight" in reader.tensors)
        else (0,)
    )
    if is_spark and not markov:
        raise reader.tensors.fault(
            "lacks tensor 'markov_head.markov_w1.weight': it is not DSpark; use decoding_type "
            "DFlash"
        )
    if markov and not is_spark:
        raise reader.tensors.bad(
            "markov_head.markov_w1.weight", "belongs to DSpark; use decoding_type DSpark"
        )
    softcap = reader.inner.values.get("final_logit_softcapping")
    scales = {
        name: reader.inner.real(key, 1.0)
        for name, key in (
            ("embedding_scale", "input_embedding_scale"),
            ("output_scale", "output_multiplier"),
        )
    }
    file = (reader.folder / _MASK_FILE).is_file()
    return BlockOptions(
        reader.views(num_layers),
        count,
        from_anchor=reader.from_anchor,
        softcap=reader.inner.real("final_logit_softcapping") if softcap else None,
        own_mask=file or ("mask_embedding" in reader.tensors and not is_spark),
        convolutions=reader.convolutions(hidden),
        selector=selector,
        markov_rank=markov,
        confidence=confidence != (0,),
        confidence_reads_markov=confidence[-1] != hidden,
        **scales,
    )


def _length(reader: BlockReader, options: BlockOptions) -> int:
    """Returns the tokens of a draft: the section's, or those of the checkpoint's block."""
    most = reader.block_size if options.from_anchor else reader.block_size - 1
    asked = reader.user.max_draft_len
    if asked and asked > most:
        raise ConfigError.at(
            "speculative_config.max_draft_len",
            f"{asked} is more than the {most} tokens that a block of {str(reader.folder)!r} "
            f"drafts (block_size {reader.block_size})",
        )
    return min(reader.user.draft_len, most)


class BlockHead:
    """Runs the module over a step, and over the block of every draft."""

    branches = True  # rows of a block may see all others
    reads_device_only = True
    only_module: FeatureModule | None = None

    def __init__(
        self,
        config: BlockConfig,
        module: BlockModule,
        capture: tuple[int, ...],  # target layers whose inputs are concatenated, in this order
        target_ids: Tensor | None,
        mask_token: int,
        length: int,  # of a draft
    ) -> None:
        self.module, self.capture, self.target_ids = module, capture, target_ids
        self.mask_token, self._length = mask_token, length
        # Nodes of a best-first tree; 0: drafts are chains.
        self.num_best = config.max_nodes if config.shape == "tree" else 0
        # Confidences apply to drawn tokens; at most one node of a tree is drawn.
        self.has_chances = module.confidence_head is not None and not self.num_best
        self.room = module.width(length)
        sizes = module.sizes
        layer = HeadLayer(sizes.num_kv_heads, sizes.head_dim, num_draft_rows=self.room)
        self.layers: tuple[HeadLayer, ...] = (layer,) * len(module.layers)

    @property
    def outputs(self) -> Sequence[nn.Linear]:
        own = self.module.lm_head
        return () if own is None else (own,)

    def rows(self, step: HeadRows, host: HeadHost) -> tuple[Tensor, Tensor]:
        """Stores the context; rows have no other output."""
        assert step.earlier is not None, "a head with layers is given slots"
        features = torch.cat([step.hidden[layer] for layer in self.capture], dim=-1)
        slots = step.earlier().slots
        for layer, (key, value) in enumerate(self.module.context(features, step.positions)):
            host.keep(layer, slots, key, value)
        return features[:, :0], features[:, :0]

    @property
    def is_chain(self) -> bool:
        """Whether drafts are chains."""
        return not self.num_best

    def expand(self, start: DraftStart, depth: int, host: HeadHost) -> Trees:
        return self.drafts(start, self.read(start, host), depth, host)

    def drafts(
        self,
        start: DraftStart,
        read: Tensor,  # [num_drafts, length, hidden_size], or of the first levels of chains
        depth: int,
        host: HeadHost,
    ) -> Trees:
        """Does the same as `expand`, for blocks that have been computed."""
        if self.num_best:
            return self._best_tree(start, read, host)
        tokens = self._chain(start, read, min(depth, self._length), host)
        before = torch.cat([start.emitted[:, None], tokens[:, :-1]], dim=1)
        chances = self.module.confidence(read[:, : tokens.shape[1]], before)
        return Trees(tokens, None, chances=chances)

    def _best_tree(
        self,
        start: DraftStart,
        read: Tensor,  # [num_drafts, length, hidden_size]
        host: HeadHost,
    ) -> Trees:
        """Returns the best tree under the block's distributions, each given its node's parent."""
        module, ids, max_ranks = self.module, self.target_ids, self.num_best
        logits = module.scaled(host.draft_logits(read.flatten(0, 1))).unflatten(0, read.shape[:2])
        if module.options.selector is not None:  # excluded tokens are never accepted
            max_ranks = min(max_ranks, module.options.selector[1])

        def children(level: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
            row = logits[:, level, None]
            if module.is_sequential:
                row, seen = (
                    each[:, level, None].expand(-1, tokens.shape[1], -1) for each in (logits, read)
                )
                row = module.corrected(row, seen, tokens, ids)
            logs, columns = ranked(row, max_ranks)
            return logs, columns if ids is None else ids[columns]

        return best_first_tree(children, start.emitted, self._length, self.num_best)

    def read(self, start: DraftStart, host: HeadHost) -> Tensor:
        """Returns the output layer's inputs of drafted tokens [num_drafts, length, hidden_size]."""
        assert start.levels is not None, "there is room for a block"
        module, width = self.module, self.room
        ids = start.emitted
        if module.mask_embedding is None:
            ids = torch.cat([ids, ids.new_full((1,), self.mask_token)])
        own = module.embed_tokens
        embedded = host.embed(ids) if own is None else own(ids)
        rows = module.embed(embedded[: len(start.emitted)], embedded[-1], width)
        ahead = torch.arange(1, width + 1, device=ids.device)
        attend = start.levels.block(width, module.options.views)
        return module.drafted(module(rows, start.base[:, None] + ahead, attend))

    def _chain(
        self,
        start: DraftStart,
        read: Tensor,  # [num_drafts, length, hidden_size]
        depth: int,
        host: HeadHost,
    ) -> Tensor:  # [num_drafts, depth]
        module, read = self.module, read[:, :depth].contiguous()
        if module.draws_plainly:
            return start.draw(read, 0)
        logits = module.scaled(host.draft_logits(read.flatten(0, 1))).unflatten(0, read.shape[:2])
        if not module.is_sequential:
            return start.draw_from(logits, 0)
        tokens = [start.emitted]
        for level in range(depth):
            given = (read[:, level], tokens[-1], self.target_ids)
            row = module.corrected(logits[:, level], *given)
            tokens.append(start.draw_from(row[:, None], level)[:, 0])
        return torch.stack(tokens[1:], dim=1)
