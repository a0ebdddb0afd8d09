"""The operations that a decoder requires of a device, and the static facts of each operation.

`ReferenceOps` is plain torch and the oracle; other implementations must agree with it. The decoder
(`workers/model/family/`) computes activations only through these verbs, so a layer is eight calls.
Activations are flat, [num_tokens, width], contiguous and in the model's dtype; results are rounded
to that dtype once, after arithmetic in float32. An implementation may return a buffer that its next
call of the same verb overwrites, except from `plan` and from a projection.

No verb reads a tensor's value on the host: what varies between steps is in tensors, and
implementations may branch only on the frozen descriptions below and on shapes. Shapes are stated
here, for all implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor

from ...scheduler.types import StepInput
from ..attention import KVCache, KVFormat
from ..verify.device_settings import DeviceEdits, DeviceSettings, DeviceWalk, Settled
from .plan import DeviceLayout, DraftLevel, KeptDrafts, PagedStep, StagedStep

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of a step's rows, each [num_tokens, rotary_dim / 2] float32."""

Projection = Callable[[Tensor], Tensor]
"""A packed product: [num_tokens, in_features] to [num_tokens, out_features], bias included."""

HeadProjection = Callable[[Tensor], Tensor]
"""A product per head: [num_tokens, num_heads, in] to [num_tokens, num_heads, out]."""

Mixture = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Packed experts: states [num_tokens, hidden_size], chosen [num_tokens, top] and scores
[num_tokens, top] to [num_tokens, hidden_size].
"""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMSNorm. Gemma's `1 + weight` is computed at load."""

    weight: Tensor | None  # [size] float32; None: all ones
    eps: float


class GateKind(Enum):
    """The activation of a gated unit: `activation(gate) * up`."""

    SILU = auto()
    GELU = auto()
    GELU_TANH = auto()
    RELU = auto()
    CLAMPED_SILU = auto()  # gpt-oss: both clamped, `gate * sigmoid(1.702 * gate) * (up + 1)`


@dataclass(frozen=True, slots=True)
class Gate:
    """A gated unit's activation."""

    kind: GateKind
    limit: float = 0.0  # of CLAMPED_SILU: gate <= limit, |up| <= limit
    alpha: float = 1.0  # of CLAMPED_SILU: factor within the sigmoid


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """One layer's attention on this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    rotary_begin: int = 0  # head dims [begin, begin + dim) are rotated, first half with second
    rotary_dim: int = 0  # 0: none
    window: int | None = None  # a row sees keys whose position is above its own minus this
    chunk: int | None = None  # a row sees keys whose position // chunk is its own's
    softcap: float | None = None  # scores become tanh(score / softcap) * softcap
    sinks: Tensor | None = None  # [num_heads] float32, logits of a key that holds no value
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    norms_all_heads: bool = False  # the two norms run over all heads at once, not head by head
    norms_after_rotation: bool = False
    shared_values: bool = False  # a key's first `value_dim` columns are its value (MLA's latents)
    is_prepared: bool = False  # only ever attended with keys that are in their slots

    @property
    def key_begin(self) -> int:
        """First column of the keys in a joined row."""
        return self.num_heads * self.head_dim

    @property
    def value_begin(self) -> int:
        return self.key_begin + self.num_kv_heads * self.head_dim

    @property
    def joined_width(self) -> int:
        own_values = 0 if self.shared_values else self.num_kv_heads * self.value_dim
        return self.value_begin + own_values


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The weights that expand latents to heads, and the attention of these heads."""

    keys: Tensor  # [num_heads, spec.rotary_begin, latent], contiguous
    values: Tensor  # [num_heads, latent, spec.value_dim], contiguous
    spec: AttentionSpec  # of as many heads as are expanded at a time, prepared


