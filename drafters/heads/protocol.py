"""The interface between heads and the worker that runs them.

A head drafts right after verification, from the hidden states of the verified step.
`workers/head.py` runs heads, on the rank that verifies or in a separate worker; training uses
their modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...scheduler.types import (
    FloatArray,
    IntArray,
    NextDrafts,
    SamplingRows,
    StepInput,
    Verdict,
    ints,
    starts_of,
)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Properties of the target that a head must match, and what reading its checkpoint may do."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    allow_pickle: bool = False  # read pickled weights if there are no safetensors

    @classmethod
    def of(cls, info: Any, device: torch.device, allow_pickle: bool = False) -> TargetFacts:
        """Returns the facts of a `ModelInfo`, for a head on `device`."""
        sizes = info.hidden_size, info.vocab_size, info.num_layers
        return cls(*sizes, info.dtype, device, allow_pickle)


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """KV shape of one layer of a head, per token."""

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None  # None: head_dim
    num_draft_rows: int = 0  # maximum number of rows that one draft adds to the layer

    @property
    def value_width(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim


class Attend(Protocol):
    """Writes a step's keys and values into their slots and attends, as the target does."""

    def __call__(
        self,
        layer: int,  # of the head
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, value_dim]
        scale: float,
    ) -> Tensor:  # [num_tokens, num_heads, value_dim]
        ...


class LevelAttend(Attend, Protocol):
    """The attention of a level's rows."""

    @property
    def positions(self) -> Tensor:  # [num_drafts * width]
        """Positions of the rows."""


@dataclass(frozen=True, slots=True)
class BlockView:
    """What the rows of a block see in one layer, in addition to the context."""

    causal: bool = False  # whether they see only earlier rows of the block, instead of all
    window: int | None = None  # only positions above a row's own position minus this


class DraftLevels(Protocol):
    """Attention of drafts that are extended level by level; their rows are dropped with them."""

    def level(
        self,
        above: Tensor,  # [num_drafts, width], row of the last level
    ) -> LevelAttend:
        """Returns attention of `width` new rows per sequence, children of the last level's rows."""

    def chain(self, width: int) -> LevelAttend:
        """Returns attention of `width` new rows per sequence, each a child of the previous one.

        It is for drafts without branches; positions continue from those of the last level.
        """

    def block(self, width: int, views: Sequence[BlockView]) -> Attend:
        """Returns attention of the `width` rows of a whole draft, positioned after the context.

        Args:
            views: what each layer's rows see.
        """


@dataclass(frozen=True, slots=True)
class EarlierRows:
    """Location of the token before each row of a step; for a node, of its parent. int64."""

    slots: Tensor  # [num_rows], the rows' own slots
    rows: Tensor  # [num_rows]; num_rows + i: the last token of sequence i before the step
    last_slots: Tensor  # [num_seqs], slots of those last tokens


@dataclass(frozen=True, slots=True)
class HeadRows:
    """A step's rows in the form that a head reads, on the device.

    On the host, a head without layers gets only hidden states.
    """

    tokens: Tensor  # [num_rows] integers, the rows' own tokens
    next_tokens: Tensor  # [num_rows] integers, the token after each; undefined for rejected nodes
    positions: Tensor  # [num_rows] integers
    hidden: dict[int, Tensor]  # by captured layer, [num_rows, hidden_size]
    attend: Attend | None
    earlier: Callable[[], EarlierRows] | None  # for heads that read features of the previous token


@dataclass(frozen=True, slots=True)
class Entrance:
    """The parts of `FeatureModule.fuse` and `enter`; None: there is no such part."""

    state_norms: tuple[nn.Module, ...] = ()  # of each captured state
    fused_norm: nn.Module | None = None  # of all of them, concatenated
    fuse: nn.Linear | None = None  # None: there is one state, which is the feature
    embedding_norm: nn.Module | None = None
    feature_norm: nn.Module | None = None
    join: nn.Linear | None = None  # of embedding and feature, concatenated, to the residual stream
    # Without `join` the first attention reads both, and the feature is the residual stream.
    is_residual_normed: bool = False
    adds: bool = False  # instead of all that, the residual stream is the sum of both


