"""One running request: its tokens, how many of them are computed, and the blocks it holds.

The single carrier of mutable state; only `Scheduler` changes it. Intervals:
`[0, num_computed)` is in the KV cache, `[num_computed, num_tokens)` is known but to be computed;
the last known token is the root of the next draft.
"""

from __future__ import annotations

import heapq
import time
from collections import abc
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .blocks import BlockPool, StateCheckpoints, chain_hash, root_hash
from .timer import Clock
from .types import (
    NO_BLOCKS,
    NO_INTS,
    NO_MOVES,
    Batch,
    Delta,
    Draft,
    IntArray,
    Logprobs,
    Opening,
    Request,
    RequestTimes,
    SeatSettings,
    SpeculationUsage,
    StepPlan,
    StepTrace,
    TokenLogprobs,
    Verdict,
    ints,
    starts_of,
)


class PromptScores:
    """Log-probabilities of a prompt's tokens, gathered over the steps that compute the prompt.

    Args:
        top: number of most likely alternatives recorded with each token.
    """

    def __init__(self, top: int) -> None:
        self.top = top
        self._parts: list[Logprobs] = []

    def add(self, part: Logprobs, num_before: int) -> None:
        """Adds one step's part; `num_before` 0 means that the prompt is computed from its start."""
        if num_before == 0:
            self._parts.clear()
        top_ids, values = part.top_ids[:, : self.top], part.top[:, : self.top]
        self._parts.append(Logprobs(part.chosen, top_ids, values, part.ranks))

    def whole(self) -> Logprobs:
        """All parts joined; empty for a prompt of a single token."""
        ids = np.zeros((0, self.top), dtype=np.int32)
        values = np.zeros((0, self.top), dtype=np.float32)
        none = Logprobs(np.zeros(0, np.float32), ids, values, NO_INTS)
        columns = zip(none.columns, *(part.columns for part in self._parts), strict=True)
        return Logprobs(*map(np.concatenate, columns))


def prompt_parts(batch: Batch, verdict: Verdict) -> dict[int, Logprobs]:
    """The step's prompt log-probabilities, by row of the batch."""
    table, counts = verdict.prompt_logprobs, batch.num_scored
    if table is None or counts is None:
        return {}
    starts = starts_of(counts).tolist()
    assert starts[-1] == len(table.chosen), (starts, len(table.chosen))
    rows = np.flatnonzero(counts).tolist()
    return {row: table.part(starts[row], starts[row + 1]) for row in rows}


_MANY = 8  # copying a slice costs as much as appending this many tokens one by one


class TokenBuffer:
    """An int32 array that grows by doubling; `view` is its filled part."""

    def __init__(self, *parts: IntArray) -> None:
        self._data = np.concatenate([*parts, np.empty(64, dtype=np.int32)]).astype(np.int32)
        self.size = len(self._data) - 64

    def __len__(self) -> int:
        return self.size

    @property
    def view(self) -> IntArray:
        return self._data[: self.size]

    def part(self, begin: int, end: int) -> IntArray:
        """The tokens of [begin, end), as a view."""
        return self._data[begin:end]

    def extend(self, tokens: IntArray | list[int]) -> None:
        begin, count = self.size, len(tokens)
        self.size = end = begin + count
        if end > len(self._data):
            self._data = np.concatenate([self._data, np.empty(end, dtype=np.int32)])
        if count > _MANY:
            self._data[begin:end] = tokens
            return
        data = self._data
        for index, token in enumerate(tokens, begin):
            data[index] = token


