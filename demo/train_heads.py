"""Trains the demo target's heads: ``python -m outrider.demo.train_heads METHOD``.

Duty: let the target write the texts that heads learn from, mix them with source files,
train one head with the function that ``outrider train`` calls, and publish it in
``models/METHOD``. A run that was
interrupted goes on where it was saved.
"""

import argparse
import json
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM

from ..training.loop import train
from ..training.options import METHODS, TrainingOptions
from .checkpoints import TARGET_DIR, WORK_DIR
from .corpus import collect_files, training_files
from .train_draft import PROMPT_TOKENS, WINDOW_TOKENS, continue_greedily
from .training import BatchSource, load_streams

logger = logging.getLogger(__name__)

HEADS_DIR = WORK_DIR / "heads"
OWN_PATH = HEADS_DIR / "own.jsonl"
MIX_PATH = HEADS_DIR / "mix.jsonl"
HELDOUT_PATH = HEADS_DIR / "heldout.jsonl"
OWN_SEED = 4242
NUM_OWN_BATCHES = 32
GENERATION_BATCH = 96
NUM_HELDOUT_TEXTS = 96
MIX_SEED = 7
MAX_FILE_CHARS = 40_000  # as a line of JSON
MAX_FILES_CHARS = 2_600_000


@dataclass(frozen=True)
class Recipe:
    """How long one head is trained, and what it is like."""

    num_steps: int
    own: dict[str, Any] = field(default_factory=dict)  # the method's options


BLOCKS = {"block_size": 8, "num_anchors": 32, "layers": (2, 4, 7)}
RECIPES = {
    "medusa": Recipe(1000, {"num_heads": 3, "draft_vocab_size": 1024}),
    "redrafter": Recipe(500, {"exit_dim": 320, "position_decay": 0.8}),
    "eagle": Recipe(900, {"feature_weight": 0, "num_passes": 4}),
    "eagle3": Recipe(1000, {"num_passes": 5, "draft_vocab_size": 2048}),
    "mtp": Recipe(350, {"num_passes": 4}),
    "dflash": Recipe(2000, {**BLOCKS, "num_layers": 2}),
    "dspark": Recipe(2000, {**BLOCKS, "num_layers": 1, "markov_rank": 64}),
}


def own_texts() -> list[list[int]]:
    """Return what the target makes of training windows, written once."""
    if not OWN_PATH.exists():
        target = AutoModelForCausalLM.from_pretrained(
            TARGET_DIR, dtype=torch.bfloat16, trust_remote_code=False
        ).eval()
        source = BatchSource(load_streams(), OWN_SEED)
        texts: list[list[int]] = []
        for index in track(range(NUM_OWN_BATCHES), description="texts"):
            prompts = source.batch(index, GENERATION_BATCH, PROMPT_TOKENS)
            texts += continue_greedily(target, prompts).tolist()
        write_lines(OWN_PATH, (json.dumps(text) for text in texts))
    return [json.loads(line) for line in OWN_PATH.read_text("utf-8").splitlines()]


def file_lines(rng: random.Random) -> Iterator[str]:
    """Yield some of the source files that may be trained on, as documents."""
    lines = [json.dumps({"text": file.text}) for file in training_files(collect_files())]
    rng.shuffle(lines)
    num_chars = 0
    for line in lines:
        if num_chars > MAX_FILES_CHARS:
            return
        if len(line) < MAX_FILE_CHARS:
            num_chars += len(line)
            yield line


def write_corpus() -> None:
    """Write what is trained on and what is not, once."""
    if MIX_PATH.exists() and HELDOUT_PATH.exists():
        return
    HEADS_DIR.mkdir(parents=True, exist_ok=True)
    texts = own_texts()
    rng = random.Random(MIX_SEED)
    files = list(file_lines(rng))
    lines = [document(text, 1.0) for text in texts[:-NUM_HELDOUT_TEXTS]] + files
    rng.shuffle(lines)
    write_lines(HELDOUT_PATH, (document(text, 0.0) for text in texts[-NUM_HELDOUT_TEXTS:]))
    write_lines(MIX_PATH, lines)


def document(text: list[int], prompt_weight: float) -> str:
    """Return a line of a corpus: ``text``, and how much predicting each token counts."""
    num_own = WINDOW_TOKENS - PROMPT_TOKENS
    weights = [prompt_weight] * PROMPT_TOKENS + [1.0] * num_own
    return json.dumps({"tokens": text, "weights": weights})


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a file that is there whole or not at all."""
    partial_path = path.with_suffix(".partial")
    partial_path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    os.replace(partial_path, path)


def train_head(method: str) -> None:
    """Train one head and publish it."""
    write_corpus()
    recipe = RECIPES[method]
    out = HEADS_DIR / method
    options = TrainingOptions(
        target=TARGET_DIR,
        out=out,
        inputs=(MIX_PATH,),
        heldout_file=HELDOUT_PATH,
        window=WINDOW_TOKENS,
        steps=recipe.num_steps,
        batch=8,
        muon_lr=0.02,
        adam_lr=3e-3,
        eval_windows=24,
        save_every=50,
        threads=1,
        device="cpu",
        resume=(out / "training" / "run.json").exists(),
    )
    outcome = train(method, options, METHODS[method].options(**recipe.own))
    if not outcome.finished:
        logger.warning("saved after step %d; the same command goes on", outcome.step)
        return
    publish(out, TARGET_DIR.parent / method)


def publish(source: Path, folder: Path) -> None:
    """Replace the head in ``folder``, atomically."""
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    (scratch / "new").mkdir(mode=0o755)
    for path in source.iterdir():
        if path.suffix == ".safetensors" or path.name == "config.json":
            shutil.copyfile(path, scratch / "new" / path.name)
    if folder.exists():
        folder.rename(scratch / "old")
    (scratch / "new").rename(folder)
    shutil.rmtree(scratch)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=tuple(RECIPES))
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    train_head(parser.parse_args().method)


if __name__ == "__main__":
    main()
