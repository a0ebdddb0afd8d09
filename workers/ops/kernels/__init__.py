"""Operations of a decoder on the CPU, compiled by numba and cached on disk (`compiled.py`).

Every kernel takes addresses, strides in bytes and counts, all int64: passing an integer costs a
twentieth of passing an array. `ops/cpu.py` has the called functions, and checks shapes. The
functions here are inlined there, and group their parameters into `NamedTuple`s, which cost nothing
once inlined. `kind` is a type of values, `to_x` the stride of x.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from numba import njit, types

from ....compiled import Compiler
from ....compiled import inlined as inlined
from ..table import capability, may_use_tiles

VOID: Any = types.void
INT: Any = types.int64
FLOAT: Any = types.float64

Kernel = Callable[..., None]

HAS_TILES = capability() == "amx" and may_use_tiles()
"""Whether AMX computes products of bfloat16 (`amx.py`)."""

compiled = Compiler(
    Path(__file__).parent, "amx" if HAS_TILES else "", nogil=True, fastmath={"contract"}
)
shared = njit  # long, and called from several places: compiled once per kernel


# How a matrix is laid out in panels (`panels.py`).
LANES = 16  # columns of a panel
GROUP = 4 * LANES  # columns
UNIT = 4  # bytes
PANEL = LANES * UNIT  # bytes of a panel's row
STRIDE = 4 * PANEL  # from one unit of a group to the next


class Kind(NamedTuple):
    """A type of values."""

    tag: Any  # `HALF` or `FULL`
    width: int  # bytes of a value


class Matrix(NamedTuple):
    """Rows in memory."""

    start: int  # address
    to_row: int
