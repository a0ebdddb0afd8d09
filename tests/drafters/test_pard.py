"""PARD against a plain forward of the same model over tokens and masks, and in an engine."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.config import EngineConfig
from outrider.drafters import draft_target
from outrider.engine.preflight import preflight
from outrider.errors import CheckpointError, ConfigError
from outrider.scheduler.types import Draft, DraftProbs, ints
from outrider.tests.helpers.verification import (
    RULES,
    distance_from_target,
    emission_law,
    random_target,
)

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts

VOCAB, MASK, LENGTH = 8, 7, 5
PROMPTS = random_prompts(8, VOCAB - 1)
SAMPLED = {"temperature": 0.9, "top_k": 6, "repetition_penalty": 1.1}
PREFIX = [int(token) for token in np.arange(40) % (VOCAB - 1)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, and a model that agrees with it where it reads no mask."""
    folder = tmp_path_factory.mktemp("pard")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=0, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "target")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.01)
    model.config.pard_token = MASK
    model.save_pretrained(folder / "pard")
    return {name: str(folder / name) for name in ("target", "pard")}


def section(models, **keys):
    keys = {"draft_timeout_s": 30, **keys} if keys.get("placement") != "colocated" else keys
    return {
        "decoding_type": "PARD",
        "speculative_model": models["pard"],
        "max_draft_len": LENGTH,
        **keys,
    }


def reference_rows(model, tokens, count):
    """Logits [count, vocab] of the tokens after `tokens`, all at once."""
    with torch.inference_mode():
        ids = torch.tensor([[*tokens, *[MASK] * (count - 1)]])
        return model(ids, use_cache=False).logits[0, -count:]


def rounds_of(monkeypatch, models, prompts, speculative, **options):
    """Every (text, draft) of an engine, and its drafter's statistics."""
    texts = {str(index): list(prompt) for index, prompt in enumerate(prompts)}
    seen = []
    propose, observe = draft_target.DraftTarget.propose, draft_target.DraftTarget.observe

    def spy_propose(self, batch, budgets):
        drafts = propose(self, batch, budgets)
        for name, draft in zip(batch.request_ids, drafts):
            if draft.num_nodes:
                seen.append((list(texts[name]), draft))
        return drafts

    def spy_observe(self, batch, verdict):
        observe(self, batch, verdict)
        for row, name in enumerate(batch.request_ids):
            texts[name] += verdict.tokens(row).tolist()

    sampling = options.pop("sampling", {})
    with monkeypatch.context() as patch:
        patch.setattr(draft_target.DraftTarget, "propose", spy_propose)
        patch.setattr(draft_target.DraftTarget, "observe", spy_observe)
        with engine_of(models["target"], speculative, **options) as engine:
            complete(engine, prompts, **sampling)
            (stats,) = engine.stats()["drafters"].values()
    assert stats["faults"] == 0
    return seen, stats


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_it_emits_the_plain_tokens(models, placement, size):
    plain = plain_outputs(models["target"], PROMPTS, {}, SAMPLED)
    options = {"tensor_parallel_size": size}
    with engine_of(models["target"], section(models, placement=placement), **options) as engine:
        for at_once in (1, 8) if size == 1 else (8,):
            for wanted, sampling in zip(plain, ({}, SAMPLED)):
                assert complete(engine, PROMPTS, at_once=at_once, **sampling)[0] == wanted
        (stats,) = engine.stats()["drafters"].values()
    assert stats["faults"] == 0
    assert stats["acc_tokens_per_pos"][1] > 0  # of a token behind a mask


@pytest.mark.parametrize("name", ["plain", "small steps", "shared prefix"])
def test_every_draft_is_that_of_a_forward_without_a_cache(monkeypatch, models, name):
    """Rows of masks, of rejected tokens and of evicted blocks would show in a later draft."""
    prompts, options = PROMPTS, {}
    if name == "small steps":
        options = {
            "num_kv_blocks": 14, "block_size": 8, "max_model_len": 96, "max_num_batched_tokens": 24
        }  # fmt: skip
    if name == "shared prefix":
        prompts = [[*PREFIX, *prompt] for prompt in PROMPTS]
        options = {"block_size": 8}
    model = AutoModelForCausalLM.from_pretrained(models["pard"], dtype=torch.float32)
    seen, stats = rounds_of(monkeypatch, models, prompts, section(models), **options)
    assert len(seen) > 50
    assert stats["num_acc_tokens"] > stats["num_acc_drafts"]
    for text, draft in seen:
        wanted = reference_rows(model, text, draft.num_nodes).argmax(1)
        assert draft.tokens.tolist() == wanted.tolist()


