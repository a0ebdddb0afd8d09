"""Functions that numba compiles: once, when they are defined, and kept on disk from then on.

A signature makes a function be compiled where it is defined, so that no step waits for it. What is
kept freezes the functions and constants of other files with it; so its folder has the name of all
sources of a package, and a package's kernels use nothing compiled outside of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., object])

# At DEBUG it writes tens of thousands of lines about every function that it compiles.
logging.getLogger("numba").setLevel(logging.INFO)

_SETTINGS: Any = numba.config
_SETTING = threading.RLock()  # where functions are kept is a setting of the process


class _PartLibrary(JITCodeLibrary):
    """Code of a function that is only ever inlined: neither optimised alone nor made executable.

    numba would do both for every function on its own, and so for the same instructions once at
    every level of calls. The decoder's float32 kernels take 23.1 processor seconds to compile into
    an empty cache, and 59.0 with `njit(forceinline=True)` (2 cores of an AMD EPYC with AVX2;
    `bench/RESULTS.md`).
    """

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> _NoEngine:
        return _NoEngine()

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _NoEngine:
    """In place of the code generator, for the last that numba does with a function."""

    def set_env(self, name: str, environment: object) -> None:
        """Does nothing: what is not executable has no environment."""


class _PartCompiler(CompilerBase):
    """numba's pipeline with such a library."""

    def define_pipelines(self) -> list[Any]:
        generator, name = self.state.targetctx.codegen(), self.state.func_id.func_qualname
        self.state.library = _PartLibrary(generator, name)
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]


def inlined(function: Function) -> Function:
    """A part of other functions' code, which only they can call."""
    njit: Any = numba.njit  # its types leave two of these options out
    return cast(
        Function,
        njit(
            forceinline=True,
            pipeline_class=_PartCompiler,
            no_cpython_wrapper=True,
            no_cfunc_wrapper=True,
        )(function),
    )


class Compiler:
    """Compiles the functions of one package or file; where no cache can be written, without one.

    Args:
        sources: the package's folder, or the file.
        variant: which machine code its functions become, beyond what numba asks the processor.
        options: further arguments of `numba.njit`.
    """

    def __init__(self, sources: Path, variant: str = "", **options: Any) -> None:
        self.folder = cache_folder(sources, _SETTINGS.CACHE_DIR, variant)
        self._options = options
        self._addresses: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def __call__(self, result: Any, *arguments: Any) -> Callable[[Function], Function]:
        """Compiles a function of these types of numba's."""
        signature = result(*arguments)

        def compile_it(function: Function) -> Function:
            if self.folder is None:
                return self._compile(function, signature)
            with _SETTING:
                usual, _SETTINGS.CACHE_DIR = _SETTINGS.CACHE_DIR, str(self.folder)
                try:
                    with ExitStack() as alone:
                        _lock(self._lock_of(function.__name__), alone)
                        return self._compile(function, signature, cache=True)
                except Exception as error:  # noqa: BLE001 - of a disk, or its own, which is raised again
                    log.warning("%s: compiled kernels cannot be kept there: %r", self.folder, error)
                    return self._compile(function, signature)
                finally:
                    _SETTINGS.CACHE_DIR = usual

        return compile_it

    def is_taken(self, name: str) -> bool:
        """Whether a process compiles the function of this name now."""
        if self.folder is None:
            return False
        with ExitStack() as lock:
            return not _lock(self._lock_of(name), lock, wait=False)

    def address_of(self, function: Callable[..., object]) -> int:
        """Where a compiled function without a result begins, as C calls it."""
        return self._addresses[function]

    def _lock_of(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.lock"

    def _compile(self, function: Function, signature: Any, **options: Any) -> Function:
        made: Any = numba.njit(signature, **self._options, **options)(function)
        (found,) = made.overloads.values()
        # Now: of functions of one name, such as one for each dtype, the newest is found.
        name = found.fndesc.llvm_cfunc_wrapper_name
        self._addresses[made] = int(found.library.get_pointer_to_function(name))
        return cast(Function, made)


def _lock(path: Path, stack: ExitStack, *, wait: bool = True) -> bool:
    """Takes a file's lock until the stack is closed; False: another process has it.

    One process compiles a function, and those that wait for it load what was kept. Where files have
    no locks, each compiles it.
    """
    try:
        file = stack.enter_context(path.open("w"))
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.info("%s cannot be locked: %s", path, error)
    return True


def cache_folder(sources: Path, usual: str, variant: str = "") -> Path | None:
    """The folder for what is compiled of these sources; None if none can be written to."""
    digest = hashlib.sha256(variant.encode())
    folder = sources if sources.is_dir() else sources.parent
    for path in sorted(folder.glob("*.py") if sources.is_dir() else (sources,)):
        digest.update(path.name.encode() + path.read_bytes())
    for base in _bases(folder, usual):
        kept = base / f"outrider-kernels-{digest.hexdigest()[:16]}"
        try:
            kept.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(kept, os.W_OK | os.X_OK):
            return kept
    return None


def _bases(sources: Path, usual: str) -> Iterator[Path]:
    if usual:  # NUMBA_CACHE_DIR
        yield Path(usual)
        return
    yield sources / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
