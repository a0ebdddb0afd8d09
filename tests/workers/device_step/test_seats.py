"""Seats on the device: drafts that the host path leaves there, and reads when it computes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from outrider.scheduler.types import NextDrafts, ints, starts_of
from outrider.tests.helpers.device_step.plans import SIZES, open_plan
from outrider.workers.device_step.seats import DeviceSeats
from outrider.workers.seats import Seats

WIDTH = 3


def seats_of() -> DeviceSeats:
    return DeviceSeats(replace(SIZES, num_draft_nodes=WIDTH), torch.device("cpu"))


def test_drafts_are_read_as_they_were_left():
    seats, owners = seats_of(), ints([5, 0, 2])
    made = NextDrafts(
        ints([7, 8, 9, 4]), ints([-1, -1, 0, -1]), starts_of([3, 0, 1]), ints([9, 9, 9])
    )
    seats.put_drafts(owners, made)
    seats.flush()
    found = seats.read_drafts(ints([2, 5, 0, 1]), ints([WIDTH, 2, WIDTH, WIDTH]))
    assert [draft.tokens.tolist() for draft in found] == [[4], [7, 8], [], []]
    assert [draft.parents.tolist() for draft in found] == [[-1], [-1, -1], [], []]
    seats.put_drafts(owners, None)
    seats.flush()
    assert not any(draft.num_nodes for draft in seats.read_drafts(owners, ints([WIDTH] * 3)))


def test_they_hold_what_the_ranks_seats_hold():
    device = seats_of()
    host, plan = Seats(SIZES.block_size, device), open_plan(np.random.default_rng(0), 4, 0, 0.7)
    host.apply(plan)
    known = host.known_lens(plan)
    host.apply(
        replace(
            plan, openings=(), blocks=plan.blocks[:0], context_lens=known, tokens=ints(range(4))
        )
    )
    device.flush()
    who = torch.from_numpy(plan.seats).long()
    assert device.lengths[who].tolist() == host.known_lens(plan).tolist() == (known + 1).tolist()
    for row, seat in enumerate(plan.seats.tolist()):
        assert device.tokens[seat, : known[row] + 1].tolist()[-1] == row
        blocks = [block for owner, _, block in plan.blocks.tolist() if owner == seat]
        assert device.tables[seat, : len(blocks)].tolist() == blocks
    beyond = replace(plan.openings[0], seat=SIZES.num_seats)
    host.apply(replace(plan, openings=(beyond,)))
    device.flush()
    assert device.lengths[SIZES.num_seats] == 1  # the padding's row
