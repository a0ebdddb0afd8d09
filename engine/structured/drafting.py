"""`ConstrainedDrafting`: applies the grammars of requests to the drafts of an engine's drafters.

Rows without a grammar pass unchanged. The drafts of other rows are pruned and extended, and get the
masks that the target applies. Drafters are shown the verdict on their own guesses only. All methods
except `compiled` run in the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...drafters.drafting import own_verdict, remember
from ...errors import InvalidRequestError
from ...scheduler import loop, tree
from ...scheduler.types import Batch, Draft, DraftProbs, IntArray, Masks, Request, Verdict, ints
from .constraints import (
    Compiler,
    Constraint,
    ConstraintError,
    DeadEndError,
    constraint_field,
    is_allowed,
    packed,
)
from .grammar import invalid

# Verification stays exact because the edits of a draft never depend on tokens drawn after the
# edited node. A guess that was drawn from a distribution and that the grammar forbids stays in the
# tree, as a leaf of target probability 0. Forced tokens always replace drawn guesses.

FORCED = "grammar"  # origin of tokens that a grammar forces


class Walk:
    """Moves a constraint over a tree of tokens; it begins and ends at the root, node -1."""

    def __init__(self, constraint: Constraint, draft: Draft) -> None:
        self._constraint = constraint
        self._tokens, self._parents = draft.tokens.tolist(), draft.parents.tolist()
        self._path: list[int] = []  # nodes consumed, from the root

    def to(self, node: int) -> None:
        """Moves to `node`; the node and its ancestors must be allowed."""
        path = []
        while node >= 0:
            path.append(node)
            node = self._parents[node]
        path.reverse()
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        self._constraint.rewind(len(self._path) - shared)
        del self._path[shared:]
        for following in path[shared:]:
            self._constraint.consume(self._tokens[following])
            self._path.append(following)


def constrained(
    constraint: Constraint,
    draft: Draft,
    allowed: IntArray,  # [num_words], at the root
    ends: frozenset[int],
    max_nodes: int,
    max_depth: int,
) -> Draft:
    """Returns the draft that is verified instead of `draft`; restores the constraint's position.

    Raises:
        ConstraintError: the constraint cannot follow the tokens and is no longer usable.
    """
    forced = forced_tokens(constraint, allowed, ends, min(max_nodes, max_depth))
    if forced and (draft.probs is not None or len(tree.follow(draft, forced)) < len(forced)):
        draft = replace(tree.chain(forced, draft.source), origins=(FORCED,) * len(forced))
    draft, masks, open_leaf = _pruned(constraint, draft, {-1: allowed}, ends)
    if open_leaf is not None and draft.num_nodes < max_nodes:
        room = min(max_nodes, max_depth) - draft.num_nodes
        draft = _extended(constraint, draft, masks[open_leaf], ends, room)
        draft, masks, _ = _pruned(constraint, draft, masks, ends)
    return replace(draft, masks=_masks(masks))


def forced_tokens(
    constraint: Constraint,
    allowed: IntArray,  # [num_words], at the constraint's position
    ends: frozenset[int],
    room: int,
) -> list[int]:
    """Returns at most `room` tokens that must come next, or the end token if only that may."""
    tokens: list[int] = []
    while len(tokens) < room:
        token = _only(allowed)
        found = [token] if token is not None else []
        if not ends.intersection(found):
            found = constraint.forced() or found
        found = found[: room - len(tokens)]
        tokens += found
        if not found or found[-1] in ends:
            break
        for token in found:
            constraint.consume(token)
        try:
            allowed = constraint.allowed()
        except DeadEndError:
            break
    constraint.rewind(len(tokens) - bool(tokens and tokens[-1] in ends))
    return tokens


def _pruned(
    constraint: Constraint,
    draft: Draft,
    known: dict[int, IntArray],  # masks by node, including the root's
    ends: frozenset[int],
) -> tuple[Draft, dict[int, IntArray], int | None]:
    """Returns the valid guesses, their masks, and a chain's last guess if more may follow."""
    masks, dead = dict(known), {}
    kept = np.ones(draft.num_nodes, dtype=np.bool_)
    walk = Walk(constraint, draft)
    nodes = zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)
    for node, (token, parent) in enumerate(nodes):
        if node >= draft.num_guesses:
            break
        above = masks.get(parent)
        if above is None or not is_allowed(above, token):
            kept[node] = above is not None and _drawn(draft, node)
        elif token not in ends and node not in known:
            walk.to(node)
            try:
                masks[node] = constraint.allowed()
            except DeadEndError:  # the request fails with it, as without a draft
                kept[node] = _drawn(draft, node)
                if kept[node]:  # a leaf, behind which a token comes first that does not count
                    dead[node] = _no_end(ends, len(above))
    walk.to(-1)
    if not kept.all():
        draft, left = tree.select(draft, kept)
        places = {node: place for place, node in enumerate(left.tolist())}
        masks = {places.get(node, -1): bits for node, bits in masks.items()}
        dead = {places[node]: bits for node, bits in dead.items()}
    last = draft.num_nodes - 1
    goes_on = not draft.num_window and last in masks and tree.is_chain(draft.parents)
    return draft, masks | dead, last if goes_on else None


