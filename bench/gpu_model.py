"""`outrider bench gpu-model`: what a step moves and computes on a GPU, and its least time there.

Arithmetic, not a measurement. The device step itself runs on the meta device, at full size and
without memory, with the operations of a GPU; every operation of torch, every launch of a kernel
and every collective is noted with the bytes that it has to move and its floating-point operations.
So a change of the design shows here, without a GPU. Times follow from a device's data sheet: an
operation takes as long as its bytes or its arithmetic, whichever is longer, and at least `floor_us`
(what one node of a graph takes, an assumption).

Reads that caches serve are not counted: keys are read once a sequence. Of experts, those are read
that a uniform router would choose. Prompts are not modelled.

Source of the model of time: Williams, Waterman, Patterson 2009, "Roofline: an insightful visual
performance model for multicore architectures".
"""

from __future__ import annotations

import importlib.util
import json
import math
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from ..config import Eagle3Config
from ..drafters.heads.block import materialise_constants
from ..drafters.heads.protocol import TargetFacts
from ..workers.attention import KVCache, KVCode, KVFormat, coded_layers
from ..workers.collective import Call, Collective
from ..workers.device_step.draft import DeviceHead
from ..workers.device_step.seats import DeviceSeats, SeatSizes
from ..workers.device_step.service import DeviceStep
from ..workers.device_step.shape import Sampler, StepShape, smallest
from ..workers.head import HeadRunner
from ..workers.model.bridge import BridgeRunner, build_meta, fuse_norms, shrink_heads, tied_names
from ..workers.model.bridge import tp_hints as hints_of
from ..workers.model.checkpoint.quantised_formats import WeightFormat
from ..workers.model.family import FamilyModel, build_family, read_spec
from ..workers.model.fit import rank_weights
from ..workers.model.info import ModelInfo, model_heads
from ..workers.model.sharding import HeadShards, ShardPlan, connect, plan_shards, plan_vocabulary
from ..workers.model.target import pack_linears
from ..workers.ops import PlannedOps, ReferenceOps
from ..workers.ops.quantised import Codes, QuantisedTensor
from .gpu.inputs import step_of as paged_step
from .gpu.machine import Size
from .gpu.steps import head_files

