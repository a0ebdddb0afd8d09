"""A tensor-parallel group over Ray actors, as the engine uses it.

Ray is the control plane: it places the ranks, starts them (`rank_actors.py`), and reports when one
died (a sentinel call that never returns, which fails within milliseconds of the process's death).
Ranks that are alive and do not run, or cannot be reached, are noticed by their missing heartbeats;
those that a signal has stopped are killed before (`process.py`). Steps go over the sockets of
`workers/transport`. A group with a dead rank is thrown away whole; a fresh one gets a
new generation, a new store and new sockets.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from ..errors import WorkerDiedError
from ..workers.group import WorkerGroup
from ..workers.spec import RankLocation, WorkerSpec
from ..workers.transport import framing
from ..workers.transport.socket_channel import Monitor, SocketChannel, routes
from .process import start_thread
from .rank_actors import Formed, RankActors, answers_of

if TYPE_CHECKING:
    from .keeper import OwnedRanks

_CONNECT_TIMEOUT_S = 30.0


class RayGroup(WorkerGroup):
    """Ranks in actors of their own.

    Raises (also from `restart`):
        ResourcesError: the cluster did not provide the resources in time.
        ConfigError, CheckpointError: a rank could not load.
    """

    is_concurrent = True

    def __init__(self, spec: WorkerSpec, source: RankActors | OwnedRanks) -> None:
        super().__init__(spec)
        self._source = source
        self._ranks: list[Any] = []
        self._monitor: Monitor | None = None
        self._form(reuse=True)

    def spares(self) -> list[RankLocation]:
        return self._source.spares()

    def respecify(self, spec: WorkerSpec) -> None:
        super().respecify(spec)
        self._source.respecify(spec)

    def _replace_ranks(self) -> None:
        self._form(reuse=False)

    def shutdown(self) -> None:
        self._hang_up()
        self._source.shutdown()

    def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close()
        if channel is not None:
            channel.close()
        self._ranks = []

    def _drop_ranks(self) -> None:
        """As a step does that meets a death: places, spares and keeper remain for what follows."""
        self._hang_up()
        self._source.drop()

    def _form(self, *, reuse: bool) -> None:
        """Gets ranks and opens their channel."""
        self._hang_up()
        node = ray.get_runtime_context().get_node_id()
        formed = self._source.form(node, reuse, self._spec)
        self._spec = formed.spec  # an engine before this one may have loaded other weights
        try:
            self._connect(formed, node)
        except (RayError, OSError) as error:
            self._drop_ranks()
            what = "died while it started" if isinstance(error, RayError) else "cannot be reached"
            raise WorkerDiedError(f"a worker {what}: {error}") from None

    def _connect(self, formed: Formed, node: str) -> None:
        secret = secrets.token_bytes(32)
        self._ranks = formed.ranks
        listening = [
            rank.listen.remote(secret, place.node_id == node)
            for rank, place in zip(formed.ranks, formed.places, strict=True)
        ]
        addresses = answers_of(listening)
        found = routes([place.node_id for place in formed.places], node)
        leading = [
            formed.ranks[leader].lead.remote([addresses[each] for each in followers], secret)
            for leader, followers in found.items()
            if followers
        ]
        answers_of(leading)
        self._watch([tuple(address) for address in addresses], list(found), secret)
        self.reports = formed.reports

    def _watch(self, addresses: list[framing.Address], connected: list[int], secret: bytes) -> None:
        """Opens the channel to the ranks `connected`; ends it when any rank dies or is silent."""
        steps, beats = (
            [
                framing.connect(addresses[rank], secret, _CONNECT_TIMEOUT_S, purpose)
                for rank in ranks
            ]
            for purpose, ranks in (
                (framing.STEPS, connected),
                (framing.BEATS, range(len(addresses))),
            )
        )
        channel = SocketChannel(steps, len(addresses), self._spec.spin_s)
        self._channel = channel

        def lost(reason: str) -> None:
            channel.kill(reason)
            if self._channel is channel:  # not what `shutdown` ended
                for told in self.on_death:
                    told(reason)

        self._monitor = Monitor(beats, self._spec.heartbeat_timeout_s, lost)
        sentinels = [rank.sentinel.remote() for rank in self._ranks]

        def wait() -> None:
            try:
                done, _ = ray.wait(sentinels, num_returns=1)
                ray.get(done)
            except RayError as error:
                lost(f"a worker died: {str(error).splitlines()[0]}")

        start_thread("sentinel", wait)
