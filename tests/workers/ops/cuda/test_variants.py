"""Kernels have few variants, and those of attention are listed: no step compiles another.

Variants are told apart by Triton's own look at the arguments of a launch; nothing is compiled.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.bench.gpu.inputs import float8_weight, random_tree, step_of, weight_of
from outrider.bench.gpu.machine import Machine, Size, random_model
from outrider.config import Eagle3Config, EngineConfig
from outrider.scheduler.tree import EMPTY
from outrider.scheduler.types import Opening, SeatSettings, StepPlan, ints
from outrider.tests.helpers.files import ROOT
from outrider.workers.attention import KV_FORMATS, KVCache, KVCode, KVShape
from outrider.workers.collective import Collective
from outrider.workers.device_step.shape import all_shapes
from outrider.workers.head import HeadService
from outrider.workers.model.family.decoder import FamilyRunner
from outrider.workers.model.info import ModelInfo
from outrider.workers.model.paged import ForwardChoice, PagedModel
from outrider.workers.model.target import load_model
from outrider.workers.ops.protocol import AttentionSpec, Experts, Gate, GateKind
from outrider.workers.seats import gather
from outrider.workers.spec import ModelSpec, WorkerSpec
from outrider.workers.worker import Worker

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")
CPU = torch.device("cpu")
LLAMA = Size(
    num_layers=1, hidden=128, inner=96, num_heads=16, num_kv_heads=4, head_dim=32, vocab=64
)
NUM_PROCESSORS = 132
ATTENTION = ("attend_kernel", "schedule_kernel")
IN_GRAPHS = {"lay_out_kernel", "settle_kernel", "_gumbel_argmax_kernel"}
SPECS = {
    "llama": AttentionSpec(32, 8, 128, 128, 0.1),
    "one head a group": AttentionSpec(8, 8, 64, 64, 0.1, window=4096, softcap=30.0),
    "odd groups": AttentionSpec(28, 4, 128, 128, 0.1, sinks=torch.zeros(28)),
    "latent": AttentionSpec(128, 1, 576, 512, 0.1, shared_values=True),
}


@pytest.fixture
def seen(monkeypatch):
    """What tells launches apart, without compiling or launching."""
    from triton.runtime.jit import JITFunction

    from outrider.tests.workers.ops.cuda.test_compiled import Compiler

    made = Compiler("sm90", compiles=False)
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: made.run(*args, **kwargs))
    return made


def of(seen, name: str) -> set:
    return {key for key in seen.variants if key[0] == name}


def random_steps(rng, count: int, *, longest: int = 4000):
    """Prompts in chunks, single tokens, chains and trees, of 1 to 8 sequences."""
    for _ in range(count):
        num_seqs = int(rng.integers(1, 9))
        lengths = [
            (int(rng.integers(longest)) * int(rng.random() < 0.7),
             int(rng.integers(1, 500)) if rng.random() < 0.7 else 1)
            for _ in range(num_seqs)
        ]  # fmt: skip
        trees = [
            random_tree(rng, int(rng.integers(80))) if rng.random() < 0.3 else []
            for _ in range(num_seqs)
        ]
        yield step_of(rng, lengths, trees, 16)


def test_random_steps_of_a_model(seen):
    """Those of attention are among the listed, and no other kernel has more than two."""
    machine = Machine(CPU, torch.bfloat16, LLAMA, rounds=1, is_dry=True)
    machine.ops.num_processors = NUM_PROCESSORS
    model, _ = random_model(machine)
    machine.ops.warm_up([layer.attention.spec for layer in model.layers], torch.bfloat16, 16)
    listed = set(seen.variants)
    assert len(of(seen, "attend_kernel")) == 8
    assert len(of(seen, "schedule_kernel")) == 3
    seen.launches.clear()
    for step, num_blocks in random_steps(np.random.default_rng(0), 120):
        cache = KVCache(model.kv_shapes, num_blocks, 16, torch.bfloat16, CPU)
        with torch.inference_mode():
            model.forward(machine.ops.plan(step, cache), cache, torch.arange(step.num_seqs))
    assert seen.launches.count("attend_kernel") == 120
    for name in ATTENTION:
        assert of(seen, name) <= listed
    for name in set(seen.launches) - set(ATTENTION):
        assert len(of(seen, name)) <= 2, name


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", [*SPECS, "codes"])
def test_every_launch_of_attention_is_listed(seen, name, invariant):
    code = KVCode(KV_FORMATS["fp8_e4m3"], 0.3, 0.7) if name == "codes" else None
    check_listed(seen, SPECS["llama" if code else name], code, invariant=invariant)


def check_listed(seen, spec, code, *, invariant):
    from outrider.workers.ops.cuda.ops import CudaOps, InvariantCudaOps

    ops = InvariantCudaOps(CPU) if invariant else CudaOps(CPU)
    ops.num_processors = NUM_PROCESSORS
    form = None if code is None else code.format
    stored = 0 if spec.shared_values else spec.value_dim
    shape = KVShape(spec.num_kv_heads, spec.head_dim, stored, format=form)
    ops.warm_up([spec], torch.bfloat16, 16, form)
    listed = set(seen.variants)
    num_listed = len(of(seen, "attend_kernel"))
    assert num_listed <= (3 if invariant else 8)
    for step, num_blocks in random_steps(np.random.default_rng(1), 12, longest=9000):
        cache = KVCache([shape], num_blocks, 16, torch.bfloat16, CPU, codes=[code])
        joined = torch.zeros(len(step.token_ids), spec.joined_width, dtype=torch.bfloat16)
        ops.rope_store_attend(joined, None, None, ops.plan(step, cache), cache, 0, spec)
    assert {key for key in seen.variants if key[0] != "_prepare_kernel"} <= listed


def test_a_library_of_contexts_adds_one_variant(seen):
    """For drafts whose queries are more than a tile's; windows stay with our kernel."""
    from outrider.workers.ops.cuda.library import AttentionLibrary
    from outrider.workers.ops.cuda.ops import CudaOps

    def context(query, *_):
        return torch.zeros_like(query), torch.zeros(query.shape[1], len(query))

    ops = CudaOps(
        CPU, library=AttentionLibrary("flash_attn_3", None, is_wished=True, context=context)
    )
    ops.num_processors, ops._is_library_checked = NUM_PROCESSORS, True
    specs, counts = [SPECS["llama"], replace(SPECS["llama"], window=4096)], []
    for spec in specs:
        ops.warm_up([spec], torch.bfloat16, 16)
        counts.append(len(of(seen, "attend_kernel")))
    assert counts == [9, 17]
    listed = set(seen.variants)
    for spec in specs:
        step, num_blocks = step_of(np.random.default_rng(0), [(900, 1)], [[-1] * 30], 16)
        cache = KVCache([KVShape(8, 128, 128)], num_blocks, 16, torch.bfloat16, CPU)
        joined = torch.zeros(31, spec.joined_width, dtype=torch.bfloat16)
        ops.rope_store_attend(joined, None, None, ops.plan(step, cache), cache, 0, spec)
    assert {key for key in seen.variants if key[0] != "_prepare_kernel"} <= listed


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_products_and_experts_of_any_number_of_rows(seen, kind):
    """A product's tiles have three sizes, and the depth is cut or not."""
    from outrider.workers.ops.cuda.linear import TiledProduct
    from outrider.workers.ops.cuda.ops import CudaOps

    product = TiledProduct(
        weight_of(kind, (256, 2048), torch.bfloat16), None, NUM_PROCESSORS, fixed_rows=False
    )
    gate_up, down = (weight_of(kind, shape, torch.bfloat16) for shape in ((4, 64, 64), (4, 64, 32)))
    mixture = CudaOps(CPU).pack_experts(Experts(gate_up, down, Gate(GateKind.SILU)))
    for rows in (*range(1, 130), 512, 1000, 4096):
        product(torch.zeros(rows, 2048, dtype=torch.bfloat16))
        states = torch.zeros(rows, 64, dtype=torch.bfloat16)
        mixture(states, torch.zeros(rows, 2, dtype=torch.int64), torch.ones(rows, 2))
    counts = {name: len(of(seen, name)) for name in set(seen.launches)}
    assert counts == {
        "_product_kernel": 4, "_sum_kernel": 1, "_align_kernel": 3,
        "_gate_up_kernel": 3, "_down_kernel": 3,
    }  # fmt: skip


