"""The validator itself, on schemas small enough to see through."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from outrider.tests.helpers.kubernetes import crd

QUANTITY = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
PORTS = {
    "type": "array",
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["port", "protocol"],
    "items": {
        "type": "object",
        "required": ["port"],
        "properties": {
            "port": {"type": "integer", "format": "int32", "minimum": 1},
            "protocol": {"type": "string", "default": "TCP", "enum": ["TCP", "UDP"]},
        },
    },
}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string", "pattern": "^a+$", "minLength": 2}, "aa"),
        ({"type": "integer", "format": "int32"}, 2**31 - 1),
        ({"type": "number"}, 1),
        ({"type": "string", "nullable": True}, None),
        ({"type": "object", "additionalProperties": {"type": "string"}}, {"any": "thing"}),
        ({"type": "object", "x-kubernetes-preserve-unknown-fields": True}, {"any": [1, {}]}),
        ({"x-kubernetes-preserve-unknown-fields": True}, 5),
        (QUANTITY, 1),
        (QUANTITY, "500m"),
        (PORTS, [{"port": 1}, {"port": 1, "protocol": "UDP"}]),
        ({"type": "string", "x-kubernetes-validations": [{"rule": "self == oldSelf"}]}, "a"),
    ],
)
def test_valid_values_pass(schema: crd.Schema, value: Any) -> None:
    assert crd.check(value, schema) == []


@pytest.mark.parametrize(
    ("schema", "value", "complaint"),
    [
        ({"type": "object", "properties": {"cpu": QUANTITY}}, {"cpus": 1}, ".cpus: unknown field"),
        ({"type": "object"}, {"a": 1}, ".a: unknown field"),
        ({"type": "object", "required": ["a"]}, {}, ".a: is required"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, {"a": 0}, "expected str"),
        ({"type": "string"}, 0, "expected string"),
        ({"type": "string"}, None, "must not be null"),
        ({"type": "integer"}, True, "expected integer"),
        ({"type": "integer"}, 1.0, "expected integer"),
        ({"type": "boolean"}, 1, "expected boolean"),
        ({"type": "integer", "format": "int32"}, 2**31, "not within"),
        ({"type": "string", "pattern": "^a+$"}, "b", "does not match"),
        ({"type": "string", "maxLength": 1}, "bb", "characters"),
        ({"type": "string", "enum": ["a"]}, "b", "is not one of"),
        ({"type": "array", "items": {"type": "string"}}, ["a", 1], "[1]: expected string"),
        (
            {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set"},
            ["a", "a"],
            "given twice",
        ),
        (QUANTITY, 1.5, "expected integer or string"),
        (PORTS, [{"port": 1}, {"port": 1, "protocol": "TCP"}], "given twice"),
        (PORTS, [{"port": 0}], "not within"),
        ({"type": "string", "x-kubernetes-validations": [{"rule": "self == ''"}]}, "", "CEL"),
    ],
)
def test_invalid_values_are_named(schema: crd.Schema, value: Any, complaint: str) -> None:
    errors = crd.check(value, schema)
    assert len(errors) == 1
    assert complaint in errors[0]


def test_an_unknown_schema_keyword_is_not_skipped() -> None:
    with pytest.raises(AssertionError, match="oneOf"):
        crd.check("a", {"type": "string", "oneOf": []})


def test_a_key_given_twice_is_an_error() -> None:
    with pytest.raises(yaml.YAMLError, match="'a' is given twice"):
        crd.load_documents("a: 1\nb: 2\na: 3\n")
