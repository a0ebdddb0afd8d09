"""What steps cost: milliseconds by requests, rows and draft lengths, measured while serving.

Called by `DraftLengths`. Steps that only decode are counted, with the time of drafting in them, and
similar ones are averaged. For a number of requests, a curve over the number of rows, a cost of
drafting and one of its length are fitted to the averages; those of other numbers of requests count
the less, the further they are away.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_EXACT = 8  # numbers of requests and rows up to which each has its own mean
_PER_OCTAVE = 4  # means beyond
_SHARE = 0.05  # of the newest step in a mean
_FULL_WEIGHT = 20  # steps of a mean, above which more do not make it weigh more
_OUTLIER = 2.0  # a step counts at most as so many times the mean
_FRESH_STEPS = (128, 1024)  # for which a mean is used without new ones: per step in it, at most
_SLOWER = 0.3  # of that share, of a slower step: other work on the machine passes
_ENOUGH = 2  # steps of a mean that is used
_STEPS_PER_FIT = 64
_NEAR = 4.0  # numbers of requests within this factor tell of each other's steps without drafts
_PER_OCTAVE_APART = 4.0  # times the octaves between numbers of requests: a mean's distance
# Weights, in steps, of what is assumed: that the curve is flat between two knots, so that unknown
# numbers of rows are tried; that drafting and its length cost nothing.
_FLAT, _FREE = 1.0, 10.0
_PASSES = 3  # of a fit; means far from the one before count less
_TYPICAL_ERROR = 0.1


class _Fit(NamedTuple):
    """Costs of steps of about so many requests."""

    knots: Floats  # [num_knots], rows
    curve: Floats  # alike: milliseconds
    drafting: float  # milliseconds, whatever is drafted
    length: float  # milliseconds, of a full draft
    most_rows: float  # that were measured


class StepCosts:
    """The means, and what is fitted to them.

    Args:
        most: nodes of a full draft.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._means: dict[tuple[int, int, bool], _Mean] = {}
        self._fits: dict[int, _Fit] = {}  # by number of requests
        self._step = self._fitted_at = 0
        self._is_new = False  # a mean has come into use since the last fit

    def count(self, num_requests: int, num_nodes: int, longest: int, elapsed_ms: float) -> None:
        """Another step, in which `longest` nodes were granted at most to one request."""
        self._step += 1
        key = (_bucket(num_requests), _bucket(num_requests + num_nodes), longest > 0)
        mean = self._means.get(key)
        if mean is None:
            mean = self._means[key] = _Mean()
        mean.count(num_requests, num_requests + num_nodes, longest, elapsed_ms, self._step)
        self._is_new |= mean.num_steps == _ENOUGH

    @property
    def knows_drafted(self) -> bool:
        """Whether steps with drafts have been measured."""
        return any(drafts for _, _, drafts in self._means)

    @property
    def knows_any_plain(self) -> bool:
        """Whether steps without drafts have been measured, of any size."""
        return any(not drafts for _, _, drafts in self._means)

    def knows_plain(self, num_requests: int) -> bool:
        """Whether such a step without drafts, or one near it, has been measured lately."""
        return any(
            num_requests / _NEAR < mean.num_requests < num_requests * _NEAR
            for (_, _, drafts), mean in self._means.items()
            if not drafts and mean.num_steps >= _ENOUGH
        )

    def learn(self) -> None:
        """Takes in what was measured, where that is due."""
        if self._is_new or self._step - self._fitted_at >= _STEPS_PER_FIT:
            self._is_new, self._fitted_at = False, self._step
            means = self._means.items()
            self._means = {key: mean for key, mean in means if mean.is_fresh(self._step)}
            self._fits.clear()

    def step_ms(self, num_requests: int, num_nodes: Floats, longest: Floats) -> Floats:
        """Of steps with so many nodes; beyond what was measured, half of a step grows with them."""
        bucket = _bucket(num_requests)
        fit = self._fits.get(bucket)
        if fit is None:
            fit = self._fits[bucket] = self._fit(num_requests)
        rows = num_requests + num_nodes
        clipped = np.minimum(rows, max(fit.most_rows, num_requests))
        ms = np.interp(clipped, fit.knots, fit.curve) * (0.5 + 0.5 * rows / clipped)
        ms += (longest > 0) * fit.drafting + fit.length / self._most * longest
        return np.asarray(ms)

    def stats(self) -> dict[str, dict[str, float]]:
        """Means by number of rows, the newest of each."""
        found: dict[str, dict[int, float]] = {"plain": {}, "drafted": {}}
        means = sorted(self._means.items(), key=lambda item: item[1].last_step)
        for (_, _, drafts), mean in means:
            found["drafted" if drafts else "plain"][round(mean.num_rows)] = mean.ms
        return {
            kind: {str(rows): ms for rows, ms in sorted(each.items())}
            for kind, each in found.items()
        }

    def _fit(self, num_requests: int) -> _Fit:
        """Least squares of relative errors."""
        used = [mean.values() for mean in self._means.values() if mean.num_steps >= _ENOUGH]
        if not used:
            return _Fit(np.ones(1), np.ones(1), 0.0, 0.0, 1.0)
        requests, rows, longest, ms, weights = np.array(used).T
        distances = np.log2(requests / num_requests) * _PER_OCTAVE_APART
        weights /= 1 + distances**2
        knots = _knots(float(rows.max()))
        unit = float(np.average(ms, weights=weights))
        at = np.clip(np.searchsorted(knots, rows, side="right") - 1, 0, len(knots) - 2)
        upper = np.clip((rows - knots[at]) / (knots[at + 1] - knots[at]), 0.0, 1.0)
        size, each = len(knots), np.arange(len(rows))
        terms = np.zeros((len(rows), size + 2))
        terms[each, at] = 1 - upper
        terms[each, at + 1] += upper
        terms[:, size], terms[:, size + 1] = longest > 0, longest / self._most
        flat = np.diff(np.eye(size), axis=0)
        prior = np.diag([1e-6] * size + [_FREE] * 2)
        # Less of it with more rows, so that what is between two measured points is convex.
        stiffness = _FLAT * num_requests**2 / np.diff(knots) / knots[1:]
        prior[:size, :size] += flat.T * stiffness @ flat
        now = weights
        for _ in range(_PASSES):
            weighted = terms * (now * (unit / ms) ** 2)[:, None]
            found = unit * np.linalg.solve(weighted.T @ terms + prior, weighted.T @ (ms / unit))
            now = weights / np.maximum(abs(terms @ found / ms - 1) / _TYPICAL_ERROR, 1.0)
            terms[:, size:] *= found[size:] > 0  # no such cost is negative
        curve, (drafting, length) = found[:size], np.maximum(found[size:], 0.0).tolist()
        rising = np.maximum.accumulate(curve) + np.minimum.accumulate(curve[::-1])[::-1]
        return _Fit(knots, np.maximum(rising / 2, 1e-3 * unit), drafting, length, float(rows.max()))


