"""Loads a head, and moves its layers onto the operations that the target runs on.

Layers of `drafters/heads/llama.py` are `head_layers.py`'s; those of the target's own kind are the
family decoder's (`head_family.py`). A layer that the operations cannot express, or that differs
from its module there, stays a torch module.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..config import HeadConfig
from ..drafters.heads.block import BlockModule
from ..drafters.heads.llama import join_projections
from ..drafters.heads.protocol import Head, TargetFacts
from ..drafters.registry import build_head
from .head_family import family_of, kept_by, take_over
from .head_layers import fuse_layers
from .model.head_shards import HeadShards
from .model.packed import pack_linears
from .ops import PlannedOps

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head as a worker runs it."""

    head: Head
    module_reason: str  # why its layers are torch modules; "": they are not
    is_cut: bool = False  # whether this rank keeps a part of the keys that `head.layers` names


def load_head(
    config: HeadConfig,
    target: TargetFacts,
    planned: PlannedOps | None,
    shards: HeadShards,
    *,
    fused: bool = True,
) -> LoadedHead:
    """The head of `config`.

    Args:
        planned: the operations that run its layers; None: the device has no kernels.
        shards: how it is divided among the ranks that run it; collective if there are several.
        fused: False: layers stay modules, for comparisons.

    Raises as `build_head` does.
    """
    if fused:
        loaded = _load(config, target, planned, shards)
    else:
        loaded = LoadedHead(build_head(config, target), "the caller asked for modules")
    head, reason = loaded.head, loaded.module_reason
    if reason:
        if head.layers and fused:
            log.warning("the head's layers run as torch modules: %s", reason)
        join_projections(head.module)
    cut = [(output, shards.cut_output(output)) for output in head.outputs]
    ops = None if planned is None or reason else planned.ops
    pack_linears(head.module, target.device, ops)
    for output, vocab_size in cut:
        if vocab_size is not None:
            shards.connect_output(output, vocab_size)
    return loaded


def _load(
    config: HeadConfig, target: TargetFacts, planned: PlannedOps | None, shards: HeadShards
) -> LoadedHead:
    head = build_head(config, target)
    if not head.layers:
        return LoadedHead(head, "it has no decoder layers")
    if planned is None:
        return LoadedHead(head, "the device has no kernels")
    modules = [part for part in head.module.modules() if isinstance(part, BlockModule)]
    if not modules:
        reason, is_cut = fuse_layers(head.module, planned, target.dtype, shards)
        return LoadedHead(head, reason, is_cut)
    spec = family_of(modules)
    if isinstance(spec, str):
        return LoadedHead(head, spec)
    if reason := take_over(modules, spec, planned, target.dtype, shards):
        return LoadedHead(build_head(config, target), reason)
    own = len(modules)  # the head's first layers
    # What `kept_by` returns is this rank's part.
    head.layers = (*map(kept_by, modules, head.layers), *head.layers[own:])
    return LoadedHead(head, "")
