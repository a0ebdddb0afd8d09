"""An ingress loads its tokenizer without torch; it splits and renders as with torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cluster.process import without_torch
from outrider.config import EngineConfig
from outrider.engine.checkpoints import load_tokenizer

_CODE = """
import json, sys
from outrider.cluster.process import without_torch
from outrider.config import EngineConfig
from outrider.engine.checkpoints import load_tokenizer
with without_torch():
    tokenizer = load_tokenizer(EngineConfig.load({"model": sys.argv[1]}))
had = "torch" in sys.modules
import torch  # it can be had afterwards
print(json.dumps([had, tokenizer("def main(a, b):").input_ids, type(tokenizer).__name__]))
"""
_DEMO = Path(__file__).parents[2] / "demo" / "models" / "target"


def test_a_tokenizer_without_torch() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _CODE, str(_DEMO)], capture_output=True, text=True, check=True
    )
    tokenizer = load_tokenizer(EngineConfig.load({"model": str(_DEMO)}))
    ids = tokenizer("def main(a, b):").input_ids
    assert json.loads(found.stdout) == [False, ids, type(tokenizer).__name__]
    assert "PyTorch" not in found.stderr


@pytest.mark.parametrize("unless", [False, True])
def test_torch_is_left_alone_where_it_is_there_or_needed(unless: bool) -> None:
    before = sys.modules["torch"]
    with without_torch(unless=unless):
        assert sys.modules["torch"] is before
