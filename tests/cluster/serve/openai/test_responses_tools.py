"""Calls and reasoning in `/v1/responses`, through the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

import httpx
import openai
import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field, TypeAdapter

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.answers import Response
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.engine.frontend import Frontend
from outrider.tests.helpers.engines import engine_of
from outrider.tests.helpers.models import write_models

Connect = Callable[..., tuple[openai.OpenAI, Any]]


class Weather(BaseModel):
    """Arguments of a call, and an answer's form."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=0, le=9)


WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": Weather.model_json_schema(),
    "strict": True,
}
PING: dict[str, Any] = {"type": "function", "name": "ping", "description": "Says pong."}
ARGUMENTS = '{"city": "Rome", "days": 3}'
CALLS = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
)
THOUGHT = "the cat sat <on> the mat"
TEXT = f"<think>\n{THOUGHT}\n</think>\n\nLet me see.\n{CALLS}"
# An item's events, in order; deltas as often as there are any.
EVENTS = {
    "reasoning": ["content_part.added", "reasoning_text.delta", "reasoning_text.done"],
    "message": ["content_part.added", "output_text.delta", "output_text.done"],
    "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
}


def bare(items: list[Any]) -> list[dict[str, Any]]:
    """Items without what is drawn anew for each answer."""
    shown = [item.model_dump() for item in items]
    return [{name: each[name] for name in each if name not in ("id", "call_id")} for each in shown]


