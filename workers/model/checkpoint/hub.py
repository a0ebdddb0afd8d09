"""Resolves names of checkpoints to folders.

`org/name` or `org/name@revision` is fetched from the Hub through its cache, and
`s3://bucket/model` through ours (`storage.py`); a GGUF file is unpacked once. A rank on another
node gets the path of the engine's folder and finds its own copy. If the path is a snapshot in the
Hub's cache, the rank's node fetches the same commit into its own cache. For an address, it fetches
the same version. For an unpacked GGUF file, the path within the cache is the file's own, and the
rank's node unpacks its copy of the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import threading
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

from ....config.files import is_address, is_hub_id, only_pickled
from ....errors import CheckpointError, shown_value
from .progress import LOGGER, Amount, Progress, watched
from .storage import cache_folder, copied, fetched, locked

log = logging.getLogger(__name__)

# Weights, configurations, tokenizers and chat templates; code only if it is allowed.
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_CODE = ["*.py"]
# Files of models and heads, and further files of heads.
_PICKLES = [
    "pytorch_model*.bin",
    "*lm_head*.pt",
    "model*.pt",
    "mask_embedding.pt",
    "warp_model.bin",
]
_EVERY = [*_PATTERNS, *_CODE, *_PICKLES]
_LONGEST_NAME: Final = 255  # bytes of a path component
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/?$")


def local_folder(
    source: str,
    field: str = "model",
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    needs_tokenizer: bool = False,
    progress: Progress | None = None,
) -> str:
    """Returns the folder that holds `source`; fetches it if it is not in the cache.

    A path is returned unchanged; for a GGUF file, the folder into which it is unpacked is returned.
    HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are respected.

    Args:
        needs_tokenizer: whether to raise if no tokenizer can be made from a GGUF file.
        progress: counts fetched or unpacked bytes for its owner to report; None: reported here, by
            a bar on a terminal, otherwise by log lines.

    Raises:
        CheckpointError: there is no such repository or revision, no right to read it, or no
            network and nothing in the cache; a GGUF file is damaged or not supported; names
            `field`.
    """
    code, pickles = _CODE if trust_remote_code else [], _PICKLES if allow_pickle else []
    patterns = [*_PATTERNS, *code, *pickles]
    require_name(source, field)
    if not Path(source).exists():
        source = unpacked_from(Path(source)) or source
    if source.startswith("file:"):
        source = "/" + source.removeprefix("file:").lstrip("/")
    if copy := copied(source, field, patterns, _EVERY, progress):
        source = str(copy)
    elif is_address(source):
        source = str(fetched(source, field, patterns, _EVERY, progress=progress))
    if _is_gguf(Path(source)):
        return _unpacked(Path(source), field, progress, needs_tokenizer=needs_tokenizer)
    if Path(source).exists():
        return source
    if snapshot := _SNAPSHOT.search(source):
        repo, revision = f"{snapshot[1]}/{snapshot[2]}", snapshot[3]
    elif is_hub_id(source):
        repo, _, tag = source.partition("@")
        revision = tag or revision
    else:
        return source
    return _fetch(repo, revision, field, patterns, progress)


def require_name(source: str, field: str) -> None:
    """Raises `CheckpointError` for a string that cannot be a file name; names `field`."""
    try:
        names = os.fsencode(source).split(b"/")
    except UnicodeEncodeError:  # an unpaired surrogate
        names = [b"\0"]
    if any(b"\0" in each for each in names):
        raise CheckpointError.at(field, f"{shown_value(source)} is no name of a file")
    if max(map(len, names)) > _LONGEST_NAME:
        raise CheckpointError.at(field, f"{shown_value(source)} is longer than any name of a file")


def _fetch(
    repo: str, revision: str | None, field: str, patterns: list[str], progress: Progress | None
) -> str:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # `HTTPError`
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT.partition("://")[2]  # a mirror, if HF_ENDPOINT names one
    at = f"{repo!r}" + (f" at revision {revision!r}" if revision else "")
    what: dict[str, Any] = {"revision": revision, "allow_patterns": patterns}
    counted = progress or Progress()
    is_told = progress is None and not sys.stderr.isatty()
    try:
        with watched(lambda: [counted.amount], partial(_tell, repo)) if is_told else nullcontext():
            return snapshot_download(repo, **what, tqdm_class=_bars_of(repo, what, counted))
    except GatedRepoError:
        why = f"is gated: accept its terms on {hub} and set HF_TOKEN"
    except RevisionNotFoundError:
        why = "has no such revision"
    except RepositoryNotFoundError:
        why = f"is no repository on {hub}, or a private one: set HF_TOKEN"
    except HFValidationError:
        why = f"is no name that {hub} allows"
    except (LocalEntryNotFoundError, HTTPError, OSError) as error:
        reach = f"{hub} cannot be reached ({_first(error)})"
        if constants.HF_HUB_OFFLINE:
            reach = "HF_HUB_OFFLINE is set"
        why = (
            f"is neither a folder here nor whole in the cache ({constants.HF_HUB_CACHE}), and "
            f"{reach}; download it where there is a network, or give a folder"
        )
    raise CheckpointError.at(field, f"{at} {why}")


def _tell(repo: str, line: str) -> None:
    if line:
        logging.getLogger(LOGGER).info("%s: %s", repo, line)


def _bars_of(repo: str, what: dict[str, Any], counted: Progress) -> type[Any]:
    """Returns the class of the Hub client's progress bars, drawn on a terminal only.

    The bars also count the bytes.

    Args:
        what: further arguments of the download.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    lock = threading.Lock()
    total_bytes: list[int] = []  # of all missing files; the client counts only begun ones

    def count(num_bytes: int, num_begun: int) -> None:
        with lock:
            if not total_bytes:
                total_bytes.append(0)
                with suppress(Exception):  # an additional request, which is optional
                    files: Any = snapshot_download(repo, **what, dry_run=True)
                    total_bytes[0] = sum(each.file_size for each in files if each.will_download)
            had = counted.amount.num_bytes + num_bytes
            counted.amount = Amount("fetched", had, max(total_bytes[0], num_begun))

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = kwargs.get("name") == "huggingface_hub.snapshot_download"
            self._counts &= kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and n:
                count(int(n), int(self.total or 0))
            return super().update(n)

    return Bar


