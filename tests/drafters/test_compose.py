"""Compose: what comes out is the target's, members keep their own books, faults stay with one."""

from __future__ import annotations

import itertools
import logging
import random
from types import SimpleNamespace

import pytest

from outrider.config import ComposeConfig, DraftTargetConfig, EngineConfig
from outrider.drafters import compose as compose_module
from outrider.drafters.compose import Choice, Compose, Member
from outrider.drafters.draft_target import DraftTarget
from outrider.drafters.drafting import Drafting, own_verdict
from outrider.drafters.lookahead import Lookahead
from outrider.drafters.lookup.ngram import ngram
from outrider.drafters.protocol import Needs, NoDrafter
from outrider.errors import ConfigError
from outrider.scheduler import tree
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Draft, DraftProbs, Request, SpeculationOptions, Verdict, ints

from ..helpers.draft_model import TokenCacheDraftModel, text_despite_failures
from ..helpers.toy import VOCAB, continuation, next_token
from ..helpers.verification import (
    coupled_outcomes,
    distance_from_target,
    emission_law,
    random_target,
    rejection_outcomes,
    sampled_drafter,
)

NGRAM = {"decoding_type": "NGram", "max_draft_len": 4}
MODEL = {"decoding_type": "DraftTarget", "speculative_model": "m", "max_draft_len": 5}
LOOKAHEAD = {"decoding_type": "Lookahead", "max_window_size": 2}


class Scripted(NoDrafter):
    """Proposes the same draft for every row; keeps the verdicts it is told."""

    def __init__(self, name: str, draft: Draft, needs: Needs | None = None) -> None:
        self.name, self.needs = name, needs or Needs()
        self.draft = draft
        self.asked: list[list[int]] = []
        self.verdicts: list[Verdict] = []

    def propose(self, batch, budgets):
        self.asked.append(budgets.tolist())
        return [tree.truncate(self.draft, int(budget)) for budget in budgets]

    def observe(self, batch, verdict):
        self.verdicts.append(verdict)


class Raising(NoDrafter):
    name = "raising"

    def propose(self, batch, budgets):
        raise RuntimeError("no luck")

    def observe(self, batch, verdict):
        raise RuntimeError("nor here")


def section(*members: dict, **options) -> ComposeConfig:
    data = {"decoding_type": "Compose", "members": list(members or (NGRAM,)), **options}
    config = EngineConfig.load({"model": "m", "speculative_config": data}).speculative_config
    assert isinstance(config, ComposeConfig)
    return config


class Continuing(Scripted):
    """Proposes nothing of its own, and continues chains by what a function makes of them."""

    def __init__(self, name: str, continuation) -> None:
        super().__init__(name, tree.EMPTY)
        self.continuation = continuation

    def extend(self, batch, chains, budgets):
        return [
            tree.truncate(self.continuation(list(chain)), budget) if budget else tree.EMPTY
            for chain, budget in zip(chains, budgets.tolist(), strict=True)
        ]


def scripted(*drafters: NoDrafter, mode: str = "merge", **options) -> Compose:
    """A composition of what is given; those called `model...` have a model."""
    members = [
        Member(each, 64, each.name.startswith("model"), isinstance(each, Continuing))
        for each in drafters
    ]
    given = (NGRAM, MODEL) if mode == "extend" else ()
    return Compose(section(*given, mode=mode, **options), members, VOCAB)


class FakeBatch:
    """As much of a batch as a drafter sees."""

    def __init__(self, step: int, count: int = 1, budget: int = 6) -> None:
        self.step, self.num_seqs = step, count
        self.request_ids = tuple(map(str, range(count)))
        self.max_nodes = ints([budget] * count)
        self.max_depth = ints([64] * count)


def emitted(tokens: list[int], path: list[int]) -> Verdict:
    return Verdict(1, ints(tokens), ints([0, len(tokens)]), ints(path), ints([0, len(path)]))


def chain(*tokens: int) -> Draft:
    return tree.chain(tokens, "x")


