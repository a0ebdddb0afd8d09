"""A head in the worker: what it may use of a sharded target, and what it is told of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.config import EagleConfig, MedusaConfig
from outrider.drafters.heads.protocol import frontier
from outrider.drafters.heads.tree_drafting import next_tokens
from outrider.scheduler.budget import DraftBudget
from outrider.scheduler.types import (
    Draft,
    NextDrafts,
    SeatSettings,
    SpeculationOptions,
    Verdict,
    ints,
)
from outrider.tests.helpers.head_files import medusa_tensors, write_medusa
from outrider.tests.helpers.heads.remote import (
    assert_same_drafts,
    plain,
    runner,
    separate,
    write_shapes,
)
from outrider.tests.helpers.models import write_guessable
from outrider.workers import head as head_module
from outrider.workers.head import HeadService
from outrider.workers.head_layers import committed
from outrider.workers.model.target import load_model
from outrider.workers.transport import wire


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def target(request, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=95,  # not divisible
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=request.param,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """By shape: a target and the section of a head."""
    folder = tmp_path_factory.mktemp("shapes")
    return write_shapes(write_guessable(folder / "target"), folder)


def test_ends_of_a_sharded_target_are_whole_on_rank_0(target, tmp_path, run_ranks):
    heads = write_medusa(tmp_path, medusa_tensors(target, 2), "safetensors")
    reference = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = MedusaConfig(speculative_model=heads, max_draft_len=2)

    def work(collective):
        model = load_model(
            Path(target), dtype=torch.float32, device=torch.device("cpu"), collective=collective
        )
        if collective.rank:
            return None
        service = HeadService(config, model, Path(target))  # no other rank takes part
        states = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            return service.embed(torch.tensor([0, 50, 94])), service._output(states), states

    for size in (1, 2):
        embedded, logits, states = run_ranks(size, work)[0]
        with torch.no_grad():
            wanted = reference.model.embed_tokens(torch.tensor([0, 50, 94]))
            assert torch.equal(embedded, wanted)
            assert torch.allclose(logits, reference.lm_head(states), atol=1e-5)


@pytest.fixture
def judged(part, build_step):
    """Two sequences, a tree below the first: what was emitted, and where."""
    draft = Draft(ints([20, 21, 22, 23]), ints([-1, -1, 1, 2]))
    parts = [
        part([10, 11], 3, [4, 2, 7], draft=draft),
        part([30], 5, [1, 3]),
    ]
    step = build_step(parts, 4)
    verdict = Verdict(
        0,
        emitted=ints([21, 22, 40, 41]),
        emitted_start=ints([0, 3, 4]),
        path=ints([1, 2]),
        path_start=ints([0, 2, 2]),
    )
    return step, verdict


def test_every_computed_token_knows_the_next(judged):
    step, verdict = judged
    ids = next_tokens(step, verdict)
    # 10 11 | 20 21 22 23: the accepted 21 and 22 are rows 3 and 4
    assert ids[[0, 1, 3, 4]].tolist() == [11, 21, 22, 40]
    assert ids[6] == 41


def test_a_partial_chunk_is_told_its_next_token(judged):
    step, verdict = judged
    step = replace(step, samples=np.array([True, False]), next_tokens=ints([-1, 77]))
    verdict = replace(verdict, emitted=ints([21, 22, 40]), emitted_start=ints([0, 3, 3]))
    assert next_tokens(step, verdict)[6] == 77


def test_where_a_draft_goes_on(judged):
    step, verdict = judged
    ends = frontier(step, verdict)
    assert ends.seqs.tolist() == [0]  # the second may not draft: it had no room for nodes
    assert ends.rows.tolist() == [4]
    assert ends.lens.tolist() == [3 + 2 + 2 + 1]
    slots, known = committed(step, verdict, ends, block_size=4, room=2)
    assert known.tolist() == [7]
    # positions 0-4 by the table, then nodes 1 and 2 where they are: indices 6 and 7
    assert slots[0, :7].tolist() == [16, 17, 18, 19, 8, 10, 11]
    assert slots.shape == (1, 9)


def test_drafts_and_sections_cross_processes(judged):
    import pickle

    _, verdict = judged
    drafts = NextDrafts(ints([1, 2]), ints([-1, 0]), ints([0, 2, 2]), ints([8, 0]), 0.5)
    back = wire.decode(wire.encode(replace(verdict, next_drafts=drafts)))
    assert back.next_drafts.tokens.tolist() == [1, 2]
    assert back.next_drafts.lens.tolist() == [8, 0]
    for section in (
        EagleConfig(speculative_model="m", use_dynamic_tree=True),
        MedusaConfig(speculative_model="m", medusa_choices=[[0, 1], [1]]),
    ):
        again = pickle.loads(pickle.dumps(section))
        assert again == section
        assert again.max_nodes == section.max_nodes


@pytest.mark.parametrize("place", ["colocated", "separate"])
@pytest.mark.parametrize("shape", ["eagle1-tree", "eagle3-chain", "mtp"])
def test_rows_that_are_put_off_change_no_draft(shapes, monkeypatch, shape, place):
    """Grants come and go: what is drafted then is what it would have been without a pause."""
    target, section = shapes[shape]
    section = separate(section) if place == "separate" else section
    wishes, put_off = DraftBudget.wishes, []
    monkeypatch.setattr(
        DraftBudget,
        "wishes",
        lambda self, *given: wishes(self, *given) if given[0][0].tokens.size % 9 < 3 else {},
    )
    follows = head_module.joined

    def spy(steps):
        put_off.append(len(steps) - 1)
        return follows(steps)

    monkeypatch.setattr(head_module, "joined", spy)
    run = runner(monkeypatch)
    seen = run(target, section)
    assert max(put_off) > 1, put_off
    assert sum(put_off) > 5
    put_off.clear()
    monkeypatch.setattr(head_module, "_MOST_PUT_OFF", 0)
    assert_same_drafts(seen, run(target, section), least_share=0.5)  # grants follow the texts
    assert not any(put_off)
    assert seen.outputs == plain(target)


@pytest.mark.parametrize("place", ["colocated", "separate"])
@pytest.mark.parametrize(
    ("shape", "rule", "temperature"),
    [
        ("eagle3-chain", "coupled", 0.9),
        ("eagle3-dynamic", "coupled", 0.0),
        ("eagle1-tree", "rejection", 0.0),
        ("medusa-tree", "coupled", 0.9),
        ("redrafter", "block", 0.0),
        ("mtp", "coupled", 0.9),
        ("dspark", "coupled", 0.0),
    ],
)
def test_drafts_end_where_a_head_is_unsure(shapes, monkeypatch, shape, rule, temperature, place):
    """The first requests have wishes of their own, the others the section's."""
    target, section = shapes[shape]
    section = {**section, "verification": rule}
    section = separate(section) if place == "separate" else section
    of = SeatSettings.of.__func__
    wishes = {100: 1.0, 101: 0.0}

    def wishing(cls, request):
        wish = SpeculationOptions(min_prob=wishes.get(request.seed))
        return of(cls, replace(request, speculation=wish))

    run, sampling = runner(monkeypatch), {"temperature": temperature}
    room = {"max_num_batched_tokens": 256, "num_kv_blocks": 128}  # as much whatever others draft
    whole = run(target, section, sampling=sampling, **room)
    with monkeypatch.context() as patch:
        patch.setattr(SeatSettings, "of", classmethod(wishing))
        cut = run(target, {**section, "p_min": 0.2}, sampling=sampling, **room)
    assert cut.outputs == whole.outputs == plain(target, **sampling)
    num_shorter = 0
    for key, draft in cut.drafts.items():
        paths, wanted = _paths(*draft), _paths(*whole.drafts.get(key, draft))
        if shape != "redrafter":  # a shorter search, which other beams survive
            assert paths <= wanted
        assert key[0] != "0"
        num_shorter += key[0] != "1" and len(paths) < len(wanted)
    assert num_shorter + len(whole.drafts) - len(cut.drafts) > 20
    assert any(key[0] == "1" for key in cut.drafts)


def _paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)
