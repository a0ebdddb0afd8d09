"""A model of step times: measured when an engine starts, updated by the steps that serve."""

from __future__ import annotations

from bisect import bisect_right
from math import exp, log2, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SIZES = tuple(2**octave for octave in range(11))  # numbers of requests in the cost table
_NUM_SHOWN = 7  # entries of `SIZES` in the statistics: 1 to 64
_MOST_LENGTHS = 10  # draft lengths in the cost table, beside 0
# The prior mean. A step of `_EQUAL_ROWS` rows takes twice as long as the fixed part of a step; a
# drafter with weights adds the share `_BEGUN` once and `_NODE` per node.
_EQUAL_ROWS, _BEGUN, _NODE = 32.0, 0.1, 0.05
# Prior standard deviations of log times: slope over rows, local bends, drafting, single cells.
_ROWS_SPREAD, _BEND_SPREAD, _DRAFT_SPREAD, _OWN_SPREAD = 0.25, 0.15, 0.2, 0.02
_BEND_OCTAVES = 1.5  # correlation length of the bends
_MACHINE_SPREAD, _MACHINE_DRIFT = 1.0, 0.02  # of the machine's factor: prior, and per step
_NOISE, _LEAST_NOISE = 0.1, 0.02  # of one step's log time, and of a mean over many steps
_SURPRISE = 3.0  # outliers are clipped to so many standard deviations
_FEW_STEPS = 4  # weight, in steps, of costs taken over from another drafter
_FORGET_STEPS = 50_000.0  # time constant with which measurements lose weight
_STEPS_BETWEEN_RUNS = 1_000  # by so many steps an earlier run's measurements are aged


def lengths_of(most: int) -> list[int]:
    """Draft lengths of the cost table, 0 to `most`; the spacing grows with the length."""
    found, each = [0], 1.0
    while each < most and len(found) < _MOST_LENGTHS:
        found.append(int(each))
        each = max(each + 1, each * 1.5)
    return [*found, most] if most else found


class Lesson(NamedTuple):
    """The measured time of some steps."""

    num_requests: float
    num_nodes: float  # mean draft nodes per request
    log_ms: float  # mean logarithm of the milliseconds of a step
    num_steps: int


