"""EAGLE-3's training: what it sees is what is served, and its loss is the equations'."""

from __future__ import annotations

import json

import pytest
import torch

from outrider.config import Eagle3Config
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
from outrider.training.options import Eagle3TrainOptions

LAYERS = (0, 1, 1)
TEXT = [7, 3, 50, 21, 9, 4, 33, 80, 61, 5, 90]


def method_of(folder: str, **options):
    torch.manual_seed(0)
    method = eagle.Eagle3Method(
        parse(Eagle3TrainOptions, {"layers": LAYERS, **options}), loaded(folder)
    )
    counts = torch.zeros(96, dtype=torch.int64)
    counts[::2] = 5
    counts[90] = 9
    method.prepare(counts)
    return method


@pytest.mark.parametrize(
    "options", [{}, {"draft_vocab_size": 40, "norm_before_residual": True, "rope_theta": 500.0}]
)
def test_the_engine_drafts_what_training_saw(tiny, tmp_path, monkeypatch, options):
    method = method_of(tiny.target, **options)
    scramble(method)
    method.export(tmp_path)
    reference = reference_of(tiny.target, tmp_path, 3, LAYERS)
    check_serving(method, tmp_path, tiny.target, reference, monkeypatch)


@pytest.mark.parametrize("draft_vocab", [None, 60])
def test_the_loss_is_that_of_the_equations(tiny, tmp_path, draft_vocab):
    options = {"num_passes": 3, "argmax_weight": 0.3, "pass_decay": 0.7}
    method = method_of(tiny.target, draft_vocab_size=draft_vocab, **options)
    with torch.no_grad():
        for weight in method.module.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    method.export(tmp_path)
    reference = reference_of(tiny.target, tmp_path, 3, LAYERS)
    known = None
    if draft_vocab:
        known = torch.zeros(96).index_fill_(0, method.target_ids, 1)
    loss, agreed, judged = slow_losses(
        reference, TEXT, WEIGHTS, parse(Eagle3TrainOptions, options), known
    )
    padded = torch.tensor([[*TEXT, 0, 0], [*TEXT, 4, 9]])  # of weight 0: what it is does not count
    found = losses_of(method, loaded(tiny.target), padded.tolist(), [[*WEIGHTS, 0, 0]] * 2)
    torch.testing.assert_close(found.loss.item(), loss, rtol=1e-5, atol=1e-5)
    assert found.num_agreed.tolist() == [2 * count for count in agreed]
    assert found.num_judged.tolist() == [2 * count for count in judged]


def test_a_few_steps_lower_the_loss(tiny):
    method, target = method_of(tiny.target, num_passes=2), loaded(tiny.target)
    check_learning(method, method_of(tiny.target, max_draft_len=7), target, 7)


def test_files_hold_what_was_trained(tiny, tmp_path):
    method = method_of(tiny.target, draft_vocab_size=40)
    scramble(method)
    method.export(tmp_path)
    target = loaded(tiny.target)
    section = {"decoding_type": "Eagle3", "speculative_model": str(tmp_path)}
    found = read_eagle(parse(Eagle3Config, section), target.facts)
    assert found.capture == LAYERS
    assert found.target_ids.tolist() == [*range(0, 78, 2), 90]  # equally frequent ones: the first
    for name, tensor in method.module.state_dict().items():
        assert torch.equal(found.module.state_dict()[name], tensor)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 40
    assert config["rope_theta"] == 10000
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 0, 0]
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 1]


def test_the_whole_vocabulary_needs_no_map(tiny, tmp_path):
    method = method_of(tiny.target)
    method.export(tmp_path)
    reference = reference_of(tiny.target, tmp_path, 3, LAYERS)
    assert "d2t" not in reference.t
    assert torch.equal(reference.t["lm_head.weight"], reference.model.lm_head.weight)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"draft_vocab_size": 97}, "draft_vocab_size"),
        ({"layers": (0, 1, 2)}, "layers"),
        ({"layers": (1, 0, 1)}, "layers"),  # an engine would gather them as 0, 1
        ({"layers": None}, "layers"),  # the default has the input of layer -1
        ({"num_passes": 0}, "num_passes"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"passes": 3}, "passes"),
    ],
)
def test_what_does_not_fit_is_named(tiny, options, named):
    with pytest.raises(ConfigError, match=named) as caught:
        method_of(tiny.target, **options)
    assert caught.value.field == named
