"""Steps without a model, and exact laws of what they emit, for the tests of verification."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from outrider.scheduler.types import (
    Draft,
    DraftProbs,
    Penalties,
    SamplingRows,
    StepInput,
    ints,
)
from outrider.workers import seats
from outrider.workers.verify import DrawSettings, rejection
from outrider.workers.verify import rules as layouts
from outrider.workers.verify.rules import match

Prefix = tuple[int, ...]
Law = dict[Prefix, float]
Target = Callable[[Prefix], np.ndarray]  # prefix -> [vocab], probabilities of the next token
Drafter = Callable[[Prefix], Sequence[tuple[float, Draft]]]  # prefix -> drafts and their chances
Outcomes = Callable[[Target, Prefix, Draft], Law]  # one round: what is emitted


def sampling_rows(num_seqs: int, **columns: object) -> SamplingRows:
    """Greedy rows of seeds 0, 1, ...; scalars in `columns` are repeated."""
    defaults: dict[str, tuple[object, type]] = {
        "temperature": (0.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "seeds": (np.arange(num_seqs), np.int64),
        "min_new_tokens": (0, np.int32),
        "num_logprobs": (-1, np.int32),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(columns.pop(name, value), dtype), num_seqs).copy()
        for name, (value, dtype) in defaults.items()
    }
    return SamplingRows(**arrays, **columns)


def make_step(
    drafts: Sequence[Draft],
    sampling: SamplingRows | None = None,
    lengths: int | Sequence[int] = 1,
    samples: Sequence[bool] | None = None,
) -> StepInput:
    """A step in which sequence i knows `lengths[i]` tokens, the last of which is the root."""
    num_seqs = len(drafts)
    context = np.broadcast_to(np.asarray(lengths), num_seqs) - 1
    sampled = np.ones(num_seqs, dtype=bool) if samples is None else np.asarray(samples)
    return seats.lay_out(
        step=7,
        token_ids=ints(np.zeros(num_seqs)),
        query_start=ints(np.arange(num_seqs + 1)),
        context_lens=ints(context),
        block_tables=ints(np.zeros((num_seqs, 64))),
        samples=sampled,
        max_nodes=ints([draft.num_nodes for draft in drafts]),
        sampling=sampling or sampling_rows(num_seqs),
        drafts=seats.gather(drafts, sampled),
        block_size=16,
    )


def prefixes(prefix: Prefix, draft: Draft) -> list[Prefix]:
    """The prefix that every row of a draft sees: the root's, then the nodes'."""
    seen = [prefix]
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist()):
        seen.append((*seen[parent + 1], token))
    return seen


def random_target(vocab: int, seed: int, sharpness: float = 1.5) -> Target:
    """A table of conditional distributions, keyed by prefix; some tokens are impossible."""

    def probs(prefix: Prefix) -> np.ndarray:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        weights = np.exp(sharpness * rng.standard_normal(vocab))
        if rng.random() < 0.3:
            weights[rng.integers(vocab)] = 0.0
        return weights / weights.sum()

    return probs


# -- drafters, with the chance of every draft


def fixed_drafter(vocab: int, parents: Sequence[int], seed: int) -> Drafter:
    """Deterministic trees of the given shape, another for every prefix."""

    def drafts(prefix: Prefix) -> list[tuple[float, Draft]]:
        rng = np.random.default_rng([seed, *prefix, 1])
        pick = {parent: rng.permutation(vocab).tolist() for parent in set(parents)}
        return [(1.0, Draft(ints([pick[parent].pop() for parent in parents]), ints(parents)))]

    return drafts


def sampled_drafter(
    vocab: int, parents: Sequence[int], source: Target, fixed: Sequence[int] = ()
) -> Drafter:
    """Trees whose siblings are drawn from `source` without replacement, cut to two tokens.

    The nodes in `fixed` are deterministic: the least likely token that is no sibling's yet.
    """

    def nucleus(prefix: Prefix) -> np.ndarray:
        probs = source(prefix)
        probs = np.where(probs >= np.sort(probs)[-max(2, vocab - 1)], probs, 0.0)
        return probs / probs.sum()

    def extend(prefix: Prefix, tokens: list[int], chance: float) -> Iterator[tuple[float, Draft]]:
        node = len(tokens)
        if node == len(parents):
            rows = [nucleus(prefixes(prefix, drawn(tokens))[parent + 1]) for parent in parents]
            rows = [row * (at not in fixed) for at, row in enumerate(rows)]
            ids = np.tile(np.arange(vocab), (node, 1))
            probs = DraftProbs(ints(ids), np.asarray(rows, dtype=np.float32))
            yield chance, Draft(ints(tokens), ints(parents), probs)
            return
        law = nucleus(prefixes(prefix, drawn(tokens))[parents[node] + 1])
        siblings = [tokens[at] for at in range(node) if parents[at] == parents[node]]
        free = np.setdiff1d(np.arange(vocab), siblings)
        if node in fixed:
            yield from extend(prefix, [*tokens, int(free[law[free].argmin()])], chance)
            return
        law[siblings] = 0.0
        for token in np.flatnonzero(law).tolist():
            yield from extend(prefix, [*tokens, token], chance * law[token] / law.sum())

    def drawn(tokens: list[int]) -> Draft:
        return Draft(ints(tokens), ints(parents[: len(tokens)]))

    return lambda prefix: list(extend(prefix, [], 1.0))


# -- one round of a rule, enumerated through the rule's own code


def coupled_outcomes(target: Target, prefix: Prefix, draft: Draft) -> Law:
    """Enumerates the target's draw at every row."""
    rows = layouts.rows_of(make_step([draft]))
    laws = [target(seen) for seen in prefixes(prefix, draft)]
    law: Law = defaultdict(float)
    for drawn in itertools.product(range(len(laws[0])), repeat=len(laws)):
        chance = float(np.prod([row[token] for row, token in zip(laws, drawn)]))
        law[_emitted(rows, match(rows, ints(drawn)))] += chance
    return law


