"""What steps cost: milliseconds by their number of rows, measured while serving.

Called by `DraftLengths`. Steps that only decode are counted; those with drafts include the time of
drafting, so they have a curve of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_EXACT = 16  # numbers of rows up to which each has its own mean
_PER_OCTAVE = 8  # means beyond
_SHARE = 0.1  # of the newest step in a mean
_OUTLIER = 2.0  # a step counts at most as so many times the mean
_FRESH_STEPS = 2048  # for which a mean without new steps is trusted
_ENOUGH = 3  # steps of a mean that is used


class StepCosts:
    """Two curves: steps in which nothing could be drafted, and the others."""

    def __init__(self) -> None:
        self._plain, self._drafted = _Curve(), _Curve()
        self._step = 0

    def count(self, num_requests: int, num_nodes: int, elapsed_ms: float, is_plain: bool) -> None:
        """Another step."""
        self._step += 1
        curve = self._plain if is_plain else self._drafted
        curve.count(num_requests + num_nodes, elapsed_ms, self._step)

    @property
    def knows_any_plain(self) -> bool:
        """Whether steps without drafts have been measured, of any size."""
        return bool(self._plain.points())

    def knows_plain(self, num_requests: int) -> bool:
        """Whether such a step without drafts, or one near it, has been measured lately."""
        return self._plain.knows(num_requests, self._step)

    @property
    def knows_drafted(self) -> bool:
        """Whether steps with drafts have been measured."""
        return bool(self._drafted.points())

    def plain_ms(self, num_requests: int) -> float:
        """Of a step without drafts."""
        return float(_at(np.array([float(num_requests)]), self._plain.points())[0])

    def drafted_ms(self, num_requests: int, num_nodes: Floats) -> Floats:
        """Of steps with so many nodes.

        Fewer than were ever drafted are taken to cost less, down to the step without drafts, so
        that they are tried.
        """
        points = [each for each in self._drafted.points() if each[0] > num_requests]
        plain = (float(num_requests), self.plain_ms(num_requests))
        return _at(num_requests + num_nodes, [plain, *points])

    def stats(self) -> dict[str, Any]:
        """Means by number of rows."""
        return {"plain": self._plain.stats(), "drafted": self._drafted.stats()}


class _Curve:
    """Means by number of rows."""

    def __init__(self) -> None:
        self._means: dict[int, list[float]] = {}  # bucket -> rows, milliseconds, steps, last step

    def count(self, num_rows: int, elapsed_ms: float, step: int) -> None:
        mean = self._means.get(_bucket(num_rows))
        if mean is None:
            self._means[_bucket(num_rows)] = [num_rows, elapsed_ms, 1, step]
            return
        mean[2] += 1
        share = max(_SHARE, 1 / mean[2])
        mean[0] += share * (num_rows - mean[0])
        mean[1] += share * (min(elapsed_ms, _OUTLIER * mean[1]) - mean[1])
        mean[3] = step

    def knows(self, num_rows: int, step: int) -> bool:
        near = (0.8 * num_rows, 1.25 * num_rows)
        return any(
            near[0] <= rows <= near[1] and steps >= _ENOUGH and step - last < _FRESH_STEPS
            for rows, _, steps, last in self._means.values()
        )

    def points(self) -> list[tuple[float, float]]:
        """Rows and milliseconds, by rows."""
        return sorted((rows, ms) for rows, ms, steps, _ in self._means.values() if steps >= _ENOUGH)

    def stats(self) -> dict[str, float]:
        return {f"{rows:.0f}": ms for rows, ms, *_ in sorted(self._means.values())}


def _at(num_rows: Floats, points: list[tuple[float, float]]) -> Floats:
    """Milliseconds by straight, rising lines; beyond them half of a step grows with its rows."""
    if not points:
        return np.ones_like(num_rows)
    rows, ms = np.array(points).T
    clipped = np.clip(num_rows, rows[0], rows[-1])
    lines = np.interp(clipped, rows, np.maximum.accumulate(ms))
    return np.asarray(lines * (0.5 + 0.5 * num_rows / clipped))


def _bucket(num_rows: int) -> int:
    if num_rows <= _EXACT:
        return num_rows
    return _EXACT + int(np.log2(num_rows / _EXACT) * _PER_OCTAVE)
