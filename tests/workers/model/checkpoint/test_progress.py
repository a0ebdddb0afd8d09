"""How far weights are: lines for what takes long, none for the rest."""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from outrider.tests.helpers.gguf_files import write_gguf
from outrider.workers.collective import Collective
from outrider.workers.group import LocalGroup
from outrider.workers.model.checkpoint import progress as module
from outrider.workers.model.checkpoint.hub import local_folder
from outrider.workers.model.checkpoint.progress import Amount, Progress, Teller, joined, watched
from outrider.workers.model.checkpoint.weights import Checkpoint
from outrider.workers.model.target import load_model
from outrider.workers.spec import ModelSpec, WorkerSpec

DEMO = Path(__file__).resolve().parents[4] / "demo" / "models"
GIB = 2**30


def told(amounts: list[Amount], step_s: float = 1.0) -> dict[float, str]:
    """By the time, the lines of a worker whose amounts are looked at every `step_s`."""
    lines: dict[float, str] = {}
    now_s = [0.0]
    teller = Teller(lambda line: lines.update({now_s[0]: line}), clock=lambda: now_s[0])
    for amount in amounts:
        teller.look(amount)
        now_s[0] += step_s
    return lines


def test_what_takes_seconds_is_not_told() -> None:
    assert told([Amount()] * 40 + [Amount("read", GIB // 4 * step, GIB) for step in range(5)]) == {}


def test_a_line_every_few_seconds_until_all_is_read() -> None:
    reading = [Amount("read", GIB * step, 14 * GIB) for step in range(15)]
    assert told([Amount(), *reading, reading[-1]]) == {
        6.0: "weights: 5.0 of 14.0 GiB read, 1.00 GiB/s, about 9 s left",
        11.0: "weights: 10.0 of 14.0 GiB read, 1.00 GiB/s, about 4 s left",
        15.0: "weights: 14.0 GiB read in 14 s",
    }


def test_lines_are_rarer_the_longer_it_takes() -> None:
    hours = [Amount("fetched", 10 * 2**20 * step, 200 * GIB) for step in range(7200)]
    lines = told(hours)
    assert list(lines)[:3] == [5.0, 10.0, 15.0]
    assert lines[5.0].startswith("weights: 0.0 of 200.0 GiB fetched, 10.0 MiB/s, about ")
    gaps = [after - before for before, after in pairwise(lines)]
    assert sorted(gaps) == gaps
    assert gaps[-1] == 60.0
    assert len(lines) < 200


def test_nothing_arrives_and_what_is_done_changes() -> None:
    stuck = [Amount("fetched", 0, GIB)] * 7
    reading = [Amount("read", GIB // 2 + GIB // 50 * step, GIB) for step in range(7)]
    assert told(stuck + reading) == {
        5.0: "weights: 0.0 of 1.0 GiB fetched, 0.0 MiB/s",
        12.0: "weights: 0.6 of 1.0 GiB read, 20.5 MiB/s, about 20 s left",
    }


def test_workers_that_wait_for_another_are_left_out() -> None:
    reading = Amount("read", 3, 10)
    assert joined([]) == joined([Amount(), Amount()]) == Amount()
    assert joined([reading, Amount(), Amount("read", 4, 10)]) == Amount("read", 7, 20)
    assert joined([reading, Amount(), Amount("fetched", 4, 9)]) == Amount("fetched", 4, 9)
    assert joined([reading, Amount("fetched", 9, 9)]) == reading


def test_a_watch_ends_with_what_it_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    lines: list[str] = []
    with watched(lambda: [Amount("read", 1, 2)], lines.append):
        time.sleep(0.1)
    assert lines == [], "nothing was told, so nothing has to be taken back"
    monkeypatch.setattr(module, "_FIRST_S", 1e-6)
    with watched(lambda: [Amount("read", GIB, 2 * GIB)], lines.append):
        while not lines:
            time.sleep(0.01)
    assert lines[0].startswith("weights: 1.0 of 2.0 GiB read, ")
    assert lines[-1] == ""


def test_a_group_tells_how_far_its_ranks_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    monkeypatch.setattr(module, "_FIRST_S", 1e-6)
    monkeypatch.setattr(module, "_EVERY_S", 0.05)
    add = Progress.add

    def slowly(self: Progress, num_bytes: int) -> None:
        time.sleep(0.005)
        add(self, num_bytes)

    monkeypatch.setattr(Progress, "add", slowly)
    model = ModelSpec(str(DEMO / "target"), "float32", 16, 64, 64, 1, 64, 2**20, 0.5)
    group = LocalGroup(WorkerSpec(2, "cpu", None, 60.0, target=model))
    assert group.loading == "", "it is up"
    group.shutdown()
    lines = [each.message for each in caplog.records if each.name == module.LOGGER]
    size = sum(file.stat().st_size for file in (DEMO / "target").glob("*.safetensors"))
    assert sum("read, " in line for line in lines) > 3
    assert f"of {size / 2**20:,.1f} MiB read" in lines[-2]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_unpacking_is_counted_and_told_without_a_terminal(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_FIRST_S", 1e-6)
    file = write_gguf(DEMO / "draft", tmp_path / "x.gguf", kind)
    counted = Progress()
    folder = Path(local_folder(str(file), progress=counted))
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        size = sum(stored.get_tensor(name).nbytes for name in stored.keys())  # noqa: SIM118
    assert counted.amount == Amount("unpacked", size, size)
    assert not [each for each in caplog.records if each.name == module.LOGGER]
    file.rename(tmp_path / "y.gguf")
    local_folder(str(tmp_path / "y.gguf"))
    lines = [each for each in caplog.records if each.name == module.LOGGER]
    assert lines[0].levelno == logging.INFO
    assert lines[0].message.startswith("y.gguf: weights: ")
    assert " MiB unpacked, " in lines[0].message
    assert Checkpoint(folder).names


@pytest.mark.parametrize("name", ["target", "draft"])
def test_every_byte_of_a_checkpoint_is_counted(name: str) -> None:
    counted = Progress()
    device = torch.device("cpu")
    load_model(DEMO / name, device=device, collective=Collective.single(), progress=counted)
    files = [*(DEMO / name).glob("*.safetensors")]
    size = 0
    for file in files:
        with safe_open(file, framework="pt") as stored:
            size += sum(stored.get_tensor(each).nbytes for each in stored.keys())  # noqa: SIM118
    assert counted.amount == Amount("read", size, size)
