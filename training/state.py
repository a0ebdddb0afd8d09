"""A run's files in its output folder, and the identity of a run.

`training/checkpoint.pt` (module, optimizers, step), `training/run.json` (the run's identity),
`log.jsonl` (losses and evaluations), and what a method exports. Files are replaced atomically and
get the permissions of any new file; safetensors' own files would be restricted to the owner.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..config.files import write_whole
from ..errors import CheckpointError, ConfigError
from .data import Documents
from .protocol import FrozenTarget

_SAMPLE_BYTES = 1 << 20  # of each weight file's beginning and end
_WEIGHTS = (".safetensors", ".bin", ".pt")


def target_mark(folder: Path) -> str:
    """Returns a digest of a checkpoint's configuration and of samples of its weight files."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def data_mark(*parts: Documents) -> str:
    """Returns a digest of tokens and weights."""
    digest = hashlib.sha256()
    for documents in parts:
        for tensor in (documents.tokens, documents.weights, documents.starts):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


class Folder:
    """A run's output folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log.jsonl"  # losses and evaluations, one JSON object per line
        self.training = path / "training"  # files that only training reads
        self.checkpoint = self.training / "checkpoint.pt"
        self.run = self.training / "run.json"

    def check(self, identity: dict[str, Any], *, resume: bool) -> None:
        """Checks that this run may use the folder; writes nothing.

        Raises:
            ConfigError: without `resume`, the folder holds a run or other files; with `resume`, it
                holds no run.
            CheckpointError: with `resume`, it holds another run.
        """
        if not resume:
            held = sorted(path.name for path in self.path.iterdir()) if self.path.is_dir() else []
            what = f"other files ({', '.join(held[:3])}); give a new or empty folder"
            if self.run.exists():
                what = "a training run; give --resume to continue it, or another folder"
            if held:
                raise ConfigError.at("out", f"{self.path} holds {what}")
            return
        try:
            before = dict(json.loads(self.run.read_text(encoding="utf-8")))
        except OSError:
            raise ConfigError.at("resume", f"{self.path} holds no training run") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError.at("resume", f"{self.run} is damaged: {error}") from None
        now = json.loads(json.dumps(identity))
        for key in [*now, *sorted(before.keys() - now.keys())]:  # the method first
            if before.get(key) != now.get(key):
                raise CheckpointError(
                    f"resume: {self.path} was trained with {key} = {before.get(key)!r}, this run "
                    f"has {now.get(key)!r}",
                    field=key,
                )

    def begin(self, identity: dict[str, Any]) -> None:
        """Creates the folder and writes this run's identity.

        Raises:
            ConfigError: the folder cannot be written.
        """
        try:
            self.training.mkdir(parents=True, exist_ok=True)
            write_whole(self.run, [_as_json(identity)])
        except OSError as error:
            raise ConfigError.at("out", f"cannot write {self.path}: {error.strerror}") from None


def save(path: Path, module: nn.Module, optimizers: list[dict[str, Any]], step: int) -> None:
    """Writes a checkpoint; `step` is the next step."""
    state = {"module": module.state_dict(), "optimizers": optimizers, "step": step}
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load(path: Path, module: nn.Module) -> tuple[list[dict[str, Any]], int] | None:
    """Loads the module's weights; returns optimizer states and the next step.

    Returns:
        None if there is no checkpoint.

    Raises:
        CheckpointError: it is damaged; or a tensor is missing, superfluous or of another shape.
    """
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        stored, optimizers, step = dict(state["module"]), state["optimizers"], int(state["step"])
    except (
        RuntimeError, OSError, EOFError, pickle.UnpicklingError, LookupError, TypeError, ValueError
    ) as error:  # fmt: skip
        raise CheckpointError.at(
            "resume", f"{path} cannot be read: {error}; delete it to restart the run"
        ) from error
    wanted = module.state_dict()
    for name in sorted(stored.keys() | wanted.keys()):
        found = tuple(stored[name].shape) if name in stored else None
        shape = tuple(wanted[name].shape) if name in wanted else None
        if found != shape:
            raise CheckpointError(
                f"resume: tensor {name!r} of {path} has shape {found}, expected {shape}", field=name
            )
    module.load_state_dict(stored)
    return optimizers, step


def append(path: Path, row: dict[str, Any]) -> None:
    """Appends a line to a log."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns all complete lines of a log; a killed run may have left an incomplete one.

    Raises:
        CheckpointError: a line is not a log entry.
    """
    if not path.is_file():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        return [{**row, "step": int(row["step"])} for row in rows]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise CheckpointError.at("resume", f"{path} is damaged: {error!r}") from None


def cut_log(path: Path, step: int) -> None:
    """Removes the lines after `step` from a log."""
    kept = [row for row in read_log(path) if row["step"] <= step]
    if path.is_file():
        write_whole(path, (json.dumps(row).encode() + b"\n" for row in kept))


def target_config(target: FrozenTarget) -> dict[str, Any]:
    """Returns the target's `config.json`, with the keys of its text part at the top level."""
    config: dict[str, Any] = json.loads((target.path / "config.json").read_text(encoding="utf-8"))
    inner: dict[str, Any] | None = config.pop("text_config", None)
    return {**config, **(inner or {})}


def stored_dtype(target: FrozenTarget) -> torch.dtype:
    """Returns the dtype of the target's checkpoint; bfloat16 for a quantised one."""
    theirs = target_config(target)
    name = str(theirs.get("dtype") or theirs.get("torch_dtype") or target.facts.dtype)
    dtype = getattr(torch, name.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def write_tensors(
    folder: Path,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    target: FrozenTarget,
    stem: str = "model",
) -> None:
    """Writes `{stem}.safetensors` in the dtype of the target's checkpoint, and `config.json`."""
    dtype = stored_dtype(target)
    stored = {
        key: each.to(dtype) if each.is_floating_point() else each for key, each in tensors.items()
    }
    named = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    write_files(folder, stored, named, stem)


def write_files(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], stem: str = "model"
) -> None:
    """Writes `{stem}.safetensors` with these tensors unchanged, and `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {key: each.detach().cpu().contiguous() for key, each in tensors.items()}
    write_whole(folder / f"{stem}.safetensors", [safetensors.torch.save(stored, {"format": "pt"})])
    write_whole(folder / "config.json", [_as_json(config)])


def _as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
