"""Steps made of nothing but tokens, to compare two forwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....scheduler import joining, tree
from ....scheduler.types import Draft, KnownTokens, SamplingRows, StepInput, ints


def sample_step(
    tokens: Sequence[int],
    context_len: int,
    table: Sequence[int],
    draft: Draft = tree.EMPTY,
    block_size: int = 1,
) -> StepInput:
    """One greedy sequence's step, of which every row's logits are computed."""
    zeros, ones = np.zeros(1, np.float32), np.ones(1, np.float32)
    none = ints([0])
    known = KnownTokens(
        step=0,
        token_ids=ints(tokens),
        query_start=ints([0, len(tokens)]),
        context_lens=ints([context_len]),
        block_tables=ints([table]),
        samples=np.ones(1, np.bool_),
        max_nodes=ints([draft.num_nodes]),
        kv_moves=ints([]).reshape(0, 2),
        sampling=SamplingRows(
            zeros, none, ones, zeros, np.zeros(1, np.int64), none, none - np.int32(1)
        ),
    )
    step = joining.join(known, joining.gather([draft], known.samples), block_size)
    return StepInput(
        **{name: getattr(step, name) for name in StepInput.__dataclass_fields__ if name != "rows"},
        rows=ints(np.arange(len(step.token_ids))),
    )
