"""Log-probabilities of the prompt's tokens that a step computes, for requests that ask for them.

Called by `TargetService` on every rank: the output layer is collective. Only these requests' rows
get logits beside the sampled ones, a bounded number of rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..scheduler.types import IntArray, Logprobs, StepInput, ints
from .model import PagedModel
from .verify.logprobs import token_logprobs

_MAX_LOGITS = 2**24  # numbers at a time: 64 MiB in float32
# Products take so many rows, or a multiple: oneDNN keeps some 100 KB for every number of rows that
# it ever met, for good.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of known tokens that another known token follows."""

    rows: IntArray  # [num_scored], in the flat query
    next_tokens: IntArray  # [num_scored], the token whose log-probability each row gives
    top: int  # the most rivals that a sequence needs

    @classmethod
    def of(cls, step: StepInput) -> PromptRows | None:
        """The rows that `step` has to score; None: there are none."""
        wanted = step.sampling.num_prompt_logprobs
        if wanted is None:
            return None
        assert step.next_tokens is not None, "the scheduler's steps name the following tokens"
        rows: list[IntArray] = []
        tokens: list[IntArray] = []
        for seq in np.flatnonzero(wanted >= 0).tolist():
            begin, root = int(step.query_start[seq]), int(step.root_rows[seq])
            tokens.append(step.token_ids[begin + 1 : root + 1])
            rows.append(np.arange(begin, root, dtype=np.int32))
            if not step.samples[seq]:  # the chunk's last token is not the prompt's
                rows.append(ints([root]))
                tokens.append(step.next_tokens[seq : seq + 1])
        found = ints(np.concatenate(rows))
        return cls(found, ints(np.concatenate(tokens)), int(wanted.max())) if len(found) else None

    def logprobs(
        self,
        model: PagedModel,
        states: Tensor,  # [num_tokens, hidden_size], behind the final norm
    ) -> Logprobs:
        """Their log-probabilities; collective."""
        size = max(1, _MAX_LOGITS // model.info.vocab_size // _ROWS) * _ROWS
        parts = []
        for begin in range(0, len(self.rows), size):
            tokens = self.next_tokens[begin : begin + size]
            rows = self.rows[begin : begin + size]
            padded = np.resize(rows, -(-len(rows) // _ROWS) * _ROWS)
            chosen = torch.from_numpy(padded).to(states.device, torch.int64)
            logits = model.logits(states.index_select(0, chosen))
            parts.append(token_logprobs(logits[: len(rows)], tokens, self.top))
        return Logprobs(
            np.concatenate([part.chosen for part in parts]),
            np.concatenate([part.top_ids for part in parts]),
            np.concatenate([part.top for part in parts]),
        )