def _first(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


# GGUF files.

_UNPACKED = re.compile(r"/outrider/gguf(/.+)/[0-9a-f]{16}/?$")
_LAYOUT: Final = 1  # version of the layout of unpacked folders; a new number unpacks again
_ELSEWHERE: Final = "; XDG_CACHE_HOME chooses another folder for caches"


def unpacked_from(folder: Path) -> str | None:
    """Returns the GGUF file from which `folder` was unpacked; None if it was not."""
    found = _UNPACKED.search(str(folder))
    return None if found is None else found[1]


def files_of(folder: Path) -> list[Path]:
    """Returns the GGUF files of an unpacked `folder`; empty if they are gone or changed."""
    from .gguf import shards_of

    source = unpacked_from(folder)
    with suppress(OSError, CheckpointError):
        files = [] if source is None else shards_of(Path(source))
        if files and _place(files).name == folder.name:
            return files
    return []


def _is_gguf(path: Path) -> bool:
    """Returns True if the file exists and is GGUF by its suffix or magic bytes."""
    if not path.is_file():
        return False
    with suppress(OSError), path.open("rb") as opened:
        return path.suffix.lower() == ".gguf" or opened.read(4) == b"GGUF"
    return True


def _unpacked(file: Path, field: str, progress: Progress | None, *, needs_tokenizer: bool) -> str:
    """Returns the folder of a GGUF file; unpacks the file if necessary.

    Raises:
        CheckpointError: the file is damaged or not supported, or the cache is full or cannot be
            written; names `field`, or the tokenizer.
    """
    from .gguf import shards_of

    file = Path(os.path.abspath(file))
    folder: Path | None = None
    try:
        files = shards_of(file)
        folder = _place(files)
        is_there = (folder / "config.json").is_file()
        if not is_there or (needs_tokenizer and not (folder / "tokenizer.json").is_file()):
            _unpack(files, folder, progress, needs_tokenizer=needs_tokenizer)
    except OSError as error:
        where = error.filename or folder
        raise CheckpointError.at(
            field, f"{file} cannot be unpacked: {where}: {error.strerror or error}{_ELSEWHERE}"
        ) from None
    except CheckpointError as error:
        if error.field != "model":
            raise
        raise CheckpointError.at(field, _left_out(file) or f"{file}: {error.message}") from None
    return str(folder)


def _place(files: list[Path]) -> Path:
    """Returns the folder for files with this path, these sizes and these modification times."""
    stats = [each.stat() for each in files]
    facts = [_LAYOUT, *((each.st_size, each.st_mtime_ns) for each in stats)]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_folder("gguf") / files[0].relative_to("/") / key


def _unpack(
    files: list[Path], folder: Path, progress: Progress | None, *, needs_tokenizer: bool
) -> None:
    """Checks everything except the weights, writes all files beside `folder`, and renames it.

    If another process is unpacking the same file, waits for it.
    """
    from .gguf_checkpoint import read_model, write_checkpoint
    from .gguf_tokenizer import write_tokenizer

    model = read_model(files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock")):
        if (folder / "config.json").is_file():  # written by another process
            if needs_tokenizer and not (folder / "tokenizer.json").is_file():
                write_tokenizer(folder, files[0], model.meta)
            return
        for rest in folder.parent.glob(f"{folder.name}.*.partial"):  # of an interrupted process
            shutil.rmtree(rest, ignore_errors=True)
        gib, free = model.num_bytes / 2**30, shutil.disk_usage(folder.parent).free
        log.warning(
            "%s (%s) is unpacked to %s; its weights take %.2f GiB there, and of memory %.2f GiB as "
            "%s, or less where they stay quantised",
            *(files[0], model.kinds, folder, gib, gib, model.dtype),
        )
        if free < model.num_bytes:
            raise CheckpointError(
                f"unpacking needs {gib:,.2f} GiB, and {free / 2**30:,.2f} GiB are free at "
                f"{folder.parent}{_ELSEWHERE}"
            )
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        try:
            scratch.mkdir()
            write_checkpoint(scratch, model, progress, needs_tokenizer=needs_tokenizer)
            if _place(files) != folder:
                raise CheckpointError("it changed while it was unpacked; start again")
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


# Folders.

INDEX_NAME: Final = "model.safetensors.index.json"
PICKLED: Final = "pytorch_model.bin"
PICKLED_INDEX: Final = "pytorch_model.bin.index.json"


class Trust(TypedDict, total=False):
    """What reading a checkpoint's files may do; everything is off by default."""

    trust_remote_code: bool  # run Python code in them
    allow_pickle: bool  # read pickled weights if there are no safetensors


def require_checkpoint(path: Path, **trust: Unpack[Trust]) -> Path:
    """Returns `path` if it is a folder with a configuration and weights that may be read.

    Hub names are not resolved here; the checkpoint must already be in a folder.
    """
    if not path.exists():
        raise CheckpointError(f"model path {str(path)!r} does not exist")
    if not path.is_dir():
        raise CheckpointError(f"model path {str(path)!r} is a file; a checkpoint is a folder")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{str(path)!r} has no config.json")
    if has_safetensors(path) or (trust.get("allow_pickle") and _has_pickles(path)):
        return path
    if _has_pickles(path):
        raise CheckpointError(only_pickled(path))
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise CheckpointError(
            f"{str(path)!r} holds only pickled weights, and no {PICKLED}; convert them to "
            "safetensors (save_pretrained does)"
        )
    raise CheckpointError(f"{str(path)!r} has no *.safetensors file")


def check_whole(folder: Path, field: str = "model") -> None:
    """Raises `CheckpointError` naming `field` if a file's size contradicts its header."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError.at(field, unreadable(file, error)) from None


def stored_names(folder: Path) -> set[str]:
    """Returns names of all tensors in a folder's safetensors files, except damaged files."""
    from safetensors import SafetensorError, safe_open

    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with suppress(SafetensorError, OSError), safe_open(file, framework="np") as stored:
            names.update(stored.keys())
    return names


_LFS = b"version https://git-lfs"


def unreadable(file: Path, error: BaseException) -> str:
    """Returns why a checkpoint's file cannot be read: `error`, or that it is a Git LFS pointer."""
    return _left_out(file) or f"{file} cannot be read, it may be truncated: {error}"


def _left_out(file: Path) -> str:
    """Returns a message if the file is only a Git LFS pointer, else ""."""
    with suppress(OSError), file.open("rb") as opened:
        if opened.read(len(_LFS)) == _LFS:
            return f"{file} is a pointer of Git LFS, not the file; `git lfs pull` fetches it"
    return ""


def read_mapping(file: Path) -> dict[str, Any]:
    """Returns the contents of one of a checkpoint's JSON files; {} if the file does not exist.

    Raises:
        CheckpointError: it is not JSON, or not a mapping.
    """
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        why = "it is empty" if not error.doc.strip() else str(error)
        raise CheckpointError(unreadable(file, ValueError(why))) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(unreadable(file, error)) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} must hold a mapping of keys")
    return data


def has_safetensors(path: Path) -> bool:
    return (path / INDEX_NAME).is_file() or any(path.glob("*.safetensors"))


def _has_pickles(path: Path) -> bool:
    """Returns True if the folder has weights in transformers' pickled layout."""
    return (path / PICKLED_INDEX).is_file() or (path / PICKLED).is_file()
