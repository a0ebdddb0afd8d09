"""Compiled loops: kept on disk where that works, and there all the same where it does not."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import pytest

from outrider import compiled
from outrider.compiled import cache_folder, inlined
from outrider.drafters.lookup import kernels as loops
from outrider.drafters.lookup.kernels import hashing

SOURCES = Path(loops.__file__).parent
TESTS = Path(__file__).parents[1]
CODE = """
import logging, sys
logging.basicConfig(level=logging.DEBUG)
from outrider.drafters import registry
print("numba" in sys.modules)
from outrider.drafters.lookup.kernels import hashing
made = [each for each in vars(hashing).values() if hasattr(each, "stats")]
print(len(made), sum(sum(each.stats.cache_hits.values()) for each in made))
"""


def double(number: int) -> int:
    return 2 * number


def start(folder, code=CODE):
    """What a fresh process says that keeps its loops there."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "NUMBA_CPU_NAME": "generic"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert "numba" not in done.stderr
    return done.stdout.split(), done.stderr


def test_kept_for_the_next_process_and_loaded_only_when_wanted(tmp_path):
    (was_loaded, made, hits), _ = start(tmp_path)
    assert (was_loaded, hits) == ("False", "0")
    (was_loaded, made, hits), log = start(tmp_path)
    assert (was_loaded, hits, log) == ("False", made, "")


def test_two_processes_share_the_work(tmp_path):
    with ThreadPoolExecutor(2) as threads:
        first, second = (each[0] for each in threads.map(start, (tmp_path, tmp_path)))
    (_, made, hits), (_, _, others) = first, second
    assert int(hits) + int(others) == int(made)


def test_damage_on_the_disk_costs_time_and_nothing_else(tmp_path):
    start(tmp_path)
    kept = [path for path in tmp_path.rglob("*.nb?") if path.is_file()]
    assert kept
    for index, path in enumerate(kept):
        path.write_bytes(path.read_bytes()[: index * 7])
    (_, made, hits), log = start(tmp_path)
    assert (made, hits) != ("0", made)
    assert "cannot be kept there" in log


def test_a_full_disk(monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba.core.caching.FunctionCache, "save_overload", full)
    made = loops.compiled(loops.INT, loops.INT)(double)
    assert made(21) == 42
    assert "No space left" in caplog.text


def test_nowhere_to_keep_them(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    assert cache_folder(SOURCES, str(tmp_path / "file")) is None
    monkeypatch.setattr(loops.compiled, "folder", None)
    made = loops.compiled(loops.INT, loops.INT)(double)
    assert made(21) == 42
    assert len(made.signatures) == 1  # compiled already


def test_what_is_wrong_with_a_function_is_said():
    with pytest.raises(numba.core.errors.TypingError):
        loops.compiled(loops.INT, loops.INT)(lambda number: number.there_is_none)


def test_a_change_in_any_source_is_another_folder(tmp_path):
    sources, kept = tmp_path / "sources", str(tmp_path / "kept")
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    before = cache_folder(sources, kept)
    assert before == cache_folder(sources, kept)
    for path in sorted(sources.glob("*.py")):
        path.write_text(path.read_text() + "\n")
        after = cache_folder(sources, kept)
        assert after != before, path.name
        before = after


def test_nothing_is_compiled_in_a_step():
    assert not hashing.insert._can_compile


def test_parts_are_not_optimised_alone(monkeypatch):
    @inlined
    def part(number):
        return 2 * number

    def whole(number):
        return part(number) + 1

    optimised = []
    library = numba.core.codegen.CPUCodeLibrary
    optimise = library._optimize_final_module
    monkeypatch.setattr(
        library,
        "_optimize_final_module",
        lambda each: (optimised.append(each.name), optimise(each)),
    )
    monkeypatch.setattr(loops.compiled, "folder", None)
    assert loops.compiled(loops.INT, loops.INT)(whole)(21) == 43
    names = [name.rpartition(".")[2] for name in optimised]
    assert "whole" in names
    assert "part" not in names


@pytest.mark.slow
def test_no_loop_leaves_its_arrays(tmp_path):
    """The tests of what is made of loops, with bounds checked."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_BOUNDSCHECK": "1"}
    names = ("test_suffix.py", "test_count_table.py", "test_ngram_cache.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist",
         *(str(TESTS / name) for name in names)],
        env=env, cwd=TESTS.parents[2], capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def test_threads_that_compile_at_once_keep_the_setting(tmp_path, monkeypatch):
    """Ranks of one process: where functions are kept is one setting for all of them."""
    both, seen, before = threading.Barrier(2, timeout=0.2), set(), compiled._SETTINGS.CACHE_DIR
    makers = [compiled.Compiler(Path(compiled.__file__)) for _ in range(2)]
    for index, maker in enumerate(makers):
        maker.folder = tmp_path / str(index)
        maker.folder.mkdir()

    def slowly(self, function, signature, **options):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()
        seen.add((str(self.folder), compiled._SETTINGS.CACHE_DIR))
        return function

    monkeypatch.setattr(compiled.Compiler, "_compile", slowly)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda maker: maker(tuple)(len), makers))
    assert seen == {(str(maker.folder), str(maker.folder)) for maker in makers}
    assert before == compiled._SETTINGS.CACHE_DIR
