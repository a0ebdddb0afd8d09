"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`.

Below `/v1/messages`, they have Anthropic's form: `{"type": "error", "error": {"type", "message"}}`.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....errors import AuthenticationError, OutriderError, WorkerError

log = logging.getLogger(__name__)


class BodyTooLargeError(OutriderError):
    """The request's body exceeds the server's limit."""

    status = 413
    kind = "invalid_request_error"


class BodyTimeoutError(OutriderError):
    """The request's body did not arrive in time."""

    status = 408
    kind = "timeout_error"


class BodyEncodingError(OutriderError):
    """The request's body is compressed."""

    status = 415
    kind = "invalid_request_error"


class ClientGoneError(OutriderError):
    """The client has disconnected, so nobody reads the answer."""

    status = 499


def error_body(error: OutriderError) -> dict[str, Any]:
    """Returns the error's body in the form that OpenAI's clients expect."""
    return {
        "error": {
            "message": _sendable(_told(error)),
            "type": error.kind,
            "param": error.field and _sendable(error.field),
            "code": error.code,
        }
    }


def _told(error: OutriderError) -> str:
    """Returns the message; of a worker's traceback only the last line, as the log has the rest."""
    lines = error.message.strip().splitlines()
    return lines[-1] if isinstance(error, WorkerError) and lines else error.message


_MESSAGES = "/v1/messages"
# By status; others are `invalid_request_error` below 500, and `api_error` from there on.
_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error_body(error: OutriderError) -> dict[str, Any]:
    """Returns the error's body in Anthropic's form, with the field's name added."""
    usual = "invalid_request_error" if error.status < 500 else "api_error"
    shown = error_body(error)["error"]
    shown["type"] = _MESSAGES_KINDS.get(error.status, usual)
    return {"type": "error", "error": shown}


_MAX_CHARS = 4096


def _sendable(text: str) -> str:
    """Shortens a long text and escapes lone surrogates, which have no UTF-8 encoding."""
    shown = text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")


def error_response(error: OutriderError, path: str) -> Response:
    """Returns the response to an error at `path`; some errors include `Retry-After`."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, (BodyEncodingError, BodyTimeoutError, BodyTooLargeError)):
        headers["Connection"] = "close"  # the rest of the body is not read
    body = messages_error_body(error) if _MESSAGES in path else error_body(error)
    return JSONResponse(body, status_code=error.status, headers=headers)


async def _on_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, OutriderError)
    if _told(error) != error.message:
        log.error("%s %s failed: %s", request.method, request.url.path, error.message)
    return error_response(error, request.url.path)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    wrapped = OutriderError(f"{request.method} {request.url.path}: {error.detail}")
    wrapped.kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    wrapped.status = error.status_code
    response = error_response(wrapped, request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _on_any(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(
        OutriderError(f"internal error: {type(error).__name__}"), request.url.path
    )


# Exception handlers of an application, which convert every error to OpenAI's form.
HANDLERS = {OutriderError: _on_ours, HTTPException: _on_http, Exception: _on_any}
