"""User: a drafter given by import path, run in a separate thread.

The simplest kind is a class with one method, `draft(token_ids, max_tokens) -> token ids`; a class
with `propose` is used as a full `Drafter`, which may draft trees. `prepare(request)` and
`free(request_id)` correspond to TensorRT-LLM's hooks of a user-provided drafter.

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
from dataclasses import fields, is_dataclass, replace
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
    """Imports the user's class; raises `ConfigError` where there is none."""
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
    """Imports the user's class and constructs it with its options."""
    found = find(config)
    try:
        return found(**config.options)
    except Exception as error:
        raise ConfigError.at(
            "speculative_config.options",
            f"{config.drafter}(**{config.options!r}) raised {type(error).__name__}: {error}",
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
    """Whether the method accepts these arguments, in this order."""
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
    """The error for a drafter that cannot be used."""
    return ConfigError.at(_FIELD, f"{path}: {reason}")


T = TypeVar("T")


def readonly(value: T) -> T:
    """`value` with read-only views of its arrays; other mutable parts are copied.

    The same arrays are sent to the target's workers, so a write would change what is computed and
    emitted; with these views it raises inside the user's drafter.
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
        default = config.drafter.rpartition(":")[2].rpartition(".")[2].lower()
        self.name = getattr(made, "name", default)
        self.needs = getattr(made, "needs", Needs())
        if not isinstance(self.name, str) or not isinstance(self.needs, Needs):
            raise wrong(config.drafter, "`name` must be a str and `needs` a `Needs`")
        self._drafter: Drafter
        if hasattr(made, "propose"):
            check_full(made, config.drafter)
            self._drafter = made
        else:
            self._drafter = _Simple(made, self.name, config.drafter)
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
        """Whether the drafter can be called; reopens its requests after a missed deadline."""
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
    if isinstance(drafter, _Simple):  # its hooks are for those that came or went
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
        """The call's result and its exception; None if it takes longer than `timeout_s`."""
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
        if guess is None:
            return tree.EMPTY
        ids = np.asarray(guess)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise TypeError(f"draft must return a list of token ids, got {guess!r}")
        if ids.size and not (ids.min() >= 0 and ids.max() < 2**31):
            raise ValueError(f"draft returned values that are not token ids: {guess!r}")
        return tree.chain(ids, self.name) if ids.size else tree.EMPTY


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
