"""Files that are whole or not there: what fails leaves what was, and nothing else."""

from __future__ import annotations

import stat

import pytest

from outrider.config.files import check_writable, write_whole
from outrider.errors import ConfigError


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    write_whole(path, [b"one", b"two"], mode=0o600)
    assert path.read_bytes() == b"onetwo"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    check_writable(path, "f")
    write_whole(path, [b"three"])
    assert path.read_bytes() == b"three"
    assert names(tmp_path) == ["file"]


def test_what_fails_half_way_leaves_the_old_file_alone(tmp_path):
    def parts():
        yield b"half"
        raise MemoryError

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(MemoryError):
        write_whole(path, parts())
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "folder" / "file")
    check_writable(link, "f")
    write_whole(link, [b"x"])
    assert link.is_symlink()
    assert (tmp_path / "folder" / "file").read_bytes() == b"x"


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for place in ("folder", "none/file", "file/file", "x" * 300):
        with pytest.raises(ConfigError, match="cannot be written") as caught:
            check_writable(tmp_path / place, "some.field")
        assert caught.value.field == "some.field"
        assert place in caught.value.message
        with pytest.raises(OSError, match="file|directory|name"):
            write_whole(tmp_path / place, [b"x"])
    assert names(tmp_path) == ["file", "folder"]
    assert names(tmp_path / "folder") == []
