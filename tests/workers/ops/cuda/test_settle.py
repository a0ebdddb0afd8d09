"""What follows the draw against torch's operations, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from outrider.scheduler.types import ints
from outrider.tests.helpers.device_step.ops import settle_by_tensors
from outrider.workers.device_step.layout import bits, jumps_of
from outrider.workers.ops.cuda.step_rows import settle
from outrider.workers.verify.device_settings import DeviceWalk

NUM_SEATS, WIDTH, VOCAB = 6, 400, 50


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
    jumps = jumps_of(torch.from_numpy(parents), num_nodes) if num_nodes else ()
    depths, words = nodes.to(torch.int32), bits(torch.from_numpy(lanes) - 1, nodes, num_nodes or 1)
    for above in jumps:
        depths = depths + depths[above]
        words = words | words[above]
    contexts = ints(rng.integers(0, 100, 6))
    tables = [
        torch.from_numpy(ints(rng.integers(0, 9, (NUM_SEATS + 1, width))))
        for width in (WIDTH, 1, VOCAB + 1)
    ]
    tables[0][NUM_SEATS] = 0
    walk = DeviceWalk(
        torch.from_numpy(ints(token_ids)), jumps, words, depths,
        torch.from_numpy(rng.permutation(1000)[: starts[-1]]), torch.from_numpy(ints(starts)),
        torch.from_numpy(contexts), torch.from_numpy(seats),
        torch.tensor([appends], dtype=torch.int32), tables[0], tables[1][:, 0],
        tables[2] if counts else None, 5000, num_nodes + 1,
    )  # fmt: skip
    return torch.from_numpy(ints(drawn)), walk


@pytest.mark.parametrize("num_nodes", [0, 1, 3, 12, 64, 65, 150])
@pytest.mark.parametrize(("rate", "appends", "counts"), [(0, 1, 0), (0.7, 0, 1), (1, 1, 1)])
def test_equal_bits(num_nodes, rate, appends, counts):
    """Of no, some and all draws that accept a node; trees of one word of ancestors and of more."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        drawn, walk = walk_of(rng, num_nodes, rate, appends=appends > 0, counts=counts > 0)
        tables = {name: getattr(walk, name) for name in ("tokens", "lengths", "counts")}
        held = {name: None if each is None else each.clone() for name, each in tables.items()}
        made, wanted = settle(drawn, walk), settle_by_tensors(drawn, replace(walk, **held))
        for field in fields(made):
            if num_nodes or field.name not in ("source", "target"):
                assert torch.equal(getattr(made, field.name), getattr(wanted, field.name)), field
        for name, each in tables.items():
            assert each is None or torch.equal(each, held[name]), name
        num_accepted = int((made.outcome >= 0).sum()) - 5  # roots
        if rate in (0, 1):  # the fourth sequence has all nodes
            assert (num_accepted > 0) == (num_nodes > 0 and rate == 1)
