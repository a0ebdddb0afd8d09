"""The target: a Hugging Face causal LM folder as one rank of a paged, sharded model.

The bridge is always loaded first. If the architecture belongs to the family, the family's decoder
takes over its weights once the two agree on a short text. Otherwise the bridge serves, and
`PagedModel.forward_choice` has the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from ...drafters.heads.block import materialise_constants
from ...errors import CheckpointError, ConfigError
from ..collective import Collective
from ..ops import Ops, ReferenceOps, make_invariant_ops, make_ops, missing_kernels
from ..ops.cpu import pack_large
from ..ops.protocol import Projection
from ..ops.quantised import QuantisedTensor
from .bridge import (
    BridgeRunner,
    build_meta,
    explained,
    fuse_norms,
    map_checkpoint,
    own_attention,
    refuse_state,
    shrink_heads,
    shrink_states,
    tied_names,
    tp_hints,
)
from .checkpoint.adapters import FIELD, Adapter, open_adapters
from .checkpoint.hub import Trust
from .checkpoint.progress import Progress
from .checkpoint.weights import Checkpoint, Received, TensorSource
from .family import (
    Adapters,
    FamilyRunner,
    FamilySpec,
    build_family,
    compare,
    read_spec,
    recurrent_layers,
    without_attention,
)
from .info import STAGES_FIELD, TESTED, ModelInfo, model_heads, read_model
from .paged import ForwardChoice, PagedModel
from .sharding import ShardPlan, bytes_of_part, connect, plan_shards, plan_vocabulary, read_part
from .stages import Stage, StageCut, StageRunner


def fitting_sources(
    model: Any,
    stored: Mapping[str, TensorSource],
    path: Path,
    is_held: Callable[[str], bool] = lambda name: True,
) -> dict[str, TensorSource]:
    """Returns the source of every tensor of `model` that is not tied, by the model's own names.

    Args:
        is_held: whether this rank holds a tensor; others are checked, but not read.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape; names it.
    """
    tied = tied_names(model)
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    sources, surplus = map_checkpoint(model, stored, is_held)
    missing = sorted(set(wanted) - set(sources))
    if missing or surplus:
        raise CheckpointError(
            f"the tensors of {str(path)!r} do not fit its config.json: "
            f"missing {_some(missing)}, surplus {_some(surplus)}"
        )
    others = [name for name in wanted if sources[name].shape != tuple(wanted[name].shape)]
    if others:
        name = others[0]
        more = f", and {len(others) - 1} more tensors differ" if len(others) > 1 else ""
        raise CheckpointError(
            f"tensor {name!r} of {str(path)!r} has shape {list(sources[name].shape)}, "
            f"its config.json wants {list(wanted[name].shape)}{more}"
        )
    return {name: sources[name] for name in wanted if is_held(name)}


def load_weights(
    model: Any,
    checkpoint: Checkpoint,
    plan: ShardPlan,
    device: torch.device,
    rank: int,
    is_held: Callable[[str], bool] = lambda name: True,
    progress: Progress | None = None,
) -> None:
    """Reads this rank's part of every tensor that it holds into the model.

    Args:
        progress: counts the bytes.
    """
    stored, empty = {name: checkpoint.source(name) for name in checkpoint.names}, model.state_dict()
    sources = fitting_sources(model, stored, checkpoint.path, is_held)
    progress = progress or Progress()
    sizes = {name: bytes_of_part(each, plan.shards.get(name)) for name, each in sources.items()}
    progress.expect("read", sum(sizes.values()))
    for name, source in sources.items():
        tensor = read_part(source, plan.shards.get(name)).to(device=device, dtype=empty[name].dtype)
        if name in plan.rank0_only and rank:
            tensor = torch.zeros_like(tensor)
        _place(model, name, tensor)
        progress.add(sizes[name])
    for name, owner in tied_names(model).items():
        if (own := checkpoint.coded.get(name)) is None:
            _place(model, name, _get(model, owner))
            continue
        tensor = read_part(own, plan.shards.get(owner)).to(device=device, dtype=empty[name].dtype)
        _place(model, name, tensor)


def whole_embedding(
    model: Any, path: Path, dtype: torch.dtype, device: torch.device, **trust: Unpack[Trust]
) -> nn.Module:
    """Returns a copy of the model's embedding with the whole tensor and without collectives."""
    return _twins(model, [model.get_input_embeddings()], path, dtype, device, **trust)[0]


