"""The properties of a model, from its checkpoint's configuration; no weight is read.

This module imports no code that computes models: an engine whose ranks are separate processes needs
only an outline. transformers is imported when a configuration is read.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ...config.files import SERVED_AS, reason, stored_config
from ...errors import CheckpointError, ConfigError
from .checkpoint.hub import Trust, read_mapping, require_checkpoint
from .checkpoint.pooling import lacks_output_layer
from .checkpoint.quantised_formats import find_format

if TYPE_CHECKING:
    import torch

NEEDED = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
)

_MOST = {"num_hidden_layers": 4096}  # each layer is built for the check of the weights

TESTED = frozenset(
    {
        *("afmoe", "apertus", "arcee", "aria_text", "axk1", "bamba", "beam", "biogpt", "bitnet"),
        *("cohere", "cohere2", "cohere2_moe", "falcon_h1", "granitemoehybrid", "nemotron_h"),
        *("ctrl", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe"),
        *("exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "glm"),
        *("gemma3n_text", "laguna"),
        *("glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss"),
        *("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium"),
        *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3"),
        *("iquestcoder", "jais2", "jetmoe", "kolibri1", "llama", "llama4_text", "mellum"),
        *("mimo_v2_flash", "minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral"),
        *("ministral3", "mistral", "mixtral", "modernbert-decoder", "nanochat", "olmo", "olmo2"),
        *("olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3"),
        *("solar_open", "starcoder2", "vaultgemma", "youtu"),
    }
)
"""Model types whose every kind of step is tested against transformers' own forward.

The tests use one rank and two. Models of other types are compared when they are loaded, on one
rank.
"""
TESTED_ALONE = frozenset({"gemma4_text", "gemma4_unified_text"})
"""Further types that are tested in the same way, but on one rank only."""

UNLIKE = frozenset({"diffllama", "doge", "inkling2_text", "inkling_text", "phimoe"})
"""Types whose logits over a paged cache differ from those of transformers' own forward.

Shapes do not reveal this. For types that are not listed, it is found only at start.
"""


def _as_other(data: dict[str, Any], path: Path) -> Any:
    """Converts a configuration to that of the type as which the model is served."""
    from transformers import CONFIG_MAPPING

    kind = data["model_type"]
    if kind in CONFIG_MAPPING:  # with this type's defaults
        data = CONFIG_MAPPING[kind].from_dict(data).to_dict()
    others = ("model_type", "auto_map", "layer_types", "indexer_types", "mlp_layer_types")
    keys = {key: value for key, value in data.items() if key not in others}
    if kinds := data.get("mlp_layer_types"):
        keys["first_k_dense_replace"] = count = kinds.count("dense")
        if "dense" in kinds[count:]:
            raise ValueError(f"mlp_layer_types: dense layers are the first ones, got {kinds}")
    config = CONFIG_MAPPING[SERVED_AS[kind]].from_dict(keys)
    config.name_or_path = str(path)
    return config


def read_config(path: Path, **trust: Unpack[Trust]) -> Any:
    """Returns the text model's configuration; raises `CheckpointError` if it is invalid."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    data = read_mapping(path / "config.json")
    try:
        if data.get("model_type") in SERVED_AS:
            config = _as_other(data, path)
        else:
            config = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust.get("trust_remote_code", False)
            )
    except (
        ValueError,
        OSError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        StrictDataclassError,
    ) as error:
        raise CheckpointError(
            f"{path / 'config.json'} is not a configuration that transformers knows: "
            f"{reason(error, path)}"
        ) from error
    outer, config = config, config.get_text_config()
    if getattr(config, "is_heterogeneous", False):  # per-layer facts are observed
        config.allow_global_per_layer_attribute_access = True
    find_format(path)  # rejects unsupported formats
    for each in (outer, config):  # weights are read dequantised: transformers must not see it
        if getattr(each, "quantization_config", None) is not None:
            del each.quantization_config
    lacking = [name for name in NEEDED if not isinstance(getattr(config, name, None), int)]
    if lacking:
        raise CheckpointError(
            f"{config.model_type!r} is not a decoder with a plain key-value cache: its "
            f"configuration has no {', '.join(lacking)}"
        )
    for name in NEEDED:
        value, most = getattr(config, name), _MOST.get(name, math.inf)
        if not 1 <= value <= most:
            bound = f"at most {most}" if value > most else "at least 1"
            raise CheckpointError(f"{path / 'config.json'}: {name} is {value}; allowed: {bound}")
    if lacks_output_layer(path):
        config.tie_word_embeddings = True
    return config


