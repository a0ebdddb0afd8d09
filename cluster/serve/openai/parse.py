"""Validation shared by all bodies: strict types, no unknown fields, bounded lists."""

from __future__ import annotations

import functools
import json
import json.scanner
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError
from starlette.datastructures import QueryParams

from ....config.compat.table import REQUEST, Ignored, Refused, hint
from ....config.strict import nearest, walk
from ....errors import (
    InvalidRequestError,
    OutriderError,
    in_words,
    renamed,
    shortened,
    shown_value,
)
from ....scheduler.sampling import MAX_STOPS, invalid_request

log = logging.getLogger(__name__)
# Maximum number of items: pydantic holds the GIL until it has validated all of them.
MANY = 2**16


class Strict(BaseModel):
    """A model without type coercion and unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def complaint(cls, errors: Sequence[Any]) -> InvalidRequestError | None:
        """Returns the body's own error for pydantic's errors; None: the general one is used."""
        return None


def at_most(limit: int) -> BeforeValidator:
    """Limits the length of a list or mapping before its items are validated."""

    def few(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > limit:
            raise PydanticCustomError("too_many", "at most {limit}", {"limit": limit})
        return value

    return BeforeValidator(few)


# Parsing JSON objects without blocking other threads for long.
_LARGE_BYTES = 256 * 2**10
_MANY_VALUES = 100_000
_MAX_NAME = 64  # characters of a key in a message


def load(raw: bytes) -> dict[str, Any]:
    """Returns the JSON object in `raw`.

    Raises:
        InvalidRequestError: it is not UTF-8 or not a JSON object, or an object has a duplicate key.
    """
    try:
        data = _decoder(raw).decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRequestError.at("body", f"it is not UTF-8: {error}") from None
    except RecursionError:
        raise nested_too_deeply() from None
    except ValueError as error:
        raise InvalidRequestError.at("body", f"it is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequestError.at("body", "it has to be a JSON object")
    return data


def nested_too_deeply() -> InvalidRequestError:
    """Returns the error for a body whose nesting exhausts the stack."""
    return InvalidRequestError.at("body", "it is nested too deeply")


def _decoder(raw: bytes) -> json.JSONDecoder:
    """Returns a decoder; for many values, one in Python, which releases the GIL between values."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)
    # Long texts are decoded quickly; the number of values determines the time.
    if len(raw) > _LARGE_BYTES and sum(map(raw.count, (b",", b"[", b"{"))) > _MANY_VALUES:
        decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    return decoder


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of these pairs; rejects duplicate keys, which are ambiguous."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                name = key[:_MAX_NAME]
                raise InvalidRequestError.at(name, "an object has this key twice")
            seen.add(key)
    return found


# Fields documented by OpenAI or vLLM that are not supported: values that request nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "documents": (None, []),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_decoding_backend": (None, "auto", "guidance"),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": (None, []),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prompt_cache_options": (None,),
    "prompt_embeds": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "truncation_side": (None, "left"),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "vllm_xargs": (None, {}),
    "web_search_options": (None,),
}
# Documented fields that have no effect on the output.
IGNORED = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}
)


Body = TypeVar("Body", bound=Strict)


def parse(body_type: type[Body], raw: bytes) -> Body:
    """Parses and validates a body.

    A field of OpenAI's that is not supported is rejected unless its value requests nothing. An
    unknown field is rejected with the nearest documented name.

    Raises:
        InvalidRequestError: it is not UTF-8 or not a JSON object, or a field is invalid; names the
            field.
    """
    data = load(raw)
    try:
        if b"\\ud" in raw or b"\\uD" in raw:
            _check_characters(data)
        if not body_type.model_fields.keys().isdisjoint(("prompt", "messages")):
            data = _without_unsupported(body_type, data)
        elif "input" in body_type.model_fields and not REQUEST.keys().isdisjoint(data):
            data = _without_foreign(body_type, data)
        return validated(body_type, data)
    except RecursionError:
        raise nested_too_deeply() from None


def validated(body_type: type[Body], fields: Mapping[str, Any]) -> Body:
    """Validates these fields; raises `InvalidRequestError`, which names the first invalid one."""
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        raise _complaint(body_type, error) from None


def _check_characters(data: dict[str, Any]) -> None:
    """Rejects lone surrogates, which JSON can express, but which are not valid text."""
    for name, value in data.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            shown = shortened(name)
            raise InvalidRequestError.at(
                shown, "it contains half of a surrogate pair, which is not text"
            ) from None


def check_unserved(
    name: str, value: Any, fine: tuple[Any, ...], advice: str = "leave it out"
) -> None:
    """Rejects a documented field that is not supported, unless its value requests nothing."""
    # `in` does not work: 0 == False, and values may be unhashable.
    if not any(type(value) is type(each) and value == each for each in fine):
        raise InvalidRequestError.at(
            name, f"not supported here (got {shown_value(value)}); {advice}"
        )


def _check_foreign(name: str, value: Any) -> None:
    """Warns of another engine's field if it has no effect here; rejects it otherwise."""
    row = REQUEST[name]
    if isinstance(row, Ignored):
        _warn(name, f"{row.ignored}{hint(row)}")
        return
    try:
        row.keys(value)
    except ValueError as error:
        raise InvalidRequestError.at(name, f"{error} (got {shown_value(value)})") from None


def _without_foreign(body_type: type[Strict], data: dict[str, Any]) -> dict[str, Any]:
    """Checks and removes fields of other engines."""
    foreign = data.keys() & REQUEST.keys() - body_type.model_fields.keys()
    for name in sorted(foreign):
        _check_foreign(name, data[name])
    return {name: value for name, value in data.items() if name not in foreign}


