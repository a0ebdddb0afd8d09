"""`EngineConfig`: one engine's settings, read once, checked strictly, frozen.

`EngineConfig.load(path_or_dict)` is what the CLI, `LLM` and the Serve application call. Keys that
TensorRT-LLM's YAML and vLLM's JSON spell differently are translated in `compat/` first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, create_model, field_validator, model_validator

from ..errors import ConfigError, shown_value
from .compat.translate import (
    FOREIGN,
    as_given,
    check_placed,
    translate_engine,
    translate_section,
)
from .files import HfOverrides, is_hub_id
from .section import SpeculationBase
from .speculation import GROUP_NAME, DraftModelConfig, NoSpeculation, SpeculativeConfig
from .strict import Strict, at_key, check_foreign_names, check_order, parse, read_mapping


class ResourcesConfig(Strict):
    """What each Ray actor asks of the cluster."""

    cpus_per_worker: float | None = Field(None, ge=0)
    """CPUs of a worker; default: 1 on a CPU, 0 beside a GPU."""
    gpus_per_worker: float | None = Field(None, ge=0)
    """GPUs of a worker; default: 1 on CUDA, 0 on a CPU."""
    accelerator_type: str | None = Field(None, min_length=1)
    """Ray's name of the GPU that every worker needs: H100."""
    drafter_accelerator_type: str | None = Field(None, min_length=1)
    """The same for the workers of a separate drafter: L4; default: `accelerator_type`."""
    threads_per_worker: int | None = Field(None, ge=1, le=4096)
    """Threads of a worker; default: cores / workers of the node."""
    spin_s: float = Field(0.002, ge=0, le=0.1)
    """Seconds for which an engine and its workers look for each other's messages before they sleep;
    0: not at all. It takes processor time that is idle otherwise."""
    placement_timeout_s: float = Field(60.0, gt=0)
    """Seconds that the engine waits for room in the cluster."""
    spare_workers: bool | Literal["auto"] = "auto"
    """A second process per rank takes over a lost one: true, false, or auto: in servers on nodes
    with enough memory."""
    keep_workers_s: float = Field(60.0, ge=0)
    """Seconds that a server's workers wait for another engine when theirs died; 0: they end with
    it."""
    placement_strategy: Literal["PACK", "STRICT_PACK"] = "PACK"
    """PACK: ranks share a node if one has room for all; STRICT_PACK: always."""


class LoraModule(Strict):
    """One LoRA adapter of the target, served beside it; also as text: `name=path`, or JSON."""

    name: str = Field(min_length=1, description="Name by which requests choose it.")
    path: str = Field(
        min_length=1, description="Folder in PEFT's layout, a Hugging Face id, or an address."
    )
    base_model_name: str | None = None
    """Name of its model in /v1/models; default: the served name."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        name, equals, path = given.partition("=")
        try:
            return {"name": name, "path": path} if equals and name[:1] != "{" else json.loads(given)
        except (ValueError, RecursionError):
            raise ValueError("expected name=path, or JSON with name and path") from None


class OnlineAdaptationConfig(Strict):
    """A head that goes on learning from what the target emits while it serves."""

    folder: str = Field(min_length=1, description="Folder that adapted heads are written to.")
    tenants: tuple[str, ...] = ()
    """Tenants whose text may be used; default: requests without a tenant alone, which are \"\" in a
    list."""
    mixes_tenants: bool = False
    """Lets one head learn from several tenants."""
    automatic: bool = True
    """Rounds begin by themselves; false: only where one is asked for."""
    min_tokens: int = Field(20_000, ge=64)
    """New output tokens after which a round begins."""
    interval_s: float = Field(60.0, ge=0)
    """Least seconds from the end of a round to the next."""
    max_tokens: int = Field(400_000, ge=1024)
    """Recent tokens that are kept in memory to learn from; the oldest texts go first."""
    heldout: float = Field(0.2, gt=0, le=0.5)
    """Share of the texts that heads are measured on, and do not learn from."""
    steps: int = Field(100, ge=1)
    """Optimizer steps of a round; fewer where these are more than four passes over the texts."""
    batch: int = Field(8, ge=1, description="Windows of text in a step.")
    window: int = Field(256, ge=8, description="Tokens in a window.")
    adam_lr: float | None = Field(None, gt=0)
    """AdamW's learning rate; default: that of `outrider train adapt`."""
    muon_lr: float | None = Field(None, gt=0)
    """Muon's learning rate; default: that of `outrider train adapt`."""
    min_gain: float = Field(0.02, ge=0)
    """Tokens of a draft that have to be accepted more than of the present head, on average."""
    trial_drafts: int = Field(500, ge=0)
    """Live drafts, of requests that ended, after which a head that is accepted less often than the
    one before goes again; 0: it stays."""
    threads: int = Field(1, ge=1, description="Threads of the process that trains.")
    niceness: int = Field(19, ge=0, le=19)
    """How far other processes go before it; 19: it has what they leave."""
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where it trains: cpu, cuda.")
    cuda_visible_devices: str | None = Field(None, min_length=1)
    """The GPU that it trains on, such as a drafter's; default: the engine's first."""
    round_timeout_s: float = Field(3600.0, gt=0)
    """Seconds after which a round is given up."""
    num_kept: int = Field(4, ge=2)
    """Adapted heads of an engine whose folders stay."""

    @field_validator("folder")
    @classmethod
    def _from_here(cls, path: str) -> str:
        """Other processes have other working directories."""
        return str(Path(path).absolute())

    @model_validator(mode="after")
    def _tenants_apart(self) -> OnlineAdaptationConfig:
        if len(set(self.tenants)) > 1 and not self.mixes_tenants:
            raise at_key(
                "tenants",
                f"one head would learn from {len(set(self.tenants))} tenants; name one, or set "
                "mixes_tenants: true",
            )
        if self.cuda_visible_devices is not None and self.device != "cuda":
            raise at_key("cuda_visible_devices", "needs device 'cuda', here 'cpu'")
        return self


