"""Tool calls and reasoning over HTTP, through the official client."""

from __future__ import annotations

import json
import shutil

import openai
import pytest
from fastapi.testclient import TestClient

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.engine.frontend import Frontend
from outrider.errors import ConfigError
from outrider.tests.helpers.engines import engine_of
from outrider.tests.helpers.models import write_models

from .conftest import TEMPLATE

MESSAGES = [{"role": "user", "content": "a cat"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
PING = {"type": "function", "function": {"name": "ping", "description": "Says pong."}}
TOOLS = [WEATHER, PING]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
)


def whole_and_streamed(client, **options):
    """The message and its finish reason, which a stream's deltas have to add up to."""
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400, **options}
    answer = client.chat.completions.create(**options)
    (choice,) = answer.choices
    with client.chat.completions.stream(**options) as stream:
        events = list(stream)
        final = stream.current_completion_snapshot.choices[0]
    message = choice.message.model_dump()
    streamed = final.message.model_dump()
    assert (streamed["content"] or None) == message["content"]
    assert streamed.get("reasoning_content") == message.get("reasoning_content")
    assert final.finish_reason == choice.finish_reason
    names = [
        [(c["function"]["name"], c["function"]["arguments"]) for c in each["tool_calls"] or ()]
        for each in (message, streamed)
    ]
    assert names[0] == names[1]
    ids = [call["id"] for call in message["tool_calls"] or ()]
    assert len(set(ids)) == len(ids)
    return message, choice.finish_reason, answer.usage, events


def test_calls(connect):
    client, _ = connect(CALLS)
    message, reason, usage, events = whole_and_streamed(client, tools=TOOLS)
    assert message["content"] == "Let me see."
    assert reason == "tool_calls"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"name": "ping", "arguments": "{}"},
    ]
    assert all(call["id"].startswith("call_") for call in message["tool_calls"])
    assert usage.completion_tokens_details.reasoning_tokens == 0
    deltas = [
        call
        for event in events
        if event.type == "chunk"
        for choice in event.chunk.choices
        for call in choice.delta.tool_calls or ()
    ]
    firsts = [call for call in deltas if call.id is not None]
    assert [(call.index, call.type, call.function.name) for call in firsts] == [
        (0, "function", "get_weather"),
        (1, "function", "ping"),
    ]
    rest = [call for call in deltas if call.id is None]
    assert len([call for call in rest if call.index == 0]) > 2  # arguments in pieces
    assert all(call.function.name is None for call in rest)
    # One of them where calls are not parallel, none where they are not wanted.
    message, reason, _, _ = whole_and_streamed(client, tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    message, reason, _, _ = whole_and_streamed(client, tools=TOOLS, tool_choice="none")
    assert (message["content"], message["tool_calls"], reason) == (CALLS, None, "stop")


def test_what_the_client_has_parsed_is_sent_back(connect, tokenizer):
    """Its helpers add fields to an answer, which do not change what is rendered."""
    client, engine = connect(CALLS)
    options = {"model": "tiny", "max_tokens": 400, "tools": [WEATHER]}
    plain = client.chat.completions.create(messages=MESSAGES, **options).choices[0].message
    with client.chat.completions.stream(messages=MESSAGES, **options) as stream:
        helped = stream.get_final_completion().choices[0].message
    called = helped.model_dump(exclude_unset=True)
    called["parsed"] = {"a": [1]}
    called["tool_calls"][0]["function"]["parsed_arguments"] = {"city": "Rome"}
    prompts = []
    for answer in (plain, helped, called):
        result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
        client.chat.completions.create(messages=[*MESSAGES, answer, result], **options)
        prompts.append(tokenizer.decode(engine.submitted[-1].prompt.tolist()))
    assert prompts[0] == prompts[1] == prompts[2]
    assert "<tool_call>Rome</tool_call>" in prompts[0]


def test_malformed_and_cut_off_calls(connect):
    text = 'So <tool_call>{"nome": "x"}</tool_call> it is.'
    client, _ = connect(text)
    message, reason, _, _ = whole_and_streamed(client, tools=TOOLS)
    assert (message["content"], message["tool_calls"], reason) == (text, None, "stop")
    client, _ = connect(CALLS)
    message, reason, _, _ = whole_and_streamed(client, tools=TOOLS, max_tokens=65)
    assert reason == "length"
    assert message["tool_calls"][0]["function"]["arguments"].startswith('{"ci')


def test_a_conversation_with_tools_is_rendered(connect, tokenizer):
    client, engine = connect("ok")
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
    }
    client.chat.completions.create(
        model="tiny",
        messages=[
            *MESSAGES,
            {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
        tools=TOOLS,
    )
    prompt = tokenizer.decode(engine.submitted[-1].prompt.tolist())
    assert prompt.startswith(f"<tool>get_weather{json.dumps(SCHEMA)}<tool>ping")
    assert prompt.endswith(
        "<user>a cat\n<assistant><think>hm</think><tool_call>Oslo</tool_call>\n"
        "<tool>raincall_1\n<assistant>"
    )
    client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="none")
    assert "get_weather" not in tokenizer.decode(engine.submitted[-1].prompt.tolist())


def test_reasoning(connect, tokenizer):
    thought = "the cat sat <on> the mat"
    client, _ = connect(f"<think>\n{thought}\n</think>\n\nYes. {CALLS}")
    message, reason, usage, _ = whole_and_streamed(client, tools=TOOLS)
    assert message["reasoning_content"] == message["reasoning"] == thought
    assert message["content"] == "Yes. Let me see."
    assert len(message["tool_calls"]) == 2
    assert reason == "tool_calls"
    counted = usage.completion_tokens_details.reasoning_tokens
    assert abs(counted - len(tokenizer.encode(f"\n{thought}\n"))) <= 2
    hidden = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=400, extra_body={"include_reasoning": False}
    )
    assert "reasoning" not in hidden.choices[0].message.model_dump()
    assert hidden.usage.completion_tokens_details.reasoning_tokens == counted
    # Without a parser everything is content; a cut-off thought has none.
    plain, _ = connect(f"<think>{thought}</think>Yes.", reasoning_parser="none")
    assert whole_and_streamed(plain)[0]["content"] == f"<think>{thought}</think>Yes."
    message, reason, usage, _ = whole_and_streamed(client, max_tokens=15)
    assert (message["content"], reason) == (None, "length")
    assert usage.completion_tokens_details.reasoning_tokens > 5


