"""A mixture's experts on a CPU: routing and the chosen experts' sum, each one kernel.

Small experts lie in panels and are computed by one call (`kernels/experts.py`). Large ones, of
which a product is worth all threads, are packed one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from .kernels import FLOAT, INT, VOID, compiled
from .kernels.elementwise import Activation
from .kernels.experts import Routing, Weights, mix_rows, mixing_bytes, route_rows
from .kernels.panels import UNIT
from .products import Buffers, Kernel, kind_of, panels_of
from .protocol import Experts, Gate, Projection, Router, Scoring
from .reference import sum_in_order

_SCORINGS = tuple(Scoring)  # in the order of the kernel's numbers


@cache
def routing_kernel() -> Kernel:
    @compiled(VOID, *[INT] * 2, *[INT] * 8, FLOAT, *[INT] * 3)
    def route(
        logits, num_rows, num_experts, top, scoring, correction, num_groups, top_groups, group_top,
        normalise, scale, chosen, best, scratch,
    ):  # fmt: skip
        """`route_rows`."""
        routing = Routing(
            num_experts, top, scoring, correction, num_groups, top_groups, group_top, normalise,
            scale,
        )  # fmt: skip
        route_rows(logits, num_rows, routing, chosen, best, scratch)

    return route


@cache
def _mixing_kernel(dtype: torch.dtype) -> Kernel:
    kind = kind_of(dtype)

    @compiled(VOID, *[INT] * 13, INT, FLOAT, FLOAT, INT, INT)
    def mix(
        states, num_rows, chosen, scores, top, num_experts, hidden_size, width, gate_up,
        gate_up_bias, down, down_bias, scores_input, function, limit, alpha, out, scratch,
    ):  # fmt: skip
        """`mix_rows`."""
        weights = Weights(
            num_experts, hidden_size, width, gate_up, gate_up_bias, down, down_bias, scores_input
        )
        activation = Activation(function, np.float32(limit), np.float32(alpha))
        mix_rows(kind, activation, states, num_rows, chosen, scores, top, weights, out, scratch)

    return mix


def route(
    logits: Tensor,  # [num_tokens, num_experts], any floating dtype
    router: Router,
    own: Buffers,
) -> tuple[Tensor, Tensor]:  # chosen int64, scores float32, each [num_tokens, top]
    """`Ops.route`; of two equal experts the lower one is chosen."""
    logits = logits.float().contiguous()
    num_rows, count = logits.shape
    chosen = torch.empty(num_rows, router.top, dtype=torch.int64)
    best = torch.empty(num_rows, router.top, dtype=torch.float32)
    correction = 0 if router.correction is None else router.correction.data_ptr()
    routing_kernel()(
        logits.data_ptr(), num_rows, count, router.top, _SCORINGS.index(router.scoring),
        correction, router.num_groups, router.top_groups, router.group_top, router.normalise,
        router.scale, chosen.data_ptr(), best.data_ptr(), own.scratch_of(12 * count),
    )  # fmt: skip
    return chosen, best


class PanelMixture:
    """Experts whose weights lie in panels."""

    def __init__(self, experts: Experts, function: int, own: Buffers) -> None:
        self._kernel = _mixing_kernel(experts.down.dtype)
        self._gate = (function, experts.gate.limit, experts.gate.alpha)
        self._kept = [
            torch.stack([panels_of(weight) for weight in each])
            for each in (experts.gate_up, experts.down)
        ]
        biases = [
            None if bias is None else bias.contiguous()
            for bias in (experts.gate_up_bias, experts.down_bias)
        ]
        self._biases = biases  # held for their addresses
        shifts = [0 if bias is None else bias.data_ptr() for bias in biases]
        num_experts, hidden_size, width = experts.down.shape
        self._weights = Weights(
            num_experts, hidden_size, width, self._kept[0].data_ptr(), shifts[0],
            self._kept[1].data_ptr(), shifts[1], experts.scores_input,
        )  # fmt: skip
        self._own = own

    def __call__(
        self,
        states: Tensor,  # [num_tokens, hidden_size]
        chosen: Tensor,  # [num_tokens, top]
        scores: Tensor,  # [num_tokens, top]
    ) -> Tensor:  # [num_tokens, hidden_size]
        num_rows, top = chosen.shape
        assert states.shape == (num_rows, self._weights.hidden_size), states.shape
        states, out = states.contiguous(), torch.empty_like(states)
        scratch = mixing_bytes(num_rows, top, self._weights, states.itemsize)
        self._kernel(
            states.data_ptr(), num_rows, chosen.data_ptr(), scores.data_ptr(), top, *self._weights,
            *self._gate, out.data_ptr(), self._own.scratch_of(scratch),
        )  # fmt: skip
        return out


def fits_panels(experts: Experts) -> bool:
    """Whether rows of both products are whole units."""
    per_unit = UNIT // experts.down.itemsize
    return experts.down.shape[1] % per_unit == 0 and experts.down.shape[2] % per_unit == 0


class PackedMixture:
    """Experts packed one by one; a row's parts are added in the order in which they were chosen."""

    def __init__(
        self,
        experts: Experts,
        pack: Callable[[Tensor, Tensor | None], Projection],
        gate: Callable[[Tensor, Gate], Tensor],
    ) -> None:
        self._gate, self._unit, self._scores_input = gate, experts.gate, experts.scores_input
        self._gate_up, self._down = (
            [
                pack(weight, None if biases is None else biases[index])
                for index, weight in enumerate(weights)
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
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            score = scores[rows, place][:, None]
            read = states[rows]
            if self._scores_input:
                read = (read * score).to(states.dtype)
            inner = self._gate(self._gate_up[expert](read), self._unit)
            part = self._down[expert](inner).float()
            given[rows, place] = part if self._scores_input else part * score
        return sum_in_order(given).to(states.dtype)
