"""How a feature link is opened: plain records that go over the step channels.

The engine asks the head's worker to listen, and hands what it offers to the target's ranks; the
features themselves (`features.py`) then go from worker to worker. Every opening has an address
and a secret of its own, so that nothing of an earlier one can be taken for something of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .framing import Address


@dataclass(frozen=True, slots=True)
class ListenFeatures:
    """To the head's worker: forget the link there was, and wait for another."""

    here: bool  # the target's rank 0 is in the same process
    remote: bool  # it is on another node
    distributed: bool  # tensors go through a process group, not over the socket


@dataclass(frozen=True, slots=True)
class LinkOffer:
    """Its answer: where it waits."""

    queue: Any = None  # in one process: the `Outbox` itself, which never crosses a wire
    address: Address | None = None
    secret: bytes = b""
    store: tuple[str, int] | None = None  # where the process group meets; None: no group


@dataclass(frozen=True, slots=True)
class OpenFeatures:
    """To the target's ranks: from now on, rank 0 sends the features of every step there."""

    link: int  # which head's; an earlier link of the same head is closed
    offer: LinkOffer
    capture: tuple[int, ...]  # layers whose inputs the head reads, ascending
    timeout_s: float  # of connecting, and of a peer that stops reading
