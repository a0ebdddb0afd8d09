"""Sections of the heads, which draft from the target's hidden states.

`medusa_choices` are validated and expanded here, so that an invalid tree is reported before
anything is loaded. Keys are TensorRT-LLM's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .section import (
    LONGEST_DRAFT,
    MaxDraftLen,
    PlacedConfig,
    PreparingConfig,
    SpeculationCacheConfig,
)
from .strict import at_key

Choice = tuple[Annotated[int, Field(strict=True)], ...]
_MAX_DEPTH = 64  # levels of a fixed tree


class HeadConfig(PlacedConfig):
    """Keys shared by the sections of heads: the checkpoint, and its placement."""

    of_separate: ClassVar[tuple[str, ...]] = ("draft_timeout_s", "feature_transport")

    speculative_model: str = Field(min_length=1, description="Folder of the head's checkpoint.")
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated: in the target's ranks; separate: in a worker of its own."""
    feature_transport: Literal["auto", "socket", "distributed"] = "auto"
    """separate: how hidden states are transferred."""
    p_min: float = Field(0.0, ge=0, le=1)
    """A draft or branch ends where the probability of its best token is lower."""
    draft_tensor_parallel_size: Literal[1] = 1
    """vLLM's key; a head is not sharded."""

    @property
    def folder(self) -> Path:
        return Path(self.speculative_model)

    @property
    def is_chain(self) -> bool:
        """True if no draft branches."""
        return self.max_nodes == self.draft_len

    @property
    def num_prepared(self) -> int:
        """Maximum number of tokens prepared per step."""
        return 0

    def folder_beside(self, target: str) -> Path:
        """Returns the checkpoint's folder; some heads are part of the target's checkpoint."""
        return self.folder

    def at_its_place(self, target: str) -> Self:
        """Returns the section with an absolute path, which is valid in every process."""
        folder = str(self.folder_beside(target).resolve())
        return self.model_copy(update={"speculative_model": folder})


Shape = Literal["chain", "tree"]
"""Shape of drafts whose distributions are computed in one forward, unless a key decides it."""


def best_first_nodes(num_levels: int, max_total_draft_tokens: int | None) -> int:
    """Returns the number of nodes of a best-first tree; default: twice those of a chain.

    Raises:
        ValueError: it is below the length of one path.
    """
    count = min(max_total_draft_tokens or 2 * num_levels, LONGEST_DRAFT)
    check_whole_path(count, num_levels)
    return count


class BestFirstConfig(HeadConfig):
    """Heads that compute the distributions of all levels in one forward, so any tree fits."""

    shape: Shape = "chain"
    """tree: the best tree (DDTree, arXiv:2604.12989) with max_total_draft_tokens nodes in
    max_draft_len levels."""
    max_total_draft_tokens: int | None = Field(None, ge=1, le=1024)
    """shape tree: number of nodes; default: twice the number of levels."""

    @property
    def max_nodes(self) -> int:
        if self.shape == "tree":
            return best_first_nodes(self.draft_len, self.max_total_draft_tokens)
        return super().max_nodes

    @property
    def is_chain(self) -> bool:
        return self.shape == "chain" and super().is_chain

    def check_nodes(self) -> None:
        """Raises `ValueError` if `max_total_draft_tokens` does not match the shape."""
        if self.shape == "tree":
            best_first_nodes(self.draft_len, self.max_total_draft_tokens)
        elif self.max_total_draft_tokens not in (None, self.max_nodes):
            raise at_key("max_total_draft_tokens", "max_total_draft_tokens belongs to shape 'tree'")


def check_whole_path(num_nodes: int, num_levels: int, path: str = "path (max_draft_len)") -> None:
    """Raises `ValueError` if a tree has fewer nodes than a single path."""
    if num_nodes < num_levels:
        raise at_key(
            "max_total_draft_tokens",
            f"max_total_draft_tokens ({num_nodes}) is below the {num_levels} tokens of one {path}",
        )


