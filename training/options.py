"""Options of a training run; imports no torch, so that the command can validate them quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from ..config import Strict

MICRO_BATCH = 4  # default number of windows per forward


class TrainingOptions(Strict):
    """Options of a run, without those of its method."""

    target: Path = Field(description="Folder of the target's checkpoint.")
    out: Path = Field(description="Folder of the run, and of the result.")
    inputs: tuple[Path, ...] = Field(
        min_length=1, description="Text to train on, .txt or .jsonl; may be repeated."
    )

    # Data.
    window: int = Field(512, ge=8, description="Tokens in a training window.")
    heldout: float = Field(
        0.02,
        gt=0,
        lt=1,
        description="Share of the corpus, at its end, that is held out for evaluation.",
    )
    heldout_file: Path | None = Field(
        None, description="File to evaluate on, instead of a part of the corpus."
    )
    all_tokens: bool = Field(False, description="Train on users' messages of conversations too.")
    generate: int = Field(0, ge=0, description="Texts that the target generates before training.")
    own_share: float = Field(0.5, ge=0, le=1, description="Share of generated texts in a batch.")
    temperature: float = Field(
        0.0, ge=0, description="Temperature of generated texts; 0 is greedy."
    )

    # Optimization.
    steps: int = Field(1000, ge=1, description="Optimizer steps.")
    batch: int = Field(16, ge=1, description="Windows in a step, over all processes.")
    micro_batch: int = Field(MICRO_BATCH, ge=1, description="Windows in one forward pass.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of every random choice.")
    optimizer: Literal["auto", "muon", "adamw"] = Field(
        "auto", description="auto, muon (AdamW for parameters that are not matrices) or adamw."
    )
    adam_lr: float | None = Field(
        None, gt=0, description="AdamW's learning rate; default depends on the method."
    )
    muon_lr: float | None = Field(
        None, gt=0, description="Muon's learning rate; default depends on the method."
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of matrices.")
    warmup: int = Field(20, ge=0, description="Steps in which the learning rate rises.")
    decay: float = Field(
        0.4, ge=0, le=1, description="Share of the steps in which the learning rate falls to zero."
    )
    max_grad_norm: float = Field(
        1.0, gt=0, description="Largest norm of the gradient; larger ones are clipped."
    )

    # Machine.
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto, cpu or cuda.")
    trust_remote_code: bool = Field(False, description="Run Python code that TARGET brings.")
    allow_pickle: bool = Field(
        False,
        description="Read TARGET's pickled weights (pytorch_model.bin) without safetensors.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "bfloat16",
        description="Data type of the target and of matrix products: bfloat16, float32, auto.",
    )
    num_processes: int = Field(1, ge=1, description="Number of GPUs, or of processes on a CPU.")
    threads: int | None = Field(
        None, ge=1, description="Threads of a process; default shares out all cores."
    )

    # Reports.
    eval_every: int = Field(100, ge=1, description="Steps between evaluations.")
    eval_windows: int = Field(32, ge=1, description="Held-out windows in an evaluation.")
    save_every: int = Field(100, ge=1, description="Steps between checkpoints.")
    resume: bool = Field(False, description="Resume the run in OUT.")

    @model_validator(mode="after")
    def _shared_out(self) -> TrainingOptions:
        if self.batch % self.num_processes:
            raise ValueError(
                f"batch: {self.batch} windows cannot be divided evenly among "
                f"{self.num_processes} processes"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Options that must not change when a run is resumed; files are compared by content."""
        kept = (
            "window", "heldout", "all_tokens", "generate", "own_share", "temperature", "batch",
            "seed", "optimizer", "adam_lr", "muon_lr", "weight_decay", "warmup", "decay",
            "max_grad_norm", "dtype",
        )  # fmt: skip
        return {name: getattr(self, name) for name in kept}
