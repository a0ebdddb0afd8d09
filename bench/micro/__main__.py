"""Times small parts of a step, each as a ratio to a reference in the same run.

    python -m outrider.bench.micro [--only attention ...] [--rounds 20] [--dtype bfloat16 ...]

A ratio below 1 means quicker than the reference. One thread; the clock is that thread's time on a
CPU, which other processes disturb less than the wall's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import chain

import torch

from ..measure import Pair, show
from .host import host
from .operations import attention, operations, preparation, rewinds

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.micro")
    parser.add_argument("--only", nargs="+", default=[], help="parts whose names contain these")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    """Prints a table."""
    options = _arguments()
    torch.set_num_threads(1)
    dtypes = [DTYPES[name] for name in options.dtype]
    parts = (operations, preparation, attention)
    kernels = (pair for dtype in dtypes for part in parts for pair in part(dtype))
    pairs: Iterable[Pair] = chain(host(), rewinds(), kernels)
    if options.only:
        pairs = (pair for pair in pairs if any(name in pair.part for name in options.only))
    show(pairs, options.rounds, "part", "case", "ours, us", "reference, us", "ratio")


if __name__ == "__main__":
    main()
