"""Parsing shared by formats: calls as JSON objects, and arguments between tags.

The parser emits the beginning of a call `{"name": ..., "arguments": {...}}` once it has read the
name and the start of the arguments; arguments are passed on as they arrive. Arguments that come
before the name are held back until the name is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .lark import Function, Lark
from .reader import Flow, Reader, is_name

_ARGUMENTS = ("arguments", "parameters")
_HALF = re.compile("[\ud800-\udfff]")


def call_object(reader: Reader, known: Collection[str] | None = None) -> Flow[bool]:
    """Reads a call as an object. Returns False if it is no call; `give_back` then returns the text.

    If the object becomes malformed after the call has begun, the rest is emitted as content.

    Args:
        known: allowed names of functions; None allows any name.
    """
    name: str | None = None
    held: str | None = None
    begun = complete = False
    if not (yield from reader.literal("{")):
        return False
    while True:
        yield from reader.space()
        key = yield from _member(reader)
        if key == "name" and name is None:
            name = _name((yield from reader.value()), known)
            if name is None:
                return False
        elif key in _ARGUMENTS and not begun and held is None:
            if name is None:
                held = yield from reader.value()
                if held is None:
                    return False
            else:
                begun = yield from _streamed(reader, name)
                if not begun:
                    return False
                reader.begin()
        elif key is None or (yield from reader.value()) is None:
            break
        if (yield from reader.after_space("}")):
            if begun:
                reader.begin()
            complete = True
            break
        if not (yield from reader.literal(",")):
            break
    if begun:
        yield from reader.settle()
        return True
    if name is None or not complete:
        return False
    yield reader.call(name)
    yield reader.arguments("{}" if held is None else _as_object(held))
    return True


def _streamed(reader: Reader, name: str) -> Flow[bool]:
    """Emits a call with its arguments: an object while it arrives, other values once complete."""
    if (yield from reader.peek()) == "{":
        yield reader.call(name)
        yield from reader.value(reader.arguments)
        return True
    text = yield from reader.value()
    if text is not None:
        yield reader.call(name)
        yield reader.arguments(_as_object(text))
    return text is not None


def _member(reader: Reader) -> Flow[str | None]:
    """Reads a member's key and the colon after it; None if no member follows."""
    if (yield from reader.peek()) != '"':
        return None
    text = yield from reader.value()
    key = None if text is None else _string(text)
    yield from reader.space()
    if key is None or not (yield from reader.literal(":")):
        return None
    yield from reader.space()
    return key


def _name(text: str | None, known: Collection[str] | None) -> str | None:
    name = None if text is None else _string(text)
    if name is None or not is_name(name) or (known is not None and name not in known):
        return None
    return name


def with_escapes(text: str) -> str:
    """Returns JSON in which lone surrogates are escaped, because UTF-8 cannot encode them."""
    return _HALF.sub(lambda half: f"\\u{ord(half.group()):04x}", text)


def _as_object(text: str) -> str:
    """Unquotes arguments that the model has written as a JSON string; `{}` if there are none."""
    inner = _string(text)
    if text == "null" or (inner is not None and not inner.strip()):
        return "{}"
    if inner is None or not inner.lstrip().startswith("{"):
        return text
    return with_escapes(inner)


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


# Arguments between tags, with strings as plain text: `<tag>key</tag><tag>value</tag>`.
# The schema decides how a value is read. If only strings are allowed, the text is a string and is
# passed on as it arrives. Otherwise the text is read as JSON if that has an allowed type, and as a
# string if not.

_MAX_KEY = 192  # characters
_EMPTY = '""'
_DEPTH = 16  # limit of nested references in a schema
_ALL: Final = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's names of JSON's constants
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
_KINDS |= {list: "array", type(None): "null"}
_UNCONSTRAINED = {"type", "title", "description", "default", "examples", "anyOf", "oneOf"}
_OBJECT = {"type", "properties", "required", "additionalProperties", "title", "description"}
_OBJECT |= {"$defs", "definitions", "$schema"}


class UnenforceableError(ValueError):
    """No grammar of this format can enforce the schema."""


@dataclass(frozen=True, slots=True)
class Tags:
    """The marks around keys and values.

    Args:
        begin: before a key.
        middle: between key and value; white space is allowed between the marks.
        end: after a value.
        close: after the last value.
        newlines: whether a value is on lines of its own.
    """

    begin: str
    middle: tuple[str, ...]
    end: str
    close: str
    newlines: bool = False


def read_arguments(reader: Reader, function: Function | None, tags: Tags) -> Flow[None]:
    """Emits the arguments as a JSON object; reads up to and including `tags.close`.

    Unexpected text ends the arguments and is emitted as content. If the text ends early, the JSON
    object stays open.
    """
    schema = function.schema if function is not None else {"type": "object"}
    yield reader.arguments("{")
    comma = ""
    while True:
        reader.begin()
        if (yield from reader.after_space(tags.close)):
            yield reader.arguments("}")
            reader.begin()
            return
        key, is_cut_off = yield from _key(reader, tags)
        if key is None:
            break
        yield reader.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
        comma = ", "
        if not (yield from _value(reader, _types_of_member(schema, key), tags)):
            return
    if is_cut_off:
        reader.take(len(reader.buffer))
        return
    yield reader.arguments("}")
    yield from reader.give_back()


