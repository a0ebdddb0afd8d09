"""The target's own text, against one forward per token without a cache."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import ConfigError
from outrider.training import data
from outrider.training.data import Writer, pack, prompts_of, write_all
from outrider.training.parallel import Ranks, Stop

from .conftest import EOS

WINDOW = 24


def prompts(count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 34, (4 + 3 * i,), generator=generator) for i in range(count)]


def slow(target, prompt: torch.Tensor) -> list[int]:
    ids = prompt.tolist()
    while len(ids) < WINDOW:
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids


@torch.no_grad()
def test_greedy_text_is_the_targets_own(target):
    written = Writer(target, WINDOW, 0.0, seed=0).write(prompts(), 0)
    for prompt, (ids, weights) in zip(prompts(), written, strict=True):
        assert ids == slow(target, prompt)
        assert weights == [0] * len(prompt) + [1] * (len(ids) - len(prompt))


def test_text_ends_with_the_end(target, monkeypatch):
    wanted = slow(target, prompts()[0])
    end = wanted[len(prompts()[0]) + 2]
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", [end, EOS])
    ((ids, weights),) = Writer(target, WINDOW, 0.0, seed=0).write(prompts()[:1], 0)
    assert ids == wanted[: len(ids)]
    assert ids[-1] == end
    assert end not in ids[len(prompts()[0]) : -1]
    assert len(weights) == len(ids)


def test_sampled_text_hangs_on_the_seed(target):
    first, again, other = (
        Writer(target, WINDOW, 1.0, seed=seed).write(prompts(), 0) for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other
    assert first != Writer(target, WINDOW, 1.0, seed=0).write(prompts(), 1)


def test_what_is_written_is_not_written_again(target, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BATCH", 2)
    path, writer, advanced = tmp_path / "own.jsonl", Writer(target, WINDOW, 0.0, 0), []
    whole = write_all(writer, prompts(), path, Ranks(), Stop(), advanced.append)
    assert len(whole) == 5
    assert sum(advanced) == 5
    content = path.read_bytes()
    path.unlink()
    stop = Stop()

    def advance(count):
        stop.asked = path.exists()  # after the first batch

    assert write_all(writer, prompts(), path, Ranks(), stop, advance) is None
    assert len(path.read_text().splitlines()) == 2
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:3]) + b'{"tokens": [3')
    numbers, write = [], Writer.write
    monkeypatch.setattr(Writer, "write", lambda *a: numbers.append(a[2]) or write(*a))
    again = write_all(writer, prompts(), path, Ranks(), Stop(), advanced.append)
    assert numbers == [1, 2]
    write_all(writer, prompts(), path, Ranks(), Stop(), advanced.append)
    assert numbers == [1, 2], "nothing was left to do"
    assert path.read_bytes() == content
    assert torch.equal(again.tokens, whole.tokens)
    assert torch.equal(again.weights, whole.weights)
    with pytest.raises(ConfigError, match="holds 4 texts, this run has 2"):
        write_all(writer, prompts(2), path, Ranks(), Stop(), advanced.append)


def test_prompts_end_where_answers_begin():
    text = pack([(range(100), [1.0] * 100)])
    cut = prompts_of(text, 9, 40, seed=0)
    assert {len(prompt) for prompt in cut} == {10}
    assert len({int(prompt[0]) for prompt in cut}) > 5
    assert all(torch.equal(p, torch.arange(int(p[0]), int(p[0]) + 10)) for p in cut)
    chats = pack([([5] * 6 + [6] * 3 + [7] * 4 + [8] * 2, [0.0] * 6 + [1] * 3 + [0] * 4 + [1] * 2)])
    assert {tuple(p.tolist()) for p in prompts_of(chats, 20, 40, seed=0)} == {
        (5,) * 6,
        (5,) * 6 + (6,) * 3 + (7,) * 4,
    }
    assert {len(p) for p in prompts_of(chats, 20, 8, seed=0)} == {6}  # the end, three quarters
    both = pack([(range(10), [1.0] * 10), (range(100, 130), [1.0] * 30)])
    long = sum(int(p[0]) >= 100 for p in prompts_of(both, 40, 8, seed=0))
    assert long == 30, "by length"
