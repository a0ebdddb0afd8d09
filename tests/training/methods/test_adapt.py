"""Heads that go on learning: what is written has the names, types and order of what was read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config.strict import parse
from outrider.drafters.heads.llama import halves, neighbours
from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.eagle import section as eagle_section
from outrider.tests.helpers.eagle_training import loaded
from outrider.tests.helpers.head_files import eagle_tensors, joined_first, write_eagle
from outrider.tests.helpers.mtp import Made
from outrider.training import state
from outrider.training.loop import train
from outrider.training.methods.unroll import AdaptMethod
from outrider.training.options import METHODS, AdaptOptions, TrainingOptions

TEXT = [7, 3, 50, 21, 9, 4, 33, 80, 61, 5, 90, 8, 2, 44, 7, 3]
EAGLES = {  # version, options of its tensors, keys of its section
    "eagle": (1, {}, {}),
    "eagle, two layers": (1, {"num_layers": 2, "final_norm": True, "draft_vocab": 40}, {}),
    "eagle3": (3, {"draft_vocab": 40}, {}),
    "eagle3, own embedding": (3, {"embed": True, "fc_norm": True, "norm_before_fc": True}, {}),
    "eagle3, pairs": (3, {"qk_norm": True}, {"rope_layout": "interleaved", "rope_theta": 500.0}),
    "eagle3, normed": (3, {}, {"norm_before_residual": True, "recycle": "post_norm"}),
}  # fmt: skip


LAYERS = {"config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}}  # the target has two


def options_of(tmp_path: Path, section: dict, **keys) -> AdaptOptions:
    file = tmp_path / "head.json"
    file.write_text(json.dumps({"speculative_config": section}))
    return parse(AdaptOptions, {"config": str(file), **keys})


def checked(method: AdaptMethod, target, before: Path, after: Path) -> None:
    """Unchanged, it is written as it was; a step of learning changes its weights alone."""
    method.prepare(torch.zeros(96, dtype=torch.int64))
    method.export(after)
    first = load_file(before / "model.safetensors")
    own = {name: tensor for name, tensor in first.items() if name in method._head.published()}
    second = load_file(after / "model.safetensors")
    assert second.keys() <= first.keys()
    for name, tensor in second.items():
        assert tensor.dtype == first[name].dtype, name
        assert torch.equal(tensor, first[name]), name
    assert own, "it has weights"
    from outrider.training.protocol import Windows

    windows = Windows(torch.tensor([TEXT]), torch.ones(1, len(TEXT)))
    states = target.states(windows.tokens, method.capture)
    losses = method.loss(windows, states, target)
    losses.loss.backward()
    learnt = {n for n, each in method.module.named_parameters() if each.grad is not None}
    assert learnt == {n for n, each in method.module.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for parameter in method.module.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    assert method.loss(windows, states, target).loss < losses.loss
    method.export(after)
    third = load_file(after / "model.safetensors")
    assert any(not torch.equal(tensor, second[name]) for name, tensor in third.items())
    config = json.loads((after / "config.json").read_text())
    assert config == json.loads((before / "config.json").read_text())


@pytest.mark.parametrize("case", EAGLES)
def test_eagle_goes_on(tiny, tmp_path, case):
    version, options, keys = EAGLES[case]
    config, tensors = eagle_tensors(tiny.target, version, **LAYERS, **options)
    tensors = {
        f"model.{name}" if "norm" in name and version == 1 else name: each.bfloat16()
        if "fc" in name
        else each
        for name, each in tensors.items()
    }
    before = Path(write_eagle(tmp_path / "before", config, tensors))
    section = {**eagle_section(str(before), **keys), "max_draft_len": 3}
    section["decoding_type"] = "Eagle3" if version == 3 else "Eagle"
    target = loaded(tiny.target)
    torch.manual_seed(0)
    method = AdaptMethod(options_of(tmp_path, section, num_passes=2), target)
    checked(method, target, before, tmp_path / "after")


def test_a_joined_first_layer_goes_on(tiny, tmp_path):
    config, tensors = eagle_tensors(tiny.target, 3, **LAYERS)
    before = Path(write_eagle(tmp_path / "before", config, joined_first(tensors)))
    section = {**eagle_section(str(before)), "decoding_type": "Eagle3"}
    target = loaded(tiny.target)
    method = AdaptMethod(options_of(tmp_path, section, num_passes=2), target)
    checked(method, target, before, tmp_path / "after")


@pytest.mark.parametrize("kind", ["llama", "qwen"])
@pytest.mark.parametrize("place", ["alone", "folder"])
def test_modules_go_on(tmp_path, kind, place):
    """Of a module in the target's own folder, it alone is written."""
    made = Made(tmp_path, kind)
    before = Path(getattr(made, place))
    target = loaded(str(before if place == "folder" else tmp_path / "plain"))
    section = {"decoding_type": "MTP", "max_draft_len": 3}
    if place == "alone":
        section["speculative_model"] = str(before)
    method = AdaptMethod(options_of(tmp_path, section, num_passes=2), target)
    checked(method, target, before, tmp_path / "after")
    stored = load_file(tmp_path / "after" / "model.safetensors")
    if place == "folder":
        assert stored.keys() <= made.extra.keys()


