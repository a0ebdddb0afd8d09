"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import math
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....errors import (
    AuthenticationError,
    EngineDeadError,
    ModelNotFoundError,
    OutriderError,
    OverloadedError,
    PermissionDeniedError,
    PromptTooLongError,
)

log = logging.getLogger(__name__)

_CODES: dict[type[OutriderError], str] = {
    PromptTooLongError: "context_length_exceeded",
    ModelNotFoundError: "model_not_found",
    OverloadedError: "rate_limit_exceeded",
    EngineDeadError: "engine_dead",
    AuthenticationError: "invalid_api_key",
    PermissionDeniedError: "permission_denied",
}


class BodyTooLargeError(OutriderError):
    """The request's body exceeds the server's limit."""

    status = 413
    kind = "invalid_request_error"


class BodyTimeoutError(OutriderError):
    """The request's body did not arrive in time."""

    status = 408
    kind = "timeout_error"


class ClientGoneError(OutriderError):
    """The client hung up; nobody reads the answer."""

    status = 499


def error_body(error: OutriderError) -> dict[str, Any]:
    """What OpenAI's clients expect in an error's body."""
    return {
        "error": {
            "message": _sendable(error.message),
            "type": error.kind,
            "param": error.field and _sendable(error.field),
            "code": next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None),
        }
    }


def _sendable(text: str) -> str:
    """Half of a surrogate pair, quoted from a request, has no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def error_response(error: OutriderError) -> Response:
    """The whole answer; overload says when to come back."""
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, (BodyTimeoutError, BodyTooLargeError)):
        headers["Connection"] = "close"  # the rest of the body is not read
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def install(app: Starlette) -> None:
    """Makes every error of `app` one of OpenAI's shape."""

    async def on_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, OutriderError)
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        wrapped = OutriderError(f"{request.method} {request.url.path}: {error.detail}")
        wrapped.kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        return JSONResponse(
            error_body(wrapped), status_code=error.status_code, headers=error.headers
        )

    async def on_any(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(OutriderError(f"internal error: {type(error).__name__}"))

    app.add_exception_handler(OutriderError, on_ours)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_any)
