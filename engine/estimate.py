"""Estimates the memory of workers from configurations, and describes the target's files.

Weights are exact unless they are quantised: they follow from the shapes that each rank's sharding
cuts. Graphs and buffers of the device step are counted at the bound that workers reserve. The CUDA
context and NCCL's buffers are not counted; `kv_memory_fraction` leaves room for them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import DraftModelConfig, EngineConfig
from .checkpoints import draft_sections, draft_size, head_sections, opened_adapters, resolved, trust

if TYPE_CHECKING:
    import torch

    from ..drafters.heads.protocol import Head, TargetFacts
    from ..workers.model.checkpoint.adapters import Adapter
    from ..workers.model.fit import Serving
    from ..workers.model.info import ModelInfo

_CUT_COLLECTIVES = 4  # collectives of a sharded head: two per layer, input, output


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Memory of one rank, in bytes."""

    weights: int  # this rank's part of target and adapters, and of a colocated draft model
    heads: int = 0  # a head in this rank, and its copies of the target's ends
    graphs: int = 0  # device step: seats, activations, captured graphs
    states: int = 0  # recurrent states, for `max_num_seqs` and the checkpoints
    kv_per_token: int = 0  # all caches of this rank
    fixed_kv_bytes: int | None = None  # if `num_kv_blocks` is set
    min_tokens: int = 0  # the longest sequence, in whole blocks
    max_tokens: int = 0  # `max_num_seqs` such sequences
    kv_cpu_bytes: int = 0
    gpu_fraction: float = 1.0  # share of a GPU's memory that the engine may use

    @property
    def fixed_bytes(self) -> int:
        """Everything except the KV cache."""
        return self.weights + self.heads + self.graphs + self.states

    def kv_on_gpu(self, gpu_bytes: int | None, used_bytes: int) -> int:
        """Returns the cache's bytes on a GPU; `used_bytes` of it are in use by others.

        If `gpu_bytes` is None, the size of the GPU is unknown and the largest useful cache is
        returned.
        """
        if self.fixed_kv_bytes is not None:
            return self.fixed_kv_bytes
        most = self.max_tokens * self.kv_per_token
        if gpu_bytes is None:
            return most
        return max(0, min(most, int(gpu_bytes * self.gpu_fraction) - used_bytes - self.fixed_bytes))

    @property
    def kv_on_cpu(self) -> int:
        if self.fixed_kv_bytes is not None:
            return self.fixed_kv_bytes
        return min(self.kv_cpu_bytes, self.max_tokens * self.kv_per_token)


@dataclass(frozen=True, slots=True)
class GroupEstimate:
    """A group of workers that are started together."""

    role: str  # "target", "draft model", "head"
    field: str  # key of the configuration that errors name
    device: str  # "auto", "cpu", "cuda"
    size: int
    rank: RankBytes
    first: RankBytes | None = None  # rank 0's, where it differs
    others: tuple[RankBytes, ...] = ()  # a rank of each earlier stage, counted from the end
    drafts: bool = False  # whether it only holds a drafter
    follows_target: bool = False  # whether its cache has as many tokens as the target's

    @property
    def num_stages(self) -> int:
        return 1 + len(self.others)

    def bytes_of(self, rank: int) -> RankBytes:
        """Returns the memory of a rank; ranks are numbered from the last stage on."""
        stage = rank // (self.size // self.num_stages)
        if stage:
            return self.others[stage - 1]
        return self.first if rank == 0 and self.first is not None else self.rank