def test_pairs_are_turned_back():
    rows = torch.arange(48.0).reshape(24, 2)
    assert torch.equal(neighbours(halves(rows, 8), 8), rows)
    assert torch.equal(halves(neighbours(rows, 8), 8), rows)


def test_a_run_begins_where_the_last_one_ended(target_path, corpus, tmp_path):
    """The first evaluation is the head's own; the next one is better."""
    shared = {
        "target": target_path, "inputs": (corpus,), "window": 24, "batch": 4, "steps": 20,
        "eval_every": 20, "warmup": 2, "dtype": "float32", "threads": 1, "device": "cpu",
    }  # fmt: skip
    own = METHODS["eagle3"].options(layers=(0, 1, 1), num_passes=3, max_draft_len=4)
    first = train("eagle3", TrainingOptions(out=tmp_path / "first", **shared), own)
    section = {"decoding_type": "Eagle3", "speculative_model": str(tmp_path / "first")}
    again = options_of(tmp_path, section, num_passes=3, max_draft_len=4)
    settings = TrainingOptions(out=tmp_path / "second", muon_lr=1e-2, adam_lr=3e-3, **shared)
    second = train("adapt", settings, again)
    rows = [row for row in state.read_log(tmp_path / "second" / "log.jsonl") if "heldout" in row]
    assert rows[0]["heldout"]["text"]["acceptance"] == pytest.approx(
        list(first.scores["text"].acceptance)
    )
    assert rows[0]["heldout"]["text"]["loss"] == pytest.approx(first.scores["text"].loss, rel=1e-4)
    assert second.scores["text"].loss < first.scores["text"].loss


def test_what_cannot_go_on_is_refused(tiny, tmp_path):
    target = loaded(tiny.target)
    medusa = {"decoding_type": "Medusa", "speculative_model": "heads"}
    with pytest.raises(ConfigError, match="^config: .*0 heads that can go on") as caught:
        AdaptMethod(options_of(tmp_path, medusa), target)
    assert caught.value.field == "config"
    missing = {"decoding_type": "Eagle3", "speculative_model": str(tmp_path / "none")}
    with pytest.raises(CheckpointError, match="^config: .*none' is not a folder"):
        AdaptMethod(options_of(tmp_path, missing), target)
    config, tensors = eagle_tensors(tiny.target, 3, **LAYERS)
    write_eagle(tmp_path / "head", config, tensors)
    short = {name: each for name, each in tensors.items() if name != "fc.weight"}
    save_file(short, tmp_path / "head" / "model.safetensors")
    cut = {"decoding_type": "Eagle3", "speculative_model": str(tmp_path / "head")}
    with pytest.raises(CheckpointError, match=r"^config: .*fc\.weight"):
        AdaptMethod(options_of(tmp_path, cut), target)
    with pytest.raises(ConfigError, match="^config: "):
        AdaptMethod(parse(AdaptOptions, {"config": str(tmp_path / "no.json")}), target)
