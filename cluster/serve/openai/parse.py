"""What every body has: strict types, no unknown fields, bounded lists."""

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
# Items that are looked at: pydantic holds the interpreter's lock until it is done with all.
MANY = 2**16


class Strict(BaseModel):
    """No coercion of strings to numbers, no unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def complaint(cls, errors: Sequence[Any]) -> InvalidRequestError | None:
        """The error for pydantic's complaints, where a body words it itself."""
        return None


def at_most(limit: int) -> BeforeValidator:
    """Bounds a list or mapping before its items are looked at."""

    def few(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > limit:
            raise PydanticCustomError("too_many", "at most {limit}", {"limit": limit})
        return value

    return BeforeValidator(few)


# Bytes of a request to a JSON object, without holding up other threads for long.
_LARGE_BYTES = 256 * 2**10
_MANY_VALUES = 100_000
_MAX_NAME = 64  # characters of a key in a message


def load(raw: bytes) -> dict[str, Any]:
    """The object in `raw`.

    Raises:
        InvalidRequestError: it is no UTF-8, or no JSON object, or an object has a key twice.
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
    """For whatever in a body is nested so deeply that handling it ends the stack."""
    return InvalidRequestError.at("body", "it is nested too deeply")


def _decoder(raw: bytes) -> json.JSONDecoder:
    """One that lets other threads run, where the usual one would not for tenths of a second."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)
    # Text of any length is read in no time: it is the number of values that counts.
    if len(raw) > _LARGE_BYTES and sum(map(raw.count, (b",", b"[", b"{"))) > _MANY_VALUES:
        decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    return decoder


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; readers differ in which value of a repeated key they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                name = key[:_MAX_NAME]
                raise InvalidRequestError.at(name, "an object has this key twice")
            seen.add(key)
    return found


# Documented by OpenAI or vLLM, not served: the values that ask for nothing beyond what we do.
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
# Documented, without an effect on the output.
IGNORED = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}
)


Body = TypeVar("Body", bound=Strict)


def parse(body_type: type[Body], raw: bytes) -> Body:
    """The body, checked.

    A field of OpenAI's that we cannot honour is refused unless it has a value that asks for
    nothing; a name that nobody documents is refused with the nearest one that is.

    Raises:
        InvalidRequestError: it is no UTF-8, no JSON object, or a field is wrong; names the field.
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
    """A body of these fields; raises `InvalidRequestError`, which names the first that is wrong."""
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        raise _complaint(body_type, error) from None


def _check_characters(data: dict[str, Any]) -> None:
    """Refuses halves of surrogate pairs: JSON can write them, but they are not text."""
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
    """Refuses a field that is documented but not served, but for values that ask for nothing."""
    # Not by `in`: 0 == False, and an unhashable value is as good as any.
    if not any(type(value) is type(each) and value == each for each in fine):
        raise InvalidRequestError.at(
            name, f"not supported here (got {shown_value(value)}); {advice}"
        )


def _check_foreign(name: str, value: Any) -> None:
    """Warns of another engine's field that has no effect here, and refuses one that would have."""
    row = REQUEST[name]
    if isinstance(row, Ignored):
        _warn(name, f"{row.ignored}{hint(row)}")
        return
    try:
        row.keys(value)
    except ValueError as error:
        raise InvalidRequestError.at(name, f"{error} (got {shown_value(value)})") from None


def _without_foreign(body_type: type[Strict], data: dict[str, Any]) -> dict[str, Any]:
    """Checks and drops other engines' fields."""
    foreign = data.keys() & REQUEST.keys() - body_type.model_fields.keys()
    for name in sorted(foreign):
        _check_foreign(name, data[name])
    return {name: value for name, value in data.items() if name not in foreign}


@functools.cache  # once in a process, not with every request
def _warn(name: str, reason: str) -> None:
    log.warning("field %s of requests has no effect here: %s", name, reason)


def _without_unsupported(body_type: type[Strict], data: dict[str, Any]) -> dict[str, Any]:
    """Checks and drops what is documented but not served."""
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


# What OpenAI's endpoints call the same limit.
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


def _unknown(names: Sequence[str], known: Iterable[str]) -> InvalidRequestError:
    """The error of an unknown field, the last of `names`, with the nearest of `known`."""
    shown = [shortened(name) for name in names]
    is_top = len(names) == 1  # where other engines' fields are
    others = [name for name, row in REQUEST.items() if is_top and not isinstance(row, Refused)]
    known = list(known)
    same = next((name for name in _LIMITS if shown[-1] in _LIMITS and name in known), None)
    near = same or nearest(shown[-1], known, 0.7) or nearest(shown[-1], others, 0.7)
    hint = f"did you mean {near!r}?" if near else "there is no such field here"
    return InvalidRequestError.at(".".join(shown) or "body", f"unknown field; {hint}")


PROMPTS = "a string, a list of strings, a list of token ids, or a list of such lists"
# Fields that are unions, whose members' complaints would hide what is allowed.
_ALLOWED = {
    "prompt": PROMPTS,
    "prompt_token_ids": "a list of token ids, or a list of such lists",
    "stop": f"a string or a list of at most {MAX_STOPS} strings",
    "input": "a string or a list of items",
    "tool_choice": "'auto', 'required', 'none', or a function by its name",
}


def _complaint(body_type: type[Strict], error: ValidationError) -> InvalidRequestError:
    """pydantic's first complaint; members of a union are no part of the field's name."""
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
        # A list of items, and more of them is wrong than that it is no string.
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
    """The entries of a list that are objects, with their places; none of anything else."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict):
            yield index, item


def check_kind(field: str, given: Mapping[Any, Any], allowed: Sequence[Any], rule: str) -> None:
    """Refuses an object of another `type` by its name, which a union's errors would hide."""
    kind = given.get("type")
    if kind not in allowed:
        shown = shown_value(kind)
        raise InvalidRequestError.at(f"{field}.type", f"{shown} is not supported; {rule}")


@contextmanager
def named(fields: Mapping[str, str]) -> Iterator[None]:
    """Puts a request's names of fields into errors that have the engine's."""
    try:
        yield
    except OutriderError as error:
        raise renamed(error, [(rf"^{ours}\b", theirs) for ours, theirs in fields.items()]) from None


def query_of(given: QueryParams, known: Mapping[str, Mapping[str, Any]]) -> QueryParams:
    """The query of a route that has only the names `known`, with their schemas.

    Raises:
        InvalidRequestError: there is another name, or one twice that is no list.
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
    """Refuses options in a body, which would otherwise have no effect."""
    if raw.strip() not in (b"", b"{}"):
        where = "its options are in the query" if known else "it has no options"
        raise InvalidRequestError.at("body", f"{path} takes none; {where}")


def _item_field(location: tuple[int | str, ...]) -> str:
    """The field of an input's item: `input`, the union's member, the index, the item's kind, ..."""
    _, _, index, *rest = location
    parts = [
        part
        for part in rest[1:]
        if part != "str" and not str(part).startswith(("list[", "function-"))
    ]
    return ".".join(str(part) for part in ("input", index, *parts))
