"""Engines that give their memory back for a while: outputs, what is freed, what fails."""

from __future__ import annotations

import asyncio
import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, AsyncLLM, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.weights import DrafterChange
from outrider.errors import CheckpointError, InvalidRequestError
from outrider.scheduler.types import Request, ints
from outrider.workers.model.paged import Offloaded, storages_of

from ..helpers.eagle import section as eagle_section
from ..helpers.engines import Box, complete, engine_of, plain_outputs, random_prompts
from ..helpers.head_files import eagle_tensors, write_eagle
from ..helpers.models import write_guessable, write_models
from ..helpers.ports import wait_for

PROMPTS = random_prompts(6, 96)


def wanted(model: str) -> Any:
    return plain_outputs(model, PROMPTS, {})[0]


def held(engine: Engine) -> list[weakref.ref[Any]]:
    """Models and caches of the target's ranks."""
    workers = engine._host.target_group._workers
    found = [each for worker in workers for each in worker._models.values()]
    found += [worker._target._cache for worker in workers]
    return [weakref.ref(each) for each in found]


def submit(engine: Engine, box: Box, name: str = "late") -> None:
    engine.submit(Request(name, ints([5]), SamplingParams(max_tokens=2), seed=0), box)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["none", "colocated", "separate"])
def test_memory_is_given_back_and_taken_again(tiny, kind, size, level):
    section = None
    if kind != "none":
        section = {
            "decoding_type": "DraftTarget",
            "speculative_model": tiny.draft,
            "placement": kind,
        }
    with engine_of(tiny.target, section, tensor_parallel_size=size) as engine:
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        before = held(engine)
        apart = list(engine._host.apart().values())
        engine.sleep(level)
        gc.collect()
        assert [each() for each in before] == [None] * len(before)
        assert not any(group.alive for group in apart)
        assert engine.is_sleeping
        assert engine.stats()["sleeping"] == ["kv_cache", "weights"]
        box = Box()
        submit(engine, box)
        num_steps = engine.stats()["steps"]["num_steps"]
        engine.wake_up(("weights",))
        assert engine.stats()["sleeping"] == ["kv_cache"]
        assert engine.stats()["steps"]["num_steps"] == num_steps
        assert box.deltas.empty()
        engine.wake_up(("kv_cache",))
        assert box.last().finish_reason == "length"
        assert not engine.is_sleeping
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        assert engine.stats()["num_restarts"] == 0
        if section is not None:
            name = "draft_target"

            def drafts() -> bool:
                num = engine.stats()["drafters"][name]["num_acc_tokens"]
                assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
                return engine.stats()["drafters"][name]["num_acc_tokens"] > num

            wait_for(drafts)


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_heads_sleep_along(tmp_path, placement):
    one = write_guessable(tmp_path / "one", num_layers=3)
    folder = write_eagle(tmp_path / "head", *eagle_tensors(one, 3))
    section = {**eagle_section(folder, max_draft_len=3, placement=placement)}
    section["decoding_type"] = "Eagle3"
    with engine_of(one, section) as engine:
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up()

            def drafts() -> bool:
                num = engine.stats()["drafters"]["eagle3"]["num_acc_tokens"]
                assert complete(engine, PROMPTS)[0] == wanted(one)
                return engine.stats()["drafters"]["eagle3"]["num_acc_tokens"] > num

            wait_for(drafts)
        assert engine.stats()["drafters"]["eagle3"]["faults"] == 0  # it was asked for


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_requests_that_run(tiny, mode):
    with engine_of(tiny.target) as engine:
        engine.pause("keep")
        box, params = Box(), SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        requests = [Request(str(n), ints(p), params, seed=100 + n) for n, p in enumerate(PROMPTS)]
        engine.submit_all(requests, box)
        engine.resume()
        outputs = {request.id: () for request in requests}
        reasons: dict[str, str] = {}

        def take(count: int) -> None:
            for _ in range(count):
                delta = box.deltas.get(timeout=60)
                outputs[delta.request_id] += delta.token_ids
                if delta.finish_reason:
                    reasons[delta.request_id] = delta.finish_reason

        take(12)
        engine.sleep(1, mode)
        if mode == "keep":
            engine.wake_up()
        while len(reasons) < len(requests):
            take(1)
        engine.wake_up()
        if mode == "abort":
            assert set(reasons.values()) <= {"abort", "length"}
        else:
            assert set(reasons.values()) == {"length"}
            assert outputs == wanted(tiny.target)
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)


