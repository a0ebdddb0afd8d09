"""Device steps over a model, and random plans for them."""

from __future__ import annotations

import numpy as np
import torch

from outrider.scheduler.types import Draft, Opening, SeatSettings, StepPlan, ints
from outrider.workers.attention import KVCache
from outrider.workers.device_step.seats import DeviceSeats, SeatSizes
from outrider.workers.device_step.service import DeviceStep
from outrider.workers.device_step.shape import StepShape, smallest
from outrider.workers.seats import Seats, gather

CPU = torch.device("cpu")
SIZES = SeatSizes(num_seats=8, max_model_len=60, num_blocks=40, block_size=4, vocab_size=101)


def device_step(model, device=CPU) -> DeviceStep:
    shapes, dtype = model.kv_shapes, model.info.dtype
    num_blocks, codes = SIZES.num_blocks + 1, model.kv_codes
    cache = KVCache(shapes, num_blocks, SIZES.block_size, dtype, device, codes=codes)
    return DeviceStep(model.runner.model, cache, DeviceSeats(SIZES, device))


def open_plan(
    rng: np.random.Generator,
    num_seqs: int,
    num_nodes: int,
    temperature: float,
    vocab: int = 101,
    edits: tuple[dict, ...] = ({},),  # of the sequences in turn: more of their settings
):
    """Requests in shuffled seats and blocks, of which all but one token are in the cache."""
    seats = ints(rng.permutation(SIZES.num_seats)[:num_seqs])
    num_blocks = SIZES.num_blocks * (1 + num_nodes // 16)  # more than `SIZES` for long drafts
    blocks = rng.permutation(num_blocks).reshape(SIZES.num_seats, -1)
    settings = [
        SeatSettings(
            int(rng.integers(1 << 62)),
            temperature,
            int(rng.integers(9)),
            0.9,
            0.02,
            **edits[index % len(edits)],
        )
        for index in range(num_seqs)
    ]
    lens = rng.integers(2, 9, num_seqs)
    openings = tuple(
        Opening(int(seat), ints(rng.integers(0, vocab, length)), 1, own)
        for seat, length, own in zip(seats, lens, settings, strict=True)
    )
    drafts = []
    for _ in seats:
        count = int(rng.integers(num_nodes // 2 + 1, num_nodes + 1)) if num_nodes else 0
        parents = ints([int(rng.integers(-1, node)) for node in range(count)])
        drafts.append(Draft(ints(rng.permutation(vocab)[:count]), parents))
    counts = ints([draft.num_nodes for draft in drafts])
    return StepPlan(
        step=0,
        seats=seats,
        context_lens=ints(lens - 1),
        chunk_lens=ints(np.ones(num_seqs)),
        max_nodes=counts,
        tokens=ints([]),
        blocks=ints([(s, i, b) for s in seats for i, b in enumerate(blocks[s])]),
        kv_moves=ints([]).reshape(0, 2),
        openings=openings,
        drafts=gather(drafts, np.ones(num_seqs, np.bool_)),
        appends=True,
    )


EDITS = (
    {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.3},
    {"bias_ids": ints([3, 50, 999]), "bias_values": np.array([4.0, -100.0, 1.0], np.float32)},
    {},
    {"min_tokens": 6, "ends": ints([7, 8]), "presence_penalty": -0.4, "num_logprobs": 3},
    {"num_logprobs": 0},
)
"""Settings that edit logits or report them; one id is beyond the vocabulary."""


def stage(step: DeviceStep, plan: StepPlan, room: tuple[int, int] | None = None):
    """Stages a step in its own shape, or in that of so many sequences with so many nodes each."""
    Seats(SIZES.block_size, step.seats).apply(plan)
    shape = step.seats.kinds.shape(plan)
    assert shape is not None
    if room is not None:
        sizes, (num_seqs, num_nodes) = step.seats.sizes, room
        wanted = num_seqs, 1 + num_nodes, num_seqs * (1 + num_nodes)
        size = smallest(*wanted, sizes.num_seats, sizes.num_draft_nodes)
        assert size is not None
        shape = StepShape(*size, shape.sampler)
    step.seats.stage(plan, shape)
    step.seats.flush()
    return shape
