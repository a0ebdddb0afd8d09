"""Checkpoints in object storage: addresses such as `s3://bucket/model`, through fsspec.

A model's files are fetched once into the user's cache. The folder's name depends on the sizes and
versions of all files that models may need. So other weights at the same address are fetched again,
and a reader that may use more of the same files fetches only the missing ones. Pieces of several
files are transferred at a time, and an interrupted transfer resumes where it ended. If the storage
does not answer, the copy that was fetched last is served.

A rank on another node gets the path of the engine's folder: its part within the cache is the
address, and the rank's node fetches the same version.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, NamedTuple

from ....errors import CheckpointError
from .progress import Progress, transfer

log = logging.getLogger(__name__)

_FETCHED = re.compile(r"/outrider/storage/([a-z0-9+]+)/(.+)/([0-9a-f]{16})(?:/([^/]+\.gguf))?/?$")
_FILES: Final = ".files.json"  # in a copy: the names of the files in its storage
_PIECE: Final = 16 << 20  # bytes of one request
_UNDER_WAY: Final = 8  # number of concurrent pieces
_ATTEMPTS: Final = 4  # for each piece
_PAUSE_S: Final = 0.5  # before the second attempt; doubles with each further one
# Keys that distinguish versions of an object in various file systems.
_VERSIONS = ("ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "checksum", "generation")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created")


class _Object(NamedTuple):
    """A file of a checkpoint in its storage."""

    path: str
    size: int  # bytes
    version: str

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]


def cache_folder(kind: str) -> Path:
    """Returns the folder for copies of checkpoints of one kind."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return base / "outrider" / kind


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a file's lock; does nothing if the file system has no locks."""
    with path.open("w") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX)
        except OSError as error:
            log.info("%s cannot be locked: %s", path, error)
        yield


def copied(
    path: str,
    field: str,
    patterns: Sequence[str],
    every: Sequence[str],
    progress: Progress | None = None,
) -> Path | None:
    """Returns this node's copy for `path`, a folder or a GGUF file in the cache of another node.

    Returns None for other paths. Raises as `fetched`, which has the same arguments.
    """
    if (found := _FETCHED.search(path)) is None:
        return None
    scheme, where, version, file = found.groups()
    at = Path(path)
    if _is_whole(at.parent if file else at, [_parts_of(file)] if file else patterns):
        return at
    address = f"{scheme}://{where}" + (f"/{file}" if file else "")
    return fetched(address, field, patterns, every, version, progress)


def fetched(
    address: str,
    field: str,
    patterns: Sequence[str],
    every: Sequence[str],
    version: str = "",
    progress: Progress | None = None,
) -> Path:
    """Returns a copy of a folder's files by `patterns`, or of a GGUF file and its other parts.

    Args:
        every: patterns of all files that any model may need, which determine the version.
        version: version of another node's copy; a different one is an error.
        progress: counts the bytes.

    Raises:
        CheckpointError: unknown kind of storage, no permission, nothing there, another version, no
            space, or neither an answer nor a copy; names `field`.
    """
    scheme, where = _parts(address)
    if ".." in where.split("/"):
        raise CheckpointError.at(field, f"{address!r}: a path without '..'")
    is_file = where.lower().endswith(".gguf")
    home = cache_folder("storage") / scheme / (where.rpartition("/")[0] if is_file else where)
    name = where.rpartition("/")[2] if is_file else ""
    if is_file:
        patterns = every = [_parts_of(name)]
    try:
        system, root = _file_system(address)
        objects = _listed(system, root, every)
        if not any(_fits(each.name, patterns) for each in objects):
            raise FileNotFoundError
    except (ImportError, ValueError) as error:  # unknown scheme, or its package is not installed
        raise CheckpointError.at(field, f"{address!r}: {error}") from None
    except Exception as error:  # noqa: BLE001, each file system has its own
        lists = sorted(
            home.glob(f"{version or '*'}/{_FILES}"), key=lambda each: each.stat().st_mtime
        )
        copies = [each.parent for each in lists if _is_whole(each.parent, patterns)]
        if not copies or isinstance(error, (FileNotFoundError, PermissionError)):
            raise CheckpointError.at(field, f"{address!r} cannot be read: {_why(error)}") from None
        log.warning("%s cannot be read (%s); a copy of it serves", address, _why(error))
        return copies[-1] / name
    folder = home / _key(objects)
    if version not in ("", folder.name):
        raise CheckpointError.at(
            field, f"{address!r} has changed since the engine's node read it; start again"
        )
    try:
        _fetch(system, objects, patterns, folder, address, progress)
    except CheckpointError as error:
        raise CheckpointError.at(field, error.message) from None
    except OSError as error:
        why = f"{error.filename or folder}: {error.strerror or error}"
        raise CheckpointError.at(field, f"{address!r} cannot be kept: {why}") from None
    return folder / name


def _parts(address: str) -> tuple[str, str]:
    """Returns scheme and path."""
    scheme, _, where = address.partition(":")
    return scheme, where.strip("/")


