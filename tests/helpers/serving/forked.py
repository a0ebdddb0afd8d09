"""Ray's workers as forks of one process that has imported what ranks import.

A rank imports torch, transformers and the workers for four seconds of processor time, and kill
tests start hundreds. Within `forked_workers`, Ray starts this file in place of its own program of
a worker: it hands arguments, environment and open files to a process that has imported all, whose
fork becomes that worker, and ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, cast

_ADDRESS = "OUTRIDER_TESTS_FORKS"
_EARLY = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
# Of the environment, what nothing that is imported reads.
_UNREAD = ("RAY_", "PYTEST_", "LINES", "COLUMNS", "SPT_NOENV", _ADDRESS)


@contextmanager
def forked_workers() -> Iterator[None]:
    """A Ray that is started here meanwhile has forks as workers."""
    import pytest
    from ray._private.parameter import RayParams

    plain = RayParams.update_if_absent

    def update_if_absent(params: RayParams, **given: Any) -> None:
        if "worker_path" in given:
            given["worker_path"] = __file__
        plain(params, **given)

    address = f"outrider-tests-{os.getpid()}"
    # What forks ends when this process closes its standard input, or dies.
    command = [sys.executable, __file__, address]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as forks,
        cast("IO[bytes]", forks.stdin),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(_ADDRESS, address)
        patch.setattr(RayParams, "update_if_absent", update_if_absent)
        yield


def listen(address: str) -> None:
    """Forks for everyone who asks; returns in the forks, and at the end of standard input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not waited for
    environment = read_environment()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind("\0" + address)
        server.listen(64)
        import_all()
        while server in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            with connection:
                message, files, _, _ = socket.recv_fds(connection, 1 << 20, 4)
                worker = Worker(**json.loads(message))
                same = read_environment(worker.environment) == environment
                if same and not os.fork():
                    break
                connection.send(b"forked" if same else b"differs")
                for file in files:
                    os.close(file)
        else:
            return
    worker.run(files)


def read_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that something imported may have read."""
    return {key: value for key, value in environment.items() if not key.startswith(_UNREAD)}


def import_all() -> None:
    """What ranks import; nothing of Ray, which reads the environment of its worker."""
    from outrider.cluster.process import without_collecting

    os.environ.update(_EARLY)
    with without_collecting():
        import torch  # noqa: F401

        from outrider.workers import worker  # noqa: F401
        from outrider.workers.model import bridge  # noqa: F401
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of the other threads"
    assert "ray" not in sys.modules


@dataclass(frozen=True)
class Worker:
    """What the raylet has started as its worker."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str

    def run(self, files: list[int]) -> None:
        """Becomes Ray's worker, with the raylet's files and the last of `files` for its life."""
        import numpy as np

        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
            os.close(file)
        threading.Thread(target=follow, args=(files[3],), daemon=True).start()
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        np.random.seed()
        sys.argv = [program(), *self.arguments]
        sys.path[0] = os.path.dirname(program())
        runpy.run_path(program(), run_name="__main__")


def follow(raylet: int) -> None:
    """Ends this process with the raylet, which is no parent of a fork."""
    select.select([raylet], [], [])
    os._exit(1)


def program() -> str:
    """Ray's own program of a worker, which is found without importing Ray."""
    (package,) = importlib.util.find_spec("ray").submodule_search_locations
    return os.path.join(package, "_private", "workers", "default_worker.py")


def ask() -> None:
    """Has a fork made with this process's arguments, environment and files, or is the worker."""
    raylet = os.pidfd_open(os.getppid())
    worker = Worker(sys.argv[1:], dict(os.environ), os.getcwd())
    with (
        suppress(OSError),  # for instance in another network
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
    ):
        connection.connect("\0" + os.environ[_ADDRESS])
        socket.send_fds(connection, [json.dumps(vars(worker)).encode()], [0, 1, 2, raylet])
        if connection.recv(16) == b"forked":
            return
    os.execv(sys.executable, [sys.executable, program(), *worker.arguments])


if __name__ == "__main__":
    if len(sys.argv) == 2:
        listen(sys.argv[1])
    else:
        ask()
