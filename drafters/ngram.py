"""NGram: a pool from token patterns to what followed them, with TensorRT-LLM's four switches.

Semantics of `tensorrt_llm/_torch/speculative/ngram.py` (after Saxena 2023, prompt lookup
decoding): keys are all n-grams up to `max_matching_ngram_size`, values the next at most
`max_draft_len` tokens; the longest tail of the sequence that is a key gives the draft. A pool is
private to its request, or shared by a tenant's (`is_public_pool`); tenants never share.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..config import NGramConfig
from ..scheduler import tree
from ..scheduler.sequence import TokenBuffer
from ..scheduler.types import Batch, Draft, IntArray, Request, Verdict
from .protocol import Needs

Tokens = tuple[int, ...]


class NGramPool:
    """Patterns and what followed them, oldest first."""

    def __init__(self, config: NGramConfig) -> None:
        self._config = config
        self._matches: dict[Tokens, dict[Tokens, None]] = {}  # a dict as an ordered set

    def update(self, tokens: list[int]) -> None:
        """Learns every pattern of `tokens` (a window; matches may be cut short by its end)."""
        max_len = self._config.max_draft_len
        for size in range(min(self._config.max_matching_ngram_size, len(tokens) - 1), 0, -1):
            for begin in range(len(tokens) - size):
                pattern = tuple(tokens[begin : begin + size])
                match = tuple(tokens[begin + size : begin + size + max_len])
                self._store(pattern, match)

    def find(self, tail: Tokens) -> Tokens:
        """What followed the longest known suffix of `tail`; empty if none is known."""
        for size in range(len(tail), self._config.min_matching_ngram_size - 1, -1):
            matches = self._matches.get(tail[len(tail) - size :])
            if matches is not None:
                keys = iter(matches) if self._config.is_use_oldest else reversed(matches)
                return next(keys)
        return ()

    def _store(self, pattern: Tokens, match: Tokens) -> None:
        stored = self._matches.get(pattern)
        if stored is None:
            self._matches[pattern] = {match: None}
        elif match in stored:
            return
        elif not self._config.is_keep_all and len(match) > len(next(iter(stored))):
            self._matches[pattern] = {match: None}
        else:
            for shorter in [key for key in stored if len(key) < len(match)]:
                del stored[shorter]
            stored[match] = None


class NGram:
    """Drafts by looking up what followed the sequence's tail before."""

    name = "ngram"
    needs = Needs()

    def __init__(self, config: NGramConfig) -> None:
        self._config = config
        self._public: dict[str, NGramPool] = {}  # by tenant
        self._pools: dict[str, NGramPool] = {}  # by request
        self._tokens: dict[str, TokenBuffer] = {}

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if self._config.is_public_pool:
                pool = self._public.setdefault(request.tenant, NGramPool(self._config))
            else:
                pool = NGramPool(self._config)
            self._pools[request.id] = pool
            self._tokens[request.id] = TokenBuffer(request.prompt, request.emitted)
            pool.update(self._tokens[request.id].view.tolist())

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        drafts = []
        for request_id, budget in zip(batch.request_ids, budgets.tolist(), strict=True):
            draft = tree.EMPTY
            tokens = self._tokens.get(request_id)
            if budget > 0 and tokens is not None:
                tail = tokens.view[-self._config.max_matching_ngram_size :]
                match = self._pools[request_id].find(tuple(tail.tolist()))
                if match:
                    draft = tree.chain(match[:budget], self.name)
            drafts.append(draft)
        return drafts

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        window = self._config.max_draft_len + self._config.max_matching_ngram_size - 1
        for row, request_id in enumerate(batch.request_ids):
            emitted = verdict.tokens(row)
            tokens = self._tokens.get(request_id)
            if len(emitted) and tokens is not None:
                # Patterns whose match was cut short by the old end are learnt again, longer.
                start = max(0, len(tokens) - window)
                tokens.extend(emitted)
                self._pools[request_id].update(tokens.view[start:].tolist())

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._pools.pop(request_id, None)
            self._tokens.pop(request_id, None)

    def shutdown(self) -> None:
        self._public.clear()
