"""Sequences of a model whose rows are computed in any parts, to be compared bit by bit."""

from __future__ import annotations

import numpy as np
import torch

from outrider.scheduler import joining
from outrider.scheduler.types import Draft, KnownTokens, StepInput, ints
from outrider.tests.helpers.verification import sampling_rows

BLOCK, LENGTH, VOCAB = 16, 150, 101


class Texts:
    """Sequences of one cache, each in blocks of its own; steps compute any part of them."""

    def __init__(self, model, count: int) -> None:
        rng = np.random.default_rng(5)
        self.model, self.count = model, count
        self.tokens = rng.integers(0, VOCAB, (64, LENGTH))[:count]
        per_seq = -(-LENGTH // BLOCK)
        self.tables = rng.permutation(64 * per_seq)[: count * per_seq].reshape(count, per_seq)
        self.cache = model.new_cache(64 * per_seq, BLOCK)
        self.rows: dict[tuple[int, int], torch.Tensor] = {}

    def step(self, parts: list[tuple[int, int, int, int]]) -> None:
        """Computes (sequence, begin, end of known tokens, end of a chain of drafts) together."""
        known = [self.tokens[seq, begin:end] for seq, begin, end, _ in parts]
        drafts = [
            Draft(ints(self.tokens[seq, end:last]), ints(np.arange(last - end) - 1))
            for seq, _, end, last in parts
        ]
        starts = np.concatenate([[0], np.cumsum([len(each) for each in known])])
        plan = KnownTokens(
            step=0,
            token_ids=ints(np.concatenate(known)),
            query_start=ints(starts),
            context_lens=ints([begin for _, begin, _, _ in parts]),
            block_tables=ints(np.stack([self.tables[seq] for seq, *_ in parts])),
            samples=np.ones(len(parts), np.bool_),
            max_nodes=ints([draft.num_nodes for draft in drafts]),
            kv_moves=ints(np.zeros((0, 2))),
            sampling=sampling_rows(len(parts)),
        )
        step = joining.join(plan, joining.gather(drafts, plan.samples), BLOCK)
        names = StepInput.__dataclass_fields__
        every = {name: getattr(step, name) for name in names if name != "rows"}
        step = StepInput(**every, rows=ints(np.arange(len(step.token_ids))))
        with torch.inference_mode():
            logits = self.model.forward_capturing(step, self.cache, ())[0]
        place = 0
        for seq, begin, _, last in parts:
            for index in range(begin, last):
                self.rows[seq, index] = logits[place].clone()
                place += 1
        assert place == len(logits)

    def difference(self, wanted: dict[tuple[int, int], torch.Tensor]) -> list[tuple[int, int]]:
        return [key for key, row in self.rows.items() if not torch.equal(row, wanted[key])]
