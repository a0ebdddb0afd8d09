"""A speculation cache leaves the target's law alone: enumerated, on every path that a draft takes.

The drafter, its cache and the service that draws for it are the real ones, over a model that is a
table. Whatever they draw is a choice, and all choices are played. Draws of one key of the noise
share one number, so that a draft which is drawn again is the same one, and a draft whose fate
depended on noise that is used later would show. The verdict's choices are those of the rules' own
code (`tests/helpers/verification.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from outrider.config import EngineConfig
from outrider.config.section import SpeculationBase
from outrider.drafters.drafting import Drafting
from outrider.drafters.protocol import CacheCounts, Drafted, DraftStep
from outrider.drafters.registry import build
from outrider.drafters.speculation_cache import SpeculationCache
from outrider.errors import WorkerDiedError
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Draft, Request, SpeculationOptions, StepInput, Verdict, ints
from outrider.tests.helpers.lookups import planned
from outrider.tests.helpers.verification import (
    RULES,
    Law,
    Prefix,
    Target,
    distance_from_target,
    make_step,
    prefixes,
)
from outrider.workers import draft as service
from outrider.workers import outcomes
from outrider.workers.collective import Collective
from outrider.workers.draft import DraftService
from outrider.workers.verify import DrawSettings, draw_siblings
from outrider.workers.verify import rules as layouts
from outrider.workers.verify.rules import match

VOCAB, LENGTH, ROOM, PROMPT = 2, 3, 9, (0, 1, 0)
BLOCK_SIZE, NUM_BLOCKS, NUM_SCRATCH = 4, 16, 128
EXACT = 1e-6  # the drafts' probabilities are float32


# -- choices


class Chance:
    """The random choices of a run: first those of a script, then the first that is possible."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.taken: list[int] = []
        self.others: list[list[int]] = []  # that each choice might have been, and is not yet
        self.probability = 1.0
        self._cells: dict[tuple[Any, ...], tuple[float, float]] = {}

    def pick(self, weights: Sequence[float]) -> int:
        """One of these, each as likely as its weight."""
        possible = [at for at, weight in enumerate(weights) if weight > 1e-12]
        is_new = len(self.taken) >= len(self._script)
        choice = possible[0] if is_new else self._script[len(self.taken)]
        self.taken.append(choice)
        self.others.append(possible[1:] if is_new else [])
        self.probability *= weights[choice] / sum(weights)
        return choice

    def draw(self, key: tuple[Any, ...], probs: Sequence[float]) -> int:
        """A token of a distribution by the number of a key, of which each draw tells more."""
        low, high = self._cells.get(key, (0.0, 1.0))
        ends = np.concatenate([[0.0], np.cumsum(probs) / np.sum(probs)])
        begins, ends = np.maximum(ends[:-1], low), np.minimum(ends[1:], high)
        token = self.pick(np.maximum(ends - begins, 0.0).tolist())
        self._cells[key] = float(begins[token]), float(ends[token])
        return token


def law_of(play: Callable[[Chance], Prefix]) -> Law:
    """The law of what a run returns, over all choices."""
    law: Law = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        chance = Chance(scripts.pop())
        law[play(chance)] += chance.probability
        for at, others in enumerate(chance.others):
            scripts += [[*chance.taken[:at], other] for other in others]
    assert sum(law.values()) == pytest.approx(1.0)
    return law


# -- a draft model that is a table, and whose messages may be late or never come


class TableModel:
    """Distributions by the text after the prompt; its KV cache holds token ids."""

    def __init__(self, source: Target) -> None:
        self._source = source

    def new_cache(self, num_blocks: int, block_size: int) -> np.ndarray:
        return np.full(num_blocks * block_size, -1, dtype=np.int64)

    def forward(self, step: StepInput, cache: np.ndarray) -> torch.Tensor:
        moved = cache[step.kv_moves[:, 0]].copy()
        cache[step.kv_moves[:, 1]] = moved
        cache[step.slot_mapping] = step.token_ids
        owner = np.arange(step.num_seqs).repeat(np.diff(step.query_start))
        laws = []
        for row in step.rows.tolist():
            index = np.arange(int(step.positions[row]) + 1)
            table = step.block_tables[owner[row]]
            text = cache[table[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE]
            assert text[: len(PROMPT)].tolist() == list(PROMPT), "the cache is stale"
            laws.append(self._source(tuple(text[len(PROMPT) :].tolist())))
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(np.stack(laws)).astype(np.float32))


