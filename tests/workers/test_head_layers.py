"""A head's layers on the operations: drafts like the modules', and modules where they differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.config import DFlashConfig, DSparkConfig, Eagle3Config, EagleConfig
from outrider.tests.helpers.dflash import write_kind
from outrider.tests.helpers.eagle import LLAMA4_ONE
from outrider.tests.helpers.head_files import eagle_tensors, write_eagle
from outrider.tests.helpers.models import write_guessable
from outrider.workers import head_layers

CASES = {
    "one": (1, {}),
    "one-norms": (1, {"para_norm": True, "fc_bias": False, "num_layers": 2}),
    "one-llama4": (1, LLAMA4_ONE | {"num_layers": 2}),
    "three": (3, {"draft_vocab": 80}),
    "three-norms": (
        3,
        {"qk_norm": True, "fc_norm": True, "config": {"norm_before_residual": True}},
    ),
    "three-deep": (3, {"num_layers": 2, "norm_before_fc": True, "layer": "layers.0"}),
}
SHAPES = {
    "chain": {"max_draft_len": 4},
    "fixed": {"eagle_choices": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]], "max_draft_len": 3},
    # 80 rows: more than one word of ancestor bits
    "dynamic": {
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 10,
        "max_draft_len": 8,
        "max_total_draft_tokens": 40,
    },
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> str:
    return write_guessable(tmp_path_factory.mktemp("six") / "target")


@pytest.fixture(scope="module")
def heads(six, tmp_path_factory) -> dict[str, tuple[type[EagleConfig], str]]:
    """By case: section, folder."""
    made = {}
    for name, (version, options) in CASES.items():
        config, tensors = eagle_tensors(six, version, **options)
        folder = write_eagle(tmp_path_factory.mktemp("head") / name, config, tensors)
        made[name] = (EagleConfig if version == 1 else Eagle3Config), folder
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_fused_layers_draft_what_modules_do(six, heads, head_drafts, case, shape):
    section, folder = heads[case]
    config = section(speculative_model=folder, **SHAPES[shape])
    fused, found = head_drafts(six, config)
    assert fused.module_reason == ""
    names = [name for name, _ in fused.head.module.named_parameters()]
    assert names
    assert not [name for name in names if "self_attn" in name or "mlp" in name]  # no second copy
    modules, wanted = head_drafts(six, config, dense=True)
    assert modules.module_reason
    assert found == wanted
    assert all(start[-1] > 0 for _, _, start in found)


BLOCK = {"max_draft_len": 4, "target_layer_ids": [1, 2, 4]}


def test_a_blocks_layers_draft_what_modules_do(six, head_drafts, tmp_path, monkeypatch, caplog):
    """And are read again where they differ, since the family has used their weights up."""
    config = DSparkConfig(speculative_model=write_kind(tmp_path, six, "markov"), **BLOCK)
    with monkeypatch.context() as patch:
        patch.setattr(head_layers, "_obstacle", lambda module: "modules alone")
        modules, wanted = head_drafts(six, config)
    assert modules.module_reason == "modules alone"
    fused, found = head_drafts(six, config)
    assert fused.module_reason == ""
    names = [name for name, _ in fused.head.module.named_parameters()]
    assert names
    assert not [name for name in names if "self_attn" in name or "mlp" in name]
    assert found == wanted
    assert all(start[-1] > 0 for _, _, start in found)
    monkeypatch.setattr(head_layers, "mismatch", lambda *_: "relative error 9")
    with caplog.at_level("INFO"):
        head, found = head_drafts(six, config)
    assert head.module_reason == "its layers differ from their modules: relative error 9"
    assert head.module_reason in caplog.text
    assert found == wanted


def test_a_block_of_windows_stays_modules(six, head_drafts, tmp_path):
    config = DFlashConfig(speculative_model=write_kind(tmp_path, six, "plain"), **BLOCK)
    head, found = head_drafts(six, config)
    assert head.module_reason == "its layers see different rows"
    assert all(start[-1] > 0 for _, _, start in found)


def test_layers_that_differ_stay_modules(six, heads, head_drafts, monkeypatch, caplog):
    section, folder = heads["three"]
    config = section(speculative_model=folder, **SHAPES["chain"])
    _, wanted = head_drafts(six, config, dense=True)
    described = head_layers.describe

    def wrong(module):
        return replace(described(module), residual_scale=0.5)

    monkeypatch.setattr(head_layers, "describe", wrong)
    with torch.no_grad(), caplog.at_level("INFO"):
        head, found = head_drafts(six, config)
    assert "layer 0 differs from its module" in head.module_reason
    assert head.module_reason in caplog.text
    assert found == wanted
