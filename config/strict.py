"""Strict pydantic models, and conversion of pydantic's errors to ones that name the key.

`Strict` is the base of every configuration section; `parse` converts a dict to a section.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..errors import ConfigError, in_words, shown_value

Model = TypeVar("Model", bound=BaseModel)
_AT_KEY = "at_key"
_TYPE = re.compile(
    r"(bool|int|float|str|none|bytes)$|(literal|list|dict|tuple|constrained|function)\W"
)


_SHORTEST_S, _LONGEST_S = 1e-6, 1e8  # the clocks of Python and C support no more than 300 years


class Strict(BaseModel):
    """A frozen model that rejects unknown keys; a field's docstring is its description.

    Numbers must be finite, and durations in seconds (`*_s`, `*_sec`) within what can be waited for.
    A boolean is no number: YAML's `yes` would otherwise mean 1.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _no_booleans(cls, data: Any) -> Any:
        for key, value in data.items() if isinstance(data, dict) else ():
            field = cls.model_fields.get(key) if isinstance(value, bool) else None
            if field is not None:
                types = set(types_in(field.annotation))
                if types & {int, float} and bool not in types:
                    raise at_key(key, f"expected a number (got {str(value).lower()})")
        return data

    @field_validator("*")
    @classmethod
    def _seconds(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, float) or not str(info.field_name).endswith(("_s", "_sec")):
            return value
        if value > _LONGEST_S:
            raise ValueError(f"at most {_LONGEST_S:g} seconds")
        if 0 < value < _SHORTEST_S:
            raise ValueError(f"at least {_SHORTEST_S:g} seconds")
        return value

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split()) or None


def parse(model: type[Model], data: dict[str, Any]) -> Model:
    """Validates `data` as `model`; raises pydantic's first error as a `ConfigError` with a hint."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise config_error(model, error) from None


def config_error(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """Converts the most informative error; `others` has the errors about other fields."""
    complaints = error.errors()
    first = _telling(complaints)
    found: dict[str | None, ConfigError] = {}
    for each in (first, *complaints):
        made = _as_error(model, each)
        # A misspelt key explains a missing one; all members of a union report the same field.
        if each is first or each["type"] != "missing" or first["type"] != "extra_forbidden":
            found.setdefault(made.field, made)
    told, *others = found.values()
    told.others = others
    return told


def _as_error(model: type[BaseModel], first: Any) -> ConfigError:
    """Converts an error; it has the full key and, for an unknown key, the nearest known one."""
    names, section = walk(model, [str(part) for part in first["loc"]])
    if first["type"] == _AT_KEY:
        return _about(names, first["ctx"]["key"], first["msg"])
    name = ".".join(names) or model.__name__
    if first["type"] == "extra_forbidden":
        return unknown_key(name, names[-1], list(section.model_fields) if section else [])
    if first["type"] == "missing":
        return ConfigError.at(name, "this key is required")
    if first["type"] == "union_tag_invalid":
        context = first.get("ctx", {})
        allowed = str(context.get("expected_tags")).replace("'", "").split(", ")
        return unknown_name(f"{name}.decoding_type", "drafter", context.get("tag"), allowed)
    if first["type"] == "union_tag_not_found":
        return ConfigError(f"{name}.decoding_type: this key is required", field=name)
    value = first["input"]
    shown = "a mapping" if isinstance(value, dict) else shown_value(value)
    field = section.model_fields.get(names[-1]) if section and names else None
    such = f", such as {field.examples[0]}" if field and field.examples else ""
    return ConfigError.at(name, f"{in_words(first)}{such} (got {shown})")


def _telling(errors: list[Any]) -> Any:
    """Returns the error to report: if a key is missing, a misspelt key in its place."""
    first = errors[0]
    if first["type"] != "missing":
        return first
    *above, lacking = map(str, first["loc"])
    for other in errors:
        *place, key = map(str, other["loc"])
        is_near = difflib.get_close_matches(key, [lacking], cutoff=0.6)
        if other["type"] == "extra_forbidden" and place == above and is_near:
            return other
    return first


def at_key(key: str, message: str) -> PydanticCustomError:
    """Creates an error about one key, for validators that check several keys."""
    return PydanticCustomError(_AT_KEY, "{message}", {"key": key, "message": message})


def check_order(lower: str, low: float, upper: str, high: float, why: str = "") -> None:
    """Raises an error as `at_key` if `low`, of the key `lower`, exceeds `high`, of `upper`."""
    if low > high:
        raise at_key(lower, f"{lower} ({low}) must not exceed {upper} ({high}){why}")


def _about(names: Sequence[str], key: str, message: str) -> ConfigError:
    """Returns an error about a key of a section; the message may begin with the key."""
    name = ".".join([*names, key])
    text = f"{name}{message[len(key) :]}" if message.startswith(key) else f"{name}: {message}"
    return ConfigError(text, field=name)


def unknown_key(path: str, key: str, known: Iterable[str]) -> ConfigError:
    """Returns the error of an unknown key, with the nearest known key or all known keys."""
    near = nearest(key, known)
    hint = f"did you mean {near!r}?" if near else f"known keys: {', '.join(sorted(set(known)))}"
    return ConfigError.at(path, f"unknown key; {hint}")


def unknown_name(path: str, what: str, name: Any, allowed: Iterable[str]) -> ConfigError:
    """Returns the error of an unknown name, with the nearest allowed name and all allowed names."""
    near = nearest(name, allowed) if isinstance(name, str) else None
    hint = f"did you mean {near!r}? " if near else ""
    names = ", ".join(dict.fromkeys(allowed))
    return ConfigError.at(path, f"unknown {what} {shown_value(name)}; {hint}allowed: {names}")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known name that `name` is probably a misspelling of, ignoring case."""
    by_case = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=cutoff)
    return by_case[found[0]] if found else None


