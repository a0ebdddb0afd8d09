"""Best-first trees: against a heap, against every tree, and as drafts of heads."""

from __future__ import annotations

import heapq
import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from outrider.config import DFlashConfig, DSparkConfig, MedusaConfig, PEagleConfig, parse
from outrider.drafters.heads.protocol import Trees
from outrider.drafters.heads.tree_drafting import best_first_tree, ranked
from outrider.errors import ConfigError
from outrider.tests.helpers.dflash import KINDS, Reference, block_tensors, write_block
from outrider.tests.helpers.drafts import drafts_seen, paths_of
from outrider.tests.helpers.eagle import MaskReference
from outrider.tests.helpers.head_files import (
    eagle_tensors,
    medusa_tensors,
    write_eagle,
    write_medusa,
)
from outrider.tests.helpers.heads.tokens import check_plain_tokens
from outrider.tests.helpers.models import write_guessable
from outrider.workers.block_program import best_trees, most_nodes

from ...helpers.engines import complete, engine_of, plain_outputs, random_prompts

PROMPTS = [[7, 3, 50, 21, 9, 4, 33, 80, 61], [5, 6], [11, 12, 13, 90, 14, 15, 16]]


def heap_tree(after, num_levels, max_nodes):
    """Paths of tokens with their scores: the paper's algorithm, one pop after the other.

    Args:
        after: path -> log-probabilities of all tokens.
    """
    heap, popped = [], []

    def push(path, score, rank):
        logs = after(path)
        if rank < len(logs):
            order = sorted(range(len(logs)), key=lambda token: (-float(logs[token]), token))
            found = score + float(logs[order[rank]])
            heapq.heappush(heap, (-found, len(path), path, rank, order[rank], score))

    push((), 0.0, 0)
    while heap and len(popped) < max_nodes:
        negative, _, path, rank, token, above = heapq.heappop(heap)
        popped.append(((*path, token), -negative))
        push(path, above, rank + 1)
        if len(path) + 1 < num_levels:
            push((*path, token), -negative, 0)
    return dict(popped)


def chances_of(logits, table, root):
    """Log-probabilities after a path, from a sequence's [num_levels, vocab]."""

    def after(path):
        logs = logits[len(path)]
        return (logs if table is None else logs + table[(root, *path)[-1]]).log_softmax(0)

    return after


def independent(logits):  # [num_drafts, num_levels, vocab]
    return lambda level, tokens: ranked(logits[:, level : level + 1], 64)


def corrected(logits, table):
    """The correction of a level's logits hangs on the parent's token: table [vocab, vocab]."""
    return lambda level, tokens: ranked(logits[:, level, None] + table[tokens], 64)


