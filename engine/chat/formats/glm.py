"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5 to 4.7.

GLM-4.5 and 4.6 put a newline behind the name and behind every tag that ends; GLM-4.7 does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..arguments import Tags, member_rules, read_arguments
from ..lark import CallLayout, Function, Lark
from ..reader import Flow, Reader

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
MARKS = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)
_TAGS = Tags(KEY, (KEY_END, VALUE), VALUE_END, END)


def parse(reader: Reader, functions: Mapping[str, Function]) -> Flow[None]:
    """Text and calls in any order; what begins like a call and is none is text."""

    def read(mark: str) -> Flow[bool]:
        yield from reader.space()
        found = yield from reader.name((KEY, END, "\n"))
        if found is None:
            return False
        name, behind = found
        reader.unread(behind)
        yield reader.call(name)
        yield from read_arguments(reader, functions.get(name), _TAGS)
        return True

    yield from reader.calls((BEGIN,), read)


def layout(functions: Sequence[Function], lark: Lark) -> CallLayout:
    """As the template writes calls: required parameters and optional ones in the schema's order."""
    newline = "\n" if "{function-name}\n" in lark.template else ""
    line = lark.text(newline)
    key, key_end, value, value_end = (lark.mark(each) for each in (KEY, KEY_END, VALUE, VALUE_END))

    def member(name: str, text: str) -> str:
        return f"{key} {name} {key_end} {line} {value} {text} {line}"

    calls = []
    for each in functions:
        members = member_rules(each, lark, member, value_end, "/[^<\\n]{1,128}/")
        calls.append(" ".join([lark.text(each.name), line, *members]))
    return CallLayout(
        tuple(calls),
        trigger=BEGIN,
        between=lark.text("\n") if newline else "",
        closing=lark.mark(END),
        each=True,
        rules=tuple(lark.until("passage", VALUE_END)),
    )
