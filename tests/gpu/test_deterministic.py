"""On a CUDA device: bf16 text that depends on no other request, draft, chunk or prefix hit."""

from __future__ import annotations

import pytest
import torch

from ..helpers.engines import complete, engine_of, random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NGRAM = {"decoding_type": "NGram", "max_draft_len": 6, "max_matching_ngram_size": 1}
OPTIONS = {"dtype": "bfloat16", "deterministic": True, "device": "cuda"}


@pytest.mark.parametrize("step", ["auto", "off"])
def test_text(tiny, step):
    prompts = random_prompts(16, 96, longest=60)
    options = {**OPTIONS, "device_step": step}
    with engine_of(tiny.target, **options, max_num_batched_tokens=16) as engine:
        assert engine.info.operations == "triton, batch-invariant"
        alone, _ = complete(engine, prompts, at_once=1)
        again, _ = complete(engine, prompts, at_once=16)
    with engine_of(tiny.target, NGRAM, **options) as engine:
        drafted, _ = complete(engine, prompts, at_once=16)
    assert alone == again == drafted


def test_rows_of_a_product():
    from outrider.workers.ops.cuda.linear import TiledProduct

    torch.manual_seed(0)
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    product = TiledProduct(weight, None, 132, fixed_rows=True)
    states = torch.randn(513, 4096, device="cuda", dtype=torch.bfloat16)
    whole = product(states)
    for rows in (slice(0, 1), slice(40, 48), slice(100, 164), slice(512, 513)):
        assert torch.equal(product(states[rows]), whole[rows])
