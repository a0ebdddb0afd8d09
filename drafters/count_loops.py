"""What is counted and looked up every step in tables of n-grams, compiled.

A table, of which `count_table.py` has the owner, is int32:

- rows[num_rows, 8], in order of arrival. A key's row: its tokens, the newest first, padded with -1;
  how often anything followed; the token that did most often (of equals the one that got there
  first), and how often; the last of its pairs, -1 while a single token has followed.
  A pair's row: the key's row, the token, twice -2; how often; nothing; nothing; the pair that
  comes after it, in a ring.
- slots[a power of two]: a hash table of the rows, at most half full.
- used[2]: rows, and keys among them.
"""

from __future__ import annotations

from ..scheduler.types import IntArray
from .compiled import INT, INTS, TABLE, compiled

ORDERS = 4
TOTAL, BEST, BEST_COUNT, LAST = 4, 5, 6, 7  # of a key, whose tokens are before these
COUNT, NEXT = 4, 7  # of a pair
COLUMNS = 8
NUM_ROWS, NUM_KEYS = 0, 1  # of `used`
NONE, PAIR = -1, -2
_MOST = 2**31 - 1

STATIC_ORDER = 2
# By order, from 1: least samples, least percent.
_LAX = ((2, 66), (2, 50), (1, 50), (1, 50))
_STRICT = ((4, 75), (3, 66), (2, 66), (2, 66))
_STATIC_LEAST, _STATIC_PERCENT = 2, 50
_STATIC_WEIGHT = 100
_LIMITS = f"UniTuple(UniTuple({INT}, 2), {ORDERS})"


@compiled(INT, TABLE, INTS, INT, INT, INT, INT)
def slot_of(rows: IntArray, slots: IntArray, one: int, two: int, three: int, four: int) -> int:
    """Where the row is, or where it would be put."""
    mask = len(slots) - 1
    place = one * 0x1E3779B97F4A7C15 + two * 0x3C6EF372FE94F82B
    place += three * 0x5851F42D4C957F2D + four * 0x14057B7EF767814F
    place = (place ^ (place >> 32)) & mask
    while True:
        row = slots[place]
        if row < 0 or (
            rows[row, 0] == one
            and rows[row, 1] == two
            and rows[row, 2] == three
            and rows[row, 3] == four
        ):
            return place
        place = (place + 1) & mask


@compiled("none", TABLE, INTS, INT)
def put_rows(rows: IntArray, slots: IntArray, num_rows: int) -> None:
    """Into an empty hash table."""
    for row in range(num_rows):
        place = slot_of(rows, slots, rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3])
        slots[place] = row


@compiled(INT, TABLE, INTS, INTS, INT, INT, INT, INT, INT)
def new_row(
    rows: IntArray, slots: IntArray, used: IntArray,
    place: int, one: int, two: int, three: int, four: int,
) -> int:  # fmt: skip
    row = used[NUM_ROWS]
    used[NUM_ROWS] += 1
    slots[place] = row
    rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3] = one, two, three, four
    return row


@compiled(INT, TABLE, INTS, INTS, INT, INT, INT)
def add_pair(
    rows: IntArray, slots: IntArray, used: IntArray, key: int, token: int, count: int
) -> int:
    """Counts one of a key's tokens; how often it has followed."""
    place = slot_of(rows, slots, key, token, PAIR, PAIR)
    pair = slots[place]
    if pair >= 0:
        rows[pair, COUNT] = min(rows[pair, COUNT] + count, _MOST)
        return rows[pair, COUNT]
    pair = new_row(rows, slots, used, place, key, token, PAIR, PAIR)
    rows[pair, COUNT] = count
    last = rows[key, LAST]
    if last < 0:
        rows[pair, NEXT] = pair
    else:
        rows[pair, NEXT], rows[last, NEXT] = rows[last, NEXT], pair
    rows[key, LAST] = pair
    return count


@compiled("none", TABLE, INTS, INTS, INT, INT, INT, INT, INT, INT)
def add(
    rows: IntArray, slots: IntArray, used: IntArray,
    one: int, two: int, three: int, four: int, token: int, count: int,
) -> None:  # fmt: skip
    """`token` followed the key, `count` times more. Takes room for two rows."""
    place = slot_of(rows, slots, one, two, three, four)
    key = slots[place]
    if key < 0:
        key = new_row(rows, slots, used, place, one, two, three, four)
        used[NUM_KEYS] += 1
        rows[key, TOTAL] = rows[key, BEST_COUNT] = count
        rows[key, BEST], rows[key, LAST] = token, NONE
        return
    rows[key, TOTAL] = min(rows[key, TOTAL] + count, _MOST)
    if rows[key, LAST] < 0:
        if rows[key, BEST] == token:
            rows[key, BEST_COUNT] = rows[key, TOTAL]
            return
        add_pair(rows, slots, used, key, rows[key, BEST], rows[key, BEST_COUNT])
    counted = add_pair(rows, slots, used, key, token, count)
    if counted > rows[key, BEST_COUNT]:
        rows[key, BEST], rows[key, BEST_COUNT] = token, counted


