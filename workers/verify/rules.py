"""`verify`: the step's logits to its verdict, under the rule that the configuration names.

Called by the target worker's rank 0 after the forward. Every rule is one file and one class:
`choose` decides at every row, whether or not the walk reaches it; the walk, the verdict and the
log-probabilities are computed here for all rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ConfigError
from ...scheduler.types import (
    DraftProbs,
    IntArray,
    Logprobs,
    SamplingRows,
    StepInput,
    Verdict,
    starts_of,
)
from .block import BlockVerification
from .constrain import allow
from .coupled import Coupled
from .layout import Choice, Layout, layout, verdict, walk
from .logprobs import token_logprobs
from .process import edit
from .rejection import Rejection
from .relaxed import Relaxed
from .synthetic import Synthetic
from .typical import Typical


class Rule(Protocol):
    """How draft nodes are accepted. A frozen dataclass; its fields are the rule's parameters.

    `choose` gets the rows' layout, the sampling settings, the draft's sparse distributions and
    the logits with penalties and biases applied, and returns a `Choice`: which child every row
    takes, and which token is emitted if the walk ends there. `process.pools` gives the processed
    distributions, `noise.uniform` coins that depend on (seed, position, stream) only. A rule
    whose decision on a node depends on later nodes (`block`) must draw its drafts and coins from a
    stream that changes with every round; otherwise it is not exact.

    To add a rule: write its file, add its class to `RULES`, and its name and the keys of its
    parameters to `config/section.py`.
    """

    name: ClassVar[str]

    def choose(
        self,
        rows: Layout,
        sampling: SamplingRows,
        draft_probs: DraftProbs | None,  # rows of zeros for deterministic nodes
        logits: Tensor,  # [num_rows, vocab] float32, edited
    ) -> Choice: ...


RULES: Mapping[str, Callable[..., Rule]] = MappingProxyType(
    {
        rule.name: rule
        for rule in (Coupled, Rejection, BlockVerification, Typical, Relaxed, Synthetic)
    }
)


def make_rule(name: str, **parameters: float) -> Rule:
    """The rule called `name`; `parameters` are its fields.

    Raises:
        ConfigError: there is no such rule.
    """
    if name not in RULES:
        raise ConfigError(f"rule: {name!r} is not one of {', '.join(RULES)}", field="rule")
    return RULES[name](**parameters)


def verify(
    rule: Rule,
    step: StepInput,
    logits: Tensor,  # [num_rows, vocab] float32, not modified
) -> Verdict:
    """The verdict on `step` under `rule`."""
    rows = layout(step)
    assert len(logits) == rows.num_rows, (logits.shape, rows.num_rows)
    edited = allow(edit(rows, step.sampling, logits), step.masks)
    choice = rule.choose(rows, step.sampling, step.draft_probs, edited)
    passed = walk(rows, choice)
    result = verdict(step.step, rows, choice, passed)
    if step.num_window is not None:
        window, starts = _window(step.num_window, rows, edited)
        result = replace(result, window=window, window_start=starts)
    asked = step.sampling.num_logprobs[rows.seq[passed]]
    if not np.count_nonzero(asked >= 0):
        return result
    return replace(result, logprobs=_logprobs(logits, passed, result, asked >= 0, asked.max()))


def _window(
    num_window: IntArray,  # [num_seqs]
    rows: Layout,
    logits: Tensor,  # [num_rows, vocab]
) -> tuple[IntArray, IntArray]:  # [num_window nodes], [num_seqs + 1]
    """The most likely token after every window node, and the offsets of the sequences.

    Not a draw: the token may become a guess for a position whose noise must still be unused.
    """
    nodes = torch.from_numpy(np.flatnonzero(rows.window)).to(logits.device)
    sampled = np.bincount(rows.seq[rows.window], minlength=len(num_window))
    likely = logits[nodes].argmax(1).to(torch.int32).cpu().numpy()
    return likely, starts_of(sampled)


def _logprobs(
    logits: Tensor,  # [num_rows, vocab]
    passed: NDArray[np.int64],  # [num_emitted], the row that emitted each token
    result: Verdict,
    wanted: NDArray[np.bool_],  # [num_emitted]
    top: int,
) -> Logprobs:
    """Log-probabilities under the model's own distribution; zeros for tokens that need none.

    All rows get the largest requested `top`.
    """
    rows = torch.from_numpy(passed[wanted]).to(logits.device)
    part = token_logprobs(logits[rows], result.emitted[wanted], int(top))
    chosen = np.zeros(len(passed), dtype=np.float32)
    top_ids = np.zeros((len(passed), part.top.shape[1]), dtype=np.int32)
    top_values = np.zeros(top_ids.shape, dtype=np.float32)
    chosen[wanted], top_ids[wanted], top_values[wanted] = part.chosen, part.top_ids, part.top
    return Logprobs(chosen, top_ids, top_values)
