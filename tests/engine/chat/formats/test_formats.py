"""Every format: what it reads, what it gives back, and that no split of the text changes either."""

from __future__ import annotations

import json
import random

import pytest

from outrider.engine.chat import formats
from outrider.engine.chat.formats import (
    deepseek,
    glm,
    harmony,
    hermes,
    kimi,
    llama_json,
    mistral,
    pythonic,
    qwen_coder,
)
from outrider.engine.chat.lark import Function
from outrider.engine.chat.reader import Arguments, CallBegin, Content, Parser, Reasoning

TYPES = {
    "city": {"type": "string"},
    "n": {"type": "array"},
    "t": {"type": "boolean"},
    "x": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "k": {"$ref": "#/$defs/K"},
}
WEATHER = Function("get_weather", {"properties": TYPES, "$defs": {"K": {"enum": [1, "b"]}}})
NAMES = {name: Function(name) for name in ("add", "ns.sub-tool")} | {"get_weather": WEATHER}
PARSERS = {
    "hermes": hermes.parse,
    "llama_json": llama_json.parse,
    "mistral": mistral.parse,
    "deepseek": deepseek.parse,
    "pythonic": pythonic.parse,
    "harmony": harmony.parse,
    "kimi": kimi.parse,
    "qwen_coder": qwen_coder.parse,
    "glm": glm.parse,
}
ARGS = '{"city": "São \\"P\\" {]", "n": [1, {"a": null}], "t": true}'
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```"
    "<｜tool▁call▁end｜>"
)
HEAD = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
KIMI = f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ARGS}"
KIMI_END = "<|tool_call_end|><|tool_calls_section_end|>"
CODER = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nSão "P"\n<b>\n\n</parameter>\n'
    '<parameter=n>\n[1, {"a": null}]\n</parameter>\n<parameter=t>\nTrue\n</parameter>\n'
    "</function>\n</tool_call>"
)
CODER_ARGS = '{"city": "São \\"P\\"\\n<b>\\n", "n": [1, {"a": null}], "t": true}'
GLM = (
    "<tool_call>get_weather\n<arg_key>x</arg_key>\n<arg_value>null</arg_value>\n"
    "<arg_key>city</arg_key>\n<arg_value> a\n</arg_value>\n"
    "<arg_key>k</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
)
GLM_ARGS = '{"x": null, "city": " a\\n", "k": 1}'
# Per format: text, content, reasoning, calls.
CASES = [
    ("hermes", "no call < at <tool all.\n", "no call < at <tool all.\n", "", []),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"x": 1}, "name": "add"}\n</tool_call>\n',
        "Let me see.",
        "",
        [("get_weather", ARGS), ("add", '{"x": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call> done', "done", "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}', "", "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":null}', "", "", [("f", "{}")]),
    # One bracket short, one too many, and a member more.
    ("hermes", '<tool_call>{"name":"f","arguments":{}</tool_call>', "", "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}}}</tool_call>.', "}.", "", [("f", "{}")]),
    ("hermes", '<tool_call>{"id":7,"name":"f","arguments":{},"type":"x"}', "", "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a": "b', "", "", [("f", '{"a": "b')]),
    # Malformed before it is a call: all of it is content.
    ("hermes", 'a \n<tool_call>\n {"nam": 1 } b', 'a \n<tool_call>\n {"nam": 1 } b', "", []),
    ("hermes", 'a <tool_call>\n{"name": "get_w', 'a <tool_call>\n{"name": "get_w', "", []),
    ("hermes", "<tool_call> words </tool_call>", "<tool_call> words </tool_call>", "", []),
    (
        "llama_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGS}}}; {{"name":"add"}} !',
        "!",
        "",
        [("get_weather", ARGS), ("add", "{}")],
    ),
    ("llama_json", '\n{"type":"function","name":"add","parameters":{}}', "", "", [("add", "{}")]),
    (
        "llama_json",
        ' {"name": "other", "parameters": {}}',
        ' {"name": "other", "parameters": {}}',
        "",
        [],
    ),
    ("llama_json", "{ braces } and so on", "{ braces } and so on", "", []),
    ("llama_json", 'So: <|python_tag|>{"name": "add"', 'So: <|python_tag|>{"name": "add"', "", []),
    ("llama_json", '{"name":"add","parameters":{}}; {"a": 1}', '; {"a": 1}', "", [("add", "{}")]),
    (
        "mistral",
        f'Hm.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGS}}}, {{"name": "add", '
        '"arguments": {}, "id": "abcdefghi"}]',
        "Hm.",
        "",
        [("get_weather", ARGS), ("add", "{}")],
    ),
    (
        "mistral",
        f"[TOOL_CALLS]get_weather[ARGS]{ARGS}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{{}}",
        "",
        "",
        [("get_weather", ARGS), ("add", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]add{"a": 1} [', "[", "", [("add", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS] and words [ARGS]", "[TOOL_CALLS] and words [ARGS]", "", []),
    ("mistral", '[TOOL_CALLS][{"nome": 1}] x', '[TOOL_CALLS][{"nome": 1}] x', "", []),
    ("deepseek", f"I add.\n\n{V3}<｜tool▁calls▁end｜>", "I add.", "", [("add", "{}")]),
    (
        "deepseek",
        f"{V3}\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGS}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜> ok",
        "ok",
        "",
        [("add", "{}"), ("get_weather", ARGS)],
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{ARGS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "",
        [("function", ARGS), ("add", "{}")],
    ),
    ("deepseek", "<｜tool▁calls▁begin｜> none", "<｜tool▁calls▁begin｜> none", "", []),
    (
        "pythonic",
        "[get_weather(city='São (\"P\")', n=[1, {'a': None}], t=True), add(a=-1.5, b=null)]",
        "",
        "",
        [
            ("get_weather", '{"city": "São (\\"P\\")", "n": [1, {"a": null}], "t": true}'),
            ("add", '{"a": -1.5, "b": null}'),
        ],
    ),
    ("pythonic", "<|python_start|>[add()]<|python_end|> x", "x", "", [("add", "{}")]),
    ("pythonic", "[other(a=1)] [", "[other(a=1)] [", "", []),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", "", []),
    ("pythonic", "[add(a=f(1))]", "[add(a=f(1))]", "", []),
    ("pythonic", "[add(a=1), add(", ", add(", "", [("add", '{"a": 1}')]),
    (
        "harmony",
        f"<|channel|>analysis<|message|>I think.<|end|><|start|>assistant{HEAD}{ARGS}<|call|>",
        "",
        "I think.",
        [("get_weather", ARGS)],
    ),
    (
        "harmony",
        " to=functions.add<|channel|>commentary json<|message|>{}<|call|><|start|>assistant"
        f"{HEAD}{ARGS}",
        "",
        "",
        [("add", "{}"), ("get_weather", ARGS)],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look. <|end|><|start|>assistant<|channel|>final<|message|> It rains.\n<|return|>",
        "I look.It rains.",
        "Hm.",
        [],
    ),
    ("harmony", " plain < text <|", " plain < text <|", "", []),
    ("harmony", f"{HEAD}<|call|>", "", "", [("get_weather", "{}")]),
    (
        "kimi",
        f"I look.\n<|tool_calls_section_begin|>{KIMI}<|tool_call_end|>\n<|tool_call_begin|> "
        f"add:1 <|tool_call_argument_begin|> {{}}{KIMI_END} ok",
        "I look.ok",
        "",
        [("get_weather", ARGS), ("add", "{}")],
    ),
    ("kimi", f"{KIMI}{KIMI_END}", "", "", [("get_weather", ARGS)]),
    ("kimi", "<|tool_calls_section_begin|> none", "<|tool_calls_section_begin|> none", "", []),
    ("kimi", "<|tool_call_begin|>a b<|tool_call", "<|tool_call_begin|>a b<|tool_call", "", []),
    ("qwen_coder", f"So: {CODER}\n{CODER}.", "So:.", "", [("get_weather", CODER_ARGS)] * 2),
    # Without the outer tag; without parameters; values of any type.
    ("qwen_coder", CODER.replace("<tool_call>", ""), "", "", [("get_weather", CODER_ARGS)]),
    ("qwen_coder", "<tool_call><function=f></function></tool_call>", "", "", [("f", "{}")]),
    (
        "qwen_coder",
        "<function=add><parameter=a>1.5</parameter><parameter=b>None</parameter><parameter=c>\n"
        'NaN\n</parameter><parameter=d>"5"</parameter></function>',
        "",
        "",
        [("add", '{"a": 1.5, "b": null, "c": "NaN", "d": "\\"5\\""}')],
    ),
    ("qwen_coder", "<function=other>", "<function=other>", "", []),
    ("qwen_coder", "<tool_call> words </tool_call>", "<tool_call> words </tool_call>", "", []),
    # Out of place, and cut off: what has begun stays a call.
    ("qwen_coder", "<function=add>\nwords", "\nwords", "", [("add", "{}")]),
    ("qwen_coder", "<function=add>\n<param", "", "", [("add", "{")]),
    (
        "qwen_coder",
        "<function=get_weather><parameter=city>\nRo\n</par",
        "",
        "",
        [("get_weather", '{"city": "Ro')],
    ),
    ("glm", f"Hm.\n{GLM}\n{GLM}", "Hm.", "", [("get_weather", GLM_ARGS)] * 2),
    ("glm", GLM.replace("\n<", "<"), "", "", [("get_weather", GLM_ARGS.replace("\\n", ""))]),
    ("glm", "<tool_call>add</tool_call> ok", "ok", "", [("add", "{}")]),
    ("glm", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", "", []),
    (
        "glm",
        "<tool_call>add\n<arg_key>a</arg_key> b",
        "\n<arg_key>a</arg_key> b",
        "",
        [("add", "{}")],
    ),
]


def read(name, pieces):
    parser = Parser(lambda reader: PARSERS[name](reader, NAMES))
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, Arguments):
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    spans = parser.reader.reasoning
    return content, reasoning, [tuple(call) for call in calls], spans


def pieces_of(text, rng):
    """`text` in random pieces, of one character each in every fourth case."""
    if rng.random() < 0.25:
        return list(text)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), CASES)
def test_whole_and_split(name, text, content, reasoning, calls):
    rng = random.Random(text)
    whole = read(name, [text])
    assert whole[:3] == (content, reasoning, calls)
    for _ in range(60):
        assert read(name, pieces_of(text, rng)) == whole


@pytest.mark.parametrize("name", PARSERS)
def test_splits_of_damaged_text(name):
    """Whatever is missing, doubled or out of place: the pieces do not matter, nothing fails."""
    rng = random.Random(name)
    texts = [case[1] for case in CASES if case[0] == name]
    for _ in range(400):
        text = rng.choice(texts)
        for _ in range(rng.randrange(1, 4)):
            at, size = rng.randrange(len(text) + 1), rng.randrange(12)
            other = rng.choice(texts)
            start = rng.randrange(len(other))
            text = text[:at] + rng.choice(["", other[start : start + size]]) + text[at + size :]
            text = text or "x"
        assert read(name, pieces_of(text, rng)) == read(name, [text]), text


def test_arguments_are_passed_on_before_the_call_ends():
    parser = Parser(lambda reader: hermes.parse(reader, NAMES))
    assert parser.push('<tool_call>\n{"name": "add", "arguments": {"a"') == [
        CallBegin(0, "add"),
        Arguments(0, '{"a"'),
    ]
    assert parser.push(": 1") == [Arguments(0, ": 1")]
    assert parser.push("}}\n</tool_call>\n") == [Arguments(0, "}")]
    assert parser.finish() == []


def test_strings_are_passed_on_before_they_end():
    parser = Parser(lambda reader: qwen_coder.parse(reader, NAMES))
    assert parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\nRo") == [
        CallBegin(0, "get_weather"),
        Arguments(0, '{"city": "Ro'),
    ]
    assert parser.push('"\n</para') == [Arguments(0, '\\"')]
    assert parser.push('"meter>') == [Arguments(0, '\\n</para\\"meter>')]


def test_kimis_own_ids_are_kept():
    parser = Parser(lambda reader: kimi.parse(reader, NAMES))
    assert parser.push(KIMI)[0] == CallBegin(0, "get_weather", "functions.get_weather:0")
    parser = Parser(lambda reader: kimi.parse(reader, NAMES))
    assert parser.push(KIMI.replace(":0", ""))[0] == CallBegin(0, "get_weather")


def test_calls_are_valid_json():
    for name, _, _, _, calls in CASES:
        for _, arguments in calls:
            if arguments not in ('{"a": "b', "{", '{"city": "Ro'):
                assert isinstance(json.loads(arguments), dict), name
    assert formats.__doc__
