"""The `serve.access` section: API keys with tenants and limits, CORS, and logging of prompts."""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from .strict import Strict, at_key

KeyHash = Annotated[
    str, Field(pattern=r"^sha256:[0-9a-f]{64}$", description="sha256: and 64 hexadecimal digits.")
]
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")  # in the form that browsers send


class KeyConfig(Strict):
    """An API key: its hash, tenant and limits."""

    hash: KeyHash
    name: str | None = Field(None, description="Name of the key in logs; default: the tenant.")
    tenant: str | None = Field(None, max_length=256)
    """Tenant of its requests; default: a tenant of its own."""
    requests_per_minute: int | None = Field(None, ge=1)
    """Requests per minute; more get 429."""
    tokens_per_minute: int | None = Field(None, ge=1)
    """Prompt and output tokens per minute; more get 429."""
    max_concurrent_requests: int | None = Field(None, ge=1)
    """Concurrent requests; more get 429."""
    max_request_tokens: int | None = Field(None, ge=2)
    """Prompt and output tokens of one completion."""
    max_body_bytes: int | None = Field(None, ge=1024, description="Largest body of a request.")
    min_priority: int = Field(0, ge=-(2**31), lt=2**31)
    """Best priority (lowest value) that its requests may have."""


class KeysFile(Strict):
    """The content of `access.keys_file`."""

    keys: list[KeyConfig] = Field(default_factory=list, description="Keys of clients.")
    admin_keys: list[KeyHash] = Field(default_factory=list)
    """Hashes of keys that may use every route. Without any, a single key in `keys` may also read
    statistics and metrics."""

    @model_validator(mode="after")
    def _each_once(self) -> KeysFile:
        seen: set[str] = set()
        for key, hashes in (
            ("keys", [each.hash for each in self.keys]),
            ("admin_keys", self.admin_keys),
        ):
            for each in hashes:
                if each in seen:
                    raise at_key(key, f"the hash {each[:16]}... is given twice")
                seen.add(each)
        return self


class AccessConfig(KeysFile):
    """Access to the server. Without keys, everybody who reaches the server may use it."""

    command_key: KeyHash | None = None
    """Hash of the key with which `outrider serve` reads statistics; set by the command."""
    keys_file: str | None = None
    """YAML file with keys and admin_keys; it is read again when it changes."""
    cors_allowed_origins: list[str] = Field(default_factory=list)
    """Origins whose pages may call the API; *: all."""
    log_prompts: bool = Field(False, description="Write prompts to the ingress's log.")

    @field_validator("cors_allowed_origins")
    @classmethod
    def _as_browsers_send_it(cls, origins: list[str]) -> list[str]:
        for each in origins:
            if not _ORIGIN.fullmatch(each):
                raise ValueError(
                    f"{each!r} is no origin, which no browser sends: expected one such as "
                    "https://example.org, without a path"
                )
        return origins

    @field_validator("keys_file")
    @classmethod
    def _from_here(cls, path: str | None) -> str | None:
        """Makes the path absolute, because other processes have other working directories."""
        return None if path is None else str(Path(path).absolute())

    @property
    def has_keys(self) -> bool:
        """True if requests need a key."""
        return bool(self.keys or self.admin_keys or self.keys_file or self.command_key)

    @property
    def may_limit(self) -> bool:
        """True if a key has a rate limit, or may get one from the file of keys."""
        limits = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
        given = (getattr(key, name) for key in self.keys for name in limits)
        return self.keys_file is not None or any(each is not None for each in given)


_PREFIX = "or-"


def new_key() -> str:
    """Returns a new key of 256 random bits, which is not stored."""
    return _PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """Returns the hash of a key, which configurations contain instead of the key.

    A key of 256 random bits cannot be guessed from its SHA-256; a slow hash would only protect keys
    chosen by people. The time of a look-up by hash reveals nothing about the key.
    """
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
