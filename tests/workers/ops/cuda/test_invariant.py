"""The GPU's batch-invariant operations: equal bits at batch 1, 8 and 64, with chains of 0 to 16
drafts, chunks of any size, cold and after a prefix hit."""

from __future__ import annotations

import pytest
import torch

from outrider.bench.gpu.inputs import weight_of
from outrider.tests.helpers.invariant.models import check_angles, write_random
from outrider.tests.helpers.invariant.texts import Texts
from outrider.workers.collective import Collective
from outrider.workers.model.target import load_model
from outrider.workers.ops.cuda import attention
from outrider.workers.ops.cuda.linear import TiledProduct
from outrider.workers.ops.cuda.ops import InvariantCudaOps

CPU = torch.device("cpu")
LENGTH = 20
LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 0,
}  # fmt: skip
KINDS = {
    "gemma2": {"num_key_value_heads": 1, "sliding_window": 9, "head_dim": 24},
    "deepseek_v3": {"num_key_value_heads": 2, **LATENT},
}


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    sizes = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 1}
    keys = {**sizes, "num_attention_heads": 2, **KINDS[request.param]}
    folder = write_random(tmp_path_factory.mktemp(request.param), request.param, **keys)
    return load_model(
        folder,
        dtype=torch.bfloat16,
        device=CPU,
        collective=Collective.single(),
        forward="family",
        ops=InvariantCudaOps(CPU),
    )


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    """So that these contexts are cut too."""
    monkeypatch.setattr(attention, "FIXED_KEYS", 8)


def test_rows_of_a_model(model):
    assert model.forward_choice.operations == "triton, batch-invariant"
    alone = Texts(model, 1)
    for index in range(LENGTH):
        alone.step([(0, index, index + 1, index + 1)])
    wanted = alone.rows
    texts = Texts(model, 64)
    for count in (8, 64):  # prompts, then a token each
        begin = 0 if count == 8 else 2
        texts.step([(seq, begin * (seq < 8), begin + 1 + (seq == 0), begin + 1 + (seq == 0))
                    for seq in range(count)])  # fmt: skip
    check(texts, wanted)
    texts = Texts(model, 3)
    for begin, end in ((0, 2), (2, 9)):  # chunks beside a longer sequence
        texts.step([(0, begin, end, end), (1, 2 * begin, 2 * end, 2 * end)])
    for drafts in (0, 1, 7):
        texts.step([(0, 3, 4, 4 + drafts), (2, 0, 1, 1)])
    texts.step([(2, 1, 3, 3), (0, 3, 4, 20)])  # 16 drafts, after what was cached
    check(texts, wanted)


def check(texts, wanted) -> None:
    texts.rows = {key: row for key, row in texts.rows.items() if key[0] == 0}
    assert len(texts.rows) > 2
    assert not texts.difference(wanted)


@pytest.mark.parametrize("kind", ["plain", "int4 zeros"])
def test_rows_of_a_product(kind):
    """Cut into parts of its depth."""
    torch.manual_seed(0)
    product = TiledProduct(weight_of(kind, (70, 1200), torch.bfloat16), None, 8, fixed_rows=True)
    states = torch.randn(130, 1200).to(torch.bfloat16)
    whole = product(states)
    for rows in (slice(0, 1), slice(37, 45), slice(66, 130), slice(129, 130)):
        assert torch.equal(product(states[rows]), whole[rows])


def test_angles_are_those_of_the_position_alone():
    check_angles(InvariantCudaOps(CPU), InvariantCudaOps(CPU), atol=1e-5)
