"""What a checkpoint is made for, by its files; everything else is refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from outrider.errors import CheckpointError
from outrider.tests.helpers.pooling import DEMO, write_json, write_modules
from outrider.workers.model.checkpoint.pooling import described, read_pooling

LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64}


@pytest.fixture
def folder(tmp_path) -> Path:
    write_json(tmp_path / "config.json", CONFIG)
    return tmp_path


def settings(folder: Path, **changed: object) -> None:
    write_json(folder / "config.json", CONFIG | changed)


def test_embeddings(folder):
    write_modules(folder, "Pooling", "Normalize", **LAST)
    found = read_pooling(folder)
    assert (found.kind, found.normalizes, found.size, found.dimensions) == ("embed", True, 64, None)
    assert described(folder) == "embeddings of 64, normalised"
    settings(folder, matryoshka_dimensions=[32, 16])
    assert read_pooling(folder).dimensions == (16, 32)
    settings(folder, is_matryoshka=True)
    assert read_pooling(folder).dimensions == ()
    write_modules(folder, "Pooling", pooling_mode="lasttoken")  # the newer key
    assert not read_pooling(folder).normalizes


def test_newer_names_of_the_modules(folder):
    write_modules(folder, "LogitScore", true_token_id=7, false_token_id=None)
    rows = json.loads((folder / "modules.json").read_text())
    rows[1]["type"] = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    write_json(folder / "modules.json", rows)
    found = read_pooling(folder)
    assert (found.kind, found.tokens, found.has_sigmoid) == ("score", (7,), True)
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    write_json(folder / "config_sentence_transformers.json", identity)
    assert not read_pooling(folder).has_sigmoid


def test_tokens_in_the_configuration(folder):
    shutil.copy(DEMO / "tokenizer.json", folder)
    vocabulary = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    no, yes, *_ = sorted(vocabulary)
    settings(folder, classifier_from_token=[no, yes])
    assert read_pooling(folder).tokens == (vocabulary[yes], vocabulary[no])
    for wrong in (["no such token", yes], [yes], 7, None):
        settings(folder, classifier_from_token=wrong)
        with pytest.raises(CheckpointError, match="classifier_from_token"):
            read_pooling(folder)


@pytest.mark.parametrize(
    ("modules", "second", "changed", "reason"),
    [
        ((), {}, {}, "neither sentence-transformers' modules.json nor an architecture"),
        (("Pooling",), {"pooling_mode_mean_tokens": True}, {}, "pooling_mode_mean_tokens"),
        (("Pooling",), {}, {}, "its pooling is none"),
        (("Pooling", "Dense"), LAST, {}, "not computed: Transformer, Pooling, Dense"),
        (("Pooling",), LAST, {"is_causal": False}, "not causal"),
        ((), {}, {"architectures": ["Qwen3ForSequenceClassification"]}, "with 2 labels"),
    ],
)
def test_what_is_not_computed_is_refused(folder, modules, second, changed, reason):
    settings(folder, **changed)
    if modules:
        write_modules(folder, *modules, **second)
    found = read_pooling(folder)
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("modules.json", {"a": 1}),
        ("modules.json", [{"type": "x"}]),
        ("1_LogitScore/config.json", {"true_token_id": "yes"}),
        ("1_LogitScore/config.json", {}),
        ("config_sentence_transformers.json", {"activation_fn": "torch.nn.Tanh"}),
    ],
)
def test_damaged_files(folder, file, content):
    write_modules(folder, "LogitScore", true_token_id=7)
    write_json(folder / file, content)
    with pytest.raises(CheckpointError):
        read_pooling(folder)
