"""Checks of a checkpoint and of its KV cache's size, without reading weights or computing.

Files are opened (safetensors checks their headers against their sizes). Names and shapes are
compared with the model built on the meta device, and one token is run through it there to find the
size of the KV cache. `rank_weights` needs no file but config.json; `rank_adapters` also needs the
adapters' files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

import torch
from torch import nn

from ...errors import CheckpointError, ConfigError, OutriderError
from ..attention import KV_FORMATS
from ..ops import max_latent_heads
from ..ops.table import keeps_codes
from ..spec import ModelSpec, SentWeights
from ..states import StateShape
from .bridge import build_meta, observed_shapes, refuse_state, tied_names, tp_hints
from .checkpoint.adapters import FIELD, Adapter
from .checkpoint.gguf_checkpoint import coded_sources
from .checkpoint.hub import Trust, files_of, require_checkpoint
from .checkpoint.quantised import CodedSource
from .checkpoint.quantised_formats import WeightFormat, find_format
from .checkpoint.weights import Checkpoint, Received
from .family import read_spec, recurrent_layers, without_attention
from .info import TESTED, ModelInfo, model_heads, read_config, read_model, stage_layers
from .sharding import ShardPlan, is_experts, plan_shards, plan_vocabulary
from .stages import StageCut
from .target import Wish, check_stages, fitting_sources, needs_family

EXPERTS_FIELD = "enable_expert_parallel"
CPU = torch.device("cpu")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class Serving:
    """The options of loading a model on which the size of its KV cache depends."""

    device: torch.device = CPU
    dtype: torch.dtype | None = None  # None: the checkpoint's
    forward: Wish = "auto"
    deterministic: bool = False
    has_kernels: bool | None = None  # for that device; None: as on this machine
    keeps_quantised: bool = True  # if the operations support it
    whole_experts: bool = False
    kv_dtype: str = "auto"  # see `ModelSpec.kv_dtype`

    def kv_itemsize(self, dtype: torch.dtype) -> int:
        """Returns the bytes per element of the KV cache of a model of that dtype."""
        return 1 if self.kv_dtype in KV_FORMATS else dtype.itemsize

    def coded(self, path: Path, config: Any, info: ModelInfo) -> dict[str, float]:
        """Returns weights of a GGUF file's folder that stay quantised, and bytes per weight."""
        on_cpu = self.device.type == "cpu" and keeps_codes(info.dtype)
        if not on_cpu or not self._keeps(config):
            return {}
        return bytes_of_coded(coded_sources(files_of(path)))

    def kept(
        self, path: Path, config: Any, info: ModelInfo, **trust: Unpack[Trust]
    ) -> WeightFormat | None:
        """Returns the format in which weights stay quantised; None: they are dequantised."""
        if not self._keeps(config) or (form := find_format(path)) is None:
            return None
        if not form.is_kept:
            return None
        on_cpu = self.device.type == "cpu"
        return form if not on_cpu or keeps_on_cpu(path, info.dtype, **trust) else None

    def _keeps(self, config: Any) -> bool:
        """Returns True if weights stay quantised where operations support it."""
        on_family = self.forward != "bridge" and not isinstance(read_spec(config), str)
        return self.keeps_quantised and on_family


def keeps_on_cpu(path: Path, dtype: torch.dtype | None, **trust: Unpack[Trust]) -> bool:
    """Returns True if quantised weights stay quantised on this processor (None: bfloat16)."""
    codes = keeps_codes(dtype or torch.bfloat16)
    return Checkpoint(path, keeps_codes=codes, **trust).keeps


