"""The tensor-parallel plan: which part of each tensor a rank holds, and where ranks communicate.

Column-parallel linears split their outputs, row-parallel ones their inputs and sum over the ranks:
two sums a layer (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053). Key heads are replicated
where there are fewer than ranks. Tensors without a rule are replicated, which is always correct.
Called by `target.py`; the modules stay transformers' own, only their weights shrink.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from .heads import Heads, Range, split

COLUMN = ("gate_proj", "up_proj")
QUERY = ("q_proj", "q_b_proj", "kv_b_proj")
KEY_VALUE = ("k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that one rank holds: `ranges` of dimension `dim`, end to end."""

    dim: int
    ranges: tuple[Range, ...]
    padded_len: int = 0  # zeros are added up to this length

    @property
    def length(self) -> int:
        return max(self.padded_len, sum(end - begin for begin, end in self.ranges))


@dataclass(slots=True)
class ShardPlan:
    """Which tensors are cut, by state-dict name, and which modules take part in a collective."""

    shards: dict[str, Shard] = field(default_factory=dict)
    summed: list[str] = field(default_factory=list)  # modules whose output is a part of a sum
    rank0_only: set[str] = field(default_factory=set)  # biases added once: zeros elsewhere
    attentions: list[str] = field(default_factory=list)  # modules that hold fewer heads now
    embedding: str | None = None
    head: str | None = None


def plan_shards(model: nn.Module, heads: Heads, hints: Mapping[str, str]) -> ShardPlan:
    """The plan of one rank. `hints` is the model's `tp_plan`, for names that we do not know."""
    plan = ShardPlan()
    heads.check()
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if isinstance(children.get("o_proj"), nn.Linear) and _shards_heads(children, heads):
            _plan_attention(plan, name, module, heads)
        elif isinstance(children.get("down_proj"), nn.Linear):
            _plan_mlp(plan, name, children, heads.rank, heads.size)
        elif hasattr(module, "is_transposed") and hasattr(module, "down_proj"):
            _plan_experts(plan, name, module, heads.rank, heads.size)
    _plan_hinted(plan, model, hints, heads)
    return plan


