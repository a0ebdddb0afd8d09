"""Deployments in virtual time: figures known by arithmetic, and traces of known engines."""

from __future__ import annotations

import json
import random
import time

import pytest

from outrider.bench.measure import Load
from outrider.bench.modelled import Curve, DraftLaw, DraftTimes, TargetTimes, TreeShape, rates_of
from outrider.bench.simulation import Scenario, _Simulation, simulate
from outrider.bench.traces import Trace, TracedRequest, TraceRun, fit_draft, fit_target
from outrider.config import EngineConfig
from outrider.engine.weights import DrafterChange
from outrider.errors import ConfigError
from outrider.scheduler.timer import RequestRecord, StepRecord, TraceLog

from ..helpers.engines import complete, engine_of, random_prompts

FLAT = TargetTimes(Curve((1.0,), (20.0,)))
MODEL = {
    "decoding_type": "DraftTarget",
    "adaptive_draft_len": False,
    "speculative_model": "m",
    "max_draft_len": 4,
}
COLOCATED = {**MODEL, "placement": "colocated"}
NGRAM = {"decoding_type": "NGram", "adaptive_draft_len": False, "max_draft_len": 4}


def scenario_of(section=None, *, rates=(0.8,), ranks=(0.6, 0.3), recorded=(), engine=None, **given):
    config = EngineConfig.load(
        {"model": "m", "speculative_config": section or {"decoding_type": "None"}, **(engine or {})}
    )
    settings = {
        "target": FLAT,
        "draft": DraftTimes(Curve((1.0,), (1.0,))),
        "load": Load(streams=4),
        "num_requests": 40,
        "input_len": 64,
        "output_len": 64,
        **given,
    }
    return Scenario(
        config,
        law=lambda number: DraftLaw(rates, recorded=recorded, bonus_ranks=ranks, seed=number),
        **settings,
    )


def test_plain_decoding_is_a_token_per_step():
    found = simulate(scenario_of())
    assert (found.num_finished, found.num_tokens) == (40, 40 * 64)
    assert found.tokens_per_s == pytest.approx(4 / 0.020)
    assert found.ttft_ms == pytest.approx({"p50": 20.0, "p90": 20.0, "p99": 20.0})
    assert found.inter_token_ms["p50"] == pytest.approx(20.0)
    assert found.target_share == pytest.approx(1.0)
    assert found.hidden_share is None


@pytest.mark.parametrize("section", [MODEL, COLOCATED, NGRAM])
def test_drafts_give_what_the_formula_says(section):
    """1 + a + a^2 + a^3 + a^4 tokens of a step, and four forwards of the drafter before it."""
    found = simulate(scenario_of(section, num_requests=200, output_len=256))
    expected = sum(0.8**power for power in range(5))
    assert found.tokens_per_step == pytest.approx(expected, rel=0.03)
    assert found.tokens_per_s == pytest.approx(4 * expected / 0.024, rel=0.04)
    assert found.num_accepted == pytest.approx((expected - 1) / 4 * found.num_drafted, rel=0.05)


def test_nothing_sleeps():
    start = time.perf_counter()
    found = simulate(scenario_of(target=TargetTimes(Curve((1.0,), (60_000.0,))), num_requests=4))
    assert found.seconds > 3600
    assert time.perf_counter() - start < 60


def test_an_equal_seed_gives_equal_figures():
    one, two, other = (
        simulate(scenario_of(MODEL, range_ratio=0.5, load=Load(rate=20.0, seed=3), seed=seed))
        for seed in (1, 1, 2)
    )
    assert one == two != other


def test_a_speculation_cache_hides_drafting():
    """Its real look-ups and pace, over prepared outcomes of which some come true."""
    waiting = simulate(scenario_of(MODEL, load=Load(streams=1)))
    cache = {**MODEL, "speculation_cache": {"adaptive": False}}
    hidden = simulate(scenario_of(cache, load=Load(streams=1), ranks=(1.0,)))
    assert hidden.cache is not None
    assert hidden.cache.num_hits > 0.95 * (hidden.cache.num_lookups - 40)
    assert hidden.hidden_share > 0.9 > 0.1 > waiting.hidden_share
    assert hidden.tokens_per_s > 1.15 * waiting.tokens_per_s
    never = simulate(scenario_of(cache, load=Load(streams=1), ranks=(0.0,)))
    assert never.cache.num_hits == 0


