"""Files that are there whole or not at all: tables of n-grams and snapshots of pools.

Whoever will write one when the engine ends asks when it starts whether that can be done.
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
    """Writes a file; what was there stays until it is whole, and if it fails nothing else does."""
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
    """Does all that `write_whole` will do, short of the file itself.

    Raises:
        ConfigError: it could not be written.
    """
    try:
        _, partial = _places(path)
        os.close(os.open(partial, _FLAGS, 0o600))
        partial.unlink()
    except OSError as error:
        raise ConfigError(
            f"{field}: {path} cannot be written: {error.strerror}", field=field
        ) from None


def _places(path: Path) -> tuple[Path, Path]:
    """Where a link leads, and a new name beside it."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path, path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