class _Mean:
    """Of similar steps, newer ones counting more."""

    __slots__ = ("last_step", "longest", "ms", "num_requests", "num_rows", "num_steps")

    def __init__(self) -> None:
        self.num_requests = self.num_rows = self.longest = self.ms = 0.0
        self.num_steps = self.last_step = 0

    def count(
        self, num_requests: int, num_rows: int, longest: int, elapsed_ms: float, step: int
    ) -> None:
        self.num_steps += 1
        self.last_step = step
        share = max(_SHARE, 1 / self.num_steps)
        if self.num_steps == _ENOUGH:  # the lower of two: a bad one must not end further trials
            self.ms = elapsed_ms = min(elapsed_ms, self.ms)
        elif self.num_steps > 1:
            elapsed_ms = min(elapsed_ms, _OUTLIER * self.ms)
        self.num_requests += share * (num_requests - self.num_requests)
        self.num_rows += share * (num_rows - self.num_rows)
        self.longest += share * (longest - self.longest)
        slower = elapsed_ms > self.ms and self.num_steps > _ENOUGH
        self.ms += share * (_SLOWER if slower else 1.0) * (elapsed_ms - self.ms)

    def is_fresh(self, step: int) -> bool:
        per_step, most = _FRESH_STEPS
        return step - self.last_step < min(per_step * self.num_steps, most)

    def values(self) -> tuple[float, float, float, float, float]:
        weight = min(self.num_steps, _FULL_WEIGHT)
        return self.num_requests, self.num_rows, self.longest, self.ms, weight


def _knots(most_rows: float) -> Floats:
    """1, 2, 3, 4, 6, 8, 12 and so on, up to one that is not below `most_rows`."""
    knots = [1.0, 2.0]
    while knots[-1] < most_rows:
        octave = 2.0 ** int(np.log2(knots[-1]))
        knots.append(1.5 * octave if knots[-1] == octave else 2 * octave)
    return np.array(knots)


def _bucket(number: int) -> int:
    if number <= _EXACT:
        return number
    return _EXACT + int(np.log2(number / _EXACT) * _PER_OCTAVE)
