"""A target without a network: its KV cache holds token ids, so that every slot can be checked."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import replace

import numpy as np

from outrider.scheduler import tree
from outrider.scheduler.types import (
    Batch,
    Draft,
    Logprobs,
    NextDrafts,
    Request,
    Verdict,
    ints,
    slots_of,
    starts_of,
)
from outrider.workers import seats
from outrider.workers.seats import Seats
from outrider.workers.target import PromptRows, moves_of

VOCAB = 50


def next_token(prefix: tuple[int, ...]) -> int:
    """The language: a hash of the last six tokens, so that mistakes do not heal quickly."""
    digest = hashlib.blake2b(repr(prefix[-6:]).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def continuation(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What plain greedy decoding emits."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens)))
    return tuple(tokens[len(prompt) :])


class TokenCacheTarget:
    """Writes token ids into a paged cache and reads every context back from it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.seats = Seats(block_size)
        self.slots = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self.max_tokens_seen = 0
        self.fail_next = False
        self.verdicts: deque[Verdict] = deque()
        self.head: OracleDrafting | None = None  # drafts in the ranks
        self.kept: dict[int, Draft] = {}  # by seat, what it drafted

    def verify(self, batch: Batch, drafts: list[Draft]) -> Verdict:
        self.post(batch, drafts)
        return self.collect()

    def post(self, batch: Batch, drafts: list[Draft]) -> None:
        """Computes at once, as ranks do in order; the verdict waits to be collected."""
        self.verdicts.append(self._computed(batch, drafts))

    def collect(self) -> Verdict:
        return self.verdicts.popleft()

    def _computed(self, batch: Batch, drafts: list[Draft]) -> Verdict:
        if batch.plan.own_drafts:
            pairs = zip(batch.plan.seats.tolist(), batch.max_nodes.tolist(), strict=True)
            drafts = [tree.truncate(self.kept.get(seat, tree.EMPTY), room) for seat, room in pairs]
        step = self.seats.expand(replace(batch.plan, drafts=seats.gather(drafts, batch.samples)))
        self.max_tokens_seen = max(self.max_tokens_seen, len(step.token_ids))
        moved = self.slots[step.kv_moves[:, 0]].copy()
        self.slots[step.kv_moves[:, 1]] = moved
        self.slots[step.slot_mapping] = step.token_ids
        emitted: list[list[int]] = []
        path: list[list[int]] = []
        window: list[list[int]] = []
        for row in range(batch.num_seqs):
            tokens, nodes, after = self._walk(batch, step, drafts[row], row)
            emitted.append(tokens)
            path.append(nodes)
            window.append(after)
        verdict = Verdict(
            batch.step,
            ints(sum(emitted, [])),
            starts_of([len(e) for e in emitted]),
            ints(sum(path, [])),
            starts_of([len(p) for p in path]),
            window=ints(sum(window, [])),
            window_start=starts_of([len(w) for w in window]),
            prompt_logprobs=_scores(PromptRows.of(step)),
        )
        if batch.plan.appends:
            sources, places = moves_of(step, verdict).T
            self.slots[places] = self.slots[sources].copy()
            self.seats.append(batch.plan, verdict)
            verdict = replace(verdict, compacted=True)
        if self.head is not None:
            verdict = replace(verdict, next_drafts=self._next_drafts(batch, step, emitted))
            made = verdict.next_drafts
            for row, seat in enumerate(batch.plan.seats.tolist()):
                span = slice(made.start[row], made.start[row + 1])
                self.kept[seat] = Draft(made.tokens[span], made.parents[span])
        return verdict

    def _next_drafts(self, batch, step, emitted: list[list[int]]) -> NextDrafts:
        """What the head drafts after all that a sequence's seat has by now."""
        assert self.head is not None
        made, lens = [], []
        for row, tokens in enumerate(emitted):
            seat, room = int(batch.plan.seats[row]), int(batch.plan.max_nodes[row])
            known = int(self.seats._num_tokens[seat])
            text = self.seats._tokens[seat, :known].tolist()
            made.append(self.head._tree(text, room) if tokens else tree.EMPTY)
            lens.append(known)
        return NextDrafts(
            ints(sum([draft.tokens.tolist() for draft in made], [])),
            ints(sum([draft.parents.tolist() for draft in made], [])),
            starts_of([draft.num_nodes for draft in made]),
            ints(lens),
        )

    def _walk(self, batch, step, draft: Draft, row: int) -> tuple[list[int], list[int], list[int]]:
        if not batch.samples[row]:
            return [], [], []
        known = int(step.context_lens[row]) + int(batch.plan.chunk_lens[row])
        index = np.arange(known)
        table = step.block_tables[row]
        read = self.slots[slots_of(table, index, self.block_size)]
        prefix = tuple(read.tolist())
        kids = tree.children(draft.parents[: draft.num_guesses])
        after = [
            next_token((*prefix, *_path(draft, node)))
            for node in range(draft.num_guesses, draft.num_nodes)
        ]
        tokens, nodes, at = [], [], -1
        while True:
            token = next_token(prefix)
            tokens.append(token)
            prefix += (token,)
            match = [n for n in kids.get(at, []) if draft.tokens[n] == token]
            if not match:
                return tokens, nodes, after
            at = match[0]
            nodes.append(at)


def _scores(scored: PromptRows | None) -> Logprobs | None:
    """Scores that name the tokens they are of."""
    if scored is None:
        return None
    top = np.zeros((len(scored.rows), scored.top), dtype=np.float32)
    values = scored.next_tokens.astype(np.float32)
    return Logprobs(values, top.astype(np.int32), top, scored.next_tokens)


def _path(draft: Draft, node: int) -> list[int]:
    """Tokens from the root's child down to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, int(draft.tokens[node]))
        node = int(draft.parents[node])
    return path


class OracleDrafting:
    """Drafts random trees around the true continuation, sometimes wrong, sometimes empty."""

    proposes_trees = True
    may_rest, ranks_draft = True, False

    def __init__(self, seed: int, accuracy: float = 0.7) -> None:
        self.random = random.Random(seed)
        self.accuracy = accuracy
        self.tokens: dict[str, list[int]] = {}

    def open(self, requests: list[Request]) -> None:
        for request in requests:
            self.tokens[request.id] = [*request.prompt.tolist(), *request.emitted.tolist()]

    def propose(self, batch: Batch) -> list[Draft]:
        return [
            self._tree(self.tokens[rid], int(batch.max_nodes[row]))
            for row, rid in enumerate(batch.request_ids)
        ]

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        for row, rid in enumerate(batch.request_ids):
            self.tokens[rid] += verdict.tokens(row).tolist()

    def close(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.tokens[request_id]

    def _tree(self, prefix: list[int], budget: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        paths: dict[int, tuple[int, ...]] = {-1: tuple(prefix)}
        while len(tokens) < budget and self.random.random() < 0.9:
            parent = self.random.choice([-1, *range(len(tokens))])
            truth = next_token(paths[parent])
            token = truth if self.random.random() < self.accuracy else self.random.randrange(VOCAB)
            if any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
                continue
            paths[len(tokens)] = (*paths[parent], token)
            tokens.append(token)
            parents.append(parent)
        return Draft(ints(tokens), ints(parents), source="oracle")