META = torch.device("meta")
BLOCK_SIZE = 16
FLOOR_US = 2.0
BATCHES = (1, 8, 64)
CONTEXT_LEN = 2048
_FP8_GROUP = 128


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as its data sheet has it."""

    name: str
    bytes_per_s: float
    flops_per_s: float  # bfloat16, dense
    link_bytes_per_s: float  # to the other GPUs, in one direction
    memory_bytes: float
    num_processors: int = 132


DEVICES = {
    "H100": Device("H100", 3.35e12, 989.4e12, 450e9, 80e9),
    "H200": Device("H200", 4.8e12, 989.4e12, 450e9, 141e9),
}
"""The SXM models (NVIDIA's data sheets of 2024)."""


@dataclass(frozen=True)
class Target:
    """A model by its configuration, and how it is served."""

    name: str
    kind: str  # transformers' name of the type
    keys: dict[str, Any]
    num_ranks: int
    head: Size  # of an EAGLE-3 head beside it
    form: WeightFormat | None = None  # how linears and experts are stored; None: bfloat16

    def config(self) -> Any:
        """Transformers' configuration."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.kind, **self.keys)


def _llama(num_layers: int, hidden: int, inner: int, num_heads: int) -> tuple[dict[str, Any], Size]:
    keys = {
        "vocab_size": 128256, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": num_layers, "num_attention_heads": num_heads,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return keys, Size(num_layers, hidden, inner, num_heads, 8, 128, 128256)


_DEEPSEEK = {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "max_position_embeddings": 163840, "tie_word_embeddings": False,
}  # fmt: skip


def targets() -> list[Target]:
    """Those of the table."""
    small, small_head = _llama(32, 4096, 14336, 32)
    large, large_head = _llama(80, 8192, 28672, 64)
    fp8 = WeightFormat("fp8", "fp8 in blocks", (_FP8_GROUP, _FP8_GROUP))
    beside = Size(61, 7168, 18432, 56, 8, 128, 129280)
    return [
        Target("Llama-3.1-8B", "llama", small, 1, small_head),
        Target("Llama-3.1-70B", "llama", large, 8, large_head),
        Target("DeepSeek-V3", "deepseek_v3", _DEEPSEEK, 8, beside, fp8),
    ]


# -- a model of full size on the meta device, as one rank would load it


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rank 0's part of a target."""

    model: FamilyModel
    ends: tuple[nn.Module, nn.Module]
    info: ModelInfo
    collective: Collective
    held_bytes: int  # of weights, as `outrider check` plans them


def load(target: Target, ops: Any) -> Loaded:
    """As `workers/model/target.py` loads the family's decoder, without a checkpoint.

    Raises:
        ValueError: the model is not of the family.
    """
    config, size = target.config(), target.num_ranks
    spec = read_spec(config)
    if isinstance(spec, str):
        raise ValueError(f"{target.name}: {spec}")
    heads = model_heads(config, 0, size)
    held_bytes = rank_weights(build_meta(config, torch.bfloat16), size, target.form)[0]
    model, plan = build_meta(config, torch.bfloat16), ShardPlan()
    if size > 1:
        plan = plan_shards(model, heads, hints_of(model))
        plan_vocabulary(plan, model, *_ends(model), 0, size)
    materialise_constants(model, META)
    _cut(model, plan, target.form)
    begin, end = heads.kv_range
    shrink_heads(model, plan.attentions, heads.local, end - begin)
    fuse_norms(model)
    pack_linears(nn.ModuleList(_ends(model)), META, ops)
    collective = Collective.single() if size == 1 else Collective(0, size, object())
    connect(model, plan, collective, config.vocab_size)
    info = ModelInfo(
        target.name, config.num_hidden_layers, heads.local, end - begin,
        getattr(config, "head_dim", None) or config.hidden_size // heads.num_heads,
        config.hidden_size, config.vocab_size, config.max_position_embeddings, (), torch.bfloat16,
    )  # fmt: skip
    with rehearsed(collective):
        observed = BridgeRunner(model, info, ReferenceOps()).attention_specs
        family = build_family(model, spec, observed, ops, plan, collective)
    return Loaded(family, _ends(model), info, collective, held_bytes)


def _ends(model: Any) -> tuple[nn.Module, nn.Module]:
    return model.get_input_embeddings(), model.get_output_embeddings()


def _cut(model: Any, plan: ShardPlan, form: WeightFormat | None) -> None:
    """Gives every tensor the shape, and the codes, that the rank holds."""
    ends = {id(module) for module in _ends(model)}
    tied = tied_names(model)
    for prefix, module in model.named_modules():
        for leaf, tensor in list(module._parameters.items()):
            name = f"{prefix}.{leaf}"
            if tensor is None or name in tied:
                continue
            shape, shard = list(tensor.shape), plan.shards.get(name)
            if shard is not None:
                shape[shard.dim] = shard.length
            cut = torch.empty(shape, dtype=tensor.dtype, device=META)
            is_packed = (type(module) is nn.Linear and id(module) not in ends) or len(shape) == 3
            if form is not None and is_packed and leaf != "bias":
                cut = _coded(cut)
            module._parameters[leaf] = nn.Parameter(cut, requires_grad=False)
    for name, owner in tied.items():
        prefix, _, leaf = name.rpartition(".")
        held = model.get_parameter(owner)
        model.get_submodule(prefix)._parameters[leaf] = held


def _coded(weight: Tensor) -> QuantisedTensor:
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=META)
    num_groups = -(-weight.shape[-1] // _FP8_GROUP)
    scales = torch.empty((*weight.shape[:-1], num_groups), dtype=torch.float32, device=META)
    return QuantisedTensor(
        Codes(values, scales, None, _FP8_GROUP, weight.shape[-1]), torch.bfloat16
    )


def load_head(
    target: Target, loaded: Loaded, ops: Any, num_nodes: int, batch: int, num_levels: int = 4
) -> HeadRunner:
    """An EAGLE-3 head in the target's ranks: a chain up to 8 nodes, above a dynamic tree."""
    shapes, keys = head_files(target.head)
    vocab = shapes["lm_head.weight"][0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(keys))
        stored: Sketch = {"t2d": ("BOOL", (target.head.vocab,)), "d2t": ("I64", (vocab,))}
        stored |= {name: ("BF16", shape) for name, shape in shapes.items()}
        _write_sparse(path / "model.safetensors", stored, b"\1" * vocab)  # the first tokens
        drafts: dict[str, Any] = {"max_draft_len": num_nodes}
        if num_nodes > 8:
            drafts = {"max_draft_len": num_levels, "max_total_draft_tokens": num_nodes}
            drafts |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": 8}
        config = Eagle3Config(speculative_model=folder, **drafts)
        info = loaded.info
        facts = TargetFacts.of(info, META)
        shards = HeadShards(loaded.collective)
        with rehearsed(loaded.collective):
            return HeadRunner(
                config, facts, loaded.ends, PlannedOps(ops), info.num_layers, batch, shards=shards
            )


Sketch = dict[str, tuple[str, tuple[int, ...]]]
"""Tensors' names, with safetensors' name of the type, and the shape."""
_SIZES = {"BF16": 2, "I64": 8, "BOOL": 1}


def _write_sparse(file: Path, tensors: Sketch, begin: bytes) -> None:
    """Safetensors of names and shapes whose data are `begin` and zeros, which take no disk."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + _SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + begin)
        out.truncate(8 + len(text) + offset)


# -- the tape: what a step runs, with bytes and arithmetic


@dataclass(frozen=True, slots=True)
class Operation:
    """One launch."""

    name: str
    num_bytes: float  # that have to be read and written
    flops: float = 0.0
    link_bytes: float = 0.0  # from the other ranks
    weight_bytes: float = 0.0  # of `num_bytes`
    kv_bytes: float = 0.0  # of `num_bytes`

    def seconds(self, device: Device) -> float:
        """Of the longest of memory, arithmetic and links."""
        return max(
            self.num_bytes / device.bytes_per_s,
            self.flops / device.flops_per_s,
            self.link_bytes / device.link_bytes_per_s,
        )


_aten = torch.ops.aten
_FREE = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default,
    _aten.empty_strided.default, _aten.new_empty_strided.default,
}  # fmt: skip
"""What launches nothing, beside views."""
_VIEWS = {_aten._unsafe_view, _aten.detach, _aten.lift_fresh, _aten._reshape_alias}
_PICK = {"index_select", "embedding", "gather", "index", "index_copy_", "index_put_", "scatter",
         "scatter_", "scatter_add_"}  # fmt: skip
"""What touches only the rows that an index names."""


class Tape(TorchDispatchMode):
    """The operations of a step in order.

    Args:
        batch: sequences of the step; the others are padding, which has no keys.
        context_len: keys of each in the cache.
        query_len: rows of each; None: of all that a launch has room for.
    """

    def __init__(self, batch: int, context_len: int, query_len: int | None = None) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._batch, self._context_len, self._query_len = batch, context_len, query_len
        self._touched = 1.0  # share of the experts that the mixture at hand reads
        self._num_parts: dict[int, int] = {}  # of a sequence's keys, by the id of their list
        self._made: dict[int, Any] = {}  # storages that the step writes first, kept alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._overloadpacket not in flop_registry:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if func.is_view or func._overloadpacket in _VIEWS:
            return out
        if func not in _FREE and any(each.numel() for each in _tensors(out)):
            self.operations.append(self._of_torch(func, args, kwargs, out))
        for each in _tensors(out):
            storage = each.untyped_storage()
            self._made[storage._cdata] = storage
        return out

    def collective(self, call: Call, num_ranks: int) -> None:
        """A sum sends every part to every rank; a gather or an exchange, one of them."""
        held = math.prod(call.shape) * call.dtype.itemsize
        shares = num_ranks - 1
        if call.verb == "all_to_all":
            held //= num_ranks
        elif call.verb == "all_reduce" and held > 256 << 10:  # beyond one shot
            held, shares = 2 * held // num_ranks, num_ranks - 1
        self.operations.append(Operation(call.verb, 2 * held, link_bytes=held * shares))

    def launch(self, kernel: Any, args: Sequence[Any]) -> None:
        """A kernel of Triton."""
        given = dict(zip(kernel.arg_names, args, strict=True))
        rule = _KERNELS.get(kernel.__name__)
        if rule is None:
            made = Operation(kernel.__name__, _num_bytes(args))
        else:
            made = rule(self, kernel.__name__, given)
        self.operations.append(made)

    def _of_torch(self, func: Any, args: Any, kwargs: Any, out: Any) -> Operation:
        name = func._overloadpacket.__name__
        count = flop_registry.get(func._overloadpacket)
        flops = float(count(*args, **kwargs, out_val=out)) if count else 0.0
        if name in _PICK:
            picked = _tensors(args[1:])
            if func._schema.is_mutable:
                return Operation(name, 2 * _num_bytes(picked), flops)
            return Operation(name, _num_bytes(picked[:1]) + 2 * _num_bytes(out), flops)
        held = [each for each in _tensors(args) if each.untyped_storage()._cdata not in self._made]
        weights = _num_bytes(held) if flops else 0
        return Operation(name, _num_bytes([args, out]), flops, weight_bytes=weights)

    def attend(self, name: str, given: dict[str, Any]) -> Operation:
        query_len = self._query_len or len(given["query"]) // given["num_seqs"]
        num_seqs = self._batch
        rows, num_keys = num_seqs * query_len, self._context_len + query_len
        key, value = given["HEAD_DIM"], given["VALUE_DIM"]
        stored = key if given["values"] is given["keys"] else key + value
        kv = num_seqs * num_keys * given["NUM_KV_HEADS"] * stored * given["keys"].itemsize
        flops = 2.0 * rows * given["NUM_HEADS"] * (key + value) * num_keys
        beside = _num_bytes([given["query"], given["out"]])
        if given["PREPARES"]:  # joined rows, whose keys and values are stored
            beside += rows * given["NUM_KV_HEADS"] * (key + value) * given["keys"].itemsize
        num_parts = self._num_parts.get(id(given["items"]), 1)
        if num_parts > 1:  # each query's part, in float32, written and read
            beside += 2 * num_parts * 2 * _num_bytes(given["out"])
        return Operation(name, kv + beside, flops, kv_bytes=kv)

    def schedule(self, name: str, given: dict[str, Any]) -> Operation:
        """Every sequence has the same number of parts."""
        num_keys = min(self._context_len, given["REACH"] or self._context_len)
        blocks = (given["num_items"] - given["most"]) * self._batch // given["num_seqs"]
        share = max(-(-num_keys * blocks // given["most"]), given["MIN_KEYS"])
        self._num_parts[id(given["items"])] = -(-num_keys // share)
        self._made[id(given["items"])] = given["items"]  # ids are not used again
        return Operation(name, _num_bytes(list(given.values())))

    def lay_out(self, name: str, given: dict[str, Any]) -> Operation:
        """Of the seats, those of the step's sequences."""
        of_seats = ("all_", "draft_", "lengths")
        rows = [each for key, each in given.items() if not key.startswith(of_seats)]
        return Operation(name, _num_bytes(rows) + _num_bytes(given["tables"]))

    def move(self, name: str, given: dict[str, Any]) -> Operation:
        """A chain's nodes stay where they are."""
        return Operation(name, _num_bytes([given["source"], given["target"]]))

    def keep(self, name: str, given: dict[str, Any]) -> Operation:
        """Of the seats, those of the step's sequences."""
        return Operation(name, _num_bytes(given["tokens"]) + 2 * _num_bytes(given["outcome"]))

    def draft_slots(self, name: str, given: dict[str, Any]) -> Operation:
        """Those of each draft's context."""
        written = self._batch * (self._context_len + given["room"])
        return Operation(name, written * given["slots"].itemsize)

    def draft_level(self, name: str, given: dict[str, Any]) -> Operation:
        """Of the slots, one a row."""
        rows = [each for key, each in given.items() if key != "slots"]
        return Operation(name, _num_bytes(rows) + _num_bytes(given["row_slots"]))

    def settle(self, name: str, given: dict[str, Any]) -> Operation:
        """Of the seats, each row writes its token, and may count it."""
        seats = [given[each] for each in ("tokens", "lengths", "counts")]
        rows = [each for key, each in given.items() if key not in ("tokens", "lengths", "counts")]
        num_rows, per_row = len(given["drawn"]), 3 if given["COUNTS"] else 1
        written = seats[0].itemsize * (num_rows * per_row + 2 * len(given["seats"]))
        return Operation(name, _num_bytes(rows) + written)

    def prepare(self, name: str, given: dict[str, Any]) -> Operation:
        return Operation(name, 2 * _num_bytes([given["joined"]]))

    def product(self, name: str, given: dict[str, Any]) -> Operation:
        flops = 2.0 * given["num_rows"] * given["num_heads"] * given["OUT"] * given["IN"]
        weights = _num_bytes([given["values"], given["scales"], given["zeros"]])
        beside = _num_bytes([given["states"], given["out"]])
        return Operation(name, weights + beside, flops, weight_bytes=weights)

    def gate_up(self, name: str, given: dict[str, Any]) -> Operation:
        num_experts, pairs = given["weight"].shape[0], given["num_pairs"]
        self._touched = 1 - (1 - given["TOP"] / num_experts) ** (pairs / given["TOP"])
        flops = 4.0 * pairs * given["HIDDEN"] * given["WIDTH"]
        return self._experts(name, given, flops, [given["states"], given["out"]])

    def down(self, name: str, given: dict[str, Any]) -> Operation:
        flops = 2.0 * given["num_pairs"] * given["num_columns"] * given["WIDTH"]
        share = given["num_columns"] / given["HIDDEN"]
        return self._experts(name, given, flops, [given["inner"], given["out"]], share)

    def _experts(
        self,
        name: str,
        given: dict[str, Any],
        flops: float,
        states: list[Tensor],
        share: float = 1.0,  # of each expert's columns
    ) -> Operation:
        held = _num_bytes([given["weight"], given["scales"], given["zeros"]])
        weights = held * self._touched * share
        return Operation(name, weights + _num_bytes(states), flops, weight_bytes=weights)


_KERNELS: dict[str, Callable[[Tape, str, dict[str, Any]], Operation]] = {
    "attend_kernel": Tape.attend,
    "schedule_kernel": Tape.schedule,
    "lay_out_kernel": Tape.lay_out,
    "settle_kernel": Tape.settle,
    "move_kernel": Tape.move,
    "keep_kernel": Tape.keep,
    "draft_slots_kernel": Tape.draft_slots,
    "draft_level_kernel": Tape.draft_level,
    "_prepare_kernel": Tape.prepare,
    "_product_kernel": Tape.product,
    "_gate_up_kernel": Tape.gate_up,
    "_down_kernel": Tape.down,
}


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_flatten(tree)[0] if isinstance(each, Tensor)]


