"""Compositions in an engine: what comes out is the target's, whatever the members are."""

from __future__ import annotations

from pathlib import Path

import pytest

import outrider
from outrider import LLM, SamplingParams
from outrider.engine.frontend import RequestOptions
from outrider.errors import ConfigError, InvalidRequestError
from outrider.scheduler.types import SpeculationOptions

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts

DEMO = Path(outrider.__file__).parent / "demo" / "models" / "target"

NGRAM = {"decoding_type": "NGram", "max_draft_len": 4}
MODEL = {"decoding_type": "DraftTarget", "speculative_model": "m", "max_draft_len": 5}
LOOKAHEAD = {"decoding_type": "Lookahead", "max_window_size": 2}


@pytest.mark.parametrize("mode", ["precedence", "extend", "merge"])
@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_the_engine_emits_what_it_does_without(tiny, mode, placement):
    prompts = random_prompts(6, 96) + [[5, 6, 7, 8] * 6]
    model = {**MODEL, "speculative_model": tiny.draft, "placement": placement}
    speculative = {"decoding_type": "Compose", "members": [NGRAM, LOOKAHEAD, model], "mode": mode}
    samplings = {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}
    plain, num_accepted = plain_outputs(tiny.target, prompts, *samplings), 0
    with engine_of(tiny.target, speculative) as engine:
        for sampling, wanted in zip(samplings, plain, strict=True):
            assert complete(engine, prompts, **sampling)[0] == wanted
            drafters = engine.stats()["drafters"]
            assert list(drafters) == ["ngram", "lookahead", "draft_target"]
            assert drafters["draft_target"]["num_acc_tokens"] > num_accepted
            num_accepted = drafters["draft_target"]["num_acc_tokens"]
            assert [each["faults"] for each in drafters.values()] == [0, 0, 0]


def test_greedy_output_holds_under_rejection_too(tiny):
    model = {**MODEL, "speculative_model": tiny.draft}
    data = {"decoding_type": "Compose", "members": [NGRAM, model], "verification": "rejection"}
    merged = {**data, "members": [NGRAM, LOOKAHEAD], "mode": "merge"}
    prompts = random_prompts(5, 96)
    (plain,) = plain_outputs(tiny.target, prompts, {})
    extended = {**data, "mode": "extend", "keep_order": True, "members": [model, NGRAM]}
    for speculative in (data, merged, extended, {**extended, "verification": "block"}):
        with engine_of(tiny.target, speculative) as engine:
            assert complete(engine, prompts)[0] == plain
            complete(engine, prompts, temperature=0.9)
            stats = engine.stats()["drafters"].values()
            assert [each["faults"] for each in stats] == [0, 0]
            assert any(each["num_acc_tokens"] > 0 for each in stats)
    with (
        pytest.raises(ConfigError, match=r"members\.1.*coupled"),
        engine_of(tiny.target, {**data, "mode": "merge"}),
    ):
        pass


def test_several_separate_models_and_one_colocated_at_most(tiny):
    separate = {**MODEL, "speculative_model": tiny.draft, "max_draft_len": 2}
    colocated = {**separate, "placement": "colocated"}
    prompts = random_prompts(3, 96)
    (plain,) = plain_outputs(tiny.target, prompts, {})
    for members in ([separate, separate], [separate, colocated]):
        data = {"decoding_type": "Compose", "members": members, "mode": "merge"}
        with engine_of(tiny.target, data) as engine:
            assert complete(engine, prompts)[0] == plain
            stats = engine.stats()["drafters"]
            assert all(each["num_acc_tokens"] > 0 for each in stats.values())
    data = {"decoding_type": "Compose", "members": [colocated, colocated]}
    with (
        pytest.raises(ConfigError, match=r"members\.1\.placement.*at most"),
        engine_of(tiny.target, data),
    ):
        pass


def test_a_members_model_is_checked_and_named(tiny):
    other = {**MODEL, "speculative_model": tiny.other_vocabulary}
    data = {"decoding_type": "Compose", "members": [NGRAM, other]}
    with (
        pytest.raises(ConfigError, match=r"members\.1\.speculative_model.*97"),
        engine_of(tiny.target, data),
    ):
        pass


@pytest.mark.slow
def test_an_isolated_request_measures_the_drafter_and_not_what_it_stored():
    """The same prompt again takes as many steps as at first; a request that shares takes fewer."""
    section = {"decoding_type": "Compose", "members": [{"decoding_type": "Suffix"}, NGRAM]}
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM(str(DEMO), speculative_config=section, executor="local") as llm:

        def serve(**wish):
            options = RequestOptions(speculation=SpeculationOptions(**wish))
            (output,) = llm.generate(["class Stack:\n"], params, use_tqdm=False, options=options)
            return output.outputs[0].text, output.speculation

        text, first = serve(isolated=True)
        assert first.num_steps < 60
        for wish in ({"isolated": True}, {"enabled": False}, {"isolated": True}):
            again, usage = serve(**wish)
            assert again == text
            assert usage.num_steps == (first.num_steps if wish.get("isolated") else 64)
        again, shared = serve()
        assert (again, shared.num_steps < first.num_steps) == (text, True)
        assert serve(isolated=True, drafters=("ngram",))[1].drafter == "ngram"
        with pytest.raises(InvalidRequestError, match=r"speculation\.drafters: 'nobody'"):
            serve(drafters=("nobody",))
