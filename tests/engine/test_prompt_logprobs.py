"""Log-probabilities of the prompt against transformers, through every way to compute a prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider import LLM
from outrider.engine import engine as engine_module
from outrider.engine.outputs import Logprob
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Request, ints
from outrider.workers import target

from ..helpers.engines import Box, complete, engine_of, random_prompts

PROMPTS = [*random_prompts(5, 96), [7], [9, 11]]
TOP = 3
DRAFTERS = {
    "none": None,
    "ngram": {"decoding_type": "NGram", "max_draft_len": 4},
    "draft": {"decoding_type": "DraftTarget", "max_draft_len": 4, "placement": "colocated"},
}


@pytest.fixture(scope="module")
def oracle(tiny):
    """Per prompt: every token's log-probability, and the most likely ones."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, :-1]
        table = logits.log_softmax(1)
        best = table.topk(TOP, dim=1)
        following = torch.tensor(prompt[1:], dtype=torch.int64)
        chosen = table.gather(1, following[:, None])[:, 0]
        found.append((chosen.numpy(), best.indices.numpy(), best.values.numpy()))
    return found


def check(last, oracle, first: str = ""):
    for index, (chosen, ids, values) in enumerate(oracle):
        table = last[f"{first}{index}"]
        np.testing.assert_allclose(table.chosen, chosen, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(table.top, values, rtol=1e-4, atol=1e-4)
        assert table.top_ids.tolist() == ids.tolist()


def run(engine, *, prefix: str = "", emitted=(), **sampling):
    """Every prompt's log-probabilities and tokens; each is delivered once."""
    box = Box()
    settings = SamplingParams(**{"temperature": 0.0, "prompt_logprobs": TOP, **sampling})
    requests = [
        Request(f"{prefix}{index}", ints(prompt), settings, seed=1, emitted=ints(emitted))
        for index, prompt in enumerate(PROMPTS)
    ]
    engine.submit_all(requests, box)
    tables, tokens, running = {}, {}, len(requests)
    while running:
        delta = box.deltas.get(timeout=60)
        if delta.prompt_logprobs is not None:
            assert delta.request_id not in tables, "delivered twice"
            assert delta.request_id not in tokens, "not with the first tokens"
            tables[delta.request_id] = delta.prompt_logprobs
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        running -= delta.finish_reason is not None
    return tables, tokens


@pytest.mark.parametrize("name", sorted(DRAFTERS))
@pytest.mark.parametrize(("size", "stages"), [(1, 1), (2, 1), (1, 2)])
def test_every_drafter_and_size(tiny, oracle, name, size, stages, monkeypatch):
    """Twice, so that the prefix cache has the prompts; a few rows of logits at a time."""
    monkeypatch.setattr(target, "_MAX_LOGITS", 96 * 5)
    section = DRAFTERS[name] and {**DRAFTERS[name]}
    if name == "draft":
        section["speculative_model"] = tiny.draft
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
    with engine_of(tiny.target, section, **sizes) as engine:
        plain, _ = complete(engine, PROMPTS, max_tokens=8)
        for prefix in ("a", "b"):
            tables, tokens = run(engine, prefix=prefix, max_tokens=8)
            check(tables, oracle, prefix)
            assert {key[1:]: tuple(each) for key, each in tokens.items()} == {
                key: tuple(each) for key, each in plain.items()
            }


@pytest.mark.parametrize("forward", ["family", "bridge"])
def test_chunks_preemption_and_no_output(tiny, oracle, forward):
    """Prompts in chunks of a few tokens, with too few blocks for all; then scores alone."""
    options = {"num_kv_blocks": 11, "max_model_len": 88, "max_num_batched_tokens": 8}
    with engine_of(tiny.target, block_size=8, forward=forward, **options) as engine:
        tables, tokens = run(engine, max_tokens=20)
        check(tables, oracle)
        assert all(len(each) == 20 for each in tokens.values())
        assert engine.stats()["requests"]["num_preemptions"] > 0
        tables, tokens = run(engine, max_tokens=0)
        check(tables, oracle)
        assert not any(tokens.values())


def test_a_replay_and_other_requests_get_none(tiny):
    with engine_of(tiny.target) as engine:
        assert run(engine, emitted=[5], max_tokens=4)[0] == {}
        assert run(engine, prompt_logprobs=None, max_tokens=4)[0] == {}
        tables, _ = run(engine, prompt_logprobs=0, max_tokens=1)
        assert tables["0"].top.shape == (len(PROMPTS[0]) - 1, 0)


def test_llm_gives_a_table_per_token(monkeypatch, make_engine, config):
    """In Python: None for the first token, then the token itself and the most likely."""
    fake = make_engine("the cat ")
    monkeypatch.setattr(engine_module.Engine, "start", lambda config, backend: fake)
    monkeypatch.setattr("outrider.engine.llm.preflight", lambda config: {})
    with LLM(config.model, executor="local") as llm:
        settings = SamplingParams(prompt_logprobs=1, max_tokens=0)
        (output,) = llm.generate([[70, 65, 71]], settings, use_tqdm=False)
        (without,) = llm.generate([[70, 65, 71]], SamplingParams(), use_tqdm=False)
    assert output.prompt_logprobs == [
        None,
        {65: Logprob(0.0, 1, "b")},
        {65: Logprob(0.0, 1, "b"), 71: Logprob(-2.0, 2, "h")},
    ]
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ((), "length")
    assert without.prompt_logprobs is None
