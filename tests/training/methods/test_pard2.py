"""PARD-2: every row against a forward of its own, what is served, what it starts from."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.config import PARD2Config
from outrider.drafters.heads.protocol import TargetFacts
from outrider.drafters.registry import check_head
from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.drafts import drafts_seen
from outrider.tests.helpers.eagle import PROMPTS
from outrider.tests.helpers.eagle_training import loaded
from outrider.tests.helpers.engines import check_plain_tokens
from outrider.tests.helpers.models import write_guessable
from outrider.tests.helpers.pard2 import Reference, write_pard2
from outrider.training.methods.draft import PARD2Method
from outrider.training.options import PARD2Options
from outrider.training.protocol import FrozenTarget, Windows

from ..conftest import VOCAB_SIZE

MASK = 39
SMALL = {"hidden_size": 32, "num_layers": 1, "num_attention_heads": 4, "max_draft_len": 4}


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("six") / "target"
    return write_guessable(folder, bos_token_id=0, eos_token_id=1)


def made(target, **options) -> PARD2Method:
    torch.manual_seed(1)
    method = PARD2Method(PARD2Options(mask_token_id=MASK, **options), target)
    with torch.no_grad():
        for weight in method.module.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return method


@torch.no_grad()
def test_loss_and_counts(target):
    layers, scale = (2, 0, -2), 0.3
    method = made(target, num_depths=3, max_draft_len=4, layers=layers, scale=scale)
    torch.manual_seed(2)
    given = Windows(
        torch.randint(0, VOCAB_SIZE - 1, (2, 9)),
        torch.tensor([[1.0] * 9, [0, 0, 1, 1, 0.5, 1, 0, 1, 1]]),
    )
    found = method.loss(given, target.states(given.tokens, method.capture), target)
    theirs = target.model(input_ids=given.tokens, output_hidden_states=True)
    features = torch.cat([theirs.hidden_states[layer] for layer in layers], dim=-1)
    said = theirs.logits.double().softmax(-1)
    loss, total, agreed, judged = 0.0, 0.0, [0] * 4, [0] * 4
    so_far = torch.ones(2, 9, dtype=torch.bool)
    table = method.model.get_input_embeddings()
    for depth in range(4):
        for window in range(2):
            for anchor in range(8 - depth):
                text = given.tokens[window]
                ids = torch.tensor([*text[: anchor + 1].tolist(), *[MASK] * depth])
                read = torch.cat([torch.zeros_like(features[0, :1]), features[window, :anchor]])
                read = torch.cat([read, read[-1:].expand(depth, -1)])
                rows = table(ids) + scale * (read @ method.projection.weight.T)
                row = method.model(inputs_embeds=rows[None]).logits[0, -1].double()
                counts = float(given.weights[window, anchor + depth + 1])
                lesson = 0.5 * said[window, anchor + depth]
                best = int(said[window, anchor + depth].argmax())
                lesson[best] += 0.5
                if depth < 3:
                    gone = range(anchor, anchor + depth)
                    reached = counts * math.prod(float(said[window, i, text[i + 1]]) for i in gone)
                    loss -= reached * float(lesson @ row.log_softmax(-1))
                    total += reached
                so_far[window, anchor] &= int(row.argmax()) == best
                if counts > 0:
                    judged[depth] += 1
                    agreed[depth] += int(so_far[window, anchor])
    assert float(found.loss) == pytest.approx(loss / total, rel=1e-4)
    assert found.num_agreed.tolist() == agreed
    assert found.num_judged.tolist() == judged


def learn(method: PARD2Method, target: FrozenTarget, num_steps: int) -> tuple[float, float]:
    """Losses before and after."""
    torch.manual_seed(5)
    optimizer, found = torch.optim.AdamW(method.module.parameters(), lr=5e-3), []
    for _ in range(num_steps):
        tokens = torch.randint(0, target.facts.vocab_size - 1, (8, 16))
        states = target.states(tokens, method.capture)
        optimizer.zero_grad()
        loss = method.loss(Windows(tokens, torch.ones(8, 16)), states, target).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found[0], found[-1]


def test_the_engine_drafts_what_training_saw(six, tmp_path, monkeypatch):
    """A few steps, then served: drafts are the equations', tokens those of no drafter."""
    target, folder = loaded(six), tmp_path / "head"
    torch.manual_seed(0)
    method = PARD2Method(PARD2Options(mask_token_id=95, layout="reference", **SMALL), target)
    before, after = learn(method, target, 60)
    assert after < 0.9 * before
    method.export(folder)
    section = {"decoding_type": "PARD2", "speculative_model": str(folder), "max_draft_len": 4}
    reference = Reference(six, str(folder))
    seen, _ = drafts_seen(monkeypatch, six, section, PROMPTS, allow_pickle=True)
    for text, tokens, _ in seen:
        assert tokens == reference.chain(text, len(tokens))
    check_plain_tokens(six, section, allow_pickle=True)
    (folder / "warp_model.safetensors").write_bytes(b"of a run before")
    method.export(folder)
    assert not (folder / "warp_model.safetensors").exists()


