"""What a prompt may be made of: token ids, and a chat template that the request brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider.engine.chat.template import OWN_NAMES

from .conftest import Server

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ mood }}"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


def error(server: Server, path: str, **body: Any) -> tuple[int, str, str]:
    answer = server.post(path, **body)
    found = answer.json()["error"]
    return answer.status_code, found["param"], found["message"]


def test_prompt_token_ids(server: Server) -> None:
    """vLLM's name; one list is one prompt, several lists are several."""
    for ids, prompts in (([5, 6], [[5, 6]]), ([[5], [7, 8]], [[5], [7, 8]])):
        answer = server.post("/v1/completions", model="tiny", prompt_token_ids=ids, max_tokens=2)
        assert len(answer.json()["choices"]) == len(prompts)
        sent = [request.prompt.tolist() for request in server.engine.submitted[-len(prompts) :]]
        assert sent == prompts
    for body, field in (
        ({"prompt_token_ids": [5], "prompt": "a"}, "prompt"),
        ({}, "prompt"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [999]}, "prompt_token_ids"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids"),
        ({"prompt_token_ids": ["a"]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5] * 300}, "prompt_token_ids"),
    ):
        assert error(server, "/v1/completions", model="tiny", **body)[:2] == (400, field)


def test_a_requests_template_is_refused_by_default(server: Server) -> None:
    status, field, message = error(
        server, "/v1/chat/completions", **CHAT, chat_template=TEMPLATE, max_tokens=2
    )
    assert (status, field) == (400, "chat_template")
    assert "trust_request_chat_template" in message
    status, field, _ = error(
        server, "/v1/chat/completions", **CHAT, chat_template_kwargs={"chat_template": TEMPLATE}
    )
    assert (status, field) == (400, "chat_template_kwargs.chat_template")


def test_variables_of_a_template_have_any_name_but_its_renderers(server: Server) -> None:
    known = {"field": 1, "tokenizer": 2, "options": 3, "kwargs": 4}  # no names of our own
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/messages", {**CHAT, "max_tokens": 2})):
        assert server.post(path, **body, chat_template_kwargs=known).status_code == 200
        for name in OWN_NAMES:
            status, field, _ = error(server, path, **body, chat_template_kwargs={name: True})
            assert (status, field) == (400, f"chat_template_kwargs.{name}")


def test_a_servers_template_that_fails_on_messages_says_so(start: Callable[..., Server]) -> None:
    failing = "{{ 1 / (messages[0].content | length - 1) }}"
    server = start(config={"chat_template": failing})
    status, field, message = error(server, "/v1/chat/completions", **CHAT)
    assert (status, field) == (400, "messages")
    assert message == "messages: the chat template fails on these messages: division by zero"


def test_a_requests_template(start: Callable[..., Server], tokenizer: Any) -> None:
    server = start(config={"trust_request_chat_template": True})
    body = {**CHAT, "chat_template": TEMPLATE, "chat_template_kwargs": {"mood": "!"}}
    answer = server.post("/v1/chat/completions", **body, max_tokens=2)
    assert answer.status_code == 200
    assert server.engine.submitted[-1].prompt.tolist() == tokenizer.encode("[user]a!")
    rendered = server.post("/tokenize", **body).json()
    assert rendered["tokens"] == tokenizer.encode("[user]a!")


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ 1 / 0 }}",
        "{{ ().__class__.__mro__ }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% if %}",
        "{% set _ = messages.append(1) %}",
        "a" * 65537,
    ],
)
def test_a_template_that_fails_is_the_requests_fault(
    start: Callable[..., Server], template: str
) -> None:
    """Rendered in a sandbox: no access to Python's objects, no change to what it is given."""
    server = start(config={"trust_request_chat_template": True})
    status, field, _ = error(
        server, "/v1/chat/completions", **CHAT, chat_template=template, max_tokens=2
    )
    assert status == 400
    assert field in ("chat_template", "messages")
    assert server.engine.submitted == []


def test_a_message_is_continued_or_answered(server: Server, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the cat"}]
    body = {"model": "tiny", "messages": messages, "continue_final_message": True, "max_tokens": 2}
    assert server.post("/v1/chat/completions", **body).status_code == 200
    continued = tokenizer.encode("<user>a\n<assistant>the cat")
    assert server.engine.submitted[-1].prompt.tolist() == continued
    for path in ("/v1/chat/completions", "/tokenize"):
        given = {key: value for key, value in body.items() if key != "max_tokens"}
        status, field, _ = error(server, path, **given, add_generation_prompt=True)
        assert (status, field) == (400, "add_generation_prompt")


def test_absent_routes_answer_as_openai_does(server: Server) -> None:
    """An OpenAI client raises its own not-found error, with a message that names the path."""
    import openai

    with pytest.raises(openai.BadRequestError, match="gives no embeddings: its checkpoint has"):
        server.openai.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.NotFoundError, match="/v1/images/generations"):
        server.openai.images.generate(prompt="a")
    answer = server.http.get("/v1/nothing")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