@pytest.mark.parametrize("mode", ["precedence", "extend", "merge", "choose"])
@pytest.mark.parametrize("num_blocks", [200, 40], ids=["roomy", "evicting"])
def test_a_draft_models_cache_stays_right(make_loop, request_of, drive, mode, num_blocks):
    model = TokenCacheDraftModel(num_blocks)
    config = section(NGRAM, LOOKAHEAD, MODEL, mode=mode, max_draft_len=9)
    drafters = [
        ngram(config.members[0]),
        Lookahead(config.members[1]),
        DraftTarget(config.members[2], model),
    ]
    members = [
        Member(drafter, each.max_draft_len, each.has_model, each.continues)
        for drafter, each in zip(drafters, config.members, strict=True)
    ]
    drafting = Drafting(Compose(config, members, VOCAB), VOCAB)
    # Room for everybody's nodes: a node that is cut counts as drafted.
    options = {"max_draft_len": 9, "max_num_batched_tokens": 8 * 10}
    loop = make_loop(200, max_model_len=150, drafting=drafting, **options)
    rng, wanted = random.Random(5), {}
    for index in range(16):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 70)))
        wanted[str(index)] = continuation(prompt, 40)
        model.prefixes.add(prompt + wanted[str(index)])
        loop.add(request_of(str(index), prompt, 40))
    assert drive(loop) == wanted
    stats = drafting.all_stats()
    assert list(stats) == ["ngram", "lookahead", "draft_target"]
    assert [each.faults for each in stats.values()] == [0, 0, 0]
    assert stats["draft_target"].num_acc_tokens > 0.2 * stats["draft_target"].num_gen_tokens > 0
    drafters[2].check()
    # What is accepted needs no second look: the model computes little more than every token once.
    if num_blocks == 200 and mode == "merge":
        known = sum(len(text) for text in model.prefixes)
        assert model.num_tokens < 1.6 * known


def test_failed_target_steps_leave_members_sound(make_loop, request_of):
    model = TokenCacheDraftModel(100)
    config = section(NGRAM, MODEL, mode="merge", max_draft_len=6)
    draft_target = DraftTarget(config.members[1], model)
    members = [Member(ngram(config.members[0]), 4, False), Member(draft_target, 5, True)]
    drafting = Drafting(Compose(config, members, VOCAB), VOCAB)
    loop = make_loop(200, drafting=drafting)
    wanted = continuation((1, 2, 3), 40)
    model.prefixes.add((1, 2, 3) + wanted)
    loop.add(request_of("a", (1, 2, 3), 40))
    assert text_despite_failures(loop, paused=2) == wanted
    assert [each.faults for each in drafting.all_stats().values()] == [0, 0]


@pytest.mark.parametrize("mode", ["precedence", "merge"])
def test_a_request_chooses_its_drafters(mode):
    one, other = Scripted("one", chain(5, 6)), Scripted("other", chain(7))
    compose = scripted(one, other, mode=mode)
    chosen = {"0": ("other",), "1": None, "2": ("one", "other"), "3": ("one",)}
    requests = [
        Request(name, ints([1]), SamplingParams(), 0, speculation=SpeculationOptions(drafters=wish))
        for name, wish in chosen.items()
    ]
    compose.open(requests)
    batch = FakeBatch(1, count=4)
    drafts = compose.propose(batch, batch.max_nodes)
    both = [5, 6] if mode == "precedence" else [5, 6, 7]
    assert [draft.tokens.tolist() for draft in drafts] == [[7], both, both, [5, 6]]
    one.takes_min_prob = True  # the other would ignore it
    wishes = [SpeculationOptions(drafters=each, min_prob=0.5) for each in chosen.values()]
    for name, wish in zip("4567", wishes, strict=True):
        compose.open([Request(name, ints([1]), SamplingParams(), 0, speculation=wish)])
    batch.request_ids = tuple("4567")
    drafts = compose.propose(batch, batch.max_nodes)
    assert [draft.tokens.tolist() for draft in drafts] == [[], [5, 6], [5, 6], [5, 6]]
    batch.request_ids = tuple("0123")
    compose.close(["0", "3", *"4567"])
    drafts = compose.propose(batch, batch.max_nodes)
    assert [draft.tokens.tolist() for draft in drafts] == [both] * 4, (
        "a choice ends with its request"
    )


