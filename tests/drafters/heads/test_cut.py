"""Drafts that end where a head finds tokens too unlikely: against a walk over paths, and in law."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from outrider.config import EagleConfig
from outrider.drafters.heads.protocol import Cut, DraftStart, Trees, log_of_best
from outrider.drafters.heads.redrafter import merged
from outrider.drafters.heads.tree_drafting import TreeDraftingHead, best_first_tree, ranked
from outrider.scheduler.types import Draft, ints
from outrider.tests.helpers.drafts import paths_of
from outrider.tests.helpers.verification import (
    RULES,
    distance_from_target,
    emission_law,
    random_target,
)

CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 1))
SHAPES = {
    "chain": {"max_draft_len": 3},
    "fixed": {"eagle_choices": CHOICES},
    "dynamic": {
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 3,
        "max_draft_len": 3,
        "max_total_draft_tokens": 8,
    },
}


class TableHead(TreeDraftingHead):
    """The next token's logits depend on the last token alone."""

    target_ids = None

    def __init__(self, table: torch.Tensor, **section) -> None:  # [vocab, vocab]
        super().__init__(EagleConfig(speculative_model="m", **section))
        self.table = table

    def advance(self, level, token_ids, feature, positions, attend, host):
        rows = torch.eye(len(self.table))[token_ids]
        return rows, rows

    def draft_logits(self, states):  # as a `HeadHost`
        return states @ self.table

    def drafts(self, emitted: torch.Tensor, least: torch.Tensor | None = None) -> Trees:
        """Chains are greedy."""
        cut = None if least is None else Cut(least)

        def draw(read, level):
            logits = self.draft_logits(read)
            if cut is not None:
                cut.see(log_of_best(logits))
            return logits.argmax(-1)

        attend = SimpleNamespace(positions=None)
        levels = SimpleNamespace(chain=lambda width: attend, level=lambda above: attend)
        states = torch.eye(len(self.table))[emitted]
        start = DraftStart(emitted, emitted, states, states, levels, draw, draw, cut)
        trees = self.expand(start, 3, self)
        return trees if cut is None else cut.of(trees)


def walked(trees: Trees, table: torch.Tensor, emitted: torch.Tensor, least: torch.Tensor):
    """By row: the paths of whole drafts that are left, in their order."""
    probs, found = table.softmax(-1), []
    for row, root in enumerate(emitted.tolist()):
        kept = []
        for path in paths_of(whole(trees, row), 0):
            above = (root, *path)[:-1]
            if all(probs[at, token] >= least[row] for at, token in zip(above, path, strict=True)):
                kept.append(path)
        found.append(kept)
    return found


def whole(trees: Trees, row: int) -> Trees:
    """One draft, without what is behind its size, as a tree."""
    size = trees.tokens.shape[1] if trees.sizes is None else int(trees.sizes[row])
    chain = torch.arange(-1, trees.tokens.shape[1] - 1).expand_as(trees.tokens)
    parents = chain if trees.parents is None else trees.parents
    return Trees(trees.tokens[row : row + 1, :size], parents[row : row + 1, :size])


def table_of(seed: int, vocab: int) -> torch.Tensor:
    return 1.5 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))


def check(trees: Trees, cut: Trees, table, emitted, least) -> int:
    """How many nodes were cut."""
    wanted = walked(trees, table, emitted, least)
    assert [paths_of(whole(cut, row), 0) for row in range(len(emitted))] == wanted
    return sum(whole(trees, row).tokens.shape[1] - len(kept) for row, kept in enumerate(wanted))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_left_is_found_by_walking(shape):
    """Every row has its own least probability; 0 cuts nothing, 1 everything."""
    num_cut = 0
    for seed in range(5):
        head = TableHead(table_of(seed, 9), **SHAPES[shape])
        emitted, least = torch.tensor([0, 3, 5, 8, 1]), torch.tensor([0.0, 0.15, 0.3, 0.5, 1.0])
        trees, cut = head.drafts(emitted), head.drafts(emitted, least)
        num_cut += check(trees, cut, head.table, emitted, least)
        assert cut.sizes[0] == trees.tokens.shape[1] > 0 == cut.sizes[-1]
    assert num_cut > 25


def test_best_first_trees_and_beams():
    emitted, least = torch.tensor([0, 3, 5, 8]), torch.tensor([0.0, 0.15, 0.25, 0.4])
    num_cut = 0
    for seed in range(5):
        table = table_of(seed, 9)
        trees = best_first_tree(lambda _, tokens, of=table: ranked(of[tokens], 9), emitted, 3, 12)
        num_cut += check(trees, Cut(least).of(trees), table, emitted, least)
        logs, levels = table.log_softmax(-1), []
        tokens, score = emitted[:, None], torch.zeros(4, 1)
        for _ in range(3):
            scores = (logs[tokens] + score[..., None]).flatten(1)
            score, chosen = scores.topk(min(4, scores.shape[1]), dim=1)
            tokens, above = chosen % 9, chosen // 9
            levels.append((tokens, score, above))
        trees = merged(levels, 7)
        assert (trees.sizes < 7).any() or trees.tokens.shape[1] == 7
        num_cut += check(trees, Cut(least).of(trees), table, emitted, least)
    assert num_cut > 25


def test_there_is_no_value_on_the_host():
    with torch.device("meta"):
        ids, scores = torch.empty(2, 7, dtype=torch.int64), torch.empty(2, 7)
        cut = Cut(torch.empty(2)).of(Trees(ids, ids, scores=scores))
        assert cut.tokens.shape == cut.parents.shape == (2, 7)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cut_drafts_leave_the_law_alone(rule, shape):
    """What heads draft where noise is not shared is a function of the text, and so is the cut."""
    vocab, small = 3, {**SHAPES[shape]}
    if shape == "fixed":
        small = {"eagle_choices": CHOICES[:2] + CHOICES[3:5]}
    if shape == "dynamic":
        small |= {"dynamic_tree_max_topK": 2, "max_draft_len": 2, "max_total_draft_tokens": 4}
    # By the token before: sure, unsure, and between them.
    table = torch.tensor([[0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.1, 0.3, 0.6]]).log()
    head, sizes = TableHead(table, **small), set()

    def drafter(prefix):
        last = torch.tensor([prefix[-1] if prefix else 0])
        draft = whole(head.drafts(last, torch.tensor([0.5])), 0)
        sizes.add(draft.tokens.shape[1])
        return [(1.0, Draft(ints(draft.tokens[0].numpy()), ints(draft.parents[0].numpy())))]

    for seed in range(2):
        target = random_target(vocab, seed)
        law = emission_law(RULES[rule], target, drafter, length=3)
        assert distance_from_target(law, target, length=3) < 1e-12
    assert len(sizes) > 1