class Scoring(Enum):
    """How a router turns logits into scores."""

    SOFTMAX = auto()  # over all experts, then the best
    SIGMOID = auto()  # of each expert, then the best
    SOFTMAX_OF_TOP = auto()  # over the best alone
    SIGMOID_OF_TOP = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """How experts are chosen from a router's logits."""

    top: int
    scoring: Scoring
    correction: Tensor | None = None  # [num_experts] float32, added to scores for the choice only
    num_groups: int = 1  # experts lie in groups of equal size
    top_groups: int = 1  # only the best groups' experts are chosen from
    group_top: int = 1  # a group's score is the sum of this many of its best
    normalise: bool = False  # scores of the chosen are divided by their sum
    norm_min: float = 0.0  # or by this, where the sum is less
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The weights of all experts on this rank, and the operations between their two products."""

    gate_up: Tensor  # [num_experts, 2 * width, hidden_size], gates first
    down: Tensor  # [num_experts, hidden_size, width]
    gate: Gate
    gate_up_bias: Tensor | None = None  # [num_experts, 2 * width]
    down_bias: Tensor | None = None  # [num_experts, hidden_size]
    scores_input: bool = False  # the score multiplies what an expert reads, not what it returns
    is_part: bool = False  # other ranks have more: a choice of theirs is -1, and adds nothing


class Ops(Protocol):
    """The operations."""

    name: str
    """Name of the implementation in the log and `/stats`."""
    reads_device_only: bool
    """Whether it accepts a `PagedStep` made on the device; it then implements `DeviceOps`."""
    is_invariant: bool
    """Whether a row's bits depend only on that row's sequence (`invariant.py`)."""
    reuses_results: bool
    """Whether a verb's result may be in a buffer that its next call overwrites."""
    keeps_quantised: bool
    """Whether `pack` and `pack_experts` accept a checkpoint's `QuantisedTensor`."""
    keeps_codes: bool
    """Whether `pack` accepts integer codes, as in GGUF files, and dequantises unsupported ones."""
    takes_parts: bool
    """Whether threads may compute parts of one step concurrently (`PagedStep.turn`)."""
    max_latent_heads: int
    """Maximum query heads that share one latent (`shared_values`); with more, keys are expanded."""
    expands_latents: bool
    """Whether `expand_attend` replaces `rope_store_attend` where it takes fewer multiplications."""

    def plan(self, step: StepInput, cache: KVCache) -> PagedStep:
        """Returns the arrays of a step, computed once for all layers."""

    def adopt(self, plan: PagedStep) -> PagedStep:
        """Completes a plan whose arrays were made elsewhere for this implementation."""

    def warm_up(
        self,
        specs: Iterable[AttentionSpec],
        dtype: torch.dtype,
        block_size: int,
        form: KVFormat | None = None,  # of keys and values; None: `dtype`
        *,
        shows_progress: bool = False,
    ) -> bool:
        """Compiles all that attention of these layers may need, before the first request.

        Returns:
            Whether there are kernels to compile.
        """

    def plain_inputs(self) -> AbstractContextManager[None]:
        """In this context, products do not quantise inputs, even if a checkpoint requests it.

        It is used for comparisons with a forward whose inputs are not quantised.
        """

    def pack(
        self,
        weight: Tensor,  # [out_features, in_features]
        bias: Tensor | None,  # [out_features]
    ) -> Projection:
        """Lays out a weight for its product, at load. The caller must keep no other reference."""

    def pack_heads(self, weight: Tensor) -> HeadProjection:  # [num_heads, out, in]
        """Lays out a weight per head for its products, at load."""

    def pack_experts(self, experts: Experts) -> Mixture:
        """Lays out experts, at load. A step computes only the chosen experts."""

    def rotation(
        self,
        positions: Tensor,  # [num_tokens] int32
        frequencies: Tensor,  # [rotary_dim / 2] float32, or [num_tokens, rotary_dim / 2]
        scale: float,  # of both cosines and sines
    ) -> Rotation:
        """Returns rotary angles of a step's rows, computed once for all layers of one kind."""

    def norm(self, states: Tensor, norm: Norm) -> Tensor:  # [num_tokens, size], alike
        """Computes RMSNorm. `states` may be columns of a wider tensor."""

    def add_norm(
        self,
        residual: Tensor,  # [num_tokens, hidden_size], written
        update: Tensor | None,  # [num_tokens, hidden_size]; None: the first layer's input
        after: Norm | None,  # of the update
        scale: float,  # of the update
        before: Norm | None,  # of what the next block reads
        kept: Tensor | None = None,  # [num_tokens, hidden_size], written: the residual
    ) -> Tensor:  # [num_tokens, hidden_size]
        """`residual += scale * after(update)`; returns `before(residual)`.

        Without `before`, the result is `residual` itself.
        """

    def enter(
        self,
        embedded: Tensor,  # [num_tokens, embedding_size]
        embedding_norm: Norm | None,
        feature: Tensor,  # [num_tokens, hidden_size]
        feature_norm: Norm | None,
        *,
        is_residual_normed: bool,
    ) -> tuple[Tensor, Tensor]:  # [num_tokens, both sizes]; [num_tokens, hidden_size]
        """Computes the inputs of a head's first layer.

        Returns both inputs with their norms, concatenated; and the residual stream, which is the
        feature before or after its norm.
        """

    def rope_store_attend(
        self,
        joined: Tensor,  # [num_tokens, spec.joined_width]: queries, keys, values, head by head
        rotation: Rotation | None,  # None: no rotation, whatever `spec` says
        temperature: Tensor | None,  # [num_tokens] float32, factors of the rows' queries
        plan: PagedStep,
        cache: KVCache,
        layer: int,
        spec: AttentionSpec,
    ) -> Tensor:  # [num_tokens, num_heads * value_dim]
        """Norms and rotates queries and keys, writes keys and values into their slots, attends.

        `joined` may be overwritten.
        """

    def expand_attend(
        self,
        query: Tensor,  # [num_tokens, num_heads, heads.spec.head_dim]
        latent: Tensor,  # [num_tokens, spec.head_dim], a key of all heads
        rotation: Rotation | None,
        temperature: Tensor | None,  # [num_tokens] float32
        plan: PagedStep,  # of the host
        cache: KVCache,
        layer: int,
        spec: AttentionSpec,  # of latents
        heads: LatentHeads,
    ) -> Tensor:  # [num_tokens, num_heads * heads.spec.value_dim]
        """Does the same as `rope_store_attend` for latents that are expanded for each head."""

    def gate(
        self,
        gate_up: Tensor,  # [num_tokens, 2 * width], gates first
        gate: Gate,
    ) -> Tensor:  # [num_tokens, width]
        """Computes the gated unit between an MLP's two products."""

    def route(
        self,
        logits: Tensor,  # [num_tokens, num_experts], any floating dtype
        router: Router,
    ) -> tuple[Tensor, Tensor]:  # chosen int64, scores float32, each [num_tokens, top]
        """Returns the experts of each row, and their weights."""


