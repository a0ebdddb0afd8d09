"""The module of block drafters: all tokens of a draft in one forward, conditioned on the target.

Context: the states of several target layers at a token are one feature c = hidden_norm(fc(states)),
whose keys and values every layer stores at the token's position. Block: the last emitted token and
masks, at the positions after the context. Queries come only from the block, and its rows attend to
the context and to one another. The output of a mask's row predicts the token at the mask's own
position; with `from_anchor`, a row predicts the next token.

- DFlash (z-lab/dflash): as above; positions are independent given the text.
- DFlash2: convolutions over the block before and after each sublayer, and a selector that rates
  each position's likeliest tokens, given the previously chosen token.
- DSpark (arXiv:2607.05147): a Markov head adds a low-rank bias, given the previous token, to a
  row's logits; a confidence head estimates how likely the target accepts the row's token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .llama import Layer, LayerSizes, RMSNorm, Rope
from .protocol import Attend, BlockView


@dataclass(frozen=True, slots=True)
class Convolutions:
    """Sizes of DFlash2's convolutions in a layer."""

    taps: int
    group_size: int  # adjacent channels that share the input-dependent part of a kernel


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """The published variants of block drafters."""

    views: tuple[BlockView, ...]  # by layer
    num_features: int  # target states that are concatenated
    from_anchor: bool = False  # row k predicts the next token, so row 0 drafts too
    embedding_scale: float = 1.0
    output_scale: float = 1.0  # of logits, before the cap
    softcap: float | None = None  # of logits: tanh(logits / softcap) * softcap
    own_mask: bool = False  # the masks' embedding is a separate tensor
    convolutions: Convolutions | None = None
    selector: tuple[int, int] | None = None  # its rank, and the number of candidates
    markov_rank: int = 0  # 0: no Markov head
    confidence: bool = False
    confidence_reads_markov: bool = True  # in addition to the row's state


