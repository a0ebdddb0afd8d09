"""What drafters without a model cost per step: `propose` and `observe`, without `open`.

    python -m outrider.bench.micro_ngram [--batch 64] [--context 8192] [--steps 60] [--emit 4]
                                           [--noise 0.02]

Synthetic text of phrases from a common stock, so that drafts are found and mostly right: each
request's future is known, and a step emits what its draft got right of it, plus one. Of all steps
the median and two percentiles (on a shared machine the 10th tells more); the aim is a median below
1 ms for 64 requests of 8k tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import EngineConfig
from ..drafters.protocol import Drafter
from ..drafters.registry import build
from ..scheduler.sampling import SamplingParams
from ..scheduler.types import Batch, Draft, IntArray, Request, SamplingRows, Verdict, ints

VOCAB = 32_000
_PHRASES = 40
DRAFTERS: dict[str, dict[str, Any]] = {
    "NGram": {},
    "PromptLookup": {},
    "NGramSimple": {"max_draft_len": 16},
    "NGramMapK": {"max_draft_len": 16},
    "NGramMapK4V": {"ngram_size_n": 8, "ngram_size_m": 8},
    "NGramMod": {},
    "NGramCache": {},
    "Suffix": {},
    "Suffix, tree": {"shape": "tree"},
}


# A pool that takes a cut draft for a bad one would be wiped all the time.
UNCUT = {"NGramMod"}


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of one step for the whole batch."""

    propose_ms: float
    observe_ms: float
    total_ms: float
    quiet_ms: float  # the 10th percentile: what it costs on a machine of its own
    total_p90_ms: float
    open_ms: float  # of one request
    drafted: float  # tokens per request and step
    accepted: float


class _Host:
    """Drafters without a model ask for nothing else."""

    vocab_size = VOCAB
    tokenizer = Path()


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--emit", type=int, default=4, help="most tokens that a step emits")
    parser.add_argument("--only", nargs="*", help="drafters, by decoding_type")
    parser.add_argument("--noise", type=float, default=0.02, help="share of random tokens")
    args = parser.parse_args()
    show = f"{'drafter':<14}{'propose':>9}{'observe':>9}{'total ms':>10}{'p10':>8}{'p90':>8}"
    _say(
        f"{args.batch} requests of {args.context} tokens, at most {args.emit} emitted a step, "
        f"{args.noise:.1%} noise"
    )
    _say(show + f"{'open ms':>9}{'drafted':>9}{'accepted':>10}")
    for name, options in DRAFTERS.items():
        if args.only and name not in args.only:
            continue
        emit = args.emit if name not in UNCUT else sys.maxsize
        sizes = (args.batch, args.context, args.steps, emit)
        cost = measure(name, options, *sizes, args.noise)
        _say(
            f"{name:<14}{cost.propose_ms:>9.3f}{cost.observe_ms:>9.3f}{cost.total_ms:>10.3f}"
            f"{cost.quiet_ms:>8.3f}{cost.total_p90_ms:>8.3f}{cost.open_ms:>9.2f}{cost.drafted:>9.2f}"
            f"{cost.accepted:>10.2f}"
        )


def measure(
    name: str,
    options: dict[str, Any],
    batch_size: int,
    context: int,
    steps: int,
    emit: int,
    noise: float,
) -> Cost:
    """One drafter over `steps` steps."""
    section = {"decoding_type": name.partition(",")[0], **options}
    config = EngineConfig.load({"model": "m", "speculative_config": section})
    host: Any = _Host()
    drafter = build(config.speculative_config, host)
    stock = np.random.default_rng(0).integers(0, VOCAB, (_PHRASES, 60)).astype(np.int32)
    length = context + steps * min(emit, 65) + 1
    texts = [_text(stock, length, noise, seed) for seed in range(batch_size)]
    names = tuple(map(str, range(batch_size)))
    requests = [
        Request(name, text[:context], SamplingParams(max_tokens=None), seed=0)
        for name, text in zip(names, texts)
    ]
    start = time.perf_counter()
    drafter.open(requests)
    open_ms = (time.perf_counter() - start) * 1e3 / batch_size
    budgets = np.full(batch_size, config.speculative_config.max_draft_len, dtype=np.int32)
    known = [context] * batch_size
    times, drafted, accepted = [], 0, 0
    for step in range(steps):
        batch = _batch(step, names, budgets)
        before = time.perf_counter()
        drafts = drafter.propose(batch, budgets)
        between = time.perf_counter()
        verdict = _judge(step, drafts, texts, known, emit)
        after = time.perf_counter()
        drafter.observe(batch, verdict)
        times.append((between - before, time.perf_counter() - after))
        drafted += sum(draft.num_nodes for draft in drafts)
        accepted += len(verdict.path)
    _end(drafter, names)
    spent = np.array(times[5:]) * 1e3
    total = spent.sum(axis=1)
    propose_ms, observe_ms = np.median(spent, axis=0).tolist()
    return Cost(
        propose_ms,
        observe_ms,
        float(np.median(total)),
        float(np.quantile(total, 0.1)),
        float(np.quantile(total, 0.9)),
        open_ms,
        drafted / steps / batch_size,
        accepted / steps / batch_size,
    )


def _end(drafter: Drafter, names: tuple[str, ...]) -> None:
    drafter.close(names)
    drafter.shutdown()


def _text(stock: IntArray, length: int, noise: float, seed: int) -> IntArray:
    """Phrases of a common stock, with some tokens replaced."""
    rng = np.random.default_rng(seed)
    text = stock[rng.integers(0, len(stock), length // stock.shape[1] + 1)].ravel()[:length]
    return np.where(rng.random(length) < noise, rng.integers(0, VOCAB, length), text).astype(
        np.int32
    )


def _judge(
    step: int, drafts: list[Draft], texts: list[IntArray], known: list[int], emit: int
) -> Verdict:
    """What a target would say whose text is known; at most `emit` tokens each."""
    emitted: list[int] = []
    path: list[int] = []
    starts, path_starts = [0], [0]
    for row, draft in enumerate(drafts):
        at, node, text = known[row], -1, texts[row]
        while True:
            token = int(text[at])
            emitted.append(token)
            at += 1
            node = next(_children(draft, node, token), -2)
            if node == -2 or at - known[row] == emit:
                break
            path.append(node)
        known[row] = at
        starts.append(len(emitted))
        path_starts.append(len(path))
    return Verdict(step, ints(emitted), ints(starts), ints(path), ints(path_starts))


def _children(draft: Draft, parent: int, token: int) -> Iterator[int]:
    for node in np.flatnonzero((draft.parents == parent) & (draft.tokens == token)):
        yield int(node)


def _batch(step: int, names: tuple[str, ...], budgets: IntArray) -> Batch:
    """As much of a batch as drafters without a model look at."""
    none: Any = ints([])
    rows = SamplingRows(none, none, none, none, none, none, none)
    return Batch(
        step, names, none, none, none, none, np.ones(len(names), bool), budgets, none, rows
    )


def _say(text: str) -> None:
    """Writes a line of the table."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
