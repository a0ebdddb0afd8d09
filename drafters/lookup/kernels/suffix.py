"""Compiled loops of a suffix automaton: appending text, and extending a match.

Its tables, int32:

- nodes[num_states, 8]: one state per half a cache line.
- edges: transitions of states with several of them, by state and token (see `hashing.py`); those of
  one state form a ring in order of arrival.
- walk[4 + depth + 2]: numbers of used states and of tokens read, and the states of the current
  text's suffixes, longest first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from ....scheduler.types import IntArray
from . import BOOL, FLOAT, FLOATS, INT, INTS, TABLE, TABLES, VOID, compiled
from .hashing import HASHED, NUM_ROWS, VALUE, Hashed, find, insert, key_of

ROOT = 0
# Of `nodes`. LAST: edge, -1 for none; SEEN: when it occurred last, in tokens of all texts.
LENGTH, LINK, COUNT, BEST, AFTER, LAST, DEGREE, SEEN = range(8)
NODE = 8
STATE, TOKEN, TARGET, NEXT = 0, 1, VALUE, VALUE + 1  # of `edges`
EDGE = VALUE + 2
NUM_STATES, MAX_DEGREE, NUM_SUFFIXES, NUM_READ, SUFFIXES = range(5)  # of `walk`


@compiled(INT, TABLE, HASHED, INT, INT)
def after(nodes: IntArray, edges: Hashed, state: int, token: int) -> int:
    """The state that `token` leads to; -1 if it never followed."""
    if nodes[state, BEST] == token:
        return nodes[state, AFTER]
    if nodes[state, LAST] < 0:
        return -1
    edge = find(edges, key_of(state, token, 0, 0))
    return edges[0][edge, TARGET] if edge >= 0 else -1


@compiled(VOID, TABLE, HASHED, INTS, INT, INT, INT)
def add_edge(
    nodes: IntArray, edges: Hashed, walk: IntArray, state: int, token: int, target: int
) -> None:
    rows, edge, last = edges[0], insert(edges, key_of(state, token, 0, 0)), nodes[state, LAST]
    rows[edge, TARGET] = target
    if last < 0:
        rows[edge, NEXT] = edge
    else:
        rows[edge, NEXT], rows[last, NEXT] = rows[last, NEXT], edge
    nodes[state, LAST] = edge
    nodes[state, DEGREE] += 1
    if state != ROOT and nodes[state, DEGREE] > walk[MAX_DEGREE]:
        walk[MAX_DEGREE] = nodes[state, DEGREE]


@compiled(INT, TABLE, HASHED, INTS, INT, INT)
def split(nodes: IntArray, edges: Hashed, walk: IntArray, state: int, size: int) -> int:
    """Moves the strings of `state` of up to `size` tokens to a state of their own."""
    part = walk[NUM_STATES]
    walk[NUM_STATES] += 1
    for column in range(NODE):
        nodes[part, column] = nodes[state, column]
    nodes[part, LENGTH], nodes[part, LAST], nodes[part, DEGREE] = size, -1, 0
    nodes[state, LINK] = part
    edge = nodes[state, LAST]
    for _ in range(nodes[state, DEGREE]):
        edge = edges[0][edge, NEXT]
        token, target = edges[0][edge, TOKEN], edges[0][edge, TARGET]
        add_edge(nodes, edges, walk, part, token, target)
    return part


@compiled(INT, TABLE, HASHED, INTS, INT, INTS)
def extend(nodes: IntArray, edges: Hashed, walk: IntArray, depth: int, tokens: IntArray) -> int:
    """Appends tokens while there is room; returns their number."""
    longest = depth - 1  # longest string that is extended
    for place in range(len(tokens)):
        if walk[NUM_STATES] + 2 > len(nodes) or edges[2][NUM_ROWS] + 2 * walk[NUM_SUFFIXES] + walk[
            MAX_DEGREE
        ] > len(edges[0]):
            return place
        token = tokens[place]
        walk[NUM_READ] += 1
        begin = SUFFIXES
        if nodes[walk[SUFFIXES], LENGTH] > longest and nodes[walk[SUFFIXES + 1], LENGTH] == longest:
            begin += 1  # a string of `depth` tokens, which is not extended
        grown = SUFFIXES  # new suffixes overwrite those that were read
        last = new = whole = part = -1
        for index in range(begin, SUFFIXES + walk[NUM_SUFFIXES]):
            state = walk[index]
            known = nodes[state, BEST]
            target = after(nodes, edges, state, token)
            if target < 0:
                if new < 0:
                    new = last = walk[NUM_STATES]
                    walk[NUM_STATES] += 1
                    nodes[new, LENGTH] = min(nodes[state, LENGTH], longest) + 1
                    nodes[new, LINK], nodes[new, COUNT] = ROOT, 1
                    nodes[new, BEST] = nodes[new, AFTER] = nodes[new, LAST] = -1
                    nodes[new, DEGREE], nodes[new, SEEN] = 0, walk[NUM_READ]
                    walk[grown] = new
                    grown += 1
                if known >= 0:
                    if nodes[state, LAST] < 0:
                        add_edge(nodes, edges, walk, state, known, nodes[state, AFTER])
                    add_edge(nodes, edges, walk, state, token, new)
                if known < 0 or nodes[nodes[state, AFTER], COUNT] == 1:
                    nodes[state, BEST], nodes[state, AFTER] = token, new
                continue
            if last == new:  # the first suffix that has the transition
                size = min(nodes[state, LENGTH], longest) + 1
                if nodes[target, LENGTH] != size:
                    whole, part = target, split(nodes, edges, walk, target, size)
                if new >= 0:
                    nodes[new, LINK] = target if part < 0 else part
            if target == whole:
                target = part
                if known == token:
                    nodes[state, AFTER] = part
                if nodes[state, LAST] >= 0:
                    edges[0][find(edges, key_of(state, token, 0, 0)), TARGET] = part
            if target != last:
                last = target
                walk[grown] = target
                grown += 1
                nodes[target, COUNT] += 1
                nodes[target, SEEN] = walk[NUM_READ]
            if known != token and nodes[target, COUNT] >= nodes[nodes[state, AFTER], COUNT]:
                nodes[state, BEST], nodes[state, AFTER] = token, target
        walk[grown] = ROOT
        walk[NUM_SUFFIXES] = grown + 1 - SUFFIXES
    return len(tokens)


@compiled(INT, TABLE, INT, INT)
def within(nodes: IntArray, state: int, max_len: int) -> int:
    """The state of the longest suffix of `state` of at most `max_len` tokens."""
    while state != ROOT and nodes[nodes[state, LINK], LENGTH] >= max_len:
        state = nodes[state, LINK]
    return state


@compiled(VOID, TABLE, HASHED, INT, TABLE, INT, INTS)
def follow(
    nodes: IntArray, edges: Hashed, depth: int, matches: IntArray, row: int, tokens: IntArray
) -> None:
    """Extends a match (state, length) to the longest suffix below `depth` that occurs."""
    matched = matches[row, 1]
    state = within(nodes, matches[row, 0], matched)  # the state may have been split since
    for token in tokens:
        target = after(nodes, edges, state, token)
        while target < 0 and state != ROOT:
            state = nodes[state, LINK]
            matched = nodes[state, LENGTH]
            target = after(nodes, edges, state, token)
        if target < 0:
            matched = 0
            continue
        state = target
        matched = min(matched + 1, depth - 1)
        if nodes[nodes[state, LINK], LENGTH] == depth - 1:
            state = nodes[state, LINK]
    matches[row, 0], matches[row, 1] = state, matched


# The best guess after a match. A guess is (score, number of nodes); its tokens and parents are in
# the rows of a draft.

TOKENS, PARENTS = 0, 1  # rows of a draft
MOST, WIDEST = 0, 1  # rows of `Limits.table`
# Columns of an offer: the parent node, the token, ..., when it was last seen.
PARENT, ID, OFFER_STATE, TIME, OFFER = range(5)
OWN, CORPUS = 2, 3  # rows of `matches`
NOWHERE, AT_END, AT_MATCH = range(3)
_ROUNDING = 1e-9  # of a probability
_GUESS: Any = types.Tuple((FLOAT, INT))


class Automaton(NamedTuple):
    """The tables of one text's automaton (`suffix.py`)."""

    nodes: IntArray
    edges: IntArray


