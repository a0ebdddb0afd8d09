"""P-EAGLE's training: what it sees is what is served, and its loss is the equations'."""

from __future__ import annotations

import json

import pytest
import torch

from outrider.config.strict import parse
from outrider.errors import ConfigError
from outrider.tests.helpers.eagle import MaskReference
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
from outrider.training.methods.eagle import PEagleMethod
from outrider.training.options import PEagleOptions

LAYERS = (0, 1, 1)
TEXT = [7, 3, 50, 21, 9, 4, 33, 80, 61, 5, 90]


def method_of(folder: str, **options):
    torch.manual_seed(0)
    method = PEagleMethod(parse(PEagleOptions, {"layers": LAYERS, **options}), loaded(folder))
    counts = torch.arange(96)
    counts[93] = 0
    method.prepare(counts)
    return method


@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 40, "mask_token_id": 3}])
def test_the_engine_drafts_what_training_saw(tiny, tmp_path, monkeypatch, options):
    method = method_of(tiny.target, **options)
    scramble(method)
    method.export(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["ptd_token_id"] == options.get("mask_token_id", 93)
    reference = reference_of(tiny.target, tmp_path, 3, LAYERS, MaskReference)
    check_serving(method, tmp_path, tiny.target, reference, monkeypatch, "PEagle")


def test_the_loss_is_that_of_the_equations(tiny, tmp_path):
    options = {"num_passes": 3, "max_draft_len": 3, "argmax_weight": 0.3, "pass_decay": 0.7}
    method = method_of(tiny.target, **options)
    with torch.no_grad():
        for weight in method.module.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    method.export(tmp_path)
    reference = reference_of(tiny.target, tmp_path, 3, LAYERS, MaskReference)
    loss, agreed, judged = slow_losses(reference, TEXT, WEIGHTS, parse(PEagleOptions, options))
    found = losses_of(method, loaded(tiny.target), [TEXT], [WEIGHTS])
    torch.testing.assert_close(found.loss.item(), loss, rtol=1e-5, atol=1e-5)
    assert found.num_agreed.tolist() == agreed
    assert found.num_judged.tolist() == judged


def test_a_few_steps_lower_the_loss_and_move_the_mask(tiny):
    method, target = method_of(tiny.target, num_passes=2), loaded(tiny.target)
    before = method.module.mask_hidden.detach().clone()
    check_learning(method, method_of(tiny.target, max_draft_len=10), target, 10)
    assert not torch.equal(method.module.mask_hidden, before)


def test_a_mask_outside_the_vocabulary_is_named(tiny):
    with pytest.raises(ConfigError, match="mask_token_id: 96 exceeds the target's 96 tokens"):
        method_of(tiny.target, mask_token_id=96)
