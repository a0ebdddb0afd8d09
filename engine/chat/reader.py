"""`Reader`: text that arrives in pieces, read by parsers written as generators.

A parser asks for the text that it expects next, and is suspended until the text decides. Every
helper waits until its result cannot change, so a parser's result does not depend on how the text is
cut into pieces. Text taken since `begin` can be given back as content if it is not markup.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text; `end` is its end position in the parsed text."""

    text: str
    end: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of reasoning; `end` as in `Content`."""

    text: str
    end: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a tool call. `id` is the model's own, in formats that have one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments; the pieces together are JSON."""

    index: int
    text: str


Event = Content | Reasoning | CallBegin | Arguments
Prose = type[Content] | type[Reasoning]
# Steps of a parser: yields events once they are certain, and None if it needs more text.
Flow = Generator[Event | None, None, Result]


def merged(events: list[Event]) -> list[Event]:
    """Joins neighbouring events of the same kind."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if last is None or isinstance(event, CallBegin) or isinstance(last, CallBegin):
            result.append(event)
        elif type(event) is type(last):  # same call: a `CallBegin` would come between
            result[-1] = replace(event, text=last.text + event.text)
        else:
            result.append(event)
    return result


_SPACE = re.compile(r"\s*")
_OUTSIDE = re.compile(r'["{}\[\]]')  # outside a JSON string
_INSIDE = re.compile(r'["\\]')
_SCALAR = re.compile(r"[-+.\w]*")
_NAME = re.compile(r"[\w.:/-]{1,128}")  # name of a function
_MAX_NAME = 192  # characters of a name and the white space around it


class Reader:
    """The unread text, and the text taken since the last `begin`."""

    def __init__(self) -> None:
        self.buffer = ""
        self.ended = False
        self.num_calls = 0
        self.num_read = 0  # total number of characters read
        self.reasoning: list[tuple[int, int]] = []  # spans of reasoning in the read text
        self.content: list[tuple[int, int]] = []
        self._taken: list[str] = []

    # Access to the buffer.

    def take(self, size: int) -> str:
        """Reads `size` characters, which must be in the buffer."""
        text, self.buffer = self.buffer[:size], self.buffer[size:]
        self.num_read += len(text)
        self._taken.append(text)
        return text

    def begin(self, before: str = "") -> None:
        """Marks the start of the text, after `before`, that `give_back` returns."""
        self._taken = [before]

    def give_back(self) -> Flow[None]:
        """Emits the taken text as content."""
        text = "".join(self._taken)
        self._taken = []
        if text:
            yield self._piece(Content, text)

    def settle(self) -> Flow[None]:
        """Emits the taken text as content, unless it is white space or was cut off by the end."""
        is_cut_off = self.ended and not self.buffer
        if not is_cut_off and "".join(self._taken).strip():
            yield from self.give_back()

    def unread(self, text: str) -> None:
        """Puts back text that `take` has just returned."""
        assert "".join(self._taken).endswith(text), (self._taken, text)
        self._taken = ["".join(self._taken).removesuffix(text)]
        self.buffer = text + self.buffer
        self.num_read -= len(text)

    def has(self, size: int) -> Flow[bool]:
        """Returns True if `size` characters follow; waits for them."""
        while len(self.buffer) < size and not self.ended:
            yield None
        return len(self.buffer) >= size

    # Decisions about the next characters.

    def peek(self) -> Flow[str]:
        """Returns the next character without reading it; empty at the end."""
        yield from self.has(1)
        return self.buffer[:1]

    def matched(self, pattern: re.Pattern[str]) -> Flow[str]:
        """Reads the longest match of `pattern`, which may be empty."""
        while True:
            found = pattern.match(self.buffer)
            assert found is not None, pattern
            if found.end() < len(self.buffer) or self.ended:
                return self.take(found.end())
            yield None

    def space(self) -> Flow[str]:
        """Reads white space."""
        return self.matched(_SPACE)

    def literal(self, text: str) -> Flow[bool]:
        """Reads `text` if it follows, otherwise nothing."""
        while len(self.buffer) < len(text) and text.startswith(self.buffer) and not self.ended:
            yield None
        if not self.buffer.startswith(text):
            return False
        self.take(len(text))
        return True

    def after_space(self, text: str) -> Flow[bool]:
        """Reads white space, then `text` if it follows."""
        yield from self.space()
        return (yield from self.literal(text))

    def up_to(self, marks: Sequence[str], max_chars: int) -> Flow[tuple[str, str] | None]:
        """Reads up to and including the first of `marks`; returns the text and the mark.

        Returns None and reads nothing if no mark begins within `max_chars` characters.
        """
        while True:
            found = _first(self.buffer, marks)
            if found is not None and found[0] <= max_chars:
                at, mark = found
                text = self.take(at)
                self.take(len(mark))
                return text, mark
            if found is not None or self.ended or len(self.buffer) > max_chars + 64:
                return None
            yield None

    # Passing text on.

    def prose(self, marks: Sequence[str], kind: Prose, *, trim: bool = True) -> Flow[str]:
        """Emits text as it arrives, up to the first of `marks`, which is read and returned.

        White space before a mark is taken but not emitted, and neither is leading white space if
        `trim`. On return, `give_back` would return that white space and the mark. Returns an empty
        string if the text has ended.
        """
        held, start = "", self.num_read
        while True:
            self.begin()
            found = _first(self.buffer, marks)
            size = found[0] if found else len(self.buffer) - overlap(self.buffer, marks)
            if not found and self.ended:
                size = len(self.buffer)
            text = held + self.take(size)
            if kind is Reasoning and size:
                _extend(self.reasoning, start, self.num_read)
            body = text.rstrip()
            held = text[len(body) :]
            if trim:
                body = body.lstrip()
            if body:
                trim = False
                yield self._piece(kind, body, behind=len(held))
            if found:
                self.begin(held)
                return self.take(len(found[1]))
            if self.ended:
                if held and not trim:
                    yield self._piece(kind, held)
                return ""
            yield None

    def passage(
        self,
        mark: str,
        pass_on: Callable[[str], Event] | None = None,
        *,
        drop_newline: bool = False,
    ) -> Flow[str | None]:
        """Reads text up to and including `mark`; passes pieces on as they arrive.

        Args:
            drop_newline: whether a newline before the mark is excluded from the text.

        Returns:
            The text; None if the text ended without the mark.
        """
        parts: list[str] = []
        held = ""
        while True:
            at = self.buffer.find(mark)
            size = at if at >= 0 else len(self.buffer) - overlap(self.buffer, (mark,))
            text = held + self.take(size)
            held = "\n" if drop_newline and text.endswith("\n") else ""
            text = text.removesuffix(held) if held else text
            if text:
                parts.append(text)
                if pass_on is not None:
                    yield pass_on(text)
            if at >= 0:
                self.take(len(mark))
                return "".join(parts)
            if self.ended:
                self.take(len(self.buffer))
                return None
            yield None

    def value(self, pass_on: Callable[[str], Event] | None = None) -> Flow[str | None]:
        """Reads a JSON value by its brackets and quotes; passes pieces on as they arrive.

        Returns:
            The value's text; None if the text ended within it, or no value follows.
        """
        parts: list[str] = []
        depth, quoted = 0, False
        first = yield from self.peek()
        if first and first not in '{["':
            text = yield from self.matched(_SCALAR)
            if text and pass_on is not None:
                yield pass_on(text)
            return text or None
        while (yield from self.has(1)):
            size, depth, quoted = _scan(self.buffer, depth, quoted, self.ended)
            if size:
                text = self.take(size)
                parts.append(text)
                if pass_on is not None:
                    yield pass_on(text)
            if depth == 0 and not quoted and parts:
                return "".join(parts)
            if not size:
                if self.ended:
                    return None
                yield None
        return None

    def _piece(self, kind: Prose, text: str, *, behind: int = 0) -> Content | Reasoning:
        """Returns the event of `text`, which ends `behind` characters before the read position."""
        end = self.num_read - behind
        if kind is Content:
            _extend(self.content, end - len(text), end)
        return kind(text, end)

    # Calls.

    def calls(
        self,
        begins: tuple[str, ...],
        read: Callable[[str], Flow[bool]],
        ends: tuple[str, ...] = (),
        *,
        in_section: bool = False,
    ) -> Flow[None]:
        """Reads text and calls in any order; what begins like a call but is none becomes content.

        Args:
            begins: the marks before a call.
            read: reads a call after one of `begins`; returns False if it is none.
            ends: marks that are skipped after a call.
            in_section: whether any number of `ends` is skipped anywhere after the first call.
        """
        marks, trim = begins, False
        while mark := (yield from self.prose(marks, Content, trim=trim)):
            if not in_section:
                marks = begins
            if mark in ends:
                continue
            trim = yield from read(mark)
            if trim:
                marks = (*begins, *ends)
            else:
                yield from self.give_back()

    def section(
        self, section: tuple[str, str], call: tuple[str, str], read: Callable[[Reader], Flow[bool]]
    ) -> Flow[None]:
        """Like `calls`, for calls that have marks around each call and around a section of calls.

        Args:
            section: the marks of a section.
            call: the marks of a call.
            read: reads the text after a call's first mark; returns False if it is no call.
        """

        def begun(mark: str) -> Flow[bool]:
            is_call = mark == call[0]
            if not is_call:
                is_call = yield from self.after_space(call[0])
            return is_call and (yield from read(self))

        ends = (call[1], section[1])
        return self.calls((section[0], call[0]), begun, ends, in_section=True)

    def calls_behind(
        self, mark: str, read: Callable[[Reader], Flow[None]], *, leading: bool = False
    ) -> Flow[None]:
        """Reads text, and calls `read` after every mark; `read` gives back what is no call.

        Args:
            leading: whether calls may begin the text, with or without the mark.
        """
        if leading:
            self.begin()
            yield from self.after_space(mark)
            yield from read(self)
        while (yield from self.prose((mark,), Content, trim=self.num_calls > 0)):
            yield from read(self)

    def name(self, marks: Sequence[str]) -> Flow[tuple[str, str] | None]:
        """Reads a function's name and the first of `marks` after it; None if there is no name."""
        found = yield from self.up_to(marks, _MAX_NAME)
        if found is None or not is_name(found[0].strip()):
            return None
        return found[0].strip(), found[1]

    def object_call(self, name: str, id: str | None = None) -> Flow[bool]:
        """Reads the object of a call's arguments; False if no object follows."""
        yield from self.space()
        if (yield from self.peek()) != "{":
            return False
        yield self.call(name, id)
        yield from self.value(self.arguments)
        self.begin()
        return True

    def call(self, name: str, id: str | None = None) -> CallBegin:
        """Returns the beginning of the next call."""
        self.num_calls += 1
        return CallBegin(self.num_calls - 1, name, id)

    def arguments(self, text: str) -> Arguments:
        """Returns a piece of the last call's arguments."""
        return Arguments(self.num_calls - 1, text)


