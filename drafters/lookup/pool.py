"""The store of shared pools: numbered windows of served tokens, bounded, and saved to disk.

Drafters with a shared pool publish windows of tokens over a `PoolLink` and receive the windows of
others. Each builds its own tables from them, so look-ups are always local. `PoolStore` collects the
windows, in a Ray actor (`cluster/pools.py`) or, behind `LocalLink`, in this process. A tenant's
windows are sent only to drafters that serve the tenant.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgpack
import numpy as np

from ...config.files import check_writable, write_whole
from ...errors import ConfigError, PoolSnapshotError
from ...scheduler.types import IntArray

_MAGIC = b"outrider-pool\n"
_HEAD = len(_MAGIC) + 32  # magic and the body's SHA-256
_VERSION = 2
_FIELD = "speculative_config.pool_snapshot"
_MAX_ANSWER_TOKENS = 2**16  # per tenant and exchange


class PoolLink(Protocol):
    """A drafter's connection to a `PoolStore`. No call blocks, and any of them may be lost."""

    def publish(self, tenant: str, tokens: IntArray) -> None:
        """Publishes a window of served tokens."""

    def poll(self, tenant: str) -> list[IntArray]:
        """New windows of the tenant from other drafters."""

    def take_fault(self) -> Exception | None:
        """The error that occurred in the background since the last call, if any."""

    def shutdown(self) -> None:
        """Saves the snapshot, if one is configured, and closes the link."""


@dataclass(frozen=True, slots=True)
class SharedWindow:
    """Tokens that one drafter published."""

    sequence: int
    source: str  # the publisher, to which it is not sent back
    digest: bytes
    tokens: bytes  # int32, little-endian

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


@dataclass(frozen=True, slots=True)
class Differences:
    """The windows that a caller lacked. Its `cursors` are valid only with the same `epoch`."""

    epoch: str  # of the store; a store that was lost and created again has another one
    windows: list[tuple[str, bytes]] = field(default_factory=list)  # (tenant, tokens)
    cursors: dict[str, int] = field(default_factory=dict)  # by tenant, last sequence number seen


