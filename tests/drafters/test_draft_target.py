"""The draft model's books against a draft model whose KV cache holds token ids."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outrider.config import DraftTargetConfig, PARDConfig
from outrider.drafters.draft_target import PARD, DraftTarget
from outrider.drafters.drafting import Drafting
from outrider.errors import WorkerDiedError

from ..helpers.draft_model import (
    FaultyDraftModel,
    TokenCacheDraftModel,
    text_despite_failures,
)
from ..helpers.toy import VOCAB, continuation

PROMPTS = {"a": (4, 2), "b": (7, 3, 1)}


def make_drafting(num_blocks: int, *, masks: bool = False) -> tuple[Drafting, TokenCacheDraftModel]:
    model = TokenCacheDraftModel(num_blocks)
    section = {"speculative_model": "m", "max_draft_len": 5}
    if masks:
        return Drafting(PARD(PARDConfig(**section, mask_token_id=9), model), VOCAB), model
    return Drafting(DraftTarget(DraftTargetConfig(**section), model), VOCAB), model


@pytest.mark.parametrize("masks", [False, True], ids=["in turn", "masks"])
@pytest.mark.parametrize("num_blocks", [200, 40], ids=["roomy", "evicting"])
def test_cache_and_tokens_stay_right(make_loop, request_of, drive, num_blocks, masks):
    drafting, model = make_drafting(num_blocks, masks=masks)
    loop = make_loop(200, max_model_len=150, drafting=drafting)
    rng, wanted = random.Random(5), {}
    for index in range(16):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 70)))
        wanted[str(index)] = continuation(prompt, 40)
        model.prefixes.add(prompt + wanted[str(index)])
        loop.add(request_of(str(index), prompt, 40))
    assert drive(loop) == wanted
    assert drafting.stats.faults == 0
    assert drafting.stats.num_acc_tokens > 0.3 * drafting.stats.num_gen_tokens
    drafting.drafter.check()


def test_a_failed_target_step_leaves_the_drafter_sound(make_loop, request_of, drive):
    drafting, model = make_drafting(100)
    loop = make_loop(200, drafting=drafting)
    wanted = continuation((1, 2, 3), 40)
    model.prefixes.add((1, 2, 3) + wanted)
    loop.add(request_of("a", (1, 2, 3), 40))
    assert text_despite_failures(loop) == wanted
    assert drafting.stats.faults == 0


def test_death_costs_speed_only_and_it_comes_back(make_loop, request_of, drive):
    drafting, model = make_drafting(100)
    loop = make_loop(200, drafting=drafting)
    wanted = continuation((4, 2), 60)
    model.prefixes.add((4, 2) + wanted)
    loop.add(request_of("a", (4, 2), 60))
    emitted = sum((delta.token_ids for delta in loop.step()), ())
    model.dead = True
    emitted += sum((delta.token_ids for delta in loop.step()), ())
    assert drafting.stats.faults == 1
    (health,) = drafting.all_health().values()
    assert (health["state"], health["last_fault"] != "") == ("down", True)
    before = drafting.stats.num_gen_drafts
    emitted += drive(loop)["a"]
    assert drafting.drafter.health().state == "active"
    assert emitted == wanted
    assert drafting.stats.num_gen_drafts > before


def test_a_silent_model_costs_one_deadline_and_its_late_answer_no_token(make_loop, request_of):
    drafting, model = make_drafting(100)
    loop = make_loop(200, drafting=drafting)
    wanted = {name: continuation(prompt, 40) for name, prompt in PROMPTS.items()}
    for name, prompt in PROMPTS.items():
        model.prefixes.add(prompt + wanted[name])
    loop.add(request_of("a", PROMPTS["a"], 40))
    emitted = dict.fromkeys(PROMPTS, ())

    def step() -> None:
        for delta in loop.step():
            emitted[delta.request_id] += delta.token_ids
        drafting.drafter.check()

    for _ in range(3):
        step()
    model.silent = True
    model.waits.clear()
    for _ in range(5):
        step()
    assert model.waits == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert drafting.drafter.health().state == "late"
    assert drafting.stats.faults == 1
    loop.abort("a")  # what the model still computes for it has no owner any more
    loop.add(request_of("b", PROMPTS["b"], 40))
    step()
    model.silent = False
    before = drafting.stats.num_gen_drafts
    while loop.scheduler.has_work:
        step()
    assert emitted["b"] == wanted["b"]
    assert wanted["a"][: len(emitted["a"])] == emitted["a"]
    assert drafting.stats.num_gen_drafts > before
    assert model.waits[-1] == 1.0


def test_what_a_late_answer_computed_is_not_computed_again(make_loop, request_of):
    """Else a model slower than its deadline would never catch up with a long prompt."""
    drafting, model = make_drafting(100)
    loop = make_loop(200, drafting=drafting, max_num_batched_tokens=200)
    prompt = tuple(index % VOCAB for index in range(130))
    wanted = continuation(prompt, 30)
    model.prefixes.add(prompt + wanted)
    loop.add(request_of("a", prompt, 30))
    emitted: tuple[int, ...] = ()
    while loop.scheduler.has_work:
        model.silent = not model.silent
        emitted += sum((delta.token_ids for delta in loop.step()), ())
    assert emitted == wanted
    assert model.num_tokens < 2 * len(prompt)


@pytest.mark.parametrize("masks", [False, True], ids=["in turn", "masks"])
def test_a_prompt_longer_than_a_draft_step_is_caught_up_in_pieces(
    make_loop, request_of, drive, masks
):
    drafting, model = make_drafting(100, masks=masks)
    loop = make_loop(200, drafting=drafting, max_num_batched_tokens=200)
    prompt = tuple(index % VOCAB for index in range(130))
    wanted = continuation(prompt, 30)
    model.prefixes.add(prompt + wanted)
    loop.add(request_of("a", prompt, 30))
    assert drive(loop) == {"a": wanted}
    assert drafting.stats.num_gen_drafts > 0


@pytest.mark.parametrize(
    ("rule", "asked"),
    [
        ("coupled", (0, False)),
        ("rejection", (7, True)),
        ("block", (7, True)),
        ("relaxed", (0, False)),
    ],
)
def test_the_rule_says_what_is_shipped_and_whose_noise_is_used(
    make_loop, request_of, drive, rule, asked
):
    model, steps = TokenCacheDraftModel(64), []
    draft = model.draft
    model.draft = lambda step: steps.append((step.probs_top, step.salted)) or draft(step)
    section = {"speculative_model": "m", "verification": rule, "probs_top": 7}
    config = DraftTargetConfig(**section, lossy=rule == "relaxed")
    loop = make_loop(drafting=Drafting(DraftTarget(config, model), VOCAB))
    model.prefixes.add((1, 2, *continuation((1, 2), 8)))
    loop.add(request_of("a", (1, 2), max_tokens=6))
    drive(loop)
    assert set(steps) == {asked}


def test_messages_are_counted(make_loop, request_of, drive):
    """Their sizes, and of answers that a step waits for the time without the model's own."""
    drafting, model = make_drafting(100)
    loop, now, draft = make_loop(200, drafting=drafting), [0.0], model.draft
    drafting.drafter.clock = lambda: now[0]

    def slow(step):
        now[0] += 0.05
        return replace(draft(step), sent_bytes=300, received_bytes=90, forward_ms=48.5)

    model.draft = slow
    model.prefixes.add((4, 2) + continuation((4, 2), 20))
    loop.add(request_of("a", (4, 2), 20))
    drive(loop)
    link = drafting.stats.as_dict()["link"]
    count = drafting.drafter._step
    assert link["sent_bytes"]["sum"] == 300 * count
    assert link["sent_bytes"]["counts"] == (0, count, 0, 0, 0, 0, 0, 0)
    assert link["received_bytes"]["sum"] == 90 * count
    assert link["link_s"]["sum"] == pytest.approx(0.0015 * count)
    config = DraftTargetConfig(speculative_model="m", placement="colocated")
    beside = Drafting(DraftTarget(config, TokenCacheDraftModel(100)), VOCAB)
    assert beside.stats.as_dict()["link"] is None, "its answers are no messages"


