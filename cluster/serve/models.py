"""`ServedModel`: a model behind the endpoint, with the deployment options of its engines."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any

from ray.experimental import internal_kv

from ...config import EngineConfig
from ...engine.weights import PauseMode
from ...workers.model.checkpoint.progress import LOGGER
from .args import DeploymentConfig, autoscaling

ENGINE = "Engine"
UPDATE_TIMEOUT_S = 1800.0  # for a call to all engines, whose requests may have to end first
SETTLE_S = 5.0  # that Serve waits beyond the drain time of running requests
_ROUTER = "outrider.cluster.serve.engines:EngineRouter"


class HeldCheck:
    """Delays every health check but the first, which a replica's start waits for.

    Serve's controller notices a replica's death by the failure of a call to it, and its only calls
    are one health check per period. A check that is held until the next one is due fails within
    milliseconds of the process's death.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._has_begun = False

    async def hold(self) -> None:
        if self._has_begun:
            await asyncio.sleep(self._hold_s)
        self._has_begun = True


@dataclass(frozen=True, slots=True)
class WeightsNote:
    """The weights and drafters that all engines of a model adopt, including those started later.

    Ray's head stores the last note as long as the cluster lives.
    """

    target: str = ""  # folders; empty: unchanged
    drafter: str = ""
    mode: PauseMode = "keep"
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    speculative: dict[str, Any] | None = None  # newer than `drafter`; None: unchanged
    make_room: bool = False
    weights_id: str = ""  # id of the note that named the weights; "": this note
    drafters: tuple[str, ...] = ()  # names, once the engines have the drafters
    adapters: dict[str, str] | None = None  # folders by name; None: those of the configuration
    sent: str = ""  # id of weights sent by a trainer, newer than `target`, in no folder
    version: str = ""  # of the target's weights, for outputs; "": the note's id

    @property
    def target_id(self) -> str:
        """Identifies the target's weights if they have no version; "" for those of the start."""
        return self.weights_id or self.id if self.target else ""

    def after(self, before: WeightsNote | None) -> WeightsNote:
        """Returns this note, completed with the fields that only the previous note has set."""
        if before is None:
            return self
        adapters = before.adapters if self.adapters is None else self.adapters
        target, is_of_folders = self.target or before.target, bool(self.target or self.drafter)
        if is_of_folders:
            return replace(
                self,
                sent="" if self.target else before.sent,
                target=target,
                version=self.version if self.target else before.version or before.target_id,
                drafter=self.drafter or before.drafter,
                speculative=before.speculative,
                drafters=before.drafters,
                adapters=adapters,
            )
        weights_id, mode = before.weights_id or before.id, self.mode if self.sent else before.mode
        sent = self.sent or before.sent
        note = replace(
            self, target=target, mode=mode, weights_id=weights_id, adapters=adapters, sent=sent,
            version=self.version if self.sent else before.version,
        )  # fmt: skip
        if self.speculative is not None:
            return note
        return replace(
            note, drafter=before.drafter, speculative=before.speculative, drafters=before.drafters
        )


@dataclass
class WeightsBoard:
    """Stores the note of a model.

    Args:
        deployment: application and deployment of the engines.
        settings: digest of the engines' configuration; a different one has its own note.
    """

    deployment: str
    settings: str

    def read(self) -> WeightsNote | None:
        """Returns the note, or None."""
        found = internal_kv._internal_kv_get(self._key)
        return None if found is None else WeightsNote(**json.loads(found))

    def write(self, note: WeightsNote) -> None:
        """Replaces the note."""
        internal_kv._internal_kv_put(self._key, json.dumps(asdict(note)).encode())

    @property
    def _key(self) -> bytes:
        return f"outrider weights {self.deployment} {self.settings}".encode()


