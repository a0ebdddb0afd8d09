"""Draft models of another vocabulary: the target's law, its tokens, and what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.config import EngineConfig
from outrider.drafters import draft_target, vocabulary
from outrider.engine.preflight import preflight
from outrider.engine.weights import DrafterChange
from outrider.errors import CheckpointError, ConfigError
from outrider.scheduler.types import Draft, DraftProbs, ints
from outrider.workers.draft_program import Translated

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts
from ..helpers.frontend import EOS, VOCAB_SIZE
from ..helpers.models import write_guessable, write_of_another_vocabulary
from ..helpers.verification import RULES, distance_from_target, emission_law, random_target

PROMPTS = random_prompts(8, VOCAB_SIZE)
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1}
CACHE = {"outcomes": 8, "adaptive": False}
PREFIX = [int(token) for token in np.arange(40) * 7 % VOCAB_SIZE]


class Pair:
    """A target, a draft model of another vocabulary, and the tokens that both have."""

    def __init__(self, tokenizer_path: Path, folder: Path) -> None:
        self.target = write_guessable(
            folder / "target", num_layers=2, vocab_size=VOCAB_SIZE, eos_token_id=EOS
        )
        for file in tokenizer_path.glob("*token*"):
            shutil.copy(file, self.target)
        self.draft, self.shared = write_of_another_vocabulary(self.target, folder / "other")
        self.model = AutoModelForCausalLM.from_pretrained(self.draft, dtype=torch.float32)
        sizes = VOCAB_SIZE, self.model.config.vocab_size
        self.translation = vocabulary.translation(Path(self.target), Path(self.draft), sizes)
        table = np.frombuffer(self.translation.table, dtype=np.int32)
        self.read = np.where(table < 0, -1 - table, table)

    def section(self, **keys):
        if keys.get("placement") != "colocated":
            keys = {"draft_timeout_s": 30, **keys}
        return {
            "decoding_type": "DraftTarget",
            "speculative_model": self.draft,
            "use_heterogeneous_vocab": True,
            "max_draft_len": 4,
            **keys,
        }

    def logits(self, tokens) -> torch.Tensor:  # [target_vocab]
        """Of the token after `tokens`, by a forward of all tokens: the tokens that both have."""
        with torch.inference_mode():
            own = self.model(
                torch.from_numpy(self.read[tokens][None]).long(), use_cache=False
            ).logits[0, -1]
        found = torch.full((VOCAB_SIZE,), -torch.inf)
        found[list(self.shared)] = own[list(self.shared.values())]
        return found


@pytest.fixture(scope="module")
def pair(tokenizer_path, tmp_path_factory):
    return Pair(tokenizer_path, tmp_path_factory.mktemp("vocabularies"))


def rounds_of(monkeypatch, pair, prompts, section, sampling=None, **options):
    """Every (text, draft) of an engine, what it emitted, and its drafter's statistics."""
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

    with monkeypatch.context() as patch:
        patch.setattr(draft_target.DraftTarget, "propose", spy_propose)
        patch.setattr(draft_target.DraftTarget, "observe", spy_observe)
        with engine_of(pair.target, section, **options) as engine:
            found, _ = complete(engine, prompts, **sampling or {})
            stats = engine.stats()
    (drafter,) = stats["drafters"].values()
    assert drafter["faults"] == 0
    return seen, found, drafter, stats


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_it_emits_the_plain_tokens(pair, placement, size):
    plain = plain_outputs(pair.target, PROMPTS, {}, SAMPLED)
    options = {"tensor_parallel_size": size}
    section = pair.section(placement=placement)
    if placement == "separate":
        section["draft_tensor_parallel_size"] = size
    with engine_of(pair.target, section, **options) as engine:
        for wanted, sampling in zip(plain, ({}, SAMPLED)):
            assert complete(engine, PROMPTS, **sampling)[0] == wanted
            alone = complete(engine, PROMPTS[:3], at_once=1, **sampling)[0]
            assert alone == {name: wanted[name] for name in alone}
        (stats,) = engine.stats()["drafters"].values()
    assert stats["faults"] == 0
    assert stats["num_acc_tokens"] > 0.1 * stats["num_gen_tokens"]


@pytest.mark.parametrize("placement", ["separate", "colocated"])
@pytest.mark.parametrize("name", ["plain", "small steps", "shared prefix"])
def test_every_draft_is_that_of_a_forward_without_a_cache(monkeypatch, pair, name, placement):
    """Positions are equal, so rewinds, evictions and prefix hits are those of one vocabulary."""
    prompts, options = PROMPTS, {}
    if name == "small steps":  # requests are preempted, and the draft model's blocks evicted
        options = {
            "num_kv_blocks": 14, "block_size": 8, "max_model_len": 96, "max_num_batched_tokens": 24
        }  # fmt: skip
    if name == "shared prefix":
        prompts = [[*PREFIX, *prompt] for prompt in PROMPTS]
        options = {"block_size": 8}
    section = pair.section(placement=placement)
    if name == "small steps":
        section["num_kv_blocks"] = 14
    seen, found, drafter, stats = rounds_of(monkeypatch, pair, prompts, section, **options)
    assert found == plain_outputs(pair.target, prompts, {})[0]
    assert len(seen) > 50
    assert drafter["num_acc_tokens"] > 0.1 * drafter["num_gen_tokens"]
    if name == "small steps":
        assert stats["requests"]["num_preemptions"] > 0
    for text, draft in seen:
        for token in draft.tokens.tolist():
            assert token == int(pair.logits(text).argmax())
            text = [*text, token]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_probabilities_are_those_of_the_shared_tokens(monkeypatch, pair, rule):
    section = pair.section(verification=rule, probs_top=VOCAB_SIZE, max_draft_len=3)
    seen, *_ = rounds_of(monkeypatch, pair, PROMPTS, section, {"temperature": 1.0, "max_tokens": 8})
    assert any(draft.num_nodes == 3 for _, draft in seen)
    for text, draft in seen:
        for node, token in enumerate(draft.tokens.tolist()):
            found = np.zeros(VOCAB_SIZE)
            # Where fewer are likely, the rest of the row is one id again and again, of no mass.
            np.add.at(found, draft.probs.ids[node], draft.probs.probs[node])
            np.testing.assert_allclose(found, pair.logits(text).softmax(0), atol=1e-5)
            assert token in pair.shared
            text = [*text, token]
    greedy = pair.section(verification=rule)
    with engine_of(pair.target, greedy) as engine:
        assert complete(engine, PROMPTS)[0] == plain_outputs(pair.target, PROMPTS, {})[0]


