"""Heartbeats of ranks: one byte every `PERIOD_S`, from a separate thread and connection.

A rank that computes for minutes keeps sending them; one that is stopped or unreachable sends none
and is detected within seconds, whether or not a step is running.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from . import framing

PERIOD_S = 0.5
_SEND_TIMEOUT_S = 5.0  # of an engine that does not read


def beat(connection: socket.socket, stopped: threading.Event) -> None:
    """The rank's end: sends until `stopped` is set or the engine closes the connection."""
    connection.settimeout(_SEND_TIMEOUT_S)
    while not stopped.wait(PERIOD_S):
        try:
            connection.send(b".")
        except TimeoutError:  # the engine is suspended; it may resume
            continue
        except OSError:
            return


class Monitor:
    """The engine's end, in a thread of its own.

    Args:
        connections: one per rank, in rank order.
        timeout_s: a rank that sends nothing for longer is lost.
        on_loss: called once, with the reason, when the first rank is lost.
    """

    def __init__(
        self, connections: Sequence[socket.socket], timeout_s: float, on_loss: Callable[[str], None]
    ) -> None:
        self._connections = list(connections)
        self._timeout_s = timeout_s
        self._on_loss = on_loss
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outrider-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching, from any thread; a running `on_loss` is not interrupted."""
        self._closed.set()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._connections):
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, rank)
            lost = self._watch(selector)
        for connection in self._connections:
            connection.close()
        if lost is not None:
            self._on_loss(lost)

    def _watch(self, selector: selectors.BaseSelector) -> str | None:
        """Waits for a loss and returns its reason; None if `close` came first."""
        last = [time.monotonic()] * len(self._connections)
        looked = time.monotonic()
        while not self._closed.is_set():
            ready = selector.select(min(framing.HANDSHAKE_TIMEOUT_S, self._timeout_s / 4))
            now = time.monotonic()
            if now - looked > self._timeout_s / 2:  # this process was suspended, not the ranks
                last = [now] * len(last)
            looked = now
            for key, _ in ready:
                if not _drain(self._connections[key.data]):
                    return f"rank {key.data} has closed its connection"
                last[key.data] = now
            for rank, at in enumerate(last):
                if now - at > self._timeout_s:
                    return (
                        f"rank {rank} has sent no heartbeat for {now - at:.1f} s "
                        f"(heartbeat_timeout_s = {self._timeout_s:g})"
                    )
        return None


def _drain(connection: socket.socket) -> bool:
    """Reads available bytes; False if the connection has ended."""
    try:
        return bool(connection.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False
