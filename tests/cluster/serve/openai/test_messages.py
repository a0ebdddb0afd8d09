"""`/v1/messages`, asked by Anthropic's official client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest

from outrider.cluster.serve.access.access import Access
from outrider.config.access import AccessConfig, hash_of

from .conftest import TEMPLATE, TEXT, Server

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
THOUGHT = "the cat sat <on> the mat"
ARGUMENTS = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\nLet me see.\n{CALL}"
USER: list[Any] = [{"role": "user", "content": "a"}]


def client_of(server: Server, **options: Any) -> anthropic.Anthropic:
    options = {"api_key": "none", "max_retries": 0, **options}
    return anthropic.Anthropic(base_url=server.url, **options)


def shown(block: Any) -> dict[str, Any]:
    """A block without its id, which is drawn anew for each answer."""
    return {name: value for name, value in block.model_dump().items() if name != "id"}


def whole_and_streamed(client: anthropic.Anthropic, **options: Any) -> Any:
    """The message, which a stream's events have to add up to."""
    options = {"model": "tiny", "max_tokens": 200, "messages": USER, **options}
    whole = client.messages.create(**options)
    kinds = []
    with client.messages.stream(**options) as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_message()
    raw = [kind for kind in kinds if kind not in ("text", "thinking", "signature", "input_json")]
    assert raw[0] == "message_start"
    assert raw[-2:] == ["message_delta", "message_stop"]
    assert raw.count("content_block_start") == raw.count("content_block_stop") == len(whole.content)
    assert [shown(block) for block in final.content] == [shown(block) for block in whole.content]
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens
    return whole


def test_text_usage_and_the_end(start: Callable[..., Server], tokenizer: Any) -> None:
    server = start(eos=True)
    client = client_of(server)
    message = whole_and_streamed(client, system="be brief")
    (block,) = message.content
    assert (block.type, block.text) == ("text", TEXT)
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "end_turn")
    rendered = "<system>be brief\n<user>a\n<assistant>"
    prompt = tokenizer.encode(rendered)
    assert server.engine.submitted[0].prompt.tolist() == prompt
    usage = message.usage  # the fake engine reports two cached tokens
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(prompt) - 2, 2)
    assert usage.output_tokens == len(tokenizer.encode(TEXT)) + 1
    assert usage.model_dump()["speculation"]["drafter"] == "fake"
    count = client.messages.count_tokens(model="tiny", system="be brief", messages=USER)
    assert count.input_tokens == len(prompt)


def test_reasons_to_stop(server: Server) -> None:
    client = client_of(server)
    cut = whole_and_streamed(client, max_tokens=3)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    met = whole_and_streamed(client, stop_sequences=["mat", "sat"])
    assert (met.stop_reason, met.stop_sequence) == ("stop_sequence", "sat")
    assert met.content[0].text == TEXT.partition("sat")[0]


