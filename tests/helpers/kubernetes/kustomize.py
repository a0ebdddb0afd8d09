"""What `kubectl kustomize` prints, for the features that `k8s/` uses; any other is an error.

The order of steps is kustomize's: resources, components, generators, patches, the suffix, images,
replacements, transformers. `tests/k8s/test_kustomize.py` compares both where `kubectl` is
installed.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from outrider.tests.helpers.kubernetes import crd

Resource = dict[str, Any]
Resources = list[Resource]

LOCAL = "config.kubernetes.io/local-config"
_NAMES = "internal/names"  # earlier names, which replacements may still use
_REFERENCES = "internal/references"  # (kind that refers, its path, kind that is referred to)
_FIELDS = {
    "apiVersion", "kind", "resources", "components", "configMapGenerator", "patches", "nameSuffix",
    "images", "replacements", "transformers", "configurations",
}  # fmt: skip
_VERSIONS = {
    "Kustomization": "kustomize.config.k8s.io/v1beta1",
    "Component": "kustomize.config.k8s.io/v1alpha1",
}


class KustomizeError(ValueError):
    """A kustomization that `kubectl kustomize` refuses, or a feature that this renderer lacks."""


def build(folder: Path) -> Resources:
    """The resources of a kustomization, as they are applied: by kind and name."""
    found = [each for each in _accumulate(folder, "Kustomization", []) if not _is_local(each)]
    for each in found:
        del each[_NAMES], each[_REFERENCES]
    return found


def _is_local(resource: Resource) -> bool:
    return resource["metadata"].get("annotations", {}).get(LOCAL) == "true"


def _accumulate(folder: Path, kind: str, found: Resources) -> Resources:
    """The steps of one kustomization, or of a component on what its user has `found`."""
    (spec,) = crd.load_documents((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    _known(spec, _FIELDS, folder)
    if (spec["apiVersion"], spec["kind"]) != (_VERSIONS[kind], kind):
        raise KustomizeError(f"{folder}: expected a {kind} of {_VERSIONS[kind]}")
    for name in spec.get("resources", []):
        found = [*found, *_resources(folder, name)]
    for name in spec.get("components", []):
        found = _accumulate(_folder(folder, name), "Component", found)
    for generator in spec.get("configMapGenerator", []):
        _generate(generator, folder, found)
    references = _references(spec.get("configurations", []), folder)
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    if len(set(names)) < len(names):
        raise KustomizeError(f"{folder}: a resource is given twice: {sorted(names)}")
    for patch in spec.get("patches", []):
        _patch(patch, folder, found)
    for each in found:
        each[_REFERENCES] |= references
    for each in found:
        each["metadata"]["name"] += spec.get("nameSuffix", "")
        each[_NAMES].add(each["metadata"]["name"])
    for each in found:
        _refer(each, found)
    for image in spec.get("images", []):
        _known(image, {"name", "newName", "newTag"}, folder)
        _rename_images(found, image)
    for replacement in spec.get("replacements", []):
        _replace(replacement, found)
    for name in spec.get("transformers", []):
        for transformer in _accumulate(_folder(folder, name), "Kustomization", []):
            del transformer[_NAMES], transformer[_REFERENCES]
            _known(transformer, {"apiVersion", "kind", "metadata", "replacements"}, folder)
            if (transformer["apiVersion"], transformer["kind"]) != (
                "builtin",
                "ReplacementTransformer",
            ):
                raise KustomizeError(f"{folder}: no transformer {transformer['kind']}")
            for replacement in transformer["replacements"]:
                _replace(replacement, found)
    return found


def _known(mapping: dict[str, Any], allowed: set[str], where: Path) -> None:
    if unknown := set(mapping) - allowed:
        raise KustomizeError(f"{where}: unknown fields {sorted(unknown)}")


def _folder(folder: Path, name: str) -> Path:
    found = (folder / name).resolve()
    if not (found / "kustomization.yaml").is_file():
        raise KustomizeError(f"{folder}: no kustomization at {name}")
    return found


def _file(folder: Path, name: str) -> str:
    """A file of the folder: kustomize reads none outside."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        raise KustomizeError(f"{folder}: no file {name} within")
    return path.read_text(encoding="utf-8")


def _resources(folder: Path, name: str) -> Resources:
    if (folder / name).is_dir():
        return _accumulate(_folder(folder, name), "Kustomization", [])
    documents: Resources = crd.load_documents(_file(folder, name))
    # An anchor and its aliases are one object here, and several mappings to kustomize.
    documents = json.loads(json.dumps(documents))
    return [{**each, _NAMES: {each["metadata"]["name"]}, _REFERENCES: set()} for each in documents]


def _references(configurations: list[str], folder: Path) -> set[tuple[str, str, str]]:
    found = set()
    for name in configurations:
        (spec,) = crd.load_documents(_file(folder, name))
        _known(spec, {"nameReference"}, folder)
        for reference in spec["nameReference"]:
            _known(reference, {"kind", "version", "fieldSpecs"}, folder)
            for field in reference["fieldSpecs"]:
                _known(field, {"kind", "path"}, folder)
                found.add((field["kind"], field["path"], reference["kind"]))
    return found


def _refer(resource: Resource, found: Resources) -> None:
    """Writes the present names of resources where `resource` has earlier ones."""
    for kind, path, target in resource[_REFERENCES]:
        if resource["kind"] != kind:
            continue
        *parents, last = path.split("/")
        places = [resource]
        for key in parents:
            below = [each[key] for each in places if key in each]
            places = [
                item for each in below for item in (each if isinstance(each, list) else [each])
            ]
        for place in [each for each in places if last in each]:
            for each in found:
                if each["kind"] == target and place[last] in each[_NAMES]:
                    place[last] = each["metadata"]["name"]


