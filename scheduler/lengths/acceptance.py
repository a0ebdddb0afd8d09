"""How drafts fare: accepted nodes by position, and by how the same request's drafts fared lately.

Called by `DraftLengths`. A request is in one of a few *states*: nothing drafted yet, no draft for
some steps, or a level of what its latest drafts came to. What each state's drafts come to is
learned from all requests together, so that one which has just begun need not be learned anew.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NUM_LEVELS = 6
NEW, _RESTED = _NUM_LEVELS, _NUM_LEVELS + 1  # the states beside the levels
NUM_STATES = _NUM_LEVELS + 2
_SHARE = 0.3  # of the newest draft in a request's level
_GOOD = 8  # accepted nodes that make a draft a full success, however many it had
_RESTED_STEPS = 6  # without a draft, after which a level tells nothing
_DECAY = 0.98  # of a count, with each draft that adds to it
_FIRST_DRAFTS = 2.0  # weight of the first guess
_FIRST_GUESS = 0.8  # of a node's acceptance


class Lately:
    """One request's latest drafts."""

    __slots__ = ("_level", "_num_idle", "state", "tried_at")

    def __init__(self) -> None:
        self.state = NEW
        self.tried_at = -1  # step of the last trial
        self._level = -1.0
        self._num_idle = 0

    def drafted(self, num_nodes: int, num_accepted: int) -> None:
        """A draft was verified."""
        fared = min(num_accepted / min(num_nodes, _GOOD), 1.0)
        self._level = fared if self._level < 0 else self._level + _SHARE * (fared - self._level)
        self._num_idle = 0
        self.state = int(self._level * (_NUM_LEVELS - 1) + 0.5)

    def idle(self) -> None:
        """Nothing was granted in a step that could have drafted."""
        self._num_idle += 1
        if self._num_idle == _RESTED_STEPS and self.state != NEW:
            self.state = _RESTED


class Acceptance:
    """Nodes that were granted, drafted and accepted, by state and group; older ones count less.

    Args:
        sizes: nodes of each group, which follow one another in a draft.
    """

    def __init__(self, sizes: NDArray[np.int64]) -> None:
        self._sizes = sizes
        self._starts = np.cumsum(sizes) - sizes
        first = np.tile(_FIRST_DRAFTS * sizes, (NUM_STATES, 1))
        # [3, NUM_STATES, num_groups]
        self._counts: Floats = np.stack([first, first, _FIRST_GUESS * first])
        self._new: list[tuple[int, int, int, int]] = []  # since the last `learn`

    def count(self, state: int, num_granted: int, num_nodes: int, num_accepted: int) -> None:
        """What became of a grant."""
        self._new.append((state, num_granted, num_nodes, num_accepted))

    def learn(self) -> None:
        """Takes in what was counted."""
        if not self._new:
            return
        states, *nodes = np.array(self._new).T
        self._new.clear()
        each_state = np.arange(NUM_STATES)[:, None] == states  # [NUM_STATES, num_grants]
        # [3, num_grants, num_groups], nodes
        found = np.clip(np.stack(nodes)[:, :, None] - self._starts, 0, self._sizes)
        self._counts *= _DECAY ** (each_state @ (found[0] > 0).astype(np.float64))
        self._counts += each_state @ found

    def per_granted(self) -> tuple[Floats, Floats]:
        """Drafted and accepted of the granted nodes, by state and group.

        A node is accepted only after its ancestors, so neither rises along a draft.
        """
        granted, *others = self._counts
        drafted, accepted = np.minimum.accumulate(np.stack(others) / granted, axis=2)
        return drafted, accepted

    def stats(self) -> tuple[float, list[float]]:
        """Of all requests: drafted of the granted nodes, and accepted of the drafted by group."""
        granted, drafted, accepted = self._counts.sum(axis=1)
        return float(drafted.sum() / granted.sum()), (accepted / drafted).tolist()