def made(seed, num_drafts=3, num_levels=5, vocab=7, *, ties=False):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_drafts, num_levels, vocab, generator=generator) * 2
    table = torch.randn(vocab, vocab, generator=generator) * 2
    return (logits.round(), table.round()) if ties else (logits, table)


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("is_corrected", [False, True])
def test_nodes_are_the_heaps(is_corrected, max_nodes):
    """Each sequence its own tree, and its first nodes the best tree of fewer."""
    for seed in range(4):
        logits, table = made(seed)
        emitted = torch.tensor([0, 3, 5])
        children = corrected(logits, table) if is_corrected else independent(logits)
        trees = best_first_tree(children, emitted, logits.shape[1], max_nodes)
        for row in range(len(emitted)):
            after = chances_of(logits[row], table if is_corrected else None, int(emitted[row]))
            paths = paths_of(trees, row)
            for count in {1, max_nodes // 2 or 1, max_nodes}:
                assert set(paths[:count]) == set(heap_tree(after, logits.shape[1], count))


@pytest.mark.parametrize("max_nodes", [1, 5, 16, 40])
def test_a_kernels_trees_are_as_good(max_nodes):
    """Of positions that are independent; with ties, other nodes of the same scores may be taken."""
    for seed, ties in itertools.product(range(4), (False, True)):
        logits, _ = made(seed, ties=ties)
        wanted = best_first_tree(independent(logits), torch.tensor([0, 3, 5]), 5, max_nodes)
        logs, ids = (each.transpose(0, 1).contiguous() for each in ranked(logits, max_nodes))
        shape = (3, most_nodes(5, logs.shape[2], max_nodes))
        tokens, parents = (np.empty(shape, dtype=np.int32) for _ in range(2))
        best_trees(logs.numpy(), ids.numpy(), tokens, parents)
        found = Trees(torch.from_numpy(tokens), torch.from_numpy(parents))
        for row in range(3):
            paths = paths_of(found, row)
            assert len(set(paths)) == max_nodes
            after = chances_of(logits[row], None, 0)
            scores = [sum(after(path[:at])[path[at]] for at in range(len(path))) for path in paths]
            np.testing.assert_allclose(scores, wanted.scores[row], rtol=1e-5)
            if not ties:
                assert paths == paths_of(wanted, row)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_kernels_nodes_differ_whatever_the_scores_are(value):
    """As of a head whose logits are no numbers: siblings that were equal would be judged twice."""
    logs, ids = torch.full((3, 1, 4), value), torch.arange(12).view(3, 1, 4)
    tokens, parents = (np.empty((1, 40), dtype=np.int32) for _ in range(2))
    best_trees(logs.numpy(), ids.numpy(), tokens, parents)
    found = Trees(torch.from_numpy(tokens), torch.from_numpy(parents))
    assert len(set(paths_of(found, 0))) == 40


def test_no_tree_of_as_many_nodes_expects_more():
    """Every tree over three tokens and three levels, with ties and without."""
    nodes = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    for seed, ties in itertools.product(range(3), (False, True)):
        logits, table = made(seed, 1, 3, 3, ties=ties)
        for is_corrected, max_nodes in itertools.product((False, True), (2, 4)):
            children = corrected(logits, table) if is_corrected else independent(logits)
            emitted = torch.tensor([1])
            after = chances_of(logits[0], table if is_corrected else None, 1)
            chances = {
                path: float(sum(after(path[:at])[path[at]] for at in range(len(path))).exp())
                for path in nodes
            }
            trees = [
                chosen
                for chosen in itertools.combinations(nodes, max_nodes)
                if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
            ]
            best = max(sum(map(chances.get, chosen)) for chosen in trees)
            found = paths_of(best_first_tree(children, emitted, 3, max_nodes), 0)
            assert sum(map(chances.get, found)) == pytest.approx(best, abs=1e-6)


def test_there_is_no_value_on_the_host():
    """On `meta` there are none, and shapes alone decide: a small vocabulary has small trees."""
    with torch.device("meta"):
        logits, emitted = torch.empty(4, 6, 50), torch.empty(4, dtype=torch.int64)
        trees = best_first_tree(independent(logits), emitted, 6, 24)
        assert trees.tokens.shape == trees.parents.shape == (4, 24)
        trees = best_first_tree(independent(logits[:, :2, :3]), emitted, 2, 24)
        assert trees.tokens.shape == (4, 3 + 9)


def test_rounding_keeps_parents_first():
    """Certain tokens: a child is as likely as its parent, and no likelier."""
    logits = torch.full((2, 5, 9), -200.0)
    logits[:, :, 4] = 37.123456
    trees = best_first_tree(independent(logits), torch.tensor([1, 2]), 5, 5)
    assert trees.tokens.tolist() == [[4] * 5] * 2
    assert trees.parents.tolist() == [[-1, 0, 1, 2, 3]] * 2


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> str:
    return write_guessable(tmp_path_factory.mktemp("best") / "target")


@pytest.fixture(scope="session")
def sections(target, tmp_path_factory):
    """By drafter: its section with a best-first tree."""
    folder = tmp_path_factory.mktemp("heads")
    medusa = write_medusa(folder / "medusa", medusa_tensors(target, 3), "safetensors")
    config, tensors = eagle_tensors(target, 3, draft_vocab=80, config={"pard_token": 95})
    noise = torch.randn(1, tensors["fc.weight"].shape[1], generator=torch.manual_seed(0))
    tensors["mask_hidden"] = noise
    eagle = write_eagle(folder / "peagle", config, tensors)
    tree = {"shape": "tree", "max_total_draft_tokens": 12, "max_draft_len": 3}
    sections = {
        "Medusa": {"decoding_type": "Medusa", "speculative_model": medusa, **tree},
        "PEagle": {"decoding_type": "PEagle", "speculative_model": eagle, **tree},
    }
    references: dict[str, Any] = {"PEagle": MaskReference(target, config, tensors, 3, (2, 3, 3))}
    for name, kind in {"DFlash": "plain", "DFlash2": "selected", "DSpark": "markov"}.items():
        config, options = KINDS[kind]
        tensors = block_tensors(target, **options)
        path = write_block(folder / name, config, tensors)
        sections[name] = {"decoding_type": name.strip("2"), "speculative_model": path, **tree}
        views = ((True, 5), (False, None)) if kind == "plain" else None
        references[name] = Reference(target, config, tensors, 3, views=views)
    return sections, references


@pytest.mark.parametrize("name", ["PEagle", "DFlash", "DFlash2", "DSpark"])
def test_drafts_are_the_heads_best_trees(target, sections, monkeypatch, name):
    """Every request's own tree, best node first, from the head's equations written out.

    Those of DFlash2 and DSpark hang on the token above: the scores are corrected ones.
    """
    section, reference = sections[0][name], sections[1][name]
    sizes, shapes = set(), set()
    options = {"max_num_batched_tokens": 60, "max_tokens": 20}
    seen, stats = drafts_seen(monkeypatch, target, section, PROMPTS, **options)
    if name != "DFlash2":  # whose random codebooks guess wrong
        assert stats["drafters"][section["decoding_type"].lower()]["num_acc_tokens"] > 0
    for text, tokens, parents in seen:
        logs = cache(lambda path, text=text: reference.after(text, path))
        wanted = heap_tree(logs, 3, len(tokens))
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert set(paths) == set(wanted)
        scores = [wanted[path] for path in paths]
        assert scores == pytest.approx(sorted(scores, reverse=True), abs=1e-4)
        sizes.add(len(tokens))
        shapes.add(tuple(parents))
    assert max(sizes) == 12
    assert len(shapes) > 3


@pytest.mark.parametrize(
    ("kind", "at_once", "tensor_parallel_size"),
    [("Medusa", 8, 1), ("PEagle", 1, 1), ("PEagle", 8, 2), ("DFlash", 1, 1), ("DSpark", 8, 2)],
)
def test_tokens_are_those_without_a_drafter(target, sections, kind, at_once, tensor_parallel_size):
    """Greedy and sampled, with chunked prefill, preemptions and prefix hits."""
    section = sections[0][kind]
    check_plain_tokens(target, section, at_once=at_once, tensor_parallel_size=tensor_parallel_size)


@pytest.mark.parametrize("options", [{"verification": "rejection"}, {"placement": "separate"}])
def test_greedy_tokens_are_the_targets(target, sections, options):
    """Under a rule that weighs drafts, nodes are certain; so is what another worker drafts."""
    prompts = random_prompts(5, 96)
    (wanted,) = plain_outputs(target, prompts, {})
    for section in sections[0].values():
        with engine_of(target, section | options) as engine:
            assert complete(engine, prompts)[0] == wanted
            (drafter,) = engine.stats()["drafters"].values()
        assert drafter["faults"] == 0
        assert drafter["num_acc_tokens"] > 0 or section is sections[0]["DFlash2"]


@pytest.mark.parametrize(
    ("section", "fields", "named"),
    [
        (MedusaConfig, {"medusa_choices": [[0]]}, "medusa_choices"),
        (MedusaConfig, {"top_k": 3}, "top_k belongs to medusa_choices"),
        (MedusaConfig, {"max_draft_len": 5, "max_total_draft_tokens": 4}, "below the 5 tokens"),
        (MedusaConfig, {"shape": "chain", "max_total_draft_tokens": 9}, "belongs to shape 'tree'"),
        (PEagleConfig, {"eagle_choices": [[0]]}, "eagle_choices"),
        (PEagleConfig, {"use_dynamic_tree": True}, "use_dynamic_tree"),
        (PEagleConfig, {"dynamic_tree_max_topK": 3}, "dynamic_tree_max_topK"),
        (PEagleConfig, {"max_draft_len": 5, "max_total_draft_tokens": 4}, "below the 5 tokens"),
        (PEagleConfig, {"shape": "graph"}, "shape"),
        (DFlashConfig, {"max_draft_len": 5, "max_total_draft_tokens": 4}, "below the 5 tokens"),
        (DSparkConfig, {"shape": "chain", "max_total_draft_tokens": 9}, "belongs to shape 'tree'"),
    ],
)
def test_what_contradicts_the_shape_is_named(section, fields, named):
    with pytest.raises(ConfigError, match=named):
        parse(section, {"speculative_model": "m", "shape": "tree", **fields})
