"""Grammars of tool calls against the parsers, and which formats a chat template stands for."""

from __future__ import annotations

import json

import pytest

from outrider.config import EngineConfig
from outrider.engine.chat.chat_text import CALLS, REASONING, ChatText
from outrider.engine.chat.formats import deepseek, glm, harmony, kimi, mistral, qwen_coder
from outrider.engine.chat.lark import Function
from outrider.engine.chat.reader import CallBegin, Reasoning
from outrider.engine.structured.grammar import check_schema, grammar_of
from outrider.errors import ConfigError, InvalidRequestError
from outrider.scheduler.sampling import StructuredOutputs

WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}, "n": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    strict=True,
)
ADD = Function("add")
ROME = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>'
V3 = (
    f"{deepseek.CALL}function{deepseek.SEPARATOR}get_weather\n```json\n{ROME}\n```"
    f"{deepseek.CALL_END}"
)
V31 = f"{deepseek.CALL}get_weather{deepseek.SEPARATOR}{ROME}{deepseek.CALL_END}"
HARMONY = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}"
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=n>\n3\n"
    "</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>n</arg_key>"
    "<arg_value>3</arg_value></tool_call>"
)
GLM_LINES = "<tool_call>{function-name}\n"  # in templates of GLM-4.5
KIMI = f"{kimi.CALL}functions.get_weather:7{kimi.ARGUMENTS}{ROME}{kimi.CALL_END}"
# Parser, template, tokens of the vocabulary, a required answer and how many calls it has.
REQUIRED = [
    ("hermes", "", (), CALL, 1),
    ("hermes", "", ("<tool_call>", "</tool_call>"), f"{CALL}\n{CALL}", 2),
    ("llama3_json", "", (), f'{{"name": "get_weather", "parameters": {ROME}}}', 1),
    ("pythonic", "", (), '[get_weather(city="Rome", n=3), get_weather(city="Rome")]', 2),
    ("mistral", "", (), f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ROME}}}]', 1),
    ("mistral", "", ("[TOOL_CALLS]", "[ARGS]"), f"[TOOL_CALLS]get_weather[ARGS]{ROME}" * 2, 2),
    (
        "mistral",
        "[TOOL_CALLS] [",
        ("[TOOL_CALLS]", "[ARGS]"),
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ROME}}}]',
        1,
    ),
    ("deepseek_v3", "", (), f"{deepseek.CALLS}{V3}\n{V3}{deepseek.CALLS_END}", 2),
    (
        "deepseek_v3",
        deepseek.CALL,
        deepseek.MARKS,
        f"{deepseek.CALLS}{V31}{V31}{deepseek.CALLS_END}",
        2,
    ),
    ("qwen3_coder", "", (qwen_coder.BEGIN, qwen_coder.END), f"{CODER}\n{CODER}", 2),
    ("glm45", "", glm.MARKS, GLM + GLM, 2),
    (
        "glm45",
        GLM_LINES,
        (),
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        1,
    ),
    ("kimi_k2", "", kimi.MARKS, f"{kimi.CALLS}{KIMI}{KIMI}{kimi.CALLS_END}", 2),
    ("harmony", "", harmony.MARKS, HARMONY, 1),
    (
        "harmony",
        "",
        harmony.MARKS,
        f"<|channel|>analysis<|message|>So.<|end|><|start|>assistant{HARMONY}",
        1,
    ),
]


