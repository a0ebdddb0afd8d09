"""`EngineReplica`: the Serve deployment that owns one engine."""

from __future__ import annotations

import asyncio
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import ray
from ray import serve

from ...config import EngineConfig, UserConfig
from ...engine.engine import Engine
from ...engine.statistics import EngineInfo
from ...errors import OutriderError, WorkerError
from ...scheduler.sampling import SamplingParams
from ...scheduler.types import Delta, Request, ints
from ...workers.transport.wire import decode
from ..backend import backend_of
from ..keeper import Successors
from ..process import keep_trimmed, start_watchdog, without_torch
from .edge import EdgeLink, ReplyTo
from .models import HeldCheck
from .openai.engine_client import LocalClient
from .resume_tokens import ResumeTokens, TokenStore
from .telemetry import configure_logging


class EngineReplica:
    """One engine, its loop in a thread, its ranks in actors of their own.

    Raises:
        ConfigError, CheckpointError, ResourcesError, WorkerError: it cannot start.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        resume_window_s: float = 0.0,
        resume_max_values: int = 1,
        health_hold_s: float = 0.0,
        hung_after_s: float = 0.0,
    ) -> None:
        start_watchdog(hung_after_s)
        keep_trimmed()
        self._engine: Engine | None = None
        self._store = TokenStore(resume_window_s, resume_max_values)
        self._links: dict[str, EdgeLink] = {}
        self._node = ray.get_runtime_context().get_node_id()
        self._health = HeldCheck(health_hold_s)
        replica = serve.get_replica_context().replica_id
        self._name = replica.unique_id
        # `submit` waits for the step under way to end: not on the event loop.
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="outrider-submit")
        config = EngineConfig.load(settings)
        configure_logging(config.log_format)
        with without_torch(unless=_may_compute(config)):
            import transformers  # noqa: F401
        digest = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        successors = Successors(str(replica.deployment_id), digest, config.resources.keep_workers_s)
        engine = Engine.start(config, backend_of(config, successors))
        self._engine = engine
        _decode_one_token(engine)

    async def info(self) -> EngineInfo:
        return self._alive().info

    async def generate(self, body: bytes, reply_to: ReplyTo) -> None:
        """Returns when the request's last delta has been sent; cancelling it aborts the request.

        Raises:
            InvalidRequestError, OverloadedError, WorkerError, EngineDeadError, EdgeLostError.
        """
        engine, request = self._alive(), decode(body)
        assert isinstance(request, Request)
        link = await self._link(reply_to)
        last = link.expect(request.id)
        self._store.begin(request)
        submitted = self._threads.submit(engine.submit, request, link)
        finished = False
        try:
            await asyncio.shield(asyncio.wrap_future(submitted))
            delta: Delta = await asyncio.wrap_future(last)
            finished = True
            if delta.finish_reason == "error":
                engine.check()
                raise WorkerError(delta.error or "the step of this request failed")
        finally:
            link.forget(request.id)
            if not finished:
                # Behind the submission, should it still be under way.
                submitted.add_done_callback(lambda _: engine.abort(request.id))
            self._store.release(request.id)

    async def count_resumable(self, stream_id: str, owner: str) -> dict[int, int]:
        """How many tokens of a resumable stream's completions are kept here."""
        return self._store.count(stream_id, owner)

    async def take(self, stream_id: str, owner: str) -> dict[int, ResumeTokens]:
        """What is kept of a resumable stream; its requests end here."""
        taken, running = self._store.take(stream_id, owner)
        for request_id in running:
            self._alive().abort(request_id)
        return taken

    async def report(self) -> tuple[str, dict[str, Any]]:
        """The replica's name, with its engine's statistics or what is wrong with it."""
        try:
            engine = self._alive()
            engine.check()
            stats = await asyncio.to_thread(engine.stats)  # it may ask other processes
            return self._name, {**stats, "resumable": self._store.stats()}
        except OutriderError as error:
            return self._name, {"error": error.message}

    async def check_health(self) -> None:
        """Asks the loop's thread nothing, so that a long step is no illness."""
        self._store.expire()
        self._alive().check()
        await self._health.hold()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls this when `user_config` changes: no replica is restarted."""
        self._alive().reconfigure(user_config)

    def __del__(self) -> None:
        engine, self._engine = getattr(self, "_engine", None), None
        for link in getattr(self, "_links", {}).values():
            link.close()
        if engine is not None:
            engine.shutdown()

    def _alive(self) -> Engine:
        if self._engine is None:
            raise WorkerError("the replica is shutting down")
        return self._engine

    async def _link(self, reply_to: ReplyTo) -> EdgeLink:
        link = self._links.get(reply_to.ingress)
        if link is None or link.lost:
            link = await asyncio.to_thread(EdgeLink, reply_to, self._node, self._store)
            known = self._links.get(reply_to.ingress)
            if known is not None and not known.lost:  # another request was faster
                link.close()
                return known
            self._links = {name: each for name, each in self._links.items() if not each.lost}
            self._links[reply_to.ingress] = link
        return link


def _decode_one_token(engine: Engine) -> None:
    """Ready means that a token came out."""

    async def decode_it() -> None:
        request = Request(
            id=f"readiness-{uuid.uuid4().hex}",
            prompt=ints([engine.info.eos_token_ids[0] if engine.info.eos_token_ids else 0]),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            seed=0,
        )
        async for _ in LocalClient(engine).generate(request):
            pass

    worker = ThreadPoolExecutor(1)  # a replica is constructed inside a running event loop
    worker.submit(asyncio.run, decode_it()).result()
    worker.shutdown()


def _may_compute(config: EngineConfig) -> bool:
    """Whether code that needs torch may run beside the engine: ranks, or a user's."""
    drafters = config.speculative_config.sections
    own = config.trust_remote_code or any(isinstance(each, UserConfig) for each in drafters)
    return own or config.executor != "ray"
