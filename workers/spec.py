"""Configuration sent to workers and the reports they return: plain data that crosses processes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..config import SECTIONS, HeadConfig
from .model.checkpoint.hub import Trust, local_folder
from .model.checkpoint.progress import Progress


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model and the memory for its KV cache."""

    path: str
    dtype: str  # "auto", "bfloat16", "float16", "float32"
    block_size: int
    num_blocks: int | None  # None: as many as fit into the memory below
    max_model_len: int | None  # None: the checkpoint's limit
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cpu_bytes: int
    kv_memory_fraction: float
    trust_remote_code: bool = False  # run Python code contained in the checkpoint
    allow_pickle: bool = False  # read pickled weights if there are no safetensors
    forward: Literal["auto", "family", "bridge"] = "auto"  # which decoder computes the model
    deterministic: bool = False  # rows do not depend on the batch
    kv_dtype: str = "auto"  # of a target's keys and values: "auto", or one of `KV_FORMATS`
    prompt_attention: str = "auto"  # of a target: "auto", "own", or a library's name
    keeps_quantised: bool = True  # weights stay quantised if operations support that
    num_scratch_blocks: int = 0  # of a draft model, in addition to `num_blocks`
    # Of a draft model with another vocabulary, see `Translation`; empty: the target's vocabulary.
    translation: bytes = field(default=b"", repr=False)
    max_draft_len: int = 0  # of a draft model: longest chain drawn with the target's noise; 0: none
    num_checkpoints: int = 0  # states of a target's recurrent layers, in addition to `max_num_seqs`
    # Overrides of keys in a target's config.json, such as those that declare pooling.
    hf_overrides: tuple[tuple[str, Any], ...] = ()
    whole_experts: bool = False  # a rank has some experts of a mixture, not a part of each
    # LoRA adapters of a target: (name, folder); None: adapters are not supported.
    adapters: tuple[tuple[str, str], ...] | None = None
    # If `num_blocks` is None: the number of blocks that replaced ranks had, which must not change.
    kept_blocks: int | None = field(default=None, compare=False)

    def loads_as(self, other: ModelSpec | None) -> bool:
        """Returns True if both specs load the same; the length of chains may differ."""
        return other is not None and self == replace(other, max_draft_len=self.max_draft_len)

    def longest(self, own: int) -> int:
        """Returns the longest sequence of a model whose own limit is `own`."""
        return min(self.max_model_len or own, own)

    @property
    def known_blocks(self) -> int | None:
        """Number of blocks that does not depend on free memory; None: as many as fit."""
        return self.num_blocks or self.kept_blocks

    @property
    def trust(self) -> Trust:
        """What reading the checkpoint may do, as keyword arguments."""
        return {"trust_remote_code": self.trust_remote_code, "allow_pickle": self.allow_pickle}

    @property
    def folder(self) -> Path:
        """The checkpoint's folder on this node, fetched if necessary; raises `CheckpointError`."""
        return self.fetch(None)

    def fetch(self, progress: Progress | None) -> Path:
        """Fetches the checkpoint's folder and reports progress."""
        return Path(local_folder(self.path, progress=progress, **self.trust))


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A group of ranks and the models that each loads."""

    size: int  # ranks of all stages
    device: Literal["auto", "cpu", "cuda"]
    threads: int | None  # torch threads per rank; None: the node's cores, divided evenly
    timeout_s: float  # limit for one message
    heartbeat_timeout_s: float = 5.0  # a rank without heartbeats for longer is lost
    rule: str = "coupled"  # verification rule of the target
    rule_parameters: tuple[tuple[str, float], ...] = ()  # (name, value)
    spin_s: float = 0.0  # how long both ends of the step channel poll before they sleep
    device_step: Literal["auto", "off"] = "auto"  # off: every step is planned on the host
    symmetric_memory: Literal["auto", "off"] = "auto"  # off: NCCL sums small messages too
    target: ModelSpec | None = None
    draft: ModelSpec | None = None
    head: HeadConfig | None = None  # runs in the target's rank 0, or separately without `target`
    head_target: ModelSpec | None = None  # separate head only: the target for which it drafts
    fed_heads: tuple[HeadConfig, ...] = ()  # separate heads that read the target's hidden states
    stages: int = 1  # pipeline stages of the target; ranks of a stage are neighbours
    num_leases: int = 0  # most engines that share the draft model; 0: one engine owns it

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share every layer."""
        return self.size // self.stages

    @property
    def num_groups(self) -> int:
        """Number of the target's steps that may be in flight: one per stage.

        It is 1 with a draft model in these ranks, whose steps come between the target's.
        """
        return self.stages if self.draft is None else 1


