"""Counting n-grams, compiled.

A table has two kinds of rows (see `hashing.py`):

- A key row: its tokens, the newest first, padded with -1; the total count of tokens that followed;
  the most frequent of them (ties go to the first to reach the count) and its count; the last pair
  of the key, -1 while a single token has followed.
- A pair row: the row of the key, the token, two entries of -2; the count; the next pair (a ring).
"""

from __future__ import annotations

from typing import Any

from numba import types

from ....scheduler.types import IntArray
from . import INT, INTS, TABLE, VOID, compiled
from .hashing import (
    HASHED,
    KEY,
    NUM_ROWS,
    USED,
    VALUE,
    Hashed,
    Key,
    find,
    insert,
    key_of,
    stored_key,
)

ORDERS = 4
TOTAL, BEST, BEST_COUNT, LAST = range(VALUE, VALUE + 4)  # of a key
COUNT, NEXT = VALUE, VALUE + 1  # of a pair
COLUMNS = VALUE + 4
NUM_KEYS = USED  # of `used`
NONE, PAIR = -1, -2
_MOST = 2**31 - 1


@compiled(INT, HASHED, INT, INT, INT)
def add_pair(table: Hashed, key: int, token: int, count: int) -> int:
    """Counts a token after a key; returns the token's count."""
    rows, last = table[0], table[0][key, LAST]
    pair = find(table, key_of(key, token, PAIR, PAIR))
    if pair >= 0:
        rows[pair, COUNT] = min(rows[pair, COUNT] + count, _MOST)
        return rows[pair, COUNT]
    pair = insert(table, key_of(key, token, PAIR, PAIR))
    rows[pair, COUNT] = count
    if last < 0:
        rows[pair, NEXT] = pair
    else:
        rows[pair, NEXT], rows[last, NEXT] = rows[last, NEXT], pair
    rows[key, LAST] = pair
    return count


@compiled(VOID, HASHED, KEY, INT, INT)
def add(table: Hashed, ngram: Key, token: int, count: int) -> None:
    """Adds `count` occurrences of `token` after the n-gram. Needs room for two rows."""
    rows, _, used = table
    key = find(table, ngram)
    if key < 0:
        key = insert(table, ngram)
        used[NUM_KEYS] += 1
        rows[key, TOTAL] = rows[key, BEST_COUNT] = count
        rows[key, BEST], rows[key, LAST] = token, NONE
        return
    rows[key, TOTAL] = min(rows[key, TOTAL] + count, _MOST)
    if rows[key, LAST] < 0:
        if rows[key, BEST] == token:
            rows[key, BEST_COUNT] = rows[key, TOTAL]
            return
        add_pair(table, key, rows[key, BEST], rows[key, BEST_COUNT])
    counted = add_pair(table, key, token, count)
    if counted > rows[key, BEST_COUNT]:
        rows[key, BEST], rows[key, BEST_COUNT] = token, counted


@compiled(KEY, INTS, INT)
def newest_of(text: IntArray, place: int) -> Key:
    """The n-gram that ends before `place`, as long as the text allows."""
    one = text[place - 1] if place > 0 else NONE
    two = text[place - 2] if place > 1 else NONE
    three = text[place - 3] if place > 2 else NONE
    four = text[place - 4] if place > 3 else NONE
    return key_of(one, two, three, four)


@compiled(KEY, KEY, INT)
def shortened(ngram: Key, order: int) -> Key:
    """The newest tokens of an n-gram."""
    two = ngram.two if order > 1 else NONE
    three = ngram.three if order > 2 else NONE
    return key_of(ngram.one, two, three, ngram.four if order > 3 else NONE)


@compiled(INT, HASHED, INTS, INT)
def extend(table: Hashed, text: IntArray, begin: int) -> int:
    """Counts the n-grams of a text from `begin` on; returns where it ran out of room."""
    for place in range(begin, len(text)):
        if table[2][NUM_ROWS] + 2 * ORDERS > len(table[0]):
            return place
        newest = newest_of(text, place)
        for order in range(1, min(place, ORDERS) + 1):
            add(table, shortened(newest, order), text[place], 1)
    return len(text)


