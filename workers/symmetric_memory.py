"""Sums over the ranks of one node through memory that all of them read, for small messages.

A decode step sums a few rows after every block, where NCCL's start costs more than the data. Here
one kernel copies a rank's part into a buffer that is mapped on all ranks, waits for the others'
flags and adds: the whole message on every rank (one shot), or a share on each, which it writes to
all (two shots; the switch adds and writes, where it can). Every element is added in rank order or
by one rank, so all ranks get the same bits. Larger messages are NCCL's.

`collective.py` opens this at start and uses it in `all_reduce`. All kernels are torch's
(`torch.ops.symm_mem`, torch 2.13); they are launched on the current stream and can be captured.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

MAX_RANKS = 8
MAX_BYTES = 2 << 20  # of a message; the size of the shared buffer
ALIGNMENT = 16  # bytes that the kernels load at once
DTYPES = (torch.bfloat16, torch.float32)  # that the kernels add
_ONE_SHOT_BYTES = {2: MAX_BYTES, 4: 512 << 10, MAX_RANKS: 256 << 10}  # by the most ranks
"""Up to which size reading all parts beats a second exchange. With two ranks both read as much."""


class Way(Enum):
    """How a message is summed."""

    ONE_SHOT = "one shot"
    TWO_SHOT = "two shots"
    MULTICAST = "multicast"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank runs; of strings, so that it goes through a store."""

    host: str  # name and boot: containers of one machine differ
    gpu: str  # UUID; "": no CUDA device

    @classmethod
    def here(cls, device: torch.device) -> RankPlace:
        """Of this process and `device`."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        started = boot.read_text().strip() if boot.exists() else ""
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        return cls(f"{socket.gethostname()} {started}", gpu)


class SharedMemory(Protocol):
    """A buffer of `MAX_BYTES` on every rank, mapped on all of them, and the sums over it."""

    has_multicast: bool  # whether the switch between the GPUs adds

    def part(self, tensor: Tensor) -> Tensor:
        """The buffer's beginning, flat, in the dtype and number of elements of `tensor`."""
        ...

    def one_shot(self, part: Tensor, tensor: Tensor) -> None:
        """Sums `tensor` [num_elements] in place; all ranks' parts are written and read."""
        ...

    def two_shot(self, part: Tensor) -> None:
        """Sums all ranks' parts in place."""
        ...

    def multicast(self, part: Tensor) -> None:
        """Likewise, added by the switch."""
        ...

    def close(self) -> None:
        """Gives the memory back."""
        ...


class SymmetricSums:
    """The sums that go through shared memory, of one rank."""

    def __init__(self, memory: SharedMemory, num_ranks: int) -> None:
        self.memory = memory
        self._one_shot_bytes = next(
            limit for most, limit in _ONE_SHOT_BYTES.items() if num_ranks <= most
        )

    @property
    def description(self) -> str:
        """For the log and `/stats`."""
        added = ", added by the switch" if self.memory.has_multicast else ""
        return f"symmetric memory up to {MAX_BYTES >> 20} MiB{added}; nccl beyond"

    def way(self, tensor: Tensor) -> Way | None:
        """How `tensor` is summed; None: not here. Depends on what is the same on all ranks."""
        num_bytes = tensor.numel() * tensor.itemsize
        if tensor.dtype not in DTYPES or not 0 < num_bytes <= MAX_BYTES or num_bytes % ALIGNMENT:
            return None
        if tensor.storage_offset() * tensor.itemsize % ALIGNMENT:
            return None
        if num_bytes <= self._one_shot_bytes:
            return Way.ONE_SHOT
        return Way.MULTICAST if self.memory.has_multicast else Way.TWO_SHOT

    def add(self, tensor: Tensor) -> bool:  # any shape, contiguous
        """Sums `tensor` over the ranks in place; False: it is not for here, and unchanged."""
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
        """Whether sums of known values come out, in every way; collective."""
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
    """Why ranks at `places` cannot share memory, or nothing; the same on every rank."""
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
    """The sums, or why there are none: all ranks have them, or none has."""
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
    except RuntimeError as error:  # a kernel that cannot be launched
        right, reason = False, f"symmetric memory failed: {' '.join(str(error).split())[:200]}"
    if not all_true(right):
        memory.close()
        return None, reason or "sums over symmetric memory are wrong"
    return sums, ""


class TorchSharedMemory:
    """torch's symmetric memory.

    Args:
        store: where the ranks exchange handles, of this group alone.
        name: of the group, among those of the process.

    Its rendezvous finds ranks through a process group that is registered by name. That group only
    lends its store: no tensor goes through it, and it is not one of `torch.distributed`'s.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, device: torch.device) -> None:
        from torch._C import _distributed_c10d as c10d
        from torch._C._autograd import DeviceType

        # Each rank may see one GPU, so that all of them have the same index.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self._name = GroupName(name)
        self._group = register(store, self._name, rank, size)
        memory = c10d._SymmetricMemory
        self._buffer = memory.empty_strided_p2p((MAX_BYTES,), (1,), torch.uint8, device, name)
        self._handle = memory.rendezvous(self._buffer, name)  # owns the mapping of the peers
        self.has_multicast = (
            memory.has_multicast_support(DeviceType.CUDA, device.index or 0)
            and self._handle.multicast_ptr != 0
        )
        self._ops = torch.ops.symm_mem

    def part(self, tensor: Tensor) -> Tensor:
        return self._buffer[: tensor.numel() * tensor.itemsize].view(tensor.dtype)

    def one_shot(self, part: Tensor, tensor: Tensor) -> None:
        self._ops.one_shot_all_reduce_copy_out(part, tensor, "sum", self._name, tensor)

    def two_shot(self, part: Tensor) -> None:
        self._ops.two_shot_all_reduce_(part, "sum", self._name)

    def multicast(self, part: Tensor) -> None:
        self._ops.multimem_all_reduce_(part, "sum", self._name)

    def close(self) -> None:
        del self._handle, self._buffer, self._group
        unregister(self._name)


def register(store: Any, name: GroupName, rank: int, size: int) -> Any:
    """Makes `store` known to torch's symmetric memory as that of the group `name`.

    It is known for as long as the returned group lives.
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