@compiled(INT, TABLE, INTS, INTS, INTS, INT)
def extend(
    rows: IntArray,
    slots: IntArray,
    used: IntArray,
    text: IntArray,
    begin: int,
) -> int:
    """Counts what follows the n-grams of a text from `begin` on; up to where there was room."""
    for place in range(begin, len(text)):
        if used[NUM_ROWS] + 2 * ORDERS > len(rows):
            return place
        token = text[place]
        one = two = three = four = NONE
        for order in range(1, min(place, ORDERS) + 1):
            if order == 1:
                one = text[place - 1]
            elif order == 2:
                two = text[place - 2]
            elif order == 3:
                three = text[place - 3]
            else:
                four = text[place - 4]
            add(rows, slots, used, one, two, three, four, token, 1)
    return len(text)


@compiled(INT, TABLE, INT)
def num_pairs(rows: IntArray, key: int) -> int:
    """Tokens that followed a key."""
    last, num = rows[key, LAST], 1
    pair = last
    while pair >= 0 and rows[pair, NEXT] != last:
        pair = rows[pair, NEXT]
        num += 1
    return num


@compiled("none", TABLE, INTS, INTS, TABLE, INT)
def add_all(rows: IntArray, slots: IntArray, used: IntArray, source: IntArray, key: int) -> None:
    """All that followed a key of another table."""
    one, two, three, four = source[key, 0], source[key, 1], source[key, 2], source[key, 3]
    pair = last = source[key, LAST]
    if last < 0:
        add(rows, slots, used, one, two, three, four, source[key, BEST], source[key, TOTAL])
        return
    while True:
        pair = source[pair, NEXT]
        add(rows, slots, used, one, two, three, four, source[pair, 1], source[pair, COUNT])
        if pair == last:
            return


@compiled(INT, TABLE, INTS, INTS, TABLE, INTS, TABLE, INT, INT, INT)
def merge(
    rows: IntArray,
    slots: IntArray,
    used: IntArray,
    older: IntArray,  # rows of a table whose keys move here when they are counted again
    older_slots: IntArray,
    source: IntArray,
    begin: int,
    end: int,
    is_only_new: int,  # whether keys that are known here are passed over
) -> int:
    """Adds the keys of rows [begin, end) of another table; up to where there was room."""
    for row in range(begin, end):
        one, two, three, four = source[row, 0], source[row, 1], source[row, 2], source[row, 3]
        if four == PAIR:
            continue
        needed, before = 1 + 2 * num_pairs(source, row), -1
        if slots[slot_of(rows, slots, one, two, three, four)] >= 0:
            if is_only_new:
                continue
        else:
            before = older_slots[slot_of(older, older_slots, one, two, three, four)]
            if before >= 0:
                needed += 2 * num_pairs(older, before)
        if used[NUM_ROWS] + needed > len(rows):
            return row
        if before >= 0:
            add_all(rows, slots, used, older, before)
            key = slots[slot_of(rows, slots, one, two, three, four)]
            rows[key, BEST] = older[before, BEST]
        add_all(rows, slots, used, source, row)
    return end


@compiled(INT, TABLE, INTS, INTS, TABLE, INTS, TABLE, INT, INT)
def fill(
    rows: IntArray,
    slots: IntArray,
    used: IntArray,
    keys: IntArray,  # [num_keys, order], the oldest token first
    counts: IntArray,  # [num_keys], pairs of each
    pairs: IntArray,  # [num_pairs, 2], (token, count)
    begin: int,
    begin_pair: int,
) -> int:
    """Adds keys from `begin` on; up to where there was room."""
    order, pair = keys.shape[1], begin_pair
    for key in range(begin, len(keys)):
        if used[NUM_ROWS] + 2 * counts[key] + 1 > len(rows):
            return key
        one, two, three, four = keys[key, order - 1], NONE, NONE, NONE
        if order > 1:
            two = keys[key, order - 2]
        if order > 2:
            three = keys[key, order - 3]
        if order > 3:
            four = keys[key, order - 4]
        for _ in range(counts[key]):
            add(rows, slots, used, one, two, three, four, pairs[pair, 0], pairs[pair, 1])
            pair += 1
    return len(keys)


