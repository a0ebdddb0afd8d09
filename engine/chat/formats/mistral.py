"""`[TOOL_CALLS]`: JSON objects in a list (Mistral to v7), or `name[ARGS]{...}` (from v11 on)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..arguments import call_object
from ..lark import CallLayout, Function, Lark
from ..reader import Flow, Reader

MARKS = MARK, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MAX_ID = 192  # characters of a call's id with white space around it


def parse(reader: Reader, names: Collection[str]) -> Flow[None]:
    """Text, and calls behind every mark; a mark without a call is text."""
    return reader.calls_behind(MARK, _calls)


def _calls(reader: Reader) -> Flow[None]:
    yield from reader.space()
    first = yield from reader.peek()
    read = _listed if first == "[" else call_object if first == "{" else _named
    if not (yield from read(reader)):
        yield from reader.give_back()


def _listed(reader: Reader) -> Flow[bool]:
    """`[{...}, {...}]`; False: an item is no call."""
    yield from reader.literal("[")
    while True:
        yield from reader.space()
        if not (yield from call_object(reader)):
            return False
        reader.begin()
        if not (yield from reader.after_space(",")):
            yield from reader.literal("]")
            return True


def _named(reader: Reader) -> Flow[bool]:
    """`name[ARGS]{...}`, perhaps with a `[CALL_ID]`, or `name{...}`; False: it is none."""
    found = yield from reader.name((ID, ARGS, "{"))
    if found is None:
        return False
    name, mark = found
    if mark == "{":
        reader.unread(mark)
    elif mark == ID and (yield from reader.up_to((ARGS,), _MAX_ID)) is None:
        return False
    return (yield from reader.object_call(name))


def layout(functions: Sequence[Function], lark: Lark) -> CallLayout:
    """As the template writes calls; one that writes none leaves it to the vocabulary."""
    if ARGS in lark.template or (MARK not in lark.template and lark.has(ARGS)):
        calls = [
            f"{lark.text(each.name)} {lark.mark(ARGS)} {lark.json(each.schema)}"
            for each in functions
        ]
        return CallLayout(tuple(calls), trigger=MARK, each=True)
    return CallLayout(
        calls=tuple(lark.object_call(each, "arguments") for each in functions),
        trigger=MARK,
        opening=f'" "? {lark.text("[")}',
        between=lark.text(", "),
        closing=lark.text("]"),
    )
