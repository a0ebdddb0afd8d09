"""Sequences of a model whose rows are computed in any parts, to be compared bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from outrider.scheduler.types import Draft, ints
from outrider.tests.helpers.verification import sampling_rows
from outrider.workers import seats

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
        samples = np.ones(len(parts), np.bool_)
        step = seats.lay_out(
            token_ids=ints(np.concatenate(known)),
            query_start=ints(starts),
            context_lens=ints([begin for _, begin, _, _ in parts]),
            block_tables=ints(np.stack([self.tables[seq] for seq, *_ in parts])),
            samples=samples,
            max_nodes=ints([draft.num_nodes for draft in drafts]),
            sampling=sampling_rows(len(parts)),
            drafts=seats.gather(drafts, samples),
            block_size=BLOCK,
        )
        step = replace(step, rows=ints(np.arange(len(step.token_ids))))
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