def _generate(generator: dict[str, Any], folder: Path, found: Resources) -> None:
    _known(generator, {"name", "behavior", "files", "literals", "options"}, folder)
    options = generator.get("options", {})
    _known(options, {"disableNameSuffixHash", "annotations", "labels"}, folder)
    data = {name: _file(folder, name) for name in generator.get("files", [])}
    data |= dict(literal.split("=", 1) for literal in generator.get("literals", []))
    if generator.get("behavior", "create") == "merge":
        (existing,) = _selected({"kind": "ConfigMap", "name": generator["name"]}, found)
        existing["data"] |= data
        return
    if not options.get("disableNameSuffixHash"):
        raise KustomizeError(f"{folder}: this renderer makes no names with hashes")
    kept = {key: options[key] for key in ("annotations", "labels") if key in options}
    metadata = {"name": generator["name"], **kept}
    found.append(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": data,
            _NAMES: {generator["name"]},
            _REFERENCES: set(),
        }
    )


def _selected(selector: dict[str, Any], found: Resources) -> Resources:
    if unknown := set(selector) - {"kind", "name"}:
        raise KustomizeError(f"unknown fields {sorted(unknown)} of a selector")
    chosen = [
        each
        for each in found
        if selector.get("kind", each["kind"]) == each["kind"]
        and ("name" not in selector or selector["name"] in each[_NAMES])
    ]
    if not chosen:
        raise KustomizeError(f"nothing is selected by {selector}")
    return chosen


def _patch(patch: dict[str, Any], folder: Path, found: Resources) -> None:
    _known(patch, {"target", "path", "patch"}, folder)
    text = _file(folder, patch["path"]) if "path" in patch else patch["patch"]
    (operations,) = crd.load_documents(text)
    if not isinstance(operations, list):
        raise KustomizeError(f"{folder}: this renderer has JSON patches only")
    for resource in _selected(patch["target"], found):
        for operation in operations:
            _operate(operation, resource)


def _operate(operation: dict[str, Any], document: Any) -> None:
    """One operation of a JSON patch (RFC 6902)."""
    kind = operation["op"]
    sources = {"add": "value", "replace": "value", "copy": "from", "remove": None}
    if kind not in sources:
        raise KustomizeError(f"this renderer has no operation {kind}")
    expected = {"op", "path", sources[kind]} - {None}
    if set(operation) != expected:
        raise KustomizeError(f"{kind}: expected {expected}, got {sorted(operation)}")
    value = operation.get("value")
    if kind == "copy":
        value = document
        for key in _pointer(operation["from"]):
            value = _child(value, key, operation["from"])
    *parents, last = _pointer(operation["path"])
    parent = document
    for key in parents:
        parent = _child(parent, key, operation["path"])
    if kind in ("replace", "remove"):
        _child(parent, last, operation["path"])  # it exists
    if kind == "remove":
        del parent[int(last) if isinstance(parent, list) else last]
    elif isinstance(parent, dict):
        parent[last] = copy.deepcopy(value)
    elif kind == "replace":
        parent[int(last)] = copy.deepcopy(value)
    else:
        place = len(parent) if last == "-" else int(last)
        if not 0 <= place <= len(parent):
            raise KustomizeError(f"{operation['path']}: no such place")
        parent.insert(place, copy.deepcopy(value))


def _pointer(path: str) -> list[str]:
    start, *keys = path.split("/")
    if start or not keys:
        raise KustomizeError(f"{path}: not a pointer")
    return [key.replace("~1", "/").replace("~0", "~") for key in keys]


def _child(parent: Any, key: str, path: str) -> Any:
    try:
        return parent[int(key) if isinstance(parent, list) else key]
    except (KeyError, IndexError, ValueError, TypeError):
        raise KustomizeError(f"{path}: there is no {key}") from None


def _rename_images(value: Any, image: dict[str, str]) -> None:
    """In every list of containers."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in items:
        _rename_images(each, image)
    for containers in ("containers", "initContainers") if isinstance(value, dict) else ():
        for container in value.get(containers, []):
            name, _, tag = container["image"].partition(":")
            if name == image["name"]:
                name, tag = image.get("newName", name), image.get("newTag", tag)
                container["image"] = f"{name}:{tag}"


def _field(path: str) -> list[str]:
    """`data.[args.yaml]` as its keys."""
    head, bracket, rest = path.partition(".[")
    return [*head.split("."), *([rest.removesuffix("]")] if bracket else [])]


def _replace(replacement: dict[str, Any], found: Resources) -> None:
    """Writes a field of one resource between the delimiters of a text in others."""
    source = dict(replacement["source"])
    path = _field(source.pop("fieldPath"))
    (value,) = _selected(source, found)
    for key in path:
        value = _child(value, key, ".".join(path))
    for target in replacement["targets"]:
        if set(target) != {"select", "fieldPaths", "options"}:
            raise KustomizeError(f"this renderer replaces between delimiters: {target}")
        delimiter, index = target["options"]["delimiter"], target["options"]["index"]
        for resource in _selected(target["select"], found):
            for field in target["fieldPaths"]:
                *parents, last = _field(field)
                parent: Any = resource
                for key in parents:
                    parent = _child(parent, key, field)
                parts = _child(parent, last, field).split(delimiter)
                if not 0 < index < len(parts) - 1:
                    raise KustomizeError(f"{field}: not between two of {delimiter!r}")
                parts[index] = value
                parent[last] = delimiter.join(parts)
