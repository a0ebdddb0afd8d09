"""EAGLE's sections: a chain, a fixed tree of ranks, or a tree that grows where it is likely."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .heads import Choice, HeadConfig, checked_tree, expand

DEFAULT_DEPTH = 4
_MOST_SIBLINGS = 64


class EagleConfig(HeadConfig):
    """EAGLE (arXiv:2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840): TensorRT-LLM's keys.

    Which of them the checkpoint is, its tensors say.
    """

    decoding_type: Literal["Eagle"] = "Eagle"
    max_draft_len: int = Field(0, ge=0, le=64)  # levels; 0: those of `eagle_choices`, or 4
    eagle_choices: tuple[Choice, ...] | None = None  # a fixed tree
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int = Field(10, ge=1, le=_MOST_SIBLINGS)
    max_total_draft_tokens: int | None = Field(None, ge=1, le=1024)  # nodes of a dynamic tree
    eagle3_one_model: bool = True  # the head runs inside the target's worker
    eagle3_layers_to_capture: tuple[int, ...] | None = None  # whose outputs; None: the checkpoint's
    rope_theta: float | None = Field(None, gt=0)  # None: the checkpoint's

    @model_validator(mode="after")
    def _sound(self) -> EagleConfig:
        if not self.eagle3_one_model:
            raise ValueError("eagle3_one_model: the head always runs inside the target's worker")
        if self.eagle_choices is not None and self.use_dynamic_tree:
            raise ValueError("eagle_choices is a fixed tree, use_dynamic_tree another; give one")
        if self.max_total_draft_tokens is not None and not self.use_dynamic_tree:
            raise ValueError("max_total_draft_tokens belongs to use_dynamic_tree")
        depth = DEFAULT_DEPTH
        if self.eagle_choices is not None:
            nodes = checked_tree("eagle_choices", self.eagle_choices, _MOST_SIBLINGS)
            deepest = max(nodes, key=len)
            depth = len(deepest)
            if 0 < self.max_draft_len < depth:
                raise ValueError(
                    f"eagle_choices: path {list(deepest)} is {depth} deep, but max_draft_len is "
                    f"{self.max_draft_len}"
                )
        if self.max_draft_len == 0 or self.eagle_choices is not None:
            object.__setattr__(self, "max_draft_len", depth)  # the section is not in use yet
        if self.max_nodes < self.max_draft_len:
            raise ValueError(
                f"max_total_draft_tokens ({self.max_nodes}) is below the {self.max_draft_len} "
                "tokens of one path (max_draft_len)"
            )
        return self

    @property
    def nodes(self) -> tuple[Choice, ...] | None:
        """The fixed tree as rank paths, parents first."""
        return None if self.eagle_choices is None else expand(self.eagle_choices)

    @property
    def max_nodes(self) -> int:
        if self.nodes is not None:
            return len(self.nodes)
        if not self.use_dynamic_tree:
            return self.max_draft_len
        width = self.dynamic_tree_max_topK
        every = width + (self.max_draft_len - 1) * width * width
        return min(every, self.max_total_draft_tokens or every, 1024)


class Eagle3Config(EagleConfig):
    """The same; a checkpoint of EAGLE-1 is refused."""

    decoding_type: Literal["Eagle3"] = "Eagle3"  # type: ignore[assignment]
