"""What an EAGLE-3 head costs in the device step on a GPU, over random weights generated there.

    python -m outrider.bench.micro.gpu_head [--size 8b] [--batch 1 64] [--nodes 4] [--context 1024]

Three whole steps in one process, without a scheduler: one token a sequence; a root and a chain of
`--nodes` drafted tokens, without a head; the same with the head's rows and its draft loop. Each is
captured in a CUDA graph on a CUDA device, as an engine does. Random weights accept nothing, so the
last figure is the number of tokens a step has to emit for the head to pay. `--dry-run` with
TRITON_INTERPRET=1 in the environment runs the same code on a CPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from ...config import Eagle3Config
from ...drafters.heads.protocol import TargetFacts
from ...scheduler import tree
from ...scheduler.types import Opening, SeatSettings, StepPlan, ints
from ...workers.attention import KVCache, KVShape
from ...workers.device_step.draft import DeviceHead
from ...workers.device_step.seats import DeviceSeats, SeatSizes
from ...workers.device_step.shape import MAX_NODES, StepShape, smallest
from ...workers.device_step.step import DeviceStep
from ...workers.head import HeadRunner
from ...workers.model.family import FamilyModel
from ...workers.ops import Ops, PlannedOps
from ...workers.seats import Seats, gather
from ..forward import BLOCK_SIZE, DTYPES
from ..gpu import SIZES, Machine, Size, begin_dry_run, describe, machine_of, random_model

DRAFT_VOCAB = 32000  # of published heads


def random_head(
    size: Size, machine: Machine, ops: Ops, config: Eagle3Config, batch: int
) -> HeadRunner:
    """An EAGLE-3 head beside a target of that size, read from a folder that is written first."""
    hidden, inner, dim = size.hidden, size.inner, size.head_dim
    vocab = min(DRAFT_VOCAB, size.vocab)
    captured = sorted({0, size.num_layers // 2, size.num_layers - 1})
    kv_width = size.num_kv_heads * dim
    shapes = {
        "midlayer.self_attn.q_proj": (size.num_heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_width, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_width, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, size.num_heads * dim),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "fc": (hidden, len(captured) * hidden),
        "lm_head": (vocab, hidden),
    }
    tensors = {f"{name}.weight": machine.random(*shape).cpu() for name, shape in shapes.items()}
    norms = ("post_attention_layernorm", "hidden_norm", "input_layernorm")
    for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
        tensors[f"{name}.weight"] = torch.ones(hidden)
    tensors["d2t"] = torch.zeros(vocab, dtype=torch.int64)
    tensors["t2d"] = torch.arange(size.vocab) < vocab
    (config.folder / "config.json").write_text(
        json.dumps(
            {
                "num_attention_heads": size.num_heads,
                "num_key_value_heads": size.num_kv_heads,
                "head_dim": dim,
                "num_hidden_layers": 1,
                "rms_norm_eps": 1e-5,
                "eagle_aux_hidden_state_layer_ids": captured,
            }
        )
    )
    save_file(tensors, config.folder / "model.safetensors")
    facts = TargetFacts(hidden, size.vocab, size.num_layers, machine.dtype, machine.device)
    table = nn.Embedding.from_pretrained(machine.random(size.vocab, hidden))
    output = nn.Identity()  # the head has an output layer of its own
    return HeadRunner(
        config,
        facts,
        (table, output),
        PlannedOps(ops),
        size.num_layers,
        batch,
    )


def device_step(
    model: FamilyModel, size: Size, machine: Machine, sizes: SeatSizes, runner: HeadRunner | None
) -> DeviceStep:
    """The step of a model over an empty cache, with its head if there is one."""
    shapes = [KVShape(size.num_kv_heads, size.head_dim, size.head_dim)] * size.num_layers
    shapes += runner.kv_shapes if runner else ()
    cache = KVCache(shapes, sizes.num_blocks + 1, BLOCK_SIZE, machine.dtype, machine.device)
    seats = DeviceSeats(sizes, machine.device)
    if runner is None:
        return DeviceStep(model, cache, seats)
    runner.attach(cache)
    return DeviceStep(model, cache, seats, DeviceHead(runner, cache, seats))


def staged(step: DeviceStep, batch: int, context_len: int, num_nodes: int, vocab: int) -> StepShape:
    """Stages one step of `batch` greedy requests, which appends nothing: it can be repeated."""
    source, sizes = np.random.default_rng(0), step.seats.sizes
    per_seat = sizes.num_blocks // batch
    seats = np.arange(batch)
    drafts = [tree.chain(source.integers(0, vocab, num_nodes), "random") for _ in seats]
    plan = StepPlan(
        step=0,
        seats=ints(seats),
        context_lens=ints(np.full(batch, context_len)),
        chunk_lens=ints(np.ones(batch)),
        max_nodes=ints(np.full(batch, num_nodes)),
        tokens=ints([]),
        blocks=ints([(s, i, s * per_seat + i) for s in seats for i in range(per_seat)]),
        kv_moves=ints([]).reshape(0, 2),
        openings=tuple(
            Opening(int(s), ints(source.integers(0, vocab, context_len + 1)), 1, SeatSettings(0))
            for s in seats
        ),
        drafts=gather(drafts, np.ones(batch, dtype=np.bool_)),
    )
    Seats(BLOCK_SIZE, step.seats).apply(plan)
    shape = step.seats.kinds.shape(plan)
    assert shape is not None, (batch, num_nodes)
    step.seats.stage(plan, shape)
    step.seats.flush()
    return shape


def step_ms(machine: Machine, step: DeviceStep, shape: StepShape) -> float:
    """The median time of a step, captured where that is possible."""

    def run() -> None:
        step.run(shape)

    return machine.time_ms(machine.captured(run) or run)


@torch.inference_mode()
def report(
    size: Size, machine: Machine, batches: list[int], context_len: int, num_nodes: int
) -> list[str]:
    """The lines of a report."""
    ops = machine.ops()
    model, _ = random_model(size, machine, ops)
    lines = [
        f"device: {describe(machine.device)}, operations: {ops.name}, torch {torch.__version__}, "
        f"context {context_len}, a chain of {num_nodes}"
    ]
    for batch in batches:
        per_seat = -(-(context_len + num_nodes + 2) // BLOCK_SIZE)
        sizes = SeatSizes(batch, context_len + num_nodes + 2, batch * per_seat, BLOCK_SIZE)
        plain = device_step(model, size, machine, sizes, None)
        times_ms = [
            step_ms(machine, plain, staged(plain, batch, context_len, count, size.vocab))
            for count in (0, num_nodes)
        ]
        del plain
        with tempfile.TemporaryDirectory() as folder:
            config = Eagle3Config(speculative_model=folder, max_draft_len=num_nodes)
            runner = random_head(size, machine, ops, config, batch)
        drafting = replace(sizes, num_draft_nodes=num_nodes)
        step = device_step(model, size, machine, drafting, runner)
        shape = staged(step, batch, context_len, num_nodes, size.vocab)
        times_ms.append(step_ms(machine, step, shape))
        one, verified, drafted = times_ms
        lines.append(
            f"batch {batch}: one token {one:.3f} ms, {num_nodes} nodes {verified:.3f} ms, with the "
            f"head {drafted:.3f} ms; it pays above {drafted / one:.2f} tokens a step"
        )
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.micro.gpu_head")
    parser.set_defaults(device="cuda")
    parser.add_argument("--size", default="8b", choices=tuple(SIZES))
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--nodes", type=int, default=4, help="levels of the head's chain")
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU, interpreted")
    options = parser.parse_args(arguments)
    if options.dry_run:
        begin_dry_run(parser, options)
        options.batch = [min(2, each) for each in options.batch]
    if min(options.context, options.rounds, *options.batch) < 1:
        parser.error("--context, --rounds and --batch must be at least 1")
    if not 1 <= options.nodes <= MAX_NODES or smallest_size(options) is None:
        parser.error("--nodes: no step of the device has room for --batch times so many")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; `--dry-run` tries the code")
    machine = machine_of(options)
    found = report(SIZES[options.size], machine, options.batch, options.context, options.nodes)
    for line in found:
        sys.stdout.write(line + "\n")


def smallest_size(options: argparse.Namespace) -> tuple[int, int] | None:
    """The step's size for the largest batch; None: there is none."""
    most = max(options.batch)
    return smallest(most, options.nodes + 1, most, options.nodes) and smallest(
        most, options.nodes + 1, most
    )


if __name__ == "__main__":
    main()