@dataclass(frozen=True, slots=True)
class NewWeights:
    """To all ranks of a group: load other weights of the same models; an empty path: unchanged."""

    target: str = ""
    draft: str = ""
    head: str = ""
    only_checks: bool = False  # only check whether they could be loaded

    def applied(self, spec: WorkerSpec, report: WorkerReport) -> WorkerSpec:
        """Returns the specification of ranks with these weights, in their current dtypes."""
        parts: dict[str, Any] = {
            name: replace(model, path=path, dtype=made.dtype if made else model.dtype)
            for name, path, model, made in (
                ("target", self.target, spec.target, report.target),
                ("draft", self.draft, spec.draft, report.draft),
                ("head_target", self.target, spec.head_target, report.target),
            )
            if path and model is not None
        }
        head = spec.head
        if self.head and head is not None:
            head = head.model_copy(update={"speculative_model": self.head})
        return replace(spec, head=head, **parts)


@dataclass(frozen=True, slots=True)
class NewAdapter:
    """To all ranks of a target's group: add a LoRA adapter, or remove one."""

    name: str
    path: str  # empty: remove the adapter
    only_checks: bool = False  # only check whether it could be served

    def applied(self, spec: WorkerSpec) -> WorkerSpec:
        """Returns the specification of ranks with this adapter, or without it."""
        assert spec.target is not None, "an adapter is a target's"
        others = tuple(each for each in spec.target.adapters or () if each[0] != self.name)
        adapters = (*others, (self.name, self.path)) if self.path else others
        return replace(spec, target=replace(spec.target, adapters=adapters))


@dataclass(frozen=True, slots=True)
class NewDrafters:
    """To all ranks of a target's group: replace the drafters, and the heads that read features.

    The target stays. Ranks load the new drafters first; if that fails, nothing has changed. Then
    they rebuild their caches. They answer with rank 0's report, or with the reason for refusing.
    """

    draft: ModelSpec | None
    head: str  # a section in JSON; empty: none
    fed_heads: tuple[str, ...]  # sections in JSON
    only_checks: bool = False  # only check whether they fit; nothing is loaded

    @classmethod
    def of(cls, spec: WorkerSpec) -> NewDrafters:
        """Returns the drafters of `spec`."""
        head = "" if spec.head is None else spec.head.model_dump_json()
        return cls(spec.draft, head, tuple(each.model_dump_json() for each in spec.fed_heads))

    def kinds(self) -> tuple[Any, ...]:
        """What drafts, regardless of its weights."""
        heads = [json.loads(each or "{}") for each in (self.head, *self.fed_heads)]
        draft = self.draft and replace(self.draft, path="", dtype="")
        return draft, *({**each, "speculative_model": ""} for each in heads)

    def applied(self, spec: WorkerSpec) -> WorkerSpec:
        """Returns the specification of ranks with these drafters."""
        head = _section(self.head) if self.head else None
        fed_heads = tuple(map(_section, self.fed_heads))
        return replace(spec, draft=self.draft, head=head, fed_heads=fed_heads)


def on_this_node(head: HeadConfig, *, allow_pickle: bool) -> HeadConfig:
    """Returns `head` with its checkpoint's folder on this node; raises `CheckpointError`."""
    if not head.speculative_model:  # it is a part of the target
        return head
    field = "speculative_config.speculative_model"
    folder = local_folder(head.speculative_model, field, allow_pickle=allow_pickle)
    return head.model_copy(update={"speculative_model": folder})


