"""What the tests of both EAGLE methods share: trained text, serving, equations."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from outrider.tests.helpers.drafts import drafts_seen
from outrider.tests.helpers.eagle import Reference
from outrider.training.protocol import FrozenTarget, TargetStates, Windows

PROMPTS = [[7, 3, 50, 21, 9, 4, 33, 80, 61], [5, 6], [11, 12, 13, 90, 14, 15, 16]]
WEIGHTS = (0, 1, 1, 1, 0, 0, 1, 0.5, 1, 1, 1)


def loaded(folder: str) -> FrozenTarget:
    return FrozenTarget(Path(folder), torch.device("cpu"))


def scramble(method, seed: int = 0) -> None:
    """Weights so large that every mistake of layer, position or order shows in the draft."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in method.module.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.25 * noise if weight.dim() == 2 else 1 + 0.2 * noise)


def losses_of(method, target, tokens, weights):
    windows = Windows(torch.tensor(tokens), torch.tensor(weights, dtype=torch.float32))
    return method.loss(windows, target.states(windows.tokens, method.capture), target)


def reference_of(
    target: str, folder: Path, version: int, capture=None, kind: type[Reference] = Reference
) -> Reference:
    config = json.loads((folder / "config.json").read_text())
    return kind(target, config, load_file(folder / "model.safetensors"), version, capture)


def check_serving(
    method, folder: Path, model: str, reference: Reference, monkeypatch, kind: str = "Eagle"
) -> None:
    """A chain that the engine drafts is the one that training sees at that row."""
    method.export(folder)
    section = {"decoding_type": kind, "speculative_model": str(folder), "max_draft_len": 4}
    seen, _ = drafts_seen(monkeypatch, model, section, PROMPTS, max_tokens=20)
    target, drafted = loaded(model), set()
    for text, tokens, _ in seen[:12]:
        assert tokens == reference.chain(text, len(tokens))
        drafted |= set(tokens)
        for depth in range(1, len(tokens) + 1):
            window = [*text, *tokens[:depth]]
            assert _agrees(method, target, window, depth) == 1
            window[-1] = (window[-1] + 1) % 96
            assert _agrees(method, target, window, depth) == 0
    assert len(drafted) > 8


@torch.no_grad()
def _agrees(method, target, window, depth) -> int:
    """Whether the draft of `depth` tokens that ends with the window is the window's own text."""
    tokens = torch.tensor([window])
    weights = torch.zeros(1, len(window))
    weights[0, -1] = 1
    states = target.states(tokens, method.capture)
    wanted = torch.nn.functional.one_hot(tokens.roll(-1, dims=1), 96).float()
    losses = method.loss(Windows(tokens, weights), TargetStates(states.hidden, wanted), target)
    assert losses.num_judged[depth - 1] == 1
    return int(losses.num_agreed[depth - 1])


@torch.no_grad()
def slow_losses(reference: Reference, text, weights, options, known=None):
    """Loss and counts, one row of one pass at a time: `num_passes` are learnt from and judged."""
    said = reference.model(torch.tensor([text])).logits[0].double().softmax(-1)
    best = said.argmax(-1)
    lesson = (1 - options.argmax_weight) * said
    lesson[range(len(text)), best] += options.argmax_weight
    total = scale = 0.0
    agreed, judged = [0] * options.num_passes, [0] * options.num_passes
    for index in range(options.num_passes):
        lost = counted = 0.0
        for row in range(len(text) - 2 - index):
            end = row + 2 + index  # of the token that is guessed
            hits = [
                int(reference.after(text[: row + 2], text[row + 2 : at]).argmax()) == best[at - 1]
                for at in range(row + 2, end + 1)
            ]
            logs = reference.after(text[: row + 2], text[row + 2 : end])
            kept = lesson[end - 1] * (1 if known is None else known)
            lost -= weights[end] * float((kept * logs.clamp(min=-1e9)).sum())
            counted += weights[end]
            judged[index] += weights[end] > 0
            agreed[index] += weights[end] > 0 and all(hits)
        total += options.pass_decay**index * lost / counted
        scale += options.pass_decay**index
    return total / scale, agreed, judged


def check_learning(method, fresh, target: FrozenTarget, num_passes: int) -> None:
    """A few steps of two passes lower the loss; `fresh` judges `num_passes` where not told."""
    optimizer = torch.optim.AdamW(method.module.parameters(), lr=5e-3)
    tokens = torch.randint(2, 96, (2, 20), generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    for _ in range(50):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(losses_of(method, target, tokens, [[1.0] * 20] * 2))
        optimizer.zero_grad()
        found[-1].loss.backward()
        optimizer.step()
    assert found[-1].loss < 0.7 * found[0].loss
    assert found[-1].num_agreed[0] > found[0].num_agreed[0] + 10
    assert len(found[0].num_judged) == 2
    with torch.no_grad():
        judged = losses_of(fresh, target, tokens, [[1.0] * 20] * 2)
    assert len(judged.num_judged) == num_passes