def _key(reader: Reader, tags: Tags) -> Flow[tuple[str | None, bool]]:
    """Returns a key, read with its tags; or None and whether the text ended within the tags."""
    if not (yield from reader.literal(tags.begin)):
        return None, _ends_in(reader, tags.begin, tags.close)
    first, *rest = tags.middle
    found = yield from reader.up_to((first,), _MAX_KEY)
    if found is None:
        return None, reader.ended and len(reader.buffer) <= _MAX_KEY
    for tag in rest:
        if not (yield from reader.after_space(tag)):
            return None, _ends_in(reader, tag)
    return found[0].strip(), False


def _ends_in(reader: Reader, *tags: str) -> bool:
    """Returns True if the text ended within one of `tags`."""
    return reader.ended and any(tag.startswith(reader.buffer) for tag in tags)


def _value(reader: Reader, types: frozenset[str], tags: Tags) -> Flow[bool]:
    """Emits a value and reads its end tag; False if the text ended within the value."""
    if tags.newlines and (yield from reader.peek()) == "\n":
        reader.take(1)
    if types == {"string"}:
        yield reader.arguments('"')
        text = yield from reader.passage(
            tags.end,
            lambda piece: reader.arguments(_quoted(piece)[1:-1]),
            drop_newline=tags.newlines,
        )
        if text is None:
            return False
        yield reader.arguments('"')
        return True
    text = yield from reader.passage(tags.end, drop_newline=tags.newlines)
    if text is None:
        return False
    yield reader.arguments(as_json(text, types))
    return True


def as_json(text: str, types: frozenset[str]) -> str:
    """Returns `text` as a JSON value if it has one of `types`, otherwise as a JSON string."""
    word = text.strip()
    word = _WORDS.get(word, word)
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _quoted(text)
    kind = _KINDS[type(value)]
    fits = kind in types or (kind == "integer" and "number" in types)
    if "string" in types and (kind == "string" or not fits):
        return _quoted(text)
    return word


def types_of(schema: Any, root: Mapping[str, Any], depth: int = _DEPTH) -> frozenset[str]:
    """Returns the JSON types that `schema` allows; `root` holds its definitions."""
    if not isinstance(schema, Mapping) or depth == 0:
        return _ALL
    if "$ref" in schema:
        return types_of(_resolved(schema["$ref"], root), root, depth - 1)
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        is_list = isinstance(values, list)
        return frozenset(_KINDS[type(value)] for value in values) if is_list else _ALL
    if "type" in schema:
        given = schema["type"]
        names = [given] if isinstance(given, str) else given
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return frozenset(names)
        return _ALL
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            parts = [types_of(each, root, depth - 1) for each in schema[name]]
            return frozenset().union(*parts)
    return _ALL


def definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the definitions that a part of the schema `root` may refer to."""
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def _value_rule(schema: Any, root: Mapping[str, Any], lark: Lark, end: str) -> str:
    """Returns a Lark expression of a value and its end.

    Raises:
        UnenforceableError: the schema restricts the pattern or length of strings, or allows no
            value.
    """
    if isinstance(schema, bool):  # any value, or none
        if not schema:
            raise UnenforceableError("false: a parameter that may not be given")
        return "passage"
    resolved = _resolved(schema["$ref"], root) if "$ref" in schema else schema
    types = types_of(resolved, root)
    if "enum" in resolved or "const" in resolved:
        values = resolved.get("enum", [resolved.get("const")])
        shown = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return f"({' | '.join(lark.text(text) or _EMPTY for text in shown)}) {end}"
    if "string" not in types:
        return f"{lark.json({**schema, **definitions(root)})} {end}"
    if not _is_unconstrained(resolved):
        more = sorted(set(resolved) - _UNCONSTRAINED)
        raise UnenforceableError(f"{', '.join(more) or 'its parts'}: strings are plain text here")
    return "passage"


def member_rules(
    function: Function, lark: Lark, member: Callable[[str, str], str], end: str, name: str
) -> list[str]:
    """Returns the members between tags as Lark expressions, in the schema's order.

    Args:
        member: joins the expression of a name with that of a value and its end.
        end: the expression of a value's end; `passage` is any text up to and including it.
        name: the expression of any name, for functions that accept any parameters.

    Raises:
        UnenforceableError: the schema restricts more than individual parameters.
    """
    schema = function.schema
    if function.parameters is None or "properties" not in function.parameters:
        return [f"({member(name, 'passage')})*"]
    more = sorted(key for key in schema if key not in _OBJECT)
    if more:
        raise UnenforceableError(f"{', '.join(more)}: only properties of their own can be enforced")
    rules = []
    for key, value in schema["properties"].items():
        rule = member(lark.text(key), _value_rule(value, schema, lark, end))
        rules.append(rule if key in schema.get("required", ()) else f"({rule})?")
    return rules


def _types_of_member(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    properties = schema.get("properties")
    member = properties.get(key) if isinstance(properties, Mapping) else None
    return types_of(member, schema)


def _is_unconstrained(schema: Mapping[str, Any]) -> bool:
    """Returns True if the schema restricts nothing beyond types."""
    parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return set(schema) <= _UNCONSTRAINED and all(
        isinstance(part, Mapping) and _is_unconstrained(part) for part in parts
    )


def _resolved(reference: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the definition in `root`; an unknown reference allows any value."""
    found: Any = root
    for name in str(reference).removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(name)
