"""Drafters walked through random texts, in random pieces, beside a slow reading of each."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from outrider.config import EngineConfig
from outrider.drafters.lookup.ngram_file import Arrays
from outrider.drafters.protocol import Drafter
from outrider.drafters.registry import build
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Batch, Draft, Request, StepPlan, Verdict, ints


class Host:
    """What drafters without a model may ask of an engine."""

    def __init__(self, vocab_size: int, tokenizer: Path = Path("nowhere")) -> None:
        self.vocab_size, self.tokenizer = vocab_size, tokenizer


def drafter_of(
    section: dict[str, Any], vocab_size: int = 50, tokenizer: Path = Path("nowhere")
) -> Drafter:
    config = EngineConfig.load({"model": "m", "speculative_config": section})
    return build(config.speculative_config, Host(vocab_size, tokenizer))


def request_of(name: str, prompt: list[int], tenant: str = "", **fields: Any) -> Request:
    return Request(
        name, ints(prompt), SamplingParams(max_tokens=None), seed=0, tenant=tenant, **fields
    )


def batch_of(names: list[str], budgets: list[int]) -> Batch:
    return planned(names, 0, budgets, budgets)


def planned(names: list[str], step: int, max_nodes: list[int], max_depth: list[int]) -> Batch:
    """A batch of one known token each, as much of it as drafters without a model read."""
    none, ones = ints([]), np.ones(len(names), dtype=np.int32)
    plan = StepPlan(
        step, ints(range(len(names))), ones - ones, ones, ints(max_nodes), none,
        none.reshape(0, 3), none.reshape(0, 2),
    )  # fmt: skip
    return Batch(tuple(names), plan, ones.astype(bool), ints(max_depth))


def propose(drafter: Drafter, names: list[str], budgets: list[int]) -> list[Draft]:
    return drafter.propose(batch_of(names, budgets), ints(budgets))


def observe(drafter: Drafter, names: list[str], emitted: list[list[int]]) -> None:
    starts = np.concatenate([[0], np.cumsum([len(each) for each in emitted])])
    verdict = Verdict(0, ints(sum(emitted, [])), ints(starts), ints([]), ints([0] * len(starts)))
    drafter.observe(batch_of(names, [0] * len(names)), verdict)


def counts_of(arrays: Arrays) -> dict[tuple[int, ...], dict[int, int]]:
    """What a file's table says: key -> token -> count, in its order."""
    flat = iter(arrays.pairs.tolist())
    return {
        tuple(key): dict(next(flat) for _ in range(size))
        for key, size in zip(arrays.keys.tolist(), arrays.counts.tolist(), strict=True)
    }


def growing(rng: random.Random, text: list[int], count: int, vocab: int) -> list[int]:
    """`count` more tokens: copies of earlier pieces, with some noise."""
    more: list[int] = []
    while len(more) < count:
        known = text + more
        if known and rng.random() < 0.8:
            begin = rng.randrange(len(known))
            more += known[begin : begin + rng.randrange(1, 20)]
        else:
            more.append(rng.randrange(vocab))
    return more[:count]


def walk(
    section: dict[str, Any],
    oracle: Any,
    *,
    seed: int,
    vocab: int = 4,
    steps: int = 60,
    prompt_len: int = 60,
    num_requests: int = 3,
    max_budget: int | None = None,
    shaped: Callable[[Draft], Any] = lambda draft: draft.tokens.tolist(),
) -> int:
    """Asserts at every step that draft and oracle agree; the number of drafted tokens.

    The oracle has `open(name, tokens)`, `draft({name: budget})` and `observe(name, drafted,
    emitted)`, which comes after `draft` for every name.
    """
    rng = random.Random(seed)
    drafter = drafter_of(section, vocab)
    longest = (
        max_budget
        or EngineConfig.load(
            {"model": "m", "speculative_config": section}
        ).speculative_config.draft_len
    )
    texts = {
        str(index): growing(rng, [], rng.randrange(1, prompt_len), vocab)
        for index in range(num_requests)
    }
    for name, text in texts.items():
        drafter.open([request_of(name, text)])
        oracle.open(name, list(text))
    num_drafted = 0
    for _ in range(steps):
        names = [name for name in texts if rng.random() < 0.9]
        budgets = [rng.choice([0, 1, longest // 2, longest, longest]) for _ in names]
        drafts = propose(drafter, names, budgets)
        wanted = oracle.draft(dict(zip(names, budgets)))
        emitted = []
        for name, draft in zip(names, drafts):
            assert shaped(draft) == wanted[name], (name, texts[name])
            num_drafted += draft.num_nodes
            chain = draft.tokens.tolist()
            right = rng.choice([0, len(chain) // 2, len(chain), len(chain)])
            count = rng.choice([0, 1, 1, 2, 5])
            new = chain[:right] + growing(rng, texts[name] + chain[:right], count, vocab)
            texts[name] += new
            emitted.append(new)
        observe(drafter, names, emitted)
        for name, draft, new in zip(names, drafts, emitted):
            oracle.observe(name, draft.tokens.tolist(), new)
    return num_drafted


def num_matching(drafted: list[int], emitted: list[int]) -> int:
    count = 0
    while count < min(len(drafted), len(emitted)) and drafted[count] == emitted[count]:
        count += 1
    return count


class TextOracle:
    """Base of oracles that draft for each request alone."""

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}

    def open(self, name: str, tokens: list[int]) -> None:
        self.texts[name] = tokens

    def draft(self, budgets: dict[str, int]) -> dict[str, list[int]]:
        return {
            name: self.one(name, self.texts[name], budget) if budget else []
            for name, budget in budgets.items()
        }

    def one(self, name: str, tokens: list[int], budget: int) -> list[int]:
        raise NotImplementedError

    def observe(self, name: str, drafted: list[int], emitted: list[int]) -> None:
        self.texts[name] += emitted
