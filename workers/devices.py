"""The device that a process computes on, and the reasons why a GPU cannot be used.

torch is imported only if nothing else answers: the installation and the machine's files reveal most
problems in a hundredth of the time that the import takes.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import logging
import os
import re
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
_DRIVER = "libcuda.so.1"
_DRIVER_FILES = ("nvidia*", "dxg", "nvhost*", "nvmap", "nvgpu")  # also of WSL and of Tegra
_BUILD = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*=\s*(\S.*)$", re.MULTILINE)


def dtype_of(name: str) -> torch.dtype | None:
    """Returns the configured `dtype`; None for "auto"."""
    import torch

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    return dtypes.get(name)


def pick_device(wish: str, *, granted: bool = False) -> torch.device:
    """Returns the device for the configured `wish`: "auto", "cpu" or "cuda".

    "auto" is the CPU if torch sees no GPU; if the machine has one, a warning gives the reason.

    Args:
        granted: whether a GPU is reserved for this process; "auto" then requires it.

    Raises:
        ConfigError: CUDA was requested, or a GPU is reserved, but torch sees none.
    """
    import torch

    if wish == "cpu":
        return torch.device("cpu")
    reason = gpu_obstacle()
    if torch.cuda.is_available() and not reason:
        return torch.device("cuda", torch.cuda.current_device())
    if wish == "cuda":
        raise _no_cuda(reason)
    if granted:
        raise ConfigError.at(
            "device",
            f"Ray has reserved a GPU for this worker, and torch sees none"
            f"{': ' + reason if reason else ''}; repair that, or choose 'cpu'",
        )
    if reason:
        _warn_of_idle_gpus(reason)
    return torch.device("cpu")


def require_cuda() -> None:
    """Raises `ConfigError` if torch sees no GPU; imports torch only if files do not show it."""
    if "torch" not in sys.modules:
        build = _torch_build()
        if build is not None and not build["cuda"] and not build["hip"]:
            raise _no_cuda(_idle_gpus(_built_without_cuda(build["__version__"])))
        if build is not None and not build["hip"] and not _has_driver():
            raise _no_cuda("")
    pick_device("cuda")


def gpu_obstacle() -> str:
    """Returns why torch cannot use the NVIDIA GPUs of this machine.

    Returns:
        "" if there are none, if they can be used, or if CUDA_VISIBLE_DEVICES hides them, as Ray
        does for workers without a GPU.
    """
    import torch

    if torch.cuda.is_available():
        return _kernel_obstacle()
    if not _idle_gpus(""):
        return ""
    if torch.version.cuda is None:
        return _idle_gpus(_built_without_cuda(torch.__version__))
    why = f"CUDA {torch.version.cuda} finds none of them usable"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # raised by the driver
        why = f"CUDA {torch.version.cuda} does not start: {' '.join(str(error).split())}"
    return _idle_gpus(why)


def _kernel_obstacle() -> str:
    """Returns why torch's own kernels do not run on the GPU that it sees, or ""."""
    import torch

    built = [] if torch.version.hip else torch.cuda.get_arch_list()
    capability = torch.cuda.get_device_capability() if built else (0, 0)
    if not built or any(_runs(each, capability) for each in built):
        return ""
    name, (major, minor) = torch.cuda.get_device_name(), capability
    return (
        f"torch {torch.__version__} has no kernels for {name}, whose compute capability is "
        f"{major}.{minor}, only for {', '.join(built)}"
    )


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Returns True if code for `arch` runs on a GPU of `capability`, perhaps after compilation."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)(\w?)", arch)
    if found is None:
        return True  # an unknown kind of code
    kind, major, minor, suffix = found.groups()
    own = (int(major), int(minor))
    if suffix == "a":
        return own == capability
    return own <= capability and (kind == "compute" or own[0] == capability[0])


def num_nvidia_gpus() -> int:
    """Counts the driver's device files, whether or not torch can use the GPUs."""
    return sum(1 for file in Path("/dev").glob("nvidia*") if file.name[6:].isdecimal())


def _no_cuda(reason: str) -> ConfigError:
    why = f": {reason}" if reason else ""
    return ConfigError.at("device", f"'cuda' was requested but no CUDA device is visible{why}")


def _idle_gpus(why: str) -> str:
    """Returns a message that this machine's GPUs are idle; "" if it has none or they are hidden."""
    count = num_nvidia_gpus()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    if not count or hidden:
        return ""
    return f"this machine has {count} NVIDIA GPU{'s' * (count > 1)}, but {why}"


def _built_without_cuda(version: str) -> str:
    return f"torch {version} is built without CUDA; install a build with it"


def _torch_build() -> dict[str, Any] | None:
    """Reads `__version__`, `cuda` and `hip` from the installed torch's file; None if uncertain."""
    with suppress(ImportError, ValueError, OSError, SyntaxError):
        spec = find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
            found = {name: ast.literal_eval(value) for name, value in _BUILD.findall(text)}
            return found if found.keys() == {"__version__", "cuda", "hip"} else None
    return None


def _has_driver() -> bool:
    """Returns True if CUDA's driver may be installed: its library or a device file exists."""
    if any(next(Path("/dev").glob(pattern), None) for pattern in _DRIVER_FILES):
        return True
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


@functools.cache
def _warn_of_idle_gpus(reason: str) -> None:
    """Warns once per process."""
    log.warning("device 'auto' is the CPU here: %s; 'device: cpu' accepts that", reason)
