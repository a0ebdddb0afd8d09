"""Where workers go: the bundles, the strategies, and a plan of all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.cluster import placement
from outrider.cluster.placement import make_plan, parse_nodes, placed
from outrider.config import EngineConfig, ResourcesConfig
from outrider.engine.estimate import GroupEstimate, RankBytes
from outrider.errors import ConfigError

GIB = 2**30
USUAL = ResourcesConfig()


def group(size: int, weights_gib: float = 1.0, role: str = "target", **changes) -> GroupEstimate:
    held = {"kv_per_token": 1 << 20, "min_tokens": 1024, "max_tokens": 65536, "gpu_fraction": 0.9}
    rank = RankBytes(int(weights_gib * GIB), **{**held, **changes.pop("held", {})})
    return GroupEstimate(
        role, f"field of {role}", changes.pop("device", "cuda"), size, rank, **changes
    )


def places(plan: placement.Plan) -> list[tuple[str, str, str]]:
    """Every run of alike ranks: its ranks, node and devices."""
    return [
        (f"{run[0].group} {run[0].rank}-{run[-1].rank}", run[0].node, run[0].device)
        for run in plan.runs()
    ]


def test_nodes_are_described_by_count_gpus_kind_and_memory():
    nodes = parse_nodes("2x8xH100-80G, 1xL4-24G+16cpu,4cpu-16G,3x2cpu")
    assert [node.kind for node in nodes] == ["H100", "H100", "L4", *["CPU"] * 4]
    assert [node.name for node in nodes] == [f"node {index}" for index in range(7)]
    assert [node.total["CPU"] for node in nodes] == [64, 64, 16, 4, 2, 2, 2]
    assert [node.total.get("GPU") for node in nodes[:4]] == [8, 8, 1, None]
    assert [node.gpu_bytes for node in nodes[:4]] == [80 * GIB, 80 * GIB, 24 * GIB, None]
    assert [node.memory_bytes for node in nodes[3:5]] == [16 * GIB, None]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "8xH100",
            "H100-80G",
            "2x8xH100-80",
            "0x8xH100-80G",
            "0xH100-80G",
            "0cpu",
            "1xL4-24G,",
        ),
        *("00x1cpu", "9" * 5000 + "cpu", "99999999x1cpu", "6000x1cpu,6000x1cpu", "10001xL4-24G"),
    ],
)
def test_a_description_that_cannot_be_read_is_an_error(text):
    with pytest.raises(
        ConfigError, match=r"^nodes: .*(is not understood|describes nothing|at most 10000)"
    ):
        parse_nodes(text)


def test_ranks_share_a_node_that_has_room_for_all():
    plan = make_plan([group(4)], parse_nodes("2x2xA100-80G,8xH100-80G"), USUAL)
    assert not plan.problems
    assert places(plan) == [("target 0-3", "node 2", "GPU 0")]


def test_the_tightest_such_node_is_taken():
    plan = make_plan([group(4), group(8)], parse_nodes("8xH100-80G,4xH100-80G"), USUAL)
    assert [each[1] for each in places(plan)] == ["node 1", "node 0"]


def test_ranks_are_spread_where_no_node_has_room_and_neighbours_share_a_node():
    plan = make_plan([group(16)], parse_nodes("2x8xH100-80G"), USUAL)
    assert not plan.problems
    assert places(plan) == [("target 0-7", "node 0", "GPU 0"), ("target 8-15", "node 1", "GPU 0")]


def test_strict_pack_is_not_spread():
    strict = ResourcesConfig(placement_strategy="STRICT_PACK")
    plan = make_plan([group(16)], parse_nodes("2x8xH100-80G"), strict)
    (problem,) = plan.problems
    assert problem.field == "field of target"
    assert "no place for the target: 16 ranks of 1 GPU each, all on one node" in problem.message
    assert "node 0 (H100) has room for 8; node 1 (H100) has room for 8" in problem.message


def test_a_stage_is_not_spread_over_nodes():
    """Where a node could hold one: seven free GPUs are left alone by stages of four."""
    staged = replace(group(8), others=(group(8).rank,))
    plan = make_plan([staged], parse_nodes("1x7xH100-80G,2x4xH100-80G"), USUAL)
    assert not plan.problems
    assert [each[:2] for each in places(plan)] == [
        ("target 0-3", "node 0"),
        ("target 4-7", "node 1"),
    ]
    (problem,) = make_plan([staged], parse_nodes("1x7xH100-80G,1x3xH100-80G"), USUAL).problems
    assert "8 ranks of 1 GPU each, each stage of 4 on one node" in problem.message
    wide = make_plan([staged], parse_nodes("3x3xH100-80G"), USUAL)
    assert not wide.problems  # no node could hold a stage
    assert [each[1] for each in places(wide)] == ["node 0", "node 1", "node 2"]


def test_a_node_that_is_busy_now_is_waited_for_and_named():
    """Ray waits for the node that could hold all ranks; the plan says what is free."""
    (node,) = parse_nodes("8xH100-80G")
    busy = placement.Node("a", node.total, {**node.total, "GPU": 3.0}, node.gpu_bytes)
    spread = [placement.Node(each, node.total, {**node.total, "GPU": 1.0}) for each in "bc"]
    (problem,) = make_plan([group(4)], [busy, *spread], USUAL).problems
    assert "a (H100) has room for 3 now; b (H100) has room for 1 now" in problem.message


def test_drafters_go_to_nodes_of_their_type():
    kinds = ResourcesConfig(accelerator_type="H100", drafter_accelerator_type="L4")
    groups = [group(4), group(1, role="draft model", drafts=True)]
    plan = make_plan(groups, parse_nodes("1xL4-24G,4xH100-80G"), kinds)
    assert places(plan) == [
        ("target 0-3", "node 1", "GPU 0"),
        ("draft model 0-0", "node 0", "GPU 0"),
    ]
    (problem,) = make_plan(groups, parse_nodes("2x4xH100-80G"), kinds).problems
    assert problem.field == "field of draft model"
    assert "1 rank of 1 GPU each on nodes with L4" in problem.message


def test_every_engine_gets_its_workers():
    plan = make_plan([group(2)], parse_nodes("4xH100-80G,2cpu"), USUAL, num_engines=3)
    assert [each[0] for each in places(plan)] == [
        "target of engine 0 0-1",
        "target of engine 1 0-1",
    ]
    assert [each.message[:40] for each in plan.problems] == [
        "field of target: no place for the target"
    ]


def test_the_cache_takes_what_the_fraction_leaves():
    (rank,) = make_plan([group(1, 40.0)], parse_nodes("1xH100-80G"), USUAL).ranks
    assert rank.kv_bytes == int(80 * GIB * 0.9) - 40 * GIB
    assert rank.kv_tokens == 32 * 1024


def test_weights_that_do_not_fit_are_named_with_their_ranks():
    (problem,) = make_plan([group(8, 84.0)], parse_nodes("8xH100-80G"), USUAL).problems
    assert problem.field == "field of target"
    assert "ranks 0 to 7 of the target need 84.0 GiB each" in problem.message
    assert "a device has 80.0 GiB (node 0, from GPU 0 on)" in problem.message


def test_a_cache_for_less_than_one_sequence_is_named():
    (problem,) = make_plan([group(1, 71.5)], parse_nodes("1xH100-80G"), USUAL).problems
    assert problem.field == "kv_memory_fraction"
    assert "room for 512 tokens of KV cache, and one sequence may have 1024" in problem.message


def test_two_groups_share_a_gpu_and_its_memory():
    halves = ResourcesConfig(gpus_per_worker=0.5)
    first = group(1, 10.0, held={"fixed_kv_bytes": 8 * GIB})
    nodes = parse_nodes("1xL4-24G")
    plan = make_plan([first, group(1, 3.0, role="draft model", drafts=True)], nodes, halves)
    assert [rank.device for rank in plan.ranks] == ["GPU 0", "GPU 0"]
    assert plan.ranks[1].beside_bytes == 18 * GIB
    assert plan.ranks[1].kv_bytes == int(24 * GIB * 0.9) - 21 * GIB
    tight = [first, group(1, 7.0, role="draft model", drafts=True)]
    (problem,) = make_plan(tight, nodes, halves).problems
    assert "draft model need 7.0 GiB each beside 18.0 GiB of other workers" in problem.message


def test_workers_on_cpus_share_the_memory_of_their_node():
    cpu = {"device": "cpu", "held": {"kv_cpu_bytes": 2 * GIB}}
    plan = make_plan([group(2, 1.0, **cpu)], parse_nodes("4cpu-8G"), USUAL)
    assert [rank.kv_bytes for rank in plan.ranks] == [2 * GIB, 2 * GIB]
    assert not plan.problems
    cpu = {"device": "cpu", "held": {"kv_cpu_bytes": 2 * GIB}}
    (problem,) = make_plan([group(2, 3.0, **cpu)], parse_nodes("4cpu-8G"), USUAL).problems
    assert "rank 1 of the target need" in problem.message


@pytest.mark.parametrize("others", [(), (RankBytes(40 * GIB, states=GIB),)])
def test_a_separate_head_s_cache_has_the_target_s_tokens(others):
    """A stage without attention has no say."""
    head = group(1, 2.0, "head", drafts=True, follows_target=True, held={"kv_per_token": 4096})
    plan = make_plan([group(2, 40.0, others=others), head], parse_nodes("4xH100-80G"), USUAL)
    assert plan.ranks[-1].kv_tokens == plan.ranks[0].kv_tokens == 32 * 1024
    assert plan.ranks[1].kv_tokens == (None if others else 32 * 1024)


def test_memory_that_is_not_known_is_no_problem():
    (node,) = parse_nodes("1xH100-80G")
    unknown = placement.Node("a", node.total, node.free)
    plan = make_plan([group(1, 500.0)], [unknown], USUAL)
    assert not plan.problems
    assert plan.ranks[0].memory_bytes is None


DRAFT = {"decoding_type": "DraftTarget", "speculative_model": "draft"}
HEAD = {"decoding_type": "Eagle3", "speculative_model": "head", "placement": "separate"}


def section_of(section, *nodes, **keys):
    """Where the drafters are, on nodes of so many GPUs."""
    config = EngineConfig.load({"model": "target", "speculative_config": section, **keys})
    found = placed(config, [{"CPU": 4.0, "GPU": float(count)} for count in nodes])
    if found == config:
        assert found is config
    return [getattr(each, "placement", None) for each in found.speculative_config.sections]


@pytest.mark.parametrize("nodes", [(1,), (1, 0)])
def test_a_draft_model_without_a_gpu_of_its_own_shares_the_target_s(nodes, caplog):
    with caplog.at_level("WARNING"):
        assert section_of(DRAFT, *nodes) == ["colocated"]
    assert "placement: colocated" in caplog.text
    members = [{"decoding_type": "NGram", "max_draft_len": 3}, DRAFT]
    both = {"decoding_type": "Compose", "members": members}
    assert section_of(both, *nodes) == [None, "colocated"]
    assert section_of({**DRAFT, "placement": "colocated"}, *nodes) == ["colocated"]


@pytest.mark.parametrize(
    ("nodes", "keys"),
    [
        ((2,), {}),
        ((1, 1), {}),
        ((3,), {"tensor_parallel_size": 2}),
        ((0,), {}),  # on CPUs
        ((1,), {"device": "cpu"}),
        ((1,), {"resources": {"gpus_per_worker": 0.5}}),
        ((1,), {"tensor_parallel_size": 2, "device": "cuda"}),  # no place for the target, yet
    ],
)
def test_a_draft_model_has_a_worker_of_its_own_where_there_is_room(nodes, keys):
    assert section_of(DRAFT, *nodes, **keys) == ["separate"]


@pytest.mark.parametrize(
    ("section", "keys", "field"),
    [
        ({**DRAFT, "placement": "separate"}, {}, "speculative_config.placement: 'separate' cannot"),
        ({**DRAFT, "speculation_cache": {}}, {}, "'separate', which speculation_cache asks for, c"),
        (HEAD, {}, "speculative_config.placement: 'separate' cannot be placed .*the head: 1 rank"),
        (DRAFT, {"tensor_parallel_size": 2}, "speculative_config.placement: 'separate' cannot"),
        (
            {"decoding_type": "Compose", "members": [DRAFT, {**DRAFT, "max_draft_len": 2}]},
            {},
            "speculative_config.members.1.placement: 'separate' cannot be placed beside",
        ),
    ],
)
def test_what_asks_for_a_gpu_that_is_not_there_is_refused_at_once(section, keys, field):
    with pytest.raises(ConfigError, match=f"{field}.*set placement: colocated"):
        section_of(section, keys.get("tensor_parallel_size", 1), **keys)


def test_drafter_groups_have_workers_elsewhere():
    group = {"decoding_type": "DraftTarget", "drafter_group": "small"}
    assert section_of(group, 1) == ["separate"]
