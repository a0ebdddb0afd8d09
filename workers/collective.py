"""Collectives of one group of ranks, over raw process-group objects.

Nothing here uses `torch.distributed`'s globals, so a process can discard a group and build a new
one, and ranks may be threads of one process (tests, local mode).
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import GroupName

from ..errors import ConfigError, WorkerError

MAX_RANKS = 8
MAX_BYTES = 2 << 20  # per message; the size of the shared buffer
ALIGNMENT = 16  # bytes that the kernels load at once
Backend = Literal["gloo", "nccl"]
Verb = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]
DTYPES = (torch.bfloat16, torch.float32)  # that the kernels add
_ONE_SHOT_BYTES = {2: MAX_BYTES, 4: 512 << 10, MAX_RANKS: 256 << 10}  # by the most ranks
"""Messages up to this size are read from all ranks in one exchange; larger ones take two.

With two ranks, both ways read equally much.
"""


class Way(Enum):
    """How a message is summed."""

    ONE_SHOT = "one shot"
    TWO_SHOT = "two shots"
    MULTICAST = "multicast"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank runs; has only strings, so that it can be sent through a store."""

    host: str  # host name and boot id: the containers of one machine differ
    gpu: str  # UUID; "": no CUDA device

    @classmethod
    def here(cls, device: torch.device) -> RankPlace:
        """Returns the place of this process and `device`."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        started = boot.read_text().strip() if boot.exists() else ""
        return cls(f"{socket.gethostname()} {started}", gpu_of(device))


def gpu_of(device: torch.device) -> str:
    """Returns the GPU's UUID; "" if `device` is not a CUDA device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


class SharedMemory:
    """A buffer of `MAX_BYTES` per rank, mapped on all ranks by torch's symmetric memory, with sums.

    Args:
        store: where the ranks exchange handles; used by this group only.
        name: name of the group, unique within the process.

    The rendezvous finds ranks through a process group that is registered by name. That group only
    provides its store: it transfers no tensors and is not registered in `torch.distributed`.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, device: torch.device) -> None:
        from torch._C import _distributed_c10d as c10d
        from torch._C._autograd import DeviceType

        # Each rank may see only its own GPU, so that all ranks have the same device index.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self._name = GroupName(name)
        self._group = register(store, self._name, rank, size)
        memory = c10d._SymmetricMemory
        self._buffer = memory.empty_strided_p2p((MAX_BYTES,), (1,), torch.uint8, device, name)
        self._handle = memory.rendezvous(self._buffer, name)  # owns the mapping of the peers
        self.has_multicast = (  # whether the switch between the GPUs can add
            memory.has_multicast_support(DeviceType.CUDA, device.index or 0)
            and self._handle.multicast_ptr != 0
        )
        self._ops = torch.ops.symm_mem

    def part(self, tensor: Tensor) -> Tensor:
        """Returns the start of the buffer as a flat tensor with the dtype and size of `tensor`."""
        return self._buffer[: tensor.numel() * tensor.itemsize].view(tensor.dtype)

    def one_shot(self, part: Tensor, tensor: Tensor) -> None:
        """Sums `tensor` [num_elements] in place; all ranks' parts are written and read."""
        self._ops.one_shot_all_reduce_copy_out(part, tensor, "sum", self._name, tensor)

    def two_shot(self, part: Tensor) -> None:
        """Sums all ranks' parts in place."""
        self._ops.two_shot_all_reduce_(part, "sum", self._name)

    def multicast(self, part: Tensor) -> None:
        """Sums all ranks' parts in place; the switch adds."""
        self._ops.multimem_all_reduce_(part, "sum", self._name)

    def close(self) -> None:
        del self._handle, self._buffer, self._group
        unregister(self._name)


