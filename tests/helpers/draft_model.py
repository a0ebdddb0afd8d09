"""A draft model whose KV cache holds token ids."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.drafters.lookup.base import num_agreeing
from outrider.drafters.protocol import Drafted, DraftStep, Outcomes, Preparation
from outrider.errors import WorkerDiedError
from outrider.scheduler.loop import Loop
from outrider.scheduler.types import Verdict, ints, starts_of
from outrider.tests.helpers.toy import VOCAB, continuation, next_token
from outrider.workers.seats import Seats


class TokenCacheDraftModel:
    """Draws the true continuation, often; checks on every read that its cache is right."""

    vocab_size, max_model_len, max_num_batched_tokens, block_size = VOCAB, 200, 40, 4
    reads_verdicts = False

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        self.num_blocks = num_blocks
        self.seats = Seats(self.block_size)
        self.slots = np.full(num_blocks * self.block_size, -1, dtype=np.int64)
        self.random = random.Random(seed)
        self.prefixes: set[tuple[int, ...]] = set()  # of what may be asked
        self.dead = False
        self.num_tokens = 0
        self.silent = False  # what is asked is not answered yet
        self.asked: list[DraftStep] = []
        self.waits: list[float] = []
        self.going: DraftStep | None = None  # until the verdict on its round, or another step
        self.num_begun = 0
        self.is_stale = False  # a drafter's failure costs drafts, and would pass unnoticed

    def _check(self, prefix: tuple[int, ...]) -> None:
        if not any(whole[: len(prefix)] == prefix for whole in self.prefixes):
            self.is_stale = True
            raise AssertionError("the cache is stale")

    def go_on(self, verdict: Verdict) -> None:
        """Writes a chain of zeros behind the tokens of the round, as one that may be asked for."""
        step = self.going
        if step is None or step.continuation is None or step.continuation.step != verdict.step:
            return
        self.going = None
        plan, going = step.plan, step.continuation
        ends = plan.context_lens + plan.chunk_lens
        counts = np.zeros(len(ends), np.int32) if plan.drafts is None else plan.drafts.num_nodes
        starts = starts_of(counts)
        for index, (row, seat) in enumerate(zip(going.rows, plan.seats, strict=True)):
            emitted, end = verdict.tokens(row).tolist(), int(ends[index])
            nodes = [] if plan.drafts is None else plan.drafts.tokens.tolist()
            chain = nodes[starts[index] : starts[index + 1]]
            begin, after = end + num_agreeing(emitted, chain), end + len(emitted)
            last = end + min(int(going.room[index]), len(emitted) + int(going.max_nodes[index]))
            if not emitted or last <= after:
                continue
            table = self.seats.tables(ints([seat]), last)[0]
            self.slots[self._slots(table, begin, after)] = emitted[begin - end :]
            self.slots[self._slots(table, after, last)] = 0
            self.num_begun += 1

    def ask(self, step: DraftStep) -> None:
        assert not self.asked, "one question at a time"
        if self.dead:
            raise WorkerDiedError("gone")
        self.asked.append(step)

    def answer(self, timeout_s: float) -> Drafted | None:
        self.waits.append(timeout_s)
        return None if self.silent else self.draft(self.asked.pop())

    def draft(self, step: DraftStep) -> Drafted:
        if self.dead:
            raise WorkerDiedError("gone")
        self.going = step
        if step.preparation is not None:
            return self._prepare(step, step.preparation)
        known, budgets = self.seats.expand(step.plan), step.plan.max_nodes
        num_masks = 0 if step.mask_token is None else int(np.maximum(budgets - 1, 0).sum())
        assert len(known.token_ids) + num_masks <= self.max_num_batched_tokens
        self.num_tokens += len(known.token_ids)
        self.slots[known.slot_mapping] = known.token_ids
        chains = []
        for row in range(known.num_seqs):
            count = int(known.query_start[row + 1] - known.query_start[row])
            assert count > 0, "an empty row"
            end = int(known.context_lens[row]) + count
            table = known.block_tables[row]
            prefix = tuple(self.slots[self._slots(table, 0, end)].tolist())
            self._check(prefix)
            chain: list[int] = []
            for depth in range(int(budgets[row])):
                wrong = self.random.random() < 0.3
                token = self.random.randrange(VOCAB) if wrong else next_token(prefix)
                chain.append(token)
                prefix += (token,)
                if depth + 1 < budgets[row]:  # the last one is never fed back
                    read = token if step.mask_token is None else step.mask_token
                    self.slots[self._slots(table, end + depth, end + depth + 1)] = read
            chains.append(chain)
        starts = np.concatenate([[0], np.cumsum([len(chain) for chain in chains])])
        return Drafted(ints(sum(chains, [])), ints(starts), None, step=step.plan.step)

    def _prepare(self, step: DraftStep, preparation: Preparation) -> Drafted:
        """True continuations behind every number of accepted nodes, and some wrong ones."""
        known = self.seats.expand(step.plan)
        assert len(known.token_ids) <= self.max_num_batched_tokens
        self.slots[known.slot_mapping] = known.token_ids
        table, chains = [], []
        for row in range(known.num_seqs):
            nodes = known.draft_tokens[known.draft_start[row] : known.draft_start[row + 1]].tolist()
            end = int(known.context_lens[row] + known.query_lens[row]) - len(nodes)
            prefix = tuple(self.slots[self._slots(known.block_tables[row], 0, end)].tolist())
            self._check(prefix)
            for accepted in range(min(len(nodes) + 1, int(preparation.num_outcomes[row]))):
                room = min(preparation.depth, int(preparation.reach[row]) - accepted - 1)
                if room <= 0:
                    continue
                wrong = self.random.random() < 0.3
                text = (*prefix, *nodes[:accepted])
                table.append((row, accepted, next_token(text), 0))
                text += (next_token(text),)
                chain = [self.random.randrange(VOCAB)] if wrong else []
                chains.append([*chain, *continuation((*text, *chain), room - len(chain))])
        outcomes = Outcomes(*ints(table).reshape(-1, 4).T)
        starts = np.concatenate([[0], np.cumsum([len(chain) for chain in chains])])
        tokens = ints(sum(map(list, chains), []))
        return Drafted(tokens, ints(starts), None, step=step.plan.step, outcomes=outcomes)

    def revive(self) -> bool:
        if self.dead:
            self.slots[:] = -1
            self.seats = Seats(self.block_size)
        self.dead = False
        return True

    def detach(self) -> None: ...

    def shutdown(self) -> None: ...

    def _slots(self, table: np.ndarray, begin: int, end: int) -> np.ndarray:
        index = np.arange(begin, end)
        return table[index // self.block_size] * self.block_size + index % self.block_size


def text_despite_failures(loop: Loop, paused: int | None = None) -> tuple[int, ...]:
    """What the loop's request emits where every third step of the target fails.

    Args:
        paused: of every four steps, the one in which nothing is drafted; None: in all it is.
    """
    text: tuple[int, ...] = ()
    verify = loop.target.verify
    for step in range(100):
        if step % 3 == 1:
            loop.target.verify = lambda batch, drafts: (_ for _ in ()).throw(WorkerDiedError("x"))
            with pytest.raises(WorkerDiedError):
                loop.step()
            loop.scheduler.requeue_all()
            loop.target.verify = verify
        loop.scheduler.budget.enabled = step % 4 != paused
        for delta in loop.step():
            text += delta.token_ids
        if not loop.scheduler.has_work:
            break
    return text


class FaultyDraftModel(TokenCacheDraftModel):
    """Answers late, twice, out of order or never; dies and comes back empty."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        super().__init__(num_blocks, seed)
        self.faults = random.Random(seed)
        self.old: list[Drafted] = []  # answers to earlier requests
        self.drafted: Drafted | None = None  # to the open request
        self.told: list[Verdict] = []
        self.reads_verdicts = bool(seed % 3)

    def hear(self, verdict: Verdict) -> None:
        """A verdict of the target: in time, or late, or again, or after another."""
        if self.dead:
            return
        self.told.append(verdict)
        if self.asked and self.drafted is None and self.faults.random() < 0.5:
            self.drafted = self.draft(self.asked[0])
        while self.told and self.faults.random() < 0.7:
            self.go_on(self.faults.choice(self.told))
            if self.faults.random() < 0.5:
                del self.told[0]

    def answer(self, timeout_s: float) -> Drafted | None:
        if self.faults.random() < 0.05:
            self.dead = True
            raise WorkerDiedError("gone")
        if self.drafted is None:
            self.drafted = self.draft(self.asked[0])
        kind = self.faults.random()
        if kind < 0.25:
            return None
        if kind < 0.5 and self.old:
            return self.faults.choice(self.old)
        self.old.append(self.drafted)
        self.asked.clear()
        drafted, self.drafted = self.drafted, None
        return drafted

    def revive(self) -> bool:
        if self.dead and self.faults.random() < 0.5:
            return False
        if self.dead:
            self.asked.clear()
            self.drafted = self.going = None
        return super().revive()