def test_probabilities_are_known_before_the_draw_and_keep_the_law(monkeypatch, models):
    """Row k's distribution has no drafted token in it; every rule is enumerated with them."""
    speculative = section(models, verification="rejection", probs_top=VOCAB, max_draft_len=3)
    model = AutoModelForCausalLM.from_pretrained(models["pard"], dtype=torch.float32)
    seen, _ = rounds_of(
        monkeypatch, models, PROMPTS, speculative, sampling={"temperature": 1.0, "max_tokens": 12}
    )
    assert any(draft.num_nodes == 3 for _, draft in seen)
    for text, draft in seen:
        found = np.zeros((draft.num_nodes, VOCAB))
        np.put_along_axis(found, draft.probs.ids, draft.probs.probs, axis=1)
        wanted = reference_rows(model, text, draft.num_nodes).softmax(1)
        np.testing.assert_allclose(found, wanted, atol=1e-5)

    vocab, length = 3, 4
    target = random_target(vocab, seed=2, sharpness=0.7)

    def drafts(prefix):
        rows = reference_rows(model, [1, *prefix], 2)[:, :vocab].double().softmax(1).numpy()
        ids, probs = np.tile(np.arange(vocab), (2, 1)), rows.astype(np.float32)
        for tokens in itertools.product(range(vocab), repeat=2):
            chance = float(np.prod(probs[[0, 1], tokens].astype(np.float64)))
            yield chance, Draft(ints(tokens), ints([-1, 0]), DraftProbs(ints(ids), probs))

    for outcomes in RULES.values():
        law = emission_law(outcomes, target, drafts, length)
        assert distance_from_target(law, target, length) < 1e-6


def test_a_chain_ends_where_it_is_unlikely(monkeypatch, models):
    model = AutoModelForCausalLM.from_pretrained(models["pard"], dtype=torch.float32)
    seen, _ = rounds_of(monkeypatch, models, PROMPTS, section(models, p_min=0.5))
    assert {draft.num_nodes for _, draft in seen} > {1}
    for text, draft in seen:
        best = reference_rows(model, text, LENGTH).softmax(1).amax(1)
        assert (best[: draft.num_nodes] >= 0.5).all()


def altered(models, folder, config=None, **keys):
    """A copy of the checkpoint with another `config.json`; None takes a key away."""
    shutil.copytree(models["pard"], folder)
    stored = json.loads((folder / "config.json").read_text())
    stored = {key: value for key, value in {**stored, **keys}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(stored))
    return str(folder)


def test_other_keys_for_the_mask_are_read(models, tmp_path):
    other = altered(models, tmp_path / "other", pard_token=None, ptd_token_id=MASK)
    keys = {"speculative_model": other, "max_draft_len": 4}
    with engine_of(models["target"], section(models, **keys)) as engine:
        complete(engine, PROMPTS[:2], max_tokens=8)
        assert engine.stats()["drafters"]["pard"]["num_gen_tokens"] > 0


def test_what_is_no_checkpoint_of_it_is_refused(models, tmp_path):
    def fault(error, **keys):
        data = {"model": models["target"], "speculative_config": section(models, **keys)}
        with pytest.raises(error) as caught:
            engine_of(models["target"], section(models, **keys)).__enter__()
        errors = []
        preflight(EngineConfig.load(data), errors=errors)
        assert str(caught.value) in map(str, errors)
        return str(caught.value)

    missing = altered(models, tmp_path / "missing", pard_token=None)
    found = fault(CheckpointError, speculative_model=missing)
    assert "speculative_config.speculative_model" in found
    assert "no 'pard_token'" in found
    outside = altered(models, tmp_path / "outside", pard_token=VOCAB)
    assert f"'pard_token' in config.json of {outside!r} is 8" in fault(
        CheckpointError, speculative_model=outside
    )
    found = fault(ConfigError, mask_token_id=VOCAB)
    assert "speculative_config.mask_token_id" in found
    assert "vocabulary of 8" in found
    second = altered(models, tmp_path / "second")
    torch.save({}, f"{second}/warp_model.bin")
    assert "PARD-2" in fault(CheckpointError, speculative_model=second)
