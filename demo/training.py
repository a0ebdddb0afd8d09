"""What the two training runs share: data order, optimizers, schedule.

Duty: turn the corpus into windows in a reproducible order, and take the steps of
Muon + AdamW. Everything depends
on the step number and the seed alone, so a resumed run equals an uninterrupted one.

Work is shared out by whole pieces of a
batch, one core each: splitting every operation over the cores would make each wait
for the slowest, which costs much on a machine that does other things as well.

Muon: Jordan et al., 2024 (orthogonalised momentum for the hidden matrices), in
PyTorch's own implementation; embeddings and norms take AdamW. The schedule is
warm-up, constant, linear decay to zero (WSD).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .checkpoints import BOS_ID, EOS_ID, TARGET_DIR, WORK_DIR
from .corpus import STDLIB, SourceFile, collect_files, training_files

TOKENS_PATH = WORK_DIR / "tokens.pt"
STDLIB_FRACTION = 0.5
NUM_WORKERS = 2


@dataclass(frozen=True)
class OptimizerConfig:
    """Learning rates and schedule of one run."""

    num_steps: int
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    muon_weight_decay: float = 0.05
    num_warmup_steps: int = 20
    decay_fraction: float = 0.4
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class TokenStreams:
    """The training tokens: the standard library, and everything else."""

    stdlib: Tensor
    packages: Tensor


class WindowSampler:
    """Yields windows of a token stream, each once per epoch, in a seeded order."""

    def __init__(self, tokens: Tensor, seed: int) -> None:
        self._tokens = tokens
        self._seed = seed
        self._order_key: tuple[int, int] | None = None
        self._order: Tensor = torch.empty(0, dtype=torch.long)
        self._offset = 0

    def window(self, index: int, num_tokens: int) -> Tensor:
        """Return the ``index``-th window of ``num_tokens`` tokens of this order."""
        num_windows = (self._tokens.numel() - num_tokens) // num_tokens
        epoch, position = divmod(index, num_windows)
        if self._order_key != (epoch, num_tokens):
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(num_windows, generator=generator)
            self._offset = int(torch.randint(num_tokens, (1,), generator=generator))
            self._order_key = (epoch, num_tokens)
        start = int(self._order[position]) * num_tokens + self._offset
        return self._tokens[start : start + num_tokens].long()


class BatchSource:
    """Builds the batch of a given step, half standard library, half packages."""

    def __init__(self, streams: TokenStreams, seed: int) -> None:
        self._stdlib = WindowSampler(streams.stdlib, seed)
        self._packages = WindowSampler(streams.packages, seed + 1)

    def batch(self, step: int, num_windows: int, num_tokens: int) -> Tensor:
        """Return ``num_windows`` windows of ``num_tokens`` tokens for ``step``."""
        num_stdlib = round(num_windows * STDLIB_FRACTION)
        num_packages = num_windows - num_stdlib
        rows = [self._stdlib.window(step * num_stdlib + i, num_tokens) for i in range(num_stdlib)]
        rows += [
            self._packages.window(step * num_packages + i, num_tokens) for i in range(num_packages)
        ]
        return torch.stack(rows)


def encode_files(files: list[SourceFile], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Concatenate files into one stream, each between a bos and an eos token."""
    ids: list[int] = []
    encodings = tokenizer([file.text for file in files], add_special_tokens=False, verbose=False)
    for file_ids in encodings["input_ids"]:
        ids += [BOS_ID, *file_ids, EOS_ID]
    return torch.tensor(ids, dtype=torch.int16)


def load_streams() -> TokenStreams:
    """Return the encoded corpus, encoding it on the first call."""
    if not TOKENS_PATH.exists():
        WORK_DIR.mkdir(exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR, trust_remote_code=False)
        files = training_files(collect_files())
        streams = {
            "stdlib": encode_files([f for f in files if f.package == STDLIB], tokenizer),
            "packages": encode_files([f for f in files if f.package != STDLIB], tokenizer),
        }
        torch.save(streams, TOKENS_PATH)
    return TokenStreams(**torch.load(TOKENS_PATH))


def worker_pool() -> ThreadPoolExecutor:
    """Return the threads that share a step's work, each confined to one core."""
    return ThreadPoolExecutor(NUM_WORKERS, initializer=torch.set_num_threads, initargs=(1,))


def accumulate_gradients(
    pool: ThreadPoolExecutor,
    model: nn.Module,
    pieces: Sequence[Tensor],
    loss_of: Callable[[Tensor], Tensor],
) -> float:
    """Set the gradients of the mean of ``loss_of`` over ``pieces``; return that mean.

    The sum runs in the order of the pieces, so that it does not depend on timing.
    """
    parameters = list(model.parameters())

    def piece_gradients(piece: Tensor) -> tuple[float, tuple[Tensor, ...]]:
        loss = loss_of(piece) / len(pieces)
        return loss.item(), torch.autograd.grad(loss, parameters)

    mean_loss = 0.0
    for loss, gradients in pool.map(piece_gradients, pieces):
        mean_loss += loss
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return mean_loss


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for embeddings and norms."""
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
    ]
    matrix_ids = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in matrix_ids]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices[worker::NUM_WORKERS],
            lr=config.muon_lr,
            weight_decay=config.muon_weight_decay,
            momentum=0.95,
        )
        for worker in range(NUM_WORKERS)
    ]
    optimizers.append(
        torch.optim.AdamW(others, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def lr_scale(step: int, config: OptimizerConfig) -> float:
    """Return the schedule's factor at ``step``."""
    num_decay = max(1, round(config.decay_fraction * config.num_steps))
    return min(1.0, (step + 1) / config.num_warmup_steps, (config.num_steps - step) / num_decay)


def apply_step(
    pool: ThreadPoolExecutor,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    config: OptimizerConfig,
) -> None:
    """Clip the gradients, take one optimizer step, and clear the gradients."""
    nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    scale = lr_scale(step, config)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale
    for _ in pool.map(lambda optimizer: optimizer.step(), optimizers):
        pass
    model.zero_grad(set_to_none=True)


def training_progress() -> Progress:
    """Return the progress bar of a run, with a free ``status`` column."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
