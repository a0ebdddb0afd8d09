"""What is unpacked of a GGUF file is the checkpoint that it was made of."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import outrider
from outrider.errors import CheckpointError
from outrider.tests.helpers.gguf_files import one_layer, write_gguf
from outrider.workers.model.checkpoint.gguf import (
    CODED,
    READABLE,
    WITH_MINIMA,
    read_codes,
    read_files,
)
from outrider.workers.model.checkpoint.gguf_checkpoint import ARCHITECTURES
from outrider.workers.model.checkpoint.hub import local_folder
from outrider.workers.model.fit import check_weights

DEMO = Path(outrider.__file__).resolve().parent / "demo" / "models"
SMALL = {
    **{"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    **{"long_factor": [1.5, 2.0, 4.0], "short_factor": [1.0, 1.25, 1.5]},
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": {},
    "llama, Llama 3's rope": {"rope_parameters": LLAMA3, "head_dim": 16},
    "llama, biases": {"attention_bias": True, "tie_word_embeddings": True, "mlp_bias": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2, yarn": {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
            "original_max_position_embeddings": 16,
        }
    },
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 24},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**MOE, "norm_topk_prob": True, "head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        **{"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
        **{"num_hidden_layers": 7, "final_logit_softcapping": 20.0},
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "phi3": {"sliding_window": 8},
    "phi3, long": {"rope_parameters": LONG, "original_max_position_embeddings": 32},
    "granite": {
        **{"attention_multiplier": 0.3, "embedding_multiplier": 3.0},
        **{"residual_multiplier": 0.5, "logits_scaling": 4.0},
    },
    "smollm3": {"num_hidden_layers": 5},
    "gpt_oss": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "truncate": False},
            "original_max_position_embeddings": 16,
        },
    },
    "olmo2": {},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def random_model(case, folder, **keys):
    """Saves a small model with a random value in every weight; returns it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(case.partition(",")[0], **{**SMALL, **CASES[case], **keys})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.normal_(0.8, 0.2)
    model.save_pretrained(folder)
    return model


def logits(model, length=40):
    tokens = torch.arange(3, 3 + length)[None] * 7 % 101
    with torch.inference_mode():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_every_architecture_is_the_one_that_was_written(case, tmp_path):
    wanted = random_model(case, tmp_path / "model")
    folder = local_folder(str(write_gguf(tmp_path / "model", tmp_path / "x.gguf", "F32")))
    stored = load_file(tmp_path / "model" / "model.safetensors")
    found = load_file(Path(folder) / "model.safetensors")
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=3e-7, msg=name)
    check_weights(Path(folder))
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(folder).float().eval()),
        *(logits(wanted),),
        rtol=1e-5,
        atol=1e-5,
    )


