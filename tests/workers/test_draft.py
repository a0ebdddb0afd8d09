"""The draft worker draws with the noise that the step asks for: by position, or by round too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.drafters.lookup.base import num_agreeing
from outrider.drafters.protocol import Continuation, Drafted, DraftStep, Preparation
from outrider.scheduler.blocks import BlockPool
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.sequence import PagedTokens, Row, Seating
from outrider.scheduler.types import (
    JoinedDrafts,
    Request,
    SeatSettings,
    StepPlan,
    Verdict,
    ints,
    starts_of,
)
from outrider.tests.helpers.models import write_guessable
from outrider.tests.helpers.verification import sampling_rows
from outrider.workers.collective import Collective
from outrider.workers.draft import DraftService, SharedDrafts
from outrider.workers.draft_program import ChainProgram
from outrider.workers.model.paged import PagedModel
from outrider.workers.model.target import load_model
from outrider.workers.spec import Leased, OpenLease, WeightsAnswer
from outrider.workers.verify import DrawSettings, draw_siblings

VOCAB, DEPTH = 20, 3
LOGITS = torch.linspace(-1, 1, VOCAB)


class Constant:
    """A model that always says the same."""

    def new_cache(self, num_blocks: int, block_size: int) -> None:
        return None

    def forward(self, step, cache) -> torch.Tensor:
        return LOGITS.expand(len(step.rows), VOCAB)


class Fading:
    """Each further token of a chain is less certain; the second sequence is at once."""

    def __init__(self) -> None:
        self.level = 0

    def new_cache(self, num_blocks: int, block_size: int) -> None:
        return None

    def forward(self, step, cache) -> torch.Tensor:
        logits = torch.zeros(len(step.rows), VOCAB)
        logits[:, 5] = 8.0 - 3 * self.level
        logits[1:, 5] -= 6.0
        self.level += 1
        return logits


def planned(lengths: list[int], temperature: float) -> StepPlan:
    """The last of so many tokens of each sequence is to be computed, and `DEPTH` to be drawn."""
    pool, rows = BlockPool(1000, 16), []
    for length in lengths:
        request = Request("a", ints([0] * length), SamplingParams(temperature=temperature), seed=3)
        sequence = PagedTokens(request, SeatSettings.for_drafting(request))
        assert sequence.allocate(pool, length + DEPTH)
        sequence.num_computed = length - 1
        rows.append(Row(sequence, 1, DEPTH))
    return Seating().plan(0, rows)


def test_a_chain_ends_where_the_model_is_unsure():
    step = DraftStep(planned([4, 6], temperature=0.0), probs_top=0, p_min=0.5)
    drafted = DraftService(Fading(), 64, 16, Collective.threads(1, timeout_s=10)[0]).draft(step)
    assert drafted.start.tolist() == [0, 2, 2]
    assert drafted.tokens.tolist() == [5, 5]


def test_a_sequence_may_have_a_limit_of_its_own():
    plan, service = planned([4, 6], temperature=0.0), Collective.threads(1, timeout_s=10)[0]
    own = np.array([0.2, 0.2], dtype=np.float32)
    step = DraftStep(plan, probs_top=0, p_min=0.5, min_probs=own)
    assert DraftService(Fading(), 64, 16, service).draft(step).start.tolist() == [0, 3, 4]
    own[1] = 0.3
    assert DraftService(Fading(), 64, 16, service).draft(step).start.tolist() == [0, 3, 3]


def drawn(lengths: list[int], *, salted: bool) -> np.ndarray:  # [num_seqs, depth]
    step = DraftStep(planned(lengths, temperature=1.0), probs_top=VOCAB, salted=salted)
    service = DraftService(Constant(), 64, 16, Collective.threads(1, timeout_s=10)[0])
    return service.draft(step).tokens.reshape(-1, DEPTH)


def test_a_salted_round_shares_no_noise_with_another():
    lengths = list(range(1, 41))
    by_position, by_round = (drawn(lengths, salted=salted) for salted in (False, True))
    assert by_position[:-1, 1].tolist() == by_position[1:, 0].tolist()  # a position is a draw
    agree = np.mean(by_round[:-1, 1] == by_round[1:, 0])
    assert agree < 0.3  # by chance alone
    sampling = sampling_rows(DEPTH, temperature=1.0, seeds=3)
    rounds = ints(np.full(DEPTH, 9))
    tokens, _, _ = draw_siblings(
        LOGITS.expand(DEPTH, VOCAB), rounds + ints(range(DEPTH)),
        DrawSettings.of(sampling, ints(range(DEPTH))), VOCAB, rounds=rounds,
    )  # fmt: skip
    assert (
        by_round[8].tolist() == tokens[:, 0].tolist()
    )  # nine tokens known: the round that begins at 9


def test_chains_are_longer_behind_likelier_outcomes():
    """Against taking the best token that continues a chain, one by one."""
    rng = np.random.default_rng(3)
    for depth, num_models in ((1, 1), (4, 1), (5, 2)):
        reach, rates = ints([9, 3, 7]), rng.uniform(0.1, 0.95, depth).astype(np.float32)
        shares = None if num_models == 1 else ints([[1, num_models]] * 3)
        seqs = ints([0] * 12 + [1] * 5 + [2] * 9)
        accepted, chances = rng.integers(0, 4, 26), rng.uniform(0, 1, 26)
        chances[rng.integers(0, 26, 4)] = 0.0
        num_rows = ints([20, 7, 3])
        given = (depth, ints([9] * 3), reach, rates, np.zeros((2, 4), np.float32), True, shares)
        found = Preparation(*given, num_rows).lens(seqs, accepted, chances)
        wanted = np.zeros(26, np.int32)
        for seq in range(3):
            for _ in range(num_rows[seq] * num_models):
                gains = {
                    each: chances[each] * rates[: wanted[each] + 1].prod()
                    for each in np.flatnonzero((seqs == seq) & (chances > 0)).tolist()
                    if wanted[each] < min(depth, reach[seq] - accepted[each] - 1)
                }
                if gains:
                    wanted[max(gains, key=gains.__getitem__)] += 1
        assert found.tolist() == wanted.tolist()
        whole = Preparation(*given).lens(seqs, accepted, chances)
        assert whole.tolist() == np.clip(reach[seqs] - accepted - 1, 0, depth).tolist()


# -- the program of a model's chains, against its forwards called one by one


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_guessable(tmp_path_factory.mktemp("draft") / "model", num_layers=2)
    alone = Collective.threads(1, timeout_s=10)[0]
    return load_model(
        Path(folder), dtype=torch.float32, device=torch.device("cpu"), collective=alone
    )


def rounds(service: DraftService, temperatures: list[float], **settings) -> list[Drafted]:
    """Rounds of sequences with chunks and budgets of all sizes, and tokens that follow."""
    rng, pool, sequences = np.random.default_rng(7), BlockPool(200, 8), []
    for index, temperature in enumerate(temperatures):
        sampling = SamplingParams(temperature=temperature)
        prompt = ints(rng.integers(0, 96, 3 + 9 * index))
        request = Request(str(index), prompt, sampling, seed=index)
        sequences.append(PagedTokens(request, SeatSettings.for_drafting(request)))
    seating, found = Seating(), []
    for number in range(6):
        rows = []
        for sequence in sequences:
            missing, wanted = sequence.num_uncomputed, int(rng.integers(0, 6))
            chunk = missing if number else min(missing, 20)  # the last prompt takes two
            if chunk < missing:
                wanted = 0
            assert sequence.allocate(pool, sequence.num_tokens + wanted)
            rows.append(Row(sequence, chunk, wanted))
        plan = seating.plan(number, rows)
        found.append(service.draft(DraftStep(plan, **settings)))
        for sequence, chunk, wanted, _ in rows:
            sequence.num_computed += chunk
            if sequence.num_uncomputed == 0:
                sequence.tokens.extend(ints(rng.integers(0, 96, 1 + wanted // 2)))
    return found


@pytest.mark.parametrize("temperatures", [[0.0] * 4, [0.8] * 4, [0.0, 0.8, 0.0, 0.8], [0.0]])
@pytest.mark.parametrize("settings", [{"probs_top": 0}, {"probs_top": 20, "salted": True}])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_chains_of_the_program_are_those_of_forwards(model, temperatures, settings, num_threads):
    torch.set_num_threads(num_threads)
    made = [DraftService(model, 200, 8, model.collective) for _ in range(2)]
    assert made[0]._program is not None
    made[1].drop_program()
    ours, wanted = (rounds(each, temperatures, **settings) for each in made)
    assert sum(len(each.tokens) for each in ours) > len(ours) * len(temperatures)
    for one, other in zip(ours, wanted, strict=True):
        assert one.start.tolist() == other.start.tolist()
        assert one.tokens.tolist() == other.tokens.tolist()
        if one.probs is not None:
            np.testing.assert_allclose(one.probs.probs, other.probs.probs, atol=1e-5)
    caches = [each._cache for each in made]
    for part in ("keys", "values"):
        for one, other in zip(*(getattr(each, part) for each in caches), strict=True):
            torch.testing.assert_close(one, other)


def test_masks_and_unsure_ends_take_forwards(model, monkeypatch):
    monkeypatch.setattr(ChainProgram, "run", None)  # not called
    service = DraftService(model, 200, 8, model.collective)
    assert any(len(each.tokens) for each in rounds(service, [0.0, 0.0], probs_top=0, p_min=0.01))
    assert any(len(each.tokens) for each in rounds(service, [0.0], probs_top=0, mask_token=3))


@pytest.mark.parametrize("keys", [{"tie_word_embeddings": True}, {"attention_bias": True}])
def test_other_models_have_a_program_too(tmp_path, keys):
    folder = write_guessable(tmp_path / "model", num_layers=1, **keys)
    alone = Collective.threads(1, timeout_s=10)[0]
    model = load_model(
        Path(folder), dtype=torch.float32, device=torch.device("cpu"), collective=alone
    )
    made = [DraftService(model, 200, 8, alone) for _ in range(2)]
    assert made[0]._program is not None
    made[1].drop_program()
    ours, wanted = (rounds(each, [0.0] * 3, probs_top=0) for each in made)
    assert [each.tokens.tolist() for each in ours] == [each.tokens.tolist() for each in wanted]


@pytest.mark.parametrize("temperatures", [[0.0] * 3, [0.8, 0.0, 0.8]])
@pytest.mark.parametrize("settings", [{"probs_top": 0}, {"probs_top": 20, "salted": True}])
def test_the_program_of_a_model_of_another_vocabulary(model, temperatures, settings):
    """All of the model's tokens in another order, of which every third is not shared."""
    table = np.random.default_rng(2).permutation(96).astype(np.int32)
    table[::3] = -1 - table[::3]
    made = [
        DraftService(model, 200, 8, model.collective, 0, translation)
        for translation in (table.tobytes(), table.tobytes(), b"")
    ]
    made[1].drop_program()
    ours, wanted, plain = (rounds(each, temperatures, **settings) for each in made)
    tokens = [token for each in ours for token in each.tokens.tolist()]
    assert tokens == [token for each in wanted for token in each.tokens.tolist()]
    assert (table[tokens] >= 0).all()
    assert tokens != [token for each in plain for token in each.tokens.tolist()]
    for one, other in zip(ours, wanted, strict=True):
        if one.probs is not None:
            np.testing.assert_allclose(one.probs.probs, other.probs.probs, atol=1e-5)