@pytest.mark.parametrize("layout", ["safetensors", "reference"])
def test_files(target, tmp_path, layout):
    method = made(target, layers=(0, -1), hidden_size=24, num_attention_heads=2, layout=layout)
    method.export(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored | {
        "pard2": True, "spd_type": "pard2", "pard2_scale": 0.02, "pard2_proj_bias": False,
        "pard2_target_layers": [0, 2], "pard2_target_dim": 64, "pard_token": MASK,
    } == stored  # fmt: skip
    ends = {"safetensors": (".safetensors", load_file), "reference": (".bin", torch.load)}
    end, load = ends[layout]
    assert load(tmp_path / f"warp_model{end}")["target_proj.weight"].shape == (24, 64)
    assert not [*tmp_path.glob("model.partial")]
    assert len([*tmp_path.glob("warp_model*")]) == 1
    assert "target_proj.weight" not in load_file(tmp_path / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)  # as any other
    torch.testing.assert_close(model.state_dict(), method.model.state_dict())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_published_model_goes_on(six, tmp_path, kind):
    """What it reads, its factor, its mask and its projection stay."""
    target = loaded(six)
    for_target = {"vocab_size": 96}
    before = trimmed(Path(write_pard2(tmp_path / "first", six, kind, pickled=False)), for_target)
    method = PARD2Method(PARD2Options(init=before), target)
    method.prepare(torch.ones(96, dtype=torch.int64))
    method.export(tmp_path / "second")
    first, second = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second")
    )
    for key in ("pard_token", "pard2_scale", "pard2_proj_bias", "model_type"):
        assert first[key] == second[key], key
    counts = {6: 6, -1: 6, 2: 2, 0: 0, -4: 3}
    assert second["pard2_target_layers"] == [counts[i] for i in first["pard2_target_layers"]]
    for name in ("model", "warp_model"):
        files = [load_file(tmp_path / each / f"{name}.safetensors") for each in ("first", "second")]
        torch.testing.assert_close(files[1], files[0])
    facts = TargetFacts(64, 96, 6, torch.float32, torch.device("cpu"))
    check_head(PARD2Config(speculative_model=str(tmp_path / "second")), facts)


def trimmed(folder: Path, sizes: dict[str, int]) -> Path:
    """The model of a folder with as many tokens as the target."""
    stored = json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(sizes["vocab_size"])
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(stored | sizes))
    return folder


def plain(folder: Path, kind: str = "llama", vocab_size: int = VOCAB_SIZE, **keys) -> Path:
    config = AutoConfig.for_model(
        kind, vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, **keys,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_plain_model_begins_with_a_new_projection(target, tmp_path):
    folder = plain(tmp_path / "plain", "qwen2", pard_token=7)
    method = PARD2Method(PARD2Options(init=folder, layers=(1,), scale=0.5), target)
    method.prepare(torch.zeros(VOCAB_SIZE, dtype=torch.int64))
    method.export(tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (stored["pard_token"], stored["pard2_target_layers"]) == (7, [1])
    assert (stored["pard2_scale"], stored["model_type"]) == (0.5, "qwen2")


@pytest.mark.parametrize("kind", ["gemma2", "qwen3"])
def test_targets_of_other_kinds_get_a_llama(tmp_path, kind):
    folder = plain(tmp_path / "target", kind, use_sliding_window=kind == "qwen3")
    target = FrozenTarget(folder, torch.device("cpu"))
    method = PARD2Method(PARD2Options(mask_token_id=MASK), target)
    method.export(tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["model_type"] == ("qwen3" if kind == "qwen3" else "llama")
    check_head(PARD2Config(speculative_model=str(tmp_path / "out")), target.facts)


def test_what_does_not_fit_is_named(target, six, tmp_path):
    def build(**options):
        return PARD2Method(PARD2Options(**options), target)

    with pytest.raises(ConfigError, match=r"layers: \[0, 3\] are not states of a target of 2 lay"):
        build(layers=(0, 3))
    with pytest.raises(ConfigError, match="mask_token_id: 40 exceeds the target's 40 tokens"):
        build(mask_token_id=VOCAB_SIZE)
    for folder, message in (
        (tmp_path / "none", "is not a folder"),
        (plain(tmp_path / "gemma2", "gemma2"), "model_type.*gemma2.*llama, qwen2, qwen3"),
        (plain(tmp_path / "bias", mlp_bias=True), "mlp_bias.*True"),
        (plain(tmp_path / "act", hidden_act="gelu"), "hidden_act.*gelu"),
        (plain(tmp_path / "vocabulary", vocab_size=41), "has 41 tokens, the target has 40"),
        (Path(write_pard2(tmp_path / "other", six, pickled=False)), r"\[64, 64\], expected \[64,"),
    ):
        with pytest.raises(CheckpointError, match=f"init: .*{message}") as caught:
            build(init=folder)
        assert caught.value.field == "init"
