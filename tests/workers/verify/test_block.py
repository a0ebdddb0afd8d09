"""Block verification: exact over many rounds, never behind rejection, and fresh noise per round."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from outrider.scheduler import tree
from outrider.scheduler.types import Bias, Draft, DraftProbs, ints
from outrider.tests.helpers.verification import (
    assert_fits,
    block_outcomes,
    coupled_outcomes,
    distance_from_target,
    emission_law,
    fixed_drafter,
    make_step,
    random_target,
    rejection_outcomes,
    sampled_drafter,
    sampling_rows,
)
from outrider.workers.verify import (
    DrawSettings,
    draw_siblings,
    make_rule,
    noise,
    rejection,
    verify,
)
from outrider.workers.verify.rules import rows_of

CHAIN = [-1, 0, 1]


def expected(outcomes, target, drafter, prefix=()) -> float:
    """The mean number of accepted tokens of one round."""
    return sum(
        share * chance * (len(emitted) - 1)
        for share, draft in drafter(prefix)
        for emitted, chance in outcomes(target, prefix, draft).items()
    )


def independent(*probs: float):
    """A model whose tokens do not depend on what came before."""
    return lambda prefix: np.array(probs)


def full_drafter(source, length: int):
    """Chains drawn from all of `source`, not cut to its likeliest tokens."""

    def drafts(prefix):
        vocab = len(source(()))
        for tokens in itertools.product(range(vocab), repeat=length):
            rows = [source((*prefix, *tokens[:at])) for at in range(length)]
            ids = ints(np.tile(np.arange(vocab), (length, 1)))
            probs = DraftProbs(ids, np.asarray(rows, dtype=np.float32))
            chance = float(np.prod([row[token] for row, token in zip(rows, tokens)]))
            yield chance, tree.chain(tokens, "full", probs)

    return lambda prefix: list(drafts(prefix))


@pytest.mark.parametrize(
    ("vocab", "parents"), [(4, [-1]), (4, CHAIN), (3, []), (3, [-1, -1, 0])], ids=str
)
def test_deterministic_drafts_leave_the_law_alone(vocab, parents):
    for seed in range(3):
        target = random_target(vocab, seed)
        law = emission_law(block_outcomes, target, fixed_drafter(vocab, parents, seed), length=4)
        assert distance_from_target(law, target, length=4) < 1e-12


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("vocab", "parents", "fixed"),
    [(2, CHAIN, ()), (3, CHAIN, ()), (4, [-1, 0], ()), (3, CHAIN, (1,)), (3, [-1, -1, 0], ())],
    ids=str,
)
def test_sampled_drafts_leave_the_law_alone(vocab, parents, fixed, seed):
    """Four tokens of chains of three: rounds follow upon partial acceptance."""
    target, source = random_target(vocab, seed), random_target(vocab, seed + 50)
    drafter = sampled_drafter(vocab, parents, source, fixed)
    law = emission_law(block_outcomes, target, drafter, length=4)
    assert distance_from_target(law, target, length=4) < 3e-7  # the drafts' float32


def test_chains_that_end_where_they_please_leave_the_law_alone():
    """A drafter may stop upon what it has drawn; it may not draw on and take it back."""
    target, source = random_target(3, 5), random_target(3, 6)

    def stopping(prefix):
        short: dict[bytes, tuple[float, Draft]] = {}
        for chance, draft in full_drafter(source, 3)(prefix):
            length = 1 if draft.tokens[0] == 0 else 3
            cut = tree.truncate(draft, length)
            so_far = short.get(cut.tokens.tobytes(), (0.0, cut))[0]
            short[cut.tokens.tobytes()] = so_far + chance, cut
        return list(short.values())

    law = emission_law(block_outcomes, target, stopping, length=4)
    assert distance_from_target(law, target, length=4) < 3e-7


def test_never_fewer_tokens_than_rejection():
    gains = []
    for seed in range(15):
        target, source = random_target(3, seed), random_target(3, seed + 70)
        drafter = full_drafter(source, 1 + seed % 3)
        gains.append(
            expected(block_outcomes, target, drafter)
            - expected(rejection_outcomes, target, drafter)
        )
    assert min(gains) > -1e-7
    assert np.mean(np.array(gains) > 0.01) > 0.3


def test_the_papers_example():
    target, drafter = independent(1 / 3, 2 / 3), full_drafter(independent(2 / 3, 1 / 3), 2)
    assert expected(rejection_outcomes, target, drafter) == pytest.approx(10 / 9)
    assert expected(block_outcomes, target, drafter) == pytest.approx(11 / 9)


# -- through `verify`, with the noise that it really uses

VOCAB, LENGTH = 3, 4
BIAS, HEAT = np.float32([0.4, 0.0, -0.3]), 0.9


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the target's and of the drafter's next token by the last one; they disagree."""
    rng = np.random.default_rng(22)
    target, source = torch.from_numpy(rng.standard_normal((2, VOCAB, VOCAB), dtype=np.float32))
    return target, source


