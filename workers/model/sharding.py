"""The tensor-parallel plan: which part of each tensor a rank holds, and where ranks communicate.

Column-parallel linears split their outputs. Row-parallel ones split their inputs and sum over the
ranks: two sums per layer (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053). Key heads are
replicated if there are fewer than ranks. Tensors without a rule are replicated, which is always
correct. The modules stay transformers' own; only their weights shrink.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..collective import Collective
from .checkpoint.weights import TensorSource
from .info import Heads, Range, split

COLUMN = ("gate_proj", "up_proj")
DOWN = ("down_proj", "output_linear")
QUERY = ("q_proj", "q_b_proj", "kv_b_proj")
KEY_VALUE = ("k_proj", "v_proj")
GATE = ("gate_proj", "g_proj")
"""Names of the gate of attention's output: one value per head, or one per element."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that one rank holds: `ranges` of dimension `dim`, concatenated."""

    dim: int
    ranges: tuple[Range, ...]
    padded_len: int = 0  # zeros are added up to this length

    @property
    def length(self) -> int:
        return max(self.padded_len, self.num_stored)

    @property
    def num_stored(self) -> int:
        """The length of the part without padding."""
        return sum(end - begin for begin, end in self.ranges)


def read_part(source: TensorSource, shard: Shard | None, dim: int | None = None) -> Tensor:
    """Reads a rank's part of a tensor.

    Args:
        dim: the only dimension that is cut; None: the shard's.
    """
    box = tuple((0, size) for size in source.shape)
    if shard is None or dim not in (None, shard.dim):
        return source.read(box)
    pieces = [
        source.read((*box[: shard.dim], span, *box[shard.dim + 1 :])) for span in shard.ranges
    ]
    tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=shard.dim)
    if (short := shard.length - tensor.shape[shard.dim]) > 0:
        shape = list(tensor.shape)
        shape[shard.dim] = short
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim=shard.dim)
    return tensor


def bytes_of_part(source: TensorSource, shard: Shard | None) -> int:
    """Returns the stored bytes that `read_part` reads; scales are counted in proportion."""
    if shard is None or not (size := source.shape[shard.dim]):
        return source.num_bytes
    return source.num_bytes * shard.num_stored // size


@dataclass(slots=True)
class ShardPlan:
    """Tensors to cut, by state-dict name, and modules that take part in a collective."""

    shards: dict[str, Shard] = field(default_factory=dict)
    summed: list[str] = field(default_factory=list)  # modules that return a partial sum
    own_experts: dict[str, Range] = field(default_factory=dict)  # a mixture's whole experts
    rank0_only: set[str] = field(default_factory=set)  # biases added once: zeros elsewhere
    attentions: list[str] = field(default_factory=list)  # modules with fewer heads per rank
    recurrent: list[str] = field(default_factory=list)  # likewise, with a state
    whole: list[str] = field(default_factory=list)  # MLPs that every rank computes whole
    embedding: str | None = None
    head: str | None = None


def plan_shards(
    model: nn.Module, heads: Heads, hints: Mapping[str, str], *, whole_experts: bool = False
) -> ShardPlan:
    """Returns the plan of one rank. `hints` is the model's `tp_plan`, for unknown names.

    With `whole_experts`, a rank holds some whole experts of a mixture (expert parallelism: Lepikhin
    et al. 2020, GShard, arXiv:2006.16668); otherwise, it holds a part of each.
    """
    heads.check()
    planner = _Planner(heads, ShardPlan(), whole_experts)
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if isinstance(children.get("o_proj"), nn.Linear) and _shards_heads(children, heads):
            planner.attention(name, module)
        elif hasattr(module, "A_log") and hasattr(module, "num_k_heads"):
            planner.recurrent(name, module)
        elif any(isinstance(children.get(key), nn.Linear) for key in DOWN):
            planner.mlp(name, module)
        elif is_experts(module):
            planner.experts(name, module)
    planner.hinted(model, hints)
    return planner.plan


def is_experts(module: nn.Module) -> bool:
    """Returns True if a module holds all experts of a mixture in three-dimensional tensors."""
    return hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def own_choices(chosen: Tensor, own: Range) -> Tensor:  # [num_tokens, top], alike
    """Returns the indices of chosen experts among a rank's own; -1: another rank's expert."""
    local = chosen - own[0]
    return local.masked_fill((local < 0) | (local >= own[1] - own[0]), -1)


