"""The look-ups' inner loops, compiled by numba and cached on disk (`compiled.py`).

Inside the kernels, related values are grouped in `NamedTuple`s. Functions that Python calls take
plain arrays and numbers, since numba takes a microsecond to type a `NamedTuple` argument.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numba import types

from ....compiled import Compiler

VOID: Any = types.void
BOOL: Any = types.boolean
INT: Any = types.int64
INTS: Any = types.int32[::1]
TABLE: Any = types.int32[:, ::1]
TABLES: Any = types.int32[:, :, ::1]
FLOAT: Any = types.float64
FLOATS: Any = types.float64[::1]

compiled = Compiler(Path(__file__).parent)
