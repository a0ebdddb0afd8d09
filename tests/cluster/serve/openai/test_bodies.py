"""Bodies that are refused, and the field that each error names."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from outrider.cluster.serve.openai import messages
from outrider.cluster.serve.openai import parse as parsing
from outrider.cluster.serve.openai.messages import MessagesBody
from outrider.cluster.serve.openai.parse import IGNORED, UNSUPPORTED
from outrider.cluster.serve.openai.protocol import ChatBody, CompletionBody
from outrider.cluster.serve.openai.responses import ResponsesBody
from outrider.cluster.serve.openai.responses import body as responses
from outrider.config.compat.table import REQUEST, Ignored
from outrider.errors import InvalidRequestError

from .conftest import CHAT, COMPLETION, Server

IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/completions", {"model": "tiny"}, 400, "prompt"),
    ("/v1/completions", {"model": "tiny", "user": "a", "cache_prompt": True}, 400, "prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": ""}, 400, "prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": []}, 400, "prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": [[]]}, 400, "prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": ["a", 1]}, 400, "prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": [999]}, 400, "prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": "a" * 600}, 400, "prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": "a\ud800"}, 400, "prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": ["a"] * 1025}, 400, "prompt"),
    ("/v1/completions", {**COMPLETION, "max_tokens": 9999}, 400, "max_tokens"),
    ("/v1/completions", {**COMPLETION, "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", {**COMPLETION, "max_tokens": "5"}, 400, "max_tokens"),
    ("/v1/completions", {**COMPLETION, "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {**COMPLETION, "temperature": True}, 400, "temperature"),
    ("/v1/completions", {**COMPLETION, "top_p": 0}, 400, "top_p"),
    ("/v1/completions", {**COMPLETION, "n": 0}, 400, "n"),
    ("/v1/completions", {**COMPLETION, "n": 1000}, 400, "n"),
    ("/v1/completions", {**COMPLETION, "best_of": 1, "n": 2}, 400, "best_of"),
    ("/v1/completions", {**COMPLETION, "best_of": 999}, 400, "best_of"),
    ("/v1/completions", {**COMPLETION, "suffix": "b"}, 400, "suffix"),
    ("/v1/completions", {**COMPLETION, "logprobs": 99}, 400, "logprobs"),
    ("/v1/completions", {**COMPLETION, "prompt_logprobs": 21}, 400, "prompt_logprobs"),
    ("/v1/completions", {**COMPLETION, "prompt_logprobs": -1}, 400, "prompt_logprobs"),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"9999": 1}}, 400, "logit_bias"),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"5": 101}}, 400, "logit_bias.5"),
    ("/v1/completions", {**COMPLETION, "stop": 5}, 400, "stop"),
    ("/v1/completions", {**COMPLETION, "stop": ""}, 400, "stop"),
    ("/v1/completions", {**COMPLETION, "stop": ["\ud800"]}, 400, "stop"),
    ("/v1/completions", {**COMPLETION, "suffix": "\ud800"}, 400, "suffix"),
    ("/v1/completions", {**COMPLETION, "cache_salt": "\ud800"}, 400, "cache_salt"),
    ("/v1/completions", {**COMPLETION, "request_id": "\ud800"}, 400, "request_id"),
    ("/v1/responses", {"input": "a", "metadata": {"a": "\ud800"}}, 400, "metadata"),
    ("/v1/completions", {**COMPLETION, "\ud800": 1}, 400, "\\ud800"),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"a": 1}}, 400, "logit_bias.a"),
    ("/v1/completions", {**COMPLETION, "seed": 2**70}, 400, "seed"),
    ("/v1/completions", {**COMPLETION, "min_tokens": 50}, 400, "min_tokens"),
    ("/v1/completions", {**COMPLETION, "temprature": 1}, 400, "temprature"),
    ("/v1/completions", {**COMPLETION, "stream_options": {}}, 400, "stream_options"),
    ("/v1/completions", {**COMPLETION, "speculation": {"len": 1}}, 400, "speculation.len"),
    (
        "/v1/completions",
        {**COMPLETION, "speculation": {"max_draft_len": 1025}},
        400,
        "speculation.max_draft_len",
    ),
    *(
        (
            "/v1/completions",
            {**COMPLETION, "speculation": {"min_prob": wrong}},
            400,
            "speculation.min_prob",
        )
        for wrong in (-0.1, 1.01, "0.5")
    ),
    (
        "/v1/completions",
        {**COMPLETION, "speculation": {"drafters": ["fake", "nobody"]}},
        400,
        "speculation.drafters",
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "speculation": {"drafters": []}},
        400,
        "speculation.drafters",
    ),
    ("/v1/completions", {**COMPLETION, "model": "other"}, 404, "model"),
    ("/v1/chat/completions", {"model": "tiny", "messages": []}, 400, "messages"),
    ("/v1/chat/completions", {**CHAT, "messages": "a"}, 400, "messages"),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "x"}]}, 400, "messages.0.role"),
    ("/v1/chat/completions", {**CHAT, "messages": [IMAGE]}, 400, "messages.0.content"),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user"}]}, 400, "messages.0.content"),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools.0.function"),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json"}},
        400,
        "response_format.type",
    ),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 3}, 400, "top_logprobs"),
    ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 9999}, 400, "max_completion_tokens"),
    (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 3, "max_completion_tokens": 4},
        400,
        "max_tokens",
    ),
    ("/v1/chat/completions", {**CHAT, "model": "other"}, 404, "model"),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"05": 1, "5": 2}}, 400, "logit_bias.05"),
    ("/tokenize", {"model": "tiny"}, 400, "prompt"),
    ("/detokenize", {"tokens": [9999]}, 400, "tokens"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies(server: Server, stream: bool) -> None:
    for path, body, status, param in BAD:
        if stream and path.startswith("/v1"):
            body = {**body, "stream": True}
            if param == "stream_options":
                continue
        raw = json.dumps(body)
        answer = server.http.post(path, content=raw.encode("utf-8", "surrogatepass"))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), (body, error)
        assert set(error) == {"message", "type", "param", "code"}
        assert param.split(".")[0] in error["message"]
    assert server.engine.submitted == []


def test_errors_say_what_this_endpoint_takes(server: Server) -> None:
    message = {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
    for path, body, said in (
        ("/tokenize", {"prompt": ["a"]}, "prompt: expected a string"),
        ("/v1/embeddings", {"input": 5}, "input: it has to be a string, a list of strings, a"),
        ("/v1/embeddings", {}, "input: it is required"),
        ("/v1/responses", {"input": 5}, "input: it has to be a string or a list of items"),
        ("/v1/responses", {"input": "a", "max_tokens": 5}, "mean 'max_output_tokens'?"),
        ("/v1/completions", {**COMPLETION, "max_completion_tokens": 5}, "mean 'max_tokens'?"),
        ("/v1/chat/completions", {**CHAT, "max_output_tokens": 5}, "mean 'max_"),
        ("/v1/messages", {**message, "tool_choice": "auto"}, "tool_choice: expected a mapping"),
        ("/v1/messages", {**message, "tool_choice": {"type": "x"}}, "expected 'auto', 'any', "),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "any"}, "it has to be 'auto', 'required"),
        (
            "/v1/completions",
            {**COMPLETION, "structured_outputs": {"jsn": {}}},
            "structured_outputs.jsn: unknown field (got {})",
        ),
    ):
        answer = server.post(path, **body)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
    # SGLang's clients send the default of a field that asks for nothing.
    assert server.post("/v1/chat/completions", **CHAT, top_logprobs=0).status_code == 200


def test_nested_and_endless_values_are_refused_in_short(server: Server) -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    long = "k" * 300_000
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": deep}]}),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"a": deep}, "tools": deep}),
        ("/v1/completions", {"prompt": deep}),
        ("/v1/completions", {**COMPLETION, "response_format": deep}),
        ("/v1/completions", {**COMPLETION, long: 1}),
        ("/v1/completions", {**COMPLETION, "model": long}),
        ("/v1/completions", {**COMPLETION, "logit_bias": {long: 1}}),
        ("/v1/completions", {**COMPLETION, "temperature": long}),
        ("/v1/completions", {"prompt": ["a"] + [1] * 200_000}),
        ("/v1/completions", {"prompt": [5] * 200_000}),
        ("/v1/chat/completions", {"messages": [1] * 200_000}),
        ("/tokenize", {"prompt": "the cat" * 10**5}),
        ("/detokenize", {"tokens": ["a"] * 200_000}),
        (
            "/v1/chat/completions",
            {**CHAT, "tool_choice": {"type": "function", "function": {"name": long}}},
        ),
        ("/admin/drafters", {"replaces": long}),
    ):
        answer = server.post(path, **body)
        assert answer.status_code in (400, 404), answer.text[:2000]
        assert len(answer.text) < 2000


def test_a_body_that_never_ends(start: Callable[..., Server]) -> None:
    server = start(body_timeout_s=0.3)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
        connection.sendall(head)
        received = b""
        while part := connection.recv(65536):  # the server hangs up by itself
            received += part
    assert received.startswith(b"HTTP/1.1 408 ")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["param"] == "body"


def test_a_batch_that_the_queue_can_never_hold(start: Callable[..., Server]) -> None:
    server = start(max_completions=4)
    assert server.post("/v1/completions", prompt=["a"] * 2, n=2, max_tokens=1).status_code == 200
    for path, body, param in (
        ("/v1/completions", {"prompt": ["a"] * 5}, "prompt"),
        ("/v1/completions", {"prompt": "a", "n": 5}, "n"),
        ("/v1/chat/completions", {**CHAT, "n": 5}, "n"),
    ):
        answer = server.post(path, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert "max_queued_requests = 4" in answer.json()["error"]["message"]


def test_an_unknown_field_gets_a_suggestion(server: Server) -> None:
    error = server.post("/v1/completions", **COMPLETION, temprature=1).json()["error"]
    assert "did you mean 'temperature'" in error["message"]


def test_bad_bytes(server: Server) -> None:
    for raw in (b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000, b"nul"):
        answer = server.http.post("/v1/completions", content=raw)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body"), raw[:20]


def test_compressed_bodies_are_refused(server: Server) -> None:
    body = gzip.compress(b'{"prompt": "a"}')
    answer = server.http.post("/v1/completions", content=body, headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-encoding")


def test_a_repeated_key_is_refused_by_name(server: Server) -> None:
    for raw in (b'{"n": 1, "n": 1}', b'{"logit_bias": {"n": 1, "m": 2, "n": 3}}'):
        error = server.http.post("/v1/completions", content=raw).json()["error"]
        assert (error["param"], error["message"]) == ("n", "n: an object has this key twice")


def test_every_documented_field_is_known() -> None:
    """Whatever the official client can send is honoured, ignored on purpose, or refused by name."""
    for params, body in (
        (completion_create_params.CompletionCreateParamsStreaming, CompletionBody),
        (chat_create_params.CompletionCreateParamsStreaming, ChatBody),
    ):
        known = {*body.model_fields, *UNSUPPORTED, *IGNORED}
        assert set(get_type_hints(params)) <= known


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "logit_bias", {str(index): 1 for index in range(2**16 + 1)}),
        ("/v1/chat/completions", "messages", [{}] * (2**16 + 1)),
        ("/v1/chat/completions", "messages.0.content", [{}] * (2**16 + 1)),
        ("/tokenize", "messages", [{}] * (2**16 + 1)),
    ],
)
def test_lists_that_are_too_long_are_not_looked_through(server, path, field, value) -> None:
    """The event loop would wait for as long as pydantic does."""
    body = {"prompt": "a"} if path == "/v1/completions" else {}
    if field.endswith("content"):
        body["messages"] = [{"role": "user", "content": value}]
    else:
        body[field] = value
    error = server.post(path, **body).json()["error"]
    assert error["param"] == field
    assert "at most 65536" in error["message"]


def test_conversations_that_become_too_long_as_chats() -> None:
    """A system message comes before the others."""
    one = [{"role": "user", "content": ""}]
    for module, kind, name, given in (
        (messages, MessagesBody, "messages", {"system": "s", "messages": one, "max_tokens": 1}),
        (responses, ResponsesBody, "input", {"instructions": "s", "input": one}),
    ):
        body: Any = parsing.parse(kind, json.dumps(given).encode())
        most = body.model_copy(update={name: getattr(body, name) * 2**16})
        with pytest.raises(InvalidRequestError, match=r"^messages: at most 65536") as caught:
            module.as_chat(most)
        assert caught.value.field == "messages"


BODIES = [
    (ChatBody, {"messages": [{"role": "user", "content": "a"}]}),
    (CompletionBody, {"prompt": "a"}),
    (ResponsesBody, {"input": "a"}),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
@pytest.mark.parametrize(("name", "row"), REQUEST.items())
def test_other_engines_fields(
    kind: Any, body: dict[str, Any], name: str, row: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without effect: accepted, with one warning in a process; with one: refused by name."""
    parsing._warn.cache_clear()

    def parse(**more: Any) -> Any:
        return parsing.parse(kind, json.dumps({**body, **more}).encode())

    if isinstance(row, Ignored):
        for value in (True, 3):
            assert parse(**{name: value}) == parse()
        (said,) = caplog.messages
        assert f"field {name} " in said
        assert row.ignored in said
        return
    for value in getattr(row, "only", ()):
        assert parse(**{name: value}) == parse()
    with pytest.raises(InvalidRequestError) as caught:
        parse(**{name: "something else"})
    assert caught.value.field == name
    assert row.nearest in caught.value.message
    assert not caplog.messages


