"""Every kernel compiles for the devices that it is meant for, which needs no such device.

The interpreter accepts what the compiler rejects (types that change in a loop, shapes that are no
powers of two), and knows nothing of shared memory. So the launchers run here on tensors of a CPU,
and what they would launch is compiled instead.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.bench.gpu.inputs import KINDS, float8_weight, step_of, weight_of
from outrider.workers.attention import KV_FORMATS, KVCache, KVCode, KVShape
from outrider.workers.ops.protocol import AttentionSpec, Experts, Gate, GateKind, Norm

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles"),
]
CPU = torch.device("cpu")
# Architecture, threads of a warp, and the bytes of shared memory that a program may use.
TARGETS = {
    "sm80": ("cuda", 80, 32, 163 << 10),
    "sm90": ("cuda", 90, 32, 227 << 10),
    "sm100": ("cuda", 100, 32, 227 << 10),
    "gfx942": ("hip", "gfx942", 64, 64 << 10),
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Compiler:
    """Compiles what a launch would compile, by Triton's own look at the arguments. Every variant of
    a kernel is compiled once; without `compiles` they are only told apart."""

    def __init__(self, name: str, *, compiles: bool = True) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend

        backend, arch, warp, self.room = TARGETS[name]
        self.target = GPUTarget(backend, arch, warp)
        self.backend = make_backend(self.target)
        self.launches: list[str] = []
        self.variants: dict[tuple, object] = {}  # by name and specialisation
        self._compiles = compiles

    def run(self, kernel, *args, grid, warmup, **options):
        from triton.runtime.jit import create_function_from_signature

        assert options.keys() <= set(OPTIONS), options
        bind = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        _, special, _ = bind(*args, **options)
        variant = [
            ("constexpr", value) if param.is_constexpr else known
            for param, value, known in zip(kernel.params, args, special, strict=True)
        ]
        key = (kernel.__name__, tuple(map(str, variant)), tuple(options.items()))
        self.launches.append(kernel.__name__)
        if key not in self.variants:
            made = self._compiled(kernel, variant, options) if self._compiles else object()
            self.variants[key] = made
        return self.variants[key]

    def _compiled(self, kernel, variant, options):
        from triton.compiler import ASTSource

        signature, constants, attrs = {}, {}, {}
        for index, (param, (kind, known)) in enumerate(zip(kernel.params, variant)):
            signature[param.name] = kind
            if kind == "constexpr":
                constants[param.name] = known
            elif known:
                attrs[index,] = self.backend.parse_attr(known)
        source = ASTSource(kernel, signature, constants, attrs)
        made = triton.compile(source, target=self.target, options=options)
        shared = made.metadata.shared
        assert shared <= self.room, (kernel.__name__, shared)
        return made

    def of(self, name: str) -> list:
        """The variants of a kernel, in the order of their first launches."""
        return [made for key, made in self.variants.items() if key[0] == name]


@pytest.fixture(params=TARGETS)
def compiler(request, monkeypatch):
    from triton.runtime.jit import JITFunction

    made = Compiler(request.param)
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: made.run(*args, **kwargs))
    return made


@pytest.fixture
def compiled(compiler):
    """Compiles in place of launching; the names of the kernels that would be launched."""
    return compiler.launches


def resources(made) -> dict[str, int]:
    """Registers of a thread, bytes of its stack and spilled bytes, as the assembler reports."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(made.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"(REG|STACK|LOCAL):(\d+)", text)
    assert found, text
    return {name: int(value) for name, value in found}


def spills_nothing(compiler) -> None:
    """For the device whose assembler reports it."""
    if compiler.target.arch == 90:
        for made in compiler.variants.values():
            used = resources(made)
            assert used["STACK"] == used["LOCAL"] == 0, (made.metadata.name, used)