def test_thinking_text_and_a_call_and_their_way_back(
    start: Callable[..., Server], tokenizer: Any, limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of an answer are a part of the next request as they are."""
    monkeypatch.setattr(limits, "max_model_len", 2048)
    server = start(ANSWER, eos=True, config={"tool_call_parser": "hermes", **REASONS})
    client = client_of(server)
    message = whole_and_streamed(client, tools=[WEATHER], thinking=BUDGET)
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking.strip()) == ("thinking", THOUGHT)
    assert (text.type, text.text.strip()) == ("text", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Rome"})
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    said = {"type": "text", "text": "and then?"}
    history = [
        *USER,
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": [said, result]},
    ]
    client.messages.create(model="tiny", max_tokens=4, messages=history, tools=[WEATHER])
    prompt = tokenizer.decode(server.engine.submitted[-1].prompt.tolist())
    after = prompt.partition("<user>a\n")[2]
    assert after == tokenizer.decode(
        tokenizer.encode(
            f"<assistant><think>{thinking.thinking}</think>{text.text}<tool_call>Rome</tool_call>\n"
            f"<tool>sunny{call.id}\n<user>and then?\n<assistant>"
        )
    )


REASONS: dict[str, Any] = {"reasoning_parser": "qwen3", "chat_template": TEMPLATE}
BUDGET: Any = {"type": "enabled", "budget_tokens": 100}


def test_thinking_may_be_left_out_and_switched_off(
    start: Callable[..., Server], tokenizer: Any
) -> None:
    server = start(ANSWER, eos=True, config=REASONS)
    client = client_of(server)
    hidden = whole_and_streamed(client, thinking={**BUDGET, "display": "omitted"})
    assert (hidden.content[0].type, hidden.content[0].thinking) == ("thinking", "")
    client.messages.create(model="tiny", max_tokens=4, messages=USER, thinking={"type": "disabled"})
    prompt = tokenizer.decode(server.engine.submitted[-1].prompt.tolist())
    assert prompt.endswith("<think></think>")


def test_a_budget_of_thinking_reaches_the_engine(start: Callable[..., Server]) -> None:
    server = start(ANSWER, eos=True, config=REASONS)
    create = {"model": "tiny", "max_tokens": 200, "messages": USER}
    client_of(server).messages.create(**create, thinking=BUDGET)
    budget = server.engine.submitted[-1].sampling.thinking_budget
    assert (budget.max_tokens, budget.begin, budget.end) == (100, "<think>", "</think>")
    for name in ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens"):
        body = {**create, name: 7}
        assert server.post("/v1/chat/completions", **body).status_code == 200
        assert server.engine.submitted[-1].sampling.thinking_budget.max_tokens == 7
    body = {**create, "thinking_budget_tokens": -1}
    assert server.post("/v1/chat/completions", **body).status_code == 200
    assert server.engine.submitted[-1].sampling.thinking_budget is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"thinking_budget_tokens": -2}, "thinking_budget_tokens"),
        ({"thinking_token_budget": 7, "thinking_budget": 8}, "thinking_budget"),
        ({"thinking_budget": 7, "thinking_budget_tokens": -1}, "thinking_budget_tokens"),
    ],
)
def test_budgets_that_are_none_or_differ(
    start: Callable[..., Server], fields: dict[str, int], named: str
) -> None:
    server = start(ANSWER, eos=True, config=REASONS)
    answer = server.post("/v1/chat/completions", model="tiny", messages=USER, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == named


def test_where_there_is_no_thinking_a_budget_bounds_nothing(server: Server) -> None:
    create = {"model": "tiny", "max_tokens": 200, "messages": USER}
    client_of(server).messages.create(**create, thinking=BUDGET)
    assert server.engine.submitted[-1].sampling.thinking_budget is None
    for name in ("thinking_token_budget", "thinking_budget"):
        answer = server.post("/v1/chat/completions", **create, **{name: 7})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name


def test_the_last_turn_of_the_assistants_is_continued(server: Server, tokenizer: Any) -> None:
    history = [*USER, {"role": "assistant", "content": "the cat"}]
    client_of(server).messages.create(model="tiny", max_tokens=4, messages=history)
    prompt = tokenizer.decode(server.engine.submitted[-1].prompt.tolist())
    assert prompt.endswith("<assistant>the cat")


def test_a_line_that_changes_with_every_request_is_no_part_of_the_prompt(
    server: Server, tokenizer: Any
) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1f"},
        {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
    ]
    client_of(server).messages.create(model="tiny", max_tokens=4, system=system, messages=USER)
    prompt = tokenizer.decode(server.engine.submitted[-1].prompt.tolist())
    assert prompt.startswith("<system>be brief\n<user>")


USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0.type"),
        (
            {"messages": [{"role": "user", "content": [RESULT]}]},
            "messages.0.content.0.tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "input": "x"}]}]},
            "messages.0.content.0.input",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]},
            "messages.0.content.0.text",
        ),
        ({"system": [IMAGE]}, "system.0.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{**WEATHER, "name": "no spaces"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4}}, "thinking.budget_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop_sequences": ["a"] * 200}, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers.0"),
        ({"context_management": {"edits": [{"type": "x"}]}}, "context_management.edits"),
        ({"context_management": {"edits": 1}}, "context_management.edits"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"max_token": 5}, "max_token"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_wrong_is_named_in_anthropics_shape(
    server: Server, changes: dict[str, Any], field: str
) -> None:
    body = {"model": "tiny", "max_tokens": 4, "messages": USER, **changes}
    response = server.post("/v1/messages", **{k: v for k, v in body.items() if v is not None})
    error = response.json()
    assert (error["type"], error["error"]["param"]) == ("error", field), error
    assert error["error"]["type"] == (
        "not_found_error" if field == "model" else "invalid_request_error"
    )
    assert 400 <= response.status_code < 500


def test_keys_errors_and_unknown_paths(start: Callable[..., Server]) -> None:
    """Anthropic's client sends its key in a header of its own, and gets its own exceptions."""
    keys = [{"hash": hash_of("right-key-123"), "tenant": "mine"}]
    server = start(access=Access(AccessConfig.model_validate({"keys": keys})))
    create = {"model": "tiny", "max_tokens": 4, "messages": USER}
    assert client_of(server, api_key="right-key-123").messages.create(**create).content
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        client_of(server, api_key="wrong").messages.create(**create)
    with pytest.raises(anthropic.NotFoundError):
        client_of(server, api_key="right-key-123").messages.create(**{**create, "model": "other"})
    headers = {"x-api-key": "right-key-123"}
    lost = httpx.get(f"{server.url}/v1/messages/batches", headers=headers)
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")


def test_an_error_in_a_stream_is_its_last_event(server: Server) -> None:
    server.engine.free_steps = 1
    body = {"model": "tiny", "max_tokens": 40, "messages": USER, "stream": True}
    with server.http.stream("POST", "/v1/messages", json=body) as response:
        rest = response.iter_lines()
        assert next(rest) == "event: message_start"
        server.engine.error = "a worker raised"
        server.engine.gate.set()
        lines = [line for line in rest if line]
    assert lines[-2] == "event: error"
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "api_error"
