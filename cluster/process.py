"""Process-level utilities of a server: returning memory, a watchdog, imports without torch."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_EVERY_S = 30.0


def start_thread(name: str, target: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Starts and returns a daemon thread named `outrider-{name}`."""
    thread = threading.Thread(target=target, args=arguments, name=f"outrider-{name}", daemon=True)
    thread.start()
    return thread


def trim() -> bool:
    """Returns free pages of the heap to the system; False if there were none, or without glibc."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0)))
    except AttributeError:
        return False


def keep_trimmed() -> None:
    """Starts a thread that calls `trim` until the process ends; other threads do not wait for it.

    Tensors of varying sizes fragment glibc's heap, which then grows for hours although the memory
    in use does not.
    """

    def run() -> None:
        while True:
            time.sleep(_EVERY_S)
            trim()

    start_thread("trim", run)


log = logging.getLogger(__name__)
PERIOD_S = 0.5
_PROGRAM = Path(__file__).with_name("watch_parent.py")
_started = threading.Lock()


def start_watchdog(silence_s: float, *, only_stopped: bool = False) -> None:
    """Starts a watchdog that kills this process if it does not run for `silence_s`; 0: never.

    Ray notices at once that a process has died. A process that is stopped, or in which a library
    holds the GIL, counts as alive for Ray: Serve replaces its replica only after three failed
    health checks and a grace period, which takes minutes. The watchdog's thread therefore sends a
    byte twice a second to a child process, which kills its parent if none arrives.

    Only the first call in a process has an effect.

    Args:
        only_stopped: kills the process only if a signal has stopped it. A process that is silent
            because it computes in a library that holds the GIL, or gets no processor time,
            survives.
    """
    if silence_s and _started.acquire(blocking=False):
        start_thread("watchdog", _beat, silence_s, ["stopped"] if only_stopped else [])


def _beat(silence_s: float, more: list[str]) -> None:
    """Sends bytes while the process lives; restarts a child that has died."""
    command = [sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid()), str(silence_s), *more]
    while True:
        try:
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
            ) as child:
                while child.stdin is not None:
                    child.stdin.write(b".")
                    time.sleep(PERIOD_S)
        except OSError as error:
            log.warning("the watchdog's process has ended, or does not start: %s", error)
        time.sleep(PERIOD_S)


@contextmanager
def without_collecting() -> Iterator[None]:
    """Disables garbage collection during imports, and exempts the imported objects from later ones.

    Imported objects stay alive. Scanning them repeatedly takes a sixth of the time of importing
    torch and transformers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_HIDDEN = ("torch", "torchvision", "torchaudio")


@contextmanager
def without_torch(*, unless: bool = False) -> Iterator[None]:
    """Hides torch from transformers, if transformers is first imported within this context.

    transformers imports torch if it is installed, but tokenizers and configurations do not need it.
    Measured with the demo's target, torch 2.13 and transformers 5.23: an ingress takes 170 MB
    instead of 495 MB, an engine's replica 163 MB instead of 487 MB, and each starts with 1.5 s of
    processor time instead of 6 s. Clients wait while either is replaced.

    Args:
        unless: torch may be needed, for example by a tokenizer's own code.
    """
    if unless or "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]
    modules.update(dict.fromkeys(_HIDDEN))
    try:
        yield
    finally:
        for name in _HIDDEN:
            del modules[name]
