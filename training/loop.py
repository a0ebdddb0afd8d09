"""A training run of any method: read, generate text, optimise, evaluate, report, save, export.

Randomness depends only on the seed and the step number, so a resumed run equals an uninterrupted
one, and several processes give the result of one up to rounding.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from ..config import Strict
from ..config.files import reason
from ..errors import CheckpointError, ConfigError
from ..workers.model.checkpoint.hub import require_checkpoint
from ..workers.model.info import read_config
from . import state
from .data import (
    Batches,
    CorpusWindows,
    Documents,
    DocumentWindows,
    MicroBatch,
    Reader,
    Writer,
    in_order,
    micro_batches,
    padded,
    prompts_of,
    split,
    write_all,
)
from .options import METHODS, TrainingOptions
from .parallel import Ranks, Stop, run
from .protocol import FrozenTarget, Losses, Method

_OWN_HELDOUT = 16  # one held-out generated text per so many training ones,
_OWN_HELDOUT_RANGE = (8, 32)  # at least and at most
_OWN_SEED = 1  # makes the orders of corpus and generated text independent


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    step: int
    finished: bool  # false: stopped early and saved
    scores: Scores
    tokens_per_s: float


def train(method: str, options: TrainingOptions, own: Strict) -> Outcome:
    """Trains a head and exports it to `options.out` after the last step.

    Args:
        own: the method's options, of type `METHODS[method].options`.

    Raises:
        ConfigError: an option or a file is invalid, or the output folder belongs to another run.
        CheckpointError: the target cannot be read, or the saved run does not match.
    """
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise ConfigError.at("method", f"unknown method {method!r}; known: {known}")
    on_gpu = _on_gpu(options)
    corpus, heldout = _read(options)
    identity = {
        "method": method,
        "target": state.target_mark(options.target),
        "data": state.data_mark(corpus, heldout),
        **options.identity(),
        **{f"{method}.{name}": value for name, value in own.model_dump(mode="json").items()},
    }
    state.Folder(options.out).check(identity, resume=options.resume)
    training = _TrainingRun(method, options, own, corpus, heldout, identity, on_gpu)
    return run(training, options.num_processes, on_gpu=on_gpu)


@dataclass
class _TrainingRun:
    """One process of a run, which starts when the object is called."""

    name: str
    options: TrainingOptions
    own: Strict
    corpus: Documents
    heldout: Documents
    identity: dict[str, Any]
    on_gpu: bool
    ranks: Ranks = field(init=False)
    stop: Stop = field(init=False)
    target: FrozenTarget = field(init=False)
    method: Method = field(init=False)
    optimization: Optimization = field(init=False)
    tests: dict[str, list[tuple[Tensor, Tensor]]] = field(init=False)  # by kind of text

    def __call__(self, ranks: Ranks, stop: Stop) -> Outcome:
        options, entry = self.options, METHODS[self.name]
        self.ranks, self.stop = ranks, stop
        disable_progress_bar()  # transformers' own
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        torch.set_num_threads(options.threads or max(1, cores // ranks.num_ranks))
        dtypes = {"auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
        self.target = FrozenTarget(
            options.target,
            torch.device("cuda", ranks.rank) if self.on_gpu else torch.device("cpu"),
            dtypes[options.dtype],
            trust_remote_code=options.trust_remote_code,
            allow_pickle=options.allow_pickle,
        )
        torch.manual_seed(options.seed)
        self.method = entry.build(self.own, self.target)  # first, since it validates the options
        if ranks.first and not options.resume:
            state.Folder(options.out).begin(self.identity)
        ranks.wait()
        own, own_heldout = self._own_text() if options.generate else (None, None)
        if options.generate and own_heldout is None:
            return Outcome(0, False, {}, 0.0)
        self.method.prepare(self._token_counts([self.corpus, *([own] if own else [])]))
        self.optimization = Optimization(
            self.method.module,
            options,
            options.adam_lr or entry.adam_lr,
            options.muon_lr or entry.muon_lr,
            self.target.facts.vocab_size,
        )
        self.tests = {"text": in_order(self.heldout, options.window, options.eval_windows)}
        if own_heldout is not None:
            some = range(min(len(own_heldout), options.eval_windows))
            self.tests["own"] = [padded(*own_heldout[i], options.window) for i in some]
        corpus = CorpusWindows(self.corpus, options.window, options.seed)
        seed = options.seed + _OWN_SEED
        own_windows = None if own is None else DocumentWindows(own, options.window, seed)
        return self._steps(Batches(corpus, own_windows, options.own_share, options.batch))

    def _own_text(self) -> tuple[Documents | None, Documents | None]:
        """Returns the target's own text, for training and held out; None if it was stopped."""
        options = self.options
        folder = state.Folder(options.out).training
        writer = Writer(self.target, options.window, options.temperature, options.seed)
        least, most = _OWN_HELDOUT_RANGE
        num_heldout = min(max(options.generate // _OWN_HELDOUT, least), most)
        found: list[Documents | None] = []
        with Bar("own text", options.generate + num_heldout, shown=self.ranks.first) as bar:
            for name, documents, count in (
                ("own.jsonl", self.corpus, options.generate),
                ("own-heldout.jsonl", self.heldout, num_heldout),
            ):
                seed = options.seed + len(found)
                prompts = prompts_of(documents, count, options.window, seed)
                path = folder / name
                found.append(write_all(writer, prompts, path, self.ranks, self.stop, bar.update))
        return found[0], found[1]

    def _token_counts(self, parts: Iterable[Documents]) -> Tensor:  # [vocab]
        """Returns how often each token is a training label."""
        counts = torch.zeros(self.target.facts.vocab_size, dtype=torch.int64)
        for documents in parts:
            labels = documents.tokens[documents.weights > 0].long()
            counts += torch.bincount(labels, minlength=len(counts))
        return counts

    def _steps(self, batches: Batches) -> Outcome:
        """Takes all remaining steps."""
        options, folder, module = self.options, state.Folder(self.options.out), self.method.module
        first = self._resumed(folder)
        module.train()
        scores: Scores = {}
        with Bar(self.name, options.steps, first, shown=self.ranks.first) as bar:
            if first == 0:
                scores = self._evaluate(0, folder, bar)
            for step in range(first, options.steps):
                loss, norm, stopped = self._step(step, batches.at(step))
                done = step + 1
                bar.advance(loss, options.batch * options.window)
                if self.ranks.first:
                    state.append(folder.log, {"step": done, "loss": loss, "grad_norm": norm})
                if done % options.eval_every == 0 or done == options.steps:
                    scores = self._evaluate(done, folder, bar)
                saves = stopped or done % options.save_every == 0 or done == options.steps
                if self.ranks.first and saves:
                    state.save(folder.checkpoint, module, self.optimization.state(), done)
                if stopped and done < options.steps:
                    return Outcome(done, False, scores, bar.tokens_per_s)
            speed = bar.tokens_per_s
        log = state.read_log(folder.log)
        if not scores:  # the run had no remaining steps
            scores = next((from_row(row) for row in reversed(log) if "heldout" in row), {})
        if self.ranks.first:
            self.method.export(folder.path)
            plot_log(log, self.name, folder.path / "training.png")
        return Outcome(options.steps, True, scores, speed)

    def _resumed(self, folder: state.Folder) -> int:
        """Loads the saved state, if any, and returns the next step."""
        found = state.load(folder.checkpoint, self.method.module)
        if found is None:
            if self.ranks.first:  # a log without a checkpoint is left by a killed run
                folder.log.unlink(missing_ok=True)
            return 0
        optimizers, step = found
        self.optimization.load(optimizers)
        if step > self.options.steps:
            raise ConfigError.at(
                "steps", f"{self.options.steps}, but the saved run has taken {step}"
            )
        if self.ranks.first:
            state.cut_log(folder.log, step)
        return step

    def _step(self, step: int, rows: list[tuple[Tensor, Tensor]]) -> tuple[float, float, bool]:
        """Takes a step; returns loss, gradient norm, and whether any process was asked to stop."""
        total = torch.zeros((), device=self.target.facts.device)
        seed = (self.options.seed << 32) + step * self.options.batch
        for part, losses in self._losses(rows, seed):
            (losses.loss * part.share).backward()
            total += losses.loss.detach() * part.share
        local = torch.stack([total, torch.full_like(total, float(self.stop.asked))])
        loss, asked = self.optimization.share(self.ranks, local).tolist()
        return loss, self.optimization.step(step), asked > 0

    @torch.no_grad()
    def _evaluate(self, step: int, folder: state.Folder, bar: Bar) -> Scores:
        """Computes, logs and shows the scores of all held-out windows."""
        self.method.module.eval()
        scores = {kind: self._score(rows) for kind, rows in self.tests.items()}
        self.method.module.train()
        if self.ranks.first:
            state.append(folder.log, as_row(step, scores))
        bar.evaluated(step, scores)
        return scores

    def _score(self, rows: list[tuple[Tensor, Tensor]]) -> Score:
        found = []
        for part, losses in self._losses(rows):
            counts = torch.stack([losses.num_agreed, losses.num_judged]).double().cpu()
            found.append((float(losses.loss) * part.share, counts))
        every = [part for some in self.ranks.gather(found) for part in some]
        agreed, judged = torch.stack([counts for _, counts in every]).sum(0)
        return Score(sum(loss for loss, _ in every), tuple((agreed / judged.clamp(min=1)).tolist()))

    def _losses(
        self, rows: list[tuple[Tensor, Tensor]], seed: int | None = None
    ) -> Iterator[tuple[MicroBatch, Losses]]:
        """Yields losses of this process's micro-batches, in bfloat16 or the target's float32.

        Args:
            seed: seed to which the index in the step is added, so noise does not depend on the
                process.
        """
        ranks, facts, capture = self.ranks, self.target.facts, self.method.capture
        mixed = torch.autocast(
            facts.device.type, dtype=torch.bfloat16, enabled=facts.dtype != torch.float32
        )
        size = self.options.micro_batch
        for part in micro_batches(rows, size, ranks.rank, ranks.num_ranks, facts.device):
            if seed is not None:
                torch.manual_seed(seed + part.first)
            with mixed:
                states = self.target.states(part.windows.tokens, capture)
                losses = self.method.loss(part.windows, states, self.target)
            yield part, losses


def _read(options: TrainingOptions) -> tuple[Documents, Documents]:
    """Reads the corpus and the held-out text.

    Raises:
        CheckpointError: the target's configuration or tokenizer cannot be read.
        ConfigError: a file is invalid, or a window exceeds the target's positions.
    """
    target, trusted = options.target, options.trust_remote_code
    try:
        require_checkpoint(target, trust_remote_code=trusted, allow_pickle=options.allow_pickle)
        config = read_config(target, trust_remote_code=trusted)
    except CheckpointError as error:
        raise CheckpointError.at("target", error.message) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target, local_files_only=True, trust_remote_code=trusted
        )
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError.at(
            "target", f"the tokenizer of {str(target)!r} cannot be read: {reason(error, target)}"
        ) from error
    longest = config.max_position_embeddings
    if options.window > longest:
        raise ConfigError.at(
            "window",
            f"{options.window} tokens exceed the target's {longest} positions "
            "(max_position_embeddings)",
        )
    reader = Reader(tokenizer, config.vocab_size, all_tokens=options.all_tokens)
    corpus = reader.read(options.inputs)
    if options.heldout_file is None:
        return split(corpus, options.heldout, options.window)
    return corpus, reader.read([options.heldout_file], "--heldout-file")


def _on_gpu(options: TrainingOptions) -> bool:
    """Returns whether GPUs are used; requires one per process."""
    count = torch.cuda.device_count()
    if options.device == "cpu" or (options.device == "auto" and not count):
        return False
    if not count:
        raise ConfigError.at("device", "'cuda' was requested, but there is no GPU")
    if options.num_processes > count:
        raise ConfigError.at(
            "num_processes",
            f"{options.num_processes} processes need as many GPUs, but there are {count}",
        )
    return True


_TABLES = ("embed", "lm_head", "markov_w")  # parts of the names of layers with one row per token


class Optimization:
    """A module's optimizers and their schedule.

    Muon (Jordan et al. 2024: orthogonalised momentum) updates hidden matrices; AdamW updates
    embeddings, output layers, norms and biases. The learning rate warms up, stays constant, then
    falls to zero.

    Raises:
        ConfigError: Muon is requested and the module has no hidden matrix.
    """

    def __init__(
        self,
        module: nn.Module,
        options: TrainingOptions,
        adam_lr: float,
        muon_lr: float,
        vocab_size: int,
    ) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if _is_matrix(name, p, vocab_size)]
        if options.optimizer == "adamw":
            matrices = []
        elif options.optimizer == "muon" and not matrices:
            raise ConfigError.at(
                "optimizer", "'muon' needs hidden matrices, but this method has none; use 'adamw'"
            )
        taken = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in taken]
        self._options = options
        self._parameters = [p for _, p in named]
        self._optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            decay = options.weight_decay
            self._optimizers.append(
                torch.optim.Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=decay)
            )
        if others:  # weight decay applies only to matrices
            deep, flat = [p for p in others if p.dim() >= 2], [p for p in others if p.dim() < 2]
            decayed = [(deep, options.weight_decay), (flat, 0.0)]
            groups = [{"params": some, "weight_decay": each} for some, each in decayed if some]
            self._optimizers.append(torch.optim.AdamW(groups, lr=adam_lr, betas=(0.9, 0.95)))
        self._rates = [
            [group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers
        ]

    def share(self, ranks: Ranks, extra: Tensor) -> Tensor:  # [num_extra], same shape
        """Sums gradients and the numbers in `extra` over all processes; returns `extra`'s sum."""
        if ranks.num_ranks == 1:
            return extra
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        parts = [*(p.grad for p in self._parameters if p.grad is not None), extra]
        flat = nn.utils.parameters_to_vector(parts)
        ranks.add(flat)
        nn.utils.vector_to_parameters(flat, parts)
        return extra

    def step(self, step: int) -> float:
        """Takes one step; returns the gradient norm before clipping.

        Raises:
            ConfigError: the norm is not finite; the weights are unchanged.
        """
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._options.max_grad_norm))
        if not math.isfinite(norm):
            raise ConfigError.at(
                "adam_lr",
                f"the gradient norm of step {step + 1} is {norm}; start another run with "
                "lower rates (adam_lr, muon_lr) or a longer warmup",
            )
        scale = rate(step, self._options)
        for optimizer, peaks in zip(self._optimizers, self._rates, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * scale
            optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        return norm

    def state(self) -> list[dict[str, Any]]:
        """Optimizer states for a checkpoint."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load(self, states: list[dict[str, Any]]) -> None:
        """Restores the states of a checkpoint of the same module and options."""
        for optimizer, held in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(held)


def rate(step: int, options: TrainingOptions) -> float:
    """Returns the learning rate factor of a step."""
    num_decaying = max(1, round(options.decay * options.steps))
    warm = (step + 1) / max(1, options.warmup)
    return min(1.0, warm, (options.steps - step) / num_decaying)


def _is_matrix(name: str, parameter: Tensor, vocab_size: int) -> bool:
    layer = name.split(".")[-2:-1]
    table = any(part.startswith(_TABLES) for part in layer) or vocab_size in parameter.shape
    return parameter.dim() == 2 and min(parameter.shape) > 1 and not table


# -- reports: acceptance tables, progress bar, plot


@dataclass(frozen=True, slots=True)
class Score:
    """Draft quality on held-out text."""

    loss: float
    acceptance: tuple[float, ...]  # by position d: the first d + 1 drafted tokens are accepted

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per step by a chain of all positions, including the target's own."""
        return 1 + sum(self.acceptance)


Scores = Mapping[str, Score]  # by kind of text


def as_row(step: int, scores: Scores) -> dict[str, Any]:
    """Returns scores as a row of the log."""
    return {"step": step, "heldout": {kind: asdict(score) for kind, score in scores.items()}}


def from_row(row: Mapping[str, Any]) -> Scores:
    """Returns the scores of a row of the log."""
    scores = row["heldout"].items()
    return {kind: Score(one["loss"], tuple(one["acceptance"])) for kind, one in scores}


def acceptance_table(title: str, scores: Scores) -> Table:
    """Returns a table of held-out acceptance by position, one row per kind of text."""
    most = max((len(score.acceptance) for score in scores.values()), default=0)
    table = Table("held out", title=title or None, title_justify="left")
    for name in ("loss", *map(str, range(1, most + 1)), "tokens per step"):
        table.add_column(name, justify="right")
    for kind, score in scores.items():
        shares = [f"{share:.1%}" for share in score.acceptance]
        table.add_row(kind, f"{score.loss:.3f}", *shares, f"{score.tokens_per_step:.2f}")
    return table


class Bar(tqdm):
    """A progress bar on the terminal, and the tables above it; only in the first process."""

    def __init__(self, what: str, total: int, first: int = 0, *, shown: bool) -> None:
        disable = None if shown else True  # None: unless there is no terminal
        super().__init__(desc=what, total=total, initial=first, disable=disable, dynamic_ncols=True)
        self._console = Console(stderr=True, highlight=False, quiet=not shown)
        self._accepted = ""
        self._num_tokens = 0
        self._spent_s = 0.0
        self._since = time.perf_counter()

    @property
    def tokens_per_s(self) -> float:
        """Training throughput since this run was started or resumed, without evaluation."""
        return self._num_tokens / max(self._spent_s, 1e-9)

    def advance(self, loss: float, num_tokens: int) -> None:
        """Reports a finished step."""
        self._num_tokens += num_tokens
        self._spent_s += time.perf_counter() - self._since
        self._since = time.perf_counter()
        status = f"loss {loss:.3f}, {self.tokens_per_s:,.0f} tokens/s{self._accepted}"
        self.set_postfix_str(status, refresh=False)
        self.update(1)

    def evaluated(self, step: int, scores: Scores) -> None:
        """Reports a finished evaluation, whose time does not count as training."""
        best = list(scores.values())[-1]
        self._accepted = f", {best.tokens_per_step:.2f} tokens per step"
        with self.external_write_mode(file=sys.stderr):
            self._console.print(acceptance_table(f"step {step}", scores))
        self._since = time.perf_counter()


def plot_log(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Plots a log: losses and held-out acceptance by position, over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses, accepted = figure.subplots(1, 2)
    steps = [row for row in rows if "loss" in row]
    judged = [(row["step"], from_row(row)) for row in rows if "heldout" in row]
    losses.plot([row["step"] for row in steps], [row["loss"] for row in steps], lw=0.8, alpha=0.6,
                color="0.5", label="training")  # fmt: skip
    kinds = list(judged[0][1]) if judged else []
    for kind, style in zip(kinds, ("--", "-"), strict=False):
        at = [step for step, _ in judged]
        losses.plot(at, [s[kind].loss for _, s in judged], style, color="C3",
                    label=f"held out: {kind}")  # fmt: skip
        for position in range(len(judged[0][1][kind].acceptance)):
            shares = [scores[kind].acceptance[position] for _, scores in judged]
            accepted.plot(at, shares, style, color=f"C{position % 10}",
                          label=f"{kind}, first {position + 1}")  # fmt: skip
    losses.set(xlabel="step", ylabel="loss", title=f"{title}: loss")
    accepted.set(xlabel="step", ylabel="accepted", ylim=(0, 1),
                 title="held out: greedy drafts accepted")  # fmt: skip
    losses.legend(fontsize=7)
    if judged:
        accepted.legend(fontsize=7, ncols=len(kinds))
    partial = path.with_name("." + path.name)
    figure.savefig(partial, format="png", dpi=110)
    partial.replace(path)
