"""Log-probabilities of the prompt over HTTP, and the choice among candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import TEXT, Server


def expected(tokens: list[str], top: int) -> tuple[list[Any], list[Any]]:
    """What the fake engine says of a prompt: its own values, and the likeliest."""
    values: list[Any] = [None, *(-float(index) for index in range(1, len(tokens)))]
    tops: list[Any] = [None]
    for token, value in zip(tokens[1:], values[1:]):
        tops.append({token: value} | {chr(98 + rank): -float(rank) for rank in range(top)})
    return values, tops


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 7])
def test_echo_with_logprobs(server: Server, tokenizer: Any, stream: bool, max_tokens: int) -> None:
    prompt = "the cat, naïve 日本"
    answer = server.openai.completions.create(
        model="tiny", prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens, stream=stream
    )
    text, tokens, values, tops, offsets = "", [], [], [], []
    for choice in [chunk.choices[0] for chunk in answer] if stream else answer.choices:
        text += choice.text
        tokens += choice.logprobs.tokens
        values += choice.logprobs.token_logprobs
        tops += choice.logprobs.top_logprobs
        offsets += choice.logprobs.text_offset
    ids = tokenizer.encode(prompt)
    assert text.startswith(prompt)
    assert (TEXT * 2).startswith(text[len(prompt) :])
    assert len(tokens) == len(values) == len(tops) == len(offsets) == len(ids) + max_tokens
    wanted, likeliest = expected(tokens[: len(ids)], 2)
    assert values == [*wanted, *[-0.5] * max_tokens]
    assert tops[: len(ids)] == likeliest
    for token, begin, end in zip(tokens, offsets, [*offsets[1:], len(text)]):
        if not token.startswith("bytes:"):
            assert text[begin:end] == token
    assert server.engine.submitted[0].sampling.prompt_logprobs == 2


def test_offsets_without_the_tokens_that_a_tokenizer_adds(server: Server) -> None:
    """A prompt of ids is echoed with its special tokens; each has its place in the text."""
    answer = server.openai.completions.create(
        model="tiny", prompt=[299, 65, 66], echo=True, logprobs=0, max_tokens=0
    )
    (choice,) = answer.choices
    assert choice.text == "<|eos|>bc"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["<|eos|>", "b", "c"]
    assert choice.logprobs.text_offset == [0, 7, 8]
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0]
    assert choice.logprobs.top_logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_prompt_logprobs_of_a_completion(server: Server) -> None:
    body = {"model": "tiny", "prompt": [70, 66, 71], "prompt_logprobs": 2, "max_tokens": 0}
    (choice,) = server.post("/v1/completions", **body).json()["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "65": {"logprob": 0.0, "rank": 1, "decoded_token": "b"},
        "66": {"logprob": -1.0, "rank": 2, "decoded_token": "c"},
    }
    assert third["71"] == {"logprob": -2.0, "rank": 3, "decoded_token": "h"}
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    # `echo` computes more rivals; this field shows those that it asks for.
    body |= {"prompt_logprobs": 0, "echo": True, "logprobs": 5}
    (choice,) = server.post("/v1/completions", **body).json()["choices"]
    assert [list(row or ()) for row in choice["prompt_logprobs"]] == [[], ["66"], ["71"]]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 5


def test_prompt_logprobs_of_a_chat(server: Server, tokenizer: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a" * 60}]}
    answer = server.post("/v1/chat/completions", **body, prompt_logprobs=1, max_tokens=2).json()
    ids = tokenizer.encode("<user>" + "a" * 60 + "\n<assistant>")
    assert len(answer["prompt_logprobs"]) == len(ids)
    assert all(str(id) in row for id, row in zip(ids[1:], answer["prompt_logprobs"][1:]))
    assert "prompt_logprobs" not in server.post("/v1/chat/completions", **body, max_tokens=2).json()


def test_a_long_prompt_is_described_in_a_thread(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    monkeypatch.setattr("outrider.cluster.serve.openai.generation._LONG_PROMPT", 3)
    body = {"model": "tiny", "prompt": "the cat sat on", "echo": True, "logprobs": 1}
    whole = server.post("/v1/completions", **body, max_tokens=4)
    assert len(whole.json()["choices"][0]["logprobs"]["tokens"]) > 7


def test_refused(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for body, field in (
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "a", "max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({**chat, "max_tokens": 0}, "max_tokens"),
        ({**chat, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = server.post(path, model="tiny", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_best_of(server: Server) -> None:
    """The likeliest candidates of each prompt, best first; usage counts them all."""
    order = [-3.0, -1.0, -2.0, -0.5]
    server.engine.logprob = lambda request: order[int(request.id.rsplit("-", 1)[-1])]
    for logprobs in (None, 1):
        answer = server.openai.completions.create(
            model="tiny", prompt=["a", "b"], best_of=4, n=2, max_tokens=3, logprobs=logprobs
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2 * 4 * 3
        for choice, value in zip(answer.choices, [-0.5, -1.0] * 2):
            if logprobs is None:
                assert choice.logprobs is None
            else:
                assert choice.logprobs is not None
                assert choice.logprobs.token_logprobs == [value] * 3
