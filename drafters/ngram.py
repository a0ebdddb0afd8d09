"""NGram: a pool from token patterns to what followed them, with TensorRT-LLM's four switches.

Semantics of `tensorrt_llm/_torch/speculative/ngram.py` (after Saxena 2023, prompt lookup
decoding): keys are all n-grams up to `max_matching_ngram_size`, values the next at most
`max_draft_len` tokens; the longest tail of the sequence that is a key gives the draft. A pool is
private to its request, or shared (`pool_scope`): by a tenant's requests, by a whole engine's, or
by a tenant's in all engines, which a `PoolLink` keeps up to date.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from ..config import NGramConfig
from ..scheduler import tree
from ..scheduler.sequence import TokenBuffer
from ..scheduler.types import Batch, Draft, IntArray, Request, Verdict
from .ngram_pool import FirstSeen, NGramPool, Tokens
from .pool import PoolLink
from .protocol import DraftFault, Needs

# Tokens learnt in one step, so that long prompts do not stall it; their drafts come a bit later.
_MAX_LEARNT = 512  # by pools
_MAX_INDEXED = 2**13  # by tables of positions
_PUBLISH_EVERY = 32  # tokens of one request
_MAX_WINDOW = 512  # tokens published together; prompts that begin alike have windows in common


class PoolBook:
    """A request's reading and writing of a pool, its own or a shared one."""

    def __init__(self, pool: NGramPool, tokens: TokenBuffer) -> None:
        self.tokens = tokens
        self.pool = pool
        self.num_learnt = 0

    def find(self) -> Tokens:
        return self.pool.find(tuple(self.tokens.view[-self.pool.max_size :].tolist()))

    def learn(self, max_tokens: int) -> int:
        """Teaches the pool what is new, up to so many tokens; how many it was."""
        count = min(max_tokens, len(self.tokens) - self.num_learnt)
        if count > 0:
            known = min(self.num_learnt, self.pool.num_overlap)
            start = self.num_learnt - known
            self.num_learnt += count
            self.pool.update(self.tokens.view[start : self.num_learnt].tolist(), known)
        return count


class SharedPools:
    """Pools by who shares them, and the windows of others that are still to be learnt.

    All pools together hold at most `pool_max_patterns`; the sharers that were served longest ago
    lose theirs first, and of theirs those used longest ago.
    """

    def __init__(self, config: NGramConfig, link: PoolLink | None) -> None:
        self._config = config
        self._link = link
        self._pools: OrderedDict[str, NGramPool] = OrderedDict()  # served longest ago first
        self._backlog: deque[tuple[str, IntArray]] = deque()
        self._num_waiting = 0  # tokens in it

    def open(self, sharer: str) -> NGramPool:
        """The pool of a request that is about to be served."""
        pool = self._pool(sharer)
        self._pools.move_to_end(sharer)
        return pool

    def publish(self, sharer: str, tokens: IntArray) -> None:
        if self._link is not None:
            self._link.publish(sharer, tokens)

    def gather(self, sharers: set[str], max_tokens: int) -> None:
        """Learns from others' windows, up to so many tokens.

        Raises:
            DraftFault: the link failed; the pools are as they were.
        """
        if self._link is not None:
            for sharer in sharers if not self._backlog else ():
                for window in self._link.poll(sharer):
                    self.postpone(sharer, window)
        while self._backlog and max_tokens > 0:
            sharer, window = self._backlog.popleft()
            self._num_waiting -= len(window)
            max_tokens -= len(window)
            self._pool(sharer).update(window.tolist())
        self._evict(sharers)
        fault = None if self._link is None else self._link.take_fault()
        if fault is not None:
            raise DraftFault("the shared pool failed; its text is missing for a while") from fault

    def postpone(self, sharer: str, window: IntArray) -> None:
        """A window to be learnt when there is time; too many, and the oldest are dropped."""
        self._backlog.append((sharer, window))
        self._num_waiting += len(window)
        while self._num_waiting > self._config.pool_max_patterns:
            self._num_waiting -= len(self._backlog.popleft()[1])

    def _evict(self, in_use: set[str]) -> None:
        excess = sum(map(len, self._pools.values())) - self._config.pool_max_patterns
        for sharer in list(self._pools) if excess > 0 else ():
            pool = self._pools[sharer]
            for _ in range(min(excess, len(pool))):
                pool.evict()
                excess -= 1
            if not len(pool) and sharer not in in_use:
                del self._pools[sharer]
            if excess == 0:
                return

    def _pool(self, sharer: str) -> NGramPool:
        pool = self._pools.get(sharer)
        if pool is None:
            pool = self._pools[sharer] = NGramPool(self._config)
        return pool

    def shutdown(self) -> None:
        self._pools.clear()
        if self._link is not None:
            self._link.shutdown()


