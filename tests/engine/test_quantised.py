"""A quantised target with drafters: the tokens of its dequantised twin, and of no drafter."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from outrider.workers.model.checkpoint import quantised
from outrider.workers.ops.cpu import CodedProjection
from outrider.workers.ops.table import SMALL, VARIABLE

from ..helpers.engines import complete, engine_of, random_prompts
from ..helpers.quantised import mxfp4
from ..helpers.quantised.formats import KINDS, write_coded, write_pair

MIXTURE = Qwen3MoeConfig(
    vocab_size=90, hidden_size=96, intermediate_size=192, moe_intermediate_size=96,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=24, num_experts=4,
    num_experts_per_tok=2, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
PROMPTS = random_prompts(4, 90, longest=12)
DRAFTERS = (
    {"decoding_type": "NGram", "max_draft_len": 4},
    {"decoding_type": "Suffix", "max_draft_len": 4},
    {"decoding_type": "Lookahead", "max_window_size": 3, "max_ngram_size": 3},
)


@pytest.mark.parametrize(
    ("kind", "size", "stages"), [("awq", 1, 1), ("gptq desc_act", 2, 1), ("awq", 1, 2)]
)
def test_every_drafter_emits_the_tokens_of_generate(tmp_path, kind, size, stages):
    plain, coded = map(str, write_pair(kind, tmp_path))
    oracle = AutoModelForCausalLM.from_pretrained(plain)
    keys = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = {}
    for index, prompt in enumerate(PROMPTS):
        tokens = torch.tensor([prompt])
        text = oracle.generate(tokens, attention_mask=torch.ones_like(tokens), **keys)
        wanted[index] = text[0, len(prompt) :].tolist()
    sections = (None, *DRAFTERS, {
        "decoding_type": "DraftTarget", "speculative_model": plain, "max_draft_len": 3,
    })  # fmt: skip
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
    for section in sections if size == stages else sections[:2]:
        with engine_of(coded, section, **sizes) as engine:
            found = complete(engine, PROMPTS, max_tokens=20)[0]
        assert [list(each) for each in found.values()] == list(wanted.values()), section


def test_experts_in_mxfp4_with_drafters(tmp_path):
    plain, coded = map(str, mxfp4.write_pair(tmp_path))
    wanted = None
    for folder, section in ((plain, None), (coded, None), (coded, DRAFTERS[0]), (coded, {
        "decoding_type": "DraftTarget", "speculative_model": coded, "max_draft_len": 3,
    })):  # fmt: skip
        with engine_of(folder, section) as engine:
            found = complete(engine, PROMPTS, max_tokens=20)[0]
        wanted = wanted or found
        assert found == wanted, section


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("has_experts", [False, True])
def test_integers_that_stay_so_on_a_cpu_give_the_tokens_of_their_values(
    size, has_experts, tmp_path, monkeypatch
):
    monkeypatch.setenv(VARIABLE, "avx512_bf16")
    monkeypatch.setattr(quantised, "FEWEST_CODED", 0)
    made, begin = [], CodedProjection.__init__
    monkeypatch.setattr(
        CodedProjection, "__init__", lambda self, *given: made.append(1) or begin(self, *given)
    )
    if has_experts:
        monkeypatch.setitem(SMALL, torch.bfloat16, 0)  # each is packed by itself
        Qwen3MoeForCausalLM(MIXTURE).save_pretrained(tmp_path / "plain")
        write_coded(tmp_path / "plain", tmp_path / "packed", *KINDS["gptq symmetric"])
    else:
        write_pair("gptq symmetric", tmp_path)
    found, counts = [], []
    options = {"dtype": "bfloat16", "deterministic": True, "tensor_parallel_size": size}
    for keep, section in (("off", None), ("auto", None), ("auto", DRAFTERS[0])):
        with engine_of(str(tmp_path / "packed"), section, keep_quantised=keep, **options) as engine:
            found.append(complete(engine, PROMPTS, max_tokens=20)[0])
        counts.append(len(made))
    assert found[0] == found[1] == found[2]
    per_layer = 2 + 2 * (4 if has_experts else 1)
    assert counts == [0, 2 * per_layer * size, 4 * per_layer * size]
