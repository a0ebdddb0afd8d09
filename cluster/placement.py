"""The placement of an engine's workers: resources of each rank, and a plan for all of them.

`placed` chooses the placement of a draft model whose section names none.

`rank_actors.py` requests the same bundles and strategies from Ray, which chooses among the nodes
with enough room. The plan uses the fullest node that can hold a whole group, or else the emptiest
nodes first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from ..config import DraftModelConfig, EngineConfig, HeadConfig, ResourcesConfig, SpeculationBase
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..engine.estimate import GroupEstimate, RankBytes

log = logging.getLogger(__name__)
Bundle = dict[str, float]
"""The resources that one rank reserves, by Ray's names."""
_KIND = "accelerator_type:"  # followed by a GPU's name: Ray's resource of the nodes with that GPU
_GROUP = re.compile(
    r"(?:(?P<count>\d{1,9})x)?"
    r"(?:(?P<gpus>\d{1,9})x(?P<kind>[A-Za-z][\w-]*?)-(?P<gib>\d{1,9})G|(?P<only>\d{1,9})cpu(?:-(?P<ram>\d{1,9})G)?)"
    r"(?:\+(?P<cpus>\d{1,9})cpu)?"
)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster, described by the user or running."""

    name: str
    total: Mapping[str, float]  # by Ray's names of resources
    free: Mapping[str, float]
    gpu_bytes: int | None = None  # of each GPU; None: unknown
    memory_bytes: int | None = None  # of the node or its container

    @property
    def kind(self) -> str:
        """The name of the node's GPU; "GPU" if it is unknown, "CPU" if there is none."""
        kinds = [name.removeprefix(_KIND) for name in self.total if name.startswith(_KIND)]
        return ", ".join(kinds) or ("GPU" if self.total.get("GPU") else "CPU")


_MOST = 10_000  # nodes, and GPUs or CPUs per node


def parse_nodes(text: str) -> list[Node]:
    """Parses a description of nodes, such as `2x8xH100-80G,1xL4-24G+16cpu,4cpu-16G`.

    The parts are: number of nodes, GPUs per node, the GPU's name and its memory in GiB. `+16cpu`
    gives the number of CPUs (default: 8 per GPU). `4cpu-16G` is a node without GPUs.

    Raises:
        ConfigError: names the part that is invalid.
    """
    nodes: list[Node] = []
    for part in text.replace(" ", "").split(","):
        found = _GROUP.fullmatch(part)
        if found is None:
            raise ConfigError.at(
                "nodes",
                f"{part!r} is not understood; nodes are described as 2x8xH100-80G (two nodes of "
                "eight GPUs of 80 GiB each), 1xL4-24G+16cpu, 16cpu-64G, separated by commas",
            )
        gpus = int(found["gpus"] or 0)
        cpus = int(found["cpus"] or found["only"] or 8 * gpus)
        count = int(found["count"] or 1)
        if not (gpus or found["only"]) or not cpus or not count:
            raise ConfigError.at("nodes", f"{part!r} describes nothing that could compute")
        if max(gpus, cpus, len(nodes) + count) > _MOST:
            raise ConfigError.at("nodes", f"at most {_MOST} nodes, of as many GPUs and CPUs each")
        total: Bundle = {"CPU": float(cpus)}
        if gpus:
            total |= {"GPU": float(gpus), f"{_KIND}{found['kind']}": 1.0}
        nodes += [
            Node(
                f"node {len(nodes) + index}",
                total,
                total,
                int(found["gib"]) * 2**30 if gpus else None,
                int(found["ram"]) * 2**30 if found["ram"] else None,
            )
            for index in range(count)
        ]
    return nodes


def has_workers_apart(config: EngineConfig) -> bool:
    """Returns True if a drafter needs workers of its own in this engine."""
    return any(map(_is_apart, config.speculative_config.sections))


def _is_apart(section: SpeculationBase) -> bool:
    is_own = getattr(section, "drafter_group", None) is None
    return is_own and getattr(section, "placement", "") == "separate"


