"""What the frontend makes of prompts, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.engine.frontend import Frontend, RequestOptions, derive_seed
from outrider.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    PromptTooLongError,
)
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import SpeculationOptions
from outrider.workers.transport.wire import decode, encode


@pytest.fixture(scope="module")
def frontend(config: EngineConfig, limits: Any) -> Frontend:
    return Frontend(config, limits)


def test_text_becomes_a_request_that_crosses_processes(frontend: Frontend) -> None:
    prompt = frontend.text_prompt("the cat")
    wish = SpeculationOptions(max_draft_len=2, min_prob=0.25)
    options = RequestOptions(wish, priority=3, tenant="t")
    (request,) = frontend.requests("r", prompt, SamplingParams(max_tokens=None), options)
    assert request.prompt.tolist() == list(prompt.token_ids)
    assert request.sampling.max_tokens == 256 - len(prompt.token_ids)
    assert request.eos_token_ids == (299,)
    copy = decode(encode(request))
    assert copy.sampling == request.sampling
    assert (copy.id, copy.seed, copy.priority, copy.tenant) == ("r", request.seed, 3, "t")
    assert copy.speculation == wish


@pytest.mark.parametrize("wrong", [-0.1, 1.5, float("nan"), "0.5", True])
def test_a_least_probability_is_checked(frontend: Frontend, wrong: Any) -> None:
    options = RequestOptions(SpeculationOptions(min_prob=wrong))
    with pytest.raises(InvalidRequestError) as caught:
        frontend.requests("r", frontend.text_prompt("a"), SamplingParams(), options)
    assert caught.value.field == "speculation.min_prob"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (RequestOptions(SpeculationOptions(max_draft_len="4")), "speculation.max_draft_len"),  # type: ignore[arg-type]
        (RequestOptions(SpeculationOptions(max_draft_len=-1)), "speculation.max_draft_len"),
        (RequestOptions(SpeculationOptions(drafters="ngram")), "speculation.drafters"),  # type: ignore[arg-type]
        (RequestOptions({"enabled": False}), "speculation"),  # type: ignore[arg-type]
        (RequestOptions(priority="high"), "priority"),  # type: ignore[arg-type]
        (RequestOptions(priority=2**40), "priority"),
        (RequestOptions(SpeculationOptions(enabled="no")), "speculation.enabled"),  # type: ignore[arg-type]
        (RequestOptions(pools=True), "pools"),
        (RequestOptions(tenant=None), "tenant"),  # type: ignore[arg-type]
        (RequestOptions(shown_ids=[1]), "shown_ids"),  # type: ignore[arg-type]
    ],
)
def test_options_of_another_type_never_reach_the_scheduler(
    frontend: Frontend, options: RequestOptions, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        frontend.requests("r", frontend.text_prompt("a"), SamplingParams(), options)
    assert caught.value.field == field


def test_the_engines_seed_is_that_of_requests_without_one(config: Any, limits: Any) -> None:
    def seeds(seed: int | None) -> list[int]:
        own = Frontend(config.model_copy(update={"seed": seed}), limits)
        sampling = SamplingParams(max_tokens=4)
        prompt = own.token_prompt([1, 2])
        return [own.requests(str(n), prompt, sampling)[0].seed for n in range(3)]

    assert seeds(7) == seeds(7) != seeds(8)
    assert len({*seeds(7), *seeds(None), *seeds(None)}) == 9


def test_seeds(frontend: Frontend) -> None:
    prompt = frontend.text_prompt("the cat")
    many = frontend.requests("r", prompt, SamplingParams(n=3, seed=7))
    assert [request.id for request in many] == ["r-0", "r-1", "r-2"]
    assert [request.seed for request in many] == [7, derive_seed(7, 1), derive_seed(7, 2)]
    assert len({request.seed for request in many}) == 3
    again = frontend.requests("r", prompt, SamplingParams(n=3, seed=7))
    assert [request.seed for request in again] == [request.seed for request in many]
    drawn = {frontend.requests("r", prompt, SamplingParams())[0].seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(-(2**63) <= derive_seed(-5, index) < 2**63 for index in range(50))


def test_ignore_eos(frontend: Frontend) -> None:
    prompt = frontend.text_prompt("the cat")
    (request,) = frontend.requests("r", prompt, SamplingParams(ignore_eos=True))
    assert request.eos_token_ids == ()


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field"),
    [(256, 1, "prompt"), (300, None, "prompt"), (250, 7, "max_tokens")],
)
def test_too_long(frontend: Frontend, num_prompt: int, max_tokens: int | None, field: str) -> None:
    prompt = frontend.token_prompt([5] * num_prompt)
    with pytest.raises(PromptTooLongError, match="256") as caught:
        frontend.requests("r", prompt, SamplingParams(max_tokens=max_tokens))
    assert caught.value.field == field
    assert str(num_prompt) in caught.value.message


def test_the_context_can_be_filled(frontend: Frontend) -> None:
    prompt = frontend.token_prompt([5] * 250)
    assert frontend.requests("r", prompt, SamplingParams(max_tokens=6))


@pytest.mark.parametrize("bad", [[], [304], [-1], [True], ["a"], [1.5]])
def test_bad_token_ids(frontend: Frontend, bad: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match="prompt") as caught:
        frontend.requests("r", frontend.token_prompt(bad), SamplingParams())
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"logit_bias": {304: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (-2,)}, "stop_token_ids"),
        ({"allowed_token_ids": (3, 304)}, "allowed_token_ids"),
        ({"bad_words": ("a", "a\ud800")}, "bad_words"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"stop": "a\ud800"}, "stop"),
    ],
)
def test_bad_settings(frontend: Frontend, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        frontend.requests("r", frontend.text_prompt("a"), SamplingParams(**settings))
    assert caught.value.field == field


def test_half_a_surrogate_pair(frontend: Frontend) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        frontend.text_prompt("a\ud800b")
    options = RequestOptions(tenant="\ud800")
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        frontend.requests("r", frontend.text_prompt("a"), SamplingParams(), options)


def test_chat(frontend: Frontend) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    prompt = frontend.chat_prompt(messages)
    assert prompt.text == "<user>the cat\n<assistant>"
    assert frontend.tokenizer.decode(list(prompt.token_ids)) == prompt.text
    with pytest.raises(InvalidRequestError, match="chat template"):
        frontend.chat_prompt([{"role": "user"}])


def test_own_chat_template(config: EngineConfig, limits: Any, tmp_path: Any) -> None:
    text = "{{ messages[0].content | upper }}"
    path = tmp_path / "template.jinja"
    path.write_text(text)
    for template in (text, str(path)):
        own = Frontend(config.model_copy(update={"chat_template": template}), limits)
        assert own.chat_prompt([{"role": "user", "content": "cat"}]).text == "CAT"
    for wrong in ("{{ broken", str(tmp_path / "missing.jinja")):
        with pytest.raises(ConfigError) as caught:
            Frontend(config.model_copy(update={"chat_template": wrong}), limits)
        assert caught.value.field == "chat_template"


def test_no_tokenizer(config: EngineConfig, limits: Any, tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match="tokenizer"):
        Frontend(config.model_copy(update={"tokenizer": str(tmp_path)}), limits)