def test_every_architecture_has_a_case():
    kinds = {case.partition(",")[0] for case in CASES}
    assert kinds == {each.model_type for each in ARCHITECTURES.values()} | {"mixtral"}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_weights_of_every_type_that_the_library_writes(kind, tmp_path):
    folder = local_folder(str(write_gguf(DEMO / "draft", tmp_path / "x.gguf", kind)))
    wanted, found = (
        load_file(Path(each) / "model.safetensors") for each in (DEMO / "draft", folder)
    )
    assert found.keys() == wanted.keys()
    dtype = {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    steps = {"Q8_0": 255, "Q5_1": 31, "Q5_0": 31, "Q4_1": 15, "Q4_0": 15}
    for name, tensor in wanted.items():
        difference = (found[name].float() - tensor.float()).abs()
        if kind in ("F32", "BF16"):
            assert not difference.any(), name
        elif kind == "F16":
            assert torch.equal(found[name], tensor.half()), name
        else:
            most = 2.3 * tensor.float().abs().max() / steps[kind]
            assert difference.max() <= most, name


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
def test_quantised_experts_that_are_joined(kind, tmp_path):
    """gpt-oss's: rows of files are columns of the folder's, gate and up in turn."""
    number = gguf.GGMLQuantizationType[kind]
    random_model("gpt_oss", tmp_path / "model", intermediate_size=64)
    folder = local_folder(str(write_gguf(tmp_path / "model", tmp_path / "x.gguf", kind)))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    wanted, found = (
        load_file(Path(each) / "model.safetensors")[name] for each in (tmp_path / "model", folder)
    )
    for column in (0, 1):
        rows = wanted[..., column::2].transpose(1, 2).numpy()
        values = gguf.quants.dequantize(gguf.quants.quantize(rows, number), number)
        columns = torch.from_numpy(values).transpose(1, 2).bfloat16()
        assert torch.equal(found[..., column::2], columns)


def q4_k(block: bytes) -> list[float]:
    """256 values: 8 groups of 32 with scales and minima of 6 bits."""
    scale, minimum = np.frombuffer(block[:4], np.float16).astype(np.float64)
    packed, codes = block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            a, b = packed[group] & 63, packed[group + 4] & 63
        else:
            a = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            b = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        for index in range(32):
            byte = codes[group // 2 * 32 + index]
            code = byte >> 4 if group % 2 else byte & 15
            values.append(scale * a * code - minimum * b)
    return values


def q6_k(block: bytes) -> list[float]:
    """256 values: 16 groups of 16 with scales of 8 bits, codes of 4 and 2 bits."""
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    scale = float(np.frombuffer(block[208:], np.float16)[0])
    values = []
    for index in range(256):
        half, rest = divmod(index, 128)
        quarter, at = divmod(rest, 32)
        byte = low[half * 64 + quarter % 2 * 32 + at]
        code = (byte >> 4 if quarter > 1 else byte & 15) | (
            high[half * 32 + at] >> 2 * quarter & 3
        ) << 4
        values.append(scale * int(scales[index // 16]) * (code - 32))
    return values


@pytest.mark.parametrize(
    ("kind", "block_bytes", "scales", "reference"),
    [("Q4_K", 144, (0, 2), q4_k), ("Q6_K", 210, (208,), q6_k)],
)
def test_k_quants_against_a_slow_reference(kind, block_bytes, scales, reference, tmp_path):
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (6, 2, block_bytes), np.uint8)
    for at in scales:
        raw[..., at : at + 2] = rng.normal(0, 0.01, (6, 2, 1)).astype(np.float16).view(np.uint8)
    file = one_layer(tmp_path / "x.gguf", kind, raw.reshape(6, -1))
    folder = Path(local_folder(str(file)))
    found = load_file(folder / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    blocks = [reference(bytes(block)) for block in raw.reshape(-1, block_bytes)]
    wanted = torch.tensor(blocks, dtype=torch.float64).reshape(6, 512)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(found, wanted.float().bfloat16())


@pytest.mark.parametrize("kind", READABLE)
def test_every_type_that_is_read_is_dequantised(kind, tmp_path):
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    raw = np.zeros((6, 512 // block * block_bytes), np.uint8)
    folder = Path(local_folder(str(one_layer(tmp_path / "x.gguf", kind, raw))))
    found = load_file(folder / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    assert found.shape == (6, 512)
    wanted = gguf.quants.dequantize(raw, number)
    assert torch.equal(found.float(), torch.from_numpy(wanted).to(found.dtype).float())


@pytest.mark.parametrize("kind", CODED)
def test_codes_of_every_type_are_those_that_the_library_dequantises(kind, tmp_path):
    rng, number = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    raw = rng.integers(0, 256, (6, 512 // block, block_bytes), np.uint8)
    halves = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind, (0, 2))
    for at in halves:  # scales, and minima
        numbers = rng.normal(0, 0.01, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = numbers[..., None].view(np.uint8)
    raw = raw.reshape(6, -1)
    file = one_layer(tmp_path / "x.gguf", kind, raw)
    tensor = read_files([file])[1]["blk.0.ffn_gate.weight"]
    wanted = gguf.quants.dequantize(raw, number)
    (bits, group), rows = CODED[kind], np.array([4, 0, 5])
    codes, scales, minima = read_codes(tensor, rows)
    assert (minima is not None) == (kind in WITH_MINIMA)
    assert scales.shape == (3, 512 // group)
    if bits == 4:
        assert codes.max() < 16
        codes = codes.astype(np.float32) - 8 * (kind == "Q4_0")
    found = codes * scales.repeat(group, 1)
    found = found if minima is None else found - minima.repeat(group, 1)
    np.testing.assert_allclose(found, wanted[rows], rtol=0, atol=1e-6)
    if minima is None:
        assert np.array_equal(found, wanted[rows])


def test_more_tokens_than_rows_are_refused(tmp_path):
    keys = {"tokenizer.ggml.tokens": [f"t{index}" for index in range(4097)]}
    file = write_gguf(DEMO / "draft", tmp_path / "x.gguf", keys=keys)
    with pytest.raises(CheckpointError, match="4,097 tokens, and token_embd.weight 4,096 rows"):
        local_folder(str(file))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"general.architecture": "mamba"}, "general.architecture is 'mamba', which is not read"),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"llama.block_count": 3}, r"blk\.2\..* has the shape of no tensor|blk.2"),
        ({"llama.block_count": 1}, r"blk\.1\..* is no tensor"),
        ({"llama.block_count": 2**31 - 1}, "block_count is 2147483647"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count": 7}, "rows for 7 heads"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv is"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
        ({"llama.context_length": "long"}, "context_length is 'long'"),
        ({"llama.rope.scaling.type": "other"}, "scaling.type is 'other'"),
        ({"llama.attention.value_length": 8}, "different widths"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
    ],
)
def test_what_is_not_read_is_refused_by_its_key(keys, why, tmp_path, cache):
    file = write_gguf(DEMO / "draft", tmp_path / "x.gguf", keys=keys)
    with pytest.raises(CheckpointError, match=why) as caught:
        local_folder(str(file))
    assert caught.value.field == "model"
    assert str(file) in caught.value.message
    assert not cache.exists(), "it is refused before anything is written"


def test_other_divisors_of_frequencies_are_refused(tmp_path):
    random_model("llama, Llama 3's rope", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["rope_parameters"]["high_freq_factor"] = 3.0
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has other values"):
        local_folder(str(write_gguf(tmp_path / "model", tmp_path / "x.gguf")))


def test_keys_that_are_not_read_are_named(tmp_path, caplog):
    file = write_gguf(DEMO / "draft", tmp_path / "x.gguf", keys={"llama.logit_scale": 2.0})
    local_folder(str(file))
    assert "keys of the GGUF file that are not read: llama.logit_scale" in caplog.text