def test_a_bandit_gives_requests_to_the_fastest_member():
    """Of three members the last emits most per second, until the first becomes faster."""
    now, rng = [0.0], random.Random(1)
    choice = Choice(3, lambda: now[0])
    step, speeds = FakeBatch(1), [1.0, 1.5, 2.0]  # tokens per second
    step.num_tokens = 1

    def serve(count: int) -> list[int]:
        given = [0, 0, 0]
        for _ in range(count):
            member = choice.open("0")
            given[member] += 1
            for _ in range(9):
                choice.count(step, emitted([1], []), ints([4]), [0.0, 0.0, 0.0])
                now[0] += rng.uniform(0.5, 1.5) / speeds[member]
            now[0] += 100.0  # the engine is idle
            choice.close("0")
        return given

    assert serve(300)[2] > 240
    assert choice.speeds == pytest.approx(speeds, rel=0.2)
    speeds[0] = 4.0
    serve(1000)
    assert serve(300)[0] > 240, "what was measured long ago is forgotten"


def test_a_step_is_shared_by_rows_and_drafting_is_its_members_own():
    now = [0.0]
    choice = Choice(2, lambda: now[0])
    batch = FakeBatch(1, count=2)
    batch.num_tokens = 2
    assert sorted(map(choice.open, batch.request_ids)) == [0, 1]
    verdict = Verdict(1, ints([1] * 4), ints([0, 3, 4]), ints([0, 1]), ints([0, 2, 2]))
    for elapsed in (0.0, 10.0):
        now[0] += elapsed
        choice.count(batch, verdict, ints([4, 0]), [4.0, 0.0])
    first = choice._member["0"]  # with five of six rows
    wanted = [3 / (4.0 * (first == 0) + 5.0), 1 / (4.0 * (first == 1) + 1.0)]
    assert [choice.speeds[first], choice.speeds[1 - first]] == pytest.approx(wanted)
    batch.num_tokens = 9  # a prompt
    now[0] += 99.0
    choice.count(batch, verdict, ints([4, 0]), [4.0, 0.0])
    assert choice.speeds[first] == pytest.approx(wanted[0])


def test_a_chosen_member_drafts_alone_and_wishes_go_first():
    one, other = Scripted("one", chain(5, 6)), Scripted("other", chain(7))
    compose = scripted(one, other, mode="choose")
    wishes = {"0": None, "1": None, "2": ("other",)}
    for name, wish in wishes.items():
        asked = SpeculationOptions(drafters=wish)
        compose.open([Request(name, ints([1]), SamplingParams(), 0, speculation=asked)])
    batch = FakeBatch(1, count=3)
    drafts = compose.propose(batch, batch.max_nodes)
    assert [draft.tokens.tolist() for draft in drafts] == [[5, 6], [7], [7]]
    assert [member.stats.num_chosen for member in compose.members] == [1, 1]


class Guess(Continuing):
    """Drafts, or continues, with some chance, rightly with another, and takes its time."""

    def __init__(self, name: str, now: list[float], share: float, right: float, took_s: float):
        super().__init__(name, self.guess)
        self.now, self.share, self.right, self.took_s = now, share, right, took_s
        self.random = random.Random(name)

    def guess(self, path=()):
        self.now[0] += self.took_s
        first = len(path) + 1 if self.random.random() < self.right else 20
        return chain(*range(first, first + 3))

    def propose(self, batch, budgets):
        drafts = self.share and budgets[0] and self.random.random() < self.share
        self.asked.append(budgets.tolist())
        return [tree.truncate(self.guess(), int(budgets[0])) if drafts else tree.EMPTY]


