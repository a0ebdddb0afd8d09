"""Which sums go through symmetric memory and how; on a CPU over memory that threads share."""

from __future__ import annotations

import threading

import pytest
import torch

from outrider.errors import WorkerError
from outrider.workers import collective as symmetric
from outrider.workers.collective import RankPlace, SymmetricSums, Way, obstacle, open_sums

KIB, MIB = 1 << 10, 1 << 20
CPU = torch.device("cpu")
PLACES = [RankPlace("a", "gpu-0"), RankPlace("a", "gpu-1")]


class ThreadMemory:
    """Buffers of threads, summed in rank order between two barriers, as the kernels do."""

    def __init__(self, size: int, has_multicast: bool = False, error: float = 0.0) -> None:
        self.buffers = [torch.zeros(symmetric.MAX_BYTES, dtype=torch.uint8) for _ in range(size)]
        self.barrier = threading.Barrier(size)
        self.has_multicast, self.error = has_multicast, error
        self.closed: list[int] = []

    def of(self, rank: int) -> OfRank:
        return OfRank(self, rank)


class OfRank:
    """One rank's `SharedMemory`, which notes the ways."""

    def __init__(self, memory: ThreadMemory, rank: int) -> None:
        self._memory, self._rank = memory, rank
        self.has_multicast = memory.has_multicast
        self.ways: list[Way] = []

    def part(self, tensor):
        own = self._memory.buffers[self._rank]
        return own[: tensor.numel() * tensor.itemsize].view(tensor.dtype)

    def one_shot(self, part, tensor) -> None:
        part.copy_(tensor)
        self._add(Way.ONE_SHOT, part, tensor)

    def two_shot(self, part) -> None:
        self._add(Way.TWO_SHOT, part, part)

    def multicast(self, part) -> None:
        self._add(Way.MULTICAST, part, part)

    def close(self) -> None:
        self._memory.closed.append(self._rank)

    def _add(self, way, part, out) -> None:
        self.ways.append(way)
        self._memory.barrier.wait()
        size = part.numel() * part.itemsize
        parts = [each[:size].view(part.dtype) for each in self._memory.buffers]
        total = sum(parts[1:], parts[0].clone()) + self._memory.error
        self._memory.barrier.wait()
        out.copy_(total)