class StepCosts:
    """Predicts the log milliseconds of a step from its requests and their mean draft length.

    The model is a table over numbers of requests and draft lengths, interpolated in between, plus
    one term for the current speed of the machine. Table and term have a joint Gaussian prior in
    which cells with similar numbers of rows or similar lengths are correlated (a Gaussian process).
    Every measurement, from the engine's start or from serving steps, updates it as an observation
    of a Kalman filter; with time the uncertainty returns to the prior's.

    Args:
        most: nodes of a full draft.
        has_model: whether the drafter computes with weights.
    """

    def __init__(self, most: int, *, has_model: bool) -> None:
        self._lengths = np.array(lengths_of(most), dtype=np.float64)
        self._length_list = self._lengths.tolist()
        self._has_model = has_model
        requests = np.array(SIZES, dtype=np.float64)[:, None]
        rows = (requests * (1.0 + self._lengths)).ravel()
        drafted = np.tile(self._lengths, len(SIZES))
        octaves, of_drafts = np.log2(rows), np.log2(1.0 + drafted)
        kernel = _ROWS_SPREAD**2 * np.outer(octaves, octaves)
        near = (octaves[:, None] - octaves) / _BEND_OCTAVES
        kernel += _BEND_SPREAD**2 * np.exp(-0.5 * near**2)
        drafts_spread = _DRAFT_SPREAD if has_model else _OWN_SPREAD
        kernel += drafts_spread**2 * np.outer(of_drafts, of_drafts)
        if has_model:
            near = (of_drafts[:, None] - of_drafts) / _BEND_OCTAVES
            some = (drafted > 0).astype(np.float64)
            kernel += drafts_spread**2 * np.exp(-0.5 * near**2) * np.outer(some, some)
        kernel += _OWN_SPREAD**2 * np.eye(rows.size)
        self._first = np.zeros((1 + rows.size, 1 + rows.size))
        self._first[0, 0], self._first[1:, 1:] = _MACHINE_SPREAD**2, kernel
        self._covariance = self._first.copy()
        self._scratch = np.empty_like(self._first)
        self._mean = np.zeros(1 + rows.size)
        self._mean[1:] = np.log1p(rows / _EQUAL_ROWS)
        if has_model:
            self._mean[1:] += np.log1p(_BEGUN * (drafted > 0) + _NODE * drafted)
        self._is_scaled = False  # whether any step was measured in this run
        self.num_lessons = 0

    def learn(self, lesson: Lesson, *, apart: int) -> None:
        """Updates the model with measured steps.

        Args:
            apart: steps since the last lesson, during which the machine's speed may have drifted.
        """
        num_requests, length, log_ms, num_steps = lesson
        used, weights = self._cells(num_requests, length)
        mean, covariance = self._mean, self._covariance
        expected = float(mean[used] @ weights)
        if not self._is_scaled:
            self._is_scaled = True
            mean[0] += log_ms - expected
            expected = log_ms
        covariance[0, 0] = min(covariance[0, 0] + _MACHINE_DRIFT**2 * apart, _MACHINE_SPREAD**2)
        towards = covariance[:, used] @ weights
        spread = float(towards[used] @ weights) + _NOISE**2 / num_steps + _LEAST_NOISE**2
        most = _SURPRISE * sqrt(spread)
        mean += towards * (max(min(log_ms - expected, most), -most) / spread)
        # The outer product, written as a matrix product because that is faster.
        np.dot(towards[:, None], (towards / spread)[None], out=self._scratch)
        covariance -= self._scratch
        self.num_lessons += 1

    def _cells(self, num_requests: float, length: float) -> tuple[list[int], Floats]:
        """Indices and weights whose sum is a log time: the machine's term and four table cells."""
        octave = min(max(log2(num_requests), 0.0), len(SIZES) - 1.001)
        row, share = int(octave), octave % 1.0
        lengths = self._length_list
        at = max(min(bisect_right(lengths, length), len(lengths) - 1) - 1, 0)
        if len(lengths) == 1:
            at, part = 0, 0.0
        else:
            part = min((length - lengths[at]) / (lengths[at + 1] - lengths[at]), 1.0)
        first = 1 + row * len(lengths) + at
        second = first + len(lengths)
        weights = [1.0, (1 - share) * (1 - part), (1 - share) * part,
                   share * (1 - part), share * part]  # fmt: skip
        return [0, first, first + 1, second, second + 1], np.array(weights)

    def expect(self, num_requests: int, lengths: Floats, deepest: Floats) -> Floats:  # [num_works]
        """Expected log milliseconds of steps of `num_requests` requests.

        Args:
            lengths: mean draft nodes per request, one entry per alternative.
            deepest: draft nodes of the request that has the most. A drafter with weights runs that
                many rounds; shorter drafts are computed within them.
        """
        costs = self._row(num_requests)
        log_ms = np.interp(lengths, self._lengths, costs)
        if self._has_model:
            # The share of the added time that is drafting and not the target's additional rows.
            most = self._length_list[-1]
            added = exp(costs[-1]) - exp(costs[0])
            of_rows = exp(self._row(num_requests * (1.0 + most))[0]) - exp(costs[0])
            share = 1.0 - min(max(of_rows / max(added, 1e-9), 0.0), 1.0)
            uneven = np.exp(np.interp(deepest, self._lengths, costs)) - np.exp(log_ms)
            log_ms = np.log(np.exp(log_ms) + share * np.maximum(uneven, 0.0))
        return log_ms + self._mean[0]

    def _row(self, num_requests: float) -> Floats:  # [num_lengths]
        """Log times by draft length, made non-decreasing."""
        octave = min(log2(num_requests), len(SIZES) - 1.001)
        table = self._mean[1:].reshape(len(SIZES), -1)
        at, share = int(octave), octave % 1.0
        return np.maximum.accumulate((1.0 - share) * table[at] + share * table[at + 1])

    def forget(self, num_steps: int) -> None:
        """Moves the uncertainty back towards the prior, by `num_steps` steps."""
        kept = exp(-num_steps / _FORGET_STEPS)
        self._covariance *= kept
        self._covariance += np.multiply(self._first, 1.0 - kept, out=self._scratch)

    @property
    def belief(self) -> tuple[Floats, Floats]:
        """Mean and covariance of the machine's term and the table."""
        return self._mean, self._covariance

    def recall(self, mean: Floats, covariance: Floats) -> None:
        """Starts from the state of an earlier run, aged; the machine's term is reset."""
        self._mean, self._covariance = mean.copy(), covariance.copy()
        self._covariance[0, :] = self._covariance[:, 0] = 0.0
        self._covariance[0, 0] = _MACHINE_SPREAD**2
        self._is_scaled = False
        self.forget(_STEPS_BETWEEN_RUNS)

    def plain(self) -> list[Lesson]:
        """Lessons about steps without drafts, for the model of drafters that replace these."""
        costs = [float(self._row(size)[0] + self._mean[0]) for size in SIZES[:_NUM_SHOWN]]
        sizes = zip(SIZES, costs, strict=False) if self._is_scaled else ()
        return [Lesson(size, 0, log_ms, _FEW_STEPS) for size, log_ms in sizes]

    def stats(self) -> dict[str, dict[str, float]]:
        """Expected milliseconds of a step, by number of requests and draft length."""
        found: dict[str, dict[str, float]] = {}
        for size in SIZES[:_NUM_SHOWN]:
            ms: Any = np.exp(self._row(size) + self._mean[0])
            found[str(size)] = {
                str(int(length)): round(float(each), 4)
                for length, each in zip(self._length_list, ms, strict=True)
            }
        return found