def plan_vocabulary(
    plan: ShardPlan,
    model: nn.Module,
    embedding: nn.Module,
    head: nn.Module,
    rank: int,
    size: int,
) -> None:
    """Split the embedding and the output layer by token; the last rank's part is padded."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in (embedding, head):
        assert isinstance(module.weight, nn.Parameter), type(module)
        vocab_size = module.weight.shape[0]
        length = math.ceil(vocab_size / size)
        span = (min(rank * length, vocab_size), min((rank + 1) * length, vocab_size))
        for key, _ in module.named_parameters(recurse=False):
            plan.shards[f"{names[id(module)]}.{key}"] = Shard(0, (span,), length)
    plan.embedding, plan.head = names[id(embedding)], names[id(head)]


def _shards_heads(children: Mapping[str, nn.Module], heads: Heads) -> bool:
    """Not where a norm runs over all heads at once (OLMo-2): such attention is replicated."""
    if not any(key in children for key in (*QUERY, "qkv_proj")):
        return False
    norm = getattr(children.get("q_norm"), "weight", None)
    query = children.get("q_proj")
    if norm is None or norm.dim() != 1 or not isinstance(query, nn.Linear):
        return True
    return bool(norm.shape[0] != query.out_features or heads.num_heads == 1)


def _plan_attention(plan: ShardPlan, name: str, module: nn.Module, heads: Heads) -> None:
    rank, size = heads.rank, heads.size
    plan.attentions.append(name)
    for key, child in module.named_children():
        path = f"{name}.{key}"
        if isinstance(child, nn.Linear):
            if key in QUERY:
                _cut_rows(plan, path, child, (split(child.out_features, rank, size, path),))
            elif key in KEY_VALUE:
                dim = child.out_features // heads.num_kv_heads
                _cut_rows(plan, path, child, (_scaled(heads.kv_range, dim),))
            elif key == "qkv_proj":
                _cut_rows(plan, path, child, _fused_qkv(child.out_features, heads))
            elif key == "o_proj":
                _cut_columns(plan, path, child, rank, size)
        elif (weight := getattr(child, "weight", None)) is not None and weight.dim() == 2:
            # A norm with weights of its own for every head (Cohere): [num_heads, head_dim].
            if weight.shape[0] == heads.num_heads and key == "q_norm":
                span = split(heads.num_heads, rank, size, path)
                plan.shards[f"{path}.weight"] = Shard(0, (span,))
            elif weight.shape[0] == heads.num_kv_heads:
                plan.shards[f"{path}.weight"] = Shard(0, (heads.kv_range,))
    for key, parameter in module.named_parameters(recurse=False):
        if parameter.shape[0] == heads.num_heads:  # one value per head: gpt-oss's sinks
            span = split(heads.num_heads, rank, size, key)
            plan.shards[f"{name}.{key}"] = Shard(0, (span,))


def _fused_qkv(out_features: int, heads: Heads) -> tuple[Range, ...]:
    dim = out_features // (heads.num_heads + 2 * heads.num_kv_heads)
    query = split(heads.num_heads, heads.rank, heads.size, "num_attention_heads")
    begin, end = heads.kv_range
    ranges, offset = [query], heads.num_heads
    for _ in KEY_VALUE:
        ranges.append((offset + begin, offset + end))
        offset += heads.num_kv_heads
    return tuple(_scaled(span, dim) for span in ranges)


def _plan_mlp(
    plan: ShardPlan, name: str, children: Mapping[str, nn.Module], rank: int, size: int
) -> None:
    for key, child in children.items():
        if not isinstance(child, nn.Linear):
            continue
        path = f"{name}.{key}"
        if key in COLUMN:
            _cut_rows(plan, path, child, (split(child.out_features, rank, size, path),))
        elif key == "gate_up_proj":
            _cut_rows(plan, path, child, _halves(child.out_features, rank, size, path))
        elif key == "down_proj":
            _cut_columns(plan, path, child, rank, size)


def _plan_experts(plan: ShardPlan, name: str, module: nn.Module, rank: int, size: int) -> None:
    """Every rank holds a slice of every expert: balanced whatever the router picks."""
    plan.summed.append(name)
    for key, parameter in module.named_parameters(recurse=False):
        path, is_bias = f"{name}.{key}", key.endswith("_bias")
        if key == "down_proj_bias":
            plan.rank0_only.add(path)
        elif key.startswith(("gate_up_proj", "up_proj")):
            dim = 1 if is_bias or not module.is_transposed else 2
            total = parameter.shape[dim]
            ranges: tuple[Range, ...]
            if key.startswith("gate_up") and module.is_concatenated:
                ranges = _halves(total, rank, size, path)
            else:  # pairs of gate and up lie side by side, or there is no gate
                ranges = (split(total, rank, size, path),)
            plan.shards[path] = Shard(dim, ranges)
        elif key == "down_proj":
            dim = 1 if module.is_transposed else 2
            plan.shards[path] = Shard(dim, (split(parameter.shape[dim], rank, size, path),))


def _plan_hinted(plan: ShardPlan, model: nn.Module, hints: Mapping[str, str], heads: Heads) -> None:
    """Linears outside of attention and known MLPs that only the model's own plan lists."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or f"{name}.weight" in plan.shards:
            continue
        if any(name.startswith(f"{known}.") for known in plan.attentions) or "attn" in name:
            continue
        for style in _styles(name, hints):
            if style == "colwise":
                span = split(module.out_features, heads.rank, heads.size, name)
                _cut_rows(plan, name, module, (span,))
            elif style == "rowwise":
                _cut_columns(plan, name, module, heads.rank, heads.size)


def _styles(name: str, hints: Mapping[str, str]) -> Iterator[str]:
    for pattern, style in hints.items():
        if fnmatch.fnmatchcase(name, pattern):
            yield style
            return


def _halves(total: int, rank: int, size: int, what: str) -> tuple[Range, Range]:
    begin, end = split(total // 2, rank, size, what)
    return (begin, end), (total // 2 + begin, total // 2 + end)


def _scaled(span: Range, factor: int) -> Range:
    return span[0] * factor, span[1] * factor


def _cut_rows(plan: ShardPlan, name: str, linear: nn.Linear, ranges: tuple[Range, ...]) -> None:
    plan.shards[f"{name}.weight"] = Shard(0, ranges)
    if linear.bias is not None:
        plan.shards[f"{name}.bias"] = Shard(0, ranges)


def _cut_columns(plan: ShardPlan, name: str, linear: nn.Linear, rank: int, size: int) -> None:
    plan.shards[f"{name}.weight"] = Shard(1, (split(linear.in_features, rank, size, name),))
    plan.summed.append(name)
    if linear.bias is not None:
        plan.rank0_only.add(f"{name}.bias")
