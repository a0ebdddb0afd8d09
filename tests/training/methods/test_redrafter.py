"""Training of ReDrafter: its file serves, its loss falls, its counts are what serving accepts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from outrider.config import ReDrafterConfig, parse
from outrider.drafters import head_drafters
from outrider.drafters.heads.redrafter import load_redrafter
from outrider.tests.helpers.redrafter import Reference, write_target
from outrider.training.methods.redrafter import ReDrafterMethod
from outrider.training.options import ReDrafterOptions
from outrider.training.protocol import FrozenTarget, Windows

from ...helpers.engines import complete, engine_of

SHAPES = [
    {},
    {"rnn": True, "num_draft_layers": 2},
    {"exit_dim": 96},
    {"exit_dim": 40, "rnn": True},
    {"init_from_target": False},
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    return write_target(tmp_path_factory.mktemp("redrafter-train") / "target")


@pytest.fixture(scope="session")
def target(folder) -> FrozenTarget:
    return FrozenTarget(Path(folder), torch.device("cpu"))


def greedy(target: FrozenTarget, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """The target's own continuation of every prompt."""
    tokens = prompts
    while tokens.shape[1] < length:
        with torch.no_grad():
            tokens = torch.cat([tokens, target.model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens


def scrambled(method) -> None:
    """Random weights everywhere, so that nothing agrees by its first weights alone."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in method.module.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)


@pytest.mark.parametrize("options", SHAPES)
def test_what_is_exported_says_the_same(target, tmp_path, options):
    """Read back by the head's own loader and by the equations."""
    torch.manual_seed(0)
    method = ReDrafterMethod(ReDrafterOptions(**options), target)
    scrambled(method)
    method.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "recurrent_drafting_drafter"
    assert config["exit_dim"] == options.get("exit_dim", 128)
    assert config["num_draft_layers"] == options.get("num_draft_layers", 1)
    assert config["rnn"] == options.get("rnn", False)
    section = {"decoding_type": "ReDrafter", "speculative_model": str(tmp_path)}
    head = load_redrafter(parse(ReDrafterConfig, section), target.facts)
    reference = Reference(str(target.path), load_file(tmp_path / "model.safetensors"))
    context = torch.randn(64)
    state = wanted_state = torch.zeros(64)
    with torch.no_grad():
        for token in (5, 17, 40):
            embedded = target.embed(torch.tensor(token))
            state, theirs = method.module.recur(embedded, state), head.module.recur(embedded, state)
            torch.testing.assert_close(state, theirs)
            torch.testing.assert_close(
                method.module(context, state), head.module(context, theirs), atol=1e-4, rtol=1e-4
            )
            wanted_state, wanted = reference.step(context, wanted_state, token)
            torch.testing.assert_close(state, wanted_state)
            torch.testing.assert_close(head.module(context, state), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"rnn": True}, {"exit_dim": 96}])
def test_the_output_layer_begins_as_the_targets(target, options):
    """Of the first position: whatever s is, the head says what the target said of c."""
    method = ReDrafterMethod(ReDrafterOptions(**options), target)
    tokens = torch.randint(2, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    states = target.states(tokens, method.capture)
    context = states.hidden[target.facts.num_layers]
    said = method.module(context, torch.randn_like(context))
    torch.testing.assert_close(said, states.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"num_positions": 3}, {"rnn": True, "position_decay": 0.7}])
