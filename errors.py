"""Typed errors. Each names the field at fault, the value it had and what is allowed.

At the edge they become OpenAI-shaped HTTP errors or, on the command line, a message of one screen.
"""

from __future__ import annotations

import copy
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

Error = TypeVar("Error", bound="OutriderError")

# By pydantic's kind of complaint: what it expected.
_EXPECTED = {
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type", "dataclass_type"), "a mapping"
    ),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    "finite_number": "a finite number",
    "string_type": "a string",
    "path_type": "a path",
}
# The same for limits: where its context has the limit, and the words before it.
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def in_words(complaint: Mapping[str, Any]) -> str:
    """What one of pydantic's complaints (`ValidationError.errors()`) says, without Python's types.

    Neither the field nor the value is part of it.
    """
    kind, context = complaint["type"], complaint.get("ctx", {})
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{words} {context[name]}"
    if kind == "missing":
        return "it is required"
    if kind == "extra_forbidden":
        return "unknown field"
    if kind == "none_required":
        return "it is not supported; leave it out"
    if kind == "literal_error":
        return f"expected {context['expected']}"
    if kind == "too_short":
        least = context["min_length"]
        return f"at least {least} {'entry is' if least == 1 else 'entries are'} needed"
    if kind == "too_long":
        return f"at most {context['max_length']} entries"
    if kind == "string_unicode":
        return "it contains half of a surrogate pair, which is not text"
    if kind == "string_too_short" and complaint["input"] == "":
        return "it is empty"
    if kind in ("string_too_short", "string_too_long"):
        bound = next(iter(context.values()))
        return f"at {'most' if kind == 'string_too_long' else 'least'} {bound} characters"
    if kind == "string_pattern_mismatch":
        return f"expected text of the form {context['pattern']}"
    return str(complaint["msg"]).removeprefix("Value error, ")


_MAX_SHOWN = 80  # characters of a user's name or value in a message


def shown_value(value: Any) -> str:
    """`value` in a message: cut where it is long, or nested deeply."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = _MAX_SHOWN
    brief.maxlevel = 3
    return brief.repr(value)


def shortened(name: str) -> str:
    """A field's name in a message: users may write megabytes."""
    return name if len(name) <= _MAX_SHOWN else name[: _MAX_SHOWN - 3] + "..."


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose."""

    status = 500  # HTTP status at the edge
    kind = "server_error"  # OpenAI's `error.type`
    code: str | None = None  # OpenAI's `error.code`
    retry_after_s: float | None = None  # when to come back; None: that would not help

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.others: Sequence[OutriderError] = ()  # found beside this one

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


def renamed(error: Error, names: Sequence[tuple[str, str]]) -> Error:
    """`error` under the user's name for its field, by the first pattern of `names` that matches."""
    for pattern, own in names:
        if error.field is not None and re.match(pattern, error.field):
            found = copy.copy(error)
            found.field = re.sub(pattern, own, error.field)
            found.message = re.sub(pattern, own, error.message)
            found.args = (found.message,)
            return found
    return error


class ConfigError(OutriderError):
    """A setting is unknown, out of range, or contradicts another."""

    status = 400
    kind = "invalid_config_error"


@contextmanager
def below(section: str) -> Iterator[None]:
    """Errors of keys are those of keys of `section`, the place of what is read alone here."""
    try:
        yield
    except ConfigError as error:
        field = f"{section}.{error.field}"
        raise ConfigError(f"{section}.{error.message}", field=field) from None


class InvalidRequestError(OutriderError):
    """A request's field is missing, malformed or out of range."""

    status = 400
    kind = "invalid_request_error"


class PromptTooLongError(InvalidRequestError):
    """The prompt, or the prompt and `max_tokens` together, exceed the context."""

    code = "context_length_exceeded"


class ModelNotFoundError(OutriderError):
    """The request names a model that is not served here."""

    status = 404
    kind = "not_found_error"
    code = "model_not_found"


class AuthenticationError(OutriderError):
    """A request has no API key, or one that is not known."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"


class PermissionDeniedError(OutriderError):
    """The request's API key does not allow what it asks for."""

    status = 403
    kind = "permission_error"
    code = "permission_denied"


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
    code = "rate_limit_exceeded"
    retry_after_s = 1.0


class WorkerError(OutriderError):
    """A worker raised inside a step; the requests of that step fail."""


class GenerationError(WorkerError):
    """A prompt of a batch failed while it ran; `outputs` has what became of every prompt."""

    outputs: Sequence[Any] = ()

    @classmethod
    def of(cls, reason: str, num_failed: int, outputs: Sequence[Any]) -> GenerationError:
        """For `reason`, the first of `num_failed` in `outputs`."""
        more = "" if num_failed == 1 else f" ({num_failed} of {len(outputs)} prompts failed)"
        error = cls(f"{reason}{more}")
        error.outputs = outputs
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return (*super().__reduce__(), {"outputs": self.outputs})


class StepMemoryError(WorkerError):
    """A rank ran out of memory in a step; its requests are computed again in smaller steps."""


class WorkerDiedError(WorkerError):
    """A worker's process is gone; its group is started afresh and the requests are replayed."""


class WorkersReplacedError(WorkerDiedError):
    """The workers were ended or restarted on purpose, and others take their place."""


class EngineDeadError(OutriderError):
    """No engine can run a step: it is being replaced, or could not recover; the message says."""

    status = 503
    retry_after_s = 3.0  # most replacements take less
    code = "engine_dead"
    outputs: Sequence[Any] = ()  # of a batch that it ended, what became of every prompt


class InternalError(OutriderError):
    """A fault of the server that cost one request; the log has the traceback."""


class TableFileError(ConfigError):
    """An n-gram table's file is missing, damaged, or made with another tokenizer."""
