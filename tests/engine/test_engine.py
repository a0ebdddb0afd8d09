"""The engine in one process: the same tokens from every drafter, and what goes wrong."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from outrider.engine.weights import DrafterChange
from outrider.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
)
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Request, SpeculationOptions, ints
from outrider.tests.helpers.verification import assert_fits
from outrider.workers import threads

from ..helpers.engines import Box, complete, engine_of, random_prompts

PROMPTS = random_prompts(8, 96)


SAMPLED = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "logit_bias": {5: 1.5},
    "min_tokens": 4,
}


def sections(tiny) -> dict[str, dict]:
    draft = {"decoding_type": "DraftTarget", "speculative_model": tiny.draft, "max_draft_len": 4}
    return {
        "ngram": {"decoding_type": "NGram", "max_draft_len": 4},
        "separate draft": {**draft, "draft_timeout_s": 30},  # whatever else the machine does
        "colocated draft": {**draft, "placement": "colocated"},
    }


@pytest.fixture(scope="module")
def plain(tiny):
    """What no drafter emits, one request at a time."""
    with engine_of(tiny.target) as engine:
        greedy, _ = complete(engine, PROMPTS, at_once=1)
        sampled, _ = complete(engine, PROMPTS, at_once=1, **SAMPLED)
    return {"greedy": greedy, "sampled": sampled}


@pytest.mark.parametrize("name", ["ngram", "separate draft", "colocated draft"])
@pytest.mark.parametrize("size", [1, 2])
def test_every_drafter_emits_the_plain_tokens(tiny, plain, name, size):
    with engine_of(tiny.target, sections(tiny)[name], tensor_parallel_size=size) as engine:
        for at_once in (1, 8) if size == 1 else (8,):  # batches are the scheduler's, not the ranks'
            greedy, last = complete(engine, PROMPTS, at_once=at_once)
            assert greedy == plain["greedy"]
            sampled, _ = complete(engine, PROMPTS, at_once=at_once, **SAMPLED)
            assert sampled == plain["sampled"]
        (stats,) = engine.stats()["drafters"].values()
    assert stats["faults"] == 0
    assert stats["num_acc_tokens"] > 0
    assert {delta.usage.drafter for delta in last.values()} <= {engine.info.drafter, "none"}


def test_both_forwards_emit_the_same_and_say_which_they_are(tiny, plain, monkeypatch):
    monkeypatch.setattr(threads, "num_cores", lambda: 2)
    for forward in ("family", "bridge"):
        with engine_of(tiny.target, forward=forward) as engine:
            assert complete(engine, PROMPTS)[0] == plain["greedy"]
            stats = engine.stats()
        assert stats["forward"] == engine.info.forward == forward
        assert bool(stats["forward_reason"]) == (forward == "bridge")
        assert stats["operations"] == {"family": "cpu", "bridge": "transformers"}[forward]
        assert stats["all_reduce"] == ""  # one rank
        assert {choice["num_threads"] for choice in stats["threads"]} <= {1, 2}
        assert stats["threads"]
        assert all(choice["one_ms"] > 0 < choice["all_ms"] for choice in stats["threads"])
        step = stats["device_step"]
        assert (step["on"], step["reason"]) == (False, "the device is 'cpu'")


def test_preemption_and_a_tiny_token_budget_change_nothing(tiny, plain):
    speculative = sections(tiny)["separate draft"]
    options = {"num_kv_blocks": 16, "max_model_len": 96, "max_num_batched_tokens": 24}
    with engine_of(tiny.target, speculative, block_size=8, **options) as engine:
        sampled, _ = complete(engine, PROMPTS, **SAMPLED)
        assert sampled == plain["sampled"]
        assert engine.stats()["requests"]["num_preemptions"] > 0


def test_rejection_is_greedy_at_zero_and_runs_above(tiny, plain):
    speculative = {**sections(tiny)["separate draft"], "verification": "rejection"}
    with engine_of(tiny.target, speculative) as engine:
        assert complete(engine, PROMPTS)[0] == plain["greedy"]
        sampled, _ = complete(engine, PROMPTS, temperature=1.0)
        assert all(len(tokens) == 32 for tokens in sampled.values())
        assert engine.stats()["drafters"]["draft_target"]["num_acc_tokens"] > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_drafts_leave_the_targets_law(tiny, rule):
    """Many requests of one prompt against the probabilities that the checkpoint itself gives."""
    import torch
    from transformers import AutoModelForCausalLM

    prompt, heat, top_k, length = [5, 7, 11], 2.0, 3, 3
    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32)
    law = {(): 1.0}
    for _ in range(length):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *path] for path in law])).logits[:, -1]
        values, ids = (logits.double() / heat).topk(top_k)
        law = {
            (*path, token): chance * share
            for (path, chance), tokens, shares in zip(
                law.items(), ids.tolist(), values.softmax(1).tolist()
            )
            for token, share in zip(tokens, shares)
        }
    draft = {**sections(tiny)["separate draft"], "verification": rule, "probs_top": 96}
    with engine_of(tiny.target, draft, max_num_seqs=64) as engine:
        settings = {"temperature": heat, "top_k": top_k, "max_tokens": length}
        emitted, _ = complete(engine, [prompt] * 320, at_once=64, **settings)
        (stats,) = engine.stats()["drafters"].values()
    assert stats["faults"] == 0
    assert 0 < stats["num_acc_tokens"] < stats["num_gen_tokens"]
    counts = Counter(emitted.values())
    assert not counts.keys() - law.keys()
    assert_fits(np.array([counts[path] for path in law]), np.array(list(law.values())))


def test_block_is_greedy_at_zero_and_the_same_after_a_restart(tiny, plain):
    speculative = {**sections(tiny)["colocated draft"], "verification": "block"}
    with engine_of(tiny.target, speculative) as engine:
        assert complete(engine, PROMPTS)[0] == plain["greedy"]
        first, _ = complete(engine, PROMPTS, temperature=1.0)
    with engine_of(tiny.target, speculative) as engine:
        assert complete(engine, PROMPTS, temperature=1.0)[0] == first


def test_relaxed_acceptance_holds_between_its_tokens_alone(tiny, plain):
    section = sections(tiny)["separate draft"] | {
        "use_relaxed_acceptance_for_thinking": True,
        "relaxed_topk": 20,
        "relaxed_delta": 0.9,
        "begin_thinking_phase_token": 94,
        "end_thinking_phase_token": 95,
    }
    calm = [index for index, prompt in enumerate(PROMPTS) if 94 not in prompt]
    greedy = {at: plain["greedy"][str(index)] for at, index in enumerate(calm)}
    greedy = {str(at): tokens for at, tokens in greedy.items() if 94 not in tokens[:-1]}
    assert len(greedy) > 3
    with engine_of(tiny.target, section) as engine:
        emitted, _ = complete(engine, [PROMPTS[index] for index in calm])
        assert {at: emitted[at] for at in greedy} == greedy
        before = engine.stats()["drafters"]["draft_target"]["num_acc_tokens"]
        complete(engine, [[*prompt, 94, 95] for prompt in PROMPTS])
        middle = engine.stats()["drafters"]["draft_target"]["num_acc_tokens"]
        complete(engine, [[*prompt, 95, 94] for prompt in PROMPTS])
        after = engine.stats()["drafters"]["draft_target"]["num_acc_tokens"]
    assert after - middle > middle - before
    with pytest.raises(ConfigError, match="end_thinking_phase_token: 96 is outside"):
        engine_of(tiny.target, {**section, "end_thinking_phase_token": 96}).__enter__()


def test_abort_frees_the_cache(tiny):
    with engine_of(tiny.target) as engine:
        box = Box(lambda count, delta: engine.abort("a") if count == 1 else None)
        sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        engine.submit(Request("a", ints([3, 4]), sampling, seed=1), box)
        assert box.last().finish_reason == "abort"
        assert complete(engine, PROMPTS[:1])
        stats = engine.stats()
        assert stats["kv"]["num_free_blocks"] == stats["kv"]["num_blocks"]


def test_switching_speculation_off_and_on(tiny, plain):
    with engine_of(tiny.target, sections(tiny)["separate draft"]) as engine:
        engine.reconfigure({"enabled": False})
        assert complete(engine, PROMPTS)[0] == plain["greedy"]
        assert engine.stats()["drafters"]["draft_target"]["num_gen_tokens"] == 0
        engine.reconfigure({"max_draft_len": 2})
        assert complete(engine, PROMPTS)[0] == plain["greedy"]
        assert len(engine.stats()["drafters"]["draft_target"]["acc_tokens_per_pos"]) == 2
        for wrong in (
            {"max_draft_len": 9},
            {"max_draft_len": True},
            {"length": 3},
            {"enabled": "false"},
            {"enabled": None},
        ):
            with pytest.raises(ConfigError) as caught:
                engine.reconfigure(wrong)
            assert caught.value.field in wrong


def test_a_request_may_opt_out_or_narrow(tiny):
    with engine_of(tiny.target, sections(tiny)["separate draft"]) as engine:
        box = Box()
        sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        wishes = {
            "off": SpeculationOptions(enabled=False),
            "one": SpeculationOptions(True, 1),
            "sure": SpeculationOptions(min_prob=1.0),
        }
        for name, wish in wishes.items():
            engine.submit(Request(name, ints([3, 4]), sampling, 1, speculation=wish), box)
        usage, tokens = {}, {name: [] for name in wishes}
        while len(usage) < 3:
            delta = box.deltas.get(timeout=30)
            tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                usage[delta.request_id] = delta.usage
        assert (usage["off"].num_draft_tokens, usage["off"].num_steps) == (0, 16)
        assert usage["off"].drafter == "none"
        assert 0 < usage["one"].num_draft_tokens == usage["one"].num_drafts
        assert usage["sure"].num_draft_tokens == 0
        assert tokens["off"] == tokens["one"] == tokens["sure"]


def test_a_least_probability_needs_a_drafter_that_takes_it(tiny):
    members = [{"decoding_type": "NGram"}, {"decoding_type": "Suffix"}]
    sampling = SamplingParams(temperature=0, max_tokens=1)
    wishes = [
        SpeculationOptions(min_prob=0.5, drafters=("ngram",)),
        SpeculationOptions(min_prob=0.5, drafters=("ngram", "suffix")),
        SpeculationOptions(min_prob=0.5),
    ]
    with engine_of(tiny.target, {"decoding_type": "Compose", "members": members}) as engine:
        box = Box()

        def ask(name, wish, emitted=()):
            made = Request(name, ints([3, 4]), sampling, 1, speculation=wish, emitted=ints(emitted))
            engine.submit(made, box)

        with pytest.raises(InvalidRequestError, match="only drafters with prob.*: ngram") as caught:
            ask("a", wishes[0])
        assert caught.value.field == "speculation.min_prob"
        for name, wish in zip("bc", wishes[1:], strict=True):
            ask(name, wish)
            assert box.deltas.get(timeout=30).request_id == name
        engine.change_drafters(DrafterChange(whole={"decoding_type": "None"}))
        with pytest.raises(InvalidRequestError, match="asked here: none"):
            ask("d", wishes[2])
        sampling = SamplingParams(temperature=0, max_tokens=2)
        ask("e", wishes[2], [5])  # it began where a drafter took it
        assert box.deltas.get(timeout=30).finish_reason == "length"


def test_a_drafter_that_finds_nothing_is_named(tiny):
    with engine_of(tiny.target, {"decoding_type": "NGram", "max_draft_len": 3}) as engine:
        _, last = complete(engine, PROMPTS[:1], max_tokens=2)
        (delta,) = last.values()
        assert (delta.usage.drafter, delta.usage.num_draft_tokens) == ("ngram", 0)


def test_bad_settings_name_their_field(tiny):
    draft = sections(tiny)["separate draft"]
    bad = [
        ({"model": "/nowhere"}, None, CheckpointError, "model"),
        ({"tensor_parallel_size": 3}, None, ConfigError, "tensor_parallel_size"),
        (
            {},
            {**draft, "speculative_model": tiny.other_vocabulary},
            ConfigError,
            "speculative_config.speculative_model",
        ),
        (
            {},
            {**draft, "speculative_model": "/nowhere"},
            CheckpointError,
            "speculative_config.speculative_model",
        ),
        ({"num_kv_blocks": 4, "max_model_len": 200}, None, ConfigError, "num_kv_blocks"),
        ({"max_model_len": 257}, None, ConfigError, "max_model_len"),
    ]
    for options, speculative, kind, field in bad:
        options = {"model": tiny.target, **options}
        with pytest.raises(kind) as caught, engine_of(options.pop("model"), speculative, **options):
            pass
        assert caught.value.field == field


def test_impossible_requests_are_refused_before_anything_runs(tiny):
    with engine_of(tiny.target) as engine:
        with pytest.raises(InvalidRequestError) as caught:
            engine.submit(Request("a", ints(range(256)), SamplingParams(), 1), Box())
        assert caught.value.field == "prompt"