def _num_bytes(tree: Any) -> int:
    """Of the distinct tensors, each element once, whatever is repeated."""
    found = {id(each): each for each in _tensors(tree)}
    return sum(
        each.itemsize * math.prod(n for n, step in zip(each.shape, each.stride()) if step)
        for each in found.values()
    )


@contextmanager
def taped(tape: Tape, collective: Collective) -> Iterator[None]:
    """Notes all operations, launches and collectives of a step."""
    with torch.inference_mode(), rehearsed(collective, tape.launch) as calls, tape:
        yield
    for call in calls:
        tape.collective(call, collective.size)


@contextmanager
def rehearsed(
    collective: Collective, note: Callable[[Any, Sequence[Any]], None] = lambda *_: None
) -> Iterator[list[Call]]:
    """Executes no kernel and no collective; the collectives that are called."""
    from triton.runtime.jit import JITFunction

    launched = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if not warmup:
            note(kernel, args)

    JITFunction.run = run
    try:
        with collective.rehearsal() as calls:
            yield calls
    finally:
        JITFunction.run = launched


# -- steps


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of a batch takes on one rank."""

    operations: tuple[Operation, ...]
    shape: StepShape | None  # of its graph; without one it takes the host path

    def total(self, field: str) -> float:
        """A sum over the operations."""
        return sum(getattr(each, field) for each in self.operations)

    def names(self) -> Counter[str]:
        """Launches by name."""
        return Counter(each.name for each in self.operations)

    def milliseconds(self, device: Device, floor_us: float = 0.0) -> float:
        """Its least time; no operation takes less than `floor_us`."""
        return 1e3 * sum(max(each.seconds(device), floor_us / 1e6) for each in self.operations)


def step_of(
    loaded: Loaded,
    head: HeadRunner | None,
    batch: int,
    num_nodes: int,
    context_len: int,
    form: KVFormat | None = None,  # of the target's keys and values; None: bfloat16
    sampler: Sampler = Sampler.PLAIN,
) -> Step:
    """A step of `batch` sequences with `num_nodes` draft nodes each.

    Without a shape for it, the host path's forward, without the head's drafts.
    """
    drafted = num_nodes if head else 0
    longest = context_len + 2 + num_nodes
    num_blocks = batch * -(-longest // BLOCK_SIZE)
    kept = loaded.model.kv_shapes
    codes: Sequence[KVCode | None] = ()
    if form is not None:
        kept, codes = coded_layers(kept, [KVCode(form)] * len(kept))
    shapes = (*kept, *(head.kv_shapes if head else ()))
    cache = KVCache(shapes, num_blocks + 1, BLOCK_SIZE, torch.bfloat16, META, codes=codes)
    tape = Tape(batch, context_len, None if head else 1 + num_nodes)
    wanted = (batch, 1 + num_nodes, batch * (1 + num_nodes))
    size = smallest(*wanted, max(batch, max(BATCHES)), drafted)
    if size is None:
        lengths, trees = [(context_len, 1)] * batch, [list(range(-1, num_nodes - 1))] * batch
        step, _ = paged_step(np.random.default_rng(0), lengths, trees, BLOCK_SIZE)
        with taped(tape, loaded.collective):
            loaded.model.forward(loaded.model.ops.plan(step, cache), cache, None)
        return Step(tuple(tape.operations), None)
    seats = DeviceSeats(
        SeatSizes(
            max(batch, size[0]), longest, num_blocks, BLOCK_SIZE, drafted, loaded.info.vocab_size
        ),
        META,
    )
    with rehearsed(loaded.collective):
        device_head = None
        if head is not None:
            head.attach(cache)
            device_head = DeviceHead(head, cache, seats)
        device_step = DeviceStep(loaded.model, cache, seats, device_head)
    shape = StepShape(*size, sampler)
    with taped(tape, loaded.collective):
        device_step.run(shape)
    return Step(tuple(tape.operations), shape)


def unusable() -> str:
    """Why the operations of a GPU cannot be looked at here, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "gpu-model looks at the launches of Triton's kernels, and Triton is not installed"
    from triton import knobs

    return "gpu-model needs Triton's compiler: unset TRITON_INTERPRET" * knobs.runtime.interpret