def whole_ends(
    model: Any, path: Path, dtype: torch.dtype, device: torch.device, **trust: Unpack[Trust]
) -> tuple[nn.Module, nn.Module]:
    """Returns copies of the model's embedding and output layer, whole and without collectives."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    embedding, output = _twins(model, ends, path, dtype, device, **trust)
    names = {id(module): name for name, module in model.named_modules()}
    if f"{names[id(ends[1])]}.weight" in tied_names(model):
        output._parameters["weight"] = embedding._parameters["weight"]
    return embedding, output


def _twins(
    model: Any,
    modules: Sequence[nn.Module],
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    **trust: Unpack[Trust],
) -> list[nn.Module]:
    checkpoint = Checkpoint(path, **trust)
    stored = {entry: checkpoint.source(entry) for entry in checkpoint.names}
    sources, tied = map_checkpoint(model, stored)[0], tied_names(model)
    names = {id(module): name for name, module in model.named_modules()}

    def whole(module: nn.Module) -> nn.Module:
        twin = copy(module)
        twin.__dict__.pop("forward", None)  # the class's own forward, without collectives
        twin._parameters = dict.fromkeys(module._parameters)
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{names[id(module)]}.{leaf}"
                tensor = read_part(sources[tied.get(full, full)], None)
                twin._parameters[leaf] = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
        return twin

    return [whole(module) for module in modules]


def _get(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def _place(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    elif isinstance(tensor, nn.Parameter):
        module._parameters[leaf] = tensor
    else:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4]) or "none"
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


MIN_ELEMENTS = {torch.bfloat16: 1 << 16, torch.float32: 1 << 18}
"""Below, the fixed cost of a oneDNN call (about 12 us) outweighs the gain at one token."""


def pack_linears(model: nn.Module, device: torch.device, ops: Ops | None = None) -> int:
    """Packs every large linear's weight for its product on a CPU; frees the plain one if unshared.

    Torch's linear reorders its weight in every call. With packed weights, eight tokens cost little
    more than one, as verification needs (oneDNN on an AVX-512 CPU, one thread, weights out of
    cache, 2816x1024: bf16 582 -> 456 us at 1 token and 911 -> 499 at 8; fp32 697 -> 643 and 1484 ->
    829).

    With `ops`, these pack the weights that they multiply themselves: quantised ones on any device,
    and every weight if the operations are invariant.
    """
    invariant = ops is not None and ops.is_invariant
    on_cpu = device.type == "cpu"
    shared = _shared_weights(model)
    num_packed = 0
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        weight = module.weight
        own = invariant or (ops is not None and isinstance(weight, QuantisedTensor))
        is_large = weight.numel() >= MIN_ELEMENTS.get(weight.dtype, weight.numel() + 1)
        if not own and not (on_cpu and is_large):
            continue
        bias = None if module.bias is None else module.bias.detach()
        pack = pack_large if ops is None else ops.pack
        if (project := pack(weight.detach(), bias)) is None:
            continue
        num_packed += 1
        object.__setattr__(module, "forward", _Packed(project))
        if id(weight) not in shared:  # other code may read its shape and dtype
            hollow = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
            module.weight = nn.Parameter(hollow, requires_grad=False)
    return num_packed


class _Packed:
    """A projection as the forward of a linear, for any number of leading dimensions."""

    def __init__(self, project: Projection) -> None:
        self.project = project  # takes flat rows

    def __call__(self, states: Tensor) -> Tensor:  # [..., in_features]
        out = self.project(states.reshape(-1, states.shape[-1]))
        return out.view(*states.shape[:-1], out.shape[-1])


def product_of(linear: nn.Module) -> Projection | None:
    """Returns the packed product of a linear; None if `pack_linears` did not pack it."""
    forward = linear.forward
    return forward.project if isinstance(forward, _Packed) else None


def _shared_weights(model: nn.Module) -> set[int]:
    """Returns weights that more than one module holds, usually a tied output layer's."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            (shared if id(weight) in seen else seen).add(id(weight))
    return shared


