"""What is derived from a tree's parents, against walks from node to root."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.scheduler import tree
from outrider.scheduler.types import (
    Draft,
    DraftProbs,
    Masks,
    SamplingRows,
    ints,
    starts_of,
)
from outrider.workers import seats

VOCAB = 500


def path(draft: Draft, node: int) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    while node >= 0:
        tokens, node = (int(draft.tokens[node]), *tokens), int(draft.parents[node])
    return tokens


def random_draft(rng: random.Random) -> Draft:
    """Tokens are all different, so that a path names its node."""
    size, window = rng.randrange(1, 12), rng.randrange(4)
    parents = [rng.randrange(-1, node) for node in range(size)]
    parents += [rng.choice([-1, rng.randrange(size + at)]) for at in range(window)]
    tokens = rng.sample(range(VOCAB), len(parents))
    ids = np.arange(2 * len(parents)).reshape(-1, 2)
    probs = rng.choice([None, DraftProbs(ints(ids), ids.astype(np.float32))])
    return Draft(ints(tokens), ints(parents), probs, "random", window)


def test_pruning_keeps_the_paths_that_are_short_enough():
    rng = random.Random(4)
    num_cut = num_windows = 0
    for _ in range(500):
        draft, max_depth = random_draft(rng), rng.randrange(1, 7)
        pruned, kept = tree.prune(draft, max_depth)
        guesses, nodes = range(draft.num_guesses), range(draft.num_nodes)
        wanted = [node for node in guesses if len(path(draft, node)) <= max_depth]
        window = [node for node in nodes if node >= draft.num_guesses]
        orphans = [node for node in window if draft.num_guesses > draft.parents[node] >= 0]
        if all(int(draft.parents[node]) in wanted for node in orphans):
            wanted += window
        assert tree.problem(pruned, VOCAB) is None
        assert [path(pruned, node) for node in range(pruned.num_nodes)] == [
            path(draft, node) for node in wanted
        ]
        assert pruned.num_window == sum(node in window for node in wanted)
        assert pruned.source == draft.source
        if draft.probs is not None:
            assert pruned.probs.ids.tolist() == draft.probs.ids[wanted].tolist()
            assert pruned.probs.probs.tolist() == draft.probs.probs[wanted].tolist()
        assert (kept is None) == (len(wanted) == draft.num_nodes)
        if kept is not None:
            assert kept.tolist() == wanted
            num_cut, num_windows = num_cut + 1, num_windows + (pruned.num_window > 0)
    assert min(num_cut, num_windows) > 50


def random_batch(rng: random.Random, drafts: list[Draft]) -> SimpleNamespace:
    """Chunks of random lengths; a sequence without nodes may be in the middle of its prompt."""
    chunks = [rng.randrange(1, 5) for _ in drafts]
    contexts = [rng.randrange(40) for _ in drafts]
    samples = [draft.num_nodes > 0 or rng.random() < 0.6 for draft in drafts]
    none = ints([0] * len(drafts))
    return SimpleNamespace(
        step=3,
        token_ids=ints(rng.choices(range(VOCAB), k=sum(chunks))),
        query_start=starts_of(chunks),
        context_lens=ints(contexts),
        block_tables=ints([rng.sample(range(900), 20) for _ in drafts]),
        samples=np.array(samples),
        max_nodes=ints([draft.num_nodes + rng.randrange(3) for draft in drafts]),
        kv_moves=ints([]).reshape(-1, 2),
        sampling=SamplingRows(none, none, none, none, none, none, none),
    )


def joined_by_walks(batch: SimpleNamespace, drafts: list[Draft]) -> dict[str, list[int]]:
    """The flat arrays of `seats.lay_out`, sequence by sequence and node by node."""
    flat: dict[str, list[int]] = {
        name: [] for name in ("token_ids", "positions", "slot_mapping", "rows", "masks")
    }
    num_rows = 0
    for seq, draft in enumerate(drafts):
        begin, end = batch.query_start[seq : seq + 2].tolist()
        known = int(batch.context_lens[seq]) + end - begin
        flat["token_ids"] += batch.token_ids[begin:end].tolist() + draft.tokens.tolist()
        depths = [len(path(draft, node)) for node in range(draft.num_nodes)]
        flat["positions"] += [*range(known - end + begin, known)]
        flat["positions"] += [known - 1 + depth for depth in depths]
        for index in range(known - end + begin, known + draft.num_nodes):
            flat["slot_mapping"].append(int(batch.block_tables[seq][index // 4]) * 4 + index % 4)
        if batch.samples[seq]:
            total = len(flat["token_ids"])
            flat["rows"] += range(total - draft.num_nodes - 1, total)
            if draft.masks is not None:
                flat["masks"] += (draft.masks.rows + num_rows).tolist()
            num_rows += draft.num_nodes + 1
    return flat


@pytest.mark.parametrize("few", [0, 256])
def test_a_joined_step_is_what_walks_over_every_sequence_give(few, monkeypatch):
    monkeypatch.setattr(tree, "_FEW_NODES", few)
    rng = random.Random(7)
    for _ in range(300):
        drafts = [
            rng.choice([tree.EMPTY, random_draft(rng), tree.chain(rng.sample(range(9), 3), "c")])
            for _ in range(rng.randrange(1, 7))
        ]
        if rng.random() < 0.5:  # constrained sequences
            mask = Masks(ints([0, 1]), ints([[5], [6]]))
            drafts = [replace(each, masks=mask) if each.num_nodes else each for each in drafts]
        batch = random_batch(rng, drafts)
        before = batch.token_ids.tolist()
        step = seats.lay_out(
            **vars(batch), drafts=seats.gather(drafts, batch.samples), block_size=4
        )
        wanted = joined_by_walks(batch, drafts)
        masked = [] if step.masks is None else step.masks.rows.tolist()
        assert masked == wanted.pop("masks")
        for name, values in wanted.items():
            found = getattr(step, name)
            assert found.tolist() == values, name
            assert found.dtype == np.int32, name
        assert step.draft_tokens.tolist() == [t for each in drafts for t in each.tokens.tolist()]
        assert step.draft_parents.tolist() == [p for each in drafts for p in each.parents.tolist()]
        assert np.diff(step.draft_start).tolist() == [draft.num_nodes for draft in drafts]
        assert (
            np.diff(step.query_start).tolist()
            == (np.diff(batch.query_start) + np.diff(step.draft_start)).tolist()
        )
        assert batch.token_ids.tolist() == before
