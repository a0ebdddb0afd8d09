"""One rank as a Ray actor: a thin shell around `workers/worker.py`.

Methods are called in this order: warm, place, join, load, allocate (`rank_actors.py`), listen, lead
of a node's first rank, sentinel (`rank_actors.py`); of a spare first warm and, once it is needed,
take_over. A rank that outlives its engine continues with renew and allocate for the next one.
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
_STOPPED = 0.4  # of `heartbeat_timeout_s`: a network that is down for a moment ends no rank
_LAST_STEP_S = 5.0  # that a rank may still compute when its engine is gone
# Read when torch is loaded. As a `runtime_env`, Ray would start a process for it where one waits.
_ENV = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs."""

    node_id: str
    host: str
    free_port: int
    devices: str | None = None  # CUDA_VISIBLE_DEVICES


class Rank:
    """The actor.

    Args:
        keeper: with one, it waits for another engine when its own hangs up, and ends when it has
            neither; without one, it ends with its engine.
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
        self._beats: list[socket.socket] = []  # of a shared drafter's followers
        keep_trimmed()
        start_thread("parent", _follow_parent)

    def place(self) -> RankPlace:
        """Node, address, and a port that was free just now."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        return RankPlace(node, host, port, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def warm(self, *, models: bool = True) -> RankLocation:
        """Does what loading begins with and what needs no device: a spare then waits.

        Args:
            models: also makes the models without weights, whose modules it imports.
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
        """A spare becomes a rank of `spec`, with the devices of the one that it replaces."""
        self._spec = spec
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices

    def join(self, rank: int, host: str, port: int, generation: int, spread: bool) -> None:
        """Meets the other ranks. In a cluster `spread` over nodes, gloo and NCCL need a name."""
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
        """Reads this rank's shards; `known` is its predecessor's report."""
        assert self._worker is not None
        report = self._worker.load(known)
        self._worker.freeze()  # `renew` collects garbage while streams wait
        return report

    def progress(self) -> Amount:
        """How far this rank's weights are; called while it loads."""
        return Amount() if self._worker is None else self._worker.progress.amount

    def renew(self) -> None:
        """Forgets the requests of an engine that has hung up.

        Raises:
            WorkerError: it still computes a step, as ranks do whose peers never got it.
        """
        serving = self._serving
        if serving is not None:
            serving.join(_LAST_STEP_S)
            if serving.is_alive():
                raise WorkerError("a step of the last engine does not end")
        assert self._worker is not None
        self._worker.renew()

    def adopt(self, keeper: Any) -> None:
        """Another keeper is in the place of one that died."""
        self._keeper = keeper

    def allocate(self, num_target_blocks: int, num_draft_blocks: int) -> DeviceStepReport:
        """Makes the KV caches."""
        assert self._worker is not None
        return self._worker.allocate(num_target_blocks, num_draft_blocks)

    def listen(self, secret: bytes, same_node: bool) -> framing.Address:
        """Opens this rank's end of the step channel and serves it from a thread.

        From now on the rank ends soon where it is stopped, with its connections: to the engine it
        is a death then, which is noticed at once and on any node.
        """
        start_watchdog(_STOPPED * self._spec.heartbeat_timeout_s, only_stopped=True)
        host = None if same_node else ray.util.get_node_ip_address()
        server, address = framing.listen(host)
        self._serving = start_thread("steps", self._serve, server, address, secret)
        return address

    def lead(self, followers: list[framing.Address], secret: bytes) -> None:
        """Connects to the node's other ranks, to hand steps on; before the engine connects."""
        self._followers = [
            framing.connect(each, secret, _ACCEPT_TIMEOUT_S, framing.STEPS) for each in followers
        ]

    def share(self, followers: list[framing.Address], secret: bytes) -> list[framing.Address]:
        """Opens rank 0's end for any number of engines, on a Unix socket and on TCP.

        Args:
            followers: where the group's other ranks listen; they get every message in this order.
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
        """Rank 0's answer to one of the engines; a group whose ranks may differ is replaced."""
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
            os._exit(0)  # the sentinel would delay an orderly exit

    def _follow_keeper(self) -> None:
        """Ends this process, and frees its place, once it has neither a keeper nor an engine."""
        while True:
            time.sleep(_KEEPER_POLL_S)
            keeper, serving = self._keeper, self._serving
            try:
                ray.get(keeper.recall.remote(), timeout=_KEEPER_TIMEOUT_S)
            except (GetTimeoutError, ActorUnavailableError):
                continue  # it is busy, or is being started again
            except RayError:
                if keeper is self._keeper and (serving is None or not serving.is_alive()):
                    break
        try:
            if self._worker is not None:  # a spare's place is that of ranks that may go on
                remove_placement_group(ray.util.get_current_placement_group())
        finally:
            os._exit(0)


def _follow_parent() -> None:
    """Ends this process with the raylet that started it, whatever its other threads do."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


def _accept_both(acceptor: framing.Acceptor) -> dict[bytes, socket.socket]:
    """The engine's two connections, by what they are for."""
    ends: dict[bytes, socket.socket] = {}
    while {framing.STEPS, framing.BEATS} - set(ends):
        connection = acceptor.next(_ACCEPT_TIMEOUT_S)
        ends[framing.receive(connection, max_bytes=16)] = connection
    acceptor.close()
    return ends


def interface_of(host: str) -> str | None:
    """The network interface that has the address `host`."""
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
