"""Calibration: what it measures is what serving accepts, and it finds what is read wrongly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.bench.suite.workloads import load_prompts
from outrider.cli.calibrate import CalibrationOptions, Sweep, _check_keys, _head
from outrider.config import (
    DFlashConfig,
    Eagle3Config,
    EngineConfig,
    MedusaConfig,
    PARD2Config,
    PARDConfig,
    PEagleConfig,
)
from outrider.drafters.registry import method_of
from outrider.errors import ConfigError
from outrider.scheduler.types import ints
from outrider.training.calibration import Calibrator
from outrider.training.options import METHODS, PARDOptions, PEagleOptions
from outrider.training.protocol import FrozenTarget, Windows

from ..helpers.dflash_training import teach_block
from ..helpers.engines import complete, engine_of
from ..helpers.pard2 import teach_pard2

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
    section = Eagle3Config(
        speculative_model=str(HEAD), max_draft_len=DEPTH, adaptive_draft_len=False
    )
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


def test_what_cannot_be_calibrated_is_refused_first(prompts):
    section = Eagle3Config(speculative_model=str(HEAD))
    for sweep in ("rope_thetas", "all,rope_theta", ""):
        with pytest.raises(ConfigError, match="sweep: unknown key; "):
            _check_keys(CalibrationOptions(sweep=sweep), section)
    for sweep in ("all", "none", "rope_theta, eagle3_layers_to_capture"):
        _check_keys(CalibrationOptions(sweep=sweep), section)
    texts = [ints(prompt) for prompt in prompts]
    with pytest.raises(ConfigError, match="max_tokens: 10+ more than a prompt's 160 tokens exceed"):
        Calibrator(TARGET, texts, 10**9, device=torch.device("cpu"))


def test_a_key_without_variants_is_refused(calibrator):
    sweep = Sweep(calibrator, Eagle3Config(speculative_model=str(HEAD)), 20, lambda text: None)
    sweep.measure({})
    with pytest.raises(ConfigError, match="sweep: 'medusa_choices' has no variants.*rope_theta"):
        sweep.best(("medusa_choices",))


@pytest.fixture(scope="module")
def masked(tmp_path_factory) -> tuple[Calibrator, dict[str, str]]:
    """A target that repeats what is two tokens back, and drafters that were taught to."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("masked")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=0, eos_token_id=1, pad_token_id=7, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    prompts = [ints([2 + (index + at) % 9 for at in range(6)]) for index in range(6)]
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "allow_pickle": True}
    calibrator = Calibrator(folder / "target", prompts, 40, **options)
    target = FrozenTarget(folder / "target", torch.device("cpu"))
    tokens = torch.tensor(np.stack(calibrator.texts), dtype=torch.int64)
    windows = Windows(tokens, torch.ones(tokens.shape))
    folders = {}
    for name, options in (
        ("pard", PARDOptions(num_depths=4, mask_token_id=11, hidden_size=32, num_layers=1)),
        ("peagle", PEagleOptions(num_passes=4, mask_token_id=11, layers=(1, 2, 3))),
    ):
        method = METHODS[name].build(options, target)
        method.prepare(torch.ones(12, dtype=torch.int64))
        optimizer = torch.optim.AdamW(method.module.parameters(), lr=5e-3)
        states = target.states(tokens, method.capture)
        for _ in range(120):
            optimizer.zero_grad()
            method.loss(windows, states, target).loss.backward()
            optimizer.step()
        folders[name] = str(folder / name)
        Path(folders[name]).mkdir()
        method.export(Path(folders[name]))
    return calibrator, folders


@pytest.mark.parametrize("kind", [PARDConfig, PEagleConfig])
def test_it_finds_the_mask_of_another_token(masked, kind):
    """A wrong mask shows behind the first token alone."""
    calibrator, folders = masked
    section = kind(speculative_model=folders[kind.__name__[:-6].lower()], max_draft_len=3)
    right = calibrator.measure(section, 10**6)
    wrong = section.model_copy(update={"mask_token_id": 7})
    sweep = Sweep(calibrator, wrong, 10**6, lambda text: None)
    base = sweep.measure({})
    first, second = (found.acceptance(3) for found in (right, base.measured))
    assert first[0] == second[0]
    assert first[2] > second[2] + 0.1
    assert sweep.best(("mask_token_id",)) == {"mask_token_id": 11}


