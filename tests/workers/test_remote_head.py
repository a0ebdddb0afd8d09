"""Heads on workers of their own: the drafts of a colocated head, and no harm from losing them."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.config import EngineConfig, HeadConfig, MedusaConfig, parse
from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.helpers.heads.remote import (
    LEAVING,
    SHAPES,
    assert_same_drafts,
    plain,
    runner,
    separate,
    write_shapes,
)
from outrider.tests.helpers.models import write_guessable
from outrider.workers import worker
from outrider.workers.device_step.service import DeviceStepService
from outrider.workers.group import LocalGroup
from outrider.workers.model.target import load_ends

from ..helpers.engines import engine_of


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By shape: the target and the head's section."""
    folder = tmp_path_factory.mktemp("heads")
    return write_shapes(write_guessable(folder / "target"), folder)


@pytest.fixture
def run(monkeypatch):
    return runner(monkeypatch)


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_are_those_of_a_colocated_head(made, run, monkeypatch, shape):
    """Greedy, eight at once: chunked prefill, preemption, prefix hits; over every transport.

    The target's ranks append, and move what was accepted, as they do over Ray.
    """
    target, section = made[shape]
    near = run(target, section)
    monkeypatch.setattr(LocalGroup, "is_concurrent", True)
    far = run(target, separate(section, feature_transport=LEAVING.get(shape, "auto")))
    assert near.outputs == far.outputs == plain(target)
    assert_same_drafts(near, far, section["max_draft_len"] if shape == "redrafter" else 0)
    assert far.drafter["faults"] == 0
    assert far.drafter["num_acc_tokens"] > 0
    own_layers = shape.startswith(("eagle", "mtp", "dspark"))  # "dflash" has windows
    for seen, placement in ((near, "colocated"), (far, "separate")):
        (head,) = seen.stats["heads"]
        assert head["placement"] == placement
        assert head["layers"] == ("operations" if own_layers else "modules")
        assert bool(head["layers_reason"]) != own_layers
    assert far.stats["requests"]["num_hit_tokens"] > 0
    assert far.stats["requests"]["num_preemptions"] > 0
    # A process that exits while a thread takes a group down may crash.
    assert "outrider-features" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("shape", "transport", "at_once"),
    [("eagle3-chain", "socket", 8), ("eagle3-dynamic", "distributed", 1)],
)
def test_a_sharded_target_feeds_a_head_in_another_process(made, run, shape, transport, at_once):
    """As between processes, at tensor-parallel size 2; sampled, one at a time or eight."""
    target, section = made[shape]
    sampling = {"temperature": 0.8, "top_p": 0.9}
    near = run(target, section, sampling=sampling, at_once=at_once)
    far = run(
        target,
        separate(section, feature_transport=transport),
        sampling=sampling,
        at_once=at_once,
        tensor_parallel_size=2,
    )
    assert near.outputs == far.outputs
    assert near.outputs.items() <= plain(target, **sampling).items()
    assert_same_drafts(near, far)
    assert far.drafter["faults"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["eagle3-dynamic", "mtp"])
def test_a_target_that_computes_steps_on_the_device(made, run, monkeypatch, shape):
    """The device step serves beside separate heads; chunks of prompts take the host path."""
    target, section = made[shape]
    near, steps = run(target, section), []
    load, post = worker.load_model, DeviceStepService.post

    def counted(self, plan, shape):
        steps.append(plan.step)
        return post(self, plan, shape)

    monkeypatch.setattr(worker, "load_model", partial(load, ops=TensorOps()))
    monkeypatch.setattr(worker.Worker, "_target_obstacle", lambda self: "")
    monkeypatch.setattr(DeviceStepService, "post", counted)
    far = run(target, separate(section))
    assert far.stats["device_step"]["on"]
    assert near.outputs == far.outputs == plain(target)
    assert_same_drafts(near, far)
    assert far.drafter["faults"] == 0
    assert far.drafter["num_acc_tokens"] > 0
    assert len(steps) > 20


def test_several_heads_of_one_target(made, run):
    six, medusa = made["medusa-chain"]
    members = [medusa, separate(made["eagle3-chain"][1]), separate(made["eagle1-chain"][1])]
    far = run(six, {"decoding_type": "Compose", "mode": "merge", "members": members})
    assert far.outputs == plain(six)
    for stats in far.stats["drafters"].values():
        assert stats["faults"] == 0
        assert stats["num_acc_tokens"] > 0
    with (
        pytest.raises(ConfigError, match="placement: separate"),
        engine_of(six, {"decoding_type": "Compose", "members": [medusa, made["eagle1-chain"][1]]}),
    ):
        pass


def test_ends_are_the_targets(made):
    six, _ = made["medusa-chain"]
    reference = LlamaForCausalLM.from_pretrained(six, dtype=torch.float32)
    info, embedding, output = load_ends(Path(six), torch.float32, torch.device("cpu"))
    assert info.num_layers == 6
    ids, states = torch.tensor([0, 50, 95]), torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(embedding(ids), reference.model.embed_tokens(ids))
        assert torch.allclose(output(states), reference.lm_head(states), atol=1e-5)


def test_what_is_wrong_is_named(made, tmp_path):
    six, _ = made["medusa-chain"]
    fields = {"decoding_type": "Medusa", "speculative_model": "h", "placement": "colocated"}
    for key, value in {"draft_timeout_s": 2.0, "feature_transport": "socket"}.items():
        with pytest.raises(ConfigError, match=f"{key} belongs to placement 'separate'"):
            parse(MedusaConfig, {**fields, key: value})
    config = parse(MedusaConfig, {**fields, "placement": "separate", "draft_timeout_s": 2.0})
    assert isinstance(config, HeadConfig)
    vllm = {"method": "eagle3", "model": "h", "placement": "separate"}
    vllm["draft_tensor_parallel_size"] = 1
    loaded = EngineConfig.load({"model": "m", "speculative_config": vllm})
    assert loaded.speculative_config.placement == "separate"
    wrong = {"placement": "elsewhere", "draft_timeout_s": 0, "draft_tensor_parallel_size": 2}
    for key, value in {**wrong, "feature_transport": "nccl"}.items():
        with pytest.raises(ConfigError) as refused:
            EngineConfig.load({"model": "m", "speculative_config": {**vllm, key: value}})
        assert refused.value.field == f"speculative_config.{key}"
    for name, message in {"none": "is not a folder", "": "medusa_lm_head"}.items():
        folder = str(tmp_path / name)
        section = {**separate(made["medusa-chain"][1]), "speculative_model": folder}
        with pytest.raises(CheckpointError, match=message), engine_of(six, section):
            pass
    members = [{"decoding_type": "NGram"}, separate(made["medusa-chain"][1])]
    members[1]["speculative_model"] = str(tmp_path / "none")
    compose = {"decoding_type": "Compose", "members": members}
    with pytest.raises(CheckpointError) as caught, engine_of(six, compose):
        pass
    assert caught.value.field == "speculative_config.members.1.speculative_model"
