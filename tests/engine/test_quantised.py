"""A quantised target with drafters: the tokens of its dequantised twin, and of no drafter."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from ..helpers.engines import complete, engine_of, random_prompts
from ..helpers.quantised.formats import write_pair

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