def check_weights(
    path: Path,
    size: int = 1,
    serving: Serving = Serving(),
    num_stages: int = 1,
    **trust: Unpack[Trust],
) -> tuple[ModelInfo, int | None]:
    """Checks a rank's weights; returns its `ModelInfo` and KV cache bytes per token, if known.

    Args:
        size: ranks that share every layer.
        num_stages: pipeline stages; the result is of a rank of the largest one.

    Raises:
        CheckpointError: a file is truncated or damaged, or a tensor is missing, superfluous or has
            another shape than config.json implies; names it.
        ConfigError: `size` ranks cannot share the model, or stages were requested and the family's
            decoder does not support it.
    """
    model, info = _fitting_model(path, size, serving.dtype, **trust)
    if model.config.model_type not in TESTED and not recurrent_layers(model.config):
        refuse_state(model)
    stages = stage_layers(info.num_layers, num_stages)
    if num_stages > 1:
        check_stages(path, model.config)
    if serving.whole_experts:
        _check_experts(model, size)
    found = [kv_bytes_per_token(model, info, size, serving, layers) for layers in stages]
    known = [each for each in found if each is not None]
    if size > 1 and not _cut_layers(model, size):
        heads = model_heads(model.config, 0, 1)
        info = replace(info, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads)
    return info, max(known, default=None)


def _check_experts(model: Any, size: int) -> None:
    """Raises `ConfigError` if ranks cannot each hold some whole experts of a mixture."""
    counts = {len(module.down_proj) for module in model.modules() if is_experts(module)}
    if not counts:
        raise ConfigError.at(EXPERTS_FIELD, "this model has no experts that ranks could share out")
    for count in counts:
        if count % size:
            raise ConfigError.at(
                EXPERTS_FIELD,
                f"tensor_parallel_size={size} does not divide this model's {count} experts",
            )


def _fitting_model(
    path: Path, size: int, dtype: torch.dtype | None, **trust: Unpack[Trust]
) -> tuple[Any, ModelInfo]:
    """Builds the model on the meta device and checks all tensors against it; raises likewise."""
    config, info = read_model(path, size, dtype, **trust)
    model = build_meta(config, info.dtype, **trust)
    checkpoint = Checkpoint(path, **trust)
    fitting_sources(model, {name: checkpoint.outline(name) for name in checkpoint.names}, path)
    return model, info


_OWN_KEYS = frozenset(
    {
        *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
        *("use_cache", "return_dict", "output_hidden_states", "output_attentions"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        *("router_aux_loss_coef", "output_router_logits", "tie_weights_keys"),
    }
)
"""Keys of config.json that no logit depends on; trainers may write other values of them."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Properties of a served model that replacement weights must share."""

    settings: dict[str, Any]  # of config.json
    format: str  # format of quantised weights

    @classmethod
    def of(cls, path: Path, **trust: Unpack[Trust]) -> ServedModel:
        """Reads the properties (raises `CheckpointError`)."""
        settings = read_config(path, **trust).to_dict()
        found = find_format(path)
        kept = {key: value for key, value in settings.items() if key not in _OWN_KEYS}
        return cls(kept, "none" if found is None else found.description)

    def check(self, path: Path, size: int, **trust: Unpack[Trust]) -> ModelInfo:
        """Checks the weights in `path` without reading them; returns a rank's `ModelInfo`.

        Raises:
            CheckpointError, ConfigError: as in `check_weights`; or the model or its format differs:
                names the key of config.json.
        """
        require_checkpoint(path, **trust)
        other = ServedModel.of(path, **trust)
        for key in sorted(self.settings.keys() | other.settings.keys()):
            ours, theirs = (each.settings.get(key) for each in (self, other))
            if ours != theirs:
                raise CheckpointError(
                    f"{str(path)!r} is another model than the one that is served: its {key} is "
                    f"{theirs!r}, not {ours!r}"
                )
        if self.format != other.format:
            raise CheckpointError(
                f"{str(path)!r} is in another format than the model that is served: its "
                f"quantization_config says {other.format}, not {self.format}"
            )
        return _fitting_model(path, size, None, **trust)[1]


def received_problem(message: SentWeights, spec: ModelSpec, num_ranks: int) -> tuple[str, str]:
    """Checks weights from a trainer; returns the field at fault and the reason, or ""."""
    counts = len(message.names), len(message.dtypes), len(message.shapes)
    if len(set(counts)) > 1 or len(set(message.names)) < counts[0]:
        return "names", f"{counts} names, dtypes and shapes, of which names may repeat"
    for dtype in message.dtypes:
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            return "dtypes", f"{dtype!r} is no type of torch's"
    shaped = zip(message.names, message.dtypes, message.shapes, strict=True)
    try:
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, dtype, shape in shaped
        }
        path = spec.folder
        trusted = spec.trust_remote_code
        config, info = read_model(path, num_ranks, None, trust_remote_code=trusted)
        if find_format(path) is not None:
            raise CheckpointError("a quantised model takes weights from folders only")
        model = build_meta(config, info.dtype, trust_remote_code=trusted)
        received = Received(path, tensors)
        fitting_sources(model, {name: received.outline(name) for name in received.names}, path)
    except (RuntimeError, TypeError) as error:  # raised by torch for an invalid shape
        return "shapes", str(error)
    except OutriderError as error:
        return "names", error.message
    return "", ""