Wish = Literal["auto", "family", "bridge"]


@dataclass(frozen=True, slots=True)
class _Rank:
    """A checkpoint, and the rank on which it is loaded."""

    path: Path
    config: Any
    info: ModelInfo
    device: torch.device
    collective: Collective
    trust: Trust
    adapters: Sequence[Adapter] | None = None
    received: Mapping[str, Tensor] | None = None
    stage: Stage | None = None  # None: it has all layers
    max_model_len: int | None = None  # None: the checkpoint's
    keeps_quantised: bool = True  # where operations support it
    whole_experts: bool = False  # a rank has some whole experts of a mixture
    progress: Progress | None = None  # counts the bytes that are read

    @property
    def layers(self) -> range:
        """The layers that the rank holds."""
        count = self.info.num_layers
        return range(count) if self.stage is None else self.stage.layers(count)


def load_model(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device,
    collective: Collective,
    forward: Wish = "auto",
    ops: Ops | None = None,
    deterministic: bool = False,
    prompt_attention: str = "auto",
    known: ForwardChoice | None = None,
    adapters: Sequence[tuple[str, str]] | None = None,
    stage: Stage | None = None,
    received: Mapping[str, Tensor] | None = None,
    max_model_len: int | None = None,
    keeps_quantised: bool = True,
    whole_experts: bool = False,
    progress: Progress | None = None,
    **trust: Unpack[Trust],
) -> PagedModel:
    """Loads this rank's shard. `dtype` None is the checkpoint's; `ops` None the device's fastest.

    `deterministic` selects operations whose rows do not depend on the batch. `known` is the choice
    of an earlier load of the same model on such a device; the forwards are not compared again.
    Every rank has one, or none has. `adapters` are LoRA adapters by name and folder; None disables
    them. `stage` is the pipeline stage whose layers are loaded. `received` are weights that replace
    the folder's. `max_model_len` sets LongRoPE's frequencies; None is the checkpoint's length.
    `keeps_quantised`: weights stay quantised where operations support it. `whole_experts`: a rank
    holds some whole experts. `progress` counts the bytes read.

    Raises:
        CheckpointError: the folder cannot be served, or an adapter is not for this model.
        ConfigError: `forward` is "family", or `deterministic`, adapters or stages are requested,
            and the family cannot serve this model; or there are more stages than layers.
    """
    config, info = read_model(path, collective.size, dtype, **trust)
    opened = None if adapters is None else open_adapters(adapters)
    rank = _Rank(path, config, info, device, collective, trust, opened, received, stage)
    rank = replace(rank, max_model_len=max_model_len, keeps_quantised=keeps_quantised,
                   whole_experts=whole_experts, progress=progress)  # fmt: skip
    assert len(rank.layers), "every stage has a layer"
    if stage is not None:
        check_stages(path, config)
    make = partial(make_ops, prompt_attention=prompt_attention)
    is_free = ops is None and not deterministic
    if (adapters is not None or stage is not None) and forward == "auto":
        forward = "family"
    spec = _wanted_family(rank, forward, known) if is_free else _read_family(config, forward)
    if deterministic and device.type != "cpu" and recurrent_layers(config):
        raise ConfigError.at(
            "deterministic",
            f"not available on {device.type} for a model with recurrent layers; leave it out",
        )
    if isinstance(spec, FamilySpec):
        if ops is None:  # rejects the model before weights are read
            ops = (make_invariant_ops if deterministic else make)(device, info.dtype)
        found = _load_family(rank, spec, ops, is_known=known is not None)
        if isinstance(found, PagedModel):
            return found
        spec = found
    if recurrent_layers(config):
        raise CheckpointError(
            f"{str(path)!r} cannot be served: only the family's decoder keeps the states of its "
            f"layers, and {spec}"
        )
    if deterministic:
        raise ConfigError.at(
            "deterministic",
            f"only the family's decoder is batch-invariant, and it cannot serve "
            f"{str(path)!r}: {spec}; leave `deterministic` out",
        )
    if adapters is not None:
        raise ConfigError.at(FIELD, needs_family(path, spec))
    if stage is not None:
        raise ConfigError.at(STAGES_FIELD, f"not available for {str(path)!r}: {spec}")
    if forward == "family":
        why = f"'family' cannot serve {str(path)!r}: {spec}; allowed for it are 'auto' and 'bridge'"
        raise ConfigError.at("forward", why)
    reads_own = known is None and collective.size == 1 and config.model_type not in TESTED
    with explained(config) if reads_own else nullcontext():
        return _load_bridge(rank, spec, ops or make(device, info.dtype), reads_own=reads_own)


