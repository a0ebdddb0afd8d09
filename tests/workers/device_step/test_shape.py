"""Buckets: few under any load, large enough, and only for what the device step computes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from outrider.scheduler import tree
from outrider.scheduler.types import Draft, Masks, Opening, SeatSettings, StepPlan, ints
from outrider.workers.device_step.seats import padding
from outrider.workers.device_step.shape import (
    MAX_SHAPES,
    ROWS,
    Sampler,
    SeatKinds,
    StepShape,
    all_shapes,
    sizes,
    smallest,
)
from outrider.workers.seats import gather

GREEDY, SAMPLED = SeatSettings(1), SeatSettings(1, 0.7, 5, 0.9)


def plan_of(seats, drafts=None, settings=(), context=5, chunk=1, opened=None) -> StepPlan:
    """Sequences with a context each; `settings` opens their seats."""
    num = len(seats)
    tokens = ints(np.zeros(context + chunk if opened is None else opened))
    openings = tuple(Opening(s, tokens, 1, own) for s, own in zip(seats, settings))
    drafts = drafts or [tree.EMPTY] * num
    return StepPlan(
        step=0,
        seats=ints(seats),
        context_lens=ints([context] * num),
        chunk_lens=ints([chunk] * num),
        max_nodes=ints([draft.num_nodes for draft in drafts]),
        tokens=ints([]),
        blocks=ints([]).reshape(-1, 3),
        kv_moves=ints([]).reshape(-1, 2),
        openings=openings,
        drafts=gather(drafts, np.ones(num, np.bool_)),
    )


def taken_in(kinds: SeatKinds, plan: StepPlan) -> StepShape | None:
    for opening in plan.openings:
        if opening.seat < kinds.num_seats:
            kinds.open(opening)
    return kinds.shape(plan)


def shape_of(plan: StepPlan, num_seats: int = 64) -> StepShape | None:
    return taken_in(SeatKinds(num_seats), plan)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 48, 64, 256, 1000])
def test_random_loads_have_few_shapes(max_num_seqs):
    rng, found, none = np.random.default_rng(0), set(), 0
    kinds = SeatKinds(max_num_seqs)
    for _ in range(1500):
        num_seqs = int(rng.integers(1, max_num_seqs + 1) ** rng.choice([1.0, 0.5, 0.2]))
        seats = rng.permutation(max_num_seqs)[:num_seqs].tolist()
        longest = int(rng.choice([0, 1, 5, 15, 63, 80]))
        drafts = [tree.chain(range(rng.integers(0, longest + 1)), "x") for _ in seats]
        settings = [SAMPLED if rng.random() < 0.02 else GREEDY for _ in seats]
        plan = plan_of(seats, drafts, settings)
        shape = taken_in(kinds, plan)
        if shape is None:
            none += 1
            continue
        found.add(shape)
        lens = np.array([1 + draft.num_nodes for draft in drafts])
        assert shape.num_seqs >= num_seqs
        assert shape.query_len >= lens.max()
        assert shape.sampler == max(Sampler.of(own) for own in settings)
        check_padding(shape, lens)
    assert found <= set(all_shapes(max_num_seqs))
    assert len(all_shapes(max_num_seqs)) <= MAX_SHAPES
    assert none < 1000


def check_padding(shape: StepShape, lens) -> None:
    """At most 12% from 8 rows on."""
    num_rows = int(lens.sum())
    assert shape.num_rows - num_rows <= 0.12 * shape.num_rows or num_rows < 8
    check_held(shape, lens)


def check_held(shape: StepShape, lens) -> None:
    """Every row is of a sequence, and none has more than it may."""
    num_rows = int(lens.sum())
    assert num_rows <= shape.num_rows
    needed = ints(np.pad(lens, (0, shape.num_seqs - len(lens))))
    held = needed + padding(needed, shape)
    assert held.sum() == shape.num_rows
    assert (held >= needed).all()
    assert (held <= shape.query_len).all()
    if len(lens) < shape.num_seqs and num_rows + shape.query_len > shape.num_rows:
        assert (held[: len(lens)] == lens).all()  # padding sequences take it


def test_few_rows_are_padding():
    assert all(below < above for below, above in pairwise(ROWS))
    for below, above in pairwise(ROWS):
        assert below < 8 or above - (below + 1) <= 0.12 * above


LOADS = {  # sequences, nodes of a head's drafts: the shapes of each sampler
    (1, 0): 1 + 17, (8, 0): 4 + 35, (64, 0): 18 + 35, (256, 0): 30 + 35, (1000, 0): 36 + 35,
    (1, 4): 1 + 2, (8, 4): 4 + 16, (64, 4): 18 + 2 * 22 + 6, (256, 4): 30 + 2 * 22 + 6,
    (64, 1): 18 + 22, (64, 2): 18 + 2 * 22 + 3, (15, 4): 8 + 2 * 12, (20, 4): 10 + 2 * 14 + 4,
    (64, 32): 18 + 17 + 12 + 5, (256, 60): 30 + 12 + 8 + 4, (256, 255): 30 + 3 + 2 + 3,
}  # fmt: skip


@pytest.mark.parametrize("load", LOADS)
def test_number_of_shapes(load):
    assert len(all_shapes(*load)) == 2 * len(sizes(*load)) == 2 * LOADS[load]


@pytest.mark.parametrize("num_draft_nodes", [0, 4, 32])
def test_rows_follow_the_total(num_draft_nodes):
    """Not the longest draft times the sequences: chains and trees, equal drafts and unequal ones.

    A head drafts as much for every sequence, so that its sequences are padded instead.
    """
    rng, kinds = np.random.default_rng(0), SeatKinds(256, num_draft_nodes)
    for _ in range(300):
        num_seqs = int(rng.integers(1, 65))
        most = num_draft_nodes or int(rng.integers(1, 40))
        lens = np.full(num_seqs, most) if num_draft_nodes else rng.integers(0, most + 1, num_seqs)
        trees = [Draft(ints(range(n)), ints(rng.integers(-1, 0, n))) for n in lens]
        seats = list(range(num_seqs))
        shape = taken_in(kinds, plan_of(seats, trees, [GREEDY] * num_seqs))
        if shape is None:
            assert num_seqs + lens.sum() > (512 if not num_draft_nodes else 450)
        else:
            check_padding(shape, lens + 1)


@pytest.mark.parametrize("max_num_seqs", [1, 48, 256])
@pytest.mark.parametrize("num_draft_nodes", [1, 2, 7, 60, 63])
def test_shapes_with_a_head(max_num_seqs, num_draft_nodes):
    """What a plan has room for decides, not what was drafted: the step drafts as much."""
    rng, kinds = np.random.default_rng(0), SeatKinds(max_num_seqs, num_draft_nodes)
    shapes = all_shapes(max_num_seqs, num_draft_nodes)
    assert len(shapes) <= MAX_SHAPES
    assert {shape.num_nodes for shape in shapes} >= {0, num_draft_nodes}
    for _ in range(100):
        seats = rng.permutation(max_num_seqs)[: rng.integers(1, 9)].tolist()
        plan = plan_of(seats, settings=[GREEDY] * len(seats))
        room = ints(rng.integers(0, num_draft_nodes + 1, len(seats)))
        plan = replace(plan, max_nodes=room)
        shape = taken_in(kinds, plan)
        assert shape in shapes
        assert shape.num_seqs >= len(seats)
        assert shape.num_nodes >= room.max()
        assert shape.num_rows <= shape.num_seqs * shape.query_len
        check_held(shape, room + 1)
        assert bool(shape.num_nodes) == bool(room.max())


def test_nodes_that_ranks_choose_have_rows_together():
    """However many each sequence may have; the host's drafts are those that it was told."""
    kinds, num_seqs = SeatKinds(64, 8), 32
    none = plan_of(list(range(num_seqs)), settings=[GREEDY] * num_seqs)
    assert taken_in(kinds, none) is not None
    plan = replace(none, openings=(), max_nodes=ints([8] * num_seqs), own_drafts=True)
    rows = {-1: 288, 20: 96, 64: 96, 100: 160, 1000: 288}
    for num_kept, num_rows in rows.items():
        shape = kinds.shape(replace(plan, num_kept=num_kept))
        assert shape is not None
        assert (shape.num_seqs, shape.query_len, shape.num_rows) == (32, 9, num_rows), num_kept
    drafts = gather([tree.chain(range(3), "x")] * num_seqs, np.ones(num_seqs, np.bool_))
    shape = kinds.shape(replace(plan, own_drafts=False, drafts=drafts, num_kept=96))
    assert shape is not None
    assert (shape.query_len, shape.num_rows) == (9, 160)
    shape = kinds.shape(replace(plan, own_drafts=False, num_kept=96))
    assert shape is not None
    assert (shape.query_len, shape.num_rows) == (9, 96)


