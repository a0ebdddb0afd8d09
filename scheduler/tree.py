"""Everything that is derived from a draft tree's `parents`: validity, depths, masks, selections.

The only file that does so. A chain is the tree `[-1, 0, 1, ...]`; node 0 of the literature (the
root, the last committed token) is not in the draft, and is written as parent -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from .types import Draft, DraftProbs, IntArray, ints, starts_of

_FEW_NODES = 256


_CHAIN = np.arange(-1, 127, dtype=np.int32)
_CHAIN.flags.writeable = False
_CHAINS = tuple([_CHAIN[:count] for count in range(len(_CHAIN) + 1)])  # by length


def chain_parents(count: int) -> IntArray:  # [count], read-only
    """Parents of a chain. Short chains share one array, so that they can be told by identity."""
    if count < len(_CHAINS):
        return _CHAINS[count]
    return np.arange(-1, count - 1, dtype=np.int32)


EMPTY = Draft(tokens=ints([]), parents=chain_parents(0))


def chain(tokens: object, source: str, probs: DraftProbs | None = None) -> Draft:
    """A draft in which every token follows the one before."""
    ids = ints(tokens)
    return Draft(ids, chain_parents(len(ids)), probs, source)


def problem(draft: Draft, vocab_size: int) -> str | None:
    """Why `draft` is malformed, or None. Drafts of user code go through here."""
    num_nodes = len(draft.tokens)
    if len(draft.parents) != num_nodes:
        return f"{num_nodes} tokens but {len(draft.parents)} parents"
    if num_nodes == 0:
        return None
    order = np.arange(num_nodes)
    if bool(np.any((draft.parents < -1) | (draft.parents >= order))):
        return f"a parent must be -1 or come before its node: {draft.parents.tolist()}"
    if bool(np.any((draft.tokens < 0) | (draft.tokens >= vocab_size))):
        return f"a token is outside the vocabulary of {vocab_size}: {draft.tokens.tolist()}"
    if not 0 <= draft.num_window <= num_nodes:
        return f"{draft.num_window} window nodes of {num_nodes}"
    guesses = draft.num_guesses
    pairs = set(zip(draft.parents[:guesses].tolist(), draft.tokens[:guesses].tolist(), strict=True))
    if len(pairs) != guesses:
        return "two siblings carry the same token"
    return None


def is_chain(parents: IntArray) -> bool:
    """Whether every node follows the one before it."""
    expected = chain_parents(len(parents))
    return parents is expected or bool(np.array_equal(parents, expected))


def depths(parents: IntArray) -> IntArray:
    """Distance from the root of every node; children of the root have depth 1."""
    if is_chain(parents):
        return np.arange(1, len(parents) + 1, dtype=np.int32)
    count = ints([len(parents)])
    return flat_depths(parents, starts_of(count), count)


def children(parents: IntArray) -> dict[int, list[int]]:
    """Children of every inner node in drawing order; the root is -1."""
    table: dict[int, list[int]] = {}
    for node, parent in enumerate(parents.tolist()):
        table.setdefault(parent, []).append(node)
    return table


def num_expected(draft: Draft) -> float:
    """Expected accepted tokens of a chain by the drafter's own estimates; 0 without estimates."""
    if draft.chances is None or not is_chain(draft.parents):
        return 0.0
    return float(draft.chances[: draft.num_guesses].cumprod().sum())


def follow(draft: Draft, tokens: Sequence[int]) -> list[int]:
    """The draft's nodes along `tokens`, from the root, as far as they exist."""
    guesses = draft.num_guesses
    places: dict[tuple[int, int], int] = {}
    pairs = zip(draft.parents[:guesses].tolist(), draft.tokens[:guesses].tolist(), strict=True)
    for node, pair in enumerate(pairs):
        places.setdefault(pair, node)
    nodes: list[int] = []
    for token in tokens:
        node = places.get((nodes[-1] if nodes else -1, token), -1)
        if node < 0:
            break
        nodes.append(node)
    return nodes