def estimate(config: EngineConfig, num_gpus: float) -> list[GroupEstimate]:
    """Returns the groups of one engine in a cluster of `num_gpus`; the target's comes first.

    Raises:
        CheckpointError, ConfigError: a file is missing or damaged, as in `preflight`.
    """
    from ..drafters.registry import build_head

    config = resolved(config)
    size = config.tensor_parallel_size
    target = _Model(
        config,
        config.model,
        size,
        num_gpus,
        num_blocks=config.num_kv_blocks,
        max_model_len=config.max_model_len,
        num_stages=config.pipeline_parallel_size,
        adapters=opened_adapters(config),
        kv_dtype=config.kv_cache_dtype,
    )
    made, extra, chains = [], 0, 0
    for field, section in draft_sections(config):
        path, ranks = section.speculative_model, draft_size(config, section)
        draft = _Model(config, path, ranks, num_gpus, num_blocks=section.num_kv_blocks)
        own_chains = _chain_bytes(config, section, draft)
        if section.placement == "colocated":
            target.add(draft)
            chains = own_chains
        else:
            made.append(
                GroupEstimate(
                    "draft model", field.replace("speculative_model", "draft_tensor_parallel_size"),
                    config.device, draft.size, replace(draft.rank(), graphs=own_chains), drafts=True
                )
            )  # fmt: skip
    own, fed = None, set[int]()
    for each in head_sections(config):
        head = build_head(each.at_its_place(config.model), head_facts(config, target.info))
        if each.placement == "colocated":
            own = each, head
        else:
            fed.update(head.capture)
            extra += 1
            role = "head" if extra == 1 else f"head {extra}"
            made.append(_separate_head(config, role, head, target))
    rank, first = target.rank(), None
    others = tuple(target.rank(stage) for stage in range(1, len(target.parts)))
    on_device = target.on_cuda and target.on_family and not rank.states and not others
    graphs = 0
    if config.device_step == "auto" and on_device:
        num_nodes = own[0].max_nodes if own else 0
        graphs = _graph_bytes(config, target, num_nodes, tuple(sorted(fed)))
    rank = replace(rank, graphs=graphs if others else graphs + chains)
    if own is not None:
        on_every_rank = bool(graphs) or (size == 1 and not others)
        rank, first = _with_head(rank, own[1], target, on_every_rank=on_every_rank)
    field = "pipeline_parallel_size" if others else "tensor_parallel_size"
    group = GroupEstimate("target", field, config.device, config.num_ranks, rank, first, others)
    return [group, *made]


def estimate_members(
    config: EngineConfig, name: str, num_members: int, place: str, num_gpus: float
) -> list[GroupEstimate]:
    """Returns the members of a drafter group in a cluster of `num_gpus`.

    Args:
        place: key of the group's section, for errors.

    Raises:
        CheckpointError, ConfigError: as `estimate`.
    """
    size = config.tensor_parallel_size
    model = _Model(
        config,
        config.model,
        size,
        num_gpus,
        num_blocks=config.num_kv_blocks,
        max_model_len=config.max_model_len,
    )
    field = f"{place}.tensor_parallel_size"
    return [
        GroupEstimate(f"{name} {index + 1}", field, config.device, size, model.rank(), drafts=True)
        for index in range(num_members)
    ]


@dataclass(slots=True)
class _Part:
    """The bytes that one rank of a stage holds of its models."""

    weights: int
    ends: int  # embedding and output layer; included in `weights`
    state_bytes: int  # recurrent state per sequence
    kv_per_token: int
    fixed_kv_bytes: int | None


