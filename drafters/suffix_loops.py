"""A suffix automaton's loops, compiled: appending to it, and going on from a match.

Its tables, int32, which `suffix_index.py` owns:

- nodes[num_states, 8]: a state in half a cache line.
- edges[num_edges, 4]: how the states that go on in several ways do, chained by state.
- slots[a power of two]: a hash table of the edges by state and token, at most half full.
- walk[4 + depth + 2]: how much of them is used, and the states of the current text's suffixes,
  longest first.
"""

from __future__ import annotations

from ..scheduler.types import IntArray
from .compiled import INT, INTS, TABLE, compiled

ROOT = 0
LENGTH, LINK, COUNT, BEST, AFTER, FIRST, DEGREE = range(7)  # columns of `nodes`
NODE = 8
STATE, TOKEN, TARGET, NEXT = range(4)  # columns of `edges`
EDGE = 4
NUM_STATES, NUM_EDGES, MAX_DEGREE, NUM_SUFFIXES, SUFFIXES = range(5)  # of `walk`


@compiled(INT, TABLE, INTS, INT, INT)
def slot_of(edges: IntArray, slots: IntArray, state: int, token: int) -> int:
    """Where the edge is, or where it would be put."""
    mask = len(slots) - 1
    place = state * 2654435761 + token * 2246822519
    place = (place ^ (place >> 29)) & mask
    while True:
        edge = slots[place]
        if edge < 0 or (edges[edge, STATE] == state and edges[edge, TOKEN] == token):
            return place
        place = (place + 1) & mask


@compiled(INT, TABLE, TABLE, INTS, INT, INT)
def after(nodes: IntArray, edges: IntArray, slots: IntArray, state: int, token: int) -> int:
    """Where `token` leads; -1 if it never followed."""
    if nodes[state, BEST] == token:
        return nodes[state, AFTER]
    if nodes[state, FIRST] < 0:
        return -1
    edge = slots[slot_of(edges, slots, state, token)]
    return edges[edge, TARGET] if edge >= 0 else -1


@compiled("none", TABLE, TABLE, INTS, INTS, INT, INT, INT)
def add_edge(
    nodes: IntArray,
    edges: IntArray,
    slots: IntArray,
    walk: IntArray,
    state: int,
    token: int,
    target: int,
) -> None:
    edge = walk[NUM_EDGES]
    walk[NUM_EDGES] += 1
    slots[slot_of(edges, slots, state, token)] = edge
    edges[edge, STATE], edges[edge, TOKEN], edges[edge, TARGET] = state, token, target
    edges[edge, NEXT] = nodes[state, FIRST]
    nodes[state, FIRST] = edge
    nodes[state, DEGREE] += 1
    if state != ROOT and nodes[state, DEGREE] > walk[MAX_DEGREE]:
        walk[MAX_DEGREE] = nodes[state, DEGREE]


@compiled("none", TABLE, INTS, INT)
def put_edges(edges: IntArray, slots: IntArray, num_edges: int) -> None:
    """Into an empty hash table."""
    for edge in range(num_edges):
        slots[slot_of(edges, slots, edges[edge, STATE], edges[edge, TOKEN])] = edge


@compiled(INT, TABLE, TABLE, INTS, INTS, INT, INT)
def split(
    nodes: IntArray, edges: IntArray, slots: IntArray, walk: IntArray, state: int, size: int
) -> int:
    """The strings of `state` of up to `size` tokens, as a state of their own."""
    part = walk[NUM_STATES]
    walk[NUM_STATES] += 1
    nodes[part, LENGTH] = size
    nodes[part, LINK] = nodes[state, LINK]
    nodes[part, COUNT] = nodes[state, COUNT]
    nodes[part, BEST] = nodes[state, BEST]
    nodes[part, AFTER] = nodes[state, AFTER]
    nodes[part, FIRST] = -1
    nodes[part, DEGREE] = 0
    nodes[state, LINK] = part
    edge = nodes[state, FIRST]
    while edge >= 0:
        add_edge(nodes, edges, slots, walk, part, edges[edge, TOKEN], edges[edge, TARGET])
        edge = edges[edge, NEXT]
    return part