class SymmetricSums:
    """Sums of small messages over the ranks of one node, through shared memory.

    A decode step sums a few rows after every block, where NCCL's launch costs more than the data.
    Here, one kernel copies a rank's part into a buffer that is mapped on all ranks, waits for the
    other ranks' flags and adds. With one shot, every rank adds the whole message. With two shots,
    every rank adds a share and writes it to all ranks; the switch adds and writes if it can. Every
    element is added in rank order or by a single rank, so all ranks get the same bits. Larger
    messages use NCCL. All kernels are torch's (`torch.ops.symm_mem`, torch 2.13) and run on the
    current stream, so they can be captured.
    """

    def __init__(self, memory: SharedMemory, num_ranks: int) -> None:
        self.memory = memory
        self._one_shot_bytes = next(
            limit for most, limit in _ONE_SHOT_BYTES.items() if num_ranks <= most
        )

    @property
    def description(self) -> str:
        """Returns the description for the log and `/stats`."""
        added = ", added by the switch" if self.memory.has_multicast else ""
        return f"symmetric memory up to {MAX_BYTES >> 20} MiB{added}; nccl beyond"

    def way(self, tensor: Tensor) -> Way | None:
        """Returns how `tensor` is summed; None: not by this class. All ranks return the same."""
        num_bytes = tensor.numel() * tensor.itemsize
        if tensor.dtype not in DTYPES or not 0 < num_bytes <= MAX_BYTES or num_bytes % ALIGNMENT:
            return None
        if tensor.storage_offset() * tensor.itemsize % ALIGNMENT:
            return None
        if num_bytes <= self._one_shot_bytes:
            return Way.ONE_SHOT
        return Way.MULTICAST if self.memory.has_multicast else Way.TWO_SHOT

    def add(self, tensor: Tensor) -> bool:  # any shape, contiguous
        """Sums `tensor` over the ranks in place; returns False and does nothing if unsupported."""
        way = self.way(tensor)
        if way is not None:
            self.add_by(way, tensor)
        return way is not None

    def add_by(self, way: Way, tensor: Tensor) -> None:  # any shape, contiguous
        """Sums `tensor` over the ranks in place."""
        flat = tensor.view(-1)
        part = self.memory.part(flat)
        if way is Way.ONE_SHOT:
            self.memory.one_shot(part, flat)
            return
        part.copy_(flat)
        if way is Way.MULTICAST:
            self.memory.multicast(part)
        else:
            self.memory.two_shot(part)
        flat.copy_(part)

    def is_right(self, rank: int, num_ranks: int, device: torch.device) -> bool:
        """Returns True if every way sums known values correctly; collective."""
        ways = [Way.ONE_SHOT, Way.MULTICAST if self.memory.has_multicast else Way.TWO_SHOT]
        right = True
        for dtype in DTYPES:
            for way in ways:
                values = torch.arange(1024, device=device).remainder(7).to(dtype) + rank
                wanted = torch.arange(1024, device=device).remainder(7) * num_ranks
                self.add_by(way, values)
                wanted += num_ranks * (num_ranks - 1) // 2
                right &= bool((values == wanted.to(dtype)).all())
        return right


def obstacle(places: Sequence[RankPlace]) -> str:
    """Returns why ranks at `places` cannot share memory, or ""; the same on every rank."""
    if len(places) > MAX_RANKS:
        return f"{len(places)} ranks are more than {MAX_RANKS}"
    if not all(place.gpu for place in places):
        return "a rank has no CUDA device"
    if len({place.host for place in places}) > 1:
        return "the ranks are on several nodes"
    if len({place.gpu for place in places}) < len(places):
        return "ranks share a GPU"
    return ""