def rejection_outcomes(target: Target, prefix: Prefix, draft: Draft) -> Law:
    """Enumerates every coin below or above its threshold, and every cell of the residual."""
    rows, family, laws, seen = _weighed(target, prefix, draft)
    chances = rejection.odds(family, seen.target_probs, seen.outside)
    law: Law = defaultdict(float)
    exists = family.children >= 0
    for coins, chance in _coins(chances.accept, exists):

        def decide(tokens: np.ndarray, spare: np.ndarray, coins: np.ndarray = coins):
            return rejection.decide(rows, family, chances, tokens, coins, spare)

        _enumerate_residual(rows, family, chances, laws, decide, chance, law)
    return law


def block_outcomes(target: Target, prefix: Prefix, draft: Draft) -> Law:
    """The same for whole chains; a draft that branches is left to rejection, as the rule does."""
    rows, family, laws, seen = _weighed(target, prefix, draft)
    if rejection.branching(rows, family).any():
        return rejection_outcomes(target, prefix, draft)
    law: Law = defaultdict(float)
    if not rows.drafted.any():
        return coupled_outcomes(target, prefix, draft)
    chances = rejection.chain_odds(rows, family, seen)
    for coins, chance in _coins(chances.accept, rows.drafted):

        def decide(tokens: np.ndarray, spare: np.ndarray, coins: np.ndarray = coins):
            return rejection.decide_chain(rows, family, chances, tokens, coins, spare)

        _enumerate_residual(rows, family, chances, laws, decide, chance, law)
    return law


def _weighed(target: Target, prefix: Prefix, draft: Draft):
    """What a rule that weighs probabilities sees of one round."""
    step = make_step([draft])
    rows = layouts.rows_of(step)
    family = rejection.siblings(rows, step.draft_probs, np.zeros(rows.num_rows, dtype=bool))
    laws = np.stack([target(seen) for seen in prefixes(prefix, draft)])
    inside = np.where(
        family.support >= 0, np.take_along_axis(laws, family.support.clip(0), axis=1), 0.0
    )
    outside = [row.sum() for row in _outside(laws, family.support)]
    seen = rejection.Evidence(inside, np.asarray(outside), ints(np.zeros(rows.num_rows)))
    return rows, family, laws, seen


def _coins(accept: np.ndarray, exists: np.ndarray) -> Iterator[tuple[np.ndarray, float]]:
    """Every way that the coins may fall, with its chance."""
    places = np.argwhere(exists)
    for accepted in itertools.product([True, False], repeat=len(places)):
        coins, chance = np.full(exists.shape, 0.5), 1.0
        for place, yes in zip(map(tuple, places), accepted):
            threshold = accept[place]
            coins[place] = threshold / 2 if yes else (threshold + 1) / 2
            chance *= threshold if yes else 1 - threshold
        if chance > 0:
            yield coins, chance


def _outside(laws: np.ndarray, support: np.ndarray) -> list[np.ndarray]:
    """Every row's probabilities of the tokens that its support lacks."""
    tokens = np.arange(laws.shape[1])
    return [law[np.setdiff1d(tokens, known)] for law, known in zip(laws, support)]


def _enumerate_residual(rows, family, chances, laws, decide, chance, law) -> None:
    nothing = np.zeros(rows.num_rows)
    stop = layouts.walk(rows, decide(ints(nothing), nothing + 0.5))[-1]
    cells = np.concatenate([[chances.outside[stop]], chances.residual[stop]])
    cells /= cells.sum()
    edges = np.concatenate([[0.0], np.cumsum(cells)])
    free = np.setdiff1d(np.arange(laws.shape[1]), family.support[stop])
    for cell in np.flatnonzero(cells > 1e-15).tolist():
        spare = nothing + 0.5
        spare[stop] = (edges[cell] + edges[cell + 1]) / 2
        others = free.tolist() if cell == 0 else [0]
        for token in others:
            share = laws[stop, token] / laws[stop, free].sum() if cell == 0 else 1.0
            outside = np.full(rows.num_rows, token, dtype=np.int32)
            choice = decide(outside, spare)
            law[_emitted(rows, choice)] += chance * float(cells[cell]) * share


