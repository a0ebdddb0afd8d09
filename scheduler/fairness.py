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
from .types import Batch, Request


class TenantService:
    """Tokens computed for each tenant that has requests, counted since it has."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._num_requests: Counter[str] = Counter()
        # Requests that are gone while a step of theirs is in flight, whose failure would give back
        # what it was charged: until then they count for their tenants.
        self.leaving: dict[str, str] = {}

    def join(self, tenant: str) -> None:
        """Another request of `tenant` is there."""
        if tenant not in self._served:
            self._served[tenant] = min(self._served.values(), default=0)
        self._num_requests[tenant] += 1

    def leave_after(self, request: Request, in_flight: Iterable[Batch]) -> None:
        """A request is gone; it leaves when the steps `in_flight` that it is in have ended."""
        if request.id not in self.leaving and _is_in(request.id, in_flight):
            self.leaving[request.id] = request.tenant
        else:
            self.leave(request.tenant)

    def settle(self, in_flight: Iterable[Batch]) -> None:
        """A step has ended; only those of `in_flight` have not."""
        for request_id in [each for each in self.leaving if not _is_in(each, in_flight)]:
            self.leave(self.leaving.pop(request_id))

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
        # The head's tenant, and its service when it was found. As service grows, no other tenant
        # comes before it until its own has grown; what lets service shrink clears this.
        self._first: tuple[str, int] | None = None
        self.size = 0

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence at the place that its arrival gives it."""
        queue = self._queues.setdefault(sequence.request.tenant, [])
        heapq.heappush(queue, (sequence.rank, sequence))
        self.size += 1
        self._first = None

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence, wherever it is."""
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
        """The first of the least served tenant, among those of the best priority."""
        if not self._queues:
            return None
        if self._first is None or self._shares.served(self._first[0]) != self._first[1]:
            tenant = min(self._queues, key=self._turn)
            self._first = tenant, self._shares.served(tenant)
        return self._queues[self._first[0]][0][1]

    def give_back(self, failed: deque[Batch], sequences: dict[str, Sequence]) -> None:
        """Takes steps out of `failed`: their known tokens were not computed.

        Those of requests that go on are charged once more, those of requests that ended never.
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
        """The KV of a running sequence was lost, and all of it is computed and charged again."""
        charged = sequence.num_computed - sequence.num_cached_tokens
        self._give_back(sequence.request.tenant, max(0, charged))

    def _give_back(self, tenant: str, num_tokens: int) -> None:
        self._shares.charge(tenant, -num_tokens)
        self._first = None

    def _turn(self, tenant: str) -> tuple[int, int, int]:
        priority, arrival = self._queues[tenant][0][0]
        return (priority, self._shares.served(tenant), arrival)


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


def _is_in(request_id: str, batches: Iterable[Batch]) -> bool:
    return any(request_id in batch.request_ids for batch in batches)


def _num_seats(running: Iterable[Sequence]) -> Counter[str]:
    return Counter(sequence.request.tenant for sequence in running)
