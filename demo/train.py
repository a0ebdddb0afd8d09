"""Command line of the demo models: ``python -m outrider.demo.train SUBCOMMAND``.

Duty: run one stage (``tokenizer``, ``target``, ``draft``, ``evaluate``) or ``all``
of them in order.
"""

import argparse
import logging

from rich.console import Console
from rich.logging import RichHandler

from .checkpoints import DRAFT_DIR, TARGET_DIR, save_tokenizer, train_tokenizer
from .corpus import collect_files, training_files, write_manifest, write_prompts
from .evaluate import evaluate
from .train_draft import train_draft
from .train_target import train_target
from .training import TOKENS_PATH

STAGES = ("tokenizer", "target", "draft", "evaluate")


def run_tokenizer() -> None:
    """Collect the corpus, train the tokenizer, and cut the held-out prompts."""
    files = collect_files()
    write_manifest(files)
    tokenizer = train_tokenizer(file.text for file in training_files(files))
    for folder in (TARGET_DIR, DRAFT_DIR):
        save_tokenizer(tokenizer, folder)
    num_prompts = write_prompts(files, tokenizer)
    TOKENS_PATH.unlink(missing_ok=True)
    logging.getLogger(__name__).info("%d held-out prompts", num_prompts)


def main() -> None:
    """Parse the command line and run the chosen stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=(*STAGES, "all"))
    stage = parser.parse_args().stage
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=Console())]
    )
    for noisy in ("httpx", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    runners = {
        "tokenizer": run_tokenizer,
        "target": train_target,
        "draft": train_draft,
        "evaluate": evaluate,
    }
    for name in STAGES if stage == "all" else (stage,):
        runners[name]()


if __name__ == "__main__":
    main()
