"""Continuous batching without phases: `schedule()` says who runs, `commit()` what came of it.

A sequence has `num_computed` tokens in the KV cache and `num_tokens` known ones; a step computes
some of the difference plus its draft nodes, under one token budget. Prefill, decode and
verification are that one mechanism. Called by `scheduler/loop.py`; `commit` is the only writer of
running sequences.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import numpy as np

from ..config import EngineConfig
from ..errors import InvalidRequestError, OverloadedError
from .blocks import BlockPool
from .budget import DraftBudget
from .packing import Row, SamplingPacker, pack
from .sequence import Sequence
from .types import (
    Batch,
    Delta,
    Draft,
    IntArray,
    Request,
    SpeculationUsage,
    TokenLogprobs,
    Verdict,
    ints,
)


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since the start."""

    num_finished: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_looked_up_tokens: int = 0  # asked of the prefix cache
    num_hit_tokens: int = 0  # found there


class Scheduler:
    """Requests, blocks and the plan of each step.

    Args:
        config: the engine's configuration.
        num_blocks: KV blocks that every rank has.
        max_model_len: the longest sequence, prompt and output together.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
        self.pool = BlockPool(num_blocks, config.block_size, caching=config.enable_prefix_caching)
        self.budget = DraftBudget(config.speculative_config, max_model_len)
        self.max_model_len = max_model_len
        self.counts = SchedulerCounts()
        self.running: list[Sequence] = []
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # heap by rank
        self._sequences: dict[str, Sequence] = {}
        self._config = config
        self._thinking_tokens = config.speculative_config.thinking_tokens
        self._reach = max(section.reach for section in config.speculative_config.sections)
        self._sampling = SamplingPacker(phases=self._thinking_tokens is not None)
        self._moves: list[tuple[int, int]] = []
        self._arrivals = 0
        self._step = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    def add(self, request: Request) -> None:
        """Takes a request into the queue.

        Raises:
            InvalidRequestError: it could never run.
            OverloadedError: the queue is full.
        """
        if len(self._waiting) >= self._config.max_queued_requests:
            raise OverloadedError(
                f"{len(self._waiting)} requests are queued (max_queued_requests = "
                f"{self._config.max_queued_requests}); try again later"
            )
        if request.id in self._sequences:
            raise InvalidRequestError(f"request id {request.id!r} is in use", field="request_id")
        num_prompt = len(request.prompt)
        max_tokens = request.sampling.max_tokens
        limit = self.max_model_len
        if max_tokens is not None:
            limit = min(limit, num_prompt + max_tokens)
        if num_prompt == 0 or num_prompt >= self.max_model_len:
            raise InvalidRequestError(
                f"prompt: {num_prompt} tokens; allowed are 1 to {self.max_model_len - 1}",
                field="prompt",
            )
        if self.pool.blocks_for(limit) > self.pool.num_blocks:
            raise InvalidRequestError(
                f"max_tokens: prompt and output of {limit} tokens exceed the KV cache of "
                f"{self.pool.num_blocks * self.pool.block_size}",
                field="max_tokens",
            )
        sequence = Sequence(request, self._arrivals, limit, self._thinking_tokens, self._reach)
        self._arrivals += 1
        self._sequences[request.id] = sequence
        heapq.heappush(self._waiting, (sequence.rank, sequence))
        self.counts.num_prompt_tokens += num_prompt

    def abort(
        self, request_id: str, reason: str = "abort", error: str | None = None
    ) -> list[Delta]:
        """Ends a request wherever it is; empty if it is not known (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self._waiting = [item for item in self._waiting if item[1] is not sequence]
            heapq.heapify(self._waiting)
        self._forget(sequence)
        return [Delta(request_id, (), finish_reason=reason, usage=sequence.usage, error=error)]

    def late(self) -> list[str]:
        """Requests whose deadline has passed."""
        now = time.monotonic()
        return [
            request_id
            for request_id, sequence in self._sequences.items()
            if sequence.request.deadline_s is not None and sequence.request.deadline_s < now
        ]

    def schedule(self) -> Batch:
        """The next step's plan: running requests first, in rank order, then waiting ones."""
        self._make_way()
        rows: list[Row] = []
        left = self._config.max_num_batched_tokens
        queue = sorted(self.running, key=lambda sequence: sequence.rank)
        while queue and left > 0:
            sequence = queue.pop(0)
            row = self._row(sequence, max(1, left - len(queue)), victims=queue)
            if row is not None:
                rows.append(row)
                left -= row.num_chunk + row.max_nodes
        while self._waiting and left > 0 and len(self.running) < self._config.max_num_seqs:
            sequence = self._waiting[0][1]
            row = self._admit(sequence, left)
            if row is None:
                break
            heapq.heappop(self._waiting)
            self.running.append(sequence)
            rows.append(row)
            left -= row.num_chunk + row.max_nodes
        self._step += 1
        moves, self._moves = self._moves, []
        sequences = [self._sequences[row.request_id] for row in rows]
        packed = ints(moves).reshape(-1, 2)
        batch = pack(self._step, rows, packed, self._sampling.pack(sequences))
        return replace(batch, max_depth=ints([max(0, each.max_depth) for each in sequences]))

    def commit(self, batch: Batch, drafts: Rows[Draft], verdict: Verdict) -> list[Delta]:
        """Appends what was emitted, rewinds what was rejected, finishes what is done."""
        deltas = []
        chunks = np.diff(batch.query_start)
        for row, request_id in enumerate(batch.request_ids):
            sequence = self._sequences[request_id]
            if not batch.samples[row]:
                sequence.num_computed += int(chunks[row])
                sequence.publish(self.pool)
                continue
            draft = drafts[row]
            path = verdict.nodes(row)
            self._queue_moves(sequence, path)
            sequence.num_computed = sequence.num_tokens + len(path)
            emitted, reason = _until_end(sequence, verdict.tokens(row))
            sequence.tokens.extend(emitted)
            sequence.follow(emitted)
            sequence.num_computed = min(sequence.num_computed, sequence.num_tokens)
            num_accepted = min(len(path), len(emitted))
            sequence.usage = _counted(sequence.usage, draft, num_accepted)
            sequence.publish(self.pool)
            sequence.trim(self.pool)
            self.counts.num_output_tokens += len(emitted)
            deltas.append(
                Delta(
                    request_id=request_id,
                    token_ids=tuple(emitted.tolist()),
                    num_accepted=num_accepted,
                    finish_reason=reason,
                    stop_token_id=int(emitted[-1]) if reason == "stop" else None,
                    logprobs=_logprobs(sequence, verdict, row, len(emitted)),
                    num_cached_tokens=sequence.num_cached_tokens,
                    usage=sequence.usage if reason else None,
                )
            )
            if reason:
                self.running.remove(sequence)
                self._forget(sequence)
                self.counts.num_finished += 1
        return deltas

    def requeue_all(self) -> None:
        """After the KV cache was lost: every request is to be computed again from its tokens."""
        for sequence in list(self.running):
            self._preempt(sequence)
        self._moves.clear()
        self.pool.clear_cache()

    def check(self) -> None:
        """Asserts that every block is either free or held by a known sequence."""
        self.pool.check(sequence.blocks for sequence in self._sequences.values())

    def _row(self, sequence: Sequence, left: int, victims: list[Sequence]) -> Row | None:
        """A running sequence's part of the step; None if it had to give up its blocks itself."""
        num_chunk = min(sequence.num_tokens - sequence.num_computed, left)
        nodes = self._nodes(sequence, num_chunk, left)
        end = sequence.num_computed + num_chunk
        held = self._hold(sequence, end, nodes)
        while held is None:  # draft nodes are not worth a preemption
            victim = victims.pop() if victims else sequence
            self._preempt(victim)
            if victim is sequence:
                return None
            held = self._hold(sequence, end, 0)
        return Row(sequence.request.id, sequence, num_chunk, held)

    def _admit(self, sequence: Sequence, left: int) -> Row | None:
        """A waiting sequence's first part; None, and nothing held, if there is no room for it."""
        cached = sequence.adopt_prefix(self.pool)
        num_chunk = min(sequence.num_tokens - sequence.num_computed, left)
        nodes = self._nodes(sequence, num_chunk, left)
        end = sequence.num_computed + num_chunk
        # Room is left for one more block of every running request, or they would soon be evicted.
        spare = self.pool.num_free - (self.pool.blocks_for(end) - len(sequence.blocks))
        if self.running and spare < len(self.running):
            sequence.drop(self.pool)
            return None
        held = self._hold(sequence, end, nodes)
        if held is None:
            sequence.drop(self.pool)
            return None
        self.counts.num_looked_up_tokens += sequence.num_tokens
        self.counts.num_hit_tokens += cached
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(cached, sequence.num_prompt)
        return Row(sequence.request.id, sequence, num_chunk, held)

    def _hold(self, sequence: Sequence, end: int, nodes: int) -> int | None:
        """Blocks for `end` tokens and for draft nodes: all, a path's, or none, as there is room.

        Returns how many nodes there is room for; None, and no change, if there is none for `end`.
        """
        for some in (nodes, min(nodes, max(0, sequence.max_depth)), 0):
            if sequence.reserve(self.pool, end + some):
                return some
        return None

    def _nodes(self, sequence: Sequence, num_chunk: int, left: int) -> int:
        """Draft nodes for this step, if the chunk reaches the root."""
        if sequence.num_computed + num_chunk < sequence.num_tokens:
            return 0
        nodes = self.budget.nodes(sequence, len(self.running))
        return min(nodes, left - num_chunk)

    def _make_way(self) -> None:
        """Preempts a running request for a waiting one of a better priority."""
        while self._waiting and self.running:
            waiting = self._waiting[0][1]
            worst = max(self.running, key=lambda sequence: sequence.rank)
            if waiting.request.priority >= worst.request.priority:
                return
            blocks = self.pool.blocks_for(waiting.num_tokens)
            seats = self._config.max_num_seqs - len(self.running)
            if seats > 0 and self.pool.num_free >= blocks + len(self.running):
                return
            self._preempt(worst)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, at its old place; its KV is recomputed later."""
        sequence.drop(self.pool)
        sequence.num_preemptions += 1
        self.counts.num_preemptions += 1
        self.running.remove(sequence)
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def _queue_moves(self, sequence: Sequence, path: IntArray) -> None:
        """Accepted nodes that are not in place yet, to be compacted before the next forward."""
        size = self.pool.block_size
        first = sequence.num_tokens  # index of the first node's slot
        for step, node in enumerate(path.tolist()):
            if node != step:
                self._moves.append(
                    (sequence.slot(first + node, size), sequence.slot(first + step, size))
                )

    def _forget(self, sequence: Sequence) -> None:
        sequence.drop(self.pool)
        del self._sequences[sequence.request.id]


def _until_end(sequence: Sequence, emitted: IntArray) -> tuple[IntArray, str | None]:
    """`emitted` cut at the first end token or at the limit, and why it ended, if it did."""
    room = sequence.limit - sequence.num_tokens
    owed = sequence.request.sampling.min_tokens - sequence.num_output
    for index, token in enumerate(emitted[:room].tolist()):
        if token in sequence.ends and index + 1 > owed:
            return emitted[: index + 1], "stop"
    if len(emitted) >= room:
        return emitted[:room], "length"
    return emitted, None


def _counted(usage: SpeculationUsage, draft: Draft, num_accepted: int) -> SpeculationUsage:
    return replace(
        usage,
        drafter=draft.source if draft.num_nodes else usage.drafter,
        num_steps=usage.num_steps + 1,
        num_drafts=usage.num_drafts + (draft.num_guesses > 0),
        num_draft_tokens=usage.num_draft_tokens + draft.num_guesses,
        num_accepted_tokens=usage.num_accepted_tokens + num_accepted,
    )


def _logprobs(
    sequence: Sequence, verdict: Verdict, row: int, count: int
) -> tuple[TokenLogprobs, ...]:
    """This row's log-probabilities, as many rivals as the request asked for."""
    wanted = sequence.request.sampling.logprobs
    if wanted is None or verdict.logprobs is None:
        return ()
    table = verdict.logprobs
    begin = int(verdict.emitted_start[row])
    return tuple(
        TokenLogprobs(
            float(table.chosen[index]),
            tuple(
                zip(
                    table.top_ids[index, :wanted].tolist(),
                    table.top[index, :wanted].tolist(),
                    strict=True,
                )
            ),
        )
        for index in range(begin, begin + count)
    )
