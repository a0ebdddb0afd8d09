"""What an engine must know of a model before its ranks start, from files of a few kilobytes.

Nothing here imports torch: an engine whose ranks are processes of their own has no use for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint.folder import require_checkpoint
from .heads import Heads, split
from .settings import read_config, read_eos


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Counts and sizes of a model. Head counts are those of one rank."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def outline(
    path: Path,
    tensor_parallel_size: int = 1,
    *,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> ModelOutline:
    """A model's outline.

    Raises:
        CheckpointError: the folder is no checkpoint that can be served.
        ConfigError: names the count that `tensor_parallel_size` does not divide.
    """
    require_checkpoint(path, allow_pickle=allow_pickle)
    config = read_config(path, trust_remote_code=trust_remote_code)
    return outline_of(config, path, tensor_parallel_size)


def outline_of(config: Any, path: Path, tensor_parallel_size: int) -> ModelOutline:
    """The outline of the model in `path`, whose configuration was read; raises `ConfigError`."""
    heads = model_heads(config, 0, tensor_parallel_size)
    heads.check()
    for name in ("intermediate_size", "moe_intermediate_size", "intermediate_size_mlp"):
        if isinstance(width := getattr(config, name, None), int):
            split(width, 0, tensor_parallel_size, name)
    begin, end = heads.kv_range
    return ModelOutline(
        architecture=(config.architectures or [config.model_type])[0],
        num_layers=config.num_hidden_layers,
        num_heads=heads.local,
        num_kv_heads=end - begin,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads.num_heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=read_eos(path, config),
    )


def model_heads(config: Any, rank: int, size: int) -> Heads:
    num_heads = config.num_attention_heads
    return Heads(num_heads, getattr(config, "num_key_value_heads", None) or num_heads, rank, size)
