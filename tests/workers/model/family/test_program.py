"""A program's threads together compute what its operations do one by one, bit by bit."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.scheduler.types import Draft, ints
from outrider.workers.collective import Collective
from outrider.workers.model.target import load_model
from outrider.workers.ops import plan as plan_module
from outrider.workers.ops import program as program_module
from outrider.workers.ops.cpu import kernels_of
from outrider.workers.ops.kernels import GROUP, compiled
from outrider.workers.ops.kernels.program import NUM_VARIABLES
from outrider.workers.ops.program import Helpers, Program, gates_at_once

CPU = torch.device("cpu")
TABLES = [3, 1, 2, 5, 7, 9, 15, 0], [4, 6, 8, 11, 10, 12, 14, 13]
TEXTS = [list(map(int, np.random.default_rng(seed).integers(3, 100, 32))) for seed in (0, 1)]
TREE = Draft(ints([9, 8, 7, 6, 5]), ints([-1, 0, 0, 1, 1]))
DENSE = ["llama", "mistral", "qwen2", "qwen3", "phi3", "phi3_longrope", "granite", "gemma2",
         "gemma3_two_ropes", "olmo2", "smollm3", "tied"]  # fmt: skip
OTHERS = ["gpt_oss", "llama4", "deepseek_v3", "qwen3_next"]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def load(checkpoint):
    def load(name, **options):
        path, _ = checkpoint(name)
        single = Collective.single()
        return load_model(path, device=CPU, collective=single, forward="family", **options)

    return load


@pytest.fixture
def steps(part, build_step):
    """Two prompts, of which one is cut; chunks of both, one with a tree; trees; single tokens."""
    (one, two), (first, second) = TABLES, TEXTS
    return [
        build_step([part(first[:17], 0, one), part(second[:4], 0, two)], 4),
        build_step([part(first[17:20], 17, one, TREE), part(second[4:14], 4, two)], 4),
        build_step([part(first[20:21], 20, one), part(second[14:15], 14, two)], 4),
        build_step([part(first[21:22], 21, one, TREE), part(second[15:16], 15, two, TREE)], 4),
        build_step([part(first[22:23], 22, one)], 4),
    ]


def outcomes(model, steps):
    """Logits and captured states: all rows, those that are asked for, and no states."""
    cache = model.new_cache(24, 4)
    last = model.info.num_layers
    found = []
    for step in steps:
        every = replace(step, rows=ints(np.arange(len(step.token_ids))))
        for each, capture in ((every, (0, last)), (step, (1,)), (step, ())):
            logits, states = model.forward_capturing(each, cache, capture)
            found += [logits, *states]
    return [*found, *cache.keys, *cache.values]


def assert_equal(found, wanted):
    different = [
        index
        for index, (one, other) in enumerate(zip(found, wanted, strict=True))
        if not torch.equal(one, other)
    ]
    assert not different


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_bits_are_those_of_the_operations(load, steps, monkeypatch, name, deterministic, dtype):
    model = load(name, deterministic=deterministic, dtype=dtype)
    program = model.runner.model.program
    assert program is not None
    assert (program.unembed is not None) == deterministic, "else a small product is torch's"
    monkeypatch.setattr(plan_module, "MIN_ROWS", 1 << 20)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        found = outcomes(model, steps)
        with monkeypatch.context() as patch:
            patch.setattr(Program, "takes", lambda self, plan: False)
            assert_equal(found, outcomes(model, steps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"intermediate_size": 192, "mlp_bias": True}),
        ("gemma2", {"intermediate_size": 128}),
        ("llama", {"intermediate_size": 96}),
    ],
)
def test_gates_are_those_of_the_operations(
    checkpoint, steps, part, build_step, monkeypatch, name, settings, dtype
):
    """With their product in one phase where they are whole groups, part by part of a prompt."""
    path, _ = checkpoint(name, max_position_embeddings=2048, **settings)
    single = Collective.single()
    model = load_model(path, device=CPU, collective=single, forward="family", dtype=dtype)
    program = model.runner.model.program
    assert program is not None
    at_once = settings["intermediate_size"] % GROUP == 0
    assert [gates_at_once(each.gate_up) for each in program.layers] == [at_once] * 2
    prompt = [*map(int, np.random.default_rng(2).integers(3, 100, 1100))]
    steps = [*steps, build_step([part(prompt, 0, [*range(16, 300)])], 4)]

    def found():
        cache = model.new_cache(300, 4)
        return [model.forward(step, cache) for step in steps]

    monkeypatch.setattr(plan_module, "MIN_ROWS", 1 << 20)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        logits = found()
        with monkeypatch.context() as patch:
            patch.setattr(Program, "takes", lambda self, plan: False)
            assert_equal(logits, found())


@pytest.mark.parametrize("name", OTHERS)
def test_layers_with_other_operations_have_none(load, name):
    assert load(name).runner.model.program is None


@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_helper_that_never_comes_or_comes_late(load, steps, monkeypatch, num_threads):
    """Its owner computes what it leaves; and a job of a step that has ended touches nothing."""
    model = load("llama", deterministic=True)
    torch.set_num_threads(1)
    wanted = outcomes(model, steps)
    jobs, ended = [], threading.Event()

    def sleep(queue, cores):
        while (job := queue.get()) is not None:
            jobs.append(job)
        ended.set()

    with monkeypatch.context() as patch:
        patch.setattr(program_module, "_help", sleep)
        helpers = Helpers()
        patch.setattr(program_module.TEAM, "helpers", helpers)
        torch.set_num_threads(num_threads)
        assert_equal(outcomes(model, steps), wanted)
        while any(queue.qsize() for queue in helpers._queues):
            time.sleep(0.01)
        assert len(jobs) >= num_threads - 1
        for kernel, _, *arguments in jobs:
            kernel(*arguments)
        assert_equal(outcomes(model, steps), wanted)
    del helpers
    gc.collect()
    assert ended.wait(10), "helpers end with the one that owns them"


def test_helpers_that_are_slow_in_turns(load, steps, monkeypatch):
    """Every order of threads gives the same: each step another one is put aside for a while."""
    model = load("mistral", deterministic=True)
    torch.set_num_threads(1)
    wanted = outcomes(model, steps)
    generator = np.random.default_rng(0)
    made = program_module._compiled_for(torch.float32)

    def run(*arguments):
        time.sleep(float(generator.choice([0, 0, 1e-5, 1e-4, 1e-3])))
        made.run(*arguments)

    delayed = made._replace(run=run)
    monkeypatch.setattr(program_module, "_compiled_for", lambda dtype: delayed)
    torch.set_num_threads(3)
    for _ in range(20):
        assert_equal(outcomes(model, steps), wanted)


def test_two_models_at_once(load, steps):
    """Each calling thread has its own helpers, and each program of a thread its own memory."""
    models = [load(name, deterministic=True) for name in ("llama", "qwen3")]
    torch.set_num_threads(1)
    wanted = [outcomes(model, steps) for model in models]
    failed = []

    def run():
        torch.set_num_threads(2)
        for _ in range(10):
            for model, each in zip(models, wanted, strict=True):
                found = outcomes(model, steps)
                if not all(torch.equal(a, b) for a, b in zip(found, each, strict=True)):
                    failed.append(model)

    callers = [threading.Thread(target=run) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failed


def test_operands_are_told_from_variables(load):
    """Addresses lie far above the numbers of variables; sizes are no operands of that kind."""
    program = load("llama").runner.model.program
    phases = program._phases(program_module.Tail(), None, [None] * len(program.layers))
    addresses = phases[phases[:, 0] == program_module.PRODUCT][:, 4]
    assert (addresses > NUM_VARIABLES).all()


def test_addresses_are_those_of_each_dtype():
    """Also where both have been compiled before a program asks: names are the same."""
    kernels = [kernels_of(dtype) for dtype in (torch.bfloat16, torch.float32)]
    each = [compiled.address_of(kernel) for made in kernels for kernel in made[1:]]
    assert len(set(each)) == len(each) == 12