class DeviceOps(Ops, Protocol):
    """Further operations of the device step; `Ops.reads_device_only` is True."""

    def lay_out_on_device(self, staged: StagedStep) -> DeviceLayout:
        """Returns the rows of a step, as `plan_step` does for a step on the host."""

    def draw_on_device(
        self,
        logits: Tensor,  # [num_rows, width] float32
        positions: Tensor,  # [num_rows]
        settings: DeviceSettings,  # of the rows
        tokens: Tensor | None = None,  # [width] int64, ascending, of the columns; None: the same
    ) -> Tensor:  # [num_rows] int32
        """Draws one token per row with the target's noise, as `workers/verify/process.py` does."""

    def gumbel_argmax_on_device(
        self,
        logits: Tensor,  # [num_rows, width], of any part of the vocabulary, rows contiguous
        positions: Tensor,  # [num_rows]
        settings: DeviceSettings,  # of the rows, by temperature alone
        tokens: Tensor | int,  # [width] int64, of the columns, or of the first of neighbours
        ahead: int = 0,  # of all positions
    ) -> tuple[Tensor, Tensor]:  # each [num_rows]: float32; int32, or as `tokens`
        """Returns each row's best score and its token; the best of all parts is the drawn token."""

    def edit_on_device(
        self,
        logits: Tensor,  # [num_rows, vocab] float32, contiguous, written
        edits: DeviceEdits,
    ) -> None:
        """Applies biases, forbidden ends and penalties, as in `workers/verify/process.py`."""

    def logprobs_on_device(
        self,
        logits: Tensor,  # [num_rows, vocab], unedited
        tokens: Tensor,  # [num_rows] int32, drawn
        edits: DeviceEdits,
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities as values [num_rows, 1 + MAX_TOP] float32 and as many int32.

        The values are the drawn token's, followed by the most likely ones; the integers are the
        drawn token's rank, followed by the ids of the most likely. Only requested entries are
        defined.
        """

    def settle_on_device(
        self,
        drawn: Tensor,  # [num_rows] int32, the target's own token at every row
        walk: DeviceWalk,
    ) -> Settled:
        """Runs the walk of the coupled rule (on the host: `workers/verify/rules.py`).

        It accepts a root, and a node that equals its parent's draw if its ancestors are accepted.
        The draw at an accepted row is emitted: appended to its seat and counted.
        """

    def move_on_device(
        self,
        cache: KVCache,
        places: Tensor,  # of the cache
        settled: Settled,
        query_start: Tensor,  # [num_seqs + 1] int32
        query_len: int,  # rows of a sequence, at most
    ) -> None:
        """Moves accepted nodes' keys and values to a chain's slots, in every layer."""

    def keep_on_device(self, kept: KeptDrafts) -> None:
        """Writes drafts to seats and outcome, padded with 0, parents with -1."""

    def draft_slots_on_device(
        self,
        tables: Tensor,  # [num_drafts, num_columns] int32
        known: Tensor,  # [num_drafts] int32, committed rows
        block_size: int,
        max_known: int,
        first_spare: int,  # slot of the first draft's first row
        room: int,  # rows of a draft
    ) -> Tensor:  # [num_drafts, max_known + room] int32
        """Returns slots of committed rows, then those of the draft; the rest is undefined."""

    def draft_level_on_device(self, level: DraftLevel) -> PagedStep:
        """Returns the rows of a level, with ancestors' bits unless the drafts are chains."""


class PlannedOps:
    """The operations with the plan of the last step, which layers other than the target's share."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.last: tuple[StepInput, KVCache, PagedStep] | None = None

    def plan(self, step: StepInput, cache: KVCache) -> PagedStep:
        """Returns the plan of `step`, cached for a step and a cache."""
        last = self.last
        if last is not None and last[0] is step and last[1] is cache:
            return last[2]
        plan = self.ops.plan(step, cache)
        self.last = (step, cache, plan)
        return plan

    def attend(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, value_dim]
        plan: PagedStep,
        cache: KVCache,
        layer: int,
        spec: AttentionSpec,  # without norms and rotation
    ) -> Tensor:  # [num_tokens, num_heads, value_dim]
        """Does the same as `Ops.rope_store_attend`, for prepared queries and keys."""
        joined = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=1)
        kept, code = cache.keys[layer].dtype, cache.codes[layer]
        assert code is not None or joined.dtype == kept, (joined.dtype, kept)
        out = self.ops.rope_store_attend(joined, None, None, plan, cache, layer, spec)
        return out.unflatten(1, (spec.num_heads, spec.value_dim))
