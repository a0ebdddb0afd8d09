"""A separate head's end in the engine: what is asked and kept, whatever happens to the answers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.config import Eagle3Config
from outrider.drafters.drafting import Drafting
from outrider.drafters.head_drafters import SeparateHead
from outrider.drafters.protocol import Drafted, DraftWait, HeadAnswer, HeadAsk, Outcomes
from outrider.drafters.speculation_cache import SpeculationCache
from outrider.errors import WorkerDiedError, WorkerError
from outrider.scheduler.types import NextDrafts, ints, starts_of
from outrider.tests.helpers.toy import VOCAB, continuation, next_token

LENGTH = 4


class Head:
    """Drafts the true continuation, often; answers late, with an error or never, where it may."""

    def __init__(self, seed: int = 0, *, faulty: bool = False) -> None:
        self.random = random.Random(seed)
        self.faulty, self.dead = faulty, False
        self.drafter: SeparateHead | None = None
        self.asked: list[tuple[HeadAsk, list[tuple[int, ...]]]] = []
        self.num_prepared = self.num_drafted = 0

    @property
    def num_outstanding(self) -> int:
        return 0 if self.dead else len(self.asked)

    def ask(self, ask: HeadAsk) -> None:
        if self.dead:
            raise WorkerDiedError("gone")
        step, num_seqs, rows = self.drafter._observed
        assert ask.step == step
        texts = [()] * num_seqs
        for request_id in rows.keys() & self.drafter._texts.keys():
            row = rows[request_id]
            texts[row] = tuple(self.drafter._texts[request_id].view.tolist())
        self.asked.append((ask, texts))

    def answer(self, timeout_s: float) -> HeadAnswer | None:
        assert self.asked, "nothing is outstanding"
        fault = self.random.random() if self.faulty else 1.0
        if fault < 0.03:
            self.dead, self.asked = True, []
            raise WorkerDiedError("gone")
        if fault < 0.15:
            return None
        ask, texts = self.asked.pop(0)
        if fault < 0.2:
            raise WorkerError("it failed")
        took_s = 9.0 if fault < 0.25 else 0.0
        if ask.preparation is not None:
            drafted = None if fault < 0.3 else self._prepared(ask, texts)
            return HeadAnswer(ask.step, None, took_s=took_s, is_preparation=True, drafted=drafted)
        error = "it failed" if fault < 0.3 else ""
        drafts = None if error else self._drafts(ask, texts)
        return HeadAnswer(ask.step, drafts, error, took_s=took_s, linked=fault >= 0.27)

    def revive(self) -> bool:
        self.dead = False
        return True

    def shutdown(self) -> None: ...

    def _chain(self, text: tuple[int, ...], length: int) -> list[int]:
        wrong = [self.random.randrange(VOCAB)] if self.random.random() < 0.3 else []
        return [*wrong, *continuation((*text, *wrong), length)][:length]

    def _drafts(self, ask: HeadAsk, texts: list[tuple[int, ...]]) -> NextDrafts:
        self.num_drafted += 1
        wanted = np.ones(len(texts), np.bool_) if ask.wanted is None else ask.wanted
        pairs = zip(texts, wanted.tolist(), strict=True)
        chains = [self._chain(text, LENGTH) if text and is_it else [] for text, is_it in pairs]
        counts = ints([len(chain) for chain in chains])
        parents = ints([node - 1 for chain in chains for node in range(len(chain))])
        lens = ints([len(text) for text in texts])
        return NextDrafts(ints(sum(chains, [])), parents, starts_of(counts), lens)

    def _prepared(self, ask: HeadAsk, texts: list[tuple[int, ...]]) -> Drafted:
        self.num_prepared += 1
        table, chains, begin = [], [], 0
        preparation = ask.preparation
        for row, (text, count) in enumerate(zip(texts, ask.chains.num_nodes.tolist(), strict=True)):
            nodes, begin = ask.chains.tokens[begin : begin + count].tolist(), begin + count
            for accepted in range(min(count + 1, int(preparation.num_outcomes[row]))):
                room = min(preparation.depth, int(preparation.reach[row]) - accepted - 1)
                if room > 0:
                    known = (*text, *nodes[:accepted])
                    bonus = next_token(known)
                    table.append((row, accepted, bonus, 0))
                    chains.append(self._chain((*known, bonus), room))
        outcomes = Outcomes(*ints(table).reshape(-1, 4).T)
        starts = starts_of(ints([len(chain) for chain in chains]))
        return Drafted(ints(sum(chains, [])), starts, None, outcomes=outcomes)


@pytest.fixture
def make(make_loop):
    """`make(head, on_miss, adaptive)`: a loop, and its drafting."""

    def loop_of(head: Head, on_miss: str = "draft", *, adaptive: bool = False, **options):
        cache = {"outcomes": 6, "on_miss": on_miss, "adaptive": adaptive}
        section = Eagle3Config(
            speculative_model="h",
            placement="separate",
            max_draft_len=LENGTH,
            speculation_cache=cache,
        )
        drafter = SeparateHead(
            "eagle3", head, DraftWait(1.0), is_chain=True, cache=SpeculationCache(section, "eagle3")
        )
        head.drafter = drafter
        drafting = Drafting(drafter, VOCAB)
        return make_loop(200, max_model_len=150, drafting=drafting, **options), drafting

    return loop_of


@pytest.mark.parametrize("on_miss", ["auto", "draft", "none"])
def test_prepared_drafts_are_found_on_the_verdict(make, request_of, drive, on_miss):
    head = Head()
    loop, drafting = make(head, on_miss)
    rng, wanted = random.Random(3), {}
    for index in range(10):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 70)))
        wanted[str(index)] = continuation(prompt, 40)
        loop.add(request_of(str(index), prompt, 40))
    assert drive(loop) == wanted
    counts = drafting.stats.speculation_cache
    assert drafting.stats.faults == 0
    assert counts.num_hits > 0.5 * counts.num_lookups
    assert counts.num_lookups == (
        counts.num_hits + counts.num_unprepared + counts.num_stale + counts.num_absent
    )
    assert drafting.stats.num_acc_tokens > 100
    assert drafting.drafter._cache.is_empty  # entries end with their requests
    assert not drafting.drafter._drafts
    assert not drafting.drafter._texts


def test_where_all_is_prepared_nothing_is_asked_for(make, request_of, drive):
    head = Head()
    head._chain = lambda text, length: list(continuation(text, length))  # always right
    loop, drafting = make(head)
    loop.add(request_of("a", (1, 2, 3), 40))
    assert drive(loop) == {"a": continuation((1, 2, 3), 40)}
    counts = drafting.stats.speculation_cache
    assert head.num_drafted == counts.num_waited_drafts == 1  # after the prompt
    assert head.num_prepared > 5
    assert counts.num_hits == counts.num_lookups - 1
    assert drafting.stats.num_acc_tokens == drafting.stats.num_gen_tokens


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_messages_changes_a_token(make, request_of, seed):
    """Late and failed answers, deaths, broken links, failed steps, aborts, reused ids."""
    rng = random.Random(seed)
    head = Head(seed, faulty=True)
    loop, drafting = make(head, rng.choice(["auto", "draft", "none"]), adaptive=bool(seed % 2))
    verify, emitted, wanted, num_done = loop.target.verify, {}, {}, 0
    for _ in range(3000):
        if num_done >= 12 and not loop.has_work:
            break
        name = str(rng.randrange(6))
        if num_done < 12 and name not in wanted and rng.random() < 0.3:
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50)))
            wanted[name], emitted[name] = continuation(prompt, 30), ()
            loop.add(request_of(name, prompt, 30))
        if name in wanted and rng.random() < 0.02:
            loop.abort(name)
            assert wanted.pop(name)[: len(emitted[name])] == emitted[name]
            num_done += 1
        if not loop.has_work:
            continue
        if rng.random() < 0.05:
            loop.target.verify = lambda batch, drafts: (_ for _ in ()).throw(WorkerDiedError("x"))
            with pytest.raises(WorkerDiedError):
                loop.step()
            loop.scheduler.requeue_all()
            loop.target.verify = verify
            continue
        loop.scheduler.budget.enabled = rng.random() < 0.9
        for delta in loop.step():
            emitted[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                assert emitted[delta.request_id] == wanted.pop(delta.request_id)
                num_done += 1
    assert num_done >= 12
    assert not wanted
    assert drafting.stats.faults > 0
    assert drafting.stats.num_acc_tokens > 0
    assert not drafting.drafter._texts


def test_no_step_waits_for_a_head_that_catches_up(make, request_of):
    """One that was stopped answers at once, but has the steps that it missed to process."""
    head = Head()
    loop, drafting = make(head)
    drafter, answer, now = drafting.drafter, head.answer, [0.0]
    drafter.clock = lambda: now[0]
    silent, waits = True, []

    def slow(timeout_s: float) -> HeadAnswer | None:
        if timeout_s:
            waits.append(timeout_s)
            now[0] += timeout_s
        return None if silent else answer(timeout_s)

    head.answer = slow
    loop.add(request_of("a", (1, 2, 3), 80))
    for _ in range(12):
        loop.step()
    assert waits == [1.0]
    assert head.num_outstanding == 1, "no more is asked until it has answered"
    silent, before = False, head.num_drafted
    loop.step()
    assert head.num_drafted > before, "it has answered"
    assert waits == [1.0]
    assert drafter.health().state == "late"
    for _ in range(3):
        loop.step()
    assert drafter.health().state == "active"


def test_a_wait_is_counted_once_however_many_answers_come_in_it():
    now = [0.0]
    head = Head()
    section = Eagle3Config(
        speculative_model="h", placement="separate", max_draft_len=LENGTH, speculation_cache={}
    )
    cache = SpeculationCache(section, "eagle3")
    drafter = SeparateHead("eagle3", head, DraftWait(1.0), is_chain=True, cache=cache)
    answers = [HeadAnswer(0, None), HeadAnswer(1, None), None, HeadAnswer(2, None)]
    head.asked = [None] * 3
    drafter.clock = lambda: now[0]

    def answer(timeout_s: float) -> HeadAnswer | None:
        now[0] += 0.01
        found = answers.pop(0)
        del head.asked[: found is not None]
        return found

    head.answer = answer
    for step in range(3):
        drafter._asked[step, False] = drafter._asked_of(["a"])
    assert drafter._receive(1.0, lambda asked: True)  # the last of three answers is missing
    assert cache.counts.waited_ms == pytest.approx(20)
    assert not drafter._receive(1.0, lambda asked: True)
    assert cache.counts.waited_ms == pytest.approx(now[0] * 1e3) == pytest.approx(40)
