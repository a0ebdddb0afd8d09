"""What a group of workers asks of the cluster, and the placement group that reserves it."""

from __future__ import annotations

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from ..config import ResourcesConfig
from ..errors import ResourcesError
from ..workers.spec import WorkerSpec


def needs(spec: WorkerSpec, resources: ResourcesConfig) -> tuple[float, float]:
    """CPUs and GPUs of one rank."""
    on_gpu = spec.device == "cuda" or (
        spec.device == "auto" and ray.cluster_resources().get("GPU", 0) >= spec.size
    )
    cpus, gpus = resources.cpus_per_worker, resources.gpus_per_worker
    return (
        (0.0 if on_gpu else 1.0) if cpus is None else cpus,
        (1.0 if on_gpu else 0.0) if gpus is None else gpus,
    )


def single_node_cpus() -> float:
    """CPUs that are free where the cluster is one node; 0 where it has several."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return float(ray.available_resources().get("CPU", 0.0)) if len(nodes) == 1 else 0.0


def place(
    spec: WorkerSpec, resources: ResourcesConfig, *, detached: bool = False
) -> PlacementGroup:
    """One bundle a rank, on one node if that is possible at all; `detached` outlives its maker.

    Raises:
        ResourcesError: the cluster did not provide the resources in time.
    """
    cpus, gpus = needs(spec, resources)
    bundle = {name: count for name, count in (("CPU", cpus), ("GPU", gpus)) if count}
    kind = resources.accelerator_type
    if kind is not None:  # Ray's nodes have a resource of that name
        bundle[f"accelerator_type:{kind}"] = 0.001
    bundles = [dict(bundle or {"CPU": 0.001}) for _ in range(spec.size)]
    fits = any(
        node["Alive"]
        and all(
            node["Resources"].get(name, 0) >= count * spec.size
            for name, count in bundles[0].items()
        )
        for node in ray.nodes()
    )
    strategy = "STRICT_PACK" if fits else resources.placement_strategy
    lifetime = "detached" if detached else None
    group = placement_group(bundles, strategy=strategy, lifetime=lifetime)
    if not group.wait(timeout_seconds=resources.placement_timeout_s):
        free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
        total = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
        remove_placement_group(group)
        field = "tensor_parallel_size"
        if spec.head_target is not None:
            field = "speculative_config.placement"
        elif spec.target is None:
            field = "speculative_config.draft_tensor_parallel_size"
        raise ResourcesError(
            f"{field}: {spec.size} workers of {bundles[0]} each could not "
            f"be placed within {resources.placement_timeout_s:.0f} s; the cluster has "
            f"{total}, free are {free or 'none'}",
            field=field,
        )
    return group
