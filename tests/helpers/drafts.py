"""Records what a colocated head drafts while an engine serves."""

from __future__ import annotations

from outrider.drafters import head_drafters
from outrider.scheduler.types import NextDrafts
from outrider.tests.helpers.engines import complete, engine_of


def drafts_seen(monkeypatch, target, speculative, prompts, max_tokens=14, chances=None, **options):
    """Every (text, tokens, parents) that was drafted, and the engine's statistics.

    Args:
        chances: a list that takes each draft's estimates.
    """
    texts = {str(index): list(prompt) for index, prompt in enumerate(prompts)}
    seen = []
    observe = head_drafters.Colocated.observe

    def spy(self, batch, verdict):
        drafts = verdict.next_drafts or NextDrafts.empty(batch.num_seqs)
        for row, request_id in enumerate(batch.request_ids):
            texts[request_id] += verdict.tokens(row).tolist()
            span = slice(drafts.start[row], drafts.start[row + 1])
            if drafts.start[row] < drafts.start[row + 1]:
                assert drafts.lens[row] == len(texts[request_id])
                item = (list(texts[request_id]), drafts.tokens[span].tolist())
                seen.append((*item, drafts.parents[span].tolist()))
                if chances is not None:
                    chances.append(drafts.chances[span].tolist())
        observe(self, batch, verdict)

    with monkeypatch.context() as patch, engine_of(target, speculative, **options) as engine:
        patch.setattr(head_drafters.Colocated, "observe", spy)
        complete(engine, prompts, together=True, max_tokens=max_tokens)
        stats = engine.stats()
    assert all(drafter["faults"] == 0 for drafter in stats["drafters"].values())
    assert len(seen) > 10
    return seen, stats


def paths_of(trees, row):
    """By node of one of a head's drafts: the tokens from the root down."""
    paths = []
    for token, parent in zip(trees.tokens[row].tolist(), trees.parents[row].tolist()):
        assert parent < len(paths), "parents come first"
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return paths