def test_a_block_that_the_prompt_opens_or_closes(connect):
    opens = TEMPLATE.replace(
        "<assistant>{% if",
        "<assistant>{% if enable_thinking | default(true) %}<think>\n{% endif %}{% if",
    )
    client, _ = connect("I think.\n</think>\n\nYes.", chat_template=opens)
    message, _, _, _ = whole_and_streamed(client)
    assert (message["reasoning_content"], message["content"]) == ("I think.", "Yes.")
    client, _ = connect("No thought.", chat_template=opens)
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    message, _, _, _ = whole_and_streamed(client, extra_body=body)
    assert message["content"] == "No thought."
    assert "reasoning" not in message


def test_reasoning_effort(connect, tokenizer):
    client, engine = connect("ok")

    def prompt(**options):
        client.chat.completions.create(model="tiny", messages=MESSAGES, **options)
        return tokenizer.decode(engine.submitted[-1].prompt.tolist())

    assert prompt().endswith("<assistant>")
    assert prompt(reasoning_effort="none").endswith("<assistant><think></think>")
    with pytest.raises(openai.BadRequestError, match="the chat template has no such setting"):
        prompt(reasoning_effort="high")
    client, engine = connect("ok", chat_template="{{ reasoning_effort }}")
    assert prompt(reasoning_effort="high") == "high"


HARMONY = (
    "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}'
)