@pytest.fixture
def language(tokenizer_path):
    """A tokenizer with marks as tokens, and whether a grammar of it matches a text."""
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    def make(marks):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)
        special = [AddedToken(mark, special=mark[0] == "[") for mark in marks]
        tokenizer.add_tokens(special)
        compiled = from_tokenizer(tokenizer, n_vocab=len(tokenizer))

        def matches(grammar, text):
            matcher = LLMatcher(compiled, grammar, log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            for token in tokenizer.encode(text, add_special_tokens=False):
                if not matcher.consume_token(token):
                    return False
            return matcher.is_accepting()

        return tokenizer, matches

    return make


def chat_text(tokenizer, calls, reasoning="none", template=""):
    if calls == "harmony":
        reasoning = "harmony"
    return ChatText(calls, reasoning, template, tokenizer)


@pytest.mark.parametrize(("name", "template", "marks", "text", "num_calls"), REQUIRED)
def test_required_calls(language, name, template, marks, text, num_calls):
    tokenizer, matches = language(marks)
    chat = chat_text(tokenizer, name, template=template)
    grammar = chat.required([WEATHER, ADD], "", parallel=True)
    assert matches(grammar, text)
    assert not matches(grammar, text.replace("Rome", "Oslo"))
    assert not matches(grammar, text.replace("get_weather", "get_time"))
    assert not matches(grammar, "Rome is nice.")
    assert matches(chat.required([WEATHER], "", parallel=False), text) == (num_calls == 1)
    parser = chat.parser("", [WEATHER, ADD])
    events = parser.push(text) + parser.finish()
    calls = [event.name for event in events if isinstance(event, CallBegin)]
    assert calls == ["get_weather"] * num_calls
    # Special tokens that the parser reads are not dropped from the text.
    ids = tokenizer.convert_tokens_to_ids(list(marks))
    assert set(ids) <= set(chat.shown_ids)


@pytest.mark.parametrize("marks", [(), ("<tool_call>",)])
def test_strict_calls_within_free_text(language, marks):
    tokenizer, matches = language(marks)
    chat = chat_text(tokenizer, "hermes")
    grammar = chat.strict([WEATHER, ADD], "")
    add = '<tool_call>\n{"name": "add", "arguments": {"any": [1]}}\n</tool_call>'
    for text in ("No call.", f"So {CALL}", f"{CALL}\n{add} and text", ""):
        assert matches(grammar, text), text
    for text in (CALL.replace("Rome", "Oslo"), "<tool_call> words", CALL.replace("get_", "be_")):
        assert not matches(grammar, text), text
    assert chat_text(tokenizer, "llama3_json").strict([WEATHER], "") is None


def test_plain_text_arguments_under_a_grammar(language):
    """Strings are free text up to their end, other values JSON; further parameters are free."""
    tokenizer, matches = language(())
    schema = {
        "properties": {"s": {"type": "string"}, "m": {"type": "integer", "maximum": 5}},
        "required": ["s"],
    }
    named = Function("f", schema, strict=True)
    chat = chat_text(tokenizer, "qwen3_coder")
    grammar = chat.strict([named, ADD], "")
    head, end = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"

    def parameter(name, value):
        return f"<parameter={name}>\n{value}\n</parameter>\n"

    text = parameter("s", 'if a < b:\n\t"x"\n')
    assert matches(grammar, f"So {head}{text}{end}")
    assert matches(grammar, f"{head}{text}{parameter('m', 5)}{end}")
    free = f"<tool_call>\n<function=add>\n{parameter('any', 'thing')}{parameter('more', 1)}{end}"
    assert matches(grammar, free)
    for bad in (head + end, head + parameter("m", 5) + end, head + text + parameter("m", 9) + end):
        assert not matches(grammar, bad), bad
    for member in (
        {"type": "string", "pattern": "a+"},
        {"type": ["string", "null"], "minLength": 1},
    ):
        bounded = Function("f", {"properties": {"s": member}})
        with pytest.raises(InvalidRequestError, match=r"^here: .*strings are plain text") as caught:
            chat.check_function(bounded, "here")
        assert caught.value.field == "here"
    with pytest.raises(InvalidRequestError, match="anyOf"):
        chat.check_function(Function("f", {"properties": {}, "anyOf": []}), "here")


@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")])
def test_a_grammar_begins_after_the_reasoning(language, marks):
    tokenizer, matches = language(marks)
    chat = chat_text(tokenizer, "hermes", "qwen3")

    def framed(prompt, **options):
        frame = chat.frame(prompt, **options)
        answer = StructuredOutputs(json={"enum": [7]})
        return grammar_of(answer.model_copy(update={"frame": frame}))

    thought = "<think>\nI {think} so\n</think>\n\n"
    for text in (f"{thought}7", "7"):
        assert matches(framed("<assistant>"), text), text
    assert not matches(framed("<assistant>"), f"{thought}8")
    assert not matches(framed("<assistant>"), "<think>7")
    opened = framed("<assistant><think>\n")
    assert matches(opened, "hm</think>\n\n7")
    assert not matches(opened, "7")
    assert chat.frame("<assistant><think>\n\n</think>\n\n") is None
    either = framed("<assistant>", functions=[WEATHER])
    for text in (f"{thought}{CALL}", CALL, f"{thought}7"):
        assert matches(either, text), text
    assert not matches(either, CALL.replace("Rome", "Oslo"))
    required = chat.required([WEATHER], "<think>", parallel=True)
    assert matches(required, f"hm</think>\n{CALL}")
    for kind in ({"regex": "a+"}, {"choice": ["b"]}, {"grammar": 'root ::= "c"'}):
        frame = chat.frame("<assistant>")
        grammar = grammar_of(StructuredOutputs(**kind, frame=frame))
        text = {"regex": "aa", "choice": "b", "grammar": "c"}[next(iter(kind))]
        assert matches(grammar, f"{thought}{text}"), kind
        assert matches(grammar, text), kind
        assert not matches(grammar, "d"), kind


def test_harmony_answers_go_to_the_final_channel(language):
    tokenizer, matches = language(harmony.MARKS)
    chat = chat_text(tokenizer, "harmony")
    grammar = grammar_of(StructuredOutputs(json={"enum": [7]}, frame=chat.frame("")))
    text = "<|channel|>final<|message|>7"
    assert matches(grammar, text)
    assert matches(grammar, f"<|channel|>analysis<|message|>x<|end|><|start|>assistant{text}")
    assert not matches(grammar, "7")


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_where_a_completion_begins(tokenizer, parser):
    def reasoning(prompt, text, **options):
        reader = chat_text(tokenizer, "none", parser).parser(prompt, [], **options)
        events = reader.push(text) + reader.finish()
        return "".join(event.text for event in events if isinstance(event, Reasoning))

    assert reasoning("<assistant>", "<think>a</think>b") == "a"
    assert reasoning("<assistant><think>\n", "a</think>b") == "a"
    assert reasoning("<assistant><think>\n\n</think>\n\n", "a") == ""
    assert reasoning("<assistant>", "a</think>b") == ("a" if parser == "deepseek_r1" else "")
    assert reasoning("x <think>half", " a</think>b", continued=True) == "a"
    assert reasoning("x <think>half</think> b", " c", continued=True) == ""


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{ messages }}", "none", "none"),
        ("<tool_call>\n{...}</tool_call> <think>", "hermes", "qwen3"),
        ("<tool_call>\n<function=name><parameter=key><think>", "qwen3_coder", "qwen3"),
        ("<tool_call>{function-name}\n<arg_key>k</arg_key><think>", "glm45", "qwen3"),
        ("<|tool_calls_section_begin|>", "kimi_k2", "none"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        (f"{deepseek.CALLS} content.split('</think>')", "deepseek_v3", "deepseek_r1"),
        ("<|channel|>analysis", "harmony", "harmony"),
        ("use exact format: [func_name1(a=1)] ipython", "pythonic", "none"),
        ('ipython {"name": ' + "'\"parameters\": '", "llama3_json", "none"),
    ],
)
def test_auto_reads_the_template(tokenizer, template, calls, reasoning):
    chat = ChatText("auto", "auto", template, tokenizer)
    assert (chat.calls_name, chat.reasoning_name) == (calls, reasoning)
    chosen = ChatText("hermes", "auto", template, tokenizer)
    assert chosen.calls_name == "hermes"
    assert chosen.reasoning_name == ("none" if reasoning == "harmony" else reasoning)


