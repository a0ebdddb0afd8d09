"""Logits edited on the host and on the device, from seats that saw the same plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from outrider.scheduler.types import JoinedDrafts, Masks, Verdict, ints, starts_of
from outrider.tests.helpers.device_step.plans import EDITS, SIZES, open_plan
from outrider.tests.helpers.device_step.rows import lay_out_by_tensors
from outrider.workers.device_step.seats import DeviceSeats
from outrider.workers.device_step.shape import MAX_QUERY_LEN
from outrider.workers.seats import Seats
from outrider.workers.verify.device_settings import MAX_TOP, DeviceEdits
from outrider.workers.verify.process import allow, edit, token_logprobs
from outrider.workers.verify.rules import rows_of

VOCAB = SIZES.vocab_size


def check_edits(ops, seed: int, num_nodes: int) -> None:
    """Equal bits, with prompts, outputs and paths that repeat tokens, over several steps."""
    rng = np.random.default_rng(seed)
    most = num_nodes if num_nodes >= MAX_QUERY_LEN else 0  # a head's: others' trees are smaller
    sizes = replace(SIZES, num_draft_nodes=most)
    device = DeviceSeats(sizes, torch.device("cpu"))
    host = Seats(SIZES.block_size, device)
    vocab = max(20, num_nodes)  # siblings differ
    num_seqs = 4 if most else 5
    plan = open_plan(rng, num_seqs, num_nodes, 0.8, vocab=vocab, edits=EDITS)
    plan = replace(plan, drafts=masked(plan, rng))
    for _ in range(2 if most else 3):  # wide steps are slow under an interpreter
        step = host.expand(plan)
        shape = device.kinds.shape(plan)
        assert shape is not None
        starts = device.stage(plan, shape)
        device.flush()
        _check(ops, rng, rows_of(step), step.sampling, device, shape, starts, step.masks)
        emitted = ints(rng.integers(0, 20, len(plan.seats)))
        starts = starts_of(np.ones(len(emitted), dtype=np.int32))
        verdict = Verdict(0, emitted, starts, ints([]), np.zeros_like(starts))
        host.append(plan, verdict)
        known = plan.context_lens + 1
        plan = replace(plan, context_lens=known, openings=(), blocks=ints([]).reshape(0, 3))


def masked(plan, rng) -> JoinedDrafts:
    """The plan's drafts, with masks of some of its rows."""
    drafts = plan.drafts
    if drafts is None:
        none = ints(np.zeros(len(plan.seats)))
        drafts = JoinedDrafts(ints([]), none)
    num_rows = int((drafts.num_nodes + 1).sum())
    rows = ints(np.flatnonzero(rng.random(num_rows) < 0.4))
    size = (len(rows), -(-VOCAB // 32) + 1)  # with a word that no token has
    bits = rng.integers(-(1 << 31), 1 << 31, size).astype(np.int32)
    return replace(drafts, masks=Masks(rows, bits) if len(rows) else None)


def _check(ops, rng, rows, sampling, device, shape, starts, masks) -> None:
    of_step = lay_out_by_tensors(device.staged(shape))
    plan = of_step.plan
    edits = DeviceEdits(
        device.edits, of_step.first, of_step.row_seats, plan.positions, of_step.lanes,
        plan.ancestors, device.step_masks(shape), plan.token_ids, shape.num_nodes,
    )  # fmt: skip
    logits = torch.from_numpy(rng.normal(size=(shape.num_rows, VOCAB), scale=3).astype(np.float32))
    logits[:, 5] = -torch.inf
    at = torch.from_numpy(starts[rows.seq] + np.arange(rows.num_rows) - rows.root)
    wanted = allow(edit(rows, sampling, logits[at]), masks)
    edited = logits.clone()
    ops.edit_on_device(edited, edits)
    assert torch.equal(edited[at], wanted)
    assert not torch.equal(wanted, logits[at])
    tokens = torch.from_numpy(rng.integers(6, VOCAB, shape.num_rows).astype(np.int32))
    values, ids = ops.logprobs_on_device(logits, tokens, edits)
    best = token_logprobs(logits[at], tokens[at].numpy(), MAX_TOP)
    for row, num_top in enumerate(sampling.num_logprobs[rows.seq].tolist()):
        if num_top >= 0:
            found = values[at[row], : 1 + num_top].numpy()
            known = np.concatenate([best.chosen[row : row + 1], best.top[row, :num_top]])
            np.testing.assert_allclose(found, known, rtol=1e-5, atol=1e-5)
            wanted_ids = [best.ranks[row], *best.top_ids[row, :num_top]]
            assert ids[at[row], : 1 + num_top].tolist() == wanted_ids
