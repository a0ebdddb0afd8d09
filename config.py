"""Configuration: read once, checked strictly, frozen.

`EngineConfig.load(path_or_dict)` is what the CLI, `LLM` and the Serve application call. Keys that
TensorRT-LLM's YAML and vLLM's JSON spell differently are translated in `dialects.py` first.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .dialects import translate_engine, translate_speculative
from .errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SpeculationBase(Strict):
    """What every drafter's section shares."""

    max_draft_len: int = Field(4, ge=0, le=64)  # draft nodes per request and step
    verification: Literal["coupled", "rejection"] = "coupled"
    max_concurrency: int | None = Field(None, ge=1)  # no drafts while more requests run


class NoSpeculation(SpeculationBase):
    """Plain decoding: a drafter that proposes nothing."""

    decoding_type: Literal["None"] = "None"
    max_draft_len: Literal[0] = 0  # type: ignore[assignment]


class NGramConfig(SpeculationBase):
    """TensorRT-LLM's n-gram pool (`tensorrt_llm/_torch/speculative/ngram.py`)."""

    decoding_type: Literal["NGram"] = "NGram"
    max_matching_ngram_size: int = Field(4, ge=1, le=64)
    min_matching_ngram_size: int = Field(1, ge=1, le=64)
    is_public_pool: bool = False  # one pool per tenant; off by default: timing could leak
    is_keep_all: bool = True
    is_use_oldest: bool = True

    @model_validator(mode="after")
    def _sizes_in_order(self) -> NGramConfig:
        if self.min_matching_ngram_size > self.max_matching_ngram_size:
            raise ValueError(
                f"min_matching_ngram_size ({self.min_matching_ngram_size}) must not exceed "
                f"max_matching_ngram_size ({self.max_matching_ngram_size})"
            )
        return self


class DraftModelConfig(SpeculationBase):
    """What sections with a draft model of its own share: which, where, how large."""

    speculative_model: str
    placement: Literal["separate", "colocated"] = "separate"
    draft_tensor_parallel_size: int | None = Field(None, ge=1)  # None: 1, or the target's
    num_kv_blocks: int | None = Field(None, ge=2)  # None: as many as there is room for

    @model_validator(mode="after")
    def _colocated_size(self) -> DraftTargetConfig:
        if self.placement == "colocated" and self.draft_tensor_parallel_size is not None:
            raise ValueError(
                "draft_tensor_parallel_size belongs to placement 'separate'; "
                "a colocated drafter has the target's"
            )
        return self


class DraftTargetConfig(DraftModelConfig):
    """A small model of the same vocabulary drafts for the target."""

    decoding_type: Literal["DraftTarget"] = "DraftTarget"
    probs_top: int = Field(32, ge=1, le=1024)  # width of the distribution that `rejection` sees


SpeculativeConfig = Annotated[
    NoSpeculation | NGramConfig | DraftTargetConfig, Field(discriminator="decoding_type")
]
_TAGS = {
    section.model_fields["decoding_type"].default: section
    for section in (NoSpeculation, NGramConfig, DraftTargetConfig)
}


class ResourcesConfig(Strict):
    """What each Ray actor asks of the cluster."""

    cpus_per_worker: float | None = Field(None, ge=0)  # None: 1 on CPU, 0 beside a GPU
    gpus_per_worker: float | None = Field(None, ge=0)  # None: 1 on CUDA, 0 on CPU
    threads_per_worker: int | None = Field(None, ge=1)  # None: cores / workers of the node
    placement_timeout_s: float = Field(60.0, gt=0)