def open_sums(
    places: Sequence[RankPlace],
    rank: int,
    device: torch.device,
    share: Callable[[], SharedMemory],
    all_true: Callable[[bool], bool],  # collective: whether all ranks passed True
) -> tuple[SymmetricSums | None, str]:
    """Returns the sums, or None and the reason; the outcome is the same on all ranks."""
    reason = obstacle(places)
    if reason:
        return None, reason
    memory: SharedMemory | None = None
    try:
        memory = share()
    except (RuntimeError, OSError, AttributeError) as error:  # the driver's, or another torch
        reason = f"symmetric memory failed: {' '.join(str(error).split())[:200]}"
    if not all_true(memory is not None) or memory is None:
        if memory is not None:
            memory.close()
        return None, reason or "symmetric memory failed on another rank"
    sums = SymmetricSums(memory, len(places))
    try:
        right = sums.is_right(rank, len(places), device)
    except RuntimeError as error:  # a kernel cannot be launched
        right, reason = False, f"symmetric memory failed: {' '.join(str(error).split())[:200]}"
    if not all_true(right):
        memory.close()
        return None, reason or "sums over symmetric memory are wrong"
    return sums, ""


def register(store: Any, name: GroupName, rank: int, size: int) -> Any:
    """Registers `store` with torch's symmetric memory as the store of the group `name`.

    The registration lasts as long as the returned group.
    """
    from torch._C import _distributed_c10d as c10d

    group = c10d.ProcessGroup(store, rank, size)
    group._set_group_name(name)
    c10d._register_process_group(name, group)
    return group


def unregister(name: GroupName) -> None:
    """Undoes `register`."""
    from torch._C import _distributed_c10d as c10d

    c10d._unregister_process_group(name)


class Meeting:
    """A rendezvous at which threads exchange tensors.

    Args:
        timeout_s: how long a thread waits for the others.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._brought: list[tuple[Verb, Tensor, Tensor] | None] = [None] * size
        self._barrier = threading.Barrier(size, self._exchange)
        self._num_done = 0

    def exchange(self, rank: int, verb: Verb, tensor: Tensor, result: Tensor) -> None:
        """Combines all ranks' tensors by `verb` and writes the result to `result`; collective.

        Raises:
            RuntimeError: not all ranks arrived in time, or one has left.
        """
        self._brought[rank] = verb, tensor, result
        before = self._num_done  # an exchange needs this rank, so the count cannot change before
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            if self._num_done > before:
                return  # the exchange is done; another rank has left since
            raise RuntimeError(f"rank {rank} waited in vain for the others' {verb}") from None

    def _exchange(self) -> None:
        """Runs in the last thread to arrive, while the others wait."""
        brought = [each for each in self._brought if each is not None]
        self._brought = [None] * len(brought)
        verbs, tensors, results = zip(*brought, strict=True)
        kinds = {(verb, tensor.dtype, tensor.numel()) for verb, tensor in zip(verbs, tensors)}
        assert len(kinds) == 1, kinds
        with torch.inference_mode():
            if verbs[0] == "all_gather":
                torch.cat(tensors, out=results[0])
            else:
                for tensor in tensors[1:]:
                    results[0].add_(tensor)
            for result in results[1:]:
                result.copy_(results[0])
        self._num_done += 1

    def leave(self) -> None:
        """Ends the others' waiting; callable from any thread."""
        self._barrier.abort()


class ThreadGroup:
    """One thread's membership in a gloo group. The threads sum and gather CPU tensors themselves.

    Gloo's own way, through sockets, takes a dozen switches between threads per operation.
    """

    def __init__(self, gloo: Any, meeting: Meeting, rank: int) -> None:
        self._gloo, self._meeting, self._rank = gloo, meeting, rank
        self.alltoall_base, self.broadcast = gloo.alltoall_base, gloo.broadcast
        self.send, self.recv = gloo.send, gloo.recv

    def allreduce(self, tensor: Tensor) -> Any:
        if tensor.device.type != "cpu":
            return self._gloo.allreduce(tensor)
        self._meeting.exchange(self._rank, "all_reduce", tensor, tensor)
        return _Done()

    def _allgather_base(self, parts: Tensor, flat: Tensor) -> Any:
        if flat.device.type != "cpu":
            return self._gloo._allgather_base(parts, flat)
        self._meeting.exchange(self._rank, "all_gather", flat, parts)
        return _Done()

    def abort(self) -> None:
        self._meeting.leave()
        self._gloo.abort()


