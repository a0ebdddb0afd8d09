"""Threads that share a step's rows out compute what one thread does, without a program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.bench.gpu.inputs import step_of
from outrider.scheduler.types import Draft, ints
from outrider.workers.collective import Collective
from outrider.workers.model.family.decoder import PartThreads
from outrider.workers.model.target import load_model
from outrider.workers.ops import plan as plan_module
from outrider.workers.ops.plan import bounds_of, plan_step
from outrider.workers.ops.program import Program

CPU = torch.device("cpu")
TABLES = [3, 1, 2, 5, 7, 9, 15, 0], [4, 6, 8, 11, 10, 12, 14, 13]
TEXTS = [list(map(int, np.random.default_rng(seed).integers(3, 100, 32))) for seed in (0, 1)]
TREE = Draft(ints([9, 8, 7, 6, 5]), ints([-1, 0, 0, 1, 1]))
MODELS = ["llama", "mistral", "gemma2", "gpt_oss", "llama4", "glm4_moe", "phi3_longrope"]


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    monkeypatch.setattr(plan_module, "MIN_ROWS", 2)
    monkeypatch.setattr(Program, "takes", lambda self, plan: False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def counted(monkeypatch):
    """The number of parts of every step that was shared out."""
    counts = []
    forward = PartThreads.forward

    def count(self, context, rows, capture, bounds):
        counts.append(len(bounds) - 1)
        return forward(self, context, rows, capture, bounds)

    monkeypatch.setattr(PartThreads, "forward", count)
    return counts


def load(checkpoint, name, **options):
    path, _ = checkpoint(name)
    single = Collective.single()
    return load_model(path, device=CPU, collective=single, forward="family", **options)


def steps(part, build_step):
    """Two prompts, of which one is cut; chunks of both, one with a tree; single tokens."""
    (one, two), (first, second) = TABLES, TEXTS
    yield build_step([part(first[:17], 0, one), part(second[:4], 0, two)], 4)
    yield build_step([part(first[17:20], 17, one, TREE), part(second[4:14], 4, two)], 4)
    yield build_step([part(first[20:21], 20, one), part(second[14:15], 14, two)], 4)
    yield build_step([part(first[21:22], 21, one, TREE), part(second[15:16], 15, two, TREE)], 4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_all_rows_and_states_equal(checkpoint, name, deterministic, part, build_step, counted):
    model = load(checkpoint, name, deterministic=deterministic)
    found = {}
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        cache = model.new_cache(24, 4)
        outcomes = []
        for step in steps(part, build_step):
            every = replace(step, rows=ints(np.arange(len(step.token_ids))))
            outcomes += [
                model.forward_capturing(every, cache, (0, model.info.num_layers)),
                model.forward_capturing(step, cache, ()),
            ]
        found[num_threads] = outcomes
    assert counted == [3] * 6, "single tokens are not shared out"
    for (logits, states), (wanted, wanted_states) in zip(found[3], found[1], strict=True):
        if deterministic:
            assert torch.equal(logits, wanted)
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states, wanted_states, rtol=1e-4, atol=1e-4)


def test_a_tree_is_not_cut(checkpoint, part, build_step):
    model = load(checkpoint, "llama")
    step = build_step([part(TEXTS[0][:2], 0, TABLES[0], TREE)], 4)
    plan = model.runner.model.ops.plan(step, model.new_cache(24, 4))
    assert bounds_of(plan, 2, 1000) == [0, 2, 7]
    assert bounds_of(plan, 3, 1000) == [0, 2, 7]


def test_parts_take_equally_long(checkpoint, part, build_step):
    """Later rows have more keys, so that there are fewer of them."""
    model = load(checkpoint, "llama")
    step = build_step([part(TEXTS[0], 0, TABLES[0])], 4)
    plan = model.runner.model.ops.plan(step, model.new_cache(24, 4))
    assert bounds_of(plan, 2, 10**6) == [0, 16, 32]
    assert 16 < bounds_of(plan, 2, 8)[1] < 24


def test_a_row_that_costs_more_than_a_part():
    """The last of 24 sequences has nearly all keys."""
    step, _ = step_of(np.random.default_rng(0), [(0, 1)] * 23 + [(4000, 1)], [[]] * 24, 4)
    assert bounds_of(plan_step(step, 4, CPU), 3, 8) == [0, 23, 24]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_part_that_fails_releases_the_others(checkpoint, part, build_step, monkeypatch, failing):
    model = load(checkpoint, "llama")
    step = build_step([part(TEXTS[0], 0, TABLES[0])], 4)
    cache = model.new_cache(24, 4)
    torch.set_num_threads(3)
    wanted = model.forward(step, cache)
    ops = model.runner.model.ops
    bounds = bounds_of(ops.plan(step, cache), 3, model.info.hidden_size)
    attend = type(ops).rope_store_attend

    def fail(self, joined, rotation, temperature, plan, cache, layer, spec):
        if layer == 1 and plan.row_index[0] == bounds[failing]:
            raise MemoryError("no room")
        return attend(self, joined, rotation, temperature, plan, cache, layer, spec)

    with monkeypatch.context() as patch:
        patch.setattr(type(ops), "rope_store_attend", fail)
        with pytest.raises(MemoryError, match="no room"):
            model.forward(step, cache)
    assert torch.get_num_threads() == 3
    assert torch.equal(model.forward(step, cache), wanted)
