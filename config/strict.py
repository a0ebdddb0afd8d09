"""Strict pydantic models, and pydantic's complaints as errors that name the key and help.

Base of every configuration section; `parse` is how a dict becomes one.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ..errors import ConfigError, in_words, shown_value

Model = TypeVar("Model", bound=BaseModel)
_AT_KEY = "at_key"
_TYPE = re.compile(
    r"(bool|int|float|str|none|bytes)$|(literal|list|dict|tuple|constrained|function)\W"
)


_SHORTEST_S, _LONGEST_S = 1e-6, 1e8  # the clocks of Python and C take no more than 300 years


class Strict(BaseModel):
    """Frozen, and an unknown key is an error; a field's docstring is its description.

    Numbers are finite, and those of seconds (`*_s`, `*_sec`) are what can be waited for.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

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
    """`data` as `model`; pydantic's first complaint as a `ConfigError` with a suggestion."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise config_error(model, error) from None


def config_error(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """The most telling complaint as an error, whose `others` are those about other fields."""
    complaints = error.errors()
    first = _telling(complaints)
    found: dict[str | None, ConfigError] = {}
    for each in (first, *complaints):
        made = _as_error(model, each)
        # A misspelt key explains the missing one; members of a union complain about one field.
        if each is first or each["type"] != "missing" or first["type"] != "extra_forbidden":
            found.setdefault(made.field, made)
    told, *others = found.values()
    told.others = others
    return told


def _as_error(model: type[BaseModel], first: Any) -> ConfigError:
    """A complaint with the full key and, for an unknown key, the nearest known one."""
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
    """The complaint to report: where a key is missing, a misspelt one in its place."""
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
    """For validators that look at several keys: a `ValueError` that is about this one."""
    return PydanticCustomError(_AT_KEY, "{message}", {"key": key, "message": message})


def check_order(lower: str, low: float, upper: str, high: float, why: str = "") -> None:
    """Raises as `at_key` where `low`, of the key `lower`, is more than `high`, of `upper`."""
    if low > high:
        raise at_key(lower, f"{lower} ({low}) must not exceed {upper} ({high}){why}")


def _about(names: Sequence[str], key: str, message: str) -> ConfigError:
    """A complaint about a key of the section at `names`; a message may begin with the key."""
    name = ".".join([*names, key])
    text = f"{name}{message[len(key) :]}" if message.startswith(key) else f"{name}: {message}"
    return ConfigError(text, field=name)


def unknown_key(path: str, key: str, known: Iterable[str]) -> ConfigError:
    """An unknown key's error, with the nearest known key or all of them."""
    near = nearest(key, known)
    hint = f"did you mean {near!r}?" if near else f"known keys: {', '.join(sorted(set(known)))}"
    return ConfigError.at(path, f"unknown key; {hint}")


def unknown_name(path: str, what: str, name: Any, allowed: Iterable[str]) -> ConfigError:
    """The error of a value that names nothing `allowed`, with the nearest that is, or all."""
    near = nearest(name, allowed) if isinstance(name, str) else None
    hint = f"did you mean {near!r}? " if near else ""
    names = ", ".join(dict.fromkeys(allowed))
    return ConfigError.at(path, f"unknown {what} {shown_value(name)}; {hint}allowed: {names}")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that `name` may be a misspelling of; case does not count."""
    by_case = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=cutoff)
    return by_case[found[0]] if found else None


def check_foreign_names(
    keys: Iterable[Any], own: Collection[str], foreign: Collection[str], at: str = ""
) -> None:
    """Raises `ConfigError` for a key that is nearest to another engine's name of one.

    Misspellings of `own` names are left to the strict check.
    """
    for key in keys:
        if isinstance(key, str) and key not in own and key not in foreign:
            near = nearest(key, [*foreign, *own], 0.8)
            if near is not None and near not in own:
                raise unknown_key(f"{at}{key}", key, [near])


def walk(model: type[BaseModel], loc: Sequence[str]) -> tuple[list[str], type[BaseModel] | None]:
    """The keys of `loc` without the tags of unions, and the section that holds the last one."""
    names: list[str] = []
    section: type[BaseModel] | None = model
    held: Sequence[type[BaseModel]] = [model]
    for part in loc:
        if part.isdigit():  # a list's item
            names.append(part)
            continue
        if len(held) > 1:  # a union: pydantic puts the member's tag here
            held = [member for member in held if tag(member) == part]
            continue
        section = held[0] if held else None
        if section is None and _TYPE.match(part):  # a union of plain types: pydantic's name of one
            continue
        names.append(part)
        field = section.model_fields.get(part) if section else None
        held = list(sections_in(field.annotation)) if field else []
    return names, section


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


def tag(section: type[BaseModel]) -> str | None:
    """The `decoding_type` that selects the section in a union."""
    field = section.model_fields.get("decoding_type")
    return field.default if field else None


# Files, YAML and JSON of a user's. Both parsers would silently keep the last of two equal keys.


class _StrictLoader(yaml.SafeLoader):
    """`SafeLoader` that refuses a mapping with one key twice."""

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
    """The data in YAML `text`; `where` is the file or the key that it is from.

    Raises:
        ConfigError: it is not YAML, nested too deep, a part of itself, or a key is given twice;
            names `field`.
    """
    try:
        data = yaml.load(text, _StrictLoader)
        if _holds_itself(data, (), set()):
            raise ConfigError.at(field, f"{where} has an alias of a part within that part")
        return data
    # A date such as 2001-99-99 is a ValueError, `!!timestamp 5` an AttributeError.
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        raise ConfigError.at(field, f"{where} is not YAML: {error}") from None
    except RecursionError:
        raise ConfigError.at(field, f"{where} is nested too deep") from None


def _holds_itself(data: Any, above: tuple[int, ...], known: set[int]) -> bool:
    """Whether a part is within itself; `above` and `known`: the `id`s of what is around, and of
    what is not."""
    if not isinstance(data, dict | list) or id(data) in known:
        return False
    inside = (*above, id(data))
    parts = data.values() if isinstance(data, dict) else data
    if id(data) in above or any(_holds_itself(part, inside, known) for part in parts):
        return True
    known.add(id(data))
    return False


def read_json(text: str, field: str) -> Any:
    """The data in JSON `text`.

    Raises:
        ConfigError: it is not JSON, nested too deep, or a key is given twice; names `field`.
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
    except ValueError as error:  # Python reads no integers of thousands of digits
        raise ConfigError.at(field, f"not JSON: {error}") from None
    except RecursionError:
        raise ConfigError.at(field, "it is nested too deep") from None


def read_text(path: Path, field: str) -> str:
    """The text of a file that `field` names.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError.at(field, f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError.at(field, f"{path} is not UTF-8: {error}") from None
    except ValueError as error:  # of a path with a zero byte
        raise ConfigError.at(field, f"cannot read {str(path)!r}: {error}") from None


def read_mapping(path: Path, field: str) -> dict[str, Any]:
    """A YAML or JSON file that holds a mapping.

    Raises:
        ConfigError: unreadable, not YAML, or something else than a mapping.
    """
    data = read_yaml(read_text(path, field), field, str(path))
    if not isinstance(data, dict):
        raise ConfigError.at(field, f"{path} must hold a mapping of keys")
    return data