def _extended(
    constraint: Constraint,
    draft: Draft,  # a chain
    allowed: IntArray,  # [num_words], at its end
    ends: frozenset[int],
    room: int,
) -> Draft:
    """Returns `draft` with the tokens appended that its last token forces."""
    walk = Walk(constraint, draft)
    walk.to(draft.num_nodes - 1)
    forced = forced_tokens(constraint, allowed, ends, room)
    walk.to(-1)
    if not forced:
        return draft
    tokens = [*draft.tokens.tolist(), *forced]
    probs, added = draft.probs, ((0, len(forced)), (0, 0))
    if probs is not None:  # zeros, because the forced tokens are not drawn
        probs = DraftProbs(np.pad(probs.ids, added), np.pad(probs.probs, added))
    origins = (draft.origins or (draft.source,) * draft.num_nodes) + (FORCED,) * len(forced)
    return replace(tree.chain(tokens, draft.source, probs), origins=origins)


def _no_end(ends: frozenset[int], num_words: int) -> IntArray:
    """Returns a dead end's mask: no end token, with which the request would succeed."""
    may = np.ones(num_words * 32, dtype=np.bool_)
    may[list(ends)] = False
    return packed(may)


def _only(bits: IntArray) -> int | None:
    """Returns the only token of a mask; None if there are more or none."""
    words = np.flatnonzero(bits)
    if len(words) != 1:
        return None
    word = int(bits[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(words[0]) * 32 + word.bit_length() - 1


def _drawn(draft: Draft, node: int) -> bool:
    """Returns True if the node was drawn from a distribution; rows of other nodes are zeros."""
    return draft.probs is not None and bool(draft.probs.probs[node].any())


def _masks(masks: dict[int, IntArray]) -> Masks:
    nodes = sorted(masks)
    return Masks(ints(nodes) + np.int32(1), np.stack([masks[node] for node in nodes]))


log = logging.getLogger(__name__)
Constraints = Mapping[str, Constraint]  # by request id


@dataclass(slots=True)
class _State:
    """The state of a constrained request."""

    request: Request
    constraint: Constraint
    allowed: IntArray  # [num_words], after the emitted tokens
    emitted: list[int]


class ConstrainedDrafting:
    """Implements the loop's `Drafting` protocol around the engine's drafting.

    Args:
        longest: returns the maximum number of nodes of a draft of the engine's drafters.
    """

    def __init__(
        self, drafting: loop.Drafting, compiler: Compiler, longest: Callable[[], int]
    ) -> None:
        self._drafting = drafting
        self._compiler = compiler
        self._longest = longest
        self._expected: dict[str, Constraint] = {}
        self._states: dict[str, _State] = {}
        self._failed: dict[str, InvalidRequestError] = {}
        # By step in flight: the drafters' own drafts, and whether each row kept its window.
        self._own: dict[int, tuple[list[Draft], list[bool]]] = {}

    def compiled(self, requests: Sequence[Request]) -> Constraints:
        """Compiles the constraints of `requests` in the caller's thread.

        Raises:
            InvalidRequestError: a grammar does not compile.
        """
        opened = [(request.id, self._compiler.open(request)) for request in requests]
        return {name: constraint for name, constraint in opened if constraint is not None}

    def expect(self, constraints: Constraints) -> None:
        """Sets the constraints of the requests that are opened next; replaces unused ones."""
        self._expected = dict(constraints)

    def failures(self) -> dict[str, InvalidRequestError]:
        """Returns the requests whose constraint failed, with the error; each is returned once."""
        failed, self._failed = self._failed, {}
        return failed

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            constraint = self._expected.pop(request.id, None)
            if constraint is not None:
                emitted = request.emitted.tolist()
                allowed = constraint.allowed()
                self._states[request.id] = _State(request, constraint, allowed, emitted)
        self._drafting.open(requests)

    @property
    def may_rest(self) -> bool:
        """Masks depend on the emitted tokens, so constrained rows cannot rest."""
        return self._drafting.may_rest and self._are_free()

    def propose(self, batch: Batch) -> list[Draft]:
        drafts = self._drafting.propose(batch)
        if not self._states:
            return drafts
        used = list(drafts)
        for row, request_id in enumerate(batch.request_ids):
            state = self._states.get(request_id)
            if state is None or not batch.samples[row]:
                continue
            if state.constraint.num_free() <= min(batch.max_nodes[row], batch.max_depth[row]):
                used[row] = self._constrained(state, batch, row, drafts[row])
        rides = [
            given.num_window == own.num_window > 0 for given, own in zip(used, drafts, strict=True)
        ]
        remember(self._own, batch.step, (drafts, rides))
        return used

    @property
    def ranks_draft(self) -> bool:
        return self._drafting.ranks_draft and self._are_free()

    def drafted(self, batch: Batch) -> list[Draft]:
        return self._drafting.drafted(batch)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        own = self._own.pop(batch.step, None)
        for row, request_id in enumerate(batch.request_ids if self._states else ()):
            state = self._states.get(request_id)
            if state is not None:
                self._advance(state, verdict.tokens(row).tolist())
        if own is not None:
            verdict = own_verdict(verdict, *own)
        self._drafting.observe(batch, verdict)

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._states.pop(request_id, None)
            self._failed.pop(request_id, None)
        self._drafting.close(request_ids)

    def _are_free(self) -> bool:
        """Returns True if no token of the next step, or of a step in flight, can be forbidden."""
        most = 2 * (self._longest() + 1)
        return all(each.constraint.num_free() >= most for each in self._states.values())

    def _constrained(self, state: _State, batch: Batch, row: int, draft: Draft) -> Draft:
        """Returns the row's draft under its grammar; an empty one if it cannot be followed."""
        room = int(batch.max_nodes[row])
        depth = int(batch.max_depth[row])
        ends = frozenset(state.request.eos_token_ids)
        try:
            return constrained(state.constraint, draft, state.allowed, ends, room, depth)
        except ConstraintError as error:
            name = state.request.id
            log.info("request %s has no draft: %s", name, error, extra={"request_id": name})
            self._rebuild(state)
            root = _masks({-1: state.allowed})
            return replace(tree.EMPTY, source=draft.source, masks=root)

    def _advance(self, state: _State, tokens: list[int]) -> None:
        """Consumes the emitted tokens up to an end token."""
        try:
            for token in tokens:
                if token in state.request.eos_token_ids and is_allowed(state.allowed, token):
                    return  # the request is finished
                state.constraint.consume(token)
                state.emitted.append(token)
                state.allowed = state.constraint.allowed()
        except ConstraintError as error:
            self._fail(state, error)

    def _rebuild(self, state: _State) -> None:
        """Replaces a constraint that broke on a guess by a new one after the same tokens."""
        try:
            fresh = self._compiler.open(state.request)
            assert fresh is not None, state.request
            for token in state.emitted[len(state.request.emitted) :]:
                fresh.consume(token)
            state.constraint = fresh
        except (ConstraintError, InvalidRequestError) as error:
            self._fail(state, error)

    def _fail(self, state: _State, error: Exception) -> None:
        field = constraint_field(state.request.sampling)
        self._failed[state.request.id] = invalid(field, f"the text cannot go on: {error}")
