"""Training of block drafters: the loss is the equations', what is learnt is what is served."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from outrider.config.strict import parse
from outrider.errors import ConfigError
from outrider.tests.helpers.dflash import Reference
from outrider.tests.helpers.drafts import drafts_seen
from outrider.tests.helpers.eagle_training import PROMPTS, WEIGHTS, loaded, losses_of
from outrider.training import state
from outrider.training.loop import train
from outrider.training.methods.dflash import DFlashMethod, DSparkMethod
from outrider.training.options import DFlashTrainOptions, DSparkTrainOptions, TrainingOptions

MASK = 95
LAYERS = (0, 1, 1)
TEXT = [7, 3, 50, 21, 9, 4, 33, 80, 61, 5, 90]
SIZES = {
    "num_layers": 2, "block_size": 4, "layers": LAYERS, "mask_token_id": MASK, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
}  # fmt: skip
KINDS = {
    "dflash": (DFlashMethod, DFlashTrainOptions, {}),
    "a part": (DFlashMethod, DFlashTrainOptions, {"layout": "speculators", "draft_vocab_size": 40}),
    "dspark": (DSparkMethod, DSparkTrainOptions, {"markov_rank": 8}),
    "dspark, a part": (
        DSparkMethod,
        DSparkTrainOptions,
        {"markov_rank": 8, "draft_vocab_size": 40, "sample_from_anchor": False},
    ),
}


def method_of(folder: str, kind: str, **options):
    torch.manual_seed(0)
    method, own, fields = KINDS[kind]
    made = method(parse(own, {**SIZES, **fields, **options}), loaded(folder))
    made.prepare(torch.arange(96) % 11)
    return made


def scramble(method) -> None:
    """Weights so large that every mistake shows."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in method.module.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.25 * noise if weight.dim() == 2 else 1 + 0.2 * noise)


def reference_of(folder: str, out, length: int) -> Reference:
    config = json.loads((out / "config.json").read_text())
    tensors = load_file(out / "model.safetensors")
    outputs = tuple(layer - 1 for layer in LAYERS)
    return Reference(folder, config, tensors, length, outputs=outputs)


@torch.no_grad()
def slow_losses(reference: Reference, options, num_anchors: int):
    """Loss and counts, one row at a time."""
    said = reference.model(torch.tensor([TEXT])).logits[0].double().softmax(-1)
    length, last = reference.length, len(TEXT) - 1
    anchors = torch.linspace(1, last - 1, num_anchors).round().long().tolist()
    total = {"cross": 0.0, "apart": 0.0, "sure": 0.0, "weight": 0.0}
    agreed, judged = [0] * length, [0] * length
    for anchor in anchors:
        text, reached, parts = TEXT[: anchor + 1], 1.0, []
        is_right = True
        for index in range(min(length, last - anchor)):
            path = TEXT[anchor + 1 : anchor + 1 + index]
            logs = reference.after(text, path).double()
            teacher, best = said[anchor + index], int(said[anchor + index].argmax())
            lesson = (1 - options.argmax_weight) * teacher
            lesson[best] += options.argmax_weight
            known = logs > -torch.inf
            chance = float(logs[best].exp())
            reached *= (1 - options.smoothing) * chance + options.smoothing
            found = {
                "reached": reached,
                "cross": -float((lesson * logs.clamp(min=-1e9))[known].sum()),
                "apart": float((lesson - logs.exp())[known].abs().sum()),
            }
            if "confidence_head.proj.weight" in reference.t:
                sure = reference.confidence(text, path)
                chance = float(torch.minimum(teacher, logs.exp()).sum())
                logs_of = torch.tensor([sure, 1 - sure], dtype=torch.float64).log()
                found["sure"] = -float(chance * logs_of[0] + (1 - chance) * logs_of[1])
            parts.append(found)
            weight = WEIGHTS[anchor + 1 + index]
            is_right &= int(logs.argmax()) == best
            judged[index] += weight > 0
            agreed[index] += weight > 0 and is_right
        for index, found in enumerate(parts):
            pace = sum(later["reached"] for later in parts[index:])
            weight = WEIGHTS[anchor + 1 + index] * pace
            total["weight"] += weight
            for name in ("cross", "apart", "sure"):
                total[name] += weight * found.get(name, 0.0)
    share = getattr(options, "distance_weight", 0.0)
    loss = (1 - share) * total["cross"] + share * total["apart"] + total["sure"]
    return loss / total["weight"], agreed, judged


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_equations(tiny, tmp_path, kind):
    own = {"num_anchors": 6, "argmax_weight": 0.3, "smoothing": 0.4}
    method = method_of(tiny.target, kind, **own)
    with torch.no_grad():
        for weight in method.module.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    method.export(tmp_path)
    reference = reference_of(tiny.target, tmp_path, 3 + method.module.options.from_anchor)
    loss, agreed, judged = slow_losses(reference, method._options, 6)
    with torch.no_grad():
        found = losses_of(method, loaded(tiny.target), [TEXT], [WEIGHTS])
    torch.testing.assert_close(found.loss.item(), loss, rtol=1e-4, atol=1e-4)
    assert found.num_agreed.tolist() == agreed
    assert found.num_judged.tolist() == judged


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_drafts_what_was_trained(tiny, tmp_path, monkeypatch, kind):
    """Chains of the exported files are those of the weights' equations."""
    method = method_of(tiny.target, kind)
    scramble(method)
    method.export(tmp_path)
    reference = reference_of(tiny.target, tmp_path, 3 + method.module.options.from_anchor)
    section = {
        "decoding_type": "DSpark" if kind.startswith("dspark") else "DFlash",
        "speculative_model": str(tmp_path),
    }
    seen, _ = drafts_seen(monkeypatch, tiny.target, section, PROMPTS, max_tokens=20)
    assert max(len(tokens) for _, tokens, _ in seen) == reference.length
    for text, tokens, _ in seen:
        assert tokens == reference.chain(text, len(tokens))


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_few_steps_lower_the_loss(tiny, kind):
    method, target = method_of(tiny.target, kind, num_anchors=16), loaded(tiny.target)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 95, (2, 24), generator=generator).tolist()
    optimizer = torch.optim.AdamW(method.module.parameters(), lr=5e-3)

    @torch.no_grad()
    def judged():
        return losses_of(method, target, tokens, [[1.0] * 24] * 2)

    before = judged()
    for _ in range(60):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = losses_of(method, target, tokens, [[1.0] * 24] * 2)
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
    after = judged()
    assert after.loss < 0.7 * before.loss
    assert after.num_agreed[0] > before.num_agreed[0] + 10
    assert after.num_agreed[2] > before.num_agreed[2] + 5
    assert not any(weight.grad is None for weight in method.module.parameters())


