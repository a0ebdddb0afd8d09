"""A step's rows, and what follows the draw, against torch's, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from outrider.scheduler.types import ints
from outrider.tests.helpers.device_step.plans import CPU, SIZES, open_plan
from outrider.tests.helpers.device_step.rows import (
    bits,
    draft_level_by_tensors,
    draft_slots_by_tensors,
    jumps_of,
    keep_by_tensors,
    lay_out_by_tensors,
    settle_by_tensors,
)
from outrider.workers.attention import KV_FORMATS, KVCache, KVCode, KVShape
from outrider.workers.device_step.seats import DeviceSeats
from outrider.workers.device_step.shape import MAX_QUERY_LEN
from outrider.workers.ops import DraftLevel, KeptDrafts
from outrider.workers.ops.cuda.step_rows import (
    draft_level,
    draft_slots,
    keep,
    lay_out,
    move,
    settle,
)
from outrider.workers.seats import Seats
from outrider.workers.verify.device_settings import DeviceWalk

NUM_SEATS, WIDTH, VOCAB = 6, 400, 50


def same(made, wanted, but=()):
    """Equal dataclasses of tensors and sizes; those of tensors that are not equal."""
    for field in fields(made):
        one, other = getattr(made, field.name), getattr(wanted, field.name)
        if isinstance(one, tuple):
            assert all(torch.equal(*pair) for pair in zip(one, other, strict=True)), field.name
        elif isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, field.name
            assert field.name in but or torch.equal(one, other), field.name
        elif field.name != "plan":
            assert one == other, field.name


@pytest.mark.parametrize("num_nodes", [0, 3, 12, 70, 120])
@pytest.mark.parametrize(("head", "own"), [(False, False), (True, False), (True, True)])
def test_rows(num_nodes, head, own):
    """Trees of the host, or of the seats' drafts; of one word of ancestors and of more."""
    if num_nodes >= MAX_QUERY_LEN and not head:
        return  # a host's trees are smaller
    rng = np.random.default_rng(num_nodes)
    seats = DeviceSeats(replace(SIZES, num_draft_nodes=num_nodes if head else 0), CPU)
    plan = open_plan(rng, 3, num_nodes, 0.7, vocab=max(20, num_nodes))
    Seats(SIZES.block_size, seats).apply(plan)
    shape = seats.kinds.shape(plan)
    seats.stage(plan, shape)
    seats.flush()
    staged = seats.staged(shape)
    if own and num_nodes:
        staged.own_drafts.fill_(1)
        for seat, room in zip(plan.seats.tolist(), plan.max_nodes.tolist()):
            staged.draft_counts[seat] = rng.integers(room // 2, num_nodes + 1)
            staged.drafts[0][seat] = torch.from_numpy(ints(rng.integers(0, 20, num_nodes)))
            parents = [int(rng.integers(max(-1, node - 3), node)) for node in range(num_nodes)]
            staged.drafts[1][seat] = torch.tensor(parents)
    made, wanted = lay_out(staged), lay_out_by_tensors(staged)
    same(made, wanted)
    same(made.plan, wanted.plan)
    assert int(made.depths.max()) > 1 or num_nodes < 2


def walk_of(rng, num_nodes: int, rate: float, *, appends: bool, counts: bool):
    """Random trees, and draws that equal a child's token at so many nodes; idle sequences and rows
    of padding among them."""
    seats = np.append(rng.permutation(NUM_SEATS)[:4], [NUM_SEATS, NUM_SEATS])
    sizes = np.append(rng.integers(0, num_nodes + 1, 3), [num_nodes, 0, 0])
    lens = np.minimum(sizes + rng.integers(1, 4, 6), num_nodes + 1) * [1, 1, 1, 1, 1, 0]
    starts = np.append(0, np.cumsum(lens))
    parents, token_ids = np.arange(starts[-1]), rng.integers(0, VOCAB, starts[-1])
    drawn = rng.integers(0, VOCAB, starts[-1])
    is_node = np.zeros(starts[-1], dtype=bool)
    for first, size in zip(starts, sizes):
        for node in range(size):
            row, above = first + 1 + node, rng.integers(max(0, node - 3), node + 1)
            parents[row], is_node[row] = first + above, True
        for row in range(first, first + size + 1 if size else first):  # one child is drawn
            children = np.flatnonzero(is_node & (parents == row))
            token_ids[children] = rng.permutation(VOCAB)[: len(children)]
            if len(children) and rng.random() < rate:
                drawn[row] = token_ids[rng.choice(children)]
            elif len(children):
                drawn[row] = VOCAB
    lanes = ints(np.arange(starts[-1]) - np.repeat(starts[:-1], lens))
    nodes = torch.from_numpy(is_node)
    above = torch.from_numpy(parents)
    depths, words = nodes.to(torch.int32), bits(torch.from_numpy(lanes) - 1, nodes, num_nodes or 1)
    for jump in jumps_of(above, num_nodes):
        depths = depths + depths[jump]
        words = words | words[jump]
    contexts = ints(rng.integers(0, 100, 6))
    tables = [
        torch.from_numpy(ints(rng.integers(0, 9, (NUM_SEATS + 1, width))))
        for width in (WIDTH, 1, VOCAB + 1)
    ]
    tables[0][NUM_SEATS] = 0
    walk = DeviceWalk(
        torch.from_numpy(ints(token_ids)), above, words, depths,
        torch.from_numpy(rng.permutation(1000)[: starts[-1]]), torch.from_numpy(ints(starts)),
        torch.from_numpy(contexts), torch.from_numpy(seats),
        torch.tensor([appends], dtype=torch.int32), tables[0], tables[1][:, 0],
        tables[2] if counts else None, torch.full((int(starts[-1]),), -7, dtype=torch.int32), 5000,
        num_nodes + 1,
    )  # fmt: skip
    return torch.from_numpy(ints(drawn)), walk


@pytest.mark.parametrize("num_nodes", [0, 1, 3, 12, 64, 65, 150])
@pytest.mark.parametrize(("rate", "appends", "counts"), [(0, 1, 0), (0.7, 0, 1), (1, 1, 1)])
def test_what_follows_the_draw(num_nodes, rate, appends, counts):
    """Of no, some and all draws that accept a node; trees of one word of ancestors and of more."""
    for seed in range(2):
        rng = np.random.default_rng(seed)
        drawn, walk = walk_of(rng, num_nodes, rate, appends=appends > 0, counts=counts > 0)
        names = ("tokens", "lengths", "counts", "outcome")
        tables = {name: getattr(walk, name) for name in names}
        held = {name: None if each is None else each.clone() for name, each in tables.items()}
        made, wanted = settle(drawn, walk), settle_by_tensors(drawn, replace(walk, **held))
        same(made, wanted, () if num_nodes else ("source", "target"))
        for name, each in tables.items():
            assert each is None or torch.equal(each, held[name]), name
        num_accepted = int((walk.outcome >= 0).sum()) - 5  # roots
        if rate in (0, 1):  # the fourth sequence has all nodes
            assert (num_accepted > 0) == (num_nodes > 0 and rate == 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_nodes", [1, 12, 65])
def test_accepted_nodes_move_in_every_layer(num_nodes, dtype):
    """Slots of several sizes, longer than what is copied at once; one is read before and after."""
    code = KVCode(KV_FORMATS["fp8_e4m3"])
    shapes = [KVShape(2, 66, 64), KVShape(3, 200, 0, 5), KVShape(2, 66, 64)]
    shapes.insert(0, KVShape(2, 66, 64, format=code.format))
    for seed in range(2):
        rng = np.random.default_rng(seed)
        drawn, walk = walk_of(rng, num_nodes, 0.8, appends=True, counts=False)
        settled = settle(drawn, replace(walk, spare_slot=1000))
        caches = [KVCache(shapes, 251, 4, dtype, CPU, codes=[code]) for _ in range(2)]
        for one, other in zip(*(cache._storages for cache in caches)):
            one.copy_(torch.from_numpy(rng.normal(size=one.shape) * 100))
            other.copy_(one)
        move(caches[0].places, settled, walk.query_start, walk.query_len)
        caches[1].move(settled.source, settled.target)
        for one, other in zip(*(cache._storages for cache in caches)):
            assert torch.equal(one, other)
    assert num_nodes == 1 or (settled.source != settled.target).any()


@pytest.mark.parametrize("num_nodes", [1, 5, 40])
@pytest.mark.parametrize("kind", ["chain", "tree", "sizes", "chances"])
def test_drafts_are_kept(num_nodes, kind):
    """Of fewer nodes than there are columns, for seats in any order."""
    rng, width = np.random.default_rng(num_nodes), 40
    tokens = torch.from_numpy(rng.integers(0, 1000, (3, num_nodes)))
    above = torch.from_numpy(rng.integers(-1, num_nodes, (num_nodes, 3)))
    sizes = torch.from_numpy(rng.integers(0, num_nodes + 1, 3))
    chances = torch.from_numpy(rng.random((3, num_nodes)))

    def kept():
        tables = [torch.full((NUM_SEATS + 1, columns), -7, dtype=torch.int32)
                  for columns in (1, width, width)]  # fmt: skip
        words = torch.full((3 * (1 + (3 if kind == "chances" else 2) * width),), -7).int()
        return KeptDrafts(
            tokens, None if kind in ("chain", "chances") else above.T,
            sizes if kind == "sizes" else None,
            chances.bfloat16() if kind == "chances" else None,
            torch.from_numpy(ints(rng.permutation(40)[:3])), torch.tensor([4, 0, NUM_SEATS]),
            tables[0][:, 0], (tables[1], tables[2]), words,
        )  # fmt: skip

    made = kept()
    wanted = replace(kept(), room=made.room)
    keep(made)
    keep_by_tensors(wanted)
    same(made, wanted)


@pytest.mark.parametrize(("room", "widths"), [(4, None), (100, (1, 8, 40, 40)), (20, (5, 5, 5))])
def test_levels_of_drafts(room, widths):
    """Of chains, and of trees of one word of ancestors and of two."""
    rng = np.random.default_rng(room)
    known = torch.from_numpy(ints(rng.integers(1, 1500, 3)))
    tables = torch.from_numpy(ints(rng.permutation(3 * 400).reshape(3, 400)))
    sizes = (4, 1600, 5000, room)
    slots, wanted = (
        draft_slots(tables, known, *sizes),
        draft_slots_by_tensors(tables, known, *sizes),
    )
    for draft, end in enumerate((known + room).tolist()):
        assert torch.equal(slots[draft, :end], wanted[draft, :end])
    seen, begin, base = None, 0, known.long() + 7
    for depth, width in enumerate(widths or (1, 2, 1), 1):
        above = None
        if widths:
            last = 1 if seen is None else seen.shape[1]
            above = torch.from_numpy(rng.integers(0, last, (3, width)))
            above = above if depth < 3 else above[:1].expand(3, -1)
        level = DraftLevel(slots, known, base, above, seen, begin, width, depth, room)
        made, wanted = draft_level(level), draft_level_by_tensors(level)
        same(replace(made, block_tables=wanted.block_tables), wanted, ("block_tables",))
        seen = made.ancestors.view(3, width, -1) if widths else None
        begin += width
