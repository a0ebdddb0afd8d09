"""What can be found out about a checkpoint and its KV cache without reading or computing anything.

Files are opened (safetensors checks their headers against their sizes), names and shapes are
compared with the model built on the meta device, and one token goes through it there, so that the
size of the KV cache is known.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigError
from ..ops import ReferenceOps, max_latent_heads
from .bridge import BridgeRunner, build_meta, fuse_norms
from .checkpoint.weights import Checkpoint
from .family import read_spec
from .info import ModelInfo, read_model
from .target import Wish, fitting_sources

CPU = torch.device("cpu")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class Serving:
    """How a model is going to be loaded, as far as the size of its KV cache depends on it."""

    device: torch.device = CPU
    dtype: torch.dtype | None = None  # the checkpoint's
    forward: Wish = "auto"
    deterministic: bool = False


def check_weights(
    path: Path,
    size: int = 1,
    serving: Serving = Serving(),
    *,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> tuple[ModelInfo, int | None]:
    """What a rank would load, and the bytes of its KV cache per token (None: not known).

    Raises:
        CheckpointError: a file is cut short or damaged, or a tensor is missing, superfluous or of
            another shape than config.json says; names it.
        ConfigError: `size` ranks cannot share the model.
    """
    trust = {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
    config, info = read_model(path, size, serving.dtype, **trust)
    model = build_meta(config, info.dtype, trust_remote_code=trust_remote_code)
    checkpoint = Checkpoint(path, allow_pickle=allow_pickle)
    fitting_sources(model, {name: checkpoint.outline(name) for name in checkpoint.names}, path)
    return info, _kv_bytes_per_token(model, info, size, serving)


def _kv_bytes_per_token(model: Any, info: ModelInfo, size: int, serving: Serving) -> int | None:
    """Of one rank; None for models that look at values, which the meta device does not have."""
    latent = _latent_elements(model.config, info, serving)
    if latent is not None:
        return int(info.num_layers * latent * info.dtype.itemsize)
    fuse_norms(model)
    try:
        shapes = BridgeRunner(model, info, ReferenceOps()).kv_shapes
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, LookupError):
        return None
    total_heads = max(shape.num_kv_heads for shape in shapes)
    held = -(-total_heads // size)
    elements = sum(shape.num_elements for shape in shapes)
    return elements * info.dtype.itemsize * held // total_heads


def _latent_elements(config: Any, info: ModelInfo, serving: Serving) -> int | None:
    """What a rank keeps of a token in a layer of latent attention; None: it is of another kind.

    Every rank keeps latents as they are; of expanded heads each keeps its own.
    """
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    latent, rotated, plain, value = (getattr(config, name, None) for name in names)
    if not latent or not rotated or not plain or not value:
        return None
    most = max_latent_heads(serving.device, info.dtype, deterministic=serving.deterministic)
    is_kept = serving.forward != "bridge" and not isinstance(read_spec(config), str)
    if is_kept and info.num_heads <= most:
        return int(latent + rotated)
    return int(info.num_heads * (plain + rotated + value))


def machine_bytes(device: torch.device) -> int:
    """Memory that this machine, or this container, has for `device`."""
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
    """Raises `ConfigError` where so many KV blocks cannot be held by the machine's memory.

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
