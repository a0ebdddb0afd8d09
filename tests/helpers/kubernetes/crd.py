"""A strict validator for the structural schemas of Kubernetes' CustomResourceDefinitions.

The API server prunes fields that a schema does not know, so that a
misspelt key disappears in silence; here it is an error. Follows the structural-schema rules of
apiextensions.k8s.io/v1. A schema keyword that is not handled is an error too, never skipped.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]

# Annotations of the schema: they change how the server stores or merges, not what is valid.
_SILENT = {"description", "default", "title", "format", "x-kubernetes-map-type"}
_HANDLED = {
    "additionalProperties",
    "anyOf",
    "enum",
    "items",
    "maxLength",
    "maximum",
    "minLength",
    "minimum",
    "nullable",
    "pattern",
    "properties",
    "required",
    "type",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",
}
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_INT_RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}

# A CRD leaves the root's metadata to the server; this is the part of ObjectMeta that users write.
OBJECT_META: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        # KubeRay appends "-serve-svc" and suffixes of its own: a label of at most 41 characters.
        "name": {"type": "string", "maxLength": 41, "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$"},
        "namespace": {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
_TEXT: Schema = {"type": "string", "minLength": 1}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _resource(**properties: Schema) -> Schema:
    fixed = {"apiVersion": _TEXT, "kind": _TEXT, "metadata": OBJECT_META}
    return _object([*fixed, *properties], **fixed, **properties)


# Of prometheus-operator's monitoring.coreos.com/v1, the fields that `k8s/` uses and no others.
_RELABELING = _object(
    ["action", "sourceLabels", "regex"],
    action={"type": "string", "enum": ["keep", "drop"]},  # others have further fields
    sourceLabels=_list({"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}),
    regex=_TEXT,
)
_ENDPOINT = _object(
    ["port"],
    port=_TEXT,
    path={"type": "string", "pattern": "^/"},
    authorization=_object(
        ["credentials"],
        type={"type": "string", "enum": ["Bearer"]},  # "Basic" is not a value that it takes
        credentials=_object(["name", "key"], name=_TEXT, key=_TEXT),
    ),
    relabelings=_list(_RELABELING),
)
OTHERS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _resource(
        spec=_object(
            ["selector", "podMetricsEndpoints"],
            selector=_object(["matchLabels"], matchLabels=_TEXTS),
            podTargetLabels=_list({"type": "string"}),
            podMetricsEndpoints=_list(_ENDPOINT),
        )
    ),
    ("v1", "ConfigMap"): _resource(data=_TEXTS),
    ("v1", "PersistentVolumeClaim"): _resource(
        spec=_object(
            ["accessModes", "resources"],
            accessModes=_list({"type": "string", "enum": ["ReadOnlyMany", "ReadWriteMany"]}),
            storageClassName=_TEXT,
            resources=_object(
                ["requests"],
                requests=_object(
                    ["storage"], storage={"type": "string", "pattern": "^[0-9]+[KMGTP]i?$"}
                ),
            ),
        )
    ),
}
"""Strict schemas of resources that are not KubeRay's: a field is to be added here before it is
used."""


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error, as kubectl's strict decoding has it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{node.start_mark}: the key {key!r} is given twice")
        return super().construct_mapping(node, deep=deep)


def load_documents(text: str) -> list[Any]:
    """All documents of a YAML stream, keys unique."""
    return list(yaml.load_all(text, Loader=UniqueKeyLoader))


def load_schemas(folder: Path) -> dict[tuple[str, str], Schema]:
    """The served schemas of a folder of CRDs, by (apiVersion, kind), and `OTHERS`."""
    schemas: dict[tuple[str, str], Schema] = dict(OTHERS)
    for path in sorted(folder.glob("*.yaml")):
        spec = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            if version["served"]:
                schema = version["schema"]["openAPIV3Schema"]
                schema["properties"]["metadata"] = OBJECT_META
                required = {*schema.get("required", []), "apiVersion", "kind", "metadata", "spec"}
                schema["required"] = sorted(required)
                api_version = f"{spec['group']}/{version['name']}"
                schemas[api_version, spec["names"]["kind"]] = schema
    # KubeRay's own rules have the shape of a NetworkPolicy's.
    cluster = schemas["ray.io/v1", "RayCluster"]["properties"]["spec"]["properties"]
    rules = cluster["networkPolicy"]["properties"]["head"]["properties"]["ingressRules"]
    schemas["networking.k8s.io/v1", "NetworkPolicy"] = _resource(
        spec=_object(
            ["podSelector", "policyTypes", "ingress"],
            podSelector=_object(["matchLabels"], matchLabels=_TEXTS),
            policyTypes=_list({"type": "string", "enum": ["Ingress"]}),
            ingress=rules,
        )
    )
    return schemas


def check(value: Any, schema: Schema, path: str = "") -> list[str]:
    """What is wrong with `value`, one message a fault; empty when it is valid."""
    unhandled = set(schema) - _SILENT - _HANDLED
    assert not unhandled, f"{path}: schema keywords that this validator lacks: {unhandled}"
    if value is None:
        return [] if schema.get("nullable") else [f"{path}: must not be null"]
    errors = _check_type(value, schema, path)
    if errors:
        return errors
    rules = [each["rule"] for each in schema.get("x-kubernetes-validations", [])]
    if any("oldSelf" not in rule for rule in rules):  # those of changes hold for a new resource
        errors.append(f"{path}: has a CEL rule, which this validator cannot evaluate")
    if "enum" in schema and value not in schema["enum"]:
        errors.append(f"{path}: {value!r} is not one of {schema['enum']}")
    if isinstance(value, dict):
        errors += _check_object(value, schema, path)
    elif isinstance(value, list):
        errors += _check_array(value, schema, path)
    elif isinstance(value, str):
        errors += _check_string(value, schema, path)
    elif not isinstance(value, bool):
        errors += _check_number(value, schema, path)
    return errors


def _check_type(value: Any, schema: Schema, path: str) -> list[str]:
    if schema.get("x-kubernetes-int-or-string"):
        allowed: tuple[type, ...] = (int, str)
        name = "integer or string"
    elif "type" in schema:
        name = schema["type"]
        allowed = _TYPES[name]
    else:
        assert schema.get("x-kubernetes-preserve-unknown-fields"), f"{path}: an untyped schema"
        return []
    # bool is a subclass of int, and YAML 1.1 reads `on` and `yes` as one.
    if isinstance(value, bool) != (allowed == (bool,)) or not isinstance(value, allowed):
        return [f"{path}: expected {name}, got {value!r}"]
    return []


def _check_object(value: dict[Any, Any], schema: Schema, path: str) -> list[str]:
    properties = schema.get("properties", {})
    rest = schema.get("additionalProperties", False)
    errors = [
        f"{path}.{key}: is required" for key in schema.get("required", []) if key not in value
    ]
    for key, item in value.items():
        where = f"{path}.{key}"
        if not isinstance(key, str):
            errors.append(f"{where}: keys are strings, got {key!r}")
        elif key in properties:
            errors += check(item, properties[key], where)
        elif isinstance(rest, dict):
            errors += check(item, rest, where)
        elif not rest and not schema.get("x-kubernetes-preserve-unknown-fields"):
            errors.append(f"{where}: unknown field; known: {', '.join(sorted(properties))}")
    return errors


def _check_array(value: list[Any], schema: Schema, path: str) -> list[str]:
    errors = []
    for index, item in enumerate(value):
        errors += check(item, schema["items"], f"{path}[{index}]")
    kind = schema.get("x-kubernetes-list-type", "atomic")
    if kind == "map":
        defaults = schema["items"].get("properties", {})
        keys = [
            tuple(
                item.get(key, defaults.get(key, {}).get("default"))
                for key in schema["x-kubernetes-list-map-keys"]
            )
            for item in value
            if isinstance(item, dict)
        ]
        errors += [f"{path}: {key} is given twice" for key in set(keys) if keys.count(key) > 1]
    elif kind == "set":
        errors += [
            f"{path}: {item!r} is given twice"
            for index, item in enumerate(value)
            if item in value[:index]
        ]
    return errors


def _check_string(value: str, schema: Schema, path: str) -> list[str]:
    errors = []
    if "pattern" in schema and re.search(schema["pattern"], value) is None:
        errors.append(f"{path}: {value!r} does not match {schema['pattern']}")
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        errors.append(
            f"{path}: {len(value)} characters are not within {schema.get('minLength', 0)} "
            f"to {schema.get('maxLength', 'any number')}"
        )
    return errors


def _check_number(value: float, schema: Schema, path: str) -> list[str]:
    low, high = _INT_RANGES.get(schema.get("format", ""), (-float("inf"), float("inf")))
    low, high = schema.get("minimum", low), schema.get("maximum", high)
    return [] if low <= value <= high else [f"{path}: {value} is not within {low} to {high}"]
