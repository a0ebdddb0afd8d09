"""gpt-oss' harmony: messages with headers that name a channel and a recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary
    to=functions.name <|constrain|>json<|message|>{...}<|call|>

`analysis` is reasoning, `final` and `commentary` without a recipient are content, and a message to
`functions.name` is a call. The recipient stands before or behind the channel.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ..lark import CallLayout, Function, Lark
from ..reader import Content, Flow, Reader, Reasoning

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END, CALL, RETURN = "<|message|>", "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_RECIPIENT = re.compile(r"to=functions\.([\w.:/-]{1,128})")
_MAX_HEADER = 512


def parse(
    reader: Reader, names: Collection[str], *, calls: bool = True, reasoning: bool = True
) -> Flow[None]:
    """All messages. Text without a header is content.

    Args:
        calls: whether calls are told from content.
        reasoning: whether reasoning is.
    """
    mark, trim = START, False
    while True:
        header = yield from _header(reader, mark)
        if header is None:
            yield from reader.give_back()
            mark = yield from reader.prose((*_ENDS, MESSAGE), Content, trim=trim)
        else:
            recipient = _RECIPIENT.search(header) if calls else None
            if recipient is not None:
                mark = yield from _call(reader, recipient.group(1))
            else:
                thinks = reasoning and f"{CHANNEL}analysis" in header
                kind = Reasoning if thinks else Content
                mark = yield from reader.prose(_ENDS, kind, trim=trim)
        if not mark:
            return
        if mark in (END, CALL, RETURN):
            reader.begin()
        trim = True


def _header(reader: Reader, mark: str) -> Flow[str | None]:
    """What stands before a message, with the mark that began it; None: no header follows."""
    first = yield from reader.space()
    for begin in (START, "assistant", CHANNEL, "to="):
        if mark == CHANNEL or (yield from reader.literal(begin)):
            found = yield from reader.up_to((MESSAGE,), _MAX_HEADER)
            if found is None:
                return None
            begin = "" if mark == CHANNEL else begin
            return mark + first + begin + found[0]
    return None


def _call(reader: Reader, name: str) -> Flow[str]:
    """A call's arguments, and the mark that ended them."""
    yield reader.call(name)
    yield from reader.space()
    if (yield from reader.peek()) == "{":
        yield from reader.value(reader.arguments)
    else:
        found = yield from reader.up_to(_ENDS, 0)
        if found is not None:
            yield reader.arguments("{}")
            return found[1]
    return (yield from reader.prose(_ENDS, Content))


def layout(functions: Sequence[Function], lark: Lark) -> CallLayout:
    """One call: its end is the end of the text."""
    channel, constrain, message = (lark.mark(each) for each in (CHANNEL, CONSTRAIN, MESSAGE))
    calls = []
    for each in functions:
        head = lark.text(f"commentary to=functions.{each.name} ")
        calls.append(f'{channel} {head} {constrain} "json" {message} {lark.json(each.schema)}')
    return CallLayout(tuple(calls), many=False)


def lead_rules(lark: Lark, *, to_final: bool) -> list[str]:
    """Rules of `lead`: reasoning, which may be missing, and for text the final channel's header."""
    channel, message, start = (lark.mark(each) for each in (CHANNEL, MESSAGE, START))
    final = final_header(lark) if to_final else ""
    return [
        f'lead: ({channel} "analysis" {message} thought {start} "assistant")? {final}',
        *lark.until("thought", END),
    ]


def final_header(lark: Lark) -> str:
    """What stands before an answer to the user."""
    return f'{lark.mark(CHANNEL)} "final" {lark.mark(MESSAGE)}'