class EngineConfig(Strict):
    """One engine: a target, its drafter, its scheduler."""

    model: str = Field(
        description="Folder of the checkpoint (safetensors), a GGUF file, a Hugging Face id, or an "
        "address such as s3://bucket/model."
    )
    served_model_name: str | None = None
    """Name for clients; default: the last part of the model's path."""
    revision: str | None = Field(None, description="Branch, tag or commit of a Hugging Face id.")
    hf_overrides: HfOverrides = HfOverrides()
    """What the checkpoint gives beside text, for one that does not declare it."""
    generation_config: str = "auto"
    """Sampling defaults of HTTP requests: auto (the model's), vllm (none), a folder."""
    trust_remote_code: bool = Field(False, description="Run Python code contained in a checkpoint.")
    allow_pickle: bool = False
    """Read pickled weights (pytorch_model.bin) where there are no safetensors."""
    tokenizer: str | None = Field(None, description="Tokenizer; default: the model's own.")
    chat_template: str | None = None
    """Chat template or a file of one; default: the tokenizer's."""
    trust_request_chat_template: bool = False
    """Accept chat_template in requests; it runs in a sandbox."""
    tool_call_parser: Literal[
        "auto",
        "none",
        "hermes",
        "qwen3_coder",
        "glm45",
        "kimi_k2",
        "llama3_json",
        "pythonic",
        "mistral",
        "deepseek_v3",
        "harmony",
    ] = "auto"
    """How the model writes tool calls: hermes, qwen3_coder, glm45, kimi_k2, llama3_json, pythonic,
    mistral, deepseek_v3, harmony, none, or auto: as the chat template writes them."""
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "mistral", "harmony"] = "auto"
    """How the model marks reasoning: qwen3, deepseek_r1, mistral, harmony, none, or auto: as the
    chat template does."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """auto, bfloat16, float16, float32."""
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto, cpu, cuda.")
    forward: Literal["auto", "family", "bridge"] = "auto"
    """family (our decoder), bridge (transformers' modules), or auto: family where both agree."""
    device_step: Literal["auto", "off"] = "auto"
    """auto (on CUDA: captured steps that do not return to the host), off."""
    symmetric_memory: Literal["auto", "off"] = "auto"
    """auto (several CUDA ranks of one node sum small messages over memory that all of them map),
    off: NCCL sums all."""
    prompt_attention: Literal["auto", "own", "varlen", "flash_attn_3"] = "auto"
    """What computes long chunks of prompts on CUDA: own (our kernel), varlen (torch's varlen_attn),
    flash_attn_3 (the package flash_attn_interface; by this name also long contexts behind drafts),
    or auto: a library where the GPU suits it."""
    quantization: Literal["auto", "none", "fp8", "compressed-tensors", "awq", "gptq", "mxfp4"] = (
        "auto"
    )
    """Format of a quantised target: auto (the checkpoint's), none, fp8, compressed-tensors, awq,
    gptq, mxfp4."""
    keep_quantised: Literal["auto", "off"] = "auto"
    """auto (weights stay quantised in memory where the device has products by them), off:
    dequantised at load."""
    deterministic: bool = False
    """Outputs whose bits depend on no other request, draft or cache hit."""
    lora_modules: tuple[LoraModule, ...] = ()
    """LoRA adapters of the target: name=path, or mappings of name and path."""
    enable_lora: bool | None = None
    """true: adapters may be added while it runs, in Python; false: there are no lora_modules;
    default: lora_modules alone."""
    max_lora_rank: int | None = Field(None, ge=1)
    """Largest rank that an adapter may have; default: any."""
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="Ranks of the target.")
    pipeline_parallel_size: int = Field(1, ge=1, le=64)
    """Stages of the target's layers, of tensor_parallel_size ranks each."""
    enable_expert_parallel: bool = False
    """A rank of the target holds some of a mixture's experts, instead of a part of each."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt and output together; default: the checkpoint's."""
    max_num_seqs: int = Field(64, ge=1, description="Requests that run at once.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Tokens of one step.")
    max_queued_requests: int = Field(1024, ge=1, description="Requests that wait; more get 429.")
    block_size: int = Field(16, ge=1, le=256, description="Tokens of a KV block.")
    num_kv_blocks: int | None = Field(None, ge=2, description="KV blocks; default: what fits.")
    kv_memory_fraction: float = Field(0.9, gt=0, le=0.98)
    """Share of a GPU's memory to use, weights included."""
    kv_cpu_bytes: int = Field(2**30, ge=2**20)
    """Bytes of KV cache per worker, on a CPU."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """How the target's keys and values are kept: auto (in the model's dtype), fp8 or fp8_e4m3,
    fp8_e5m2: floats of one byte."""
    enable_prefix_caching: bool = Field(True, description="Reuse the KV cache of equal beginnings.")
    executor: Literal["ray", "local"] = "ray"
    """ray (an actor per rank), local (this process)."""
    seed: int | None = None
    """Seed of the generator that gives seeds to requests without one; default: unpredictable."""
    overlap_scheduling: bool = True
    """Plan, deliver and take in requests while the workers compute."""
    step_timeout_s: float = Field(120.0, gt=0)
    """Seconds after which a step counts as a failure."""
    heartbeat_timeout_s: float = Field(5.0, gt=0)
    """Seconds of silence after which a rank is replaced; two fifths of it where it is stopped."""
    max_restarts: int = Field(3, ge=0)
    """Restarts of the worker group within restart_window_s."""
    restart_window_s: float = Field(600.0, gt=0, description="Seconds in which restarts count.")
    log_format: Literal["text", "json"] = "text"
    """Log of engine and edge: text, json (a line of JSON per record)."""
    allow_synthetic_acceptance: bool = False
    """Serve although verification is synthetic, for benchmarks."""
    stats_interval_s: float = Field(30.0, gt=0)
    """Seconds between statistics lines in the log."""
    resources: ResourcesConfig = ResourcesConfig()
    """What each worker asks of the cluster."""
    speculative_config: SpeculativeConfig = NoSpeculation()
    """The drafter; default: none."""
    online_adaptation: OnlineAdaptationConfig | None = None
    """Trains the head on what the target emits while it serves; default: off."""

    @field_validator("model")
    @classmethod
    def _named(cls, model: str) -> str:
        if not model.strip():
            raise ValueError(
                "the name is empty; give a folder, a GGUF file, a Hugging Face id or an address"
            )
        return model

    @field_validator("kv_cache_dtype")
    @classmethod
    def _in_full(cls, name: str) -> str:
        return "fp8_e4m3" if name == "fp8" else name

    @field_validator("enable_expert_parallel", mode="before")
    @classmethod
    def _by_number_of_ranks(cls, value: Any, info: ValidationInfo) -> Any:
        """Other engines give the number of ranks that share out experts."""
        ranks = info.data.get("tensor_parallel_size", 1)
        if type(value) is not int or value < 1:
            return value
        if value not in (1, ranks):
            raise ValueError(
                f"{value} ranks cannot share out experts: all {ranks} of tensor_parallel_size do, "
                "or none (1)"
            )
        return value > 1

    @model_validator(mode="after")
    def _one_format_of_harmony(self) -> EngineConfig:
        for key, other in (
            ("tool_call_parser", self.reasoning_parser),
            ("reasoning_parser", self.tool_call_parser),
        ):
            name = getattr(self, key)
            if other == "harmony" and name not in ("auto", "none", "harmony"):
                raise at_key(
                    key,
                    f"{name!r} cannot read harmony, which the other parser is; allowed: harmony, "
                    "none, auto",
                )
        return self

    @model_validator(mode="after")
    def _deterministic_where_it_can_be(self) -> EngineConfig:
        if not self.deterministic:
            return self
        narrow = ("float16",) if self.device == "cuda" else ()
        for key, allowed in (
            ("forward", ("auto", "family")),
            ("dtype", ("auto", "bfloat16", "float32", *narrow)),
            ("prompt_attention", ("auto", "own")),
            ("tensor_parallel_size", (1, 2)),  # sums of more ranks depend on a message's size
        ):
            if (value := getattr(self, key)) not in allowed:
                raise at_key(
                    "deterministic",
                    f"not available with {key} {value!r}; allowed: {', '.join(map(repr, allowed))}",
                )
        return self

    @model_validator(mode="after")
    def _adapters_where_they_can_be(self) -> EngineConfig:
        if self.enable_lora is False and self.lora_modules:
            raise at_key("enable_lora", "false, and there are lora_modules")
        names = [self.model_name]
        for module in self.lora_modules:
            if module.name in names:
                whose = "a second adapter has" if module.name in names[1:] else "the model has"
                raise at_key("lora_modules", f"{whose} the name {module.name!r}")
            names.append(module.name)
        return self

    @model_validator(mode="after")
    def _of_the_family(self) -> EngineConfig:
        for key, is_asked in (
            ("lora_modules", bool(self.lora_modules)),
            ("enable_lora", self.enable_lora),
            ("pipeline_parallel_size", self.pipeline_parallel_size > 1),
        ):
            if is_asked and self.forward == "bridge":
                reason = "not available with forward 'bridge'; allowed: 'auto', 'family'"
                raise at_key(key, reason)
        return self

    @model_validator(mode="after")
    def _adapted_where_it_can_be(self) -> EngineConfig:
        if self.online_adaptation is None:
            return self
        sections, key = self.speculative_config.sections, "online_adaptation"
        scopes = {getattr(each, "pool_scope", "request") for each in sections}
        if self.online_adaptation.mixes_tenants and scopes & {"tenant", "cluster"}:
            raise at_key(
                f"{key}.mixes_tenants",
                "the pools of a drafter keep tenants apart (pool_scope), and so has a head to",
            )
        if self.speculative_config.is_synthetic:
            raise at_key(key, "verification is synthetic, so that no acceptance is a head's")
        colocated = [each for each in sections if getattr(each, "placement", "") == "colocated"]
        if self.pipeline_parallel_size > 1 and colocated:
            raise at_key(
                key,
                "with pipeline_parallel_size above 1 only heads with placement 'separate' can be "
                "replaced",
            )
        return self

    @model_validator(mode="after")
    def _chunk_holds_every_draft(self) -> EngineConfig:
        nodes = 1 + self.speculative_config.max_nodes
        if self.max_num_batched_tokens < nodes:
            raise at_key(
                "max_num_batched_tokens",
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below one request's "
                f"step of {nodes} tokens (speculative_config.max_draft_len + 1)",
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Ranks of the target, of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def takes_adapters(self) -> bool:
        """Whether the target has LoRA adapters, or may get some."""
        return bool(self.lora_modules) or self.enable_lora is True

    @property
    def drafter_groups(self) -> dict[str, list[DraftModelConfig]]:
        """The sections of drafter groups that draft for it, by the groups' names."""
        found: dict[str, list[DraftModelConfig]] = {}
        for each in self.speculative_config.sections:
            if isinstance(each, DraftModelConfig) and each.drafter_group is not None:
                found.setdefault(each.drafter_group, []).append(each)
        return found

    @property
    def num_checkpoints(self) -> int:
        """States of recurrent layers that are kept for cached prefixes."""
        return self.max_num_seqs if self.enable_prefix_caching else 0

    @property
    def model_name(self) -> str:
        """The name under which clients ask for the model."""
        if self.served_model_name is None and is_hub_id(self.model):
            return self.model.partition("@")[0]
        return self.served_model_name or Path(self.model).name

    @classmethod
    def load(cls, source: str | Path | dict[str, Any], **overrides: Any) -> EngineConfig:
        """Reads a YAML or JSON file, or a dict; `overrides` that are not None win.

        Raises:
            ConfigError: names the key, its value, and what is allowed.
        """
        read = dict(source) if isinstance(source, dict) else read_mapping(Path(source), "config")
        given = {key: value for key, value in overrides.items() if value is not None}
        data = {**translate_engine(read), **translate_engine(given)}
        check_placed(data, cls.model_fields)
        check_foreign_names(data, cls.model_fields, FOREIGN)
        speculative = data.get("speculative_config")
        if isinstance(speculative, dict):
            data["speculative_config"] = translate_section(speculative)
        elif speculative is None:
            data.pop("speculative_config", None)
        elif not isinstance(speculative, SpeculationBase):
            shown = shown_value(speculative)
            raise ConfigError.at("speculative_config", f"expected a mapping, got {shown}")
        try:
            return parse(cls, data)
        except ConfigError as error:
            raise as_given(error, {**read, **given}) from None


