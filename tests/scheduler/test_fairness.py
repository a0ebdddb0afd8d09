"""Tenants share steps, seats and blocks evenly; one tenant alone is served in order of arrival."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from outrider.scheduler.fairness import TenantService, WaitingQueue
from outrider.scheduler.sequence import Sequence

from ..helpers.toy import continuation


def prompt_of(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(50) for _ in range(length))


@pytest.mark.parametrize(
    ("num_blocks", "max_tokens"), [(2000, 100), (120, 60)], ids=["few seats", "few blocks"]
)
def test_a_thousand_requests_delay_another_tenant_by_one_step(
    make_loop, request_of, num_blocks, max_tokens
):
    rng = random.Random(1)
    loop = make_loop(num_blocks, max_draft_len=0)
    for index in range(1000):
        loop.add(request_of(str(index), prompt_of(rng, 50), max_tokens, tenant="many"))
    for _ in range(20):
        loop.step()
    prompt = prompt_of(rng, 40)
    loop.add(request_of("single", prompt, max_tokens, tenant="one"))
    outputs: dict[str, tuple[int, ...]] = {"single": ()}
    late = 0  # steps without a token of it
    while len(outputs["single"]) < max_tokens:
        for delta in (deltas := loop.step()):
            outputs[delta.request_id] = outputs.get(delta.request_id, ()) + delta.token_ids
        late += not any(delta.request_id == "single" for delta in deltas)
        loop.scheduler.check()
    assert late <= 2  # its prompt is computed in the first or the second step
    assert outputs["single"] == continuation(prompt, max_tokens)


def test_prompts_of_two_tenants_are_computed_in_even_shares(make_loop, request_of):
    """One sends few long prompts and the other many short ones, earlier and later."""
    rng = random.Random(2)
    loop = make_loop(4000, max_num_seqs=8, max_draft_len=0)
    for index in range(40):
        loop.add(request_of(f"long-{index}", prompt_of(rng, 150), 1, tenant="long"))
    for index in range(400):
        loop.add(request_of(f"short-{index}", prompt_of(rng, 15), 1, tenant="short"))
    computed: Counter[str] = Counter()
    for _ in range(80):
        batch = loop.scheduler.schedule()
        for name, num_tokens in zip(batch.request_ids, batch.plan.chunk_lens.tolist(), strict=True):
            computed[name.split("-")[0]] += num_tokens
        drafts = loop.drafting.propose(batch)
        loop.scheduler.commit(batch, drafts, loop.target.verify(batch, drafts))
    assert abs(computed["long"] - computed["short"]) <= 150 + 64  # a prompt, and a step
    assert sum(computed.values()) > 4500


def test_a_tenant_that_was_idle_has_saved_up_nothing():
    shares = TenantService()
    shares.join("busy")
    shares.charge("busy", 1000)
    shares.join("idle")
    assert shares.served("idle") == 1000
    shares.leave("idle")
    shares.charge("busy", 500)
    shares.join("idle")
    assert shares.served("idle") == 1500


@pytest.mark.parametrize("num_tenants", [1, 3])
def test_the_queue_against_sorting(request_of, num_tenants):
    """With one tenant the order is that of priority and arrival alone."""
    rng = random.Random(num_tenants)
    shares, waiting = TenantService(), {}
    queue = WaitingQueue(shares)
    for arrival in range(400):
        tenant, priority = str(rng.randrange(num_tenants)), rng.choice([0, 0, 0, 1])
        request = request_of(str(arrival), (1, 2), tenant=tenant, priority=priority)
        shares.join(tenant)
        waiting[arrival] = Sequence(request, arrival, 9)
        queue.push(waiting[arrival])
        if rng.random() < 0.3:
            queue.remove(waiting.pop(rng.choice(list(waiting))))
        while waiting and rng.random() < 0.4:
            expected = min(
                waiting.values(),
                key=lambda one: (
                    one.request.priority,
                    shares.served(one.request.tenant) if num_tenants > 1 else 0,
                    one.arrival,
                ),
            )
            assert queue.head() is expected
            queue.remove(expected)
            charge = rng.randrange(50)
            shares.charge(expected.request.tenant, charge)
            if rng.random() < 0.2:  # preempted by the plan that admitted it
                shares.charge(expected.request.tenant, -charge)
                queue.push(expected)
            else:
                del waiting[expected.arrival]
        if waiting and rng.random() < 0.3:  # the workers died: what was computed is to be repeated
            lost = Sequence(rng.choice(list(waiting.values())).request, 0, 9)
            lost.num_computed = rng.randrange(40)
            queue.give_back_computed(lost)
        assert queue.size == len(waiting)


def test_work_that_failures_void_is_charged_once(make_loop, request_of):
    rng = random.Random(3)
    loop = make_loop(4000, max_draft_len=0)
    scheduler, shares = loop.scheduler, loop.scheduler._shares
    for name in ("a", "b"):
        loop.add(request_of(name, prompt_of(rng, 100), 5, tenant=name))

    def served() -> int:
        return shares.served("a") + shares.served("b")

    for _ in range(2):  # one step fails, and its tokens are scheduled again
        scheduler.schedule()
        assert served() == 64
    scheduler.requeue_all()
    assert served() == 0
    loop.step()
    loop.step()
    assert served() == 128
    scheduler.requeue_all()  # the caches are lost, and all of it is computed again
    assert served() == 0
    loop.add(request_of("other", prompt_of(rng, 10), 5, tenant="a"))
    scheduler.schedule()
    assert served() == 64
    scheduler.abort("a")
    scheduler.requeue_all()
    assert served() == 0


@pytest.mark.parametrize("fails", [True, False])
def test_a_request_that_ends_in_flight_is_charged_for_what_was_computed(
    make_loop, request_of, fails
):
    """The step's failure gives back its tokens, also those of requests that end with it; a tenant
    whose only request is gone is kept for that."""
    rng = random.Random(4)
    loop = make_loop(4000, max_draft_len=0)
    scheduler, shares = loop.scheduler, loop.scheduler._shares
    for name in ("a", "a-2", "b"):
        loop.add(request_of(name, prompt_of(rng, 20), 5, tenant=name[0]))
    batch = scheduler.schedule()
    chunks = dict(zip(batch.request_ids, batch.plan.chunk_lens.tolist(), strict=True))
    assert chunks == {"a": 20, "a-2": 20, "b": 20}
    scheduler.abort("a", "error")
    scheduler.abort("b", "error")
    assert (shares.served("a"), shares.served("b")) == (40, 20)
    if fails:
        batch = scheduler.schedule()  # what is left is planned, and charged, anew
        assert batch.request_ids == ("a-2",)
        assert shares.served("a") == 20
    else:
        drafts = loop.drafting.propose(batch)
        scheduler.commit(batch, drafts, loop.target.verify(batch, drafts))
        assert shares.served("a") == 40
    loop.add(request_of("b", prompt_of(rng, 20), 5, tenant="b"))
    assert shares.served("b") == shares.served("a")  # it was gone, and begins anew
    assert not shares.leaving


def test_a_tenant_without_a_seat_takes_one_and_nothing_is_lost(make_loop, request_of, drive):
    rng = random.Random(5)
    loop = make_loop(400, max_num_seqs=6, max_draft_len=0)
    wanted = {}
    for tenant in ("first", "second"):
        for index in range(9):
            name, prompt = f"{tenant}-{index}", prompt_of(rng, 10)
            wanted[name] = continuation(prompt, 30)
            loop.add(request_of(name, prompt, 30, tenant=tenant))
        for _ in range(4):
            loop.step()
    seats = Counter(each.request.tenant for each in loop.scheduler.running)
    assert seats["first"] + seats["second"] == 6
    assert seats["second"] >= 1
    done = drive(loop)
    assert loop.scheduler.counts.num_preemptions <= 2  # no seat goes back and forth
    assert {name: tokens[-5:] for name, tokens in done.items()} == {
        name: tokens[-5:] for name, tokens in wanted.items()
    }
