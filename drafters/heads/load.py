"""Reads a head's checkpoint: one folder with one or several files.

`Tensors.take` checks a tensor's presence and shape; `Tensors.finish` rejects tensors that were not
taken. Reads safetensors and, if allowed, torch's own format, without unpickling code.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...config.files import only_pickled
from ...errors import CheckpointError

FIELD = "speculative_config.speculative_model"
_SAFE, _PICKLED = ".safetensors", (".pt", ".bin", ".pth")
_DTYPES: dict[str, torch.dtype] = {}  # by the name in safetensors files; filled as they are read
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fail(message: str) -> CheckpointError:
    """Returns the error for any fault of a head's checkpoint."""
    return CheckpointError.at(FIELD, f"{message}")


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the head's configuration; empty if there is no file.

    Raises:
        CheckpointError: the folder is missing, or its configuration is not JSON.
    """
    if not folder.is_dir():
        raise fail(f"{str(folder)!r} is not a folder")
    file = folder / "config.json"
    if not file.exists():
        return {}
    return _mapping(file)


class Tensors:
    """The tensors of a folder by name, read when they are taken.

    Args:
        names: file names without suffix, in order of preference; the first that exists is read,
            with all parts listed in its index, if it has one.
        rename: maps a stored name to the name used here; None ignores the tensor.
        device: "meta" reads names, shapes and dtypes but no weights.
        allow_pickle: whether torch's own format is read if there are no safetensors.
    """

    def __init__(
        self,
        folder: Path,
        names: Iterable[str],
        rename: Callable[[str], str | None] = lambda name: name,
        device: torch.device | None = None,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self.folder = folder
        self._dry = device is not None and device.type == "meta"
        self._readers: dict[str, Callable[..., Tensor]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, str] = {}
        for file in _files(folder, tuple(names), rename, allow_pickle):
            for stored, shape, reader in _entries(file):
                name = rename(stored)
                if name is None:
                    continue
                if name in self._readers:
                    raise fail(f"{str(folder)!r} holds tensor {name!r} twice, also as {stored!r}")
                self._readers[name], self._shapes[name] = reader, shape
                self._stored[name] = stored
        self._left = set(self._readers)

    def __contains__(self, name: str) -> bool:
        return name in self._readers

    def fault(self, what: str) -> CheckpointError:
        """Returns an error about the folder, with the fault `what`."""
        return fail(f"{str(self.folder)!r} {what}")

    def bad(self, name: str, what: str) -> CheckpointError:
        """Returns an error about a tensor, with the fault `what`."""
        return fail(f"tensor {name!r} of {str(self.folder)!r} {what}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a present tensor."""
        return self._shapes[name]

    def stored_name(self, name: str) -> str:
        """Returns the name in the file of a present tensor."""
        return self._stored[name]

    def matches(self, pattern: str) -> list[re.Match[str]]:
        """Returns full matches of `pattern` among the names."""
        # Compiled once: with a large target's tensors there are 90,000 names.
        return [
            match for match in map(re.compile(pattern).fullmatch, sorted(self._readers)) if match
        ]

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns the weight called `name` (raises as `expect` and `weight` do)."""
        self.expect(name, *shape)
        return self.weight(name, self.reader(name)())

    def state_of(
        self, module: nn.Module, stored_name: Callable[[str], str] = lambda name: name
    ) -> dict[str, Tensor]:
        """Returns weights of all parameters of `module`, in its shapes (raises as `take` does)."""
        return {
            name: self.take(stored_name(name), *empty.shape)
            for name, empty in module.state_dict().items()
        }

    def take_ids(self, name: str, *shape: int) -> Tensor:
        """Returns the integer tensor called `name`, as int64 (raises as `take` does)."""
        self.expect(name, *shape)
        tensor = self._readers[name]()
        if tensor.is_floating_point() or tensor.is_complex():
            raise self.bad(name, f"is {tensor.dtype}, expected whole numbers")
        return tensor.to(torch.int64)

    def weight(self, name: str, tensor: Tensor) -> Tensor:
        """Returns `tensor`, read as `name`.

        Raises:
            CheckpointError: it is quantised, or not a weight.
        """
        if tensor.dtype not in _WEIGHTS:
            raise self.bad(
                name,
                f"is {tensor.dtype}, expected "
                "torch.float32, bfloat16 or float16: quantised heads are not read",
            )
        return tensor

    def expect(self, name: str, *shape: int) -> None:
        """Marks the tensor called `name` as taken without reading it.

        Raises:
            CheckpointError: it is missing, or has another shape.
        """
        if name not in self._readers:
            near = ", ".join(sorted(self._left)[:4]) or "none"
            raise self.fault(f"lacks tensor {name!r} of shape {list(shape)}; unused ones: {near}")
        if self._shapes[name] != shape:
            raise self.bad(name, f"has shape {list(self._shapes[name])}, expected {list(shape)}")
        self._left.discard(name)

    def reader(self, name: str) -> Callable[[], Tensor]:
        """Returns a reader of a present tensor of any shape; marks it as taken."""
        self._left.discard(name)
        read = self._readers[name]
        return partial(read, dry=True) if self._dry else read

    def finish(self, ignored: str = "(?!)") -> None:
        """Raises `CheckpointError` if a tensor was neither taken nor `ignored`."""
        left = sorted(name for name in self._left if not re.fullmatch(ignored, name))
        if left:
            more = f" and {len(left) - 4} more" if len(left) > 4 else ""
            raise self.fault(
                f"holds tensors that this head does not have: {', '.join(left[:4])}{more}"
            )


def _files(
    folder: Path, names: tuple[str, ...], rename: Callable[[str], str | None], allow_pickle: bool
) -> list[Path]:
    """Returns the files with the head's tensors; for all `names`, safetensors come first."""
    if not folder.is_dir():
        raise fail(f"{str(folder)!r} is not a folder")
    for suffix in (_SAFE, *_PICKLED):
        for name in names:
            index, file = folder / f"{name}{suffix}.index.json", folder / f"{name}{suffix}"
            if not index.is_file() and not file.is_file():
                continue
            files = _parts(index, rename) if index.is_file() else [file]
            if not allow_pickle and any(each.suffix != _SAFE for each in files):
                raise fail(only_pickled(folder))
            return files
    raise fail(f"{str(folder)!r} has none of {', '.join(names)} as {_SAFE}, .pt, .bin")