# Keys of an engine's configuration that a drafter group has as well.
GROUP_KEYS = frozenset(
    {
        *("model", "revision", "trust_remote_code", "allow_pickle", "dtype", "device", "forward"),
        *("tensor_parallel_size", "symmetric_memory", "resources"),
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        *("block_size", "num_kv_blocks", "kv_memory_fraction", "kv_cpu_bytes"),
        *("step_timeout_s", "heartbeat_timeout_s"),
    }
)


class GroupAutoscalingConfig(Strict):
    """How many members a drafter group has, by the requests that engines draft for."""

    min_members: int = Field(1, ge=0)
    """Members at least; it starts with these. 0: none where engines have no requests."""
    max_members: int = Field(ge=1, description="Members at most.")
    target_ongoing_requests: float | None = Field(None, gt=0)
    """Requests of all engines for each member; default: the group's max_num_seqs."""
    upscale_delay_s: float = Field(30.0, ge=0)
    """Seconds for which more members are needed before some join; the first of none joins at
    once."""
    downscale_delay_s: float = Field(600.0, ge=0)
    """Seconds for which fewer members are needed before some leave."""

    @model_validator(mode="after")
    def _limits_in_order(self) -> GroupAutoscalingConfig:
        check_order("min_members", self.min_members, "max_members", self.max_members)
        return self