class EngineConfig(Strict):
    """One engine: a target, its drafter, its scheduler."""

    model: str
    tokenizer: str | None = None  # None: the model's own
    served_model_name: str | None = None  # None: the last part of the model's path
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    executor: Literal["ray", "local"] = "ray"
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    max_model_len: int | None = Field(None, ge=2)  # None: the checkpoint's
    block_size: int = Field(16, ge=1, le=256)
    num_kv_blocks: int | None = Field(None, ge=2)  # None: from `kv_memory_fraction`
    kv_memory_fraction: float = Field(0.9, gt=0, le=0.98)  # of a GPU's memory, weights included
    kv_cpu_bytes: int = Field(2**30, ge=2**20)  # per worker, where the device is a CPU
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int = Field(2048, ge=1)
    max_queued_requests: int = Field(1024, ge=1)
    enable_prefix_caching: bool = True
    seed: int = 0
    step_timeout_s: float = Field(120.0, gt=0)  # a step that takes longer is a dead worker
    max_restarts: int = Field(3, ge=0)  # of the worker group, within `restart_window_s`
    restart_window_s: float = Field(600.0, gt=0)
    stats_interval_s: float = Field(30.0, gt=0)  # between statistics lines in the log
    chat_template: str | None = None  # text or a file; None: the tokenizer's
    resources: ResourcesConfig = ResourcesConfig()
    speculative_config: SpeculativeConfig = NoSpeculation()

    @model_validator(mode="after")
    def _chunk_holds_every_draft(self) -> EngineConfig:
        nodes = 1 + self.speculative_config.max_draft_len
        if self.max_num_batched_tokens < nodes:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below one request's "
                f"step of {nodes} tokens (speculative_config.max_draft_len + 1)"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name under which clients ask for the model."""
        return self.served_model_name or Path(self.model).name

    @classmethod
    def load(cls, source: str | Path | dict[str, Any], **overrides: Any) -> EngineConfig:
        """Reads a YAML or JSON file, or a dict; `overrides` that are not None win.

        Raises:
            ConfigError: names the key, its value, and what is allowed.
        """
        data = dict(source) if isinstance(source, dict) else _read(Path(source))
        data.update({key: value for key, value in overrides.items() if value is not None})
        data = translate_engine(data)
        speculative = data.get("speculative_config")
        if isinstance(speculative, dict):
            data["speculative_config"] = translate_speculative(speculative)
        elif speculative is None:
            data.pop("speculative_config", None)
        elif not isinstance(speculative, SpeculationBase):
            raise ConfigError(
                f"speculative_config: expected a mapping, got {speculative!r}",
                field="speculative_config",
            )
        return parse(cls, data)


def parse(model: type[Model], data: dict[str, Any]) -> Model:
    """`data` as `model`; pydantic's first complaint as a `ConfigError` with a suggestion."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise config_error(model, error) from None


def config_error(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """The first complaint, with the full key and, for an unknown key, the nearest known one."""
    first = error.errors()[0]
    loc = [str(part) for part in first["loc"]]
    name = ".".join(part for part in loc if part not in _TAGS) or model.__name__
    if first["type"] == "extra_forbidden":
        return unknown_key(name, loc[-1], _known_keys(model, loc[:-1]))
    if first["type"] == "missing":
        return ConfigError(f"{name}: this key is required", field=name)
    if first["type"] == "union_tag_invalid":
        context = first.get("ctx", {})
        return ConfigError(
            f"{name}.decoding_type: unknown drafter {context.get('tag')!r}; "
            f"allowed: {context.get('expected_tags')}",
            field=f"{name}.decoding_type",
        )
    if first["type"] == "union_tag_not_found":
        return ConfigError(f"{name}.decoding_type: this key is required", field=name)
    message = first["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(first["input"], dict) else f" (got {first['input']!r})"
    return ConfigError(f"{name}: {message}{shown}", field=name)


def unknown_key(path: str, key: str, known: list[str]) -> ConfigError:
    """An unknown key's error, with the nearest known key or all of them."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return ConfigError(f"{path}: unknown key; {hint}", field=path)


def _known_keys(model: type[BaseModel], path: list[str]) -> list[str]:
    """Keys allowed at `path` under `model`; union members are found by their tag."""
    fields = model.model_fields
    if not path:
        return list(fields)
    sections: dict[str, type[BaseModel]] = {"resources": ResourcesConfig, **_TAGS}
    section = sections.get(path[-1])
    return list(section.model_fields) if section else []


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}", field="config") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config: {path} is not UTF-8: {error}", field="config") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path} is not YAML: {error}", field="config") from None
    if not isinstance(data, dict):
        raise ConfigError(f"config: {path} must hold a mapping of keys", field="config")
    return data
