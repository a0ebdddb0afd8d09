"""A checkpoint's configuration files.

Nothing that computes a model is imported here: an engine whose ranks are processes of their own
reads these files and needs no more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig

from ...config.trust import reason
from ...errors import CheckpointError
from .checkpoint.quantised.formats import find_format

NEEDED = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
)


def read_config(path: Path, *, trust_remote_code: bool = False) -> Any:
    """The text model's configuration; a typed error when transformers cannot make one of it."""
    try:
        config = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (
        ValueError,
        OSError,
        KeyError,
        TypeError,
        AttributeError,
        StrictDataclassError,
    ) as error:
        raise CheckpointError(
            f"{path / 'config.json'} is not a configuration that transformers knows: "
            f"{reason(error, path)}",
            field="model",
        ) from error
    outer, config = config, config.get_text_config()
    find_format(path)  # refuses what is not read
    for each in (outer, config):  # weights are read dequantised: transformers must not see it
        if getattr(each, "quantization_config", None) is not None:
            del each.quantization_config
    lacking = [name for name in NEEDED if not isinstance(getattr(config, name, None), int)]
    if lacking:
        raise CheckpointError(
            f"{config.model_type!r} is not a decoder with a plain key-value cache: its "
            f"configuration has no {', '.join(lacking)}",
            field="model",
        )
    return config


def read_eos(path: Path, config: Any) -> tuple[int, ...]:
    """Tokens that end a text: the generation configuration's, else the model's."""
    eos = None
    if (path / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
