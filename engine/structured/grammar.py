"""Translates a request's constraint into a grammar of llguidance, and checks it.

The limits of llguidance's parser bound time and memory. White space between JSON tokens is bounded
here, because a model might otherwise never stop writing it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from ...errors import InvalidRequestError
from ...scheduler.sampling import SamplingParams, StructuredOutputs
from ..chat.lark import WHITESPACE

# Bounds of quantities that llguidance's own limits do not cover. A pattern with repetitions is
# expanded in full, a text that must come next is tokenized in full in every step, and a multiple
# becomes an automaton with one state per remainder. Without bounds, one request could block all
# others for minutes.

MAX_TEXT: Final = 8192  # characters of a pattern's shortest match, or of a text
MAX_OPTIONAL: Final = 1000  # optional properties of an object; each takes 4 items of a parser row
MAX_MULTIPLE: Final = 10_000  # states of the automaton
_MAX_MULTIPLES: Final = 20_000  # sum over a schema
_ENDLESS: Final = 10**12
_LITERAL_KEYS = ("const", "enum")  # their values are not schemas
_PATTERN_KEYS = ("pattern", "whitespace_pattern")
# Keywords that apply several schemas to one value; otherwise each multiple has its own automaton.
_JOINING_KEYS: Final = {
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"),
    *("patternProperties", "contains", "$ref", "$dynamicRef", "$recursiveRef"),
}
_COUNT = re.compile(r"\{(\d+)(?:,\d*)?\}")
_ESCAPE = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|x..|u....|U........|.)", re.DOTALL)
_LARK_TOKEN = re.compile(
    r"//[^\n]*|\"(?P<text>(?:\\.|[^\"\\\n])*)\"|/(?P<pattern>(?:\\.|[^/\\\n])+)/"
)
# A row of text alternatives, after each character of the texts has been replaced by "_".
_LISTED = re.compile(
    r"(?<=[:(|])\s*(?P<texts>\"_+\"i?(?:\s*\|\s*\"_+\"i?){63,})(?=\s*[|)]|[ \t]*(?:\n|\Z))"
)


def check_pattern(pattern: str) -> None:
    """Raises `ValueError` if the shortest match of a regular expression is too long."""
    length = min_length(pattern)
    if length > MAX_TEXT:
        raise ValueError(
            f"the shortest text that the pattern matches has {min(length, _ENDLESS)} characters; "
            f"at most {MAX_TEXT}"
        )


def check_text(text: str) -> None:
    """Raises `ValueError` if a text that may be the only continuation is too long."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"a text of {len(text)} characters; at most {MAX_TEXT}")


def check_lark(grammar: str) -> None:
    """Checks patterns and texts of a Lark grammar; raises `ValueError`."""
    for token in _LARK_TOKEN.finditer(grammar):
        if token["pattern"] is not None:
            check_pattern(token["pattern"])
        elif token["text"] is not None:
            check_text(token["text"])


def with_terminals(grammar: str) -> str:
    """Rewrites a Lark grammar: each long list of texts becomes one terminal.

    llguidance's parser limits the number of alternatives in rules to some thousands, but not in
    terminals.
    """

    def blank(token: re.Match[str]) -> str:
        if token["text"] is None:
            return " " * len(token[0])
        return f'"{"_" * len(token["text"])}"'

    name = "TEXTS"
    while name in grammar:
        name += "_"
    parts, terminals, end = list[str](), list[str](), 0
    for found in _LISTED.finditer(_LARK_TOKEN.sub(blank, grammar)):
        begin, behind = found.span("texts")
        parts.append(f"{grammar[end:begin]}{name}{len(terminals)}")
        terminals.append(f"{name}{len(terminals)}: {grammar[begin:behind]}")
        end = behind
    return "\n".join(["".join(parts) + grammar[end:], *terminals])


