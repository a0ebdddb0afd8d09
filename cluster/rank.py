"""One rank as a Ray actor: a thin shell around `workers/worker.py`.

The methods are called in this order: warm, place, join, load, allocate (`rank_actors.py`), listen,
lead (only on a node's first rank), sentinel (`rank_actors.py`). A spare is called with warm, and
with take_over once it is needed. A rank that outlives its engine continues with renew and allocate
for the next engine.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.placement_group import remove_placement_group

from ..errors import WorkerError
from ..workers.model.checkpoint.progress import Amount
from ..workers.spec import DeviceStepReport, Leased, RankLocation, WorkerReport, WorkerSpec
from ..workers.transport import framing, wire
from ..workers.transport.socket_channel import SharedEnd, beat, serve
from .process import keep_trimmed, start_thread, start_watchdog, without_collecting

if TYPE_CHECKING:
    from ..workers.worker import Worker

log = logging.getLogger(__name__)
_ACCEPT_TIMEOUT_S = 60.0
_LAST_ANSWER_S = 0.2
_PARENT_POLL_S = 1.0
_KEEPER_POLL_S, _KEEPER_TIMEOUT_S = 2.0, 10.0
_STOPPED = 0.4  # of `heartbeat_timeout_s`; a short network failure does not end a rank
_LAST_STEP_S = 5.0  # that a rank may still compute after its engine is gone
# Read when torch is loaded. In a `runtime_env`, they would keep Ray from using a waiting process.
_ENV = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class RankPlace:
    """Node and address of a rank."""

    node_id: str
    host: str
    free_port: int
    devices: str | None = None  # CUDA_VISIBLE_DEVICES


class Rank:
    """The actor.

    Args:
        keeper: if given, the rank waits for another engine when its own disconnects, and ends once
            it has neither engine nor keeper; None: the rank ends with its engine.
    """

    def __init__(self, spec: WorkerSpec, keeper: Any = None) -> None:
        os.environ.update(_ENV)
        self._spec = spec
        self._keeper = keeper
        if keeper is not None:
            start_thread("keeper", self._follow_keeper)
        self._serving: threading.Thread | None = None
        self._rank = 0
        self._worker: Worker | None = None
        self._followers: list[socket.socket] = []
        self._beats: list[socket.socket] = []  # connections to a shared drafter's followers
        keep_trimmed()
        start_thread("parent", _follow_parent)

    def place(self) -> RankPlace:
        """Returns node, address, and a port that was free when probed."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        return RankPlace(node, host, port, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def warm(self, *, models: bool = True) -> RankLocation:
        """Performs the part of loading that needs no device; a spare waits after it.

        Args:
            models: also builds the models without weights, to import their modules.
        """
        with without_collecting():
            import torch

            from ..workers import worker as _  # noqa: F401 - its imports take most of the time
            from ..workers.model.bridge import build_meta
            from ..workers.model.info import read_config

        for spec in (self._spec.target, self._spec.draft):
            if models and spec is not None:
                config = read_config(Path(spec.path), trust_remote_code=spec.trust_remote_code)
                build_meta(config, torch.float32, trust_remote_code=spec.trust_remote_code)
        return RankLocation(ray.get_runtime_context().get_node_id(), os.getpid())

    def take_over(self, spec: WorkerSpec, devices: str | None) -> None:
        """Turns a spare into a rank of `spec`, on the devices of the rank that it replaces."""
        self._spec = spec
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices

    def join(self, rank: int, host: str, port: int, generation: int, spread: bool) -> None:
        """Joins the process group; if it is `spread` over nodes, gloo and NCCL need an
        interface."""
        from ..workers.collective import Collective
        from ..workers.devices import pick_device
        from ..workers.worker import Worker

        if spread:
            name = interface_of(ray.util.get_node_ip_address())
            if name is not None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        self._rank = rank
        granted = bool(ray.get_gpu_ids())
        device = pick_device(self._spec.device, granted=granted)
        collective = Collective.connect(
            "nccl" if device.type == "cuda" else "gloo",
            host,
            port,
            rank,
            self._spec.size,
            generation,
            self._spec.timeout_s,
            device,
            symmetric_memory=self._spec.symmetric_memory == "auto",
            num_parts=self._spec.stages,
        )
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._worker = Worker(self._spec, collective, device, node, address)

    def load(self, known: WorkerReport | None) -> WorkerReport:
        """Loads this rank's shards; `known` is the report of the rank that it replaces."""
        assert self._worker is not None
        report = self._worker.load(known)
        self._worker.freeze()  # because `renew` collects garbage while streams wait
        return report

    def progress(self) -> Amount:
        """Returns how much of this rank's weights is loaded; called while it loads."""
        return Amount() if self._worker is None else self._worker.progress.amount

    def renew(self) -> None:
        """Drops the requests of an engine that has disconnected.

        Raises:
            WorkerError: a step is still running, because other ranks never received it.
        """
        serving = self._serving
        if serving is not None:
            serving.join(_LAST_STEP_S)
            if serving.is_alive():
                raise WorkerError("a step of the last engine does not end")
        assert self._worker is not None
        self._worker.renew()

    def adopt(self, keeper: Any) -> None:
        """Replaces a keeper that died."""
        self._keeper = keeper

    def allocate(self, num_target_blocks: int, num_draft_blocks: int) -> DeviceStepReport:
        """Allocates the KV caches."""
        assert self._worker is not None
        return self._worker.allocate(num_target_blocks, num_draft_blocks)

    def listen(self, secret: bytes, same_node: bool) -> framing.Address:
        """Opens this rank's end of the step channel and serves it in a thread.

        From then on, a watchdog kills a stopped rank soon, which closes its connections. The engine
        then sees a death, which it notices at once on any node.
        """
        start_watchdog(_STOPPED * self._spec.heartbeat_timeout_s, only_stopped=True)
        host = None if same_node else ray.util.get_node_ip_address()
        server, address = framing.listen(host)
        self._serving = start_thread("steps", self._serve, server, address, secret)
        return address

    def lead(self, followers: list[framing.Address], secret: bytes) -> None:
        """Connects to the node's other ranks, to forward steps; the engine connects later."""
        self._followers = [
            framing.connect(each, secret, _ACCEPT_TIMEOUT_S, framing.STEPS) for each in followers
        ]

    def share(self, followers: list[framing.Address], secret: bytes) -> list[framing.Address]:
        """Opens rank 0's end for any number of engines, on a Unix socket and on TCP.

        Args:
            followers: addresses of the group's other ranks, which receive all messages in order.
        """
        start_watchdog(_STOPPED * self._spec.heartbeat_timeout_s, only_stopped=True)
        for each in followers:
            steps, beats = (
                framing.connect(each, secret, _ACCEPT_TIMEOUT_S, purpose)
                for purpose in (framing.STEPS, framing.BEATS)
            )
            self._followers.append(steps)
            self._beats.append(beats)
        ends = [framing.listen(None), framing.listen(ray.util.get_node_ip_address())]
        shared = SharedEnd([server for server, _ in ends], secret, self._answer_lease)
        start_thread("steps", shared.run)
        return [address for _, address in ends]

    def _answer_lease(self, lease: int, message: Any) -> Any:
        """Answers one engine on rank 0; if ranks may differ after a failure, the group ends."""
        assert self._worker is not None
        leased = Leased(lease, message)
        try:
            for follower in self._followers:
                framing.send(follower, wire.encode(leased))
            return self._worker.handle(leased)
        except Exception:
            if self._followers:
                log.exception("the ranks of a shared drafter end")
                threading.Timer(_LAST_ANSWER_S, os._exit, (1,)).start()
            raise

    def sentinel(self) -> None:
        """Never returns; fails when this process dies."""
        threading.Event().wait()

    def _serve(self, server: socket.socket, address: framing.Address, secret: bytes) -> None:
        assert self._worker is not None
        with server:
            ends = _accept_both(framing.Acceptor(server, secret))
        framing.unlink(address)
        stopped = threading.Event()
        start_thread("heartbeat", beat, ends[framing.BEATS], stopped)
        with ends[framing.STEPS], ends[framing.BEATS]:
            serve(
                ends[framing.STEPS],
                self._rank,
                self._worker.begin,
                self._followers,
                self._spec.spin_s,
                self._worker.beside,
            )
            stopped.set()
        for follower in self._followers:
            follower.close()
        self._followers = []
        if self._keeper is None:
            os._exit(0)  # before the sentinel, which would delay an orderly exit

    def _follow_keeper(self) -> None:
        """Ends this process and frees its placement group once it has neither keeper nor engine."""
        while True:
            time.sleep(_KEEPER_POLL_S)
            keeper, serving = self._keeper, self._serving
            try:
                ray.get(keeper.recall.remote(), timeout=_KEEPER_TIMEOUT_S)
            except (GetTimeoutError, ActorUnavailableError):
                continue  # it is busy or being restarted
            except RayError:
                if keeper is self._keeper and (serving is None or not serving.is_alive()):
                    break
        try:
            if self._worker is not None:  # ranks that may continue share a spare's placement group
                remove_placement_group(ray.util.get_current_placement_group())
        finally:
            os._exit(0)


def _follow_parent() -> None:
    """Ends this process with the raylet that started it, regardless of other threads."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


def _accept_both(acceptor: framing.Acceptor) -> dict[bytes, socket.socket]:
    """Accepts the engine's two connections; returns them by purpose."""
    ends: dict[bytes, socket.socket] = {}
    while {framing.STEPS, framing.BEATS} - set(ends):
        connection = acceptor.next(_ACCEPT_TIMEOUT_S)
        ends[framing.receive(connection, max_bytes=16)] = connection
    acceptor.close()
    return ends


def interface_of(host: str) -> str | None:
    """Returns the network interface with the address `host`, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None
