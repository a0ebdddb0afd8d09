"""`ServeClient`: an `EngineClient` over the sockets to engines, with replay.

If an engine is lost, the request is sent to another one together with the tokens already streamed,
so that every token is returned once. A full queue accepts such a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, replace
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from ...engine.outputs import add_usage
from ...engine.statistics import recovery_of
from ...engine.weights import DrafterChange, PauseMode, checked_link
from ...errors import EngineDeadError, OutriderError
from ...scheduler.types import Delta, Request, SpeculationUsage, ints
from ...workers.spec import SentWeights, TrainerLink
from .edge import EdgeLostError, PassedOnError, error_of
from .engines import Engines, Inbox
from .models import UPDATE_TIMEOUT_S, WeightsBoard, WeightsNote
from .openai.engine_client import EngineClient
from .resume_tokens import ResumeTokens, longer

log = logging.getLogger(__name__)
_MAX_LOSSES = 4
_BACKOFF_S = 0.5  # after the second loss; doubled with every further loss
_STATS_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 1.0
_LOST = (EdgeLostError, EngineDeadError)


class ServeClient(EngineClient):
    """Runs requests on `engines`.

    Args:
        edges: handle of all ingresses; None: there are no others.
        board: where engines read the weights to serve; None: the weights never change.
        replayed: called with the seconds from the loss of a request's engine to its next delta.
    """

    def __init__(
        self,
        engines: Engines,
        edges: DeploymentHandle[Any] | None,
        replayed: Callable[[float], None] = lambda _: None,
        board: WeightsBoard | None = None,
    ) -> None:
        self._board = board
        self._replayed = replayed
        self._engines = engines
        self._edges = edges
        self._calls: dict[str, _Call] = {}

    @property
    def board(self) -> WeightsBoard:
        """Where engines read the weights and drafters to serve."""
        assert self._board is not None, "an application's clients have one"
        return self._board

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Raises the engine's errors, or `EngineDeadError` if every attempt failed."""
        emitted: list[int] = request.emitted.tolist()
        before = usage = SpeculationUsage()  # usage of lost attempts; of all attempts
        attempt = num_losses = 0
        begun_s, lost_s = time.monotonic(), None
        while True:
            wire = request
            if attempt:
                wire = replace(
                    request,
                    id=f"{request.id}.{attempt}",
                    emitted=ints(emitted),
                    timeout_s=_left(request.timeout_s, begun_s),
                    was_accepted=True,
                )
            call = _Call(self._engines, wire)
            self._calls[request.id] = call
            try:
                inbox = await call.inbox()
                while True:
                    delta = await inbox.get()
                    call.is_finished = delta.finish_reason is not None
                    if lost_s is not None:
                        self._replayed(time.monotonic() - lost_s)
                        lost_s = None
                    emitted.extend(delta.token_ids)
                    if attempt:
                        if delta.usage is not None:
                            usage = add_usage([delta.usage, before])
                        delta = replace(delta, request_id=request.id, usage=usage)
                    elif delta.usage is not None:
                        usage = delta.usage
                    yield delta
                    if delta.finish_reason is not None:
                        return
            except _LOST as error:
                attempt += 1
                num_losses += not isinstance(error, PassedOnError)
                before, lost_s = usage, lost_s or time.monotonic()
                if num_losses == _MAX_LOSSES:
                    raise EngineDeadError(
                        f"the request was lost on {num_losses} engines; the last time: {error}"
                    ) from None
                log.warning(
                    "request %s is replayed elsewhere: %s",
                    request.id,
                    error,
                    extra={"request_id": request.id},
                )
            finally:
                call.close()
                del self._calls[request.id]
            if num_losses > 1:
                await asyncio.sleep(_BACKOFF_S * 2 ** (num_losses - 2))

    async def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            call.abort()

    async def count_resumable(self, stream_id: str, owner: str) -> dict[int, int]:
        counts: dict[int, int] = {}
        for answer in (await self._ask("count_resumable", stream_id, owner)).values():
            for index, count in answer.items():
                counts[index] = max(count, counts.get(index, 0))
        return counts

    async def take(self, stream_id: str, owner: str) -> dict[int, ResumeTokens]:
        taken: dict[int, ResumeTokens] = {}
        for answer in (await self._ask("take", stream_id, owner)).values():
            for index, tokens in answer.items():
                taken[index] = longer(taken.get(index), ResumeTokens(*tokens))
        return taken

    async def update_weights(
        self, target: str, drafter: str, mode: PauseMode, version: str = ""
    ) -> int:
        board = self.board
        self._names("check the weights")
        await self.tell("check_weights", target, drafter)
        before = await asyncio.to_thread(board.read)
        note = WeightsNote(target, drafter, mode, version=version).after(before)
        await asyncio.to_thread(board.write, note)
        return await self.tell("update_weights")

    async def link_trainer(self, link: TrainerLink) -> int:
        names = self._names("join the trainer")
        links = [link] * len(names)
        if link.host:
            counts = await self._by_all("num_sent_ranks", dict.fromkeys(names, ()))
            links = checked_link(link, [counts[name] for name in names])
        told = {name: astuple(each) for name, each in zip(names, links, strict=True)}
        try:
            await self._by_all("link_trainer", told)
        except OutriderError:
            if link.host:  # engines that have joined leave again
                leave = astuple(TrainerLink(link.name))
                with suppress(OutriderError):
                    await self._by_all("link_trainer", dict.fromkeys(names, leave))
            raise
        return len(names)

    async def take_weights(self, sent: SentWeights, mode: PauseMode) -> int:
        names = self._names("take the weights")
        sent = replace(sent, id=uuid.uuid4().hex, until="check")
        await self._by_all("take_weights", dict.fromkeys(names, astuple(sent)))
        staged = astuple(replace(sent, until="stage"))
        try:
            await self._by_all("take_weights", dict.fromkeys(names, staged))
        except OutriderError:
            with suppress(OutriderError):
                await self._every("drop_sent")
            raise
        # From now on these are the model's weights; an engine that is replaced lacks them.
        board = self.board
        note = WeightsNote(mode=mode, sent=sent.id, version=sent.version)
        note = note.after(await asyncio.to_thread(board.read))
        await asyncio.to_thread(board.write, note)
        try:
            await self._by_all("update_weights", dict.fromkeys(names, ()))
        except OutriderError as error:
            whole = f"the new weights are served, but not by every engine: {error.message}"
            raise type(error)(whole, field=error.field) from None
        return len(names)

    def _names(self, purpose: str) -> list[str]:
        """Returns the running engines' names, sorted; raises `EngineDeadError` if none runs."""
        names = sorted(each.name for each in self._engines.links)
        if not names:
            raise EngineDeadError(f"no engine is up that could {purpose}")
        return names

    async def _by_all(self, verb: str, each: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Calls these engines, each with its own arguments; returns their answers by name.

        Raises:
            EngineDeadError: an engine did not answer; names it.
            OutriderError: the first error raised by an engine; names that engine.
        """
        try:
            answers = await self._engines.ask(verb, timeout_s=UPDATE_TIMEOUT_S, each=each)
        except TimeoutError:
            answers = {}
        missing = sorted(each.keys() - answers.keys())
        if missing:  # a missing engine may be the cause of the others' errors
            raise EngineDeadError(
                f"{len(missing)} of {len(each)} engines did not answer: {', '.join(missing)}"
            )
        for name in sorted(answers):
            if isinstance(answers[name], (list, tuple)):
                kind, message, field = answers[name]
                message = message.removeprefix(f"{field}: ")
                raise error_of(kind, f"engine {name}: {message}", field)
        return answers

    async def drafters(self) -> dict[str, dict[str, Any]]:
        return await self._ask("drafters")

    async def change_drafters(self, change: DrafterChange) -> tuple[int, tuple[str, ...]]:
        board = self.board
        self._names("check the drafters")
        served = await self._every("drafters")
        plans = await self._every("plan_drafters", asdict(change))
        for plan in plans.values():
            if "failure" in plan:
                raise error_of(*plan["failure"])
        planned = next(iter(plans.values()))["planned"]
        had = next(iter(served.values()))["speculative_config"]
        note = WeightsNote(speculative=planned, make_room=change.make_room)
        num_engines, note = await self._announce(note, speculative=had)
        described = await self._ask("drafters")
        names = {each["name"]: None for one in described.values() for each in one["drafters"]}
        note = replace(note, drafters=tuple(names))
        await asyncio.to_thread(board.write, note)
        return num_engines, note.drafters

    async def adapters(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for served in (await self._every("adapters")).values():
            found |= served
        return found

    async def change_adapters(self, adapters: dict[str, str]) -> int:
        self._names("change adapters")
        had = await self.adapters()
        note = WeightsNote(adapters=adapters)
        return (await self._announce(note, adapters=had))[0]

    async def _announce(self, note: WeightsNote, **had: Any) -> tuple[int, WeightsNote]:
        """Makes all engines follow a note, or none; returns their number and the complete note.

        Args:
            had: fields that replace those of the note if an engine cannot follow it.
        """
        note = note.after(await asyncio.to_thread(self.board.read))
        await asyncio.to_thread(self.board.write, note)
        try:
            return await self.tell("update_weights"), note
        except OutriderError:  # engines that have changed go back
            back = replace(note, id=WeightsNote().id, **had)
            await asyncio.to_thread(self.board.write, back)
            with suppress(OutriderError):
                await self.tell("update_weights")
            raise

    async def tell(self, verb: str, *arguments: Any) -> int:
        answers = await self._every(verb, *arguments)
        for failure in answers.values():
            if failure is not None:
                raise error_of(*failure)
        return len(answers)

    async def _every(self, verb: str, *arguments: Any) -> dict[str, Any]:
        """Calls every engine; returns answers by name, or raises `EngineDeadError`."""
        wanted = {link.name for link in self._engines.links}
        try:
            answers = await self._engines.ask(verb, *arguments, timeout_s=UPDATE_TIMEOUT_S)
        except TimeoutError:
            answers = {}
        missing = wanted.intersection(link.name for link in self._engines.links) - answers.keys()
        if missing:
            raise EngineDeadError(
                f"{len(missing)} of {len(wanted)} engines did not answer: {verb.replace('_', ' ')}"
            )
        return answers

    async def traces(self) -> dict[str, dict[str, Any]]:
        return await self._every("trace")

    async def check(self) -> None:
        """Checks that an engine can step; one that does not answer in time may only be busy."""
        try:
            reports = await self._engines.ask("report", timeout_s=_CHECK_TIMEOUT_S)
        except TimeoutError:
            return
        reasons = [_unable(stats) for stats in reports.values()]
        if all(reasons):
            raise EngineDeadError(str(reasons[0]) if reasons else "no engine is up")

    async def stats(self) -> dict[str, dict[str, Any]]:
        reports = await self._ask("report")
        return {name: stats for name, stats in reports.items() if "error" not in stats}

    async def edge_metrics(self) -> list[Any]:
        if self._edges is None:
            return []
        try:
            answers = await self._edges.broadcast("edge_families").results_async(
                timeout_s=_STATS_TIMEOUT_S, return_exceptions=True
            )
        except (TimeoutError, DeploymentUnavailableError) as error:
            log.warning("metrics of other ingresses got no answer: %s", error)
            return []
        given = [each for each in answers if not isinstance(each, BaseException)]
        return [family for families in given for family in families]

    async def _ask(self, verb: str, *arguments: Any) -> dict[str, Any]:
        """Calls the engines; returns their answers by name, or nothing if not all came in time."""
        try:
            return await self._engines.ask(verb, *arguments, timeout_s=_STATS_TIMEOUT_S)
        except TimeoutError:
            log.warning("%s got no answer in time", verb)
            return {}


def _left(timeout_s: float | None, begun_s: float) -> float | None:
    """Returns the rest of a timeout that started at `begun_s`."""
    return None if timeout_s is None else timeout_s - (time.monotonic() - begun_s)


def _unable(stats: dict[str, Any]) -> str | None:
    """Returns why a replica cannot run a step now; None if it can."""
    if (reason := recovery_of(stats)) is not None:
        return reason
    if stats.get("weights", {}).get("sent") == "lost":
        return "the weights that a trainer had sent are lost: send them again"
    return stats.get("error")


class _Call:
    """One attempt: a request that is sent to an engine, or waits for one."""

    def __init__(self, engines: Engines, request: Request) -> None:
        self._id = request.id
        self._sent = engines.run(request)
        self._is_aborted = False
        self.is_finished = False  # the last delta has arrived

    async def inbox(self) -> Inbox:
        """Returns the inbox of the request's deltas, once an engine has room.

        Reading the inbox raises:
            InvalidRequestError, OverloadedError, WorkerError: the engine rejected the request, or
            its step failed.
            EdgeLostError: the engine is lost; the request may be sent again.

        Raises:
            OverloadedError: too many requests wait for room.
            EngineDeadError: no engine is up.
        """
        try:
            return (await self._sent)[1]
        except asyncio.CancelledError:
            if not self._is_aborted:
                raise
            inbox = Inbox()
            inbox.put(Delta(self._id, (), finish_reason="abort"))
            return inbox

    def abort(self) -> None:
        """Makes the engine end the request; its last delta still arrives."""
        self._is_aborted = True
        if self._sent.done():
            self._sent.result()[0].abort(self._id)
        else:
            self._sent.cancel()

    def close(self) -> None:
        """Drops the request, and ends it unless its last delta has arrived."""
        if not self._sent.done():
            self._sent.cancel()
        elif not self._sent.cancelled() and self._sent.exception() is None:
            self._sent.result()[0].close(self._id, is_finished=self.is_finished)
