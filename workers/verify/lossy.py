"""Lossy rules, off by default: emitted tokens do NOT follow the target's distribution.

The user selects each of them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.types import SamplingRows
from . import noise
from .process import GREEDY_BELOW, DraftRows, DrawSettings, pools
from .rules import Choice, child_table, draw_rows, first_taken, longest, match

Test = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns which nodes pass, as bool [num_nodes].

Arguments: the parents' log-probabilities [num_parents, num_candidates], the index of each node's
parent among them [num_nodes], and the nodes' own log-probabilities [num_nodes].
"""


def weigh(
    rows: DraftRows,
    logits: Tensor,  # [num_rows, vocab]
    nodes: NDArray[np.int64],  # [num_nodes], rows
    limits: DrawSettings,  # of all rows
    test: Test,
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:  # [num_rows] each
    """Returns which of `nodes` pass the test at their parent, and their log-probabilities there."""
    parents, place = np.unique(rows.parent[nodes], return_inverse=True)
    device = logits.device
    passes, log_probs = np.zeros(rows.num_rows, dtype=np.bool_), np.zeros(rows.num_rows)
    for pool in pools(logits[torch.from_numpy(parents).to(device)], limits.take(parents)):
        inside = np.isin(place, pool.rows)
        at = torch.from_numpy(np.searchsorted(pool.rows, place[inside])).to(device)
        index = torch.from_numpy(rows.tokens[nodes[inside]].astype(np.int64)).to(device)
        logs = pool.logits.log_softmax(1)
        column, known = pool.find(at, index[:, None])
        own = logs[at, column[:, 0]].masked_fill(~known[:, 0], -torch.inf)
        passes[nodes[inside]] = test(logs, at, own).cpu().numpy()
        log_probs[nodes[inside]] = own.double().cpu().numpy()
    return passes, log_probs


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Accepts tokens close to the best one during a thinking phase.

    One token starts a thinking phase and another ends it, in the prompt, in the output, or in the
    draft itself; a node is subject to the phase of its parent. In a phase, a child is accepted if
    it is among the target's `topk` most likely tokens (including ties with the last) and its
    probability is at least that of the best one minus `delta`, or if it is the target's own draw.
    The longest accepted path is taken; on a tie, the one with the highest summed log p. Outside a
    phase, and with `topk` 1 or `delta` 0, this is the coupled rule.

    Probabilities are the request's: at its temperature, after its top-k, top-p and min-p, so
    excluded tokens are never accepted; at temperature 0 they are the model's at temperature 1. The
    token after the accepted ones is the target's draw as usual, at temperature 0 its argmax.

    Source: TensorRT-LLM's relaxed acceptance (`tensorrt_llm/_torch/speculative/mtp.py`), which
    supports chains at temperature 0.
    """

    name: ClassVar[str] = "relaxed"
    topk: int = 1  # tokens that may be accepted
    delta: float = 0.0  # maximum difference from the best probability
    begin: int = 128798  # token that begins a thinking phase
    end: int = 128799  # token that ends it

    def choose(
        self, rows: DraftRows, sampling: SamplingRows, draft_probs: object, logits: Tensor
    ) -> Choice:
        drawn = draw_rows(rows, sampling, logits)
        matched = match(rows, drawn)
        judged = rows.drafted & self._phases(rows, sampling)[rows.parent]
        if self.topk == 1 or self.delta == 0 or not judged.any():
            return matched
        drawn_too = matched.taken & rows.drafted
        weighed = (judged | drawn_too) & np.isin(rows.seq, rows.seq[judged])
        limits = _sampled_settings(DrawSettings.of(sampling, rows.seq))
        nodes = np.flatnonzero(weighed)
        near, log_probs = weigh(rows, logits, nodes, limits, self._near)
        return Choice(longest(rows, drawn_too | (near & judged), log_probs), drawn)

    def _phases(self, rows: DraftRows, sampling: SamplingRows) -> NDArray[np.bool_]:  # [num_rows]
        """Returns whether the thinking phase is active after each row's token."""
        if sampling.thinking is None:
            return np.zeros(rows.num_rows, dtype=np.bool_)
        thinking = sampling.thinking[rows.seq]
        for depth in range(1, int(rows.depth.max(initial=0)) + 1):
            at = np.flatnonzero(rows.depth == depth)
            kept = thinking[rows.parent[at]] & (rows.tokens[at] != self.end)
            thinking[at] = kept | (rows.tokens[at] == self.begin)
        return thinking

    def _near(self, logs: Tensor, at: Tensor, own: Tensor) -> Tensor:
        best = logs.topk(min(self.topk, logs.shape[1]), dim=1).values[at]
        within = own.exp() >= best[:, 0].exp() - self.delta
        return (own > -torch.inf) & (own >= best[:, -1]) & within


def _sampled_settings(limits: DrawSettings) -> DrawSettings:
    """Returns `limits` with greedy rows at temperature 1 and without cuts."""
    columns = (limits.temperature, limits.top_k, limits.top_p, limits.min_p)
    plain = [
        np.where(limits.greedy, column.dtype.type(off), column)
        for column, off in zip(columns, (1, 0, 1, 0), strict=True)
    ]
    return DrawSettings(limits.seeds, *plain)


@dataclass(frozen=True, slots=True)
class Typical:
    """Accepts tokens above a bound that falls with the target's entropy.

    A child x is accepted if p(x) > min(threshold, alpha * exp(-H)), where H is the entropy of the
    target's distribution p at the parent, at the request's temperature. The longest accepted path
    is taken; on a tie, the one with the highest summed log p. At temperature 0 it is greedy
    matching, which is exact.

    Source: Cai et al. 2024, arXiv:2401.10774; Hewitt et al. 2022, arXiv:2210.15191 (threshold).
    """

    name: ClassVar[str] = "typical"
    threshold: float = 0.09  # hard bound
    alpha: float = 0.3  # factor of the entropy bound

    def choose(
        self, rows: DraftRows, sampling: SamplingRows, draft_probs: object, logits: Tensor
    ) -> Choice:
        drawn = draw_rows(rows, sampling, logits)
        greedy = sampling.temperature[rows.seq] < GREEDY_BELOW
        matched = match(rows, drawn)
        if greedy.all() or not rows.drafted.any():
            return matched
        cuts = np.zeros(rows.num_rows, np.float32)
        heat = sampling.temperature[rows.seq]
        limits = DrawSettings(rows.seeds, heat, cuts.astype(np.int32), cuts + 1, cuts)
        nodes = np.flatnonzero(rows.drafted & ~greedy)
        passes, log_probs = weigh(rows, logits, nodes, limits, self._above)
        taken = np.where(greedy, matched.taken, longest(rows, passes, log_probs))
        return Choice(taken, drawn)

    def _above(self, logs: Tensor, at: Tensor, own: Tensor) -> Tensor:
        probs = logs.exp()
        entropy = -(probs * (probs + 1e-5).log()).sum(1)
        bound = (self.alpha * torch.exp(-entropy)).clamp(max=self.threshold)
        return own.exp() > bound[at]


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Accepts drafted tokens at a given rate, whatever the target computes, for benchmarks.

    A large model with random weights agrees with no drafter, so its speed with speculation cannot
    be measured with a rule that compares tokens. Here, every drafted token is accepted with
    probability `rate` if its parent was accepted and none of its earlier siblings was. A chain of n
    nodes emits 1 + rate + rate^2 + ... + rate^n tokens per step on average. The token after the
    accepted ones is the target's own draw, as under `coupled`, so a step has the full cost of a
    verification. Every figure is labelled.

    Coins depend only on (seed, position, sibling), so a run repeats exactly at every temperature. A
    token that the request's settings or grammar exclude is never accepted.

    Its purpose is that of vLLM's `rejection_sample_method: synthetic`
    (`vllm/config/speculative.py`), whose rates are defined differently (`config/compat/vllm.yaml`).
    """

    name: ClassVar[str] = "synthetic"
    rate: float = 0.0  # of a token whose parent was accepted and no earlier sibling was

    def choose(
        self, rows: DraftRows, sampling: SamplingRows, draft_probs: object, logits: Tensor
    ) -> Choice:
        drawn = draw_rows(rows, sampling, logits)
        children = child_table(rows)
        if not children.size:
            return Choice(rows.is_root, drawn)
        siblings = torch.arange(children.shape[1])
        coins = noise.uniform(
            rows.seeds[:, None], rows.positions[:, None], noise.COINS + siblings
        ).numpy()
        hit = (children >= 0) & _allowed(rows, logits)[children] & (coins < self.rate)
        return Choice(first_taken(rows, children, hit), drawn)


def _allowed(rows: DraftRows, logits: Tensor) -> NDArray[np.bool_]:  # [num_rows]
    """Returns nodes whose token is possible at their parent; also True at roots."""
    nodes = np.flatnonzero(rows.drafted)
    device = logits.device
    parents = torch.from_numpy(rows.parent[nodes]).to(device)
    tokens = torch.from_numpy(rows.tokens[nodes].astype(np.int64)).to(device)
    allowed = np.ones(rows.num_rows, dtype=np.bool_)
    allowed[nodes] = (logits[parents, tokens] > -torch.inf).cpu().numpy()
    return allowed