def test_names_are_those_of_the_configuration():
    fields = EngineConfig.model_fields
    for field, table in (
        ("tool_call_parser", CALLS),
        ("reasoning_parser", REASONING),
    ):
        names = set(fields[field].annotation.__args__)
        assert names == {"auto", "none", *table}
    for other, ours in (
        ({"tool_call_parser": "qwen25"}, "hermes"),
        ({"tool_call_parser": "openai", "enable_auto_tool_choice": True}, "harmony"),
        ({"tool_call_parser": "llama4_pythonic"}, "pythonic"),
        ({"tool_call_parser": "glm47"}, "glm45"),
        ({"tool_call_parser": "qwen3_xml"}, "qwen3_coder"),
    ):
        assert EngineConfig.load({"model": "m", **other}).tool_call_parser == ours
    loaded = EngineConfig.load({"model": "m", "reasoning_parser": "deepseek-r1"})
    assert loaded.reasoning_parser == "deepseek_r1"
    for bad in ({"tool_call_parser": "bert"}, {"enable_auto_tool_choice": False}):
        with pytest.raises(ConfigError) as caught:
            EngineConfig.load({"model": "m", **bad})
        assert caught.value.field == next(iter(bad))


def test_schemas_are_checked_by_name():
    check_schema(WEATHER.schema, "tools.0.function.parameters")
    with pytest.raises(InvalidRequestError, match=r"tools\.3\.function\.parameters: "):
        check_schema({"type": "strin"}, "tools.3.function.parameters")
    assert json.loads(ROME)
    assert mistral.MARK in CALLS["mistral"].code.MARKS
