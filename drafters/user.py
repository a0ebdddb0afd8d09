"""User: a drafter given by import path or as an object, run in a separate thread.

The simplest kind is a class with one method, `draft(token_ids, max_tokens) -> token ids`; a class
with `propose` is used as a full `Drafter`, which may draft trees. One with `prepare_draft_tokens`
is TensorRT-LLM's (`tensorrt_llm/_torch/speculative/drafter.py`): it sets `py_draft_tokens` of the
requests of a step.

Each call has a deadline. While a call overruns it, steps run without the drafter. Missed steps are
not replayed: a full drafter's requests are closed and opened again with their current tokens; the
simple kind receives all tokens with every call.
"""

from __future__ import annotations

import importlib
import inspect
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel

from ..config import UserConfig
from ..errors import ConfigError
from ..scheduler import tree
from ..scheduler.sequence import TokenBuffer
from ..scheduler.types import Batch, Draft, IntArray, Request, Verdict
from .protocol import Drafter, DraftFault, Needs

_FIELD = "speculative_config.drafter"
_VERBS = {  # methods of a full drafter and their arguments
    verb: tuple(inspect.signature(getattr(Drafter, verb)).parameters)[1:]
    for verb in ("open", "propose", "observe", "close", "shutdown")
}


def find(config: UserConfig) -> Any:
    """Returns the user's class or object; raises `ConfigError` if it cannot be imported."""
    if not isinstance(config.drafter, str):
        return config.drafter
    module_name, _, attribute = config.drafter.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise wrong(config.drafter, f"{error}") from error
    except Exception as error:
        raise wrong(
            config.drafter,
            f"the import raised {type(error).__name__}: {error}. Is the module on PYTHONPATH?",
        ) from error
    if not callable(found):
        raise wrong(config.drafter, f"expected a class, got {found!r}")
    return found


def make(config: UserConfig) -> Any:
    """Builds the user's drafter: a class is constructed with its options."""
    found = find(config)
    if not isinstance(config.drafter, str | type):
        return found
    try:
        return found(**config.options)
    except Exception as error:
        raise ConfigError.at(
            "speculative_config.options",
            f"{config.path}(**{config.options!r}) raised {type(error).__name__}: {error}",
        ) from error


def check_full(drafter: Any, path: str) -> None:
    """Raises `ConfigError` unless the object has every method of `Drafter`."""
    for verb, arguments in _VERBS.items():
        method = getattr(drafter, verb, None)
        if not callable(method):
            raise wrong(
                path,
                f"a drafter with `propose` needs all methods, but this one lacks `{verb}` "
                "(a drafter with only `draft` needs no other)",
            )
        _check_arguments(path, verb, method, arguments)


def takes(method: Callable[..., Any], *arguments: str, keyword: str | None = None) -> bool:
    """Returns True if the method accepts these arguments, in this order."""
    try:
        inspect.signature(method).bind(*arguments, **({keyword: ""} if keyword else {}))
    except TypeError:
        return False
    except ValueError:  # compiled, without a readable signature
        return keyword is None
    return True


def _check_arguments(
    path: str, verb: str, method: Callable[..., Any], arguments: Sequence[str]
) -> None:
    if not takes(method, *arguments):
        call = f"`{verb}({', '.join(arguments)})`"
        raise wrong(path, f"`{verb}{inspect.signature(method)}` cannot be called as {call}")


def wrong(path: str, reason: str) -> ConfigError:
    """Returns the error for a drafter that cannot be used."""
    return ConfigError.at(_FIELD, f"{path}: {reason}")


T = TypeVar("T")


def readonly(value: T) -> T:
    """Returns `value` with read-only views of its arrays; other mutable parts are copied.

    The same arrays are sent to the target's workers, so a write would change what is computed and
    emitted; with these views, it raises inside the user's drafter.
    """
    shown: Any = value
    if value is None or isinstance(value, (str, int, float)):
        return value  # the most frequent case
    if isinstance(value, np.ndarray):
        shown = value.view()
        shown.flags.writeable = False
    elif isinstance(value, tuple):
        shown = tuple(map(readonly, value))
    elif isinstance(value, BaseModel):
        shown = value.model_copy(deep=True)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [readonly(getattr(value, field.name)) for field in fields(value)]
        shown = type(value)(*parts)
    return shown


