"""MLA in both forms: latents with absorbed products, and expanded heads as their oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.scheduler.types import Draft, ints
from outrider.workers.collective import Collective
from outrider.workers.model.fit import Serving, check_weights
from outrider.workers.model.target import load_model
from outrider.workers.ops import ReferenceOps
from outrider.workers.ops.cpu import CpuOps

CPU = torch.device("cpu")
TREE = Draft(ints([8, 9, 10, 11, 12, 13]), ints([-1, -1, 0, 1, 1, 3]))
CHAIN = Draft(ints([8, 9, 10]), ints([-1, 0, 1]))


class ExpandedOps(ReferenceOps):
    max_latent_heads = 0


def steps(part, build_step):
    """A prompt long enough to be laid out in panels, then chains and a tree beside each other."""
    text = np.random.default_rng(0).integers(3, 100, 60).tolist()
    one, two = list(range(13, 0, -1)), [14, 15, 16, 17]
    yield build_step([part(text[:40], 0, one), part(text[40:45], 0, two)], 4)
    yield build_step([part(text[45:47], 40, one, TREE), part(text[47:48], 5, two, CHAIN)], 4)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_equal_expanded_heads(checkpoint, name, dtype, part, build_step):
    path, _ = checkpoint(name, initializer_range=0.1)
    found = []
    for ops in (CpuOps(dtype), ReferenceOps(), ExpandedOps()):
        model = load_model(
            path, dtype=dtype, device=CPU, collective=Collective.single(), forward="family", ops=ops
        )
        cache = model.new_cache(24, 4)
        found.append(torch.cat([model.forward(each, cache) for each in steps(part, build_step)]))
        shape = model.kv_shapes[0]
        assert (shape.num_kv_heads, shape.num_elements) == (
            (4, 4 * (16 + 12)) if isinstance(ops, ExpandedOps) else (1, 16 + 8)
        )
    limit = 2e-4 if dtype == torch.float32 else 0.15
    for latents in found[:2]:
        torch.testing.assert_close(latents, found[2], rtol=limit, atol=limit)


def test_every_rank_keeps_the_latents_and_the_check_says_so(checkpoint, run_ranks):
    path, _ = checkpoint("deepseek_v3")
    for size in (1, 2):
        for model in run_ranks(
            size, lambda collective: load_model(path, device=CPU, collective=collective)
        ):
            assert model.forward_choice.kind == "family"
            assert model.kv_bytes_per_token() == 2 * (16 + 8) * 4
            assert model.kv_bytes_per_token() == check_weights(path, size)[1]


def test_more_heads_than_the_kernel_takes_are_expanded(checkpoint, monkeypatch):
    path, _ = checkpoint("deepseek_v3")
    monkeypatch.setattr(CpuOps, "max_latent_heads", 3)
    model = load_model(path, device=CPU, collective=Collective.single())
    assert model.forward_choice.kind == "family"
    assert model.kv_bytes_per_token() == 2 * 4 * (16 + 12) * 4 == check_weights(path)[1]
    assert check_weights(path, 2)[1] == 2 * (16 + 8) * 4  # two heads a rank


@pytest.mark.parametrize(
    ("serving", "is_kept"),
    [
        (Serving(), True),
        (Serving(dtype=torch.bfloat16), True),
        (Serving(forward="bridge"), False),
        (Serving(deterministic=True), False),
        (Serving(dtype=torch.float16), False),  # no kernels on a CPU
    ],
)
def test_the_check_has_the_size_of_the_cache_in_both_forms(checkpoint, run_ranks, serving, is_kept):
    path, _ = checkpoint("deepseek_v3")
    options = {name: getattr(serving, name) for name in ("dtype", "forward", "deterministic")}
    for size in (1, 2):
        for model in run_ranks(
            size, lambda group: load_model(path, device=CPU, collective=group, **options)
        ):
            cache = model.new_cache(3, 4)
            assert (model.kv_shapes[0].num_kv_heads == 1) == is_kept
            assert cache.num_bytes == 12 * check_weights(path, size, serving)[1]