ALONE = Collective.threads(1, timeout_s=10)[0]


class Model:
    """The draft model's workers, as the engine sees them.

    Args:
        late: answers, by their number, that are not there when they are asked for.
        dead: answers with which it dies.
        told: of the target's verdicts, how many it gets of each, in turn.
    """

    vocab_size, max_model_len, max_num_batched_tokens = VOCAB, 64, 256
    num_blocks, block_size = NUM_BLOCKS, BLOCK_SIZE

    def __init__(
        self,
        source: Target,
        late: Sequence[int] = (),
        dead: Sequence[int] = (),
        told: Sequence[int] = (),
    ) -> None:
        self._source, self._late, self._dead, self._told = source, late, dead, told
        self.reads_verdicts = bool(told)
        self._num_answers = 0
        self._asked: DraftStep | None = None
        self.revive()

    def ask(self, step: DraftStep) -> None:
        assert self._asked is None, "one request at a time"
        self._asked = step

    def answer(self, timeout_s: float) -> Drafted | None:
        self._num_answers += 1
        if self._num_answers in self._dead:
            self._asked = None
            raise WorkerDiedError("gone")
        if self._num_answers in self._late:
            return None
        asked, self._asked = self._asked, None
        assert asked is not None
        drafted, self._drafted = self._drafted, None
        return drafted or self._service.draft(asked)

    def hear(self, verdict: Verdict) -> None:
        if not self._told:
            return
        if self._asked is not None and self._drafted is None:
            self._drafted = self._service.draft(self._asked)
        for _ in range(self._told[verdict.step % len(self._told)]):
            self._service.go_on(verdict)

    def revive(self) -> bool:
        self._drafted: Drafted | None = None
        self._service = DraftService(
            TableModel(self._source), NUM_BLOCKS, BLOCK_SIZE, ALONE, NUM_SCRATCH
        )
        return True

    def shutdown(self) -> None: ...


class Host:
    vocab_size = VOCAB

    def __init__(self, model: Model) -> None:
        self._model = model

    def draft_model(self, config: Any) -> Model:
        return self._model


# -- the loop


def unsure(prefix: Prefix) -> np.ndarray:
    """The target."""
    first = np.random.default_rng([len(prefix), *prefix]).uniform(0.3, 0.7)
    return np.array([first, 1 - first])


def sure_at_last(prefix: Prefix) -> np.ndarray:
    """The draft model: the likeliest outcome depends on the second token of the first draft.

    After a rare one it is that none is accepted: the next draft begins where that token was.
    """
    first = [0.05, 0.5, 0.2][len(prefix) % 3]
    return np.array([first, 1 - first])