class User(Drafter):
    """Calls the user's drafter with a deadline and tolerates its failure.

    Raises:
        ConfigError: the class cannot be imported or constructed, or lacks a method.
    """

    def __init__(self, config: UserConfig) -> None:
        made = make(config)
        default = config.path.rpartition(":")[2].rpartition(".")[2].lower()
        self.name = getattr(made, "name", default)
        self.needs = getattr(made, "needs", Needs())
        if not isinstance(self.name, str) or not isinstance(self.needs, Needs):
            raise wrong(config.path, "`name` must be a str and `needs` a `Needs`")
        self._drafter: Drafter
        if hasattr(made, "prepare_draft_tokens"):
            self._drafter = _Prepared(made, config.resource_manager, self.name, config.path)
        elif config.resource_manager is not None:
            raise ConfigError.at(
                "speculative_config.resource_manager",
                f"{config.path} has no `prepare_draft_tokens`, which it is for",
            )
        elif hasattr(made, "propose"):
            check_full(made, config.path)
            self._drafter = made
        else:
            self._drafter = _Simple(made, self.name, config.path)
        self._timeout_s = config.timeout_s
        self._runner = _Runner(f"outrider-{self.name}")
        self._open: dict[str, tuple[Request, TokenBuffer]] = {}
        self._opened: set[str] = set()  # requests that were opened in the drafter
        self._missed = False  # a deadline was missed: the drafter's state is out of date

    def open(self, requests: Sequence[Request]) -> None:
        shown = [readonly(request) for request in requests]
        for request in shown:
            self._open[request.id] = (request, TokenBuffer(request.prompt, request.emitted))
        if self._ready():
            self._opened.update(request.id for request in shown)
            self._call("open", lambda: self._drafter.open(shown))

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        if not self._ready():
            return [tree.EMPTY] * batch.num_seqs
        shown, own = readonly(batch), budgets.copy()
        return self._call("propose", lambda: self._drafter.propose(shown, own))

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        for row, request_id in enumerate(batch.request_ids):
            if request_id in self._open:
                self._open[request_id][1].extend(verdict.tokens(row))
        if not self._missed:
            shown, outcome = readonly(batch), readonly(verdict)
            self._call("observe", lambda: self._drafter.observe(shown, outcome))

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)
        if not self._missed:
            self._opened.difference_update(request_ids)
            self._call("close", lambda: self._drafter.close(list(request_ids)))

    def shutdown(self) -> None:
        try:
            if not self._runner.busy:
                self._call("shutdown", self._drafter.shutdown)
        finally:
            self._runner.stop()

    def _ready(self) -> bool:
        """Returns True if the drafter can be called; first reopens its requests if necessary."""
        if self._missed and not self._runner.busy:
            opened, self._opened = list(self._opened), set(self._open)
            now = [
                readonly(replace(request, emitted=tokens.view[len(request.prompt) :].copy()))
                for request, tokens in self._open.values()
            ]
            self._missed = False
            self._call("open", lambda: _reopen(self._drafter, opened, now))
        return not self._missed

    def _call(self, verb: str, call: Callable[[], Any]) -> Any:
        """Returns the drafter's result or raises its exception, within the deadline."""
        outcome = self._runner.run(call, self._timeout_s)
        if outcome is None:
            self._missed = True
            raise TimeoutError(
                f"{self.name}.{verb} took more than {self._timeout_s} s (timeout_s); steps run "
                "without its drafts until it returns"
            )
        result, error = outcome
        if isinstance(error, DraftFault):
            raise error
        if error is not None:
            raise DraftFault(f"{self.name}.{verb} raised {type(error).__name__}") from error
        return result


def _reopen(drafter: Drafter, opened: list[str], now: list[Request]) -> None:
    """Replaces the drafter's `opened` requests by those open `now`."""
    if isinstance(drafter, _Simple | _Prepared):  # hooks are only for new and ended requests
        still = {request.id for request in now}
        opened = [each for each in opened if each not in still]
    try:
        drafter.close(opened)
    finally:
        drafter.open(now)


