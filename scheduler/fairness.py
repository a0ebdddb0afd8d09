"""Fair sharing between tenants: the least served tenant's first request is the next to be admitted.

Service is counted in tokens of known text. Within a priority,
waiting requests go by their tenant's service and then by arrival, so that the order is that of
arrival within a tenant, and everywhere while there is one tenant only. A tenant that begins starts
at the least service of those that are active: nobody saves up service while idle (start-time fair
queueing, Goyal, Vin, Cheng 1996).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .sequence import Sequence
from .types import Batch


class TenantService:
    """Tokens computed for each tenant that has requests, counted since it has."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._num_requests: Counter[str] = Counter()

    def join(self, tenant: str) -> None:
        """Another request of `tenant` is there."""
        if tenant not in self._served:
            self._served[tenant] = min(self._served.values(), default=0)
        self._num_requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One of its requests is gone."""
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._num_requests[tenant], self._served[tenant]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """`num_tokens` known tokens are computed for `tenant`."""
        self._served[tenant] += num_tokens

    def served(self, tenant: str) -> int:
        """The tenant's service, comparable with the others'."""
        return self._served[tenant]

    def turn(self, sequence: Sequence) -> tuple[int, bool, int, int]:
        """Order in which tokens are given out.

        Within a priority, a running request that needs a single token goes before every prompt, so
        that a long prompt delays no stream; prompts go by their tenants' service, then by arrival.
        """
        request = sequence.request
        is_prompt = sequence.num_uncomputed > 1 or not sequence.blocks
        return (request.priority, is_prompt, self._served[request.tenant], sequence.arrival)


@dataclass(slots=True)
class KnownPlan:
    """Known tokens of a step while it is planned."""

    left: int  # tokens of the budget
    queue: list[Sequence]  # running, not planned yet; the next is the last
    shares: TenantService
    chunks: dict[Sequence, int] = field(default_factory=dict)  # known tokens to compute

    def add(self, sequence: Sequence, num_chunk: int) -> None:
        self.chunks[sequence] = num_chunk
        self.left -= num_chunk
        self.shares.charge(sequence.request.tenant, num_chunk)

    def remove(self, sequence: Sequence) -> None:
        """Takes out what was preempted, planned or not."""
        num_chunk = self.chunks.pop(sequence, 0)
        self.left += num_chunk
        self.shares.charge(sequence.request.tenant, -num_chunk)
        if sequence in self.queue:
            self.queue.remove(sequence)


class WaitingQueue:
    """Waiting requests; `head` is the next to be admitted."""

    def __init__(self, shares: TenantService) -> None:
        self._shares = shares
        self._queues: dict[str, list[tuple[tuple[int, int], Sequence]]] = {}  # heaps, by tenant
        # A heap over the tenants' heads: priority, service when it was pushed, arrival, tenant. The
        # last entry of a tenant is the valid one. Service grows, so an entry that is out of date
        # comes up too early. Where it shrinks, the tenant's head is pushed again: for a request
        # that is preempted in the step that planned it, by `push`, and by `_give_back`.
        self._heads: list[tuple[int, int, int, str]] = []
        self._last: dict[str, tuple[int, int, int, str]] = {}  # by tenant
        self.size = 0

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence at the place that its arrival gives it."""
        queue = self._queues.setdefault(sequence.request.tenant, [])
        heapq.heappush(queue, (sequence.rank, sequence))
        self.size += 1
        self._push_head(sequence.request.tenant)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence, wherever it is."""
        tenant = sequence.request.tenant
        queue = self._queues[tenant]
        if queue[0][1] is sequence:
            heapq.heappop(queue)
            if queue:
                self._push_head(tenant)
            else:
                del self._queues[tenant], self._last[tenant]
        else:
            queue.remove((sequence.rank, sequence))
            heapq.heapify(queue)
        self.size -= 1

    def head(self) -> Sequence | None:
        """The first of the least served tenant, among those of the best priority."""
        while self._heads:
            entry = self._heads[0]
            _, served, _, tenant = entry
            if entry == self._last.get(tenant) and served == self._shares.served(tenant):
                return self._queues[tenant][0][1]
            heapq.heappop(self._heads)
            if entry == self._last.get(tenant):
                self._push_head(tenant)
        return None

    def give_back(self, failed: deque[Batch], sequences: dict[str, Sequence]) -> None:
        """Takes steps out of `failed`: their known tokens are computed, and charged, once more.

        A request that was ended keeps the charge: the ranks have done its work.
        """
        for batch in failed:
            for request_id, chunk in zip(batch.request_ids, batch.plan.chunk_lens.tolist()):
                sequence = sequences.get(request_id)
                if sequence is not None:
                    self._give_back(sequence.request.tenant, chunk)
        failed.clear()

    def give_back_computed(self, sequence: Sequence) -> None:
        """The KV of a running sequence was lost, and all of it is computed and charged again."""
        charged = sequence.num_computed - sequence.num_cached_tokens
        self._give_back(sequence.request.tenant, max(0, charged))

    def _give_back(self, tenant: str, num_tokens: int) -> None:
        self._shares.charge(tenant, -num_tokens)
        if tenant in self._queues:
            self._push_head(tenant)

    def _push_head(self, tenant: str) -> None:
        priority, arrival = self._queues[tenant][0][0]
        entry = (priority, self._shares.served(tenant), arrival, tenant)
        if entry != self._last.get(tenant):
            self._last[tenant] = entry
            heapq.heappush(self._heads, entry)


def last_of(running: Iterable[Sequence]) -> Sequence:
    """The first to lose its blocks when they run out: the last of the tenant with most seats."""
    seats = _num_seats(running)

    def order(sequence: Sequence) -> tuple[int, int, int]:
        priority, arrival = sequence.rank
        return (priority, seats[sequence.request.tenant], arrival)

    return max(running, key=order)


def beyond_share(sequence: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
    """Running sequences that may give way to `sequence`, the first to do so last.

    A tenant without a seat takes one of those that hold several, of its own priority. Further
    seats are shared out as they come free: to exchange them too would compute prompts twice.
    """
    seats = _num_seats(running)
    if seats[sequence.request.tenant]:
        return []
    victims = []
    for each in sorted(running, key=lambda one: one.arrival, reverse=True):
        same_priority = each.request.priority == sequence.request.priority
        if same_priority and seats[each.request.tenant] > 1:
            seats[each.request.tenant] -= 1
            victims.append(each)
    return victims[::-1]


def _num_seats(running: Iterable[Sequence]) -> Counter[str]:
    return Counter(sequence.request.tenant for sequence in running)
