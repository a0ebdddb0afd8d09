"""`EngineReplica`: the Serve deployment that owns one engine."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve

from ...config import EngineConfig, UserConfig
from ...engine.engine import Engine
from ...engine.metrics import engine_metrics
from ...engine.statistics import EngineInfo
from ...engine.weights import DrafterChange
from ...errors import EngineDeadError, OutriderError, WorkerError
from ...scheduler.sampling import SamplingParams
from ...scheduler.types import Delta, Request, ints
from ..backend import backend_of
from ..keeper import Successors
from ..process import keep_trimmed, start_thread, start_watchdog, without_torch
from .args import LOAD
from .drafters import await_groups
from .edge import EngineDoor, failure_of
from .metrics import RayMetrics
from .models import (
    UPDATE_TIMEOUT_S,
    HeldCheck,
    LoadingBoard,
    ServedModel,
    WeightsBoard,
    WeightsNote,
)
from .resume_tokens import TokenStore
from .telemetry import configure_logging

log = logging.getLogger(__name__)
_DRAIN_POLL_S = 0.1
_STAGED_S = UPDATE_TIMEOUT_S + 60.0  # no living ingress waits longer to write its note
_REPORT_S = 5.0  # Ray's exporter collects new values every 10 s
_MAX_FOLDER_LEN = 75  # a Unix socket's path has at most 107 bytes


class EngineReplica:
    """One engine, with its loop in a thread and its ranks in actors of their own.

    Raises:
        ConfigError, CheckpointError, ResourcesError, WorkerError: it cannot start.
    """

    def __init__(
        self,
        model: ServedModel,
        resume_window_s: float,
        resume_max_values: int,
        groups: Mapping[str, Any],
    ) -> None:
        """`groups` are the application's drafter groups by name; another deployment owns them."""
        config, section = model.config, model.deployment
        start_watchdog(section.hung_after_s)
        keep_trimmed()
        self._engine: Engine | None = None
        self._door: EngineDoor | None = None
        self._store = TokenStore(resume_window_s, resume_max_values)
        self._drain_s = section.graceful_shutdown_timeout_s
        self._health = HeldCheck(section.health_hold_s)
        replica = serve.get_replica_context().replica_id
        configure_logging(config.log_format)
        with without_torch(unless=_may_compute(config)):
            import transformers  # noqa: F401
        deployment = str(replica.deployment_id)
        await_groups(config, groups)
        successors = Successors(deployment, model.settings, config.resources.keep_workers_s)
        backend = backend_of(config, successors)
        with LoadingBoard(replica.deployment_id.app_name, replica.unique_id):
            engine = Engine.start(config, backend)
        self._engine = engine
        self._weights = WeightsFollower(engine, WeightsBoard(deployment, model.settings))
        self._weights.follow(needs_drafters=False, starts=True)
        backend.retain()
        _decode_one_token(engine)
        self._weights.settle()
        node = ray.get_runtime_context().get_node_id()
        host = ray.util.get_node_ip_address()
        self._door = EngineDoor(engine, self._store, self._report, host, node, sockets_folder())
        self._door.verbs["update_weights"] = self._weights.answer
        start_thread("ray-metrics", self._report_to_ray, RayMetrics())

    def record_replica_metadata(self) -> dict[str, Any]:
        """Called once by Serve, which passes the engine's address to every ingress."""
        assert self._door is not None
        return self._door.address

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve periodically, for `by_load`."""
        return {LOAD: 0.0 if self._door is None else float(self._door.num_expected)}

    async def info(self) -> EngineInfo:
        return self._alive().info

    async def wake(self) -> None:
        """Returns once an engine is up; a pending call makes Serve start one."""

    def _report(self) -> dict[str, Any]:
        """Returns the engine's statistics, or its error."""
        try:
            engine = self._alive()
            engine.check()
            return {**engine.stats(), "resumable": self._store.stats()}
        except OutriderError as error:
            return {"error": error.message}

    def _report_to_ray(self, metrics: RayMetrics) -> None:
        """Reports metrics until the replica ends."""
        while (engine := self._engine) is not None:
            try:
                metrics.report(engine_metrics(engine.stats(), engine.info.model_name))
            except Exception:
                log.exception("metrics were not given to Ray")
            time.sleep(_REPORT_S)

    async def check_health(self) -> None:
        """Checks without calling the loop's thread, so that a long step is not a failure."""
        self._store.expire()
        self._alive().check()
        await asyncio.to_thread(self._weights.look)
        await self._health.hold()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve when `user_config` changes; no replica is restarted."""
        self._alive().reconfigure(user_config)

    async def __del__(self) -> None:
        """Called by Serve when the replica ends; running requests may continue for a while."""
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


class WeightsFollower:
    """Applies the weights and drafters of the board to an engine, even if it missed a change."""

    def __init__(self, engine: Engine, board: WeightsBoard) -> None:
        self._engine, self._board = engine, board
        self._lock = threading.Lock()  # held while they are being replaced
        self._served = self._weights = ""  # ids of notes
        self._lacks = False  # whether sent weights that the note names are missing
        self._speculative: dict[str, Any] | None = None  # of the last note with drafters
        self._failure: OutriderError | None = None

    def follow(self, *, needs_drafters: bool = True, starts: bool = False) -> None:
        """Returns once the engine has the weights and drafters of the board.

        Weights that a trainer has sent cannot be obtained later. An engine without them serves
        nothing until the weights are replaced.

        Args:
            needs_drafters: if False, drafters that cannot be loaded are logged and not raised.
            starts: an engine without sent weights still has to decode a token first; `settle`
                follows.

        Raises:
            OutriderError: as `update_weights` and `change_drafters`.
        """
        with self._lock:
            while (note := self._board.read()) is not None and note.id != self._served:
                self._follow_drafters(note, needs_drafters)
                self._follow_adapters(note, needs_drafters)
                has_sent = bool(note.sent) and self._takes_sent(note)
                weights_id, target = note.weights_id or note.id, "" if has_sent else note.target
                if (target or note.drafter) and weights_id != self._weights:
                    log.info("the weights are replaced: %s", target or note.drafter)
                    version = note.version or weights_id
                    self._engine.update_weights(target, note.drafter, note.mode, version)
                self._weights = weights_id
                self._served = note.id
                self._lacks = bool(note.sent) and not has_sent
                if not starts:
                    self.settle()

    def settle(self) -> None:
        """Stops an engine that lacks the weights sent by a trainer."""
        if self._lacks and not self._engine.lacks_weights:
            self._engine.lose_weights()

    def _takes_sent(self, note: WeightsNote) -> bool:
        """Returns True if the engine serves the sent weights; raises as `Engine.take_sent`."""
        try:
            return self._engine.take_sent(note.sent, note.mode, note.version or note.sent)
        except WorkerError:  # its new ranks have the weights of the folder
            self._engine.lose_weights()
            raise

    def _follow_drafters(self, note: WeightsNote, needs_them: bool) -> None:
        if note.speculative is None or note.speculative == self._speculative:
            return
        log.info("the drafters are replaced")
        with self._following(note, "the drafters cannot be replaced, and stay", needs_them):
            change = DrafterChange(whole=note.speculative, make_room=note.make_room)
            self._engine.change_drafters(change)
            self._speculative = note.speculative

    def _follow_adapters(self, note: WeightsNote, needs_them: bool) -> None:
        if note.adapters is None:
            return
        with self._following(note, "an adapter cannot be changed", needs_them):
            self._engine.serve_adapters(note.adapters)

    @contextmanager
    def _following(self, note: WeightsNote, failed: str, needs_it: bool) -> Iterator[None]:
        """Logs changes that the engine cannot follow; raises the error if `needs_it`."""
        try:
            yield
        except EngineDeadError:
            raise
        except OutriderError as error:
            log.error("%s: %s", failed, error.message)
            self._served = note.id  # the sender gets the error, and withdraws the note
            if needs_it:
                raise

    def answer(self) -> Any:
        """Calls `follow` for an ingress; returns the failure, or None."""
        return failure_of(self.follow)

    def look(self) -> None:
        """Starts following if the board has changed.

        Raises:
            OutriderError: the last attempt failed.
        """
        if self._failure is not None:
            raise self._failure
        note = self._board.read()
        if note is not None and note.id != self._served and not self._lock.locked():
            start_thread("weights", self._catch_up)
        elif self._engine.staged(_STAGED_S) and not self._lock.locked():
            start_thread("weights", self._drop_staged)

    def _drop_staged(self) -> None:
        """Frees staged weights if their ingress died before it wrote the note that names them."""
        with self._lock:
            staged_id, note = self._engine.staged(_STAGED_S), self._board.read()
            if not staged_id or (note is not None and note.sent == staged_id):
                return
            log.warning("weights from a trainer are dropped: the update did not go ahead")
            try:
                self._engine.drop_staged(staged_id)
            except OutriderError as error:
                log.error("the weights are not dropped: %s", error.message)

    def _catch_up(self) -> None:
        try:
            self.follow(needs_drafters=False)
        except OutriderError as error:
            log.error("the weights cannot be replaced: %s", error.message)
            self._failure = error


def sockets_folder() -> str | None:
    """Returns Ray's folder for sockets of this session; None if its path is too long."""
    node = ray._private.worker._global_node
    folder = None if node is None else str(node.get_sockets_dir_path())
    return folder if folder is not None and len(folder) <= _MAX_FOLDER_LEN else None


class _Deltas(queue.SimpleQueue[list[Delta]]):
    """A sink that another thread reads with blocking calls."""

    deliver = queue.SimpleQueue.put


def _decode_one_token(engine: Engine) -> None:
    """Decodes a token, after which the engine counts as ready."""
    request = Request(
        id=f"readiness-{uuid.uuid4().hex}",
        prompt=ints([engine.info.eos_token_ids[0] if engine.info.eos_token_ids else 0]),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        seed=0,
    )
    sink = _Deltas()
    engine.submit(request, sink)
    ends: list[Delta] = []
    while not ends:
        ends = [each for each in sink.get() if each.finish_reason is not None]
    if ends[0].finish_reason == "error":
        raise ends[0].failure


def _may_compute(config: EngineConfig) -> bool:
    """Returns True if code beside the engine may need torch: local ranks, or a user's code."""
    drafters = config.speculative_config.sections
    own = config.trust_remote_code or any(isinstance(each, UserConfig) for each in drafters)
    return own or config.executor != "ray"
