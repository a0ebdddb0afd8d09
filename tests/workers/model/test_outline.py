"""Every architecture's configuration is read without torch as with it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
from transformers import AutoConfig

from outrider.errors import CheckpointError
from outrider.workers.model.info import describe, outline

from .conftest import BASE, VARIANTS

_CODE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from outrider.cluster.process import without_torch
with without_torch():
    import transformers
from outrider.workers.model.info import outline
print(json.dumps({folder: asdict(outline(Path(folder), 2)) for folder in sys.argv[1:]}))
assert "torch" not in sys.modules
"""


def test_outlines_without_torch(tmp_path) -> None:
    wanted = {}
    for name, changes in VARIANTS.items():
        folder = tmp_path / name
        AutoConfig.for_model(**{**BASE, **changes}, dtype="float32").save_pretrained(folder)
        (folder / "model.safetensors").touch()
        wanted[str(folder)] = asdict(describe(folder, 2))
        del wanted[str(folder)]["dtype"]
    found = subprocess.run(
        [sys.executable, "-c", _CODE, *wanted], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == json.loads(json.dumps(wanted))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("num_hidden_layers", each) for each in (-1, 0, 10**9)),
        *(("num_attention_heads", 0), ("vocab_size", 0)),
        *(("max_position_embeddings", each) for each in (-1, 0)),  # searching texts never ended
    ],
)
def test_numbers_that_no_model_has(tmp_path, name, number) -> None:
    AutoConfig.for_model("llama", **BASE).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: number}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        outline(tmp_path)
