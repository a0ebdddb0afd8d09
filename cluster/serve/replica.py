"""`EngineReplica`: the Serve deployment that owns one engine."""

from __future__ import annotations

import asyncio
import json
import time
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
from ...scheduler.types import Request, ints
from ..backend import backend_of
from ..keeper import Successors
from ..process import keep_trimmed, start_watchdog, without_torch
from .args import LOAD
from .edge import EngineDoor
from .models import HeldCheck
from .openai.engine_client import LocalClient
from .resume_tokens import TokenStore
from .telemetry import configure_logging

_DRAIN_POLL_S = 0.1
_MAX_FOLDER_LEN = 75  # of 107 bytes that a Unix socket's path may have


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
        drain_s: float = 0.0,
    ) -> None:
        start_watchdog(hung_after_s)
        keep_trimmed()
        self._engine: Engine | None = None
        self._door: EngineDoor | None = None
        self._store = TokenStore(resume_window_s, resume_max_values)
        self._drain_s = drain_s
        self._health = HeldCheck(health_hold_s)
        replica = serve.get_replica_context().replica_id
        config = EngineConfig.load(settings)
        configure_logging(config.log_format)
        with without_torch(unless=_may_compute(config)):
            import transformers  # noqa: F401
        digest = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        successors = Successors(str(replica.deployment_id), digest, config.resources.keep_workers_s)
        engine = Engine.start(config, backend_of(config, successors))
        self._engine = engine
        _decode_one_token(engine)
        node = ray.get_runtime_context().get_node_id()
        host = ray.util.get_node_ip_address()
        self._door = EngineDoor(engine, self._store, self._report, host, node, sockets_folder())

    def record_replica_metadata(self) -> dict[str, Any]:
        """Serve calls this once, and tells every ingress where the engine listens."""
        assert self._door is not None
        return self._door.address

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this now and then, for `by_load`."""
        return {LOAD: 0.0 if self._door is None else float(self._door.num_expected)}

    async def info(self) -> EngineInfo:
        return self._alive().info

    async def wake(self) -> None:
        """Returns once there is an engine: a call that waits makes Serve start one."""

    def _report(self) -> dict[str, Any]:
        """The engine's statistics, or what is wrong with it."""
        try:
            engine = self._alive()
            engine.check()
            return {**engine.stats(), "resumable": self._store.stats()}
        except OutriderError as error:
            return {"error": error.message}

    async def check_health(self) -> None:
        """Asks the loop's thread nothing, so that a long step is no illness."""
        self._store.expire()
        self._alive().check()
        await self._health.hold()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls this when `user_config` changes: no replica is restarted."""
        self._alive().reconfigure(user_config)

    async def __del__(self) -> None:
        """Serve calls this as the replica ends: requests that run may go on for a while."""
        engine, door = getattr(self, "_engine", None), getattr(self, "_door", None)
        self._engine = self._door = None
        if door is not None:
            door.leave()
            deadline = time.monotonic() + self._drain_s
            while door.num_requests and time.monotonic() < deadline:
                await asyncio.sleep(_DRAIN_POLL_S)
            door.shutdown()
        if engine is not None:
            engine.shutdown()

    def _alive(self) -> Engine:
        if self._engine is None:
            raise WorkerError("the replica is shutting down")
        return self._engine


def sockets_folder() -> str | None:
    """Ray's folder for sockets, which is removed with its session; None where it is too deep."""
    node = ray._private.worker._global_node
    folder = None if node is None else str(node.get_sockets_dir_path())
    return folder if folder is not None and len(folder) <= _MAX_FOLDER_LEN else None


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
