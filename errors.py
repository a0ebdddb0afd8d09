"""Typed errors. Each names the field at fault, the value it had and what is allowed.

At the edge they become OpenAI-shaped HTTP errors or, on the command line, a message of one screen.
"""

from __future__ import annotations

from typing import Any, TypeVar

Error = TypeVar("Error", bound="OutriderError")


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose."""

    status = 500  # HTTP status at the edge
    kind = "server_error"  # OpenAI's `error.type`

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    @classmethod
    def at(cls: type[Error], field: str, reason: str) -> Error:
        """An error whose message begins with its field."""
        return cls(f"{field}: {reason}", field=field)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.field))


def _rebuild(cls: type[OutriderError], message: str, field: str | None) -> OutriderError:
    error = cls.__new__(cls)
    OutriderError.__init__(error, message, field=field)
    return error


class ConfigError(OutriderError):
    """A setting is unknown, out of range, or contradicts another."""

    status = 400
    kind = "invalid_config_error"

    def below(self, section: str) -> ConfigError:
        """The same of a key of `section`, which gives the place of what was read alone."""
        return ConfigError(f"{section}.{self.message}", field=f"{section}.{self.field}")


class InvalidRequestError(OutriderError):
    """A request's field is missing, malformed or out of range."""

    status = 400
    kind = "invalid_request_error"


class PromptTooLongError(InvalidRequestError):
    """The prompt, or the prompt and `max_tokens` together, exceed the context."""

    status = 400


class ModelNotFoundError(OutriderError):
    """The request names a model that is not served here."""

    status = 404
    kind = "not_found_error"


class AuthenticationError(OutriderError):
    """A request has no API key, or one that is not known."""

    status = 401
    kind = "invalid_request_error"


class PermissionDeniedError(OutriderError):
    """The request's API key does not allow what it asks for."""

    status = 403
    kind = "permission_error"


class RequestTimeoutError(OutriderError):
    """A request took longer than it, or the server, allows; it has been aborted."""

    status = 504
    kind = "timeout_error"


class CheckpointError(ConfigError):
    """A checkpoint is missing, truncated, or does not fit its configuration: the target's, unless
    another field is named."""

    def __init__(self, message: str, *, field: str | None = "model") -> None:
        super().__init__(message, field=field)


class PoolSnapshotError(ConfigError):
    """A saved n-gram pool is damaged, of another version, or of another tokenizer."""


class ResourcesError(ConfigError):
    """The cluster cannot give the CPUs, GPUs or memory that were asked for."""

    status = 503


class OverloadedError(OutriderError):
    """The queue is full; try again after `retry_after_s`."""

    status = 429
    kind = "rate_limit_error"
    retry_after_s = 1.0


class WorkerError(OutriderError):
    """A worker raised inside a step; the requests of that step fail."""


class StepMemoryError(WorkerError):
    """A rank ran out of memory in a step; its requests are computed again in smaller steps."""


class WorkerDiedError(WorkerError):
    """A worker's process is gone; its group is started afresh and the requests are replayed."""


class EngineDeadError(OutriderError):
    """The engine could not recover; the message says why."""

    status = 503
    kind = "server_error"


class InternalError(OutriderError):
    """A fault of the server that cost one request; the log has the traceback."""


class TableFileError(ConfigError):
    """An n-gram table's file is missing, damaged, or made with another tokenizer."""
