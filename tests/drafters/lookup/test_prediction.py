"""Predictions: aligned as a slow reading of the rules, and the output is what it is without."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from outrider.drafters.drafting import Drafting, WithPredictions
from outrider.drafters.lookup.prediction import Alignment
from outrider.drafters.protocol import NoDrafter
from outrider.errors import WorkerDiedError
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Request, SpeculationOptions, ints

from ...helpers import toy
from ...helpers.engines import Outputs, collect_all, engine_of, random_prompts
from ...helpers.head_files import eagle_tensors, write_eagle
from ...helpers.lookups import drafter_of
from ...helpers.toy import VOCAB


def num_steps(predicted: list[int], output: list[int], most: int = 32) -> tuple[int, Alignment]:
    """Steps in which `output` comes if every step verifies the draft at hand."""
    alignment, begin, steps = Alignment(ints(predicted)), 0, 0
    while begin < len(output):
        draft = alignment.draft(most)
        agreed = 0
        while draft is not None and agreed < min(len(draft), len(output) - begin - 1):
            if draft[agreed] != output[begin + agreed]:
                break
            agreed += 1
        begin += agreed + 1
        alignment.follow(output, begin)
        steps += 1
    return steps, alignment


TEXT = random.Random(0).choices(range(50), k=400)
CUT = [*TEXT[:150], *TEXT[170:]]
ADDED = [*TEXT[:150], *range(100, 120), *TEXT[150:]]
REPLACED = [*TEXT[:150], *range(100, 120), *TEXT[165:]]
EVERYWHERE = [100 if index % 40 == 20 else token for index, token in enumerate(TEXT)]


@pytest.mark.parametrize(
    ("output", "most_steps", "num_rejected"),
    [
        (TEXT, 16, 0),
        (CUT, 22, 20),
        (ADDED, 42, 0),
        (REPLACED, 42, 15),
        (EVERYWHERE, 50, 10),
        ([*range(100, 130), *TEXT], 50, 0),  # something comes before it
        ([*TEXT[200:], *TEXT[:200]], 30, 0),  # its halves the other way round
    ],
)
def test_the_place_is_found_again_after_an_edit(output, most_steps, num_rejected):
    steps, alignment = num_steps(TEXT, output)
    assert steps <= most_steps
    assert alignment.num_accepted + alignment.num_rejected == len(TEXT)
    assert abs(alignment.num_rejected - num_rejected) <= 2  # tokens beside an edit may agree


def test_ahead_comes_before_behind():
    phrase = [1, 2, 3]
    alignment = Alignment(ints([*phrase, 10, *range(20, 40), *phrase, 11, *phrase, 12, 13]))
    output = [*phrase, 10, *range(20, 40), 90, 91, *phrase]
    alignment.follow(output)
    assert alignment.draft(1).tolist() == [11]
    output += [92, 93, *phrase]
    alignment.follow(output)
    assert alignment.draft(2).tolist() == [12, 13]
    output += [94, 20, 21]
    alignment.follow(output)
    assert alignment.draft(2) is None  # two tokens are too few so far behind
    alignment.follow([*output, 22])
    assert alignment.draft(2).tolist() == [23, 24]


def test_a_wrong_prediction_is_given_up():
    rng = random.Random(1)
    wrong, output = rng.choices(range(12), k=500), rng.choices(range(12), k=500)
    alignment, num_drafted = Alignment(ints(wrong)), 0
    for end in range(1, len(output) + 1):
        draft = alignment.draft(32)
        num_drafted += 0 if draft is None else len(draft)
        alignment.follow(output, end)
    assert num_drafted < 200
    assert alignment.num_accepted < 150


def test_it_depends_on_the_texts_alone():
    rng = random.Random(2)
    for _ in range(200):
        predicted = rng.choices(range(6), k=rng.randrange(1, 60))
        output = [*predicted[rng.randrange(len(predicted)) :], *rng.choices(range(6), k=20)]
        whole, pieces = Alignment(ints(predicted)), Alignment(ints(predicted))
        whole.follow(output)
        end = 0
        while end < len(output):
            end = min(len(output), end + rng.randrange(4))
            pieces.follow(output, end)
        for name in ("place", "num_accepted", "num_rejected", "_matched", "_num_misses"):
            assert getattr(whole, name) == getattr(pieces, name)


def edited(rng: random.Random, text: list[int], vocab: int) -> list[int]:
    """`text` with some tokens changed, cut and added."""
    made: list[int] = []
    for token in text:
        chance = rng.random()
        if chance < 0.05:
            made.append(rng.randrange(2, vocab))
        elif chance < 0.10:
            made += [token, rng.randrange(2, vocab)]
        elif chance > 0.15:
            made.append(token)
    return made


@pytest.mark.parametrize("section", [None, {"decoding_type": "NGram", "max_draft_len": 3}])
def test_toy_loop_emits_the_same(make_loop, request_of, drive, section):
    inner = NoDrafter() if section is None else drafter_of(section, VOCAB)
    drafting = WithPredictions(Drafting(inner, VOCAB), VOCAB)
    loop = make_loop(128, drafting=drafting, max_draft_len=3)
    rng, wanted = random.Random(3), {}
    for index in range(12):
        prompt = tuple(rng.randrange(6) for _ in range(rng.randrange(1, 50)))
        wanted[str(index)] = text = toy.continuation(prompt, 60)
        request = request_of(str(index), prompt, 60)
        if index % 3:
            request = replace(request, prediction=ints(edited(rng, list(text), VOCAB)))
        loop.add(request)
    assert drive(loop) == wanted
    stats = drafting.all_stats()["prediction"]
    assert stats.faults == 0
    assert stats.num_acc_tokens > 0.6 * 8 * 60
    assert not loop.drafting._open


def test_drafters_keep_to_their_own_nodes(make_loop, request_of):
    loop = make_loop(128, drafting=WithPredictions(Drafting(NoDrafter(), VOCAB), VOCAB))
    loop.add(replace(request_of("0", (1,), 50), prediction=ints([1, 2])))
    loop.add(request_of("1", (1,), 50))
    short = SpeculationOptions(max_draft_len=2)
    loop.add(replace(request_of("2", (1,), 50), prediction=ints([1, 2]), speculation=short))
    off = SpeculationOptions(enabled=False)
    loop.add(replace(request_of("3", (1,), 50), prediction=ints([1, 2]), speculation=off))
    batch = loop.scheduler.schedule()
    assert batch.max_nodes.tolist() == [32, 6, 2, 0]
    assert batch.drafter_nodes.tolist() == [6, 6, 2, 0]


PROMPTS = random_prompts(6, 96) + [[5, 6, 7, 8] * 6]


def requests(outputs: Outputs | None, temperature: float) -> list[Request]:
    """One request a prompt; with the outputs of most of them, edited, as predictions."""
    rng, made = random.Random(4), []
    for index, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
        request = Request(str(index), ints(prompt), sampling, seed=index)
        if outputs is not None and index % 4:
            text = list(outputs[request.id])
            text = text if index % 2 else edited(rng, text, 96)
            request = replace(request, prediction=ints(text))
        made.append(request)
    return made


@pytest.fixture(scope="module")
def plain(tiny):
    with engine_of(tiny.target) as engine:
        return {each: collect_all(engine, requests(None, each))[0] for each in (0.0, 0.9)}


@pytest.mark.parametrize("name", ["none", "ngram", "draft", "colocated", "merge", "precedence"])
def test_a_model_emits_the_same(tiny, plain, name):
    """Bit by bit under `coupled`, at any temperature, beside every kind of drafter."""
    ngram = {"decoding_type": "NGram", "max_draft_len": 4}
    draft = {"decoding_type": "DraftTarget", "speculative_model": tiny.draft, "max_draft_len": 3}
    lookahead = {"decoding_type": "Lookahead", "max_window_size": 2}
    section = {
        "none": None,
        "ngram": ngram,
        "draft": {**draft, "draft_timeout_s": 30},
        "colocated": {**draft, "placement": "colocated"},
        "merge": {"decoding_type": "Compose", "mode": "merge", "members": [ngram, lookahead]},
        "precedence": {"decoding_type": "Compose", "members": [ngram, lookahead]},
    }[name]
    with engine_of(tiny.target, section) as engine:
        for temperature, wanted in plain.items():
            outputs, last = collect_all(engine, requests(wanted, temperature))
            assert outputs == wanted
            exact = last["1"].usage  # its prediction is its output
            assert (exact.drafter, exact.num_steps) == ("prediction", 2)
            assert exact.num_draft_tokens == exact.num_accepted_tokens == 38
        drafters = engine.stats()["drafters"]
        assert not any(each["faults"] for each in drafters.values())
        assert drafters["prediction"]["num_acc_tokens"] > 250
        assert drafters["prediction"]["health"]["state"] == "active"
        if name != "none":  # where there is no prediction
            assert any(
                each["num_acc_tokens"] for key, each in drafters.items() if key != "prediction"
            )


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_heads_draft_where_predictions_do_not(tiny, plain, tmp_path, placement):
    """A head's next draft comes with the verdict on a prediction, which has more nodes than it."""
    folder = write_eagle(tmp_path / "eagle", *eagle_tensors(tiny.target, 1))
    eagle = {"decoding_type": "Eagle", "speculative_model": folder, "max_draft_len": 3}
    if placement == "separate":
        eagle |= {"placement": placement, "draft_timeout_s": 30}
    with engine_of(tiny.target, eagle) as engine:
        for temperature, wanted in plain.items():
            outputs, last = collect_all(engine, requests(wanted, temperature))
            assert outputs == wanted
            assert last["1"].usage.num_steps == 2
        drafters = engine.stats()["drafters"]
        assert not any(each["faults"] for each in drafters.values())
        assert drafters["eagle"]["num_gen_tokens"] > 100


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_greedy_output_holds_under_other_rules(tiny, plain, rule):
    draft = {"decoding_type": "DraftTarget", "speculative_model": tiny.draft, "max_draft_len": 3}
    with engine_of(tiny.target, {**draft, "verification": rule}) as engine:
        assert collect_all(engine, requests(plain[0.0], 0.0))[0] == plain[0.0]
        collect_all(engine, requests(plain[0.9], 0.9))
        assert not any(each["faults"] for each in engine.stats()["drafters"].values())


