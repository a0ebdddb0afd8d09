"""Steps laid out from seats equal steps laid out from whole sequences, through random lives."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from outrider.scheduler import tree
from outrider.scheduler.blocks import BlockPool
from outrider.scheduler.sequence import Row, Seating, Sequence
from outrider.scheduler.types import StepInput, StepPlan, ints
from outrider.workers.seats import Seats, gather
from outrider.workers.transport import wire

BLOCK, VOCAB = 4, 30
SETTINGS = [
    {},
    {"min_tokens": 9, "stop_token_ids": (9, 4)},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logprobs": 2},
    {"logit_bias": {3: 1.5, 7: -2.0}, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
    {"prompt_logprobs": 3},
]


class Life:
    """Sequences that come, compute in pieces, emit, are preempted and go."""

    def __init__(self, seed: int, request_of) -> None:
        self.random = random.Random(seed)
        self.request_of = request_of
        self.pool, self.seating = BlockPool(400, BLOCK), Seating()
        self.sequences: list[Sequence] = []
        self.num_opened = 0

    def change(self) -> None:
        rng = self.random
        if len(self.sequences) < 6 and rng.random() < 0.3:
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 90)))
            settings = rng.choice(SETTINGS)
            request = self.request_of(
                str(self.num_opened), prompt, sampling=settings, eos_token_ids=(1,)
            )
            self.sequences.append(Sequence(request, self.num_opened, len(prompt) + 500))
            self.num_opened += 1
        if self.sequences and rng.random() < 0.1:
            sequence = rng.choice(self.sequences)
            sequence.free(self.pool)
            self.seating.leave(sequence)
            if rng.random() < 0.5:
                self.sequences.remove(sequence)

    def rows(self) -> list[Row]:
        rng, rows = self.random, []
        for sequence in rng.sample(self.sequences, rng.randint(0, len(self.sequences))):
            chunk = rng.choice([sequence.num_uncomputed, rng.randint(1, sequence.num_uncomputed)])
            nodes = rng.randrange(6) if chunk == sequence.num_uncomputed else 0
            assert sequence.allocate(self.pool, sequence.num_computed + chunk + nodes)
            rows.append(Row(sequence, chunk, nodes))
        return rows

    def drafts(self, rows: list[Row]) -> list:
        drafts = []
        for row in rows:
            count = self.random.randint(0, row.max_nodes)
            parents = [self.random.randint(-1, node - 1) for node in range(count)]
            drafts.append(tree.Draft(ints([5] * count), ints(parents)))
        return drafts

    def emit(self, rows: list[Row]) -> None:
        for row in rows:
            sequence = row.sequence
            sequence.num_computed += row.num_chunk
            if sequence.num_uncomputed == 0:
                new = [self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 4))]
                sequence.tokens.extend(new)
                sequence.num_computed = sequence.num_tokens - 1
                sequence.trim(self.pool)


def check(step: StepInput, rows: list[Row], drafts: list) -> None:
    """Against the sequences themselves, one by one."""
    settings = step.sampling
    for seq, (row, draft) in enumerate(zip(rows, drafts)):
        sequence = row.sequence
        tokens, begin = sequence.tokens.view.tolist(), sequence.num_computed
        end = begin + row.num_chunk
        span = slice(step.query_start[seq], step.query_start[seq + 1])
        assert step.token_ids[span].tolist() == tokens[begin:end] + draft.tokens.tolist()
        index = range(begin, end + draft.num_nodes)
        slots = [sequence.slot(each, BLOCK) for each in index]
        assert step.slot_mapping[span].tolist() == slots
        assert step.context_lens[seq] == begin
        assert step.samples[seq] == (end == len(tokens))
        assert step.next_tokens[seq] == (-1 if end == len(tokens) else tokens[end])
        held = -(-(end + row.max_nodes) // BLOCK)
        assert step.block_tables[seq, :held].tolist() == sequence.blocks[:held]
        assert step.max_nodes[seq] == row.max_nodes
        params, output = sequence.request.sampling, tokens[sequence.num_prompt :]
        owed = max(0, params.min_tokens - len(output))
        assert settings.min_new_tokens[seq] == owed
        if owed:
            assert settings.ends[seq].tolist() == [1, 4, 9]
        assert settings.top_k[seq] == params.top_k
        assert settings.top_p[seq] == np.float32(params.top_p)
        assert settings.num_logprobs[seq] == (-1 if params.logprobs is None else params.logprobs)
        scores = params.prompt_logprobs if not output else None
        given = settings.num_prompt_logprobs
        assert (-1 if given is None else given[seq]) == (-1 if scores is None else scores)
        penalties = [each for each in settings.penalties if each.row == seq]
        assert len(penalties) == sequence.settings.has_penalties
        for each in penalties:
            assert each.prompt_ids.tolist() == sorted(set(tokens[: sequence.num_prompt]))
            counts = dict(zip(each.output_ids.tolist(), each.output_counts.tolist()))
            assert counts == {token: output.count(token) for token in output}
            given = (each.repetition, each.presence, each.frequency)
            assert given == (
                params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
            )  # fmt: skip
        biases = {each.row: dict(zip(each.ids, each.values)) for each in settings.biases}
        assert biases.get(seq, {}) == params.logit_bias


@pytest.mark.parametrize("seed", range(3))
def test_a_random_life(seed, request_of):
    life, seats = Life(seed, request_of), Seats(BLOCK)
    num_steps = num_kept = 0
    before = None
    for step in range(400):
        life.change()
        rows = life.rows()
        if not rows:
            continue
        drafts, plan = life.drafts(rows), life.seating.plan(step, rows)
        samples = [row.num_chunk == row.sequence.num_uncomputed for row in rows]
        plan = replace(plan, drafts=gather(drafts, np.array(samples)))
        if step % 2:
            plan = wire.decode(wire.encode(plan))
        assert isinstance(plan, StepPlan)
        laid_out = seats.expand(plan)
        assert laid_out.num_seqs == len(rows)
        check(laid_out, rows, drafts)
        num_kept += before is laid_out.sampling
        before = laid_out.sampling
        num_steps += 1
        life.emit(rows)
    assert num_steps > 200
    assert life.num_opened > 8
    assert life.seating._num_seats <= 6


def test_settings_are_kept_while_nothing_changes_them(request_of):
    pool, seating, seats = BlockPool(64, BLOCK), Seating(), Seats(BLOCK)
    sequences = [Sequence(request_of(name, (1, 2)), 0, 99) for name in "ab"]
    kept = []
    for step in range(4):
        rows = []
        for sequence in sequences:
            assert sequence.allocate(pool, sequence.num_tokens)
            rows.append(Row(sequence, sequence.num_uncomputed, 0))
        kept.append(seats.expand(seating.plan(step, rows)).sampling)
        for sequence in sequences:
            sequence.num_computed = sequence.num_tokens
            sequence.tokens.extend([3])
    assert all(each is kept[0] for each in kept)


def test_phases_travel_with_the_plan(request_of):
    pool, seating, seats = BlockPool(64, BLOCK), Seating(), Seats(BLOCK)
    sequence = Sequence(request_of("a", (1, 2)), 0, 99)
    assert sequence.allocate(pool, 2)
    plan = seating.plan(0, [Row(sequence, 2, 0)], thinking=np.array([True]))
    assert seats.expand(plan).sampling.thinking.tolist() == [True]
    assert seats.expand(replace(plan, openings=(), thinking=None)).sampling.thinking is None
