"""User: a drafter by import path, run in a thread of its own so that it can harm nothing.

The simplest is a class with one method, `draft(token_ids, max_tokens) -> token ids`; one with
`propose` is taken for a full `Drafter`, which may draft trees. TensorRT-LLM's hooks of a
user-provided drafter are `prepare(request)` and `free(request_id)` here.

Each call has a deadline. While a call overruns it, steps go on without the drafter; what it missed
meanwhile is not replayed: a full drafter's requests are closed and opened again with the tokens
they have then; the simplest kind is handed all tokens with every call anyway.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..config import UserConfig
from ..scheduler import tree
from ..scheduler.sequence import TokenBuffer
from ..scheduler.types import Batch, Draft, IntArray, Request, Verdict
from .protocol import Drafter, DraftFault, Needs
from .readonly import readonly
from .user_load import check_full, make, misfit, takes, wrong


class User:
    """Calls the user's drafter, and gets along without it.

    Raises:
        ConfigError: it cannot be imported or made, or lacks what a drafter has.
    """

    def __init__(self, config: UserConfig) -> None:
        made = make(config)
        default = config.drafter.rpartition(":")[2].rpartition(".")[2].lower()
        self.name: str = getattr(made, "name", default)
        self.needs: Needs = getattr(made, "needs", Needs())
        if not isinstance(self.name, str) or not isinstance(self.needs, Needs):
            raise wrong(config.drafter, "`name` must be a str and `needs` a `Needs`")
        self._drafter: Drafter
        if hasattr(made, "propose"):
            check_full(made, config.drafter)
            self._drafter = made
        else:
            self._drafter = _Simple(made, self.name, config.drafter)
        self._timeout_s = config.timeout_s
        self._helper = _Helper(f"outrider-{self.name}")
        self._open: dict[str, tuple[Request, TokenBuffer]] = {}
        self._told: set[str] = set()  # requests that the drafter was told of
        self._missed = False  # it overran a deadline and does not know what happened since

    def open(self, requests: Sequence[Request]) -> None:
        shown = [readonly(request) for request in requests]
        for request in shown:
            self._open[request.id] = (request, TokenBuffer(request.prompt, request.emitted))
        if self._ready():
            self._told.update(request.id for request in shown)
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
            shown, said = readonly(batch), readonly(verdict)
            self._call("observe", lambda: self._drafter.observe(shown, said))

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)
        if not self._missed:
            self._told.difference_update(request_ids)
            self._call("close", lambda: self._drafter.close(list(request_ids)))

    def shutdown(self) -> None:
        try:
            if not self._helper.busy:
                self._call("shutdown", self._drafter.shutdown)
        finally:
            self._helper.stop()

    def _ready(self) -> bool:
        """Whether the drafter can be asked; one that is back is told where things stand."""
        if self._missed and not self._helper.busy:
            told, self._told = list(self._told), set(self._open)
            now = [
                readonly(replace(request, emitted=tokens.view[len(request.prompt) :].copy()))
                for request, tokens in self._open.values()
            ]
            self._missed = False
            self._call("open", lambda: _catch_up(self._drafter, told, now))
        return not self._missed

    def _call(self, verb: str, call: Callable[[], Any]) -> Any:
        """What the drafter returns, or raises, within its deadline."""
        outcome = self._helper.run(call, self._timeout_s)
        if outcome is None:
            self._missed = True
            raise TimeoutError(
                f"{self.name}.{verb} took more than {self._timeout_s} s (timeout_s); the engine "
                "goes on without it until it returns"
            )
        result, error = outcome
        if isinstance(error, DraftFault):
            raise error
        if error is not None:
            raise DraftFault(f"{self.name}.{verb} raised {type(error).__name__}") from error
        return result


def _catch_up(drafter: Drafter, told: list[str], now: list[Request]) -> None:
    """Brings a drafter that knew of `told` to what is open `now`."""
    if isinstance(drafter, _Simple):
        drafter.catch_up(now)
        return
    try:
        drafter.close(told)
    finally:
        drafter.open(now)


class _Helper:
    """A thread that runs one call at a time; a call that hangs hangs there."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], list[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        self._late = 0  # calls that were given up and are still to be heard of
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a call that was given up still runs."""
        while self._late and self._done.acquire(blocking=False):
            self._late -= 1
        return self._late > 0

    def run(
        self, call: Callable[[], Any], timeout_s: float
    ) -> tuple[Any, BaseException | None] | None:
        """The call's result and what it raised; None if it takes longer."""
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


class _Simple:
    """A drafter around an object with `draft`, and perhaps `prepare` and `free`."""

    def __init__(self, drafter: Any, name: str, path: str) -> None:
        if not callable(getattr(drafter, "draft", None)):
            raise wrong(
                path, "it has neither `draft(token_ids, max_tokens)` nor a full drafter's `propose`"
            )
        self._with_id = takes(drafter.draft, "token_ids", "max_tokens", keyword="request_id")
        if not self._with_id and not takes(drafter.draft, "token_ids", "max_tokens"):
            raise wrong(path, misfit("draft", drafter.draft, ("token_ids", "max_tokens")))
        for hook, argument in (("prepare", "request"), ("free", "request_id")):
            if hasattr(drafter, hook) and not takes(getattr(drafter, hook), argument):
                raise wrong(path, misfit(hook, getattr(drafter, hook), (argument,)))
        self._drafter = drafter
        self._tokens: dict[str, list[int]] = {}
        self.name = name
        self.needs = Needs()

    def catch_up(self, now: Sequence[Request]) -> None:
        """What is open and its tokens; `prepare` and `free` are called for news only."""
        gone = self._tokens.keys() - {request.id for request in now}
        news = [request for request in now if request.id not in self._tokens]
        for request in now:
            self._tokens[request.id] = [*request.prompt.tolist(), *request.emitted.tolist()]
        try:
            self.close(list(gone))
        finally:
            self.open(news)

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._tokens[request.id] = [*request.prompt.tolist(), *request.emitted.tolist()]
        if hasattr(self._drafter, "prepare"):
            _call_all(self._drafter.prepare, requests)

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
            raise TypeError(f"draft must return a list of token ids, not {guess!r}")
        if ids.size and not (ids.min() >= 0 and ids.max() < 2**31):
            raise ValueError(f"draft returned what are no token ids: {guess!r}")
        return tree.chain(ids, self.name) if ids.size else tree.EMPTY


def _call_all(hook: Callable[[Any], Any], arguments: Sequence[Any]) -> None:
    """Calls the hook for each, also after one for which it raised; then raises the first's."""
    first: BaseException | None = None
    for argument in arguments:
        try:
            hook(argument)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001, raised below
            first = first or error
    if first is not None:
        raise first
