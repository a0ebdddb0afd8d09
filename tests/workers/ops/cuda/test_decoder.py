"""Whole forwards of the family over the kernels, against those over the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.scheduler.types import Draft, ints
from outrider.tests.helpers.adapters import write_adapter
from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.workers.model.conftest import checkpoint  # noqa: F401
from outrider.workers.collective import Collective
from outrider.workers.device_step.chains import ChainSizes, ChainStep
from outrider.workers.device_step.shape import Sampler
from outrider.workers.model.target import load_model
from outrider.workers.ops import ReferenceOps
from outrider.workers.ops.cuda.ops import CudaOps, InvariantCudaOps

CPU = torch.device("cpu")
BLOCK = 4
PARENTS = [-1, -1, 0, 1, 1, 3]


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "gpt_oss", "llama4", "deepseek_v3"])
def test_a_decoder(checkpoint, name, part, build_step):  # noqa: F811
    """A prompt, then a decode beside a tree, in small blocks."""
    path, _ = checkpoint(name)
    tokens = np.random.default_rng(0).integers(3, 100, 20).tolist()
    tables = [[5, 2, 7, 0], [1, 6, 3, 4]]
    tree = Draft(ints([8, 9, 10, 11, 12, 13]), ints(PARENTS))
    steps = [
        build_step([part(tokens[:7], 0, tables[0]), part(tokens[7:10], 0, tables[1])], BLOCK),
        build_step([part(tokens[10:11], 7, tables[0]), part([5], 3, tables[1], tree)], BLOCK),
    ]
    found = []
    for ops in (CudaOps(CPU, splits=2), ReferenceOps()):
        model = load_model(path, device=CPU, collective=Collective.single(), ops=ops)
        assert (model.forward_choice.kind, model.forward_choice.operations) == ("family", ops.name)
        cache = model.new_cache(8, BLOCK)
        found.append([model.forward(step, cache) for step in steps])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


def test_adapters(checkpoint, tmp_path, part, build_step):  # noqa: F811
    """Prompts of two adapters and none, then one token each."""
    path, _ = checkpoint("llama")
    adapters = [(name, write_adapter(tmp_path / name, str(path), seed=len(name)))
                for name in ("a", "bb")]  # fmt: skip
    tables = [[5, 2], [1, 6], [3, 4], [0, 7]]
    rows = np.random.default_rng(0).integers(3, 100, (4, 6)).tolist()
    steps = [
        build_step([part(row[begin:end], begin, table) for row, table in zip(rows, tables)], BLOCK)
        for begin, end in ((0, 5), (5, 6))
    ]
    found = []
    for ops in (CudaOps(CPU, splits=2), InvariantCudaOps(CPU), ReferenceOps()):
        single = Collective.single()
        model = load_model(path, device=CPU, collective=single, ops=ops, adapters=adapters)
        cache = model.new_cache(8, BLOCK)
        found.append(
            [model.forward(replace(step, adapters=ints([1, 2, 0, 1])), cache) for step in steps]
        )
    for mine in found[:2]:
        for one, theirs in zip(mine, found[2], strict=True):
            torch.testing.assert_close(one, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.inference_mode()
def test_chains_of_a_draft_model(checkpoint, name, part, build_step):  # noqa: F811
    """One and two known tokens behind a prompt; greedy, then drawn with a cut."""
    path, _ = checkpoint(name)
    tokens = np.random.default_rng(0).integers(3, 100, 20).tolist()
    tables = [[5, 2, 7, 0], [1, 6, 3, 4]]
    prompts = build_step([part(tokens[:7], 0, tables[0]), part(tokens[7:10], 0, tables[1])], BLOCK)
    known = build_step(
        [part(tokens[10:11], 7, tables[0]), part(tokens[11:13], 3, tables[1])], BLOCK
    )
    heat, top_p = (np.full(2, value, dtype=np.float32) for value in (0.8, 0.9))
    drawn = replace(known, sampling=replace(known.sampling, temperature=heat, top_p=top_p))
    sizes, least = ChainSizes(2, 3, 12, 8, BLOCK), np.zeros(2, dtype=np.float32)
    found = []
    for ops in (CudaOps(CPU, splits=2), TensorOps()):
        model = load_model(path, device=CPU, collective=Collective.single(), ops=ops)
        cache = model.new_cache(9, BLOCK)
        model.forward(prompts, cache)
        step = ChainStep(model.runner.model, cache, sizes)
        words = []
        for sampler, given in ((Sampler.PLAIN, known), (Sampler.SAMPLED, drawn)):
            shape = sizes.shape(2, 3, sampler)
            step.stage(shape, given, ints([3, 2]), least)
            step.run(shape)
            words.append(step.words[: shape.num_drawn].tolist())
        found.append(words)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
