"""The checkpoint's tensors in the modules: this rank's part of each, read and put in place.

Called by `target.py` for a whole model, and for single modules by heads that need them uncut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from .bridge import map_checkpoint, tied_names
from .checkpoint.weights import Checkpoint, TensorSource
from .sharding import Shard, ShardPlan


def fitting_sources(
    model: Any, stored: Mapping[str, TensorSource], path: Path
) -> dict[str, TensorSource]:
    """The source of every tensor of `model`, by the model's own names.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape; names it.
    """
    tied = tied_names(model)
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    sources, surplus = map_checkpoint(model, stored)
    missing = sorted(set(wanted) - set(sources))
    if missing or surplus:
        raise CheckpointError(
            f"the tensors of {str(path)!r} do not fit its config.json: "
            f"missing {_some(missing)}, surplus {_some(surplus)}",
            field="model",
        )
    for name, empty in wanted.items():
        shape, expected = sources[name].shape, tuple(empty.shape)
        if shape != expected:
            raise CheckpointError(
                f"tensor {name!r} of {str(path)!r} has shape {list(shape)}, "
                f"its config.json wants {list(expected)}",
                field="model",
            )
    return sources


def load_weights(
    model: Any, checkpoint: Checkpoint, plan: ShardPlan, device: torch.device, rank: int
) -> None:
    """Read this rank's part of every tensor and put it in place."""
    tied = tied_names(model)
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    stored = {name: checkpoint.source(name) for name in checkpoint.names}
    sources = fitting_sources(model, stored, checkpoint.path)
    for name, empty in wanted.items():
        source = sources[name]
        tensor = _read(source, plan.shards.get(name)).to(device=device, dtype=empty.dtype)
        if name in plan.rank0_only and rank:
            tensor = torch.zeros_like(tensor)
        _place(model, name, tensor)
    for name, owner in tied.items():
        _place(model, name, _get(model, owner))


def whole_module(
    model: Any,
    name: str,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    allow_pickle: bool = False,
) -> nn.Module:
    """A twin of the sharded module `name`, with all of its tensors and no part in a collective."""
    checkpoint = Checkpoint(path, allow_pickle=allow_pickle)
    stored = {entry: checkpoint.source(entry) for entry in checkpoint.names}
    sources, _ = map_checkpoint(model, stored)
    twin = copy(model.get_submodule(name))
    twin.__dict__.pop("forward", None)  # the class's own, not the one that talks to other ranks
    twin._parameters = {}
    for leaf, parameter in model.get_submodule(name)._parameters.items():
        twin._parameters[leaf] = None
        if parameter is not None:
            full = f"{name}.{leaf}"
            tensor = _read(sources[tied_names(model).get(full, full)], None)
            twin._parameters[leaf] = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
    return twin


def _read(source: TensorSource, shard: Shard | None) -> Tensor:
    box = tuple((0, size) for size in source.shape)
    if shard is None:
        return source.read(box)
    pieces = [
        source.read((*box[: shard.dim], span, *box[shard.dim + 1 :])) for span in shard.ranges
    ]
    tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=shard.dim)
    if (short := shard.length - tensor.shape[shard.dim]) > 0:
        shape = list(tensor.shape)
        shape[shard.dim] = short
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim=shard.dim)
    return tensor


def _get(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(owner), leaf)
    return tensor


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