def test_engines_queue_for_a_drafter_that_they_share():
    given = {"num_engines": 4, "load": Load(streams=16), "num_requests": 160}
    slow = {"draft": DraftTimes(Curve((1.0,), (5.0,)))}
    found = [
        simulate(scenario_of(MODEL, num_drafters=count, **given, **slow)) for count in (1, 2, 4, 8)
    ]
    speeds = [each.tokens_per_s for each in found]
    assert speeds[0] < 0.75 * speeds[1] < speeds[2]
    assert found[0].drafter_share > 0.9 > found[2].drafter_share
    assert speeds[3] == pytest.approx(speeds[2], rel=0.02)  # a flat curve: dividing rows is no use


def test_sequences_are_divided_among_several_drafters():
    by_row = DraftTimes(Curve((0.0, 1.0), (0.0, 1.0)))
    one, four = (simulate(scenario_of(MODEL, draft=by_row, num_drafters=count)) for count in (1, 4))
    assert four.tokens_per_s > 1.2 * one.tokens_per_s


@pytest.mark.parametrize("streams", [8, 64])
def test_requests_spread_over_engines(streams):
    """By the rule of ingresses, few engines and many."""
    given = {"num_engines": 16, "num_requests": 320, "load": Load(streams=16 * streams)}
    found = simulate(scenario_of(**given, engine={"max_num_seqs": 2 * streams}))
    assert found.num_finished == 320
    assert found.tokens_per_s > 0.7 * min(16 * streams, 320) / 0.020


def test_what_a_full_queue_refuses_is_counted():
    engine = {"max_num_seqs": 1, "max_queued_requests": 2}
    found = simulate(scenario_of(engine=engine, load=Load(rate=1000.0)))
    assert found.num_refused > 0
    assert found.num_refused + found.num_finished == 40


def test_scarce_blocks_preempt_as_they_do_live():
    engine = {"num_kv_blocks": 24, "block_size": 16}
    found = simulate(scenario_of(engine=engine))
    assert found.num_preemptions > 0
    assert found.num_tokens == 40 * 64


def test_adaptive_lengths_end_drafting_that_does_not_pay():
    """The real controller, on virtual times: rows cost, and hardly a node is accepted."""
    steep = TargetTimes(Curve((1.0, 101.0), (10.0, 210.0)))
    given = {"target": steep, "rates": (0.1,), "output_len": 256}
    fixed = simulate(scenario_of(NGRAM, **given))
    adaptive = simulate(scenario_of({**NGRAM, "adaptive_draft_len": True}, **given))
    assert adaptive.tokens_per_s > 1.3 * fixed.tokens_per_s


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded", "prefix"])
@pytest.mark.parametrize("cache", [None, {"adaptive": False}])
def test_engines_share_the_members_of_a_group(routing, cache):
    """All of them, whatever the policy; one member more than engines are is of use."""
    section = {key: value for key, value in MODEL.items() if key != "speculative_model"}
    section |= {"drafter_group": "small", "drafter_routing": routing, "speculation_cache": cache}
    by_row = DraftTimes(Curve((0.0, 1.0), (0.0, 1.0)))
    given = {"num_engines": 2, "load": Load(streams=12), "draft": by_row}
    one, three = (
        simulate(scenario_of(section, num_drafters=count, num_requests=60, **given))
        for count in (1, 3)
    )
    assert one.num_finished == three.num_finished == 60
    assert three.tokens_per_s > 1.1 * one.tokens_per_s
    assert three.drafter_share < one.drafter_share
    if cache:
        assert three.cache.num_hits > 0


def test_requests_that_come_together_are_dealt_out_evenly():
    """A policy that counts requests leaves no member idle; by their beginnings, some are."""
    section = {key: value for key, value in MODEL.items() if key != "speculative_model"}
    by_row = DraftTimes(Curve((0.0, 1.0), (0.0, 4.0)))
    found = {}
    for routing in ("round_robin", "least_loaded", "prefix"):
        given = section | {"drafter_group": "small", "drafter_routing": routing}
        scenario = scenario_of(
            given, num_drafters=4, num_requests=8, output_len=256, load=Load(streams=8),
            draft=by_row,
        )  # fmt: skip
        found[routing] = simulate(scenario).tokens_per_s
    assert found["round_robin"] == pytest.approx(found["least_loaded"], rel=0.1)
    assert found["prefix"] < 0.95 * found["least_loaded"]


