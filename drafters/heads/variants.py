"""What may be wrong with how a head is read, as changes of its section: for calibration to try.

Published configurations contradict one another on these points, and every mistake shows as low
acceptance and nothing else: which layers are captured (ids name inputs here and outputs there),
the rotary base (trainers ignore the target's), the layout of rotary pairs, whether the residual
is normed, and which output is the next feature. One function per section type; a head without
such doubts has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ...config import Eagle3Config, EagleConfig, HeadConfig, MedusaConfig, MTPConfig
from ...config.heads import Choice

_THETAS = (10_000.0, 500_000.0, 1_000_000.0)


@dataclass(frozen=True, slots=True)
class Doubt:
    """One key of a section and the values that it might have to have."""

    key: str
    values: tuple[Any, ...]


def doubts(
    section: HeadConfig,
    capture: Sequence[int],  # target layers whose inputs the head reads, in its order
    num_layers: int,  # of the target
    target_theta: float | None,
) -> list[Doubt]:
    """What to try; values that the section has already are among them."""
    found = _DOUBTS.get(type(section))
    return found(capture, num_layers, target_theta) if found else []


def with_tree(section: HeadConfig, choices: tuple[Choice, ...]) -> HeadConfig | None:
    """`section` drafting a static tree; None where its draft has another shape."""
    key = _TREE_KEYS.get(type(section))
    if key is None:
        return None
    given = section.model_dump(exclude_defaults=True)
    for other in ("max_draft_len", *_DYNAMIC, *_RANKS):
        given.pop(other, None)
    widest = max(max(path) for path in choices) + 1
    ranks = {name: widest for name in _RANKS if name in type(section).model_fields}
    return type(section).model_validate({**given, key: choices, **ranks})


def _grown(capture: Sequence[int], num_layers: int, target_theta: float | None) -> list[Doubt]:
    thetas = sorted({*_THETAS, *([target_theta] if target_theta else [])})
    found = [Doubt("rope_theta", tuple(thetas)), Doubt("rope_layout", ("half", "interleaved"))]
    if tuple(capture) == (num_layers,):
        return found
    outputs = [layer - 1 for layer in capture]  # the key names outputs
    shifted = [tuple(layer + by for layer in outputs) for by in (-1, 0, 1)]
    inside = tuple(ids for ids in shifted if min(ids) >= -1 and max(ids) < num_layers - 1)
    return [
        Doubt("eagle3_layers_to_capture", inside),
        *found,
        Doubt("norm_before_residual", (False, True)),
        Doubt("recycle", ("pre_norm", "post_norm")),
    ]


def _modules(capture: Sequence[int], num_layers: int, target_theta: float | None) -> list[Doubt]:
    return [
        Doubt("recycle", ("post_norm", "pre_norm")),
        Doubt("zero_first_embedding", (False, True)),
    ]


_RANKS = ("top_k",)  # keys that bound the ranks of a tree
_DYNAMIC = ("use_dynamic_tree", "dynamic_tree_max_topK", "max_total_draft_tokens")
_DOUBTS: Mapping[type[HeadConfig], Callable[..., list[Doubt]]] = MappingProxyType(
    {EagleConfig: _grown, Eagle3Config: _grown, MTPConfig: _modules}
)
_TREE_KEYS: Mapping[type[HeadConfig], str] = MappingProxyType(
    {
        EagleConfig: "eagle_choices",
        Eagle3Config: "eagle_choices",
        MTPConfig: "mtp_choices",
        MedusaConfig: "medusa_choices",
    }
)