def keeps_to_registers(made) -> None:
    """The loop over keys that all rows see: products of 64 rows, and nothing on the stack. What
    comes before it and behind it may lie there."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(made.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    code = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?) ;", text)]
    backwards = [
        (int(target[1], 16), at)
        for at, what in code
        if (target := re.search(r"BRA (0x[0-9a-f]+)", what)) and int(target[1], 16) < at
    ]
    loops = [[what for at, what in code if begin <= at <= end] for begin, end in backwards]
    loop = next(each for each in loops if any("HGMMA" in what for what in each))
    assert sum("HGMMA" in what for what in loop) == 12, "8 of scores and 4 of values"
    assert any("LDGSTS" in what for what in loop), "keys are on their way meanwhile"
    assert not [what for what in loop if re.search(r"\b(STL|LDL)\b", what)], made.metadata.name


def loads(made) -> Counter[int]:
    """Instructions that load global memory, by the bytes that each loads for a thread."""
    text, found = made.asm["ptx"], Counter()
    for width in re.findall(r"cp\.async\.c[ag]\S+ .*?\], (0x\w+|\d+)", text):
        found[int(width, 0)] += 1
    for vector, bits in re.findall(
        r"ld\.global(?:\.(?!v\d|[bufs]\d)\w+)*(\.v\d)?\.[bufs](\d+)", text
    ):
        found[int(vector[2:] or 1) * int(bits) // 8] += 1
    return found


def steps_of(made) -> list[str]:
    """What touches global memory, and barriers, in order; of other devices nothing."""
    pattern = r"\b(?:st\.global|bar\.sync|atom\.\S+|(?:ld\.global|cp\.async\.c[ag])\S*)"
    return re.findall(pattern, made.asm.get("ptx", ""))


def counts_what_is_written(made) -> None:
    """Parts are written by all threads before one counts them, and read past the first cache."""
    steps = steps_of(made)
    counted = [index for index, step in enumerate(steps) if step.startswith("atom")]
    assert counted or "ptx" not in made.asm
    for index in counted:
        assert steps[index - 1 : index + 2 : 2] == ["bar.sync"] * 2, steps[index - 3 : index + 3]
        assert steps[index].startswith("atom.global.gpu.acq_rel"), steps[index]
        read = next(step for step in steps[index:] if step.startswith(("ld", "cp")))
        assert ".cg" in read, read


def launch_attention(
    spec, chunk, splits, dtype=torch.bfloat16, *, invariant=False, code=None, has_e4m3=True,
    library=None,
):  # fmt: skip
    from outrider.workers.ops.cuda.ops import CudaOps, InvariantCudaOps

    step, num_blocks = step_of(np.random.default_rng(0), [(300, chunk)], [[-1, -1]], 16)
    stored = 0 if spec.shared_values else spec.value_dim
    form = None if code is None else code.format
    shape = KVShape(spec.num_kv_heads, spec.head_dim, stored, format=form)
    cache = KVCache([shape], num_blocks, 16, dtype, CPU, codes=[code])
    ops = InvariantCudaOps(CPU) if invariant else CudaOps(CPU, splits)
    ops.has_e4m3, ops.library = has_e4m3, library
    plan = ops.plan(step, cache)
    turned = None
    if spec.rotary_dim:
        turned = ops.rotation(plan.positions, torch.ones(spec.rotary_dim // 2), 1.0)
    joined = torch.zeros(len(step.token_ids), spec.joined_width, dtype=dtype)
    ops.rope_store_attend(joined, turned, None, plan, cache, 0, spec)


def test_attention_of_an_8b_model(compiler, compiled):
    norm = Norm(torch.ones(128), 1e-6)
    plain = AttentionSpec(32, 8, 128, 128, 0.09, rotary_dim=128, query_norm=norm, key_norm=norm)
    for chunk in (1, 5):  # tokens, and a draft
        launch_attention(plain, chunk, 8)
    spills_nothing(compiler)
    for made in compiler.of("attend_kernel"):
        counts_what_is_written(made)
        steps = steps_of(made)
        if steps:  # keys of the step are written by all threads before any are read
            behind = steps[steps.index("st.global") :]
            assert next(each for each in behind if each[:3] in ("bar", "cp.")) == "bar.sync"
    launch_attention(plain, 400, 1)
    if compiler.target.arch == 90:  # of prompts, and of trees whose queries fill several tiles
        keeps_to_registers(compiler.of("attend_kernel")[-1])
    assert set(compiled) == {
        "_rotation_kernel", "_prepare_kernel", "schedule_kernel", "attend_kernel",
    }  # fmt: skip


@pytest.mark.parametrize("compiler", ["sm90"], indirect=True)
def test_attention_behind_contexts_by_a_library(compiler):
    """Of the 8B model with a tree of 32 nodes; nothing is cut into parts."""
    from outrider.workers.ops.cuda.library import AttentionLibrary

    def context(query, *_):
        return torch.zeros_like(query), torch.zeros(query.shape[1], len(query))

    library = AttentionLibrary("flash_attn_3", None, is_wished=True, context=context)
    plain = AttentionSpec(32, 8, 128, 128, 0.09, rotary_dim=128)
    launch_attention(plain, 31, None, library=library)
    (made,) = compiler.of("attend_kernel")
    assert loads(made)[16] >= 4, loads(made)
    keeps_to_registers(made)


@pytest.mark.parametrize("form", KV_FORMATS)
def test_attention_over_codes(compiler, form):
    """Of the 8B model and of latents; keys and values are loaded 16 bytes at a time."""
    code, has_e4m3 = KVCode(KV_FORMATS[form], 0.5, 0.5), compiler.target.arch != 80
    plain = AttentionSpec(32, 8, 128, 128, 0.09, rotary_dim=128)
    for chunk, splits in ((1, 8), (400, 1)):
        launch_attention(plain, chunk, splits, code=code, has_e4m3=has_e4m3)
    if compiler.target.arch == 90:
        single = compiler.of("attend_kernel")[0]
        for made in (single, *compiler.of("_prepare_kernel")):
            used = resources(made)
            assert used["STACK"] == used["LOCAL"] == 0, (made.metadata.name, used)
        for made in compiler.of("attend_kernel"):
            assert loads(made)[16] >= 4, loads(made)
            assert not loads(made)[1], "a byte at a time"
    latent = AttentionSpec(
        128, 1, 576, 512, 0.1, rotary_begin=512, rotary_dim=64, shared_values=True
    )
    launch_attention(latent, 1, 4, code=code, has_e4m3=has_e4m3)


def test_attention_with_windows_caps_and_sinks(compiled):
    capped = AttentionSpec(8, 4, 256, 256, 0.06, rotary_dim=256, window=4096, softcap=50.0)
    launch_attention(capped, 90, 4)
    sinks = AttentionSpec(64, 8, 64, 64, 0.125, rotary_dim=64, window=128, sinks=torch.zeros(64))
    launch_attention(sinks, 1, 1, torch.float16)
    odd = AttentionSpec(24, 8, 96, 80, 0.1, rotary_dim=48, chunk=8192)
    launch_attention(odd, 1, 2, torch.float32)


def test_attention_over_latents(compiler):
    """Blocks of 16 queries and of 64, whole and in parts: products of 64 rows on Hopper."""
    for num_heads, chunk, splits in ((4, 1, 4), (128, 1, 4), (128, 40, 1)):
        latent = AttentionSpec(
            num_heads, 1, 576, 512, 0.1, rotary_begin=512, rotary_dim=64, shared_values=True
        )
        launch_attention(latent, chunk, splits)
    narrow, *wide = compiler.of("attend_kernel")
    assert len(wide) == 2
    if compiler.target.arch == 90:
        spills_nothing(compiler)
        assert "mma.sync" in narrow.asm["ptx"]
        for made in wide:
            assert "wgmma.mma_async" in made.asm["ptx"]
            assert loads(made)[16] >= 2 * (512 + 64) * 32 * 2 // 16 // 256, loads(made)
            assert "st.local" not in made.asm["ptx"]
        for made in (narrow, wide[0]):
            counts_what_is_written(made)


def test_attention_with_heads_of_latents(compiler):
    """Keys and values that are in their slots; values lie head by head."""
    from outrider.workers.ops.cuda.ops import CudaOps

    each = AttentionSpec(8, 8, 192, 128, 0.1, rotary_begin=128, rotary_dim=64, is_prepared=True)
    step, num_blocks = step_of(np.random.default_rng(0), [(300, 400)], [[]], 16)
    ops, cache = CudaOps(CPU), KVCache([], num_blocks, 16, torch.bfloat16, CPU)
    query = torch.zeros(400, 8, 192, dtype=torch.bfloat16)
    keys, values = (
        query.new_zeros(num_blocks * 16, 8, 192),
        query.new_zeros(8, num_blocks * 16, 128),
    )
    ops.attend(query, keys, values.transpose(0, 1), ops.plan(step, cache), each)
    (made,) = compiler.of("attend_kernel")
    if compiler.target.arch == 90:
        assert "wgmma.mma_async" in made.asm["ptx"]
        assert loads(made)[16] >= 4, loads(made)


def test_draws(compiler, compiled):
    from outrider.workers.ops.cuda.draw import counts_of, draw
    from outrider.workers.verify.device_settings import DeviceSettings

    ones = torch.ones(2)
    seeds, positions = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    settings = DeviceSettings(seeds, ones, positions, ones, ones)
    for tokens in (None, torch.arange(128_000)):
        draw(torch.zeros(2, 128_000), positions, settings, tokens, 132, counts_of(CPU))
    # Of top-k and of top-p: eight digits of four bits, and the last token. Then the draw.
    one = ["_scale_kernel", *(["_digit_kernel"] * 8 + ["_last_kernel"]) * 2, "_draw_kernel"]
    assert compiled == one * 2
    assert len(compiler.of("_digit_kernel")) == 2
    spills_nothing(compiler)
    for made in compiler.of("_draw_kernel"):
        counts_what_is_written(made)


def test_contests(compiler, compiled):
    from outrider.workers.ops.cuda.draw import counts_of, gumbel_argmax
    from outrider.workers.verify.device_settings import DeviceSettings

    ones = torch.ones(2)
    seeds, positions = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    settings = DeviceSettings(seeds, ones, positions, ones, ones)
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.zeros(2, 128_000, dtype=dtype)
        for tokens in (64_000, torch.arange(128_000)):
            gumbel_argmax(logits, positions, settings, tokens, 132, counts_of(CPU))
    assert compiled == ["_gumbel_argmax_kernel"] * 4
    spills_nothing(compiler)
    for made in compiler.of("_gumbel_argmax_kernel"):
        counts_what_is_written(made)


@pytest.mark.parametrize("num_nodes", [0, 63, 200])
def test_edits(compiled, num_nodes):
    from outrider.workers.ops.cuda.ops import edit, logprobs
    from outrider.workers.verify.device_settings import (
        MAX_BIASES,
        MAX_ENDS,
        NUM_WORDS,
        DeviceEdits,
        EditTables,
    )

    def table(width):
        return torch.zeros(3, width, dtype=torch.int32)

    tables = EditTables(
        table(NUM_WORDS),
        table(MAX_BIASES),
        table(MAX_BIASES),
        table(MAX_ENDS),
        table(128_000),
        table(4000),
    )
    rows = 2 * (1 + num_nodes)
    positions = torch.zeros(rows, dtype=torch.int32)
    words = torch.zeros(rows, max(1, -(-num_nodes // 64)), dtype=torch.int64)
    seats = torch.zeros(rows, dtype=torch.int64)
    edits = DeviceEdits(
        tables, positions, seats, positions, positions, words, positions, positions, num_nodes
    )
    edit(torch.zeros(rows, 128_000), edits, 132)
    for dtype in (torch.bfloat16, torch.float32):
        logprobs(torch.zeros(rows, 128_000, dtype=dtype), positions, edits)
    assert len(compiled) == 3


def launch_step_rows(shape, num_draft_nodes=0):
    """What a device step launches beside its forward, of zeros."""
    from outrider.workers.device_step.seats import DeviceSeats, SeatSizes, walk_of
    from outrider.workers.device_step.shape import Sampler
    from outrider.workers.ops.cuda.step_rows import lay_out, move, settle

    seats = DeviceSeats(SeatSizes(64, 4096, 1 << 12, 16, num_draft_nodes, 4096), CPU)
    layout = lay_out(seats.staged(shape))
    outcome = torch.zeros(shape.num_rows, dtype=torch.int32)
    sampled = shape.sampler is not Sampler.PLAIN
    walk = walk_of(seats, layout, shape, outcome, counts_tokens=sampled)
    settled = settle(torch.zeros(shape.num_rows, dtype=torch.int32), walk)
    if shape.num_nodes:
        places = torch.zeros(8, 2, dtype=torch.int64)
        move(places, settled, walk.query_start, shape.query_len)
    if num_draft_nodes:
        launch_levels(layout, settled, num_draft_nodes)
        launch_keep(seats, layout, shape, num_draft_nodes)


def launch_keep(seats, layout, shape, num_nodes):
    """A chain's drafts, and a tree's."""
    from outrider.workers.ops.cuda.step_rows import keep
    from outrider.workers.ops.plan import KeptDrafts

    tokens = torch.zeros(shape.num_seqs, num_nodes, dtype=torch.int64)
    outcome = torch.zeros(shape.num_seqs * (1 + 2 * num_nodes), dtype=torch.int32)
    for parents in (None, tokens):
        keep(
            KeptDrafts(
                tokens, parents, None, None, seats.step_room(shape), layout.seats,
                seats.draft_counts, seats.drafts, outcome,
            )
        )  # fmt: skip


def launch_levels(layout, settled, room):
    """Two of a chain, and two of a tree of any number of nodes."""
    from outrider.workers.ops.cuda.step_rows import draft_level, draft_slots
    from outrider.workers.ops.plan import DraftLevel

    num_drafts = len(settled.known)
    slots = draft_slots(layout.plan.block_tables, settled.known, 16, 4096, 1 << 16, room)
    for above in (None, torch.zeros(num_drafts, min(8, room), dtype=torch.int64)):
        begin, seen, width = 0, None, 1 if above is None else above.shape[1]
        for depth in (1, 2):
            plan = draft_level(
                DraftLevel(
                    slots, settled.known, settled.base, above, seen, begin, width, depth, room
                )
            )
            seen = None if above is None else plan.ancestors.view(num_drafts, width, -1)
            begin += width


@pytest.mark.parametrize("num_nodes", [0, 4, 63, 200])
def test_step_rows(compiler, compiled, num_nodes):
    from outrider.workers.device_step.shape import Sampler, StepShape

    for sampler, drafts in ((Sampler.PLAIN, num_nodes), (Sampler.SAMPLED, 0)):
        launch_step_rows(StepShape(2, 1 + num_nodes, 2 * (1 + num_nodes), sampler), drafts)
    rows, levels = ["lay_out_kernel", "settle_kernel"], ["draft_level_kernel"] * 4
    rows += ["move_kernel"] * (num_nodes > 0)
    drafts = ["draft_slots_kernel", *levels, *["keep_kernel"] * 2] if num_nodes else []
    assert compiled == rows + drafts + rows
    spills_nothing(compiler)


def test_norms_gates_and_experts(compiler, compiled):
    from outrider.workers.ops.cuda.ops import CudaOps

    ops, rows = CudaOps(CPU), torch.zeros(4, 4096, dtype=torch.bfloat16)
    norm = Norm(torch.ones(4096), 1e-6)
    ops.norm(rows, norm)
    ops.add_norm(rows, rows.clone(), None, 1.0, norm)
    ops.add_norm(rows, rows.clone(), norm, 1.0, Norm(None, 1e-6), rows.clone())
    ops.add_norm(rows, None, None, 1.0, norm, rows.clone())
    for first, second in ((norm, norm), (None, None)):
        ops.enter(rows, first, rows, second, is_residual_normed=False)
    spills_nothing(compiler)
    if compiler.target.arch == 90:  # four elements a thread and load, or more
        for made in compiler.of("_enter_kernel"):
            assert min(loads(made)) >= 8, loads(made)
    for kind in GateKind:
        ops.gate(rows, Gate(kind, 7.0, 1.7))
    for scores_input, biased in ((False, True), (True, False)):
        experts = Experts(
            torch.zeros(8, 2 * 768, 2048, dtype=torch.bfloat16),
            torch.zeros(8, 2048, 768, dtype=torch.bfloat16),
            Gate(GateKind.CLAMPED_SILU, 7.0, 1.7),
            torch.zeros(8, 2 * 768, dtype=torch.bfloat16) if biased else None,
            torch.zeros(8, 2048, dtype=torch.bfloat16) if biased else None,
            scores_input,
        )
        states = torch.zeros(5, 2048, dtype=torch.bfloat16)
        mixture = ops.pack_experts(experts)
        mixture(states, torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_products_and_experts(compiled, kind):
    from outrider.workers.ops.cuda.linear import TiledProduct
    from outrider.workers.ops.cuda.ops import CudaOps

    dtype = torch.float16 if kind == "int8" else torch.bfloat16
    weight = weight_of(kind, (256, 2048), dtype, 128)
    for rows, fixed_rows in ((1, False), (100, True)):
        states = torch.zeros(rows, 2048, dtype=dtype)
        TiledProduct(weight, states[0, :256], 132, fixed_rows=fixed_rows)(states)
    gate_up, down = (
        weight_of(kind, (4, 512, 256), dtype, 128),
        weight_of(kind, (4, 256, 256), dtype),
    )
    mixture = CudaOps(CPU).pack_experts(Experts(gate_up, down, Gate(GateKind.SILU)))
    mixture(states[:5, :256], torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2))
    assert {"_product_kernel", "_sum_kernel", "_gate_up_kernel", "_down_kernel"} <= set(compiled)


@pytest.mark.parametrize("compiler", ["sm90", "sm100"], indirect=True)
@pytest.mark.parametrize("group", [0, 128])
def test_products_by_inputs_in_float8(compiler, compiled, group):
    """One launch of ours and one of torch's. A thread of 256 at most has 32 columns."""
    from outrider.workers.ops.cuda.float8 import Float8Products

    calls = []

    def multiply(left, right, *_, output_dtype, **__):
        calls.append((left.shape, right.shape))
        return torch.empty(left.shape[0], right.shape[1], dtype=output_dtype)

    products = Float8Products({0, 128}, 132, multiply)
    sizes = (2048, 4096, 14336)
    for size in sizes:
        product = products.pack(float8_weight((64, size), torch.bfloat16, group), None)
        assert product(torch.zeros(5, size, dtype=torch.bfloat16)).shape == (5, 64)
    assert compiled == ["_quantise_kernel"] * 3
    assert calls == [((8, size), (size, 64)) for size in sizes]
    spills_nothing(compiler)
    for made in compiler.of("_quantise_kernel"):
        assert min(loads(made)) >= 8, loads(made)


