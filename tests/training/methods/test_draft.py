"""Draft models: the loss and counts row by row, sizes, files."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from outrider.config import parse
from outrider.errors import CheckpointError, ConfigError
from outrider.training.methods.draft import DraftMethod
from outrider.training.options import DraftOptions
from outrider.training.protocol import Windows

from ..conftest import VOCAB_SIZE


@pytest.fixture
def method(target):
    torch.manual_seed(1)
    method = DraftMethod(DraftOptions(max_draft_len=3), target)
    with torch.no_grad():
        for weight in method.module.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return method


@torch.no_grad()
def test_loss_and_counts(target, method):
    torch.manual_seed(2)
    given = Windows(
        torch.randint(0, VOCAB_SIZE, (2, 9)),
        torch.tensor([[1.0] * 9, [0, 0, 1, 1, 0.5, 1, 0, 1, 1]]),
    )
    states = target.states(given.tokens, method.capture)
    assert states.hidden == {}
    found = method.loss(given, states, target)
    said = states.logits.double().softmax(-1)
    guessed = method.module(input_ids=given.tokens).logits.double()
    total, weight = 0.0, 0.0
    agreed, judged = [0] * 3, [0] * 3
    for window in range(2):
        best, drafted = said[window].argmax(-1).tolist(), guessed[window].argmax(-1).tolist()
        for row in range(8):
            counts = float(given.weights[window, row + 1])
            lesson = 0.5 * said[window, row]
            lesson[best[row]] += 0.5
            total -= counts * float(lesson @ guessed[window, row].log_softmax(-1))
            weight += counts
            for place in range(min(3, 8 - row)):
                if given.weights[window, row + place + 1] > 0:
                    reach = slice(row, row + place + 1)
                    agreed[place] += best[reach] == drafted[reach]
                    judged[place] += 1
    assert float(found.loss) == pytest.approx(total / weight, rel=1e-4)
    assert found.num_agreed.tolist() == agreed
    assert found.num_judged.tolist() == judged


@torch.no_grad()
def test_export_is_a_model_with_the_targets_tokenizer(method, target_path, tmp_path):
    method.export(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, VOCAB_SIZE, (1, 12))
    assert torch.equal(model(tokens).logits, method.module(tokens).logits)
    for folder in (tmp_path, target_path):
        assert AutoTokenizer.from_pretrained(folder)("the cat").input_ids[:3] == [21, 9, 6]


def test_sizes(target):
    config = DraftMethod(DraftOptions(), target).module.config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (16, 1, 24)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 2, 8)
    sizes = {"hidden_size": 24, "num_layers": 3, "num_attention_heads": 3, "intermediate_size": 7}
    config = DraftMethod(DraftOptions(**sizes), target).module.config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (24, 3, 7)
    assert (config.num_attention_heads, config.num_key_value_heads) == (3, 1)
    for bad, named in [
        ({"num_attention_heads": 3}, "num_attention_heads: 3 does not divide hidden_size, 16"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads: 3 does not"),
        ({"hidden_size": 12, "num_attention_heads": 4}, "have 3 numbers each; .* an even number"),
    ]:
        with pytest.raises(ConfigError, match=named):
            DraftMethod(DraftOptions(**bad), target)


def test_a_model_has_its_own_sizes(target_path):
    with pytest.raises(ConfigError, match="hidden_size: the model of 'init' has a size of its own"):
        parse(DraftOptions, {"init": str(target_path), "hidden_size": 8})


def test_it_goes_on_from_a_model(target, target_path, tmp_path):
    method = DraftMethod(DraftOptions(init=target_path), target)
    tokens = torch.randint(0, VOCAB_SIZE, (2, 8))
    found = method.loss(Windows(tokens, torch.ones(2, 8)), target.states(tokens, ()), target)
    assert torch.equal(found.num_agreed, found.num_judged), "it is the target"
    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=1)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=f"has 9 tokens, the target has {VOCAB_SIZE}"):
        DraftMethod(DraftOptions(init=tmp_path / "other"), target)
    with pytest.raises(CheckpointError, match="init: .*/none' does not exist"):
        DraftMethod(DraftOptions(init=tmp_path / "none"), target)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    more = {**config, "num_hidden_layers": 2}
    (tmp_path / "other" / "config.json").write_text(json.dumps(more))
    with pytest.raises(CheckpointError, match=r"init: the tensors of .* missing model\.layers\.1"):
        DraftMethod(DraftOptions(init=tmp_path / "other"), target)
