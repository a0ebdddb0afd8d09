"""`EngineClient`: all that HTTP knows of engines; the Serve application's is `ServeClient`."""

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
"""What all engines are told alike, by the names of `Engine`'s methods."""


class EngineClient:
    """Runs requests on some engine: here, on one of this process.

    `ServeClient` overrides every method.

    Args:
        store: keeps the tokens of resumable streams.
    """

    def __init__(self, engine: Engine, store: TokenStore | None = None) -> None:
        self._engine = engine
        self._store = store or TokenStore()
        # `submit` waits for the step under way to end: not on the event loop.
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="outrider-submit")

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The request's deltas, to the one with a finish reason. Closing it aborts the request.

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
        """Behind the submission, should it still be under way; nobody awaits its error."""
        if not submitted.cancelled() and submitted.exception() is None:
            self._engine.abort(request_id)

    async def count_resumable(self, stream_id: str, owner: str) -> dict[int, int]:
        """How many tokens of a stream's completions the engines keep; nothing changes."""
        return self._store.count(stream_id, owner)

    async def take(self, stream_id: str, owner: str) -> dict[int, ResumeTokens]:
        """What the engines keep of a stream, by completion; its requests end, wherever they run."""
        taken, running = self._store.take(stream_id, owner)
        for request_id in running:
            self._engine.abort(request_id)
        return taken

    async def abort(self, request_id: str) -> None:
        """Ends a request early; its generator still gives the last delta."""
        self._engine.abort(request_id)

    async def tell(self, verb: EngineVerb, *arguments: Any) -> int:
        """Every engine does what its method `verb` does; how many engines there are.

        Raises:
            EngineDeadError: one did not answer.
            OutriderError: the first that an engine raised.
        """
        await asyncio.to_thread(getattr(self._engine, verb), *arguments)
        return 1

    async def update_weights(
        self, target: str, drafter: str, mode: PauseMode, version: str = ""
    ) -> int:
        """Every engine, and those that are started later, serve other weights; how many there are.

        All have checked the weights before the first of them loads any.

        Args:
            target, drafter: folders; "": as before.
            mode: of running requests.
            version: of the target's weights, by which outputs name them.

        Raises:
            CheckpointError, ConfigError: the weights do not fit; nothing has changed.
            WorkerError, EngineDeadError: an engine did not load them; it is going to, or ends.
        """
        await asyncio.to_thread(self._engine.update_weights, target, drafter, mode, version)
        return 1

    async def link_trainer(self, link: TrainerLink) -> int:
        """The ranks of every engine join a trainer's process group, or leave it; how many engines
        there are.

        They join in the order of their names, one behind the other from `link.rank_offset` on.

        Raises:
            InvalidRequestError, ConfigError: an argument is wrong, or an engine could not join in
                time; none has.
            WorkerError, EngineDeadError: an engine failed.
        """
        links = [link]
        if link.host:
            links = checked_link(link, [self._engine.num_sent_ranks()])
        await asyncio.to_thread(self._engine.link_trainer, links[0])
        return 1

    async def take_weights(self, sent: SentWeights, mode: PauseMode) -> int:
        """Every engine serves what a trainer sends to all of them, or none does; how many there
        are. All have checked names and shapes before the first receives any.

        Raises:
            ConfigError: they do not fit, or did not arrive everywhere; nothing has changed.
            WorkerError, EngineDeadError: an engine failed; it serves nothing until it gets others.
        """
        await asyncio.to_thread(self._engine.take_weights, sent, mode)
        return 1

    async def drafters(self) -> dict[str, dict[str, Any]]:
        """`Engine.drafters()` of every replica."""
        return {"local": self._engine.drafters()}

    async def change_drafters(self, change: DrafterChange) -> tuple[int, tuple[str, ...]]:
        """Every engine, and those that are started later, draft otherwise.

        All have checked the change before the first of them makes it; if one cannot make it, all
        go back.

        Returns:
            How many engines there are, and the names of their drafters.

        Raises:
            InvalidRequestError, ConfigError, CheckpointError, ResourcesError: the drafters cannot
                serve; those from before do.
            WorkerError, EngineDeadError: an engine did not change.
        """
        await asyncio.to_thread(self._engine.change_drafters, change)
        return 1, self._engine.info.drafters

    async def adapters(self) -> dict[str, str]:
        """Folders of the LoRA adapters that engines serve, by name."""
        return self._engine.adapters()

    async def change_adapters(self, adapters: dict[str, str]) -> int:
        """Every engine, and those that are started later, serve these LoRA adapters and no others;
        how many engines there are. Requests of one that goes end first.

        Raises:
            ConfigError, CheckpointError: an adapter cannot be served; those from before are.
            WorkerError, EngineDeadError: an engine did not change.
        """
        await asyncio.to_thread(self._engine.serve_adapters, adapters)
        return 1

    async def traces(self) -> dict[str, dict[str, Any]]:
        """`Engine.trace()` of every replica (raises `EngineDeadError` where one did not answer)."""
        return {"local": await asyncio.to_thread(self._engine.trace)}

    async def check(self) -> None:
        """Raises `EngineDeadError` where no engine can serve."""
        self._engine.check()
        if (reason := recovery_of(self._engine.stats())) is not None:
            raise EngineDeadError(reason)

    async def stats(self) -> dict[str, dict[str, Any]]:
        """`Engine.stats()` of every replica."""
        return {"local": self._engine.stats()}

    async def edge_metrics(self) -> list[Any]:
        """Prometheus families measured at every HTTP edge, this one included."""
        return []


class QueueSink:
    """A sink whose deltas arrive in an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: TokenStore | None = None) -> None:
        self._store = store
        self.queue: asyncio.Queue[list[Delta]] = asyncio.Queue()
        self._loop = loop

    def deliver(self, deltas: list[Delta]) -> None:
        if self._store is not None:
            self._store.record(deltas)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.queue.put_nowait, deltas)
