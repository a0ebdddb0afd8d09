"""Validation of drafts before the target computes them.

Called by `drafting.py`. A batch of chains is checked at once; only if that fails is each draft
checked alone, to find the reason. Rules that use the distributions of drawn nodes are exact only if
those are correct, so inconsistent distributions are rejected here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..scheduler import tree
from ..scheduler.types import Draft, DraftProbs, IntArray

MAX_SUM_ERROR = 1e-4  # of a distribution: far above float32's error, far below a truncated one's


def all_chains(drafts: list[Draft], budgets: IntArray, vocab_size: int) -> bool:
    """Whether all drafts are valid chains; the tokens of the whole batch are checked at once."""
    tokens: list[IntArray] = []
    drawn: list[Draft] = []
    for draft, budget in zip(drafts, budgets.tolist(), strict=True):
        if draft is tree.EMPTY:
            continue
        if type(draft) is not Draft or type(draft.source) is not str or draft.num_window != 0:
            return False
        ids, parents = draft.tokens, draft.parents
        if type(ids) is not np.ndarray or ids.ndim != 1 or len(ids) > budget:
            return False
        if parents is not tree.chain_parents(len(ids)) and not _is_chain(parents, len(ids)):
            return False
        tokens.append(ids)
        if draft.probs is not None:
            drawn.append(draft)
    if not tokens:
        return True
    flat = np.concatenate(tokens)
    if flat.dtype != np.int32:
        return False
    # Without a sign, a negative token is beyond every vocabulary.
    known = int(flat.view(np.uint32).max(initial=0)) < vocab_size
    return known and (not drawn or _all_drawn(drawn, vocab_size))


def _is_chain(parents: Any, count: int) -> bool:
    """Whether `parents` (any object) are those of a chain of `count` nodes."""
    is_array = _is_array(parents, 1, "i") and parents.dtype == np.int32
    return is_array and len(parents) == count and tree.is_chain(parents)


def problem(draft: Any, budget: int, vocab_size: int) -> str | None:
    """Why `draft` (any object) cannot be used; None if it can."""
    if not isinstance(draft, Draft):
        return f"expected a Draft, got {draft!r}"
    for name, part in (("tokens", draft.tokens), ("parents", draft.parents)):
        if not _is_array(part, 1, "i"):
            return f"{name} must be a 1-D int32 array, got {part!r}"
    if not isinstance(draft.source, str) or not isinstance(draft.num_window, (int, np.integer)):
        return f"expected str and int, got {draft.source=} and {draft.num_window=}"
    if draft.num_nodes > budget:
        return f"{draft.num_nodes} nodes exceed the budget of {budget}"
    return (
        _misshapen(draft)
        or tree.problem(draft, vocab_size)
        or (_misdrawn(draft.tokens, draft.probs, vocab_size, draft.num_guesses))
    )


def _all_drawn(drawn: list[Draft], vocab_size: int) -> bool:
    """Whether the distributions of well-formed chains, all drawn, are valid."""
    if any(_misshapen(draft) for draft in drawn):
        return False
    every = [draft.probs for draft in drawn if draft.probs is not None]
    if len({probs.ids.shape[1] for probs in every}) > 1:
        return False
    tokens = np.concatenate([draft.tokens for draft in drawn])
    ids, weights = [probs.ids for probs in every], [probs.probs for probs in every]
    joined = DraftProbs(np.concatenate(ids), np.concatenate(weights))
    return _misdrawn(tokens, joined, vocab_size, len(tokens)) is None


def _misshapen(draft: Draft) -> str | None:
    """Why the arrays of the draft's distributions are malformed; None if they are not."""
    probs = draft.probs
    if probs is None:
        return None
    if not isinstance(probs, DraftProbs) or not _is_array(probs.ids, 2, "i"):
        return f"probabilities must be `DraftProbs` with int32 ids, got {probs!r}"
    if not _is_array(probs.probs, 2, "f"):
        return f"probabilities must be a 2-D float32 array, got {probs.probs!r}"
    if probs.ids.shape != probs.probs.shape:
        return f"probabilities of shape {probs.probs.shape} for ids of {probs.ids.shape}"
    if len(probs.ids) != draft.num_nodes:
        return f"{draft.num_nodes} nodes but {len(probs.ids)} rows of probabilities"
    return None


def _misdrawn(
    tokens: IntArray,  # [num_nodes]
    probs: DraftProbs | None,
    vocab_size: int,
    num_guesses: int,
) -> str | None:
    """Why `tokens` cannot have been drawn from `probs`; a row of zeros marks a fixed token."""
    if probs is None:
        return None
    weights = probs.probs
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        return "a probability is negative or not a number"
    if ((probs.ids < 0) | (probs.ids >= vocab_size)).any():
        return f"probabilities of tokens outside the vocabulary of {vocab_size}"
    weights, ids = weights[:num_guesses], probs.ids[:num_guesses]
    drawn = (weights > 0).any(axis=1)
    sums = weights.sum(axis=1, dtype=np.float64)
    bad = np.flatnonzero(drawn & (np.abs(sums - 1.0) > MAX_SUM_ERROR))
    if len(bad):
        return f"the probabilities of node {bad[0]} sum to {sums[bad[0]]:.6g}, not to 1"
    own = ((ids == tokens[:num_guesses, None]) & (weights > 0)).any(axis=1)
    bad = np.flatnonzero(drawn & ~own)
    if len(bad):
        return f"node {bad[0]} has token {tokens[bad[0]]}, which has probability 0 in its own row"
    return None


def _is_array(part: Any, num_dims: int, kind: str) -> bool:
    """Whether `part` is a plain array; a masked array would pass every comparison."""
    return type(part) is np.ndarray and part.ndim == num_dims and part.dtype.kind == kind