def placed(config: EngineConfig, totals: Sequence[Mapping[str, float]]) -> EngineConfig:
    """Returns `config` with a placement for the draft model that names none, on these nodes.

    If no GPU is free for a worker of its own, the draft model runs in the worker of a single-rank
    target.

    Raises:
        ConfigError: the nodes have room for the target, but not for a drafter beside it.
    """
    nodes = [Node(f"node {index}", total, total) for index, total in enumerate(totals)]
    sections = list(config.speculative_config.sections)
    while problem := _without_place(config, sections, nodes):
        index, reason = problem
        section = sections[index]
        given = [
            key
            for key in ("placement", *getattr(section, "of_separate", ()))
            if key in section.model_fields_set and getattr(section, key) is not None
        ]
        taken = any(getattr(each, "placement", "") == "colocated" for each in sections)
        if given or taken or config.num_ranks > 1 or not isinstance(section, DraftModelConfig):
            single = len(sections) == 1
            prefix = "speculative_config." if single else f"speculative_config.members.{index}."
            asked = next((key for key in given if key != "placement"), None)
            why = f", which {asked} asks for," if asked and "placement" not in given else ""
            raise ConfigError.at(
                f"{prefix}placement",
                f"'separate'{why} cannot be placed beside the target: {reason}; give the cluster "
                "another GPU, or set placement: colocated, which shares the target's",
            )
        sections[index] = section.model_copy(update={"placement": "colocated"})
        log.warning(
            "the draft model runs in the target's worker (placement: colocated), for want of room "
            "for one of its own"
        )
    old = config.speculative_config
    if list(old.sections) == sections:
        return config
    update = {"members": tuple(sections)}
    new = sections[0] if old.sections == (old,) else old.model_copy(update=update)
    return config.model_copy(update={"speculative_config": new})


def _without_place(
    config: EngineConfig, sections: Sequence[SpeculationBase], nodes: Sequence[Node]
) -> tuple[int, str] | None:
    """Returns the index of the first GPU drafter that can never be placed, and the reason."""
    from ..engine.estimate import GroupEstimate, RankBytes

    nothing, num_gpus = RankBytes(0), sum(node.total.get("GPU", 0.0) for node in nodes)
    stages = (nothing,) * (config.pipeline_parallel_size - 1)
    groups = [GroupEstimate("target", "", config.device, config.num_ranks, nothing, None, stages)]
    for index, section in enumerate(sections):
        if not _is_apart(section):
            continue
        size = getattr(section, "draft_tensor_parallel_size", None) or 1
        role = "head" if isinstance(section, HeadConfig) else "draft model"
        group = GroupEstimate(role, "", config.device, size, nothing, drafts=True)
        before = len(make_plan(groups, nodes, config.resources).problems)
        groups.append(group)
        problems = make_plan(groups, nodes, config.resources).problems
        asks_gpu = needs(config.device, size, config.resources, num_gpus)[1] > 0
        if not before and problems and asks_gpu:
            return index, problems[0].message.removeprefix(": ")
    return None


def accelerator(resources: ResourcesConfig, *, drafts: bool) -> str | None:
    """Returns Ray's name of the GPU that a group requires, or None.

    Args:
        drafts: whether the group only holds a drafter.
    """
    return (drafts and resources.drafter_accelerator_type) or resources.accelerator_type


def needs(
    device: str, size: int, resources: ResourcesConfig, num_gpus: float
) -> tuple[float, float]:
    """Returns the CPUs and GPUs of one rank of a group of `size`, in a cluster of `num_gpus`."""
    on_gpu = device == "cuda" or (device == "auto" and num_gpus >= size)
    cpus, gpus = resources.cpus_per_worker, resources.gpus_per_worker
    return (
        (0.0 if on_gpu else 1.0) if cpus is None else cpus,
        (1.0 if on_gpu else 0.0) if gpus is None else gpus,
    )


def bundle_of(cpus: float, gpus: float, kind: str | None) -> Bundle:
    """Returns the resources that one rank reserves."""
    bundle = {name: count for name, count in (("CPU", cpus), ("GPU", gpus)) if count}
    if kind is not None:  # nodes with this GPU have a resource of this name
        bundle[f"{_KIND}{kind}"] = 0.001
    return bundle or {"CPU": 0.001}


def reserved_at_once(
    bundle: Bundle, size: int, num_stages: int, totals: Sequence[Mapping[str, float]]
) -> tuple[Bundle, int]:
    """Returns a bundle of the group's reservation, and the number of ranks that share it.

    With pipeline stages, the ranks of a stage share a bundle, so that a stage is not spread over
    nodes. If no node could ever hold a stage, every rank has its own bundle.
    """
    per_stage = size // num_stages
    if num_stages == 1 or not any(_room(bundle, total) >= per_stage for total in totals):
        return bundle, 1
    return {name: count * per_stage for name, count in bundle.items()}, per_stage


