"""Trains the demo target's heads: ``python -m outrider.demo.train_heads METHOD``.

Duty: write the corpus to a file, train one head with the function that ``outrider
train`` calls, and publish it in ``models/METHOD``. Called by people who want to rebuild
``demo/models``. A run that was interrupted goes on where it was saved.
"""

import argparse
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..config import Strict
from ..drafters.train.loop import train
from ..drafters.train.options import TrainingOptions
from ..drafters.train.registry import METHODS
from .checkpoints import TARGET_DIR, WORK_DIR
from .corpus import SourceFile, collect_files, heldout_files, training_files
from .train_tokenizer import BOS_TOKEN

logger = logging.getLogger(__name__)

CORPUS_PATH = WORK_DIR / "corpus.jsonl"
HELDOUT_PATH = WORK_DIR / "heldout.jsonl"
WINDOW_TOKENS = 256
NUM_OWN_TEXTS = 1536
OWN_SHARE = 0.75
NUM_PROCESSES = 2


@dataclass(frozen=True)
class Recipe:
    """How long one head is trained, and on how much at a time."""

    num_steps: int
    num_windows: int = 16
    micro_batch: int = 4


RECIPES = {
    "medusa": Recipe(1000),
    "redrafter": Recipe(1000),
    "eagle": Recipe(1000),
    "eagle3": Recipe(1000),
    "mtp": Recipe(1000),
}


def write_texts(files: Iterable[SourceFile], path: Path) -> None:
    """Write one line per file, beginning as the target's training windows do."""
    partial_path = path.with_suffix(".partial")
    with partial_path.open("w", encoding="utf-8") as out:
        for file in files:
            out.write(json.dumps({"text": BOS_TOKEN + file.text}) + "\n")
    os.replace(partial_path, path)


def write_corpus() -> None:
    """Write what may be trained on, and what may not, once."""
    if CORPUS_PATH.exists() and HELDOUT_PATH.exists():
        return
    WORK_DIR.mkdir(exist_ok=True)
    files = collect_files()
    write_texts(training_files(files), CORPUS_PATH)
    write_texts(heldout_files(files), HELDOUT_PATH)


def train_head(method: str, num_processes: int = NUM_PROCESSES) -> None:
    """Train one head and publish it."""
    write_corpus()
    recipe = RECIPES[method]
    out = WORK_DIR / "heads" / method
    options = TrainingOptions(
        target=TARGET_DIR,
        out=out,
        inputs=(CORPUS_PATH,),
        heldout_file=HELDOUT_PATH,
        window=WINDOW_TOKENS,
        generate=NUM_OWN_TEXTS,
        own_share=OWN_SHARE,
        steps=recipe.num_steps,
        batch=recipe.num_windows,
        micro_batch=recipe.micro_batch,
        num_processes=num_processes,
        device="cpu",
        resume=(out / "training" / "run.json").exists(),
    )
    own: Strict = METHODS[method].options()
    outcome = train(method, options, own)
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
    parser.add_argument("--num-processes", type=int, default=NUM_PROCESSES)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    train_head(arguments.method, arguments.num_processes)


if __name__ == "__main__":
    main()