class _Done:
    """Completed work."""

    def wait(self) -> None: ...


_MAX_REASON_BYTES = 512


@dataclass(frozen=True, slots=True)
class Call:
    """An operation of a `Collective` on a tensor of some shape."""

    verb: Verb
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def operand(self) -> Tensor:
        """Returns a tensor to call the operation with."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class Collective:
    """One rank's membership in a group. With size 1 every operation is a no-op."""

    def __init__(self, rank: int, size: int, group: Any | None) -> None:
        assert 0 <= rank < size, (rank, size)
        assert (group is None) == (size == 1), (size, group)
        self.rank = rank
        self.size = size
        self._group = group
        self._sums: SymmetricSums | None = None
        self._rehearsed: list[Call] | None = None  # None: calls are executed
        self._make: Callable[[str, int, int], Collective] | None = None  # connects a subgroup
        self._parts: tuple[Collective, ...] = ()  # the groups that `divided` created
        self.all_reduce_by = ""  # what sums, for the log and `/stats`; "": a group of one

    def all_reduce(self, tensor: Tensor) -> Tensor:  # any shape, contiguous; the same on every rank
        """Sums over the ranks in place; returns `tensor`."""
        if self.size > 1 and not self._rehearses("all_reduce", tensor):
            group = self._live()
            if self._sums is None or not self._sums.add(tensor):
                group.allreduce(tensor).wait()
        return tensor

    def all_gather(
        self,
        tensor: Tensor,  # any shape; the same on every rank
        dim: int = -1,
    ) -> Tensor:
        """Returns every rank's tensors, joined along `dim` in rank order."""
        if self.size == 1:
            return tensor
        if self._rehearses("all_gather", tensor):
            return torch.cat([tensor] * self.size, dim=dim)
        flat = tensor.contiguous().view(-1)
        parts = flat.new_empty(self.size * len(flat))  # NCCL writes into it, without a copy
        self._live()._allgather_base(parts, flat).wait()
        return torch.cat(parts.view(self.size, *tensor.shape).unbind(), dim=dim)

    def all_to_all(
        self,
        tensor: Tensor,  # [num_rows, ...], the same on every rank; its rows are shared out evenly
    ) -> Tensor:
        """Sends part i of the rows to rank i; returns what all ranks sent here, in rank order."""
        if self.size == 1:
            return tensor
        assert len(tensor) % self.size == 0, (tensor.shape, self.size)
        if self._rehearses("all_to_all", tensor):
            return tensor.clone()
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._live().alltoall_base(received, tensor.contiguous(), [], []).wait()
        return received

    def broadcast(
        self,
        tensor: Tensor,  # any shape, contiguous; the same on every rank
        root: int = 0,
    ) -> Tensor:
        """Copies `root`'s values into every rank's `tensor` in place; returns it."""
        if self.size > 1 and not self._rehearses("broadcast", tensor):
            self._live().broadcast(tensor, root).wait()
        return tensor

    def send(self, tensor: Tensor, peer: int) -> None:  # any shape, contiguous
        """Sends to `peer`, which receives the same shape; on a GPU, on the current stream."""
        self.start_send(tensor, peer).wait()

    def start_send(self, tensor: Tensor, peer: int) -> Any:  # any shape, contiguous
        """Starts to send; `tensor` must not change until `wait` of the returned object."""
        return self._live().send([tensor], peer, 0)

    def receive(self, tensor: Tensor, peer: int) -> Tensor:  # any shape, contiguous
        """Receives `peer`'s values in place; returns `tensor`."""
        self._live().recv([tensor], peer, 0).wait()
        return tensor

    @contextmanager
    def rehearsal(self) -> Iterator[list[Call]]:
        """Within it, no rank waits for another: results have the right shape and arbitrary values.

        Yields the list of recorded calls, for `exercise`.
        """
        calls: list[Call] = []
        self._rehearsed = calls
        try:
            yield calls
        finally:
            self._rehearsed = None

    def _rehearses(self, verb: Verb, tensor: Tensor) -> bool:
        if self._rehearsed is None:
            return False
        self._rehearsed.append(Call(verb, tuple(tensor.shape), tensor.dtype, tensor.device))
        return True

    def exercise(
        self,
        calls: Sequence[Call],  # the same on every rank
        operands: Sequence[Tensor],  # one per call; overwritten
    ) -> None:
        """Executes `calls`, which opens their connections and compiles their kernels."""
        for call, operand in zip(calls, operands, strict=True):
            getattr(self, call.verb)(operand)

    def abort(self) -> None:
        """Leaves the group without waiting. Blocked gloo peers wait until their timeout."""
        group, self._group = self._group, None
        self._sums = None  # the process ends and releases the mappings
        if group is not None:
            group.abort()
        for part in self._parts:
            part.abort()

    def divided(self, num_parts: int) -> tuple[Collective, Collective]:
        """Returns the group of this rank's part, and the group of ranks at its place in all parts.

        A part consists of neighbouring ranks. Collective; may be called once. `abort` also leaves
        these groups.
        """
        assert self._make is not None, "a group that was joined"
        assert self.size % num_parts == 0, (self.size, num_parts)
        length = self.size // num_parts
        part, place = divmod(self.rank, length)
        self._parts = (
            self._make(f"part-{part}", place, length),
            self._make(f"place-{place}", part, num_parts),
        )
        return self._parts

    def _live(self) -> Any:
        if self._group is None:
            raise WorkerError(f"rank {self.rank} has left its group of {self.size}")
        return self._group

    @staticmethod
    def single() -> Collective:
        """Returns a group of one rank."""
        return Collective(0, 1, None)

    @staticmethod
    def connect(
        backend: Backend,
        host: str,
        port: int,
        rank: int,
        size: int,
        generation: int,
        timeout_s: float,
        device: torch.device,
        *,
        symmetric_memory: bool = False,
        num_parts: int = 1,
    ) -> Collective:
        """Joins the other ranks at `host:port`, where rank 0 listens. Blocks until all have joined.

        `generation` separates the keys of this group from those of an earlier one. Between nodes,
        gloo binds the interface in `GLOO_SOCKET_IFNAME` (NCCL: `NCCL_SOCKET_IFNAME`).
        `symmetric_memory` sums small messages through shared memory where the ranks support it. If
        the group is going to be `divided` into `num_parts`, these are the ranks of a part.
        """
        if size == 1:
            return Collective.single()
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(host, port, size, rank == 0, timeout)
        whole = PrefixStore(f"generation-{generation}", store)

        def make(name: str, rank: int, size: int) -> Collective:
            collective = _joined(backend, PrefixStore(name, whole), rank, size, timeout, device)
            sums = name == "all" if num_parts == 1 else name.startswith("part")
            if symmetric_memory and backend == "nccl" and sums and size > 1:
                full_name = f"outrider-{port}-{generation}-{name}"
                collective._share_memory(PrefixStore(name, whole), device, full_name)
            return collective

        collective = make("all", rank, size)
        collective._make = make
        return collective

    def _share_memory(self, store: Any, device: torch.device, name: str) -> None:
        """Opens symmetric memory on all ranks or on none; collective."""
        here = RankPlace.here(device)
        store.set(f"place-{self.rank}", f"{here.host}\n{here.gpu}")
        found = [store.get(f"place-{rank}").decode().split("\n") for rank in range(self.size)]

        def all_true(own: bool) -> bool:
            return int(self.all_reduce(torch.tensor([own], dtype=torch.int32, device=device))) == (
                self.size
            )

        self._sums, reason = open_sums(
            [RankPlace(host, gpu) for host, gpu in found],
            self.rank,
            device,
            lambda: SharedMemory(
                PrefixStore("symmetric-memory", store), name, self.rank, self.size, device
            ),
            all_true,
        )
        self.all_reduce_by = self._sums.description if self._sums else f"nccl: {reason}"

    @staticmethod
    def pair(store: Any, rank: int, timeout_s: float, device: torch.device) -> Collective:
        """Connects a group of two for `send` and `receive`: NCCL on CUDA, else gloo. Blocks."""
        backend: Backend = "nccl" if device.type == "cuda" else "gloo"
        return _joined(backend, store, rank, 2, timedelta(seconds=timeout_s), device)

    @staticmethod
    def threads(size: int, timeout_s: float) -> list[Collective]:
        """Returns the members of a group inside this process, one for each of `size` threads."""
        if size == 1:
            return [Collective.single()]
        store, timeout, cpu = HashStore(), timedelta(seconds=timeout_s), torch.device("cpu")
        meetings: dict[str, Meeting] = {}

        def make(name: str, rank: int, size: int) -> Collective:
            collective = _joined("gloo", PrefixStore(name, store), rank, size, timeout, cpu)
            if size > 1:
                meeting = meetings.setdefault(name, Meeting(size, timeout_s))
                collective._group = ThreadGroup(collective._group, meeting, rank)
                collective.all_reduce_by = "threads of one process"
            return collective

        def build(rank: int) -> Collective:
            collective = make("all", rank, size)
            collective._make = make
            return collective

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(build, range(size)))