def check_schema_bounds(schema: Any) -> None:
    """Checks patterns, texts and multiples of a JSON schema; raises `ValueError`."""
    multiples: list[int] = []
    joins = False
    for node in _nodes(schema, _LITERAL_KEYS):
        if isinstance(node, dict) and isinstance(properties := node.get("properties"), dict):
            num_optional = len(properties.keys() - _texts(node.get("required")))
            if num_optional > MAX_OPTIONAL:
                raise ValueError(
                    f"an object with {num_optional} properties that are not required; "
                    f"at most {MAX_OPTIONAL}"
                )
    for key, value in _keywords(schema):
        joins = joins or key in _JOINING_KEYS
        if key in _PATTERN_KEYS and isinstance(value, str):
            check_pattern(value)
        elif key == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                check_pattern(pattern)
        elif key in _LITERAL_KEYS:
            for text in _texts(value):
                check_text(text)
        elif key == "multipleOf" and isinstance(value, (int, float)):
            multiples.append(_states(value))
    # Multiples of one value are combined to their least common multiple, also across references.
    states = math.lcm(*multiples) if joins else max(multiples, default=1)
    if states > MAX_MULTIPLE or sum(multiples) > _MAX_MULTIPLES:
        raise ValueError(
            f"multipleOf: each in a schema is at most {MAX_MULTIPLE}, with allOf, $ref and the "
            "like the least common multiple of all; and their sum at most "
            f"{_MAX_MULTIPLES}, without decimal points"
        )


def min_length(pattern: str) -> int:
    """Returns the length of the shortest match of a regular expression in Rust's syntax.

    The result is an upper bound: a part that is not understood counts as one character, and
    alternatives count as the longest of them, because each is expanded.
    """
    # Per open group: length of the longest alternative, of the current one, and of its last item.
    stack = [[0, 0, 0]]
    place = 0
    while place < len(pattern):
        top = stack[-1]
        char = pattern[place]
        repeat = _COUNT.match(pattern, place)
        place += 1
        if char == "(":
            top[1], top[2] = top[1] + top[2], 0
            stack.append([0, 0, 0])
            flags = re.compile(r"\?(?:P?<\w+>|[\w-]*:?)").match(pattern, place)
            place = flags.end() if flags is not None else place
        elif char == ")" and len(stack) > 1:
            longest, done, last = stack.pop()
            stack[-1][2] = max(longest, done + last)
        elif char == "|":
            top[0], top[1], top[2] = max(top[0], top[1] + top[2]), 0, 0
        elif repeat is not None:
            top[2] = min(top[2] * max(1, int(repeat[1][:12])), _ENDLESS)
            place = repeat.end()
        elif char not in "*+?":
            top[1], top[2] = top[1] + top[2], 1
            if char == "\\":
                escape = _ESCAPE.match(pattern, place - 1)
                place = escape.end() if escape is not None else place
            elif char == "[":
                place = _class_end(pattern, place)
    while len(stack) > 1:  # an unclosed group
        longest, done, last = stack.pop()
        stack[-1][2] = max(longest, done + last)
    longest, done, last = stack[0]
    return max(longest, done + last)


def _class_end(pattern: str, place: int) -> int:
    """Returns the position after a character class that begins before `place`; they may nest."""
    depth, first = 1, True
    while place < len(pattern) and depth:
        char = pattern[place]
        if char == "\\":
            place += 1
        elif char == "[":
            depth += 1
        elif char == "]" and not first:
            depth -= 1
        first = (first and char == "^") or char == "["
        place += 1
    return place


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields every key and value in a schema except those within literals, in no fixed order."""
    for node in _nodes(schema, _LITERAL_KEYS):
        if isinstance(node, dict):
            yield from node.items()


def _texts(value: Any) -> Iterator[str]:
    """Yields every string in a value, including keys."""
    for node in _nodes(value):
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            yield from node


def _nodes(value: Any, but: Sequence[str] = ()) -> Iterator[Any]:
    """Yields a value and everything nested in it, except below the keys `but`."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, dict):
            waiting += [below for key, below in node.items() if key not in but]
        elif isinstance(node, list):
            waiting += node


def _states(multiple: float) -> int:
    """Returns a multiple without decimal point and trailing zeros: 25 for 0.25, 1 for 1000."""
    number = Decimal(repr(multiple))
    if not number.is_finite() or number == 0:
        return 1  # llguidance rejects it
    return int("".join(map(str, number.normalize().as_tuple().digits)))


_MAX_NESTING: Final = 128  # nested brackets of a grammar
_STOP_REASONS: Final = {"NoExtensionBias": "no text of finite length matches it"}
_CROWDED = re.compile(r"Current row has (\d+) items; max is (\d+)")
_MAX_MESSAGE: Final = 300  # characters of the library's message