def test_other_numbers_of_processors(seen):
    """What `check --compile-processors` launches is what such a GPU does: parts of quantised
    products, which differ, and of draws."""
    from outrider.bench.gpu_model import META, _coded, gpu_ops
    from outrider.workers.ops.cuda.ops import CudaOps
    from outrider.workers.verify.device_settings import DeviceSettings

    def launched(ops, device) -> set:
        seen.variants.clear()
        for out in (1536, 2048, 8192):
            shape = (out, 4096)
            weight = torch.empty(shape, dtype=torch.bfloat16, device=META)
            product = ops.pack(_coded(weight), None)
            for rows in (1, 40, 200):
                product(torch.zeros(rows, 4096, dtype=torch.bfloat16, device=device))
        ints = torch.zeros(3, dtype=torch.int32, device=device)
        ones = torch.ones(3, device=device)
        settings = DeviceSettings(ints.long(), ones, ints, ones, ones)
        ops.draw_on_device(torch.zeros(3, 32_000, device=device), ints, settings)
        return set(seen.variants)

    found = {}
    for num_processors in (78, 108, 114, NUM_PROCESSORS, 148):
        ops = CudaOps(CPU)
        ops.num_processors = num_processors
        found[num_processors] = launched(gpu_ops(num_processors), META)
        assert found[num_processors] == launched(ops, CPU)
    products = [{key for key in keys if key[0] == "_product_kernel"} for keys in found.values()]
    assert products[0] != products[2] != products[3], "the number is compiled in"