def gpu_ops(num_processors: int = 132) -> Any:
    """A GPU's operations, on the meta device."""
    from ..workers.ops.cuda.ops import CudaOps

    ops = CudaOps(META)
    ops.num_processors = num_processors
    return ops


DRAFTS = {"none": 0, "chain 4": 4, "tree 32": 32}


@dataclass(frozen=True, slots=True)
class Sheet:
    """What is computed."""

    targets: tuple[Target, ...]
    devices: tuple[Device, ...] = tuple(DEVICES.values())
    batches: tuple[int, ...] = BATCHES
    context_len: int = CONTEXT_LEN
    floor_us: float = FLOOR_US
    form: KVFormat | None = None  # of keys and values; None: bfloat16

    def rows(self, show: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """A row per target, batch and draft; `show` is told what comes next."""
        ops = gpu_ops()
        for target in self.targets:
            show(f"{target.name}...")
            loaded = load(target, ops)
            for batch in self.batches:
                plain: dict[str, float] = {}
                for draft, num_nodes in DRAFTS.items():
                    head = load_head(target, loaded, ops, num_nodes, batch) if num_nodes else None
                    step = step_of(loaded, head, batch, num_nodes, self.context_len, self.form)
                    times = [self._times(step, device, plain, loaded) for device in self.devices]
                    yield {
                        "model": target.name,
                        "ranks": target.num_ranks,
                        "batch": batch,
                        "draft": draft,
                        "captured": step.shape is not None,
                        "rows": step.shape and step.shape.num_rows,
                        "held_gb": loaded.held_bytes / 1e9,
                        "launches": len(step.operations),
                        "weights_gb": step.total("weight_bytes") / 1e9,
                        "kv_gb": step.total("kv_bytes") / 1e9,
                        "all_gb": step.total("num_bytes") / 1e9,
                        "tflop": step.total("flops") / 1e12,
                        "links_mb": step.total("link_bytes") / 1e6,
                        "devices": times,
                    }

    def _times(
        self, step: Step, device: Device, plain: dict[str, float], loaded: Loaded
    ) -> dict[str, Any]:
        """On one device; `plain` has the step without drafts, which comes first."""
        step_ms = step.milliseconds(device, self.floor_us)
        plain.setdefault(device.name, step_ms)
        return {
            "device": device.name,
            "fits": loaded.held_bytes < device.memory_bytes,
            "roofline_ms": step.milliseconds(device),
            "step_ms": step_ms,
            "to_plain": step_ms / plain[device.name],
        }

    @property
    def columns(self) -> tuple[str, ...]:
        """Of `cells`; times are those of the data sheet, and with the floor of a launch."""
        return (
            "model", "ranks", "batch", "draft", "launches", "weights, GB", "keys, GB", "all, GB",
            "TFLOP", "links, MB", *(f"{device.name}, ms (to plain)" for device in self.devices),
        )  # fmt: skip


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row's text."""
    launches = str(row["launches"]) + ("" if row["captured"] else ", no graph")
    moved = [f"{row[key]:.2f}" for key in ("weights_gb", "kv_gb", "all_gb", "tflop")]
    times = [
        f"{each['roofline_ms']:.2f}; {each['step_ms']:.2f} ({each['to_plain']:.2f})"
        if each["fits"]
        else "weights do not fit"
        for each in row["devices"]
    ]
    where = (row["model"], str(row["ranks"]), str(row["batch"]), row["draft"])
    return (*where, launches, *moved, f"{row['links_mb']:.0f}", *times)