@pytest.mark.parametrize("num_draft_nodes", [4, 8, 32])
def test_unequal_drafts_of_a_head_share_rows(num_draft_nodes):
    """A few whole drafts beside sequences without any, where all of them would be whole ones."""
    rng, kinds, counts = np.random.default_rng(0), SeatKinds(64, num_draft_nodes), []
    for _ in range(200):
        num_seqs = int(rng.integers(17, 65))
        room = np.where(rng.random(num_seqs) < 0.25, num_draft_nodes, 0)
        plan = plan_of(list(range(num_seqs)), settings=[GREEDY] * num_seqs)
        shape = taken_in(kinds, replace(plan, max_nodes=ints(room)))
        needed = num_seqs + int(room.sum())
        if shape is None:
            assert needed > 450
            continue
        check_held(shape, room + 1)
        counts.append((needed, shape.num_rows, num_seqs * (1 + room.max())))
    needed, held, whole = np.sum(counts, axis=0)
    assert held < 0.65 * whole
    assert len(counts) > 150


def test_the_smallest_that_fits():
    assert smallest(1, 1, 1, 64) == (1, 1, 1)
    assert smallest(3, 1, 3, 64) == (4, 1, 4)
    assert smallest(45, 1, 45, 48) == (48, 1, 48)
    assert smallest(2, 3, 5, 64) == (8, 64, 8)
    assert smallest(17, 5, 85, 64) == (64, 64, 88)
    assert smallest(17, 5, 85, 64, 4) == (19, 5, 95)
    assert smallest(64, 5, 128, 64, 4) == (64, 5, 128)
    assert smallest(64, 5, 129, 64, 4) == (64, 5, 192)
    assert smallest(64, 3, 70, 64, 4) == (64, 5, 128)
    assert smallest(12, 3, 32, 64, 4) == (12, 3, 36)  # four rows less, but twice as much drafted
    assert smallest(64, 33, 512, 64, 32) == (64, 33, 512)
    assert smallest(64, 9, 512, 64) == (64, 64, 512)
    assert smallest(64, 9, 513, 64) is None
    assert smallest(1, 65, 65, 64) is None


