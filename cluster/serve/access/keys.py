"""API keys: made, and hashed to be found again.

A key is 256 random bits, which nobody can guess from its SHA-256; a slow hash would protect only
keys that people choose. How long a look-up by the hash takes tells nothing about the key.
"""

from __future__ import annotations

import hashlib
import secrets

_PREFIX = "or-"


def new_key() -> str:
    """A fresh key; it is kept nowhere."""
    return _PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """What configurations hold in a key's place."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
