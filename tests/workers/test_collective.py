"""Groups without globals: sums, gathers, broadcasts, and a group rebuilt in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outrider.errors import ConfigError, WorkerError
from outrider.workers.collective import Collective, TrainerGroup

from ..helpers.ports import free_port

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_reduce_sums_in_place(run_ranks, size, dtype):
    def work(collective):
        tensor = torch.full((1, 3, 4), collective.rank + 1.0, dtype=dtype)
        assert collective.all_reduce(tensor) is tensor
        return tensor

    for tensor in run_ranks(size, work):
        assert torch.equal(tensor, torch.full_like(tensor, size * (size + 1) / 2))


@pytest.mark.parametrize("dim", [-1, 0])
def test_all_gather_joins_in_rank_order(run_ranks, dim):
    def work(collective):
        return collective.all_gather(torch.full((2, 3), float(collective.rank)), dim=dim)

    expected = torch.cat([torch.zeros(2, 3), torch.ones(2, 3)], dim=dim)
    for gathered in run_ranks(2, work):
        assert torch.equal(gathered, expected)


def test_broadcast_gives_the_root_s_values(run_ranks):
    def work(collective):
        return collective.broadcast(torch.tensor([collective.rank + 5]), root=1)

    assert [int(tensor) for tensor in run_ranks(3, work)] == [6, 6, 6]


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