@pytest.mark.parametrize(
    ("num_scratch_blocks", "field", "problem"),
    [
        (0, "drafter_group", "has 16 KV blocks, and one sequence may need 32; give the group more"),
        (2, "speculation_cache.budget", "has 16 KV blocks, of which its outcomes need 2; one"),
    ],
)
def test_a_part_that_holds_no_sequence_is_refused_by_what_makes_it_small(
    num_scratch_blocks: int, field: str, problem: str
) -> None:
    draft = SimpleNamespace(num_blocks=64, max_model_len=512, block_size=16)
    shared = SharedDrafts(lambda *_: None, SimpleNamespace(draft=draft), 4)  # type: ignore[arg-type, return-value]
    answer = shared.handle(Leased(1, OpenLease("engine", num_scratch_blocks)))
    assert isinstance(answer, WeightsAnswer)
    assert answer.field == field
    assert problem in answer.problem


# -- chains that are begun on the target's verdict, against those that are asked for


class Rounds:
    """An engine's rounds with a draft model, over few blocks, whose target emits at random.

    The messages do not depend on whether the model gets verdicts, so that its answers may not.
    """

    NODES, SIZE = 4, 8

    def __init__(self, service: DraftService, seed: int, temperatures: list[float]) -> None:
        self.service, self.rng = service, np.random.default_rng(seed)
        self.pool, self.seating = BlockPool(NUM_BLOCKS, self.SIZE), Seating()
        self.sequences = [self.opened(each) for each in temperatures]
        self.answers: list[Drafted] = []
        self.step = 0

    def opened(self, temperature: float) -> PagedTokens:
        prompt = ints(self.rng.integers(0, 96, self.rng.integers(1, 20)))
        seed = int(self.rng.integers(99))
        request = Request("a", prompt, SamplingParams(temperature=temperature), seed=seed)
        return PagedTokens(request, SeatSettings.for_drafting(request))

    def planned(self, sequences: list[PagedTokens], wanted: list[int]) -> list[Row]:
        rows = []
        for sequence, count in zip(sequences, wanted, strict=True):
            assert sequence.allocate(self.pool, sequence.num_tokens + count)
            sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
            rows.append(Row(sequence, sequence.num_uncomputed, count))
        return rows

    def asked(self, step: DraftStep) -> Drafted:
        self.answers.append(self.service.draft(step))
        return self.answers[-1]

    def asked_preparation(
        self, chains: list[list[int]], least: int = 1, **settings: Any
    ) -> Drafted:
        drafted = self.asked(self.preparation(chains, least, **settings))
        assert drafted.outcomes is not None
        for sequence in self.sequences:
            sequence.num_computed = sequence.num_tokens
        return drafted

    def preparation(self, chains: list[list[int]], least: int, **settings: Any) -> DraftStep:
        """A preparation of all sequences, in the order of another step of the target."""
        rows = self.planned(self.sequences, [len(chain) for chain in chains])
        count, self.step = len(rows), self.step + 1
        room = []
        for sequence, chain in zip(self.sequences, chains, strict=True):
            more = len(chain) + 1 + self.NODES
            sequence.allocate(self.pool, sequence.num_tokens + more)
            room.append(min(more, len(sequence.blocks) * self.SIZE - sequence.num_tokens))
        plan = self.seating.plan(self.step, rows)
        if any(chains):
            nodes, sizes = ints(sum(chains, [])), ints([len(chain) for chain in chains])
            plan = replace(plan, drafts=JoinedDrafts(nodes, sizes))
        preparation = Preparation(
            depth=3, num_outcomes=ints([5] * count), reach=ints([50] * count),
            accept_rates=np.full(self.NODES, 0.7, np.float32),
            rank_rates=np.full((2, 4), 0.3, np.float32), shares_noise=True,
        )  # fmt: skip
        going = Continuation(
            self.step, ints(range(count))[::-1], ints([self.NODES] * count), ints(room), least
        )
        return DraftStep(plan, preparation=preparation, continuation=going, **settings)

    def verdict(self, step: int, texts: list[list[int]]) -> Verdict:
        """Of texts in the order of the sequences."""
        texts = texts[::-1]
        starts = starts_of(ints([len(text) for text in texts]))
        none = np.zeros(len(texts) + 1, np.int32)
        return Verdict(step, ints(sum(texts, [])), starts, ints([]), none)

    def observe(
        self, chains: list[list[int]], texts: list[list[int]], *, counts: bool = True
    ) -> None:
        """What the target emits; `counts`: in the prepared step, whose nodes are then computed."""
        for sequence, chain, text in zip(self.sequences, chains, texts, strict=True):
            sequence.num_computed = sequence.num_tokens + counts * num_agreeing(text, chain)
            sequence.tokens.extend(ints(text))

    def ask(self, chosen: list[PagedTokens], wanted: list[int], **settings: Any) -> Drafted:
        """Chains behind all known tokens."""
        self.step += 1
        rows = self.planned(chosen, wanted)
        drafted = self.asked(DraftStep(self.seating.plan(self.step, rows), **settings))
        for row in rows:
            row.sequence.num_computed = row.sequence.num_tokens
        return drafted


