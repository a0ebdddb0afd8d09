"""Medusa's training: its loss and counts row by row, and its file."""

from __future__ import annotations

import json

import pytest
import torch

from outrider.config import MedusaConfig, parse
from outrider.drafters.heads.medusa import load_medusa
from outrider.errors import ConfigError
from outrider.training.methods.medusa import MedusaMethod
from outrider.training.options import MedusaOptions
from outrider.training.protocol import Windows

from ..conftest import VOCAB_SIZE


@pytest.fixture
def method(target):
    torch.manual_seed(1)
    method = MedusaMethod(MedusaOptions(num_heads=3, num_layers=2, head_decay=0.7), target)
    with torch.no_grad():
        for weight in method.module.parameters():
            weight += 0.05 * torch.randn_like(weight)
    return method


def windows() -> Windows:
    torch.manual_seed(2)
    weights = torch.tensor([[1.0] * 10, [0, 0, 0, 1, 1, 0.5, 1, 0, 1, 1]])
    return Windows(torch.randint(0, VOCAB_SIZE, (2, 10)), weights)


def test_a_head_begins_as_the_target(target):
    method = MedusaMethod(MedusaOptions(), target)
    states = target.states(windows().tokens, method.capture)
    for logits in method.module(states.hidden[2]):
        torch.testing.assert_close(logits, states.logits)


@torch.no_grad()
def test_loss_and_counts(target, method):
    given = windows()
    states = target.states(given.tokens, method.capture)
    found = method.loss(given, states, target)
    said = states.logits.double().softmax(-1)
    heads = [logits.double() for logits in method.module(states.hidden[2])]
    sums, weights, agreed, judged = [0.0] * 3, [0.0] * 3, [0] * 3, [0] * 3
    for window in range(2):
        for row in range(10):
            so_far = True
            for head, logits in enumerate(heads):
                token = row + 2 + head  # that the head guesses
                if token > 9:
                    continue
                lesson = 0.5 * said[window, token - 1]
                best = int(said[window, token - 1].argmax())
                lesson[best] += 0.5
                weight = float(given.weights[window, token])
                sums[head] -= weight * float(lesson @ logits[window, row].log_softmax(-1))
                weights[head] += weight
                so_far &= int(logits[window, row].argmax()) == best
                agreed[head] += so_far and weight > 0
                judged[head] += weight > 0
    wanted = sum(0.7**head * sums[head] / weights[head] for head in range(3)) / (1 + 0.7 + 0.49)
    assert float(found.loss) == pytest.approx(wanted, rel=1e-4)
    assert found.num_agreed.tolist() == agreed
    assert found.num_judged.tolist() == judged
    assert agreed[0] > agreed[2]


def test_heads_longer_than_a_window(target):
    method = MedusaMethod(MedusaOptions(num_heads=9), target)
    given = Windows(windows().tokens[:, :8], windows().weights[:, :8])
    found = method.loss(given, target.states(given.tokens, method.capture), target)
    assert found.num_judged.shape == (6,)
    assert torch.isfinite(found.loss)


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ("vllm", ("num_heads", "num_hidden_layers")),
        ("reference", ("medusa_num_heads", "medusa_num_layers")),
    ],
)
@torch.no_grad()
def test_export_is_what_serves(target, method, tmp_path, layout, keys):
    method._options = MedusaOptions(num_heads=3, num_layers=2, layout=layout)
    method.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert [config[key] for key in keys] == [3, 2]
    section = {"decoding_type": "Medusa", "speculative_model": str(tmp_path), "num_medusa_heads": 3}
    head = load_medusa(parse(MedusaConfig, section), target.facts)
    hidden = torch.randn(5, 32)
    for served, trained in zip(head.module(hidden), method.module(hidden), strict=True):
        assert torch.equal(served, trained)


def test_a_draft_vocabulary_is_kept(target, tmp_path):
    torch.manual_seed(1)
    method = MedusaMethod(MedusaOptions(num_heads=2, draft_vocab_size=20), target)
    counts = torch.arange(VOCAB_SIZE).flip(0)
    method.prepare(counts)
    given = windows()
    states = target.states(given.tokens, method.capture)
    found = method.loss(given, states, target)
    assert torch.isfinite(found.loss)
    method.export(tmp_path / "heads")
    section = parse(MedusaConfig, {"speculative_model": str(tmp_path / "heads")})
    served = load_medusa(section, target.facts)
    assert served._token_map.tolist() == list(range(20))  # the most frequent
    for ours, theirs in zip(method.module(states.hidden[2]), served.module(states.hidden[2])):
        assert torch.equal(ours, theirs)
        assert ours.shape[-1] == 20


def test_a_draft_vocabulary_beyond_the_targets(target):
    with pytest.raises(ConfigError, match="draft_vocab_size: 1000 exceeds"):
        MedusaMethod(MedusaOptions(draft_vocab_size=1000), target)
    with pytest.raises(ConfigError, match="layout: 'reference' has no place for a draft"):
        MedusaMethod(MedusaOptions(draft_vocab_size=20, layout="reference"), target)
