"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 Pro, Qwen2.5, Qwen3, ..."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..arguments import call_object
from ..lark import CallLayout, Function, Lark
from ..reader import Flow, Reader

MARKS = BEGIN, END = "<tool_call>", "</tool_call>"


def parse(reader: Reader, names: Collection[str]) -> Flow[None]:
    """Text and calls in any order; what is between the marks and is no call is text."""

    def read(mark: str) -> Flow[bool]:
        yield from reader.space()
        return (yield from call_object(reader))

    yield from reader.calls((BEGIN,), read, (END,))


def layout(functions: Sequence[Function], lark: Lark) -> CallLayout:
    """As Qwen's templates write calls."""
    return CallLayout(
        calls=tuple(lark.object_call(each, "arguments") for each in functions),
        trigger=BEGIN,
        opening=lark.text("\n"),
        between=lark.text("\n"),
        closing=f"{lark.text(chr(10))} {lark.mark(END)}",
        each=True,
    )