class PoolStore:
    """Windows of all tenants, at most `max_tokens` tokens; the least recently published go first.

    A window that is published again is not stored again; it only becomes the most recent one.
    """

    def __init__(
        self,
        fingerprint: str,  # of the vocabulary
        max_tokens: int,
        vocab_size: int = 2**31,
        *,
        is_common: bool = False,  # whether all tenants share one pool
    ) -> None:
        self.epoch = secrets.token_hex(8)
        self.num_tokens = 0
        self._fingerprint, self._is_common = fingerprint, is_common
        self._max_tokens, self._vocab_size = max_tokens, vocab_size
        self._sequence = 0
        self._tenants: dict[str, dict[int, SharedWindow]] = {}  # by sequence number, ascending
        self._recent: OrderedDict[tuple[str, bytes], int] = OrderedDict()  # oldest first

    def publish(self, source: str, tenant: str, tokens: bytes) -> None:
        """Stores a window."""
        digest = hashlib.blake2b(tokens, digest_size=16).digest()
        if (tenant, digest) in self._recent:
            self._recent.move_to_end((tenant, digest))
            return
        self._sequence += 1
        window = SharedWindow(self._sequence, source, digest, tokens)
        self._tenants.setdefault(tenant, {})[window.sequence] = window
        self._recent[(tenant, digest)] = window.sequence
        self.num_tokens += window.num_tokens
        while self.num_tokens > self._max_tokens:
            self._evict()

    def exchange(
        self,
        source: str,
        published: Sequence[tuple[str, bytes]],
        epoch: str,
        cursors: Mapping[str, int],
    ) -> Differences:
        """Stores windows, and returns those that the caller lacks of the tenants it names."""
        for tenant, tokens in published:
            self.publish(source, tenant, tokens)
        answer = Differences(self.epoch)
        for tenant, cursor in cursors.items():
            lacking = self._after(tenant, cursor if epoch == self.epoch else 0)
            answer.cursors[tenant] = lacking[-1].sequence if lacking else self._sequence
            answer.windows.extend((tenant, w.tokens) for w in lacking if w.source != source)
        return answer

    def open(self, path: str) -> None:
        """Loads the snapshot, if it exists and the store is empty; `save` writes it there.

        Raises:
            PoolSnapshotError: as `load`, even if the store is not empty.
            ConfigError: it could not be saved.
        """
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{_FIELD}: {path} cannot be written: {error.strerror}"
            raise ConfigError(reason, field=_FIELD) from None
        check_writable(file, _FIELD)
        self.load(path)

    def save(self, path: str) -> None:
        """Writes the snapshot, readable by its owner only; replaces the old one when complete."""
        windows = [
            (tenant, self._tenants[tenant][sequence].tokens)
            for (tenant, _), sequence in self._recent.items()
        ]
        content = {
            "version": _VERSION,
            "fingerprint": self._fingerprint,
            "is_common": self._is_common,
            "windows": windows,
        }
        body = msgpack.packb(content, unicode_errors="surrogatepass")
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, [_MAGIC, hashlib.sha256(body).digest(), body], mode=0o600)

    def load(self, path: str) -> None:
        """Loads the snapshot, if it exists and the store is empty.

        Raises:
            PoolSnapshotError: it is damaged, or of another version, tokenizer or scope.
        """
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise _bad(path, f"cannot be read: {error.strerror}") from None
        if not data.startswith(_MAGIC):
            raise _bad(path, "is not a pool snapshot")
        if hashlib.sha256(data[_HEAD:]).digest() != data[len(_MAGIC) : _HEAD]:
            raise _bad(path, "is damaged (its checksum is wrong)")
        try:
            content = msgpack.unpackb(data[_HEAD:], unicode_errors="surrogatepass")
        except (ValueError, TypeError) as error:
            raise _bad(path, f"is damaged ({error})") from None
        windows = self._checked(path, content)
        if self.num_tokens == 0:
            for tenant, tokens in windows:
                self.publish("", tenant, tokens)

    def _checked(self, path: str, content: Any) -> list[tuple[str, bytes]]:
        """The windows of a snapshot, after checks that it belongs to this pool."""
        if not isinstance(content, dict):
            raise _bad(path, "is damaged (its content has no keys)")
        if content.get("version") != _VERSION:
            raise _bad(path, f"has version {content.get('version')!r}, not {_VERSION}")
        if content.get("fingerprint") != self._fingerprint:
            raise _bad(path, "is of another tokenizer or vocabulary than this model's")
        if content.get("is_common") is not self._is_common:
            raise _bad(path, "was not saved under this `pool_scope`: replica pools have no tenants")
        windows = content.get("windows")
        if not isinstance(windows, list):
            raise _bad(path, "is damaged (windows: a list is wanted)")
        for index, window in enumerate(windows):
            match window:
                case [str(), bytes(tokens)] if tokens and len(tokens) % 4 == 0:
                    continue
            raise _bad(path, f"is damaged (windows.{index}: a tenant and its tokens are wanted)")
        ids = unpack(b"".join(tokens for _, tokens in windows))
        if bool(((ids < 0) | (ids >= self._vocab_size)).any()):
            reason = f"windows: tokens outside the vocabulary of {self._vocab_size}"
            raise _bad(path, f"is damaged ({reason})")
        return windows

    def _after(self, tenant: str, cursor: int) -> list[SharedWindow]:
        """The tenant's windows after `cursor`, oldest first, as many as fit into an answer."""
        found: list[SharedWindow] = []
        for sequence, window in reversed(self._tenants.get(tenant, {}).items()):
            if sequence <= cursor:
                break
            found.append(window)
        found.reverse()
        room = _MAX_ANSWER_TOKENS
        for index, window in enumerate(found):
            room -= window.num_tokens
            if room < 0 and index:
                return found[:index]
        return found

    def _evict(self) -> None:
        (tenant, _), sequence = self._recent.popitem(last=False)
        windows = self._tenants[tenant]
        self.num_tokens -= windows.pop(sequence).num_tokens
        if not windows:
            del self._tenants[tenant]


class LocalLink:
    """A link to a store in this process; reads `snapshot` at once and writes it at shutdown."""

    def __init__(self, store: PoolStore, snapshot: str | None = None) -> None:
        self._store = store
        self._snapshot = snapshot
        self._source = secrets.token_hex(8)
        self._cursors: dict[str, int] = {}
        if snapshot is not None:
            store.open(snapshot)

    def publish(self, tenant: str, tokens: IntArray) -> None:
        self._store.publish(self._source, tenant, pack(tokens))

    def poll(self, tenant: str) -> list[IntArray]:
        cursor = {tenant: self._cursors.get(tenant, 0)}
        answer = self._store.exchange(self._source, (), self._store.epoch, cursor)
        self._cursors.update(answer.cursors)
        return [unpack(tokens) for _, tokens in answer.windows]

    def take_fault(self) -> Exception | None:
        return None

    def shutdown(self) -> None:
        if self._snapshot is not None:
            self._store.save(self._snapshot)


def pack(tokens: IntArray) -> bytes:
    """A window's tokens in the format in which they are sent."""
    return tokens.astype("<i4", copy=False).tobytes()


def unpack(data: bytes) -> IntArray:
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


def _bad(path: str, reason: str) -> PoolSnapshotError:
    return PoolSnapshotError.at(_FIELD, f"{path} {reason}; remove it to start empty")
