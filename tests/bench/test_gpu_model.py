"""The model of a GPU's steps against checkpoints' arithmetic and against real steps on a CPU."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.config import Eagle3Config
from outrider.scheduler.types import Opening, SeatSettings, StepPlan, ints
from outrider.tests.helpers.files import ROOT
from outrider.workers.attention import KV_FORMATS, KVCache
from outrider.workers.collective import Collective
from outrider.workers.device_step.draft import DeviceHead
from outrider.workers.device_step.seats import DeviceSeats, SeatSizes
from outrider.workers.device_step.service import DeviceStep
from outrider.workers.device_step.shape import Sampler, SeatKinds, StepShape
from outrider.workers.head import HeadService
from outrider.workers.model.paged import ForwardChoice
from outrider.workers.model.target import load_model

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")

from outrider.bench import gpu_model, published  # noqa: E402
from outrider.bench.gpu.machine import Size  # noqa: E402
from outrider.bench.gpu.steps import Work, head_files, staged  # noqa: E402

CPU = torch.device("cpu")
DEMO = ROOT / "demo" / "models" / "target"
CONTEXT_LEN = 100


@pytest.fixture(scope="module")
def ops():
    return gpu_model.gpu_ops()


def target_named(name: str) -> gpu_model.Target:
    return next(each for each in gpu_model.targets() if each.name == name)


def llama_weights(keys, num_ranks: int) -> tuple[int, int, int]:
    """Elements of one rank: of products, of the embedding, of norms."""
    hidden, layers, dim = keys["hidden_size"], keys["num_hidden_layers"], keys["head_dim"]
    width = keys["num_attention_heads"] * dim + 2 * keys["num_key_value_heads"] * dim
    attention = hidden * width + keys["num_attention_heads"] * dim * hidden
    layer = attention + 3 * hidden * keys["intermediate_size"]
    ends = hidden * keys["vocab_size"]
    return (layers * layer + ends) // num_ranks, ends // num_ranks, (2 * layers + 1) * hidden


@pytest.mark.parametrize(("name", "num_params"), [("8B", 8_030_261_248), ("70B", 70_553_706_496)])
def test_weights_of_llama(ops, name, num_params):
    target = target_named(f"Llama-3.1-{name}")
    products, embedding, norms = llama_weights(target.keys, target.num_ranks)
    assert (products + embedding) * target.num_ranks + norms == num_params
    loaded = gpu_model.load(target, ops)
    assert loaded.held_bytes == 2 * (products + embedding + norms)
    for batch, num_nodes in ((1, 0), (8, 3), (64, 0)):
        step = gpu_model.step_of(loaded, None, batch, num_nodes, CONTEXT_LEN)
        assert step.total("weight_bytes") == 2 * products
        heads = target.keys["num_key_value_heads"] // target.num_ranks
        keys = batch * (CONTEXT_LEN + 1 + num_nodes) * 2 * heads * 128 * 2
        assert step.total("kv_bytes") == keys * target.keys["num_hidden_layers"]
        form = KV_FORMATS["fp8_e4m3"]
        coded = gpu_model.step_of(loaded, None, batch, num_nodes, CONTEXT_LEN, form)
        assert coded.total("kv_bytes") == step.total("kv_bytes") / 2
        assert coded.names() == step.names()


def test_weights_of_deepseek(ops):
    """All 671 billion, in fp8; of experts, those that are chosen, with a scale for 128 columns."""
    target = target_named("DeepSeek-V3")
    loaded = gpu_model.load(target, ops)
    ends, routers = 2 * 129280 * 7168, 58 * 256 * 7168
    replicated = 61 * 7168 * (1536 + 512 + 64) + 2 * routers
    wanted = 671_026_419_200 + ends + routers + 7 * replicated
    assert loaded.held_bytes * 8 == pytest.approx(wanted, rel=1e-3)
    expert = 3 * 7168 * 2048 // 8 * (1 + 4 / 128)
    reads = {
        batch: gpu_model.step_of(loaded, None, batch, 0, CONTEXT_LEN).total("weight_bytes")
        for batch in (1, 8)
    }
    touched = 256 * (1 - (1 - 8 / 256) ** 8)
    assert reads[8] - reads[1] == pytest.approx(58 * expert * (touched - 8))


# -- the demo's target: a real step on a CPU, whose kernels are not executed


def _filled(tree):
    leaves = tree_flatten(tree)[0]
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.numel()]


class Launches(torch.utils._python_dispatch.TorchDispatchMode):
    """Operations of torch whose results lie in memory that none of their operands has."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        held = {each.untyped_storage().data_ptr() for each in _filled(args)}
        made = [each.untyped_storage().data_ptr() for each in _filled(out)]
        name = func._overloadpacket.__name__
        if made and (func._schema.is_mutable or not held.issuperset(made)):
            self.names[name] += "empty" not in name
            if "empty" in name:
                out.zero_()  # no kernel writes to it, and others take it for an index
        return out


