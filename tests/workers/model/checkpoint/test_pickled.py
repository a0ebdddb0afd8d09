"""Weights in pickled files: refused unless they are asked for, and read without execution."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import EngineConfig
from outrider.engine.preflight import preflight
from outrider.errors import CheckpointError
from outrider.training.protocol import FrozenTarget
from outrider.workers.collective import Collective
from outrider.workers.model.checkpoint.weights import Checkpoint
from outrider.workers.model.target import load_model

from ....helpers.models import write_models

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in three layouts."""
    folder = tmp_path_factory.mktemp("pickled")
    plain = Path(write_models(tokenizer_path, folder / "plain")["target"])
    checkpoint = Checkpoint(plain)
    state = {
        name: checkpoint.source(name).read(
            tuple((0, size) for size in checkpoint.source(name).shape)
        )
        for name in checkpoint.names
    }
    found = {"safetensors": plain}
    for layout in ("one", "old", "parts"):
        found[layout] = folder / layout
        shutil.copytree(plain, found[layout], ignore=shutil.ignore_patterns("*.safetensors*"))
    torch.save(state, found["one"] / "pytorch_model.bin")
    old = found["old"] / "pytorch_model.bin"
    torch.save(state, old, _use_new_zipfile_serialization=False)
    names = sorted(state)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2]}
    parts["pytorch_model-00002-of-00002.bin"] = names[1::2]
    weight_map = {}
    for file, held in parts.items():
        torch.save({name: state[name] for name in held}, found["parts"] / file)
        weight_map |= dict.fromkeys(held, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (found["parts"] / "pytorch_model.bin.index.json").write_text(index)
    return found


def load(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    single = Collective.single()
    model = load_model(path, device=CPU, collective=single, forward="bridge", **options)
    return dict(model.module.named_parameters())


@pytest.mark.parametrize("layout", ["one", "old", "parts"])
def test_the_same_weights(folders: dict[str, Path], layout: str) -> None:
    with pytest.raises(CheckpointError, match="set allow_pickle: true") as caught:
        load(folders[layout])
    assert caught.value.field == "model"
    wanted = load(folders["safetensors"])
    found = load(folders[layout], allow_pickle=True)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_nothing_is_executed(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    shutil.copytree(folders["one"], folder)
    mark = tmp_path / "mark"

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (mark,)

    torch.save({"model.norm.weight": Hostile()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds objects other than tensors"):
        load(folder, allow_pickle=True)
    torch.save([1], folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds no tensors by name"):
        load(folder, allow_pickle=True)
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        load(folder, allow_pickle=True)
    assert not mark.exists()


def test_the_key_reaches_target_and_draft_model(folders: dict[str, Path]) -> None:
    section = {"decoding_type": "DraftTarget", "speculative_model": str(folders["parts"])}
    settings = {"model": str(folders["one"]), "speculative_config": section, "executor": "local"}
    with pytest.raises(CheckpointError, match="allow_pickle") as caught:
        preflight(EngineConfig.load({**settings, "num_kv_blocks": 8}))
    assert caught.value.field == "model"
    mixed = {**settings, "model": str(folders["safetensors"]), "num_kv_blocks": 8}
    with pytest.raises(CheckpointError, match="speculative_model: .*allow_pickle"):
        preflight(EngineConfig.load(mixed))
    facts = preflight(EngineConfig.load({**settings, "num_kv_blocks": 8, "load_format": "pt"}))
    assert facts["draft model"] == str(folders["parts"])


def test_training_reads_them_where_it_is_allowed(folders: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="target: .*set allow_pickle: true"):
        FrozenTarget(folders["parts"], CPU)
    for layout in ("one", "parts"):
        found = FrozenTarget(folders[layout], CPU, allow_pickle=True).model.state_dict()
        wanted = FrozenTarget(folders["safetensors"], CPU).model.state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
