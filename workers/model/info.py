"""The properties of a model, from its checkpoint's configuration; no weight is read.

Nothing that computes a model is imported here: an engine whose ranks are processes of their own
needs an outline and no more. transformers is imported where a configuration is read.
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

_MOST = {"num_hidden_layers": 4096}  # each is built, to be compared with the weights

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
"""Model types of which tests compare every kind of step with transformers' own forward, at one rank
and at two. Others are compared when they are loaded, on one rank."""
TESTED_ALONE = frozenset({"gemma4_text", "gemma4_unified_text"})
"""Of the others, those of which tests compare the same at one rank."""

UNLIKE = frozenset({"diffllama", "doge", "inkling2_text", "inkling_text", "phimoe"})
"""Types whose logits over a paged cache are not those of transformers' own forward, which no shape
shows. Of types that are not named here, only a start finds that out."""


def _as_other(data: dict[str, Any], path: Path) -> Any:
    """A configuration of one of these types, as that of the type which it is served as."""
    from transformers import CONFIG_MAPPING

    kind = data["model_type"]
    if kind in CONFIG_MAPPING:  # with its own defaults
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
    """The text model's configuration; a typed error when transformers cannot make one of it."""
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
    if getattr(config, "is_heterogeneous", False):  # what is observed of a layer is its own
        config.allow_global_per_layer_attribute_access = True
    find_format(path)  # refuses what is not read
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
    """Tokens that end a text: the generation configuration's, else the model's.

    Raises:
        CheckpointError: they are no token ids.
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
    """The layers of each stage, the first stage's first; where they do not divide evenly, earlier
    stages have one more: the last one has the output layer and a head.

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
    """Attention heads of the whole model and how they are divided."""

    num_heads: int
    num_kv_heads: int
    rank: int
    size: int

    def check(self) -> None:
        """Raise when `size` ranks cannot share these heads."""
        if self.num_heads % self.size:
            raise _indivisible("num_attention_heads", self.num_heads, self.size)
        if self.num_kv_heads % self.size and self.size % self.num_kv_heads:
            raise _indivisible("num_key_value_heads", self.num_kv_heads, self.size)

    @property
    def local(self) -> int:
        return self.num_heads // self.size

    @property
    def kv_range(self) -> Range:
        """This rank's key heads; where there are fewer than ranks, neighbours share one."""
        begin = self.rank * self.num_kv_heads // self.size
        return begin, begin + max(1, self.num_kv_heads // self.size)


def split(total: int, rank: int, size: int, what: str) -> Range:
    """`rank`'s even share of `[0, total)`."""
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
    """A model's outline.

    Raises:
        CheckpointError: the folder is no checkpoint that can be served.
        ConfigError: names the count that `tensor_parallel_size` does not divide.
    """
    require_checkpoint(path, **trust)
    config = read_config(path, **trust)
    return outline_of(config, path, tensor_parallel_size)


def outline_of(config: Any, path: Path, tensor_parallel_size: int) -> ModelOutline:
    """The outline of the model in `path`, whose configuration was read; raises `ConfigError`."""
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
    """Tokens of the longest context of which every row attends to all."""
    return getattr(config, "index_topk", None)


def check_type(kind: str, tensor_parallel_size: int) -> None:
    """Raises `CheckpointError` for a type that cannot be served, and `ConfigError` for ranks of a
    model whose parts no test has put together.

    A type that transformers does not know brings its own code, and its own plan.
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
    """Checks what config.json itself says, which takes no time; `outline` reads it in full.

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
    """The longest context by config.json itself, in tokens; None where it states none."""
    text = _stated(path)
    limits = (text.get("max_position_embeddings"), text.get("index_topk"))
    return min((each for each in limits if isinstance(each, int) and each > 0), default=None)


def _stated(path: Path) -> dict[str, Any]:
    """config.json of the text part; empty where whoever reads it in full reports why."""
    data = stored_config(path)
    text = data.get("text_config")
    return text if isinstance(text, dict) and text else data


def check_length(max_model_len: int, limit: int) -> None:
    """Raises `ConfigError` for a length that is beyond the checkpoint's."""
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
    """The configuration, and what `load_model` would give a rank; raises as `outline`."""
    from .checkpoint.weights import Checkpoint  # imports torch, which `outline` does without

    require_checkpoint(path, **trust)
    config = read_config(path, **trust)
    found = outline_of(config, path, tensor_parallel_size)
    dtype = dtype or config.dtype or Checkpoint(path, **trust).dtype()
    return config, ModelInfo(**asdict(found), dtype=dtype)


def describe(path: Path, tensor_parallel_size: int = 1, **options: Any) -> ModelInfo:
    """What `load_model` would give a rank, with the options of `read_model`; raises alike."""
    return read_model(path, tensor_parallel_size, **options)[1]
