"""Reads and writes the checkpoints of the demo models, atomically.

Duty: where the checkpoints lie, the saved state a run resumes from, and the
published bf16 checkpoint.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM

from .corpus import DEMO_DIR
from .train_tokenizer import save_tokenizer

WORK_DIR = DEMO_DIR / "work"
TARGET_DIR = DEMO_DIR / "models" / "target"
DRAFT_DIR = DEMO_DIR / "models" / "draft"


def save_state(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], next_step: int
) -> None:
    """Write what a resumed run needs, atomically."""
    partial_path = path.with_suffix(".partial")
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "next_step": next_step,
    }
    torch.save(state, partial_path)
    os.replace(partial_path, path)


def load_state(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Restore a saved run and return the step to go on from; 0 where there is none."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    return int(state["next_step"])


def publish(model: LlamaForCausalLM, folder: Path) -> None:
    """Replace the checkpoint in ``folder`` by ``model`` in bf16, atomically."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    scratch.chmod(0o755)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.bfloat16().save_pretrained(scratch / "new")
    (scratch / "new" / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, scratch / "new")
    folder.rename(scratch / "old")
    (scratch / "new").rename(folder)
    shutil.rmtree(scratch)
