"""A mixture's experts on a CPU: routing and the chosen experts' sum, each by one kernel.

Small experts are laid out in panels and computed by one call (`kernels/panels.py`). Large ones,
whose products are worth all threads, are packed one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from .kernels import FLOAT, INT, UNIT, VOID, Kernel, compiled
from .kernels.elementwise import Activation
from .kernels.panels import FLOATS, Pairs, Weights, kind_of, mix_rows, mixing_bytes, panels_of
from .protocol import Experts, Gate, Projection, Router, Scoring
from .reference import sum_in_order

_SCORINGS = tuple(Scoring)  # in the order of the kernel's numbers
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_TOP, _SIGMOID_OF_TOP = range(4)
_FLOATS: Any = types.float32[:, ::1]
_SHIFTS: Any = types.Array(types.float32, 1, "C", readonly=True)


@cache
def routing_kernel() -> Kernel:
    """Returns the kernel, compiled with the first experts."""

    @compiled(VOID, _FLOATS, _SHIFTS, *[INT] * 5, *[FLOAT] * 2, types.int64[:, ::1], _FLOATS)
    def route(
        logits, correction, scoring, num_groups, top_groups, group_top, normalise, norm_min, scale,
        chosen, best,
    ):  # fmt: skip
        """Fills the last two arguments."""
        for row in range(len(logits)):
            scores = logits[row].astype(np.float64)
            if scoring == _SOFTMAX:
                scores = np.exp(scores - scores.max())
                scores /= scores.sum()
            elif scoring == _SIGMOID:
                scores = 1 / (1 + np.exp(-scores))
            wanted = scores + correction
            if num_groups > 1:
                grouped = wanted.reshape((num_groups, -1))
                merits = np.empty(num_groups)
                for group in range(num_groups):
                    merits[group] = np.sort(grouped[group])[-group_top:].sum()
                for group in np.argsort(-merits, kind="mergesort")[top_groups:]:
                    grouped[group] = -np.inf
            picks = np.argsort(-wanted, kind="mergesort")[: chosen.shape[1]]
            weights = scores[picks]
            if scoring == _SOFTMAX_OF_TOP:
                weights = np.exp(weights - weights.max())
                weights /= weights.sum()
            elif scoring == _SIGMOID_OF_TOP:
                weights = 1 / (1 + np.exp(-weights))
            if normalise:
                weights /= max(weights.sum() + 1e-20, norm_min)
            chosen[row] = picks
            best[row] = weights * scale

    return route


@cache
def _mixing_kernel(dtype: torch.dtype) -> Kernel:
    kind = kind_of(dtype)

    @compiled(VOID, *[INT] * 14, INT, FLOAT, FLOAT, INT, INT)
    def mix(
        states, num_rows, count, top, chosen, scores, order, hidden_size, width, gate_up,
        gate_up_bias, down, down_bias, scores_input, function, limit, alpha, out, scratch,
    ):  # fmt: skip
        """Calls `mix_rows`."""
        weights = Weights(hidden_size, width, gate_up, gate_up_bias, down, down_bias, scores_input)
        activation = Activation(function, np.float32(limit), np.float32(alpha))
        pairs = Pairs(count, top, chosen, scores, order)
        mix_rows(kind, FLOATS, activation, states, num_rows, pairs, weights, out, scratch)

    return mix


def route(
    logits: Tensor,  # [num_tokens, num_experts], any floating dtype
    router: Router,
) -> tuple[Tensor, Tensor]:  # chosen int64, scores float32, each [num_tokens, top]
    """Implements `Ops.route`; of two equal experts, the lower one is chosen."""
    num_rows, count = logits.shape
    chosen = np.empty((num_rows, router.top), dtype=np.int64)
    best = np.empty((num_rows, router.top), dtype=np.float32)
    added = np.zeros(count, np.float32) if router.correction is None else router.correction.numpy()
    routing_kernel()(
        logits.float().contiguous().numpy(), added, _SCORINGS.index(router.scoring),
        router.num_groups, router.top_groups, router.group_top, router.normalise, router.norm_min,
        router.scale, chosen, best,
    )  # fmt: skip
    return torch.from_numpy(chosen), torch.from_numpy(best)


class PanelMixture:
    """Experts whose weights are laid out in panels."""

    def __init__(self, experts: Experts, function: int, scratch_of: Callable[[int], int]) -> None:
        self._kernel = _mixing_kernel(experts.down.dtype)
        self._gate = (function, experts.gate.limit, experts.gate.alpha)
        self._kept = [
            torch.stack([panels_of(weight) for weight in each])
            for each in (experts.gate_up, experts.down)
        ]
        self._biases = (experts.gate_up_bias, experts.down_bias)  # kept alive for their addresses
        for bias in self._biases:
            assert bias is None or bias.is_contiguous(), bias.stride()
        shifts = [0 if bias is None else bias.data_ptr() for bias in self._biases]
        _, hidden_size, width = experts.down.shape
        self._weights = Weights(
            hidden_size, width, self._kept[0].data_ptr(), shifts[0], self._kept[1].data_ptr(),
            shifts[1], experts.scores_input,
        )  # fmt: skip
        self._scratch_of = scratch_of

    def __call__(
        self,
        states: Tensor,  # [num_tokens, hidden_size]
        chosen: Tensor,  # [num_tokens, top]
        scores: Tensor,  # [num_tokens, top]
    ) -> Tensor:  # [num_tokens, hidden_size]
        num_rows, top = chosen.shape
        assert states.shape == (num_rows, self._weights.hidden_size), states.shape
        assert chosen.is_contiguous(), chosen.stride()
        assert scores.is_contiguous(), scores.stride()
        states, out = states.contiguous(), torch.empty_like(states)
        numbers = chosen.numpy()
        order = np.argsort(numbers, axis=None, kind="stable")
        order = order[np.count_nonzero(numbers < 0) :]  # without experts of other ranks
        scratch = self._scratch_of(mixing_bytes(num_rows, self._weights, states.itemsize))
        self._kernel(
            states.data_ptr(), num_rows, len(order), top, chosen.data_ptr(),
            scores.data_ptr(), order.ctypes.data, *self._weights, *self._gate, out.data_ptr(),
            scratch,
        )  # fmt: skip
        return out


def fits_panels(experts: Experts) -> bool:
    """Returns True if rows of both products are whole units."""
    per_unit = UNIT // experts.down.itemsize
    return experts.down.shape[1] % per_unit == 0 and experts.down.shape[2] % per_unit == 0


class PackedMixture:
    """Experts packed one by one; a row's parts are added in the order of the choice."""

    def __init__(
        self,
        experts: Experts,
        pack: Callable[[Tensor, Tensor | None], Projection],
        gate: Callable[[Tensor, Gate], Tensor],
    ) -> None:
        self._gate, self._unit, self._scores_input = gate, experts.gate, experts.scores_input
        self._gate_up, self._down = (
            [
                pack(weights[index], None if biases is None else biases[index])
                for index in range(weights.shape[0])  # iterating would widen codes
            ]
            for weights, biases in (
                (experts.gate_up, experts.gate_up_bias),
                (experts.down, experts.down_bias),
            )
        )

    def __call__(
        self,
        states: Tensor,  # [num_tokens, hidden_size]
        chosen: Tensor,  # [num_tokens, top]
        scores: Tensor,  # [num_tokens, top]
    ) -> Tensor:  # [num_tokens, hidden_size]
        given = states.new_zeros(*chosen.shape, states.shape[1], dtype=torch.float32)
        for expert in chosen.unique().tolist():
            if expert < 0:  # another rank's expert
                continue
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            score = scores[rows, place][:, None]
            read = states[rows]
            if self._scores_input:
                read = (read * score).to(states.dtype)
            inner = self._gate(self._gate_up[expert](read), self._unit)
            part = self._down[expert](inner).float()
            given[rows, place] = part if self._scores_input else part * score
        return sum_in_order(given).to(states.dtype)
