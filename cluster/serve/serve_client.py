"""`ServeClient`: an `EngineClient` over Ray Serve, with replay.

Each request is ONE pending Serve call for as long as it runs: Serve's router balances it, counts it
and detects its failure; its tokens arrive on the edge's sockets. If the replica is lost, the
request is sent to another with the tokens already streamed, so that every token is returned once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle

from ...engine.outputs import add_usage
from ...errors import EngineDeadError, OutriderError, OverloadedError, WorkerError
from ...scheduler.types import Delta, Request, SpeculationUsage, ints
from ...workers.transport.wire import encode
from .edge import EdgeListener, EdgeLostError
from .resume_tokens import ResumeTokens, longer

log = logging.getLogger(__name__)
_MAX_LOSSES = 4
_BACKOFF_S = 0.5  # after the second loss, doubled with every further one
_FULL_BACKOFF_S = 0.25  # where a replay finds no place
_FULL_S = 60.0  # after which it is given up then
_LAST_DELTA_S = 5.0  # how long after its call's end a request's last delta may still come
_STATS_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 1.0
_LOST = (
    EdgeLostError,
    EngineDeadError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    ReplicaUnavailableError,
    WorkerCrashedError,
)


class ServeClient:
    """Runs requests on the replicas behind `engines`.

    Args:
        edges: the ingress's own siblings.
        replayed: called with the seconds from the loss of a request's replica to the next delta.
    """

    def __init__(
        self,
        engines: DeploymentHandle[Any],
        edges: DeploymentHandle[Any] | None,
        listener: EdgeListener,
        replayed: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._replayed = replayed
        self._engines = engines
        self._edges = edges
        self._listener = listener
        self._calls: dict[str, _Call] = {}

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Raises, beside the engine's own errors, `EngineDeadError` where every attempt failed."""
        emitted: list[int] = request.emitted.tolist()
        before = usage = SpeculationUsage()  # of the attempts that were lost; of all
        attempt = num_losses = 0
        begun_s, lost_s = time.monotonic(), None
        while True:
            wire = replace(
                request,
                id=f"{request.id}.{attempt}" if attempt else request.id,
                emitted=ints(emitted),
                timeout_s=_left(request.timeout_s, begun_s),
                was_accepted=attempt > 0,
            )
            call = _Call(self._engines, self._listener, wire)
            self._calls[request.id] = call
            try:
                while True:
                    delta = await call.next()
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
            except (*_LOST, OverloadedError) as error:
                is_full = isinstance(error, OverloadedError)
                if attempt == 0 and is_full:
                    raise  # only a request that had begun is not refused any more
                attempt, num_losses = attempt + 1, num_losses + (not is_full)
                before, lost_s = usage, lost_s or time.monotonic()
                is_late = is_full and time.monotonic() - lost_s > _FULL_S
                if num_losses == _MAX_LOSSES or is_late:
                    raise EngineDeadError(
                        f"the request was lost on {num_losses} replicas; the last time: {error}"
                    ) from None
                if not is_full:
                    log.warning(
                        "request %s is replayed elsewhere: %s",
                        request.id,
                        error,
                        extra={"request_id": request.id},
                    )
            finally:
                call.close()
                del self._calls[request.id]
            if is_full:  # of requests that came meanwhile, which are not replays
                await asyncio.sleep(_FULL_BACKOFF_S)
            elif num_losses > 1:
                await asyncio.sleep(_BACKOFF_S * 2 ** (num_losses - 2))

    async def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            call.abort()

    async def count_resumable(self, stream_id: str, owner: str) -> dict[int, int]:
        counts: dict[int, int] = {}
        for answer in await _broadcast(self._engines, "count_resumable", stream_id, owner):
            for index, count in answer.items():
                counts[index] = max(count, counts.get(index, 0))
        return counts

    async def take(self, stream_id: str, owner: str) -> dict[int, ResumeTokens]:
        taken: dict[int, ResumeTokens] = {}
        for answer in await _broadcast(self._engines, "take", stream_id, owner):
            for index, tokens in answer.items():
                taken[index] = longer(taken.get(index), tokens)
        return taken

    async def check(self) -> None:
        """Serve replaces engines that are ill; one that is full need not answer in time."""
        try:
            reports = await _answers(self._engines, "report", timeout_s=_CHECK_TIMEOUT_S)
        except TimeoutError:
            return
        reasons = [_unable(stats) for _, stats in reports]
        if all(reasons):
            raise EngineDeadError(str(reasons[0]) if reasons else "no engine replica is up")

    async def stats(self) -> dict[str, dict[str, Any]]:
        reports = await _broadcast(self._engines, "report")
        return {name: stats for name, stats in reports if "error" not in stats}

    async def edge_metrics(self) -> list[Any]:
        if self._edges is None:
            return []
        answers = await _broadcast(self._edges, "edge_families")
        return [family for families in answers for family in families]