class Limits(NamedTuple):
    """Limits of a draft."""

    table: IntArray  # [2, depth]
    least: float  # least probability of a node
    is_tree: int
    budget: int  # largest number of nodes


class Offer(NamedTuple):
    """A candidate for the next node of a tree."""

    share: float  # product of probabilities along its path
    parent: int
    token: int
    state: int
    seen: int  # when it occurred last


class Offers(NamedTuple):
    """The best offers in order, the best last."""

    rows: IntArray  # [limit, OFFER]
    shares: NDArray[np.float64]  # [limit]


AUTOMATON: Any = types.NamedUniTuple(TABLE, 2, Automaton)
LIMITS: Any = types.NamedTuple((TABLE, FLOAT, INT, INT), Limits)
AN_OFFER: Any = types.NamedTuple((FLOAT, INT, INT, INT, INT), Offer)
OFFERS: Any = types.NamedTuple((TABLE, FLOATS), Offers)


@compiled(AN_OFFER, FLOAT, INT, INT, INT, INT)
def offer_of(share: float, parent: int, token: int, state: int, seen: int) -> Offer:
    """An offer from integers of any width."""
    return Offer(share, parent, token, state, seen)


@compiled(VOID, TABLE, INT, TABLE, INT, INT)
def copy(to: IntArray, row: int, source: IntArray, source_row: int, size: int) -> None:
    """The first columns of a row."""
    for column in range(size):  # a loop, since a slice takes seconds to compile
        to[row, column] = source[source_row, column]