@pytest.mark.parametrize(
    "settings",
    [
        SeatSettings(1, repetition_penalty=1.1),
        SeatSettings(1, min_tokens=3),
        SeatSettings(1, num_logprobs=0),
        SeatSettings(1, num_prompt_logprobs=0),
        SeatSettings(1, bias_ids=ints([3]), bias_values=np.ones(1, np.float32)),
    ],
)
def test_settings_of_the_host(settings):
    assert shape_of(plan_of([0, 1], settings=[GREEDY, settings])) is None
    assert shape_of(plan_of([0, 1], settings=[GREEDY, GREEDY])) == StepShape(2, 1, 2, Sampler.PLAIN)


def with_edits(plan: StepPlan) -> StepShape | None:
    return taken_in(SeatKinds(64, has_edits=True), plan)


def biased(count: int) -> SeatSettings:
    return SeatSettings(1, bias_ids=ints(range(count)), bias_values=np.ones(count, np.float32))


@pytest.mark.parametrize(
    ("settings", "is_served"),
    [
        (SeatSettings(1, frequency_penalty=0.5), True),
        (SeatSettings(1, repetition_penalty=1.1, temperature=0.7), True),
        (SeatSettings(1, num_logprobs=20), True),
        (SeatSettings(1, num_logprobs=21), False),
        (SeatSettings(1, min_tokens=3, ends=ints(range(16))), True),
        (SeatSettings(1, min_tokens=3, ends=ints(range(17))), False),
        (biased(64), True),
        (biased(65), False),
    ],
)
def test_edits_where_seats_have_tables(settings, is_served):
    """They are sampled at any temperature, so there are no more shapes."""
    found = with_edits(plan_of([0, 1], settings=[GREEDY, settings]))
    assert found == (StepShape(2, 1, 2, Sampler.SAMPLED) if is_served else None)


def test_prompt_logprobs_until_a_token_is_emitted():
    settings = SeatSettings(1, num_prompt_logprobs=2)
    one = plan_of([0], settings=[settings])  # a prompt of one token, of six that are known
    assert with_edits(one) == StepShape(1, 1, 1, Sampler.PLAIN)
    opening = replace(one.openings[0], num_prompt=6)
    assert with_edits(replace(one, openings=(opening,))) is None
    ahead = replace(one, openings=(opening,), context_lens=ints([-1]))
    assert with_edits(ahead) == StepShape(1, 1, 1, Sampler.PLAIN)


def test_steps_of_the_host():
    both = [GREEDY, GREEDY]
    assert shape_of(plan_of([0, 1], settings=both, chunk=2)) is None
    assert shape_of(plan_of([0, 1], settings=both, opened=9)) is None  # more of the prompt is left
    window = Draft(ints([1, 2]), ints([-1, 0]), num_window=1)
    assert shape_of(plan_of([0, 1], [window, tree.EMPTY], both)) is None
    masked = plan_of([0], [Draft(ints([1]), ints([-1]), masks=Masks(ints([0]), ints([[1]])))])
    assert shape_of(masked) is None  # without tables
    assert with_edits(masked) == StepShape(2, 64, 2, Sampler.SAMPLED)
    assert shape_of(plan_of([0, 9], settings=both), num_seats=8) is None
    assert shape_of(plan_of([])) is None