NUM_BLOCKS, NUM_SCRATCH = 40, 40
KINDS = (
    *("once", "twice", "early", "late", "never"),
    *("of another step", "of a failed step", "of a step that ran again"),
)
SETTINGS = [
    {"probs_top": 0},
    {"probs_top": 20, "salted": True},
    {"probs_top": 0, "mask_token": 3},
    {"probs_top": 0, "p_min": 0.02},
]


def twins(model: PagedModel, seed: int, temperatures: list[float]) -> list[Rounds]:
    given = (NUM_BLOCKS, Rounds.SIZE, model.collective, NUM_SCRATCH)
    return [Rounds(DraftService(model, *given), seed, temperatures) for _ in range(2)]


def assert_same_answers(ours: Rounds, wanted: Rounds) -> None:
    for one, other in zip(ours.answers, wanted.answers, strict=True):
        assert (one.step, one.start.tolist()) == (other.step, other.start.tolist())
        assert one.tokens.tolist() == other.tokens.tolist()
        if one.probs is not None:
            assert other.probs is not None
            np.testing.assert_allclose(one.probs.probs, other.probs.probs, atol=1e-5)
    assert not any(each.num_begun for each in wanted.answers)


@pytest.mark.parametrize("settings", SETTINGS, ids=["in turn", "weighed", "masks", "unsure ends"])
def test_every_outcome_and_every_order_of_its_verdict_gives_the_same_draft(model, settings):
    """All numbers of accepted nodes, tokens and ways of the verdict, of one sequence."""
    num_begun = 0
    for kind in KINDS:
        for num_accepted in range(3):
            for bonus in (5, 17, None):  # None: one that is prepared
                ours, wanted = twins(model, 3, [0.0])
                for each in (ours, wanted):
                    chains = [[4, 9]]
                    prepared = each.asked_preparation(chains, **settings)
                    found = prepared.outcomes
                    token = bonus
                    if token is None:
                        own = np.flatnonzero(found.num_accepted == num_accepted)
                        token = int(found.bonus[own[0]]) if len(own) else 60
                    texts = [[*chains[0][:num_accepted], token]]
                    if each is ours:
                        deliver(each, kind, texts, [[9, 9]])
                    if kind != "of a failed step":
                        each.observe(chains, texts, counts=kind != "of a step that ran again")
                    last = each.ask(each.sequences, [3], **settings)
                    if kind == "late" and each is ours:
                        each.service.go_on(each.verdict(prepared.step, texts))
                    each.asked_preparation([last.tokens.tolist()], **settings)
                assert_same_answers(ours, wanted)
                begun = sum(each.num_begun for each in ours.answers)
                known = zip(found.num_accepted.tolist(), found.bonus.tolist(), strict=True)
                is_missed = (num_accepted, token) not in set(known)
                assert begun == (kind in ("once", "twice", "early") and is_missed)
                num_begun += begun
    assert num_begun > 3 * 3


