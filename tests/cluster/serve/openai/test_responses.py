"""`/v1/responses`, asked by the official client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.responses import response_create_params

from .conftest import TEXT, Server

ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def test_create(start: Callable[..., Server], tokenizer: Any) -> None:
    server = start(eos=True)
    response = server.openai.responses.create(
        model="tiny", input="a", instructions="be brief", temperature=0, metadata={"k": "v"}
    )
    assert response.output_text == TEXT
    assert (response.status, response.incomplete_details, response.error) == ("completed",) + (
        None,
    ) * 2
    assert (response.metadata, response.temperature) == ({"k": "v"}, 0)
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    rendered = "<system>be brief\n<user>a\n<assistant>"
    assert server.engine.submitted[0].prompt.tolist() == tokenizer.encode(rendered)
    assert response.usage is not None
    assert response.usage.input_tokens == len(tokenizer.encode(rendered))
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert response.usage.output_tokens == len(tokenizer.encode(TEXT)) + 1
    assert response.usage.model_dump()["speculation"]["drafter"] == "fake"


def test_a_conversation_with_an_earlier_answer(server: Server, tokenizer: Any) -> None:
    """The output of a response is a part of the next one's input as it is."""
    first = server.openai.responses.create(model="tiny", input="a", max_output_tokens=4)
    assert first.status == "incomplete"
    assert first.incomplete_details is not None
    assert first.incomplete_details.reason == "max_output_tokens"
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]
    history += [item.model_dump() for item in first.output]
    history += [{"role": "user", "content": "b"}]
    server.openai.responses.create(model="tiny", input=history, max_output_tokens=4)
    rendered = f"<user>a\n<assistant>{first.output_text}\n<user>b\n<assistant>"
    assert server.engine.submitted[-1].prompt.tolist() == tokenizer.encode(rendered)


@pytest.mark.parametrize("logprobs", [False, True])
def test_events_in_their_order(server: Server, logprobs: bool) -> None:
    more: dict[str, Any] = {"include": ["message.output_text.logprobs"]} if logprobs else {}
    events = list(
        server.openai.responses.create(
            model="tiny", input="a", max_output_tokens=7, stream=True, **more
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [*ORDER, "response.incomplete"]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    last = events[-1].response
    assert "".join(event.delta for event in deltas) == last.output_text
    assert {event.item_id for event in deltas} == {last.output[0].id}
    found = last.output[0].content[0].logprobs
    assert sum(len(event.logprobs) for event in deltas) == len(found) == (7 if logprobs else 0)
    whole = server.openai.responses.create(model="tiny", input="a", max_output_tokens=7, **more)
    assert whole.output_text == last.output_text
    assert whole.usage is not None
    assert whole.usage.model_dump() == last.usage.model_dump()


def test_the_clients_stream_helper(start: Callable[..., Server]) -> None:
    server = start(eos=True)
    with server.openai.responses.stream(model="tiny", input="a") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert (text, final.output_text, final.status) == (TEXT, TEXT, "completed")


def test_a_schema_reaches_the_engine(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
    body = {"model": "tiny", "input": "a", "max_output_tokens": 3, "text": {"format": wanted}}
    answer = server.post("/v1/responses", **body)
    assert answer.json()["text"]["format"] == wanted
    constraint = server.engine.submitted[0].sampling.structured_outputs
    assert schema == json.loads(constraint.model_dump(exclude_none=True, by_alias=True)["json"])
    wanted["schema"] = {"type": "nothing"}
    error = server.post("/v1/responses", **body).json()["error"]
    assert error["param"].startswith("text.format.schema")


def test_a_length_without_an_end(server: Server) -> None:
    """vLLM's extensions, as its load client sends them."""
    more = {"ignore_eos": True, "min_tokens": 3}
    answer = server.openai.responses.create(
        model="tiny", input="a", max_output_tokens=5, extra_body=more
    )
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.ignore_eos, sampling.min_tokens) == (True, 3)
    assert answer.status == "incomplete"


def test_refused_by_name(server: Server) -> None:
    for name, value in (
        ("store", True),
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("tools.0.type", [{"type": "web_search"}]),
        ("tool_choice", "required"),
        ("truncation", "auto"),
        ("reasoning.effort", {"effort": "high"}),
        ("reasoning.summary", {"summary": "detailed"}),
        ("reasoning.context", {"context": "all_turns"}),
        (
            "text.format.name",
            {"format": {"type": "json_schema", "name": "a" * 300, "schema": {}}},
        ),
        ("prompt", {"id": "p"}),
        ("max_output_tokens", 0),
        ("max_output_tokens", 9999),
        ("temperature", -1),
        ("top_logprobs", 21),
        ("stream_options", {}),
        ("nonsense", 1),
    ):
        top = name.partition(".")[0]
        with pytest.raises(openai.BadRequestError) as caught:
            server.openai.responses.create(model="tiny", input="a", extra_body={top: value})
        assert caught.value.param == name
        assert "max_tokens" not in caught.value.message
    image = {"type": "input_image", "image_url": "x"}
    for items, field in (
        ([], "input"),
        ([{"role": "robot", "content": "a"}], "input.0.role"),
        ([{"role": "user", "content": "a", "kind": 1}], "input.0.kind"),
        ([{"type": "item_reference", "id": "msg_1"}], "input.0.type"),
        ([{"role": "user", "content": [image]}], "input.0.content.0.type"),
        ("a" * 3000, "input"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            server.openai.responses.create(model="tiny", input=items)  # type: ignore[arg-type]
        assert caught.value.param == field
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.create(model="other", input="a")
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve("resp_1")
    assert server.engine.submitted == []


def test_every_documented_field_is_known(server: Server) -> None:
    """None asks for nothing; no documented field is an unknown one."""
    for name in response_create_params.ResponseCreateParamsBase.__annotations__:
        if name in ("model", "input", "access_programs", "image"):  # not of text
            continue
        body = {"model": "tiny", "input": "a", "max_output_tokens": 2, name: None}
        if name == "max_output_tokens":
            body["stop"] = ["a"]
        answer = server.post("/v1/responses", **body)
        assert answer.status_code == 200, (name, answer.text)


def test_an_error_before_and_in_the_stream(server: Server) -> None:
    server.engine.error = "out of luck"
    with pytest.raises(openai.InternalServerError, match="out of luck"):
        server.openai.responses.create(model="tiny", input="a", stream=True)
    server.engine.error = None
    server.engine.pause_s = 0.05
    events = server.openai.responses.create(
        model="tiny", input="a", max_output_tokens=200, stream=True
    )
    kinds = [next(events).type]
    server.engine.error = "out of luck"
    *_, last = events
    assert (kinds[0], last.type, "out of luck" in last.message) == (
        "response.created",
        "error",
        True,
    )
