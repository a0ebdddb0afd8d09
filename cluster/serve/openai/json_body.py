"""Bytes of a request to a JSON object, without holding up other threads for long.

Called by `protocol.parse`, for large bodies in a thread (`offload.py`).
"""

from __future__ import annotations

import json
import json.scanner
from typing import Any

from ....errors import InvalidRequestError

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
        raise InvalidRequestError(f"body: it is not UTF-8: {error}", field="body") from None
    except RecursionError:
        raise nested_too_deeply() from None
    except ValueError as error:
        raise InvalidRequestError(f"body: it is not JSON: {error}", field="body") from None
    if not isinstance(data, dict):
        raise InvalidRequestError("body: it has to be a JSON object", field="body")
    return data


def nested_too_deeply() -> InvalidRequestError:
    """For whatever in a body is nested so deeply that handling it ends the stack."""
    return InvalidRequestError("body: it is nested too deeply", field="body")


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
                raise InvalidRequestError(f"{name}: an object has this key twice", field=name)
            seen.add(key)
    return found