def deliver(rounds: Rounds, kind: str, texts: list[list[int]], others: list[list[int]]) -> None:
    """What of a round's verdict comes between its preparation and the next request."""
    service, step = rounds.service, rounds.step
    if kind in ("early", "of another step"):
        service.go_on(rounds.verdict(step - 1, others))
    if kind == "of a failed step":  # the engine never gets it, and asks for the same again
        service.go_on(rounds.verdict(step, others))
    if kind == "of a step that ran again":  # under another number, with other tokens
        again = [[95 - token for token in text] for text in texts]
        service.go_on(rounds.verdict(step, again))
    if kind in ("once", "twice", "early"):
        service.go_on(rounds.verdict(step, texts))
    if kind == "twice":
        service.go_on(rounds.verdict(step, texts))


@pytest.mark.parametrize("settings", SETTINGS, ids=["in turn", "weighed", "masks", "unsure ends"])
@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_verdicts_changes_an_answer(model, settings, seed):
    """Sequences end, lose their blocks or get others, and are not asked for; verdicts get lost."""
    pair = twins(model, seed, [0.0, 0.8, 0.0])
    for each in pair:
        faults = np.random.default_rng(seed + 100)
        rng = each.rng
        for _ in range(25):
            chains = [rng.integers(0, 96, rng.integers(0, 4)).tolist() for _ in each.sequences]
            prepared = each.asked_preparation(chains, least=int(rng.integers(1, 3)), **settings)
            texts = []
            for seq, chain in enumerate(chains):
                own = np.flatnonzero(prepared.outcomes.seqs == seq)
                count, token = int(rng.integers(0, len(chain) + 1)), int(rng.integers(0, 96))
                if len(own) and rng.random() < 0.3:
                    pick = int(rng.choice(own))
                    count = int(prepared.outcomes.num_accepted[pick])
                    token = int(prepared.outcomes.bonus[pick])
                more = rng.integers(0, 96, int(rng.integers(0, 2))).tolist()  # of another drafter
                texts.append([*chain[:count], *more, token])
            kind = ("once", "once", *KINDS)[int(rng.integers(len(KINDS) + 2))]
            if each is pair[0] and faults.random() < 0.9:
                deliver(each, kind, texts, [[7]] * len(texts))
            if kind != "of a failed step":
                each.observe(chains, texts, counts=kind != "of a step that ran again")
            for index, sequence in enumerate(each.sequences):
                what = rng.random()
                if what < 0.1 or sequence.num_tokens > 60:
                    sequence.free(each.pool)
                    each.seating.leave(sequence)
                    each.sequences[index] = each.opened(sequence.settings.temperature)
                elif what < 0.2:  # evicted
                    sequence.free(each.pool)
                else:
                    sequence.trim(each.pool, int(rng.choice([0, each.NODES])))
            chosen = [each_one for each_one in each.sequences if rng.random() < 0.7]
            if chosen:
                each.ask(chosen, rng.integers(1, each.NODES + 1, len(chosen)).tolist(), **settings)
            each.pool.check([sequence.blocks for sequence in each.sequences])
    assert_same_answers(*pair)
    assert sum(answer.num_begun for answer in pair[0].answers) > 3
