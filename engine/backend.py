"""Where an engine's workers run: `Backend`, and the one that needs nothing but this process.

The Ray backend is `cluster/backend.py`; whoever starts an engine injects the one that the
configuration's `executor` names, so that this folder never imports Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..config import EngineConfig, ResourcesConfig
from ..drafters.lookup.pool import PoolLink
from ..errors import ConfigError
from ..workers.group import LocalGroup, WorkerGroup
from ..workers.spec import WorkerSpec


class Backend(Protocol):
    """Makes worker groups and the links between engines."""

    shares_pools: bool  # whether other engines may use `shared_pool` too

    def start(self, config: EngineConfig) -> None:
        """Makes the resources of one engine available (raises `ConfigError`)."""
        ...

    def stop(self) -> None:
        """Releases what `start` made; what existed before it is left alone."""
        ...

    def recall(self) -> int | None:
        """What `note` was given by an engine that this one follows, if there is one."""
        ...

    def note(self, vocab_size: int) -> None:
        """The checkpoints were checked; the target's vocabulary has this size."""
        ...

    def group(self, spec: WorkerSpec, resources: ResourcesConfig) -> WorkerGroup:
        """A started group of workers (raises `OutriderError`)."""
        ...

    def can_start_at_once(self, specs: Sequence[WorkerSpec], resources: ResourcesConfig) -> bool:
        """Whether none of these groups can take what another needs, whichever starts first."""
        ...

    def shared_pool(
        self, fingerprint: str, max_tokens: int, vocab_size: int, snapshot: str | None
    ) -> PoolLink:
        """The link to the pool of all engines (only where `shares_pools`)."""
        ...


class LocalBackend:
    """Ranks as threads of this process."""

    shares_pools = False

    def start(self, config: EngineConfig) -> None:
        pass

    def stop(self) -> None:
        pass

    def recall(self) -> int | None:
        return None

    def note(self, vocab_size: int) -> None:
        pass

    def group(self, spec: WorkerSpec, resources: ResourcesConfig) -> WorkerGroup:
        return LocalGroup(spec)

    def can_start_at_once(self, specs: Sequence[WorkerSpec], resources: ResourcesConfig) -> bool:
        return False  # they share this process

    def shared_pool(
        self, fingerprint: str, max_tokens: int, vocab_size: int, snapshot: str | None
    ) -> PoolLink:
        raise AssertionError("pools of this backend belong to one engine")


def local_backend(config: EngineConfig) -> Backend:
    """The backend of an engine that was given none.

    Raises:
        ConfigError: the configuration's executor is not `local`.
    """
    if config.executor != "local":
        raise ConfigError(
            f"executor: {config.executor!r} needs a backend; use outrider.LLM, or pass "
            "outrider.cluster.backend.backend_of(config)",
            field="executor",
        )
    return LocalBackend()
