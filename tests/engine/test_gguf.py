"""A GGUF file as target and as draft model: the tokens of the checkpoint that it was made of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

import outrider
from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.engine.preflight import preflight
from outrider.errors import CheckpointError, ConfigError
from outrider.workers.collective import Collective
from outrider.workers.model.checkpoint import quantised
from outrider.workers.model.checkpoint.hub import local_folder
from outrider.workers.model.fit import CPU, Serving
from outrider.workers.model.info import read_model
from outrider.workers.model.target import load_model
from outrider.workers.ops.cpu import CodedProjection
from outrider.workers.ops.table import VARIABLE

from ..helpers.engines import complete, engine_of, random_prompts
from ..helpers.gguf_files import write_gguf

DEMO = Path(outrider.__file__).resolve().parent / "demo" / "models"
PROMPTS = random_prompts(3, 4000, longest=12)
PROMPTS += [(prompt * 4)[:30] for prompt in PROMPTS]  # of which n-grams make drafts
NGRAM = {"decoding_type": "NGram", "max_draft_len": 4}
TREE = {"decoding_type": "Suffix", "shape": "tree", "max_draft_len": 6}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tokens_of(model, section=None, **options):
    options = {"dtype": "auto", **options}
    with engine_of(str(model), section, **options) as engine:
        return complete(engine, PROMPTS, max_tokens=24, ignore_eos=True)[0]


def halved(folder: Path) -> Path:
    """The target in float16."""
    shutil.copytree(DEMO / "target", folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: each.half() for name, each in weights.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    return folder


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_the_tokens_of_the_checkpoint(kind, tmp_path):
    folder = DEMO / "target" if kind == "BF16" else halved(tmp_path / "halved")
    file = write_gguf(folder, tmp_path / "x.gguf", kind)
    wanted = tokens_of(folder)
    assert tokens_of(file, NGRAM) == wanted
    if kind == "BF16":  # ranks cut what is unpacked, of either kind
        assert tokens_of(file, NGRAM, tensor_parallel_size=2) == tokens_of(
            folder, tensor_parallel_size=2
        )


def test_a_draft_model(tmp_path):
    file = write_gguf(DEMO / "draft", tmp_path / "x.gguf", "Q8_0")
    section = {"decoding_type": "DraftTarget", "speculative_model": str(file), "max_draft_len": 3}
    wanted = tokens_of(DEMO / "target")
    assert tokens_of(DEMO / "target", section) == wanted
    target = write_gguf(DEMO / "target", tmp_path / "y.gguf", "Q4_0")
    assert tokens_of(target, section) == tokens_of(target)


def test_llm(tmp_path):
    file = write_gguf(DEMO / "target", tmp_path / "x.gguf", "BF16")
    greedy = SamplingParams(max_tokens=16, temperature=0.0)
    options = {"executor": "local", "num_kv_blocks": 256}
    prompt = "def total(values):\n"
    with LLM(str(DEMO / "target"), **options) as llm:
        ids = llm.generate([prompt], greedy, use_tqdm=False)[0].prompt_token_ids
        wanted = llm.generate([ids], greedy, use_tqdm=False)[0].outputs[0]
    with LLM(str(file), speculative_config=NGRAM, **options) as llm:
        found = llm.generate([ids], greedy, use_tqdm=False)[0].outputs[0]
        text = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].text
        answer = llm.chat([{"role": "user", "content": "Add two numbers."}], greedy)
    assert (found.token_ids, found.text) == (wanted.token_ids, wanted.text)
    assert text
    assert answer
    with LLM(str(file), tokenizer=str(DEMO / "target"), **options) as llm:
        assert llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].text == wanted.text


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_quantised_file_is_its_dequantised_checkpoint(kind, tmp_path, monkeypatch):
    number = gguf.GGMLQuantizationType[kind]
    folder = Path(shutil.copytree(DEMO / "target", tmp_path / "dequantised"))
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.dim() > 1:
            codes = gguf.quants.quantize(tensor.float().numpy(), number)
            weights[name] = torch.from_numpy(gguf.quants.dequantize(codes, number)).bfloat16()
    save_file(weights, folder / "model.safetensors")
    file = write_gguf(DEMO / "target", tmp_path / "x.gguf", kind)
    wanted, wanted_of_two = tokens_of(folder), tokens_of(folder, tensor_parallel_size=2)
    assert tokens_of(file, keep_quantised="off") == wanted
    monkeypatch.setattr(quantised, "FEWEST_CODED", 0)
    monkeypatch.setenv(VARIABLE, "avx512_bf16")
    assert tokens_of(file, NGRAM) == wanted
    assert tokens_of(file, TREE) == wanted
    assert tokens_of(file, NGRAM, tensor_parallel_size=2) == wanted_of_two


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1"])
def test_the_weights_of_a_file_stay_quantised_where_that_is_faster(kind, tmp_path, monkeypatch):
    file = write_gguf(DEMO / "target", tmp_path / "x.gguf", kind)
    folder, alone = Path(local_folder(str(file))), Collective.single()
    config, info = read_model(folder, 1)
    for capability, keeps, fewest, is_kept in (
        ("avx512_bf16", True, 0, True),
        ("avx512_bf16", True, quantised.FEWEST_CODED, False),
        ("avx512_bf16", False, 0, False),
        ("avx2", True, 0, False),
    ):
        monkeypatch.setenv(VARIABLE, capability)
        monkeypatch.setattr(quantised, "FEWEST_CODED", fewest)
        model = load_model(folder, device=CPU, collective=alone, keeps_quantised=keeps)
        decoder = model.runner.model
        products = [decoder.unembed, *(each.mlp.down for each in decoder.layers)]
        assert {isinstance(each, CodedProjection) for each in products} == {is_kept}
        wish = "auto" if keeps else "off"
        said = check(model=str(file), device="cpu", keep_quantised=wish)["GGUF file"]
        assert ("stay quantised" in said, "are dequantised" in said) == (is_kept, not is_kept)
        if is_kept:  # as the estimate of memory says, but for the filling of rows to groups
            wanted = Serving().coded(folder, config, info)
            down = decoder.layers[0].mlp.down
            num_bytes = wanted["model.layers.0.mlp.down_proj.weight"] * down.columns * down.length
            assert num_bytes == down.num_bytes
    file.unlink()  # the folder serves without it
    monkeypatch.setenv(VARIABLE, "avx512_bf16")
    model = load_model(folder, device=CPU, collective=alone)
    assert not isinstance(model.runner.model.unembed, CodedProjection)


def check(**config):
    return preflight(EngineConfig.load({"executor": "local", **config}))


def test_the_check_names_file_and_size(tmp_path):
    file = write_gguf(DEMO / "target", tmp_path / "x.gguf", "Q8_0")
    facts = check(model=str(file))
    assert facts["GGUF file"].startswith(f"{file}; unpacked, its weights take 0.02 GiB")
    config = EngineConfig.load({"model": str(file)})
    assert config.model_name == "x.gguf"


def test_a_draft_model_of_another_vocabulary(tmp_path):
    file = write_gguf(DEMO / "draft", tmp_path / "x.gguf")
    section = {"decoding_type": "DraftTarget", "speculative_model": str(file)}
    stored = json.loads((DEMO / "draft" / "tokenizer.json").read_text())
    tokens = [token for token, _ in sorted(stored["model"]["vocab"].items(), key=lambda x: x[1])]
    tokens[100], tokens[101] = tokens[101], tokens[100]
    check(model=str(DEMO / "target"), speculative_config=section)
    keys = {"tokenizer.ggml.tokens": tokens}
    other = write_gguf(DEMO / "draft", tmp_path / "y.gguf", keys=keys)
    with pytest.raises(ConfigError, match=r"^speculative_config.speculative_model: .*2 of 4096"):
        check(
            model=str(DEMO / "target"),
            speculative_config={**section, "speculative_model": str(other)},
        )


def test_damage_is_found_by_its_field(tmp_path):
    file = write_gguf(DEMO / "draft", tmp_path / "x.gguf")
    file.write_bytes(file.read_bytes()[:-100])
    section = {"decoding_type": "DraftTarget", "speculative_model": str(file)}
    for field, config in (
        ("model", {"model": str(file)}),
        (
            "speculative_config.speculative_model",
            {"model": str(DEMO / "target"), "speculative_config": section},
        ),
    ):
        with pytest.raises(CheckpointError, match=f"^{field}: .*may be truncated") as caught:
            check(**config)
        assert caught.value.field == field


def test_a_head_is_no_gguf_file(tmp_path):
    file = write_gguf(DEMO / "draft", tmp_path / "x.gguf")
    section = {"decoding_type": "Medusa", "speculative_model": str(file)}
    with pytest.raises(CheckpointError, match="heads are folders; a GGUF file is a target or a"):
        check(model=str(DEMO / "target"), speculative_config=section)
