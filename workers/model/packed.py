"""Linears of a CPU model with weights laid out once for oneDNN.

Plain `Linear` reorders its weight in every call. Packed, eight tokens cost little more than one
(measured on an AVX-512 CPU, one thread, weights out of cache, 2816x1024: bf16 582 -> 456 us at 1
token and 911 -> 499 at 8; fp32 697 -> 643 and 1484 -> 829), which is what verification lives on.
Called by `target.py` after loading.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops import Ops
from ..ops.cpu import SMALL
from ..ops.protocol import Projection
from ..ops.quantised import QuantisedTensor

MIN_ELEMENTS = {torch.bfloat16: 1 << 16, torch.float32: 1 << 18}
"""Below this, the fixed cost of a oneDNN call (about 12 us) outweighs the gain at one token."""


def pack_linears(model: nn.Module, device: torch.device, ops: Ops | None = None) -> int:
    """Pack every large linear, freeing its plain weight unless something shares it.

    With `ops`, these lay out the weights that they multiply themselves, quantised ones on any
    device; invariant operations lay out every weight.
    """
    invariant = ops is not None and ops.is_invariant
    on_cpu = device.type == "cpu" and _is_supported()
    shared = _shared_weights(model)
    num_packed = 0
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        weight = module.weight
        own = invariant or (ops is not None and isinstance(weight, QuantisedTensor))
        if not own and not on_cpu:
            continue
        if not own and weight.numel() < MIN_ELEMENTS.get(weight.dtype, weight.numel() + 1):
            continue
        num_packed += 1
        packed: _Packed | _Panels
        if ops is not None and (own or weight.numel() <= SMALL.get(weight.dtype, 0)):
            bias = None if module.bias is None else module.bias.detach()
            packed = _Panels(ops.pack(weight.detach(), bias))
        else:
            packed = _Packed(module)
        object.__setattr__(module, "forward", packed)
        if id(weight) not in shared:  # keeps its shape and dtype for whoever asks
            hollow = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
            module.weight = nn.Parameter(hollow, requires_grad=False)
    return num_packed


class _Panels:
    def __init__(self, project: Projection) -> None:
        self._project = project

    def __call__(self, states: Tensor) -> Tensor:  # [..., in_features]
        out = self._project(states.reshape(-1, states.shape[-1]))
        return out.view(*states.shape[:-1], out.shape[-1])


class _Packed:
    def __init__(self, module: nn.Linear) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), None)
        self._bias = None if module.bias is None else module.bias.detach()
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, states: Tensor) -> Tensor:  # [..., in_features]
        out: Tensor = self._linear(states, self._weight, self._bias, "none", [], "")
        return out


def _is_supported() -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    return torch.backends.mkldnn.is_available() and capability.startswith("AVX")


def _shared_weights(model: nn.Module) -> set[int]:
    """Weights that more than one module holds: a tied output layer's, usually."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            (shared if id(weight) in seen else seen).add(id(weight))
    return shared
