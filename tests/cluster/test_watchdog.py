"""Processes that are stopped are killed; those that run, however slowly, are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from outrider.cluster.watch_parent import is_stopped, watch

WATCHED = """
import time
from outrider.cluster.process import start_watchdog
start_watchdog(2.0)
start_watchdog(2.0)
print("up", flush=True)
time.sleep(600)
"""
SILENT = """
import os, subprocess, sys, time
from outrider.cluster import process
command = [sys.executable, str(process._PROGRAM), str(os.getpid()), "0.5", "stopped"]
child = subprocess.Popen(command, stdin=subprocess.PIPE)
print("up", flush=True)
time.sleep(600)
"""


def test_a_stopped_process_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", WATCHED], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3.5)  # it runs
        os.kill(process.pid, signal.SIGSTOP)
        assert process.wait(30) == -signal.SIGKILL


def test_of_silent_processes_only_stopped_ones_may_be_killed() -> None:
    """One whose thread of beats never runs, as if a library held the interpreter."""
    with subprocess.Popen([sys.executable, "-c", SILENT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        assert process.wait(30) == -signal.SIGKILL
    assert not is_stopped(process.pid)


def test_a_watchdog_ends_with_its_process() -> None:
    source, sink = os.pipe()
    os.write(sink, b".")
    os.close(sink)
    assert not watch(os.getpid(), 60.0, source)  # at the end of the pipe
    os.close(source)


def test_only_the_own_parent_is_killed() -> None:
    source, sink = os.pipe()
    with subprocess.Popen(["sleep", "600"]) as other:
        assert not watch(other.pid, 0.2, source)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.1)
        other.kill()
    os.close(source)
    os.close(sink)