def needs_family(path: Path, reason: str) -> str:
    """Returns why a model that the family cannot serve for `reason` has no adapters."""
    return f"adapters need the family's decoder, and it cannot serve {str(path)!r}: {reason}"


def without_stages(config: Any) -> str:
    """Returns why the target cannot be divided into stages; "" if it can."""
    spec = read_spec(config)
    return f"stages need the family's decoder: {spec}" if isinstance(spec, str) else ""


def check_stages(path: Path, config: Any) -> None:
    """Raises `ConfigError` if the target cannot be divided into stages."""
    if reason := without_stages(config):
        raise ConfigError.at(STAGES_FIELD, f"not available for {str(path)!r}: {reason}")


def _load_bridge(rank: _Rank, reason: str, ops: Ops, *, reads_own: bool) -> PagedModel:
    """Loads the bridge's model; with `reads_own`, compares it with transformers' own forward."""
    info, device, collective = rank.info, rank.device, rank.collective
    model, plan = _load_modules(rank)
    wanted = None
    if reads_own:
        refuse_state(model)
        with own_attention(model):
            wanted = compare.run_own(model, info, device)
    pack_linears(model, device)
    connect(model, plan, collective, info.vocab_size)
    runner = BridgeRunner(model, info, ops)
    if wanted is not None:
        found = compare.run(runner, info, device)
        if mismatch := compare.mismatch(found, wanted, info.dtype, collective):
            raise CheckpointError(
                f"{rank.config.model_type!r} models cannot be served: the logits of "
                f"{str(rank.path)!r} over a paged cache are not those of transformers' own "
                f"forward: {mismatch}"
            )
    return PagedModel(info, model, device, collective, runner, ForwardChoice("bridge", reason))


def _read_family(config: Any, forward: Wish) -> FamilySpec | str:
    """Returns the family's description of the model, or why the bridge serves it."""
    return "the configuration asks for it" if forward == "bridge" else read_spec(config)


def _wanted_family(rank: _Rank, forward: Wish, known: ForwardChoice | None) -> FamilySpec | str:
    """Does the same as `_read_family`, considering the device's operations.

    Without kernels for the device, the family launches more operations than the bridge does, so
    `auto` selects the bridge.
    """
    if forward != "bridge" and known is not None and known.kind == "bridge":
        return known.reason
    missing = ""
    if forward == "auto" and not recurrent_layers(rank.config):  # the bridge does not support these
        missing = missing_kernels(rank.device, rank.info.dtype)
    return missing or _read_family(rank.config, forward)