class LoadingBoard(logging.Handler):
    """Publishes the progress of an engine that is loading and therefore cannot answer yet.

    Within the context, Ray's head stores the last progress line that this process logs.
    """

    def __init__(self, application: str, replica: str) -> None:
        super().__init__()
        self._key = _loading_prefix(application) + replica.encode()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            internal_kv._internal_kv_put(self._key, record.getMessage().encode())
        except Exception:  # noqa: BLE001 -- Ray's head is away: loading goes on
            self.handleError(record)

    def __enter__(self) -> None:
        logging.getLogger(LOGGER).addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger(LOGGER).removeHandler(self)
        with suppress(Exception):  # Ray's head is away: `forget_loading` deletes it
            internal_kv._internal_kv_del(self._key)


def forget_loading(application: str) -> None:
    """Deletes the lines of engines that died while loading."""
    for key in internal_kv._internal_kv_list(_loading_prefix(application)):
        internal_kv._internal_kv_del(key)


def loading_lines(application: str) -> list[str]:
    """Returns the last progress line of every engine of the application that is loading."""
    keys = sorted(internal_kv._internal_kv_list(_loading_prefix(application)))
    found = (internal_kv._internal_kv_get(key) for key in keys)
    return [line.decode() for line in found if line is not None]


def _loading_prefix(application: str) -> bytes:
    return f"outrider loading {application}/".encode()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's engine settings, and how Serve deploys its engines."""

    config: EngineConfig
    deployment: DeploymentConfig

    @property
    def name(self) -> str:
        """The name by which clients choose the model."""
        return self.config.model_name

    @property
    def settings(self) -> str:
        """A digest of the engine's configuration."""
        settings = json.dumps(self.config.model_dump(mode="json"), sort_keys=True)
        return sha256(settings.encode()).hexdigest()

    @property
    def names(self) -> list[str]:
        """The names of the model and of its adapters."""
        return [self.name, *(each.name for each in self.config.lora_modules)]

    @property
    def deployment_name(self) -> str:
        """Name of the engines' deployment, if the application has several models."""
        return f"{ENGINE}:{self.name.replace('/', '--').replace('#', '-')}"

    @property
    def max_engines(self) -> int:
        """Maximum number of engines."""
        count, scaling = self.deployment.num_replicas, self.serve_options()
        most = scaling.get("autoscaling_config", {}).get("max_replicas", count)
        return int(most)

    @property
    def max_completions(self) -> int | None:
        """Requests that an ingress may queue at once; None: no limit."""
        queued = self.deployment.max_queued_requests
        if queued is None:
            return self.config.max_queued_requests
        return max(1, queued) if queued >= 0 else None

    @property
    def max_each(self) -> int | None:
        """Requests that an engine gets at once; None: as many as its own queue accepts."""
        config, section = self.config, self.deployment
        if section.max_ongoing_requests is not None or not section.scales:
            return section.max_ongoing_requests
        # Enough requests wait in the engine to fill its next batch; new engines share the others.
        return config.max_num_seqs + min(config.max_num_seqs, config.max_queued_requests)

    @property
    def max_waiting(self) -> int:
        """Requests that wait in an ingress for an engine with room; negative: no limit."""
        queued = self.deployment.max_queued_requests
        return self.config.max_queued_requests if queued is None else queued

    def serve_options(self) -> dict[str, Any]:
        """Returns the arguments of `serve.deployment` for the engines."""
        section = self.deployment
        scaling = autoscaling(section, self.config.max_num_seqs)
        fixed = {"num_replicas": section.num_replicas}
        return {
            "request_router_config": {"request_router_class": _ROUTER},
            "health_check_period_s": section.health_check_period_s,
            "health_check_timeout_s": section.health_check_timeout_s,
            "graceful_shutdown_timeout_s": section.graceful_shutdown_timeout_s + SETTLE_S,
            "ray_actor_options": {"num_cpus": 0, **section.ray_actor_options},
            "user_config": section.user_config,
            **(fixed if scaling is None else {"autoscaling_config": scaling}),
        }