class Game:
    """A request served by a target under a rule, with drafts of a table.

    Args:
        events: arguments of `Model`.
    """

    def __init__(self, rule: str, section: Any = None, **events: Any) -> None:
        self.target = unsure
        self._rule, self._events = rule, events
        given = {"verification": rule, **(section or cached())}
        self._config = EngineConfig.load({"model": "m", "speculative_config": given})
        self._rounds: dict[tuple[Any, ...], Law] = {}
        self.counts = CacheCounts()  # of all runs
        self.num_faults = self.num_looked_up = 0

    def distance(self, monkeypatch: pytest.MonkeyPatch) -> float:
        """From the target's law."""

        def play(chance: Chance) -> Prefix:
            take_from(chance, monkeypatch)
            return self._play(chance)

        return distance_from_target(law_of(play), self.target, LENGTH)

    def _play(self, chance: Chance) -> Prefix:
        model = Model(sure_at_last, **self._events)
        config = self._config.speculative_config
        guard = Drafting(build(config, Host(model)), VOCAB)
        sampling = SamplingParams(temperature=1.0, max_tokens=ROOM)
        request = Request("a", ints(PROMPT), sampling, 7, speculation=SpeculationOptions())
        guard.open([request])
        text, step = Prefix(), 0
        while len(text) < LENGTH:
            step += 1
            batch = planned(["a"], step, [config.max_nodes], [ROOM - len(text)])
            (draft,) = guard.propose(batch, batch.max_nodes)
            self.num_looked_up += "prompt_lookup" in draft.source
            emitted = self._emitted(chance, text, draft)
            path = ints(range(len(emitted) - 1))
            starts = ints([0, len(emitted)]), ints([0, len(path)])
            verdict = Verdict(step, ints(emitted), starts[0], path, starts[1])
            model.hear(verdict)
            guard.observe(batch, verdict)
            text += emitted
        self.num_faults += guard.stats.faults
        found = (each.cache_counts for each in drafters_of(guard))
        counts = next(filter(None, found), CacheCounts())
        names = ("num_lookups", "num_hits", "num_unprepared", "num_absent", "num_stale")
        for name in (*names, "num_begun"):
            setattr(self.counts, name, getattr(self.counts, name) + getattr(counts, name))
        return text[:LENGTH]

    def _emitted(self, chance: Chance, text: Prefix, draft: Draft) -> Prefix:
        if self._rule == "coupled":
            return self._coupled(chance, text, draft)
        probs = b"" if draft.probs is None else draft.probs.probs.tobytes()
        key = text, draft.tokens.tobytes(), probs
        if key not in self._rounds:
            self._rounds[key] = RULES[self._rule](self.target, text, draft)
        outcomes = list(self._rounds[key])
        return outcomes[chance.pick([self._rounds[key][each] for each in outcomes])]

    def _coupled(self, chance: Chance, text: Prefix, draft: Draft) -> Prefix:
        """The target draws with the noise that drafters draw with."""
        rows = layouts.rows_of(make_step([draft]))
        drawn = [
            chance.draw(("target", len(PROMPT) + len(seen)), self.target(seen).tolist())
            for seen in prefixes(text, draft)
        ]
        choice = match(rows, ints(drawn))
        passed = layouts.walk(rows, choice)
        return tuple(layouts.verdict(0, rows, choice, passed).tokens(0).tolist())


def drafters_of(guard: Drafting) -> list[Any]:
    return [guard.drafter, *(member.drafter for member in guard.drafter.members)]


def take_from(chance: Chance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the service's draws made by `chance`, with the keys that the noise has."""

    def siblings(
        logits: torch.Tensor, positions: Any, settings: DrawSettings, top: int, rounds: Any = None
    ) -> tuple[torch.Tensor, ...]:
        _, ids, probs = draw_siblings(logits, positions, settings, top, rounds=rounds)
        places = np.broadcast_to(positions, len(logits)).tolist()
        salts = [None] * len(places) if rounds is None else np.asarray(rounds).tolist()
        tokens = []
        for row, key in enumerate(zip(salts, places)):
            law = np.zeros(VOCAB)
            law[ids[row].numpy()] = probs[row].double().numpy()
            tokens.append(chance.draw(("draft", *key), law.tolist()))
        return torch.tensor(tokens)[:, None], ids, probs

    def draw(logits: torch.Tensor, positions: Any, settings: DrawSettings) -> torch.Tensor:
        laws = logits.double().softmax(1).tolist()
        places = np.broadcast_to(positions, len(logits)).tolist()
        return torch.tensor([chance.draw(("target", at), law) for at, law in zip(places, laws)])

    def ranked(
        logits: torch.Tensor, positions: Any, settings: Any, num_ranked: int, *, shares_noise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = logits.softmax(1)
        if shares_noise:  # the model's own draw comes first
            weights = weights.scatter_add(
                1, draw(logits, positions, settings)[:, None], torch.full((len(logits), 1), 9.0)
            )
        best, order = (weights / weights.sum(1, keepdim=True)).topk(min(num_ranked, VOCAB), dim=1)
        return order.to(torch.int32), best

    monkeypatch.setattr(service, "draw_siblings", siblings)
    monkeypatch.setattr(service, "draw", draw)
    monkeypatch.setattr(outcomes, "rank_draws", ranked)


def cached(outcomes: int = 1, on_miss: str = "none", depth: int = 1, **keys: Any) -> dict[str, Any]:
    cache = {"outcomes": outcomes, "on_miss": on_miss, "adaptive": False, "depth": depth}
    section = {"decoding_type": "DraftTarget", "speculative_model": "m", "max_draft_len": 2}
    return {**section, "speculation_cache": cache, **keys}


RULE = pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])