@compiled(BOOL, AN_OFFER, OFFERS, INT)
def is_better(one: Offer, offers: Offers, place: int) -> bool:
    """Whether an offer is taken before one of `offers`: the more probable; of equals that of the
    older parent, of one parent's the token seen last."""
    if one.share != offers.shares[place]:
        return one.share > offers.shares[place]
    parent = offers.rows[place, PARENT]
    return one.seen > offers.rows[place, TIME] if one.parent == parent else one.parent < parent


@compiled(_GUESS, TABLE, INT, INT, FLOAT, TABLE)
def chain(
    nodes: IntArray, state: int, limit: int, least: float, draft: IntArray
) -> tuple[float, int]:
    """Drafts the most frequent token after token, while the product is at least the limit."""
    prob, score, total = 1.0, 0.0, nodes[state, COUNT]
    for node in range(limit):
        token = nodes[state, BEST]
        if token < 0:
            return score, node
        state = nodes[state, AFTER]
        prob *= nodes[state, COUNT] / total
        if prob < least:
            return score, node
        total = nodes[state, COUNT]
        score += prob
        draft[TOKENS, node], draft[PARENTS, node] = token, node - 1
    return score, limit


@compiled(INT, OFFERS, INT, AN_OFFER)
def keep(offers: Offers, num: int, one: Offer) -> int:
    """Inserts an offer if it is one of the best; returns their number."""
    rows, shares = offers.rows, offers.shares
    if num == len(shares):  # the worst one can no longer be taken
        if not is_better(one, offers, 0):
            return num
        num -= 1
        for place in range(num):
            shares[place] = shares[place + 1]
            copy(rows, place, rows, place + 1, OFFER)
    place = num
    while place > 0 and not is_better(one, offers, place - 1):
        shares[place] = shares[place - 1]
        copy(rows, place, rows, place - 1, OFFER)
        place -= 1
    shares[place] = one.share
    rows[place, PARENT], rows[place, ID] = one.parent, one.token
    rows[place, OFFER_STATE], rows[place, TIME] = one.state, one.seen
    return num + 1


@compiled(INT, AUTOMATON, INT, INT, FLOAT, INT, FLOAT, OFFERS, INT)
def offer_children(
    automaton: Automaton,
    node: int,  # of the draft; -1: the root
    state: int,
    prob: float,
    most: int,  # offers that can still be taken
    least: float,
    offers: Offers,
    num: int,
) -> int:
    """Inserts the continuations of a node; returns the number of offers.

    Continuations are stored in the order in which they were first seen, frequent ones mostly early.
    The scan ends when the remaining ones together are below the least probability.
    """
    nodes, edges = automaton
    total = nodes[state, COUNT]
    token, target = nodes[state, BEST], nodes[state, AFTER]
    if token < 0:
        return num
    share, unseen = prob * (nodes[target, COUNT] / total), total - nodes[target, COUNT]
    if share < least:
        return num
    num = keep(offers, num, offer_of(share, node, token, target, nodes[target, SEEN]))
    edge = last = nodes[state, LAST]
    while edge >= 0:
        floor = least if num < most else max(least, offers.shares[num - most])
        if prob * (unseen / total) < floor - _ROUNDING:
            return num
        edge = edges[edge, NEXT]
        token, target = edges[edge, TOKEN], edges[edge, TARGET]
        if token != nodes[state, BEST]:
            unseen -= nodes[target, COUNT]
            share = prob * (nodes[target, COUNT] / total)
            if share >= floor:
                one = offer_of(share, node, token, target, nodes[target, SEEN])
                num = keep(offers, num, one)
        if edge == last:
            return num
    return num


