"""`Access`: the access settings of one ingress, which can change at run time.

They come from the deployment's configuration, from `reconfigure`, and from a file of keys, which is
read again when it changes. Running requests keep the settings that they started with.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ....config.access import AccessConfig, KeyConfig, KeysFile, hash_of
from ....config.strict import parse, read_mapping
from ....engine.frontend import RequestOptions
from ....errors import (
    AuthenticationError,
    ConfigError,
    InvalidRequestError,
    OutriderError,
    OverloadedError,
    PermissionDeniedError,
)
from ....scheduler.sampling import SamplingParams
from ..openai.errors import error_response

log = logging.getLogger(__name__)
Clock = Callable[[], float]
_LOOK_EVERY_S = 1.0  # interval of checks whether the file of keys has changed
_OWN_TENANT_DIGITS = 16  # of a key's hash, which form the default tenant of the key
_MINUTE_S = 60.0
_CONCURRENCY_RETRY_S = 1.0


class RateLimitError(OverloadedError):
    """A key's limit is reached; `retry_after_s` is the time until a retry can succeed."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Bucket:
    """A token bucket: its size is also its rate per minute. It starts unlimited."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._size = self._level = math.inf
        self._at_s = clock()

    def resize(self, per_minute: float) -> None:
        """Changes the rate; what was used remains used."""
        self._fill()
        used = 0.0 if math.isinf(self._size) else self._size - self._level
        self._size = per_minute
        self._level = self._size - used

    def take(self, count: float, refusal: str) -> None:
        """Takes `count` units; a count above the bucket's size can be taken when it is full.

        Raises:
            RateLimitError: the bucket has too few units; the message begins with `refusal`.
        """
        self._fill()
        wanted = min(count, self._size)
        if self._level < wanted:
            wait_s = (wanted - self._level) * _MINUTE_S / self._size
            raise RateLimitError(f"{refusal}; try again in {wait_s:.1f} s", retry_after_s=wait_s)
        self._level -= count

    def give_back(self, count: float) -> None:
        """Returns `count` units that were taken but not used."""
        self._level = min(self._size, self._level + count)

    def _fill(self) -> None:
        now = self._clock()
        if not math.isinf(self._size):
            gained = (now - self._at_s) * self._size / _MINUTE_S
            self._level = min(self._size, self._level + gained)
        self._at_s = now


class Usage:
    """The current and recent usage of one key."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._requests, self._tokens = Bucket(clock), Bucket(clock)
        self._most: float = math.inf
        self._num_running = 0

    def limit(self, key: KeyConfig, num_parts: int) -> None:
        """Sets one ingress's equal share of a key's limits; running requests are not affected."""
        self._requests.resize((key.requests_per_minute or math.inf) / num_parts)
        self._tokens.resize((key.tokens_per_minute or math.inf) / num_parts)
        most = key.max_concurrent_requests
        self._most = math.inf if most is None else max(1, most // num_parts)

    def begin(self) -> None:
        """Counts a running request, until `end`.

        Raises:
            RateLimitError: the key has too many running requests, or sends too many.
        """
        if self._num_running >= self._most:
            raise RateLimitError(
                f"this key has {self._num_running} requests running (max_concurrent_requests)",
                retry_after_s=_CONCURRENCY_RETRY_S,
            )
        self._requests.take(1, "this key has sent too many requests (requests_per_minute)")
        self._num_running += 1

    def end(self) -> None:
        """Ends a request that had begun."""
        self._num_running -= 1

    def take_tokens(self, count: int) -> None:
        """Counts tokens that a request may use.

        Raises:
            RateLimitError: the key has used too many.
        """
        self._tokens.take(
            count, f"this key has used too many tokens for {count} more (tokens_per_minute)"
        )

    def give_back_tokens(self, count: int) -> None:
        """Returns tokens that were counted but not used."""
        self._tokens.give_back(count)


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of a key, or anybody if the server has no keys.

    Args:
        key: the key's configuration; None for administrators, and if there are no keys.
        usage: the key's usage.
        tenant: None if requests name their own tenant.
    """

    name: str = ""
    key: KeyConfig | None = None
    usage: Usage = field(default_factory=Usage)
    tenant: str | None = None
    is_admin: bool = True  # may use every route
    may_monitor: bool = True  # may read statistics and metrics

    def options(self, options: RequestOptions) -> RequestOptions:
        """Returns a request's options with the key's tenant.

        Raises:
            PermissionDeniedError: the request names a tenant, or a priority that the key does not
                allow.
        """
        if self.tenant is None:
            return options
        if options.tenant:
            raise PermissionDeniedError.at(
                "cache_salt", "the API key decides the tenant; leave it out"
            )
        best = self.key.min_priority if self.key is not None else options.priority
        if options.priority < best:
            raise PermissionDeniedError.at(
                "priority",
                f"this key's requests have at least {best} (got {options.priority}; "
                "lower values run first)",
            )
        return replace(options, tenant=self.tenant)

    def sampling(
        self, sampling: SamplingParams, num_prompt: int, max_model_len: int
    ) -> SamplingParams:
        """Returns settings within the key's limits; an open `max_tokens` is set to the limit.

        Raises:
            InvalidRequestError: the request exceeds the key's limits.
        """
        if self.key is None:
            return sampling
        limits = (
            (self.key.max_request_tokens, "max_request_tokens"),
            (self.key.tokens_per_minute, "tokens_per_minute"),
        )
        limit, name = min([each for each in limits if each[0] is not None], default=(None, ""))
        if limit is None:
            return sampling
        room = min(limit, max_model_len) - num_prompt
        if sampling.max_tokens is None and room > 0:
            return sampling.model_copy(update={"max_tokens": room})
        num_tokens = num_prompt + (sampling.max_tokens or 1)
        if num_tokens > limit:
            raise InvalidRequestError.at(
                "max_tokens",
                f"prompt and output of {num_tokens} tokens exceed this key's {name} ({limit})",
            )
        return sampling


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request: its sender and its deadline."""

    identity: Identity = field(default_factory=Identity)
    timeout_s: float | None = None  # from its arrival; None: no limit
    log_prompts: bool = False
    arrived_s: float = field(default_factory=time.monotonic)

    def deadline(self, *timeouts_s: float | None) -> float | None:
        """Returns the earliest of its own and the given deadlines, on the monotonic clock."""
        given = [each for each in (self.timeout_s, *timeouts_s) if each is not None]
        return self.arrived_s + min(given) if given else None


_CURRENT: ContextVar[Call] = ContextVar("outrider_call")


def current() -> Call:
    """Returns the HTTP request that is being answered."""
    return _CURRENT.get(None) or Call()


@contextmanager
def answering(call: Call) -> Iterator[None]:
    """Makes `call` the current one, in every task and thread that answers it."""
    token = _CURRENT.set(call)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class Access:
    """Maps keys to identities.

    Args:
        num_ingresses: the ingresses that share a key's limits.

    Raises:
        ConfigError: the file of keys is missing or invalid; names the key.
    """

    def __init__(
        self,
        config: AccessConfig | None = None,
        num_ingresses: int = 1,
        clock: Clock = time.monotonic,
    ) -> None:
        self._num_ingresses = num_ingresses
        self._clock = clock
        self._usages: dict[str, Usage] = {}  # by hash; kept in case a removed key returns
        self._identities: dict[str, Identity] = {}
        self._anybody = Identity()
        self._file_state: tuple[int, int] | None = None
        self._looked_s = clock()
        self.config = AccessConfig()
        self.reconfigure(config or AccessConfig())

    def reconfigure(self, config: AccessConfig) -> None:
        """Replaces the settings; keeps the old ones on an error, which is as the constructor's."""
        state, listed = _state(config.keys_file), _listed(config)
        is_alone = len(listed.keys) == 1 and not listed.admin_keys
        identities = {each.hash: self._identity(each, is_alone) for each in listed.keys}
        own = [] if config.command_key is None else [config.command_key]
        for each in [*listed.admin_keys, *own]:
            identities[each] = Identity("admin", tenant="", usage=Usage(self._clock))
        self._identities, self.config, self._file_state = identities, config, state

    def identify(self, authorization: str | None) -> Identity:
        """Returns the sender of a request with this `Authorization` header.

        Raises:
            AuthenticationError: the server has keys, and the header has none or an unknown one.
        """
        self._look_at_file()
        if not self.config.has_keys:
            return self._anybody
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationError(
                "You didn't provide an API key; send it in an Authorization header "
                "(Authorization: Bearer KEY)"
            )
        found = self._identities.get(hash_of(key))
        if found is None:
            raise AuthenticationError("Incorrect API key provided")
        return found

    def _look_at_file(self) -> None:
        """Reads the file of keys again if it has changed."""
        now = self._clock()
        if self.config.keys_file is None or now - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now
        state = _state(self.config.keys_file)
        if state == self._file_state:
            return
        self._file_state = state
        try:
            self.reconfigure(self.config)
            log.info("%d API keys were read from %s", len(self._identities), self.config.keys_file)
        except ConfigError as error:
            log.error("API keys stay as they were: %s", error.message)

    def _identity(self, key: KeyConfig, may_monitor: bool) -> Identity:
        usage = self._usages.setdefault(key.hash, Usage(self._clock))
        usage.limit(key, self._num_ingresses)
        own = key.hash.partition(":")[2][:_OWN_TENANT_DIGITS]
        tenant = own if key.tenant is None else key.tenant
        name = key.name or tenant
        return Identity(name, key, usage, tenant, is_admin=False, may_monitor=may_monitor)


def _state(path: str | None) -> tuple[int, int] | None:
    """Returns modification time and size of a file; None if there is no file."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _listed(config: AccessConfig) -> KeysFile:
    """Returns the keys of a configuration and of its file."""
    if config.keys_file is None:
        return config
    file = parse(KeysFile, read_mapping(Path(config.keys_file), "access.keys_file"))
    return parse(
        KeysFile,
        {
            "keys": [each.model_dump() for each in [*config.keys, *file.keys]],
            "admin_keys": [*config.admin_keys, *file.admin_keys],
        },
    )


# Routes without a key: readiness, and those that reveal nothing about the server's users.
_OPEN = frozenset({"/health", "/ping", "/version", "/", "/docs", "/openapi.json"})
_OPEN_BELOW = ("/page/",)
_CLIENTS = frozenset({"/tokenize", "/detokenize"})
_CLIENTS_BELOW = ("/v1/",)
_ADMINS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})  # vLLM's names
_MONITORING = frozenset({"/stats", "/metrics", "/load"})  # read by Prometheus and by the live view
TIMEOUT_HEADER = "x-request-timeout-seconds"  # the name that Ray Serve uses
# Serve's proxy starts counting the same seconds earlier, and would otherwise answer first with 408.
_MOST_AHEAD_S, _SHARE_AHEAD = 0.1, 0.1


class AccessGate:
    """Passes requests to `app` if `access` allows them: keys, rate limits, deadlines, CORS.

    Routes that none of these lists names require an administrator's key, so a new route is closed
    by default. The gate is a plain ASGI application and does not buffer streams.
    """

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
        """Returns the check, wrapped in CORS if there are origins, which may change."""
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
            _check_origin(scope["method"], headers, self._access.config.cors_allowed_origins)
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


# Content types that a page may post to any server; for others, the browser sends a preflight.
_UNASKED = frozenset({"", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})


def _check_origin(method: str, headers: Headers, allowed: Sequence[str]) -> None:
    """Raises `PermissionDeniedError` for posts of another origin's page without a preflight.

    The browser would hide the response from the page, but the request would be carried out.
    """
    origin = headers.get("origin")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method != "POST" or origin is None or kind not in _UNASKED or {"*", origin} & {*allowed}:
        return
    own = origin.partition("://")[2] == headers.get("host")
    if not own and headers.get("sec-fetch-site") != "same-origin":
        raise PermissionDeniedError.at(
            "origin", f"pages of {origin[:64]!r} may not call it (access.cors_allowed_origins)"
        )


def _authorization(headers: Headers) -> str | None:
    """Returns the header with the key; Anthropic's clients send `x-api-key` instead."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (None if key is None else f"Bearer {key}")


def route_below(scope: Scope) -> str:
    """Returns the path below the application's prefix."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    below = root and (path == root or path.startswith(root + "/"))
    return path[len(root) :] or "/" if below else path


def _check_path(path: str, identity: Identity) -> None:
    """Raises `PermissionDeniedError` if the key does not allow the path."""
    if identity.is_admin or path in _CLIENTS:
        return
    if path.startswith(_CLIENTS_BELOW) and path not in _ADMINS:
        return
    if identity.may_monitor and path in _MONITORING:
        return
    raise PermissionDeniedError(f"{path} needs an administrator's key (access.admin_keys)")


def _timeout(headers: Headers) -> float | None:
    """Returns the client's timeout, minus the lead over Serve's own response; None: no limit."""
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
