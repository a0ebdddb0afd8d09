"""How many nodes a request may draft in this step.

`DraftBudget.nodes` is asked once per sampling request and step, and may answer zero.
"""

from __future__ import annotations

from ..config import SpeculationBase
from .sequence import Sequence


class DraftBudget:
    """The configured length, narrowed by the request's own wish and by the load."""

    def __init__(self, config: SpeculationBase) -> None:
        self._max_draft_len = config.max_nodes
        self._max_concurrency = config.max_concurrency
        self.enabled = True

    def set_max_draft_len(self, max_draft_len: int) -> None:
        """Changes the length for the steps to come."""
        self._max_draft_len = max_draft_len

    def nodes(self, sequence: Sequence, num_running: int) -> int:
        """Nodes that `sequence` may draft; never beyond what it could still emit."""
        wish = sequence.request.speculation
        if not (self.enabled and wish.enabled):
            return 0
        if self._max_concurrency is not None and num_running > self._max_concurrency:
            return 0
        nodes = self._max_draft_len
        if wish.max_draft_len is not None:
            nodes = min(nodes, wish.max_draft_len)
        # The bonus token comes on top of the accepted ones, hence the 1.
        return max(0, min(nodes, sequence.limit - sequence.num_tokens - 1))