def read_eos(path: Path, config: Any) -> tuple[int, ...]:
    """Returns the tokens that end a text, from the generation configuration or the model's.

    Raises:
        CheckpointError: they are not token ids.
    """
    file = "generation_config.json"
    eos = read_mapping(path / file).get("eos_token_id")
    if eos is None:
        file, eos = "config.json", getattr(config, "eos_token_id", None)
    if eos is None:
        return ()
    tokens = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    if not all(isinstance(each, int) for each in tokens):
        raise CheckpointError(f"{path / file}: eos_token_id is no token id: {eos!r}")
    return tokens


Range = tuple[int, int]
FIELD = "tensor_parallel_size"
STAGES_FIELD = "pipeline_parallel_size"


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Returns the layers of each stage, in order.

    If they do not divide evenly, earlier stages have one more, since the last stage has the output
    layer and a head.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if num_stages > num_layers:
        raise ConfigError.at(
            STAGES_FIELD,
            f"{num_stages} stages of a model of {num_layers} layers; allowed: 1 to {num_layers}",
        )
    least, more = divmod(num_layers, num_stages)
    ends = [(index + 1) * least + min(index + 1, more) for index in range(num_stages)]
    return [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of the whole model and their division among ranks."""

    num_heads: int
    num_kv_heads: int
    rank: int
    size: int

    def check(self) -> None:
        """Raises `ConfigError` if `size` ranks cannot share these heads."""
        if self.num_heads % self.size:
            raise _indivisible("num_attention_heads", self.num_heads, self.size)
        if self.num_kv_heads % self.size and self.size % self.num_kv_heads:
            raise _indivisible("num_key_value_heads", self.num_kv_heads, self.size)

    @property
    def local(self) -> int:
        return self.num_heads // self.size

    @property
    def kv_range(self) -> Range:
        """This rank's key heads; if there are fewer than ranks, neighbouring ranks share one."""
        begin = self.rank * self.num_kv_heads // self.size
        return begin, begin + max(1, self.num_kv_heads // self.size)


def split(total: int, rank: int, size: int, what: str) -> Range:
    """Returns `rank`'s even share of `[0, total)`."""
    if total % size:
        raise _indivisible(what, total, size)
    return rank * total // size, (rank + 1) * total // size


def _indivisible(what: str, total: int, size: int) -> ConfigError:
    return ConfigError(f"{FIELD}={size} does not divide {what}={total} of this model", field=FIELD)


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


def outline(path: Path, tensor_parallel_size: int = 1, **trust: Unpack[Trust]) -> ModelOutline:
    """Returns a model's outline.

    Raises:
        CheckpointError: the folder is not a checkpoint that can be served.
        ConfigError: names the count that `tensor_parallel_size` does not divide.
    """
    require_checkpoint(path, **trust)
    config = read_config(path, **trust)
    return outline_of(config, path, tensor_parallel_size)


def outline_of(config: Any, path: Path, tensor_parallel_size: int) -> ModelOutline:
    """Returns the outline of the model in `path` from its configuration; raises `ConfigError`."""
    check_type(config.model_type, tensor_parallel_size)
    heads = model_heads(config, 0, tensor_parallel_size)
    heads.check()
    for count in getattr(config, "num_attention_heads_per_layer", None) or ():
        replace(heads, num_heads=count).check()
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
        max_model_len=min(config.max_position_embeddings, _num_indexed(config) or sys.maxsize),
        eos_token_ids=read_eos(path, config),
    )


def _num_indexed(config: Any) -> int | None:
    """Returns the longest context in tokens in which every row attends to all tokens."""
    return getattr(config, "index_topk", None)


def check_type(kind: str, tensor_parallel_size: int) -> None:
    """Raises `CheckpointError` for a type that cannot be served.

    Raises `ConfigError` for several ranks of a type whose sharding is not tested. Types that
    transformers does not know bring their own code and their own plan, and are accepted.
    """
    from transformers import CONFIG_MAPPING

    if kind in UNLIKE:
        raise CheckpointError(
            f"{kind!r} is not supported: its logits over a paged cache are not those of "
            "transformers' own forward"
        )
    if tensor_parallel_size > 1 and kind not in TESTED and kind in CONFIG_MAPPING:
        raise ConfigError.at(
            FIELD,
            f"{tensor_parallel_size} ranks of a {kind!r} model are not tested; use 1, where its "
            "forward is compared with transformers' own as it is loaded",
        )


def check_numbers(
    path: Path, tensor_parallel_size: int, num_stages: int, max_model_len: int | None
) -> None:
    """Checks the numbers in config.json, which takes no time; `outline` reads it in full.

    Raises:
        ConfigError: the ranks cannot share the heads, or the stages the layers, or the context is
            shorter.
    """
    text = _stated(path)
    names = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    num_heads, num_kv_heads, limit = map(text.get, names)
    num_layers, indexed = text.get("num_hidden_layers"), text.get("index_topk")
    if isinstance(num_heads, int) and num_heads > 0:
        num_kv_heads = num_kv_heads if isinstance(num_kv_heads, int) and num_kv_heads > 0 else None
        Heads(num_heads, num_kv_heads or num_heads, 0, tensor_parallel_size).check()
    if isinstance(num_layers, int) and num_layers > 0:
        stage_layers(num_layers, num_stages)
    if isinstance(indexed, int) and max_model_len is not None and max_model_len > indexed:
        raise ConfigError.at(
            "max_model_len",
            f"{max_model_len} exceeds {indexed}, this model's index_topk: its sparse attention is "
            "not implemented, and up to there it is the same as full attention",
        )
    if isinstance(limit, int) and max_model_len is not None:
        check_length(max_model_len, limit)


def stated_context(path: Path) -> int | None:
    """Returns the longest context in tokens according to config.json; None if it has none."""
    text = _stated(path)
    limits = (text.get("max_position_embeddings"), text.get("index_topk"))
    return min((each for each in limits if isinstance(each, int) and each > 0), default=None)


def _stated(path: Path) -> dict[str, Any]:
    """Returns the text part of config.json; empty if unreadable, which a full read reports."""
    data = stored_config(path)
    text = data.get("text_config")
    return text if isinstance(text, dict) and text else data


def check_length(max_model_len: int, limit: int) -> None:
    """Raises `ConfigError` if a length exceeds the checkpoint's limit."""
    if max_model_len > limit:
        raise ConfigError.at("max_model_len", f"{max_model_len} exceeds the checkpoint's {limit}")


def model_heads(config: Any, rank: int, size: int) -> Heads:
    num_heads = config.num_attention_heads
    return Heads(num_heads, getattr(config, "num_key_value_heads", None) or num_heads, rank, size)


@dataclass(frozen=True, slots=True)
class ModelInfo(ModelOutline):
    """Properties of a model that other modules use. Head counts are those of one rank."""

    dtype: torch.dtype


def read_model(
    path: Path,
    tensor_parallel_size: int = 1,
    dtype: torch.dtype | None = None,
    **trust: Unpack[Trust],
) -> tuple[Any, ModelInfo]:
    """Returns the configuration and a rank's `ModelInfo`; raises as `outline`."""
    from .checkpoint.weights import Checkpoint  # imports torch, which `outline` does without

    require_checkpoint(path, **trust)
    config = read_config(path, **trust)
    found = outline_of(config, path, tensor_parallel_size)
    dtype = dtype or config.dtype or Checkpoint(path, **trust).dtype()
    return config, ModelInfo(**asdict(found), dtype=dtype)


def describe(path: Path, tensor_parallel_size: int = 1, **options: Any) -> ModelInfo:
    """Returns a rank's `ModelInfo`, with the options of `read_model`; raises likewise."""
    return read_model(path, tensor_parallel_size, **options)[1]
