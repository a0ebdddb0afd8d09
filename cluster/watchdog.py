"""Ends a process that does not run any more, so that its replacement need not wait.

Ray notices at once that a process has died. One that is stopped, or in which a library holds the
interpreter for good, is alive to Ray: Serve replaces a replica only after three health checks have
timed out and a grace period has passed, in minutes. Here a thread of the process sends a byte twice
a second to a small child process, which kills its parent when none arrives.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from ..errors import ConfigError

log = logging.getLogger(__name__)
PERIOD_S = 0.5
VARIABLE = "OUTRIDER_HUNG_AFTER_S"
DEFAULT_S = 10.0
_PROGRAM = Path(__file__).with_name("watch_parent.py")
_started = threading.Lock()


def start_watchdog(silence_s: float) -> None:
    """From now on this process is killed where it does not run for `silence_s`; 0: never.

    Only the first call of a process has an effect.
    """
    if silence_s and _started.acquire(blocking=False):
        threading.Thread(
            target=_beat, args=(silence_s,), name="outrider-watchdog", daemon=True
        ).start()


def silence_of_environment() -> float:
    """What `OUTRIDER_HUNG_AFTER_S` asks for.

    Raises:
        ConfigError: it is no number of 0 or more.
    """
    text = os.environ.get(VARIABLE, str(DEFAULT_S))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{VARIABLE}: a number of 0 or more, got {text!r}", field=VARIABLE)
    return value


def _beat(silence_s: float) -> None:
    """Sends for as long as the process lives; a child that died is replaced."""
    command = [sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid()), str(silence_s)]
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
