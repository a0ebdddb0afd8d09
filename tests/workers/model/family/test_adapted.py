"""Adapters beside the decoder's products: equality with merged weights, on every architecture."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import cache

import pytest
import torch

from outrider.errors import CheckpointError, ConfigError
from outrider.scheduler.types import ints
from outrider.tests.helpers.adapters import merged, write_adapter
from outrider.tests.helpers.equality import TEXTS, every_row, script
from outrider.tests.helpers.models import BLOCK, CPU, NOT_OF_THE_FAMILY, TABLES, full_logits
from outrider.workers.collective import Collective
from outrider.workers.model.family.adapted import AdaptedProjection
from outrider.workers.model.family.decoder import PartThreads
from outrider.workers.model.target import load_model

LATENT = ("deepseek_v2", "deepseek_v3")
ALONE = Collective(0, 1, None)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """`two(path)`: adapters by name and folder, and transformers' models with each merged.

    Of each path they are made once.
    """
    from transformers import AutoModelForCausalLM

    @cache
    def make(path):
        folder = tmp_path_factory.mktemp("adapters")
        folders = [
            write_adapter(folder / "a", path, seed=1, rank_pattern={"o_proj": 3}),
            write_adapter(folder / "b", path, seed=2, rank=2, use_rslora=True,
                          targets=("v_proj", "qkv_proj", "up_proj", "gate_up_proj"),
                          alpha_pattern={"v_proj": 3.0}),
        ]  # fmt: skip
        oracles = [
            AutoModelForCausalLM.from_pretrained(
                merged(folder / f"merged{index}", path, adapter), dtype=torch.float32
            ).eval()
            for index, adapter in enumerate(folders)
        ]
        return list(zip(("a", "b"), folders, strict=True)), oracles

    return make


@pytest.fixture(scope="module")
def logits_of(stored, two):
    """`logits_of(variant, number, text)`: of the model alone (0) or an adapter, made once."""

    @cache
    def of(variant, number, text):
        path, plain = stored(variant)
        return full_logits([plain, *two(str(path))[1]][number], list(text))

    return of


def assert_equal(mine, theirs):
    torch.testing.assert_close(mine, theirs, rtol=4e-4, atol=4e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_every_architecture(stored, two, logits_of, variant, size, part, build_step, run_ranks):
    """Every kind of step, each of two sequences by the model alone or by one of two adapters."""
    if variant in NOT_OF_THE_FAMILY or variant in LATENT:
        pytest.skip("takes no adapters")
    path, _ = stored(variant)
    adapters, _ = two(str(path))
    steps = script(TEXTS, part, build_step)

    def wanted(expected, by_text):
        rows = [
            logits_of(variant, by_text[text[0] != TEXTS[0][0]], tuple(text))[row]
            for text, row in expected
        ]
        return torch.stack(rows)

    pairs = ((1, 2), (2, 0), (0, 0))

    def work(collective):
        model = load_model(path, device=CPU, collective=collective, adapters=adapters)
        assert model.adapters.numbers == {"a": 1, "b": 2}
        found = []
        for pair in pairs:
            cache = model.new_cache(num_blocks=24, block_size=BLOCK)
            for step, _ in steps:
                chosen = ints(pair[: step.num_seqs])
                found.append(model.forward(replace(step, adapters=chosen), cache))
        return found

    oracle = [wanted(expected, pair) for pair in pairs for _, expected in steps]
    for found in run_ranks(size, work):
        for mine, theirs in zip(found, oracle, strict=True):
            assert_equal(mine, theirs)


def mixed(part, build_step):
    """Four sequences, two of them by one adapter with another's rows between."""
    rows = [[20 * index + token for token in range(12)] for index in range(4)]
    tables = [[4 * index + block for block in range(4)] for index in range(4)]
    parts = [part(row, 0, table) for row, table in zip(rows, tables, strict=True)]
    step = every_row(build_step(parts, BLOCK))
    return replace(step, adapters=ints([1, 0, 1, 2])), rows


def test_rows_of_one_adapter_need_not_be_neighbours(stored, two, part, build_step):
    path, plain = stored("llama")
    adapters, (first, second) = two(str(path))
    model = load_model(path, device=CPU, collective=ALONE, adapters=adapters)
    step, rows = mixed(part, build_step)
    found = model.forward(step, model.new_cache(24, BLOCK))
    models = (first, plain, first, second)
    assert_equal(found, torch.cat([full_logits(*each) for each in zip(models, rows, strict=True)]))


def test_parts_of_a_step_have_their_rows_adapters(stored, two, part, build_step):
    path, _ = stored("llama")
    model = load_model(path, device=CPU, collective=ALONE, adapters=two(str(path))[0])
    step, _ = mixed(part, build_step)
    with torch.inference_mode():
        whole = model.forward(step, model.new_cache(24, BLOCK))
        decoder, cache = model.runner.model, model.new_cache(24, BLOCK)
        context = decoder.context(decoder.ops.plan(step, cache), cache)
        threads = PartThreads(decoder)
        parts, _ = threads.forward(context, step.rows, (), [0, 9, 30, len(step.token_ids)])
    assert_equal(parts, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_others_where_that_is_asked_for(stored, two, part, build_step, dtype):
    path, _ = stored("llama")
    model = load_model(
        path, dtype=dtype, device=CPU, collective=ALONE, deterministic=True,
        adapters=two(str(path))[0],
    )  # fmt: skip
    step, rows = mixed(part, build_step)
    together = model.forward(step, model.new_cache(24, BLOCK)).split([len(row) for row in rows])
    for index, row in enumerate(rows):
        alone = every_row(build_step([part(row, 0, TABLES[0])], BLOCK))
        alone = replace(alone, adapters=step.adapters[index : index + 1])
        assert torch.equal(model.forward(alone, model.new_cache(24, BLOCK)), together[index])


def holds(part, kind):
    """Whether a block of the decoder has a part of a class, at any depth."""
    if isinstance(part, kind):
        return True
    held = fields(part) if is_dataclass(part) else ()
    return any(holds(getattr(part, each.name), kind) for each in held)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "glm4_moe", "deepseek_v3"])
def test_a_step_without_adapters_has_the_plain_products(stored, name):
    path, _ = stored(name)
    model = load_model(path, device=CPU, collective=ALONE, adapters=[]).runner.model
    assert not any(holds(layer, AdaptedProjection) for layer in model.layers)
    assert any(holds(layer, AdaptedProjection) for layer in model.adapted)
    for plain, adapted in zip(model.layers, model.adapted, strict=True):
        assert plain.attention.spec is adapted.attention.spec
        assert plain.before_mlp is adapted.before_mlp


def test_what_cannot_be_adapted_is_refused(stored, tmp_path):
    latents, _ = stored("deepseek_v3")
    folder = write_adapter(tmp_path / "l", str(latents), targets=("o_proj",))
    with pytest.raises(CheckpointError, match=r"lora_modules: 'a': .*self_attn.o_proj.*no adapter"):
        load_model(latents, device=CPU, collective=ALONE, adapters=[("a", folder)])
    other, _ = stored("gpt_neox")
    folder = write_adapter(tmp_path / "n", str(other), targets=("query_key_value",))
    with pytest.raises(ConfigError, match="lora_modules: adapters need the family's decoder"):
        load_model(other, device=CPU, collective=ALONE, adapters=[("a", folder)])
