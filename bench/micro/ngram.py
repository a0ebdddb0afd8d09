"""What drafters without a model cost per step: `propose` and `observe`, without `open`.

    python -m outrider.bench.micro.ngram [--batch 64] [--context 8192] [--steps 100] [--emit 4]
                                           [--noise 0.02] [--only NGram ...]

Synthetic text of phrases from a common stock, so that drafts are found and mostly right: each
request's future is known, and a step emits what its draft got right of it, plus one. The *skewed*
cases have tokens by Zipf's law instead, after which nearly anything may follow.

Two phases: while prompts are being indexed, all requests having arrived at once; and then, when
everything is (what the first steps left is indexed in between, uncounted). Milliseconds per step by
the wall clock, median and 99th percentile, of `propose`, which a step waits for, and of `observe`,
which follows in the same thread. The aim is a median of `propose` below 1 ms for 64 requests of 8k
tokens, in both phases.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...config import EngineConfig
from ...drafters.lookup.ngram_file import Arrays, save
from ...drafters.lookup.pool import LocalLink, PoolLink, PoolStore
from ...drafters.protocol import Drafter
from ...drafters.registry import build
from ...drafters.vocabulary import fingerprint
from ...scheduler.sampling import SamplingParams
from ...scheduler.types import Batch, Draft, IntArray, Request, StepPlan, Verdict, ints

VOCAB = 32_000
_PHRASES, _PHRASE_LEN = 40, 60
_ZIPF = 1.3  # the exponent
_PAST_LEN = 2048  # tokens that a finished request emitted
_MAX_DRAIN = 10**6  # steps without a request until everything is indexed


@dataclass(frozen=True, slots=True)
class Case:
    """A drafter with some options, and who uses it."""

    kind: str  # decoding_type
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    num_tenants: int = 1
    num_finished: int = 0  # requests that ended before
    has_corpus: bool = False
    is_uncut: bool = False  # a step emits all that was right of a draft
    is_skewed: bool = False  # tokens by Zipf's law, each for itself

    @property
    def name(self) -> str:
        return self.kind + (f", {self.note}" if self.note else "")


NEWEST: dict[str, Any] = {"is_use_oldest": False}
PAST: dict[str, Any] = {"num_finished": 48}
# A pool that takes a cut draft for a bad one would be wiped all the time: NGramMod is not cut.
CASES = (
    Case("PromptLookup"),
    Case("PromptLookup", {"max_matching_ngram_size": 16}, "n-grams to 16"),
    Case("NGramSimple"),
    Case("NGramMapK"),
    Case("NGramMapK4V"),
    Case("NGramMapK4V", {"ngram_size_n": 8, "ngram_size_m": 8}, "n 8, m 8"),
    Case("NGramMod", is_uncut=True),
    Case("NGramMod", note="4 tenants", num_tenants=4, is_uncut=True),
    Case("NGramCache"),
    Case("NGramCache", note="corpus, past", has_corpus=True, **PAST),
    Case("Suffix"),
    Case("Suffix", {"shape": "tree"}, "tree"),
    Case("Suffix", note="past", **PAST),
    Case("Suffix", {"shape": "tree"}, "tree, past", **PAST),
    Case("Suffix", {"shape": "tree"}, "tree, skewed", is_skewed=True),
    Case("Suffix", {"shape": "tree", "min_token_prob": 0.0}, "tree, skewed, p 0", is_skewed=True),
    Case("NGram"),
    Case("NGram", NEWEST, "newest"),
    Case("NGram", {"max_matching_ngram_size": 16}, "n-grams to 16"),
    Case("NGram", {"min_matching_ngram_size": 2}, "from 2 tokens"),
    Case("NGram", {"pool_scope": "tenant"}, "tenant"),
    Case("NGram", {"pool_scope": "tenant", **NEWEST}, "tenant, newest"),
    Case("NGram", {"pool_scope": "tenant", "max_matching_ngram_size": 16}, "tenant, to 16"),
    Case("NGram", {"pool_scope": "replica"}, "replica"),
    Case("NGram", {"pool_scope": "cluster"}, "cluster"),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds of one step for the whole batch."""

    median: float
    p99: float

    @classmethod
    def of(cls, times_s: list[float]) -> Spread:
        return cls(1e3 * float(np.median(times_s)), 1e3 * float(np.quantile(times_s, 0.99)))

    def __str__(self) -> str:
        return f"{self.median:>9.2f}{self.p99:>7.2f}"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the whole batch."""

    propose_s: float
    observe_s: float
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Phase:
    """Many steps of `propose` and `observe`, which run one after the other."""

    propose: Spread
    observe: Spread

    @classmethod
    def of(cls, steps: list[Step]) -> Phase:
        return cls(
            Spread.of([step.propose_s for step in steps]),
            Spread.of([step.observe_s for step in steps]),
        )

    def __str__(self) -> str:
        return f"{self.propose}{self.observe}"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a case costs."""

    open_ms: float  # of all requests together
    opening: Phase | None  # None: everything was indexed at once
    steady: Phase
    drafted: float  # tokens per request and step, once all is indexed
    accepted: float


