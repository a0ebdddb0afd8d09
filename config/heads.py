"""Sections of the heads that draft inside the target's workers.

`medusa_choices` are checked and expanded here, so that a wrong tree is said before anything is
loaded. Keys are TensorRT-LLM's.
"""

from __future__ import annotations

from pathlib import Path

from .section import SpeculationBase

Choice = tuple[int, ...]


class HeadConfig(SpeculationBase):
    """What sections of colocated heads share."""

    speculative_model: str  # folder of the head's checkpoint

    @property
    def folder(self) -> Path:
        return Path(self.speculative_model)


def expand(choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """The tree's nodes as rank paths, a parent before its children, likely ones first.

    `choices` are either all nodes, or only the paths that no other continues.

    Raises:
        ValueError: a path is empty, negative, given twice, or hangs in the air.
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
        ValueError: it is no tree, or asks for a rank beyond `top_k`; names the path.
    """
    nodes = expand(choices)
    if not nodes:
        raise ValueError(f"{name} is empty")
    for path in nodes:
        if max(path) >= top_k:
            raise ValueError(
                f"{name}: path {list(path)} asks for rank {max(path)}, but only the {top_k} most "
                "likely tokens are looked at"
            )
    return nodes