def plan_vocabulary(
    plan: ShardPlan, model: nn.Module, embedding: nn.Module, head: nn.Module, rank: int, size: int
) -> None:
    """Splits the embedding and the output layer by token; the last rank's part is padded."""
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
    """Returns False if a norm runs over all heads at once; such attention is replicated.

    These are norms of queries (OLMo-2) or of attention's output (BitNet).
    """
    if not any(key in children for key in (*QUERY, "qkv_proj")):
        return False
    query = children.get("q_proj")
    if heads.num_heads == 1 or not isinstance(query, nn.Linear):
        return True
    norms = (getattr(children.get(key), "weight", None) for key in ("q_norm", "attn_sub_norm"))
    return not any(norm is not None and norm.shape == (query.out_features,) for norm in norms)


def _shards_width(module: Any) -> bool:
    """Returns False if an MLP needs all of its hidden values together.

    BitNet normalizes them, and Gemma 3n keeps a share of them.
    """
    return not hasattr(module, "ffn_sub_norm") and not getattr(module, "activation_sparsity", 0)


@dataclass(frozen=True, slots=True)
class _Planner:
    """Adds modules to the plan of one rank."""

    heads: Heads
    plan: ShardPlan
    whole_experts: bool = False

    def attention(self, name: str, module: nn.Module) -> None:
        heads, shards = self.heads, self.plan.shards
        self.plan.attentions.append(name)
        for key, child in module.named_children():
            path = f"{name}.{key}"
            if isinstance(child, nn.Linear):
                if key in QUERY or key in GATE:
                    self._cut_rows(path, child, self._share(child.out_features, path))
                elif key in KEY_VALUE:
                    dim = child.out_features // heads.num_kv_heads
                    self._cut_rows(path, child, _scaled(heads.kv_range, dim))
                elif key == "qkv_proj":
                    self._cut_rows(path, child, *self._fused_qkv(child.out_features))
                elif key == "o_proj":
                    self._cut_columns(path, child)
            elif (weight := getattr(child, "weight", None)) is not None and weight.dim() == 2:
                # Cohere's norm has weights per head: [num_heads, head_dim].
                if weight.shape[0] == heads.num_heads and key == "q_norm":
                    shards[f"{path}.weight"] = Shard(0, (self._share(heads.num_heads, path),))
                elif weight.shape[0] == heads.num_kv_heads:
                    shards[f"{path}.weight"] = Shard(0, (heads.kv_range,))
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.shape[0] == heads.num_heads:  # one value per head, such as gpt-oss's sinks
                shards[f"{name}.{key}"] = Shard(0, (self._share(heads.num_heads, key),))

    def _fused_qkv(self, out_features: int) -> tuple[Range, ...]:
        heads = self.heads
        dim = out_features // (heads.num_heads + 2 * heads.num_kv_heads)
        begin, end = heads.kv_range
        ranges, offset = [self._share(heads.num_heads, "num_attention_heads")], heads.num_heads
        for _ in KEY_VALUE:
            ranges.append((offset + begin, offset + end))
            offset += heads.num_kv_heads
        return tuple(_scaled(span, dim) for span in ranges)

    def recurrent(self, name: str, module: Any) -> None:
        """Cuts a gated delta layer by key head; it stays whole if these cannot be divided."""
        if module.num_k_heads % self.heads.size:
            return
        self.plan.recurrent.append(name)
        shards = self.plan.shards
        parts, offset = [], 0
        for width in (module.key_dim, module.key_dim, module.value_dim):
            begin, end = self._share(width, name)
            parts.append((offset + begin, offset + end))
            offset += width
        shards[f"{name}.conv1d.weight"] = Shard(0, tuple(parts))
        for key in ("A_log", "dt_bias"):
            shards[f"{name}.{key}"] = Shard(0, (self._share(module.num_v_heads, key),))
        for key, child in module.named_children():
            path = f"{name}.{key}"
            if key == "in_proj_qkv":
                self._cut_rows(path, child, *parts)
            elif key.startswith("in_proj_"):  # outputs of a key head are adjacent
                self._cut_rows(path, child, self._share(child.out_features, path))
            elif key == "out_proj":
                self._cut_columns(path, child)

    def mlp(self, name: str, module: nn.Module) -> None:
        if not _shards_width(module):
            self.plan.whole.append(name)
            return
        for key, child in module.named_children():
            if not isinstance(child, nn.Linear):
                continue
            path = f"{name}.{key}"
            if key in COLUMN:
                self._cut_rows(path, child, self._share(child.out_features, path))
            elif key in ("gate_up_proj", "input_linear"):
                self._cut_rows(path, child, *self._halves(child.out_features, path))
            elif key in DOWN:
                self._cut_columns(path, child)

    def experts(self, name: str, module: Any) -> None:
        """Cuts every expert, so that ranks are balanced whatever the router chooses."""
        self.plan.summed.append(name)
        if self.whole_experts:
            own = self._share(len(module.down_proj), "num_experts")
            self.plan.own_experts[name] = own
            for key, _ in module.named_parameters(recurse=False):
                self.plan.shards[f"{name}.{key}"] = Shard(0, (own,))
            return
        for key, parameter in module.named_parameters(recurse=False):
            path, is_bias = f"{name}.{key}", key.endswith("_bias")
            if key == "down_proj_bias":
                self.plan.rank0_only.add(path)
            elif key.startswith(("gate_up_proj", "up_proj")):
                dim = 1 if is_bias or not module.is_transposed else 2
                is_joined = key.startswith("gate_up") and module.is_concatenated
                # Otherwise, gate and up alternate, or there is no gate.
                total = parameter.shape[dim]
                ranges = self._halves(total, path) if is_joined else (self._share(total, path),)
                self.plan.shards[path] = Shard(dim, ranges)
            elif key == "down_proj":
                dim = 1 if module.is_transposed else 2
                self.plan.shards[path] = Shard(dim, (self._share(parameter.shape[dim], path),))

    def hinted(self, model: nn.Module, hints: Mapping[str, str]) -> None:
        """Adds linears outside of attention and known MLPs that only the model's own plan lists."""
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear) or f"{name}.weight" in self.plan.shards:
                continue
            known = (*self.plan.attentions, *self.plan.whole)
            if any(name.startswith(f"{each}.") for each in known):
                continue
            styles = (style for key, style in hints.items() if fnmatch.fnmatchcase(name, key))
            style = None if "attn" in name else next(styles, None)
            if style == "colwise":
                self._cut_rows(name, module, self._share(module.out_features, name))
            elif style == "rowwise":
                self._cut_columns(name, module)

    def _share(self, total: int, what: str) -> Range:
        return split(total, self.heads.rank, self.heads.size, what)

    def _halves(self, total: int, what: str) -> tuple[Range, ...]:
        begin, end = self._share(total // 2, what)
        return (begin, end), (total // 2 + begin, total // 2 + end)

    def _cut_rows(self, name: str, linear: nn.Linear, *ranges: Range) -> None:
        self.plan.shards[f"{name}.weight"] = Shard(0, ranges)
        if linear.bias is not None:
            self.plan.shards[f"{name}.bias"] = Shard(0, ranges)

    def _cut_columns(self, name: str, linear: nn.Linear) -> None:
        self.plan.shards[f"{name}.weight"] = Shard(1, (self._share(linear.in_features, name),))
        self.plan.summed.append(name)
        if linear.bias is not None:
            self.plan.rank0_only.add(f"{name}.bias")


def _scaled(span: Range, factor: int) -> Range:
    return span[0] * factor, span[1] * factor


def connect(model: nn.Module, plan: ShardPlan, collective: Collective, vocab_size: int) -> None:
    """Installs forwards with collectives in all modules whose output is partial.

    Their classes and names stay.
    """
    if collective.size == 1:
        return
    for name in plan.summed:
        module: Any = model.get_submodule(name)
        own = plan.own_experts.get(name)
        forward = module.forward if own is None else _OwnExperts(module, own)
        object.__setattr__(module, "forward", _Summed(forward, collective))
    if plan.embedding is not None:
        embedding = model.get_submodule(plan.embedding)
        object.__setattr__(embedding, "forward", _Embedding(embedding, collective))
    if plan.head is not None:
        head = model.get_submodule(plan.head)
        assert isinstance(head, nn.Linear), type(head)
        object.__setattr__(head, "forward", ShardedOutput(head, collective, vocab_size))


class _Summed:
    """Forward of a module that returns a partial sum: a row-parallel linear, or sliced experts."""

    def __init__(self, forward: Any, collective: Collective) -> None:
        self._forward = forward
        self._collective = collective

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._collective.all_reduce(self._forward(*args, **kwargs).contiguous())


class _OwnExperts:
    """Forward of a mixture with some experts on this rank; other ranks' results are zeros."""

    def __init__(self, module: Any, own: Range) -> None:
        self._forward, self._own, self._count = module.forward, own, module.num_experts
        module.num_experts = own[1] - own[0]

    def __call__(self, states: Tensor, *routing: Tensor) -> Tensor:
        out: Tensor
        if not routing:  # Llama 4's: every expert's scored rows, [num_experts * num_tokens, hidden]
            begin, end = (each * len(states) // self._count for each in self._own)
            out = torch.zeros_like(states)
            out[begin:end] = self._forward(states[begin:end])
            return out
        chosen, scores = routing  # each [num_tokens, top]
        local = own_choices(chosen, self._own)
        out = self._forward(states, local.clamp(min=0), scores.masked_fill(local < 0, 0))
        return out


class _Embedding:
    """Forward of an embedding that looks up this rank's tokens and returns zeros for others."""

    def __init__(self, module: nn.Module, collective: Collective) -> None:
        assert isinstance(module.weight, Tensor)
        self._forward = module.forward  # a subclass may scale what it looks up
        self._length = module.weight.shape[0]
        self._first = collective.rank * self._length
        self._collective = collective

    def __call__(self, token_ids: Tensor) -> Tensor:  # [1, num_tokens]
        local = token_ids - self._first
        absent = (local < 0) | (local >= self._length)
        out = self._forward(local.masked_fill(absent, 0)).masked_fill(absent.unsqueeze(-1), 0)
        return self._collective.all_reduce(out)


class ShardedOutput:
    """Forward of an output layer whose vocabulary is divided among ranks.

    All ranks get all logits, or each rank gets its own part.
    """

    def __init__(self, module: nn.Linear, collective: Collective, vocab_size: int) -> None:
        length = module.weight.shape[0]
        self._forward = module.forward
        self.collective = collective
        self._vocab_size = vocab_size
        self.first = collective.rank * length  # token id of this rank's first column
        self.length = max(0, min(length, vocab_size - self.first))  # without padding

    def __call__(self, states: Tensor) -> Tensor:  # [..., num_rows, hidden_size]
        if states.shape[-2] == 0:
            return states.new_zeros(*states.shape[:-1], self._vocab_size)
        gathered = self.collective.all_gather(self._forward(states), dim=-1)
        return torch.narrow(gathered, -1, 0, self._vocab_size)

    def part(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, length]
        """Returns the logits of this rank's tokens."""
        return torch.narrow(self._forward(states), -1, 0, self.length)

    def own_rows(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size]
        """Returns all logits of this rank's share of the rows, [ceil(num_rows / size), vocab].

        The last ranks may have rows beyond `num_rows`, whose values are undefined.
        """
        missing = -len(states) % self.collective.size
        if missing:
            states = torch.nn.functional.pad(states, (0, 0, 0, missing))
        parts = self.collective.all_to_all(self._forward(states))
        joined = parts.unflatten(0, (self.collective.size, -1)).transpose(0, 1).flatten(1)
        return torch.narrow(joined, 1, 0, self._vocab_size)


MIN_SAVED_BYTES = 32 << 20
"""Bytes saved that justify a collective: about 10 us at 3 TB/s, the cost of a small one."""


@dataclass(frozen=True, slots=True)
class HeadShards:
    """This rank's part of a head that runs on every rank of a target; one rank cuts nothing.

    A part is cut if the rank then reads so many bytes less that the collective pays. Otherwise,
    every rank computes it whole, so nothing is broadcast.
    """

    collective: Collective
    min_saved_bytes: int = MIN_SAVED_BYTES

    @property
    def rank(self) -> int:
        return self.collective.rank

    @property
    def size(self) -> int:
        return self.collective.size

    def pays(self, num_bytes: int, num_collectives: int) -> bool:
        """Returns True if cutting weights of that size is worth this number of collectives."""
        saved = num_bytes - num_bytes // self.size
        return self.size > 1 and saved >= num_collectives * self.min_saved_bytes

    def heads(self, num_heads: int, num_kv_heads: int) -> Heads:
        """Returns the division of attention heads; `check` raises if it is impossible."""
        return Heads(num_heads, num_kv_heads, self.rank, self.size)

    def cut_output(self, linear: nn.Linear) -> int | None:
        """Cuts an output layer over its vocabulary if that pays; returns the vocabulary's size.

        `connect_output` must be called once its weights are laid out.
        """
        weight = linear.weight.detach()
        if not self.pays(weight.numel() * weight.element_size(), 1) or linear.bias is not None:
            return None
        length = -(-len(weight) // self.size)
        own = weight[self.rank * length : (self.rank + 1) * length]
        padded = weight.new_zeros(length, weight.shape[1])
        padded[: len(own)] = own
        linear.weight = nn.Parameter(padded, requires_grad=False)
        return len(weight)

    def connect_output(self, linear: nn.Linear, vocab_size: int) -> None:
        """Installs the forward that gathers the ranks' logits in a cut output layer."""
        output = ShardedOutput(linear, self.collective, vocab_size)
        object.__setattr__(linear, "forward", output)


WHOLE = HeadShards(Collective.single())
