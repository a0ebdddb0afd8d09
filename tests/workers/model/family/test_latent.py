"""MLA in both forms: latents with absorbed products, and expanded heads as their oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.scheduler.types import Draft, ints
from outrider.workers.attention import KV_FORMATS
from outrider.workers.collective import Collective
from outrider.workers.model.checkpoint.weights import Checkpoint
from outrider.workers.model.family import latent
from outrider.workers.model.fit import Serving, check_weights
from outrider.workers.model.target import load_model
from outrider.workers.ops import ReferenceOps, plan_step
from outrider.workers.ops.cpu import CpuOps
from outrider.workers.ops.protocol import AttentionSpec, LatentHeads

CPU = torch.device("cpu")
TREE = Draft(ints([8, 9, 10, 11, 12, 13]), ints([-1, -1, 0, 1, 1, 3]))
CHAIN = Draft(ints([8, 9, 10]), ints([-1, 0, 1]))


class ExpandedOps(ReferenceOps):
    max_latent_heads = 0


class ExpandingOps(ReferenceOps):
    """Latents in the cache, expanded in steps of many rows."""

    expands_latents = True
    num_expanded = 0

    def expand_attend(self, *given):
        self.num_expanded += 1
        return super().expand_attend(*given)


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
    expanding = ExpandingOps()
    for ops in (CpuOps(dtype), ReferenceOps(), expanding, ExpandedOps()):
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
    for latents in found[:3]:
        torch.testing.assert_close(latents, found[3], rtol=limit, atol=limit)
    assert expanding.num_expanded == 2 * model.info.num_layers, "at load, and the prompts"


@pytest.mark.parametrize("name", ["bfloat16", *KV_FORMATS])
def test_prompts_with_expanded_heads(checkpoint, monkeypatch, part, build_step, name):
    """In groups of heads, behind contexts in blocks that are not in order, over codes too: as with
    latents, and the same bits again."""
    monkeypatch.setattr(latent, "_MOST_HEADS", 3)  # of four: groups of two
    path, _ = checkpoint("deepseek_v3", initializer_range=0.1)
    text = np.random.default_rng(0).integers(3, 100, 60).tolist()
    one, two = list(range(13, 0, -1)), [14, 15, 16, 17]
    found = []
    for ops in (ReferenceOps(), ExpandingOps(), ExpandingOps()):
        model = load_model(
            path, dtype=torch.bfloat16, device=CPU, collective=Collective.single(),
            forward="family", ops=ops,
        )  # fmt: skip
        if name in KV_FORMATS:
            model.keep_kv_as(KV_FORMATS[name], Checkpoint(path), 0)
        cache = model.new_cache(24, 4)
        model.forward(build_step([part(text[:3], 0, one), part(text[3:5], 0, two)], 4), cache)
        ops.num_expanded = 0
        more = build_step([part(text[5:35], 3, one), part(text[40:42], 2, two, TREE)], 4)
        found.append(model.forward(more, cache))
        if isinstance(ops, ExpandingOps):
            assert ops.num_expanded == model.info.num_layers
    torch.testing.assert_close(found[1], found[0], rtol=0.15, atol=0.15)
    assert torch.equal(found[1], found[2])


def test_lengths_decide_whether_heads_are_expanded(part, build_step):
    """DeepSeek-V3 on 8 ranks: a chunk behind a long context, from 172 rows on; all contexts that
    fit, and all of none."""
    each = AttentionSpec(8, 8, 192, 128, 1.0, rotary_begin=128, rotary_dim=64, is_prepared=True)
    latents = AttentionSpec(16, 1, 576, 512, 1.0, shared_values=True)
    empty = torch.empty(0, dtype=torch.bfloat16)
    expanding = latent._Expanding(None, latents, LatentHeads(empty, empty, each), None)

    def takes(*lengths):
        blocks = list(range(20_000))
        rows = [part([1] * rows, context, blocks) for context, rows in lengths]
        return expanding.takes(plan_step(build_step(rows, 16), 16, CPU))

    assert takes((0, 1), (0, 300))
    assert takes((64, 100))
    assert takes((90_000, 172))
    assert not takes((90_000, 170))
    assert not takes((120_000, 400)), "more than 512 MiB"
    assert not takes((90_000, 172), (4096, 1)), "the whole step's multiplications count"


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
