"""Weights in pickled files (`pytorch_model.bin`), with the interface of an open safetensors file.

They are read only where `allow_pickle` is set, by torch's restricted unpickler, which creates
tensors and executes nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import KeysView
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....errors import CheckpointError

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


@dataclass(frozen=True, slots=True)
class PickledSlice:
    """One tensor; reading a part of it copies that part."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return _NAMES.get(self.tensor.dtype, str(self.tensor.dtype))

    def __getitem__(self, box: Any) -> Tensor:
        return self.tensor[box].clone()


class PickledFile:
    """The tensors of one file, mapped into memory where its format allows that.

    Raises:
        CheckpointError: it is damaged, or holds anything but tensors by name.
    """

    def __init__(self, file: Path) -> None:
        state = _load(file)
        if not isinstance(state, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
        ):
            raise CheckpointError(f"{file} holds no tensors by name", field="model")
        self._state: dict[str, Tensor] = state

    def keys(self) -> KeysView[str]:
        return self._state.keys()

    def get_slice(self, name: str) -> PickledSlice:
        if name not in self._state:
            raise CheckpointError(f"tensor {name!r} is not in its file", field="model")
        return PickledSlice(self._state[name])


def _load(file: Path) -> Any:
    for mmap in (True, False):  # files from before torch 1.6 cannot be mapped
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        except pickle.UnpicklingError:
            raise CheckpointError(
                f"{file} is damaged, or holds objects other than tensors", field="model"
            ) from None
        except (OSError, EOFError, RuntimeError, ValueError) as error:
            if mmap:
                continue
            reason = str(error).partition(". ")[0]
            raise CheckpointError(
                f"{file} cannot be read, it may be truncated: {reason}", field="model"
            ) from error
    raise AssertionError("the second attempt returns or raises")
