"""Loads a head, and moves its layers onto the operations that the target runs on.

Layers of `drafters/heads/llama.py` are `head_layers.py`'s; those of the target's own kind are the
family decoder's (`head_family.py`). A layer that the operations cannot express, or that differs
from its module there, stays a torch module.
"""

from __future__ import annotations

import logging

from ..config import HeadConfig
from ..drafters.heads.block import BlockModule
from ..drafters.heads.llama import join_projections
from ..drafters.heads.protocol import Head, TargetFacts
from ..drafters.registry import build_head
from .head_family import family_of, kept_by, take_over
from .head_layers import fuse_layers
from .model.packed import pack_linears
from .ops import PlannedOps

log = logging.getLogger(__name__)


def load_head(
    config: HeadConfig, target: TargetFacts, planned: PlannedOps | None, *, fused: bool = True
) -> tuple[Head, str]:
    """The head of `config`, and why its layers are torch modules; "" if they are not.

    Args:
        planned: the operations that run its layers; None: the device has no kernels.
        fused: False: layers stay modules, for comparisons.

    Raises as `build_head` does.
    """
    if fused:
        head, reason = _load(config, target, planned)
    else:
        head, reason = build_head(config, target), "the caller asked for modules"
    if reason:
        if head.layers and fused:
            log.warning("the head's layers run as torch modules: %s", reason)
        join_projections(head.module)
    ops = None if planned is None or reason else planned.ops
    pack_linears(head.module, target.device, ops)
    return head, reason


def _load(config: HeadConfig, target: TargetFacts, planned: PlannedOps | None) -> tuple[Head, str]:
    head = build_head(config, target)
    if not head.layers:
        return head, "it has no decoder layers"
    if planned is None:
        return head, "the device has no kernels"
    modules = [part for part in head.module.modules() if isinstance(part, BlockModule)]
    if not modules:
        return head, fuse_layers(head.module, planned, target.dtype)
    spec = family_of(modules)
    if isinstance(spec, str):
        return head, spec
    if reason := take_over(modules, spec, planned, target.dtype):
        return build_head(config, target), reason
    own = len(modules)  # the head's first layers
    head.layers = (*map(kept_by, modules, head.layers), *head.layers[own:])
    return head, ""