def emitted_by_rounds(num_seqs: int, salted: bool = True) -> np.ndarray:
    """The first tokens of many requests [num_seqs, LENGTH]: drafted and verified round by round."""
    target, source = tables()
    known = [[0] for _ in range(num_seqs)]
    while waiting := [seq for seq in range(num_seqs) if len(known[seq]) <= LENGTH]:
        bias = tuple(Bias(row, ints(range(VOCAB)), BIAS) for row in range(len(waiting)))
        sampling = sampling_rows(len(waiting), temperature=HEAT, seeds=waiting, biases=bias)
        settings = DrawSettings.of(sampling, ints(range(len(waiting))))
        first = ints([len(known[seq]) for seq in waiting])
        last = torch.tensor([known[seq][-1] for seq in waiting])
        tokens, levels = [last], []
        for level in range(3):
            siblings, ids, probs = draw_siblings(
                source[tokens[-1].long()],
                first + level,
                settings,
                VOCAB,
                rounds=first if salted else None,
            )
            tokens.append(siblings[:, 0])
            levels.append((tokens[-1], ids, probs))
        drawn, ids, probs = (torch.stack(part, dim=1).numpy() for part in zip(*levels))
        drafts = [
            tree.chain(drawn[row], "test", DraftProbs(ids[row], probs[row]))
            for row in range(len(waiting))
        ]
        logits = target[torch.stack(tokens, dim=1).long().flatten()]
        result = verify(make_rule("block"), make_step(drafts, sampling, first.tolist()), logits)
        for row, seq in enumerate(waiting):
            known[seq] += result.tokens(row).tolist()
    return np.array([tokens[1 : LENGTH + 1] for tokens in known])


def check_law(emitted: np.ndarray) -> None:
    target = ((tables()[0] + torch.from_numpy(BIAS)).double() / HEAT).softmax(1).numpy()
    law = np.zeros([VOCAB] * LENGTH)
    for tokens in np.ndindex(*law.shape):
        path = (0, *tokens)
        law[tokens] = np.prod([target[path[at], path[at + 1]] for at in range(LENGTH)])
    counts = np.bincount(np.ravel_multi_index(tuple(emitted.T), law.shape), minlength=law.size)
    assert_fits(counts, law.ravel())


def test_rounds_together_follow_the_target():
    check_law(emitted_by_rounds(6000))


def test_noise_by_position_alone_would_not():
    with pytest.raises(AssertionError):
        check_law(emitted_by_rounds(6000, salted=False))


def test_a_round_has_its_noise_again_after_a_replay_and_another_has_not():
    _, source = tables()
    sampling = sampling_rows(50, temperature=1.0, seeds=np.arange(50))
    settings = DrawSettings.of(sampling, ints(range(50)))
    logits, at = source[torch.zeros(50, dtype=torch.long)], ints(np.full(50, 9))

    def drawn(rounds: int) -> list[int]:
        args = (logits, at, settings, VOCAB, 1, ints(np.full(50, rounds)))
        return draw_siblings(*args)[0].tolist()

    assert drawn(8) == drawn(8) != drawn(9)
    by_position = draw_siblings(logits, at, settings, VOCAB)[0].tolist()
    assert by_position not in (drawn(8), drawn(9))


