"""What drafters without weights themselves draft leaves the target's law alone: enumerated.

Their drafts hang on all that they were told, so that every history of rounds is played to a fresh
drafter, through the guard and its verbs, and every outcome of the round after it is weighed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.drafters.drafting import Drafting
from outrider.drafters.lookup.ngram import ngram
from outrider.drafters.lookup.pool import LocalLink, PoolStore
from outrider.drafters.protocol import Drafter
from outrider.drafters.registry import build
from outrider.scheduler import tree
from outrider.scheduler.types import Batch, Draft, Verdict, ints
from outrider.tests.helpers.lookups import Host, planned, request_of
from outrider.tests.helpers.verification import (
    Law,
    Outcomes,
    Prefix,
    Target,
    block_outcomes,
    coupled_outcomes,
    distance_from_target,
    prefixes,
    random_target,
    rejection_outcomes,
)

LENGTH = 4  # of the law
WINDOW_LENGTH = 6  # so that a window's n-grams come out and are guessed
PROMPT = [0, 1, 2, 0, 1, 0, 2, 1, 0, 1]
PAST = [2, 1, 0, 1, 2, 0, 1, 1]  # text of a request that was served before

Rounds = tuple[Prefix, ...]  # what each emitted


class Copies:
    """A user's drafter: what followed the newest token when it was last written."""

    def draft(self, token_ids: list[int], max_tokens: int) -> list[int]:
        for at in range(len(token_ids) - 2, -1, -1):
            if token_ids[at] == token_ids[-1]:
                return token_ids[at + 1 : at + 1 + max_tokens]
        return []


USER = {"decoding_type": "User", "drafter": f"{__name__}:Copies", "timeout_s": 30}
NGRAM = {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2}
SUFFIX = {"decoding_type": "Suffix", "max_draft_len": 3, "min_token_prob": 0.01}
LOOKAHEAD = {
    "decoding_type": "Lookahead",
    "max_window_size": 2,
    "max_ngram_size": 3,
    "max_verification_set_size": 2,
}
SMALL = {"ngram_size_n": 1, "ngram_size_m": 3, "max_draft_len": 3}
SECTIONS: dict[str, dict[str, Any]] = {
    "PromptLookup": {"decoding_type": "PromptLookup", "max_draft_len": 3},
    "NGramSimple": {"decoding_type": "NGramSimple", **SMALL},
    "NGramMapK": {"decoding_type": "NGramMapK", **SMALL},
    "NGramMapK4V": {"decoding_type": "NGramMapK4V", **SMALL},
    "NGramMod": {
        "decoding_type": "NGramMod",
        "n_match": 1,
        "n_min": 1,
        "max_draft_len": 3,
        "max_pools": 1,
    },
    "NGramCache": {"decoding_type": "NGramCache", "max_draft_len": 3},
    "NGram": NGRAM,
    "NGram, tenant's pool": {**NGRAM, "pool_scope": "tenant"},
    "NGram, replica's pool": {**NGRAM, "pool_scope": "replica"},
    "Suffix": SUFFIX,
    "Suffix tree": {**SUFFIX, "shape": "tree", "max_draft_len": 4, "max_spec_factor": 4.0},
    "User": USER,
    "Compose": {"decoding_type": "Compose", "members": [SUFFIX, NGRAM, USER]},
    "Compose, merged": {
        "decoding_type": "Compose",
        "mode": "merge",
        "members": [SUFFIX, NGRAM, USER],
        "max_draft_len": 4,
    },
}
TREES = ("Suffix tree", "Compose, merged")


def maker(section: dict[str, Any], vocab: int) -> tuple[Callable[[], Drafting], int]:
    """Makes drafters that have served a request; and how many nodes they may draft.

    Of a smaller vocabulary than 3, texts are read as if they were of it.
    """
    config = EngineConfig.load({"model": "m", "speculative_config": section}).speculative_config

    def make() -> Drafting:
        return Drafting(served(build(config, Host(vocab)), vocab), vocab)

    return make, config.max_nodes


def served(drafter: Drafter, vocab: int) -> Drafter:
    """A drafter that has seen a text of the past."""
    drafter.open([request_of("past", within(PROMPT[:3], vocab))])
    past = within(PAST, vocab)
    for begin in range(0, len(past), 2):
        step, text = -1 - begin, ints(past[begin : begin + 2])
        verdict = Verdict(step, text, ints([0, 2]), ints([]), ints([0, 0]))
        drafter.observe(batch_of("past", step, 0, 0), verdict)
    drafter.close(["past"])
    return drafter


def within(text: list[int], vocab: int) -> list[int]:
    return [token % vocab for token in text]


def batch_of(name: str, step: int, max_nodes: int, max_depth: int) -> Batch:
    return planned([name], step, [max_nodes], [max_depth])


