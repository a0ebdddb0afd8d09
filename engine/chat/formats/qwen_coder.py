"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder.

Tags and values have lines of their own. The model may leave out `<tool_call>`, and is read so if
the name is that of a tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..arguments import Tags, member_rules, read_arguments
from ..lark import CallLayout, Function, Lark
from ..reader import Flow, Reader

MARKS = BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_TAGS = Tags(PARAMETER, (">",), PARAMETER_END, FUNCTION_END, newlines=True)


def parse(reader: Reader, functions: Mapping[str, Function]) -> Flow[None]:
    """Text and calls in any order; what begins like a call and is none is text."""

    def read(mark: str) -> Flow[bool]:
        if mark == BEGIN:
            yield from reader.space()
        is_call = mark == FUNCTION or (yield from reader.literal(FUNCTION))
        found = (yield from reader.name((">",))) if is_call else None
        if found is None or (mark == FUNCTION and found[0] not in functions):
            return False
        name, _ = found
        yield reader.call(name)
        yield from read_arguments(reader, functions.get(name), _TAGS)
        return True

    yield from reader.calls((BEGIN, FUNCTION), read, (END,))


def layout(functions: Sequence[Function], lark: Lark) -> CallLayout:
    """As the template writes calls: required parameters and optional ones in the schema's order."""
    end = lark.text(f"\n{PARAMETER_END}\n")

    def member(name: str, text: str) -> str:
        return f'"{PARAMETER}" {name} ">\\n" {text}'

    calls = []
    for each in functions:
        members = member_rules(each, lark, member, end, "/[^>\\n]{1,128}/")
        head, tail = lark.text(f"{FUNCTION}{each.name}>\n"), lark.text(f"{FUNCTION_END}\n")
        calls.append(" ".join([head, *members, tail]))
    return CallLayout(
        tuple(calls),
        trigger=BEGIN,
        opening=lark.text("\n"),
        between=lark.text("\n"),
        closing=lark.mark(END),
        each=True,
        rules=tuple(lark.until("passage", f"\n{PARAMETER_END}\n")),
    )
