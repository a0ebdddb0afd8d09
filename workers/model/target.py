"""The target: a Hugging Face causal LM folder as one rank of a paged, sharded model.

Called by the tensor-parallel worker, for draft models too. The bridge is loaded first, always;
where the architecture is of the family, the family's decoder takes over its weights once the two
agree on a short text. Otherwise the bridge serves, and `PagedModel.forward_choice` has the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ...errors import ConfigError
from ..collective import Collective
from ..ops import Ops, make_invariant_ops, make_ops, missing_kernels
from .bridge import (
    build_meta,
    fuse_norms,
    materialise_constants,
    shrink_heads,
    tp_hints,
)
from .bridged import BridgeRunner
from .checkpoint.weights import Checkpoint
from .family import FamilyRunner, FamilySpec, build_family, compare, read_spec
from .info import ModelInfo, describe
from .outline import model_heads
from .packed import pack_linears
from .paged import ForwardChoice, PagedModel
from .parallel import connect
from .settings import read_config
from .sharding import ShardPlan, plan_shards, plan_vocabulary
from .tensors import load_weights

Wish = Literal["auto", "family", "bridge"]


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of `load_model`."""

    path: Path
    dtype: torch.dtype | None
    device: torch.device
    collective: Collective
    trust_remote_code: bool
    allow_pickle: bool
    deterministic: bool
    known: ForwardChoice | None


def load_model(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device,
    collective: Collective,
    forward: Wish = "auto",
    ops: Ops | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    deterministic: bool = False,
    known: ForwardChoice | None = None,
) -> PagedModel:
    """Load this rank's shard. `dtype` None is the checkpoint's; `ops` None the device's fastest.

    `deterministic` takes operations whose rows do not depend on the batch. `known` is what an
    earlier load of the same model on such a device has chosen; the two forwards are not compared
    again. Every rank has one, or none has.

    Raises:
        CheckpointError: the folder is no checkpoint that can be served.
        ConfigError: `forward` is "family", or `deterministic` is asked for, and the family cannot
            serve this model.
    """
    request = _Request(
        path, dtype, device, collective, trust_remote_code, allow_pickle, deterministic, known
    )
    config = read_config(path, trust_remote_code=trust_remote_code)
    own = ops is not None or deterministic
    spec = _wanted_family(config, forward, None if own else request)
    if isinstance(spec, FamilySpec):
        found = _load_family(request, config, spec, ops)
        if isinstance(found, PagedModel):
            return found
        spec = found
    if deterministic:
        raise ConfigError(
            f"deterministic: only the family's decoder is batch-invariant, and it cannot serve "
            f"{str(path)!r}: {spec}; leave `deterministic` out",
            field="deterministic",
        )
    if forward == "family":
        raise ConfigError(
            f"forward: 'family' cannot serve {str(path)!r}: {spec}; allowed for it are 'auto' "
            "and 'bridge'",
            field="forward",
        )
    info, model, plan = _load_modules(request, config)
    pack_linears(model, device)
    connect(model, plan, collective, info.vocab_size)
    return PagedModel(
        info, model, device, collective, BridgeRunner(model, info), ForwardChoice("bridge", spec)
    )


def _wanted_family(config: Any, forward: Wish, request: _Request | None) -> FamilySpec | str:
    """The family's description of the model, or why the bridge serves it.

    `request` is None if the caller brings its own operations. Without kernels for the device the
    family launches more operations than the bridge does, so `auto` leaves it to the bridge.
    """
    if forward == "bridge":
        return "the configuration asks for it"
    if request is not None and request.known is not None and request.known.kind == "bridge":
        return request.known.reason
    if forward == "auto" and request is not None:
        dtype = request.dtype or getattr(config, "dtype", None)
        if missing := missing_kernels(request.device, dtype):
            return missing
    return read_spec(config)


def _load_family(
    request: _Request, config: Any, spec: FamilySpec, ops: Ops | None
) -> PagedModel | str:
    """The family's model, or why it is not to be used. Weights are read once."""
    collective, device = request.collective, request.device
    ops = ops or _make_ops(request)  # refuses before weights are read
    info, model, plan = _load_modules(request, config, keeps_quantised=ops.keeps_quantised)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    pack_linears(nn.ModuleList(ends), device, ops)  # the layers' are packed by the family
    connect(model, plan, collective, info.vocab_size)
    bridge = BridgeRunner(model, info)
    wanted = compare.run(bridge, bridge.kv_shapes, info, device)
    try:
        decoder = build_family(model, spec, bridge.facts, ops, plan, collective)
    except (AttributeError, ValueError) as error:
        return f"its modules are not those of the family: {error}"
    runner = FamilyRunner(decoder, info, collective.size)
    if request.known is None:
        mismatch = compare.mismatch(
            compare.run(runner, runner.kv_shapes, info, device), wanted, info.dtype, collective
        )
        if mismatch:
            return f"the family's logits differ from the bridge's: {mismatch}"
    choice = ForwardChoice("family", operations=ops.name)
    return PagedModel(info, model, device, collective, runner, choice)


def _make_ops(request: _Request) -> Ops:
    """The device's operations, of the kind that is asked for."""
    info = describe(
        request.path,
        dtype=request.dtype,
        trust_remote_code=request.trust_remote_code,
        allow_pickle=request.allow_pickle,
    )
    make = make_invariant_ops if request.deterministic else make_ops
    return make(request.device, info.dtype)


def _load_modules(
    request: _Request, config: Any, *, keeps_quantised: bool = False
) -> tuple[ModelInfo, Any, ShardPlan]:
    """Transformers' modules with this rank's weights, not yet packed or connected."""
    collective, trust = request.collective, request.trust_remote_code
    info = describe(
        request.path,
        collective.size,
        request.dtype,
        trust_remote_code=trust,
        allow_pickle=request.allow_pickle,
    )
    model = build_meta(config, info.dtype, trust_remote_code=trust)
    heads = model_heads(config, collective.rank, collective.size)
    plan = ShardPlan()
    if collective.size > 1:
        plan = plan_shards(model, heads, tp_hints(model))
        plan_vocabulary(
            plan,
            model,
            model.get_input_embeddings(),
            model.get_output_embeddings(),
            heads.rank,
            heads.size,
        )
    materialise_constants(model, request.device)
    checkpoint = Checkpoint(
        request.path, allow_pickle=request.allow_pickle, keeps_quantised=keeps_quantised
    )
    load_weights(model, checkpoint, plan, request.device, collective.rank)
    begin, end = heads.kv_range
    shrink_heads(model, plan.attentions, heads.local, end - begin)
    fuse_norms(model)
    return info, model, plan
