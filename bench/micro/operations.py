"""The CPU's operations against torch: `TorchOps`, with torch's fused attention and norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ...scheduler.types import Draft, SamplingRows, StepInput, StepPlan, ints
from ...workers.attention import KVCache, KVShape
from ...workers.ops.cpu import CpuOps
from ...workers.ops.protocol import AttentionSpec, Gate, GateKind, Norm, Rotation
from ...workers.ops.recurrent import Recurrence, recur
from ...workers.ops.reference import TorchOps
from ...workers.seats import gather, lay_out
from ...workers.states import MAX_SAVES, Lines, StateShape
from ..measure import Call, Pair

BLOCK_SIZE = 16
SPEC = AttentionSpec(8, 2, 64, 64, 0.125, rotary_dim=64)
CPU = torch.device("cpu")


def random_parents(num_nodes: int) -> list[int]:
    """A tree: every node below the root or an earlier node."""
    rng = np.random.default_rng(num_nodes)
    return [int(rng.integers(-1, node)) for node in range(num_nodes)]


def decode_batch(batch_size: int, context_len: int, num_nodes: int) -> dict[str, Any]:
    """Arguments of `lay_out`: sequences of one known token each, over blocks in no order."""
    max_blocks = (context_len + num_nodes) // BLOCK_SIZE + 1
    tables = np.random.default_rng(0).permutation(max_blocks * batch_size)
    zeros, none = np.zeros(batch_size, np.float32), np.zeros(batch_size, np.int32)
    return {
        "token_ids": none,
        "query_start": ints(np.arange(batch_size + 1)),
        "context_lens": none + np.int32(context_len),
        "block_tables": ints(tables.reshape(batch_size, max_blocks)),
        "samples": np.ones(batch_size, np.bool_),
        "max_nodes": none + np.int32(num_nodes),
        "block_size": BLOCK_SIZE,
        "sampling": SamplingRows(
            zeros, none, zeros + 1, zeros, np.arange(batch_size), none, none - np.int32(1)
        ),
    }


def decode_step(batch_size: int, context_len: int, num_nodes: int) -> StepInput:
    """The same with a tree drafted for each."""
    draft = Draft(ints(np.arange(num_nodes)), ints(random_parents(num_nodes)))
    known = decode_batch(batch_size, context_len, num_nodes)
    return lay_out(**known, drafts=gather([draft] * batch_size, known["samples"]))


def decode_plan(batch_size: int, context_len: int, num_nodes: int) -> StepPlan:
    """The message that asks for such a step."""
    ones, seats = np.ones(batch_size, np.int32), ints(np.arange(batch_size))
    draft = Draft(ints(np.arange(num_nodes)), ints(random_parents(num_nodes)))
    return StepPlan(
        step=0,
        seats=seats,
        context_lens=ones * np.int32(context_len),
        chunk_lens=ones,
        max_nodes=ones * np.int32(num_nodes),
        tokens=seats,
        blocks=ints([]).reshape(0, 3),
        kv_moves=ints([]).reshape(0, 2),
        drafts=gather([draft] * batch_size, ones > 0),
    )


def operations(dtype: torch.dtype) -> Iterator[Pair]:
    """Products, norms and gates of a layer of 1024 by 2816, and attention."""
    both = (CpuOps(dtype), TorchOps())
    name = str(dtype).removeprefix("torch.")
    norm, gate = Norm(torch.rand(1024), 1e-5), Gate(GateKind.SILU)
    for num_rows in (1, 5, 8, 16, 64):
        case = f"{name}, {num_rows} rows"
        for columns, length in ((480, 320), (1536, 1024)):
            weight = torch.randn(columns, length).to(dtype)
            states = torch.randn(num_rows, length).to(dtype)
            ours, reference = (_product(ops.pack(weight, None), states) for ops in both)
            yield Pair(f"product {columns} x {length}", case, ours, reference)
        states = torch.randn(num_rows, 1024).to(dtype)
        update, inner = torch.randn_like(states), torch.randn(num_rows, 5632).to(dtype)
        ours, reference = (_add_norm(ops, states.clone(), update, norm) for ops in both)
        yield Pair("add and norm", case, ours, reference)
        ours, reference = (_norm(ops, states, norm) for ops in both)
        yield Pair("norm", case, ours, reference)
        ours, reference = (_gate(ops, inner, gate) for ops in both)
        yield Pair("gated unit", case, ours, reference)


def preparation(dtype: torch.dtype) -> Iterator[Pair]:
    """Rotation and KV write: sequences that begin, so that attention has one key for each."""
    name = str(dtype).removeprefix("torch.")
    for batch_size in (1, 8, 32):
        case = f"{name}, {batch_size} rows"
        yield _attention_pair("rotation and KV write", case, dtype, batch_size, 0, 0)


def attention(dtype: torch.dtype) -> Iterator[Pair]:
    """Batches, contexts and trees."""
    name = str(dtype).removeprefix("torch.")
    for batch_size in (1, 8, 32):
        for context_len in (200, 2000, 8000):
            for num_nodes in (0, 7, 63):
                if batch_size * context_len * (num_nodes + 1) > 1 << 21:
                    continue  # seconds a call
                case = f"{name}, batch {batch_size}, context {context_len}, {num_nodes} nodes"
                yield _attention_pair("attention", case, dtype, batch_size, context_len, num_nodes)


def _attention_pair(
    part: str, case: str, dtype: torch.dtype, batch_size: int, context_len: int, num_nodes: int
) -> Pair:
    """A layer's attention with all that comes before it."""
    step = decode_step(batch_size, context_len, num_nodes)
    cache = KVCache([KVShape(2, 64, 64)], step.block_tables.size, BLOCK_SIZE, dtype, CPU)
    for pages in (*cache.keys, *cache.values):
        pages.normal_()
    joined = torch.randn(len(step.token_ids), SPEC.joined_width).to(dtype)
    ours, reference = (_attention(ops, step, cache, joined) for ops in (CpuOps(dtype), TorchOps()))
    return Pair(part, case, ours, reference)