@compiled(INT, TABLE, INTS, INT, INT)
def weight(static: IntArray, static_slots: IntArray, static_key: int, token: int) -> int:
    """What the corpus gives a token that follows a key of its table."""
    if static_key < 0:
        return 1
    if static[static_key, LAST] < 0:
        count = static[static_key, BEST_COUNT] if static[static_key, BEST] == token else 0
    else:
        pair = static_slots[slot_of(static, static_slots, static_key, token, PAIR, PAIR)]
        count = static[pair, COUNT] if pair >= 0 else 0
    return _STATIC_WEIGHT * count if count > 0 else 1


@compiled(INT, TABLE, INT, INT, INT, TABLE, INTS, INT)
def sure_token(
    rows: IntArray,
    key: int,
    least: int,
    percent: int,
    static: IntArray,
    static_slots: IntArray,
    static_key: int,
) -> int:
    """The token with the largest weighted count, if enough samples agree; else -1.

    Of equal products, the most counted before the one that came first.
    """
    total, token, count = rows[key, TOTAL], rows[key, BEST], rows[key, BEST_COUNT]
    if total < least:
        return -1
    last = rows[key, LAST]
    if last >= 0 and static_key >= 0:
        highest = count * weight(static, static_slots, static_key, token)
        pair = last
        while True:
            pair = rows[pair, NEXT]
            product = rows[pair, COUNT] * weight(static, static_slots, static_key, rows[pair, 1])
            if product > highest:
                token, count, highest = rows[pair, 1], rows[pair, COUNT], product
            if pair == last:
                break
    return token if 100 * count >= percent * total else -1


@compiled(INT, TABLE, INTS, TABLE, INTS, INT, INT, INT, INT, INT, _LIMITS, TABLE, INTS, INT)
def longest_sure(
    rows: IntArray,
    slots: IntArray,
    older: IntArray,  # for keys that are not in `rows`
    older_slots: IntArray,
    one: int,
    two: int,
    three: int,
    four: int,
    known: int,  # how many of the four there are
    limits: tuple[tuple[int, int], ...],
    static: IntArray,
    static_slots: IntArray,
    static_key: int,
) -> int:
    """The token that some order is sure enough of, the longest first; -1 if none is."""
    for order in range(known, 0, -1):
        second = two if order > 1 else NONE
        third = three if order > 2 else NONE
        fourth = four if order > 3 else NONE
        least, percent = limits[order - 1]
        table, key = rows, slots[slot_of(rows, slots, one, second, third, fourth)]
        if key < 0:
            table, key = older, older_slots[slot_of(older, older_slots, one, second, third, fourth)]
        if key >= 0:
            token = sure_token(table, key, least, percent, static, static_slots, static_key)
            if token >= 0:
                return token
    return -1


@compiled(INT, TABLE, INTS, TABLE, INTS, TABLE, INTS, TABLE, INTS, TABLE, INTS, INTS, INT, INTS)
def draft(
    context: IntArray,
    context_slots: IntArray,
    newer: IntArray,
    newer_slots: IntArray,
    older: IntArray,
    older_slots: IntArray,
    static: IntArray,
    static_slots: IntArray,
    nothing: IntArray,  # an empty table
    nothing_slots: IntArray,
    tail: IntArray,  # the newest tokens, as many as count
    budget: int,
    tokens: IntArray,
) -> int:
    """Writes tokens, each of which some table is sure of; how many they are."""
    known = min(len(tail), ORDERS)
    if known < STATIC_ORDER:
        return 0
    one, two = tail[len(tail) - 1], tail[len(tail) - 2]
    three = tail[len(tail) - 3] if known > 2 else NONE
    four = tail[len(tail) - 4] if known > 3 else NONE
    for node in range(budget):
        corpus = static_slots[slot_of(static, static_slots, one, two, NONE, NONE)]
        token = longest_sure(
            context, context_slots, nothing, nothing_slots, one, two, three, four, known, _LAX,
            static, static_slots, corpus,
        )  # fmt: skip
        if token < 0:
            token = longest_sure(
                newer, newer_slots, older, older_slots, one, two, three, four, known, _STRICT,
                static, static_slots, corpus,
            )  # fmt: skip
        if token < 0 and corpus >= 0:
            token = sure_token(
                static, corpus, _STATIC_LEAST, _STATIC_PERCENT, static, static_slots, -1
            )
        if token < 0:
            return node
        tokens[node] = token
        one, two, three, four, known = token, one, two, three, min(known + 1, ORDERS)
    return budget
