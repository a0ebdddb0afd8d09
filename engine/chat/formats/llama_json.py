"""`{"name": ..., "parameters": {...}}` as the whole answer: Llama 3.1 and later.

Several calls have `;` between them. The answer may begin with `<|python_tag|>`. Without a mark an
object counts as a call only if its name is that of a tool.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..arguments import call_object
from ..lark import CallLayout, Function, Lark
from ..reader import Flow, Reader

TAG = "<|python_tag|>"
MARKS = (TAG,)


def parse(reader: Reader, names: Collection[str]) -> Flow[None]:
    """Calls at the beginning of the text, or behind the tag; everything else is text."""
    return reader.calls_behind(TAG, lambda reader: _calls(reader, names), leading=True)


def _calls(reader: Reader, names: Collection[str]) -> Flow[None]:
    while True:
        yield from reader.space()
        if not (yield from call_object(reader, names)):
            break
        reader.begin()
        if not (yield from reader.after_space(";")):
            reader.begin()
            return
    yield from reader.give_back()


def layout(functions: Sequence[Function], lark: Lark) -> CallLayout:
    """Objects and nothing else."""
    calls = tuple(lark.object_call(each, "parameters") for each in functions)
    return CallLayout(calls, between=lark.text("; "))