def strategy_of(
    bundle: Bundle, size: int, totals: Sequence[Mapping[str, float]], resources: ResourcesConfig
) -> str:
    """Returns STRICT_PACK if some node could hold the whole group, else the configured strategy."""
    fits = any(_room(bundle, total) >= size for total in totals)
    return "STRICT_PACK" if fits else resources.placement_strategy


def _room(bundle: Bundle, free: Mapping[str, float]) -> int:
    """Returns how many such bundles fit."""
    return min(int(free.get(name, 0.0) / count + 1e-9) for name, count in bundle.items())


@dataclass(frozen=True, slots=True)
class Rank:
    """A placed worker, with the estimate of its memory."""

    group: str  # "target", "draft model" or "head", and the engine if there are several
    rank: int
    node: str
    device: str  # "CPU", or for example "GPU 3"; Ray chooses the actual GPU
    held: RankBytes
    kv_bytes: int
    memory_bytes: int | None  # of the device; None: unknown
    field: str = ""  # key of the configuration that errors name
    beside_bytes: int = 0  # of workers that were placed on the device earlier

    @property
    def total_bytes(self) -> int:
        return self.held.fixed_bytes + self.kv_bytes

    @property
    def kv_tokens(self) -> int | None:
        """Number of tokens that the caches hold; None if there are no caches."""
        return self.kv_bytes // self.held.kv_per_token if self.held.kv_per_token else None


@dataclass(slots=True)
class Plan:
    """The placed workers, and errors for what does not fit."""

    ranks: list[Rank] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)

    def runs(self) -> list[list[Rank]]:
        """Groups neighbouring ranks of one group on one node that hold the same."""
        same = attrgetter("group", "node", "held", "kv_bytes", "beside_bytes")
        return [list(ranks) for _, ranks in groupby(self.ranks, same)]


@dataclass(slots=True)
class _Left:
    """The remaining capacity of a node while the plan is made."""

    node: Node
    free: Bundle
    gpus: list[float]  # free share of each GPU
    used_bytes: list[int]  # per GPU; the last is the node's own memory

    def take(self, bundle: Bundle) -> int:
        """Takes a bundle; returns the index of its device in `used_bytes`."""
        for name, count in bundle.items():
            self.free[name] = self.free.get(name, 0.0) - count
        share = bundle.get("GPU", 0.0)
        if not share:
            return len(self.gpus)
        device = next((i for i, left in enumerate(self.gpus) if left + 1e-9 >= share), 0)
        self.gpus[device] -= share
        return device


def make_plan(
    groups: Sequence[GroupEstimate],
    nodes: Sequence[Node],
    resources: ResourcesConfig,
    num_engines: int = 1,
    members: Sequence[tuple[GroupEstimate, ResourcesConfig]] = (),
) -> Plan:
    """Places every group of every engine, in the order in which engines start them.

    Args:
        members: members of drafter groups, which are placed last.
    """
    left = [
        _Left(node, dict(node.free), _gpus(node), [0] * (len(_gpus(node)) + 1)) for node in nodes
    ]
    plan = Plan()
    for engine in range(num_engines):
        of_engine = f" of engine {engine}" if num_engines > 1 else ""
        target_tokens = 0
        for group in groups:
            named = replace(group, role=group.role + of_engine)
            ranks = _add(plan, named, left, resources, target_tokens)
            if group is groups[0]:
                held = [rank.kv_tokens for rank in ranks if rank.kv_tokens is not None]
                target_tokens = min(held, default=0)
    for group, own in members:
        _add(plan, group, left, own, 0)
    plan.problems += filter(None, map(_misfit, plan.runs()))
    return plan


def _add(
    plan: Plan,
    group: GroupEstimate,
    left: list[_Left],
    resources: ResourcesConfig,
    target_tokens: int,
) -> list[Rank]:
    """Places a group and adds its ranks to the plan, which are returned."""
    found = _place(group, left, resources, plan)
    ranks = [_hold(group, rank, *at, target_tokens) for rank, at in enumerate(found)]
    plan.ranks += ranks
    return ranks


def _gpus(node: Node) -> list[float]:
    """Returns the free share of each GPU; GPUs in use come last."""
    free = node.free.get("GPU", 0.0)
    return [min(1.0, max(0.0, free - index)) for index in range(int(node.total.get("GPU", 0)))]


