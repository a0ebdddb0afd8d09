"""Random weights of every kind that kernels multiply by."""

from __future__ import annotations

import torch

from outrider.workers.ops.quantised import Codes, QuantisedTensor

KINDS = ["plain", "fp8", "int8", "int4", "int4 zeros", "uint8 zeros"]


def weight_of(kind: str, shape: tuple[int, ...], dtype, group: int = 32) -> torch.Tensor:
    """Random values of every code, with groups that columns do not divide evenly."""
    if kind == "plain":
        return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)
    num_groups = -(-shape[-1] // group)
    scales = (torch.rand(*shape[:-1], num_groups) + 0.1) / shape[-1] ** 0.5
    zeros, offset = None, 0
    if kind == "fp8":
        values = (torch.randn(shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        values.view(torch.uint8).view(-1)[:5] = torch.tensor([1, 7, 8, 0x81, 0x7E])  # subnormals
        scales = scales / 100
    elif kind == "int8":
        values = torch.randint(-127, 128, shape, dtype=torch.int8)
        scales = scales / 60
    else:
        top = 256 if kind.startswith("uint8") else 16
        values = torch.randint(top, shape, dtype=torch.uint8)
        scales, offset = scales / top, top // 2
        if kind.endswith("zeros"):
            zeros, offset = torch.randint(top, (*shape[:-1], num_groups), dtype=torch.uint8), 0
    codes = Codes(values, scales, zeros, group, shape[-1], offset)
    return QuantisedTensor(codes.packed() if kind.startswith("int4") else codes, dtype)


def wide(weight: torch.Tensor) -> torch.Tensor:
    return weight.wide() if isinstance(weight, QuantisedTensor) else weight
