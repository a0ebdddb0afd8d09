"""On a CUDA device: captured steps emit what steps planned on the host emit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from outrider.scheduler.loop import Loop, OverlapLoop

from ..helpers.device_step import lives
from ..helpers.engines import complete, engine_of, random_prompts
from ..helpers.head_files import eagle_tensors, write_eagle
from ..helpers.models import write_guessable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = random_prompts(8, 96)
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "frequency_penalty": 0.6, "repetition_penalty": 1.2, "min_tokens": 9},
    {"temperature": 0.8, "presence_penalty": 0.4, "logit_bias": {5: 3.0, 9: -100.0}},
)


@pytest.mark.parametrize("section", [None, {"decoding_type": "NGram", "max_draft_len": 7}])
def test_equals_the_host_path(tiny, section):
    wanted: list[object] = []
    with engine_of(tiny.target, section, device="cuda", device_step="off") as engine:
        for settings in SAMPLING:
            wanted.append(complete(engine, PROMPTS, at_once=8, **settings)[0])
    with engine_of(tiny.target, section, device="cuda") as engine:
        for settings, outputs in zip(SAMPLING, wanted, strict=True):
            for at_once in (1, 3, 8):
                assert complete(engine, PROMPTS, at_once=at_once, **settings)[0] == outputs


TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_total_draft_tokens": 12}


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_a_head_drafts_in_the_graphs(tmp_path, shape):
    """Captured, uncaptured on the host, and without a head: the same tokens."""
    target = write_guessable(tmp_path / "target")
    head = write_eagle(tmp_path / "head", *eagle_tensors(target, 3, draft_vocab=80))
    section = {"decoding_type": "Eagle3", "speculative_model": head, "max_draft_len": 4, **shape}
    with engine_of(target, device="cuda", device_step="off") as engine:
        wanted = [complete(engine, PROMPTS, at_once=8, **each)[0] for each in SAMPLING]
    counts = []
    for choice in ("off", "auto"):
        with engine_of(target, section, device="cuda", device_step=choice) as engine:
            for settings, outputs in zip(SAMPLING, wanted, strict=True):
                assert complete(engine, PROMPTS, at_once=1, **settings)[0] == outputs
            stats = engine.stats()
        (drafter,) = stats["drafters"].values()
        assert drafter["faults"] == 0
        counts.append(drafter["num_acc_tokens"])
        step = stats["device_step"]
        assert step["on"] == step["drafts"] == (choice == "auto")
    assert step["num_captured"] == step["num_shapes"] > 20
    assert min(counts) > 0.9 * max(counts) > 0  # a near tie may fall differently in another shape


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_a_draft_model_draws_in_graphs(tiny, placement):
    """Captured, on the host, and without a drafter: the same tokens, and nearly the same drafts."""
    section = {"decoding_type": "DraftTarget", "speculative_model": tiny.draft, "max_draft_len": 4}
    section |= {"placement": placement, "num_kv_blocks": 256}
    with engine_of(tiny.target, device="cuda", device_step="off") as engine:
        wanted = [complete(engine, PROMPTS, at_once=8, **each)[0] for each in SAMPLING]
    counts = []
    for choice in ("off", "auto"):
        with engine_of(tiny.target, section, device="cuda", device_step=choice) as engine:
            for settings, outputs in zip(SAMPLING, wanted, strict=True):
                for at_once in (1, 8):
                    assert complete(engine, PROMPTS, at_once=at_once, **settings)[0] == outputs
            stats = engine.stats()
        (drafter,) = stats["drafters"].values()
        assert drafter["faults"] == 0
        counts.append(drafter["num_acc_tokens"])
        step = stats["device_step"]["draft_model"]
        assert step["on"] == (choice == "auto")
    assert step["num_captured"] == step["num_shapes"] > 20
    assert min(counts) > 0.9 * max(counts) > 0  # a near tie may fall differently in another shape


def test_shapes_are_captured(tiny):
    """In this process, so that the worker can be looked at; every later step is a replay."""
    from outrider.workers.collective import Collective
    from outrider.workers.device_step.shape import all_shapes
    from outrider.workers.spec import ModelSpec, WorkerSpec
    from outrider.workers.worker import Worker

    model = ModelSpec(tiny.target, "auto", 16, 64, 128, 8, 256, 1 << 26, 0.5)
    spec = WorkerSpec(1, "cuda", None, 60.0, target=model)
    device = torch.device("cuda", 0)
    worker = Worker(spec, Collective.single(), device)
    worker.load()
    worker.allocate(64, 0)
    assert worker._target is not None
    assert worker._target.device_step is not None
    assert worker._target.device_step.report.num_captured == len(all_shapes(8))


def test_steps_queue_behind_one_another(tiny):
    """The device gets a step before the outcome of the last one is read: the same tokens."""
    from outrider.workers.collective import Collective
    from outrider.workers.model.target import load_model

    device = torch.device("cuda", 0)
    collective = Collective.single()
    model = load_model(Path(tiny.target), device=device, collective=collective)
    requests = lives.requests_of(random.Random(1), 96)
    drafting = lives.GuessingDrafting({}, 1)
    plain = lives.make(Loop, model, drafting, 120, on_device=False)
    wanted = lives.emitted(plain, requests, 1)
    loop = lives.make(OverlapLoop, model, drafting, 120, on_device=True)
    loop.target.service.device_step.capture()
    assert lives.emitted(loop, requests, 1) == wanted
    assert loop.target.num_behind > 20
