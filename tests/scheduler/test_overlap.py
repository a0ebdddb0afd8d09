"""The overlapped loop emits what the plain loop emits, whatever happens to steps in flight."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest

from outrider.drafters.drafting import Drafting
from outrider.drafters.head_drafters import Colocated
from outrider.drafters.protocol import NoDrafter
from outrider.errors import InvalidRequestError, WorkerDiedError, WorkerError
from outrider.scheduler.loop import Loop, OverlapLoop
from outrider.workers.seats import Seats

from ..helpers.toy import VOCAB, OracleDrafting, continuation


def idle() -> Drafting:
    return Drafting(NoDrafter(), VOCAB)


def drafting_of(where: str, seed: int):
    """None, on the host (where it rests now and then, if so), or in the ranks."""
    if where == "ranks":
        return Drafting(Colocated("head"), VOCAB, ranks_draft=True)
    return OracleDrafting(seed) if where in ("host", "rests") else idle()


class Unready:
    """Lets time pass between a post and its verdict: what the loop does meanwhile is recorded."""

    def __init__(self, loop) -> None:
        self.num_ahead = self.num_ahead_nodes = self.num_posted = self.most = self.num_nodes = 0
        post, collect = loop.target.post, loop.target.collect

        def posted(batch, drafts):
            self.num_posted += 1
            is_ahead = bool((batch.plan.context_lens < 0).any())
            self.num_ahead += is_ahead
            self.num_ahead_nodes += is_ahead * int(batch.max_nodes.sum())
            self.num_nodes += sum(each.num_nodes for each in drafts)
            post(batch, drafts)
            self.most = max(self.most, len(loop.target.verdicts))

        loop.target.post, loop.target.collect = posted, collect


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("drafts", "num_groups"),
    [("none", 1), ("host", 1), ("rests", 1), ("ranks", 1), ("none", 2), ("host", 2), ("host", 3)],
)
def test_random_lives_token_for_token(make_loop, request_of, seed, drafts, num_groups):
    """Few blocks and seats, so that requests are preempted; random arrivals, ends and aborts."""
    rng = random.Random(seed)
    loop = make_loop(
        num_blocks=rng.choice([24, 40, 200]),
        drafting=drafting_of(drafts, seed),
        kind=OverlapLoop,
        max_num_seqs=rng.choice([2, 5]),
        max_num_batched_tokens=rng.choice([16, 64]),
        num_groups=num_groups,
    )
    watched = Unready(loop)
    outputs: dict[str, tuple[int, ...]] = {}
    requests, ended, aborted, scored = {}, {}, set(), set()
    arrived = []

    def take_in() -> None:
        while arrived:
            loop.add(arrived.pop())

    loop.take_in = take_in

    def take(deltas) -> None:
        for delta in deltas:
            name = delta.request_id
            assert name not in ended, "nothing comes after the end"
            if name not in outputs and delta.token_ids:
                prompt, table = requests[name].prompt.tolist(), delta.prompt_logprobs
                assert prompt[1:] == (table.chosen.tolist() if name in scored else prompt[1:])
            outputs[name] = outputs.get(name, ()) + delta.token_ids
            if delta.finish_reason:
                ended[name] = delta.finish_reason

    for turn in range(600 * num_groups):
        if turn < 400 and rng.random() < 0.15:
            name = f"r{len(requests)}"
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30)))
            stop = (rng.randrange(VOCAB),) if rng.random() < 0.5 else ()
            request = request_of(
                name,
                prompt,
                rng.randrange(1, 25),
                eos_token_ids=stop,
                priority=rng.randrange(2),
                sampling={"prompt_logprobs": rng.randrange(3)} if rng.random() < 0.3 else {},
            )
            if loop.has_work and rng.random() < 0.5:
                arrived.append(request)  # while the ranks compute
            else:
                loop.add(request)
            requests[name] = request
            if request.sampling.prompt_logprobs is not None:
                scored.add(name)
        if requests and rng.random() < 0.05:
            name = rng.choice(sorted(requests))
            if name not in ended and requests[name] not in arrived:
                aborted.add(name)
                take(loop.abort(name))
                if loop._in_flight(name):
                    with pytest.raises(InvalidRequestError, match="in use"):
                        loop.add(requests[name])
        if drafts == "rests" and rng.random() < 0.1:
            loop.scheduler.budget.enabled ^= True
        if loop.has_work:
            take(loop.step())
            loop.scheduler.check()
    assert not loop.has_work
    assert set(ended) == set(requests)
    for name, request in requests.items():
        tokens = continuation(tuple(request.prompt.tolist()), request.sampling.max_tokens)
        ends = [i for i, token in enumerate(tokens) if token in request.eos_token_ids]
        wanted = tokens[: ends[0] + 1] if ends else tokens
        if name in aborted and ended[name] == "abort":
            assert wanted[: len(outputs[name])] == outputs[name]
        else:
            assert (outputs[name], ended[name]) == (wanted, "stop" if ends else "length")
    assert loop.scheduler.pool.num_free == loop.scheduler.pool.num_blocks
    is_ahead = drafts != "host" and num_groups == 1
    assert 1 + (is_ahead or num_groups > 1) <= watched.most <= max(1 + is_ahead, num_groups)
    assert (watched.num_ahead > 0) == is_ahead
    if drafts == "rests":
        assert min(watched.num_ahead, watched.num_nodes) > 20
    if drafts == "ranks":
        assert watched.num_ahead_nodes > 20
        assert loop.drafting.stats.num_acc_tokens > 20
        assert loop.drafting.stats.faults == 0
    assert getattr(loop.drafting, "tokens", {}) == {}  # every request was closed


def test_groups_take_turns_and_are_of_one_size(make_loop, request_of, drive):
    """Of two stages each has a step, of other requests; who comes late is in one of the two."""
    loop = make_loop(200, drafting=OracleDrafting(0), kind=OverlapLoop, num_groups=2)
    plans = []
    post = loop.target.post
    loop.target.post = lambda batch, drafts: (plans.append(batch.request_ids), post(batch, drafts))
    for index in range(6):
        loop.add(request_of(str(index), (index, 2, 3), 40))
    for _ in range(8):
        loop.step()
    for index in range(6, 8):
        loop.add(request_of(str(index), (index, 2, 3), 40))
    outputs = drive(loop)
    assert outputs.keys() == {str(index) for index in range(8)}
    assert all(not {*one} & {*other} for one, other in itertools.pairwise(plans[:16]))
    assert {len(plan) for plan in plans[:8]} == {3}
    assert {len(plan) for plan in plans[10:14]} == {4}


def test_blocks_run_short_while_steps_are_in_flight(make_loop, request_of, drive):
    """Nothing is taken from a request in flight; as soon as none is, the last one gives way."""
    loop = make_loop(22, drafting=idle(), kind=OverlapLoop, num_groups=2)
    for index in range(4):
        loop.add(request_of(str(index), (index, 2, 3), 30, priority=index % 2))
    assert drive(loop) == {str(i): continuation((i, 2, 3), 30) for i in range(4)}
    assert loop.scheduler.counts.num_preemptions > 0


@pytest.mark.parametrize("num_groups", [1, 2])
def test_another_tenant_takes_a_seat_of_several(make_loop, request_of, num_groups):
    """As in the plain loop: no request has to end for it."""
    loop = make_loop(200, drafting=idle(), kind=OverlapLoop, max_num_seqs=2, num_groups=num_groups)
    for index in range(2):
        loop.add(request_of(str(index), (index, 2, 3), 60, tenant="many"))
    for _ in range(5):
        loop.step()
    loop.add(request_of("single", (4, 5), 3, tenant="one"))
    deltas = [delta for _ in range(6 * num_groups) for delta in loop.step()]
    assert [each.finish_reason for each in deltas if each.request_id == "single"][-1] == "length"


def test_most_plain_steps_are_posted_ahead(make_loop, request_of, drive):
    loop = make_loop(drafting=idle(), kind=OverlapLoop)
    watched = Unready(loop)
    for index in range(4):
        loop.add(request_of(str(index), (index, 2, 3), 40))
    assert drive(loop) == {str(i): continuation((i, 2, 3), 40) for i in range(4)}
    assert (watched.num_posted, watched.num_ahead) == (40, 39)


@pytest.mark.parametrize("drafts", ["none", "host", "ranks"])
def test_who_arrives_during_a_step_is_in_the_next(make_loop, request_of, drafts):
    loop = make_loop(drafting=drafting_of(drafts, 0), kind=OverlapLoop)
    loop.add(request_of("first", (1, 2, 3), 9))
    plans = []
    post = loop.target.post
    loop.target.post = lambda batch, drafts: (plans.append(batch.request_ids), post(batch, drafts))
    loop.step()
    late = [request_of("late", (4, 5), 9)]
    loop.take_in = lambda: loop.add(late.pop()) if late else None
    while late:
        loop.step()  # until the first collects a verdict
    if drafts != "host":
        loop.step()  # collects the step that was planned ahead
    num_before = 1 if drafts == "host" else 2
    assert plans == [("first",)] * num_before + [("first", "late")]


def test_a_plain_plan_ahead_sends_no_tokens(make_loop, request_of):
    loop = make_loop(drafting=idle(), kind=OverlapLoop)
    plans = []
    post = loop.target.post
    loop.target.post = lambda batch, drafts: (plans.append(batch.plan), post(batch, drafts))
    loop.add(request_of("a", (1, 2, 3), 30))
    while loop.has_work:
        loop.step()
    assert sum(len(plan.tokens) for plan in plans) == 0
    assert [len(plan.openings) for plan in plans] == [1] + [0] * 29


@pytest.mark.parametrize("drafts", ["none", "host", "rests", "ranks"])
@pytest.mark.parametrize("died", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_failures(make_loop, request_of, drafts, died, seed):
    """Workers die and steps fail, while one or two steps are in flight; requests are replayed."""
    rng = random.Random(seed)
    drafting = drafting_of(drafts, seed)
    loop = make_loop(num_blocks=60, drafting=drafting, kind=OverlapLoop)
    post, collect = loop.target.post, loop.target.collect
    calls, failures = 0, 0
    fatal = set(rng.sample(range(3, 16), 4))

    def failing(*args):
        nonlocal calls, failures
        calls += 1
        if calls in fatal:
            failures += 1
            if not args:
                collect()
            raise WorkerDiedError("gone") if died or args else WorkerError("no memory")
        return post(*args) if args else collect()

    loop.target.collect = loop.target.post = failing
    for index in range(5):
        loop.add(request_of(str(index), (index, 2, 3), 30))
    outputs: dict[str, tuple[int, ...]] = {}
    while loop.has_work:
        loop.scheduler.budget.enabled ^= drafts == "rests" and rng.random() < 0.1
        try:
            deltas = loop.step()
        except WorkerError as error:
            loop.drop()
            if isinstance(error, WorkerDiedError):  # new ranks
                loop.target.verdicts = deque()
                loop.target.seats = Seats(loop.target.block_size)
                loop.target.slots[:] = -1
            loop.scheduler.requeue_all()
            continue
        for delta in deltas:
            outputs[delta.request_id] = outputs.get(delta.request_id, ()) + delta.token_ids
        loop.scheduler.check()
    assert failures == 4
    assert outputs == {str(i): continuation((i, 2, 3), 30) for i in range(5)}


def test_the_plain_loop_stays_as_it_is(make_loop, request_of, drive):
    loop = make_loop(drafting=idle())
    assert type(loop) is Loop
    loop.add(request_of("a", (1, 2), 9))
    assert drive(loop) == {"a": continuation((1, 2), 9)}