TREES = {
    "Eagle3": {"speculative_model": "m", "use_dynamic_tree": True, "max_draft_len": 4,
               "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 12},
    "Suffix": {"max_draft_len": 12, "max_tree_depth": 6, "shape": "tree"},
}  # fmt: skip


@pytest.mark.parametrize("kind", TREES)
def test_trees_give_what_the_formula_says(kind):
    """1 and the chances of all nodes, which are the likeliest; more than a chain gives."""
    section = {"decoding_type": kind, "adaptive_draft_len": False, **TREES[kind]}
    config = scenario_of(section).config.speculative_config
    law = DraftLaw((0.6,), bonus_ranks=(0.6, 0.3))
    shape = TreeShape(config.draft_len, 3, law)
    parents = [parent for each, kids in shape.children(12).items() for parent in [each] * len(kids)]
    assert len(parents) == 12
    reached: list[float] = []
    for parent, depth, rank in zip(shape.parents, shape.depths, shape.ranks(12)):
        reached.append((reached[parent] if parent >= 0 else 1.0) * law.chance(depth, rank))
    assert reached == sorted(reached, reverse=True)
    given = {"rates": (0.6,), "num_requests": 100, "output_len": 256}
    found = simulate(scenario_of(section, **given))
    assert found.tokens_per_step == pytest.approx(1 + sum(reached), rel=0.05)
    chain = simulate(scenario_of(NGRAM, **given))
    assert found.tokens_per_step > 1.1 * chain.tokens_per_step


def test_recorded_trees_are_drawn_as_they_were():
    pairs = {(8, 0): 50, (8, 1): 30, (8, 3): 20}
    law = DraftLaw(rates_of([pairs]), recorded=[pairs], bonus_ranks=(0.6, 0.3), seed=1)
    shape = TreeShape(4, 3, law)
    drawn = [law.draw_tree(8, shape) for _ in range(2000)]
    assert {nodes for nodes, _ in drawn} == {8}
    for (_, right), share in pairs.items():
        assert [len(path) for _, path in drawn].count(right) / 2000 == pytest.approx(
            share / 100, abs=0.04
        )
    assert all(shape.parents[node] == before for _, path in drawn
               for before, node in zip([-1, *path], path))  # fmt: skip


def test_what_is_not_modelled_is_refused_by_name():
    both = {"decoding_type": "Compose", "members": [NGRAM | {"adaptive_draft_len": None}, {
        "decoding_type": "Suffix"}]}  # fmt: skip
    for each in ({"decoding_type": "Lookahead"}, both):
        with pytest.raises(ConfigError, match="speculative_config: look-ahead and compositions"):
            simulate(scenario_of(each))


def test_a_law_draws_what_was_recorded():
    pairs = {(0, 0): 50, (4, 1): 30, (4, 4): 20}
    law = DraftLaw(rates_of([pairs]), recorded=[pairs], seed=1)
    drawn = [law.draw(4) for _ in range(4000)]
    for pair, share in pairs.items():
        assert drawn.count(pair) / 4000 == pytest.approx(share / 100, abs=0.03)
    assert {law.draw(2) for _ in range(200)} == {(0, 0), (2, 1), (2, 2)}
    longer = [law.draw(6) for _ in range(500)]
    assert {nodes for nodes, _ in longer} == {0, 6}
    assert (6, 6) in longer, "as the deepest rate says"
    assert law.draw(0) == (0, 0)
    assert rates_of([pairs]) == pytest.approx([1.0, 0.4, 1.0, 1.0])


def test_a_request_follows_a_recorded_one():
    law = DraftLaw([0.5], recorded=[{(4, 0): 3}, {(4, 4): 5}], seed=1)
    drawn = {text: {law.draw(4, text) for _ in range(20)} for text in range(4)}
    assert all(len(each) == 1 for each in drawn.values())
    assert drawn[0] == drawn[2] != drawn[1] == drawn[3]


@pytest.mark.parametrize(("text", "rows", "ms"), [("25", 9, 25.0), ("1:20,64:83", 33, 52.0)])
def test_a_curve_is_read(text, rows, ms):
    assert Curve.parse(text, "step_ms")(rows) == pytest.approx(ms)
    assert Curve.parse("1:20,64:83", "step_ms")(128) == pytest.approx(147)


@pytest.mark.parametrize("text", ["", "x", "1:2:3x", "1:20,1:30", "5:-1", "1:inf"])
def test_a_malformed_curve_names_its_field(text):
    with pytest.raises(ConfigError, match="step_ms: expected milliseconds"):
        Curve.parse(text, "step_ms")


@pytest.mark.slow
@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("section", [None, NGRAM, COLOCATED])
def test_a_simulation_from_a_trace_agrees_with_what_was_traced(section, streams):
    """A modelled live engine, with other costs than a trace can name, and noise."""
    bent = TargetTimes(Curve((1.0, 4.0, 16.0, 64.0, 512.0), (5.0, 6.0, 7.0, 16.0, 90.0)), 0.1, 1.0)
    draft = DraftTimes(Curve((0.0, 1.0), (0.8, 0.85)), 0.3)
    recorded = [{(0, 0): 40, (2, 1): 20, (4, 1): 20, (4, 4): 40}, {(4, 1): 9, (4, 4): 1}]
    recorded = recorded if section == NGRAM else []
    live = scenario_of(
        section, recorded=recorded, target=bent, draft=draft, load=Load(streams=streams),
        num_requests=120, range_ratio=0.3,
    )  # fmt: skip
    run = _Simulation(live)
    log, jitter = TraceLog("live", "NGram"), random.Random(4)
    (engine,) = run._engines
    engine.loop.timer.on_step = log
    verify = engine.target.verify

    def noisy(batch, drafts):
        verdict = verify(batch, drafts)
        engine.clock.wait(engine.clock.now_s + verdict.forward_ms * jitter.uniform(0, 0.2) / 1e3)
        return verdict

    engine.target.verify = noisy
    run.run()
    measured = run.outcome()
    trace = Trace.read({"version": 1, "machine": {}, "model": "m", "runs": [log.run()]})
    (traced,) = trace.runs
    again = scenario_of(
        section, recorded=traced.recorded, rates=rates_of(traced.recorded),
        target=fit_target(trace.runs), draft=fit_draft(traced), load=Load(streams=streams),
        num_requests=120, range_ratio=0.3, seed=9,
    )  # fmt: skip
    simulated = simulate(again)
    assert simulated.tokens_per_s == pytest.approx(measured.tokens_per_s, rel=0.1)
    assert simulated.tokens_per_step == pytest.approx(measured.tokens_per_step, rel=0.05)
    for name in ("ttft_ms", "inter_token_ms", "e2e_ms"):
        median = getattr(measured, name)["p50"]
        assert getattr(simulated, name)["p50"] == pytest.approx(median, rel=0.1)


def test_ten_thousand_requests_over_a_hundred_nodes_are_all_served():
    """Plain and short, so that it takes a moment; nothing waits for a clock."""
    found = simulate(
        scenario_of(
            num_requests=10_000, num_engines=100, num_drafters=100, output_len=4, input_len=16,
            load=Load(streams=2000),
        )
    )  # fmt: skip
    assert found.num_finished == 10_000


STEP = {"num_seqs": 1, "num_tokens": 1, "num_context": 8, "num_asked": 1, "longest": 2,
        "elapsed_ms": 5.0, "draft_ms": 0.5, "num_nodes": 2}  # fmt: skip


def run_of(**changes):
    """A run of two steps and a request, in plain values."""
    log = TraceLog("one", "NGram", clock=lambda: 100.0)
    log.end(RequestRecord("early", 99.0, 5, 5))
    log.end(RequestRecord("embedding", 101.0, 5, 0))
    for accepted in (1, 2):
        log(StepRecord(**STEP, drafts=(("secret-name", 2, accepted),)))
    log.end(RequestRecord("secret-name", 101.5, 7, 6))
    return {**log.run(), **changes}


def test_a_trace_has_neither_text_nor_names():
    run = run_of()
    assert "secret" not in json.dumps(run)
    assert run["requests"] == [[1.5, 7, 6, 0]]
    assert run["drafts"] == [[[2, 1, 1], [2, 2, 1]]]
    log = TraceLog("one", "NGram", 3, lambda: 0.0)
    for number in range(5):
        log.end(RequestRecord(str(number), 1.0, 1, 1))
        log(StepRecord(**STEP, drafts=()))
    assert (log.num_steps, log.num_requests, log.is_full) == (3, 3, True)


def test_a_served_engine_is_traced_and_its_requests_replayed(tiny):
    """Two engines' traces as one; each request with its own lengths, arrival and drafts."""
    prompts = random_prompts(5, 96)
    runs = []
    for _ in range(2):
        with engine_of(tiny.target, NGRAM, max_num_seqs=4) as engine:
            complete(engine, prompts)
            engine.record_trace(10_000)
            outputs, _ = complete(engine, prompts)
            engine.change_drafters(DrafterChange(replaces="ngram"))
            complete(engine, prompts[:2])
            engine.record_trace(0)
            complete(engine, prompts[:1])
            assert engine.stats()["trace"]["recording"] is False
            found = engine.trace()["runs"]
            assert engine.stats()["trace"]["num_requests"] == 7
            runs += json.loads(json.dumps(found))
    trace = Trace.read({"version": 1, "machine": {}, "model": "m", "runs": runs})
    assert [run.decoding_type for run in trace.runs] == ["NGram", "None"] * 2
    lens = sorted((len(prompt), len(outputs[str(at)])) for at, prompt in enumerate(prompts))
    for run in trace.runs[::2]:
        assert sorted(each[1:3] for each in run.requests) == lens
    joined, requests = trace.run_of("NGram"), trace.requests("NGram")
    assert len(joined.drafts) == sum(len(run.drafts) for run in trace.runs[::2])
    came = [each[0] for run in trace.runs for each in run.requests]
    assert [each.arrived_s for each in requests] == sorted(came)
    assert len(came) == 14
    assert len({each.drafts for each in requests if each.drafts >= 0}) == len(joined.drafts)
    scenario = scenario_of(NGRAM, requests=requests, num_requests=14, num_engines=2)
    found = simulate(scenario)
    assert found.num_tokens == sum(each.num_output for each in requests)
    assert found.seconds > requests[-1].arrived_s


def test_replayed_requests_follow_their_own_drafts():
    recorded = [{(4, 0): 1}, {(4, 4): 1}]
    requests = [TracedRequest(0.0, 4, 50, 1), TracedRequest(60.0, 4, 50, 0)]
    config = EngineConfig.load({"model": "m", "speculative_config": NGRAM})
    law = DraftLaw([0.5], recorded=recorded, followed=[each.drafts for each in requests])
    scenario = Scenario(
        config, FLAT, DraftTimes(Curve((1.0,), (0.0,))), lambda _: law, Load(streams=1),
        num_requests=2, requests=requests,
    )  # fmt: skip
    found = simulate(scenario)
    assert found.num_steps == 10 + 50
    assert found.ttft_ms == pytest.approx({"p50": 20.0, "p90": 20.0, "p99": 20.0})
    assert found.seconds == pytest.approx(61.0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"requests": [[1.0, 7, 6, 1]]}, "trace: one: a request has drafts that are not there"),
        ({"requests": [[1.0, 0, 6, 0]]}, "requests.0.1: at least 1"),
        ({"requests": [[-1.0, 7, 6, 0]]}, "requests.0.0: at least 0"),
        ({"requests": [[1.0, 7, 6]]}, "requests.0"),
        ({"drafts": [[[1, 2, 1]]]}, "trace: one: 2 of 1 nodes accepted"),
        ({"drafts": [[[1, 1, 0]]]}, "drafts.0.0.2: at least 1"),
        ({"columns": {"num_seqs": [1]}}, r"trace: one: columns of \[0, 1\] steps"),
    ],
)
def test_what_does_not_fit_together_is_named(changes, complaint):
    data = {"version": 1, "machine": {}, "model": "m", "runs": [run_of(**changes)]}
    with pytest.raises(ConfigError, match=complaint):
        Trace.read(data)
    columns = {**run_of()["columns"], "elapsed_ms": [1.0, -1.0]}
    with pytest.raises(ConfigError, match="negative or infinite"):
        Trace.read({**data, "runs": [run_of(columns=columns)]})
    columns = {**run_of()["columns"], "num_seqs": [1, 0]}
    with pytest.raises(ConfigError, match="steps of no sequence"):
        Trace.read({**data, "runs": [run_of(columns=columns)]})
    with pytest.raises(ConfigError, match="it has no requests"):
        Trace.read({**data, "runs": [run_of(requests=[])]}).requests()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 2}, "trace: not a trace of this version"),
        ({"runs": []}, "trace: it has no steps"),
        ({"more": 1}, "trace: not a trace of this version: more: unknown key"),
    ],
)
def test_what_is_no_trace_is_refused(change, complaint):
    good = {"version": 1, "machine": {}, "model": "m", "runs": []}
    with pytest.raises(ConfigError, match=complaint):
        Trace.read({**good, **change})


def test_a_trace_without_the_drafter_says_what_it_has():
    log = TraceLog("plain", "None")
    run = TraceRun.model_validate(log.run())
    trace = Trace(version=1, machine={}, model="m", runs=(run,))
    with pytest.raises(ConfigError, match="no drafts of NGram; it has None"):
        trace.run_of("NGram")
    with pytest.raises(ConfigError, match="plain: columns of"):
        Trace.read(trace.model_dump(mode="json"))
