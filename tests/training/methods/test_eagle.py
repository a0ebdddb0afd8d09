"""EAGLE-1's training: what it sees is what is served, and its loss is the equations'."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import smooth_l1_loss
from transformers import AutoModelForCausalLM

from outrider.config import EagleConfig
from outrider.config.strict import parse
from outrider.drafters.heads.eagle import read_eagle
from outrider.errors import ConfigError
from outrider.tests.helpers.eagle_training import (
    WEIGHTS,
    check_learning,
    check_serving,
    loaded,
    losses_of,
    reference_of,
    scramble,
    slow_losses,
)
from outrider.training.methods import eagle
from outrider.training.options import EagleOptions
from outrider.training.protocol import FrozenTarget

TEXT = [7, 3, 50, 21, 9, 4, 33, 80, 61, 5, 90]


def method_of(folder: str, **options):
    torch.manual_seed(0)
    return eagle.EagleMethod(parse(EagleOptions, options), loaded(folder))


def test_the_engine_drafts_what_training_saw(tiny, tmp_path, monkeypatch):
    method = method_of(tiny.target, feature_noise=0.5)  # none of it where nothing is learnt
    scramble(method)
    method.export(tmp_path)
    reference = reference_of(tiny.target, tmp_path, 1)
    check_serving(method, tmp_path, tiny.target, reference, monkeypatch)


def test_the_loss_is_that_of_the_equations(tiny, tmp_path):
    options = {"num_passes": 3, "argmax_weight": 0.3, "pass_decay": 0.7, "feature_weight": 0.0}
    method = method_of(tiny.target, **options)
    method.export(tmp_path)
    reference = reference_of(tiny.target, tmp_path, 1)
    parsed = parse(EagleOptions, options)
    loss, agreed, judged = slow_losses(reference, TEXT, WEIGHTS, parsed)
    target = loaded(tiny.target)
    found = losses_of(method, target, [TEXT], [WEIGHTS])
    torch.testing.assert_close(found.loss.item(), loss, rtol=1e-5, atol=1e-5)
    assert (found.num_agreed.tolist(), found.num_judged.tolist()) == (agreed, judged)
    method = method_of(tiny.target, **options | {"feature_weight": 0.5})
    also = losses_of(method, target, [TEXT], [WEIGHTS])
    wanted = loss + 0.5 * _distance(reference, parsed)
    torch.testing.assert_close(also.loss.item(), wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def _distance(reference, options) -> float:
    """Of every pass's guessed feature to the target's, one row at a time."""
    wanted, total, scale = reference.features(tuple(TEXT)), 0.0, 0.0
    for index in range(options.num_passes):
        lost = counted = 0.0
        for row in range(len(TEXT) - 2 - index):
            features, ids = wanted[: row + 1], TEXT[1 : row + 2]
            guessed, _ = reference.run(features, ids)
            for step in range(index):
                features = torch.cat([features, guessed[-1:]])
                ids = [*ids, TEXT[row + 2 + step]]
                guessed, _ = reference.run(features, ids)
            weight = WEIGHTS[row + 2 + index]
            lost += weight * float(smooth_l1_loss(guessed[-1], wanted[row + 1 + index]))
            counted += weight
        total += options.pass_decay**index * lost / counted
        scale += options.pass_decay**index
    return total / scale


def test_a_few_steps_lower_the_loss(tiny):
    target = loaded(tiny.target)
    method = method_of(tiny.target, feature_noise=0.1, num_passes=2)
    check_learning(method, method_of(tiny.target), target, 5)


def test_files_hold_what_was_trained(tiny, tmp_path):
    method = method_of(tiny.target, rope_theta=500.0, intermediate_size=32, head_dim=4)
    scramble(method)
    method.export(tmp_path)
    target = loaded(tiny.target)
    section = {"decoding_type": "Eagle", "speculative_model": str(tmp_path)}
    found = read_eagle(parse(EagleConfig, section), target.facts)
    assert found.capture == (target.facts.num_layers,)
    assert found.module.layer_sizes == method.module.layer_sizes
    assert torch.equal(found.module.rope.frequencies, method.module.rope.frequencies)
    for name, tensor in method.module.state_dict().items():
        assert torch.equal(found.module.state_dict()[name], tensor)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert config["bias"] is False
    assert config["rope_theta"] == 500


def test_numbers_are_stored_as_the_target_stores_them(tiny, tmp_path):
    half = tmp_path / "half"
    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.bfloat16)
    model.save_pretrained(half)
    target = FrozenTarget(half, torch.device("cpu"), torch.float32)
    method = eagle.EagleMethod(EagleOptions(), target)
    method.export(tmp_path / "head")
    tensors = reference_of(tiny.target, tmp_path / "head", 1).t
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_passes": 0}, "num_passes"),
        ({"argmax_weight": 1.5}, "argmax_weight"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"draft_vocab_size": 40}, "draft_vocab_size"),
    ],
)
def test_what_does_not_fit_is_named(tiny, options, named):
    with pytest.raises(ConfigError, match=named) as caught:
        method_of(tiny.target, **options)
    assert caught.value.field == named
