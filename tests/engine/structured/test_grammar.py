"""Grammars that are refused: the field is named, in short, before anything runs."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from outrider.engine.structured.grammar import check, grammar_of, min_length, parser_limits
from outrider.errors import InvalidRequestError
from outrider.scheduler.sampling import SamplingParams, StructuredOutputs
from outrider.workers.transport.wire import decode, encode


def refused(wanted: dict, **options) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        check(SamplingParams(structured_outputs=wanted, **options), (1,))
    assert len(caught.value.message) < 500
    assert caught.value.message.startswith(str(caught.value.field))
    return caught.value


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "strin"}},
        {"json": {"$ref": "http://example.com/schema"}},
        {"json": "{no json"},
        {"json": "[1]"},
        {"json": '{"properties": ' * 900 + "{}" + "}" * 900},
        {"json": "[" * 60_000},
        {"regex": "(a"},
        {"regex": "(" * 30_000 + "a" + ")" * 30_000},
        {"regex": "(?=a)b"},
        {"regex": "a{1000000}"},
        {"regex": "(?:a{300}|b){300}"},
        {"choice": ["a", "b" * 8193]},
        {"json": {"items": {"allOf": [{"pattern": "^a{10000}$"}]}}},
        {"json": {"patternProperties": {"a{10000}": {}}}},
        {"json": {"enum": [{"a": ["b" * 8193]}]}},
        {"json": {"type": "integer", "multipleOf": 1000003}},
        {"json": {"type": "number", "multipleOf": 12.34567}},
        {"json": {"allOf": [{"multipleOf": 7919}, {"type": "integer", "multipleOf": 7907}]}},
        {
            "json": {
                "properties": {"a": {"multipleOf": 997}},
                "patternProperties": {"a": {"multipleOf": 991}},
            }
        },
        {"grammar": "start: /a{10000}/"},
        {"grammar": 'start: "' + "a" * 8193 + '"'},
        {"grammar": 'root ::= "' + "a" * 8193 + '"'},
        {"json": {"items": {"properties": {f"{key}": {} for key in range(1001)}}}},
        {"grammar": "start: nothing"},
        {"grammar": "root ::= ("},
        {"grammar": "root ::= missing"},
        {"grammar": 'rule ::= "a"'},
        {"grammar": " "},
        {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    ],
    ids=lambda wanted: str(wanted)[:40],
)
def test_what_does_not_compile_is_named(wanted):
    assert refused(wanted).field == f"structured_outputs.{next(iter(wanted))}"


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        (r"\d{4}-\d{2}(T\d{2}){0,3}", 10),
        (r"a|(?:bb|c{5}){3}d*", 16),
        (r"[]a]{3}[^]]{3}[[:alpha:]x]{5}[\]]", 12),
        (r"\{{5}\p{L}{3}\x{61}{2}\u0061", 11),
        (r"(?i)(?P<name>ab){3}{4}", 24),
        ("((a{2", 3),
        ("a{" + "9" * 5000 + "}", 10**12 - 1),
    ],
)
def test_the_shortest_match_of_a_pattern(pattern, length):
    assert min_length(pattern) == length


def test_what_is_large_within_the_bounds_is_allowed():
    for wanted in (
        {"regex": ".{1,60000}"},
        {"json": {"type": "string", "minLength": 10**6}},
        {"json": {"properties": {"multipleOf": {"type": "number", "multipleOf": 0.01}}}},
        {"json": {"const": {"multipleOf": 1000003, "pattern": "a{10000}"}}},
        {"json": {"properties": {"a": {"multipleOf": 60}, "b": {"multipleOf": 1e3}}}},
        {"json": {"properties": {"a": {"multipleOf": 997}, "b": {"multipleOf": 0.25}}}},
        {"json": {"properties": {"a": {"multipleOf": 997}, "b": {"multipleOf": 991}}}},
        {"grammar": 'start: /a{3}/ "b{10000}" // /a{10000}/'},
    ):
        check(SamplingParams(structured_outputs=wanted), (1,))


TEXTS = " | ".join(f'"{index}"' for index in range(4096))
OPTIONAL = {f"{index}": {} for index in range(1000)}


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"choice": [f"{index}" for index in range(4096)]}, "4095"),
        ({"grammar": f"start: {TEXTS}"}, "4095"),
        ({"grammar": f'root ::= "<" ( {TEXTS} )+ ">"'}, "<40954094>"),
        (
            {"grammar": f'start: "<" c "|"\nc: d | {TEXTS} | "(" d // "\nd: "x" | /[|]"/'},
            "<4095|",
        ),
        ({"grammar": f'start: "TEXTS" c\nc: "x" | {TEXTS.replace(" |", "i |")} "!"'}, "TEXTS4094"),
        ({"json": {"properties": OPTIONAL}}, '{"999": 1, "y": 2}'),
        ({"json": {"properties": OPTIONAL, "required": ["3"]}}, '{"3": 1, "999": 1}'),
    ],
    ids=lambda value: str(value)[:30],
)
def test_as_many_alternatives_as_there_may_be(tokenizer, wanted, text):
    """Of thousands of rules at once the library's parser gives up in the middle of a text."""
    asked = StructuredOutputs(**wanted)
    limits = parser_limits(is_json=asked.is_json)
    matcher = LLMatcher(from_tokenizer(tokenizer), grammar_of(asked), log_level=0, limits=limits)
    for token in tokenizer.encode(text):
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json_object": False},
        {"choice": []},
        {"choice": [""]},
        {"choice": ["a" * 2**16, "b"]},
        {"regex": "a" * (2**16 + 1)},
        {"regex": "a", "whitespace_pattern": " "},
        {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
        {"backend": "x", "regex": "a"},
    ],
    ids=lambda wanted: str(wanted)[:40],
)
def test_what_contradicts_itself_is_refused(wanted):
    with pytest.raises(InvalidRequestError, match="^structured_outputs") as caught:
        SamplingParams(structured_outputs=wanted)
    within = caught.value
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputs(**wanted)
    own = caught.value
    assert str(own).startswith(f"{own.field}: ")
    assert within.field in (own.field, f"structured_outputs.{own.field}")


def test_a_model_without_an_end_token_is_refused():
    with pytest.raises(InvalidRequestError, match="no end token"):
        check(SamplingParams(structured_outputs={"regex": "a"}), ())


def test_it_crosses_processes_as_it_is():
    for wanted in (
        {"json": {"type": "integer", "maximum": 2**70}},
        {"choice": ["b", "a"]},
        {"json_object": True, "disable_any_whitespace": True},
    ):
        sampling = SamplingParams(structured_outputs=StructuredOutputs(**wanted))
        assert decode(encode(sampling)) == sampling
        check(sampling, (1,))


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"regx": "a"}, "regx"),
        ({"regex": "\ud800"}, "regex"),
        ({"choice": ["a", 1]}, "choice.1"),
        ({}, "structured_outputs"),
    ],
)
def test_a_wrong_form_is_named(wanted, field):
    with pytest.raises(InvalidRequestError, match=f"^{field}: ") as caught:
        StructuredOutputs(**wanted)
    assert caught.value.field == field


def test_names_of_a_form_are_texts():
    with pytest.raises(InvalidRequestError, match="^structured_outputs: "):
        SamplingParams(structured_outputs={1: "a"})
