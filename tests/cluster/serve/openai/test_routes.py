"""The HTTP edge, spoken to by the official `openai` client over a real socket."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import outrider
from outrider.cluster.serve.openai.parse import UNSUPPORTED
from outrider.errors import CheckpointError
from outrider.scheduler.types import SpeculationOptions

from ....helpers.ports import wait_for
from .conftest import CHAT, COMPLETION, TEXT, Server


def test_completion(server: Server, tokenizer: Any) -> None:
    answer = server.openai.completions.create(model="tiny", prompt="a cat", max_tokens=5, seed=3)
    (choice,) = answer.choices
    assert (TEXT * 2).startswith(choice.text)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode("a cat"))
    assert (answer.usage.completion_tokens, answer.object) == (5, "text_completion")
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.usage.model_dump()["speculation"] == {
        "drafter": "fake",
        "num_draft_tokens": 6,
        "num_accepted_tokens": 4,
        "mean_accepted_len": 2.0,
        "num_steps": 2,
        "synthetic": False,
    }
    assert server.engine.submitted[0].seed == 3


def test_predictions_are_sent_and_counted(server: Server, tokenizer: Any) -> None:
    text = "the cat sat on the mat. the dog sat on the mat. "
    ids, written = tokenizer.encode(text), tokenizer.encode(TEXT * 4)
    for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
        answer = server.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            prediction={"type": "content", "content": content},
            max_tokens=len(written),
            n=2,
        )
        assert [each.prediction.tolist() for each in server.engine.submitted[-2:]] == [ids, ids]
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        accepted, rejected = (
            details.accepted_prediction_tokens or 0,
            details.rejected_prediction_tokens or 0,
        )
        assert accepted + rejected == 2 * len(ids)
        assert 3 <= rejected // 2 <= len(ids) // 3  # the dog is not in the output
        assert answer.usage.completion_tokens == 2 * len(written)
    stream = server.openai.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=len(written),
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"prediction": {"type": "content", "content": TEXT}},
    )
    *_, last = stream
    assert last.usage is not None
    details = last.usage.completion_tokens_details
    assert details is not None
    wanted = len(tokenizer.encode(TEXT))
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (wanted, 0)
    plain = server.post("/v1/completions", prompt="a", max_tokens=1).json()["usage"]
    assert plain["completion_tokens_details"]["accepted_prediction_tokens"] == 0


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"content": "text"}, "prediction.type"),
        ({"type": "text", "content": "text"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": "a", "contents": "b"}, "prediction.contents"),
        ({"type": "content", "content": "cat " * 400}, "prediction"),
        ({"type": "content", "content": "cat " * 30_000}, "prediction"),
    ],
)
def test_wrong_predictions_are_refused(server: Server, prediction: Any, param: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        answer = server.post(path, **{**body, "prediction": prediction})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
    body = {"model": "tiny", "prompt": ["a", "b"], "prediction": {"type": "content", "content": ""}}
    error = server.post("/v1/completions", **body).json()["error"]
    assert error["param"] == "prediction"
    assert "2 prompts" in error["message"]


def test_streamed_text_is_the_whole_text(start: Callable[..., Server]) -> None:
    server = start("naïve 日本語 👩‍👩‍👧 text. ")
    whole = server.openai.completions.create(model="tiny", prompt="a", max_tokens=60)
    stream = server.openai.completions.create(
        model="tiny", prompt="a", max_tokens=60, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [
        "length"
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()


def test_prompts_and_n(server: Server, tokenizer: Any) -> None:
    ids = tokenizer.encode("the cat")
    for prompt, count in (("a", 1), (["a", "b"], 2), (ids, 1), ([ids, ids, [65]], 3)):
        answer = server.openai.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=4)
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8 * count
    stream = server.openai.completions.create(
        model="tiny", prompt=["a", "b"], n=3, max_tokens=7, stream=True
    )
    texts = [""] * 6
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert len(set(texts)) == 1
    assert texts[0]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(server: Server, stream: bool) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "a", "stop": ["mat"], "max_tokens": 100}
    if stream:
        chunks = list(server.openai.completions.create(**options, stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason]
    else:
        answer = server.openai.completions.create(**options)
        text, reasons = answer.choices[0].text, [answer.choices[0].finish_reason]
        assert answer.choices[0].model_dump()["stop_reason"] == "mat"
        assert answer.usage is not None
        assert answer.usage.model_dump()["speculation"]["num_steps"] > 0
    assert (text, reasons) == ("the cat sat on the ", ["stop"])
    server.wait_idle()


def test_chat(start: Callable[..., Server], tokenizer: Any) -> None:
    server = start(eos=True)
    messages: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = server.openai.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=90
    )
    assert answer.choices[0].message.content == TEXT
    assert (answer.choices[0].finish_reason, answer.choices[0].message.role) == (
        "stop",
        "assistant",
    )
    rendered = "<system>be brief\n<assistant>\n<user>a\nb\n<assistant>"
    assert server.engine.submitted[0].prompt.tolist() == tokenizer.encode(rendered)
    chunks = list(
        server.openai.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    # An SDK's own message comes back with its empty fields.
    echoed = answer.choices[0].message.model_dump()
    server.openai.chat.completions.create(model="tiny", messages=[*messages, echoed])


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: Server, stream: bool) -> None:
    completion = server.openai.completions.create(
        model="tiny", prompt="a", logprobs=2, max_tokens=7, stream=stream
    )
    choices = [c.choices[0] for c in completion] if stream else completion.choices
    tokens: list[str] = []
    for choice in choices:
        assert choice.logprobs is not None
        for token, value, top, offset in zip(
            choice.logprobs.tokens or [],
            choice.logprobs.token_logprobs or [],
            choice.logprobs.top_logprobs or [],
            choice.logprobs.text_offset or [],
            strict=True,
        ):
            assert offset == len("".join(tokens))  # here every token is whole characters
            assert (value, top[token], len(top)) == (-0.5, -0.5, 2)
            tokens.append(token)
    assert len(tokens) == 7
    chat = server.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        logprobs=True,
        top_logprobs=3,
        max_tokens=7,
        stream=stream,
    )
    parts = [c.choices[0] for c in chat] if stream else chat.choices
    entries = [e for part in parts if part.logprobs for e in part.logprobs.content or []]
    assert [entry.token for entry in entries] == tokens
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert bytes(b for entry in entries for b in entry.bytes or []).decode() == "".join(tokens)


def test_extensions_reach_the_engine(server: Server) -> None:
    server.openai.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=4,
        logit_bias={"65": -100},
        user="someone",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [7],
            "skip_special_tokens": False,
            "priority": -1,
            "cache_salt": "tenant",
            "speculation": {
                "enabled": False,
                "max_draft_len": 1024,
                "drafters": ["other"],
                "isolated": True,
                "min_prob": 0.5,
            },
        },
    )
    (request,) = server.engine.submitted
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.1)
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (2, True, (7,))
    assert sampling.logit_bias == {65: -100.0}
    assert (request.priority, request.tenant, request.eos_token_ids) == (-1, "tenant", ())
    assert request.speculation == SpeculationOptions(False, 1024, False, ("other",), True, 0.5)


def test_echo(server: Server, tokenizer: Any) -> None:
    for prompt in ("the cat", tokenizer.encode("the cat")):
        answer = server.openai.completions.create(
            model="tiny", prompt=prompt, echo=True, max_tokens=2
        )
        assert answer.choices[0].text.startswith("the cat")


@pytest.mark.parametrize("chat", [False, True])
def test_usage_in_every_chunk(server: Server, chat: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**(CHAT if chat else COMPLETION), "max_tokens": 7, "stream": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    raw = server.post(path, **body, stream_options=options).text
    chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (3, 7)
    assert all(chunk["usage"]["speculation"]["num_steps"] > 0 for chunk in chunks)
    options["include_usage"] = False
    assert '"usage"' not in server.post(path, **body, stream_options=options).text


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_beside_the_text(server: Server, tokenizer: Any, stream: bool) -> None:
    wish = {"return_token_ids": True, "max_tokens": 7, "stream": stream}
    expected = tokenizer.encode(TEXT * 2)[:7]
    raw = server.post("/v1/completions", prompt="the cat", **wish).text
    lines = raw.splitlines() if stream else [f"data: {raw}"]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [id for choice in choices for id in choice["token_ids"]] == expected
    assert choices[0]["prompt_token_ids"] == tokenizer.encode("the cat")
    raw = server.post("/v1/chat/completions", **CHAT, **wish).text
    lines = raw.splitlines() if stream else [f"data: {raw}"]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[0]["prompt_token_ids"] == tokenizer.encode("<user>a\n<assistant>")
    ids = [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])]
    assert ids == expected


def test_names_and_lengths_as_in_vllm(server: Server, tokenizer: Any) -> None:
    answer = server.post(
        "/v1/completions",
        prompt="the cat sat on the mat",
        truncate_prompt_tokens=2,
        request_id="mine",
        logprobs=1,
        return_tokens_as_token_ids=True,
        max_tokens=2,
        spaces_between_special_tokens=True,
    ).json()
    assert answer["id"] == "cmpl-mine"
    logprobs = answer["choices"][0]["logprobs"]
    ids = tokenizer.encode(TEXT)[:2]
    assert logprobs["tokens"] == [f"token_id:{id}" for id in ids]
    assert [set(top) for top in logprobs["top_logprobs"]] == [{f"token_id:{id}"} for id in ids]
    whole = tokenizer.encode("the cat sat on the mat")
    assert server.engine.submitted[-1].prompt.tolist() == whole[-2:]
    fits = server.post("/v1/completions", prompt=[5] * 300, truncate_prompt_tokens=-1, max_tokens=6)
    assert fits.json()["usage"]["prompt_tokens"] == 250
    for name, value in (
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("request_id", ""),
        ("bad_words", "a"),
        ("bad_words", ["a"] * 1025),
        ("bad_words", ["a", " "]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [304]),
        ("allowed_token_ids", [1] * (2**18 + 1)),
        ("prompt_logprobs", 21),
        ("use_beam_search", True),
    ):
        error = server.post("/v1/completions", **COMPLETION, **{name: value}).json()["error"]
        assert error["param"] == name


def test_paths_methods_and_sizes(start: Callable[..., Server]) -> None:
    server = start(max_body_bytes=1000)
    assert server.http.get("/v1/nothing").status_code == 404
    assert server.http.get("/v1/completions").status_code == 405
    assert server.http.get("/v1/models/other").status_code == 404
    for answer in (
        server.http.get("/v1/nothing"),
        server.http.get("/v1/completions"),
        server.post("/v1/completions", prompt="a" * 2000),
        server.http.post("/v1/completions", content=iter([b"a" * 600] * 3)),
    ):
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.status_code == 413


def test_values_that_ask_for_nothing_are_fine(server: Server) -> None:
    for name, values in UNSUPPORTED.items():
        for value in values:
            answer = server.post("/v1/chat/completions", **CHAT, max_tokens=1, **{name: value})
            assert answer.status_code == 200, (name, value, answer.text)


def test_models_and_tokens(server: Server, tokenizer: Any) -> None:
    assert [model.id for model in server.openai.models.list()] == ["tiny"]
    assert server.openai.models.retrieve("tiny").id == "tiny"
    answer = server.post("/tokenize", model="tiny", prompt="the cat").json()
    assert answer["tokens"] == tokenizer.encode("the cat")
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    back = server.post("/detokenize", tokens=answer["tokens"]).json()
    assert back == {"prompt": "the cat"}
    chat = server.post("/tokenize", messages=CHAT["messages"]).json()
    assert chat["tokens"] == tokenizer.encode("<user>a\n<assistant>")


def test_tokenize_renders_messages_as_chat_does(server: Server) -> None:
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the cat"}]
    for options in (
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_special_tokens": True},
    ):
        answer = server.post("/tokenize", messages=begun, **options).json()
        server.post("/v1/chat/completions", messages=begun, max_tokens=1, **options)
        assert answer["tokens"] == server.engine.submitted[-1].prompt.tolist()
    shown = server.post("/tokenize", prompt="the cat", return_token_strs=True).json()
    assert "".join(shown["token_strs"]) == "the\u0120cat"
    refused = server.post("/tokenize", messages=begun, chat_template_kwargs={"tokenize": True})
    assert refused.json()["error"]["param"] == "chat_template_kwargs.tokenize"


def test_what_operators_call(server: Server) -> None:
    assert server.http.get("/version").json() == {"version": outrider.__version__}
    for method in ("GET", "POST"):
        assert server.http.request(method, "/ping").json() == {"status": "ok"}
    server.engine.gate.clear()
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            threads.submit(server.post, "/v1/completions", prompt="a", max_tokens=4)
        wait_for(lambda: server.http.get("/load").json() == {"server_load": 2})
        server.engine.gate.set()
    assert server.http.get("/load").json() == {"server_load": 0}
    assert server.post("/reset_prefix_cache").json() == {"num_engines": 1}
    assert server.engine.num_resets == 1
    assert server.http.get("/reset_prefix_cache").status_code == 405
    server.engine.dead = True
    assert server.http.get("/ping").status_code == 503
    assert server.http.post("/ping").status_code == 503
    assert server.post("/reset_prefix_cache").status_code == 503


def test_new_weights(server: Server) -> None:
    def updated(**body: Any) -> Any:
        return server.http.post("/admin/update_weights", json=body)

    assert updated(path="/a").json() == {"num_engines": 1}
    assert updated(drafter="/b", mode="wait", model="tiny").json() == {"num_engines": 1}
    assert server.engine.updates == [("/a", "", "keep"), ("", "/b", "wait")]
    assert updated(path="/a", weight_version="step-2").json() == {"num_engines": 1}
    assert server.engine.weight_versions == ["", "", "step-2"]
    assert set(server.http.get("/get_weight_version").json()) == {"weight_version"}
    server.engine.updates.pop()
    for body, name in (
        ({}, "path"),
        ({"path": "a/b"}, "path"),
        ({"path": ""}, "path"),
        ({"path": 1}, "path"),
        ({"drafter": "."}, "drafter"),
        ({"path": "/a", "mode": "now"}, "mode"),
        ({"path": "/a", "weight_version": ""}, "weight_version"),
        ({"drafter": "/b", "weight_version": "two"}, "weight_version"),
        ({"weights": "/a"}, "weights"),
    ):
        refused = updated(**body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), body
    assert updated(path="/a", model="other").status_code == 404
    server.engine.refuse = CheckpointError.at("weights", "tensor 'x' is missing")
    refused = updated(path="/a")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "path")
    assert refused.json()["error"]["message"] == "path: tensor 'x' is missing"
    assert len(server.engine.updates) == 2


def test_weights_from_a_trainer(server: Server) -> None:
    def asked(path: str, **body: Any) -> Any:
        return server.http.post(path, json=body)

    join, update, leave = (
        "/init_weights_update_group",
        "/update_weights_from_distributed",
        "/destroy_weights_update_group",
    )
    for query, size in (("", 2), ("?include_dp=true", 2), ("?include_dp=false&model=tiny", 2)):
        assert server.http.get(f"/get_world_size{query}").json() == {"world_size": size}
    for query, name in (("?include_dp=1", "include_dp"), ("?dp=true", "dp")):
        refused = server.http.get(f"/get_world_size{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert server.http.get("/get_world_size?model=other").status_code == 404
    group = {"master_address": "trainer", "master_port": 5, "world_size": 3}
    joined = asked(join, **group).json()
    assert joined == {"success": True, "message": "1 engines: joined", "num_engines": 1}
    tensors = {"names": ["x"], "dtypes": ["torch.float32"], "shapes": [[2, 3]]}
    given = {**tensors, "abort_all_requests": True, "flush_cache": True}
    assert asked(update, **given).json()["success"] is True
    assert asked(leave).json()["message"] == "1 engines: left"
    assert [(link.host, link.rank_offset) for link in server.engine.links] == [
        ("trainer", 1), ("", 1),
    ]  # fmt: skip
    assert server.engine.sent == [("take", "")]
    for path, body, name in (
        (join, {**group, "world_size": 2}, "rank_offset"),
        (join, {**group, "master_port": 0}, "master_port"),
        (join, {**group, "backend": "mpi"}, "backend"),
        (join, {"master_port": 5, "world_size": 3}, "master_address"),
        (update, {**tensors, "names": []}, "names"),
        (update, {**tensors, "shapes": [[-1]]}, "shapes"),
        (update, {**tensors, "flush_cache": False}, "flush_cache"),
        (leave, {"group": "x"}, "group"),
    ):
        refused = asked(path, **body)
        assert refused.status_code == 400, body
        assert refused.json()["error"]["param"].startswith(name), body
    assert asked(leave, model="other").status_code == 404


def test_a_trace(server: Server) -> None:
    def asked(**body: Any) -> Any:
        return server.http.post("/admin/trace", json=body)

    refused = server.http.get("/admin/trace")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "trace")
    assert asked(action="start", max_steps=50).json() == {"num_engines": 1}
    assert asked(action="start", model="tiny").status_code == 200
    assert asked(action="stop").json() == {"num_engines": 1}
    assert server.engine.traced_steps == [50, 20_000, 0]
    server.engine.runs = [{"name": "tiny", "decoding_type": "None", "columns": {}}]
    found = server.http.get("/admin/trace", params={"model": "tiny"}).json()
    assert (found["version"], found["machine"]) == (1, {"num_cores": 2})
    assert found["runs"] == [{"name": "local", "decoding_type": "None", "columns": {}}]
    for body, name in (
        ({}, "action"),
        ({"action": "go"}, "action"),
        ({"action": "start", "max_steps": 0}, "max_steps"),
        ({"action": "start", "max_steps": 10**6}, "max_steps"),
    ):
        refused = asked(**body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), body
    assert asked(action="stop", model="other").status_code == 404
    assert server.http.get("/admin/trace?model=other").status_code == 404
    assert server.http.get("/admin/trace?nope=1").json()["error"]["param"] == "nope"


def test_online_adaptation(server: Server) -> None:
    def asked(**body: Any) -> Any:
        return server.http.post("/admin/adaptation", json=body)

    assert server.http.get("/admin/adaptation").json() == {"engines": []}
    refused = asked(action="run")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "online_adaptation"
    server.engine.adaptation = {
        "state": "collecting", "num_output_tokens": 40, "num_excluded": 3,
        "outcomes": {"swapped": 2, "failed": 1},
        "rounds": [
            {"accepted_before": 1.5, "accepted_after": 2.0},
            {"accepted_before": None, "accepted_after": None},
        ],
    }  # fmt: skip
    (listed,) = server.http.get("/admin/adaptation").json()["engines"]
    assert (listed["model"], listed["online_adaptation"]["num_excluded"]) == ("tiny", 3)
    for action in ("run", "pause", "resume"):
        assert asked(action=action, model="tiny").json() == {"num_engines": 1}
    assert server.engine.wishes == ["run", "pause", "resume"]
    for body, name in (
        ({}, "action"),
        ({"action": "go"}, "action"),
        ({"action": "run", "wish": "run"}, "wish"),
    ):
        refused = asked(**body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), body
    assert asked(action="run", model="other").status_code == 404
    text = server.http.get("/metrics").text
    for line in (
        'outrider:adaptation_rounds_total{model="tiny",outcome="swapped",replica="local"} 2.0',
        'outrider:adaptation_tokens_total{model="tiny",replica="local"} 40.0',
        'outrider:adaptation_excluded_requests_total{model="tiny",replica="local"} 3.0',
        'outrider:adaptation_accepted_tokens{head="adapted",model="tiny",replica="local"} 2.0',
    ):
        name, _, rest = line.partition("{")
        labels = set(rest.partition("}")[0].split(","))
        found = [each for each in text.splitlines() if each.startswith(name + "{")]
        assert any(
            set(each.partition("{")[2].partition("}")[0].split(",")) == labels
            and each.endswith(line.rpartition(" ")[2])
            for each in found
        ), (line, found)


def test_other_drafters(server: Server) -> None:
    def asked(**body: Any) -> Any:
        return server.http.post("/admin/drafters", json=body)

    ngram = {"decoding_type": "NGram", "max_draft_len": 3}
    listed = server.http.get("/admin/drafters").json()["engines"]
    assert [(each["model"], each["drafters"]) for each in listed] == [("tiny", [])]
    answer = asked(drafter=ngram).json()
    assert answer == {"num_engines": 1, "drafters": ["ngram"]}
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["drafters"] == ["ngram"]
    wish = {"drafters": ["ngram"]}
    assert server.post("/v1/completions", prompt="a", speculation=wish).status_code == 200
    wish = {"drafters": ["fake"]}
    assert server.post("/v1/completions", prompt="a", speculation=wish).status_code == 400
    answer = asked(speculative_config={"decoding_type": "Suffix"}, model="tiny", make_room=True)
    assert answer.json()["drafters"] == ["suffix"]
    assert [each.make_room for each in server.engine.changes] == [False, True]
    assert not any(each.may_run_code for each in server.engine.changes)
    for body, name in (
        ({}, "drafter"),
        ({"drafter": 1}, "drafter"),
        ({"drafter": ngram, "replaces": ""}, "replaces"),
        ({"drafter": ngram, "replaces": "eagle"}, "replaces"),
        ({"drafter": ngram, "speculative_config": ngram}, "drafter"),
        ({"drafters": ngram}, "drafters"),
        ({"drafter": ngram, "may_run_code": True}, "may_run_code"),
    ):
        refused = asked(**body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), body
    assert asked(drafter=ngram, model="other").status_code == 404
    refused = server.http.delete("/admin/drafters/eagle")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")
    assert server.http.delete("/admin/drafters/eagle?models=tiny").status_code == 400
    assert server.http.delete("/admin/drafters/eagle?model=other").status_code == 404
    server.engine.refuse_drafters = {"decoding_type": "NGram"}
    refused = asked(speculative_config={"decoding_type": "NGram"})
    assert refused.json()["error"]["message"] == "speculative_config: refused here"
    server.engine.dead = True
    assert server.http.get("/admin/drafters").status_code == 503


def test_other_corpora(server: Server) -> None:
    def asked(**body: Any) -> Any:
        return server.http.post("/admin/corpora", json=body)

    refused = asked(add=["/data/a.txt"])
    assert (
        refused.json()["error"]["message"] == "model: no drafter of it takes corpora; Suffix does"
    )
    suffix = {"decoding_type": "Suffix"}
    server.http.post("/admin/drafters", json={"speculative_config": suffix})
    answer = asked(add=["/data/a.txt", "/data/b.txt"]).json()
    assert answer == {"num_engines": 1, "corpora": ["/data/a.txt", "/data/b.txt"]}
    assert asked(remove=["/data/a.txt"], model="tiny").json()["corpora"] == ["/data/b.txt"]
    (listed,) = server.http.get("/admin/corpora").json()["engines"]
    assert listed == {"model": "tiny", "replica": "local", "corpora": ["/data/b.txt"]}
    for body, name in (
        ({}, "add"),
        ({"add": ["b.txt"]}, "add"),
        ({"add": [""]}, "add.0"),
        ({"add": "/data/c.txt"}, "add"),
        ({"remove": ["/data/a.txt"]}, "remove"),
        ({"add": ["/data/b.txt"], "remove": ["/data/b.txt"]}, "add"),
        ({"corpora": []}, "corpora"),
    ):
        refused = asked(**body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), body
    assert asked(add=["/data/c.txt"], model="other").status_code == 404


def test_adapters_come_and_go(server: Server) -> None:
    def load(**body: Any) -> Any:
        return server.http.post("/v1/load_lora_adapter", json=body)

    def listed() -> dict[str, Any]:
        data = server.http.get("/v1/models").json()["data"]
        return {each["id"]: (each["root"], each["parent"]) for each in data}

    assert load(lora_name="sql", lora_path="/loras/sql").json() == {"num_engines": 1}
    assert listed()["sql"] == ("/loras/sql", "tiny")
    assert server.http.get("/v1/models/sql").status_code == 200
    assert server.post("/v1/completions", prompt="a", model="sql").json()["model"] == "sql"
    assert server.engine.submitted[-1].adapter == "sql"
    for body, name in (
        ({"lora_name": "sql", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "tiny", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "a:b", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "b", "lora_path": "x"}, "lora_path"),
        ({"lora_name": "b"}, "lora_path"),
        ({"lora_name": "b", "lora_path": "/x", "rank": 3}, "rank"),
    ):
        refused = load(**body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), body
    server.engine.refuse = CheckpointError.at("lora_modules", "no such adapter")
    refused = load(lora_name="b", lora_path="/x")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
    server.engine.refuse = None
    assert list(listed()) == ["tiny", "sql"]
    dropped = server.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert dropped.json() == {"num_engines": 1}
    assert list(listed()) == ["tiny"]
    assert server.post("/v1/completions", prompt="a", model="sql").status_code == 404
    again = server.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert again.status_code == 404


def test_sleep(server: Server) -> None:
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert server.post("/sleep").json() == {"num_engines": 1}
    assert server.post("/sleep?level=2&mode=wait").json() == {"num_engines": 1}
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.post("/wake_up?tags=weights").json() == {"num_engines": 1}
    assert server.post("/wake_up").json() == {"num_engines": 1}
    assert server.engine.sleeps == [
        (1, "abort"), (2, "wait"), (0, "weights"), (0, "weights", "kv_cache")
    ]  # fmt: skip
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
    for path, name in (
        ("/sleep?level=3", "level"),
        ("/sleep?level=-1", "level"),
        ("/sleep?level=deep", "level"),
        ("/sleep?level=" + "9" * 5000, "level"),
        ("/sleep?mode=now", "mode"),
        ("/sleep?levle=2", "levle"),
        ("/sleep?mode=keep&mode=wait", "mode"),
        ("/wake_up?tags=all", "tags"),
        ("/wake_up?tags=weights&tags=", "tags"),
    ):
        refused = server.post(path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), path
    assert len(server.engine.sleeps) == 4


def test_a_pause(server: Server) -> None:
    assert server.http.get("/is_paused").json() == {"is_paused": False}
    assert server.post("/pause").json() == {"num_engines": 1}
    assert server.post("/pause?mode=wait").json() == {"num_engines": 1}
    assert server.engine.pauses == ["abort", "wait"]
    assert server.http.get("/is_paused").json() == {"is_paused": True}
    assert server.post("/pause?mode=now").json()["error"]["param"] == "mode"
    refused = server.post("/pause", mode="keep")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "body")
    assert server.engine.pauses == ["abort", "wait"]
    assert server.post("/resume").json() == {"num_engines": 1}
    assert server.http.get("/is_paused").json() == {"is_paused": False}


def test_stats_and_metrics(server: Server) -> None:
    server.openai.completions.create(model="tiny", prompt="a", max_tokens=7)
    stats = server.http.get("/stats").json()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["engines"][0]["drafters"]["fake"]["num_acc_tokens"] == 9
    text = server.http.get("/metrics").text
    samples = {
        (sample.name, sample.labels.get("position")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    drafts = samples["outrider:spec_decode_num_drafts_total", None]
    assert drafts.value == 5
    assert drafts.labels == {"model": "tiny", "replica": "local", "drafter": "fake"}
    assert samples["outrider:spec_decode_num_accepted_tokens_per_pos_total", "1"].value == 3
    assert samples["outrider:time_to_first_token_seconds_count", None].value == 1
    assert samples["outrider:generation_tokens_total", None].value == 7
    assert samples["outrider:request_success_total", None].labels["finished_reason"] == "length"