@pytest.mark.parametrize("group", [0, 128])
def test_inputs_in_float8_of_any_number_of_rows(seen, group):
    from outrider.workers.ops.cuda.float8 import Float8Products

    products = Float8Products({0, 128}, NUM_PROCESSORS, lambda left, *_, **__: left)
    product = products.pack(float8_weight((64, 2048), torch.bfloat16, group), None)
    for rows in (*range(1, 130), 512, 1000, 4096):
        product(torch.zeros(rows, 2048, dtype=torch.bfloat16))
    assert len(seen.launches) == 132
    assert len(of(seen, "_quantise_kernel")) == 1


@pytest.mark.parametrize(("num_nodes", "most"), [(0, 2), (4, 2), (32, 3), (200, 3)])
def test_rows_of_device_steps(seen, num_nodes, most):
    """Of all shapes of a load; a head's drafts, or without one those of look-ups."""
    from outrider.tests.workers.ops.cuda.test_compiled import launch_step_rows

    for shape in all_shapes(64, num_nodes):
        launch_step_rows(shape, num_nodes)
    assert len(of(seen, "lay_out_kernel")) <= most
    assert len(of(seen, "settle_kernel")) <= 2 * most  # with counts of tokens or without
    assert len(of(seen, "draft_slots_kernel")) <= 1
    assert len(of(seen, "move_kernel")) <= most
    assert len(of(seen, "keep_kernel")) <= 2  # of chains and of trees
    assert len(of(seen, "draft_level_kernel")) <= 3  # of chains; a tree's first and others