@functools.cache  # warns once per process
def _warn(name: str, reason: str) -> None:
    log.warning("field %s of requests has no effect here: %s", name, reason)


def _without_unsupported(body_type: type[Strict], data: dict[str, Any]) -> dict[str, Any]:
    """Checks and removes documented fields that are not supported."""
    known = body_type.model_fields
    kept = {}
    for name, value in data.items():
        if name in known:
            kept[name] = value
        elif name in UNSUPPORTED:
            check_unserved(name, value, UNSUPPORTED[name])
        elif name in REQUEST:
            _check_foreign(name, value)
        elif name not in IGNORED:
            raise _unknown([name], [*known, *IGNORED])
    return kept


# Names of the same limit in OpenAI's endpoints.
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


def _unknown(names: Sequence[str], known: Iterable[str]) -> InvalidRequestError:
    """Returns the error of an unknown field, the last of `names`, with the nearest known name."""
    shown = [shortened(name) for name in names]
    is_top = len(names) == 1  # other engines' fields are at the top level
    others = [name for name, row in REQUEST.items() if is_top and not isinstance(row, Refused)]
    known = list(known)
    same = next((name for name in _LIMITS if shown[-1] in _LIMITS and name in known), None)
    near = same or nearest(shown[-1], known, 0.7) or nearest(shown[-1], others, 0.7)
    hint = f"did you mean {near!r}?" if near else "there is no such field here"
    return InvalidRequestError.at(".".join(shown) or "body", f"unknown field; {hint}")


PROMPTS = "a string, a list of strings, a list of token ids, or a list of such lists"
# Fields with union types; the errors of their members would hide the allowed forms.
_ALLOWED = {
    "prompt": PROMPTS,
    "prompt_token_ids": "a list of token ids, or a list of such lists",
    "stop": f"a string or a list of at most {MAX_STOPS} strings",
    "input": "a string or a list of items",
    "tool_choice": "'auto', 'required', 'none', or a function by its name",
}


def _complaint(body_type: type[Strict], error: ValidationError) -> InvalidRequestError:
    """Converts pydantic's first error; union members are not part of the field's name."""
    errors = error.errors()
    location = errors[0]["loc"]
    if errors[0]["type"] == "extra_forbidden":
        names, section = walk(body_type, [str(part) for part in location])
        known = section.model_fields if section else {}
        return _unknown(names, [each.alias or name for name, each in known.items()])
    own = body_type.complaint(errors)
    if own is not None:
        return own
    name = str(location[0]) if location else ""
    if name == "input":
        # If the input is a list of items, report the invalid item rather than "not a string".
        nested = next((each for each in errors if len(each["loc"]) > 2), None)
        if nested is not None:
            return InvalidRequestError.at(_item_field(nested["loc"]), in_words(nested))
    if name in _ALLOWED and (len(location) > 1 or errors[0]["type"] == "too_many"):
        return InvalidRequestError.at(name, f"it has to be {_ALLOWED[name]}")
    if "content" in location:
        many = any(each["type"] == "too_many" for each in errors)
        parts = f"at most {MANY} parts" if many else "parts"
        name = ".".join(str(part) for part in location[: location.index("content") + 1])
        return InvalidRequestError.at(
            name, f"it has to be a string or a list of {parts} of type 'text'"
        )
    return invalid_request(error)


def objects_of(items: Any) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yields the objects in a list with their indices; nothing for other values."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict):
            yield index, item


def check_kind(field: str, given: Mapping[Any, Any], allowed: Sequence[Any], rule: str) -> None:
    """Rejects an object of an unsupported `type` by name, which errors of a union would hide."""
    kind = given.get("type")
    if kind not in allowed:
        shown = shown_value(kind)
        raise InvalidRequestError.at(f"{field}.type", f"{shown} is not supported; {rule}")


@contextmanager
def named(fields: Mapping[str, str]) -> Iterator[None]:
    """Replaces the engine's names of fields in errors by the request's."""
    try:
        yield
    except OutriderError as error:
        raise renamed(error, [(rf"^{ours}\b", theirs) for ours, theirs in fields.items()]) from None


def query_of(given: QueryParams, known: Mapping[str, Mapping[str, Any]]) -> QueryParams:
    """Returns the query of a route whose parameters are `known`, with their schemas.

    Raises:
        InvalidRequestError: a parameter is unknown, or is repeated but not a list.
    """
    for name in given:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known) or 'none'}"
            raise InvalidRequestError.at(shortened(name), f"unknown name in the query; {hint}")
        if known[name].get("type") != "array" and len(given.getlist(name)) > 1:
            raise InvalidRequestError.at(name, "the query has it twice")
    return given


def require_no_body(path: str, known: Mapping[str, Any], raw: bytes) -> None:
    """Rejects options in a body, where they would have no effect."""
    if raw.strip() not in (b"", b"{}"):
        where = "its options are in the query" if known else "it has no options"
        raise InvalidRequestError.at("body", f"{path} takes none; {where}")


def _item_field(location: tuple[int | str, ...]) -> str:
    """Returns the field of an input's item, from `input`, union member, index, item kind, ..."""
    _, _, index, *rest = location
    parts = [
        part
        for part in rest[1:]
        if part != "str" and not str(part).startswith(("list[", "function-"))
    ]
    return ".".join(str(part) for part in ("input", index, *parts))
