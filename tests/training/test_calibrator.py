"""Calibration: what it measures is what serving accepts, and it finds what is read wrongly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from outrider.bench.prompts import load_prompts
from outrider.cli.calibrate import Sweep, _head
from outrider.config import Eagle3Config, EngineConfig, MedusaConfig
from outrider.drafters.registry import method_of
from outrider.errors import ConfigError
from outrider.scheduler.types import ints
from outrider.training.calibration import Calibrator

from ..helpers.engines import complete, engine_of

MODELS = Path(__file__).resolve().parents[2] / "demo" / "models"
TARGET, HEAD = MODELS / "target", MODELS / "eagle3"
NUM_TOKENS, DEPTH = 60, 4


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return [tokenizer.encode(text)[:160] for text in load_prompts(None, 8)]


@pytest.fixture(scope="module")
def calibrator(prompts) -> Calibrator:
    return Calibrator(
        TARGET,
        [ints(prompt) for prompt in prompts],
        NUM_TOKENS + DEPTH + 1,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def test_it_measures_what_serving_accepts(calibrator, prompts):
    section = Eagle3Config(speculative_model=str(HEAD), max_draft_len=DEPTH)
    with engine_of(str(TARGET), section.model_dump(mode="json")) as engine:
        outputs, last = complete(engine, prompts, max_tokens=NUM_TOKENS)
    measured = calibrator.measure(section, 10**6)
    walks = iter(measured.walks)
    for index, prompt in enumerate(prompts):
        text = calibrator.texts[index]
        assert text[len(prompt) :][:NUM_TOKENS].tolist() == list(outputs[str(index)])
        lengths = {
            known: len(next(walks).ranks) for known in range(len(prompt) + 1, len(text) - DEPTH + 1)
        }
        known, end, accepted = len(prompt) + 1, len(prompt) + NUM_TOKENS, 0
        while known < end:
            step = min(lengths[known], end - known - 1)  # the last one is the bonus
            accepted += step
            known += step + 1
        assert last[str(index)].usage.num_accepted_tokens == accepted > 0


def test_a_tree_holds_the_chain(calibrator):
    chain = Eagle3Config(speculative_model=str(HEAD), max_draft_len=3)
    tree = method_of(chain).with_tree(chain, ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    assert tree is not None
    alone, together = (calibrator.measure(section, 60).walks for section in (chain, tree))
    assert all(walk.num_nodes == 7 for walk in together)
    for one, other in zip(alone, together, strict=True):
        assert len(one.ranks) <= len(other.ranks)
        assert one.ranks == other.ranks[: len(one.ranks)]


def test_a_tree_keeps_what_the_section_says_beside_it():
    section = MedusaConfig(speculative_model="heads", top_k=2, max_concurrency=5)
    assert method_of(section).with_tree(section, ()) is None, "never right: no tree"
    tree = method_of(section).with_tree(section, ((0,), (3,)))
    assert isinstance(tree, MedusaConfig)
    assert (tree.medusa_choices, tree.max_concurrency, tree.top_k) == (((0,), (3,)), 5, 4)


@pytest.mark.parametrize(
    ("wrong", "key", "right"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "eagle3_layers_to_capture", (1, 3, 4)),
        ({"rope_theta": 1e6}, "rope_theta", 10000.0),
    ],
)
def test_it_finds_what_is_read_wrongly(calibrator, tmp_path, wrong, key, right):
    folder = tmp_path / "head"
    shutil.copytree(HEAD, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **wrong}))
    section = Eagle3Config(speculative_model=str(folder), max_draft_len=3)
    sweep = Sweep(calibrator, section, 10**6, lambda text: None)
    sweep.measure({})
    assert sweep.best((key, "recycle")) == {key: right}


def test_a_head_away_from_its_target_is_calibrated_too():
    section = {"decoding_type": "Eagle3", "speculative_model": str(HEAD), "placement": "separate"}
    given = {"model": str(TARGET), "speculative_config": section}
    assert _head(EngineConfig.load(given)).speculative_model == str(HEAD)
    given["speculative_config"] = {"decoding_type": "Compose", "members": [section, section]}
    with pytest.raises(ConfigError, match="Compose has 2 heads; one is calibrated at a time"):
        _head(EngineConfig.load(given))


def test_a_key_without_variants_is_refused(calibrator):
    sweep = Sweep(calibrator, Eagle3Config(speculative_model=str(HEAD)), 20, lambda text: None)
    sweep.measure({})
    with pytest.raises(ConfigError, match="sweep: 'medusa_choices' has no variants.*rope_theta"):
        sweep.best(("medusa_choices",))
