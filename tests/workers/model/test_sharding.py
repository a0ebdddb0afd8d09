"""The tensor-parallel plan: parts put together again give the whole, and compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

from outrider.errors import ConfigError
from outrider.workers.model.info import Heads, split
from outrider.workers.model.sharding import Shard, ShardPlan, plan_shards, plan_vocabulary

HIDDEN, DIM, WIDTH, VOCAB = 24, 4, 20, 13


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int, joined: bool) -> None:
        super().__init__()
        if joined:
            self.qkv_proj = nn.Linear(HIDDEN, (heads + 2 * kv_heads) * DIM)
        else:
            self.q_proj = nn.Linear(HIDDEN, heads * DIM)
            self.k_proj = nn.Linear(HIDDEN, kv_heads * DIM)
            self.v_proj = nn.Linear(HIDDEN, kv_heads * DIM)
        self.o_proj = nn.Linear(heads * DIM, HIDDEN)
        self.sinks = nn.Parameter(torch.randn(heads))


class Mlp(nn.Module):
    def __init__(self, joined: bool) -> None:
        super().__init__()
        if joined:
            self.gate_up_proj = nn.Linear(HIDDEN, 2 * WIDTH)
        else:
            self.gate_proj = nn.Linear(HIDDEN, WIDTH)
            self.up_proj = nn.Linear(HIDDEN, WIDTH)
        self.down_proj = nn.Linear(WIDTH, HIDDEN)


class Model(nn.Module):
    def __init__(self, heads: int = 8, kv_heads: int = 4, joined: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.attn = Attention(heads, kv_heads, joined)
        self.mlp = Mlp(joined)
        self.extra = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)


def cut(tensor: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    if shard is None:
        return tensor
    part = torch.cat([tensor.narrow(shard.dim, a, b - a) for a, b in shard.ranges], shard.dim)
    missing = shard.length - part.shape[shard.dim]
    zeros = list(part.shape)
    zeros[shard.dim] = missing
    return torch.cat([part, part.new_zeros(zeros)], shard.dim)


def parts_of(model: nn.Module, plan: ShardPlan, rank: int) -> dict[str, torch.Tensor]:
    """One rank's state; biases that are added once are zeros on the others."""
    state = {key: cut(value, plan.shards.get(key)) for key, value in model.state_dict().items()}
    for key in plan.rank0_only:
        state[key] = state[key] * (rank == 0)
    return state


def plans(model: nn.Module, heads: int, kv_heads: int, size: int, hints=None) -> list[ShardPlan]:
    return [
        plan_shards(model, Heads(heads, kv_heads, rank, size), hints or {}) for rank in range(size)
    ]


def attend(state, inputs, heads: int, kv_heads: int, joined: bool) -> torch.Tensor:
    """Plain grouped attention with `heads` of its own, without a mask."""

    def project(key: str) -> torch.Tensor:
        return linear(inputs, state[f"attn.{key}.weight"], state[f"attn.{key}.bias"])

    if joined:
        sizes = [heads * DIM, kv_heads * DIM, kv_heads * DIM]
        query, key, value = project("qkv_proj").split(sizes, -1)
    else:
        query, key, value = project("q_proj"), project("k_proj"), project("v_proj")
    query, key, value = (
        each.unflatten(-1, (-1, DIM)).transpose(0, 1) for each in (query, key, value)
    )
    group = heads // kv_heads
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    weights = (query @ key.transpose(1, 2) + state["attn.sinks"][:, None, None]).softmax(-1)
    mixed = (weights * state["attn.sinks"][:, None, None] @ value).transpose(0, 1).flatten(1)
    return linear(mixed, state["attn.o_proj.weight"], state["attn.o_proj.bias"])


