"""The operations of a decoder: one protocol, and an implementation per kind of device.

Triton is imported only on a device that it compiles for.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ConfigError
from .cpu import KERNEL_DTYPES, CpuOps
from .invariant import InvariantOps
from .plan import DeviceLayout, DraftLevel, KeptDrafts, PagedStep, StagedStep, plan_step
from .protocol import DeviceOps, Ops, PlannedOps
from .reference import ReferenceOps, TorchOps

if TYPE_CHECKING:
    from .cuda.library import AttentionLibrary

__all__ = [
    "DeviceLayout", "DeviceOps", "DraftLevel", "KeptDrafts", "Ops", "PagedStep", "PlannedOps",
    "ReferenceOps", "StagedStep", "c_compiler", "make_invariant_ops", "make_ops",
    "max_latent_heads", "missing_kernels", "plan_step", "prompt_library",
]  # fmt: skip

CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def missing_kernels(device: torch.device, dtype: torch.dtype | None) -> str:
    """Returns why `make_ops` would return torch's own operations, or ""; None: default dtype."""
    if device.type == "cpu" and (dtype is None or dtype in KERNEL_DTYPES):
        return ""
    if device.type == "cuda" and (dtype is None or dtype in CUDA_DTYPES):
        lack = triton_lacks()
        return f"no kernels on cuda without {lack}" if lack else ""
    return f"no kernels for {dtype} on {device.type}"


def has_triton() -> bool:
    return find_spec("triton") is not None


def triton_lacks() -> str:
    """Returns what Triton lacks here to compile and launch a kernel; "" if nothing."""
    if not has_triton():
        return "the package triton"
    if c_compiler() or any(triton_cache().glob("*/cuda_utils*.so")):
        return ""
    return "a C compiler, which Triton needs: gcc, clang, or what CC names"


def c_compiler() -> str:
    """Returns the compiler that Triton uses once for its launchers; "" if there is none."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or ""


def triton_cache() -> Path:
    """Returns the folder of Triton's compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def make_invariant_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """Returns operations whose rows do not depend on one another.

    Raises:
        ConfigError: there are none for `dtype` on `device`; names `deterministic`.
    """
    lack = f" without {triton_lacks()}" if device.type == "cuda" and triton_lacks() else ""
    if device.type not in ("cpu", "cuda") or lack:
        raise ConfigError.at(
            "deterministic",
            f"not available on {device.type}{lack}, where matrix products depend on "
            "the size of the batch; allowed: device 'cpu', or 'cuda' with triton",
        )
    dtypes = KERNEL_DTYPES if device.type == "cpu" else CUDA_DTYPES
    if dtype not in dtypes:
        allowed = ", ".join(str(each).removeprefix("torch.") for each in dtypes)
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError.at("deterministic", f"not available in {kind}; allowed: dtype {allowed}")
    return _new(device, dtype, deterministic=True)


def max_latent_heads(device: torch.device, dtype: torch.dtype, *, deterministic: bool) -> int:
    """Returns `Ops.max_latent_heads` of the operations that would be made, without making them."""
    return _class(device, dtype, deterministic=deterministic).max_latent_heads


def make_ops(device: torch.device, dtype: torch.dtype, prompt_attention: str = "auto") -> Ops:
    """Returns the fastest implementation for `dtype` on `device`; raises as `prompt_library`."""
    library = prompt_library(prompt_attention, device, dtype)
    if library is None:
        return _new(device, dtype, deterministic=False)
    from .cuda.ops import CudaOps

    return CudaOps(device, library=library)


def prompt_library(
    wish: str, device: torch.device, dtype: torch.dtype | None
) -> AttentionLibrary | None:
    """Returns the library that computes prompts beside our kernels; None: no library.

    `dtype` is as in `missing_kernels`.

    Raises:
        ConfigError: `prompt_attention` names a library that cannot be used here.
    """
    missing = missing_kernels(device, dtype)
    if device.type == "cuda" and not missing:
        from .cuda.library import AttentionLibrary

        return AttentionLibrary.of(wish, device)
    if wish in ("auto", "own"):
        return None
    why = missing or "it needs an NVIDIA GPU"
    raise ConfigError.at(
        "prompt_attention", f"{wish!r} is not available: {why}; allowed here: 'auto', 'own'"
    )


def _new(device: torch.device, dtype: torch.dtype, *, deterministic: bool) -> Ops:
    kind = _class(device, dtype, deterministic=deterministic)
    return kind() if kind is TorchOps else kind(dtype if device.type == "cpu" else device)


def _class(device: torch.device, dtype: torch.dtype, *, deterministic: bool) -> Any:
    if missing_kernels(device, dtype):
        return TorchOps
    if device.type == "cpu":
        return InvariantOps if deterministic else CpuOps
    from .cuda.ops import CudaOps, InvariantCudaOps

    return InvariantCudaOps if deterministic else CudaOps
