"""Groups without globals: sums, gathers, broadcasts, and a group rebuilt in one process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outrider.errors import ConfigError, WorkerError
from outrider.workers.collective import Collective, Meeting, TrainerGroup

from ..helpers.ports import free_port

CPU = torch.device("cpu")


@pytest.fixture(params=["threads", "gloo"])
def run_both(request, run_ranks):
    """`run_ranks`, of ranks in one process and of those that would be in several."""

    def run(size, work):
        port = free_port()

        def joined(rank):
            return work(Collective.connect("gloo", "127.0.0.1", port, rank, size, 0, 20, CPU))

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(joined, range(size)))

    return run_ranks if request.param == "threads" else run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_reduce_sums_in_place(run_both, size, dtype):
    def work(collective):
        tensor = torch.full((1, 3, 4), collective.rank + 1.0, dtype=dtype)
        assert collective.all_reduce(tensor) is tensor
        return tensor

    for tensor in run_both(size, work):
        assert torch.equal(tensor, torch.full_like(tensor, size * (size + 1) / 2))


@pytest.mark.parametrize("dim", [-1, 0])
def test_all_gather_joins_in_rank_order(run_both, dim):
    def work(collective):
        return collective.all_gather(torch.full((2, 3), float(collective.rank)), dim=dim)

    expected = torch.cat([torch.zeros(2, 3), torch.ones(2, 3)], dim=dim)
    for gathered in run_both(2, work):
        assert torch.equal(gathered, expected)


def test_broadcast_gives_the_root_s_values(run_both):
    def work(collective):
        return collective.broadcast(torch.tensor([collective.rank + 5]), root=1)

    assert [int(tensor) for tensor in run_both(3, work)] == [6, 6, 6]


def test_a_group_of_one_does_nothing():
    collective, tensor = Collective.single(), torch.ones(2)
    assert collective.all_reduce(tensor) is tensor
    assert collective.all_gather(tensor) is tensor
    assert collective.broadcast(tensor) is tensor


def test_a_group_is_rebuilt_in_the_same_process():
    for generation in range(2):
        port = free_port()

        def join(rank, port=port, generation=generation):
            collective = Collective.connect("gloo", "127.0.0.1", port, rank, 2, generation, 20, CPU)
            return float(collective.all_reduce(torch.ones(1)))

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(join, range(2))) == [2.0, 2.0]


def test_a_rank_that_left_says_so(run_ranks):
    def work(collective):
        collective.abort()
        with pytest.raises(WorkerError, match="has left its group of 2"):
            collective.all_reduce(torch.ones(1))

    run_ranks(2, work)


def test_threads_sum_what_gloo_sums():
    """To the bit, however often and whichever thread is first."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(2, 200, 64, generator=generator).bfloat16()

    def work(collective):
        with torch.inference_mode():
            sums = [collective.all_reduce(part.clone()) for part in parts[collective.rank]]
            collective.all_gather(sums[0])
            return torch.stack(sums)

    threads = Collective.threads(2, timeout_s=20)
    assert {each.all_reduce_by for each in threads} == {"threads of one process"}
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, threads))
        ranks = pool.map(
            lambda rank: Collective.connect("gloo", "127.0.0.1", port, rank, 2, 0, 20, CPU),
            range(2),
        )
        wanted = list(pool.map(work, list(ranks)))
    for each in (*found, *wanted):
        assert torch.equal(each, found[0])


def test_parts_of_threads_sum_apart(run_ranks):
    def work(collective):
        part, place = collective.divided(2)
        own = torch.tensor([2.0**collective.rank])
        return float(part.all_reduce(own.clone())), place.all_gather(own).tolist()

    assert run_ranks(4, work) == [
        (3.0, [1.0, 4.0]), (3.0, [2.0, 8.0]), (12.0, [1.0, 4.0]), (12.0, [2.0, 8.0])
    ]  # fmt: skip


def test_a_thread_that_leaves_or_is_late_is_not_waited_for():
    first, second = Collective.threads(2, timeout_s=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.all_reduce, torch.ones(1))
        threading.Event().wait(0.05)
        second.abort()
        with pytest.raises(RuntimeError, match="rank 0 waited in vain for the others' all_reduce"):
            waiting.result(timeout=30)
    first, _ = Collective.threads(2, timeout_s=0.2)
    with pytest.raises(RuntimeError, match="waited in vain"):
        first.all_gather(torch.ones(1))


def test_a_thread_that_leaves_after_a_sum_breaks_it_for_nobody():
    for _ in range(300):
        meeting = Meeting(3, 20)

        def work(rank, meeting=meeting):
            tensor = torch.full((2,), rank + 1.0)
            meeting.exchange(rank, "all_reduce", tensor, tensor)
            meeting.leave()
            return tensor.tolist()

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(work, range(3))) == [[6.0, 6.0]] * 3


def test_threads_that_call_otherwise_fail():
    first, second = Collective.threads(2, timeout_s=60)
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(first.all_reduce, torch.ones(1)),
            pool.submit(second.all_reduce, torch.ones(2)),
        ]
        errors = {type(call.exception(timeout=30)) for call in calls}
    assert errors == {AssertionError, RuntimeError}


def test_nccl_on_a_cpu_is_a_config_error():
    with ThreadPoolExecutor(2) as pool:
        port = free_port()
        joins = [
            pool.submit(Collective.connect, "nccl", "127.0.0.1", port, rank, 2, 0, 20, CPU)
            for rank in range(2)
        ]
        for join in joins:
            with pytest.raises(ConfigError, match="use 'gloo'"):
                join.result()


def test_a_trainer_that_loses_a_rank_tells_the_others():
    """The first of two dies as both wait: the other does not wait for the group's 300 s."""
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        made = pool.map(lambda rank: TrainerGroup("127.0.0.1", port, 3, rank=rank), range(3))
        trainer, dead, other = made
        received = pool.submit(lambda: [*other.receive([torch.float32], [(5,)])])
        dead.close()
        del dead  # its connections end
        with pytest.raises(RuntimeError):
            trainer.send({"a": torch.ones(5)})
        with pytest.raises(RuntimeError, match="the trainer has lost a rank"):
            received.result(timeout=60)
