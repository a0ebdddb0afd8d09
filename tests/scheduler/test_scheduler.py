"""The scheduler against a target whose KV cache holds token ids: every slot read is checked."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outrider.errors import InvalidRequestError, OverloadedError
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import ints
from outrider.workers.seats import Seats

from ..helpers.toy import OracleDrafting, continuation


def prompts(count: int, seed: int, longest: int = 60) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [
        tuple(rng.randrange(50) for _ in range(rng.randrange(1, longest))) for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("num_blocks", "budget"),
    [(200, 64), (200, 7), (30, 64)],
    ids=["roomy", "tiny token budget", "few blocks, so preemption"],
)
def test_every_tree_gives_the_plain_tokens(make_loop, request_of, drive, seed, num_blocks, budget):
    loop = make_loop(num_blocks, seed, max_model_len=110, max_num_batched_tokens=budget)
    wanted = {}
    for index, prompt in enumerate(prompts(24, seed)):
        loop.add(request_of(str(index), prompt, max_tokens=40))
        wanted[str(index)] = continuation(prompt, 40)
    assert drive(loop) == wanted
    assert loop.scheduler.pool.num_free == num_blocks
    assert loop.target.max_tokens_seen <= budget
    if num_blocks == 30:
        assert loop.scheduler.counts.num_preemptions > 0


def test_how_requests_end_and_when_they_began(make_loop, request_of, drive):
    loop = make_loop()
    loop.add(request_of("whole", (1, 2, 3), 6))
    loop.add(request_of("never ran", (1, 2), 6))
    loop.abort("never ran")
    loop.add(request_of("failed", (4, 5), 50))
    loop.add(replace(request_of("continued", (7, 8), 6), emitted=ints(continuation((7, 8), 2))))
    loop.step()
    loop.abort("failed", "error", "a reason")
    drive(loop)
    timer = loop.scheduler.timer
    assert timer.num_ended == {"stop": 0, "length": 2, "abort": 1, "error": 1}
    counts = {name: sum(each["counts"]) for name, each in timer.histograms().items()}
    # A request that came from a lost engine has had its first token there.
    assert (counts["first_token_s"], counts["queue_s"], counts["prefill_s"]) == (2, 2, 2)
    assert (counts["decode_s"], counts["whole_s"], counts["prompt_tokens"]) == (3, 4, 4)
    assert timer.histograms()["output_tokens"]["sum"] >= 12


def test_a_shared_prefix_is_computed_once(make_loop, request_of, drive):
    loop = make_loop()
    prompt = prompts(1, 9, 2)[0] * 41
    loop.add(request_of("first", prompt, 8))
    drive(loop)
    deltas = []
    loop.add(request_of("second", (*prompt, 3), 8))
    loop.add(request_of("other tenant", (*prompt, 3), 8, tenant="b"))
    while loop.scheduler.has_work:
        deltas += loop.step()
    cached = {delta.request_id: delta.num_cached_tokens for delta in deltas}
    assert cached == {"second": 40, "other tenant": 0}
    text = sum((d.token_ids for d in deltas if d.request_id == "second"), ())
    assert text == continuation((*prompt, 3), 8)


def test_a_better_priority_takes_the_seat_and_loses_nothing(make_loop, request_of, drive):
    loop = make_loop(max_num_seqs=1)
    loop.add(request_of("patient", (1, 2, 3), 30))
    outputs = {"patient": (), "urgent": ()}
    for _ in range(2):
        for delta in loop.step():
            outputs[delta.request_id] += delta.token_ids
    loop.add(request_of("urgent", (4, 5), 10, priority=-1))
    order = []
    while loop.scheduler.has_work:
        for delta in loop.step():
            outputs[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                order.append(delta.request_id)
        loop.scheduler.check()
    assert order == ["urgent", "patient"]
    assert outputs["patient"] == continuation((1, 2, 3), 30)
    assert outputs["urgent"] == continuation((4, 5), 10)


def test_replay_after_the_cache_was_lost_changes_nothing(make_loop, request_of, drive):
    loop = make_loop(seed=3)
    wanted = {}
    for index, prompt in enumerate(prompts(6, 3)):
        loop.add(request_of(str(index), prompt, 40))
        wanted[str(index)] = continuation(prompt, 40)
    outputs = dict.fromkeys(wanted, ())
    step = 0
    while loop.scheduler.has_work:
        step += 1
        if step % 5 == 0:
            loop.scheduler.requeue_all()
            loop.target.slots[:] = -1
        for delta in loop.step():
            outputs[delta.request_id] += delta.token_ids
        loop.scheduler.check()
    assert outputs == wanted


def test_stop_tokens_and_minimum_and_limits(make_loop, request_of, drive):
    truth = continuation((7, 7), 60)
    stop = truth[12]
    first = truth.index(stop)
    loop = make_loop()
    loop.add(request_of("stop", (7, 7), 60, eos_token_ids=(stop,)))
    loop.add(request_of("ignore", (7, 7), 60, eos_token_ids=(stop,), sampling={"ignore_eos": True}))
    loop.add(request_of("context", (7, 7), None))
    reasons = {}
    outputs = {"stop": (), "ignore": (), "context": ()}
    while loop.scheduler.has_work:
        for delta in loop.step():
            outputs[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                reasons[delta.request_id] = delta.finish_reason
    assert outputs["stop"] == truth[: first + 1]
    assert outputs["ignore"] == truth
    assert len(outputs["context"]) == 198
    assert reasons == {"stop": "stop", "ignore": "length", "context": "length"}


def test_abort_gives_everything_back(make_loop, request_of):
    loop = make_loop()
    loop.add(request_of("runs", tuple(range(30)), 30))
    loop.step()
    loop.add(request_of("waits", (1, 2), 5))
    for name in ("runs", "waits"):
        (delta,) = loop.abort(name)
        assert delta.finish_reason == "abort"
    assert loop.abort("runs") == []
    assert not loop.scheduler.has_work
    loop.scheduler.check()
    assert loop.scheduler.pool.num_free == 64


def test_a_deadline_ends_a_request_and_its_drafter_lets_go(make_loop, request_of, drive):
    drafting = OracleDrafting(0)
    loop = make_loop(drafting=drafting)
    loop.add(request_of("late", (1, 2, 3), timeout_s=-1.0))
    loop.add(request_of("early", (1, 2, 3), timeout_s=1e6))
    (delta,) = loop.abort_expired()
    assert (delta.request_id, delta.finish_reason) == ("late", "error")
    assert "deadline" in delta.error
    assert list(drafting.tokens) == ["early"]
    assert list(drive(loop)) == ["early"]


def test_what_can_never_run_is_refused(make_loop, request_of, drive):
    loop = make_loop(num_blocks=4, max_queued_requests=1)
    for prompt, field in (((), "prompt"), (tuple(range(49)) * 5, "prompt"), ((1,), "max_tokens")):
        with pytest.raises(InvalidRequestError) as caught:
            loop.add(request_of("bad", prompt, 100))
        assert caught.value.field == field
    loop.add(request_of("fine", (1,), 4))
    with pytest.raises(OverloadedError):
        loop.add(request_of("too many", (1,), 4))
    loop.add(replace(request_of("replayed", (1,), 4), was_accepted=True))
    assert list(drive(loop)) == ["fine", "replayed"]


def test_a_request_id_used_again_brings_its_own_settings(make_loop, request_of):
    """Settings stay with a seat from step to step, but not from request to request."""
    scheduler = make_loop().scheduler
    for top_k in (7, 9):
        scheduler.add(request_of("a", (1, 2), 8, sampling={"top_k": top_k}))
        (opening,) = scheduler.schedule().plan.openings
        assert opening.settings.top_k == top_k
        scheduler.abort("a")


def test_the_same_request_object_twice(make_loop, request_of):
    """Its second run owes its own `min_tokens`: nothing is kept from the first."""
    scheduler = make_loop().scheduler
    request = request_of("a", (1, 2), 8, sampling={"min_tokens": 1})
    for _ in range(2):
        scheduler.add(request)
        seats = Seats(4)
        assert seats.expand(scheduler.schedule().plan).sampling.min_new_tokens.tolist() == [1]
        scheduler._sequences["a"].tokens.extend(ints([5]))
        assert seats.expand(scheduler.schedule().plan).sampling.min_new_tokens.tolist() == [0]
        scheduler.abort("a")


def test_a_setting_beyond_int32_is_refused_and_not_met_in_the_step():
    for field in ("top_k", "min_tokens"):
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: 2**31})
        assert caught.value.field == field