def test_preemption_lost_workers_and_replays_keep_it(tiny, plain, monkeypatch):
    options = {"num_kv_blocks": 40, "block_size": 4, "max_num_batched_tokens": 64}
    options |= {"enable_prefix_caching": False, "max_model_len": 120}
    with engine_of(tiny.target, **options) as engine:
        verify, calls = engine._loop.target.verify, []

        def fails_once(batch, drafts):
            calls.append(batch.step)
            if len(calls) == 4:
                raise WorkerDiedError("as a test")
            return verify(batch, drafts)

        monkeypatch.setattr(engine._loop.target, "verify", fails_once)
        outputs, last = collect_all(engine, requests(plain[0.9], 0.9))
        assert outputs == plain[0.9]
        stats = engine.stats()
        assert stats["num_restarts"] == 1
        assert stats["requests"]["num_preemptions"] > 0
        assert last["1"].usage.num_steps < 10
        # An ingress that lost its engine sends the request again, with what was emitted.
        again = [
            replace(each, id=f"{each.id}-again", emitted=ints(outputs[each.id][:15]))
            for each in requests(plain[0.9], 0.9)
        ]
        replayed, last = collect_all(engine, again)
        assert list(replayed.values()) == list(outputs.values())
        assert last["1-again"].usage.num_steps < 6  # the place was found in what was emitted


def test_it_travels_with_the_request():
    from outrider.workers.transport.wire import decode, encode

    request = replace(requests(None, 0.0)[0], prediction=ints([3, 1, 2]))
    assert np.array_equal(decode(encode(request)).prediction, [3, 1, 2])
