"""Two ranks: each computes the whole device step, and all outcomes and seats are equal."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from outrider.scheduler.loop import Loop, OverlapLoop
from outrider.tests.helpers.device_step import lives
from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.helpers.device_step.parallel import RANKS, ParallelTarget
from outrider.tests.helpers.device_step.plans import (
    EDITS,
    SIZES,
    device_step,
    open_plan,
    stage,
)
from outrider.tests.workers.device_step.conftest import (
    RecordedGraphs,
    Tape,
    TapedCollective,
    WeightsOnMeta,
)
from outrider.tests.workers.model.conftest import checkpoint  # noqa: F401
from outrider.workers.collective import Collective
from outrider.workers.device_step.service import obstacle
from outrider.workers.device_step.shape import all_shapes
from outrider.workers.model.target import load_model


@pytest.fixture
def load(checkpoint, run_ranks):  # noqa: F811
    """`load(name)`: the models of both ranks."""

    def make(name="llama"):
        path, _ = checkpoint(name)

        def on(group):
            collective = TapedCollective(group)
            return load_model(path, device=lives.CPU, collective=collective, ops=TensorOps())

        return run_ranks(RANKS, on)

    return make


def loop_of(kind, models, drafting, num_blocks, *, on_device=True):
    loop = lives.make(kind, models[0], drafting, num_blocks, on_device=False)
    loop.target = ParallelTarget(models, num_blocks, on_device=on_device)
    return loop


def test_served(load):
    assert [obstacle(model, "coupled") for model in load()] == ["", ""]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_random_lives(load, name):
    """As in `test_equality.py`; after every step the ranks have equal outcomes and seats."""
    models, rng = load(name), random.Random(1)
    requests = lives.requests_of(rng)[:8]
    host = loop_of(Loop, models, lives.GuessingDrafting({}, 1), 120, on_device=False)
    wanted = lives.emitted(host, requests, 1)
    for kind, truth in ((Loop, wanted), (OverlapLoop, {})):
        loop = loop_of(kind, models, lives.GuessingDrafting(truth, 1), 30)
        assert lives.emitted(loop, requests, 1) == wanted
        assert loop.target.num_equal > 20
        loop.scheduler.check()


@pytest.mark.slow
def test_random_lives_on_replays(load):
    """Every step of every shape is a replay, on both ranks, with the collectives in it."""
    models, requests = load(), lives.requests_of(random.Random(5))
    host = loop_of(Loop, models, lives.GuessingDrafting({}, 0), 120, on_device=False)
    wanted = lives.emitted(host, requests, 0)
    loop = loop_of(Loop, models, lives.GuessingDrafting(wanted, 0), 120)
    apis = [RecordedGraphs(model.collective) for model in models]
    services = [service.device_step for service in loop.target.services]
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda service, api: service.capture(api), services, apis))
    for service in services:  # recordings leave values that no collective has made equal
        service._step.outcome.zero_()
        service._step.logprobs.zero_()
    assert lives.emitted(loop, requests, 0) == wanted
    for service, api in zip(services, apis, strict=True):
        assert service.report.num_captured == len(all_shapes(lives.SEATS))
        assert api.num_replays == service.num_steps > 20


def test_it_completes_without_values(load):
    """On the meta device, where whatever reads a value raises."""
    step = device_step(load()[1], torch.device("meta"))
    with torch.inference_mode(), WeightsOnMeta():
        for shape in all_shapes(SIZES.num_seats)[::6]:
            step.run(shape)


@pytest.mark.parametrize(("num_nodes", "temperature"), [(0, 0.0), (12, 0.8)])
def test_one_tape_for_all_data_of_a_shape(load, run_ranks, num_nodes, temperature):
    """Both ranks' operations, collectives included, depend on neither data nor rank."""
    models = load()

    @torch.inference_mode()
    def tapes(group: Collective):
        step, rng = device_step(models[group.rank]), np.random.default_rng(num_nodes)
        found = []
        for num_seqs in (3, 4):
            edits = EDITS if temperature else ({},)
            plan = open_plan(rng, num_seqs, num_nodes, temperature, edits=edits)
            shape = stage(step, plan, (4, num_nodes))
            with Tape() as tape:
                step.run(shape)
            found.append(tape.signature())
        assert found[0] == found[1]
        return [entry[0] for entry in found[0]]

    first, second = run_ranks(RANKS, tapes)
    layers = models[0].info.num_layers
    assert first.count("all_reduce") == 2 * layers + 1  # of the embedding, too
    assert first.count("all_gather") == 1  # of what was drawn
    assert first.count("all_to_all") == (temperature > 0)  # of the logits
    assert first == second
