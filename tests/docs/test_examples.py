"""The examples of the documentation run, from the project's root, and do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import outrider

ROOT = Path(outrider.__file__).resolve().parent
EXAMPLES = ROOT / "docs" / "examples"


def run(name: str, *arguments: Any) -> str:
    """What an example prints that starts its own Ray, whatever else runs on this machine."""
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    with tempfile.TemporaryDirectory(prefix="or", dir="/tmp") as folder:  # short: it names sockets
        env = {**os.environ, "RAY_TMPDIR": folder}
        result = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=270
        )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.slow
def test_a_head_learns_between_updates_of_weights() -> None:
    """The same tokens, and so the same rewards, whether the head learns or not."""
    short = ("--updates", 2, "--prompts", 4, "--steps", 4)
    tables = [run("rollout.py", *short, *more).splitlines()[1:] for more in ((), ("--frozen",))]
    learning, frozen = ([line.split() for line in table] for table in tables)
    assert [row[:2] for row in learning] == [row[:2] for row in frozen]
    assert [row[0] for row in frozen] == ["0", "1", "2"]
    assert {row[3] for row in frozen} == {"frozen"}
    assert {row[3] for row in learning} <= {"kept", "swapped"}


@pytest.mark.slow
def test_an_application_with_a_model_inside() -> None:
    """It compares the streamed text with the whole."""
    assert "pieces)" in run("composition.py")


@pytest.mark.slow
def test_ray_data_asks_a_running_model() -> None:
    pytest.importorskip("pyarrow")
    printed = run("batch_through_serve.py")
    lines = [line for line in printed.splitlines() if " | " in line]
    assert any("RefusedError: max_tokens" in line for line in lines), printed
    assert any(line.strip() and line.endswith(" | ") for line in lines), printed


@pytest.mark.slow
def test_offline_batches_go_on_where_they_were_stopped(tmp_path: Path) -> None:
    """Of the files of a run one is lost, as if it had been stopped; the other is not made again."""
    pytest.importorskip("pyarrow")
    first = sorted(line for line in run("offline_batches.py", tmp_path).splitlines() if "|" in line)
    assert len(first) == 6, first
    assert [line.split(" | ")[0] for line in first if "max_tokens" in line] == ["refused"]
    kept, lost = sorted(tmp_path.glob("part-*.jsonl"))
    text, num_rows = kept.read_text(), len(lost.read_text().splitlines())
    lost.unlink()
    second = run("offline_batches.py", tmp_path)
    assert sorted(line for line in second.splitlines() if "|" in line) == first
    (again,) = set(tmp_path.glob("part-*.jsonl")) - {kept}
    assert kept.read_text() == text
    assert len(again.read_text().splitlines()) == num_rows