class Zeroed(TorchDispatchMode):
    """New memory is zero: no kernel writes it, and others take it for indices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.zero_() if "empty" in str(func) else out


def plan_of(rng, seats, lens, chunks, *, num_nodes: int) -> StepPlan:
    """Requests with `lens` known tokens, of which a step computes the last `chunks`."""
    blocks = [(seat, index, seat * 100 + index) for seat in seats for index in range(100)]
    texts = [ints(rng.integers(3, 4000, length)) for length in lens]
    return StepPlan(
        step=0,
        seats=ints(seats),
        context_lens=ints(np.array(lens) - chunks),
        chunk_lens=ints(chunks),
        max_nodes=ints(np.full(len(seats), num_nodes)),
        tokens=ints([]),
        blocks=ints(blocks),
        kv_moves=ints([]).reshape(0, 2),
        openings=tuple(
            Opening(seat, text, len(text), SeatSettings(seat))
            for seat, text in zip(seats, texts, strict=True)
        ),
        drafts=gather([EMPTY] * len(seats), np.ones(len(seats), dtype=np.bool_)),
    )


def mixed() -> PagedModel:
    """A decoder, and beside it a quantised product and experts: their tiles follow the rows."""
    machine = Machine(CPU, torch.bfloat16, LLAMA, rounds=1, is_dry=True)
    machine.ops.num_processors = NUM_PROCESSORS
    model, _ = random_model(machine)
    product = machine.ops.pack(weight_of("int4", (LLAMA.hidden, 2048), torch.bfloat16), None)
    gate_up, down = (
        weight_of("int4", shape, torch.bfloat16) for shape in ((4, 192, 128), (4, 128, 96))
    )
    experts = machine.ops.pack_experts(Experts(gate_up, down, Gate(GateKind.SILU)))

    class Mixed(FamilyRunner):
        def run(self, step, cache, capture):
            rows = len(step.token_ids)
            product(torch.zeros(rows, 2048, dtype=torch.bfloat16))
            states = torch.zeros(rows, 128, dtype=torch.bfloat16)
            experts(states, torch.zeros(rows, 2, dtype=torch.int64), torch.ones(rows, 2))
            return super().run(step, cache, capture)

    info = ModelInfo("mixed", 1, 16, 4, 32, 128, 64, 8192, (), torch.bfloat16)
    runner, single = Mixed(model, info, 1), Collective.single()
    return PagedModel(info, torch.nn.Identity(), CPU, single, runner, ForwardChoice("family"))


@torch.inference_mode()
def test_a_start_compiles_what_steps_of_any_number_of_rows_need(seen, capsys):
    """Without graphs; the bars tell what is compiled and how far it is."""
    model = mixed()
    model.warm_up(16, 1000)
    shown = capsys.readouterr().err
    assert "Kernels of attention: 100%" in shown
    assert "Kernels of steps, by rows: 100%" in shown
    assert "| 9/9 [" in shown, "up to 512 rows"
    at_start = set(seen.variants)
    assert len({key[0] for key in at_start}) > 8
    for step, num_blocks in random_steps(np.random.default_rng(2), 60):
        cache = KVCache(model.kv_shapes, num_blocks, 16, torch.bfloat16, CPU)
        model.forward(step, cache)
    assert set(seen.variants) == at_start
    seen.variants.clear()
    model.warm_up(16, 0)
    assert {key[0] for key in seen.variants} == set(ATTENTION), "of a stage, attention's alone"


@torch.inference_mode()
def test_a_worker_with_a_head_compiles_all_of_it_at_start(seen, monkeypatch):
    """Prompts and single tokens on the host path, each followed by a draft of the head."""
    from outrider.workers import head_layers
    from outrider.workers.ops.cuda.ops import CudaOps

    monkeypatch.setattr(head_layers, "mismatch", lambda *_: "")  # no kernel has run
    ops, models = CudaOps(CPU), ROOT / "demo" / "models"
    ops.num_processors = NUM_PROCESSORS
    known = ForwardChoice("family")
    single = Collective.single()
    model = load_model(models / "target", device=CPU, collective=single, ops=ops, known=known)
    section = Eagle3Config(speculative_model=str(models / "eagle3"), max_draft_len=3)
    head = HeadService(section, model, models / "target", 8)
    assert head.module_reason == ""
    seen.variants.clear()
    spec = ModelSpec(str(models / "target"), "bfloat16", 16, 800, 2048, 8, 2048, 0, 0.9)
    worker = Worker(WorkerSpec(1, "cpu", 1, 60.0, target=spec), single, CPU)
    worker._models, worker._head = {"target": model}, head
    worker.allocate(800, 0)
    at_start = set(seen.variants)
    listed = set().union(*(of(seen, name) for name in ATTENTION))
    assert len(listed) == 2 * 8 + 3, "blocks of 16 keys, and of one"
    rng = np.random.default_rng(0)
    for _ in range(30):
        seats = rng.permutation(8)[: rng.integers(1, 9)].tolist()
        chunks = rng.choice([1, 1, 3, 40, 300], len(seats))
        lens = chunks + rng.choice([1, 30, 900], len(seats))
        with Zeroed():
            worker.handle(plan_of(rng, seats, lens, chunks, num_nodes=3))
    launched = set().union(*(of(seen, name) for name in ATTENTION))
    assert seen.launches.count("attend_kernel") > 30 * (model.info.num_layers + 3)
    assert launched <= listed
    later = {key[0] for key in seen.variants.keys() - at_start}
    # Captures launch the first three, and a head's comparison at load, left out here, the others.
    assert later - IN_GRAPHS <= {"_enter_kernel", "_add_norm_kernel"}


# -- ahead of a start, without a GPU

MODELS = ROOT / "demo" / "models"
HEAD = {"decoding_type": "Eagle3", "speculative_model": str(MODELS / "eagle3"), "max_draft_len": 3}


def configured(**keys) -> EngineConfig:
    given = {"model": str(MODELS / "target"), "dtype": "bfloat16", "max_num_seqs": 4}
    return EngineConfig.model_validate(given | keys)


def test_all_that_a_worker_launches_is_compiled(seen):
    """A start without a head, and steps on the host path."""
    from outrider.bench.ahead import compile_ahead
    from outrider.workers.ops.cuda.ops import CudaOps

    found = compile_ahead(configured(), "sm90", NUM_PROCESSORS)
    assert found["attend_kernel"] >= 1
    compiled = set(seen.variants)
    seen.variants.clear()
    ops = CudaOps(CPU)
    ops.num_processors = NUM_PROCESSORS
    single, known = Collective.single(), ForwardChoice("family")
    model = load_model(MODELS / "target", device=CPU, collective=single, ops=ops, known=known)
    spec = ModelSpec(str(MODELS / "target"), "bfloat16", 16, 800, 2048, 4, 2048, 0, 0.9)
    worker = Worker(WorkerSpec(1, "cpu", 1, 60.0, target=spec), single, CPU)
    worker._models = {"target": model}
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        worker.allocate(800, 0)
        for _ in range(10):
            seats = rng.permutation(4)[: rng.integers(1, 5)].tolist()
            chunks = rng.choice([1, 1, 3, 40, 300], len(seats))
            lens = chunks + rng.choice([1, 30, 900], len(seats))
            with Zeroed():
                worker.handle(plan_of(rng, seats, lens, chunks, num_nodes=0))
    assert {key[0] for key in seen.variants} > {"attend_kernel", "lay_out_kernel"}
    assert set(seen.variants) <= compiled


def test_a_head_is_compiled_too(seen):
    from outrider.bench.ahead import compile_ahead

    found = compile_ahead(configured(speculative_config=HEAD), "sm90", NUM_PROCESSORS)
    assert {"_enter_kernel", "draft_level_kernel"} <= found.keys()
    plain = compile_ahead(configured(device_step="off"), "sm90", NUM_PROCESSORS)
    assert "lay_out_kernel" not in plain
    halves = compile_ahead(configured(tensor_parallel_size=2), "sm90", NUM_PROCESSORS)
    assert {"attend_kernel", "lay_out_kernel"} <= halves.keys()
