"""Models that comparisons are made with."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from outrider.bench.drafters import MODELS
from outrider.bench.models import padded, random_model, wide_heads


def test_wide_heads_are_the_same_function(tmp_path):
    wide_heads(tmp_path)
    narrow = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (narrow.config.head_dim, wide.config.head_dim) == (40, 64)
    token_ids = torch.randint(3, 4096, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = narrow(token_ids).logits, wide(token_ids).logits
    # The file is in bfloat16: scaled weights are rounded anew.
    assert torch.allclose(found, expected, atol=0.05)


def test_random_model_loads(tmp_path):
    count = random_model(tmp_path, num_layers=1, hidden_size=128)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert count == sum(parameter.numel() for parameter in model.parameters())
    assert (tmp_path / "tokenizer.json").exists()


def test_padded_models_are_the_same_functions(tmp_path):
    padded(tmp_path, target_layers=2, draft_layers=1)
    token_ids = torch.randint(3, 4096, (2, 20), generator=torch.Generator().manual_seed(0))
    for name, more in (("target", 2), ("draft", 1)):
        plain = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
        deep = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        assert len(deep.model.layers) == len(plain.model.layers) + more
        with torch.no_grad():
            assert torch.equal(deep(token_ids).logits, plain(token_ids).logits)