@pytest.mark.parametrize(
    ("mode", "members", "rests"),
    [
        ("precedence", {"free": (0.5, 0.8, 0.0), "model": (1, 0.1, 0.5)}, "model"),
        ("precedence", {"free": (0.5, 0.8, 0.0), "model": (1, 0.8, 0.5)}, ""),
        ("precedence", {"free": (0.9, 0.1, 0.0), "model": (1, 0.8, 0.2)}, "free"),
        ("merge", {"free": (1, 0.8, 0.0), "model": (1, 0.8, 0.5)}, "model"),
        ("merge", {"free": (1, 0.3, 0.0), "model": (1, 0.8, 0.5)}, ""),
        ("extend", {"after": (0, 0.1, 0.4), "model": (1, 0.8, 0.2)}, "after"),
        ("extend", {"after": (0, 0.8, 0.2), "model": (1, 0.8, 0.2)}, ""),
        ("extend", {"after": (0.5, 0.8, 0.0), "model": (1, 0.1, 0.5)}, "model"),
    ],
)
def test_a_member_that_does_not_pay_rests_until_it_does(monkeypatch, mode, members, rests):
    now = [0.0]
    monkeypatch.setattr(compose_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    guesses = {name: Guess(name, now, *given) for name, given in members.items()}
    compose = scripted(*guesses.values(), mode=mode, adaptive_draft_len=True)
    drafting = Drafting(compose, VOCAB)
    compose.open([Request("0", ints([1]), SamplingParams(), 0)])
    numbers, text = itertools.count(), [1, 2, 3, 4, 5, 6, 7, 8, 9]

    def serve(count: int) -> str:
        for step in itertools.islice(numbers, count):
            batch = FakeBatch(step)
            batch.num_tokens = 1
            (draft,) = compose.propose(batch, batch.max_nodes)
            now[0] += 1.0 + 0.03 * draft.num_nodes
            path = tree.follow(draft, text)
            compose.observe(batch, emitted(text[: len(path) + 1], path))
        health = drafting.all_health()
        assert all(("faster" in each["reason"]) == (each["state"] == "idle")
                   for each in health.values())  # fmt: skip
        return " ".join(name for name, each in health.items() if each["state"] == "idle")

    assert [serve(100), serve(150)] == ["", rests]
    if rests:
        wish = SpeculationOptions(drafters=(rests,))
        compose.open([Request("1", ints([1]), SamplingParams(), 0, speculation=wish)])
        batch = FakeBatch(10**6)
        batch.request_ids = ("1",)
        compose.propose(batch, batch.max_nodes)
        assert guesses[rests].asked[-1][0] > 0, "it is asked for by name"
        guesses[rests].right, guesses[rests].took_s = 1.0, 0.01
        assert serve(500) != rests


def test_precedence_asks_members_without_a_model_first():
    model, empty = Scripted("model", chain(7, 8)), Scripted("empty", tree.EMPTY)
    free = Scripted("free", chain(5))
    compose = scripted(model, empty, free, mode="precedence")
    (draft,) = compose.propose(FakeBatch(1), ints([6]))
    assert draft is free.draft
    assert (model.asked, empty.asked, free.asked) == ([], [[6]], [[6]])  # a winner ends the asking
    kept = scripted(model, free, mode="precedence", keep_order=True)
    assert kept.propose(FakeBatch(1), ints([6]))[0] is model.draft


def test_merge_shares_prefixes_within_the_budget():
    first, second = Scripted("first", chain(1, 2, 3)), Scripted("second", chain(1, 2, 4, 5))
    compose = scripted(first, second)
    (draft,) = compose.propose(FakeBatch(1), ints([5]))
    assert draft.tokens.tolist() == [1, 2, 3, 4, 5]
    assert draft.parents.tolist() == [-1, 0, 1, 1, 3]
    assert draft.source == "first+second"
    (draft,) = compose.propose(FakeBatch(2), ints([4]))  # the last node has no room
    assert draft.tokens.tolist() == [1, 2, 3, 4]
    assert tree.problem(draft, VOCAB) is None


def test_acceptance_belongs_to_every_member_that_proposed_the_node():
    first, second = Scripted("first", chain(1, 2, 3)), Scripted("second", chain(1, 2, 4, 5))
    compose = scripted(first, second)
    compose.propose(FakeBatch(1), ints([5]))
    compose.observe(FakeBatch(1), emitted([1, 2, 4, 9], [0, 1, 3]))
    assert first.verdicts[0].nodes(0).tolist() == [0, 1]
    assert second.verdicts[0].nodes(0).tolist() == [0, 1, 2]
    stats = {each.name: each.stats for each in compose.members}
    assert (stats["first"].num_acc_tokens, stats["second"].num_acc_tokens) == (2, 3)
    assert (stats["first"].num_gen_tokens, stats["second"].num_gen_tokens) == (3, 4)


def test_a_look_up_continues_what_a_model_drafted():
    forked = Draft(ints([1, 2, 3, 4]), ints([-1, -1, 0, 2]))
    silent = Continuing("silent", lambda path: tree.EMPTY)
    after = Continuing("after", lambda path: chain(sum(path), 9))
    last = Continuing("last", lambda path: chain(11))
    model = Scripted("model", forked)
    compose = scripted(model, silent, after, last, mode="extend")
    (draft,) = compose.propose(FakeBatch(1), ints([9]))
    assert draft.tokens.tolist() == [1, 2, 3, 4, 8, 9]  # after 1, 3, 4
    assert draft.parents.tolist() == [-1, -1, 0, 2, 3, 4]
    assert draft.origins == ("model",) * 4 + ("after",) * 2
    assert draft.source == "model+after"
    compose.observe(FakeBatch(1), emitted([1, 3, 4, 8, 7], [0, 2, 3, 4]))
    assert model.verdicts[0].nodes(0).tolist() == [0, 2, 3]
    assert after.verdicts[0].nodes(0).tolist() == [0]
    assert silent.verdicts[0].nodes(0).tolist() == last.verdicts[0].nodes(0).tolist() == []
    stats = {each.name: each.stats for each in compose.members}
    assert (stats["after"].num_gen_tokens, stats["after"].num_acc_tokens) == (2, 1)
    (draft,) = compose.propose(FakeBatch(2), ints([5]))
    assert draft.tokens.tolist() == [1, 2, 3, 4, 8]
    compose.observe(FakeBatch(2), emitted([2, 8], [1]))  # the other branch: it was not continued
    assert after.verdicts[1].nodes(0).tolist() == []
    assert model.verdicts[1].nodes(0).tolist() == [1]
    assert compose.propose(FakeBatch(3), ints([4]))[0] is model.draft


def test_look_ups_and_windows_are_not_continued():
    after = Continuing("after", lambda path: chain(9))
    free, window = Scripted("free", chain(5)), Draft(ints([5, 8]), ints([-1, -1]), num_window=1)
    (draft,) = scripted(free, after, mode="extend").propose(FakeBatch(1), ints([6]))
    assert draft is free.draft
    looking = Scripted("model", window)
    (draft,) = scripted(looking, after, mode="extend").propose(FakeBatch(1), ints([6]))
    assert draft is window
    model = Scripted("model", chain(5))
    compose = scripted(model, after, mode="extend")
    wish = SpeculationOptions(drafters=("model",))
    compose.open([Request("0", ints([1]), SamplingParams(), 0, speculation=wish)])
    assert compose.propose(FakeBatch(1), ints([6]))[0] is model.draft


@pytest.mark.parametrize("outcomes", [coupled_outcomes, rejection_outcomes])
@pytest.mark.parametrize("parents", [[-1, 0], [-1, -1, 0]], ids=str)
def test_a_continuation_leaves_the_law_alone(outcomes, parents):
    """Enumerated: what is looked up, and whether, depends on the tokens that were drawn."""
    target, drawn = random_target(3, seed=3), sampled_drafter(3, parents, random_target(3, seed=4))

    def looked_up(path: list[int]) -> Draft:
        return chain((path[0] + path[-1]) % 3, path[0]) if path[0] != path[-1] else tree.EMPTY

    def drafter(prefix):
        for chance, draft in drawn(prefix):
            model = Scripted("model", draft, Needs("tree", probabilities=True))
            compose = scripted(model, Continuing("after", looked_up), mode="extend")
            yield chance, compose.propose(FakeBatch(1), ints([9]))[0]

    law = emission_law(outcomes, target, lambda prefix: list(drafter(prefix)), 3)
    assert distance_from_target(law, target, 3) < 1e-7


def test_a_verdict_of_another_step_is_nobodys():
    first = Scripted("first", chain(1, 2))
    compose = scripted(first)
    compose.propose(FakeBatch(1), ints([5]))
    compose.observe(FakeBatch(2), emitted([1, 2, 4], [0, 1]))
    assert first.verdicts[0].nodes(0).tolist() == []
    assert compose.members[0].stats.num_acc_tokens == 0


def test_own_verdicts_are_the_path_restricted_to_own_nodes():
    """Against the slow reading: which merged nodes on the path did the member propose itself?"""
    rng = random.Random(3)
    for _ in range(300):
        drafts = [random_tree(rng, rng.randrange(0, 6)) for _ in range(3)]
        compose = scripted(*(Scripted(str(i), draft) for i, draft in enumerate(drafts)))
        (merged,) = compose.propose(FakeBatch(1), ints([rng.randrange(1, 12)]))
        assert tree.problem(merged, VOCAB) is None
        path, at, kids = [], -1, tree.children(merged.parents)
        while kids.get(at) and rng.random() < 0.8:
            at = rng.choice(kids[at])
            path.append(at)
        tokens = [*merged.tokens[path].tolist(), rng.randrange(4)]
        for draft in drafts:
            texts = {text_of(draft, node): node for node in range(draft.num_nodes)}
            wanted = [
                texts[tuple(tokens[: depth + 1])]
                for depth in range(len(path))
                if tuple(tokens[: depth + 1]) in texts
            ]
            own = own_verdict(emitted(tokens, path), [draft], [False])
            assert own.nodes(0).tolist() == wanted


def random_tree(rng: random.Random, size: int) -> Draft:
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(size):
        parent, token = rng.choice([-1, *range(len(tokens))]), rng.randrange(4)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return Draft(ints(tokens), ints(parents))


def text_of(draft: Draft, node: int) -> tuple[int, ...]:
    text: list[int] = []
    while node >= 0:
        text.insert(0, int(draft.tokens[node]))
        node = int(draft.parents[node])
    return tuple(text)


@pytest.mark.parametrize("mode", ["precedence", "merge"])
def test_a_window_rides_beside_anothers_guesses(mode):
    window = Draft(ints([8, 9]), ints([-1, 0]), num_window=2)
    looking, free = Scripted("looking", window), Scripted("free", chain(5))
    (draft,) = scripted(looking, free, mode=mode).propose(FakeBatch(1), ints([6]))
    assert draft.tokens.tolist() == [5, 8, 9]
    assert draft.parents.tolist() == [-1, -1, 1]
    assert draft.num_window == 2
    (draft,) = scripted(free, looking, mode="merge").propose(FakeBatch(1), ints([2]))
    assert draft is free.draft  # all of it or nothing


def test_distributions_stay_with_the_winner_and_leave_a_merged_tree():
    probs = DraftProbs(ints([[7, 8], [8, 7]]), ints([[1, 0], [1, 0]]).astype("float32"))
    drawn = Draft(ints([7, 8]), ints([-1, 0]), probs)
    window = Draft(ints([9]), ints([-1]), num_window=1)
    winner = scripted(Scripted("looking", window), Scripted("model", drawn), mode="precedence")
    (draft,) = winner.propose(FakeBatch(1), ints([6]))
    assert draft.probs is not None
    assert draft.probs.probs.tolist() == [[1, 0], [1, 0], [0, 0]]
    (draft,) = scripted(Scripted("model", drawn)).propose(FakeBatch(1), ints([6]))
    assert draft.probs is None


def test_merging_what_is_drawn_is_refused_under_rejection():
    drawing = Scripted("drawing", chain(1), Needs(probabilities=True))
    with pytest.raises(ConfigError, match=r"members\.1.*'drawing'.*coupled"):
        scripted(Scripted("free", chain(1)), drawing, verification="rejection")
    scripted(drawing, verification="rejection", mode="precedence")


@pytest.mark.parametrize("mode", ["precedence", "merge"])
def test_a_member_that_raises_hurts_nobody(make_loop, request_of, drive, caplog, mode):
    truth = ngram(section().members[0])
    drafting = Drafting(scripted(Raising(), truth, mode=mode), VOCAB)
    loop = make_loop(drafting=drafting)
    prompt = (1, 2, 3, 4) * 4
    loop.add(request_of("a", prompt, 30))
    with caplog.at_level(logging.ERROR):
        assert drive(loop) == {"a": continuation(prompt, 30)}
    stats = drafting.all_stats()
    assert stats["raising"].faults > 10
    assert stats["ngram"].faults == 0
    assert stats["ngram"].num_calls[1] > 0
    logged = [record.getMessage() for record in caplog.records if "raising" in record.getMessage()]
    assert [message.split(" failed in ")[1].split(";")[0] for message in logged] == [
        "propose",
        "observe",
    ]


def test_members_of_one_kind_have_names_of_their_own():
    config = section(NGRAM, {**NGRAM, "max_matching_ngram_size": 2})
    members = [Member(ngram(each), 4, False) for each in config.members]
    made = Compose(config, members, VOCAB)
    assert [each.name for each in made.members] == ["ngram", "ngram-2"]


def test_mistakes_in_the_section_are_named():
    bad = {
        r"members\.1\.max_draf_len: unknown key; did you mean": [
            NGRAM,
            {**NGRAM, "max_draf_len": 1},
        ],
        r"members\.0\.decoding_type: unknown drafter 'X'": [{"decoding_type": "X"}],
        r"members\.1\.verification is 'rejection'": [NGRAM, {**NGRAM, "verification": "rejection"}],
        r"members: .*at least 1": [],
    }
    for message, members in bad.items():
        with pytest.raises(ConfigError, match=message):
            section_of(members)
    with pytest.raises(ConfigError, match="keep_order"):
        section_of([NGRAM], mode="merge", keep_order=True)
    with pytest.raises(ConfigError, match=r"mode.*a model or a head"):
        section_of([NGRAM], mode="extend")
    with pytest.raises(ConfigError, match=r"mode.*continues drafts: NGram, PromptLookup"):
        section_of([MODEL, {"decoding_type": "NGramMapK"}], mode="extend")


def section_of(members: list, **options) -> None:
    data = {"decoding_type": "Compose", "members": members, **options}
    EngineConfig.load({"model": "m", "speculative_config": data})


def test_lengths_and_rule_are_handed_down():
    config = section(NGRAM, MODEL, mode="merge", verification="rejection")
    assert config.draft_len == 9
    assert section(NGRAM, MODEL, mode="precedence").draft_len == 5
    assert section(NGRAM, MODEL, {**MODEL, "max_draft_len": 2}, mode="extend").draft_len == 9
    assert section(NGRAM, MODEL, mode="extend", max_draft_len=7).draft_len == 7
    assert {member.verification for member in config.members} == {"rejection"}
    assert section(NGRAM, MODEL).draft_len == 5
    dialect = section({"method": "ngram", "num_speculative_tokens": 3})
    assert dialect.members[0].max_draft_len == 3
    assert isinstance(section(NGRAM, MODEL).members[1], DraftTargetConfig)


def test_merged_drafts_of_the_toy_language_are_exact(make_loop, request_of, drive):
    """Random members, random trees, small budgets: greedy output never changes."""

    class Wild(NoDrafter):
        def __init__(self, seed: int) -> None:
            self.name, self.random, self.texts = f"wild{seed}", random.Random(seed), {}

        def open(self, requests):
            for request in requests:
                self.texts[request.id] = request.prompt.tolist()

        def propose(self, batch, budgets):
            return [
                self.guess(self.texts[name], int(budget))
                for name, budget in zip(batch.request_ids, budgets, strict=True)
            ]

        def observe(self, batch, verdict):
            for row, name in enumerate(batch.request_ids):
                self.texts[name] += verdict.tokens(row).tolist()

        def guess(self, text, budget):
            tokens = []
            for _ in range(self.random.randrange(0, budget + 1)):
                right = self.random.random() < 0.7
                tokens.append(next_token(tuple(text + tokens)) if right else 0)
            return tree.chain(tokens, self.name)

    for seed, mode in itertools.product(range(4), ("merge", "precedence")):
        drafting = Drafting(scripted(*(Wild(seed + 10 * i) for i in range(3)), mode=mode), VOCAB)
        loop = make_loop(drafting=drafting)
        wanted = {}
        for index in range(5):
            wanted[str(index)] = continuation((index, seed), 30)
            loop.add(request_of(str(index), (index, seed), 30))
        assert drive(loop) == wanted
        accepted = [each.num_acc_tokens > 0 for each in drafting.all_stats().values()]
        assert all(accepted) if mode == "merge" else accepted[0]