def replay(guard: Drafting, target: Target, rounds: Rounds, max_nodes: int, length: int) -> Draft:
    """What the drafter guesses after these rounds."""
    guard.open([request_of("a", within(PROMPT, len(target(()))))])
    text: Prefix = ()
    for step, emitted in enumerate((*rounds, ()), start=1):
        depth = length - len(text) - 1
        batch = batch_of("a", step, max_nodes if depth > 0 else 0, depth)
        (draft,) = guard.propose(batch, batch.max_nodes)
        if step <= len(rounds):
            guard.observe(batch, verdict_of(step, target, text, draft, emitted))
        text += emitted
    guard.shutdown()
    assert guard.stats.faults == 0
    return draft


def verdict_of(step: int, target: Target, text: Prefix, draft: Draft, emitted: Prefix) -> Verdict:
    """The verdict of which only `emitted` is known: its path, and what the window found."""
    path: list[int] = []
    for token in emitted[:-1]:
        at = path[-1] if path else -1
        path += [
            node
            for node in range(draft.num_guesses)
            if draft.parents[node] == at and draft.tokens[node] == token
        ]
    assert len(path) == len(emitted) - 1
    cells = prefixes(text, draft)[1 + draft.num_guesses :]
    found = [int(target(cell).argmax()) for cell in cells]
    return Verdict(
        step,
        ints(emitted),
        ints([0, len(emitted)]),
        ints(path),
        ints([0, len(path)]),
        window=ints(found),
        window_start=ints([0, len(found)]),
    )


def law_of(
    outcomes: Outcomes,
    target: Target,
    make: Callable[[], Drafting],
    max_nodes: int,
    length: int = LENGTH,
) -> tuple[Law, list[Draft], int]:
    """The exact law of the first tokens; every draft there was; accepted tokens in any history."""
    law: Law = defaultdict(float)
    known: dict[tuple[Any, ...], Law] = {}
    drafts: list[Draft] = []
    num_accepted = 0
    waiting: list[tuple[Rounds, float]] = [((), 1.0)]
    while waiting:
        rounds, chance = waiting.pop()
        text: Prefix = sum(rounds, ())
        num_accepted += sum(len(emitted) - 1 for emitted in rounds)
        if len(text) >= length:
            law[text[:length]] += chance
            continue
        draft = replay(make(), target, rounds, max_nodes, length)
        shape = draft.tokens.tobytes(), draft.parents.tobytes(), draft.num_window
        if (text, shape) not in known:
            known[text, shape] = outcomes(target, text, draft)
            drafts.append(draft)
        for emitted, likely in known[text, shape].items():
            if likely > 0:
                waiting.append(((*rounds, emitted), chance * likely))
    return law, drafts, num_accepted


RULES = pytest.mark.parametrize(
    "outcomes",
    [coupled_outcomes, rejection_outcomes, block_outcomes],
    ids=lambda rule: rule.__name__,
)


@RULES
@pytest.mark.parametrize("name", SECTIONS)
def test_what_looks_tokens_up_leaves_the_law_alone(outcomes, name):
    make, max_nodes = maker(SECTIONS[name], vocab=3)
    target = random_target(3, seed=8, sharpness=0.7)
    law, drafts, num_accepted = law_of(outcomes, target, make, max_nodes)
    assert distance_from_target(law, target, LENGTH) < 1e-12
    assert num_accepted > 0
    branch = [draft for draft in drafts if not tree.is_chain(draft.parents)]
    assert bool(branch) == (name in TREES)


@RULES
def test_a_pool_fed_by_another_replica_leaves_the_law_alone(outcomes):
    config = EngineConfig.load(
        {"model": "m", "speculative_config": {**NGRAM, "pool_scope": "cluster"}}
    ).speculative_config

    def make() -> Drafting:
        store = PoolStore("f", 1000)
        served(ngram(config, LocalLink(store)), 3)
        return Drafting(ngram(config, LocalLink(store)), 3)

    target = random_target(3, seed=9, sharpness=0.7)
    law, _, num_accepted = law_of(outcomes, target, make, config.max_nodes)
    assert distance_from_target(law, target, LENGTH) < 1e-12
    assert num_accepted > 0


@RULES
@pytest.mark.parametrize("beside", [[], [USER]], ids=["alone", "beside another's guesses"])
def test_a_window_leaves_the_law_alone(outcomes, beside):
    section = {"decoding_type": "Compose", "members": [LOOKAHEAD, *beside], "mode": "merge"}
    vocab = 2 if outcomes is coupled_outcomes else 3  # that draws at the window's rows, too
    make, max_nodes = maker(section if beside else LOOKAHEAD, vocab)
    target = random_target(vocab, seed=3, sharpness=0.7)
    law, drafts, num_accepted = law_of(outcomes, target, make, min(max_nodes, 7), WINDOW_LENGTH)
    assert distance_from_target(law, target, WINDOW_LENGTH) < 1e-12
    assert num_accepted > 0
    assert any(draft.num_window and draft.num_guesses for draft in drafts)
