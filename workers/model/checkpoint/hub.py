"""Hugging Face ids as folders: `org/name` or `org/name@revision` through the Hub's cache.

A rank on another node is given the folder of the engine's node; where that is a snapshot in the
Hub's cache, the same commit is fetched into the cache of the rank's own node.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ....config.hub import is_hub_id, only_pickled
from ....errors import CheckpointError

# Weights that are read, configurations, tokenizers, chat templates; code only where it is allowed.
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_PICKLES = ["pytorch_model*.bin", "*lm_head*.pt", "model*.pt"]  # of models and heads
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/?$")


def local_folder(
    source: str,
    field: str = "model",
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> str:
    """The folder that holds `source`; fetched with a progress bar if it is not in the cache.

    A path is returned as it is. HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are obeyed.

    Raises:
        CheckpointError: there is no such repository or revision, no right to read it, or no
            network and nothing in the cache; names `field`.
    """
    if Path(source).exists():
        return source
    if snapshot := _SNAPSHOT.search(source):
        repo, revision = f"{snapshot[1]}/{snapshot[2]}", snapshot[3]
    elif is_hub_id(source):
        repo, _, tag = source.partition("@")
        revision = tag or revision
    else:
        return source
    code = ["*.py"] if trust_remote_code else []
    pickles = _PICKLES if allow_pickle else []
    return _fetch(repo, revision, field, [*_PATTERNS, *code, *pickles])


def _fetch(repo: str, revision: str | None, field: str, patterns: list[str]) -> str:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{repo!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        return snapshot_download(repo, revision=revision, allow_patterns=patterns)
    except GatedRepoError:
        why = "is gated: accept its terms on huggingface.co and set HF_TOKEN"
    except RevisionNotFoundError:
        why = "has no such revision"
    except RepositoryNotFoundError:
        why = "is no repository on huggingface.co, or a private one: set HF_TOKEN"
    except HFValidationError:
        why = "is no name that huggingface.co allows"
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reach = f"huggingface.co cannot be reached ({_first(error)})"
        if constants.HF_HUB_OFFLINE:
            reach = "HF_HUB_OFFLINE is set"
        why = (
            f"is neither a folder here nor whole in the cache ({constants.HF_HUB_CACHE}), and "
            f"{reach}; download it where there is a network, or give a folder"
        )
    raise CheckpointError.at(field, f"{at} {why}")


def _first(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


INDEX_NAME: Final = "model.safetensors.index.json"
PICKLED: Final = "pytorch_model.bin"
PICKLED_INDEX: Final = "pytorch_model.bin.index.json"


def require_checkpoint(path: Path, *, allow_pickle: bool = False) -> Path:
    """Returns `path`, if it is a folder with a configuration and weights that may be read.

    Hub names are not resolved here: download first, then serve the folder.
    """
    if not path.exists():
        raise CheckpointError(f"model path {str(path)!r} does not exist")
    if not path.is_dir():
        raise CheckpointError(f"model path {str(path)!r} is a file; a checkpoint is a folder")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{str(path)!r} has no config.json")
    if has_safetensors(path) or (allow_pickle and _has_pickles(path)):
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
    """Raises `CheckpointError` naming `field` where a file's size is not what its header says."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError.at(field, unreadable(file, error)) from None


_LFS = b"version https://git-lfs"


def unreadable(file: Path, error: BaseException) -> str:
    """Why a file of a checkpoint is not what its name says: `error`, or that Git left it out."""
    with suppress(OSError), file.open("rb") as opened:
        if opened.read(len(_LFS)) == _LFS:
            return f"{file} is a pointer of Git LFS, not the file; `git lfs pull` fetches it"
    return f"{file} cannot be read, it may be truncated: {error}"


def read_mapping(file: Path) -> dict[str, Any]:
    """What one of a checkpoint's JSON files holds; no such file: nothing.

    Raises:
        CheckpointError: it is not JSON, or no mapping of keys.
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
    """Whether the folder has weights in transformers' pickled layout."""
    return (path / PICKLED_INDEX).is_file() or (path / PICKLED).is_file()