class Agreement:
    """Exchanges problems between ranks, so that all ranks make the same decision.

    Its memory is allocated in advance, because a rank that is out of memory must take part, too.
    """

    def __init__(self, collective: Collective, device: torch.device) -> None:
        self._collective = collective
        size = (collective.size, _MAX_REASON_BYTES)
        self._reasons = torch.zeros(size, dtype=torch.uint8, device=device)

    def problem(self, own: str) -> str:
        """Returns the problem of the first rank that has one, or "" if none has. Collective."""
        if self._collective.size == 1:
            return own
        text = bytearray(own.encode()[:_MAX_REASON_BYTES].ljust(_MAX_REASON_BYTES, b"\0"))
        self._reasons.zero_()
        self._reasons[self._collective.rank].copy_(torch.frombuffer(text, dtype=torch.uint8))
        found = self._collective.all_reduce(self._reasons).cpu().numpy()
        texts = [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in found]
        if len(set(texts)) == 1:
            return texts[0]
        return next(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)


_BUCKET_BYTES = 64 << 20  # size at which collected tensors are sent as one message
_LOOK_S, _LOOKS_PER_CHECK = 0.001, 500  # interval of polls; polls per check for an abort
_GIVEN_UP = "given up"  # key in the store: the trainer has lost a rank, so waiting is pointless


