"""Hugging Face ids from a cache that holds them, and what is said where there is no network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from outrider.config import EngineConfig
from outrider.engine.checkpoints import resolved, sampling_defaults
from outrider.errors import CheckpointError, ConfigError
from outrider.workers.model.checkpoint.hub import local_folder

DEMO = Path(__file__).resolve().parents[2] / "demo" / "models"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A cache with the demo's models as `acme/target` and `acme/draft`, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("target", "draft"):
        folder = tmp_path / f"models--acme--{name}"
        shutil.copytree(DEMO / name, folder / "snapshots" / COMMIT)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
    return tmp_path


def test_ids_become_folders_and_names(hub):
    section = {"decoding_type": "DraftTarget", "speculative_model": "acme/draft"}
    config = EngineConfig.load({"model": "acme/target", "speculative_config": section})
    found = resolved(config)
    assert found.model == str(hub / "models--acme--target" / "snapshots" / COMMIT)
    assert found.speculative_config.speculative_model.endswith(COMMIT)
    assert found.model_name == config.model_name == "acme/target"
    assert resolved(found) is found
    assert local_folder(f"acme/target@{COMMIT}") == found.model


def test_another_nodes_snapshot_is_taken_from_this_nodes_cache(hub):
    elsewhere = f"/home/other/hub/models--acme--draft/snapshots/{COMMIT}"
    assert local_folder(elsewhere) == str(hub / "models--acme--draft" / "snapshots" / COMMIT)


@pytest.mark.parametrize("source", ["acme/none", "acme/target@v2"])
def test_what_is_not_in_the_cache_is_an_error(hub, source):
    with pytest.raises(CheckpointError, match="^model: 'acme/.* neither a folder here nor whole"):
        resolved(EngineConfig.load({"model": source}))
    with pytest.raises(CheckpointError, match="^tokenizer: .*HF_HUB_OFFLINE is set"):
        resolved(EngineConfig.load({"model": "acme/target", "tokenizer": source}))


def test_an_id_on_the_command_line(hub):
    from typer.testing import CliRunner

    from outrider.cli.app import app

    args = ["check", "-m", "acme/target", "-md", "acme/draft", "--executor", "local"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.stderr
    assert yaml.safe_load(result.stdout)["served_model_name"] == "acme/target"
    result = CliRunner().invoke(app, ["generate", "-m", "acme/none", "x"])
    assert result.stderr.startswith("error: model: 'acme/none' is neither")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model whose generation_config.json has sampling settings."""
    copy = Path(shutil.copytree(DEMO / "draft", tmp_path / "model"))
    settings = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}
    (copy / "generation_config.json").write_text(json.dumps(settings))
    return copy


def test_sampling_defaults(folder, tmp_path):
    expected = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert sampling_defaults(EngineConfig.load({"model": str(folder)})) == expected
    other = {"model": str(DEMO / "draft")}
    assert sampling_defaults(EngineConfig.load(other)) == {}
    given = EngineConfig.load({**other, "generation_config": str(folder)})
    assert sampling_defaults(given) == expected
    none = EngineConfig.load({"model": str(folder), "generation_config": "vllm"})
    assert sampling_defaults(none) == {}
    with pytest.raises(ConfigError, match="^generation_config: "):
        sampling_defaults(EngineConfig.load({**other, "generation_config": str(tmp_path)}))
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match="^generation_config: .*top_p"):
        sampling_defaults(EngineConfig.load({"model": str(folder)}))


def test_what_a_request_says_wins(folder):
    from outrider.engine.frontend import Frontend
    from outrider.scheduler.sampling import SamplingParams
    from outrider.workers.model.info import describe

    frontend = Frontend(EngineConfig.load({"model": str(folder)}), describe(folder))
    sampling = frontend.with_defaults(SamplingParams(temperature=1.0, max_tokens=3))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.9, 20)
    assert (sampling.max_tokens, sampling.min_p) == (3, 0.0)


def test_an_engine_of_ids_with_a_draft_model(hub):
    from outrider.engine.engine import Engine

    section = {"decoding_type": "DraftTarget", "speculative_model": "acme/draft"}
    small = {"executor": "local", "num_kv_blocks": 64, "device": "cpu"}
    config = EngineConfig.load({"model": "acme/target", "speculative_config": section, **small})
    engine = Engine.start(config)
    try:
        assert engine.info.model_name == "acme/target"
    finally:
        engine.shutdown()


def test_a_name_that_no_file_can_have():
    for name in ("x" * 300, "org/" + "x" * 300, "é" * 200):
        with pytest.raises(CheckpointError, match="longer than any name of a file") as error:
            local_folder(name, "tokenizer")
        assert error.value.field == "tokenizer"