_member_fields: Any = {
    key: (field.annotation, field)
    for key, field in EngineConfig.model_fields.items()
    if key in GROUP_KEYS
}
_MemberFields: Any = create_model("_MemberFields", __base__=Strict, **_member_fields)


class DrafterGroupConfig(_MemberFields):
    """A drafter group that an application has; the keys of its members are the engine's."""

    name: str = Field(pattern=GROUP_NAME, description="Name by which engines find it.")
    num_members: int = Field(1, ge=1, description="Draft models, each over its own ranks.")
    autoscaling_config: GroupAutoscalingConfig | None = None
    """Members by load, in place of num_members; default: a fixed number."""
    max_engines: int = Field(4, ge=1)
    """Engines that may share a member, each with an equal part of its KV cache."""

    @model_validator(mode="after")
    def _sound(self) -> DrafterGroupConfig:
        if self.autoscaling_config is not None and "num_members" in self.model_fields_set:
            raise at_key("num_members", "give either num_members or autoscaling_config, not both")
        try:
            _ = self.engine
        except ConfigError as error:
            raise at_key(error.field or "model", error.message) from None
        return self

    @property
    def engine(self) -> EngineConfig:
        """The configuration of its members: of an engine whose model is the draft model."""
        return EngineConfig.load(
            {key: getattr(self, key) for key in self.model_fields_set if key in GROUP_KEYS}
        )

    @property
    def size(self) -> int | GroupAutoscalingConfig:
        """How many members it has."""
        return self.autoscaling_config or self.num_members

    @property
    def min_members(self) -> int:
        """Members that it starts with."""
        scaling = self.autoscaling_config
        return self.num_members if scaling is None else scaling.min_members

    @property
    def max_members(self) -> int:
        """Members at most."""
        scaling = self.autoscaling_config
        return self.num_members if scaling is None else scaling.max_members