class NGram:
    """Drafts by looking up what followed the sequence's tail before."""

    name = "ngram"
    needs = Needs()

    def __init__(self, config: NGramConfig, link: PoolLink | None = None) -> None:
        self._config = config
        self._private = config.scope == "request"
        self._shared = SharedPools(config, link)
        self._requests: dict[str, _Known] = {}

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            tokens = TokenBuffer(request.prompt, request.emitted)
            sharer = "" if self._config.scope == "replica" else request.tenant
            book: FirstSeen | PoolBook
            if not self._private:
                book = PoolBook(self._shared.open(sharer), tokens)
            elif self._config.is_use_oldest:
                book = FirstSeen(self._config, tokens)
            else:
                book = PoolBook(NGramPool(self._config), tokens)
            self._requests[request.id] = _Known(book, sharer)

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        drafts = [tree.EMPTY] * batch.num_seqs
        left = _MAX_INDEXED if self._private and self._config.is_use_oldest else _MAX_LEARNT
        emits = self._config.max_draft_len + 1  # and no less is learnt of each request
        for row, budget in enumerate(budgets.tolist()):
            known = self._requests.get(batch.request_ids[row])
            if budget <= 0 or known is None:
                continue
            left -= known.book.learn(max(left, emits))
            match = known.book.find()
            if len(match):
                drafts[row] = tree.chain(match[:budget], self.name)
        return drafts

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        starts = verdict.emitted_start.tolist()
        for row, request_id in enumerate(batch.request_ids):
            known = self._requests.get(request_id)
            if known is None or starts[row] == starts[row + 1]:
                continue
            known.book.tokens.extend(verdict.emitted[starts[row] : starts[row + 1]])
            if not self._private:
                self._publish(known, _PUBLISH_EVERY)
        if not self._private:
            self._shared.gather({known.sharer for known in self._requests.values()}, _MAX_LEARNT)

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            known = self._requests.pop(request_id, None)
            if known is not None and isinstance(known.book, PoolBook) and not self._private:
                self._publish(known, 1)
                self._postpone(known.sharer, known.book)

    def shutdown(self) -> None:
        self._requests.clear()
        self._shared.shutdown()

    def _publish(self, known: _Known, at_least: int) -> None:
        """Sends what the others do not have yet."""
        tokens = known.book.tokens.view
        if len(tokens) - known.num_published >= at_least:
            for window in self._windows(tokens, known.num_published):
                self._shared.publish(known.sharer, window)
            known.num_published = len(tokens)

    def _postpone(self, sharer: str, book: PoolBook) -> None:
        """Leaves what the pool has not learnt of a request that ends to the steps to come."""
        for window in self._windows(book.tokens.view, book.num_learnt):
            self._shared.postpone(sharer, window)

    def _windows(self, tokens: IntArray, begin: int) -> Iterator[IntArray]:
        """`tokens` from `begin`, in windows that overlap by a pattern's reach."""
        overlap = self._config.max_draft_len + self._config.max_matching_ngram_size - 1
        for start in range(begin, len(tokens), _MAX_WINDOW):
            yield tokens[max(0, start - overlap) : start + _MAX_WINDOW]


class _Known:
    """What is known of one open request."""

    __slots__ = ("book", "num_published", "sharer")

    def __init__(self, book: FirstSeen | PoolBook, sharer: str) -> None:
        self.book = book
        self.sharer = sharer
        self.num_published = 0
