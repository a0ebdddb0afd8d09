"""`[name(key=value, ...), ...]` as the whole answer: Llama 4, Llama 3.2 and others.

Values are Python's or JSON's literals. Llama 4 may put `<|python_start|>` and `<|python_end|>`
around the list. A call is passed on once it is complete, since only then it is known to be one.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..arguments import UnenforceableError, definitions, with_escapes
from ..lark import CallLayout, Function, Lark
from ..reader import Flow, Reader

MARKS = BEGIN, END = "<|python_start|>", "<|python_end|>"
_JSON_WORDS = {"true": True, "false": False, "null": None}
_OPEN, _CLOSE = "([{", ")]}"


def parse(reader: Reader, names: Collection[str]) -> Flow[None]:
    """A list of calls at the beginning of the text, or behind its mark; everything else is text."""

    def read(reader: Reader) -> Flow[None]:
        if not (yield from _listed(reader, names)):
            yield from reader.give_back()

    return reader.calls_behind(BEGIN, read, leading=True)


def _listed(reader: Reader, names: Collection[str]) -> Flow[bool]:
    """The list; False: from what was taken last on, it is none."""
    if not (yield from reader.after_space("[")):
        return False
    while True:
        yield from reader.space()
        found = yield from reader.name(("(",))
        if found is None or found[0] not in names:
            return False
        text = yield from _until_close(reader)
        arguments = None if text is None else _arguments(text)
        if arguments is None:
            return False
        yield reader.call(found[0])
        yield reader.arguments(arguments)
        reader.begin()
        if not (yield from reader.after_space(",")):
            break
    if (yield from reader.literal("]")):
        yield from reader.after_space(END)
    return True


def _until_close(reader: Reader) -> Flow[str | None]:
    """The text up to the bracket that closes a call, which is read too; None: there is none."""
    depth, quote, at = 0, "", 0
    while True:
        while at < len(reader.buffer):
            char = reader.buffer[at]
            if quote:
                if char == "\\":
                    at += 1
                elif char == quote:
                    quote = ""
            elif char in "\"'":
                quote = char
            elif char in _OPEN:
                depth += 1
            elif char == ")" and depth == 0:
                text = reader.take(at)
                reader.take(1)
                return text
            elif char in _CLOSE:
                depth -= 1
            at += 1
        if reader.ended:
            return None
        yield None


def _arguments(text: str) -> str | None:
    """Keyword arguments as a JSON object; None: they are none, or no literals."""
    try:
        call = ast.parse(f"f({text}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            values[keyword.arg] = ast.literal_eval(_Words().visit(keyword.value))
        return with_escapes(json.dumps(values, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _Words(ast.NodeTransformer):
    """JSON's names of constants as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in _JSON_WORDS:
            return ast.copy_location(ast.Constant(_JSON_WORDS[node.id]), node)
        return node


def layout(functions: Sequence[Function], lark: Lark) -> CallLayout:
    """A list of calls with values in JSON: required keywords first, each in the schema's order."""
    return CallLayout(
        calls=tuple(_call(each, lark) for each in functions),
        opening=lark.text("["),
        between=lark.text(", "),
        closing=lark.text("]"),
    )


def _call(function: Function, lark: Lark) -> str:
    schema = function.schema
    given = schema.get("properties")
    properties = _possible(given, schema) if isinstance(given, Mapping) else {}
    if not properties:
        return lark.text(f"{function.name}()")
    defined, comma = definitions(schema), lark.text(", ")
    required, optional = list[str](), list[str]()
    for name, value in properties.items():
        value = {**value, **defined} if isinstance(value, Mapping) else dict(defined)
        is_required = name in schema.get("required", ())
        keyword = f"{lark.text(f'{name}=')} {lark.json(value)}"
        (required if is_required else optional).append(keyword)
    parts = f" {comma} ".join(required) + "".join(f" ({comma} {each})?" for each in optional)
    if not required:  # any of the optional ones, in order, with commas between those there are
        parts = ""
        for each in reversed(optional):
            parts = f"({each} ({comma} {parts})? | {parts})" if parts else f"({each})"
        parts += "?"
    return f"{lark.text(f'{function.name}(')} {parts} {lark.text(')')}"


def _possible(properties: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Without those whose schema is `false`, which no value satisfies.

    Raises:
        UnenforceableError: one of them is required.
    """
    for name, value in properties.items():
        if value is False and name in schema.get("required", ()):
            raise UnenforceableError(f"{name}: required, and its schema is `false`")
    return {name: value for name, value in properties.items() if value is not False}