def _left(timeout_s: float | None, begun_s: float) -> float | None:
    """What is left of a time that began at `begun_s`."""
    return None if timeout_s is None else timeout_s - (time.monotonic() - begun_s)


def _unable(stats: dict[str, Any]) -> str | None:
    """Why a replica can run no step now; None if it can."""
    if stats.get("recovering"):
        return f"the workers are being replaced: {stats['recovering']}"
    return stats.get("error")


async def _broadcast(handle: DeploymentHandle[Any], method: str, *arguments: Any) -> list[Any]:
    """As `_answers`; none where not all came in time."""
    try:
        return await _answers(handle, method, *arguments, timeout_s=_STATS_TIMEOUT_S)
    except TimeoutError as error:
        log.warning("%s got no answer: %s", method, error)
        return []


async def _answers(
    handle: DeploymentHandle[Any], method: str, *arguments: Any, timeout_s: float
) -> list[Any]:
    """What the replicas answer; those that are dying do not (raises TimeoutError)."""
    try:
        answers = await handle.broadcast(method, *arguments).results_async(
            timeout_s=timeout_s, return_exceptions=True
        )
    except DeploymentUnavailableError as error:
        log.warning("%s got no answer: %s", method, error)
        return []
    return [answer for answer in answers if not isinstance(answer, BaseException)]


class _Call:
    """One attempt: the pending Serve call, and the queue that its deltas come to."""

    def __init__(
        self, engines: DeploymentHandle[Any], listener: EdgeListener, request: Request
    ) -> None:
        body = encode(request)
        self._id = request.id
        self._listener = listener
        self._inbox = listener.open(request.id)
        self._aborted = self._is_finished = False
        self._response = engines.generate.remote(body, listener.reply_to)
        self._task = asyncio.ensure_future(self._wait())

    async def next(self) -> Delta:
        """The next delta.

        Raises:
            what the call raised; `EdgeLostError` where it ended and the last delta never came.
        """
        item = await self._inbox.get()
        if item is not None:
            self._is_finished = item.finish_reason is not None
            return item
        error = self._task.result()
        if error is not None and not self._aborted:
            raise error
        try:
            late = await asyncio.wait_for(self._inbox.get(), _LAST_DELTA_S)
        except asyncio.TimeoutError:
            late = None
        if late is not None:
            self._inbox.put_nowait(None)  # there may be more
            return late
        if self._aborted:
            return Delta(self._id, (), finish_reason="abort")
        raise EdgeLostError("the last tokens did not arrive")

    def abort(self) -> None:
        """The replica ends the request; its last delta still comes."""
        self._aborted = True
        self._response.cancel()

    def close(self) -> None:
        """Forgets the request, and cancels it unless its last delta has come.

        A call returns by itself right after that delta, and cancelling it would cost more.
        """
        self._listener.close(self._id)
        if not self._task.done() and not self._is_finished:
            self._response.cancel()
            self._task.cancel()

    async def _wait(self) -> BaseException | None:
        """The call's outcome, kept for `next`."""
        try:
            await self._response
            return None
        except BackPressureError as error:
            return OverloadedError(f"every replica is full: {error.message}")
        except DeploymentUnavailableError as error:
            return EngineDeadError(error.message)
        except (RequestCancelledError, TaskCancelledError):
            return WorkerError("the request was cancelled")
        except asyncio.CancelledError:
            if not self._aborted:
                raise
            return None  # Serve's router raises this for a call that no replica has yet
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, OutriderError):
                return cause
            return WorkerError(f"the replica failed: {type(cause).__name__}: {cause}")
        except _LOST as error:
            return error
        finally:
            self._inbox.put_nowait(None)