class _Host:
    """Drafters without a model ask for nothing else."""

    vocab_size = VOCAB

    def __init__(self, tokenizer: Path) -> None:
        self.tokenizer = tokenizer
        self._store = PoolStore("", 2**18)

    def pool_link(self, config: Any) -> PoolLink:
        return LocalLink(self._store)


class Run:
    """A batch of requests whose text is known, and their drafter."""

    def __init__(self, case: Case, args: argparse.Namespace, folder: Path) -> None:
        self._emit = sys.maxsize if case.is_uncut else args.emit
        self._step = 0
        rng = np.random.default_rng(0)
        self._stock = rng.integers(0, VOCAB, (_PHRASES, _PHRASE_LEN)).astype(np.int32)
        section = {"decoding_type": case.kind, **case.options}
        if case.has_corpus:
            section["lookup_cache_static"] = str(_corpus(self._stock, folder))
        config = EngineConfig.load({"model": "m", "speculative_config": section})
        host: Any = _Host(folder)
        self.drafter: Drafter = build(config.speculative_config, host)
        self._noise, self._is_skewed = args.noise, case.is_skewed
        tenants = [str(row % case.num_tenants) for row in range(args.batch)]
        for index in range(case.num_finished):
            self._finish(f"past {index}", tenants[index % args.batch], seed=10_000 + index)
        self.drain()
        length = args.context + 2 * args.steps * min(self._emit, 65) + 1
        self._texts = [self._text(length, seed) for seed in range(args.batch)]
        self.names = tuple(map(str, range(args.batch)))
        self._budgets = np.full(args.batch, config.speculative_config.draft_len, dtype=np.int32)
        self._known = [args.context] * args.batch
        requests = [
            Request(name, text[: args.context], _UNLIMITED, seed=0, tenant=tenant)
            for name, text, tenant in zip(self.names, self._texts, tenants)
        ]
        start = time.perf_counter()
        self.drafter.open(requests)
        self.open_ms = (time.perf_counter() - start) * 1e3

    @property
    def is_indexed(self) -> bool:
        return getattr(self.drafter, "num_waiting", 0) == 0

    def drain(self) -> None:
        """Steps without a request until everything is indexed."""
        for _ in range(_MAX_DRAIN):
            if self.is_indexed:
                return
            self._idle()

    def step(self) -> Step:
        self._step += 1
        batch = _batch(self._step, self.names, self._budgets)
        begin = time.perf_counter()
        drafts = self.drafter.propose(batch, self._budgets)
        proposed = time.perf_counter()
        verdict = self._judge(drafts)
        judged = time.perf_counter()
        self.drafter.observe(batch, verdict)
        observed = time.perf_counter()
        num_drafted = sum(draft.num_nodes for draft in drafts)
        return Step(proposed - begin, observed - judged, num_drafted, len(verdict.path))

    def end(self) -> None:
        self.drafter.close(self.names)
        self.drafter.shutdown()

    def _finish(self, name: str, tenant: str, seed: int) -> None:
        """A request that came and went."""
        text = self._text(_PAST_LEN, seed)
        request = Request(name, text[:1], _UNLIMITED, seed=0, tenant=tenant, emitted=text[1:])
        self.drafter.open([request])
        self.drain()
        self.drafter.close([name])

    def _idle(self) -> None:
        nothing = ints([])
        verdict = Verdict(self._step, nothing, ints([0]), nothing, ints([0]))
        self.drafter.observe(_batch(self._step, (), nothing), verdict)

    def _text(self, length: int, seed: int) -> IntArray:
        """Phrases of a common stock, with some tokens replaced; or what is frequent, and rare."""
        rng = np.random.default_rng(seed)
        if self._is_skewed:
            return (rng.zipf(_ZIPF, length) % VOCAB).astype(np.int32)
        text = self._stock[rng.integers(0, _PHRASES, length // _PHRASE_LEN + 1)].ravel()[:length]
        noise = rng.random(length) < self._noise
        return np.where(noise, rng.integers(0, VOCAB, length), text).astype(np.int32)

    def _judge(self, drafts: list[Draft]) -> Verdict:
        """What a target would say whose text is known; at most `emit` tokens each."""
        emitted: list[int] = []
        path: list[int] = []
        starts, path_starts = [0], [0]
        for row, draft in enumerate(drafts):
            at, node, text = self._known[row], -1, self._texts[row]
            while True:
                token = int(text[at])
                emitted.append(token)
                at += 1
                node = next(_children(draft, node, token), -2)
                if node == -2 or at - self._known[row] == self._emit:
                    break
                path.append(node)
            self._known[row] = at
            starts.append(len(emitted))
            path_starts.append(len(path))
        return Verdict(self._step, ints(emitted), ints(starts), ints(path), ints(path_starts))


_UNLIMITED = SamplingParams(max_tokens=None)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=100, help="of each phase")
    parser.add_argument("--emit", type=int, default=4, help="most tokens that a step emits")
    parser.add_argument("--only", nargs="*", help="drafters, by decoding_type")
    parser.add_argument("--noise", type=float, default=0.02, help="share of random tokens")
    args = parser.parse_args()
    _say(
        f"{args.batch} requests of {args.context} tokens, at most {args.emit} emitted a step, "
        f"{args.noise:.1%} noise; ms per step"
    )
    titles = ("propose", "p99", "observe", "p99")
    heads = "".join(f"{title:>{9 - 2 * (place % 2)}}" for place, title in enumerate(titles))
    _say(f"{'':<28}{'while prompts are indexed':>32}{'then':>32}\n{'':<28}{heads}{heads}")
    for case in CASES:
        if not args.only or case.kind in args.only:
            cost = measure(case, args)
            _say(
                f"{case.name:<28}{cost.opening or '-'!s:>32}{cost.steady!s}"
                f"   open {cost.open_ms:.1f}, drafted {cost.drafted:.2f}, "
                f"accepted {cost.accepted:.2f}"
            )


def measure(case: Case, args: argparse.Namespace) -> Cost:
    """One case over both phases."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(case, args, Path(folder))
        opening: list[Step] = []
        while not run.is_indexed and len(opening) < args.steps:
            opening.append(run.step())
        run.drain()
        for _ in range(3):  # what was just indexed is in the caches
            run.step()
        steps = [run.step() for _ in range(args.steps)]
        run.end()
    count = len(steps) * len(run.names)
    return Cost(
        run.open_ms,
        Phase.of(opening) if opening else None,
        Phase.of(steps),
        sum(step.num_drafted for step in steps) / count,
        sum(step.num_accepted for step in steps) / count,
    )


def _corpus(stock: IntArray, folder: Path) -> Path:
    """A static table of the phrases, and the tokenizer that it is bound to."""
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}', encoding="utf-8")
    bigrams = np.concatenate([stock[:, :-2, None], stock[:, 1:-1, None]], axis=2).reshape(-1, 2)
    keys, where = np.unique(bigrams, axis=0, return_inverse=True)
    order = np.argsort(where.ravel(), kind="stable")
    tokens = stock[:, 2:].ravel()[order]
    pairs = np.stack([tokens, np.full_like(tokens, 2)], axis=1)
    counts = np.bincount(where.ravel()).astype(np.int32)
    path = folder / "corpus.ngrams"
    save(path, [Arrays("", keys, counts, pairs)], fingerprint(folder), {})
    return path


def _children(draft: Draft, parent: int, token: int) -> Iterator[int]:
    for node in np.flatnonzero((draft.parents == parent) & (draft.tokens == token)):
        yield int(node)


def _batch(step: int, names: tuple[str, ...], budgets: IntArray) -> Batch:
    """As much of a batch as drafters without a model look at."""
    none, ones = ints([]), np.ones(len(names), np.int32)
    seats, edges = ints(range(len(names))), none.reshape(0, 2)
    plan = StepPlan(step, seats, ones - ones, ones, budgets, none, none.reshape(0, 3), edges)
    return Batch(names, plan, ones.astype(bool), budgets)


def _say(text: str) -> None:
    """Writes a line of the table."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
