"""A step's rows on the device, beside the forward: what follows the draw."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...verify.device_settings import DeviceWalk, Settled

_LEAST_LANES = 32  # of a program: shapes with fewer rows of a sequence share its variant

_VIEWS = ["query_start", "context_lens", "appends", "tokens", "lengths", "counts"]  # of the seats


@triton.jit(
    do_not_specialize=["width", "num_seats", "num_rows", "vocab", "spare_slot"],
    do_not_specialize_on_alignment=_VIEWS,
)
def settle_kernel(
    drawn, token_ids, parents, ancestors, depths, slots,  # of the step's rows
    query_start, context_lens, seats,  # of the step's sequences
    appends,  # [1]
    tokens, lengths, counts,  # of all seats, written
    outcome, source, target,  # [num_rows], written
    last, emitted, known,  # [num_seqs], written
    width, num_seats, num_rows, vocab, spare_slot,
    NUM_WORDS: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_seqs,). A node is accepted if the nodes on its path, itself among them, are all
    what is drawn at their parents. Whatever is no node has a depth of 0."""
    seq = tl.program_id(0)
    begin = tl.load(query_start + seq).to(tl.int64)
    end = tl.load(query_start + seq + 1).to(tl.int64)
    context = tl.load(context_lens + seq)
    seat = tl.load(seats + seq).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    row = begin + lane
    inside = row < end
    token = tl.load(drawn + row, mask=inside, other=0)
    depth = tl.load(depths + row, mask=inside, other=0)
    accepted = inside & ((lane == 0) | (depth > 0))
    if NUM_WORDS:
        is_node = inside & (depth > 0)
        above = tl.load(parents + row, mask=is_node, other=0)
        guessed = tl.load(token_ids + row, mask=is_node, other=0)
        guessed = is_node & (guessed == tl.load(drawn + above, mask=is_node, other=0))
        bit = tl.full([BLOCK], 1, tl.int64) << ((lane - 1) & 63).to(tl.int64)
        for word in tl.static_range(NUM_WORDS):
            is_own = guessed & (lane > 64 * word) & (lane <= 64 * word + 64)
            passed = tl.sum(tl.where(is_own, bit, 0), axis=0)
            path = tl.load(ancestors + row * NUM_WORDS + word, mask=is_node, other=0)
            accepted = accepted & ((path & ~passed) == 0)
        moved = accepted & (depth != lane)
        slot = tl.load(slots + row, mask=moved, other=0)
        place = tl.load(slots + begin + depth, mask=moved, other=0)
        spare = tl.zeros([BLOCK], tl.int64) + spare_slot
        tl.store(source + row, tl.where(moved, slot, spare), mask=inside)
        tl.store(target + row, tl.where(moved, place, spare), mask=inside)
    tl.store(outcome + row, tl.where(accepted, token, ~token), mask=inside)

    written = accepted & (lane * 0 + seat < num_seats) & (lane * 0 + tl.load(appends) > 0)
    tl.store(tokens + seat * width + context + depth + 1, token, mask=written)
    if COUNTS:
        tl.atomic_add(counts + seat * vocab + token, 1, mask=written)
    num_written = tl.sum(written.to(tl.int32), axis=0)
    if num_written > 0:  # padding sequences share a seat, which none of them writes to
        tl.store(lengths + seat, tl.load(lengths + seat) + num_written)

    deepest = tl.max(tl.where(accepted, row, 0), axis=0)
    deepest = tl.maximum(deepest, tl.minimum(begin, num_rows - 1))
    tl.store(last + seq, deepest)
    tl.store(emitted + seq, tl.load(drawn + deepest).to(tl.int64))
    tl.store(known + seq, context + tl.load(depths + deepest) + 1)


def settle(drawn: Tensor, walk: DeviceWalk) -> Settled:
    """As `DeviceOps.settle_on_device`."""
    num_rows, num_seqs = len(drawn), len(walk.seats)
    make = partial(torch.empty, device=drawn.device)
    made = Settled(
        make(num_rows, dtype=torch.int32),
        make(num_rows, dtype=torch.int64), make(num_rows, dtype=torch.int64),
        make(num_seqs, dtype=torch.int64), make(num_seqs, dtype=torch.int64),
        make(num_seqs, dtype=torch.int32),
    )  # fmt: skip
    counts = walk.counts
    parents = walk.jumps[0] if walk.jumps else walk.seats
    settle_kernel[(num_seqs,)](
        drawn, walk.token_ids, parents, walk.ancestors, walk.depths, walk.slots,
        walk.query_start, walk.context_lens, walk.seats, walk.appends,
        walk.tokens, walk.lengths, walk.lengths if counts is None else counts,
        made.outcome, made.source, made.target, made.last, made.emitted, made.known,
        walk.tokens.shape[1], len(walk.tokens) - 1, num_rows,
        0 if counts is None else counts.shape[1], walk.spare_slot,
        walk.ancestors.shape[1] if walk.jumps else 0, counts is not None,
        max(_LEAST_LANES, triton.next_power_of_2(walk.query_len)), num_warps=1,
    )  # fmt: skip
    return made