class _Model:
    """The shard of a target or draft model on a rank of each stage, the last stage first."""

    def __init__(
        self,
        config: EngineConfig,
        folder: str,
        size: int,
        num_gpus: float,
        *,
        num_blocks: int | None,
        max_model_len: int | None = None,
        num_stages: int = 1,
        adapters: Sequence[Adapter] = (),
        kv_dtype: str = "auto",
    ) -> None:
        import torch

        from ..workers.model.bridge import build_meta
        from ..workers.model.family import read_spec
        from ..workers.model.fit import kv_bytes_per_token, rank_adapters, rank_weights, state_bytes
        from ..workers.model.info import read_model, stage_layers
        from ..workers.ops import max_latent_heads

        self.config, self.size = config, size
        self.num_blocks, self._max_model_len = num_blocks, max_model_len
        num_ranks = size * num_stages
        self.on_cuda = config.device == "cuda" or (
            config.device == "auto" and num_gpus >= num_ranks
        )
        device = torch.device("cuda" if self.on_cuda else "cpu")
        serving = serving_on(config, device, kv_dtype, has_kernels=self.on_cuda or None)
        model_config, self.info = read_model(Path(folder), size, serving.dtype, **trust(config))
        model = build_meta(
            model_config, self.info.dtype, trust_remote_code=config.trust_remote_code
        )
        self.max_latent_heads = sys.maxsize  # most heads that may share a latent
        if not serving.has_kernels:
            deterministic = serving.deterministic
            most = max_latent_heads(device, self.info.dtype, deterministic=deterministic)
            self.max_latent_heads = most
        self.on_family = config.forward != "bridge" and not isinstance(read_spec(model_config), str)
        kept = serving.kept(Path(folder), model_config, self.info, **trust(config))
        coded = serving.coded(Path(folder), model_config, self.info)
        self.whole_ends = rank_weights(model, 1)[1]
        self.parts: list[_Part] = []
        for layers in reversed(stage_layers(self.info.num_layers, num_stages)):
            own = None if num_stages == 1 else layers
            weights, ends = rank_weights(model, size, kept, own, coded)
            weights += rank_adapters(model, size, adapters, layers)
            states = state_bytes(model_config, self.info.dtype, size, layers)
            kv_bytes = kv_bytes_per_token(model, self.info, size, serving, layers) or 0
            fixed = self.blocks_bytes(kv_bytes)
            self.parts.append(_Part(weights, ends, states, kv_bytes, fixed))

    def blocks_bytes(self, kv_per_token: int) -> int | None:
        """Returns the bytes of `num_kv_blocks`; None if the number of blocks is not fixed."""
        blocks = self.num_blocks
        return None if blocks is None else blocks * self.config.block_size * kv_per_token

    def add(self, draft: _Model) -> None:
        """Adds a colocated draft model to the last stage's ranks; its cache has as many tokens."""
        part, added = self.parts[0], draft.parts[0]
        part.weights += added.weights
        part.kv_per_token += added.kv_per_token
        if part.fixed_kv_bytes is not None:
            more = added.fixed_kv_bytes or self.blocks_bytes(added.kv_per_token)
            part.fixed_kv_bytes += more or 0

    def rank(self, stage: int = 0) -> RankBytes:
        """Returns a rank of a stage, counted from the last, without heads and graphs."""
        part, config, limit = self.parts[stage], self.config, self.info.max_model_len
        longest = min(self._max_model_len or limit, limit)
        tokens = -(-longest // config.block_size) * config.block_size
        return RankBytes(
            part.weights,
            states=part.state_bytes * (config.max_num_seqs + config.num_checkpoints),
            kv_per_token=part.kv_per_token,
            fixed_kv_bytes=part.fixed_kv_bytes,
            min_tokens=tokens,
            max_tokens=tokens * config.max_num_seqs,
            kv_cpu_bytes=config.kv_cpu_bytes,
            gpu_fraction=config.kv_memory_fraction,
        )


def serving_on(
    config: EngineConfig, device: torch.device, kv_dtype: str, *, has_kernels: bool | None = None
) -> Serving:
    """Returns how an engine serves a model on a device."""
    from ..workers.devices import dtype_of
    from ..workers.model.fit import Serving

    return Serving(
        device,
        dtype_of(config.dtype),
        config.forward,
        config.deterministic,
        has_kernels=has_kernels,
        keeps_quantised=config.keep_quantised == "auto",
        whole_experts=config.enable_expert_parallel,
        kv_dtype=kv_dtype,
    )


def head_facts(config: EngineConfig, target: ModelInfo) -> TargetFacts:
    """Returns the facts of the target that a head is built from, on the meta device."""
    import torch

    from ..drafters.heads.protocol import TargetFacts

    sizes = target.hidden_size, target.vocab_size, target.num_layers
    return TargetFacts(*sizes, target.dtype, torch.device("meta"), config.allow_pickle)


def _head_bytes(head: Head) -> int:
    states = head.module.state_dict().values()
    return sum(tensor.numel() * tensor.element_size() for tensor in states)


def _head_kv(head: Head, target: _Model) -> int:
    """Returns a head's KV bytes per token; the cache holds latents if heads can share them."""
    from ..drafters.heads.protocol import FeatureModule
    from ..workers.head_layers import describe

    modules = [each for each in head.module.modules() if isinstance(each, FeatureModule)]
    latents: list[Any] = [
        attention
        for module in modules
        for attention in module.modules()
        if hasattr(attention, "kv_a_proj_with_mqa") and not isinstance(describe(module), str)
    ]
    elements, most = 0, target.max_latent_heads
    for layer, attention in zip_longest(head.layers, latents):
        if attention is not None and layer.num_kv_heads <= most:
            elements += attention.kv_a_proj_with_mqa.out_features
        else:
            elements += layer.num_kv_heads * (layer.head_dim + layer.value_width)
    return int(elements * target.info.dtype.itemsize)


def _own_ends(target: _Model) -> int:
    """Returns the bytes of embedding and output layer that a head on rank 0 adds."""
    part = target.parts[0]
    has_output = target.size == 1 and part.ends < target.whole_ends  # the last of several stages
    return target.whole_ends - part.ends * has_output


def _with_head(
    rank: RankBytes, head: Head, target: _Model, *, on_every_rank: bool
) -> tuple[RankBytes, RankBytes | None]:
    """Returns the target's ranks with a head, and rank 0 if only that holds the head's weights.

    Every rank's cache includes the head's layers, because all ranks agree on the number of blocks.
    """
    from ..workers.model.sharding import MIN_SAVED_BYTES

    own, kv = _head_bytes(head), rank.kv_per_token + _head_kv(head, target)
    fixed = rank.fixed_kv_bytes
    if fixed is not None and rank.kv_per_token:
        fixed = fixed // rank.kv_per_token * kv
    elif fixed is not None:  # the target's layers of this stage have no keys and values
        fixed = target.blocks_bytes(kv)
    if not on_every_rank:
        first = replace(rank, heads=own + _own_ends(target), kv_per_token=kv, fixed_kv_bytes=fixed)
        return rank, first
    saved = own - own // target.size
    if target.size > 1 and saved >= _CUT_COLLECTIVES * MIN_SAVED_BYTES:
        own //= target.size
    return replace(rank, heads=own, kv_per_token=kv, fixed_kv_bytes=fixed), None


def _separate_head(config: EngineConfig, role: str, head: Head, target: _Model) -> GroupEstimate:
    rank = target.rank()
    held = RankBytes(
        0, heads=_head_bytes(head) + target.whole_ends, kv_per_token=_head_kv(head, target),
        min_tokens=0, max_tokens=rank.max_tokens, gpu_fraction=rank.gpu_fraction,
    )  # fmt: skip
    return GroupEstimate(
        role, "speculative_config.placement", config.device, 1, held,
        drafts=True, follows_target=True,
    )  # fmt: skip


def _graph_bytes(
    config: EngineConfig, target: _Model, num_nodes: int, fed_layers: tuple[int, ...]
) -> int:
    from ..workers.device_step.seats import SeatSizes, reserved_bytes

    rank = target.rank()
    sizes = SeatSizes(
        config.max_num_seqs, rank.min_tokens, rank.max_tokens // config.block_size,
        config.block_size, num_nodes, target.info.vocab_size, fed_layers=fed_layers,
    )  # fmt: skip
    return reserved_bytes(sizes, target.info, target.size)


def _chain_bytes(config: EngineConfig, section: DraftModelConfig, draft: _Model) -> int:
    """Returns the bytes of a draft model's part of the device step."""
    from ..workers.device_step.chains import ChainSizes, chain_bytes

    is_on = config.device_step == "auto" and draft.on_cuda and draft.on_family
    in_turn = section.draws_in_turn and not section.wants_draft_probs
    if not (is_on and in_turn):
        return 0
    rank = draft.rank()
    sizes = ChainSizes(
        config.max_num_seqs, section.draft_len, rank.min_tokens,
        rank.max_tokens // config.block_size, config.block_size,
    )  # fmt: skip
    return chain_bytes(sizes, draft.info, draft.size)


# -- descriptions of the target


def at_most(config: EngineConfig) -> str:
    """Returns the prefix of quantities that differ between stages."""
    return "at most " * (config.pipeline_parallel_size > 1)


def target_facts(
    config: EngineConfig,
    target: ModelInfo,
    serving: Serving,
    device: torch.device | None,
    kv_bytes: int | None,
) -> dict[str, Any]:
    """Describes the target's configuration and files; `device` is None for other machines."""
    from ..workers.model.checkpoint.pooling import described
    from ..workers.ops.cpu import KERNEL_DTYPES
    from ..workers.ops.table import describe

    facts: dict[str, Any] = {
        "model": config.model,
        "architecture": target.architecture,
        "layers": target.num_layers,
        "vocabulary": target.vocab_size,
        "context": config.max_model_len or target.max_model_len,
        "ranks": _ranks(config, target.num_layers),
        "heads per rank": f"{target.num_heads} ({target.num_kv_heads} of keys and values)",
        "drafter": config.speculative_config.decoding_type,
    }
    if device is not None and device.type == "cpu" and target.dtype in KERNEL_DTYPES:
        facts["kernels"] = describe(target.dtype)
    if device is not None:
        facts |= _gpu_facts(config, device, target.dtype)
    if device is not None and kv_bytes is not None:
        facts["KV cache per rank"] = f"{at_most(config)}{kv_bytes:,} bytes a token of the target"
    if pooled := described(Path(config.model), config.hf_overrides.given()):
        facts["pooling"] = pooled
    return facts | _state_facts(config, target.dtype) | _gguf_facts(config, target, serving)


def _gguf_facts(config: EngineConfig, target: ModelInfo, serving: Serving) -> dict[str, Any]:
    """Describes the GGUF file of the target's folder and its size; empty for other folders."""
    from ..workers.model.bridge import build_meta
    from ..workers.model.checkpoint.hub import unpacked_from
    from ..workers.model.fit import rank_weights
    from ..workers.model.info import read_config

    path = Path(config.model)
    if (file := unpacked_from(path)) is None:
        return {}
    num_bytes = (path / "model.safetensors").stat().st_size
    model_config = read_config(path, trust_remote_code=config.trust_remote_code)
    coded = serving.coded(path, model_config, target)
    fate = "and as much in memory: they are dequantised at load"
    if coded:
        trusted = config.trust_remote_code
        model = build_meta(model_config, target.dtype, trust_remote_code=trusted)
        held = rank_weights(model, 1, coded=coded)[0] / 2**30
        fate = f"and {held:,.2f} GiB in memory: {len(coded)} matrices stay quantised"
    return {"GGUF file": f"{file}; unpacked, its weights take {num_bytes / 2**30:,.2f} GiB, {fate}"}


def _state_facts(config: EngineConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Describes the states of the target's recurrent layers."""
    from ..workers.model.fit import state_bytes
    from ..workers.model.info import read_config, stage_layers

    path, size = Path(config.model), config.tensor_parallel_size
    model = read_config(path, trust_remote_code=config.trust_remote_code)
    stages = stage_layers(model.num_hidden_layers, config.pipeline_parallel_size)
    num_bytes = max(state_bytes(model, dtype, size, layers) for layers in stages)
    if not num_bytes:
        return {}
    count = config.max_num_seqs + config.num_checkpoints
    total = num_bytes * count / 2**30
    return {
        "states per rank": f"{at_most(config)}{num_bytes:,} bytes a sequence, {total:,.2f} GiB for "
        f"max_num_seqs and {config.num_checkpoints} of cached prefixes"
    }


def _ranks(config: EngineConfig, num_layers: int) -> str | int:
    from ..workers.model.info import stage_layers

    size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if stages == 1:
        return size
    shares = ", ".join(str(len(each)) for each in stage_layers(num_layers, stages))
    return f"{config.num_ranks}: {stages} stages of {size}, with {shares} layers"


def _gpu_facts(
    config: EngineConfig, device: torch.device, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Describes which of this machine's GPUs and kernels are used."""
    import torch

    from ..workers.devices import gpu_obstacle
    from ..workers.ops import c_compiler, missing_kernels

    if device.type != "cuda":
        reason = gpu_obstacle() if config.device == "auto" else ""
        return {"GPU": f"not used: {reason}"} if reason else {}
    found = torch.cuda.get_device_properties(device)
    missing = missing_kernels(device, dtype)
    compiler = c_compiler() or "none, as those of the cache suffice"
    name = f"{found.name}, capability {found.major}.{found.minor}"
    return {
        "GPU": f"{torch.cuda.device_count()} x {name}",
        "CUDA of torch": torch.version.cuda,
        "kernels": missing or f"triton {version('triton')}; C compiler: {compiler}",
    }
