"""Grammars of tool calls and of reasoning before an answer, in llguidance's Lark notation.

A format describes its calls as a `CallLayout`. The grammar built from it admits only calls that the
format's parser reads. A mark that is a single token of the vocabulary is written as that token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .reader import Flow, Reader, Reasoning


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call.

    Args:
        parameters: JSON schema of its arguments; None: any object.
        strict: whether arguments have to match the schema wherever that can be enforced.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments."""
        return {"type": "object", **(self.parameters or {})}


@dataclass(frozen=True, slots=True)
class Block:
    """The marks around reasoning before an answer, such as `<think>` and `</think>`.

    Args:
        always: whether the model reasons even if neither prompt nor text has the opening mark.
    """

    begin: str
    end: str
    always: bool = False

    def is_open(self, prompt: str, continued: bool = False) -> bool:
        """Returns True if a completion of `prompt` begins within the block.

        Args:
            continued: whether the prompt ends within an answer.
        """
        if continued:
            return prompt.rfind(self.begin) > prompt.rfind(self.end)
        if self.is_closed(prompt):
            return False
        return self.always or prompt.rstrip().endswith(self.begin)

    def is_closed(self, prompt: str) -> bool:
        """Returns True if the template has closed the block, which turns reasoning off."""
        return prompt.rstrip().endswith(self.end)


def split(reader: Reader, block: Block, is_open: bool) -> Flow[None]:
    """Reads the block if there is one, up to the beginning of the answer."""
    reader.begin()
    begins = yield from reader.after_space(block.begin)  # some models repeat it
    if not is_open and not begins:
        yield from reader.give_back()
        return
    if (yield from reader.prose((block.end,), Reasoning)):
        reader.begin()
        yield from reader.space()
    reader.begin()


WHITESPACE: Final = r"[ \n\t\r]{1,32}"  # at one place between JSON tokens
_TEXT = "TEXT: /(.|\\n)*/"
_BREAK = "/\\n{0,2}/"  # between reasoning and answer


@dataclass(frozen=True, slots=True)
class CallLayout:
    """The syntax of a format's calls. Strings other than the trigger are Lark expressions or empty.

    Args:
        trigger: the mark that begins calls; if empty, calls are the whole answer.
        opening: after the trigger.
        calls: one expression per function.
        between: between two calls; if `each`, between a call and the next trigger.
        closing: at the end.
        each: whether every call has a trigger of its own.
        many: whether several calls are allowed.
        rules: rules that the expressions refer to.
    """

    calls: tuple[str, ...]
    trigger: str = ""
    opening: str = ""
    between: str = ""
    closing: str = ""
    each: bool = False
    many: bool = True
    rules: tuple[str, ...] = ()


class Lark:
    """Builds Lark expressions for one tokenizer.

    Args:
        token_id: returns the id of a mark that the tokenizer treats as one token, otherwise None.
        template: text of the chat template, which distinguishes variants of a format.
    """

    def __init__(self, token_id: Callable[[str], int | None], template: str = "") -> None:
        self._token_id = token_id
        self.template = template

    def has(self, mark: str) -> bool:
        """Returns True if `mark` is a single token."""
        return self._token_id(mark) is not None

    def text(self, text: str) -> str:
        """Returns an expression that matches exactly `text`."""
        return json.dumps(text, ensure_ascii=False) if text else ""

    def mark(self, mark: str) -> str:
        """Returns the expression of a mark: its token if it has one, otherwise its text."""
        token_id = self._token_id(mark)
        return self.text(mark) if token_id is None else f"<[{token_id}]>"

    def json(self, schema: dict[str, Any]) -> str:
        """Returns the expression of JSON that matches `schema`."""
        bounded = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        return f"%json {json.dumps(bounded)}"

    def object_call(self, function: Function, key: str) -> str:
        """Returns the expression of `{"name": ..., KEY: {...}}`."""
        head = f'{{"name": {json.dumps(function.name)}, "{key}": '
        return f"{self.text(head)} {self.json(function.schema)} {self.text('}')}"

    def until(self, name: str, mark: str) -> list[str]:
        """Returns rules for `name`: any text up to and including the first `mark`."""
        if self.has(mark):
            return [f"{name}: TEXT {self.mark(mark)}"]
        return [f"{name}[lazy]: TEXT {self.text(mark)}"]


def thinking_rules(lark: Lark, block: Block, is_open: bool) -> list[str]:
    """Returns the rules of `lead`: reasoning before an answer, optional unless `is_open`."""
    rules = lark.until("thought", block.end)
    if is_open:
        return [f"lead: thought {_BREAK}", *rules]
    return [f"lead: ({lark.mark(block.begin)} thought {_BREAK})?", *rules]


def call_rules(layout: CallLayout, lark: Lark, parallel: bool) -> list[str]:
    """Returns the rules of `calls`: one call, or several if `parallel`."""
    trigger = lark.mark(layout.trigger) if layout.trigger else ""
    more = parallel and layout.many
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(layout.calls)))}"]
    rules += [f"call_{index}: {each}" for index, each in enumerate(layout.calls)]
    if layout.each:
        repeat = f"({layout.between} {trigger} group)*" if more else ""
        calls = f"calls: {trigger} group {repeat}"
        group = f"group: {layout.opening} call {layout.closing}"
    else:
        repeat = f"({layout.between} call)*" if more else ""
        calls = f"calls: {trigger} group"
        group = f"group: {layout.opening} call {repeat} {layout.closing}"
    return [calls, group, *rules, *layout.rules]


def grammar(start: str, rules: Sequence[str], lead: Sequence[str] = ()) -> str:
    """Returns the whole grammar; `lead` are the rules of the part before `start`."""
    start = f"lead {start}" if lead else start
    return "\n".join([f"start: {start}", *lead, *rules, _TEXT])


def free_calls(layout: CallLayout, lark: Lark) -> tuple[str, list[str]]:
    """Returns start and rules for free text in which only calls may follow a trigger."""
    return "(triggered group)* TEXT", lark.until("triggered", layout.trigger)