@compiled(INT, TABLE, TABLE, INTS, INTS, INT, INTS)
def extend(
    nodes: IntArray,
    edges: IntArray,
    slots: IntArray,
    walk: IntArray,
    depth: int,
    tokens: IntArray,
) -> int:
    """Appends tokens to the text, as many as there is room for; how many it was."""
    longest = depth - 1  # that goes on
    for place in range(len(tokens)):
        if walk[NUM_STATES] + 2 > len(nodes) or walk[NUM_EDGES] + 2 * walk[NUM_SUFFIXES] + walk[
            MAX_DEGREE
        ] > len(edges):
            return place
        token = tokens[place]
        begin = SUFFIXES
        if nodes[walk[SUFFIXES], LENGTH] > longest and nodes[walk[SUFFIXES + 1], LENGTH] == longest:
            begin += 1  # a single string, and it does not go on
        grown = SUFFIXES  # the new suffixes take the places of those that were read
        last = new = whole = part = -1
        for index in range(begin, SUFFIXES + walk[NUM_SUFFIXES]):
            state = walk[index]
            known = nodes[state, BEST]
            target = after(nodes, edges, slots, state, token)
            if target < 0:
                if new < 0:
                    new = last = walk[NUM_STATES]
                    walk[NUM_STATES] += 1
                    nodes[new, LENGTH] = min(nodes[state, LENGTH], longest) + 1
                    nodes[new, LINK], nodes[new, COUNT] = ROOT, 1
                    nodes[new, BEST] = nodes[new, AFTER] = nodes[new, FIRST] = -1
                    nodes[new, DEGREE] = 0
                    walk[grown] = new
                    grown += 1
                if known >= 0:
                    if nodes[state, FIRST] < 0:
                        add_edge(nodes, edges, slots, walk, state, known, nodes[state, AFTER])
                    add_edge(nodes, edges, slots, walk, state, token, new)
                if known < 0 or nodes[nodes[state, AFTER], COUNT] == 1:
                    nodes[state, BEST], nodes[state, AFTER] = token, new
                continue
            if last == new:  # the first that knows the token
                size = min(nodes[state, LENGTH], longest) + 1
                if nodes[target, LENGTH] != size:
                    whole, part = target, split(nodes, edges, slots, walk, target, size)
                if new >= 0:
                    nodes[new, LINK] = target if part < 0 else part
            if target == whole:
                target = part
                if known == token:
                    nodes[state, AFTER] = part
                if nodes[state, FIRST] >= 0:
                    edges[slots[slot_of(edges, slots, state, token)], TARGET] = part
            if target != last:
                last = target
                walk[grown] = target
                grown += 1
                nodes[target, COUNT] += 1
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


@compiled("none", TABLE, TABLE, INTS, INT, TABLE, INT, INTS)
def follow(
    nodes: IntArray,
    edges: IntArray,
    slots: IntArray,
    depth: int,
    matches: IntArray,
    row: int,
    tokens: IntArray,
) -> None:
    """Goes on from a match (state, length): the longest suffix below `depth` that occurs."""
    matched = matches[row, 1]
    state = within(nodes, matches[row, 0], matched)  # it may have been split since
    for token in tokens:
        target = after(nodes, edges, slots, state, token)
        while target < 0 and state != ROOT:
            state = nodes[state, LINK]
            matched = nodes[state, LENGTH]
            target = after(nodes, edges, slots, state, token)
        if target < 0:
            matched = 0
            continue
        state = target
        matched = min(matched + 1, depth - 1)
        if nodes[nodes[state, LINK], LENGTH] == depth - 1:
            state = nodes[state, LINK]
    matches[row, 0], matches[row, 1] = state, matched