@compiled(_GUESS, AUTOMATON, INT, INT, FLOAT, TABLE)
def tree(
    automaton: Automaton, state: int, limit: int, least: float, draft: IntArray
) -> tuple[float, int]:
    """Drafts a tree of the most probable nodes, one after the other."""
    offers, num = Offers(np.empty((limit, OFFER), np.int32), np.empty(limit)), 0
    prob, score = 1.0, 0.0
    for number in range(limit):
        num = offer_children(automaton, number - 1, state, prob, limit - number, least, offers, num)
        if num == 0:
            return score, number
        num -= 1
        state, prob = offers.rows[num, OFFER_STATE], offers.shares[num]
        score += prob
        draft[TOKENS, number] = offers.rows[num, ID]
        draft[PARENTS, number] = offers.rows[num, PARENT]
    return score, limit


@compiled(_GUESS, AUTOMATON, INT, INT, LIMITS, _GUESS, TABLES)
def best_guess(
    automaton: Automaton,
    state: int,  # of the longest match
    matched: int,  # its length
    limits: Limits,
    best: tuple[float, int],
    drafts: IntArray,  # the best one, and room for another
) -> tuple[float, int]:
    """The best guess of `best` and the guesses at this match.

    Match lengths of one state differ only in the limit, so each state is evaluated once, and only
    if it can beat the best score.
    """
    nodes, table, budget = automaton.nodes, limits.table, limits.budget
    while state != ROOT and nodes[nodes[state, LINK], LENGTH] >= matched:
        state = nodes[state, LINK]  # it was split
    while state != ROOT:
        widest = table[WIDEST, matched]
        if min(budget, table[MOST, widest]) <= best[0]:
            break  # shorter matches cannot draft more
        shorter = nodes[state, LINK]
        fewest = nodes[shorter, LENGTH] + 1
        limit = min(budget, table[MOST, max(widest, fewest)])
        if limit > best[0]:
            if limits.is_tree:
                found = tree(automaton, state, limit, limits.least, drafts[1])
            else:
                found = chain(nodes, state, limit, limits.least, drafts[1])
            if found[0] > best[0]:
                best = found
                copy(drafts[0], TOKENS, drafts[1], TOKENS, found[1])
                copy(drafts[0], PARENTS, drafts[1], PARENTS, found[1])
        state, matched = shorter, fewest - 1
    return best


@compiled(
    INT, TABLE, TABLE, INTS, TABLE, TABLE, TABLE, TABLE, TABLE, TABLE, TABLE, INT, INT, TABLE,
    FLOAT, INT, TABLES,
)  # fmt: skip
def guess(
    own_nodes: IntArray,
    own_edges: IntArray,
    own_walk: IntArray,
    newer_nodes: IntArray,
    newer_edges: IntArray,
    older_nodes: IntArray,
    older_edges: IntArray,
    corpus_nodes: IntArray,
    corpus_edges: IntArray,
    matches: IntArray,  # [4, 2], state and length in both pasts, the text, and the corpora
    own_place: int,  # where to look in the request's own text: AT_END, AT_MATCH, or NOWHERE
    budget: int,
    table: IntArray,  # of `Limits`
    least: float,
    is_tree: int,
    room: IntArray,  # [2, 2, depth], to write to
) -> int:
    """Writes the best draft from request, past and corpora to `room[0]`; returns its nodes."""
    best, longest = (0.0, 0), table.shape[1] - 1
    limits = Limits(table, least, is_tree, budget)
    if own_place == AT_MATCH and matches[OWN, 1] > 0:
        state, matched = matches[OWN, 0], matches[OWN, 1]
        best = best_guess(Automaton(own_nodes, own_edges), state, matched, limits, best, room)
    elif own_place == AT_END:
        state = own_walk[SUFFIXES]
        if state != ROOT and own_nodes[state, COUNT] == 1:
            state = own_walk[SUFFIXES + 1]  # the longest suffix that occurred before
        matched = min(own_nodes[state, LENGTH], longest)
        best = best_guess(Automaton(own_nodes, own_edges), state, matched, limits, best, room)
    for past in range(2):
        nodes, edges = (newer_nodes, newer_edges) if past == 0 else (older_nodes, older_edges)
        state, matched = matches[past, 0], matches[past, 1]
        if matched > 0:
            best = best_guess(Automaton(nodes, edges), state, matched, limits, best, room)
    if matches[CORPUS, 1] > 0:
        corpus = Automaton(corpus_nodes, corpus_edges)
        best = best_guess(corpus, matches[CORPUS, 0], matches[CORPUS, 1], limits, best, room)
    return best[1]