class Convolution(nn.Module):
    """Two causal convolutions over a block's rows, whose kernels depend on the input.

    y_i = sum over taps t of (base_t + delta_i,t) * x_(i-t), with zeros before the block; `delta` is
    projected from the sublayer's input and is equal within a group of channels.
    """

    def __init__(self, hidden_size: int, sizes: Convolutions) -> None:
        super().__init__()
        self.sizes = sizes
        self.base_kernel = nn.Parameter(torch.zeros(2, sizes.taps, hidden_size))
        groups = hidden_size // sizes.group_size
        self.kernel_projection = nn.Linear(hidden_size, 2 * sizes.taps * groups, bias=False)

    def kernels(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both kernels of every row: [..., width, taps, hidden_size] each."""
        deltas = self.kernel_projection(states).unflatten(-1, (2, self.sizes.taps, -1))
        full = self.base_kernel + deltas.repeat_interleave(self.sizes.group_size, dim=-1)
        before, after = full.unbind(-3)
        return before, after


def convolve(
    states: Tensor,  # [..., width, hidden_size]
    kernel: Tensor,  # [..., width, taps, hidden_size]
) -> Tensor:  # [..., width, hidden_size]
    """Returns every row's weighted sum over itself and the rows before it in the block."""
    width, out = states.shape[-2], states * kernel[..., 0, :]
    for tap in range(1, kernel.shape[-2]):
        earlier = pad(states, (0, 0, tap, 0))[..., :width, :]
        out = out + earlier * kernel[..., tap, :]
    return out


class BlockLayer(Layer):
    """A decoder layer of a block, with or without convolutions."""

    def __init__(self, sizes: LayerSizes, convolutions: Convolutions | None) -> None:
        super().__init__(sizes)
        if convolutions is not None:
            self.attention_conv = Convolution(sizes.hidden_size, convolutions)
            self.mlp_conv = Convolution(sizes.hidden_size, convolutions)
        self.has_convolutions = convolutions is not None

    def over_block(
        self,
        states: Tensor,  # [num_blocks, width, hidden_size]
        rotation: tuple[Tensor, Tensor],
        layer: int,
        attend: Attend,
    ) -> Tensor:  # [num_blocks, width, hidden_size]
        """Returns the layer's output."""
        assert self.input_layernorm is not None, "a block's layers are like any other"
        if not self.has_convolutions:
            flat = self(states.flatten(0, 1), None, rotation, layer, attend)
            return flat.view_as(states)
        read = self.input_layernorm(states)
        before, after = self.attention_conv.kernels(read)
        flat = self.self_attn(convolve(read, before).flatten(0, 1), rotation, layer, attend)
        states = states + convolve(flat.view_as(states), after)
        read = self.post_attention_layernorm(states)
        before, after = self.mlp_conv.kernels(read)
        return states + convolve(self.mlp(convolve(read, before)), after)


class Selector(nn.Module):
    """Rates candidates b of a position after token a: its logit + <A[a] * W h, B[b]>."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(
        self,
        states: Tensor,  # [..., hidden_size]
        previous: Tensor,  # [...], target ids
        candidates: Tensor,  # [..., count], target ids
    ) -> Tensor:  # [..., count] float32
        """Returns what is added to the candidates' logits."""
        read = self.predecessor_codebook[previous] * self.hidden_projection(states)
        return (read[..., None, :].float() * self.successor_codebook[candidates].float()).sum(-1)


class MarkovHead(nn.Module):
    """Low-rank bias of a row's logits, given the previous token: w2 w1[token]."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def forward(self, previous: Tensor) -> Tensor:  # [...] -> [..., draft_vocab]
        return self.markov_w2(self.markov_w1(previous))


class ConfidenceHead(nn.Module):
    """Estimates whether the target accepts a row's token, from its state and the previous token."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, read: Tensor) -> Tensor:  # [..., input_size] -> [...], before a sigmoid
        return self.proj(read)[..., 0]


class BlockModule(nn.Module):
    """DFlash, DFlash2 or DSpark, according to `options`.

    Args:
        sizes: sizes of every layer.
        target_vocab_size: rows of the tables that are indexed by the target's tokens.
        vocab_size: rows of the module's own embedding; None: it uses the target's.
        draft_vocab_size: rows of its own output layer; None: it uses the target's.
    """

    def __init__(
        self,
        sizes: LayerSizes,
        num_layers: int,
        rope: Rope,
        options: BlockOptions,
        *,
        target_hidden_size: int,
        target_vocab_size: int,
        vocab_size: int | None = None,
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.sizes, self.rope, self.options = sizes, rope, options
        self.fc = nn.Linear(options.num_features * target_hidden_size, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, sizes.eps)
        self.layers = nn.ModuleList(
            BlockLayer(sizes, options.convolutions) for _ in range(num_layers)
        )
        self.norm = RMSNorm(hidden, sizes.eps)
        self.embed_tokens = None if vocab_size is None else nn.Embedding(vocab_size, hidden)
        self.lm_head = (
            None if draft_vocab_size is None else nn.Linear(hidden, draft_vocab_size, bias=False)
        )
        self.mask_embedding = nn.Parameter(torch.zeros(hidden)) if options.own_mask else None
        self.candidate_selector = self.markov_head = self.confidence_head = None
        if options.selector is not None:
            self.candidate_selector = Selector(target_vocab_size, hidden, options.selector[0])
        if rank := options.markov_rank:
            width = draft_vocab_size or target_vocab_size
            self.markov_head = MarkovHead(target_vocab_size, width, rank)
        if options.confidence:
            more = options.markov_rank if options.confidence_reads_markov else 0
            self.confidence_head = ConfidenceHead(hidden + more)

    def context(
        self,
        features: Tensor,  # [num_rows, num_features * target_hidden_size]
        positions: Tensor,  # [num_rows]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields keys and values [num_rows, num_kv_heads, head_dim] of tokens, layer by layer."""
        yield from self.stored(self.hidden_norm(self.fc(features)), self.rope(positions))

    def stored(
        self, states: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Does the same as `context`, for features in the form that layers read."""
        for layer in self.layers:
            yield layer.self_attn.keys_values(states, rotation)  # type: ignore[union-attr, operator]

    def embed(
        self,
        anchors: Tensor,  # [num_blocks, hidden_size], embeddings of the blocks' first tokens
        mask: Tensor,  # [hidden_size], the mask token's
        width: int,
    ) -> Tensor:  # [num_blocks, width, hidden_size]
        """Returns the rows of blocks: the first token and masks."""
        mask = mask if self.mask_embedding is None else self.mask_embedding
        masks = mask.to(anchors.dtype).expand(len(anchors), width - 1, -1)
        return torch.cat([anchors[:, None], masks], dim=1) * self.options.embedding_scale

    def forward(
        self,
        rows: Tensor,  # [num_blocks, width, hidden_size]
        positions: Tensor,  # [num_blocks, width]
        attend: Attend,
    ) -> Tensor:  # [num_blocks, width, hidden_size]
        """Returns the output layer's input of every row; `drafted` selects the rows that draft."""
        return self.decode(rows, positions, attend)

    def decode(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Applies the layers and the final norm."""
        rotation = self.rope(positions.flatten())
        for index, layer in enumerate(self.layers):
            rows = layer.over_block(rows, rotation, index, attend)  # type: ignore[operator]
        return self.norm(rows)

    def width(self, num_tokens: int) -> int:
        """Returns the rows of a block that drafts this number of tokens."""
        return num_tokens if self.options.from_anchor else num_tokens + 1

    def drafted(self, read: Tensor) -> Tensor:  # [num_blocks, width, ...] -> [.., num_tokens, ...]
        """Returns the rows that predict a token to draft, in order."""
        return read if self.options.from_anchor else read[:, 1:]

    @property
    def is_sequential(self) -> bool:
        """Whether a token's distribution depends on the drafted token before it."""
        return self.candidate_selector is not None or self.markov_head is not None

    @property
    def draws_plainly(self) -> bool:
        """Whether tokens are drawn from the output layer's logits without a correction."""
        is_scaled = self.options.output_scale != 1.0 or self.options.softcap is not None
        return not self.is_sequential and not is_scaled

    def scaled(self, logits: Tensor) -> Tensor:
        """Returns logits of the output layer in float32, with scale and cap."""
        logits = logits.float()
        if self.options.output_scale != 1.0:
            logits = logits * self.options.output_scale
        if (cap := self.options.softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def corrected(
        self,
        logits: Tensor,  # [..., draft_vocab], scaled
        read: Tensor,  # [..., hidden_size]
        previous: Tensor,  # [...], the target's ids of the tokens before
        target_ids: Tensor | None = None,  # [draft_vocab]
    ) -> Tensor:  # [..., draft_vocab]
        """Returns logits given the previous token; -inf for tokens that the selector excludes."""
        if self.markov_head is not None:
            logits = logits + self.markov_head(previous).float()
        if self.candidate_selector is not None:
            assert self.options.selector is not None
            best, columns = logits.topk(min(self.options.selector[1], logits.shape[-1]), dim=-1)
            ids = columns if target_ids is None else target_ids[columns]
            best = best + self.candidate_selector(read, previous, ids)
            logits = torch.full_like(logits, -torch.inf).scatter(-1, columns, best)
        return logits

    def confidence(
        self,
        read: Tensor,  # [..., hidden_size]
        previous: Tensor,  # [...]
    ) -> Tensor | None:  # [...] float32
        """Returns estimated probabilities that rows' tokens are accepted if earlier ones are.

        None if no head estimates them.
        """
        if self.confidence_head is None:
            return None
        if self.markov_head is not None and self.options.confidence_reads_markov:
            read = torch.cat([read, self.markov_head.markov_w1(previous)], dim=-1)
        return torch.sigmoid(self.confidence_head(read).float())


def even_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Returns the target layers whose outputs a checkpoint reads if it does not list them."""
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + index * span / (count - 1)) for index in range(count))


def views_of(
    kinds: Sequence[bool],  # by layer, whether it has a window
    window: int | None,
    *,
    causal: bool | None,  # of all layers; None: those with a window are
    causal_windows: bool = True,
) -> tuple[BlockView, ...]:
    """Returns what the rows of each layer see."""
    return tuple(
        BlockView(is_sliding and causal_windows if causal is None else causal, window)
        if is_sliding
        else BlockView(bool(causal))
        for is_sliding in kinds
    )
