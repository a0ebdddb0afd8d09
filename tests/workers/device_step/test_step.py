"""What a CPU can prove of a step that is to be captured: no host value, one tape per shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.helpers.device_step.plans import (
    CPU,
    EDITS,
    SIZES,
    device_step,
    open_plan,
    stage,
)
from outrider.tests.workers.device_step.conftest import Dispatches, Tape, WeightsOnMeta
from outrider.tests.workers.model.conftest import checkpoint  # noqa: F401
from outrider.workers.attention import KV_FORMATS, KVCode, coded_layers
from outrider.workers.collective import Collective
from outrider.workers.device_step.shape import all_shapes
from outrider.workers.model.target import load_model

NUM_LAYERS = 2
PER_LAYER = 12
PLAIN, WITH_NODES, PER_DOUBLING = 60, 50, 8
"""Dispatches beside the layers: of every step, of one with nodes, and for every doubling of their
number. But for the output layer and the draw they are arithmetic on a few hundred integers."""


@pytest.fixture
def llama(checkpoint):  # noqa: F811
    def load(ops=None):
        path, _ = checkpoint("llama")
        single = Collective.single()
        return load_model(path, device=CPU, collective=single, ops=ops or TensorOps())

    return load


@torch.inference_mode()
def test_it_completes_without_values(llama):
    """On the meta device, where whatever reads a value raises."""
    step = device_step(llama(), torch.device("meta"))
    shapes = {(s.num_seqs, s.query_len, s.sampler): s for s in all_shapes(SIZES.num_seats)}
    with WeightsOnMeta():
        for shape in shapes.values():
            step.run(shape)
        with pytest.raises((RuntimeError, NotImplementedError)):
            step.outcome[0].item()


@pytest.mark.parametrize("num_nodes", [0, 3, 12])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@torch.inference_mode()
def test_one_tape_for_all_data_of_a_shape(llama, num_nodes, temperature):
    """Operations, shapes and addresses do not depend on data; a replay computes new data. Keys are
    codes where tokens are sampled."""
    model, rng = llama(), np.random.default_rng(num_nodes)
    if temperature:
        shapes, code = model.kv_shapes, KVCode(KV_FORMATS["fp8_e4m3"])
        model.kv_shapes, model.kv_codes = coded_layers(shapes, [code] * len(shapes))
    step = device_step(model)
    for storage in step.cache._storages:
        values = torch.from_numpy(rng.normal(size=storage.shape))
        storage.copy_(values.abs() * 20 if storage.dtype == torch.uint8 else values)
    counts = step.seats.edits.counts
    state = [step.seats.memory, step.outcome, step.logprobs, counts, *step.cache._storages]
    tapes, shapes = [], []
    for num_seqs in (3, 4):
        edits = EDITS if temperature else ({},)
        plan = open_plan(rng, num_seqs, num_nodes, temperature, edits=edits)
        shapes.append(stage(step, plan, (4, num_nodes)))
        before = [tensor.clone() for tensor in state]
        with Tape() as tape:
            step.run(shapes[-1])
        tapes.append(tape)
    assert shapes[0] == shapes[1]
    assert tapes[0].signature() == tapes[1].signature()
    eager = [tensor.clone() for tensor in state]
    for tensor, old in zip(state, before, strict=True):
        tensor.copy_(old)
    tapes[0].replay()
    for tensor, wanted in zip(state, eager, strict=True):
        assert torch.equal(tensor, wanted)
    assert not torch.equal(before[1], eager[1])


@torch.inference_mode()
def test_no_row_sees_a_node_that_pads_a_draft(llama):
    """Its slot in the block table may belong to another request."""
    step = device_step(llama())
    plan = open_plan(np.random.default_rng(1), 3, 12, 0.0)
    shape = stage(step, plan, (4, 12))
    layout = step._ops.lay_out_on_device(step.seats.staged(shape))
    words, starts = layout.plan.ancestors[:, 0], layout.plan.query_start.tolist()
    num_padded = 0
    for seq in range(shape.num_seqs):
        rows = words[starts[seq] : starts[seq + 1]]
        count = int(plan.drafts.num_nodes[seq]) if seq < len(plan.seats) else 0
        assert not rows[1 + count :].any()
        own = (rows[1 : 1 + count] >> torch.arange(count)) & 1
        assert own.all()
        num_padded += max(0, len(rows) - 1 - count)
    assert num_padded > 0


@pytest.mark.parametrize("num_nodes", [0, 3, 12])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@torch.inference_mode()
def test_dispatches(llama, num_nodes, temperature):
    """A verb and a product count as one: on a device they are a kernel or two."""
    counting = Dispatches()

    class Counted(TensorOps):
        def pack(self, weight, bias):
            return counting.as_one(super().pack(weight, bias))

    ops = Counted()
    names = ("lay_out", "draw", "gumbel_argmax", "edit", "logprobs", "settle")
    on_device = [f"{name}_on_device" for name in names]
    for verb in ("norm", "add_norm", "rope_store_attend", "gate", "rotation", *on_device):
        setattr(ops, verb, counting.as_one(getattr(ops, verb)))
    step = device_step(llama(ops))
    shape = stage(step, open_plan(np.random.default_rng(0), 4, num_nodes, temperature))
    counting.count = 0  # loading called the verbs, too
    with counting:
        step.run(shape)
    budget = PER_LAYER * NUM_LAYERS + PLAIN
    if shape.num_nodes:
        budget += WITH_NODES + PER_DOUBLING * (shape.num_nodes - 1).bit_length()
    assert counting.count <= budget, (counting.count, counting.names)
