"""The gate before every route: keys, rate limits, deadlines, CORS.

What is not listed here needs an administrator's key, so that a new route is closed until somebody
opens it. Pure ASGI: nothing between a stream and its socket.
"""

from __future__ import annotations

import math

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ....errors import InvalidRequestError, OutriderError, PermissionDeniedError
from ..openai.errors import error_response
from .access import Access, Call, Identity, answering

# Without a key: readiness, and what tells nothing about the server's users.
_OPEN = frozenset({"/health", "/ping", "/version", "/", "/docs", "/openapi.json"})
_OPEN_BELOW = ("/page/",)
_CLIENTS = frozenset({"/tokenize", "/detokenize"})
_CLIENTS_BELOW = ("/v1/",)
_ADMINS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})  # vLLM's names
_MONITORING = frozenset({"/stats", "/metrics", "/load"})  # read by Prometheus, and by the live view
TIMEOUT_HEADER = "x-request-timeout-seconds"  # Ray Serve's own name for it
# Serve's proxy counts the same seconds from a little earlier, and would answer first, with 408.
_MOST_AHEAD_S, _SHARE_AHEAD = 0.1, 0.1


class AccessGate:
    """Lets requests through to `app` that `access` allows."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._cors: tuple[list[str], ASGIApp] = ([], self._checked)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._outermost()(scope, receive, send)

    def _outermost(self) -> ASGIApp:
        """The check, behind CORS where origins are allowed; these may change at any time."""
        origins = self._access.config.cors_allowed_origins
        if origins != self._cors[0]:
            app: ASGIApp = self._checked
            if origins:
                app = CORSMiddleware(
                    app,
                    allow_origins=origins,
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                    expose_headers=["Retry-After", "X-Request-ID"],
                )
            self._cors = (origins, app)
        return self._cors[1]

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            path = route_below(scope)
            if path in _OPEN or path.startswith(_OPEN_BELOW):
                identity = Identity("", tenant="", is_admin=False, may_monitor=False)
            else:
                identity = self._access.identify(_authorization(headers))
                _check_path(path, identity)
            timeout_s = _timeout(headers)
            counted = scope["method"] == "POST"
            if counted:
                identity.usage.begin()
        except OutriderError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        try:
            with answering(Call(identity, timeout_s, self._access.config.log_prompts)):
                await self._app(scope, receive, send)
        finally:
            if counted:
                identity.usage.end()


def _authorization(headers: Headers) -> str | None:
    """The header with the key; Anthropic's clients send it as `x-api-key`."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (None if key is None else f"Bearer {key}")


def route_below(scope: Scope) -> str:
    """The path below the application's prefix."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    below = root and (path == root or path.startswith(root + "/"))
    return path[len(root) :] or "/" if below else path


def _check_path(path: str, identity: Identity) -> None:
    """Raises `PermissionDeniedError` for what the key does not open."""
    if identity.is_admin or path in _CLIENTS:
        return
    if path.startswith(_CLIENTS_BELOW) and path not in _ADMINS:
        return
    if identity.may_monitor and path in _MONITORING:
        return
    raise PermissionDeniedError(f"{path} needs an administrator's key (access.admin_keys)")


def _timeout(headers: Headers) -> float | None:
    """The seconds that the client gives its request, up to Serve's answer; None: any number."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not math.isfinite(timeout_s):
        raise InvalidRequestError.at(TIMEOUT_HEADER, f"a number of seconds (got {given[:32]!r})")
    if timeout_s <= 0:  # as Ray Serve reads it
        return None
    return timeout_s - min(_MOST_AHEAD_S, _SHARE_AHEAD * timeout_s)