@pytest.mark.parametrize(
    ("parser", "text", "reasoning"),
    [
        ("harmony", HARMONY, "I look."),
        ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}]', None),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Oslo"}}', None),
        ("pythonic", "[get_weather(city='Oslo')]", None),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            None,
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
            "</function>\n</tool_call>",
            None,
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
            "</tool_call>",
            None,
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
            None,
        ),
    ],
)
def test_formats(connect, parser, text, reasoning):
    both = "harmony" if parser == "harmony" else "none"
    client, _ = connect(text, tool_call_parser=parser, reasoning_parser=both)
    message, reason, _, _ = whole_and_streamed(client, tools=TOOLS)
    assert (message["content"], reason) == (None, "tool_calls")
    assert message.get("reasoning") == reasoning
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    if parser == "kimi_k2":  # its template writes the ids of earlier calls
        assert call["id"] == "functions.get_weather:0"
    else:
        assert len(call["id"]) == (9 if parser == "mistral" else 29)


BAD = [
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{**PING, "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "pong"}}},
        "tool_choice.function.name",
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
    ),
    (
        {
            "tools": [
                PING,
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"type": "strin"}, "strict": True},
                },
            ]
        },
        "tools.1.function.parameters",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages.0.reasoning"),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[1"}}],
                }
            ]
        },
        "messages.0.tool_calls.0.function.arguments",
    ),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: str(value)[-40:])
def test_bad_bodies(connect, body, param):
    client, _ = connect("ok")
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(
            "/chat/completions",
            body={"model": "tiny", "messages": MESSAGES, **body},
            cast_to=object,
        )
    assert caught.value.body["param"] == param


def test_a_model_without_tools_refuses_them(connect):
    client, _ = connect("ok", chat_template="{{ messages[0].content }}")
    with pytest.raises(openai.BadRequestError, match="set tool_call_parser"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)
    with pytest.raises(openai.BadRequestError, match=r"tools\.0\.function\.parameters"):
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            tools=[{**PING, "function": {"name": "f", "parameters": {"type": "strin"}}}],
            tool_choice="required",
        )
    with pytest.raises(ConfigError, match="reasoning_parser: 'qwen3' cannot read harmony"):
        connect("ok", tool_call_parser="harmony", reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def models(tokenizer_path, tmp_path_factory):
    return write_models(tokenizer_path, tmp_path_factory.mktemp("tools"))


def with_and_without_drafter(models, ask, **options):
    """What `ask` returns of a client of a real engine, which has to be the same with a drafter."""
    answers = []
    for drafter in (None, {"decoding_type": "NGram", "max_draft_len": 4}):
        with engine_of(models["target"], drafter, served_model_name="tiny", **options) as engine:
            frontend = Frontend(engine._config, engine.info)
            edge = Edge(EngineClient(engine), frontend, EdgeMetrics("tiny"))
            with TestClient(build_http(edge)) as http:
                client = openai.OpenAI(
                    base_url="http://testserver/v1", api_key="none", http_client=http
                )
                answers.append(ask(client))
    assert answers[0] == answers[1]
    return answers[0]


@pytest.mark.parametrize(
    "parser",
    [
        *("hermes", "llama3_json", "pythonic", "mistral", "harmony"),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("qwen3_coder", "glm45", "kimi_k2")
        ),
    ],
)
def test_required_calls_always_parse(models, parser):
    """A model of random weights calls what it has to, with and without a drafter alike."""
    reasoning = "harmony" if parser == "harmony" else "none"
    options = {"tool_call_parser": parser, "reasoning_parser": reasoning}
    assert with_and_without_drafter(models, _forced, **options)


IGNORES_TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + IGNORES_TOOLS
)


