"""`{"name": ..., "arguments": {...}}` as the whole answer: for models without a format of calls.

Only a grammar makes such models call, so an answer is one call: a model that does not know the
format would not know where a list of calls ends either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..arguments import call_object
from ..lark import CallLayout, Function, Lark
from ..reader import Content, Flow, Reader

MARKS: tuple[str, ...] = ()


def parse(reader: Reader, names: Collection[str]) -> Flow[None]:
    """A call at the beginning of the text; everything else is text."""
    reader.begin()
    yield from reader.space()
    if not (yield from call_object(reader, names)):
        yield from reader.give_back()
    yield from reader.prose((), Content)


def layout(functions: Sequence[Function], lark: Lark) -> CallLayout:
    """One object and nothing else."""
    return CallLayout(
        calls=tuple(lark.object_call(each, "arguments") for each in functions), many=False
    )
