"""Recurrences over lines and trees, against a state that every row computes from its whole path."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.scheduler.types import ints, starts_of
from outrider.workers.ops.recurrent import Recurrence, convolve, recur, recur_by_chunks
from outrider.workers.states import Lines, StateShape

SHAPE = StateShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, kernel=4)
LENGTHS = [1, 70, 3, 130]  # of lines
PARENTS = [[], [-1, 0, 1], [-1, -1, 0, 1, 1, 4], []]
SOURCES = [2, -1, 5, 7]
SAVES = [(3, 70, 0), (1, 5, 1), (1, 64, 8)]  # sequence, length, state
FIRST_SEAT = 2  # of states


def random_lines() -> Lines:
    rng = np.random.default_rng(0)
    counts = [length + len(nodes) for length, nodes in zip(LENGTHS, PARENTS)]
    saves, lens = np.full((4, 2), -1, np.int32), np.zeros((4, 2), np.int32)
    for seq, length, state in SAVES:
        column = int((saves[seq] >= 0).sum())
        saves[seq, column], lens[seq, column] = state, length
    return Lines(
        order=ints(rng.permutation(sum(counts))),
        starts=starts_of(counts),
        num_line=ints(LENGTHS),
        parents=ints([parent for nodes in PARENTS for parent in nodes]),
        node_starts=starts_of([len(nodes) for nodes in PARENTS]),
        seats=ints([2, 3, 4, 6]),
        sources=ints(SOURCES),
        save_lens=lens,
        saves=saves,
    )


def one_token(state, row, rates, head, *, is_delta):
    """The state [key_dim, value_dim] behind a row, and what its query reads; in float64."""
    dim, group = SHAPE.key_dim, SHAPE.num_value_heads // SHAPE.num_key_heads
    query, key = (row[base + head // group * dim :][:dim] for base in (0, 2 * dim))
    value = row[4 * dim + head * SHAPE.value_dim :][: SHAPE.value_dim]
    if is_delta:
        query, key = (each / math.sqrt(each @ each + 1e-6) for each in (query, key))
        query = query / math.sqrt(dim)
    state = state * math.exp(rates[0, head])
    update = (value - is_delta * (key @ state)) * rates[1, head]
    state = state + key[:, None] * update
    return state, query @ state


def expected(inputs, rates, matrices, lines, *, is_delta):
    out = np.zeros((len(inputs), SHAPE.num_value_heads, SHAPE.value_dim))
    states = matrices.copy()
    for seq, length in enumerate(LENGTHS):
        for head in range(SHAPE.num_value_heads):
            source = SOURCES[seq]
            state = matrices[source, head] if source >= 0 else np.zeros_like(matrices[0, head])
            rows = lines.order[lines.starts[seq] : lines.starts[seq + 1]]
            for place, row in enumerate(rows[:length]):
                state, out[row, head] = one_token(
                    state, inputs[row], rates[row], head, is_delta=is_delta
                )
                for other, saved, target in SAVES:
                    if other == seq and saved == place + 1:
                        states[target, head] = state
            states[lines.seats[seq], head] = state
            behind = []
            for row, parent in zip(rows[length:], PARENTS[seq]):
                before = state if parent < 0 else behind[parent]
                now, out[row, head] = one_token(
                    before, inputs[row], rates[row], head, is_delta=is_delta
                )
                behind.append(now)
    return out, states


@pytest.mark.parametrize("implementation", [recur, recur_by_chunks])
@pytest.mark.parametrize("is_delta", [True, False])
def test_lines_trees_and_checkpoints(implementation, is_delta):
    torch.manual_seed(1)
    lines = random_lines()
    num_rows = int(lines.starts[-1])
    inputs = torch.randn(num_rows, SHAPE.conv_dim)
    rates = torch.stack([-torch.rand(num_rows, 4), torch.rand(num_rows, 4)], dim=1)
    matrices = torch.randn(9, 4, SHAPE.key_dim, SHAPE.value_dim)
    wanted, states = expected(
        inputs.double().numpy(), rates.double().numpy(), matrices.double().numpy(), lines,
        is_delta=is_delta,
    )  # fmt: skip
    found = implementation(inputs, rates, matrices, lines, Recurrence(SHAPE, is_delta))
    torch.testing.assert_close(found, torch.from_numpy(wanted).float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(matrices, torch.from_numpy(states).float(), rtol=1e-4, atol=1e-4)


def test_the_scan_has_the_same_bits_however_a_line_is_cut():
    torch.manual_seed(2)
    shape, rule = SHAPE, Recurrence(SHAPE)
    inputs = torch.randn(90, shape.conv_dim)
    rates = torch.stack([-torch.rand(90, 4), torch.rand(90, 4)], dim=1)
    none = np.full((1, 2), -1, np.int32)

    def run(cuts: list[int]):
        matrices, out = torch.zeros(1, 4, shape.key_dim, shape.value_dim), []
        for begin, end in zip([0, *cuts], [*cuts, 90]):
            size = end - begin
            lines = Lines(
                ints(np.arange(size)), ints([0, size]), ints([size]), ints([]), ints([0, 0]),
                ints([0]), ints([0 if begin else -1]), np.zeros_like(none), none,
            )  # fmt: skip
            out.append(recur(inputs[begin:end], rates[begin:end], matrices, lines, rule))
        return torch.cat(out), matrices

    whole, cut = run([]), run([1, 2, 17, 64])
    assert torch.equal(whole[0], cut[0])
    assert torch.equal(whole[1], cut[1])


def test_convolution_follows_the_path_to_each_row():
    torch.manual_seed(3)
    buffer, weight, bias = torch.randn(7, 5), torch.randn(3, 5), torch.randn(5)
    history = torch.tensor([[0, 1, 2], [1, 2, 5], [1, 2, 6]])
    found = convolve(buffer, history, weight, bias)
    for row, places in enumerate(history.tolist()):
        wanted = sum(buffer[place] * weight[step] for step, place in enumerate(places)) + bias
        torch.testing.assert_close(found[row], wanted)
