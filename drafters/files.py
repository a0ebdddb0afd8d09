"""Atomic writes of n-gram tables and pool snapshots.

A file that is written at shutdown is checked for writability at startup.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from ..errors import ConfigError

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL


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