def kv_bytes_per_token(
    model: Any, info: ModelInfo, size: int, serving: Serving, layers: range | None = None
) -> int | None:
    """Returns the bytes per token on a rank with these layers, or all.

    Returns None for models that read values, which the meta device does not have.
    """
    layers = range(info.num_layers) if layers is None else layers
    latent, itemsize = (
        _latent_elements(model.config, info, serving),
        serving.kv_itemsize(info.dtype),
    )
    if recurrent_layers(model.config):  # their modules read values
        count = len(set(layers) - without_attention(model.config))
        return 2 * count * info.num_kv_heads * info.head_dim * itemsize
    shapes = observed_shapes(model, info)
    if latent is not None:
        return int(len(layers) * latent * itemsize)
    if shapes is None:
        return None
    cut, elements = _cut_layers(model, size), 0
    for layer in layers:
        num_heads = shapes[layer].num_kv_heads
        held = -(-num_heads // size) if layer in cut else num_heads
        elements += shapes[layer].num_elements // num_heads * held
    return elements * itemsize


def _cut_layers(model: Any, size: int) -> set[int]:
    """Returns layers whose heads are divided among ranks; the others are whole on every rank."""
    if size == 1:
        return set()
    plan = plan_shards(model, model_heads(model.config, 0, size), tp_hints(model))
    return {
        module.layer_idx
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx")
        and any(f"{name}.{key}.weight" in plan.shards for key, _ in module.named_children())
    }


_MAMBA = (
    ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
    ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel"),
)
"""Fields of `StateShape`, by their names in configurations."""


def state_bytes(config: Any, dtype: torch.dtype, size: int, layers: range | None = None) -> int:
    """Returns the bytes per sequence of a rank's recurrent layers, among `layers` or all."""
    kept = recurrent_layers(config)
    count = len(kept if layers is None else kept & set(layers))
    if not count:
        return 0
    for names in _MAMBA:  # these layers are whole on every rank
        if hasattr(config, names[0]):
            return count * StateShape(*(getattr(config, key) for key in names)).num_bytes(dtype)
    heads = config.linear_num_key_heads
    share = size if heads % size == 0 else 1
    shape = StateShape(
        heads // share,
        config.linear_num_value_heads // share,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )
    return count * shape.num_bytes(dtype)


def refuse_recurrent(config: Any, what: str) -> None:
    """Raises `CheckpointError` if a model other than a target has recurrent layers."""
    if recurrent_layers(config):
        raise CheckpointError(
            f"{what} cannot be a {config.model_type!r} model: its layers keep a state that only a "
            "target's steps rewind"
        )


def _latent_elements(config: Any, info: ModelInfo, serving: Serving) -> int | None:
    """Returns the cached elements per token and layer of latent attention on a rank; None: none.

    Every rank caches whole latents; if heads are expanded, each rank caches its own heads.
    """
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    latent, rotated, plain, value = (getattr(config, name, None) for name in names)
    if not latent or not rotated or not plain or not value:
        return None
    most = info.num_heads
    if not serving.has_kernels:
        most = max_latent_heads(serving.device, info.dtype, deterministic=serving.deterministic)
    is_kept = serving.forward != "bridge" and not isinstance(read_spec(config), str)
    if is_kept and info.num_heads <= most:
        return int(latent + rotated)
    return int(info.num_heads * (plain + rotated + value))


def bytes_of_coded(sources: Mapping[str, CodedSource]) -> dict[str, float]:
    """Returns the bytes per weight of weights that stay in codes, by name.

    A product joins the rows of several weights. If one of them has no codes, none stays in codes.
    """
    found = {}
    for name, source in sources.items():
        module, leaf, _ = ("." + name).rsplit(".", 2)
        joined = [each for each in _JOINED if _JOINED[each] == _JOINED.get(leaf)] or [leaf]
        beside = [sources.get(f"{module}.{each}.weight".lstrip(".")) for each in joined]
        if None not in beside:
            kinds = [each for each in beside if each is not None]
            found[name] = source.beside(kinds).bytes_per_weight
    return found


_SCALE_SHARE = {8: 1 / 8192, 4: 1 / 32}
"""Bytes of scales and zeros per byte of codes: float32 per 128 x 128; 18 bits per group of 128."""


def rank_weights(
    model: Any,
    size: int,
    kept: WeightFormat | None = None,
    layers: range | None = None,
    coded: Mapping[str, float] = MappingProxyType({}),
) -> tuple[int, int]:
    """Returns the bytes of a rank's weights, and of its part of embedding and output layer.

    Args:
        model: from `build_meta`, with the modules whole.
        kept: format in which linears and experts stay quantised; None: they are dequantised.
        layers: layers of its stage; None: all, with both ends.
        coded: bytes per weight of those that stay in a GGUF file's codes.
    """
    plan, ends = ShardPlan(), (model.get_input_embeddings(), model.get_output_embeddings())
    if size > 1:
        plan = plan_shards(model, model_heads(model.config, 0, size), tp_hints(model))
        plan_vocabulary(plan, model, *ends, 0, size)
    names = {id(module): name for name, module in model.named_modules()}
    at_ends = {f"{names[id(module)]}.weight" for module in ends}
    linears = {
        f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear
    }
    tied, total, outside = tied_names(model), 0, 0
    cut = None if layers is None else StageCut(model, layers)
    for name, tensor in model.state_dict().items():
        shared = name in tied and name not in coded
        if shared or (cut is not None and not cut.holds(name)):
            continue
        count, shard = tensor.numel(), plan.shards.get(tied.get(name, name))
        if shard is not None:
            count = count // tensor.shape[shard.dim] * shard.length
        num_bytes = count * tensor.element_size()
        is_packed = name in linears - at_ends or tensor.dim() == 3
        if kept is not None and is_packed and tensor.is_floating_point():
            codes = count * kept.bits // 8
            num_bytes = codes + int(codes * _SCALE_SHARE.get(kept.bits, 0.0))
        if name in coded:
            num_bytes = int(count * coded[name])
        total += num_bytes
        outside += num_bytes * (name in at_ends)
    return total, outside


def check_adapters(
    path: Path,
    size: int,
    adapters: Sequence[Adapter],
    serving: Serving,
    num_stages: int = 1,
    **trust: Unpack[Trust],
) -> int:
    """Checks adapters of a target; returns their bytes on a rank of the largest stage.

    Args:
        size: ranks that share every layer.

    Raises:
        ConfigError: the target is not computed by the family's decoder.
        CheckpointError: an adapter is for another model; names the tensor.
    """
    config, info = read_model(path, size, serving.dtype, **trust)
    reason = read_spec(config)
    if isinstance(reason, str):
        raise ConfigError.at(FIELD, needs_family(path, reason))
    model = build_meta(config, info.dtype, **trust)
    for adapter in adapters:
        adapter.fit(model)
    stages = stage_layers(info.num_layers, num_stages)
    return max(rank_adapters(model, size, adapters, layers) for layers in stages)


_JOINED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
}
"""Linears that are joined into one product."""


def rank_adapters(model: Any, size: int, adapters: Sequence[Adapter], layers: range) -> int:
    """Returns the bytes of adapters on a rank, as `family/adapted.py` lays them out.

    Args:
        model: from `build_meta`, with the modules whole.
        layers: layers of its stage.
    """
    plan, modules, cut = ShardPlan(), dict(model.named_modules()), StageCut(model, layers)
    if size > 1:
        plan = plan_shards(model, model_heads(model.config, 0, size), tp_hints(model))
    products: dict[str, list[str]] = {}
    for name, module in modules.items():
        if type(module) is nn.Linear and cut.holds(name):
            parent, _, leaf = name.rpartition(".")
            products.setdefault(f"{parent}.{_JOINED.get(leaf, leaf)}", []).append(name)
    total = 0
    for names in products.values():
        for adapter in adapters:
            parts = [adapter.parts[name] for name in names if name in adapter.parts]
            if not parts:
                continue
            shards = [plan.shards.get(f"{name}.weight") for name in names]
            rank, width = sum(part.down.shape[0] for part in parts), parts[0].down.shape[1]
            if shards[0] is not None and shards[0].dim == 1:
                width = shards[0].length
            outputs = sum(
                shard.length if shard is not None and shard.dim == 0 else modules[name].out_features
                for name, shard in zip(names, shards, strict=True)
            )
            total += rank * (width + outputs) * model.dtype.itemsize
    return total


def machine_bytes(device: torch.device) -> int:
    """Returns the memory of this machine, or of this container, for `device`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in map(Path, _CGROUP_LIMITS):
        text = file.read_text().strip() if file.is_file() else ""
        if text.isdigit():
            total = min(total, int(text))
    return total


def check_blocks(
    num_blocks: int, block_size: int, kv_bytes_per_token: int, device: torch.device, num_ranks: int
) -> None:
    """Raises `ConfigError` if the machine's memory cannot hold this many KV blocks.

    Args:
        num_ranks: ranks that share the memory.
    """
    wanted = num_blocks * block_size * kv_bytes_per_token * num_ranks
    room = machine_bytes(device)
    if wanted > room:
        most = room // (block_size * kv_bytes_per_token * num_ranks)
        raise ConfigError.at(
            "num_kv_blocks",
            f"{num_blocks} blocks of {block_size} tokens take "
            f"{wanted / 2**30:,.1f} GiB, and there are {room / 2**30:,.1f} GiB of memory; at most "
            f"{most} blocks, less what the weights need",
        )


def room_of(
    spec: ModelSpec,
    kv_bytes_per_token: int,
    max_model_len: int,
    device: torch.device,
    taken_bytes: int,  # by the device step
    state_bytes: int,  # of all sequences and checkpoints
) -> int:
    """Returns the number of blocks that fit, at most what `max_num_seqs` full sequences need.

    Raises:
        ConfigError: a single sequence of full length does not fit.
    """
    free_bytes = spec.kv_cpu_bytes
    if device.type == "cuda":
        torch.cuda.empty_cache()  # releases temporary memory of loading, such as widened weights
        _, total_bytes = torch.cuda.mem_get_info(device)
        used_bytes = total_bytes - torch.cuda.mem_get_info(device)[0]
        free_bytes = int(total_bytes * spec.kv_memory_fraction) - used_bytes
    free_bytes -= taken_bytes + state_bytes
    free_bytes -= spec.num_scratch_blocks * spec.block_size * kv_bytes_per_token
    per_sequence = -(-max_model_len // spec.block_size)
    # A stage without attention fits any number of blocks if its states fit.
    room = free_bytes // max(1, kv_bytes_per_token * spec.block_size)
    if room < per_sequence:
        field = "kv_memory_fraction" if device.type == "cuda" else "kv_cpu_bytes"
        raise ConfigError.at(
            field,
            f"room for {max(0, room) * spec.block_size} tokens of KV cache, but one "
            f"sequence may have {max_model_len}; raise {field} or lower max_model_len"
            + f"{' or max_num_seqs, whose states take a part' if state_bytes else ''}",
        )
    return min(room, per_sequence * spec.max_num_seqs)