def _load_family(rank: _Rank, spec: FamilySpec, ops: Ops, *, is_known: bool) -> PagedModel | str:
    """Returns the family's model, or why it must not be used. Weights are read once."""
    info, device, collective = rank.info, rank.device, rank.collective
    model, plan = _load_modules(rank, ops)
    cut = None if rank.stage is None else StageCut(model, rank.layers)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    # The family packs the layers' weights.
    pack_linears(nn.ModuleList(ends if cut is None else cut.ends()), device, ops)
    connect(model, plan, collective, info.vocab_size)
    recurrent = recurrent_layers(rank.config)
    wanted = None
    if recurrent and not is_known:  # the bridge does not run these layers
        with own_attention(model):
            wanted = compare.run_own(model, info, device)
    others = without_attention(rank.config)
    bridge = BridgeRunner(model, info, ReferenceOps(), others, rank.layers)  # shares no kernel
    if wanted is None and not recurrent:
        wanted = compare.run(bridge, info, device)
    adapters = None
    if rank.adapters is not None:
        held = {} if cut is None else {"is_held": cut.holds}
        adapters = Adapters(model, plan, info.dtype, device, **held)
    try:
        decoder = build_family(model, spec, bridge.attention_specs, ops, plan, collective, adapters)
        for adapter in rank.adapters or ():
            assert adapters is not None, "there are some"
            adapters.add(adapter)
    except (AttributeError, ValueError) as error:
        return f"its modules are not those of the family: {error}"
    runner: FamilyRunner = FamilyRunner(decoder, info, collective.size)
    if not is_known and wanted is not None:
        with ops.plain_inputs():  # the bridge's inputs are plain, too
            found = compare.run(runner, info, device)
        if mismatch := compare.mismatch(found, wanted, info.dtype, collective):
            return f"the family's logits differ from the bridge's: {mismatch}"
    choice = ForwardChoice("family", operations=ops.name)
    if rank.stage is not None:
        runner = StageRunner(decoder, info, rank.stage)
    return PagedModel(
        info, model, device, collective, runner, choice, adapters,
        has_embedding=rank.stage is None or rank.stage.is_first,
    )  # fmt: skip


def _load_modules(rank: _Rank, ops: Ops | None = None) -> tuple[Any, ShardPlan]:
    """Loads transformers' modules with this rank's weights, not yet packed or connected.

    Args:
        ops: operations for which weights may stay quantised; None: weights are dequantised.
    """
    collective = rank.collective
    model = build_meta(rank.config, rank.info.dtype, **rank.trust)
    for adapter in rank.adapters or ():
        adapter.fit(model)
    heads = model_heads(rank.config, collective.rank, collective.size)
    plan = ShardPlan()
    if collective.size > 1:
        hints = tp_hints(model)
        plan = plan_shards(model, heads, hints, whole_experts=rank.whole_experts)
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        plan_vocabulary(plan, model, *ends, heads.rank, heads.size)
    materialise_constants(model, rank.device, rank.max_model_len)
    checkpoint: Checkpoint
    if rank.received is not None:
        checkpoint = Received(rank.path, rank.received)
    else:
        checkpoint = Checkpoint(
            rank.path,
            keeps_quantised=ops is not None and rank.keeps_quantised and ops.keeps_quantised,
            keeps_codes=ops is not None and rank.keeps_quantised and ops.keeps_codes,
            **rank.trust,
        )
    cut = None if rank.stage is None else StageCut(model, rank.layers)
    limits: dict[str, Any] = {} if cut is None else {"is_held": cut.holds}
    load_weights(
        model, checkpoint, plan, rank.device, collective.rank, progress=rank.progress, **limits
    )
    begin, end = heads.kv_range
    shrink_heads(model, plan.attentions, heads.local, end - begin)
    shrink_states(model, plan.recurrent, collective.size)
    fuse_norms(model)
    if cut is not None:
        cut.apply(plan, rank.device)
    return model, plan


def load_ends(
    path: Path, dtype: torch.dtype | None, device: torch.device, **trust: Unpack[Trust]
) -> tuple[ModelInfo, nn.Module, nn.Module]:
    """Loads the parts of a target that a head reads if other ranks compute the target.

    Returns:
        Facts about the whole model, its embedding, and its output layer.

    Raises:
        CheckpointError: the folder is not a checkpoint.
    """
    config, info = read_model(path, dtype=dtype, **trust)
    model = build_meta(config, info.dtype, **trust)
    materialise_constants(model, device)  # some embeddings have a scale that no file stores
    embedding, output = whole_ends(model, path, info.dtype, device, **trust)
    pack_linears(nn.ModuleList([embedding, output]), device)
    return info, embedding, output
