"""`EngineClient`: the interface between HTTP and engines; Serve uses `ServeClient`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ....engine.statistics import recovery_of
from ....engine.weights import DrafterChange, PauseMode, checked_link
from ....errors import EngineDeadError
from ....scheduler.types import Delta, Request
from ....workers.spec import SentWeights, TrainerLink
from ..resume_tokens import ResumeTokens, TokenStore

if TYPE_CHECKING:
    from ....engine.engine import Engine

EngineVerb = Literal[
    "reset_prefix_cache", "pause", "resume", "sleep", "wake_up", "adapt", "record_trace"
]
"""Commands to all engines, by the names of `Engine`'s methods."""


class EngineClient:
    """Runs requests on an engine; this class uses one engine in the same process.

    `ServeClient` overrides every method.

    Args:
        store: keeps the tokens of resumable streams.
    """

    def __init__(self, engine: Engine, store: TokenStore | None = None) -> None:
        self._engine = engine
        self._store = store or TokenStore()
        # `submit` waits for the current step to end, so it must not run in the event loop.
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="outrider-submit")

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Yields the request's deltas up to a finish reason. Closing aborts the request.

        Raises:
            InvalidRequestError, OverloadedError, WorkerError, EngineDeadError.
        """
        loop = asyncio.get_running_loop()
        sink = QueueSink(loop, self._store)
        self._store.begin(request)
        submitted = loop.run_in_executor(self._threads, self._engine.submit, request, sink)
        ended = False
        try:
            await asyncio.shield(submitted)
            while not ended:
                for delta in await sink.queue.get():
                    ended = delta.finish_reason is not None
                    if delta.finish_reason == "error":
                        raise delta.failure
                    yield delta
        finally:
            if not ended:
                submitted.add_done_callback(partial(self._end, request.id))
            self._store.release(request.id)

    def _end(self, request_id: str, submitted: asyncio.Future[None]) -> None:
        """Aborts the request once its submission has completed; ignores that one's error."""
        if not submitted.cancelled() and submitted.exception() is None:
            self._engine.abort(request_id)

    async def count_resumable(self, stream_id: str, owner: str) -> dict[int, int]:
        """Returns how many tokens the engines keep of each completion of a stream."""
        return self._store.count(stream_id, owner)

    async def take(self, stream_id: str, owner: str) -> dict[int, ResumeTokens]:
        """Takes the kept tokens of a stream, by completion; ends its requests wherever they run."""
        taken, running = self._store.take(stream_id, owner)
        for request_id in running:
            self._engine.abort(request_id)
        return taken

    async def abort(self, request_id: str) -> None:
        """Ends a request early; its generator still yields the last delta."""
        self._engine.abort(request_id)

    async def tell(self, verb: EngineVerb, *arguments: Any) -> int:
        """Calls the method `verb` of every engine; returns the number of engines.

        Raises:
            EngineDeadError: an engine did not answer.
            OutriderError: the first error that an engine raised.
        """
        await asyncio.to_thread(getattr(self._engine, verb), *arguments)
        return 1

    async def update_weights(
        self, target: str, drafter: str, mode: PauseMode, version: str = ""
    ) -> int:
        """Replaces the weights of all engines, including later ones; returns the number of engines.

        All engines check the weights before the first one loads them.

        Args:
            target, drafter: folders; "": unchanged.
            mode: treatment of running requests.
            version: version of the target's weights, which outputs name.

        Raises:
            CheckpointError, ConfigError: the weights do not fit; nothing has changed.
            WorkerError, EngineDeadError: an engine did not load them; it will retry, or end.
        """
        await asyncio.to_thread(self._engine.update_weights, target, drafter, mode, version)
        return 1

    async def link_trainer(self, link: TrainerLink) -> int:
        """Makes the ranks of every engine join or leave a trainer's process group.

        Engines join in the order of their names, with consecutive ranks from `link.rank_offset` on.
        Returns the number of engines.

        Raises:
            InvalidRequestError, ConfigError: an argument is invalid, or an engine could not join in
                time; none has joined.
            WorkerError, EngineDeadError: an engine failed.
        """
        links = [link]
        if link.host:
            links = checked_link(link, [self._engine.num_sent_ranks()])
        await asyncio.to_thread(self._engine.link_trainer, links[0])
        return 1

    async def take_weights(self, sent: SentWeights, mode: PauseMode) -> int:
        """Serves the weights that a trainer sends on all engines, or on none.

        All engines check names and shapes before the first one receives a tensor. Returns the
        number of engines.

        Raises:
            ConfigError: the weights do not fit or did not arrive everywhere; nothing has changed.
            WorkerError, EngineDeadError: an engine failed; it serves nothing until it gets weights
                again.
        """
        await asyncio.to_thread(self._engine.take_weights, sent, mode)
        return 1

    async def drafters(self) -> dict[str, dict[str, Any]]:
        """Returns `Engine.drafters()` of every replica."""
        return {"local": self._engine.drafters()}

    async def change_drafters(self, change: DrafterChange) -> tuple[int, tuple[str, ...]]:
        """Changes the drafters of all engines, including later ones.

        All engines check the change before the first one applies it. If an engine cannot apply it,
        all revert.

        Returns:
            The number of engines, and the names of their drafters.

        Raises:
            InvalidRequestError, ConfigError, CheckpointError, ResourcesError: the drafters cannot
                be used; the previous ones still are.
            WorkerError, EngineDeadError: an engine did not apply the change.
        """
        await asyncio.to_thread(self._engine.change_drafters, change)
        return 1, self._engine.info.drafters

    async def adapters(self) -> dict[str, str]:
        """Returns the folders of the LoRA adapters that engines serve, by name."""
        return self._engine.adapters()

    async def change_adapters(self, adapters: dict[str, str]) -> int:
        """Replaces the LoRA adapters of all engines, including later ones.

        An adapter is removed after its requests have ended. Returns the number of engines.

        Raises:
            ConfigError, CheckpointError: an adapter cannot be served; the previous ones still are.
            WorkerError, EngineDeadError: an engine did not apply the change.
        """
        await asyncio.to_thread(self._engine.serve_adapters, adapters)
        return 1

    async def traces(self) -> dict[str, dict[str, Any]]:
        """Returns `Engine.trace()` of every replica; raises `EngineDeadError` if one is missing."""
        return {"local": await asyncio.to_thread(self._engine.trace)}

    async def check(self) -> None:
        """Raises `EngineDeadError` if no engine can serve."""
        self._engine.check()
        if (reason := recovery_of(self._engine.stats())) is not None:
            raise EngineDeadError(reason)

    async def stats(self) -> dict[str, dict[str, Any]]:
        """Returns `Engine.stats()` of every replica."""
        return {"local": self._engine.stats()}

    async def edge_metrics(self) -> list[Any]:
        """Returns the Prometheus families of all ingresses, including this one."""
        return []


class QueueSink:
    """A sink that delivers deltas to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: TokenStore | None = None) -> None:
        self._store = store
        self.queue: asyncio.Queue[list[Delta]] = asyncio.Queue()
        self._loop = loop

    def deliver(self, deltas: list[Delta]) -> None:
        if self._store is not None:
            self._store.record(deltas)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.queue.put_nowait, deltas)