class PagedTokens:
    """Known tokens, and the blocks that hold the computed ones. Drafters' caches use it as well.

    Args:
        settings: the sampling settings that the model's ranks keep.
        reach: number of following tokens that a cached KV row depends on: 0, or 1 for heads.
    """

    def __init__(self, request: Request, settings: SeatSettings, *, reach: int = 0) -> None:
        assert reach in (0, 1), reach
        self._reach = reach
        self.request = request
        self.settings = settings
        self.num_prompt = len(request.prompt)
        self.tokens = TokenBuffer(request.prompt, request.emitted)
        self.num_computed = 0
        self.blocks: list[int] = []
        self.seat = -1  # seat at the model's ranks; -1: none
        self.num_sent_tokens = 0  # tokens known to the ranks after the last plan
        self.num_sent_blocks = 0  # entries of `blocks` known to the ranks
        # [0] is before the first block.
        self._hashes: list[bytes] = [root_hash(request.tenant, settings.adapter)]
        self._num_cached_blocks = 0
        self.state_load = -1  # checkpoint from which the first step starts; -1: none
        self._save_points: list[int] = []  # numbers of tokens after which states are kept
        self._saves: list[tuple[int, int]] = []  # (tokens, checkpoint) of steps in flight

    @property
    def num_tokens(self) -> int:
        return self.tokens.size

    @property
    def num_uncomputed(self) -> int:
        """Number of known tokens that are not in the KV cache yet."""
        return self.tokens.size - self.num_computed

    def allocate(self, pool: BlockPool, num_slots: int) -> bool:
        """Holds blocks for `num_slots` tokens; False (and no change) if too few are free."""
        if num_slots <= len(self.blocks) * pool.block_size:  # the case in most steps
            return True
        taken = pool.allocate(pool.blocks_for(num_slots) - len(self.blocks))
        if taken is None:
            return False
        self.blocks += taken
        return True

    def acquire_cached(self, pool: BlockPool) -> int:
        """Acquires cached blocks of all known tokens but the last; returns the number of tokens."""
        assert not self.blocks, "a cached prefix is acquired before anything is computed"
        num_full = (self.num_tokens - 1) // pool.block_size
        hashes = self._block_hashes(pool.block_size, num_full)
        self.blocks = pool.acquire_cached(hashes)
        if pool.checkpoints is not None:
            self._cut_to_checkpoint(pool, pool.checkpoints, hashes)
        self._num_cached_blocks = len(self.blocks)
        self.num_computed = len(self.blocks) * pool.block_size
        return self.num_computed

    def _cut_to_checkpoint(
        self, pool: BlockPool, checkpoints: StateCheckpoints, hashes: list[bytes]
    ) -> None:
        """Releases cached blocks after the last one that has a state checkpoint.

        Plans new checkpoints at the end of the cached blocks, where other requests may branch off
        as well, and after the last full block.
        """
        num_found, num_full = len(self.blocks), len(hashes)
        num_kept = checkpoints.longest(hashes[:num_found])
        pool.free(self.blocks[num_kept:])
        del self.blocks[num_kept:]
        if num_kept:
            self.state_load = checkpoints.acquire(hashes[num_kept - 1])
        points = {each for each in (num_found, num_full) if each > num_kept}
        self._save_points = sorted(each * pool.block_size for each in points)

    def plan_saves(self, checkpoints: StateCheckpoints, end: int) -> list[tuple[int, int]]:
        """(tokens, checkpoint) of the states that a step which computes up to `end` saves."""
        saves = []
        while self._save_points and self._save_points[0] <= end:
            point, number = self._save_points.pop(0), checkpoints.take()
            if number is not None:
                saves.append((point, number))
        self._saves += saves
        return saves

    def _settle_states(self, pool: BlockPool, *, is_computed: bool) -> None:
        """After a step: releases the checkpoint that it read and publishes those that it wrote."""
        if self.state_load >= 0 and pool.checkpoints is not None:
            pool.checkpoints.release(self.state_load)
            self.state_load = -1
        for save in list(self._saves):
            assert pool.checkpoints is not None, "they are its own"
            point, number = save
            if not is_computed:
                pool.checkpoints.give_back(number)
            elif point <= self.num_computed:
                num_full = point // pool.block_size
                pool.checkpoints.put(number, self._block_hashes(pool.block_size, num_full)[-1])
            else:
                continue
            self._saves.remove(save)

    def cache_blocks(self, pool: BlockPool) -> None:
        """Adds blocks that have become full and computed to the prefix cache."""
        if pool.checkpoints is not None:
            self._settle_states(pool, is_computed=True)
        num_full = min(self.num_computed, self.tokens.size - self._reach) // pool.block_size
        if num_full > self._num_cached_blocks:
            hashes = self._block_hashes(pool.block_size, num_full)
            for index in range(self._num_cached_blocks, num_full):
                pool.cache_block(self.blocks[index], hashes[index])
            self._num_cached_blocks = num_full

    def trim(self, pool: BlockPool, num_nodes: int = 0) -> None:
        """Releases blocks beyond the known tokens and the nodes of a step in flight."""
        num_kept = self.tokens.size + num_nodes
        if num_kept <= (len(self.blocks) - 1) * pool.block_size:
            keep = pool.blocks_for(num_kept)
            pool.free(self.blocks[keep:])
            del self.blocks[keep:]
            self.num_sent_blocks = min(self.num_sent_blocks, keep)

    def free(self, pool: BlockPool) -> None:
        """Releases all blocks; the tokens stay, to be computed again."""
        self._settle_states(pool, is_computed=False)
        self._save_points.clear()
        pool.free(self.blocks)
        self.blocks = []
        self.num_computed = self.num_sent_blocks = 0
        self._num_cached_blocks = 0

    def extend_reach(self) -> None:
        """From now on KV rows depend on the following token; earlier blocks lose their hashes."""
        self._reach = 1
        del self._hashes[1:]

    def slot(self, index: int, block_size: int) -> int:
        """The cache slot of the token at `index`."""
        return self.blocks[index // block_size] * block_size + index % block_size

    def _block_hashes(self, block_size: int, num_full: int) -> list[bytes]:
        """Hashes of the first `num_full` blocks, memoised, since known tokens never change."""
        tokens = self.tokens.view
        for index in range(len(self._hashes) - 1, num_full):
            block = tokens[index * block_size : (index + 1) * block_size + self._reach]
            self._hashes.append(chain_hash(self._hashes[-1], block))
        return self._hashes[1 : num_full + 1]


class Sequence(PagedTokens):
    """A request that has not ended."""

    def __init__(
        self,
        request: Request,
        arrival: int,
        limit: int,
        thinking_tokens: tuple[int, int] | None = None,
        reach: int = 0,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(request, SeatSettings.of(request), reach=reach)
        self._clock = clock
        self.arrival = arrival  # order of arrival; a preempted request keeps its place
        self.limit = limit  # known tokens at which it is finished
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.usage = SpeculationUsage()
        self.admitted_s = self.arrived_s = clock()
        self.first_s: float | None = None  # when the first token was emitted
        timeout_s = request.timeout_s
        self.deadline_s = None if timeout_s is None else self.arrived_s + timeout_s
        self.ends = request.ends
        self.thinking = False  # whether the last known token is part of thinking
        self._thinking_tokens = thinking_tokens
        self._follow(self.tokens.view)
        # A replayed request has delivered its prompt's log-probabilities with its first token.
        top = None if len(request.emitted) else request.sampling.prompt_logprobs
        self.scores = None if top is None else PromptScores(top)

    def acquire_cached(self, pool: BlockPool) -> int:
        """As `PagedTokens`, but no blocks while prompt log-probabilities are to be computed.

        These need the logits, and so the hidden states, of every row.
        """
        return super().acquire_cached(pool) if self.scores is None else 0

    def emit(
        self,
        draft: Draft,
        verdict: Verdict,
        row: int,
        emitted: list[int],
        path: list[int],  # accepted nodes, including any whose tokens are not emitted
        reason: str | None,
    ) -> Delta:
        """Appends `emitted` and counts the step; returns the delta that the edge streams."""
        num_computed = self.tokens.size + len(path)
        self.tokens.extend(emitted)
        if self._thinking_tokens is not None:
            self._follow(emitted)
        self.num_computed = min(num_computed, self.tokens.size)
        num_accepted, num_nodes = min(len(path), len(emitted)), len(draft.tokens)
        num_guesses, usage = num_nodes - draft.num_window, self.usage
        # Constructed with positional arguments: `replace` and keywords take 2 to 3 times as long.
        self.usage = SpeculationUsage(
            draft.source if num_nodes or usage.drafter == "none" else usage.drafter,
            usage.num_steps + 1,
            usage.num_drafts + (num_guesses > 0),
            usage.num_draft_tokens + num_guesses,
            usage.num_accepted_tokens + num_accepted,
            usage.synthetic,
        )
        times = None
        if self.first_s is None:
            self.first_s = now = self._clock()
            times = RequestTimes(self.admitted_s - self.arrived_s, now - self.admitted_s)
        scores, self.scores = self.scores, None
        table, pooled = verdict.logprobs, None
        if self.request.pools and verdict.pooled is not None:
            pooled = verdict.pooled[np.searchsorted(verdict.pooled_rows, row)]
        stop_token_id, error = emitted[-1] if reason == "stop" else None, None
        return Delta(
            self.request.id,
            tuple(emitted),
            num_accepted,
            reason,
            stop_token_id,
            () if table is None else self._logprobs(table, verdict, row, len(emitted)),
            self.num_cached_tokens,
            self.usage,
            error,
            scores.whole() if scores else None,
            step_trace(draft, path) if self.request.speculation.trace else None,
            times,
            pooled,
        )

    def _logprobs(
        self, table: Logprobs, verdict: Verdict, row: int, count: int
    ) -> tuple[TokenLogprobs, ...]:
        """This row's log-probabilities, with as many alternatives as the request asks for."""
        wanted = self.request.sampling.logprobs
        if wanted is None:
            return ()
        begin = int(verdict.emitted_start[row])
        return table.part(begin, begin + count).by_token(wanted)

    def _follow(self, emitted: IntArray | list[int]) -> None:
        """Updates `thinking` for the tokens `emitted`."""
        if self._thinking_tokens is None:
            return
        begin, end = self._thinking_tokens
        tokens = np.asarray(emitted)
        marks = tokens[(tokens == begin) | (tokens == end)]
        if len(marks):
            self.thinking = bool(marks[-1] == begin)

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of service: priority, then arrival."""
        return (self.request.priority, self.arrival)


def until_end(sequence: Sequence, emitted: list[int]) -> tuple[list[int], str | None]:
    """Cuts `emitted` at the first end token or at the limit; also returns the finish reason."""
    room = sequence.limit - sequence.tokens.size
    ends = sequence.ends
    if ends and not ends.isdisjoint(emitted):
        owed = sequence.request.min_tokens - sequence.num_output
        for index, token in enumerate(emitted[:room]):
            if token in ends and index + 1 > owed:
                return emitted[: index + 1], "stop"
    if len(emitted) >= room:
        return emitted[:room], "length"
    return emitted, None


def step_trace(draft: Draft, path: list[int]) -> StepTrace:
    """The draft and its accepted nodes, for requests that ask for a trace."""
    count = draft.num_guesses
    return StepTrace(
        tokens=tuple(draft.tokens[:count].tolist()),
        parents=tuple(draft.parents[:count].tolist()),
        origins=draft.origins or (draft.source,) * count,
        path=tuple(path),
    )


class Row(NamedTuple):
    """One sequence's part in a step: `num_chunk` known tokens, room for `max_nodes` nodes."""

    sequence: PagedTokens
    num_chunk: int
    max_nodes: int
    is_ahead: bool = (
        False  # planned before the last outcome is known: the ranks take the token from the seat
    )


class Seating:
    """Seats of running sequences at a model's ranks, and the plans that are sent to them.

    Ranks store what they receive by seat (`workers/seats.py`), so a plan carries differences only.
    The lowest free seat is taken first, so that ranks allocate few rows.

    Args:
        ranks_append: whether ranks append to their seats what they emit.
    """

    def __init__(self, *, ranks_append: bool = False) -> None:
        self.ranks_append = ranks_append
        self._free: list[int] = []  # heap
        self._num_seats = 0  # seats used so far
        self._closings: list[int] = []

    def plan(
        self,
        step: int,
        rows: abc.Sequence[Row],
        moves: abc.Sequence[tuple[int, int]] = (),
        thinking: NDArray[np.bool_] | None = None,  # [num_seqs]
        *,
        own_drafts: bool = False,
        num_kept: int = -1,
    ) -> StepPlan:
        """Builds the message for `rows`, and marks its content as known to the ranks."""
        openings: list[Opening] = []
        tokens: list[IntArray] = []
        blocks: list[tuple[int, int, int]] = []
        table: list[tuple[int, int, int, int]] = []
        for sequence, num_chunk, max_nodes, is_ahead in rows:
            if sequence.seat < 0:
                openings.append(self._open(sequence))
            begin, seat = -1 if is_ahead else sequence.num_computed, sequence.seat
            end, num_sent = begin + num_chunk, sequence.num_sent_tokens
            if end > num_sent:
                tokens.append(sequence.tokens.part(num_sent, end))
                sequence.num_sent_tokens = end
            num_blocks = len(sequence.blocks)
            if num_blocks != sequence.num_sent_blocks:
                for index in range(sequence.num_sent_blocks, num_blocks):
                    blocks.append((seat, index, sequence.blocks[index]))
                sequence.num_sent_blocks = num_blocks
            table.append((seat, begin, num_chunk, max_nodes))
        columns = ints(table).reshape(-1, 4).T.copy()
        closings: list[int] = []
        if self._closings:
            opened = {opening.seat for opening in openings}
            closings = [seat for seat in self._closings if seat not in opened]
            if rows:  # a plan without rows is never sent
                self._closings.clear()
        return StepPlan(
            step=step,
            seats=columns[0],
            context_lens=columns[1],
            chunk_lens=columns[2],
            max_nodes=columns[3],
            tokens=np.concatenate(tokens) if tokens else NO_INTS,
            blocks=ints(blocks) if blocks else NO_BLOCKS,
            kv_moves=ints(moves) if moves else NO_MOVES,
            openings=tuple(openings),
            closings=ints(closings) if closings else NO_INTS,
            thinking=thinking,
            own_drafts=own_drafts,
            num_kept=num_kept,
            appends=self.ranks_append,
        )

    def leave(self, sequence: PagedTokens) -> None:
        """Frees the seat of `sequence`, if it has one."""
        if sequence.seat >= 0:
            heapq.heappush(self._free, sequence.seat)
            self._closings.append(sequence.seat)
            sequence.seat = -1

    def reset(self, sequences: abc.Iterable[PagedTokens]) -> None:
        """Opens all of `sequences` anew in the next plan, since the ranks' state is unknown."""
        for sequence in sequences:
            self.leave(sequence)

    def _open(self, sequence: PagedTokens) -> Opening:
        if self._free:
            sequence.seat = heapq.heappop(self._free)
        else:
            sequence.seat = self._num_seats
            self._num_seats += 1
        sequence.num_sent_tokens, sequence.num_sent_blocks = sequence.num_tokens, 0
        return Opening(sequence.seat, sequence.tokens.view, sequence.num_prompt, sequence.settings)
