"""The drafts of a step, end to end, and a step's known tokens with them joined on.

`gather` runs in the engine before a step is sent, `join` on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from . import tree
from .plan import JoinedDrafts
from .types import Draft, DraftProbs, IntArray, KnownTokens, Masks, StepInput, ints, starts_of

_NO_ROW = np.iinfo(np.int32).max  # beyond every token of a sequence


def gather(
    drafts: Sequence[Draft],  # [num_seqs]
    samples: NDArray[np.bool_],  # [num_seqs]
) -> JoinedDrafts | None:
    """The drafts of a step's sequences, end to end; None if there is nothing in them."""
    masks = _join_masks(drafts, samples)
    counts = [len(draft.tokens) for draft in drafts]
    if masks is None and not any(counts):
        return None
    branching = [draft for draft in drafts if not tree.is_chain(draft.parents)]
    windows = [draft.num_window for draft in drafts]
    return JoinedDrafts(
        tokens=_concat([draft.tokens for draft in drafts]),
        num_nodes=ints(counts),
        parents=_concat([draft.parents for draft in drafts]) if branching else None,
        probs=_join_probs(drafts),
        num_window=ints(windows) if any(windows) else None,
        masks=masks,
    )


def join(known: KnownTokens, drafts: JoinedDrafts | None, block_size: int) -> StepInput:
    """`known` with the draft nodes joined on: what a rank computes.

    Numpy over the flat tokens of all sequences: no Python statement runs once per sequence.
    """
    num_seqs, query_lens = known.num_seqs, known.chunk_lens
    known_lens = known.context_lens + query_lens
    query_start, draft_start = known.query_start, np.zeros(num_seqs + 1, dtype=np.int32)
    if drafts is not None:
        num_nodes = drafts.num_nodes
        assert (num_nodes <= known.max_nodes).all(), (num_nodes, known.max_nodes)
        query_lens = query_lens + num_nodes
        query_start, draft_start = starts_of(query_lens), starts_of(num_nodes)
    total = int(query_start[-1])
    owner, index = np.arange(num_seqs), known.context_lens
    if total != num_seqs:  # not a token each
        owner = owner.repeat(query_lens)
        index = np.arange(total, dtype=np.int32) + (known.context_lens - query_start[:-1])[owner]
    table, block = known.block_tables, index // block_size
    slots = table[owner, block] * block_size + (index - block * block_size)
    tokens, positions, parents = known.token_ids, index, ints([])
    if drafts is not None and total > len(tokens):
        parents = tree.chains(num_nodes) if drafts.parents is None else drafts.parents
        tokens = np.empty(total, dtype=np.int32)
        is_node = index >= known_lens[owner]
        tokens[~is_node], tokens[is_node] = known.token_ids, drafts.tokens
        if drafts.parents is not None:
            positions, roots = index.copy(), (known_lens - 1).repeat(num_nodes)
            positions[is_node] = roots + tree.flat_depths(parents, draft_start, num_nodes)
    # From the root on: the chunk's last token and the nodes.
    from_root = index >= np.where(known.samples, known_lens - 1, _NO_ROW)[owner]
    return StepInput(
        step=known.step,
        token_ids=tokens,
        positions=positions,
        slot_mapping=slots,
        query_start=query_start,
        context_lens=known.context_lens,
        block_tables=table,
        samples=known.samples,
        draft_tokens=ints([]) if drafts is None else drafts.tokens,
        draft_parents=parents,
        draft_start=draft_start,
        draft_probs=None if drafts is None else drafts.probs,
        rows=from_root.nonzero()[0].astype(np.int32),
        kv_moves=known.kv_moves,
        sampling=known.sampling,
        num_window=None if drafts is None else drafts.num_window,
        max_nodes=known.max_nodes,
        next_tokens=known.next_tokens,
        masks=None if drafts is None else drafts.masks,
    )


def _join_masks(drafts: Sequence[Draft], samples: NDArray[np.bool_]) -> Masks | None:
    """The masks of sampled sequences, by logit row of the step."""
    if not [draft for draft in drafts if draft.masks is not None]:
        return None
    parts: list[Masks] = []
    num_rows = 0
    for draft, sampled in zip(drafts, samples.tolist(), strict=True):
        if sampled and draft.masks is not None:
            parts.append(Masks(draft.masks.rows + num_rows, draft.masks.bits))
        num_rows += (draft.num_nodes + 1) * sampled
    if not parts:
        return None
    rows = np.concatenate([part.rows for part in parts])
    return Masks(ints(rows), np.concatenate([part.bits for part in parts]))


def _join_probs(drafts: Sequence[Draft]) -> DraftProbs | None:
    """Every draft's probabilities, padded to one width; zeros for deterministic nodes."""
    widths = [draft.probs.ids.shape[1] for draft in drafts if draft.probs is not None]
    width = max(widths, default=0)
    if width == 0:
        return None
    total = sum(draft.num_nodes for draft in drafts)
    ids = np.zeros((total, width), dtype=np.int32)
    probs = np.zeros((total, width), dtype=np.float32)
    begin = 0
    for draft in drafts:
        if draft.probs is not None:
            top = draft.probs.ids.shape[1]
            ids[begin : begin + draft.num_nodes, :top] = draft.probs.ids
            probs[begin : begin + draft.num_nodes, :top] = draft.probs.probs
        begin += draft.num_nodes
    return DraftProbs(ids, probs)


def _concat(parts: Sequence[IntArray]) -> IntArray:
    return ints(np.concatenate(parts) if parts else [])