def check_foreign_names(
    keys: Iterable[Any], own: Collection[str], foreign: Collection[str], at: str = ""
) -> None:
    """Raises `ConfigError` for a key that resembles another engine's name most.

    The strict check reports misspellings of `own` names.
    """
    for key in keys:
        if isinstance(key, str) and key not in own and key not in foreign:
            near = nearest(key, [*foreign, *own], 0.8)
            if near is not None and near not in own:
                raise unknown_key(f"{at}{key}", key, [near])


def walk(model: type[BaseModel], loc: Sequence[str]) -> tuple[list[str], type[BaseModel] | None]:
    """Returns the keys of `loc` without tags of unions, and the section that has the last key."""
    names: list[str] = []
    section: type[BaseModel] | None = model
    held: Sequence[type[BaseModel]] = [model]
    for part in loc:
        if part.isdigit():  # an item of a list
            names.append(part)
            continue
        if len(held) > 1:  # pydantic inserts the tag of a union's member here
            held = [member for member in held if tag(member) == part]
            continue
        section = held[0] if held else None
        if section is None and _TYPE.match(part):  # pydantic's name of a type in a union
            continue
        names.append(part)
        field = section.model_fields.get(part) if section else None
        held = list(sections_in(field.annotation)) if field else []
    return names, section


def types_in(annotation: Any) -> Iterator[Any]:
    """Yields the types that an annotation mentions."""
    yield annotation
    for part in get_args(annotation):
        yield from types_in(part)


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yields the models that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


def tag(section: type[BaseModel]) -> str | None:
    """Returns the `decoding_type` that selects the section in a union, or None."""
    field = section.model_fields.get("decoding_type")
    return field.default if field else None


# Users' files, YAML and JSON. Both parsers would silently keep the last of two equal keys.


class _StrictLoader(yaml.SafeLoader):
    """A `SafeLoader` that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, field: str, where: str) -> Any:
    """Parses YAML `text`; `where` is the file or key that it is from.

    Raises:
        ConfigError: it is not YAML, is nested too deeply, contains itself, or has a duplicate key;
            names `field`.
    """
    try:
        data = yaml.load(text, _StrictLoader)
        if _holds_itself(data, (), set()):
            raise ConfigError.at(field, f"{where} has an alias of a part within that part")
        return data
    # An invalid date such as 2001-99-99 raises ValueError, `!!timestamp 5` raises AttributeError.
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        raise ConfigError.at(field, f"{where} is not YAML: {error}") from None
    except RecursionError:
        raise ConfigError.at(field, f"{where} is nested too deep") from None


def _holds_itself(data: Any, above: tuple[int, ...], known: set[int]) -> bool:
    """Returns True if a part contains itself.

    Args:
        above: `id`s of the enclosing parts.
        known: `id`s of parts that are already known not to contain themselves.
    """
    if not isinstance(data, dict | list) or id(data) in known:
        return False
    inside = (*above, id(data))
    parts = data.values() if isinstance(data, dict) else data
    if id(data) in above or any(_holds_itself(part, inside, known) for part in parts):
        return True
    known.add(id(data))
    return False


def read_json(text: str, field: str) -> Any:
    """Parses JSON `text`.

    Raises:
        ConfigError: it is not JSON, is nested too deeply, or has a duplicate key; names `field`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError.at(field, f"key {twice!r} is given twice")
        return data

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError.at(
            field, f"not JSON: {error.msg} at character {error.pos}: {text[:200]!r}"
        ) from None
    except ValueError as error:  # Python does not parse integers with thousands of digits
        raise ConfigError.at(field, f"not JSON: {error}") from None
    except RecursionError:
        raise ConfigError.at(field, "it is nested too deep") from None


def read_text(path: Path, field: str) -> str:
    """Reads the text of a file that `field` names.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError.at(field, f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError.at(field, f"{path} is not UTF-8: {error}") from None
    except ValueError as error:  # the path contains a zero byte
        raise ConfigError.at(field, f"cannot read {str(path)!r}: {error}") from None


def read_mapping(path: Path, field: str) -> dict[str, Any]:
    """Reads a mapping from a YAML or JSON file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    data = read_yaml(read_text(path, field), field, str(path))
    if not isinstance(data, dict):
        raise ConfigError.at(field, f"{path} must hold a mapping of keys")
    return data
