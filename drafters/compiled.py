"""Hot loops that numba compiles: once, when they are imported, and kept on disk for the next time.

A signature makes a function be compiled where it is defined, so that no step waits for it. What is
kept on disk knows its own file only: functions that call each other stay in one file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])

# At DEBUG it writes tens of thousands of lines about every function that it compiles.
logging.getLogger("numba").setLevel(logging.INFO)

INT = "int64"
INTS = "int32[::1]"
TABLE = "int32[:,::1]"
TABLES = "int32[:,:,::1]"
FLOAT = "float64"
FLOATS = "float64[::1]"


def compiled(result: str, *arguments: str) -> Callable[[Function], Function]:
    """Compiles a function of these types, by numba's names for them."""
    signature = f"{result}({', '.join(arguments)})"

    def compile_it(function: Function) -> Function:
        try:
            made = numba.njit(signature, cache=True)(function)
        except RuntimeError:  # no folder to keep it in can be written to
            made = numba.njit(signature)(function)
        return cast(Function, made)

    return compile_it