def _emitted(rows, choice) -> Prefix:
    passed = layouts.walk(rows, choice)
    return tuple(layouts.verdict(0, rows, choice, passed).tokens(0).tolist())


# -- many rounds


def emission_law(outcomes: Outcomes, target: Target, drafter: Drafter, length: int) -> Law:
    """The exact law of the first `length` tokens, over as many rounds as they take."""
    rounds: dict[Prefix, Law] = {}
    law: Law = defaultdict(float)
    waiting: Law = {(): 1.0}
    while waiting:
        prefix, chance = waiting.popitem()
        if len(prefix) >= length:
            law[prefix[:length]] += chance
            continue
        if prefix not in rounds:
            rounds[prefix] = defaultdict(float)
            for share, draft in drafter(prefix):
                for emitted, likely in outcomes(target, prefix, draft).items():
                    rounds[prefix][emitted] += share * likely
        for emitted, likely in rounds[prefix].items():
            longer = (*prefix, *emitted)
            waiting[longer] = waiting.get(longer, 0.0) + chance * likely
    return law


def distance_from_target(law: Law, target: Target, length: int) -> float:
    """The largest difference from the target's own autoregressive law."""
    vocab, worst = len(target(())), 0.0
    for tokens in itertools.product(range(vocab), repeat=length):
        chance = 1.0
        for at, token in enumerate(tokens):
            chance *= target(tokens[:at])[token]
        worst = max(worst, abs(chance - law.get(tokens, 0.0)))
    return worst


def assert_fits(counts: np.ndarray, probs: np.ndarray) -> None:
    """Pearson's chi-square, to five standard deviations; impossible cells must be empty."""
    assert not counts[probs == 0].any(), (counts, probs)
    wanted = probs[probs > 0] / probs.sum() * counts.sum()
    freedom = len(wanted) - 1
    statistic = float(((counts[probs > 0] - wanted) ** 2 / wanted).sum())
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5, (statistic, freedom)


def law_of(logits: torch.Tensor, top_p: float) -> np.ndarray:
    """Probabilities at temperature 0.9 of the tokens that `top_p` leaves."""
    probs, order = (logits.double() / 0.9).softmax(0).sort(descending=True)
    probs = torch.where(probs.cumsum(0) - probs < top_p, probs, 0.0)
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum()).numpy()


def paths(draft: Draft) -> list[list[int]]:
    every = []
    for node in range(draft.num_nodes):
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = int(draft.parents[at])
        every.append(path)
    return every


RULES = {"coupled": coupled_outcomes, "rejection": rejection_outcomes, "block": block_outcomes}


def penalties_of(row: int, prompt: list[int], output: list[int], **factors: float) -> Penalties:
    ids, counts = np.unique(ints(output), return_counts=True)
    return Penalties(
        row=row,
        repetition=factors.get("repetition", 1.0),
        presence=factors.get("presence", 0.0),
        frequency=factors.get("frequency", 0.0),
        prompt_ids=ints(sorted(set(prompt))),
        output_ids=ints(ids),
        output_counts=ints(counts),
    )


def mixed_settings(num_rows: int, seed: int) -> DrawSettings:
    rng = np.random.default_rng(seed)
    return DrawSettings(
        seeds=np.arange(num_rows) * 31 - 9,
        temperature=rng.choice(np.float32([0, 0.3, 1, 1, 3]), num_rows),
        top_k=rng.choice(ints([0, 0, 1, 5, 70, 400]), num_rows),
        top_p=rng.choice(np.float32([1, 1, 0.95, 0.5, 0.01, 1e-46]), num_rows),
        min_p=rng.choice(np.float32([0, 0, 0.02, 1]), num_rows),
    )


def scaled_logits(num_rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Rows from flat to sharp, some in bfloat16's coarse steps so that many tokens tie."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_rows, vocab), dtype=np.float32)
    logits *= rng.choice(np.float32([0, 0.5, 2, 8]), (num_rows, 1))
    logits[::3, 4:] = -np.inf
    logits[rng.random((num_rows, vocab)) < 0.02] = -np.inf
    logits[:, 2] = np.maximum(logits[:, 2], -1)
    coarse = torch.from_numpy(logits).bfloat16().float()
    return torch.where(torch.arange(num_rows)[:, None] % 2 == 0, coarse, torch.from_numpy(logits))
