"""MTP's training: what it sees is what is served; its files are the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.config.strict import parse
from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.drafts import drafts_seen
from outrider.tests.helpers.eagle_training import WEIGHTS, losses_of, slow_losses
from outrider.tests.helpers.mtp import Made, Reference
from outrider.training.methods import mtp
from outrider.training.methods.unroll import passes
from outrider.training.options import MTPOptions
from outrider.training.protocol import FrozenTarget, Windows

PROMPTS = [[7, 3, 50, 21, 9, 4, 33, 80, 61], [5, 6], [11, 12, 13, 90, 14, 15, 16]]
TEXT = [7, 3, 50, 21, 9, 4, 33, 80, 61, 5, 90]
KINDS = ("llama", "deepseek", "qwen")


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Targets by kind, one with a module of its own beside it."""
    made = {kind: Made(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}
    return {kind: Path(each.folder) for kind, each in made.items()}


def loaded(folder) -> FrozenTarget:
    return FrozenTarget(folder, torch.device("cpu"))


def method_of(target, **options):
    torch.manual_seed(0)
    return mtp.MTPMethod(parse(MTPOptions, options), target)


@torch.no_grad()
def guesses(method, target, text, draft) -> list[int]:
    """What training sees after `text`, pass by pass, where the draft was as given."""
    tokens = torch.tensor([[*text, *draft]])
    features = target.states(tokens, method.capture).hidden[method.capture[0]]
    made = passes(method.module, features, target.embed(tokens), len(draft))
    return [int(target.unembed(read[0, len(text) - 2]).argmax()) for _, read in made]


@pytest.mark.parametrize(
    ("kind", "recycle"), [("llama", "pre_norm"), ("deepseek", "post_norm"), ("qwen", "post_norm")]
)
def test_the_engine_drafts_what_training_saw(plain, kind, recycle, tmp_path, monkeypatch):
    target = loaded(plain[kind])
    method = method_of(target, recycle=recycle)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        method.module.eh_proj.weight[:, :32] += 2 * torch.eye(32)
        for weight in method.module.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    method.export(tmp_path)
    section = {"decoding_type": "MTP", "speculative_model": str(tmp_path), "max_draft_len": 3}
    fields = section | {"recycle": recycle}
    seen, stats = drafts_seen(monkeypatch, str(plain[kind]), fields, PROMPTS)
    assert stats["drafters"]["mtp"]["num_acc_tokens"] > 0
    drafted = set()
    for text, tokens, _ in seen[:15]:
        assert guesses(method, target, text, tokens) == tokens
        drafted |= set(tokens)
    assert len(drafted) > 8


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_a_few_steps_lower_the_loss(plain, kind):
    target = loaded(plain[kind])
    method = method_of(target, num_passes=2)
    optimizer = torch.optim.AdamW(method.module.parameters(), lr=3e-3)
    tokens = torch.randint(2, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    windows, found = Windows(tokens, torch.ones(2, 20)), []
    for _ in range(20):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(method.loss(windows, target.states(tokens, method.capture), target))
        optimizer.zero_grad()
        found[-1].loss.backward()
        optimizer.step()
    assert found[-1].loss < 0.8 * found[0].loss
    assert found[-1].num_agreed[0] > found[0].num_agreed[0] + 10


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_what_was_trained(plain, kind, tmp_path):
    target = loaded(plain[kind])
    method = method_of(target)
    method.export(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    theirs = load_file(plain[kind] / "model.safetensors")
    around, stem, layer = {"enorm", "hnorm", "eh_proj", "shared_head.norm"}, "model.layers.2.", ""
    if kind == "qwen":
        around = {"pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"}
        stem, layer = "mtp.", "layers.0."
    last = {name for name in theirs if name.startswith("model.layers.1.")}
    ours = {name: name.replace("model.layers.1.", stem + layer) for name in last}
    assert set(tensors) == {*(f"{stem}{name}.weight" for name in around), *ours.values()}
    for name in last:  # it begins as the target's last layer
        assert torch.equal(tensors[ours[name]], theirs[name])
    norm = stem + ("norm.weight" if kind == "qwen" else "shared_head.norm.weight")
    assert torch.equal(tensors[norm], theirs["model.norm.weight"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_nextn_predict_layers"], config["num_hidden_layers"]) == (1, 2)
    again = method_of(target, init=str(tmp_path)).module.state_dict()
    for name, tensor in method.module.state_dict().items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "embedding", "output"),
    [
        (
            "deepseek",
            "model.layers.2.embed_tokens.weight",
            "model.layers.2.shared_head.head.weight",
        ),
        ("qwen", "model.embed_tokens.weight", "lm_head.weight"),
    ],
)
def test_copies_of_the_targets_ends(plain, kind, embedding, output, tmp_path):
    """Engines that load a module by itself ask for them; here they are checked and left aside."""
    target = loaded(plain[kind])
    method_of(target, copies=True).export(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    theirs = load_file(plain[kind] / "model.safetensors")
    assert torch.equal(tensors[embedding], theirs["model.embed_tokens.weight"])
    torch.testing.assert_close(tensors[output], theirs["lm_head.weight"])
    method_of(target, init=str(tmp_path))


@pytest.mark.parametrize("recycle", ["post_norm", "pre_norm"])
def test_the_loss_is_that_of_the_equations(tmp_path, recycle):
    made = Made(tmp_path, "deepseek")
    options = {"num_passes": 3, "argmax_weight": 0.3, "pass_decay": 0.7, "recycle": recycle}
    method = method_of(loaded(Path(made.folder)), init=made.alone, **options)
    reference = Reference(made, pre_norm=recycle == "pre_norm")
    reference.model = made.target
    loss, agreed, judged = slow_losses(reference, TEXT, WEIGHTS, parse(MTPOptions, options))
    padded = [[*TEXT, 0, 0], [*TEXT, 4, 9]]  # of weight 0: what it is does not count
    found = losses_of(method, loaded(Path(made.folder)), padded, [[*WEIGHTS, 0, 0]] * 2)
    torch.testing.assert_close(found.loss.item(), loss, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        found = losses_of(method, loaded(Path(made.folder)), padded, [[*WEIGHTS, 0, 0]] * 2)
    assert found.num_agreed[:3].tolist() == [2 * count for count in agreed]
    assert found.num_judged[:3].tolist() == [2 * count for count in judged]


def test_a_module_that_came_with_the_target_is_trained_on(plain):
    target = loaded(plain["qwen"])
    method = method_of(target, init=str(plain["qwen"]))
    stored = load_file(plain["qwen"] / "model.safetensors")
    assert torch.equal(method.module.eh_proj.weight, stored["mtp.fc.weight"])
    assert all(weight.requires_grad for weight in method.module.parameters())


def test_what_does_not_fit_is_named(plain, tmp_path):
    target = loaded(plain["llama"])
    with pytest.raises(ConfigError, match="num_passes"):
        method_of(target, num_passes=0)
    with pytest.raises(ConfigError, match="head_dim"):
        method_of(target, head_dim=8)
    with pytest.raises(CheckpointError, match="init: .*lacks|init: .*holds no MTP") as caught:
        method_of(target, init=str(plain["llama"].parent / "plain"))
    assert caught.value.field == "init"
