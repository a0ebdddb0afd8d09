"""Kinds of checkpoint names, reasons why files cannot be read, and atomic writes of own files.

A Hugging Face id is `org/name` or `org/name@revision`, unless a local folder has that name. Files
that are written at shutdown (tables, snapshots of pools) are checked for writability at startup.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..errors import ConfigError
from .strict import Strict

SERVED_AS = {
    "kimi_k2": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v3",
    "mimo": "qwen2",
}
"""Model types that are served as another type. Kimi-K2 is DeepSeek-V3 and MiMo is Qwen2 under
another name. In DeepSeek-V3.2 and GLM-5, an indexer selects `index_topk` tokens for every row to
attend to. In contexts up to that length, which are the only ones served, it selects all of them, so
both are DeepSeek-V3 and the indexer is not loaded."""

# An address that was used as a path has only one slash left; `file:///` has three.
_ADDRESS = re.compile(r"[a-z][a-z0-9+]+:/{1,3}[^/].*")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class HfOverrides(Strict):
    """Keys of config.json by which a checkpoint gives embeddings or scores, if it lacks them."""

    classifier_from_token: tuple[str, str] | None = None
    """Tokens for no and yes, from whose logits a score is computed, such as `["no", "yes"]`."""
    is_matryoshka: bool | None = None
    """Embeddings may be cut to any size."""
    matryoshka_dimensions: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Sizes to which embeddings may be cut."""

    def given(self) -> dict[str, Any]:
        """Returns the keys that are set, in config.json's form."""
        return self.model_dump(mode="json", exclude_none=True)


def _is_here(source: str) -> bool:
    try:
        return Path(source).exists()
    except OSError:  # the name is too long
        return False


def is_hub_id(source: str) -> bool:
    """Returns True if `source` names a repository on the Hub and is not a local path."""
    return _ID.fullmatch(source) is not None and not _is_here(source)


def is_address(source: str) -> bool:
    """Returns True if `source` is an object-storage address and is not a local path."""
    return _ADDRESS.fullmatch(source) is not None and not _is_here(source)


def needs_folder(source: str) -> bool:
    """Returns True if `source` is an id, an address or a GGUF file, which needs to be resolved."""
    return source.lower().endswith(".gguf") or is_hub_id(source) or is_address(source)


def stored_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Returns a checkpoint's config.json; empty if it cannot be read, which loading reports."""
    try:
        data = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def only_pickled(folder: Path) -> str:
    """Returns the reason why pickled weights are not read."""
    return (
        f"{str(folder)!r} holds only pickled weights; set allow_pickle: true to read them with "
        "torch's restricted unpickler, or convert them to safetensors (save_pretrained does)"
    )


# Parts of transformers' messages about a checkpoint's own Python code (`auto_map`).
_MARKS = ("trust_remote_code", "custom code")


def reason(error: BaseException, where: object) -> str:
    """Returns why the files at `where` cannot be read, from `error` or because code is not run."""
    text = str(error).strip() or type(error).__name__
    if not any(mark in text for mark in _MARKS):
        if isinstance(error, KeyError):
            return f"unknown name {text}"
        return " ".join(text.split("\n\n")[0].split())  # instructions for updating follow
    return (
        f"{str(where)!r} brings Python code of its own (auto_map), which is not run; read the "
        "code, then set trust_remote_code: true to allow it"
    )


def write_whole(path: Path, parts: Iterable[bytes], mode: int = 0o666) -> None:
    """Writes a file atomically: the old content stays until the new one is complete."""
    path, partial = _places(path)
    try:
        with os.fdopen(os.open(partial, _FLAGS, mode), "wb") as out:
            for part in parts:
                out.write(part)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def check_writable(path: Path, field: str) -> None:
    """Checks that `write_whole` can create a file there.

    Raises:
        ConfigError: `path` cannot be written.
    """
    try:
        _, partial = _places(path)
        os.close(os.open(partial, _FLAGS, 0o600))
        partial.unlink()
    except OSError as error:
        raise ConfigError.at(field, f"{path} cannot be written: {error.strerror}") from None


def _places(path: Path) -> tuple[Path, Path]:
    """`path` with links resolved, and a new temporary name in its folder."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path, path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
