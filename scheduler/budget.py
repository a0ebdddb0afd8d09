"""How many nodes a request may draft in this step.

`DraftBudget.wishes` is called once per step, and may grant nothing; with `adaptive_draft_len`,
lengths follow what was measured (`lengths/`). The number of tokens left to emit limits the
useful *depth* of a draft (`Batch.max_depth`). For a chain that is its length; a tree or a lookahead
window has many nodes to a level, and is bounded by the configuration and by the model's positions.
`share_nodes` then divides the rest of the token budget among these requests.
"""

from __future__ import annotations

from collections import abc, defaultdict
from typing import Any

from ..config import SpeculationBase
from .lengths.adaptive import DraftLengths
from .plan import Batch
from .sequence import Sequence
from .types import Draft, Verdict


class DraftBudget:
    """The configured length, narrowed by the request's own wish and by the load.

    Args:
        max_model_len: no node lies beyond, whatever it is below.
        tree_drafts: whether a draft may have several nodes to a level.
    """

    def __init__(self, config: SpeculationBase, max_model_len: int, *, tree_drafts: bool) -> None:
        self._config = config
        self._max_draft_len = config.max_nodes
        self._max_model_len = max_model_len
        self._tree_drafts = tree_drafts
        self._last: tuple[tuple[int, int], int] = ((-1, -1), 0)  # arguments and `nodes_at`
        self.enabled = True
        self._lengths: DraftLengths | None = None
        if config.adaptive_draft_len and config.max_nodes:
            self._lengths = DraftLengths(config.max_nodes, tree_drafts=tree_drafts)

    @property
    def max_draft_len(self) -> int:
        """Nodes of a draft, before load and requests narrow it."""
        return self._max_draft_len

    def set_max_draft_len(self, max_draft_len: int) -> None:
        """Changes the length for the steps to come."""
        self._max_draft_len = max_draft_len

    def wishes(self, sequences: abc.Iterable[Sequence], num_running: int) -> dict[Sequence, int]:
        """Nodes that each of `sequences` may draft; those are left out that may have none."""
        wishes: dict[Sequence, int] = {}
        lengths = self._lengths
        if lengths is not None:
            sequences = list(sequences)
            lengths.plan([each.request.id for each in sequences])
        most = self._nodes_at(num_running) if self.enabled else 0
        if most <= 0:
            return wishes
        for sequence in sequences:
            wish, num_tokens = sequence.request.speculation, sequence.tokens.size
            depth = sequence.limit - num_tokens - 1  # `max_depth`
            if depth <= 0 or not wish.enabled:  # nothing that is drafted could be emitted
                continue
            room = self._max_model_len - num_tokens if self._tree_drafts else depth
            nodes = most if most < room else room
            if wish.max_draft_len is not None:
                nodes = min(nodes, wish.max_draft_len)
            if lengths is not None:
                nodes = min(nodes, lengths.most(sequence.request.id))
            if nodes > 0:
                wishes[sequence] = nodes
        return wishes

    def end_step(
        self, batch: Batch, drafts: abc.Sequence[Draft], verdict: Verdict, elapsed_ms: float
    ) -> None:
        """A step was committed, and took so long with all that the engine did for it."""
        if self._lengths is not None:
            self._lengths.count(batch, drafts, verdict, elapsed_ms)

    def stats(self) -> dict[str, Any] | None:
        """What measured lengths are based on; None where they are not measured."""
        return None if self._lengths is None else self._lengths.stats()

    def _nodes_at(self, num_running: int) -> int:
        """The configured length under this load; the same for all requests of a step."""
        key = (num_running, self._max_draft_len)
        if self._last[0] != key:
            self._last = (key, self._config.nodes_at(*key))
        return self._last[1]


_STEPS_PER_TURN = 16  # a head drafts a step ahead, so that a share should last longer than one


def share_nodes(wishes: dict[Sequence, int], left: int, step: int) -> dict[Sequence, int]:
    """At most `left` nodes in all, the better priorities first and evenly within each.

    A row gets fewer than another of its priority only if it wished for fewer, or by one where the
    division leaves a remainder; who is favoured by that changes with the step. The result is in
    the order in which rows are served.
    """
    classes: dict[int, list[Sequence]] = defaultdict(list)
    for sequence in wishes:
        classes[sequence.request.priority].append(sequence)
    granted: dict[Sequence, int] = {}
    for _, rows in sorted(classes.items()):
        first = step // _STEPS_PER_TURN % len(rows)
        # The smallest wish first: what it leaves of an even share goes to those after it.
        queue = sorted(rows[first:] + rows[:first], key=wishes.__getitem__)
        for num_before, sequence in enumerate(queue):
            share, wish = left // (len(queue) - num_before), wishes[sequence]
            granted[sequence] = share = share if share < wish else wish
            left -= share
    return granted
