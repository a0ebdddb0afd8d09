"""What a checkpoint's folder must hold, by the names of its files; nothing is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ....errors import CheckpointError

INDEX_NAME: Final = "model.safetensors.index.json"
PICKLED: Final = "pytorch_model.bin"
PICKLED_INDEX: Final = "pytorch_model.bin.index.json"


def require_checkpoint(path: Path, *, allow_pickle: bool = False) -> Path:
    """Returns `path`, if it is a folder with a configuration and weights that may be read.

    Hub names are not resolved here: download first, then serve the folder.
    """
    if not path.exists():
        raise CheckpointError(f"model path {str(path)!r} does not exist", field="model")
    if not path.is_dir():
        raise CheckpointError(
            f"model path {str(path)!r} is a file; a checkpoint is a folder", field="model"
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{str(path)!r} has no config.json", field="model")
    if has_safetensors(path) or (allow_pickle and _has_pickles(path)):
        return path
    if _has_pickles(path):
        raise CheckpointError(
            f"{str(path)!r} holds only pickled weights; set allow_pickle: true to read them with "
            "torch's restricted unpickler, or convert them to safetensors (save_pretrained does)",
            field="model",
        )
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise CheckpointError(
            f"{str(path)!r} holds only pickled weights, and no {PICKLED}; convert them to "
            "safetensors (save_pretrained does)",
            field="model",
        )
    raise CheckpointError(f"{str(path)!r} has no *.safetensors file", field="model")


def has_safetensors(path: Path) -> bool:
    return (path / INDEX_NAME).is_file() or any(path.glob("*.safetensors"))


def _has_pickles(path: Path) -> bool:
    """Whether the folder has weights in transformers' pickled layout."""
    return (path / PICKLED_INDEX).is_file() or (path / PICKLED).is_file()
