"""`outrider check --cluster`: the plan as a table; what does not fit is an error."""

from __future__ import annotations

import re

import pytest


def rows(result) -> list[list[str]]:
    """The plan's lines, without their frame."""
    lines = result.stderr.partition("Plan: GiB of each device, estimated")[2].splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_the_plan_is_a_table(outrider_cli, config_file, target, model):
    section = f"{{decoding_type: DraftTarget, speculative_model: {model}, placement: separate}}"
    kinds = "{accelerator_type: H100, drafter_accelerator_type: L4}"
    text = f"model: {target}\ndevice: cuda\ntensor_parallel_size: 4\nresources: {kinds}\n"
    path = config_file(f"{text}speculative_config: {section}\n")
    result = outrider_cli("check", path, "--nodes", "1xL4-24G,4xH100-80G")
    assert result.exit_code == 0, result.stderr
    plan = rows(result)
    assert [row[:3] for row in plan] == [
        ["node 1 (H100)", "GPU 0-3", "target 0-3"],
        ["node 0 (L4)", "GPU 0", "draft model 0"],
    ]
    assert [row[9] for row in plan] == ["80.00", "24.00"]
    for row in plan:
        parts = [float(each) for each in row[3:9]]
        assert sum(parts[:5]) == pytest.approx(parts[5], abs=0.03)
    assert "The configuration is sound." in result.stderr


def test_stages_are_planned_on_nodes_of_their_own(outrider_cli, config_file, target):
    text = f"model: {target}\ndevice: cuda\ntensor_parallel_size: 2\n"
    path = config_file(f"{text}speculative_config: {{decoding_type: NGram, max_draft_len: 3}}\n")
    result = outrider_cli("check", path, "-pp", 2, "--nodes", "2x2xL4-24G")
    assert result.exit_code == 0, result.stderr
    assert "4: 2 stages of 2" in result.stderr
    plan = rows(result)
    assert [row[:3] for row in plan] == [
        ["node 0 (L4)", "GPU 0-1", "target 0-1"],
        ["node 1 (L4)", "GPU 0-1", "target 2-3"],
    ]
    many = outrider_cli("check", path, "-pp", 64, "--nodes", "2x2xL4-24G")
    assert many.exit_code == 1
    assert "pipeline_parallel_size: 64 stages of a model of" in many.stderr


def test_what_does_not_fit_is_an_error_behind_the_table(outrider_cli, config_file, target):
    text = f"model: {target}\ndevice: cuda\ntensor_parallel_size: 4\nserve: {{num_replicas: 2}}\n"
    path = config_file(text)
    fits = outrider_cli("check", path, "--nodes", "2x4xL4-24G,2cpu")
    assert fits.exit_code == 0, fits.stderr
    assert [row[2] for row in rows(fits)] == ["target of engine 0 0-3", "target of engine 1 0-3"]
    assert "Without a worker: node 2." in fits.stderr
    result = outrider_cli("check", path, "--nodes", "4xL4-24G")
    assert result.exit_code == 1
    assert len(rows(result)) == 1
    assert re.search(r"^error: tensor_parallel_size: no place for the target", result.stderr, re.M)
    long = outrider_cli("check", path, "--nodes", "2x4xL4-24G", "--kv-memory-fraction", "0.001")
    assert long.exit_code == 1
    assert "kv_memory_fraction: ranks 0 to 3 of the target of engine 0 have room" in long.stderr


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("--nodes", "8xH100"), "nodes: '8xH100' is not understood"),
        (("--cluster", "--executor", "local"), "cluster: executor 'local'"),
        (("--cluster", "--nodes", "16cpu-64G"), "nodes: --cluster plans for the nodes that run"),
    ],
)
def test_mistakes_are_named(outrider_cli, target, args, field):
    result = outrider_cli("check", target, *args)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {field}")


def test_without_a_cluster_there_is_nothing_to_plan_for(outrider_cli, target, monkeypatch):
    monkeypatch.setattr("outrider.cli.check.find_ray", lambda: None)
    result = outrider_cli("check", target, "--cluster")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cluster: there is no Ray to plan for")


@pytest.mark.slow
@pytest.mark.ray
def test_a_running_cluster_is_planned_for(outrider_cli, target, monkeypatch):
    """With logical GPUs, whose memory no driver tells; one is in use."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "num_gpus": 0})
    try:
        cluster.add_node(num_cpus=2, num_gpus=3, resources={"accelerator_type:H100": 1})
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        args = ("--device", "cuda", "-tp")
        both = outrider_cli("check", target, "--cluster", *args, 2)
        assert both.exit_code == 0, both.stderr
        (row,) = rows(both)
        assert "(H100)" in row[0]
        assert row[1:3] == ["GPU 0-1", "target 0-1"]
        assert row[9] == "?"
        assert "Without a worker" in both.stderr
        many = outrider_cli("check", target, "--cluster", *args, 4)
        assert many.exit_code == 1
        assert "error: tensor_parallel_size: no place for the target: 4 ranks" in many.stderr
        on_cpus = outrider_cli("check", target, "--cluster", "--device", "cpu", "-tp", 2)
        assert on_cpus.exit_code == 0, on_cpus.stderr
        assert not ray.is_initialized()
    finally:
        cluster.shutdown()


def test_members_of_drafter_groups_have_places_of_their_own(
    outrider_cli, config_file, target, model
):
    group = f"{{name: small, model: {model}, autoscaling_config: {{min_members: 2, max_members: 3}}"
    used = "speculative_config: {decoding_type: DraftTarget, drafter_group: small}\n"
    text = f"model: {target}\ndevice: cuda\n{used}serve: {{drafter_groups: ["
    path = config_file(f"{text}{group}, device: cuda, resources: {{accelerator_type: L4}}}}]}}\n")
    result = outrider_cli("check", path, "--nodes", "2xL4-24G,1xH100-80G")
    assert result.exit_code == 0, result.stderr
    assert [row[2] for row in rows(result)][1:] == ["small 1 0", "small 2 0"]
    result = outrider_cli("check", path, "--nodes", "1xL4-24G,1xH100-80G")
    assert result.exit_code == 1
    assert "serve.drafter_groups.0.tensor_parallel_size: no place for the small 2" in result.stderr
    path = config_file(f"{text}{{name: small, model: /nowhere}}]}}\n")
    result = outrider_cli("check", path, "--nodes", "1xL4-24G,1xH100-80G")
    assert "serve.drafter_groups.0.model path '/nowhere' does not exist" in result.stderr


def test_a_draft_model_that_names_no_place_gets_one(outrider_cli, config_file, target, model):
    section = f"decoding_type: DraftTarget, speculative_model: {model}"
    path = config_file(f"model: {target}\nspeculative_config: {{{section}}}\n")
    alone = outrider_cli("check", path, "--nodes", "1xL4-24G")
    assert alone.exit_code == 0, alone.stderr
    assert [row[2] for row in rows(alone)] == ["target 0"]
    assert "placement: colocated" in alone.stdout
    assert "1 (colocated)" in alone.stderr
    two = outrider_cli("check", path, "--nodes", "1x2xL4-24G")
    assert [row[2] for row in rows(two)] == ["target 0", "draft model 0"]
    assert "1 (separate)" in two.stderr
    path = config_file(f"model: {target}\nspeculative_config: {{{section}, placement: separate}}\n")
    refused = outrider_cli("check", path, "--nodes", "1xL4-24G")
    assert refused.exit_code == 1
    assert "speculative_config.placement: 'separate' cannot be placed" in refused.stderr
