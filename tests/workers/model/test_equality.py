"""Equality with transformers' own full forward, on every architecture, at 1, 2 and 4 ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from outrider.scheduler.tree import chain
from outrider.scheduler.types import ints
from outrider.tests.helpers.equality import TEXTS, script
from outrider.tests.helpers.models import (
    BLOCK,
    CPU,
    NOT_OF_THE_FAMILY,
    RECURRENT,
    TABLES,
    full_logits,
    skip_other,
)
from outrider.tests.workers.model.conftest import VARIANTS
from outrider.workers.collective import Collective
from outrider.workers.model import target
from outrider.workers.model.target import load_model

PROMPT = [5, 17, 60, 3, 88]
NUM_GREEDY = 12
MIXTURES = [
    *("mixtral", "gpt_oss", "deepseek_v3", "llama4", "nemotron_h_moe", "granite4_moe"),
    "ernie4_5_moe",
]


@dataclass
class Oracle:
    """What transformers' own model computes of one checkpoint."""

    logits: list[torch.Tensor]  # of the script's steps
    greedy: list[int]
    prompt: torch.Tensor  # [len(PROMPT), vocab]


@pytest.fixture(scope="module")
def oracle_of(stored):
    """`oracle_of(name, steps)`, computed once for all forwards and numbers of ranks."""
    known: dict[str, Oracle] = {}

    def of(name, steps):
        if name not in known:
            _, model = stored(name)
            tokens = torch.tensor([PROMPT])
            greedy = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=NUM_GREEDY,
                do_sample=False,
            )
            known[name] = Oracle(
                [
                    torch.stack([full_logits(model, text)[row] for text, row in expected])
                    for _, expected in steps
                ],
                greedy[0].tolist(),
                full_logits(model, PROMPT),
            )
        return known[name]

    return of


@pytest.fixture
def check(stored, oracle_of, part, build_step, run_ranks):
    """`check(name, forward, size, **options)`: everything that is computed of a checkpoint, loaded
    once with these options."""

    def greedy(model, num_tokens):
        cache, text, known = model.new_cache(24, BLOCK), list(PROMPT), 0
        for _ in range(num_tokens):
            step = build_step([part(text[known:], known, TABLES[0])], BLOCK)
            known = len(text)
            text.append(int(model.forward(step, cache)[-1].argmax()))
        return text

    def captured(model):
        """Logits of the last row, and those of all rows from their states."""
        step = build_step([part(PROMPT, 0, TABLES[0])], BLOCK)
        last = model.info.num_layers
        logits, (states,) = model.forward_capturing(step, model.new_cache(24, BLOCK), (last,))
        return logits, model.logits(states)

    def check(name, forward, size, **options):
        path, _ = stored(name)
        steps = script(TEXTS, part, build_step)

        def work(collective):
            model = load_model(path, device=CPU, collective=collective, forward=forward, **options)
            assert model.forward_choice.kind == forward
            cache = model.new_cache(num_blocks=24, block_size=BLOCK)
            logits = [model.forward(step, cache) for step, _ in steps]
            return logits, greedy(model, NUM_GREEDY if size == 1 else 6), captured(model)

        wanted = oracle_of(name, steps)
        for logits, text, (last, every) in run_ranks(size, work):
            for mine, theirs in zip(logits, wanted.logits, strict=True):
                assert_equal(mine, theirs)
            assert text == wanted.greedy[: len(text)]
            assert_equal(last, wanted.prompt[-1:])
            assert_equal(every, wanted.prompt)

    return check


def assert_equal(mine, theirs):
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("forward", ["family", "bridge"])
@pytest.mark.parametrize("size", [1, 2])
def test_every_architecture(check, variant, forward, size):
    """Every kind of step, a greedy text, and the logits of captured states."""
    skip_other(variant, forward)
    check(variant, forward, size)


@pytest.mark.slow
def test_every_architecture_on_four_ranks(check, variant):
    """More ranks than key-value heads; over the forward that serves it."""
    check(variant, "bridge" if variant in NOT_OF_THE_FAMILY else "family", 4)


@pytest.mark.slow
def test_the_bridge_on_four_ranks(check, variant):
    if variant not in (*NOT_OF_THE_FAMILY, *RECURRENT):
        check(variant, "bridge", 4)


@pytest.mark.parametrize("forward", ["family", "bridge"])
@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_with_whole_experts(check, name, forward):
    skip_other(name, forward)
    check(name, forward, 2, whole_experts=True)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["llama", "tied", "phi3", "qwen3_moe"])
def test_packed_linears(check, name, size, monkeypatch):
    """Weights in oneDNN's layout, which these models are otherwise too small for."""
    monkeypatch.setitem(target.MIN_ELEMENTS, torch.float32, 0)
    check(name, "bridge", size)


@pytest.mark.parametrize("forward", ["family", "bridge"])
@pytest.mark.parametrize("name", ["llama", "llama4", "gemma2", "olmo2", "granite"])
def test_rows_and_capture(checkpoint, name, forward, part, build_step, run_ranks):
    path, oracle = checkpoint(name)
    text = [5, 17, 60, 3, 88, 9]
    with torch.inference_mode():
        wanted = oracle(torch.tensor([text]), output_hidden_states=True).hidden_states

    def work(collective):
        model = load_model(path, device=CPU, collective=collective, forward=forward)
        cache = model.new_cache(24, BLOCK)
        step = build_step([part(text, 0, TABLES[0])], BLOCK)
        some, hidden = model.forward_capturing(step, cache, tuple(range(len(wanted))))
        none = model.forward(replace(step, rows=ints([])), cache)
        return some, hidden, none

    for some, hidden, none in run_ranks(2, work):
        assert some.shape == (1, 101)
        assert none.shape == (0, 101)
        for mine, theirs in zip(hidden, wanted, strict=True):
            torch.testing.assert_close(mine, theirs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("forward", ["family", "bridge"])
def test_longrope_goes_by_the_longest_sequence_that_is_served(
    checkpoint, forward, part, build_step
):
    """Not by a step's: neither chunks nor drafts nor other requests change how a key is rotated."""
    rope = {**VARIANTS["phi3_longrope"]["rope_parameters"], "original_max_position_embeddings": 8}
    keys = {"sliding_window": None, "original_max_position_embeddings": 8, "rope_parameters": rope}
    path, oracle = checkpoint("phi3_longrope", **keys)
    text, draft = TEXTS[0][:12], chain(TEXTS[0][7:10], "test")

    def rows(steps, longest=None):
        model = load_model(
            path,
            device=CPU,
            collective=Collective.single(),
            forward=forward,
            max_model_len=longest,
        )
        cache = model.new_cache(24, BLOCK)
        every = [replace(each, rows=ints(np.arange(len(each.token_ids)))) for each in steps]
        return torch.cat([model.forward(each, cache) for each in every])

    def step(begin, end, *drafts):
        return build_step([part(text[begin:end], begin, TABLES[0], *drafts)], BLOCK)

    assert_equal(rows([step(0, 12)]), full_logits(oracle, text))
    in_parts = rows([step(0, 5), step(5, 7, draft), step(7, 12)])
    assert_equal(in_parts[[*range(7), *range(10, 15)]], full_logits(oracle, text))
    assert_equal(in_parts[7:10], full_logits(oracle, text)[7:10])
    assert_equal(rows([step(0, 7)], longest=8), full_logits(oracle, text[:7]))