@pytest.mark.parametrize("level", [1, 2])
def test_other_weights_come_while_it_sleeps(tiny, level):
    draft = {"decoding_type": "DraftTarget", "speculative_model": tiny.draft}
    with engine_of(tiny.target, {**draft, "placement": "colocated"}) as engine:
        engine.sleep(level)
        with pytest.raises(CheckpointError):
            engine.update_weights(tiny.other_vocabulary)
        assert engine.update_weights(tiny.draft) == 1
        assert engine.stats()["sleeping"] == ["kv_cache"]
        assert engine._host.target_group._workers[0]._target is None
        engine.wake_up()
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
        assert engine.stats()["num_restarts"] == 0


def test_a_sleep_in_a_sleep_and_in_a_pause(tiny):
    with engine_of(tiny.target) as engine:
        engine.wake_up()  # it is
        engine.sleep(1)
        engine.sleep(2)
        engine.wake_up()
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        engine.pause()
        engine.sleep()
        engine.wake_up()
        assert engine.is_paused
        engine.resume()
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        engine.sleep()
        for act in (
            lambda: engine.change_drafters(DrafterChange({"decoding_type": "NGram"})),
            lambda: engine.add_adapter("a", "/nowhere"),
        ):
            with pytest.raises(InvalidRequestError, match="wake it up"):
                act()
        engine.wake_up()
        engine.change_drafters(DrafterChange({"decoding_type": "NGram"}))
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)


def test_ranks_that_are_lost_meanwhile(tiny):
    with engine_of(tiny.target) as engine:
        engine.sleep()
        engine._host.target_group.discard()
        engine.wake_up(("weights",))  # new ranks have all of it
        assert not engine.is_sleeping
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        assert engine.stats()["num_restarts"] == 1


def test_the_folder_is_gone(tiny, tmp_path):
    """What cannot wake up says so; it does once the folder is there again."""
    shutil.copytree(tiny.target, tmp_path / "target")
    with engine_of(str(tmp_path / "target"), max_restarts=0) as engine:
        engine.sleep(2)
        shutil.move(tmp_path / "target", tmp_path / "other")
        engine.update_weights(str(tmp_path / "other"))
        engine.wake_up()
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)


@pytest.fixture(scope="module")
def models(tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tokenizer_path, tmp_path_factory.mktemp("models"))


def test_the_python_api(models):
    options = {"executor": "local", "dtype": "float32", "num_kv_blocks": 256}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(models["target"], **options) as llm:
        ids = llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids
        llm.sleep(level=1)
        assert llm.is_sleeping()
        for level in (0, 3, "1", True):
            with pytest.raises(InvalidRequestError, match="level"):
                llm.sleep(level)
        for tags in (["all"], [], "weights"):
            with pytest.raises(InvalidRequestError, match="tags"):
                llm.wake_up(tags)
        llm.wake_up(tags=["weights"])
        llm.wake_up(tags=["kv_cache"])
        assert not llm.is_sleeping()
        assert llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids == ids

    async def run() -> tuple[bool, bool]:
        async with AsyncLLM(models["target"], **options) as llm:
            await llm.sleep(2)
            asleep = await llm.is_sleeping()
            await llm.wake_up()
            return asleep, await llm.is_sleeping()

    assert asyncio.run(run()) == (True, False)


class Holder:
    """Tensors as models hold them: in lists, closures, views and methods."""

    def __init__(self) -> None:
        self.weight = torch.arange(12.0).reshape(3, 4)
        self.view = self.weight[1]
        self.parts = [torch.ones(5), (torch.full((2, 2), 7.0),)]
        hidden = torch.full((3,), 2.0)
        self.forward = lambda: hidden * 2
        self.parameter = torch.nn.Parameter(torch.ones(4), requires_grad=False)


def test_storages_are_emptied_and_filled_again():
    """On this machine's device: the same code moves what is on a GPU."""
    holder = Holder()
    assert len(storages_of({"a": holder}, "cpu")) == 5
    assert storages_of({"a": holder}, "cuda") == []
    kept = Offloaded({"a": holder}, "cpu")
    assert kept.num_bytes == 4 * (12 + 5 + 4 + 3 + 4)
    assert storages_of({"a": holder}, "cpu") == []
    kept.restore()
    assert torch.equal(holder.weight, torch.arange(12.0).reshape(3, 4))
    assert torch.equal(holder.view, torch.arange(4.0, 8.0))
    assert torch.equal(holder.forward(), torch.full((3,), 4.0))
    assert torch.equal(holder.parts[1][0], torch.full((2, 2), 7.0))
