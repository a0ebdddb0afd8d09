"""Checkpoints whose weights stay quantised: the tokens of the dequantised model, at one and two
ranks, in a fraction of its memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.scheduler.types import Draft, ints
from outrider.tests.helpers.adapters import write_adapter
from outrider.tests.helpers.quantised.formats import write_pair
from outrider.tests.helpers.quantised.scaled import BLOCKS, quantise, rewrite
from outrider.tests.workers.model.conftest import checkpoint  # noqa: F401
from outrider.workers.collective import Collective
from outrider.workers.model.target import load_model
from outrider.workers.ops.cuda.ops import CudaOps
from outrider.workers.ops.quantised import QuantisedTensor

CPU = torch.device("cpu")
TREE = Draft(ints([8, 9, 10, 11, 12, 13]), ints([-1, -1, 0, 1, 1, 3]))


class Watching(CudaOps):
    """Notes which weights arrive quantised."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.kept: list[bool] = []

    def pack(self, weight, bias):
        self.kept.append(isinstance(weight, QuantisedTensor))
        return super().pack(weight, bias)

    def pack_experts(self, experts):
        self.kept += [isinstance(each, QuantisedTensor) for each in (experts.gate_up, experts.down)]
        return super().pack_experts(experts)


def logits(folder, collective, part, build_step, ops=None) -> torch.Tensor:
    """Of a text and a draft; by the operations of a CPU, unless others are given."""
    model = load_model(folder, dtype=torch.float32, device=CPU, collective=collective, ops=ops)
    assert model.forward_choice.kind == "family", model.forward_choice
    cache = model.new_cache(8, 4)
    text = np.random.default_rng(0).integers(3, 89, 12).tolist()
    steps = [
        build_step([part(text[:9], 0, [5, 2, 7, 0])], 4),
        build_step([part(text[9:10], 9, [5, 2, 7, 0], TREE)], 4),
    ]
    with torch.inference_mode():
        return torch.cat([model.forward(step, cache) for step in steps])


def check(plain, coded, part, build_step, run_ranks, sizes=(1, 2)) -> list[bool]:
    wanted = logits(plain, Collective.single(), part, build_step)
    kept: list[bool] = []

    def watched(rank) -> tuple[torch.Tensor, list[bool]]:
        ops = Watching()
        return logits(coded, rank, part, build_step, ops), ops.kept

    for size in sizes:
        found = run_ranks(size, watched)
        for rows, _ in found:
            torch.testing.assert_close(rows, wanted, rtol=2e-4, atol=2e-4)
            assert torch.equal(rows.argmax(1), wanted.argmax(1))
        kept = found[0][1]
    return kept


@pytest.mark.parametrize(
    "kind", ["awq", "gptq desc_act", "packed, zeros", "packed, 8 bits, channel"]
)
def test_a_model_of_each_format(tmp_path, kind, part, build_step, run_ranks):
    pair = write_pair(kind, tmp_path)
    kept = check(*pair, part, build_step, run_ranks)
    in_order = "desc_act" not in (pair[1] / "config.json").read_text()
    # q/k/v, o, gate/up and down of two layers; out of order, the only weights of several groups
    assert sum(kept) == 2 * (4 if in_order else 3)


def test_adapters_beside_codes(tmp_path, part, build_step, run_ranks):
    """The weights stay quantised; what an adapter adds is that beside the dequantised ones."""
    plain, coded = write_pair("awq", tmp_path)
    adapters = [("a", write_adapter(tmp_path / "a", str(plain)))]
    step = build_step([part([5, 9, 30, 4], 0, [2, 0]), part([5, 9, 30, 4], 0, [1, 0])], 4)
    step = replace(step, adapters=ints([1, 0]))

    def rows(folder, collective):
        ops = Watching()
        model = load_model(
            folder, dtype=torch.float32, device=CPU, collective=collective, ops=ops,
            adapters=adapters,
        )  # fmt: skip
        return model.forward(step, model.new_cache(4, 4)), sum(ops.kept)

    wanted, _ = rows(plain, Collective.single())
    assert (wanted[0] - wanted[1]).abs().max() > 0.1
    for size in (1, 2):
        for found, num_kept in run_ranks(size, lambda rank: rows(coded, rank)):
            torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
            assert num_kept == 2 * 4


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_experts_and_latents(checkpoint, name, part, build_step, run_ranks):  # noqa: F811
    """fp8 in blocks that ranks cut; what expands latents is widened at load."""
    plain, oracle = checkpoint(name)
    coded = plain.parent / "coded"
    oracle.save_pretrained(coded)
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for key, tensor in list(tensors.items()):
        stored[key] = tensor
        quantised = "proj" in key or ".w1." in key or ".w2." in key or ".w3." in key
        if tensor.dim() == 2 and quantised:
            stored[key], scale, tensors[key] = quantise(tensor, (16, 32), torch.float8_e4m3fn)
            stored[f"{key}_scale_inv"] = scale
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, coded / "model.safetensors", metadata={"format": "pt"})
    rewrite(coded, {**BLOCKS, "weight_block_size": [16, 32]})
    kept = check(plain, coded, part, build_step, run_ranks)
    assert sum(kept) >= 2 * 2 + 2, kept