def whole_and_streamed(client: openai.OpenAI, **options: Any) -> Any:
    """The response, which a stream's events have to add up to."""
    options = {"model": "tiny", "input": "a cat", "max_output_tokens": 400, **options}
    whole = client.responses.create(**options)
    events = list(client.responses.create(stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert events[-1].type == f"response.{final.status}"
    assert (bare(final.output), final.status) == (bare(whole.output), whole.status)
    assert final.usage == whole.usage
    TypeAdapter(Response).validate_python(whole.model_dump(exclude_unset=True))
    for index, item in enumerate(final.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in mine))
        inner = EVENTS[item.type] + ["content_part.done"] * (item.type != "function_call")
        assert kinds == ["output_item.added", *inner, "output_item.done"]
        assert {event.item_id for event in mine[1:-1]} == {item.id} == {mine[0].item.id}
        assert mine[0].item.status == "in_progress"
        assert mine[-1].item == item
        text = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        found = item.arguments if item.type == "function_call" else item.content[0].text
        assert text == found
    return whole


def test_reasoning_text_and_calls(connect: Connect) -> None:
    client, _ = connect(TEXT)
    response = whole_and_streamed(client, tools=[WEATHER, PING])
    thought, message, weather, ping = response.output
    assert thought.model_dump(include={"type", "summary", "status", "encrypted_content"}) == {
        "type": "reasoning",
        "summary": [],
        "status": "completed",
        "encrypted_content": None,
    }
    assert [part.text for part in thought.content] == [THOUGHT]
    assert message.content[0].text == response.output_text == "Let me see."
    assert (weather.name, weather.arguments) == ("get_weather", ARGUMENTS)
    assert (ping.name, ping.arguments, ping.status) == ("ping", "{}", "completed")
    assert weather.call_id.startswith("call_")
    assert weather.call_id != ping.call_id
    assert response.usage.output_tokens_details.reasoning_tokens > 5
    assert [tool.name for tool in response.tools] == ["get_weather", "ping"]
    assert (response.status, response.tool_choice) == ("completed", "auto")
    single = whole_and_streamed(client, tools=[WEATHER, PING], parallel_tool_calls=False)
    assert [item.type for item in single.output] == ["reasoning", "message", "function_call"]
    assert single.parallel_tool_calls is False
    without = whole_and_streamed(client, tools=[WEATHER], tool_choice="none")
    assert [item.type for item in without.output] == ["reasoning", "message"]
    assert without.output_text == f"Let me see.\n{CALLS}"


def test_cut_off_items_are_incomplete(connect: Connect, tokenizer: Any) -> None:
    client, _ = connect(TEXT)
    for num_tokens, kinds in (
        (12, ["reasoning"]),
        (-12, ["reasoning", "message", "function_call"]),
    ):
        limit = num_tokens % len(tokenizer.encode(TEXT))
        response = whole_and_streamed(client, tools=[WEATHER], max_output_tokens=limit)
        assert [item.type for item in response.output][: len(kinds)] == kinds
        assert response.output[-1].status == response.status == "incomplete"
        assert {item.status for item in response.output[:-1]} <= {"completed"}


def test_logprobs_are_those_of_the_text(connect: Connect, tokenizer: Any) -> None:
    """Tokens of reasoning and of calls have none, however the text is cut into deltas."""
    client, engine = connect(TEXT)
    more: dict[str, Any] = {"include": ["message.output_text.logprobs"], "tools": [WEATHER, PING]}
    for num_per_step in (1, 3, 50):
        engine.num_per_step = num_per_step
        response = whole_and_streamed(client, **more)
        (part,) = response.output[1].content
        assert "".join(entry.token for entry in part.logprobs).strip() == "Let me see."


def test_trace_beside_items(connect: Connect) -> None:
    client, _ = connect(TEXT)
    events = list(
        client.responses.create(
            model="tiny",
            input="a",
            stream=True,
            tools=[WEATHER, PING],
            extra_body={"speculation": {"trace": True}},
        )
    )
    steps = [step for event in events for step in getattr(event, "speculation_trace", ())]
    whole = events[-1].response.speculation_trace
    assert steps == whole[: len(steps)]
    assert len(whole) - len(steps) <= 5  # of marks behind the last delta


def test_an_answer_is_the_next_input(connect: Connect, tokenizer: Any) -> None:
    """Reasoning, text and calls become one turn; results follow with their calls' ids."""
    client, engine = connect(TEXT)
    first = client.responses.create(model="tiny", input="a", tools=[WEATHER, PING])
    weather, ping = first.output[2:]
    history: list[Any] = [{"role": "user", "content": "a"}]
    history += [item.model_dump() for item in first.output]
    rain = [{"type": "input_text", "text": "rain"}]
    history += [
        {"type": "function_call_output", "call_id": weather.call_id, "output": rain},
        {"type": "function_call_output", "call_id": ping.call_id, "output": "pong"},
    ]
    client.responses.create(model="tiny", input=history, tools=[WEATHER], instructions="be brief")
    prompt = tokenizer.decode(engine.submitted[-1].prompt.tolist())
    assert prompt == (
        f"<tool>get_weather{json.dumps(WEATHER['parameters'])}<system>be brief\n<user>a\n"
        f"<assistant><think>{THOUGHT}</think>Let me see.<tool_call>Rome</tool_call>"
        f"<tool_call></tool_call>\n<tool>rain{weather.call_id}\n<tool>pong{ping.call_id}\n"
        "<assistant>"
    )
    with pytest.raises(openai.BadRequestError, match="no function_call before it") as caught:
        client.responses.create(model="tiny", input=[history[-1]], tools=[WEATHER])
    assert caught.value.param == "input.0.call_id"


def test_effort(connect: Connect, tokenizer: Any) -> None:
    client, engine = connect("ok")

    def prompt(effort: Any) -> str:
        answer = client.responses.create(model="tiny", input="a", reasoning={"effort": effort})
        assert answer.reasoning is not None
        assert answer.reasoning.effort == effort
        return str(tokenizer.decode(engine.submitted[-1].prompt.tolist()))

    assert prompt("none").endswith("<assistant><think></think>")
    with pytest.raises(openai.BadRequestError, match="template has no such setting") as caught:
        prompt("high")
    assert caught.value.param == "reasoning.effort"
    client, engine = connect("ok", chat_template="{{ reasoning_effort }}")
    assert prompt("max") == "max"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{**PING, "name": "a b"}]}, "tools.0.name"),
    ({"tools": [PING, {**WEATHER, "parameters": {"type": "strin"}}]}, "tools.1.parameters"),
    ({"tools": [PING], "tool_choice": {"type": "function", "name": "pong"}}, "tool_choice.name"),
    ({"tools": [PING], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    (
        {
            "tools": [PING],
            "tool_choice": "required",
            "text": {"format": {"type": "json_object"}},
        },
        "tool_choice",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[1"}]},
        "input.0.arguments",
    ),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content"),
    ({"input": [{"type": "reasoning", "summary": [{"text": "x"}]}]}, "input.0.summary"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: str(value)[-40:])
def test_bad_bodies(connect: Connect, body: dict[str, Any], param: str) -> None:
    client, engine = connect("ok")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "a", **body})
    assert caught.value.param == param
    assert "function." not in caught.value.message
    assert engine.submitted == []


@pytest.fixture(scope="module")
def app(tokenizer_path: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of random weights with a drafter."""
    models = write_models(tokenizer_path, tmp_path_factory.mktemp("responses"))
    section = {"decoding_type": "NGram", "max_draft_len": 4}
    with engine_of(
        models["target"], section, served_model_name="tiny", tool_call_parser="hermes"
    ) as engine:
        frontend = Frontend(engine._config, engine.info)
        yield build_http(Edge(EngineClient(engine), frontend, EdgeMetrics("tiny")))


def test_enforced_calls_and_forms(app: Any) -> None:
    """`parse` of the client: a required call's arguments, and a text of a given form."""
    with TestClient(app) as http:
        client = openai.OpenAI(
            base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0
        )
        tool = openai.pydantic_function_tool(Weather, name="get_weather")["function"]
        options: dict[str, Any] = {"model": "tiny", "input": "a cat", "max_output_tokens": 200}
        for choice in ("required", {"type": "function", "name": "get_weather"}):
            called = client.responses.parse(
                **options,
                tools=[{"type": "function", **tool}],
                tool_choice=choice,
                parallel_tool_calls=False,
                extra_body={"seed": 3},
            )
            (call,) = called.output
            assert call.type == "function_call"
            assert Weather.model_validate_json(call.arguments)
        with client.responses.stream(**options, text_format=Weather) as stream:
            final = stream.until_done().get_final_response()
        assert isinstance(final.output_parsed, Weather)


def test_the_async_clients_stream_helper(app: Any) -> None:
    async def ask() -> Any:
        transport = httpx.ASGITransport(app)
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(
                base_url="http://testserver/v1", api_key="none", http_client=http
            ) as client,
            client.responses.stream(
                model="tiny",
                input="a cat",
                tools=[WEATHER],
                tool_choice="required",
                parallel_tool_calls=False,
                max_output_tokens=200,
                extra_body={"seed": 3},
            ) as stream,
        ):
            deltas = [e async for e in stream if e.type == "response.function_call_arguments.delta"]
            return deltas, await stream.get_final_response()

    deltas, final = asyncio.run(ask())
    (call,) = final.output
    assert "".join(each.delta for each in deltas) == deltas[-1].snapshot == call.arguments
    assert Weather.model_validate_json(call.arguments)
