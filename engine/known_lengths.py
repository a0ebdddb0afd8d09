"""What draft lengths have learned, kept on disk for the next engine of the same kind.

A file per target, drafters, device and division into ranks, in the user's folder of caches or in
`OUTRIDER_LENGTHS_DIR` (empty: nothing is kept). It only saves comparisons: whatever is in it, the
output is the same, and what no longer holds is measured again. So a file that cannot be read or
written is no error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import uuid
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..config import EngineConfig
from ..scheduler.budget import DraftBudget
from ..scheduler.draft_lengths import Knowledge
from ..workers.spec import ModelReport

log = logging.getLogger(__name__)
FOLDER: Final = "OUTRIDER_LENGTHS_DIR"
_LAYOUT: Final = 1  # of the files
_DIGEST_BYTES: Final = 32
_LEAST_NEW: Final = 8  # comparisons that are worth a file


class KnownLengths:
    """Reads the file as an engine starts, and writes it when the engine idles or ends.

    A file is a digest, then the arrays of a `Knowledge` in float32, whose shapes follow from the
    configuration. The digest covers the key too, so a file that is damaged, of another kind of
    engine or of another program is found without being parsed.

    Args:
        budget: of the engine's start; drafters that take its place later are not kept.
    """

    def __init__(self, config: EngineConfig, report: ModelReport, budget: DraftBudget) -> None:
        self._budget, self._num_kept = budget, 0
        folder = _folder() if budget.knowledge() is not None else None
        self._key = _key(config, report)
        self._file = folder / f"{self._key}.lengths" if folder is not None else None

    def recall(self) -> None:
        """Gives the budget what earlier engines have learned, if anything."""
        if self._file is None:
            return
        first = self._budget.knowledge()
        assert first is not None, "there is a file only if lengths are measured"
        sizes = [each.size for each in first]
        try:
            with self._file.open("rb") as file:
                data = file.read(_DIGEST_BYTES + 4 * sum(sizes) + 1)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read (%s): draft lengths start anew", self._file, error)
            return
        values = data[_DIGEST_BYTES:]
        if len(values) == 4 * sum(sizes) and data[:_DIGEST_BYTES] == self._digest(values):
            parts = np.split(np.frombuffer(values, "<f4").astype(np.float64), np.cumsum(sizes)[:-1])
            known = (part.reshape(each.shape) for part, each in zip(parts, first, strict=True))
            if self._budget.recall(Knowledge(*known)):
                return
        log.warning("%s is damaged or foreign: draft lengths start anew", self._file)

    def keep(self, budget: DraftBudget) -> None:
        """Writes what `budget`, the scheduler's own, has learned since the last time."""
        num_new = budget.num_comparisons - self._num_kept
        if self._file is None or budget is not self._budget or num_new < _LEAST_NEW:
            return
        known = budget.knowledge()
        assert known is not None, "there is a file only if lengths are measured"
        self._num_kept = budget.num_comparisons
        values = b"".join(each.astype("<f4").tobytes() for each in known)
        partial = self._file.with_name(f"{self._file.name}.{uuid.uuid4().hex}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_bytes(self._digest(values) + values)
                partial.replace(self._file)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            log.warning("what draft lengths learn is not kept (%s): %s", FOLDER, error)
            self._file = None

    def _digest(self, values: bytes) -> bytes:
        return hashlib.sha256(self._key.encode() + values).digest()


def _folder() -> Path | None:
    chosen = os.environ.get(FOLDER)
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path("~/.cache").expanduser()) / "outrider" / "lengths"
    except RuntimeError:  # there is no home
        return None


def _key(config: EngineConfig, report: ModelReport) -> str:
    """Of all that the speed of drafts depends on, and that stays while an engine runs."""
    facts: dict[str, Any] = {
        "layout": _LAYOUT,
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "device": config.device,
        "executor": config.executor,
        "model": str(config.model),
        "architecture": report.architecture,
        "vocab_size": report.vocab_size,
        "dtype": report.dtype,
        "operations": report.operations,
        "ranks": [config.tensor_parallel_size, config.pipeline_parallel_size],
        "overlap": config.overlap_scheduling,
        "drafters": config.speculative_config.model_dump(mode="json"),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
