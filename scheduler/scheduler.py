"""Continuous batching without phases: `schedule()` plans a step, `commit()` applies its result.

A sequence has `num_computed` tokens in the KV cache and `num_tokens` known ones; a step computes
some of the difference plus its draft nodes, under one token budget. Prefill, decode and
verification are that one mechanism. Known tokens come first, in order of priority; draft nodes
take what is left, and never a token, a seat or a block that another request could use.
"""

from __future__ import annotations

import logging
import math
import time
from collections import abc, deque
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from ..config import EngineConfig, SpeculationBase
from ..errors import InvalidRequestError, OverloadedError
from .blocks import BlockPool, StateCheckpoints
from .budget import DraftBudget, share_nodes
from .fairness import KnownPlan, TenantService, WaitingQueue, beyond_share, last_of
from .sequence import Row, Seating, Sequence, prompt_parts, until_end
from .timer import Clock, RequestRecord, RequestTimer, SchedulerCounts
from .types import (
    NO_MOVES,
    NO_SAVES,
    Batch,
    Delta,
    Draft,
    IntArray,
    Request,
    SpeculationUsage,
    Verdict,
    ints,
)


def nodes_of(batch: Batch) -> dict[str, int]:
    """Number of draft nodes that a step has room for, by request."""
    return dict(zip(batch.request_ids, batch.max_nodes.tolist(), strict=True))


def _limited(rows: abc.Iterable[Row], of_drafters: abc.Mapping[Any, int]) -> IntArray:  # [num_seqs]
    """Number of each row's nodes that drafters may use."""
    return ints([min(row.max_nodes, of_drafters.get(row.sequence, 0)) for row in rows])


# -- after a failure

log = logging.getLogger(__name__)
_GROWTH = 1.25
_PATIENCE = 64  # steps at one budget before it grows
_MAX_PATIENCE = 4096


class StepLimit:
    """The token budget of a step: `max_tokens`, or less for a while.

    Memory of a step grows with its tokens: activations, logits, the mask of a tree. A step that
    ran out of memory halves the budget of the following ones below its own size. The budget grows
    back slowly, and more slowly each time that this fails.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._patience = _PATIENCE
        self._num_steps = 0  # at this budget
        self.num_tokens = max_tokens
        self.is_reduced = False
        self.num_shrunk = 0  # steps that ran out of memory

    def shrink(self, num_tokens: int) -> bool:
        """A step of `num_tokens` ran out of memory; returns whether a smaller one is possible."""
        if self.is_reduced:
            self._patience = min(2 * self._patience, _MAX_PATIENCE)
        self.num_shrunk += 1
        self._num_steps = 0
        self.num_tokens = max(1, min(self.num_tokens, num_tokens) // 2)
        self.is_reduced = self.num_tokens < self._max_tokens
        log.warning(
            "a step of %d tokens ran out of memory; steps have at most %d tokens for now",
            num_tokens,
            self.num_tokens,
        )
        return num_tokens > 1

    def count_step(self) -> None:
        """Counts a successful step of a reduced budget, which grows after a number of them."""
        self._num_steps += 1
        if not self.is_reduced or self._num_steps < self._patience:
            return
        self._num_steps = 0
        self.num_tokens = min(self._max_tokens, int(self.num_tokens * _GROWTH) + 1)
        self.is_reduced = self.num_tokens < self._max_tokens
        if not self.is_reduced:
            self._patience = _PATIENCE
            log.info("steps have up to %d tokens again", self._max_tokens)


def shrink_after(scheduler: Scheduler) -> list[str]:
    """The oldest step ran out of memory: its requests are computed again, in smaller steps.

    Returns the requests that cannot run, since nothing smaller is left to try.
    """
    batch = scheduler.in_flight[0]
    if len(batch.plan.kv_moves) or len(scheduler.in_flight) > 1:
        scheduler.requeue_all()  # the moves may not have run, also those of blocks of others
    else:
        scheduler.requeue(batch.request_ids)
    return [] if scheduler.step_limit.shrink(batch.most_tokens) else list(batch.request_ids)


_NEAR = 32  # two crashes within so many tokens count as the same place
_TWICE = 2


class PoisonGuard:
    """Finds the request that kills its workers, by running suspects alone.

    A step in which the workers die counts against every request in it. A request that was in two
    such steps, at about the same place of its text, runs alone until it has passed that place. If
    the workers die while it runs alone, it is refused. A poisoned request therefore costs the
    others a pause and the engine a few restarts, and is not replayed forever.
    """

    def __init__(self) -> None:
        self._crashes: dict[str, tuple[int, int]] = {}  # count, known tokens at the last one
        self.marks: dict[str, int] = {}  # by suspect: known tokens beyond which it is cleared

    def accuse(self, batch: abc.Sequence[Sequence]) -> list[str]:
        """Counts one crash against a step's requests; returns the requests to refuse."""
        for sequence in batch:
            request_id, num_tokens = sequence.request.id, sequence.num_tokens
            count, place = self._crashes.get(request_id, (0, num_tokens))
            count = count + 1 if num_tokens - place <= _NEAR else 1
            self._crashes[request_id] = count, num_tokens
            if count >= _TWICE:
                self.marks[request_id] = num_tokens
        if len(batch) == 1 and batch[0].request.id in self.marks:
            return [batch[0].request.id]
        return []

    def forget(self, request_id: str) -> None:
        """Called when a request has ended."""
        self._crashes.pop(request_id, None)
        self.marks.pop(request_id, None)

    def next(self, sequences: dict[str, Sequence]) -> Sequence | None:
        """The suspect that runs alone now; suspects that have passed their mark are cleared."""
        for request_id, mark in list(self.marks.items()):
            sequence = sequences[request_id]
            if sequence.num_tokens <= mark:
                return sequence
            del self.marks[request_id]
        return None