class TrainerGroup:
    """A trainer (rank 0) and the ranks of engines that receive weights from it, without files.

    All of them join at the same time: the trainer creates a `TrainerGroup` while it calls the
    engine's `init_weights_update_group`. Then it calls `send` while it calls
    `update_weights_from_distributed`.

    Args:
        host, port: where rank 0 listens; every rank must be able to reach it.
        world_size: the number of ranks of all engines, plus one.
        name: name of the group, unique at that address.
        backend: "gloo", or "nccl" if the tensors are on GPUs.
        rank: rank of this process.
        timeout_s: limit for joining, and for every tensor.

    Raises:
        RuntimeError: from torch; not all ranks joined in time.
    """

    def __init__(
        self,
        host: str,
        port: int,
        world_size: int,
        *,
        name: str = "weights",
        backend: Backend = "gloo",
        rank: int = 0,
        timeout_s: float = 300.0,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cuda" if backend == "nccl" else "cpu")
        timeout = timedelta(seconds=timeout_s)
        self._store = TCPStore(host, port, world_size, rank == 0, timeout, wait_for_workers=True)
        scoped = PrefixStore(f"trainer-{name}", self._store)
        self._group = _new_group(backend, scoped, rank, world_size, timeout, self.device)
        self._rank = rank

    def send(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Sends these tensors to every rank, in this order; they may be on any device.

        Raises:
            RuntimeError: from torch; a rank is gone, so the group is unusable. Others are notified.
        """
        try:
            self._send(weights)
        except BaseException:
            self._store.set(_GIVEN_UP, "")
            raise

    def _send(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        bucket: list[Tensor] = []
        num_bytes = 0
        for _, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            flat = tensor.detach().to(self.device).contiguous().reshape(-1).view(torch.uint8)
            padded = _padded(len(flat))
            bucket += [flat, flat.new_zeros(padded - len(flat))]
            num_bytes += padded
            if num_bytes >= _BUCKET_BYTES:
                self._broadcast(torch.cat(bucket))
                bucket, num_bytes = [], 0
        if num_bytes:
            self._broadcast(torch.cat(bucket))

    def receive(
        self, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
    ) -> Iterator[Tensor]:
        """Yields the tensors of these types and shapes that the trainer sends, in host memory.

        Raises:
            RuntimeError: from torch; the trainer is gone, has given up, or is too late.
        """
        bucket: list[tuple[int, torch.dtype, Sequence[int]]] = []  # with their byte offsets
        num_bytes = 0
        last = len(shapes) - 1
        for index, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True)):
            bucket.append((num_bytes, dtype, shape))
            num_bytes += _padded(math.prod(shape) * dtype.itemsize)
            if num_bytes < _BUCKET_BYTES and index < last:
                continue
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            if num_bytes:
                self._broadcast(flat)
            flat = flat.cpu()
            for begin, kind, size in bucket:
                end = begin + math.prod(size) * kind.itemsize
                yield flat[begin:end].view(kind).reshape(tuple(size))
            bucket, num_bytes = [], 0

    def close(self) -> None:
        """Leaves the group."""
        self._group.abort()

    def _broadcast(self, flat: Tensor) -> None:
        """Broadcasts bytes, since not every backend supports every dtype."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work, num_looks = self._group.broadcast([flat], options), 0
        while self._rank and not work.is_completed():
            time.sleep(_LOOK_S)
            num_looks += 1
            if num_looks % _LOOKS_PER_CHECK == 0 and self._store.check([_GIVEN_UP]):
                raise RuntimeError("the trainer has lost a rank of the group")
        work.wait()


def _padded(num_bytes: int) -> int:
    """Returns the bytes of a tensor in a bucket, padded so that any dtype may begin after it."""
    return -(-num_bytes // 16) * 16


def _joined(
    backend: Backend, store: Any, rank: int, size: int, timeout: timedelta, device: torch.device
) -> Collective:
    """Joins a rank to the group that meets in `store`. Blocks until all have joined."""
    if size == 1:
        return Collective.single()
    collective = Collective(rank, size, _new_group(backend, store, rank, size, timeout, device))
    collective.all_reduce_by = backend
    return collective


def _new_group(
    backend: Backend, store: Any, rank: int, size: int, timeout: timedelta, device: torch.device
) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if not dist.is_nccl_available() or device.type != "cuda":
        raise ConfigError(
            f"backend 'nccl' needs a CUDA device and a torch built with NCCL, got {device}; "
            "use 'gloo'",
            field="backend",
        )
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def pair_store(host: str, port: int, timeout_s: float) -> Any:
    """Returns the store through which two processes form a `pair`.

    If `port` is 0, the store is hosted here at any free port; otherwise it is joined.
    """
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, 2, port == 0, timeout, wait_for_workers=False)
