"""Experts in MXFP4 against transformers' own conversion, and gguf's."""

from __future__ import annotations

import logging

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.config import EngineConfig
from outrider.engine.estimate import estimate
from outrider.engine.preflight import check_quantization
from outrider.errors import CheckpointError
from outrider.tests.helpers.quantised.mxfp4 import write_pair
from outrider.workers.collective import Collective
from outrider.workers.model.checkpoint.quantised import Mxfp4Source
from outrider.workers.model.checkpoint.weights import Checkpoint, Whole, whole_box
from outrider.workers.model.fit import Serving, check_weights
from outrider.workers.model.info import read_model
from outrider.workers.model.target import load_model

CPU = torch.device("cpu")
NAME = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture
def pair(tmp_path):
    return write_pair(tmp_path)


def source_of(blocks, scales, tmp_path):
    return Mxfp4Source("x", Whole(blocks), Whole(scales), tmp_path)


def test_all_codes_and_scales_are_what_transformers_makes_of_them(tmp_path):
    scales = torch.arange(255, dtype=torch.uint8).view(5, 51, 1)
    blocks = (
        torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(16, 1)[:255].view(5, 51, 1, 16)
    )
    found = source_of(blocks, scales, tmp_path)
    assert found.shape == (5, 32, 51)
    values = found.read(whole_box(found.shape))
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert values.dtype == torch.bfloat16
    assert torch.equal(values.float(), wanted)
    for box in (((1, 3), (0, 32), (7, 51)), ((4, 5), (5, 18), (0, 1))):
        part = tuple(slice(*span) for span in box)
        assert torch.equal(found.read(box).float(), wanted[part])


def test_values_are_those_of_a_gguf_file(tmp_path):
    number = gguf.GGMLQuantizationType.MXFP4
    rows = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    packed = torch.from_numpy(gguf.quants.quantize(rows.numpy(), number)).view(24, 3, 17)
    scales, theirs = packed[..., 0], packed[..., 1:]
    # A file's byte holds inputs i and i + 16 of a group; the checkpoint's two neighbours.
    codes = torch.cat([theirs & 15, theirs >> 4], -1)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    found = source_of(blocks[None], scales[None], tmp_path)
    wanted = gguf.quants.dequantize(packed.reshape(24, -1).numpy(), number)
    assert torch.equal(found.read(whole_box(found.shape))[0].float(), torch.from_numpy(wanted).t())


def test_parts_are_those_of_the_plain_folder(pair):
    plain, coded = (Checkpoint(folder) for folder in pair)
    assert coded.names == plain.names
    for name in coded.names:
        found, wanted = (each.source(name) for each in (coded, plain))
        assert found.shape == wanted.shape
        box = whole_box(found.shape)
        assert torch.equal(found.read(box).float(), wanted.read(box))
    for box in (
        ((0, 4), (0, 64), (0, 192)),
        ((1, 2), (7, 40), (3, 190)),
        ((2, 4), (33, 34), (0, 2)),
    ):
        assert torch.equal(coded.source(NAME).read(box).float(), plain.source(NAME).read(box))


def test_a_rank_reads_its_part_alone(pair, elements_read):
    Checkpoint(pair[1]).source(NAME).read(((1, 2), (32, 64), (0, 48)))
    assert list(elements_read.values()) == [48 * (16 + 1)]


@pytest.mark.parametrize("forward", ["family", "bridge"])
def test_the_model_is_that_of_transformers(pair, forward, run_ranks, part, build_step):
    tokens = list(range(3, 14))
    step = build_step([part(tokens, 0, [2, 0, 3])], 4)

    def logits(folder, collective, **keys):
        model = load_model(
            folder, dtype=torch.float32, device=CPU, collective=collective, forward=forward, **keys
        )
        with torch.inference_mode():
            return model.forward(step, model.new_cache(4, 4))

    wanted = logits(pair[0], Collective.single())
    oracle = AutoModelForCausalLM.from_pretrained(
        pair[1], dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    with torch.inference_mode():
        theirs = oracle(torch.tensor([tokens])).logits[0, -1]
    found = logits(pair[1], Collective.single())
    torch.testing.assert_close(found[0], theirs, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found, wanted)
    for keys in ({}, {"whole_experts": True}):
        for each in run_ranks(2, lambda collective, keys=keys: logits(pair[1], collective, **keys)):
            torch.testing.assert_close(each, wanted)
    assert check_weights(pair[1])[0] == check_weights(pair[0])[0]


def test_memory_is_that_of_the_dequantised_model(pair, caplog):
    config, info = read_model(pair[1])
    for device in ("cpu", "cuda"):
        assert Serving(torch.device(device)).kept(pair[1], config, info) is None
    sizes = [estimate(EngineConfig.load({"model": str(folder)}), 1) for folder in pair]
    assert sizes[0] == sizes[1]
    for device in ("cpu", "cuda"):
        with caplog.at_level(logging.WARNING):
            check_quantization(
                EngineConfig.load(
                    {"model": str(pair[1]), "quantization": "mxfp4", "device": device}
                )
            )
        assert "4 bits in groups of 32, experts alone" in caplog.text
        assert "are dequantised at load" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_scales": None}, f"'{NAME}_scales' is missing"),
        ({"_blocks": None}, f"'{NAME}_scales'.*is quantised"),
        (
            {"_scales": torch.zeros(4, 192, 3, dtype=torch.uint8)},
            rf"'{NAME}_scales'.*\[4, 192, 2\]",
        ),
        ({"_blocks": torch.zeros(4, 192, 2, 8, dtype=torch.uint8)}, f"'{NAME}_blocks'.*groups, 16"),
        ({"_blocks": torch.zeros(4, 192, 32, dtype=torch.uint8)}, f"'{NAME}_blocks'.*groups, 16"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(pair, change, message):
    file = pair[1] / "model.safetensors"
    tensors = load_file(file) | {NAME + ending: tensor for ending, tensor in change.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(CheckpointError, match=message):
        check_weights(pair[1])


@pytest.mark.parametrize(
    ("ending", "make", "message"),
    [
        ("_scales", lambda old: old.fill_(255), f"'{NAME}_scales'.*no number.*expert 0"),
        ("_scales", lambda old: old.float(), f"'{NAME}_scales'.*torch.float32; expected uint8"),
        ("_blocks", lambda old: old.to(torch.int8), f"'{NAME}_blocks'.*int8; expected uint8"),
    ],
)
def test_values_that_are_none_are_named(pair, ending, make, message):
    file = pair[1] / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, NAME + ending: make(tensors[NAME + ending])}, file)
    with pytest.raises(CheckpointError, match=message):
        load_model(pair[1], dtype=torch.float32, device=CPU, collective=Collective.single())
