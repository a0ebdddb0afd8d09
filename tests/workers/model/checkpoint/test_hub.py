"""GGUF files become folders in the cache: once, and whole or not at all."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import outrider
from outrider.errors import CheckpointError
from outrider.tests.helpers.gguf_files import write_gguf
from outrider.workers.model.checkpoint import gguf_checkpoint
from outrider.workers.model.checkpoint.hub import local_folder, unpacked_from

DEMO = Path(outrider.__file__).resolve().parent / "demo" / "models" / "draft"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    return write_gguf(DEMO, tmp_path / "x.gguf")


def held(cache: Path) -> list[str]:
    """Names of all files in the cache but locks."""
    return sorted(
        each.name for each in cache.rglob("*") if each.is_file() and each.suffix != ".lock"
    )


def test_a_file_is_unpacked_once(file, cache, caplog):
    caplog.set_level(logging.WARNING)
    folder = local_folder(str(file))
    assert len(caplog.records) == 1
    size = (Path(folder) / "model.safetensors").stat().st_size / 2**30
    assert f"of memory {size:.2f} GiB as float16" in caplog.text
    assert local_folder(str(file)) == folder
    assert local_folder(folder) == folder
    assert len(caplog.records) == 1
    assert unpacked_from(Path(folder)) == str(file)
    os.utime(file, (1, 1))
    assert local_folder(str(file)) != folder, "a changed file is another"


def test_names_of_the_same_file(file, tmp_path, monkeypatch):
    folder = local_folder(str(file))
    monkeypatch.chdir(tmp_path)
    assert local_folder("x.gguf") == folder
    shutil.copy(file, tmp_path / "blob")
    assert local_folder(str(tmp_path / "blob")) != folder, "it is known by its first letters"
    assert local_folder("none.gguf") == "none.gguf", "reported by whoever looks for it"


def test_parts_are_one_model(tmp_path):
    first = write_gguf(DEMO, tmp_path / "y.gguf", max_tensors=7)
    folder = local_folder(str(first))
    assert local_folder(str(first.with_name("y-00002-of-00003.gguf"))) == folder


def test_a_rank_on_another_node_unpacks_its_own_file(file, cache):
    folder = local_folder(str(file))
    shutil.rmtree(cache)
    os.utime(file, (1, 1))
    found = local_folder(folder)
    assert found != folder
    assert (Path(found) / "model.safetensors").is_file()
    file.unlink()
    shutil.rmtree(cache)
    assert local_folder(folder) == str(file), "reported by whoever looks for it"


def test_starts_at_the_same_time(file, caplog):
    with ThreadPoolExecutor(6) as pool:
        folders = list(pool.map(lambda _: local_folder(str(file)), range(6)))
    assert len(set(folders)) == 1
    assert len([each for each in caplog.records if "is unpacked to" in each.message]) == 1


def test_an_interrupted_unpacking_leaves_nothing(file, cache, monkeypatch):
    def interrupted(*arguments):
        yield next(values(*arguments))
        raise KeyboardInterrupt

    values = gguf_checkpoint._values
    monkeypatch.setattr(gguf_checkpoint, "_values", interrupted)
    with pytest.raises(KeyboardInterrupt):
        local_folder(str(file))
    assert held(cache) == []
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert "model.safetensors" in os.listdir(local_folder(str(file)))


def test_what_a_killed_process_left_is_removed(file, cache):
    folder = Path(local_folder(str(file)))
    rest = folder.with_name(f"{folder.name}.1.partial")
    folder.rename(rest)
    assert local_folder(str(file)) == str(folder)
    assert not rest.exists()


def test_a_file_that_changes_meanwhile(file, cache, monkeypatch):
    def slow(*arguments):
        yield from values(*arguments)
        os.utime(file, (1, 1))

    values = gguf_checkpoint._values
    monkeypatch.setattr(gguf_checkpoint, "_values", slow)
    with pytest.raises(CheckpointError, match="x.gguf: it changed while it was unpacked"):
        local_folder(str(file))
    assert held(cache) == []


def test_a_full_disk_is_seen_before_anything_is_written(file, cache, monkeypatch):
    usage = shutil.disk_usage(file.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        CheckpointError, match=r"unpacking needs 0\.00 GiB, .*XDG_CACHE_HOME"
    ) as caught:
        local_folder(str(file), "speculative_config.speculative_model")
    assert caught.value.field == "speculative_config.speculative_model"
    assert held(cache) == []


def test_a_disk_that_fills_up(file, cache, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match="^model: .*x.gguf cannot be unpacked: .*No space left"
    ):
        local_folder(str(file))
    assert held(cache) == []


def test_a_cache_that_cannot_be_written_to(file, tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    with pytest.raises(
        CheckpointError, match=r"occupied/.*Not a directory; XDG_CACHE_HOME chooses"
    ):
        local_folder(str(file))