@compiled(INT, TABLE, INT)
def num_pairs(rows: IntArray, key: int) -> int:
    """Number of tokens that followed a key."""
    last, num = rows[key, LAST], 1
    pair = last
    while pair >= 0 and rows[pair, NEXT] != last:
        pair = rows[pair, NEXT]
        num += 1
    return num


@compiled(VOID, HASHED, TABLE, INT)
def add_all(table: Hashed, source: IntArray, key: int) -> None:
    """Adds all tokens that followed a key of another table."""
    ngram, last = stored_key(source, key), source[key, LAST]
    if last < 0:
        add(table, ngram, source[key, BEST], source[key, TOTAL])
        return
    pair = last
    while True:
        pair = source[pair, NEXT]
        add(table, ngram, source[pair, 1], source[pair, COUNT])
        if pair == last:
            return


@compiled(INT, HASHED, HASHED, TABLE, INT, INT, INT)
def merge(
    table: Hashed,
    older: Hashed,  # whose keys move here when they are counted again
    source: IntArray,  # rows of a third table
    begin: int,
    end: int,
    is_only_new: int,  # whether keys that are known here are passed over
) -> int:
    """Adds the keys of rows [begin, end) of another table; returns where it ran out of room."""
    for row in range(begin, end):
        ngram = stored_key(source, row)
        if ngram.four == PAIR:
            continue
        needed, before = 1 + 2 * num_pairs(source, row), -1
        if find(table, ngram) >= 0:
            if is_only_new:
                continue
        else:
            before = find(older, ngram)
            if before >= 0:
                needed += 2 * num_pairs(older[0], before)
        if table[2][NUM_ROWS] + needed > len(table[0]):
            return row
        if before >= 0:
            add_all(table, older[0], before)
            table[0][find(table, ngram), BEST] = older[0][before, BEST]
        add_all(table, source, row)
    return end


@compiled(INT, HASHED, TABLE, INTS, TABLE, INT, INT)
def fill(
    table: Hashed,
    keys: IntArray,  # [num_keys, order], the oldest token first
    counts: IntArray,  # [num_keys], pairs of each
    pairs: IntArray,  # [num_pairs, 2], (token, count)
    begin: int,
    begin_pair: int,
) -> int:
    """Adds keys from `begin` on; returns where it ran out of room."""
    order, pair = keys.shape[1], begin_pair
    for key in range(begin, len(keys)):
        if table[2][NUM_ROWS] + 2 * counts[key] + 1 > len(table[0]):
            return key
        ngram = newest_of(keys[key], order)
        for _ in range(counts[key]):
            add(table, ngram, pairs[pair, 0], pairs[pair, 1])
            pair += 1
    return len(keys)


# NGramCache's draft: token by token, as long as context, past or corpus are certain.
STATIC_ORDER = 2
# By order, from 1: least number of samples, least percentage.
_LAX = ((2, 66), (2, 50), (1, 50), (1, 50))
_STRICT = ((4, 75), (3, 66), (2, 66), (2, 66))
_STATIC_LEAST, _STATIC_PERCENT = 2, 50
_STATIC_WEIGHT = 100
_LIMITS: Any = types.UniTuple(types.UniTuple(INT, 2), ORDERS)


@compiled(INT, HASHED, INT, INT)
def weight(static: Hashed, static_key: int, token: int) -> int:
    """The corpus' weight of a token after a key."""
    rows, count = static[0], 0
    if rows[static_key, LAST] >= 0:
        pair = find(static, key_of(static_key, token, PAIR, PAIR))
        if pair >= 0:
            count = rows[pair, COUNT]
    elif rows[static_key, BEST] == token:
        count = rows[static_key, BEST_COUNT]
    return _STATIC_WEIGHT * count if count > 0 else 1