class Scheduler:
    """Requests, blocks and the plan of each step.

    Args:
        config: the engine's configuration.
        num_blocks: KV blocks that every rank has.
        max_model_len: the longest sequence, prompt and output together.
        tree_drafts: whether the drafter proposes more than chains.
        ranks_append: whether ranks append to their seats what they emit, so that steps can be
            planned before the outcome of the last one is back.
        keeps_states: whether layers of the target keep states; then ranks have room for
            `max_num_seqs` checkpoints of them, beside those of running sequences.
        num_groups: steps of different requests that may be in flight at a time: as many as the
            target has pipeline stages, so that each stage has a step to compute.
        clock: the clock of arrivals, deadlines and steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        *,
        tree_drafts: bool = False,
        ranks_append: bool = False,
        keeps_states: bool = False,
        num_groups: int = 1,
        clock: Clock = time.monotonic,
    ) -> None:
        self.clock, self.num_groups = clock, num_groups
        caching = config.enable_prefix_caching
        count = config.num_checkpoints if keeps_states else 0
        checkpoints = StateCheckpoints(count) if count else None
        self.pool = BlockPool(
            num_blocks, config.block_size, caching=caching, checkpoints=checkpoints
        )
        self.budget = DraftBudget(config.speculative_config, max_model_len, tree_drafts=tree_drafts)
        self.max_model_len = max_model_len
        self.counts = SchedulerCounts()
        self.timer = RequestTimer(clock)
        self.step_limit = StepLimit(config.max_num_batched_tokens)
        self.running: list[Sequence] = []
        # Planned and not committed: they run, or have failed.
        self.in_flight: deque[Batch] = deque()
        self._shares = TenantService()
        self._waiting = WaitingQueue(self._shares)
        self._sequences: dict[str, Sequence] = {}
        self._config = config
        # Adapters that requests may name.
        self.adapters = {each.name for each in config.lora_modules}
        self._thinking_tokens = config.speculative_config.thinking_tokens
        self._unused = SpeculationUsage(synthetic=config.speculative_config.is_synthetic)
        self._reach = max(section.reach for section in config.speculative_config.sections)
        self.ranks_append = ranks_append
        self._keeps_states = keeps_states
        self.admits_new = True  # whether requests that have not run yet are admitted
        self._seating = Seating(ranks_append=ranks_append)
        self._poison = PoisonGuard()
        self._flying: frozenset[str] = frozenset()  # requests of steps in flight, while planning
        self._is_short = False  # whether blocks ran short while steps were in flight
        self._moves: list[tuple[int, int]] = []
        self._arrivals = 0
        self._num_constrained = 0  # requests with a grammar
        self._num_predicted = 0  # requests with a prediction
        self._step = 0

    @property
    def num_waiting(self) -> int:
        return self._waiting.size

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting.size)

    def add(self, request: Request) -> None:
        """Takes a request into the queue.

        Raises:
            InvalidRequestError: it could never run.
            OverloadedError: the queue is full, and no engine had accepted the request before.
        """
        is_full = self._waiting.size >= self._config.max_queued_requests
        if is_full and not request.was_accepted:
            raise OverloadedError(
                f"{self._waiting.size} requests are queued (max_queued_requests = "
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
            raise InvalidRequestError.at(
                "prompt", f"{num_prompt} tokens; allowed are 1 to {self.max_model_len - 1}"
            )
        if self.pool.blocks_for(limit) > self.pool.num_blocks:
            raise InvalidRequestError.at(
                "max_tokens",
                f"prompt and output of {limit} tokens exceed the KV cache of "
                f"{self.pool.num_blocks * self.pool.block_size}",
            )
        if request.adapter and request.adapter not in self.adapters:
            raise InvalidRequestError.at("model", f"no adapter {request.adapter!r} is served")
        sequence = Sequence(
            request, self._arrivals, limit, self._thinking_tokens, self._reach, self.clock
        )
        sequence.usage = self._unused
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._shares.join(request.tenant)
        self._num_constrained += request.sampling.structured_outputs is not None
        self._num_predicted += request.prediction.size > 0
        self._waiting.push(sequence)
        self.counts.num_prompt_tokens += num_prompt

    def abort(
        self,
        request_id: str,
        reason: str = "abort",
        error: str | None = None,
        field: str | None = None,
    ) -> list[Delta]:
        """Ends a request, waiting or running; returns no deltas if it is not known (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._end(sequence, reason)
        usage = sequence.usage
        return [Delta(request_id, (), finish_reason=reason, usage=usage, error=error, field=field)]

    def expired(self) -> list[str]:
        """Requests whose deadline has passed."""
        now = self.clock()
        return [
            request_id
            for request_id, sequence in self._sequences.items()
            if sequence.deadline_s is not None and sequence.deadline_s < now
        ]

    def schedule(self) -> Batch:
        """The next step's plan: known tokens first, draft nodes from what they leave.

        Nothing is in flight, except steps that failed.
        """
        if self.in_flight:
            self._waiting.give_back(self.in_flight, self._sequences)
        self._is_short = False
        return self._plan_step()

    def schedule_beside(self) -> Batch | None:
        """Plans a step of requests that are in no step in flight; None if there are none.

        Requests in flight are not preempted. If blocks run short, nothing more is planned until no
        step is in flight; then `schedule` preempts as usual.
        """
        if self._poison.marks or self._is_short:
            return None
        flying = frozenset(each for batch in self.in_flight for each in batch.request_ids)
        if not self._waiting.size and len(flying) >= len(self.running):
            return None
        self._flying = flying
        try:
            batch = self._plan_step()
        finally:
            self._flying = frozenset()
        return batch if batch.num_seqs else None

    def _plan_step(self) -> Batch:
        plan = self._plan_known()
        nodes, of_drafters = self._plan_nodes(plan)
        rows = [Row(each, chunk, nodes.get(each, 0)) for each, chunk in plan.chunks.items()]
        return self._batch(rows, list(plan.chunks), of_drafters=of_drafters)

    def rests(self) -> bool:
        """Called before a step; returns whether it drafts nothing, whatever the last one emits."""
        if self._num_constrained or self._num_predicted:
            return False
        return self.budget.rests(len(self.running))

    def schedule_ahead(self, *, drafts: bool = False) -> Batch | None:
        """Plans the next token of every request in flight, before the outcome is back.

        Returns None if the next step could do more than that: a waiting request may be seated, a
        prompt is unfinished, or blocks are scarce. With `drafts`, the ranks will have drafts of
        their own, which the step verifies.
        """
        if self._poison.marks or len(self.running) > self.step_limit.num_tokens:
            return None
        head = self._waiting.head()
        if head and self._may_be_seated(head):
            return None
        nodes = self._nodes_ahead(self.in_flight[-1], drafts)
        for each in nodes:
            self._shares.charge(each.request.tenant, 1)
        rows = [Row(each, 1, count, is_ahead=True) for each, count in nodes.items()]
        return self._batch(rows, list(nodes), own=drafts) if nodes else None

    def commit(self, batch: Batch, drafts: abc.Sequence[Draft], verdict: Verdict) -> list[Delta]:
        """Appends emitted tokens, rewinds rejected nodes, and finishes requests that have ended."""
        self.in_flight.popleft()
        if self._shares.leaving:
            self._shares.settle(self.in_flight)
        flying = nodes_of(self.in_flight[0]) if self.in_flight else {}
        if self.step_limit.is_reduced:
            self.step_limit.count_step()
        deltas = []
        # Converted to lists once: indexing and slicing arrays costs several times as much.
        chunks, samples = batch.plan.chunk_lens.tolist(), batch.samples.tolist()
        all_emitted, ends = verdict.emitted.tolist(), verdict.emitted_start.tolist()
        all_paths, path_ends = verdict.path.tolist(), verdict.path_start.tolist()
        scored = {} if batch.num_scored is None else prompt_parts(batch, verdict)
        for row, request_id in enumerate(batch.request_ids):
            sequence = self._sequences.get(request_id)
            if sequence is None:  # the request ended while the step was in flight
                continue
            if sequence.scores is not None and row in scored:
                sequence.scores.add(scored[row], sequence.num_computed)
            if not samples[row]:
                sequence.num_computed += chunks[row]
                sequence.cache_blocks(self.pool)
                continue
            path = all_paths[path_ends[row] : path_ends[row + 1]]
            if path and not verdict.compacted:
                self._queue_moves(sequence, path)
            emitted, reason = until_end(sequence, all_emitted[ends[row] : ends[row + 1]])
            delta = sequence.emit(drafts[row], verdict, row, emitted, path, reason)
            deltas.append(delta)
            if delta.times is not None and not sequence.request.emitted.size:
                self.timer.first(delta.times)
            if self.ranks_append:
                sequence.num_sent_tokens = sequence.tokens.size
            sequence.cache_blocks(self.pool)
            sequence.trim(self.pool, flying.get(request_id, 0))
            self.counts.num_output_tokens += len(emitted)
            if reason:
                self.running.remove(sequence)
                self._end(sequence, reason)
                self.counts.num_finished += 1
        return deltas

    def _batch(
        self,
        rows: list[Row],
        sequences: list[Sequence],
        own: bool = False,
        of_drafters: dict[Sequence, int] | None = None,
    ) -> Batch:
        self._step += 1
        thinking = None
        if self._thinking_tokens is not None:
            thinking = np.array([each.thinking for each in sequences], dtype=np.bool_)
        names, samples, depths, scored, most_nodes = [], [], [], [], 0
        for sequence, (_, num_chunk, nodes, is_ahead) in zip(sequences, rows, strict=True):
            num_tokens = sequence.tokens.size
            is_last = is_ahead or sequence.num_computed + num_chunk == num_tokens
            names.append(sequence.request.id)
            samples.append(is_last)
            most_nodes = max(most_nodes, nodes)
            depths.append(max(0, sequence.limit - num_tokens - 1))  # 1: the bonus token
            scored.append(num_chunk - is_last if sequence.scores else 0)
        loads, saves = NO_MOVES, NO_SAVES
        if self.pool.checkpoints is not None:
            loads, saves = self._plan_states(rows, self.pool.checkpoints)
        num_kept = self.budget.num_kept if most_nodes else -1
        plan = self._seating.plan(
            self._step, rows, self._moves, thinking, own_drafts=own, num_kept=num_kept
        )
        if len(loads) or len(saves):
            plan = replace(plan, state_loads=loads, state_saves=saves)
        batch = Batch(
            request_ids=tuple(names),
            plan=plan,
            samples=np.array(samples, dtype=np.bool_),
            max_depth=ints(depths),
            num_scored=ints(scored) if any(scored) else None,
            drafter_nodes=None if of_drafters is None else _limited(rows, of_drafters),
        )
        if rows:  # an empty step is never run, so moves wait for the next one
            self._moves = []
            self.in_flight.append(batch)
        return batch

    def _plan_states(
        self, rows: list[Row], checkpoints: StateCheckpoints
    ) -> tuple[IntArray, IntArray]:
        """`state_loads` and `state_saves` of the step of `rows`, before any has a seat for it."""
        loads: list[tuple[int, int]] = []
        saves: list[tuple[int, int, int]] = []
        for index, (sequence, num_chunk, _, is_ahead) in enumerate(rows):
            if sequence.seat < 0 and sequence.state_load >= 0:
                loads.append((index, sequence.state_load))
            if not is_ahead:
                kept = sequence.plan_saves(checkpoints, sequence.num_computed + num_chunk)
                saves += [(index, point, number) for point, number in kept]
        return ints(loads).reshape(-1, 2), ints(saves).reshape(-1, 3)

    def requests(self) -> list[Request]:
        """All requests that have not ended, with the tokens that they have emitted."""
        return [
            replace(each.request, emitted=each.tokens.view[each.num_prompt :].copy())
            for each in self._sequences.values()
        ]

    def num_adapted(self, adapter: str) -> int:
        """Number of requests of an adapter that have not ended."""
        return sum(each.request.adapter == adapter for each in self._sequences.values())

    def change_drafters(self, config: SpeculationBase, *, tree_drafts: bool) -> None:
        """Changes to other drafters between two steps; verification stays the same.

        Arguments are those of the constructor.
        """
        budget = DraftBudget(config, self.max_model_len, tree_drafts=tree_drafts)
        budget.follow(self.budget)
        self.budget = budget
        grows = max(each.reach for each in config.sections) > self._reach
        if grows and self._keeps_states:  # by seat, and found by hashes
            self.requeue_all()
        if grows:
            self._reach = 1
            self.pool.clear_cache()
            for sequence in self._sequences.values():
                sequence.extend_reach()

    def requeue_all(self) -> None:
        """After the KV cache was lost: queues every request to be computed from its tokens."""
        for sequence in list(self.running):
            self._waiting.give_back_computed(sequence)
            self._preempt(sequence)
        self._moves.clear()
        self._waiting.give_back(self.in_flight, self._sequences)
        self.pool.clear_cache()

    def requeue(self, request_ids: abc.Sequence[str]) -> None:
        """Queues these requests to be computed from their tokens; the others keep their blocks."""
        for sequence in [each for each in self.running if each.request.id in request_ids]:
            self._preempt(sequence)

    def accuse(self) -> list[str]:
        """After the workers died in a step: returns the requests of it that are to be refused."""
        request_ids = dict.fromkeys(each for batch in self.in_flight for each in batch.request_ids)
        known = [self._sequences[each] for each in request_ids if each in self._sequences]
        return self._poison.accuse(known)

    def check(self) -> None:
        """Asserts that every block is either free or held by a known sequence."""
        self.pool.check(sequence.blocks for sequence in self._sequences.values())

    def _may_be_seated(self, waiting: Sequence) -> bool:
        """Whether the first waiting request may take a free seat, or another request's."""
        return (
            len(self.running) < self._config.max_num_seqs
            or waiting.request.priority < max(each.request.priority for each in self.running)
            or bool(beyond_share(waiting, self.running))
        )

    def _nodes_ahead(self, last: Batch, drafts: bool) -> dict[Sequence, int]:
        """The requests that continue after `last`, with their draft nodes.

        Blocks are allocated for whatever `last` emits and for the nodes after it; surplus ones are
        released when `last` is committed. Returns nothing if the next step would hold more: a
        request is not in `last` or has prompt left, or blocks are short.
        """
        in_step = set(last.request_ids) if all(last.samples.tolist()) else set()
        if not all(each.request.id in in_step for each in self.running):
            return {}
        nodes = {each: 0 for each in self.running if each.num_tokens + 1 < each.limit}
        if drafts:
            wishes = self.budget.wishes(nodes, len(self.running))
            nodes |= share_nodes(wishes, self.step_limit.num_tokens - len(nodes), self._step)
        flying = nodes_of(last)
        for each, count in nodes.items():
            if not each.allocate(self.pool, each.num_tokens + flying[each.request.id] + 1 + count):
                return {}
        return nodes

    def _grounded(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences that are in no step in flight."""
        if not self._flying:
            return sequences
        return [each for each in sequences if each.request.id not in self._flying]

    def _plan_known(self) -> KnownPlan:
        """Divides the token budget among running and waiting requests, by `TenantService.turn`."""
        suspect = self._poison.next(self._sequences) if self._poison.marks else None
        if suspect is not None:
            return self._plan_alone(suspect)
        turn = self._shares.turn
        queue = sorted(self._grounded(self.running), key=turn, reverse=True)
        num_admissible = math.inf
        if self.num_groups > 1:  # even shares, so that the steps in flight take equal time
            num_running, num_seats = len(self.running), self._config.max_num_seqs
            queue = queue[num_running // -self.num_groups :]
            num_soon = min(num_running + self._waiting.size, num_seats)
            num_admissible = max(1, -(num_soon // -self.num_groups) - len(queue))
        plan = KnownPlan(self.step_limit.num_tokens, queue, self._shares)
        admitting = self._waiting.size > 0
        while plan.left > 0:
            waiting = self._waiting.head() if admitting else None
            if waiting is not None and not (self.admits_new or waiting.num_preemptions):
                waiting, admitting = None, False
            if waiting is not None and not (queue and turn(queue[-1]) < turn(waiting)):
                num_admissible -= 1
                admitting = self._admit(waiting, plan) and num_admissible > 0
            elif queue:
                admitting = self._continue(queue.pop(), plan) and admitting
            else:
                break
        return plan

    def _plan_alone(self, sequence: Sequence) -> KnownPlan:
        """Plans a step of one request; others are preempted only if it needs their blocks."""
        plan = KnownPlan(self.step_limit.num_tokens, [], self._shares)
        if sequence in self.running:
            self._continue(sequence, plan)
            return plan
        while not self._admit(sequence, plan):
            self._preempt(max(self.running, key=attrgetter("rank")))
        return plan

    def _continue(self, sequence: Sequence, plan: KnownPlan) -> bool:
        """Plans a running sequence; returns False if that needed a preemption."""
        num_chunk = min(sequence.tokens.size - sequence.num_computed, plan.left)
        is_first_try = True
        while not sequence.allocate(self.pool, sequence.num_computed + num_chunk):
            if self._flying:
                self._is_short = True
                return False
            is_first_try = False
            victim = last_of(self.running)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        plan.add(sequence, num_chunk)
        return is_first_try

    def _admit(self, sequence: Sequence, plan: KnownPlan) -> bool:
        """Seats the first waiting request, if necessary by preempting requests of worse priority.

        Returns False, and leaves it waiting, if there is no room even so.
        """
        cached = sequence.acquire_cached(self.pool)
        num_chunk = min(sequence.num_uncomputed, plan.left)
        missing = self.pool.blocks_for(sequence.num_computed + num_chunk) - len(sequence.blocks)
        if not self._make_room(sequence, missing, plan):
            sequence.free(self.pool)
            return False
        held = sequence.allocate(self.pool, sequence.num_computed + num_chunk)
        assert held, (missing, self.pool.num_free, "room was made for it")
        self._waiting.remove(sequence)
        self.running.append(sequence)
        plan.add(sequence, num_chunk)
        self.counts.num_looked_up_tokens += sequence.num_tokens
        self.counts.num_hit_tokens += cached
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(cached, sequence.num_prompt)
            sequence.admitted_s = self.clock()
        return True

    def _make_room(self, sequence: Sequence, num_blocks: int, plan: KnownPlan) -> bool:
        """Makes a seat and `num_blocks` free for `sequence`, by preemption if that suffices.

        Requests of worse priority are preempted first, then requests of tenants with more than
        their share. One more block per running request is kept free, since each needs one soon.
        """
        priority, max_seats = sequence.request.priority, self._config.max_num_seqs
        worse = sorted(
            (s for s in self.running if s.request.priority > priority), key=attrgetter("rank")
        )
        worse = self._grounded([*beyond_share(sequence, self.running), *worse])
        others = len(self.running) - len(worse)
        most = self.pool.num_free + sum(len(each.blocks) for each in worse)
        if others >= max_seats or most < num_blocks + others:
            return False
        while len(self.running) >= max_seats or self.pool.num_free < num_blocks + len(self.running):
            if not worse:  # shared blocks become free only with their last holder
                return False
            self._preempt(worse.pop(), plan)
        return True

    def _plan_nodes(
        self, plan: KnownPlan
    ) -> tuple[dict[Sequence, int], dict[Sequence, int] | None]:
        """Draft nodes for rows that reach their root, from tokens and blocks that are left.

        Returns:
            The nodes, and how many of them drafters may use; None: all.
        """
        if self.rests():
            return {}, None
        at_root = [each for each, chunk in plan.chunks.items() if chunk == each.num_uncomputed]
        wishes = self.budget.wishes(at_root, len(self.running))
        if not wishes and self._num_constrained:
            wishes = self.budget.told_wishes(at_root, wishes, predicted=False)
        of_drafters = None
        if self._num_predicted:
            of_drafters = wishes
            wishes = self.budget.told_wishes(at_root, wishes, predicted=True)
        granted = share_nodes(wishes, plan.left, self._step) if wishes else {}
        for sequence, share in granted.items():
            if not sequence.allocate(self.pool, sequence.num_tokens + share):
                slots = (len(sequence.blocks) + self.pool.num_free) * self.pool.block_size
                granted[sequence] = slots - sequence.num_tokens
                held = sequence.allocate(self.pool, slots)
                assert held, (share, slots, "no more than there is room for")
        return granted, of_drafters

    def _preempt(self, sequence: Sequence, plan: KnownPlan | None = None) -> None:
        """Returns a sequence to its old place in the queue; its KV is recomputed later."""
        sequence.free(self.pool)
        self._seating.leave(sequence)
        sequence.num_preemptions += 1
        self.counts.num_preemptions += 1
        self.running.remove(sequence)
        if plan is not None:
            plan.remove(sequence)
        self._waiting.push(sequence)

    def _queue_moves(self, sequence: Sequence, path: list[int]) -> None:
        """Queues moves of accepted nodes to their final slots, done before the next forward."""
        size = self.pool.block_size
        first = sequence.num_tokens  # index of the first node's slot
        for step, node in enumerate(path):
            if node != step:
                self._moves.append(
                    (sequence.slot(first + node, size), sequence.slot(first + step, size))
                )

    def _end(self, sequence: Sequence, reason: str) -> None:
        ended = RequestRecord(
            sequence.request.id, sequence.arrived_s, sequence.num_prompt, sequence.num_output
        )
        self.timer.end(reason, ended, sequence.first_s)
        sequence.free(self.pool)
        self._seating.leave(sequence)
        self._poison.forget(sequence.request.id)
        num_read = sequence.num_prompt - sequence.num_cached_tokens
        self.budget.forget(sequence.request.id, num_read, sequence.num_output)
        self._shares.leave_after(sequence.request, self.in_flight)
        self._num_constrained -= sequence.request.sampling.structured_outputs is not None
        self._num_predicted -= sequence.request.prediction.size > 0
        del self._sequences[sequence.request.id]