def _section(text: str) -> HeadConfig:
    section = SECTIONS[json.loads(text)["decoding_type"]]
    assert issubclass(section, HeadConfig), section
    return section.model_validate_json(text)


@dataclass(frozen=True, slots=True)
class TrainerLink:
    """To all ranks of a target's group: join a trainer's process group, or leave it."""

    name: str
    host: str = ""  # empty: leave
    port: int = 0
    rank_offset: int = 1  # rank of this group's rank 0
    world_size: int = 0
    backend: str = "gloo"
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class SentWeights:
    """To all ranks of a target's group: take all of the target's weights from a trainer."""

    group: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # torch's names
    shapes: tuple[tuple[int, ...], ...]
    id: str = ""  # `TakeSent` refers to it
    # "check": only check them; "stage": receive and keep them until `TakeSent`.
    until: Literal["check", "stage", "take"] = "take"
    version: str = ""  # the version that outputs report; "": chosen by the server


@dataclass(frozen=True, slots=True)
class TakeSent:
    """To all ranks of a target's group: serve staged weights, unless they are served already.

    Refused if they are not there; an empty `id` drops the staged weights.
    """

    id: str


@dataclass(frozen=True, slots=True)
class Rest:
    """To all ranks of a group: free memory, or allocate it again.

    While asleep, a rank loads weights, but handles no message that computes.
    """

    level: int  # 1: move weights from a GPU to host memory; 2: drop them; 0: wake
    tags: tuple[str, ...] = ()  # what to wake: "weights", or "kv_cache", which needs the weights


@dataclass(frozen=True, slots=True)
class OpenLease:
    """To a shared draft model: reserve a part of its cache, and seats, for one more engine.

    The answer is a `WorkerReport` whose draft model has the blocks of that part.
    """

    engine: str
    num_scratch_blocks: int  # of that part, for chains behind outcomes
    translation: bytes = field(default=b"", repr=False)  # see `ModelSpec`


@dataclass(frozen=True, slots=True)
class Leased:
    """A message of one of the engines that share a draft model; None: the engine is gone."""

    lease: int
    message: Any


@dataclass(frozen=True, slots=True)
class WeightsAnswer:
    """Why weights, an adapter or drafters cannot be loaded; empty if they can be or were loaded."""

    problem: str = ""
    field: str = ""


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Node, process and GPU of a rank; equal values mean the same one."""

    node: str = ""
    process: int = 0
    gpu: str = ""  # "": none


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Properties of one model, found while a rank loaded it."""

    architecture: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    forward: Literal["family", "bridge"]
    forward_reason: str  # why the family decoder is not used; empty if it is
    operations: str  # "cpu", "triton", "torch", or the bridge's "transformers"
    state_bytes: int = 0  # bytes per sequence and rank in addition to keys and values


@dataclass(frozen=True, slots=True)
class HeadReport:
    """Properties of a head, found while a rank loaded it."""

    capture: tuple[int, ...]  # target layers whose inputs it reads
    layers: Literal["operations", "modules"]  # what computes its layers
    layers_reason: str  # why they are torch modules; empty if they are not


@dataclass(frozen=True, slots=True)
class DeviceStepReport:
    """How a rank computes decode steps."""

    on: bool  # steps run without reading values on the host in between
    reason: str = ""  # why it is off
    num_shapes: int = 0
    num_captured: int = 0  # number of shapes captured as graphs
    capture_error: str = ""  # why no shape is captured
    drafts: bool = False  # whether a head drafts on the device
    chooses: bool = False  # whether the device chooses the nodes to verify
    host_edits: str = ""  # why the device computes no requests with penalties, biases, ...
    draft_model: DeviceStepReport | None = None  # of this rank's draft model


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Reported by a rank once it has loaded its models, and completed by `allocate`."""

    rank: int
    device: str
    target: ModelReport | None
    draft: ModelReport | None
    location: RankLocation = RankLocation()
    all_reduce: str = ""  # what sums over the ranks; empty if there is only one
    head: HeadReport | None = None  # the one that this rank runs
    device_step: DeviceStepReport = DeviceStepReport(False, "there is no target")
