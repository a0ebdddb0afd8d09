"""Reading a head's checkpoint: one folder, one or several files, every tensor accounted for.

`Tensors.take` names the tensor and the shape that it must have; `Tensors.finish` names what is
left over. Both safetensors and torch's own files are read, the latter without unpickling code.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import CheckpointError

FIELD = "speculative_config.speculative_model"
_SUFFIXES = (".safetensors", ".pt", ".bin", ".pth")


def fail(message: str) -> CheckpointError:
    """The error that every fault of a head's checkpoint becomes."""
    return CheckpointError(f"{FIELD}: {message}", field=FIELD)


def read_config(folder: Path) -> dict[str, Any]:
    """The head's configuration; empty where there is none.

    Raises:
        CheckpointError: the folder is missing, or its configuration is not JSON.
    """
    if not folder.is_dir():
        raise fail(f"{str(folder)!r} is not a folder")
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise fail(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise fail(f"{file} must hold a mapping")
    return config


class Tensors:
    """The tensors of a folder by name, read when they are taken.

    Args:
        names: file names without suffix, best first; the first that exists is read, with all its
            parts where an index says that there are several.
        rename: what a stored name is called here; None leaves the tensor aside.
    """

    def __init__(
        self,
        folder: Path,
        names: Iterable[str],
        rename: Callable[[str], str | None] = lambda name: name,
    ) -> None:
        self.folder = folder
        self._readers: dict[str, Callable[[], Tensor]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in _files(folder, tuple(names), rename):
            for stored, shape, reader in _entries(file):
                name = rename(stored)
                if name is not None:
                    self._readers[name], self._shapes[name] = reader, shape
        self._left = set(self._readers)

    def __contains__(self, name: str) -> bool:
        return name in self._readers

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        return self._shapes[name]

    def matches(self, pattern: str) -> list[re.Match[str]]:
        """Names that are `pattern` from end to end."""
        found = (re.fullmatch(pattern, name) for name in sorted(self._readers))
        return [match for match in found if match]

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor called `name` (raises as `expect` does)."""
        self.expect(name, *shape)
        return self._readers[name]()

    def expect(self, name: str, *shape: int) -> None:
        """Counts the tensor called `name` as taken, unread.

        Raises:
            CheckpointError: it is missing, or has another shape.
        """
        if name not in self._readers:
            near = ", ".join(sorted(self._left)[:4]) or "none"
            raise fail(
                f"{str(self.folder)!r} lacks tensor {name!r} of shape {list(shape)}; "
                f"unused ones: {near}"
            )
        if self._shapes[name] != shape:
            raise fail(
                f"tensor {name!r} of {str(self.folder)!r} has shape {list(self._shapes[name])}, "
                f"wanted is {list(shape)}"
            )
        self._left.discard(name)

    def reader(self, name: str) -> Callable[[], Tensor]:
        """Reads a tensor that is there, whatever its shape; it counts as taken."""
        self._left.discard(name)
        return self._readers[name]

    def finish(self, ignored: str = "(?!)") -> None:
        """Raises `CheckpointError` if a tensor was neither taken nor `ignored`."""
        left = sorted(name for name in self._left if not re.fullmatch(ignored, name))
        if left:
            more = f" and {len(left) - 4} more" if len(left) > 4 else ""
            raise fail(
                f"{str(self.folder)!r} holds tensors that this head has no place for: "
                f"{', '.join(left[:4])}{more}"
            )


def _files(folder: Path, names: tuple[str, ...], rename: Callable[[str], str | None]) -> list[Path]:
    """Those that hold a tensor which `rename` has a name for."""
    if not folder.is_dir():
        raise fail(f"{str(folder)!r} is not a folder")
    for name in names:
        for suffix in _SUFFIXES:
            index = folder / f"{name}{suffix}.index.json"
            if index.is_file():
                parts = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
                wanted = {part for stored, part in parts.items() if rename(stored) is not None}
                return [folder / part for part in sorted(wanted)]
            if (folder / f"{name}{suffix}").is_file():
                return [folder / f"{name}{suffix}"]
    raise fail(f"{str(folder)!r} has none of {', '.join(names)} as {', '.join(_SUFFIXES[:-1])}")


def _entries(file: Path) -> list[tuple[str, tuple[int, ...], Callable[[], Tensor]]]:
    """Name, shape and reader of every tensor of a file."""
    try:
        if file.suffix == ".safetensors":
            opened = safe_open(file, framework="pt", device="cpu")
            return [
                (name, tuple(opened.get_slice(name).get_shape()), _reader(opened.get_tensor, name))
                for name in opened.keys()  # noqa: SIM118
            ]
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (SafetensorError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise fail(f"{file} cannot be read, it may be truncated: {error}") from None
    if not isinstance(state, dict):
        raise fail(f"{file} holds no tensors by name")
    return [
        (name, tuple(tensor.shape), _reader(state.__getitem__, name))
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
    ]


def _reader(get: Callable[[str], Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: get(name)