class _Runner:
    """A thread that runs one call at a time, so that a hanging call blocks only this thread."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], list[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        self._late = 0  # calls past their deadline that have not returned
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a call past its deadline still runs."""
        while self._late and self._done.acquire(blocking=False):
            self._late -= 1
        return self._late > 0

    def run(
        self, call: Callable[[], Any], timeout_s: float
    ) -> tuple[Any, BaseException | None] | None:
        """Returns the call's result and its exception; None if it takes longer than `timeout_s`."""
        assert not self.busy, "one call at a time"
        outcome: list[Any] = []
        self._calls.put((call, outcome))
        if not self._done.acquire(timeout=timeout_s):
            self._late += 1
            return None
        return outcome[0], outcome[1]

    def stop(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, outcome = item
            try:
                outcome += [call(), None]
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001, told to the loop
                outcome += [None, error]
            self._done.release()


class _Simple(Drafter):
    """Adapts an object with `draft`, and optionally `prepare` and `free`, to `Drafter`."""

    def __init__(self, drafter: Any, name: str, path: str) -> None:
        if not callable(getattr(drafter, "draft", None)):
            raise wrong(path, "it has neither `draft(token_ids, max_tokens)` nor `propose`")
        self._with_id = takes(drafter.draft, "token_ids", "max_tokens", keyword="request_id")
        if not self._with_id:
            _check_arguments(path, "draft", drafter.draft, ("token_ids", "max_tokens"))
        for hook, argument in (("prepare", "request"), ("free", "request_id")):
            if hasattr(drafter, hook):
                _check_arguments(path, hook, getattr(drafter, hook), (argument,))
        self._drafter = drafter
        self._tokens: dict[str, list[int]] = {}
        self.name = name

    def open(self, requests: Sequence[Request]) -> None:
        added = [request for request in requests if request.id not in self._tokens]
        for request in requests:
            self._tokens[request.id] = [*request.prompt.tolist(), *request.emitted.tolist()]
        if hasattr(self._drafter, "prepare"):
            _call_all(self._drafter.prepare, added)

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        drafts = [tree.EMPTY] * batch.num_seqs
        first: BaseException | None = None
        for row, budget in enumerate(budgets.tolist()):
            tokens = self._tokens.get(batch.request_ids[row])
            if budget <= 0 or tokens is None:
                continue
            try:
                drafts[row] = self._draft(batch.request_ids[row], tokens, budget)
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001, raised below
                first = first or error
        if first is not None:
            raise DraftFault(f"draft raised {type(first).__name__}", drafts) from first
        return drafts

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        for row, request_id in enumerate(batch.request_ids):
            if request_id in self._tokens:
                self._tokens[request_id] += verdict.tokens(row).tolist()

    def close(self, request_ids: Sequence[str]) -> None:
        known = [each for each in request_ids if self._tokens.pop(each, None) is not None]
        if hasattr(self._drafter, "free"):
            _call_all(self._drafter.free, known)

    def shutdown(self) -> None:
        if hasattr(self._drafter, "shutdown"):
            self._drafter.shutdown()

    def _draft(self, request_id: str, tokens: list[int], budget: int) -> Draft:
        more = {"request_id": request_id} if self._with_id else {}
        guess = self._drafter.draft(list(tokens), budget, **more)
        return _chain(guess, "draft must return", self.name)


def _chain(guess: Any, what: str, name: str, most: int | None = None) -> Draft:
    """Converts a user's token ids to a draft of up to `most` tokens; raises if invalid."""
    if guess is None:
        return tree.EMPTY
    ids = np.asarray(guess)[:most] if most is not None else np.asarray(guess)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(f"{what} a list of token ids, got {guess!r}")
    if ids.size and not (ids.min() >= 0 and ids.max() < 2**31):
        raise ValueError(f"{what} token ids, got {guess!r}")
    return tree.chain(ids, name) if ids.size else tree.EMPTY


class LlmRequest:
    """A request with TensorRT-LLM's names; a drafter sets `py_draft_tokens`."""

    def __init__(self, number: int, request: Request) -> None:
        self.request_id = self.py_request_id = number
        self.py_batch_idx: int | None = None
        self.py_prompt_len = self.py_orig_prompt_len = len(request.prompt)
        self.py_max_new_tokens = request.sampling.max_tokens
        self.py_draft_tokens: Any = []
        self.py_num_accepted_draft_tokens = self.py_rewind_len = 0
        self.speculation = request.speculation
        self.tokens = [*request.prompt.tolist(), *request.emitted.tolist()]

    def get_tokens(self, beam: int = 0) -> list[int]:
        """Returns the prompt and all tokens so far."""
        return list(self.tokens)

    def get_last_tokens(self, beam: int = 0) -> int:
        return self.tokens[-1]

    def get_num_tokens(self, beam: int = 0) -> int:
        return len(self.tokens)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(each for each in [*vars(self), *vars(type(self))] if each[:1] != "_")
        raise AttributeError(f"requests have no {name!r} here; there are {known}")


@dataclass(frozen=True, slots=True)
class ScheduledRequests:
    """The requests of a step: those that may have a draft, and the others."""

    context_requests: list[LlmRequest]
    generation_requests: list[LlmRequest]

    @property
    def batch_size(self) -> int:
        return len(self.context_requests) + len(self.generation_requests)

    def all_requests(self) -> list[LlmRequest]:
        return [*self.context_requests, *self.generation_requests]


class _Prepared(Drafter):
    """Adapts TensorRT-LLM's `prepare_draft_tokens`, and the hooks of a resource manager."""

    def __init__(self, drafter: Any, manager: Any, name: str, path: str) -> None:
        prepare, verb = drafter.prepare_draft_tokens, "prepare_draft_tokens"
        with_manager = takes(prepare, "scheduled_requests", "resource_manager")
        if not with_manager:
            _check_arguments(path, verb, prepare, ("scheduled_requests",))
        self._more = (manager,) if with_manager else ()
        self._drafter, self._manager = drafter, manager
        self._requests: dict[str, LlmRequest] = {}
        self._scheduled: ScheduledRequests | None = None  # of the step that runs
        self._num_opened = 0
        self.name = name

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            known = self._requests.get(request.id)
            if known is None:
                self._num_opened += 1
                self._requests[request.id] = LlmRequest(self._num_opened, request)
            else:
                known.tokens = [*request.prompt.tolist(), *request.emitted.tolist()]

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        scheduled = ScheduledRequests([], [])
        rows: dict[int, tuple[LlmRequest, int]] = {}
        for row, budget in enumerate(budgets.tolist()):
            request = self._requests.get(batch.request_ids[row])
            if request is None:
                continue
            request.py_batch_idx, request.py_draft_tokens = row, []
            if budget > 0:
                scheduled.generation_requests.append(request)
                rows[row] = (request, budget)
            else:
                scheduled.context_requests.append(request)
        self._scheduled = scheduled
        self._hook("prepare_resources", scheduled)
        if rows:
            self._drafter.prepare_draft_tokens(scheduled, *self._more)
        drafts = [tree.EMPTY] * batch.num_seqs
        for row, (request, budget) in rows.items():
            what = "py_draft_tokens must be"
            drafts[row] = _chain(request.py_draft_tokens, what, self.name, budget)
            request.py_draft_tokens = drafts[row].tokens.tolist()
        return drafts

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        for row, request_id in enumerate(batch.request_ids):
            request = self._requests.get(request_id)
            if request is not None and (emitted := verdict.tokens(row).tolist()):
                drafted = request.py_draft_tokens
                request.tokens += emitted
                request.py_num_accepted_draft_tokens = min(len(emitted) - 1, len(drafted))
                request.py_rewind_len = len(drafted) - request.py_num_accepted_draft_tokens
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is not None:
            self._hook("update_resources", scheduled)

    def close(self, request_ids: Sequence[str]) -> None:
        closed = [self._requests.pop(each, None) for each in request_ids]
        known = [each for each in closed if each is not None]
        _call_all(lambda request: self._hook("free_resources", request), known)

    def shutdown(self) -> None:
        self._hook("shutdown")
        if hasattr(self._drafter, "shutdown"):
            self._drafter.shutdown()

    def _hook(self, name: str, *arguments: Any) -> None:
        if (hook := getattr(self._manager, name, None)) is not None:
            hook(*arguments)


def _call_all(hook: Callable[[Any], Any], arguments: Sequence[Any]) -> None:
    """Calls the hook for every argument, then raises the first exception, if any."""
    first: BaseException | None = None
    for argument in arguments:
        try:
            hook(argument)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001, raised below
            first = first or error
    if first is not None:
        raise first
