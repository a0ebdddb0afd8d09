"""Processor time of a process and its descendants."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outrider.bench.serving.costs import cpu_s

_SPIN = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
_PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_descendants_count_and_others_do_not() -> None:
    command = [sys.executable, "-c", _PARENT, _SPIN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the grandchild has used its time
        found = cpu_s(process.pid)
        assert set(found) == {"others"}
        assert found["others"] >= 0.28  # ticks of 10 ms, rounded down
        process.communicate(b"\n")
    assert cpu_s(process.pid) == {}
