"""Kimi-K2: a section of calls, each with an id that names its function: `functions.name:index`.

The template writes the ids of earlier calls as they are, so an answer keeps those of the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ..lark import CallLayout, Function, Lark
from ..reader import Flow, Reader

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
MARKS = (CALLS, CALLS_END, CALL, CALL_END, ARGUMENTS)
_MAX_ID = 192
_ID = re.compile(r"(?:functions\.)?([\w./-]{1,128}?)(:\d{1,9})?")


def parse(reader: Reader, names: Collection[str]) -> Flow[None]:
    """Text and calls in any order; what begins like a call and is none is text."""
    return reader.section((CALLS, CALLS_END), (CALL, CALL_END), _call)


def _call(reader: Reader) -> Flow[bool]:
    found = yield from reader.up_to((ARGUMENTS,), _MAX_ID)
    given = None if found is None else _ID.fullmatch(found[0].strip())
    if given is None:
        return False
    return (yield from reader.object_call(given[1], given[0] if given[2] else None))


def layout(functions: Sequence[Function], lark: Lark) -> CallLayout:
    """As the template writes calls; the model numbers them."""
    begin, arguments, end = lark.mark(CALL), lark.mark(ARGUMENTS), lark.mark(CALL_END)
    calls = []
    for each in functions:
        head = f"{begin} {lark.text(f'functions.{each.name}:')} /[0-9]{{1,4}}/"
        calls.append(f"{head} {arguments} {lark.json(each.schema)} {end}")
    return CallLayout(tuple(calls), trigger=CALLS, closing=lark.mark(CALLS_END))
