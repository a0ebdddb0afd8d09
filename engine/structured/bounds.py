"""Bounds of what a grammar may ask for, where the library's own limits do not hold.

Called by `grammar.py` before anything is compiled. The library counts its work, except for these:
a pattern of repeated text is written out in full, as a text that must come next is tokenized in
full in every step, and a multiple is an automaton with a state per remainder. One request could
hold up all others for minutes with them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

MAX_TEXT: Final = 8192  # characters of the shortest match of a pattern, or of one text
MAX_MULTIPLE: Final = 10_000  # states of the automaton
_MAX_MULTIPLES: Final = 20_000  # of all of a schema together
_ENDLESS: Final = 10**12
_LITERAL_KEYS = ("const", "enum")  # what is below them is no schema
_PATTERN_KEYS = ("pattern", "whitespace_pattern")
# What applies several schemas to one value; without it each multiple is an automaton of its own.
_JOINING_KEYS: Final = {
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"),
    *("patternProperties", "contains", "$ref", "$dynamicRef", "$recursiveRef"),
}
_COUNT = re.compile(r"\{(\d+)(?:,\d*)?\}")
_ESCAPE = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|x..|u....|U........|.)", re.DOTALL)
_LARK_TOKEN = re.compile(
    r"//[^\n]*|\"(?P<text>(?:\\.|[^\"\\\n])*)\"|/(?P<pattern>(?:\\.|[^/\\\n])+)/"
)


def check_pattern(pattern: str) -> None:
    """Raises `ValueError` for a regular expression whose shortest match is too long."""
    length = min_length(pattern)
    if length > MAX_TEXT:
        raise ValueError(
            f"the shortest text that the pattern matches has {min(length, _ENDLESS)} characters; "
            f"at most {MAX_TEXT}"
        )


def check_text(text: str) -> None:
    """Raises `ValueError` for a text that is too long to be the only one that may come."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"a text of {len(text)} characters; at most {MAX_TEXT}")


def check_lark(grammar: str) -> None:
    """The patterns and texts of a grammar in Lark's notation (raises `ValueError`)."""
    for token in _LARK_TOKEN.finditer(grammar):
        if token["pattern"] is not None:
            check_pattern(token["pattern"])
        elif token["text"] is not None:
            check_text(token["text"])


def check_schema_bounds(schema: Any) -> None:
    """The patterns, texts and multiples of a JSON schema (raises `ValueError`)."""
    multiples: list[int] = []
    joins = False
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
    # Those of one value are joined to their least common multiple, also across references.
    states = math.lcm(*multiples) if joins else max(multiples, default=1)
    if states > MAX_MULTIPLE or sum(multiples) > _MAX_MULTIPLES:
        raise ValueError(
            f"multipleOf: each in a schema is at most {MAX_MULTIPLE}, with allOf, $ref and the "
            "like the least common multiple of all; and their sum at most "
            f"{_MAX_MULTIPLES}, without decimal points"
        )


def min_length(pattern: str) -> int:
    """Characters of the shortest match of a regular expression in Rust's syntax.

    An upper bound: what it cannot read counts as one character. Alternatives count as the longest
    of them, because each of them is written out.
    """
    # Of the groups that are open: the longest alternative, this one, its last item.
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
    while len(stack) > 1:  # a group that is not closed
        longest, done, last = stack.pop()
        stack[-1][2] = max(longest, done + last)
    longest, done, last = stack[0]
    return max(longest, done + last)


def _class_end(pattern: str, place: int) -> int:
    """The place behind a class that begins before `place`; classes can hold classes."""
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
    """Every key and value in a schema but those within literals; in no order."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield from node.items()
            waiting += [value for key, value in node.items() if key not in _LITERAL_KEYS]
        elif isinstance(node, list):
            waiting += node


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            waiting += [*node, *node.values()]
        elif isinstance(node, list):
            waiting += node


def _states(multiple: float) -> int:
    """A multiple without decimal point and zeros behind: 0.25 has 25, 1000 has 1."""
    number = Decimal(repr(multiple))
    if not number.is_finite() or number == 0:
        return 1  # the library refuses it
    return int("".join(map(str, number.normalize().as_tuple().digits)))