def test_a_mixed_batch():
    """Greedy, undrafted and branching sequences are as under the other rules; chains are not."""
    rng = np.random.default_rng(3)
    source = torch.from_numpy(rng.standard_normal((1, 40), dtype=np.float32))
    settings = DrawSettings.of(sampling_rows(1, temperature=0.8), ints([0]))
    tokens, ids, probs = draw_siblings(source, ints([1]), settings, 8, 2)
    shipped = DraftProbs(np.tile(ids.numpy(), (3, 1)), np.tile(probs.numpy(), (3, 1)))
    pair = tokens[0].tolist()
    drafts = [
        tree.chain([*pair, 5], "greedy", shipped),
        tree.EMPTY,
        Draft(ints([*pair, pair[0]]), ints([-1, -1, 0]), shipped),
        tree.chain([*pair, 5], "chain", shipped),
        Draft(ints([pair[0], 7, 8]), ints([-1, 0, 0]), None, num_window=1),
    ]
    seeds = np.arange(5)
    same: dict[str, int] = {"rejection": 0, "coupled": 0}
    for trial in range(40):
        sampling = sampling_rows(
            5, temperature=[0, 0.8, 0.8, 0.8, 0.8], seeds=seeds + 5 * trial, num_logprobs=2
        )
        logits = torch.from_numpy(rng.standard_normal((17, 40), dtype=np.float32))
        logits[0, pair[0]] = logits[1, pair[1]] = 5.0
        step = make_step(drafts, sampling)
        found = {
            rule: verify(make_rule(rule), step, logits)
            for rule in ("block", "rejection", "coupled")
        }
        ours = found["block"]
        assert ours.nodes(0).tolist()[:2] == [0, 1]
        assert ours.tokens(0).tolist() == found["coupled"].tokens(0).tolist()
        assert ours.tokens(1).tolist() == found["coupled"].tokens(1).tolist()
        assert ours.tokens(2).tolist() == found["rejection"].tokens(2).tolist()
        assert 2 not in ours.nodes(4)  # the window is never accepted
        for rule in same:
            same[rule] += ours.tokens(3).tolist() == found[rule].tokens(3).tolist()
        own = logits.log_softmax(1)
        assert ours.logprobs.chosen[0] == own[0, ours.emitted[0]]
    assert max(same.values()) < 40


def test_coins_of_a_round_are_its_own():
    step = make_step([tree.chain([1, 2], "t")] * 2, sampling_rows(2, seeds=[4, 4]), [5, 6])
    coins = rejection.round_coins(rows_of(step))
    assert len(set(coins.tolist())) == 6
    again = noise.uniform(np.array([4]), ints([7]), noise.ROUND_COINS + 5).item()
    assert coins[2] == again  # the node at position 6, whose own draw lands at 7


def test_a_greedy_chain_and_no_candidates_do_no_harm():
    target, drafter = independent(0.0, 1.0, 0.0), fixed_drafter(3, CHAIN, 1)
    for chance, draft in drafter(()):
        laws = (outcomes(target, (), draft) for outcomes in (block_outcomes, coupled_outcomes))
        ours, plain = ({path: odds for path, odds in law.items() if odds} for law in laws)
        assert ours == plain
        assert chance == 1.0
    for value in (-torch.inf, torch.nan):
        sampling = sampling_rows(3, temperature=[0, 1, 1], top_p=[1, 1, 0.5])
        step = make_step([tree.chain([4], "a")] * 3, sampling)
        result = verify(make_rule("block"), step, torch.full((6, 5000), value))
        assert (result.emitted >= 0).all()
        assert (result.emitted < 5000).all()