class FeatureModule(nn.Module, ABC):
    """Decoder layers that predict a token's feature from its embedding and the previous feature.

    Training differentiates the module. Workers replace `decode` by the family decoder's layer
    stack (`workers/head_layers.py`).
    """

    layer = 0  # index of its first layer among the head's layers
    embedding_size: int
    hidden_size: int
    norm_output: bool  # the next feature is the output after the final norm
    embed_tokens: nn.Embedding | None  # its own; None: the target's
    lm_head: nn.Linear | None  # its own; None: the target's

    def fuse(self, features: Tensor) -> Tensor:  # [num_rows, all features] -> [.., hidden_size]
        """Combines the target's states into one feature."""
        parts = self.entrance()
        if parts.state_norms:
            states = features.chunk(len(parts.state_norms), dim=-1)
            normed = [norm(each) for norm, each in zip(parts.state_norms, states, strict=True)]
            features = torch.cat(normed, dim=-1)
        if parts.fused_norm is not None:
            features = parts.fused_norm(features)
        return features if parts.fuse is None else parts.fuse(features)

    @abstractmethod
    def entrance(self) -> Entrance:
        """Returns the parts before the layers."""

    def of_target(self) -> list[Tensor]:
        """Returns weights that belong to the target and are not trained with the others."""
        return []

    def enter(
        self,
        embedded: Tensor,  # [num_rows, embedding_size]
        feature: Tensor,  # [num_rows, hidden_size]
    ) -> tuple[Tensor, Tensor | None]:  # [num_rows, hidden_size]; [num_rows, input_size]
        """Returns the residual stream, and the first attention's input if not a norm of it."""
        parts, normed = self.entrance(), feature
        if parts.adds:
            return embedded + feature, None
        if parts.feature_norm is not None:
            normed = parts.feature_norm(feature)
        if parts.embedding_norm is not None:
            embedded = parts.embedding_norm(embedded)
        both = torch.cat([embedded, normed], dim=-1)
        if parts.join is not None:
            return parts.join(both), None
        return (normed if parts.is_residual_normed else feature), both

    @abstractmethod
    def decode(
        self,
        states: Tensor,  # [num_rows, hidden_size]
        read: Tensor | None,  # [num_rows, input_size]
        positions: Tensor,  # [num_rows]
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:  # [num_rows, hidden_size] each
        """Returns the layers' output, and its final norm."""

    def forward(
        self,
        embedded: Tensor,  # [num_rows, embedding_size]
        feature: Tensor,  # [num_rows, hidden_size]
        positions: Tensor,  # [num_rows]
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:  # [num_rows, hidden_size] each
        """Returns the next feature, and the output layer's input."""
        states, normed = self.decode(*self.enter(embedded, feature), positions, attend)
        return (normed if self.norm_output else states), normed


@dataclass(frozen=True, slots=True)
class Trees:
    """Drafts on the device, parents first."""

    tokens: Tensor  # [num_drafts, num_nodes], the target's ids
    # [num_drafts, num_nodes], index within a draft; -1 is the root. None: drafts are chains.
    parents: Tensor | None
    sizes: Tensor | None = None  # [num_drafts], number of leading entries that are nodes; None: all
    chances: Tensor | None = None  # [num_drafts, num_nodes] float32, as in `Draft`
    # [num_drafts, num_nodes] float32, sums of the logarithms of the probabilities along the nodes'
    # paths; None: not computed, as of tokens that are drawn (`Cut.see`).
    scores: Tensor | None = None


class Cut:
    """Ends drafts before nodes that the head finds too unlikely, given right parents.

    If tokens are drawn, the likeliest token's probability decides, which depends only on the nodes
    above. Otherwise each node's own probability decides, which no draw has influenced. So drafts
    stay exact under every rule.
    """

    def __init__(self, least: Tensor) -> None:  # [num_drafts] float32; 0: no node is too unlikely
        self._least = least
        self._seen: list[Tensor] = []  # [num_drafts, width] each

    def see(self, best: Tensor) -> None:  # [num_drafts, width]
        """Receives the logarithms of the probabilities of the next levels' likeliest tokens."""
        self._seen.append(best)

    def of(self, trees: Trees) -> Trees:
        """Returns the remaining drafts; the order of their nodes is kept."""
        scores = trees.scores
        if scores is None:
            scores = torch.cat(self._seen, dim=1).cumsum(1)
        num_nodes = scores.shape[1]
        lanes = torch.arange(num_nodes, device=scores.device)
        parents = (lanes - 1).expand(scores.shape) if trees.parents is None else trees.parents
        is_first, up = parents < 0, parents.clamp(min=0)
        own = scores - torch.where(is_first, 0.0, scores.gather(1, up))
        kept = (own >= self._least.log()[:, None]) | (self._least == 0)[:, None]
        if trees.sizes is not None:
            kept &= lanes < trees.sizes[:, None]
        if trees.parents is None:
            return replace(trees, sizes=kept.long().cumprod(1).sum(1))
        for _ in range((num_nodes - 1).bit_length()):  # each pass reaches twice as far up
            kept &= is_first | kept.gather(1, up)
            is_first, up = is_first | is_first.gather(1, up), up.gather(1, up)
        order = kept.logical_not().long().sort(dim=1, stable=True).indices
        place = torch.empty_like(order).scatter_(1, order, lanes.expand_as(order))
        parents = parents.gather(1, order)
        found = place.gather(1, parents.clamp(min=0))
        return Trees(
            trees.tokens.gather(1, order),
            torch.where(parents < 0, -1, found),
            kept.sum(1),
            None if trees.chances is None else trees.chances.gather(1, order),
        )


def log_of_best(logits: Tensor) -> Tensor:  # [..., vocab] -> [...] float32
    """Returns the logarithm of the likeliest token's probability."""
    logits = logits.float()
    return logits.amax(-1) - logits.logsumexp(-1)


@dataclass(frozen=True, slots=True)
class DraftStart:
    """The last committed row of every sequence that drafts, and the inputs of its draft."""

    base: Tensor  # [num_drafts] int64, position of the row
    emitted: Tensor  # [num_drafts] int64, the token after it, which has no row yet
    feature: Tensor  # [num_drafts, feature]
    read: Tensor  # [num_drafts, hidden_size], for the output layer
    levels: DraftLevels | None  # None: the head has no layers with attention
    # Draws the target's ids [num_drafts, width] of `width` consecutive levels, as the
    # verification rule does; the second argument is the first level (0 is the draft's first).
    draw: Callable[[Tensor, int], Tensor]  # from the output layer's inputs [.., width, hidden_size]
    draw_from: Callable[[Tensor, int], Tensor]  # from logits [.., width, draft_vocab]
    # Ends drafts after they are built; observes draws, and otherwise requires scores of nodes.
    cut: Cut | None = None


class HeadHost(Protocol):
    """The services of the worker for a head.

    A step may exclude cached rows whose features were lost: `context_lens` counts the remaining
    rows, `block_tables` lists them, and only `positions` give a token's place in its sequence.
    """

    target: TargetFacts
    block_size: int

    def embed(self, token_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden_size]
        """Returns the target's embedding."""

    def draft_logits(
        self, states: Tensor
    ) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, draft_vocab]
        """Returns logits of the layer that drafts are drawn from: the head's or the target's."""

    def attention(self, step: StepInput) -> Attend:
        """Returns the attention of `step`, in the head's own layers."""

    def draft_attention(self, step: StepInput, verdict: Verdict, ends: Frontier) -> DraftLevels:
        """Returns attention of one draft for every sequence of `ends`, over its committed rows."""

    def cached(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values [*slots, num_kv_heads, head_dim] of a layer of the head."""

    def keep(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes rows that `cached` reads, for a layer of the head without attention."""

    def cut(self, sampling: SamplingRows, seqs: NDArray[np.int64]) -> Cut | None:
        """Returns what ends the drafts of the sequences `seqs` [num_drafts]; None: nothing."""

    def draw(
        self,
        logits: Tensor,  # [num_rows, vocab]
        sampling: SamplingRows,
        seqs: NDArray[np.int64],  # [num_rows]
        positions: IntArray,  # [num_rows], position of the drawn token
        ids: Tensor | None = None,  # [vocab], target id of every column; None: the same
    ) -> Tensor:  # [num_rows], the target's ids
        """Draws tokens with the verification rule's noise, which makes acceptance most likely."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A verified step and its hidden states."""

    step: StepInput
    verdict: Verdict
    hidden: dict[int, Tensor]  # by captured layer, [num_tokens, hidden_size]


class Head(Protocol):
    """Drafts from hidden states, without reading values on the host."""

    capture: tuple[int, ...]  # layers whose inputs it reads, in order; num_layers: the final state
    layers: tuple[HeadLayer, ...]  # its cached layers
    target_ids: Tensor | None  # [draft_vocab], target id of every draft token; None: the same
    # Whether a row of a draft may see other rows than earlier ones: siblings, or a whole block.
    branches: bool
    room: int  # maximum number of rows that one draft computes
    reads_device_only: bool  # whether its torch modules, if used, read no value on the host
    has_chances: bool  # whether drafts have probabilities
    # Computes every row of a step, and every level of a draft from the one above. None: the head
    # has several modules, or drafts in another way.
    only_module: FeatureModule | None

    @property
    def module(self) -> nn.Module:
        """The module that holds all weights."""

    @property
    def outputs(self) -> Sequence[nn.Linear]:
        """Its own output layers, which workers may divide among ranks.

        A head whose drafts are drawn has one or none; without one, the target's is used.
        """

    def rows(self, step: HeadRows, host: HeadHost) -> tuple[Tensor, Tensor]:
        """Computes and stores the head's rows of a step.

        Returns the features [num_rows, feature] and what the output layer reads
        [num_rows, hidden_size].
        """

    def expand(
        self,
        start: DraftStart,
        depth: int,  # limits a chain's levels and a beam's nodes; other trees have all of theirs
        host: HeadHost,
    ) -> Trees:
        """Returns the drafts that are built from the head's rows."""


class LastStateHead:
    """Base of heads that read only the target's last state, and draw nothing."""

    layers: tuple[HeadLayer, ...] = ()
    target_ids: Tensor | None = None
    branches, room, reads_device_only, has_chances = True, 0, False, False
    only_module: FeatureModule | None = None

    def __init__(self, target: TargetFacts) -> None:
        self.capture: tuple[int, ...] = (target.num_layers,)

    def rows(self, step: HeadRows, host: HeadHost) -> tuple[Tensor, Tensor]:
        hidden = step.hidden[self.capture[0]]
        return hidden, hidden


@dataclass(frozen=True, slots=True)
class Frontier:
    """The last known rows of the sequences that draft now."""

    seqs: NDArray[np.int64]  # [num_drafts], index in the step
    rows: NDArray[np.int64]  # [num_drafts], flat row of the last token with a state
    lens: IntArray  # [num_drafts], known tokens, including the one emitted after that row


def frontier(step: StepInput, verdict: Verdict) -> Frontier:
    """Selects the sequences that emitted and may draft."""
    wanted = step.samples.copy()
    if step.max_nodes is not None:
        wanted &= step.max_nodes > 0
    seqs = np.flatnonzero(wanted)
    rows = step.root_rows.astype(np.int64)
    deep = np.flatnonzero(verdict.num_accepted > 0)
    rows[deep] += 1 + verdict.path[verdict.path_start[deep + 1] - 1]
    lens = step.positions[rows[seqs]] + 2  # the row itself, and the token emitted after it
    return Frontier(seqs, rows[seqs], lens.astype(np.int32))


def last_emitted(verdict: Verdict, ends: Frontier) -> IntArray:  # [num_drafts]
    """Returns the token after each row of `ends`."""
    return verdict.emitted[verdict.emitted_start[ends.seqs + 1] - 1]


def drafts_of(
    step: StepInput,
    ends: Frontier,
    tokens: IntArray,  # [num_drafts, num_nodes]
    parents: IntArray,  # [num_nodes], the same for all, or [num_drafts, num_nodes]
    sizes: IntArray | None = None,  # [num_drafts], nodes of each tree; None: all of them
    chances: FloatArray | None = None,  # [num_drafts, num_nodes]
) -> NextDrafts:
    """Returns the first nodes of each tree, truncated to its sequence's budget."""
    num_drafts, num_nodes = tokens.shape
    most: IntArray = np.full(num_drafts, num_nodes) if sizes is None else ints(sizes)
    if step.max_nodes is not None:
        most = np.minimum(most, step.max_nodes[ends.seqs])
    counts, lens = np.zeros((2, step.num_seqs), dtype=np.int32)
    counts[ends.seqs], lens[ends.seqs] = most, ends.lens
    kept: Any = np.arange(num_nodes) < most[:, None]
    if parents.ndim == 1:
        parents = parents[None].repeat(num_drafts, axis=0)
    return NextDrafts(
        tokens=ints(tokens[kept]),
        parents=ints(parents[kept]),
        start=starts_of(counts),
        lens=lens,
        chances=None if chances is None else chances[kept],
    )


def on(values: Any, device: torch.device) -> Tensor:
    """Returns an integer array as int64 on `device`."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, torch.int64)
