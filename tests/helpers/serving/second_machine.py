"""A second machine: a network namespace behind a cable that a test can pull."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class SecondMachine:
    """It has this machine's files and processes, and a network of its own.

    Args:
        here, there: addresses of this machine and of that one.
        enter: a command's first words, with which it runs there.
    """

    here: str
    there: str
    enter: tuple[str, ...]
    cable: str

    def pull(self) -> None:
        """From now on no packet arrives, and neither end is told."""
        _ip(f"link set {self.cable} down")

    def plug(self) -> None:
        _ip(f"link set {self.cable} up")

    def kill(self) -> None:
        """Ends all that runs there at once."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.enter[-1]], check=True, capture_output=True, text=True
        )
        for process in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)


@contextmanager
def second_machine() -> Iterator[SecondMachine]:
    """Skips the test where namespaces cannot be made.

    This machine's address is a bridge's, which stays when the cable's plug in it is down.
    """
    number = os.getpid()
    name, bridge, cable, far = (f"or{kind}{number}" for kind in "nbcf")
    net = f"10.{200 + number // 250 % 50}.{number % 250}"
    steps = [
        f"netns add {name}",
        f"link add {bridge} type bridge",
        f"address add {net}.1/24 dev {bridge}",
        f"link set {bridge} up",
        f"link add {cable} type veth peer name {far}",
        f"link set {far} netns {name}",
        f"link set {cable} master {bridge}",
        f"link set {cable} up",
        f"-n {name} address add {net}.2/24 dev {far}",
        f"-n {name} link set {far} up",
        f"-n {name} link set lo up",
    ]
    try:
        try:
            for step in steps:
                _ip(step)
        except FileNotFoundError:
            pytest.skip("there is no command ip, which makes network namespaces")
        except subprocess.CalledProcessError as error:
            reason = error.stderr.strip()
            pytest.skip(f"network namespaces cannot be made here: ip {step}: {reason}")
        enter = ("ip", "netns", "exec", name)
        yield SecondMachine(f"{net}.1", f"{net}.2", enter, cable)
    finally:
        for step in (f"link del {cable}", f"netns del {name}", f"link del {bridge}"):
            subprocess.run(["ip", *step.split()], check=False, capture_output=True)