def _parts_of(name: str) -> str:
    """Returns the pattern of all parts of a GGUF file."""
    return re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-[0-9][0-9][0-9][0-9][0-9]-of-\1.gguf", name)


def _file_system(address: str) -> tuple[Any, str]:
    """Returns the file system of the storage, and the path in it."""
    from fsspec.core import url_to_fs

    scheme, where = _parts(address)
    system, path = url_to_fs(f"{scheme}://{where}")
    return system, path


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _is_whole(folder: Path, patterns: Sequence[str]) -> bool:
    """Returns True if a copy has all files that match; files get their names once complete."""
    if not (folder / _FILES).exists():
        return False
    names = json.loads((folder / _FILES).read_text())
    return all((folder / name).exists() for name in names if _fits(name, patterns))


def _listed(system: Any, root: str, patterns: Sequence[str]) -> list[_Object]:
    """Lists the files directly in a folder that match; for a pattern of parts, those beside it."""
    folder = root.rpartition("/")[0] if root.lower().endswith(".gguf") else root
    found = []
    for each in system.ls(folder, detail=True):
        name = each["name"].rstrip("/").rpartition("/")[2]
        if each.get("type") == "directory" or not _fits(name, patterns):
            continue
        facts = each if each.get("size") is not None else system.info(each["name"])
        if facts.get("size") is None:
            raise OSError(f"it does not say how long {name} is")
        known = [key for key in _VERSIONS if facts.get(key)] or [
            key for key in _TIMES if facts.get(key)
        ]
        found.append(_Object(each["name"], facts["size"], str([facts[key] for key in known])))
    return sorted(found)


def _key(objects: list[_Object]) -> str:
    facts = [[each.name, each.size, each.version] for each in objects]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _why(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such model"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _fetch(
    system: Any,
    objects: list[_Object],
    patterns: Sequence[str],
    folder: Path,
    address: str,
    progress: Progress | None,
) -> None:
    """Completes `folder`; if another process does so already, waits for it.

    Raises:
        CheckpointError: a piece cannot be read after all attempts, or there is no space.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [each for each in objects if _fits(each.name, patterns)]
    if _is_whole(folder, patterns):
        return
    with locked(folder / ".lock"):
        missing = [each for each in wanted if not (folder / each.name).exists()]
        partial = {each: folder / f"{each.name}.partial" for each in missing}
        had = sum(path.stat().st_size for path in partial.values() if path.exists())
        needed, free = sum(each.size for each in missing) - had, shutil.disk_usage(folder).free
        if needed > free:
            raise CheckpointError(
                f"{address!r} needs {needed / 2**30:,.2f} GiB, and {free / 2**30:,.2f} GiB are "
                f"free at {folder}; XDG_CACHE_HOME chooses another folder for caches"
            )
        if missing:
            log.warning("%s (%.2f GiB) is fetched to %s", address, needed / 2**30, folder)
            with transfer("fetched", needed, address, progress) as count:
                _fetch_pieces(system, partial, count)
        names = json.dumps([each.name for each in objects])
        written = folder / f"{_FILES}.{os.getpid()}"  # renamed when complete: others do not lock
        written.write_text(names)
        written.rename(folder / _FILES)


def _fetch_pieces(system: Any, partial: dict[_Object, Path], count: Callable[[int], None]) -> None:
    """Appends missing pieces to the partial files, in order, and renames complete files."""
    under_way: deque[tuple[_Object, int, Future[bytes] | None]] = deque()
    with ThreadPoolExecutor(_UNDER_WAY) as pool:

        def write() -> None:
            each, end, answer = under_way.popleft()
            with partial[each].open("ab") as opened:
                if answer is not None:
                    count(opened.write(answer.result()))
            if end == each.size:
                partial[each].rename(partial[each].with_name(each.name))

        try:
            for each, path in partial.items():
                begin = path.stat().st_size if path.exists() else 0
                if begin > each.size:
                    path.unlink()
                    begin = 0
                if begin == each.size:  # empty, or complete except for its name
                    under_way.append((each, begin, None))
                for at in range(begin, each.size, _PIECE):
                    end = min(at + _PIECE, each.size)
                    under_way.append((each, end, pool.submit(_piece, system, each.path, at, end)))
                    if len(under_way) > _UNDER_WAY:
                        write()
            while under_way:
                write()
        finally:
            for _, _, answer in under_way:
                if answer is not None:
                    answer.cancel()


def _piece(system: Any, path: str, begin: int, end: int) -> bytes:
    """Reads bytes `begin` to `end` of an object.

    Raises:
        CheckpointError: they cannot be read.
    """
    why = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S * 2 ** (attempt - 1))
        try:
            data: bytes = system.cat_file(path, start=begin, end=end)
        except Exception as error:  # noqa: BLE001, each file system has its own
            why = _why(error)
            continue
        if len(data) == end - begin:
            return data
        if len(data) > end - begin:
            raise CheckpointError(f"{path} comes whole where a part is asked for (no ranges)")
        why = f"{len(data)} bytes came where {end - begin} were asked for"
    raise CheckpointError(
        f"{path} cannot be read from byte {begin} on: {why}; the next start goes on from there"
    )
