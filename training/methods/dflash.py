"""Methods `dflash`, `dspark`: layers that fill a block of masks from states of the target.

A window has random anchors. Each is followed by a block: its token and masks, at its position and
those after. The block's rows see the context before the anchor, which consists of the target's
states at each token, and their own block, but no other blocks. The j-th drafted row of anchor a
(from 0) predicts token a + 1 + j, so its teacher is the target at position a + j.

D-PACE weights of positions: w_j = sum over m >= j of prod over i <= m of ((1 - s) q_i + s), where q
is the drafter's probability of the target's likeliest token and s the smoothing: the first
positions count most, and later ones gain weight as those before are learnt.

DSpark (arXiv:2607.05147) adds to each row's logits a bias by the text's previous token (Markov
head), and learns the probability that the target accepts the row's token (confidence head). Its
loss is mostly the distance of both distributions, sum |p - q|.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ...drafters.heads.dflash import BlockModule, BlockOptions, even_layers
from ...drafters.heads.llama import Rope
from ...drafters.heads.protocol import BlockView
from ...errors import ConfigError
from ..options import BlockTrainOptions, DFlashTrainOptions, DSparkTrainOptions
from ..protocol import FrozenTarget, Losses, TargetStates, Windows
from ..state import write_tensors
from .distil import (
    Agreement,
    VocabularyMethod,
    checked_mask,
    likeliest,
    rarest,
    soft_cross_entropy,
    teacher_of,
)
from .eagle import checked_layers, fill, layer_keys, layer_sizes, target_layer

_MOST_FEATURES = 5  # target layers that are read where none are named


class BlockAttention:
    """Attention of the blocks of a batch of windows, over the windows' context; without a cache.

    Args:
        context: by layer, keys and values [num_windows * window_len, num_kv_heads, head_dim].
        anchors: position of each block's first row.
    """

    def __init__(
        self,
        context: list[tuple[Tensor, Tensor]],
        anchors: Tensor,  # [num_windows, num_anchors]
        width: int,  # of a block
    ) -> None:
        self._context, self._shape = context, (*anchors.shape, width)
        num_windows = len(anchors)
        window_len = len(context[0][0]) // num_windows
        seen = torch.arange(window_len, device=anchors.device) < anchors[..., None]
        rows = seen.repeat_interleave(width, dim=1)
        self._hidden = ~rows[:, None, None]  # [num_windows, 1, 1, num_rows, window_len]

    def __call__(
        self,
        layer: int,
        query: Tensor,  # [num_windows * num_anchors * width, num_heads, head_dim]
        key: Tensor,  # [num_windows * num_anchors * width, num_kv_heads, head_dim]
        value: Tensor,
        scale: float,
    ) -> Tensor:  # [num_windows * num_anchors * width, num_heads, head_dim]
        num_windows, num_anchors, width = self._shape
        num_kv_heads = key.shape[1]
        rows = query.view(num_windows, num_anchors * width, num_kv_heads, -1, query.shape[-1])
        rows = rows.permute(0, 2, 3, 1, 4)  # [windows, kv heads, group, rows, head_dim]
        keys, values = (
            part.unflatten(0, (num_windows, -1)).transpose(1, 2) for part in self._context[layer]
        )
        own, beside = (
            part.unflatten(0, self._shape).movedim(-2, 1)  # [windows, kv heads, anchors, width, ..]
            for part in (key, value)
        )
        blocks = rows.unflatten(3, (num_anchors, width))
        far = (rows @ keys[:, :, None].mT * scale).masked_fill(self._hidden, -torch.inf)
        near = (blocks @ own[:, :, None].mT * scale).flatten(3, 4)
        weights = torch.cat([far, near], dim=-1).float().softmax(-1).to(value.dtype)
        far, near = weights.split([far.shape[-1], width], dim=-1)
        out = far @ values[:, :, None]
        out = out + (near.unflatten(3, (num_anchors, width)) @ beside[:, :, None]).flatten(3, 4)
        return out.permute(0, 3, 1, 2, 4).reshape(query.shape)


class BlockMethod(VocabularyMethod):
    """Base of both methods."""

    module: BlockModule

    def __init__(self, options: BlockTrainOptions, target: FrozenTarget, **variant: Any) -> None:
        super().__init__(target, options.draft_vocab_size)
        facts = target.facts
        self.capture = checked_layers(options.layers or _spread(facts.num_layers), target)
        self._options = options
        self._mask_token = checked_mask(options.mask_token_id, target)
        sizes = replace(layer_sizes(options, target, facts.hidden_size), qk_norm=True)
        views = (BlockView(),) * options.num_layers
        self.module = BlockModule(
            sizes,
            options.num_layers,
            Rope(sizes.head_dim, options.rope_theta),
            BlockOptions(views, len(self.capture), **variant),
            target_hidden_size=facts.hidden_size,
            target_vocab_size=facts.vocab_size,
            draft_vocab_size=self.draft_vocab_size if self.has_own_vocabulary else None,
        )
        begin_block(self.module, target, from_target=options.init_from_target)
        self.module.to(facts.device)

    def begin_output(self, rows: Tensor) -> None:  # [draft_vocab, hidden_size]
        assert self.module.lm_head is not None
        fill(self.module.lm_head.weight, rows)

    def prepare(self, token_counts: Tensor) -> None:  # [vocab]
        """The mask is the rarest token, unless one was given."""
        super().prepare(token_counts)
        if self._mask_token is None:
            self._mask_token = rarest(token_counts)

    def loss(self, windows: Windows, states: TargetStates, target: FrozenTarget) -> Losses:
        """Returns the mean over drafted tokens, by their weights and D-PACE's."""
        anchors, ids = self._anchors(windows), self.known_ids()
        read, logits = self._drafts(windows, states, target, anchors)
        num_tokens = read.shape[2]
        at = anchors[..., None] + torch.arange(num_tokens, device=anchors.device)
        last = windows.tokens.shape[1] - 1
        inside, at = at < last, at.clamp(max=last - 1)

        def rows(of: Tensor) -> Tensor:  # [windows, window_len, ...] -> [.., anchors, tokens, ...]
            index = torch.arange(len(of), device=of.device)[:, None, None]
            return of[index, at]

        weights, previous = rows(windows.weights[:, 1:]) * inside, rows(windows.tokens)
        chosen = rows(states.logits)
        teacher = teacher_of(chosen, self._options.argmax_weight, ids)
        logits = self._corrected(logits, read, previous)
        shares = weights * _pace(logits, teacher.best, inside, ids, self._options.smoothing)
        loss = self._distance(logits, teacher.probs, shares)
        loss = loss + self._further(logits, chosen, read, previous, shares)
        agreement = Agreement()
        guessed = likeliest(logits)
        guessed = guessed if ids is None else ids[guessed]
        for index in range(num_tokens):
            here = (..., index)
            agreement.add(guessed[here], teacher.best[here], weights[here] > 0)
        return Losses(loss, *agreement.totals())

    def _anchors(self, windows: Windows) -> Tensor:  # [num_windows, num_anchors]
        """Returns random anchors, ascending, preferably with a weighted next token.

        An evaluation takes them at equal distances.
        """
        window_len, device = windows.tokens.shape[1], windows.tokens.device
        count = min(self._options.num_anchors, window_len - 2)
        if not torch.is_grad_enabled():
            even = torch.linspace(1, window_len - 2, count).round().long()
            return even.to(device).expand(len(windows.tokens), -1)
        counts = (windows.weights[:, 2:] > 0).cpu()
        order = torch.rand(counts.shape) + counts
        return (order.topk(count, dim=1).indices.sort(dim=1).values + 1).to(device)

    def _drafts(
        self, windows: Windows, states: TargetStates, target: FrozenTarget, anchors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the output layer reads of every drafted row, and the logits before a correction:
        [num_windows, num_anchors, num_tokens, hidden_size or draft_vocab]."""
        assert self._mask_token is not None, "prepare() comes first"
        module, width = self.module, self._options.block_size
        num_windows, window_len = windows.tokens.shape
        features = torch.cat([states.hidden[layer] for layer in self.capture], dim=-1)
        places = torch.arange(window_len, device=anchors.device).repeat(num_windows)
        context = list(module.context(features.float().flatten(0, 1), places))
        first = windows.tokens.gather(1, anchors).flatten()
        embedded = target.embed(torch.cat([first, first.new_full((1,), self._mask_token)])).float()
        positions = anchors.flatten()[:, None] + torch.arange(width, device=anchors.device)
        attend = BlockAttention(context, anchors, width)
        read = module(module.embed(embedded[:-1], embedded[-1], width), positions, attend)
        read = module.drafted(read).unflatten(0, anchors.shape)
        own = module.lm_head
        return read, target.unembed(read) if own is None else own(read)

    def _corrected(self, logits: Tensor, read: Tensor, previous: Tensor) -> Tensor:
        """Returns logits given the text's previous token."""
        return logits

    def _distance(
        self,
        logits: Tensor,  # [..., draft_vocab]
        probs: Tensor,  # [..., draft_vocab], the lesson
        weights: Tensor,  # [...]
    ) -> Tensor:  # []
        """Returns the distance of a draft from the teacher's distribution."""
        return soft_cross_entropy(logits, probs, weights)

    def _further(
        self,
        logits: Tensor,  # [..., draft_vocab]
        target_logits: Tensor,  # [..., vocab]
        read: Tensor,  # [..., hidden_size]
        previous: Tensor,  # [...]
        weights: Tensor,  # [...]
    ) -> Tensor | float:
        """Returns a further loss."""
        return 0.0

    def _keys(self) -> dict[str, Any]:
        """Returns the keys of the layers."""
        sizes = (self.module.sizes,) * self._options.num_layers
        kinds = ["full_attention"] * len(sizes)
        keys = layer_keys(sizes, self._options, self._target)
        return keys | {"model_type": "qwen3", "layer_types": kinds}

    def _write_speculators(self, folder: Path, kind: str, architecture: str, **keys: Any) -> None:
        """Writes the speculators library's layout, which names layers by their inputs."""
        config = {
            "architectures": [architecture],
            "speculators_model_type": kind,
            "transformer_layer_config": self._keys(),
            "block_size": self._options.block_size,
            "mask_token_id": self._mask_token,
            "aux_hidden_state_layer_ids": list(self.capture),
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self._target.facts.hidden_size,
            **keys,
        }
        tensors = self.module.state_dict() | self.vocabulary_tensors()
        write_tensors(folder, tensors, config, self._target)


class DFlashMethod(BlockMethod):
    """DFlash: positions are independent given the text."""

    _options: DFlashTrainOptions

    def __init__(self, options: DFlashTrainOptions, target: FrozenTarget) -> None:
        super().__init__(options, target)
        if self.has_own_vocabulary and options.layout == "zlab":
            raise ConfigError.at(
                "layout", "'zlab' has no draft vocabulary (draft_vocab_size); use 'speculators'"
            )

    def export(self, folder: Path) -> None:
        if self._options.layout == "speculators":
            self._write_speculators(folder, "dflash", "DFlashSpeculator")
            return
        inner = {
            "mask_token_id": self._mask_token,
            "target_layer_ids": [layer - 1 for layer in self.capture],  # by their outputs
        }
        config = self._keys() | {
            "architectures": ["DFlashDraftModel"],
            "block_size": self._options.block_size,
            "num_target_layers": self._target.facts.num_layers,
            "dflash_config": inner,
        }
        write_tensors(folder, self.module.state_dict(), config, self._target)


class DSparkMethod(BlockMethod):
    """DSpark: a row's token depends on the previous one, and has a confidence."""

    _options: DSparkTrainOptions

    def __init__(self, options: DSparkTrainOptions, target: FrozenTarget) -> None:
        super().__init__(
            options,
            target,
            from_anchor=options.sample_from_anchor,
            markov_rank=options.markov_rank,
            confidence=True,
        )

    def export(self, folder: Path) -> None:
        self._write_speculators(
            folder,
            "dspark",
            "DSparkSpeculator",
            markov_head_type="vanilla",
            markov_rank=self._options.markov_rank,
            sample_from_anchor=self._options.sample_from_anchor,
        )

    def _corrected(self, logits: Tensor, read: Tensor, previous: Tensor) -> Tensor:
        return self.module.corrected(logits, read, previous)

    def _distance(self, logits: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
        share = self._options.distance_weight
        share_of = weights / weights.sum().clamp(min=1e-6)
        apart = (logits.float().softmax(-1) - probs).abs().sum(-1)
        cross = soft_cross_entropy(logits, probs, weights)
        return share * (apart * share_of).sum() + (1 - share) * cross

    def _further(
        self, logits: Tensor, target_logits: Tensor, read: Tensor, previous: Tensor,
        weights: Tensor,
    ) -> Tensor:  # fmt: skip
        """Returns the confidence's cross-entropy with the probability of acceptance, sum min(p, q).

        Its gradients do not reach the drafts.
        """
        module = self.module
        assert module.confidence_head is not None
        assert module.markov_head is not None
        with torch.no_grad():
            probs = target_logits.float().softmax(-1)
            if self.target_ids is not None:
                probs = probs.index_select(-1, self.target_ids)
            wanted = torch.minimum(probs, logits.float().softmax(-1)).sum(-1).clamp(max=1)
            states = torch.cat([read, module.markov_head.markov_w1(previous)], dim=-1)
        found = module.confidence_head(states).float()
        apart = binary_cross_entropy_with_logits(found, wanted, reduction="none")
        return (apart * weights).sum() / weights.sum().clamp(min=1e-6)


def _spread(num_layers: int) -> tuple[int, ...]:
    """Returns the target layers that are read by default: z-lab's, if the target has them."""
    outputs = even_layers(num_layers, _MOST_FEATURES)
    return tuple(sorted({min(max(each, -1), num_layers - 2) + 1 for each in outputs}))


@torch.no_grad()
def _pace(
    logits: Tensor,  # [..., num_tokens, draft_vocab]
    best: Tensor,  # [..., num_tokens], the target's likeliest tokens
    inside: Tensor,  # [..., num_tokens] bool, whether the token is within the window
    target_ids: Tensor | None,  # [draft_vocab]
    smoothing: float,
) -> Tensor:  # [..., num_tokens] float32
    """Returns D-PACE weights of positions."""
    known: Tensor | bool = True
    columns = best
    if target_ids is not None:
        columns = torch.searchsorted(target_ids, best).clamp(max=len(target_ids) - 1)
        known = target_ids[columns] == best
    chosen = logits.gather(-1, columns[..., None])[..., 0].float()
    chance = (chosen - logits.float().logsumexp(-1)).exp() * known
    reached = ((1 - smoothing) * chance + smoothing).cumprod(-1) * inside
    return reached.flip(-1).cumsum(-1).flip(-1)


@torch.no_grad()
def begin_block(module: BlockModule, target: FrozenTarget, *, from_target: bool) -> None:
    """First weights: random matrices; the target's last layers and final norm where they fit.

    The last of the features is let through to the layers, which then read nearly what the target's
    do. The Markov head begins without effect.
    """
    for weight in module.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.02)
    if module.markov_head is not None:
        module.markov_head.markov_w2.weight.zero_()
    if not from_target:
        return
    num_layers, hidden = target.facts.num_layers, target.facts.hidden_size
    for index, layer in enumerate(module.layers):
        found = target_layer(target, max(0, num_layers - len(module.layers) + index))
        for name, weight in layer.named_parameters():
            fill(weight, found.get(name))
    module.fc.weight[:, -hidden:] += torch.eye(hidden)
    norm = getattr(target.model.base_model, "norm", None)
    if isinstance(norm, nn.Module):  # what it multiplies by: some add 1 to their weight
        ones = torch.ones(1, hidden, dtype=target.facts.dtype, device=target.facts.device)
        fill(module.norm.weight, norm(ones)[0].float().cpu())
