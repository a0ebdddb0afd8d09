"""Members of a drafter group: routes, who joins and leaves, waits, and no order changes a token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from outrider.config import ComposeConfig, DraftTargetConfig, PARDConfig
from outrider.drafters.compose import Compose, Member
from outrider.drafters.draft_target import PARD, DraftTarget
from outrider.drafters.drafting import Drafting
from outrider.drafters.members import Members
from outrider.drafters.protocol import LEAST_WAIT_S, SHORT_WAIT_S, DraftWait, Health
from outrider.errors import CheckpointError, WorkerDiedError

from ..helpers.draft_model import FaultyDraftModel, TokenCacheDraftModel
from ..helpers.toy import VOCAB, continuation


class Group:
    """A drafter group whose members join and leave when a test says so."""

    folder, vocab_size, reason, num_requests = "m", VOCAB, "", 0

    def __init__(self, *names: str, faulty: bool = False, seed: int = 0) -> None:
        self.models: dict[str, TokenCacheDraftModel] = {}
        self.news: list[Any] = []
        self.prefixes: set[tuple[int, ...]] = set()
        self.faulty, self.seed, self.is_closed = faulty, seed, False
        for name in names:
            self.join(name)

    @property
    def num_members(self) -> int:
        return len(self.models)

    def join(self, name: str) -> None:
        self.seed += 1
        kind = FaultyDraftModel if self.faulty else TokenCacheDraftModel
        model = self.models[name] = kind(200, self.seed)
        model.prefixes = self.prefixes
        self.news.append((name, model))

    def leave(self, name: str) -> None:
        del self.models[name]
        self.news.append((name, None))

    def changes(self) -> Sequence[Any]:
        news, self.news = self.news, []
        return news

    def shutdown(self) -> None:
        self.is_closed = True


def members_of(group: Group, *, kind: type[DraftTarget] = DraftTarget, **keys: Any) -> Members:
    section = {"drafter_group": "small", "max_draft_len": 4, **keys}
    if kind is PARD:
        config: DraftTargetConfig = PARDConfig(**section, mask_token_id=9)
    else:
        config = DraftTargetConfig(**section)
    return Members(config, group, kind.name, lambda model: kind(config, model))


def add(loop: Any, group: Group, request: Any, count: int) -> tuple[int, ...]:
    """Adds a request; what it will emit."""
    prompt = tuple(request.prompt.tolist())
    wanted = continuation(prompt, count)
    group.prefixes.add(prompt + wanted)
    loop.add(request)
    return wanted


def owners(members: Members) -> dict[str, str]:
    return {name: route.members[0] for name, route in members._routes.items() if route.members}


@pytest.mark.parametrize("kind", [DraftTarget, PARD])
@pytest.mark.parametrize("cache", [None, {"outcomes": 6, "adaptive": False}])
@pytest.mark.parametrize("routing", ["least_loaded", "round_robin", "prefix"])
def test_all_members_draft(make_loop, request_of, drive, routing, cache, kind):
    group = Group("a", "b", "c")
    members = members_of(group, kind=kind, drafter_routing=routing, speculation_cache=cache)
    drafting = Drafting(members, VOCAB)
    loop = make_loop(200, max_model_len=150, drafting=drafting)
    rng, wanted = random.Random(1), {}
    for index in range(12):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40)))
        wanted[str(index)] = add(loop, group, request_of(str(index), prompt, 40), 40)
    assert drive(loop) == wanted
    assert group.num_requests == 0
    assert drafting.stats.faults == 0
    assert drafting.stats.num_acc_tokens > 0.2 * drafting.stats.num_gen_tokens
    for drafter in members._drafters.values():
        drafter.check()
        assert drafter._step  # it was asked
    if cache:
        counts = drafting.stats.speculation_cache
        assert counts.num_hits > 0.3 * counts.num_lookups


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_events_changes_a_token(make_loop, request_of, seed):
    """Members die, return, join, leave and answer late or twice; steps fail, requests end."""
    rng = random.Random(seed)
    group = Group("a", "b", faulty=True, seed=100 * seed)
    members = members_of(
        group,
        drafter_routing=rng.choice(["least_loaded", "round_robin", "prefix"]),
        speculation_cache=rng.choice([None, {"outcomes": 6, "adaptive": bool(seed % 2)}]),
    )
    drafting = Drafting(members, VOCAB)
    loop = make_loop(200, max_model_len=150, drafting=drafting)
    verify, emitted, wanted, num_done, num_names = loop.target.verify, {}, {}, 0, 2
    for _ in range(3000):
        if num_done >= 12 and not loop.has_work:
            break
        if rng.random() < 0.1:
            if group.models and rng.random() < 0.5:
                group.leave(rng.choice(sorted(group.models)))
            elif len(group.models) < 5:
                num_names += 1
                group.join(str(num_names))
        name = str(rng.randrange(6))
        if num_done < 12 and name not in wanted and rng.random() < 0.3:
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50)))
            wanted[name], emitted[name] = add(loop, group, request_of(name, prompt, 30), 30), ()
        if name in wanted and rng.random() < 0.02:
            loop.abort(name)
            assert wanted.pop(name)[: len(emitted[name])] == emitted[name]
            num_done += 1
        if not loop.has_work:
            continue
        if rng.random() < 0.05:
            loop.target.verify = lambda batch, drafts: (_ for _ in ()).throw(WorkerDiedError("x"))
            with pytest.raises(WorkerDiedError):
                loop.step()
            loop.scheduler.requeue_all()
            loop.target.verify = verify
            continue
        for delta in loop.step():
            emitted[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                assert emitted[delta.request_id] == wanted.pop(delta.request_id)
                num_done += 1
        for drafter in members._drafters.values():
            drafter.check()
    assert num_done >= 12
    assert not wanted
    assert drafting.stats.num_acc_tokens > 0


def routed(make_loop, request_of, group, prompts, tenants=None, **keys):
    """A loop in which these requests have drafted, and the members."""
    members = members_of(group, **keys)
    drafting = Drafting(members, VOCAB)
    loop = make_loop(400, max_model_len=150, drafting=drafting, max_num_batched_tokens=800)
    for index, prompt in enumerate(prompts):
        tenant = tenants[index] if tenants else ""
        add(loop, group, request_of(str(index), prompt, 60, tenant=tenant), 60)
    for _ in range(4):
        loop.step()
    return loop, members


def test_round_robin_deals_requests_out(make_loop, request_of):
    prompts = [(1, 2, index) for index in range(6)]
    _, members = routed(
        make_loop, request_of, Group("a", "b", "c"), prompts, drafter_routing="round_robin"
    )
    assert Counter(owners(members).values()) == {"a": 2, "b": 2, "c": 2}


def test_equal_beginnings_of_a_tenant_share_a_member(make_loop, request_of):
    group = Group("a", "b", "c", "d")
    rng = random.Random(2)
    begins = [tuple(rng.randrange(VOCAB) for _ in range(64)) for _ in range(4)]
    prompts = [(*begins[index % 4], index) for index in range(8)]
    loop, members = routed(make_loop, request_of, group, prompts, drafter_routing="prefix")
    before = owners(members)
    assert all(before[str(index)] == before[str(index + 4)] for index in range(4))
    assert len({*before.values()}) > 1
    gone = before["0"]
    group.leave(gone)
    loop.step()
    moved = owners(members)
    assert gone not in moved.values()
    assert all(moved[name] == owner for name, owner in before.items() if owner != gone)
    tenants = [str(index) for index in range(8)]
    _, members = routed(
        make_loop, request_of, Group("a", "b", "c"), [begins[0]] * 8, tenants,
        drafter_routing="prefix",
    )  # fmt: skip
    assert len({*owners(members).values()}) > 1


def test_a_member_that_others_use_gets_fewer_requests(make_loop, request_of):
    group = Group("a", "b")
    members = members_of(group)
    members._drafters["a"].load = 0.9
    loop = make_loop(200, drafting=Drafting(members, VOCAB))
    for index in range(3):
        add(loop, group, request_of(str(index), (1, index), 30), 30)
    loop.step()
    found = Counter(owners(members).values())
    assert found["b"] > found["a"]


def test_requests_of_a_member_that_died_move_and_it_gets_new_ones(make_loop, request_of, drive):
    group = Group("a", "b")
    members = members_of(group, drafter_routing="round_robin")
    drafting = Drafting(members, VOCAB)
    loop = make_loop(200, drafting=drafting)
    wanted = {
        str(index): add(loop, group, request_of(str(index), (1, index), 30), 30)
        for index in range(4)
    }
    emitted = dict.fromkeys(wanted, ())

    def step() -> None:
        for delta in loop.step():
            emitted[delta.request_id] += delta.token_ids

    step()
    assert Counter(owners(members).values()) == {"a": 2, "b": 2}
    model = group.models["a"]
    model.dead, model.revive = True, lambda: False
    step()
    step()
    assert {*owners(members).values()} == {"b"}
    health = members.health()
    assert health.state == "active"
    assert health.reason.startswith("1 of 2 members; ")
    del model.revive
    step()
    assert members.health().reason == ""
    wanted["9"], emitted["9"] = add(loop, group, request_of("9", (3, 4), 30), 30), ()
    wanted["8"], emitted["8"] = add(loop, group, request_of("8", (3, 5), 30), 30), ()
    step()
    step()
    assert "a" in owners(members).values()
    for name, tokens in drive(loop).items():
        emitted[name] += tokens
    assert emitted == wanted
    assert drafting.stats.faults == 1


def clocked(members: Members, group: Group) -> list[float]:
    """The clock of the members, which only waits for silent ones advance."""
    now = [0.0]
    members.clock = lambda: now[0]
    for name, model in group.models.items():
        members._drafters[name].clock = members.clock

        def answer(timeout_s, own=model.answer, model=model):
            if model.silent:
                now[0] += timeout_s
            return own(timeout_s)

        model.answer = answer
    return now


@pytest.mark.parametrize("cache", [None, {"outcomes": 6, "adaptive": False}])
@pytest.mark.parametrize("timeout_s", [None, 0.5])
def test_silent_members_together_cost_one_deadline(
    make_loop, request_of, cache, timeout_s, caplog, monkeypatch
):
    monkeypatch.setattr(DraftWait, "short_s", SHORT_WAIT_S)
    group = Group("a", "b", "c")
    members = members_of(group, draft_timeout_s=timeout_s, speculation_cache=cache)
    now = clocked(members, group)
    loop = make_loop(200, drafting=Drafting(members, VOCAB))
    for index in range(3):
        add(loop, group, request_of(str(index), (1, index), 60), 60)
    for _ in range(3):
        loop.step()
    for model in group.models.values():
        model.silent = True
    waits = []
    for _ in range(4):
        before = now[0]
        loop.step()
        waits.append(now[0] - before)
    assert waits == pytest.approx([timeout_s or 0.25, 0, 0, 0])
    assert group.num_requests == 3
    assert members.health().state == "late"
    (record,) = [each for each in caplog.records if "no draft within" in each.getMessage()]
    assert record.exc_info is None, "it is expected of workers that may be stopped"


@pytest.mark.parametrize(("timeout_s", "waited_s"), [(None, 0.6), (0.3, 0.3), (2.0, 2.0)])
def test_a_slow_target_waits_for_a_slow_drafter(
    make_loop, request_of, timeout_s, waited_s, monkeypatch
):
    """By default as long as its steps take, but not as a step with a long prompt; else exactly."""
    monkeypatch.setattr(DraftWait, "short_s", SHORT_WAIT_S)
    group = Group("a")
    members = members_of(group, draft_timeout_s=timeout_s)
    now = clocked(members, group)
    drafting = Drafting(members, VOCAB)
    loop = make_loop(200, drafting=drafting)
    verify, steps_s = loop.target.verify, iter([9.0, 0.6, 0.8, 7.0])

    def slow(*arguments):
        now[0] += next(steps_s, 0.7)
        return verify(*arguments)

    loop.target.verify = slow
    add(loop, group, request_of("0", (1, 2), 60), 60)
    for _ in range(8):
        loop.step()
    assert drafting.stats.faults == 0
    group.models["a"].silent = True
    before = now[0]
    loop.step()
    assert now[0] - before == pytest.approx(waited_s + 0.7)
    assert drafting.stats.faults == 1


def test_a_wait_follows_the_times_that_drafts_take(monkeypatch):
    monkeypatch.setattr(DraftWait, "short_s", SHORT_WAIT_S)
    monkeypatch.setattr(DraftWait, "least_s", LEAST_WAIT_S)
    wait, given = DraftWait(None), DraftWait(0.02)
    seconds = []
    # Too few, then quick ones, some that are slower, a late one, one that came after a stop.
    for waited_s, count in ((0.002, 15), (0.002, 1), (0.032, 1), (0.2, 1), (5.0, 1), (0.004, 63)):
        for _ in range(count):
            wait.waited(waited_s)
            given.waited(waited_s)
        seconds.append(wait.seconds)
    assert seconds == pytest.approx([0.25, 0.1, 0.16, 0.25, 0.25, 0.25])
    wait.waited(0.004)
    assert wait.seconds == pytest.approx(0.1)
    assert given.seconds == 0.02
    for step in range(8):  # of a slow target
        wait.proposed(step)
        wait.observed(step + 0.4)
    assert wait.seconds == pytest.approx(0.4)


def test_a_silent_member_is_waited_for_as_long_as_drafts_may_take(
    make_loop, request_of, monkeypatch
):
    monkeypatch.setattr(DraftWait, "short_s", SHORT_WAIT_S)
    monkeypatch.setattr(DraftWait, "least_s", LEAST_WAIT_S)
    group = Group("a")
    members = members_of(group)
    now = clocked(members, group)
    loop = make_loop(200, drafting=Drafting(members, VOCAB))
    add(loop, group, request_of("0", (1, 2), 90), 90)
    for _ in range(20):
        loop.step()
    group.models["a"].silent = True
    before = now[0]
    loop.step()
    assert now[0] - before == pytest.approx(LEAST_WAIT_S)


def test_a_model_that_does_not_fit_any_more_is_named(make_loop, request_of, drive):
    group = Group("a")
    config = DraftTargetConfig(drafter_group="small", max_draft_len=4)
    refused: list[str] = []

    def make(model: Any) -> DraftTarget:
        if refused:
            raise CheckpointError(refused[0])
        return DraftTarget(config, model)

    members = Members(config, group, "draft_target", make)
    loop = make_loop(200, drafting=Drafting(members, VOCAB))
    wanted = add(loop, group, request_of("r", (4, 2), 40), 40)
    emitted: tuple[int, ...] = ()
    for _ in range(3):
        emitted += sum((delta.token_ids for delta in loop.step()), ())
    refused.append("no mask token")
    group.leave("a")
    group.join("b")
    assert emitted + drive(loop)["r"] == wanted
    health = members.health()
    assert (health.state, health.reason) == ("down", "drafter group 'small': no mask token")
    group.leave("b")
    refused.clear()
    group.join("c")
    add(loop, group, request_of("s", (4, 3), 40), 40)
    drive(loop)
    assert members.health().state == "active"
    group.leave("c")
    idle = Health("idle", "drafter group 'small': it is scaled to zero")
    assert members.health() == idle, "whether or not its leave was taken in"
    members._take_changes()
    assert members.health() == idle
    group.join("d")
    assert members.health().state == "idle"
    members._take_changes()
    assert members.health() == Health()
    members.shutdown()
    assert group.is_closed


def test_helpers_take_other_outcomes(make_loop, request_of, drive):
    """With one request, every member prepares its own part of the outcomes."""
    group = Group("a", "b", "c")
    asked: dict[str, list[Any]] = {name: [] for name in group.models}
    for name, model in group.models.items():

        def draft(step, own=model.draft, seen=asked[name]):
            if step.preparation is not None and step.preparation.shares is not None:
                seen.extend(step.preparation.shares.tolist())
            return own(step)

        model.draft = draft
    members = members_of(group, speculation_cache={"outcomes": 2, "adaptive": False})
    loop = make_loop(200, drafting=Drafting(members, VOCAB))
    wanted = add(loop, group, request_of("r", (4, 2), 40), 40)
    assert drive(loop) == {"r": wanted}
    shares = {tuple(map(tuple, each)) for each in asked.values()}
    assert {share for each in shares for share in each} == {(0, 3), (1, 3), (2, 3)}
    assert all(len(np.unique(each, axis=0)) == 1 for each in asked.values())


@pytest.mark.parametrize("cache", [None, {"outcomes": 6, "adaptive": False}])
@pytest.mark.parametrize(
    ("mode", "routings"),
    [
        ("merge", ("round_robin", "least_loaded")),
        ("merge", ("prefix", "round_robin")),
        ("precedence", ("least_loaded", "prefix")),
    ],
)
def test_one_engine_uses_two_groups(make_loop, request_of, mode, routings, cache):
    """In one tree, or the second where the first has nothing; one of each is killed on the way."""
    groups = Group("a", "b", seed=1), Group("c", "d", seed=2)
    groups[1].prefixes = groups[0].prefixes
    for model in groups[1].models.values():
        model.prefixes = groups[0].prefixes
    drafters = [
        members_of(group, drafter_routing=routing, speculation_cache=cache)
        for group, routing in zip(groups, routings, strict=True)
    ]
    sections = [
        {"decoding_type": "DraftTarget", "drafter_group": name, "max_draft_len": 4}
        for name in ("small", "other")
    ]
    config = ComposeConfig(members=sections, mode=mode, adaptive_draft_len=False)
    compose = Compose(config, [Member(each, 4, True) for each in drafters], VOCAB)
    drafting = Drafting(compose, VOCAB)
    loop = make_loop(300, max_model_len=150, drafting=drafting, max_draft_len=8)
    rng, emitted, wanted = random.Random(1), {}, {}

    def drive(names: str, num_tokens: int) -> None:
        for name in names:
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40)))
            wanted[name] = add(loop, groups[0], request_of(name, prompt, num_tokens), num_tokens)
            emitted[name] = ()
        while loop.scheduler.has_work:
            step()

    def step() -> None:
        for delta in loop.step():
            emitted[delta.request_id] += delta.token_ids
        for each in drafters:
            for drafter in each._drafters.values():
                drafter.check()

    drive("012345", 40)
    first, second = (member.stats.num_acc_tokens for member in compose.members)
    assert first > 0
    assert second > 0 or mode == "precedence"
    for name in groups[0].models:  # the first group is lost as a whole, one of the second too
        groups[0].models[name].dead = True
        groups[0].models[name].revive = lambda: False
    groups[1].models["c"].dead = True
    groups[1].models["c"].revive = lambda: False
    drive("6789", 40)
    assert compose.members[0].stats.num_acc_tokens == first
    assert compose.members[1].stats.num_acc_tokens > second
    for group in groups:
        for model in group.models.values():
            model.__dict__.pop("revive", None)
    drive("ABCD", 40)
    assert compose.members[0].stats.num_acc_tokens > first
    assert emitted == wanted


def test_all_members_begin_anew_where_one_of_them_fails(make_loop, request_of):
    group = Group("a", "b")
    members = members_of(group)
    drafting = Drafting(members, VOCAB)
    make_loop(200, drafting=drafting)
    begun = []
    for name, drafter in members._drafters.items():

        def begin_anew(name=name):
            begun.append(name)
            if name == "a":
                raise WorkerDiedError("gone")

        drafter.begin_anew = begin_anew
    drafting.begin_anew()
    assert begun == ["a", "b"]
    assert all(each.link_counts is members.link_counts for each in members._drafters.values())
    assert drafting.stats.faults == 0, "what was counted is forgotten"