@RULE
def test_what_was_prepared(rule, monkeypatch):
    game = Game(rule, section=cached(outcomes=64))
    assert game.distance(monkeypatch) < EXACT
    assert game.counts.num_hits > 0
    assert game.counts.num_unprepared == game.counts.num_stale == 0


@RULE
def test_a_draft_after_a_miss(rule, monkeypatch):
    game = Game(rule, section=cached(on_miss="draft"))
    assert game.distance(monkeypatch) < EXACT
    assert game.counts.num_unprepared > 0
    assert game.counts.num_hits > 0 or rule == "coupled"


@RULE
@pytest.mark.parametrize(("told", "late"), [((1,), ()), ((2, 0), (2,))], ids=str)
def test_a_draft_that_was_begun_on_the_verdict(rule, told, late, monkeypatch):
    game = Game(rule, section=cached(on_miss="draft"), told=told, late=late)
    assert game.distance(monkeypatch) < EXACT
    assert game.counts.num_begun > 0 or late
    assert bool(game.num_faults) == bool(late)


@RULE
def test_no_draft_after_a_miss(rule, monkeypatch):
    game = Game(rule, section=cached(depth=2))
    assert game.distance(monkeypatch) < EXACT
    assert game.counts.num_hits > 0 < game.counts.num_unprepared


@RULE
def test_a_look_up_after_a_miss(rule, monkeypatch):
    lookup = {"decoding_type": "PromptLookup", "max_draft_len": 2}
    members = [cached(), lookup]
    section = {"decoding_type": "Compose", "members": members, "keep_order": True}
    game = Game(rule, section=section)
    assert game.distance(monkeypatch) < EXACT
    assert game.counts.num_hits > 0 < game.counts.num_unprepared
    assert game.num_looked_up > 0


@RULE
@pytest.mark.parametrize("late", [(1,), (2,)], ids=str)
def test_a_deadline_that_has_passed(rule, late, monkeypatch):
    game = Game(rule, late=late)
    assert game.distance(monkeypatch) < EXACT
    assert game.num_faults > 0


@RULE
@pytest.mark.parametrize("dead", [(1,), (2,)], ids=str)
def test_a_drafter_that_is_started_again(rule, dead, monkeypatch):
    game = Game(rule, dead=dead)
    assert game.distance(monkeypatch) < EXACT
    assert game.num_faults > 0


@RULE
@pytest.mark.parametrize("section", [cached(), cached(speculation_cache=None)], ids=["cache", ""])
def test_a_short_draft_that_ended_where_the_model_was_unsure(rule, section, monkeypatch):
    game = Game(rule, section={**section, "draft_min": 2, "p_min": 0.6})
    assert game.distance(monkeypatch) < EXACT


# -- what would be biased


def test_noise_that_was_used_before_shows(monkeypatch):
    """Which outcomes are prepared depends on nodes whose positions are drafted again."""
    monkeypatch.setattr(SpeculationBase, "salts_rounds", False)
    assert Game("rejection", section=cached(depth=2)).distance(monkeypatch) > 1e-3


@RULE
def test_a_hit_that_depends_on_the_draft_shows(rule, monkeypatch):
    """A cache that finds only drafts that begin with one of the tokens.

    The rule `coupled` is exact even so: the target draws for itself.
    """
    look_up = SpeculationCache.look_up

    def biased(self: SpeculationCache, *args: Any, **keys: Any) -> Draft | None:
        found = look_up(self, *args, **keys)
        return found if found is None or 0 in found.tokens[:1].tolist() else None

    monkeypatch.setattr(SpeculationCache, "look_up", biased)
    distance = Game(rule).distance(monkeypatch)
    assert distance < EXACT if rule == "coupled" else distance > 1e-3
