"""The properties of a model, from its checkpoint's configuration; no weight is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .checkpoint.folder import require_checkpoint
from .checkpoint.weights import Checkpoint
from .outline import ModelOutline, outline_of
from .settings import read_config


@dataclass(frozen=True, slots=True)
class ModelInfo(ModelOutline):
    """Properties of a model that other modules use. Head counts are those of one rank."""

    dtype: torch.dtype


def describe(
    path: Path,
    tensor_parallel_size: int = 1,
    dtype: torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> ModelInfo:
    """What `load_model` would give a rank, from the configuration alone; raises as `outline`."""
    require_checkpoint(path, allow_pickle=allow_pickle)
    config = read_config(path, trust_remote_code=trust_remote_code)
    found = outline_of(config, path, tensor_parallel_size)
    dtype = dtype or config.dtype or Checkpoint(path, allow_pickle=allow_pickle).dtype()
    return ModelInfo(**asdict(found), dtype=dtype)