def test_anchors_are_drawn_where_text_counts(tiny):
    method = method_of(tiny.target, "dflash", num_anchors=4)
    weights = [[0.0] * 12 + [1.0] * 4, [1.0] * 16]
    target, drawn = loaded(tiny.target), set()
    tokens = torch.arange(2, 18).expand(2, -1).tolist()
    for seed in range(3):
        torch.manual_seed(seed)
        found = losses_of(method, target, tokens, weights)
        assert found.num_judged[0] >= 7, "the first window has three anchors before such tokens"
        torch.manual_seed(seed)
        again = losses_of(method, target, tokens, weights)
        assert torch.equal(again.loss, found.loss)
        drawn.add(found.loss.item())
    assert len(drawn) == 3


def test_a_resumed_run_equals_a_whole_one(target_path, corpus, tmp_path, monkeypatch):
    own = parse(DSparkTrainOptions, {"num_layers": 1, "block_size": 4, "num_anchors": 6})

    def options(name: str, **fields) -> TrainingOptions:
        return TrainingOptions(
            out=tmp_path / name, target=target_path, inputs=(corpus,), window=24, batch=4,
            micro_batch=2, steps=5, warmup=1, eval_every=5, eval_windows=4, dtype="float32",
            threads=1, device="cpu", **fields,
        )  # fmt: skip

    outcome = train("dspark", options("whole"), own)
    assert len(outcome.scores["text"].acceptance) == 4

    def append(path, row, old=state.append):
        old(path, row)
        if row["step"] == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(state, "append", append)
        assert not train("dspark", options("cut"), own).finished
    assert train("dspark", options("cut", resume=True), own).finished
    for file in ("model.safetensors", "config.json", "log.jsonl"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_options_that_do_not_fit_are_named(tiny):
    for options, message in (
        ({"mask_token_id": 96}, "mask_token_id: 96 exceeds the target's 96 tokens"),
        ({"layers": (0, 2)}, r"layers: inputs of layers \[0, 2\].*layers 0 to 1"),
        ({"draft_vocab_size": 40}, "layout: 'zlab' has no draft vocabulary"),
    ):
        with pytest.raises(ConfigError, match=message):
            method_of(tiny.target, "dflash", **options)
