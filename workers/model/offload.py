"""Weights that wait in host memory while their device has other work, and memory given back."""

from __future__ import annotations

import ctypes
import gc
import logging
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ..collective import Collective

log = logging.getLogger(__name__)
# What leads out of a model: to the whole program, or to buffers that other ranks have mapped.
_OUTSIDE = (type, ModuleType, BuiltinFunctionType, logging.Logger, Collective, str, bytes, int)


class Offloaded:
    """The memory of every tensor that is reached from `roots`, copied to the host and freed.

    Tensors stay the objects that they are, views and all: their storages are emptied, and filled
    again by `restore`, at other addresses. Nothing may compute with them in between, and no graph
    that was captured before may be replayed.

    Args:
        device_type: of the tensors; others stay.
    """

    def __init__(self, roots: Any, device_type: str = "cuda") -> None:
        pinned = device_type == "cuda"
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in storages_of(roots, device_type):
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            copy = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=pinned)
            self._kept.append((storage, copy.copy_(flat)))
            del flat
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """Held in host memory."""
        return sum(copy.numel() for _, copy in self._kept)

    def restore(self) -> None:
        """Brings everything back; raises torch's error where there is no room on the device."""
        for storage, copy in self._kept:
            storage.resize_(copy.numel())
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            flat.copy_(copy)
        self._kept = []


def storages_of(roots: Any, device_type: str) -> list[torch.UntypedStorage]:
    """The storages of all tensors that are reached from `roots`, each once; empty ones aside."""
    found: dict[int, torch.UntypedStorage] = {}
    seen, waiting = set[int](), [roots]
    while waiting:
        each = waiting.pop()
        if isinstance(each, _OUTSIDE) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            if storage.device.type == device_type and storage.nbytes():
                found[storage.data_ptr()] = storage
            waiting.append(each.__dict__)
        elif isinstance(each, FunctionType):  # its globals are a module's
            waiting += [cell.cell_contents for cell in each.__closure__ or () if _is_set(cell)]
        elif isinstance(each, MethodType):
            waiting += [each.__self__, each.__func__]
        else:
            waiting += gc.get_referents(each)
    return list(found.values())


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def trim() -> None:
    """Has the C library give freed memory back to the system, where it can."""
    try:
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    except (OSError, AttributeError):  # another C library
        return
