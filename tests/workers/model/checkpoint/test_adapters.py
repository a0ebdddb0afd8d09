"""Adapters' folders: what is read as PEFT reads it, and what is refused by key or tensor."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import CheckpointError
from outrider.tests.helpers.adapters import write_adapter
from outrider.workers.model.bridge import build_meta
from outrider.workers.model.checkpoint.adapters import Adapter, AdapterConfig, open_adapters
from outrider.workers.model.info import read_model

Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def original(tiny, tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("adapter") / "a", tiny.target)


@pytest.fixture(scope="module")
def model(tiny):
    config, info = read_model(Path(tiny.target))
    return build_meta(config, info.dtype)


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "a")


def change(folder, **keys):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def change_tensors(folder, edit):
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def test_ranks_and_scales_by_pattern(folder):
    """The first pattern that a whole ending of the name matches, as in PEFT."""
    change(
        folder, r=8, lora_alpha=16, target_modules=".*_proj",
        rank_pattern={"o_proj": 2, r"layers\.1\.self_attn\.q_proj": 4},
        alpha_pattern={"v_proj": 1, "proj": 3},
    )  # fmt: skip
    config = AdapterConfig.read(folder)
    assert config.max_rank == 8
    assert [config.rank_of(name) for name in (Q0, Q0.replace("0", "1"), "a.o_proj")] == [8, 4, 2]
    assert [config.scale_of(name) for name in (Q0, "a.v_proj", "a.qkv_proj")] == [2, 1 / 8, 2]
    change(folder, use_rslora=True)
    assert AdapterConfig.read(folder).scale_of("a.o_proj") == 16 / math.sqrt(2)


@pytest.mark.parametrize(
    ("targets", "has"),
    [
        (["q_proj", "self_attn.o_proj"], (True, True, False)),
        (r".*\.(q_proj|proj)", (True, False, False)),
        ("all-linear", (True, True, True)),
    ],
)
def test_targets(folder, targets, has):
    change(folder, target_modules=targets)
    config = AdapterConfig.read(folder)
    names = (Q0, "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.xq_proj")
    assert tuple(map(config.has_target, names)) == has


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"use_dora": True}, "use_dora: True is not supported: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: "),
        ({"bias": "all"}, "bias: expected none, got 'all'"),
        ({"lora_bias": True}, "lora_bias: "),
        ({"trainable_token_indices": [1]}, "trainable_token_indices: "),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters: "),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: "),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4' changes"),
        ({"peft_type": "IA3"}, "peft_type: expected LORA, got 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type: expected CAUSAL_LM"),
        ({"use_new_trick": True}, "use_new_trick: an unknown key, set to True"),
        ({"r": 0}, "r: expected a whole number above 0, got 0"),
        ({"lora_alpha": "8"}, "lora_alpha: expected a number above 0, got '8'"),
        ({"lora_alpha": math.inf}, "lora_alpha: expected a number above 0, got inf"),
        ({"lora_alpha": 10**400}, r"lora_alpha: expected a number above 0, got 10+\.\.\.0+$"),
        ({"rank_pattern": [1]}, r"rank_pattern: expected a mapping, got \[1\]"),
        ({"alpha_pattern": {"(": 1}}, r"alpha_pattern: '\(' is no regular expression: missing"),
        ({"target_modules": "*_proj"}, r"target_modules: '\*_proj' is no regular expression: noth"),
        ({"target_modules": None}, "target_modules: expected names of modules"),
        ({"target_modules": ["q_proj"]}, r"tensor '.*_proj.lora_A' is not of target_modules"),
    ],
)
def test_what_is_not_served_is_refused_by_key(folder, keys, match):
    change(folder, **keys)
    with pytest.raises(CheckpointError, match=f"^lora_modules: 'x': .*{match}") as caught:
        open_adapters([("x", str(folder))])
    assert caught.value.field == "lora_modules"


@pytest.mark.parametrize(
    "keys",
    [
        {"use_dora": False, "modules_to_save": None, "layer_replication": None, "new": None},
        {"init_lora_weights": True, "inference_mode": True, "lora_dropout": 0.1, "revision": "x"},
        {"init_lora_weights": "gaussian", "loftq_config": {}, "layers_to_transform": [0, 1]},
    ],
)
def test_keys_of_training_change_nothing(folder, model, keys):
    change(folder, **keys)
    Adapter.open("x", folder).fit(model)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "is no low-rank matrix"),
        (f"base_model.model.{Q0}.lora_magnitude_vector", "is no low-rank matrix"),
        (f"base_model.model.{Q0}x_proj.lora_A.weight", f"tensor '{Q0}x_proj.lora_B' is missing"),
    ],
)
def test_tensors_that_are_none_of_linears(folder, name, match):
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(4, 4)}))
    with pytest.raises(CheckpointError, match=match):
        Adapter.open("x", folder)


def test_tensors_of_another_model(folder, model):
    def put(name, *shape):
        def edit(tensors):
            tensors[f"base_model.model.{name}.weight"] = torch.zeros(shape)

        return edit

    Adapter.open("x", folder).fit(model)
    change_tensors(folder, put(f"{Q0}.lora_A", 4, 65))
    with pytest.raises(CheckpointError, match=rf"'x': tensor '{Q0}.lora_A' has shape \[4, 65\]"):
        Adapter.open("x", folder).fit(model)
    change_tensors(folder, put(f"{Q0}.lora_A", 5, 64))
    with pytest.raises(CheckpointError, match=r"the model and r want \[4, 64\]"):
        Adapter.open("x", folder).fit(model)
    change_tensors(folder, put(f"{Q0}.lora_A", 4, 64))
    for key, shape in (("A", (4, 64)), ("B", (64, 4))):
        change_tensors(folder, put(f"model.layers.7.self_attn.q_proj.lora_{key}", *shape))
    with pytest.raises(CheckpointError, match=r"layers.7.*: the module is not in the model"):
        Adapter.open("x", folder).fit(model)


def test_tensors_that_are_missing(folder, model):
    def drop(tensors):
        for key in ("A", "B"):
            del tensors[f"base_model.model.{Q0}.lora_{key}.weight"]

    change_tensors(folder, drop)
    with pytest.raises(CheckpointError, match=rf"tensor '{Q0}.lora_A' is missing"):
        Adapter.open("x", folder).fit(model)
    change(folder, layers_to_transform=[1])  # some layers have none
    Adapter.open("x", folder).fit(model)


def test_folders_that_hold_no_adapter(folder, tiny):
    for path, match in ((folder / "no", "does not exist"), (tiny.target, "no adapter_config.json")):
        with pytest.raises(CheckpointError, match=match):
            open_adapters([("x", str(path))])
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="it may be truncated"):
        Adapter.open("x", folder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"no adapter_model.safetensors; .* is pickled"):
        Adapter.open("x", folder)