def prepared_loop(make_loop, model, on_miss: str, adaptive: bool):
    cache = {"outcomes": 6, "on_miss": on_miss, "adaptive": adaptive}
    section = {"speculative_model": "m", "max_draft_len": 4, "speculation_cache": cache}
    drafting = Drafting(DraftTarget(DraftTargetConfig(**section), model), VOCAB)
    return make_loop(200, max_model_len=150, drafting=drafting), drafting


@pytest.mark.parametrize("on_miss", ["auto", "draft", "none"])
def test_prepared_drafts_are_found_on_the_verdict(make_loop, request_of, drive, on_miss):
    model = TokenCacheDraftModel(200)
    loop, drafting = prepared_loop(make_loop, model, on_miss, adaptive=False)
    rng, wanted = random.Random(3), {}
    for index in range(10):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 70)))
        wanted[str(index)] = continuation(prompt, 40)
        model.prefixes.add(prompt + wanted[str(index)])
        loop.add(request_of(str(index), prompt, 40))
    assert drive(loop) == wanted
    drafting.drafter.check()
    counts = drafting.stats.speculation_cache
    assert drafting.stats.faults == 0
    assert counts.num_hits > 0.5 * counts.num_lookups
    assert counts.num_lookups == (
        counts.num_hits + counts.num_unprepared + counts.num_stale + counts.num_absent
    )
    assert drafting.drafter._cache.is_empty  # entries end with their requests


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_messages_changes_a_token(make_loop, request_of, seed):
    """Late, duplicated, stale and reordered answers, deaths, failed steps, aborts, reused ids.

    Two of three models read the target's verdicts, which are late, stale or reordered, too, or of
    steps that fail: the model's cache is what the drafter believes of it.
    """
    rng = random.Random(seed)
    model = FaultyDraftModel(rng.choice([40, 200]), seed)
    on_miss = rng.choice(["auto", "draft", "none"])
    loop, drafting = prepared_loop(make_loop, model, on_miss, adaptive=bool(seed % 2))
    plain, emitted, wanted, num_done = loop.target.verify, {}, {}, 0

    def verify(batch, drafts):
        verdict = plain(batch, drafts)
        model.hear(verdict)
        return verdict

    def lost(batch, drafts):
        if rng.random() < 0.5:
            verify(batch, drafts)
        raise WorkerDiedError("x")

    loop.target.verify = verify
    for _ in range(3000):
        if num_done >= 12 and not loop.has_work:
            break
        name = str(rng.randrange(6))
        if num_done < 12 and name not in wanted and rng.random() < 0.3:
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50)))
            wanted[name], emitted[name] = continuation(prompt, 30), ()
            model.prefixes.add(prompt + wanted[name])
            loop.add(request_of(name, prompt, 30))
        if name in wanted and rng.random() < 0.02:
            loop.abort(name)
            assert wanted.pop(name)[: len(emitted[name])] == emitted[name]
            num_done += 1
        if not loop.has_work:
            continue
        if rng.random() < 0.05:
            loop.target.verify = lost
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
        drafting.drafter.check()
    assert num_done >= 12
    assert not wanted
    counts = drafting.stats.speculation_cache
    assert counts.num_hits > 0
    assert counts.num_dropped > 0
    assert (model.num_begun > 0) == (
        model.reads_verdicts and on_miss != "none"
    ) or on_miss == "auto"
    assert not model.is_stale
