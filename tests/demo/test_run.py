"""`make demo`: its port stays free; nothing of the server's comes between the streamed text."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from outrider.cluster.serve import front_door
from outrider.demo.run import ANNOUNCED, reserve_port, wait_until_announced

SLOW = """
import sys, time
for line in ("loading", "| Outrider is ready |", {last!r}):
    time.sleep(0.2)
    print(line, file=sys.stderr, flush=True)
time.sleep({linger})
"""


def server(last: str, linger: float = 60.0) -> subprocess.Popen[str]:
    script = SLOW.format(last=last, linger=linger)
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)


def test_the_announcement_is_over_when_the_text_begins(capsys):
    process = server(ANNOUNCED)
    try:
        wait_until_announced(process)
        shown = capsys.readouterr().err
        time.sleep(0.3)
        assert shown.splitlines() == ["loading", "| Outrider is ready |", ANNOUNCED]
        assert capsys.readouterr().err == ""
    finally:
        process.kill()
        process.wait()


def test_a_server_that_ends_is_an_error():
    with pytest.raises(RuntimeError, match="ended with exit code 0"):
        wait_until_announced(server("no", linger=0.0))


def test_a_reserved_port_is_the_servers_alone():
    with reserve_port() as reserved:
        address = reserved.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        front_door.check_port(*address)
        with front_door._bind(*address, shared=True) as listener:
            listener.listen()
            socket.create_connection(address).close()
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(address)


def test_the_last_line_is_what_serve_prints():
    from pathlib import Path

    import outrider

    folder = Path(outrider.__file__).resolve().parent
    assert f'"{ANNOUNCED}"' in (folder / "cli" / "serve.py").read_text()