@pytest.fixture(scope="module")
def block(masked, tmp_path_factory) -> tuple[Calibrator, str]:
    calibrator, _ = masked
    texts = [text.tolist() for text in calibrator.texts]
    folder = tmp_path_factory.mktemp("block") / "head"
    return calibrator, teach_block(folder, str(calibrator.path), texts, (0, 1), 11)


@pytest.mark.parametrize(
    ("wrong", "key", "right"),
    [
        ({"target_layer_ids": [1, 2]}, "target_layer_ids", (0, 1)),
        ({"mask_token_id": 7}, "mask_token_id", 11),
        ({"rope_theta": 1e6}, "rope_theta", 10000.0),
        ({"rope_layout": "interleaved"}, "rope_layout", "half"),
        ({"sample_from_anchor": True}, "sample_from_anchor", False),
    ],
)
def test_it_finds_how_a_block_drafter_is_read(block, wrong, key, right):
    finds(*block, DFlashConfig, wrong, key, right)


def finds(calibrator, folder, kind, wrong, key, right):
    section = kind.model_validate({"speculative_model": folder, "max_draft_len": 3, **wrong})
    sweep = Sweep(calibrator, section, 10**6, lambda text: None)
    sweep.measure({})
    assert sweep.best((key,)) == {key: right}


@pytest.fixture(scope="module")
def of_states(masked, tmp_path_factory) -> tuple[Calibrator, str]:
    calibrator, _ = masked
    texts = [text.tolist() for text in calibrator.texts]
    folder = tmp_path_factory.mktemp("states") / "model"
    return calibrator, teach_pard2(folder, str(calibrator.path), texts, (2, 3), 11)


@pytest.mark.parametrize(
    ("wrong", "key", "right"),
    [
        ({"pard2_target_layers": [1, 2]}, "pard2_target_layers", (2, 3)),
        ({"pard2_target_layers": [-2, -1]}, "pard2_target_layers", (2, 3)),
        ({"pard2_scale": 0.02}, "pard2_scale", 1.0),
        ({"mask_token_id": 2}, "mask_token_id", 11),
        ({"rope_theta": 1e6}, "rope_theta", 10000.0),
        ({"rope_layout": "interleaved"}, "rope_layout", "half"),
    ],
)
def test_it_finds_how_a_model_reads_states(of_states, wrong, key, right):
    finds(*of_states, PARD2Config, wrong, key, right)


def test_it_finds_an_output_layer_that_is_not_meant(block, tmp_path):
    """A file with a map of tokens, whose head drafts from the target's output layer."""
    calibrator, folder = block
    shutil.copytree(folder, tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    tensors["d2t"] = torch.tensor([2] * 8)
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    section = DFlashConfig(speculative_model=str(tmp_path / "head"), max_draft_len=3)
    sweep = Sweep(calibrator, section, 10**6, lambda text: None)
    sweep.measure({})
    assert sweep.best(("output_layer",)) == {"output_layer": "target"}


def test_a_draft_model_with_masks_is_measured_as_it_serves(masked):
    calibrator, folders = masked
    section = PARDConfig(speculative_model=folders["pard"], max_draft_len=3, draft_timeout_s=30)
    given = {"model": str(calibrator.path), "speculative_config": section.model_dump(mode="json")}
    assert _head(EngineConfig.load(given)).speculative_model == folders["pard"]
    walks = iter(calibrator.measure(section, 10**6).walks)
    model = AutoModelForCausalLM.from_pretrained(folders["pard"], dtype=torch.float32)
    for text in calibrator.texts:
        for known in range(7, len(text) - 3 + 1):
            row = torch.tensor([[*text[:known].tolist(), 11, 11]])
            with torch.inference_mode():
                drafted = model(row).logits[0, -3:].argmax(1).tolist()
            hits = [guess == said for guess, said in zip(drafted, text[known : known + 3])]
            assert len(next(walks).ranks) == [*hits, False].index(False)
    assert next(walks, None) is None