def _parts(index: Path, rename: Callable[[str], str | None]) -> list[Path]:
    """Returns the files of an index with a tensor that `rename` does not ignore."""
    parts = _mapping(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise fail(f"{index} has no 'weight_map' from tensors to files")
    wanted = sorted({part for stored, part in parts.items() if rename(stored) is not None})
    for part in wanted:
        if not (index.parent / part).is_file():
            raise fail(f"{index} names {part!r}, which does not exist")
    return [index.parent / part for part in wanted]


def _mapping(file: Path) -> dict[str, Any]:
    """Returns a JSON file's mapping."""
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise fail(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise fail(f"{file} is not JSON: {error}") from None
    if not isinstance(held, dict):
        raise fail(f"{file} must hold a mapping, got {type(held).__name__}")
    return held


def _entries(file: Path) -> list[tuple[str, tuple[int, ...], Callable[..., Tensor]]]:
    """Returns name, shape and reader of every tensor of a file."""
    try:
        if file.suffix == _SAFE:
            opened = safe_open(file, framework="pt", device="cpu")
            return [
                (name, tuple(opened.get_slice(name).get_shape()), partial(_stored, opened, name))
                for name in opened.keys()  # noqa: SIM118
            ]
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise fail(f"{file} is damaged, or holds objects other than tensors") from None
    except (SafetensorError, OSError, EOFError, RuntimeError) as error:
        reason = str(error).partition(". ")[0]
        raise fail(f"{file} cannot be read, it may be truncated: {reason}") from None
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise fail(f"{file} holds no tensors by name")
    return [
        (name, tuple(tensor.shape), partial(_mapped, tensor))
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
    ]


def _stored(opened: Any, name: str, *, dry: bool = False) -> Tensor:
    """Returns a tensor of a safetensors file; dry: an empty one on the meta device."""
    piece = opened.get_slice(name)
    shape, stored = piece.get_shape(), piece.get_dtype()
    if not dry or not shape:
        tensor: Tensor = opened.get_tensor(name)
        return tensor.to("meta") if dry else tensor
    if stored not in _DTYPES:
        _DTYPES[stored] = piece[:0].dtype  # takes milliseconds for a tensor of a large file
    return torch.empty(shape, dtype=_DTYPES[stored], device="meta")


def _mapped(tensor: Tensor, *, dry: bool = False) -> Tensor:
    """Returns a tensor of torch's own format, which is memory-mapped and read at its first use."""
    return tensor.to("meta") if dry else tensor


class ConfigReader:
    """One mapping of a `config.json`: present values are checked, absent ones have defaults.

    Args:
        folder: folder of the file, for error messages.
    """

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        self._folder, self._file = folder, str(folder / "config.json")
        self.values = values

    def __contains__(self, key: str) -> bool:
        """Returns True if a key is present and not null."""
        return self.values.get(key) is not None

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        """Returns the error for an invalid value."""
        return fail(f"{key} of {self._file!r} is {self.values.get(key)!r}, expected {wanted}")

    def section(self, key: str) -> ConfigReader:
        """Returns a nested mapping; empty if absent."""
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "a mapping")
        return ConfigReader(self._folder, value)

    def number(self, key: str, default: int | None = None) -> int:
        """Returns a whole number above 0; required if there is no default."""
        value: Any = self.values[key] if key in self else default
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a whole number above 0")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0; required if there is no default."""
        value: Any = self.values[key] if key in self else default
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns a boolean."""
        value = self.values[key] if key in self else default
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def layers(self, key: str) -> tuple[int, ...]:
        """Returns a list of target layers; empty if absent."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(type(layer) is int for layer in value):
            raise self.wrong(key, "a list of layers")
        return tuple(value)

    def only(self, key: str, *allowed: Any, why: str) -> None:
        """Raises `CheckpointError` if a key is present with a value that is not `allowed`."""
        if key in self and self.values[key] not in allowed:
            raise fail(f"{key} of {self._file!r} is {self.values[key]!r}: {why}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks `vocab_size` for a head without a tensor that shows it."""
        wanted = f"the target's {vocab_size}: the head is of another model"
        if "vocab_size" in self and self.values["vocab_size"] != vocab_size:
            raise self.wrong("vocab_size", wanted)
