"""What is guessed: a tree of tokens, with what it was drawn from and what is allowed in it."""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import FloatArray, IntArray
from .record import record


@dataclass(frozen=True, slots=True)
class Masks:
    """Tokens allowed at some rows, one bit each: token t is bit t % 32 of word t // 32."""

    rows: IntArray  # [num_masked], ascending: logit rows of a step, or of one sequence (0: root)
    bits: IntArray  # [num_masked, num_words]


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """Sparse distributions that a sampling drafter drew its nodes from (renormalised top-k).

    Row i is the distribution at node i's parent, before any sibling was drawn; siblings are
    drawn from it in order, without replacement.
    """

    ids: IntArray  # [num_nodes, top]
    probs: FloatArray  # [num_nodes, top]


@record
class Draft:
    """A tree of guessed tokens. Node i's parent comes before it; -1 is the root.

    The last `num_window` nodes are computed but never accepted: what the target finds most likely
    after each of them comes back in the verdict (the lookahead window).
    """

    tokens: IntArray  # [num_nodes]
    parents: IntArray  # [num_nodes]
    probs: DraftProbs | None = None  # None: deterministic
    source: str = "none"  # name of the drafter, for statistics
    num_window: int = 0
    masks: Masks | None = None  # by row of the sequence; None: every token is allowed
    origins: tuple[str, ...] = ()  # [num_guesses], name of each guess's source; (): all `source`

    @property
    def num_guesses(self) -> int:
        """Nodes that may be accepted."""
        return len(self.tokens) - self.num_window

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)