@pytest.fixture
def launched(monkeypatch):
    """The kernels that would be launched."""
    from triton.runtime.jit import JITFunction

    names: Counter[str] = Counter()
    monkeypatch.setattr(
        JITFunction, "run", lambda kernel, *_, warmup, **__: names.update([kernel.__name__])
    )
    return names


def demo() -> gpu_model.Target:
    keys = json.loads((DEMO / "config.json").read_text())
    del keys["model_type"]
    size = Size(8, 320, 864, 8, 2, 40, 4096)
    return gpu_model.Target("demo", "llama", keys, 1, size)


def write_head(folder: Path, target: gpu_model.Target, num_nodes: int) -> Eagle3Config:
    shapes, keys = head_files(target.head)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    vocab = len(tensors["lm_head.weight"])
    tensors["d2t"] = torch.zeros(vocab, dtype=torch.int64)
    tensors["t2d"] = torch.arange(target.head.vocab) < vocab
    (folder / "config.json").write_text(json.dumps(keys))
    save_file(tensors, folder / "model.safetensors")
    return Eagle3Config(speculative_model=str(folder), max_draft_len=num_nodes)


@pytest.mark.parametrize(("batch", "num_nodes"), [(1, 0), (8, 0), (4, 4)])
@torch.no_grad()
def test_a_step_of_the_demo(ops, launched, monkeypatch, tmp_path, batch, num_nodes):
    """Launches and products are those of the step that runs."""
    from outrider.workers import head_layers

    monkeypatch.setattr(head_layers, "mismatch", lambda *_: "")  # no kernel has run
    target = demo()
    model = load_model(
        DEMO, device=CPU, collective=Collective.single(), ops=ops,
        known=ForwardChoice("family"),
    )  # fmt: skip
    assert model.forward_choice.kind == "family"
    longest = CONTEXT_LEN + 2 + num_nodes
    sizes = SeatSizes(batch, longest, batch * -(-longest // 16), 16, num_nodes, 4096)
    service, drafter, shapes = None, None, model.kv_shapes
    if num_nodes:
        service = HeadService(write_head(tmp_path, target, num_nodes), model, DEMO, batch)
        shapes = (*shapes, *service.kv_shapes)
    cache = KVCache(shapes, sizes.num_blocks + 1, 16, torch.bfloat16, CPU)
    seats = DeviceSeats(sizes, CPU)
    if service is not None:
        service.attach(cache)
        drafter = DeviceHead(service, cache, seats)
    step = DeviceStep(model.runner.model, cache, seats, drafter)
    shape = staged(step, Work("chain", batch, num_nodes, "greedy", CONTEXT_LEN), 4096)
    assert shape == StepShape(batch, 1 + num_nodes, batch * (1 + num_nodes), Sampler.PLAIN)
    launched.clear()
    with FlopCounterMode(display=False) as flops, Launches() as found:
        step.run(shape)

    loaded = gpu_model.load(target, ops)
    head = gpu_model.load_head(target, loaded, ops, num_nodes, batch) if num_nodes else None
    modelled = gpu_model.step_of(loaded, head, batch, num_nodes, CONTEXT_LEN)
    executed = launched + found.names
    assert modelled.names() - executed == executed - modelled.names() == Counter()
    products = [each for each in modelled.operations if each.weight_bytes]
    assert sum(each.flops for each in products) == flops.get_total_flops() > 0
    attention = [each for each in modelled.operations if each.name == "attend_kernel"]
    rows, keys = batch * (1 + num_nodes), CONTEXT_LEN + 1 + num_nodes
    assert attention[0].flops == 2 * rows * 8 * (40 + 40) * keys
    drafted = num_nodes  # the head's rows, and a level for each node but the first
    assert len(attention) == 8 + drafted


class OneDevice(torch.utils._python_dispatch.TorchDispatchMode):
    """Copies between host and device cannot be captured."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_flatten((args, kwargs, out))[0] if isinstance(x, torch.Tensor)]
        assert {each.device.type for each in tensors} <= {"meta"}, func
        return out


@pytest.mark.parametrize(("num_nodes", "num_launches"), [(0, 290), (4, 484), (32, 491)])
def test_a_step_with_cuts(ops, monkeypatch, num_nodes, num_launches):
    """Top-p as most chat models ask for it: what it launches lies on the device alone."""
    run = DeviceStep.run

    def watched(step, shape):
        with OneDevice():
            run(step, shape)

    monkeypatch.setattr(DeviceStep, "run", watched)
    target = target_named("Llama-3.1-8B")
    loaded = gpu_model.load(target, ops)
    head = gpu_model.load_head(target, loaded, ops, num_nodes, 1) if num_nodes else None
    step = gpu_model.step_of(loaded, head, 1, num_nodes, 2048, sampler=Sampler.SAMPLED)
    assert len(step.operations) == num_launches
    assert step.names()["_scale_kernel"] == step.names()["_draw_kernel"]


@pytest.mark.parametrize(
    ("batch", "num_nodes", "num_rows"), [(1, 4, 5), (17, 4, 95), (15, 32, 495)]
)
def test_shapes_are_those_of_plans(ops, batch, num_nodes, num_rows):
    """A step's shape is the one that the ranks find for a plan with room for as many nodes."""
    counts, none = np.ones(batch, dtype=np.int32), ints([])
    known = ints([0] * CONTEXT_LEN)
    plan = StepPlan(
        0, ints(range(batch)), counts * (CONTEXT_LEN - 1), counts, counts * num_nodes, none,
        none.reshape(-1, 3), none.reshape(-1, 2),
        tuple(Opening(seat, known, 1, SeatSettings(1)) for seat in range(batch)), own_drafts=True,
    )  # fmt: skip
    kinds = SeatKinds(64, num_nodes)
    for opening in plan.openings:
        kinds.open(opening)
    target = target_named("Llama-3.1-8B")
    loaded = gpu_model.load(target, ops)
    head = gpu_model.load_head(target, loaded, ops, num_nodes, batch)
    shape = gpu_model.step_of(loaded, head, batch, num_nodes, CONTEXT_LEN).shape
    assert shape == kinds.shape(plan)
    assert shape.num_rows == num_rows


# -- the table


def test_times_follow_the_data_sheet():
    device = gpu_model.Device("d", bytes_per_s=1e9, flops_per_s=1e12, link_bytes_per_s=1e8,
                              memory_bytes=1e9)  # fmt: skip
    operations = (
        gpu_model.Operation("a", 2e6, 1e6), gpu_model.Operation("b", 1e3, 5e9),
        gpu_model.Operation("c", 1e3, 0, link_bytes=1e6), gpu_model.Operation("d", 10),
    )  # fmt: skip
    step = gpu_model.Step(operations, StepShape(1, 1, 1, Sampler.PLAIN))
    assert step.milliseconds(device) == pytest.approx(2 + 5 + 10 + 1e-5)
    assert step.milliseconds(device, floor_us=100) == pytest.approx(2 + 5 + 10 + 0.1)


def test_the_command(tmp_path):
    arguments = ["bench", "gpu-model", "--models", "Llama-3.1-8B", "--batches", "1,64"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "model.json")])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "model.json").read_text())["rows"]
    assert [(row["batch"], row["draft"]) for row in rows] == [
        (batch, draft) for batch in (1, 64) for draft in ("none", "chain 4", "tree 32")
    ]
    assert [row["launches"] for row in rows[:5]] == [265, 329, 412, 265, 329]  # as in the record
    assert [row["captured"] for row in rows] == [True] * 5 + [False]  # 64 trees have no shape
    for row in rows:
        first, second = row["devices"]
        assert first["step_ms"] > second["step_ms"] > second["roofline_ms"] > 0
        assert first["to_plain"] >= 1
    for before, after in pairwise(rows[:3]):
        assert after["tflop"] > before["tflop"]
    beside = json.loads((tmp_path / "model.json").read_text())["published"]
    assert len(beside) == sum(each.model == "Llama-3.1-8B" for each in published.FIGURES)
    assert "arXiv:2503.01840, table 3" in done.output
    wrong = CliRunner().invoke(app, ["bench", "gpu-model", "--models", "GPT-2"])
    assert wrong.exit_code == 1
    assert "'GPT-2' is none of" in wrong.output