def test_required_calls_of_a_model_without_a_format(models, tmp_path):
    """One complete call, whole and streamed, in chat and in Responses, that ends by itself."""
    bounded = {**PING["function"], "parameters": {"type": "object", "additionalProperties": False}}
    tools = [WEATHER, {"type": "function", "function": bounded}]

    def ask(client):
        found = []
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            for more in ({"temperature": 0}, {"temperature": 1, "seed": 3}):
                options = {"tools": tools, "tool_choice": choice, "max_tokens": 300, **more}
                options["extra_body"] = {"ignore_eos": True}
                message, reason, _, _ = whole_and_streamed(client, **options)
                assert (message["content"], reason) == (None, "tool_calls")
                (call,) = message["tool_calls"]
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                assert name in ("get_weather", "ping")
                if name == "get_weather":
                    assert json.loads(arguments)["city"] in ("Rome", "Oslo")
                else:
                    assert choice == "required"
                    assert json.loads(arguments) == {}
                flat = [{"type": "function", **tool["function"]} for tool in tools]
                response = client.responses.create(
                    model="tiny",
                    input="a cat",
                    tools=flat,
                    tool_choice=choice
                    if choice == "required"
                    else {"type": "function", "name": "ping"},
                    max_output_tokens=300,
                    temperature=0,
                )
                (item,) = response.output
                assert (item.type, response.status) == ("function_call", "completed")
                found += [call["function"], item.name, item.arguments]
        return found

    target = tmp_path / "long"
    shutil.copytree(models["target"], target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    long = {"target": str(target)}
    assert with_and_without_drafter(long, ask, chat_template=IGNORES_TOOLS, num_kv_blocks=1024)


def test_tools_are_presented_to_a_model_that_has_to_call(connect, tokenizer):
    """A template that ignores tools gets them in a message, once; one that shows them does."""
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]

    def prompt(template, messages, choice="required"):
        client, engine = connect("x", chat_template=template, tool_call_parser="none")
        client.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, tool_choice=choice
        )
        return tokenizer.decode(engine.submitted[-1].prompt.tolist())

    shown = json.dumps(WEATHER["function"])
    told = prompt(IGNORES_TOOLS, messages)
    assert told.startswith("<system>Be brief.\n\nAnswer with a call of a function:")
    assert told.endswith(
        f'{shown}\n{json.dumps(PING["function"])[:-1]}, "parameters": '
        '{"type": "object", "properties": {}}}<user>a cat<assistant>'
    )
    assert prompt(IGNORES_TOOLS, MESSAGES).startswith("<system>Answer with a call")
    named = {"type": "function", "function": {"name": "get_weather"}}
    told = prompt(NO_SYSTEM, MESSAGES, named)
    assert told.startswith("<user>Answer with a call")
    assert told.endswith(f"{shown}\n\na cat<assistant>")
    assert prompt(IGNORES_TOOLS, messages, "none") == "<system>Be brief.<user>a cat<assistant>"
    told = prompt(TEMPLATE, messages)
    assert told.startswith(f"<tool>get_weather{json.dumps(SCHEMA)}<tool>ping")
    assert "Answer with a call" not in told


def test_a_form_beside_tools_and_after_reasoning(models, tokenizer):
    """The text is free to be reasoning, a call, or the form; with a bias against `<`, the form."""
    (mark,) = tokenizer.encode("<")
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "seed": 5}

    def ask(client):
        found = []
        for bias in ({str(mark): -100}, {str(mark): 100}):
            for more in ({"response_format": form}, {}):
                answer = client.chat.completions.create(
                    tools=[strict], logit_bias=bias, **options, **more
                )
                found.append(answer.choices[0].model_dump(exclude={"message": {"tool_calls"}}))
        return found

    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    answers = with_and_without_drafter(models, ask, **parsers)
    assert answers[0]["finish_reason"] == "stop"
    assert json.loads(answers[0]["message"]["content"])["city"] in ("Rome", "Oslo")


def _forced(client):
    bounded = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    found = []
    for choice in (
        {"type": "function", "function": {"name": "get_weather"}},
        "required",
    ):
        for temperature in (0, 1):
            answer = client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                tools=[bounded],
                tool_choice=choice,
                parallel_tool_calls=False,
                temperature=temperature,
                seed=3,
                max_tokens=230,
            )
            (one,) = answer.choices
            if one.finish_reason == "length":  # reasoning without end
                assert one.message.reasoning, one
                found.append(one.message.reasoning)
                continue
            assert one.finish_reason == "tool_calls"
            assert one.message.content is None
            (call,) = one.message.tool_calls
            assert call.function.name == "get_weather"
            arguments = json.loads(call.function.arguments)
            assert arguments["city"] in ("Rome", "Oslo")
            assert set(arguments) <= {"city", "days"}
            assert arguments.get("days", 0) <= 9
            found.append(call.function.arguments)
    return found
