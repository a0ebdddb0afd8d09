"""The draft worker draws with the noise that the step asks for: by position, or by round too."""

from __future__ import annotations

import numpy as np
import torch

from outrider.drafters.protocol import DraftStep
from outrider.scheduler.blocks import BlockPool
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.sequence import PagedTokens, Row, Seating
from outrider.scheduler.types import Request, SeatSettings, StepPlan, ints
from outrider.tests.helpers.verification import sampling_rows
from outrider.workers.collective import Collective
from outrider.workers.draft import DraftService
from outrider.workers.verify import DrawSettings, draw_siblings

VOCAB, DEPTH = 20, 3
LOGITS = torch.linspace(-1, 1, VOCAB)


class Constant:
    """A model that always says the same."""

    def new_cache(self, num_blocks: int, block_size: int) -> None:
        return None

    def forward(self, step, cache) -> torch.Tensor:
        return LOGITS.expand(len(step.rows), VOCAB)


class Fading:
    """Each further token of a chain is less certain; the second sequence is at once."""

    def __init__(self) -> None:
        self.level = 0

    def new_cache(self, num_blocks: int, block_size: int) -> None:
        return None

    def forward(self, step, cache) -> torch.Tensor:
        logits = torch.zeros(len(step.rows), VOCAB)
        logits[:, 5] = 8.0 - 3 * self.level
        logits[1:, 5] -= 6.0
        self.level += 1
        return logits


def planned(lengths: list[int], temperature: float) -> StepPlan:
    """The last of so many tokens of each sequence is to be computed, and `DEPTH` to be drawn."""
    pool, rows = BlockPool(1000, 16), []
    for length in lengths:
        request = Request("a", ints([0] * length), SamplingParams(temperature=temperature), seed=3)
        sequence = PagedTokens(request, SeatSettings.for_drafting(request))
        assert sequence.allocate(pool, length + DEPTH)
        sequence.num_computed = length - 1
        rows.append(Row(sequence, 1, DEPTH))
    return Seating().plan(0, rows)


def test_a_chain_ends_where_the_model_is_unsure():
    step = DraftStep(planned([4, 6], temperature=0.0), probs_top=0, p_min=0.5)
    drafted = DraftService(Fading(), 64, 16, Collective.threads(1, timeout_s=10)[0]).draft(step)
    assert drafted.start.tolist() == [0, 2, 2]
    assert drafted.tokens.tolist() == [5, 5]


def drawn(lengths: list[int], *, salted: bool) -> np.ndarray:  # [num_seqs, depth]
    step = DraftStep(planned(lengths, temperature=1.0), probs_top=VOCAB, salted=salted)
    service = DraftService(Constant(), 64, 16, Collective.threads(1, timeout_s=10)[0])
    return service.draft(step).tokens.reshape(-1, DEPTH)


def test_a_salted_round_shares_no_noise_with_another():
    lengths = list(range(1, 41))
    by_position, by_round = (drawn(lengths, salted=salted) for salted in (False, True))
    assert by_position[:-1, 1].tolist() == by_position[1:, 0].tolist()  # a position is a draw
    agree = np.mean(by_round[:-1, 1] == by_round[1:, 0])
    assert agree < 0.3  # by chance alone
    sampling = sampling_rows(DEPTH, temperature=1.0, seeds=3)
    rounds = ints(np.full(DEPTH, 9))
    tokens, _, _ = draw_siblings(
        LOGITS.expand(DEPTH, VOCAB), rounds + ints(range(DEPTH)),
        DrawSettings.of(sampling, ints(range(DEPTH))), VOCAB, rounds=rounds,
    )  # fmt: skip
    assert (
        by_round[8].tolist() == tokens[:, 0].tolist()
    )  # nine tokens known: the round that begins at 9
