"""What every process of a server does for itself: memory given back, a watchdog, no torch."""

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
    """A daemon thread `outrider-{name}` that runs."""
    thread = threading.Thread(target=target, args=arguments, name=f"outrider-{name}", daemon=True)
    thread.start()
    return thread


def trim() -> bool:
    """Gives whole free pages back to the system; whether there were any. Without glibc: False."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0)))
    except AttributeError:
        return False


def keep_trimmed() -> None:
    """Trims from a thread until the process ends; none of the other threads waits for it.

    Tensors of ever different sizes leave gaps in glibc's heap, which grows for hours although what
    is in use does not.
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
    """From now on this process is killed where it does not run for `silence_s`; 0: never.

    Ray notices at once that a process has died. One that is stopped, or in which a library holds
    the interpreter, is alive to Ray: Serve replaces a replica only after three health checks have
    timed out and a grace period has passed, in minutes. Here a thread sends a byte twice a second
    to a child process, which kills its parent when none arrives.

    Only the first call of a process has an effect.

    Args:
        only_stopped: not one that a signal has not stopped, however long it is silent: it computes
            in a library that holds the interpreter, or gets no processor time.
    """
    if silence_s and _started.acquire(blocking=False):
        start_thread("watchdog", _beat, silence_s, ["stopped"] if only_stopped else [])


def _beat(silence_s: float, more: list[str]) -> None:
    """Sends for as long as the process lives; a child that died is replaced."""
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
    """No garbage is looked for in what is imported here, now or later.

    Imports make objects that stay. To look through them again and again takes a sixth of the time
    that torch and transformers take.
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
    """transformers, if it is imported here for the first time, finds no torch.

    It imports torch wherever it finds it; tokenizers and configurations do not need it. Measured
    with the demo's target, torch 2.13 and transformers 5.23: the memory of an ingress is 170 MB and
    not 495, of an engine's replica 163 MB and not 487, and each starts with 1.5 s of processor time
    in place of 6 s. Both are replaced while clients wait.

    Args:
        unless: torch may be needed, as by a tokenizer's own code.
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
