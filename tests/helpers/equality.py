"""Steps of every kind over one paged cache, with the text that each row is the end of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outrider.scheduler.tree import chain
from outrider.scheduler.types import Draft, ints
from outrider.tests.helpers.models import BLOCK, TABLES

PARENTS = [-1, -1, 0, 1, 1, 3, 4]
ACCEPTED = [1, 4, 6]  # a path of PARENTS, not contiguous
TEXTS = np.random.default_rng(3).integers(3, 100, (2, 24)).tolist()


def every_row(step):
    return replace(step, rows=ints(np.arange(len(step.token_ids))))


def slot(table, index):
    return table[index // BLOCK] * BLOCK + index % BLOCK


def script(texts, part, build_step):
    """Steps with the text whose full forward each row must equal, and the row within it."""
    first, second = texts
    steps = []

    def add(parts, expected, kv_moves=()):
        steps.append((every_row(build_step(parts, BLOCK, kv_moves)), expected))

    def rows(text, begin, end):
        return [(text[: index + 1], index) for index in range(begin, end)]

    one, two = TABLES
    add([part(first[:5], 0, one)], rows(first, 0, 5))
    add(  # a chunk beside a whole prompt
        [part(first[5:12], 5, one), part(second[:9], 0, two)],
        rows(first, 5, 12) + rows(second, 0, 9),
    )
    add(  # two decodes
        [part(first[12:13], 12, one), part(second[9:10], 9, two)],
        rows(first, 12, 13) + rows(second, 9, 10),
    )
    nodes = [int(token) for token in np.random.default_rng(7).permutation(90)[: len(PARENTS)] + 3]
    paths = []
    for node in range(len(PARENTS)):
        path = [node]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        paths.append(first[:14] + [nodes[step] for step in path])
    add(  # a tree beside a chain
        [
            part(first[13:14], 13, one, Draft(ints(nodes), ints(PARENTS))),
            part(second[10:11], 10, two, chain(second[11:13], "test")),
        ],
        [
            *rows(first, 13, 14),
            *((path, len(path) - 1) for path in paths),
            *rows(second, 10, 13),
        ],
    )
    kept = first[:14] + [nodes[node] for node in ACCEPTED] + [42]
    moves = [(slot(one, 14 + node), slot(one, 14 + at)) for at, node in enumerate(ACCEPTED)]
    add(  # the accepted path is compacted, and both go on
        [part([42], 17, one), part(second[13:16], 13, two)],
        rows(kept, 17, 18) + rows(second, 13, 16),
        moves,
    )
    return steps
