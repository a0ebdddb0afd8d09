"""Whole device steps over random weights: the part `steps` of the proof.

A step without a head emits one token, or verifies a chain as look-ups propose it; with an EAGLE-3
head it also computes the head's rows and drafts the next chain or tree. A draft model's step
computes two known tokens and draws a chain behind them. Each is captured in a CUDA graph, as an
engine does, and its outcome compared with that of the same step launched one operation at a time.
Random weights accept nothing, so what drafting gains is computed from the times, for a given
probability that a node is accepted after its parent.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...config import Eagle3Config
from ...drafters.heads.protocol import TargetFacts
from ...scheduler import tree
from ...scheduler.types import Opening, SeatSettings, StepPlan, ints
from ...workers.attention import KVCache, KVShape
from ...workers.device_step.chains import ChainSizes, ChainStep
from ...workers.device_step.draft import DeviceHead
from ...workers.device_step.seats import DeviceSeats, SeatSizes
from ...workers.device_step.service import DeviceStep
from ...workers.device_step.shape import Sampler, StepShape
from ...workers.head import HeadRunner
from ...workers.model.family import FamilyModel
from ...workers.ops import PlannedOps
from ...workers.seats import Seats, gather
from .machine import SIZES, Case, Machine, Row, Size, random_model

BLOCK_SIZE = 16
DRAFT_VOCAB = 32000  # of published heads
SAMPLING = {"greedy": (0.0, 1.0), "0.6, top-p 0.9": (0.6, 0.9)}  # temperature, top_p
ACCEPTANCE = 0.7
_TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 8}


@dataclass(frozen=True, slots=True)
class Work:
    """One step."""

    drafter: str  # none, look-up, chain, tree: steps of the target; draft model: its own
    batch: int
    num_nodes: int
    sampling: str
    context_len: int

    @property
    def name(self) -> str:
        nodes = f", {self.num_nodes} nodes" if self.num_nodes else ""
        return f"{self.drafter}{nodes}, batch {self.batch}, {self.sampling}"


def head_files(size: Size) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """The weights of an EAGLE-3 head beside a target of that size, and its config.json."""
    hidden, inner, dim = size.hidden, size.inner, size.head_dim
    captured = sorted({0, size.num_layers // 2, size.num_layers - 1})
    kv_width = size.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj": (size.num_heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_width, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_width, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, size.num_heads * dim),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "fc": (hidden, len(captured) * hidden),
        "lm_head": (min(DRAFT_VOCAB, size.vocab), hidden),
    }
    norms = ("post_attention_layernorm", "hidden_norm", "input_layernorm")
    shapes |= dict.fromkeys(("norm", *(f"midlayer.{norm}" for norm in norms)), (hidden,))
    config = {
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "eagle_aux_hidden_state_layer_ids": captured,
    }
    return {f"{name}.weight": shape for name, shape in shapes.items()}, config


def random_head(machine: Machine, config: Eagle3Config, batch: int) -> HeadRunner:
    """An EAGLE-3 head beside a target of that size, read from a folder that is written first."""
    size = machine.size
    shapes, keys = head_files(size)
    tensors = {
        name: machine.random(*shape).cpu() if len(shape) == 2 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    vocab = len(tensors["lm_head.weight"])
    tensors["d2t"] = torch.zeros(vocab, dtype=torch.int64)
    tensors["t2d"] = torch.arange(size.vocab) < vocab
    (config.folder / "config.json").write_text(json.dumps(keys))
    save_file(tensors, config.folder / "model.safetensors")
    facts = TargetFacts(size.hidden, size.vocab, size.num_layers, machine.dtype, machine.device)
    table = nn.Embedding.from_pretrained(machine.random(size.vocab, size.hidden))
    output = nn.Identity()  # the head has an output layer of its own
    return HeadRunner(
        config,
        facts,
        (table, output),
        PlannedOps(machine.ops),
        size.num_layers,
        batch,
    )


def device_step(
    machine: Machine, model: FamilyModel, sizes: SeatSizes, runner: HeadRunner | None
) -> DeviceStep:
    """The step of a model over a cache of random keys, with its head if there is one."""
    size = machine.size
    shapes = [KVShape(size.num_kv_heads, size.head_dim, size.head_dim)] * size.num_layers
    shapes += runner.kv_shapes if runner else ()
    cache = KVCache(shapes, sizes.num_blocks + 1, BLOCK_SIZE, machine.dtype, machine.device)
    for storage in cache._storages:
        storage.normal_()
    seats = DeviceSeats(sizes, machine.device)
    if runner is None:
        return DeviceStep(model, cache, seats)
    runner.attach(cache)
    return DeviceStep(model, cache, seats, DeviceHead(runner, cache, seats))


def planned(work: Work, vocab: int, num_blocks: int) -> StepPlan:
    """A step behind random tokens, with chains of random nodes, that appends nothing."""
    source = np.random.default_rng(0)
    batch, context_len = work.batch, work.context_len
    per_seat = num_blocks // batch
    seats = np.arange(batch)
    drafts = [tree.chain(source.integers(0, vocab, work.num_nodes), "random") for _ in seats]
    heat, top_p = SAMPLING[work.sampling]
    return StepPlan(
        step=0,
        seats=ints(seats),
        context_lens=ints(np.full(batch, context_len)),
        chunk_lens=ints(np.ones(batch)),
        max_nodes=ints(np.full(batch, work.num_nodes)),
        tokens=ints([]),
        blocks=ints([(s, i, s * per_seat + i) for s in seats for i in range(per_seat)]),
        kv_moves=ints([]).reshape(0, 2),
        openings=tuple(
            Opening(
                int(s), ints(source.integers(0, vocab, context_len + 1)), 1,
                SeatSettings(int(s), temperature=heat, top_p=top_p),
            )
            for s in seats
        ),
        drafts=gather(drafts, np.ones(batch, dtype=np.bool_)),
    )  # fmt: skip


def staged(step: DeviceStep, work: Work, vocab: int) -> StepShape | None:
    """Stages one step, which can be repeated. None: it has no shape."""
    plan = planned(work, vocab, step.seats.sizes.num_blocks)
    Seats(BLOCK_SIZE, step.seats).apply(plan)
    shape = step.seats.kinds.shape(plan)
    if shape is None:
        return None
    step.seats.stage(plan, shape)
    step.seats.flush()
    return shape


@dataclass
class Bench:
    """The model that the steps share, and the times of steps without drafts."""

    machine: Machine
    trace: Path | None = None  # where the profile of a step goes
    plain_ms: dict[tuple[int, str], float] = field(default_factory=dict)

    @cached_property
    def model(self) -> tuple[FamilyModel, int]:
        """The target, and the bytes of its weights."""
        return random_model(self.machine)

    def step(self, work: Work) -> DeviceStep:
        """The device step of the target and, for a chain or a tree, of a head."""
        machine = self.machine
        longest = work.context_len + 2 + work.num_nodes
        num_blocks = work.batch * -(-longest // BLOCK_SIZE)
        sizes = SeatSizes(work.batch, longest, num_blocks, BLOCK_SIZE)
        if work.drafter not in ("chain", "tree"):
            return device_step(machine, self.model[0], sizes, None)
        with tempfile.TemporaryDirectory() as folder:
            keys: dict[str, Any] = {"max_draft_len": work.num_nodes}
            if work.drafter == "tree":
                keys = {**_TREE, "max_draft_len": 4, "max_total_draft_tokens": work.num_nodes}
            config = Eagle3Config(speculative_model=folder, **keys)
            runner = random_head(machine, config, work.batch)
        drafting = replace(sizes, num_draft_nodes=work.num_nodes)
        return device_step(machine, self.model[0], drafting, runner)

    @cached_property
    def draft_model(self) -> tuple[FamilyModel, int]:
        """A small model of the target's vocabulary, and the bytes of its weights."""
        size = self.machine.size if self.machine.is_dry else SIZES["1b"]
        return random_model(replace(self.machine, size=size))

    @torch.inference_mode()
    def run_chains(self, work: Work) -> Row:
        """As `run`, of a draft model's step."""
        machine, (model, weights) = self.machine, self.draft_model
        longest = work.context_len + 2 + work.num_nodes
        num_blocks = work.batch * -(-longest // BLOCK_SIZE)
        sizes = ChainSizes(work.batch, work.num_nodes, longest, num_blocks, BLOCK_SIZE)
        cache = KVCache(model.kv_shapes, num_blocks + 1, BLOCK_SIZE, machine.dtype, machine.device)
        for storage in cache._storages:
            storage.normal_()
        step, plan = ChainStep(model, cache, sizes), planned(work, machine.size.vocab, num_blocks)
        before = ints(plan.context_lens - 1)
        known = Seats(BLOCK_SIZE).expand(
            replace(plan, drafts=None, context_lens=before, chunk_lens=ints(plan.chunk_lens + 1))
        )
        is_cut = SAMPLING[work.sampling][1] < 1
        sampler = Sampler.SAMPLED if is_cut else Sampler.PLAIN
        shape = sizes.shape(work.batch, work.num_nodes, sampler)
        if shape is None:
            return {"skipped": "no shape: the host path draws these chains"}
        step.stage(shape, known, plan.max_nodes, np.zeros(work.batch, dtype=np.float32))
        row, captured_ms, _ = self._captured(partial(step.run, shape), step.words)
        keys = sum(2 * each.num_kv_heads * each.head_dim for each in model.kv_shapes)
        num_bytes = weights + keys * machine.dtype.itemsize * work.batch * work.context_len
        num_bytes *= work.num_nodes
        row["of the copy's bandwidth"] = num_bytes / machine.copied_bytes_per_s / captured_ms * 1e3
        return {"rows": shape.num_rows, **row}

    def _captured(
        self,
        run: Callable[[], None],
        outcome: Tensor,
        restage: Callable[[], object] = lambda: None,
    ) -> tuple[Row, float, Callable[[], object]]:
        """Times of a staged step, launched and captured, and what replays it."""
        launched_ms = self.machine.time_ms(run)
        launched = outcome.clone()
        replay = self.machine.captured(run)
        restage()
        outcome.zero_()
        replay()
        differ = int((outcome != launched).sum())
        captured_ms = self.machine.time_ms(replay)
        row: Row = {"launched, ms": launched_ms, "captured, ms": captured_ms}
        return row | {"differing words": differ, "passed": differ == 0}, captured_ms, replay

    @torch.inference_mode()
    def run(self, work: Work) -> Row:
        """Times of a step, whether its graph computes the same, and its share of the bandwidth."""
        if work.drafter == "draft model":
            return self.run_chains(work)
        machine = self.machine
        step = self.step(work)
        shape = staged(step, work, machine.size.vocab)
        if shape is None:
            return {"skipped": "no shape: the host path computes this step"}
        restage = partial(staged, step, work, machine.size.vocab)
        found, captured_ms, replay = self._captured(partial(step.run, shape), step.outcome, restage)
        row: Row = {"rows": shape.num_rows, **found}
        num_bytes = self.model[1] + self._cache_bytes(work)
        row["of the copy's bandwidth"] = num_bytes / machine.copied_bytes_per_s / captured_ms * 1e3
        row |= self._gain(work, captured_ms)
        if machine.device.type == "cuda":
            row |= profiled(replay, self.trace)
        return row

    def _cache_bytes(self, work: Work) -> int:
        size = self.machine.size
        per_key = 2 * size.num_layers * size.num_kv_heads * size.head_dim
        return per_key * self.machine.dtype.itemsize * work.batch * work.context_len

    def _gain(self, work: Work, captured_ms: float) -> Row:
        """Of tokens a second over steps without drafts, if each level is accepted so often."""
        key = (work.batch, work.sampling)
        if work.drafter == "none":
            self.plain_ms[key] = captured_ms
        if key not in self.plain_ms or work.drafter in ("none", "look-up"):
            return {}
        levels = 4 if work.drafter == "tree" else work.num_nodes
        emitted = sum(ACCEPTANCE**level for level in range(levels + 1))
        plain_ms = self.plain_ms[key]
        return {
            "pays above, tokens": captured_ms / plain_ms,
            f"gain at {ACCEPTANCE} a level": emitted * plain_ms / captured_ms,
        }


def profiled(replay: Callable[[], object], trace: Path | None) -> Row:
    """What a replay executes: kernels, the share of the time in which one runs, the slowest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        text = path.read_text(encoding="utf-8")
    if trace is not None:
        with gzip.open(trace, "wt", encoding="utf-8") as file:
            file.write(text)
    events = [
        each
        for each in json.loads(text)["traceEvents"]
        if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    if not events:
        return {"kernels": 0}
    busy_us = sum(each["dur"] for each in events)
    begin, end = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
    by_name: Counter[str] = Counter()
    for each in events:
        by_name[each["name"][:48]] += each["dur"]
    slowest = ", ".join(f"{name} {us / busy_us:.0%}" for name, us in by_name.most_common(6))
    return {"kernels": len(events), "busy": busy_us / (end - begin), "slowest": slowest}


def cases(machine: Machine, out: Path | None = None) -> Iterator[Case]:
    """The part `steps` of the proof. A profile of the last step of each drafter goes to `out`."""
    context_len = 20 if machine.is_dry else 1024
    bench = Bench(machine)
    works = [
        Work(drafter, batch, num_nodes, sampling, context_len)
        for sampling in SAMPLING
        for batch in (1, 8, 64)
        for drafter, num_nodes in (
            ("none", 0), ("look-up", 7), ("chain", 4), ("tree", 31), ("draft model", 4),
        )
    ]  # fmt: skip
    if machine.is_dry:
        greedy, drawn = SAMPLING
        works = [
            Work("none", 2, 0, greedy, context_len), Work("look-up", 1, 3, drawn, context_len),
            Work("chain", 2, 2, greedy, context_len), Work("tree", 1, 4, greedy, context_len),
            Work("draft model", 2, 3, drawn, context_len),
        ]  # fmt: skip
    for work in works:
        yield work.name, partial(_run, bench, work, out)


def _run(bench: Bench, work: Work, out: Path | None) -> Row:
    bench.trace = out and out / f"trace-{work.drafter.replace(' ', '-')}-{work.batch}.json.gz"
    return bench.run(work)