class Trie:
    """Merges paths by common prefixes, up to a number of nodes; parents come before children."""

    def __init__(self, room: int) -> None:
        self.room = room  # nodes that may be added
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._places: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def place(self, parent: int, token: int) -> int | None:
        """Finds or adds the node of `token` below `parent`; None if there is no room."""
        node = self._places.get((parent, token))
        if node is None and self.room > 0:
            self.room -= 1
            node = self._places[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def add(self, path: Sequence[int]) -> None:
        """Adds a path from the root, as far as there is room."""
        at = -1
        for token in path:
            node = self.place(at, token)
            if node is None:
                return
            at = node


def truncate(draft: Draft, max_nodes: int) -> Draft:
    """The first `max_nodes` nodes: parents come first, so what is left is still a tree."""
    if draft.num_nodes <= max_nodes:
        return draft
    probs = draft.probs
    if probs is not None:
        probs = DraftProbs(probs.ids[:max_nodes], probs.probs[:max_nodes])
    return Draft(
        draft.tokens[:max_nodes],
        draft.parents[:max_nodes],
        probs,
        draft.source,
        max(0, max_nodes - draft.num_guesses),
        origins=draft.origins[:max_nodes],
        chances=None if draft.chances is None else draft.chances[:max_nodes],
    )


def prune(draft: Draft, max_depth: int) -> tuple[Draft, IntArray | None]:
    """Removes guesses below `max_depth`; returns the draft and the kept nodes (None: all).

    A lookahead window below one of them is removed as a whole.
    """
    guesses = draft.num_guesses
    if guesses <= max_depth:
        return draft, None
    kept = depths(draft.parents) <= max_depth
    if kept[:guesses].all():
        return draft, None
    return select(draft, kept)


def select(
    draft: Draft,
    kept: NDArray[np.bool_],  # [num_nodes], closed under parents among the guesses
) -> tuple[Draft, IntArray]:
    """Keeps some of the guesses; returns the draft and the kept nodes.

    A lookahead window below one of them is removed as a whole.
    """
    guesses, kept = draft.num_guesses, kept.copy()
    above = draft.parents[guesses:]
    kept[guesses:] = kept[above[(above >= 0) & (above < guesses)]].all()
    places = np.cumsum(kept) - 1
    parents = np.where(draft.parents < 0, -1, places[draft.parents])[kept]
    probs = draft.probs and DraftProbs(draft.probs.ids[kept], draft.probs.probs[kept])
    num_window = int(kept[guesses:].sum())
    origins = tuple(compress(draft.origins, kept.tolist()))
    chances = None if draft.chances is None else draft.chances[kept]
    left = Draft(
        draft.tokens[kept],
        ints(parents),
        probs,
        draft.source,
        num_window,
        origins=origins,
        chances=chances,
    )
    return left, ints(np.flatnonzero(kept))


def chains(num_nodes: IntArray) -> IntArray:  # [num_seqs] -> [num_nodes], of all sequences
    """Parents where every draft is a chain."""
    begin = starts_of(num_nodes)[:-1].repeat(num_nodes)
    return np.arange(-1, len(begin) - 1, dtype=np.int32) - begin


def flat_depths(
    parents: IntArray,  # [num_nodes], of all sequences, within the sequence
    start: IntArray,  # [num_seqs + 1]
    num_nodes: IntArray,  # [num_seqs]
) -> IntArray:  # [num_nodes]
    """Depth of every node.

    Few nodes are walked one by one, many level by level: a numpy call costs as much as ten nodes.
    """
    begin = np.repeat(start[:-1], num_nodes)
    if len(parents) <= _FEW_NODES:
        walked: list[int] = []
        for parent, first in zip(parents.tolist(), begin.tolist(), strict=True):
            walked.append(1 if parent < 0 else walked[first + parent] + 1)
        return ints(walked)
    depth = np.ones(len(parents), dtype=np.int32)
    nodes = np.flatnonzero(parents >= 0)
    above = (parents + begin)[nodes]  # each node's ancestor, one level further up in every round
    while len(nodes):
        depth[nodes] += 1
        inner = parents[above] >= 0
        nodes, above = nodes[inner], above[inner]
        above = parents[above] + begin[above]
    return depth