@pytest.mark.parametrize("compiler", ["sm90"], indirect=True)
def test_offsets_of_large_results_have_64_bits(compiler):
    """Parts of a long prompt's products are longer together than 32 bits count; so are rotations of
    as many rows."""
    from outrider.workers.ops.cuda.linear import TiledProduct
    from outrider.workers.ops.cuda.ops import InvariantCudaOps

    weight = torch.zeros(64, 8192, dtype=torch.bfloat16)
    TiledProduct(weight, None, 132, fixed_rows=True)(torch.zeros(3, 8192, dtype=torch.bfloat16))
    positions = torch.zeros(2, dtype=torch.int32)
    InvariantCudaOps(CPU).rotation(positions, torch.ones(2, 64), 1.0)
    for name in ("_sum_kernel", "_rotation_kernel"):
        (made,) = compiler.of(name)
        products = re.findall(r"arith\.muli .*", made.asm["ttgir"])
        assert products == [each for each in products if "i64" in each], (name, products)


@pytest.mark.parametrize("compiler", ["sm90"], indirect=True)
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("group", [32, 128, 4096])
def test_quantised_products_load_a_scale_per_group(compiler, rows, group):
    """Not one per weight. Codes and states are loaded 8 or 16 bytes at a time.

    A thread of 128 has two of the 64 columns at most, in each of the steps that are in flight.
    """
    from outrider.workers.ops.cuda.linear import TiledProduct

    found = {}
    for kind in KINDS:
        weight = weight_of(kind, (4096, 4096), torch.bfloat16, group)
        states = torch.zeros(rows, 4096, dtype=torch.bfloat16)
        TiledProduct(weight, None, 132, fixed_rows=False)(states)
        found[kind] = loads(compiler.of("_product_kernel")[-1])
    steps, per_step = 3, 16 * 64 * 2 // 128 // 16 * max(1, rows // 16)  # of a pipeline; of states
    assert found["plain"] == {16: steps * (per_step + 4)}
    for kind, widths in found.items():
        narrow = sum(count for width, count in widths.items() if width < 8)
        wide = sum(width * count for width, count in widths.items() if width >= 8)
        per_byte = {"plain": 4, "int4": 1, "int4 zeros": 1}.get(kind, 2)
        assert wide == 16 * steps * (per_step + per_byte), (kind, widths)
        most = 0 if kind == "plain" else 2 * steps if kind.endswith("zeros") else steps
        assert narrow <= most, (kind, widths)


def test_invariant_attention(compiled, monkeypatch):
    from outrider.workers.ops.cuda import attention

    monkeypatch.setattr(attention, "FIXED_KEYS", 64)
    spec = AttentionSpec(32, 8, 128, 128, 0.09, rotary_dim=128, window=100)
    launch_attention(spec, 1, None, invariant=True)
    assert {"_rotation_kernel", "attend_kernel"} <= set(compiled)
