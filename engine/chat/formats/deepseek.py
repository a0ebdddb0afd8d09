"""DeepSeek-V3, R1 and V3.1: calls between marks of full-width bars.

V3 and R1 write `function`, a mark, the name, and the arguments as a block of Markdown; V3.1 writes
the name, a mark, and the arguments. Both are read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..lark import CallLayout, Function, Lark
from ..reader import Flow, Reader

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKS = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)
BLOCK, BLOCK_END = "```json", "```"


def parse(reader: Reader, names: Collection[str]) -> Flow[None]:
    """Text and calls in any order; what begins like a call and is none is text."""
    return reader.section((CALLS, CALLS_END), (CALL, CALL_END), _call)


def _call(reader: Reader) -> Flow[bool]:
    found, in_block = (yield from reader.name((SEPARATOR,))), False
    yield from reader.space()
    if found and found[0] == "function" and (yield from reader.peek()) != "{":
        found = yield from reader.name(("\n",))
        in_block = yield from reader.after_space(BLOCK)
    if found is None or not (yield from reader.object_call(found[0])):
        return False
    if in_block:
        yield from reader.after_space(BLOCK_END)
    return True


def layout(functions: Sequence[Function], lark: Lark) -> CallLayout:
    """As V3 writes calls, or V3.1 where the template does."""
    in_block = BLOCK in lark.template or CALL not in lark.template
    calls = []
    for each in functions:
        head, mark, end = lark.mark(CALL), lark.mark(SEPARATOR), lark.mark(CALL_END)
        arguments = lark.json(each.schema)
        if in_block:
            line, block_end = lark.text(f"{each.name}\n{BLOCK}\n"), lark.text(f"\n{BLOCK_END}")
            calls.append(f'{head} "function" {mark} {line} {arguments} {block_end} {end}')
        else:
            calls.append(f"{head} {lark.text(each.name)} {mark} {arguments} {end}")
    return CallLayout(
        tuple(calls),
        trigger=CALLS,
        between=lark.text("\n") if in_block else "",
        closing=lark.mark(CALLS_END),
    )
