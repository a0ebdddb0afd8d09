"""PARD: every row behind masks against a forward of its own, what is dropped, files."""

from __future__ import annotations

import json

import pytest
import torch

from outrider.config import PARDConfig
from outrider.drafters.vocabulary import mask_token
from outrider.errors import ConfigError
from outrider.training.methods.draft import MaskRows, PARDMethod
from outrider.training.options import PARDOptions
from outrider.training.protocol import Windows

from ..conftest import VOCAB_SIZE

MASK = 39


def made(target, **options):
    torch.manual_seed(1)
    method = PARDMethod(PARDOptions(mask_token_id=MASK, **options), target)
    with torch.no_grad():
        for weight in method.module.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return method


@torch.no_grad()
def test_loss_and_counts(target):
    method = made(target, num_depths=3, max_draft_len=4)
    torch.manual_seed(2)
    given = Windows(
        torch.randint(0, VOCAB_SIZE - 1, (2, 9)),
        torch.tensor([[1.0] * 9, [0, 0, 1, 1, 0.5, 1, 0, 1, 1]]),
    )
    states = target.states(given.tokens, method.capture)
    found = method.loss(given, states, target)
    said = states.logits.double().softmax(-1)
    means, agreed, judged = [], [0] * 4, [0] * 4
    so_far = torch.ones(2, 9, dtype=torch.bool)
    for depth in range(4):
        total, weight = 0.0, 0.0
        for window in range(2):
            for anchor in range(8 - depth):
                text = [*given.tokens[window, : anchor + 1].tolist(), *[MASK] * depth]
                row = method.module(input_ids=torch.tensor([text])).logits[0, -1].double()
                counts = float(given.weights[window, anchor + depth + 1])
                lesson = 0.5 * said[window, anchor + depth]
                best = int(said[window, anchor + depth].argmax())
                lesson[best] += 0.5
                total -= counts * float(lesson @ row.log_softmax(-1))
                weight += counts
                so_far[window, anchor] &= int(row.argmax()) == best
                if counts > 0:
                    judged[depth] += 1
                    agreed[depth] += int(so_far[window, anchor])
        means.append(total / weight)
    assert float(found.loss) == pytest.approx(sum(means[:3]) / 3, rel=1e-4)
    assert found.num_agreed.tolist() == agreed
    assert found.num_judged.tolist() == judged


def test_deeper_rows_are_dropped_with_those_that_they_need():
    torch.manual_seed(0)
    rows = MaskRows.of(100, 8, 0.7, 0.2)
    by_depth = [set(part.tolist()) for part in rows.anchors.split(rows.counts)]
    assert by_depth[0] == set(range(100))
    for depth in range(1, 8):
        assert all(anchor + depth + 1 < 100 for anchor in by_depth[depth])
        assert by_depth[depth] <= by_depth[depth - 1]
        wanted = 100 * max(0.7**depth, 0.2)
        assert wanted - depth - 2 <= len(by_depth[depth]) <= wanted + 1
    again = MaskRows.of(100, 8, 0.7, 0.2)
    assert not torch.equal(rows.anchors, again.anchors[: len(rows.anchors)])


def test_it_learns_what_is_behind_masks(target):
    method = made(target, num_depths=4, max_draft_len=4)
    torch.manual_seed(5)
    tokens = torch.randint(0, VOCAB_SIZE - 1, (4, 16))
    given, states = Windows(tokens, torch.ones(4, 16)), target.states(tokens, ())
    optimizer = torch.optim.AdamW(method.module.parameters(), lr=3e-3)
    with torch.no_grad():
        before = method.loss(given, states, target)
    for _ in range(150):
        optimizer.zero_grad()
        method.loss(given, states, target).loss.backward()
        optimizer.step()
    with torch.no_grad():
        after = method.loss(given, states, target)
    assert float(after.loss) < 0.6 * float(before.loss)
    assert int(after.num_agreed[2]) > 3 * int(before.num_agreed[2]) + 5


def test_the_mask_is_a_token_that_the_text_lacks(target, tmp_path):
    counts = torch.ones(VOCAB_SIZE, dtype=torch.int64)
    counts[[5, 30]] = 0
    method = PARDMethod(PARDOptions(), target)
    method.prepare(counts)
    method.export(tmp_path / "first")
    assert json.loads((tmp_path / "first" / "config.json").read_text())["pard_token"] == 30
    section = PARDConfig(speculative_model=str(tmp_path / "first"))
    assert mask_token(section, VOCAB_SIZE) == 30
    further = PARDMethod(PARDOptions(init=tmp_path / "first"), target)
    further.prepare(counts * 0)
    further.export(tmp_path / "second")
    assert json.loads((tmp_path / "second" / "config.json").read_text())["pard_token"] == 30
    with pytest.raises(ConfigError, match=f"mask_token_id: 40 exceeds the target's {VOCAB_SIZE}"):
        PARDMethod(PARDOptions(mask_token_id=VOCAB_SIZE), target)