def expand(choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Returns the tree's nodes as rank paths, parents before children and likely nodes first.

    `choices` lists either all nodes or only the paths of the leaves.

    Raises:
        ValueError: a path is empty, negative, repeated, or lacks its parent.
    """
    seen: set[Choice] = set()
    for path in choices:
        if not path or min(path) < 0:
            raise ValueError(f"path {list(path)} must be ranks of 0 and above, one per level")
        if path in seen:
            raise ValueError(f"path {list(path)} is given twice")
        seen.add(path)
    prefixes = {path[:depth] for path in seen for depth in range(1, len(path))}
    if seen & prefixes:  # all nodes are listed, so that a missing one is a mistake
        for path in choices:
            if len(path) > 1 and path[:-1] not in seen:
                raise ValueError(
                    f"path {list(path)} has no parent {list(path[:-1])}; list all nodes, or only "
                    "the longest paths"
                )
    return tuple(sorted(seen | prefixes, key=lambda path: (sum(path) + len(path), path)))


def checked_tree(name: str, choices: tuple[Choice, ...], top_k: int) -> tuple[Choice, ...]:
    """Expands `choices` to all nodes.

    Raises:
        ValueError: it is not a tree, is too large, or has a rank beyond `top_k`; names the path.
    """
    if not choices:
        raise at_key(name, f"{name} is empty: leave it out, or list paths of ranks")
    deepest = max(map(len, choices))
    if deepest > _MAX_DEPTH:
        raise at_key(name, f"a path is {deepest} deep; at most {_MAX_DEPTH} are drafted")
    try:
        nodes = expand(choices)
    except ValueError as error:
        raise at_key(name, str(error)) from None
    if len(nodes) > LONGEST_DRAFT:
        raise at_key(
            name, f"{name} is a tree of {len(nodes)} nodes; at most {LONGEST_DRAFT} are drafted"
        )
    for path in nodes:
        if max(path) >= top_k:
            raise at_key(
                name,
                f"path {list(path)} asks for rank {max(path)}, but only the {top_k} most likely "
                "tokens are looked at",
            )
    return nodes


DEFAULT_DEPTH = 4
_MOST_SIBLINGS = 64


class TreeDraftingConfig(HeadConfig, PreparingConfig):
    """Heads that draft from their own output: a chain, a fixed tree of ranks, or a dynamic tree
    that grows at likely nodes (EAGLE-2, arXiv:2406.16858)."""

    choices_key: ClassVar[str]  # key of the fixed tree
    of_separate = (*HeadConfig.of_separate, "speculation_cache")

    max_draft_len: MaxDraftLen = 0
    """Levels of the draft; 0: the depth of the fixed tree, or a default."""
    use_dynamic_tree: bool = Field(False, description="Grow the tree where it is likely.")
    dynamic_tree_max_topK: int = Field(10, ge=1, le=_MOST_SIBLINGS)
    """Dynamic tree: maximum children of a node, and nodes of a level."""
    max_total_draft_tokens: int | None = Field(None, ge=1, le=1024)
    """Nodes of a dynamic tree; default: dynamic_tree_max_topK per level."""

    @property
    def choices(self) -> tuple[Choice, ...] | None:
        """The fixed tree as given."""
        raise NotImplementedError

    @property
    def is_grown(self) -> bool:
        """True if a draft is a tree whose shape depends on the text."""
        return self.use_dynamic_tree

    @property
    def is_chain(self) -> bool:
        if self.use_dynamic_tree:
            return self.dynamic_tree_max_topK == 1
        return not self.is_grown and super().is_chain

    @property
    def default_len(self) -> int:
        """Number of levels if no length is given."""
        return DEFAULT_DEPTH

    @property
    def draft_len(self) -> int:
        if self.choices is not None:
            return max(map(len, self.choices))
        return self.max_draft_len or self.default_len

    @property
    def nodes(self) -> tuple[Choice, ...] | None:
        """The fixed tree as rank paths, parents first."""
        return None if self.choices is None else expand(self.choices)

    @property
    def max_nodes(self) -> int:
        if self.nodes is not None:
            return len(self.nodes)
        if not self.use_dynamic_tree:
            return self.draft_len
        width = self.dynamic_tree_max_topK
        every = width + (self.draft_len - 1) * width * width
        return min(every, self.max_total_draft_tokens or width * self.draft_len, LONGEST_DRAFT)

    @property
    def reach(self) -> int:
        return 1  # a row includes the next token's embedding

    def _bounds(self, key: str) -> bool:
        """Returns True if the key applies to this kind of tree."""
        return self.use_dynamic_tree

    @model_validator(mode="after")
    def _one_shape(self) -> TreeDraftingConfig:
        name = self.choices_key
        if self.choices is not None and self.use_dynamic_tree:
            raise at_key(name, f"{name} is a fixed tree, use_dynamic_tree another; give one")
        if self.choices is not None:
            deepest = max(checked_tree(name, self.choices, _MOST_SIBLINGS), key=len)
            if 0 < (self.max_draft_len or 0) < len(deepest):
                raise at_key(
                    name,
                    f"path {list(deepest)} is {len(deepest)} deep, but max_draft_len is "
                    f"{self.max_draft_len}",
                )
        for key in ("max_total_draft_tokens", "dynamic_tree_max_topK"):
            value = getattr(self, key)
            is_said = key == "max_total_draft_tokens" and value == self.max_nodes
            if not (self._bounds(key) or is_said or self.is_default(key)):
                raise at_key(key, f"{key} ({value}) belongs to use_dynamic_tree, which is false")
        check_whole_path(self.max_nodes, self.draft_len)
        return self

    @property
    def num_prepared(self) -> int:
        cache = self.speculation_cache
        return cache.budget * self.prepared_len if cache is not None else 0

    @model_validator(mode="after")
    def _prepares_chains(self) -> TreeDraftingConfig:
        if self.speculation_cache is not None and (self.nodes is not None or self.is_grown):
            raise at_key(
                "speculation_cache",
                "speculation_cache prepares chains; these drafts are trees: leave out the keys of "
                "the tree, or the cache",
            )
        return self


BLOCK_LEN = 7  # tokens of a block drafter's draft
OutputLayer = Annotated[int, Field(strict=True, ge=0)]
Layer = Annotated[int, Field(strict=True, ge=-1)]  # -1: the final state after its norm
State = Annotated[int, Field(strict=True)]  # negative: counted from the end


class EagleConfig(TreeDraftingConfig):
    """EAGLE (arXiv:2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840): TensorRT-LLM's keys.

    The version is derived from the tensors of the checkpoint.
    """

    choices_key = "eagle_choices"

    decoding_type: Literal["Eagle"] = "Eagle"
    eagle_choices: tuple[Choice, ...] | None = None
    """A fixed tree, as paths of ranks."""
    eagle3_layers_to_capture: tuple[Layer, ...] | None = Field(None, min_length=1)
    """Target layers whose outputs the head reads; default: the checkpoint's."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the head's rotary positions; default: the checkpoint's."""
    rope_layout: Literal["half", "interleaved"] | None = None
    """Which dimensions are rotated together; default: the checkpoint's."""
    norm_before_residual: bool | None = None
    """EAGLE-3: whether the residual is the normed feature; default: the checkpoint's."""
    recycle: Literal["post_norm", "pre_norm"] | None = None
    """Output that becomes the next feature; default: the checkpoint's."""

    @property
    def choices(self) -> tuple[Choice, ...] | None:
        return self.eagle_choices


class Eagle3Config(EagleConfig):
    """EAGLE-2 or EAGLE-3; an EAGLE-1 checkpoint is rejected."""

    decoding_type: Literal["Eagle3"] = "Eagle3"  # type: ignore[assignment]


class PEagleConfig(EagleConfig):
    """P-EAGLE (arXiv:2602.01469): an EAGLE-3 head that drafts all tokens in one forward."""

    decoding_type: Literal["PEagle"] = "PEagle"  # type: ignore[assignment]
    mask_token_id: int | None = Field(None, ge=0, lt=2**31)
    """Mask token, whose embedding stands for tokens to be drafted; default: the checkpoint's."""
    shape: Shape = "chain"
    """tree: the best tree of max_total_draft_tokens nodes (DDTree, arXiv:2604.12989)."""
    speculation_cache: SpeculationCacheConfig | None = None
    """Must be null, because a cache needs a head that reads its own output; P-EAGLE reads masks."""

    @property
    def default_len(self) -> int:
        return 7

    @property
    def is_grown(self) -> bool:
        return self.use_dynamic_tree or self.shape == "tree"

    @property
    def max_nodes(self) -> int:
        if self.shape == "tree":
            return best_first_nodes(self.draft_len, self.max_total_draft_tokens)
        return super().max_nodes

    def _bounds(self, key: str) -> bool:
        is_best_first = self.shape == "tree" and key == "max_total_draft_tokens"
        return is_best_first or super()._bounds(key)

    @model_validator(mode="after")
    def _one_tree(self) -> PEagleConfig:
        for key in ("eagle_choices", "use_dynamic_tree"):
            if self.shape == "tree" and not self.is_default(key):
                raise at_key("shape", f"shape 'tree' is the best tree, {key} another; give one")
        return self

    @model_validator(mode="after")
    def _prepares_nothing(self) -> PEagleConfig:
        if self.speculation_cache is not None:
            raise at_key(
                "speculation_cache",
                "speculation_cache needs a head that reads its own output, from which it drafts "
                "while the target's states are not there; P-EAGLE reads masks: use Eagle3 or MTP",
            )
        return self


class BlockConfig(BestFirstConfig):
    """Keys shared by drafters that fill a block in one forward."""

    max_draft_len: MaxDraftLen = Field(0, description="Draft tokens; 0: 7, or what a block has.")
    target_layer_ids: tuple[OutputLayer, ...] | None = Field(None, min_length=1)
    """Target layers whose outputs the head reads; default: the checkpoint's."""
    mask_token_id: int | None = Field(None, ge=0, lt=2**31)
    """Mask token, whose embedding stands for tokens to be drafted; default: the checkpoint's."""
    causal: bool | None = None
    """Whether a row of the block only attends to earlier rows; default: the checkpoint's, by
    layer."""
    sample_from_anchor: bool | None = None
    """Whether the last known token's row also drafts; default: the checkpoint's."""
    output_layer: Literal["own", "target"] | None = None
    """Output layer used for drafts; default: the checkpoint's own, if it has one."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the head's rotary positions; default: the checkpoint's."""
    rope_layout: Literal["half", "interleaved"] | None = None
    """Dimensions that are rotated together; default: the checkpoint's."""
    draft_window: int | None = Field(None, ge=1)
    """Number of positions, up to its own, that a row of the block reads; default: the
    checkpoint's."""

    @property
    def draft_len(self) -> int:
        return self.max_draft_len or BLOCK_LEN

    @model_validator(mode="after")
    def _one_tree(self) -> BlockConfig:
        self.check_nodes()
        return self


class DFlashConfig(BlockConfig):
    """DFlash and DFlash2: fill a block of masks, conditioned on hidden states of the target."""

    decoding_type: Literal["DFlash"] = "DFlash"


class DSparkConfig(BlockConfig):
    """DSpark (arXiv:2607.05147): DFlash with a Markov head and a confidence head."""

    decoding_type: Literal["DSpark"] = "DSpark"


class PARD2Config(BestFirstConfig):
    """A small model with masks that reads the target's states (PARD-2, arXiv:2605.08632)."""

    decoding_type: Literal["PARD2"] = "PARD2"
    max_draft_len: MaxDraftLen = Field(0, description="Draft tokens; 0: 8.")
    mask_token_id: int | None = Field(None, ge=0, lt=2**31)
    """Mask token for tokens to be drafted; default: the checkpoint's `pard_token`."""
    pard2_target_layers: tuple[State, ...] | None = Field(None, min_length=1)
    """States of the target that the model reads: 0 is the embedding, -1 the final state; default:
    the checkpoint's."""
    pard2_scale: float | None = Field(None, gt=0)
    """Scale of the features that are added to its embeddings; default: the checkpoint's."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the model's rotary positions; default: the checkpoint's."""
    rope_layout: Literal["half", "interleaved"] | None = None
    """Which dimensions are rotated together; default: the checkpoint's."""

    @property
    def draft_len(self) -> int:
        return self.max_draft_len or 8

    @model_validator(mode="after")
    def _one_tree(self) -> PARD2Config:
        self.check_nodes()
        return self


MEDUSA_LEN = 4  # nodes of the chain that is drafted without `medusa_choices`


class MedusaConfig(BestFirstConfig):
    """Medusa (arXiv:2401.10774), with TensorRT-LLM's keys."""

    decoding_type: Literal["Medusa"] = "Medusa"
    max_draft_len: MaxDraftLen = Field(0, description="Draft nodes; 0: the whole tree.")
    medusa_choices: tuple[Choice, ...] | None = None
    """The tree, as paths of ranks; default: a chain of each head's best token."""
    num_medusa_heads: int | None = Field(None, ge=1, le=64)
    """Heads of the checkpoint; default: derived from its tensors."""
    top_k: int = Field(10, ge=1, le=64, description="Tokens considered per head.")

    @model_validator(mode="after")
    def _sound(self) -> MedusaConfig:
        if self.medusa_choices is not None:
            checked_tree("medusa_choices", self.medusa_choices, self.top_k)
        is_best_first = self.shape == "tree"
        if is_best_first and self.medusa_choices is not None:
            raise at_key("shape", "shape 'tree' is the best tree, medusa_choices another; give one")
        if is_best_first and not self.is_default("top_k"):
            raise at_key("top_k", "top_k belongs to medusa_choices; shape 'tree' has no such bound")
        self.check_nodes()
        deepest = max(len(path) for path in self.nodes)
        if self.num_medusa_heads is not None and deepest > self.num_medusa_heads:
            path = next(path for path in self.nodes if len(path) == deepest)
            key, asked = "medusa_choices", f"medusa_choices: path {list(path)} is {deepest} deep"
            if self.medusa_choices is None:
                key = "max_draft_len"
                asked = f"max_draft_len asks for a chain of {deepest}, one token per head"
            raise at_key(key, f"{asked}, but num_medusa_heads is {self.num_medusa_heads}")
        return self

    @property
    def draft_len(self) -> int:
        if self.max_draft_len:
            return self.max_draft_len
        if self.medusa_choices is not None:
            return len(self.nodes)
        return self.num_medusa_heads or MEDUSA_LEN

    @property
    def is_chain(self) -> bool:
        return self.shape == "chain" and max(map(len, self.nodes)) == len(self.nodes)

    @property
    def nodes(self) -> tuple[Choice, ...]:
        """The fixed tree as rank paths, parents first."""
        if self.medusa_choices is None:
            return tuple((0,) * depth for depth in range(1, self.draft_len + 1))
        return expand(self.medusa_choices)


class MTPConfig(TreeDraftingConfig):
    """DeepSeek-V3's MTP modules (arXiv:2412.19437, section 2.2) and similar: TensorRT-LLM's
    keys."""

    choices_key = "mtp_choices"

    decoding_type: Literal["MTP"] = "MTP"
    speculative_model: str | None = Field(  # type: ignore[assignment]
        None, min_length=1, description="Folder of the modules; default: the target's."
    )
    num_nextn_predict_layers: int = Field(1, ge=1, le=64)
    """Draft length if max_draft_len is not given."""
    use_mtp_vanilla: bool | None = None
    """Whether each token has its own module; default: if the checkpoint has several."""
    mtp_choices: tuple[Choice, ...] | None = None
    """A fixed tree, as paths of ranks."""
    recycle: Literal["post_norm", "pre_norm"] | None = None
    """Output that becomes the next feature; default: by the checkpoint's layout."""
    target_state: Literal["post_norm", "pre_norm"] | None = None
    """Whether the target's state is read after or before its final norm; default: by the layout."""
    zero_first_embedding: bool = False
    """Whether the first row's embedding is zero, as in vLLM."""

    @property
    def choices(self) -> tuple[Choice, ...] | None:
        return self.mtp_choices

    @property
    def default_len(self) -> int:
        return self.num_nextn_predict_layers

    def folder_beside(self, target: str) -> Path:
        return Path(self.speculative_model or target)


BEAM_LEN = 5  # tokens of a beam


class ReDrafterConfig(HeadConfig):
    """ReDrafter (arXiv:2403.09919), with TensorRT-LLM's keys."""

    decoding_type: Literal["ReDrafter"] = "ReDrafter"
    redrafter_num_beams: int = Field(5, ge=1, le=64)
    """Beams; they are merged into a tree."""
    redrafter_draft_len_per_beam: int = Field(0, ge=0, le=LONGEST_DRAFT)
    """Tokens of a beam; 0: max_draft_len, or 5."""
    max_draft_len: MaxDraftLen = Field(0, description="Tokens of a beam, by its common name.")
    max_total_draft_tokens: int | None = Field(None, ge=1, le=1024)
    """Nodes of the merged beams; default: all."""

    @model_validator(mode="after")
    def _sound(self) -> ReDrafterConfig:
        lengths = {self.redrafter_draft_len_per_beam, self.max_draft_len or 0} - {0}
        if len(lengths) > 1:
            raise at_key(
                "redrafter_draft_len_per_beam",
                f"redrafter_draft_len_per_beam ({self.redrafter_draft_len_per_beam}) and "
                f"max_draft_len ({self.max_draft_len}) say the same; give one of the two",
            )
        check_whole_path(self.max_nodes, self.draft_len, "beam (redrafter_draft_len_per_beam)")
        return self

    @property
    def is_chain(self) -> bool:
        return self.redrafter_num_beams == 1

    @property
    def draft_len(self) -> int:
        return self.redrafter_draft_len_per_beam or self.max_draft_len or BEAM_LEN

    @property
    def max_nodes(self) -> int:
        every = self.redrafter_num_beams * self.draft_len
        return min(every, self.max_total_draft_tokens or every, LONGEST_DRAFT)