@compiled(INT, TABLE, INT, INT, INT, HASHED, INT)
def sure_token(
    rows: IntArray, key: int, least: int, percent: int, static: Hashed, static_key: int
) -> int:
    """The token with the largest weighted count, if enough samples agree; else -1.

    Ties go to the largest count, then to the token that was counted first.
    """
    total, token, count = rows[key, TOTAL], rows[key, BEST], rows[key, BEST_COUNT]
    if total < least:
        return -1
    last = rows[key, LAST]
    if last >= 0 and static_key >= 0:
        highest = count * weight(static, static_key, token)
        pair = last
        while True:
            pair = rows[pair, NEXT]
            product = rows[pair, COUNT] * weight(static, static_key, rows[pair, 1])
            if product > highest:
                token, count, highest = rows[pair, 1], rows[pair, COUNT], product
            if pair == last:
                break
    return token if 100 * count >= percent * total else -1


@compiled(INT, HASHED, HASHED, KEY, INT, _LIMITS, HASHED, INT)
def longest_sure(
    table: Hashed,
    older: Hashed,  # for keys that are not in `table`
    newest: Key,
    known: int,  # how many tokens it has
    limits: tuple[tuple[int, int], ...],
    static: Hashed,
    static_key: int,
) -> int:
    """The certain token of the longest order that has one; -1 if none has."""
    for order in range(known, 0, -1):
        ngram = shortened(newest, order)
        least, percent = limits[order - 1]
        rows, key = table[0], find(table, ngram)
        if key < 0:
            rows, key = older[0], find(older, ngram)
        if key >= 0:
            token = sure_token(rows, key, least, percent, static, static_key)
            if token >= 0:
                return token
    return -1


@compiled(INT, HASHED, HASHED, HASHED, HASHED, HASHED, INTS, INT, INTS)
def draft(
    context: Hashed,
    newer: Hashed,  # the past's generations
    older: Hashed,
    static: Hashed,
    nothing: Hashed,  # an empty table
    tail: IntArray,  # the newest tokens, as many as count
    budget: int,
    tokens: IntArray,
) -> int:
    """Writes a draft of certain tokens; returns their number."""
    known = min(len(tail), ORDERS)
    if known < STATIC_ORDER:
        return 0
    newest = newest_of(tail, len(tail))
    for node in range(budget):
        corpus = find(static, shortened(newest, STATIC_ORDER))
        token = longest_sure(context, nothing, newest, known, _LAX, static, corpus)
        if token < 0:
            token = longest_sure(newer, older, newest, known, _STRICT, static, corpus)
        if token < 0 and corpus >= 0:
            token = sure_token(static[0], corpus, _STATIC_LEAST, _STATIC_PERCENT, static, -1)
        if token < 0:
            return node
        tokens[node] = token
        newest = key_of(token, newest.one, newest.two, newest.three)
        known = min(known + 1, ORDERS)
    return budget


# NGramMod's draft: an n-gram rolled through its pool until a slot is empty.
FACTOR = 6364136223846793005 % 2**22  # pools are not larger


@compiled(INT, INTS, INTS, INT, INT, INTS)
def roll(
    slots: IntArray,  # [a power of two], successors plus one; 0: none
    tokens: IntArray,  # more than `n`
    n: int,
    budget: int,
    found: IntArray,  # to be written
) -> int:
    """Writes successors of the last `n` tokens, while known and fitting; returns their number."""
    tail, mask = tokens[len(tokens) - n :], len(slots) - 1
    where, leaving = 0, 1  # `leaving`: the factor of the n-gram's oldest token
    for token in tail:
        where = where * FACTOR + token & mask
        leaving = leaving * FACTOR & mask
    budget = min(budget, len(found))
    for step in range(budget):
        after = slots[where] - 1
        if after < 0:
            return step
        found[step] = after
        gone = tail[step] if step < n else found[step - n]
        where = where * FACTOR + after - gone * leaving & mask
    return budget