@pytest.mark.parametrize(
    ("num_ranks", "has_multicast", "num_bytes", "way"),
    [
        (2, False, 16, Way.ONE_SHOT),
        (2, True, 2 * MIB, Way.ONE_SHOT),
        (2, False, 2 * MIB + 16, None),
        (4, False, 512 * KIB, Way.ONE_SHOT),
        (3, False, 513 * KIB, Way.TWO_SHOT),
        (8, False, 256 * KIB, Way.ONE_SHOT),
        (8, True, 257 * KIB, Way.MULTICAST),
        (8, True, 2 * MIB + 16, None),
        (2, False, 24, None),  # the kernels load 16 bytes at once
        (2, False, 0, None),
    ],
)
def test_ways_by_size(num_ranks, has_multicast, num_bytes, way):
    sums = SymmetricSums(ThreadMemory(1, has_multicast).of(0), num_ranks)
    assert sums.way(torch.empty(num_bytes // 2, dtype=torch.bfloat16)) is way
    assert sums.way(torch.empty(num_bytes // 4, dtype=torch.float32)) is way


def test_what_the_kernels_cannot_add_is_left():
    sums = SymmetricSums(ThreadMemory(1).of(0), 2)
    for dtype in (torch.float16, torch.int32, torch.float64):
        tensor = torch.ones(64, dtype=dtype)
        assert not sums.add(tensor)
        assert (tensor == 1).all()
    assert not sums.add(torch.ones(65)[1:])  # not aligned


@pytest.mark.parametrize("has_multicast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_equal_the_group_s(run_ranks, monkeypatch, dtype, has_multicast):
    """Through `all_reduce`, in every way, beside messages that the group sums."""
    monkeypatch.setattr(symmetric, "_ONE_SHOT_BYTES", {8: 4096})
    memory = ThreadMemory(2, has_multicast)

    def work(collective):
        own = memory.of(collective.rank)
        collective._sums = SymmetricSums(own, 2)
        for rows in (1, 8, 3, MIB // 256):
            generator = torch.Generator().manual_seed(rows)
            both = torch.randint(-8, 9, (2, rows, 512), generator=generator).to(dtype)
            tensor = both[collective.rank].clone()
            assert collective.all_reduce(tensor) is tensor
            assert torch.equal(tensor, both.sum(0).to(dtype))
        collective.abort()
        with pytest.raises(WorkerError, match="has left"):
            collective.all_reduce(torch.ones(4))
        return own.ways

    larger = Way.MULTICAST if has_multicast else Way.TWO_SHOT
    first, second = run_ranks(2, work)
    assert first == second
    assert set(first) == {Way.ONE_SHOT, larger}
    assert len(first) == 3  # the last message is too large


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (PLACES, ""),
        ([PLACES[0], RankPlace("b", "gpu-1")], "several nodes"),
        ([PLACES[0], RankPlace("a", "")], "no CUDA device"),
        ([PLACES[0], PLACES[0]], "share a GPU"),
        ([RankPlace("a", f"gpu-{rank}") for rank in range(9)], "9 ranks"),
    ],
)
def test_obstacles(places, reason):
    assert reason in obstacle(places)
    assert (reason == "") == (obstacle(places) == "")


def opened(run_ranks, share, places=PLACES):
    """What `open_sums` returns on two ranks; `share(rank)` is a rank's memory, or raises."""

    def work(collective):
        def all_true(own: bool) -> bool:
            return int(collective.all_reduce(torch.tensor([own], dtype=torch.int32))) == 2

        rank = collective.rank
        return open_sums(places, rank, CPU, lambda: share(rank), all_true)

    return run_ranks(2, work)


def test_opened_on_all_ranks(run_ranks):
    memory = ThreadMemory(2)
    for sums, reason in opened(run_ranks, memory.of):
        assert sums is not None
        assert reason == ""
        assert sums.description == "symmetric memory up to 2 MiB; nccl beyond"
        assert sums.memory.ways == [Way.ONE_SHOT, Way.TWO_SHOT] * 2  # its own trial


def test_a_failure_on_one_rank_closes_all(run_ranks):
    memory = ThreadMemory(2)

    def share(rank):
        if rank == 1:
            raise RuntimeError("CUDA driver error:\n  invalid device")
        return memory.of(rank)

    first, second = opened(run_ranks, share)
    assert first == (None, "symmetric memory failed on another rank")
    assert second == (None, "symmetric memory failed: CUDA driver error: invalid device")
    assert memory.closed == [0]


def test_wrong_sums_are_not_used(run_ranks):
    memory = ThreadMemory(2, error=1.0)
    for sums, reason in opened(run_ranks, memory.of):
        assert sums is None
        assert reason == "sums over symmetric memory are wrong"
    assert sorted(memory.closed) == [0, 1]


def test_a_kernel_that_cannot_be_launched_closes_all(run_ranks):
    """On one rank, behind its last sum, so that the other is not in one."""
    memory = ThreadMemory(2)

    def share(rank):
        own = memory.of(rank)
        if rank == 1:
            two_shot, own.left = own.two_shot, 2

            def fail(part):
                two_shot(part)
                own.left -= 1
                if not own.left:
                    raise RuntimeError("CUDA error:\n  no kernel image")

            own.two_shot = fail
        return own

    (first, _), (second, reason) = opened(run_ranks, share)
    assert first is None
    assert second is None
    assert reason == "symmetric memory failed: CUDA error: no kernel image"
    assert sorted(memory.closed) == [0, 1]


def test_an_obstacle_opens_nothing(run_ranks):
    def share(rank):
        raise AssertionError(rank)

    for sums, reason in opened(run_ranks, share, [PLACES[0], PLACES[0]]):
        assert sums is None
        assert reason == "ranks share a GPU"


def test_a_group_is_known_by_its_name_until_it_is_closed():
    from torch._C import _distributed_c10d as c10d

    store = c10d.HashStore()
    for _ in range(2):
        held = symmetric.register(store, "outrider-test", 1, 2)
        group = c10d._resolve_process_group("outrider-test")
        assert (group.rank(), group.size()) == (held.rank(), held.size()) == (1, 2)
        symmetric.unregister("outrider-test")
        with pytest.raises(RuntimeError, match="outrider-test"):
            c10d._resolve_process_group("outrider-test")


def test_this_torch_has_the_operations():
    for name in ("one_shot_all_reduce_copy_out", "two_shot_all_reduce_", "multimem_all_reduce_"):
        schema = str(getattr(torch.ops.symm_mem, name).default._schema)
        assert "str reduce_op, str group_name" in schema