def test_the_loss_is_that_of_the_equations(target, tmp_path, options):
    """Row by row, position by position, with tokens that do not count."""
    torch.manual_seed(0)
    parsed = ReDrafterOptions(argmax_weight=0.25, **options)
    method = ReDrafterMethod(parsed, target)
    scrambled(method)
    method.export(tmp_path)
    reference = Reference(str(target.path), load_file(tmp_path / "model.safetensors"))
    tokens = torch.randint(2, 96, (2, 10), generator=torch.Generator().manual_seed(1))
    weights = torch.ones(2, 10)
    weights[0, :5], weights[1, 7:] = 0.0, 0.5
    states = target.states(tokens, method.capture)
    sums, counts = np.zeros(parsed.num_positions), np.zeros(parsed.num_positions)
    agreed, judged = np.zeros(parsed.num_positions), np.zeros(parsed.num_positions)
    for window in range(2):
        for row in range(8):
            context, state = states.hidden[2][window, row], torch.zeros(64)
            agrees = True
            for index in range(min(parsed.num_positions, 8 - row)):
                at = row + 1 + index
                state, logits = reference.step(context, state, int(tokens[window, at]))
                probs = states.logits[window, at].softmax(0)
                best = int(probs.argmax())
                lesson = 0.75 * probs
                lesson[best] += 0.25
                weight = float(weights[window, at + 1])
                sums[index] -= weight * float(lesson @ logits.log_softmax(0))
                counts[index] += weight
                agrees = agrees and int(logits.argmax()) == best
                judged[index] += weight > 0
                agreed[index] += agrees and weight > 0
    shares = parsed.position_decay ** np.arange(parsed.num_positions)
    losses = method.loss(Windows(tokens, weights), states, target)
    wanted = (sums / counts * shares).sum() / shares.sum()
    assert losses.loss.item() == pytest.approx(wanted, rel=1e-4)
    assert losses.num_agreed.tolist() == agreed.tolist()
    assert losses.num_judged.tolist() == judged.tolist()


def test_the_loss_falls_and_counts_are_what_serving_accepts(target, folder, tmp_path, monkeypatch):
    """A few steps on the target's own text; then its chains, drafted by an engine."""
    torch.manual_seed(0)
    method = ReDrafterMethod(ReDrafterOptions(rnn=True, max_draft_len=4), target)
    prompts = torch.randint(2, 96, (24, 4), generator=torch.Generator().manual_seed(2))
    learnt = Windows(greedy(target, prompts, 24), torch.ones(24, 24))
    states = target.states(learnt.tokens, method.capture)
    optimizer = torch.optim.AdamW(method.module.parameters(), lr=5e-3)
    losses = []
    for _ in range(12):
        found = method.loss(learnt, states, target)
        found.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.loss.item())
    assert losses[-1] < 0.8 * losses[0]

    text = greedy(target, torch.tensor([[5]]), 40)[0]
    window = Windows(text[None], torch.ones(1, 40))
    with torch.no_grad():
        counts = method.loss(window, target.states(window.tokens, method.capture), target)
    method.export(tmp_path)
    known, agreed = text.tolist(), np.zeros(5, dtype=int)
    firsts = {}
    observe = head_drafters.Colocated.observe

    def spy(self, batch, verdict):
        drafts = verdict.next_drafts
        for row, request_id in enumerate(batch.request_ids):
            if drafts.start[row] < drafts.start[row + 1]:
                chain = drafts.tokens[drafts.start[row] : drafts.start[row + 1]].tolist()
                firsts.setdefault(request_id, chain)
        observe(self, batch, verdict)

    monkeypatch.setattr(head_drafters.Colocated, "observe", spy)
    prefixes = [known[:length] for length in range(1, 39)]
    speculative = {
        "decoding_type": "ReDrafter",
        "speculative_model": str(tmp_path),
        "redrafter_num_beams": 1,
    }
    with engine_of(folder, speculative) as engine:
        complete(engine, prefixes, max_tokens=8)
    for index, prefix in enumerate(prefixes):
        for depth, token in enumerate(firsts[str(index)]):
            at = len(prefix) + 1 + depth
            if at >= len(known) or known[at] != token:
                break
            agreed[depth] += 1
    assert agreed[0] > 10
    assert counts.num_agreed.tolist() == agreed.tolist()
    assert counts.num_judged.tolist() == [38, 37, 36, 35, 34]


def test_a_wrong_option_is_named():
    for fields in ({"num_position": 3}, {"num_positions": 0}, {"argmax_weight": 2.0}):
        with pytest.raises(ValidationError, match=next(iter(fields))):
            ReDrafterOptions(**fields)
