"""Chooses the implementation of products on a CPU from a table, which is read at load.

Nothing is measured at start, so two starts of one model give the same bits. An entry is chosen by
the processor's instructions, the dtype and the class of the weight, and applies to any number of
rows. `python -m outrider.bench.micro.table` measures a machine's entries.

Measured (`bench/RESULTS.md`): AMX, AVX-512 with bfloat16 dots, AVX-512 and AVX2. Our kernel is as
fast as oneDNN's product at any number of rows and up to three times as fast at one. Without AMX,
beyond `SMALL`, oneDNN divides one row among threads. With AMX, codes are slower than the
dequantised weight. Attention uses the kernel everywhere, at 1.1 to 2.9 times the speed of torch's.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

import llvmlite.binding
import torch

from ...errors import ConfigError

KERNEL, ONEDNN, TORCH = "kernel", "onednn", "torch"
SMALL_WEIGHT, LARGE_WEIGHT = "small weight", "large weight"
CODES = "codes"  # of a quantised weight; torch's product uses the dequantised weight

VARIABLE = "OUTRIDER_CPU_TABLE"
"""Environment variable that selects the entries of a capability, whatever the processor has."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux, for x86_64

BF16, F32 = torch.bfloat16, torch.float32
SMALL = {BF16: 1 << 21, F32: 1 << 20}
"""Maximum elements of a small weight, which the kernel multiplies by few rows on one thread."""


Classes = dict[str, str]
"""The implementation of each class."""

_OWN: Classes = {SMALL_WEIGHT: KERNEL, LARGE_WEIGHT: KERNEL, CODES: TORCH}
_SHARED: Classes = _OWN | {LARGE_WEIGHT: ONEDNN}

TABLE: dict[str, dict[torch.dtype, Classes]] = {
    "amx": {BF16: _OWN, F32: _SHARED},
    "avx512_bf16": {BF16: _SHARED | {CODES: KERNEL}, F32: _SHARED},
    "avx512": {BF16: _SHARED, F32: _SHARED},
    "avx_ne_convert": {BF16: _SHARED, F32: _SHARED},
    "avx2": {BF16: _OWN, F32: _SHARED},
    "other": {BF16: _OWN, F32: _OWN | {LARGE_WEIGHT: TORCH}},
}
"""Implementations by capability, dtype and class."""


@cache
def may_use_tiles() -> bool:
    """Returns True if the processor has AMX's bfloat16 tiles and Linux allows their use."""
    features = llvmlite.binding.get_host_cpu_features()
    has_them = features.get("amx-bf16", False) and features.get("avx512bf16", False)
    if not has_them or not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def capability() -> str:
    """Returns the best instructions that oneDNN uses here, by their names in the table.

    Instructions that oneDNN's own limit, `ONEDNN_MAX_CPU_ISA`, excludes do not count.

    Raises:
        ConfigError: `OUTRIDER_CPU_TABLE` is not a capability of the table.
    """
    forced = os.environ.get(VARIABLE)
    if forced:
        if forced not in TABLE:
            raise ConfigError(f"{VARIABLE}={forced}: allowed: {', '.join(TABLE)}")
        return forced
    has = torch.cpu.get_capabilities()
    has_avx = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    if not has_avx or not torch.backends.mkldnn.is_available():
        return "other"
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or "ALL").upper()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # respects the limit
        return "avx2"
    is_limited = "AMX" not in limit and limit not in ("ALL", "DEFAULT")
    if has.get("amx_bf16") and not is_limited and may_use_tiles():
        return "amx"
    if not has.get("avx512_bw") or limit == "AVX2_VNNI_2":
        return "avx_ne_convert"
    pairs = has.get("avx512_bf16") and limit not in ("AVX512_CORE", "AVX512_CORE_VNNI")
    return "avx512_bf16" if pairs else "avx512"


def way(dtype: torch.dtype, what: str) -> str:
    """Returns the implementation of a class on this processor."""
    return TABLE[capability()][dtype][what]


def keeps_codes(dtype: torch.dtype) -> bool:
    """Returns True if products with codes are faster here than with dequantised weights."""
    return dtype == BF16 and way(dtype, CODES) == KERNEL


def describe(dtype: torch.dtype) -> str:
    """Describes the entries in use in one line for users."""
    parts = (f"{what}: {way(dtype, what)}" for what in TABLE[capability()][dtype])
    return f"{capability()}; {'; '.join(parts)}"


def filled_rows(num_rows: int) -> int:
    """Returns the number of rows with which oneDNN is called: at most an eighth more.

    oneDNN keeps half a megabyte for every number of rows and shape of a weight, and a missing entry
    costs half a millisecond.
    """
    step = 1 << max(num_rows.bit_length() - 4, 0)
    return -(-num_rows // step) * step