class Parser:
    """Turns a text that arrives in pieces into events.

    Args:
        flow: creates the parser's steps for a reader.
    """

    def __init__(self, flow: Callable[[Reader], Flow[None]]) -> None:
        self.reader = Reader()
        self._steps = flow(self.reader)

    def push(self, text: str) -> list[Event]:
        """Returns the events that `text` adds; neighbours of one kind are joined."""
        self.reader.buffer += text
        return self._advance()

    def finish(self) -> list[Event]:
        """Ends the text and returns the events that were held back."""
        self.reader.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        events: list[Event] = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return merged(events)


def is_name(text: str) -> bool:
    """Returns True if `text` is a valid name of a function."""
    return _NAME.fullmatch(text) is not None


def _extend(spans: list[tuple[int, int]], begin: int, end: int) -> None:
    """Adds a span; joins it with the last one if they touch."""
    if spans and begin <= spans[-1][1]:
        spans[-1] = (min(begin, spans[-1][0]), end)
    else:
        spans.append((begin, end))


def _first(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Returns position and text of the first mark; of two at one position, the longer."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return None
    at, _, mark = min(found)
    return at, mark


def overlap(text: str, marks: Sequence[str]) -> int:
    """Returns how many characters at the end of `text` may be the beginning of a mark."""
    return max((_partial(text, mark) for mark in marks), default=0)


def _partial(text: str, mark: str) -> int:
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0


def _scan(text: str, depth: int, quoted: bool, ended: bool) -> tuple[int, int, bool]:
    """Returns how many characters of `text` belong to a JSON value, and the state after them."""
    at = 0
    while at < len(text):
        found = (_INSIDE if quoted else _OUTSIDE).search(text, at)
        if found is None:
            return len(text), depth, quoted
        char, at = found.group(), found.end()
        if char == "\\":
            if at == len(text) and not ended:
                return at - 1, depth, quoted  # the escaped character has not arrived
            at += 1
        elif char == '"':
            quoted = not quoted
        else:
            depth += 1 if char in "{[" else -1
        if depth <= 0 and not quoted:
            return min(at, len(text)), 0, False
    return min(at, len(text)), depth, quoted
