"""Which names are Hugging Face ids: `org/name`, or `org/name@revision`, and no folder here."""

from __future__ import annotations

import re
from pathlib import Path

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_hub_id(source: str) -> bool:
    """Whether `source` names a repository on the Hub; a folder of that name comes first."""
    return _ID.fullmatch(source) is not None and not Path(source).exists()


# What transformers' messages about a checkpoint's own Python code (`auto_map`) contain.
_MARKS = ("trust_remote_code", "custom code")


def reason(error: BaseException, where: object) -> str:
    """Why the files at `where` cannot be read: `error`'s text, or that their code is not run."""
    text = str(error).strip() or type(error).__name__
    if not any(mark in text for mark in _MARKS):
        return text
    return (
        f"{str(where)!r} brings Python code of its own (auto_map), which is not run; read the "
        "code, then set trust_remote_code: true to allow it"
    )