def parser_limits(*, is_json: bool = False) -> LLParserLimits:
    """Returns limits for compiling a grammar and computing a mask: some tens of milliseconds each.

    A user's grammar may be ambiguous; parsing time then grows faster than the number of items. For
    a JSON schema, the items are its properties and alternatives.
    """
    return LLParserLimits(
        max_items_in_row=4 * MAX_OPTIONAL + 100 if is_json else 2000,
        initial_lexer_fuel=2_000_000,
        step_lexer_fuel=400_000,
        max_lexer_states=100_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def grammar_of(wanted: StructuredOutputs) -> str:
    """Returns the grammar in llguidance's notation.

    Raises:
        ValueError: it cannot be translated, or exceeds a bound.
    """
    if wanted.frame is not None:
        return _framed(wanted.frame, wanted.model_copy(update={"frame": None}))
    if wanted.is_json:
        schema, options = _schema(wanted)
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    if wanted.regex is not None:
        check_pattern(wanted.regex)
        return str(LLMatcher.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        for text in wanted.choice:
            check_text(text)
        texts = " | ".join(json.dumps(text) for text in dict.fromkeys(wanted.choice))
        return str(LLMatcher.grammar_from_lark(with_terminals(f"start: {texts}")))
    assert wanted.grammar is not None, wanted
    _check_nesting(wanted.grammar)
    try:
        lark = any_to_lark(wanted.grammar)
    except Exception as error:  # noqa: BLE001 - a rule is missing or defined twice
        raise ValueError(str(error)) from None
    check_lark(lark)
    return str(LLMatcher.grammar_from_lark(with_terminals(lark)))


def check(sampling: SamplingParams, eos_token_ids: tuple[int, ...], field: str = "") -> None:
    """Checks the structured outputs of `sampling`; `field` is the user's name for them.

    Raises:
        InvalidRequestError: the grammar is invalid or too large, or contradicts another field.
    """
    wanted = sampling.structured_outputs
    if wanted is None:
        return
    field = field or f"structured_outputs.{wanted.kind}"
    if not eos_token_ids:
        raise InvalidRequestError.at(field, "this model has no end token")
    _check_grammar(lambda: grammar_of(wanted), field)


def check_schema(schema: Mapping[str, Any], field: str) -> None:
    """Raises `InvalidRequestError`, which names `field`, if a JSON schema has no grammar."""

    def grammar() -> str:
        check_schema_bounds(schema)
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))

    _check_grammar(grammar, field)


def _check_grammar(grammar: Callable[[], str], field: str) -> None:
    try:
        problem = LLMatcher.validate_grammar(grammar(), limits=parser_limits())
    except (ValueError, TypeError, RecursionError) as error:
        problem = str(error) or "nested too deeply"
    if problem and not problem.startswith("WARNING"):
        raise invalid(field, problem)


def invalid(field: str, problem: str) -> InvalidRequestError:
    """Converts llguidance's message to an error that names the field."""
    brief = " ".join(problem.replace("<non-verbose/>", "").split())
    brief = _STOP_REASONS.get(brief, brief)
    if crowded := _CROWDED.search(brief):
        brief = f"{crowded[1]} alternatives and more in one place; at most {crowded[2]}"
    if len(brief) > _MAX_MESSAGE:
        brief = brief[:_MAX_MESSAGE] + "..."
    return InvalidRequestError.at(field, f"{brief}")


def _framed(frame: str, answer: StructuredOutputs) -> str:
    """Returns the grammar of `answer` within the frame."""
    _check_nesting(frame)
    if answer.is_json:
        schema, options = _schema(answer)
        inner: dict[str, Any] = {"json_schema": {**schema, "x-guidance": options}}
    else:
        text = grammar_of(answer)  # llguidance wraps some kinds in JSON of its own
        inner = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return json.dumps({"grammars": [{"lark_grammar": frame}, {**inner, "name": "answer"}]})


def _schema(wanted: StructuredOutputs) -> tuple[dict[str, Any], Any]:
    """Returns the JSON schema and llguidance's options for it; raises `ValueError`."""
    schema: Any = {"type": "object"}
    if wanted.json_schema is not None:
        try:
            schema = json.loads(wanted.json_schema)
        except ValueError as error:
            raise ValueError(f"it is no JSON: {error}") from None
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    check_schema_bounds(schema)
    if wanted.whitespace_pattern is not None:
        check_pattern(wanted.whitespace_pattern)
    options: Any = {"whitespace_pattern": wanted.whitespace_pattern or WHITESPACE}
    if wanted.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    return schema, options


def _check_nesting(grammar: str) -> None:
    """Raises `ValueError` for nesting that could exhaust the stack of a recursive parser."""
    depth = 0
    for bracket in re.findall(r"[()\[\]{}]", grammar):
        depth = depth + 1 if bracket in "([{" else max(0, depth - 1)
        if depth > _MAX_NESTING:
            raise ValueError(f"brackets nested more than {_MAX_NESTING} deep")