def error_of(kind: Any, body: dict[str, Any]) -> InvalidRequestError | None:
    """The error of a body, if it is wrong."""
    try:
        parsing.parse(kind, json.dumps(body).encode())
    except InvalidRequestError as error:
        return error
    return None


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_wrong_values_of_every_field_are_named(kind: Any, body: dict[str, Any]) -> None:
    """In JSON's words, not in Python's or pydantic's."""
    values = ("x", "", -1, 10**12, 1.5, [], {}, ["x"], {"x": 1}, [{}], [[]], [{"type": "x"}])
    for name, field in kind.model_fields.items():
        for value in values:
            error = error_of(kind, {**body, field.alias or name: value})
            if error is None:
                continue
            assert error.field is not None
            assert error.field.split(".")[0] == (field.alias or name)
            assert error.message.startswith(error.field)
            for poor in ("Value error", "instance of", "after validation", "valid dict",
                         "Extra inputs", "dict[", "NoneType", "match pattern", "Input should",
                         "unable to", "Field required"):  # fmt: skip
                assert poor not in error.message


@pytest.mark.parametrize(("kind", "body"), BODIES)
@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("chache_prompt", "cache_prompt"), ("zzz", None),
     ("repetion_penalty", "repetition_penalty"), ("speculation.grammar", None)],
)  # fmt: skip
def test_a_misspelt_field(kind: Any, body: dict[str, Any], name: str, meant: str | None) -> None:
    value: Any = 3
    for part in reversed(name.split(".")):
        value = {part: value}
    with pytest.raises(InvalidRequestError) as caught:
        parsing.parse(kind, json.dumps({**body, **value}).encode())
    hint = f"did you mean {meant!r}?" if meant else "there is no such field here"
    assert caught.value.message == f"{name}: unknown field; {hint}"
