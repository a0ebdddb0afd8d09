"""Fair sharing between tenants: the least served tenant's first request is the next to be admitted.

Service is counted in tokens of known text. Within a priority,
waiting requests are ordered by their tenant's service and then by arrival; with a single tenant the
order is that of arrival. A tenant that becomes active starts at the least service of the active
tenants, so that idle time saves up no service (start-time fair queueing, Goyal, Vin, Cheng 1996).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .sequence import Sequence
from .types import Batch, Request


class TenantService:
    """Tokens computed for each active tenant, counted since it became active."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._num_requests: Counter[str] = Counter()
        # Requests that have left while one of their steps is in flight. They count for their
        # tenants until it has ended, since a failed step returns what it charged.
        self.leaving: dict[str, str] = {}

    def join(self, tenant: str) -> None:
        """Adds a request of `tenant`."""
        if tenant not in self._served:
            self._served[tenant] = min(self._served.values(), default=0)
        self._num_requests[tenant] += 1

    def leave_after(self, request: Request, in_flight: Iterable[Batch]) -> None:
        """Removes a request once the steps `in_flight` that it takes part in have ended."""
        if request.id not in self.leaving and _is_in(request.id, in_flight):
            self.leaving[request.id] = request.tenant
        else:
            self.leave(request.tenant)

    def settle(self, in_flight: Iterable[Batch]) -> None:
        """Called when a step has ended; `in_flight` are the steps that have not."""
        for request_id in [each for each in self.leaving if not _is_in(each, in_flight)]:
            self.leave(self.leaving.pop(request_id))

    def leave(self, tenant: str) -> None:
        """Removes a request of `tenant`."""
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._num_requests[tenant], self._served[tenant]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Charges `num_tokens` known tokens to `tenant`."""
        self._served[tenant] += num_tokens

    def served(self, tenant: str) -> int:
        """The tenant's service, on a scale common to all tenants."""
        return self._served[tenant]

    def turn(self, sequence: Sequence) -> tuple[int, bool, int, int]:
        """Sort key for the token budget.

        Within a priority, a running request that needs a single token comes before every prompt, so
        that a long prompt delays no stream; prompts are ordered by service, then by arrival.
        """
        request = sequence.request
        is_prompt = sequence.num_uncomputed > 1 or not sequence.blocks
        return (request.priority, is_prompt, self._served[request.tenant], sequence.arrival)


@dataclass(slots=True)
class KnownPlan:
    """The known tokens of a step that is being planned."""

    left: int  # tokens left of the budget
    queue: list[Sequence]  # running and not planned yet; the last entry is next
    shares: TenantService
    chunks: dict[Sequence, int] = field(default_factory=dict)  # known tokens to compute

    def add(self, sequence: Sequence, num_chunk: int) -> None:
        self.chunks[sequence] = num_chunk
        self.left -= num_chunk
        self.shares.charge(sequence.request.tenant, num_chunk)

    def remove(self, sequence: Sequence) -> None:
        """Removes a preempted sequence, whether or not it was planned."""
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
        # The head's tenant and its service when it was found. Service only grows, so the head stays
        # the same until its tenant's service has grown; whatever reduces service clears this.
        self._first: tuple[str, int] | None = None
        self.size = 0

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence in the order of its arrival."""
        queue = self._queues.setdefault(sequence.request.tenant, [])
        heapq.heappush(queue, (sequence.rank, sequence))
        self.size += 1
        self._first = None

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from any place in the queue."""
        tenant = sequence.request.tenant
        queue = self._queues[tenant]
        if queue[0][1] is sequence:
            heapq.heappop(queue)
        else:
            queue.remove((sequence.rank, sequence))
            heapq.heapify(queue)
        if not queue:
            del self._queues[tenant]
        self.size -= 1
        self._first = None

    def head(self) -> Sequence | None:
        """The first request of the least served tenant, within the best priority."""
        if not self._queues:
            return None
        if self._first is None or self._shares.served(self._first[0]) != self._first[1]:
            tenant = min(self._queues, key=self._turn)
            self._first = tenant, self._shares.served(tenant)
        return self._queues[self._first[0]][0][1]

    def give_back(self, failed: deque[Batch], sequences: dict[str, Sequence]) -> None:
        """Returns what the steps in `failed` charged: their known tokens were not computed.

        Requests that continue are charged again when their tokens are computed again.
        """
        leaving = self._shares.leaving
        for batch in failed:
            for request_id, chunk in zip(batch.request_ids, batch.plan.chunk_lens.tolist()):
                sequence = sequences.get(request_id)
                if request_id in leaving:
                    self._give_back(leaving[request_id], chunk)
                elif sequence is not None:
                    self._give_back(sequence.request.tenant, chunk)
        failed.clear()
        self._shares.settle(failed)

    def give_back_computed(self, sequence: Sequence) -> None:
        """Returns the charges of a running sequence whose KV was lost and is computed again."""
        charged = sequence.num_computed - sequence.num_cached_tokens
        self._give_back(sequence.request.tenant, max(0, charged))

    def _give_back(self, tenant: str, num_tokens: int) -> None:
        self._shares.charge(tenant, -num_tokens)
        self._first = None

    def _turn(self, tenant: str) -> tuple[int, int, int]:
        priority, arrival = self._queues[tenant][0][0]
        return (priority, self._shares.served(tenant), arrival)


def last_of(running: Iterable[Sequence]) -> Sequence:
    """The sequence that is preempted first: the last one of the tenant with the most seats."""
    seats = _num_seats(running)

    def order(sequence: Sequence) -> tuple[int, int, int]:
        priority, arrival = sequence.rank
        return (priority, seats[sequence.request.tenant], arrival)

    return max(running, key=order)


def beyond_share(sequence: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
    """Running sequences that may be preempted for `sequence`; the last entry is preempted first.

    A tenant without a seat may take one from a tenant of the same priority that holds several.
    Further seats are redistributed only as they become free, since preemption recomputes prompts.
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


def _is_in(request_id: str, batches: Iterable[Batch]) -> bool:
    return any(request_id in batch.request_ids for batch in batches)


def _num_seats(running: Iterable[Sequence]) -> Counter[str]:
    return Counter(sequence.request.tenant for sequence in running)