def test_a_drafted_token_has_the_targets_noise(pair):
    """By the target's ids: else sampled drafts were accepted far less often than greedy ones."""
    rates = []
    for sampling in ({"temperature": 0.7}, {"temperature": 0.0}):
        with engine_of(pair.target, pair.section(max_draft_len=1)) as engine:
            complete(engine, PROMPTS, max_tokens=48, **sampling)
            (stats,) = engine.stats()["drafters"].values()
        rates.append(stats["num_acc_tokens"] / stats["num_gen_tokens"])
    assert min(rates) > 0.3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("table", [[2, -1, 0, -4], [0, 1, -1, -2], [3, 2, 1, 0]])
def test_the_law_is_the_targets(rule, table):
    """Enumerated over every draft of a model of four tokens, of which the target has some."""
    vocab, length, depth = 4, 3, 2
    target, model = random_target(vocab, seed=2), random_target(4, seed=7)
    translated = Translated(ints(table).tobytes(), torch.device("cpu"))

    def draft_law(prefix) -> np.ndarray:
        read = translated.read(ints(prefix)).tolist()
        own = torch.from_numpy(np.asarray(model(tuple(read))))[None].log()
        return translated.logits(own)[0].softmax(0).numpy()

    def drafts(prefix):
        for tokens in itertools.product(range(vocab), repeat=depth):
            rows = [draft_law((*prefix, *tokens[:node])) for node in range(depth)]
            chance = float(np.prod([row[token] for row, token in zip(rows, tokens)]))
            if chance > 0:
                ids = np.tile(np.arange(vocab), (depth, 1))
                probs = DraftProbs(ints(ids), np.stack(rows).astype(np.float32))
                yield chance, Draft(ints(tokens), ints([-1, 0]), probs)

    law = emission_law(RULES[rule], target, drafts, length)
    assert distance_from_target(law, target, length) < 1e-6


def test_with_a_speculation_cache(pair):
    plain = plain_outputs(pair.target, PROMPTS, {}, SAMPLED)
    with engine_of(pair.target, pair.section(speculation_cache=CACHE)) as engine:
        for wanted, sampling in zip(plain, ({}, SAMPLED)):
            assert complete(engine, PROMPTS, **sampling)[0] == wanted
        (stats,) = engine.stats()["drafters"].values()
    assert stats["speculation_cache"]["num_hits"] > 0
    assert stats["faults"] == 0


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_it_joins_an_engine_that_serves(pair, placement):
    (plain,) = plain_outputs(pair.target, PROMPTS, {})
    with engine_of(pair.target) as engine:
        engine.change_drafters(DrafterChange(pair.section(placement=placement), ""))
        assert complete(engine, PROMPTS)[0] == plain
        (stats,) = engine.stats()["drafters"].values()
    assert stats["num_acc_tokens"] > 0.1 * stats["num_gen_tokens"]


def test_what_ends_a_text_is_drafted(pair):
    table = np.frombuffer(pair.translation.table, dtype=np.int32)
    assert table[EOS] == pair.shared[EOS] >= 0


def fault(pair, **keys) -> str:
    section = pair.section(**keys)
    with pytest.raises(ConfigError) as caught:
        engine_of(pair.target, section).__enter__()
    errors: list[ConfigError] = []
    preflight(
        EngineConfig.load({"model": pair.target, "speculative_config": section}), errors=errors
    )
    assert str(caught.value) in map(str, errors)
    return str(caught.value)


def test_what_cannot_be_translated_is_refused(pair, tmp_path):
    found = fault(pair, use_heterogeneous_vocab=False)
    assert found.startswith("speculative_config.speculative_model: ")
    assert "use_heterogeneous_vocab: true" in found
    bare = shutil.copytree(pair.draft, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in fault(pair, speculative_model=str(bare))
    foreign = shutil.copytree(pair.draft, tmp_path / "foreign")
    data = json.loads((foreign / "tokenizer.json").read_text())
    size = len(data["model"]["vocab"])
    data["model"]["vocab"] = [[f"<nothing{index}>", -1.0] for index in range(size)]
    data["added_tokens"] = []
    (foreign / "tokenizer.json").write_text(json.dumps(data))
    (foreign / "tokenizer_config.json").unlink()
    assert "no token in common" in fault(pair, speculative_model=str(foreign))
    (foreign / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a readable"):
        engine_of(pair.target, pair.section(speculative_model=str(foreign))).__enter__()


def test_the_same_vocabulary_is_not_translated(pair):
    """The key is of no effect: the draft model's ids are the target's."""

    def checked(draft: str) -> dict:
        section = pair.section(speculative_model=draft)
        return preflight(EngineConfig.load({"model": pair.target, "speculative_config": section}))

    assert "draft vocabulary" not in checked(pair.target)
    assert checked(pair.draft)["draft vocabulary"] == str(pair.translation)
    assert f"{len(pair.shared):,} tokens are shared" in str(pair.translation)
