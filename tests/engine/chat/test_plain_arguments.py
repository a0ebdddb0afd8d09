"""Schemas as users write them, and arguments that have no UTF-8."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.engine.chat.arguments import UnenforceableError, call_object, types_of
from outrider.engine.chat.formats import glm, pythonic, qwen_coder
from outrider.engine.chat.lark import Function, Lark
from outrider.engine.chat.reader import Parser


@pytest.mark.parametrize("given", [5, [["string"]], {"string": 1}, None])
def test_a_type_that_is_none_allows_any(given: Any) -> None:
    assert "integer" in types_of({"type": given}, {})
    assert types_of({"type": ["null", "string"]}, {}) == {"null", "string"}


@pytest.mark.parametrize("layout", [glm.layout, qwen_coder.layout])
def test_schemas_that_are_booleans(layout: Any) -> None:
    lark = Lark(lambda text: None)
    function = Function("f", {"type": "object", "properties": {"x": True}})
    assert "x" in layout([function], lark).calls[0]
    with pytest.raises(UnenforceableError, match="false"):
        layout([Function("f", {"type": "object", "properties": {"x": False}})], lark)


def test_keywords_that_are_never_there() -> None:
    schema = {"type": "object", "properties": {"x": False, "y": True}}
    (call,) = pythonic.layout([Function("f", schema)], Lark(lambda text: None)).calls
    assert "y=" in call
    assert "x=" not in call
    with pytest.raises(UnenforceableError, match="x: required"):
        pythonic.layout([Function("f", {**schema, "required": ["x"]})], Lark(lambda text: None))


@pytest.mark.parametrize(
    ("flow", "text"),
    [
        (lambda reader: pythonic.parse(reader, {"f"}), r'[f(x="\ud800")]'),
        (call_object, r'{"name": "f", "arguments": "{\"x\": \"\ud800\"}"}'),
    ],
)
def test_halves_of_surrogate_pairs_stay_escaped(flow: Any, text: str) -> None:
    _, arguments = Parser(flow).push(text)
    assert arguments.text.encode() == rb'{"x": "\ud800"}'
    assert json.loads(arguments.text) == {"x": "\ud800"}