def gated(state, inputs, joined: bool) -> torch.Tensor:
    def project(key: str) -> torch.Tensor:
        return linear(inputs, state[f"mlp.{key}.weight"], state[f"mlp.{key}.bias"])

    gate, up = (
        project("gate_up_proj").chunk(2, -1)
        if joined
        else (project("gate_proj"), project("up_proj"))
    )
    return linear(silu(gate) * up, state["mlp.down_proj.weight"], state["mlp.down_proj.bias"])


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(8, 4, 1), (8, 4, 2), (8, 4, 4), (8, 2, 4), (4, 1, 4), (4, 4, 2)],
)
def test_ranks_sum_to_the_whole(heads, kv_heads, size, joined):
    """Attention and MLP of every rank's part, added up, are those of the whole model."""
    model = Model(heads, kv_heads, joined).double()
    inputs = torch.randn(5, HIDDEN, dtype=torch.float64)
    whole = model.state_dict()
    made = plans(model, heads, kv_heads, size)
    states = [parts_of(model, plan, rank) for rank, plan in enumerate(made)]
    local = max(1, kv_heads // size)
    attention = sum(attend(state, inputs, heads // size, local, joined) for state in states)
    torch.testing.assert_close(attention, attend(whole, inputs, heads, kv_heads, joined))
    mlp = sum(gated(state, inputs, joined) for state in states)
    torch.testing.assert_close(mlp, gated(whole, inputs, joined))
    for plan in made:
        assert sorted(plan.summed) == ["attn.o_proj", "mlp.down_proj"]
        assert plan.rank0_only == {"attn.o_proj.bias", "mlp.down_proj.bias"}
        assert plan.attentions == ["attn"]
        assert not {
            key for key in plan.shards if key.startswith(("extra", "norm", "head", "embed"))
        }


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 2), (2, 2), (2, 4), (1, 4), (8, 4)])
def test_key_heads_go_with_their_query_heads(kv_heads, size):
    num_heads = 8
    for rank in range(size):
        heads = Heads(num_heads, kv_heads, rank, size)
        begin, end = heads.kv_range
        queries = range(rank * heads.local, (rank + 1) * heads.local)
        assert {query * kv_heads // num_heads for query in queries} == set(range(begin, end))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_vocabulary_is_padded_on_the_last_ranks(size):
    model, weights = Model(), []
    for rank in range(size):
        plan = ShardPlan()
        plan_vocabulary(plan, model, model.embed, model.head, rank, size)
        assert (plan.embedding, plan.head) == ("embed", "head")
        assert plan.shards.keys() == {"embed.weight", "head.weight", "head.bias"}
        state = parts_of(model, plan, rank)
        assert len(state["head.bias"]) == -(-VOCAB // size)
        weights.append(state["head.weight"])
    joined = torch.cat(weights)
    assert torch.equal(joined[:VOCAB], model.head.weight)
    assert not joined[VOCAB:].any()


def test_hints_reach_only_what_no_rule_knows():
    hints = {"extra": "colwise", "mlp.*": "rowwise", "attn.*": "colwise"}
    plain, hinted = plans(Model(), 8, 4, 2)[1], plans(Model(), 8, 4, 2, hints)[1]
    added = {key: shard for key, shard in hinted.shards.items() if key not in plain.shards}
    half = Shard(0, ((WIDTH // 2, WIDTH),))
    assert added == {"extra.weight": half, "extra.bias": half}
    assert {key: hinted.shards[key] for key in plain.shards} == plain.shards


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "named"),
    [
        (8, 4, 3, "num_attention_heads=8"),
        (12, 4, 6, "num_key_value_heads=4"),
        (16, 16, 16, "mlp.gate_proj=20"),
    ],
)
def test_sizes_that_do_not_divide_are_named(heads, kv_heads, size, named):
    with pytest.raises(ConfigError, match=named) as error:
        plans(Model(heads, kv_heads), heads, kv_heads, size)
    assert error.value.field == "tensor_parallel_size"


def test_even_shares():
    assert [split(12, rank, 3, "x") for rank in range(3)] == [(0, 4), (4, 8), (8, 12)]
