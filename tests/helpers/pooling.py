"""Random checkpoints that are made for embeddings or scores, with the demo's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification, Qwen3Model

import outrider

DEMO = Path(outrider.__file__).resolve().parent / "demo" / "models" / "target"
YES, NO = 71, 305
_BASE = "sentence_transformers.models."


def config(**changed: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
        dtype="float32",
        **changed,
    )


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def _saved(model: Any, folder: Path, **settings: Any) -> Path:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    stored = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", stored | settings)
    return folder


def write_modules(folder: Path, *names: str, **settings: Any) -> None:
    """The files of sentence-transformers; `settings` are those of the second module."""
    kinds = ("Transformer", *names)
    paths = ["" if not index else f"{index}_{name}" for index, name in enumerate(kinds)]
    rows = [
        {"idx": index, "name": str(index), "path": path, "type": _BASE + kind}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write_json(folder / "modules.json", rows)
    write_json(folder / paths[1] / "config.json", settings)


def embedding_model(folder: Path, **settings: Any) -> Path:
    """As Qwen3-Embedding: the tensors of the model without its output layer."""
    torch.manual_seed(1)
    _saved(Qwen3Model(config(tie_word_embeddings=False)), folder, **settings)
    write_modules(folder, "Pooling", "Normalize", pooling_mode_lasttoken=True,
                  pooling_mode_mean_tokens=False, include_prompt=True)  # fmt: skip
    return folder


def reranker(folder: Path) -> Path:
    """As Qwen3-Reranker: scores are differences of two tokens' logits."""
    torch.manual_seed(2)
    _saved(Qwen3ForCausalLM(config(tie_word_embeddings=False)), folder)
    write_modules(folder, "LogitScore", true_token_id=YES, false_token_id=NO)
    return folder


def classifier(folder: Path, **changed: Any) -> Path:
    """As a reranker that was converted: a linear layer gives the score."""
    torch.manual_seed(3)
    made = config(num_labels=changed.pop("num_labels", 1), **changed)
    return _saved(Qwen3ForSequenceClassification(made), folder)
