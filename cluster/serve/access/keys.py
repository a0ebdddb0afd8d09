"""API keys: made, hashed, found again.

A key is 256 random bits, which nobody can guess from its SHA-256; a slow hash would protect only
keys that people choose.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

_PREFIX = "or-"


def new_key() -> str:
    """A fresh key; it is kept nowhere."""
    return _PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """What configurations hold in a key's place."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def find(presented: str, hashes: Iterable[str]) -> str | None:
    """The hash of `presented` among `hashes`, in a time that does not tell how near it was."""
    mine = hash_of(presented)
    found = None
    for each in hashes:
        if hmac.compare_digest(mine, each):
            found = each
    return found