def _place(
    group: GroupEstimate, left: list[_Left], resources: ResourcesConfig, plan: Plan
) -> list[tuple[_Left, int]]:
    """Returns node and device of every rank; empty if there is not enough room."""
    num_gpus = sum(each.node.total.get("GPU", 0.0) for each in left)
    asked = needs(group.device, group.size, resources, num_gpus)
    bundle = bundle_of(*asked, accelerator(resources, drafts=group.drafts))
    totals = [each.node.total for each in left]
    reserved, per_bundle = reserved_at_once(bundle, group.size, group.num_stages, totals)
    count = group.size // per_bundle
    strategy = strategy_of(reserved, count, totals, resources)
    rooms = {index: _room(reserved, each.free) for index, each in enumerate(left)}
    if strategy == "STRICT_PACK":
        whole = [index for index, room in rooms.items() if room >= count]
        order = sorted(whole, key=lambda index: rooms[index])[:1] * count
    else:
        order = [
            index
            for index in sorted(rooms, key=lambda index: (-rooms[index], index))
            for _ in range(rooms[index])
        ][:count]
    if len(order) < count:
        plan.problems.append(_no_room(group, bundle, strategy, left, per_bundle))
        return []
    return [(left[index], left[index].take(bundle)) for index in order for _ in range(per_bundle)]


def _no_room(
    group: GroupEstimate, bundle: Bundle, strategy: str, left: list[_Left], per_bundle: int
) -> ConfigError:
    """Returns an error with the group, its requirements and the free room of every node."""
    asked = ", ".join(f"{count:g} {name}" for name, count in bundle.items() if count != 0.001)
    kinds = [name.removeprefix(_KIND) for name in bundle if name.startswith(_KIND)]
    what = f"{group.size} rank{'s' * (group.size > 1)} of {asked or 'no CPU'} each"
    what += f" on nodes with {kinds[0]}" if kinds else ""
    what += f", each stage of {per_bundle} on one node" if per_bundle > 1 else ""
    what += ", all on one node" if strategy == "STRICT_PACK" and group.size > 1 else ""
    have = "; ".join(
        f"{each.node.name} ({each.node.kind}) has room for {room}"
        + (" now" if _room(bundle, each.node.total) > room else "")
        for each, room in ((each, _room(bundle, each.free)) for each in left)
    )
    return ConfigError.at(group.field, f"no place for the {group.role}: {what}; {have}")


def _hold(group: GroupEstimate, rank: int, left: _Left, device: int, target_tokens: int) -> Rank:
    """Returns a placed rank, and reserves its memory."""
    held, node = group.bytes_of(rank), left.node
    on_gpu = device < len(left.gpus)
    memory, used = node.gpu_bytes if on_gpu else node.memory_bytes, left.used_bytes[device]
    if group.follows_target:
        kv_bytes = target_tokens * held.kv_per_token
    else:
        kv_bytes = held.kv_on_gpu(memory, used) if on_gpu else held.kv_on_cpu
    name = f"GPU {device}" if on_gpu else "CPU"
    made = Rank(group.role, rank, node.name, name, held, kv_bytes, memory, group.field, used)
    left.used_bytes[device] += made.total_bytes
    return made


def _misfit(run: Sequence[Rank]) -> ConfigError | None:
    """Returns the error of neighbouring ranks that do not fit; None if they fit."""
    rank, held = run[0], run[0].held
    ranks = f"rank {rank.rank}" if len(run) == 1 else f"ranks {rank.rank} to {run[-1].rank}"
    who, where = f"{ranks} of the {rank.group}", f"({rank.node}, from {rank.device} on)"
    memory, tokens = rank.memory_bytes, rank.kv_tokens
    if memory is not None and rank.beside_bytes + rank.total_bytes > memory:
        beside = rank.beside_bytes
        others = f" beside {_gib(beside)} of other workers" if beside else ""
        return ConfigError.at(
            rank.field,
            f"{who} need {_gib(rank.total_bytes)} each{others}, and a device has {_gib(memory)} "
            f"{where}",
        )
    is_known = memory is not None or rank.device == "CPU"
    if not is_known or tokens is None or tokens >= held.min_tokens:
        return None
    key = "kv_cpu_bytes" if rank.device == "CPU" else "kv_memory_fraction"
    return ConfigError.at(
        key if held.fixed_kv_bytes is None else "num_kv_blocks",
        f"{who} have room for {tokens} tokens of KV cache, and one sequence may have "
        f"{held.min_tokens} {where}",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
