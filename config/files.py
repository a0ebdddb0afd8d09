"""Names and types of checkpoints, why their files are not read, and how own files are written.

A Hugging Face id is `org/name`, or `org/name@revision`, and no folder here. What is written at
shutdown (tables, snapshots of pools) is checked for writability at startup.
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
"""Types that are served as another. Kimi-K2 is DeepSeek-V3 by another name, and MiMo is Qwen2. In
DeepSeek-V3.2 and GLM-5 an indexer chooses `index_topk` tokens that a row attends to: all of them in
a context that is not longer, and no longer one is served. There both are DeepSeek-V3, and the
indexer is not read."""

# One slash is left where an address has been a path; `file:///` has three.
_ADDRESS = re.compile(r"[a-z][a-z0-9+]+:/{1,3}[^/].*")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class HfOverrides(Strict):
    """Keys of config.json that say what else a checkpoint gives, where its own leaves them out."""

    classifier_from_token: tuple[str, str] | None = None
    """Tokens of no and yes, whose logits make a score: as `["no", "yes"]`."""
    is_matryoshka: bool | None = None
    """Embeddings may be cut to any size."""
    matryoshka_dimensions: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Sizes to which embeddings may be cut."""

    def given(self) -> dict[str, Any]:
        """The keys that are set, as config.json has them."""
        return self.model_dump(mode="json", exclude_none=True)


def _is_here(source: str) -> bool:
    try:
        return Path(source).exists()
    except OSError:  # the name is too long
        return False


def is_hub_id(source: str) -> bool:
    """Whether `source` names a repository on the Hub; a folder of that name comes first."""
    return _ID.fullmatch(source) is not None and not _is_here(source)


def is_address(source: str) -> bool:
    """Whether `source` is in object storage, as `s3://bucket/model`; what is here comes first."""
    return _ADDRESS.fullmatch(source) is not None and not _is_here(source)


def needs_folder(source: str) -> bool:
    """Whether `source` is an id, an address, or a GGUF file by its name: no folder as yet."""
    return source.lower().endswith(".gguf") or is_hub_id(source) or is_address(source)


def stored_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A checkpoint's config.json; empty where it cannot be read, which whoever loads it reports."""
    try:
        data = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def only_pickled(folder: Path) -> str:
    """Why weights in torch's own format are not read."""
    return (
        f"{str(folder)!r} holds only pickled weights; set allow_pickle: true to read them with "
        "torch's restricted unpickler, or convert them to safetensors (save_pretrained does)"
    )


# What transformers' messages about a checkpoint's own Python code (`auto_map`) contain.
_MARKS = ("trust_remote_code", "custom code")


def reason(error: BaseException, where: object) -> str:
    """Why the files at `where` cannot be read: `error`'s text, or that their code is not run."""
    text = str(error).strip() or type(error).__name__
    if not any(mark in text for mark in _MARKS):
        if isinstance(error, KeyError):
            return f"unknown name {text}"
        return " ".join(text.split("\n\n")[0].split())  # how to update follows
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
