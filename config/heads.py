"""Sections of the heads that draft from the target's hidden states.

`medusa_choices` are checked and expanded here, so that a wrong tree is reported before anything is
loaded. Keys are TensorRT-LLM's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from .section import SpeculationBase
from .strict import at_key

Choice = tuple[Annotated[int, Field(strict=True)], ...]
_MAX_DEPTH = 64  # levels of a fixed tree
_MAX_NODES = 1024


class HeadConfig(SpeculationBase):
    """What sections of heads share: which, and where it runs."""

    speculative_model: str = Field(min_length=1, description="Folder of the head's checkpoint.")
    placement: Literal["colocated", "separate"] = Field(
        "colocated",
        description="colocated: in the target's ranks; separate: in a worker of its own.",
    )
    draft_timeout_s: float = Field(
        1.0, gt=0, le=60, description="separate: seconds after which a step goes without the draft."
    )
    feature_transport: Literal["auto", "socket", "distributed"] = Field(
        "auto", description="separate: how hidden states are sent."
    )
    draft_tensor_parallel_size: Literal[1] = Field(
        1, description="vLLM's key; a head is not sharded."
    )

    @model_validator(mode="after")
    def _keys_of_its_placement(self) -> HeadConfig:
        for key in ("draft_timeout_s", "feature_transport"):  # defaults pass, as in the rules' keys
            default = type(self).model_fields[key].default
            if self.placement == "colocated" and getattr(self, key) != default:
                raise at_key(
                    key,
                    f"{key} belongs to placement 'separate'; this head is colocated, and its draft "
                    "comes with the verdict",
                )
        return self

    @property
    def folder(self) -> Path:
        return Path(self.speculative_model)

    def folder_beside(self, target: str) -> Path:
        """Where the checkpoint is; some heads are a part of the target's."""
        return self.folder


def expand(choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """The tree's nodes as rank paths, a parent before its children, likely ones first.

    `choices` are either all nodes, or only the paths that no other continues.

    Raises:
        ValueError: a path is empty, negative, given twice, or without its parent.
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
    """`choices` expanded.

    Raises:
        ValueError: it is no tree, too large, or asks for a rank beyond `top_k`; names the path.
    """
    for path in choices:
        if len(path) > _MAX_DEPTH:
            raise at_key(
                name, f"{name}: a path is {len(path)} deep; at most {_MAX_DEPTH} are drafted"
            )
    try:
        nodes = expand(choices)
    except ValueError as error:
        raise at_key(name, f"{name}: {error}") from None
    if not nodes:
        raise at_key(name, f"{name} is empty: leave it out, or list paths of ranks")
    if len(nodes) > _MAX_NODES:
        raise at_key(
            name, f"{name} is a tree of {len(nodes)} nodes; at most {_MAX_NODES} are drafted"
        )
    for path in nodes:
        if max(path) >= top_k:
            raise at_key(
                name,
                f"{name}: path {list(path)} asks for rank {max(path)}, but only the {top_k} most "
                "likely tokens are looked at",
            )
    return nodes