def _product(project: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> Call:
    return lambda: project(states)


def _add_norm(
    ops: TorchOps | CpuOps, residual: torch.Tensor, update: torch.Tensor, norm: Norm
) -> Call:
    return lambda: ops.add_norm(residual, update, None, 0.0, norm)


def _norm(ops: TorchOps | CpuOps, states: torch.Tensor, norm: Norm) -> Call:
    return lambda: ops.norm(states, norm)


def _gate(ops: TorchOps | CpuOps, inner: torch.Tensor, gate: Gate) -> Call:
    return lambda: ops.gate(inner, gate)


def _attention(
    ops: TorchOps | CpuOps, step: StepInput, cache: KVCache, joined: torch.Tensor
) -> Call:
    plan = ops.plan(step, cache)
    turned: Rotation = ops.rotation(plan.positions, torch.rand(32), 1.0)
    return lambda: ops.rope_store_attend(joined, turned, None, plan, cache, 0, SPEC)


STATES = {
    "gated delta, 32 heads of 128 x 128": (StateShape(16, 32, 128, 128, 4), True),
    "Mamba-2, 128 heads of 128 x 64": (StateShape(1, 128, 128, 64, 4), False),
}


def rewinds() -> Iterator[Pair]:
    """A recurrent layer's step after a rewind, by replay and by a checkpoint per node.

    Ours takes the accepted nodes of the last step in again, from their kept inputs. The reference
    restores the state behind the last accepted node, and keeps the state of every node.
    """
    for name, (shape, is_delta) in STATES.items():
        for num_seqs, num_nodes, num_accepted in ((1, 4, 2), (8, 4, 2), (1, 16, 3), (8, 16, 3)):
            case = f"{name}; batch {num_seqs}, {num_accepted} of {num_nodes} nodes accepted"
            calls = _rewind(Recurrence(shape, is_delta), num_seqs, num_nodes, num_accepted)
            yield Pair("rewind of a state", case, *calls)


def _rewind(
    rule: Recurrence, num_seqs: int, num_nodes: int, num_accepted: int
) -> tuple[Call, Call]:
    shape, generator = rule.shape, torch.Generator().manual_seed(0)
    num_rows = num_seqs * (num_accepted + 1 + num_nodes)
    inputs = torch.randn(num_rows, shape.conv_dim, generator=generator)
    rates = torch.rand(num_rows, 2, shape.num_value_heads, generator=generator)
    rates[:, 0] = -rates[:, 0]
    first = torch.randn(
        num_seqs, shape.num_value_heads, shape.key_dim, shape.value_dim, generator=generator
    )
    # By sequence: accepted nodes, the known token, nodes.
    own = torch.arange(num_rows).view(num_seqs, -1)[:, num_accepted:]
    lines = _lines(num_seqs, num_nodes, num_accepted + 1)
    later = _lines(num_seqs, num_nodes, 1)
    behind = first.clone()
    accepted = torch.arange(num_rows).view(num_seqs, -1)[:, :num_accepted].flatten()
    recur(inputs[accepted], rates[accepted], behind, _lines(num_seqs, 0, num_accepted), rule)
    kept = first.new_empty(num_seqs, num_nodes, *first.shape[1:])
    kept[:, num_accepted - 1] = behind
    replayed, restored = first.clone(), first.clone()
    own_inputs, own_rates = inputs[own.flatten()], rates[own.flatten()]

    def replay() -> torch.Tensor:
        replayed.copy_(first)  # so that every call starts from the same state; in both
        return recur(inputs, rates, replayed, lines, rule)[own.flatten()]

    def restore() -> torch.Tensor:
        restored.copy_(kept[:, num_accepted - 1])
        found = recur(own_inputs, own_rates, restored, later, rule)
        for node in range(num_nodes):
            if node != num_accepted - 1:  # which every call restores
                kept[:, node].copy_(restored)
        return found

    return replay, restore


def _lines(num_seqs: int, num_nodes: int, num_line: int) -> Lines:
    """The rows of a step whose drafts are chains."""
    each = num_line + num_nodes
    return Lines(
        order=ints(np.arange(num_seqs * each)),
        starts=ints(np.arange(num_seqs + 1) * each),
        num_line=ints([num_line] * num_seqs),
        parents=ints(np.tile(np.arange(num_nodes) - 1, num_seqs)),
        node_starts=ints(np.arange(num_seqs + 1) * num_nodes),
        seats=ints(np.arange(num_seqs)),
        sources=ints(np.arange(num_seqs)),
        save_lens=ints(np.zeros((num_seqs, MAX_SAVES))),
        saves=ints(np.full((num_seqs, MAX_SAVES), -1)),
    )
