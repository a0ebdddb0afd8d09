"""Products by int8 weights on a CPU against bfloat16's and float32's, in time and in error.

    python -m outrider.bench.micro.int8 [--rounds 15] [--rows 1 8 64]

What torch has: `_weight_int8pack_mm` multiplies bfloat16 activations by int8 weights with a scale
per row (weight-only); oneDNN's `qlinear_pointwise`, `_int_mm` and fbgemm's `linear_dynamic`
multiply by quantised activations, here with a scale per row of them or one for all, found in the
call. Against them stand the products that serve (`workers/ops/table.py`).

Shapes are those of a decoder with 400 million parameters: hidden size 1024, 24 layers. One thread,
on its own time on a CPU; the weights of the copies do not fit into the caches together, so every
call reads its weight from memory, as in a forward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...workers.ops.cpu import CpuOps
from ..measure import Rows

SHAPES = {
    "q, k, v": (1536, 1024),
    "o": (1024, 1024),
    "gate, up": (5632, 1024),
    "down": (1024, 2816),
    "output": (32000, 1024),
}
NUM_LAYERS, COPY_BYTES = 24, 96 << 20
LAYERS = ("q, k, v", "o", "gate, up", "down")
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to multiply by a weight."""

    name: str
    dtype: torch.dtype  # of activations
    make: Callable[[Tensor], Product]  # of a float32 weight [out_features, in_features]


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values, and a float32 scale per row."""
    scales = weight.abs().amax(1) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


def served(dtype: torch.dtype) -> Callable[[Tensor], Product]:
    """As the CPU's operations pack it."""
    ops = CpuOps(dtype)
    return lambda weight: ops.pack(weight.to(dtype), None)


def weight_only(weight: Tensor) -> Product:
    values, scales = codes_of(weight)
    narrow = scales.to(torch.bfloat16)
    return lambda states: torch._weight_int8pack_mm(states, values, narrow)


def dynamic_onednn(weight: Tensor) -> Product:
    values, scales = codes_of(weight)
    packed = torch.ops.onednn.qlinear_prepack(values, None)
    zeros = torch.zeros(len(scales), dtype=torch.int32)

    def product(states: Tensor) -> Tensor:
        scale = float(states.abs().amax()) / 127
        codes = (states.float() / scale + 128).round_().clamp_(0, 255).to(torch.uint8)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, scale, 128, packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )
        return out

    return product


def dynamic_int_mm(weight: Tensor) -> Product:
    values, scales = codes_of(weight)
    transposed = values.t()

    def product(states: Tensor) -> Tensor:
        wide = states.float()
        rows = wide.abs().amax(1, keepdim=True) / 127
        sums = torch._int_mm((wide / rows).round_().to(torch.int8), transposed)
        return (sums * rows * scales).to(states.dtype)

    return product


def dynamic_fbgemm(weight: Tensor) -> Product:
    values, scales = codes_of(weight)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    quantised = torch._make_per_channel_quantized_tensor(values, scales.double(), zeros, 0)
    packed = torch.ops.quantized.linear_prepack(quantised, None)
    # Without VNNI, fbgemm adds pairs of products in 16 bits, which saturate: activations then take
    # 7 bits (PyTorch's `reduce_range`).
    reduce_range = not torch.cpu.get_capabilities().get("avx512_vnni", False)
    return lambda states: torch.ops.quantized.linear_dynamic(states.float(), packed, reduce_range)


KINDS = (
    Kind("bfloat16", torch.bfloat16, served(torch.bfloat16)),
    Kind("float32", torch.float32, served(torch.float32)),
    Kind("weight-only int8", torch.bfloat16, weight_only),
    Kind("qlinear (onednn)", torch.bfloat16, dynamic_onednn),
    Kind("_int_mm", torch.bfloat16, dynamic_int_mm),
    Kind("linear_dynamic", torch.bfloat16, dynamic_fbgemm),
)


def random_weight(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) / shape[1] ** 0.5


def random_states(num_rows: int, width: int) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1))


def error(kind: Kind, shape: tuple[int, int]) -> float:
    """The norm of the difference to the product by the unquantised weight, relative to it."""
    weight, states = random_weight(shape), random_states(64, shape[1]).to(torch.bfloat16)
    wanted = states.float() @ weight.t()
    found = kind.make(weight)(states.to(kind.dtype)).float()
    return float((found - wanted).norm() / wanted.norm())


def milliseconds(
    shape: tuple[int, int], rows: Sequence[int], rounds: int
) -> dict[tuple[str, int], float]:
    """The quickest call of each kind and number of rows, all in turn."""
    weight, best = random_weight(shape), dict[tuple[str, int], float]()
    copies = max(2, -(-COPY_BYTES // weight.numel()))
    for kind in KINDS:
        products = [kind.make(weight) for _ in range(copies)]
        for num_rows in rows:
            states = random_states(num_rows, shape[1]).to(kind.dtype)
            products[0](states)
            took = []
            for index in range(max(rounds, copies)):
                start = time.thread_time()
                products[index % copies](states)
                took.append(time.thread_time() - start)
            best[kind.name, num_rows] = sorted(took)[len(took) // 4] * 1e3
    return best


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.micro.int8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    """Prints a table of products, and one of their sums over a forward."""
    options = _arguments()
    torch.set_num_threads(1)
    names = [kind.name for kind in KINDS]
    table = Rows("weight", "rows", *names)
    sums = {(name, rows): 0.0 for name in names for rows in options.rows}
    for label, shape in SHAPES.items():
        found = milliseconds(shape, options.rows, options.rounds)
        for rows in options.rows:
            table.add(label, rows, *(f"{found[name, rows]:.3f}" for name in names))
            for name in names:
                times = NUM_LAYERS if label in LAYERS else 1
                sums[name, rows] += times * found[name, rows]
    for rows in options.rows:
        table.add("a forward", rows, *(f"{sums[name, rows]:.2f}" for name in names))
    table.add("error", 64, *(f"{error(kind, SHAPES['gate, up']):.4f}" for kind in KINDS))


if __name__ == "__main__":
    main()
