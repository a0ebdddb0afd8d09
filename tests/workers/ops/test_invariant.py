"""Batch invariance: every row's logits have the same bits however the step is put together."""

from __future__ import annotations

import pytest
import torch

from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.tests.helpers.invariant.models import check_angles, write_random
from outrider.tests.helpers.invariant.texts import LENGTH, Texts
from outrider.workers import ops
from outrider.workers.collective import Collective
from outrider.workers.model.target import load_model
from outrider.workers.ops import make_invariant_ops
from outrider.workers.ops.invariant import InvariantOps

CPU = torch.device("cpu")
KINDS = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 29},
    "gemma2": {"num_key_value_heads": 2, "sliding_window": 29, "head_dim": 24},
    "qwen3_moe": {
        "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "head_dim": 24,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    sizes = {"hidden_size": 88, "intermediate_size": 112, "num_hidden_layers": 2}
    keys = {**sizes, "num_attention_heads": 4, **KINDS[request.param]}
    folder = write_random(tmp_path_factory.mktemp(request.param), request.param, **keys)
    return load_model(
        folder,
        dtype=torch.bfloat16,
        device=CPU,
        collective=Collective.single(),
        deterministic=True,
    )


@pytest.fixture(scope="module")
def alone(model):
    """Every row of eight sequences, computed one token at a time."""
    texts = Texts(model, 8)
    for seq in range(8):
        for index in range(LENGTH):
            texts.step([(seq, index, index + 1, index + 1)])
    return texts.rows


def test_rows_of_a_batch(model, alone):
    for count in (8, 64):
        texts = Texts(model, count)
        texts.step([(seq, 0, 100, 100) for seq in range(count)])
        for index in range(100, 110):
            texts.step([(seq, index, index + 1, index + 1) for seq in range(count)])
        texts.rows = {key: row for key, row in texts.rows.items() if key[0] < 8}
        assert not texts.difference(alone)


def test_rows_of_chunked_prompts_and_drafts_of_any_length(model, alone):
    for chunk in (LENGTH, 1, 7, 33, 64, 65):
        texts = Texts(model, 2)
        for begin in range(0, 132, chunk):
            end = min(begin + chunk, 132)
            texts.step([(0, begin, end, end), (1, begin, end, end)])
        assert not texts.difference(alone)
    for length in range(17):
        texts.step([(0, 120, 133, 133 + length), (1, 131, 132, 132 + length)])
        assert not texts.difference(alone)


def test_rows_after_a_prefix_hit_beside_others(model, alone):
    texts = Texts(model, 3)
    texts.step([(0, 0, 64, 64)])
    cold = dict(texts.rows)
    texts.step([(1, 0, 40, 40), (0, 64, 140, 145), (2, 0, 1, 1)])  # 64 tokens were cached
    assert not texts.difference(alone)
    assert set(cold) <= set(texts.rows)


def test_angles_do_not_depend_on_their_neighbours():
    check_angles(InvariantOps(torch.float32), InvariantOps(torch.float32), atol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        {"forward": "bridge"},
        {"dtype": "float16"},
        {"dtype": "float16", "device": "cpu"},
        {"tensor_parallel_size": 4},
    ],
)
def test_what_cannot_be_deterministic_is_refused_by_name(other):
    with pytest.raises(ConfigError, match=next(iter(other))) as error:
        EngineConfig.load({"model": "m", "deterministic": True, **other})
    assert error.value.field == "deterministic"
    for dtype in ("auto", "bfloat16", "float16"):
        keys = {"model": "m", "deterministic": True, "device": "cuda", "dtype": dtype}
        assert EngineConfig.load(keys).deterministic


def test_devices_types_and_models_without_it_are_refused(tmp_path, monkeypatch):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    monkeypatch.setattr(ops, "has_triton", lambda: False)
    wrong = ("cuda", torch.bfloat16), ("meta", torch.float32), ("cpu", torch.float16)
    for device, dtype in wrong:
        with pytest.raises(ConfigError, match="deterministic: not available"):
            make_invariant_ops(torch.device(device), dtype)
    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'gpt_neox' is not of the family") as error:
        load_model(tmp_path, device=CPU, collective=Collective.single(), deterministic=True)
    assert error.value.field == "deterministic"
