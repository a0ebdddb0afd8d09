"""Constrained requests in an engine: every drafter emits what none emits, and all of it parses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest

from outrider.engine.engine import Engine
from outrider.engine.frontend import Frontend
from outrider.engine.structured.constraints import ConstraintError
from outrider.errors import InvalidRequestError, WorkerDiedError
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Request, SpeculationOptions, ints
from outrider.tests.helpers.engines import Box, collect_all, engine_of
from outrider.tests.helpers.frontend import EOS
from outrider.tests.helpers.head_files import (
    eagle_tensors,
    medusa_tensors,
    write_eagle,
    write_medusa,
)
from outrider.tests.helpers.models import write_models
from outrider.workers.group import LocalGroup

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "colour", "count"],
    "additionalProperties": False,
}
KINDS = (
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"regex": r"(cat|mat|[a-f]{2}){2,3}-\d{3}"},
    {"choice": ["the cat sat", "the cat", "on the mat"]},
    {"grammar": 'root ::= "<" item "," item ">"\nitem ::= "cat" | "sat" | [0-9] [0-9]'},
)
MODULE = """
class Cats:
    def draft(self, token_ids, max_tokens):
        return ([*b'{"name":"the cat sat'] * 3)[len(token_ids) % 5 :][:max_tokens]
"""


@pytest.fixture(scope="module")
def models(tokenizer_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("structured")
    paths = write_models(tokenizer_path, folder)
    paths["head"] = write_medusa(folder / "head", medusa_tensors(paths["target"], 3), "safetensors")
    paths["eagle"] = write_eagle(folder / "eagle", *eagle_tensors(paths["target"], 1))
    (folder / "cats.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield paths
    sys.path.remove(str(folder))


def sections(models) -> dict[str, dict]:
    ngram = {"decoding_type": "NGram", "max_draft_len": 4}
    draft = {
        "decoding_type": "DraftTarget",
        "speculative_model": models["draft"],
        "max_draft_len": 4,
    }
    waits = {"draft_timeout_s": 30}  # a busy machine's pauses are no fault of theirs
    eagle = {"decoding_type": "Eagle", "speculative_model": models["eagle"], "max_draft_len": 4}
    return {
        "ngram": ngram,
        "suffix": {"decoding_type": "Suffix", "max_draft_len": 6},
        "user": {
            "decoding_type": "User",
            "drafter": "cats:Cats",
            "max_draft_len": 5,
            "timeout_s": 30,
        },
        "tree": {
            "decoding_type": "Compose",
            "mode": "merge",
            "max_draft_len": 8,
            "members": [ngram, {**draft, "max_draft_len": 3, **waits}],
        },
        "lookahead": {"decoding_type": "Lookahead"},
        "colocated draft": {**draft, "placement": "colocated"},
        "head": {"decoding_type": "Medusa", "speculative_model": models["head"]},
        "head with a cache": eagle,
        "separate head": {**eagle, "placement": "separate", **waits},
    }


def ask(
    engine: Engine,
    frontend: Frontend,
    *,
    emitted: dict | None = None,
    speculation: SpeculationOptions | None = None,
    **options,
):
    """Every kind at once, greedy and sampled: tokens and last delta by request."""
    requests = []
    for index, wanted in enumerate(KINDS):
        for temperature in (0.0, 0.9):
            sampling = SamplingParams(
                temperature=temperature,
                seed=index,
                max_tokens=64,
                structured_outputs=wanted,
                **options,
            )
            prompt = frontend.text_prompt("the cat sat on the mat")
            (request,) = frontend.requests(f"{index}-{temperature}", prompt, sampling)
            if speculation is not None:
                request = replace(request, speculation=speculation)
            if emitted is not None:
                request = replace(request, emitted=ints(emitted[request.id][:4]))
            requests.append(request)
    return collect_all(engine, requests)


def check_texts(frontend: Frontend, outputs, last) -> None:
    for name, tokens in outputs.items():
        assert last[name].finish_reason == "stop", (name, last[name])
        assert tokens[-1] == EOS
        text = frontend.vocabulary.text(tokens[:-1])
        wanted = KINDS[int(name[0])]
        if "json" in wanted:
            value = json.loads(text)
            assert list(value) == ["name", "colour", "count"]
            assert len(value["name"]) <= 4
            assert value["colour"] in ("red", "green")
            assert 0 <= value["count"] <= 99
        elif "regex" in wanted:
            assert re.fullmatch(wanted["regex"], text)
        elif "choice" in wanted:
            assert text in wanted["choice"]
        else:
            assert re.fullmatch(r"<(cat|sat|\d\d),(cat|sat|\d\d)>", text)


@pytest.fixture(scope="module")
def plain(models):
    with engine_of(models["target"]) as engine:
        frontend = Frontend(engine._config, engine.info)
        outputs, last = ask(engine, frontend, speculation=SpeculationOptions(enabled=False))
        check_texts(frontend, outputs, last)
        assert all(last[name].usage.num_steps == len(outputs[name]) for name in outputs)
        num_steps = {name: delta.usage.num_steps for name, delta in last.items()}
    return outputs, num_steps


NAMES = [
    "ngram",
    "suffix",
    "user",
    "tree",
    "lookahead",
    "colocated draft",
    "head",
    "head with a cache",
    "separate head",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_emits_the_plain_tokens(models, plain, monkeypatch, name):
    outputs, num_steps = plain
    monkeypatch.setattr(LocalGroup, "is_concurrent", True)
    with engine_of(models["target"], sections(models)[name]) as engine:
        frontend = Frontend(engine._config, engine.info)
        found, last = ask(engine, frontend)
        assert found == outputs
        stats = engine.stats()["drafters"]
        assert not any(each["faults"] for each in stats.values()), stats
        # The schema's names and punctuation come without forwards of their own.
        assert all(last[key].usage.num_steps < num_steps[key] * 0.75 for key in ("0-0.0", "0-0.9"))
        replayed, _ = ask(engine, frontend, emitted=outputs)
        assert replayed == outputs


BUDGET = {"begin": "<think>", "end": "</think>", "is_open": True}


def thoughts(engine: Engine, emitted: dict | None = None, n: int = 1) -> dict[str, tuple[int, ...]]:
    """Answers whose thinking is bounded by 0, 1 and 9 tokens, greedy and sampled."""
    frontend = Frontend(engine._config, engine.info)
    closing = frontend.tokenizer.encode(BUDGET["end"], add_special_tokens=False)
    requests = []
    for most in (0, 1, 9):
        for temperature in (0.0, 0.9):
            sampling = SamplingParams(
                temperature=temperature,
                seed=most,
                max_tokens=40,
                n=n,
                ignore_eos=True,
                thinking_budget={**BUDGET, "max_tokens": most},
            )
            prompt = frontend.text_prompt("the cat sat on the mat")
            for request in frontend.requests(f"{most}-{temperature}", prompt, sampling):
                if emitted is not None:
                    request = replace(request, emitted=ints(emitted[request.id][:6]))
                requests.append(request)
    outputs, last = collect_all(engine, requests)
    for name, tokens in outputs.items():
        assert last[name].finish_reason == "length", (name, last[name])
        if emitted is None:
            most = int(name[0])
            assert list(tokens[most : most + len(closing)]) == closing, name
            assert frontend.vocabulary.text(tokens).count(BUDGET["end"]) == 1
    return outputs


@pytest.fixture(scope="module")
def plain_thoughts(models):
    with engine_of(models["target"]) as engine:
        return thoughts(engine)


@pytest.mark.parametrize("name", NAMES)
def test_thinking_ends_with_its_budget_with_every_drafter(
    models, plain_thoughts, monkeypatch, name
):
    monkeypatch.setattr(LocalGroup, "is_concurrent", True)
    with engine_of(models["target"], sections(models)[name]) as engine:
        assert thoughts(engine) == plain_thoughts
        assert thoughts(engine, plain_thoughts) == plain_thoughts  # as after an engine's death


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_thinking_ends_with_its_budget_under_other_rules(models, plain_thoughts, rule):
    section = {**sections(models)["colocated draft"], "verification": rule}
    with engine_of(models["target"], section) as engine:
        found = thoughts(engine)
        greedy = {name: tokens for name, tokens in found.items() if name.endswith("-0.0")}
        assert greedy.items() <= plain_thoughts.items()


def test_several_completions_and_cached_prefixes_change_no_thinking(models, plain_thoughts):
    with engine_of(models["target"], sections(models)["ngram"], block_size=4) as engine:
        first = thoughts(engine, n=3)
        hits = engine.stats()["requests"]["num_hit_tokens"]
        assert thoughts(engine, n=3) == first
        assert engine.stats()["requests"]["num_hit_tokens"] > hits
    with engine_of(models["target"]) as engine:
        assert thoughts(engine, n=3) == first
        assert thoughts(engine) == plain_thoughts


FEW_BLOCKS = {
    "num_kv_blocks": 18, "block_size": 4, "max_model_len": 68, "max_num_batched_tokens": 24,
    "enable_prefix_caching": False,
}  # fmt: skip


def lose_workers_once(engine, monkeypatch):
    verify, calls = engine._loop.target.verify, []

    def fails_once(batch, drafts):
        calls.append(batch.step)
        if len(calls) == 6:
            raise WorkerDiedError("as a test")
        return verify(batch, drafts)

    monkeypatch.setattr(engine._loop.target, "verify", fails_once)


def test_preemption_and_lost_workers_change_no_thinking(models, plain_thoughts, monkeypatch):
    with engine_of(models["target"], sections(models)["ngram"], **FEW_BLOCKS) as engine:
        lose_workers_once(engine, monkeypatch)
        assert thoughts(engine) == plain_thoughts
        stats = engine.stats()
        assert stats["num_restarts"] == 1
        assert stats["requests"]["num_preemptions"] > 0


@pytest.mark.parametrize("name", [None, "ngram", "head with a cache"])
def test_a_budget_costs_nothing_before_it_is_nearly_spent(models, monkeypatch, name):
    """No masks, and steps are posted ahead as those of free requests are."""
    monkeypatch.setattr(LocalGroup, "is_concurrent", True)
    section = None if name is None else sections(models)[name]
    with engine_of(models["target"], section) as engine:
        frontend = Frontend(engine._config, engine.info)
        structured, asked = engine._structured, []
        propose = structured.propose

        def seen(batch):
            drafts = propose(batch)
            asked.append((structured._are_free(), [draft.masks for draft in drafts]))
            return drafts

        monkeypatch.setattr(structured, "propose", seen)
        prompt = frontend.text_prompt("the cat sat on the mat")
        outputs = []
        for most in (None, 100, 20):
            asked.clear()
            budget = None if most is None else {**BUDGET, "max_tokens": most}
            sampling = SamplingParams(
                temperature=0, max_tokens=40, ignore_eos=True, thinking_budget=budget
            )
            outputs.append(collect_all(engine, frontend.requests("r", prompt, sampling))[0]["r"])
            masked = [masks for _, step in asked for masks in step if masks is not None]
            assert bool(masked) == (most == 20)
            assert all(free for free, _ in asked) == (most != 20)
            assert any(free for free, _ in asked)
        assert outputs[0] == outputs[1]
        assert outputs[0][:20] == outputs[2][:20]


def test_forced_tokens_need_no_drafter(models, plain):
    outputs, num_steps = plain
    with engine_of(models["target"]) as engine:
        found, last = ask(engine, Frontend(engine._config, engine.info))
        assert found == outputs
        assert all(last[key].usage.num_steps < num_steps[key] * 0.75 for key in ("0-0.0", "0-0.9"))
        narrow = SpeculationOptions(max_draft_len=1)
        found, narrowed = ask(engine, Frontend(engine._config, engine.info), speculation=narrow)
        assert found == outputs
        assert narrowed["0-0.0"].usage.num_steps > last["0-0.0"].usage.num_steps


@pytest.mark.parametrize(
    ("settings", "least"), [({"ignore_eos": True}, 64), ({"min_tokens": 12}, 12)]
)
def test_a_grammar_that_may_end_or_go_on_goes_on_where_it_is_told_to(models, settings, least):
    """Nothing but the end may come after `choice`, and anything after the first cat."""
    kinds = [{"regex": "(cat|sat|mat)+"}, {"choice": ["cat"]}]
    with engine_of(models["target"], sections(models)["ngram"]) as engine:
        frontend = Frontend(engine._config, engine.info)
        prompt = frontend.text_prompt("the cat sat on the mat")
        for enabled in (True, False):
            speculation = SpeculationOptions(enabled=enabled)
            requests = []
            for index, wanted in enumerate(kinds):
                sampling = SamplingParams(
                    temperature=0, max_tokens=64, structured_outputs=wanted, **settings
                )
                (request,) = frontend.requests(f"{index}", prompt, sampling)
                requests.append(replace(request, speculation=speculation))
            found, last = collect_all(engine, requests)
            assert len(found["0"]) >= least
            assert re.match("(cat|sat|mat)+", frontend.tokenizer.decode(found["0"]))
            assert frontend.tokenizer.decode(found["1"][:-1]) == "cat"
            assert (found["1"][-1], last["1"].finish_reason) == (EOS, "stop")


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_texts_match_under_other_rules(models, plain, rule):
    section = {**sections(models)["colocated draft"], "verification": rule}
    with engine_of(models["target"], section, tensor_parallel_size=2) as engine:
        frontend = Frontend(engine._config, engine.info)
        outputs, last = ask(engine, frontend)
        check_texts(frontend, outputs, last)
        greedy = {name: tokens for name, tokens in outputs.items() if name.endswith("-0.0")}
        assert greedy.items() <= plain[0].items()
        assert engine.stats()["drafters"]["draft_target"]["faults"] == 0


def test_preemption_and_lost_workers_change_nothing(models, plain, monkeypatch):
    with engine_of(models["target"], sections(models)["ngram"], **FEW_BLOCKS) as engine:
        frontend = Frontend(engine._config, engine.info)
        lose_workers_once(engine, monkeypatch)
        requests = []
        for index, wanted in enumerate(KINDS):
            sampling = SamplingParams(
                temperature=0.9, seed=index, max_tokens=44, structured_outputs=wanted
            )
            prompt = frontend.text_prompt("the cat sat on the mat")
            requests += frontend.requests(f"{index}-0.9", prompt, sampling)
        found, _ = collect_all(engine, requests)
        assert found == {name: plain[0][name][:44] for name in found}
        stats = engine.stats()
        assert stats["num_restarts"] == 1
        assert stats["requests"]["num_preemptions"] > 0


def test_free_requests_beside_them_are_left_alone(models, monkeypatch):
    """Also those whose grammar is refused by the engine cost the others nothing."""
    monkeypatch.setattr(LocalGroup, "is_concurrent", True)
    with engine_of(models["target"], sections(models)["ngram"]) as engine:
        frontend = Frontend(engine._config, engine.info)
        prompt = frontend.text_prompt("the cat sat on the mat")
        free = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        held = SamplingParams(temperature=0, max_tokens=24, structured_outputs=KINDS[1])
        (alone,) = frontend.requests("free", prompt, free)
        expected, _ = collect_all(engine, [alone])
        pair = [*frontend.requests("free", prompt, free), *frontend.requests("held", prompt, held)]
        found, last = collect_all(engine, pair)
        assert found["free"] == expected["free"]
        assert last["held"].finish_reason == "stop"
        wrong = SamplingParams(structured_outputs={"grammar": 'start: <|no_such_token|> "a"'})
        request = replace(pair[1], id="wrong", sampling=wrong)
        with pytest.raises(InvalidRequestError, match=r"structured_outputs\.grammar: "):
            engine.submit(request, Box())
        assert collect_all(engine, [pair[1]])[0]["held"] == found["held"]
        assert engine._structured._states == {}


class Breaks:
    """A constraint of the library's that breaks: on a guess, or after some tokens."""

    def __init__(self, inner, after: int, *, on_guess: bool) -> None:
        self.inner, self.after, self.on_guess = inner, after, on_guess
        self.num_consumed, self.broken = 0, False

    def allowed(self):
        self._check()
        return self.inner.allowed()

    def forced(self):
        self._check()
        return self.inner.forced()

    def consume(self, token):
        self.num_consumed += 1
        self.broken |= self.num_consumed > self.after
        self._check()
        self.inner.consume(token)

    def rewind(self, num_tokens):
        self._check()
        if not self.on_guess:
            self.num_consumed -= num_tokens
        self.inner.rewind(num_tokens)

    def num_free(self):
        return self.inner.num_free()

    def _check(self):
        if self.broken:
            raise ConstraintError("too complex")


@pytest.mark.parametrize("on_guess", [True, False])
def test_a_constraint_that_breaks(models, plain, monkeypatch, on_guess):
    """On a guess: rebuilt, and the text is the same. On an emitted token: the request fails."""
    with engine_of(models["target"], sections(models)["user"]) as engine:
        frontend = Frontend(engine._config, engine.info)
        compiler = engine._structured._compiler
        opened, count = compiler.open, []

        def breaking(request):
            count.append(request.id)
            inner = opened(request)
            if request.id != "0-0.9" or (on_guess and count.count(request.id) > 1):
                return inner
            return Breaks(inner, 6, on_guess=on_guess)

        monkeypatch.setattr(compiler, "open", breaking)
        found, last = ask(engine, frontend)
        others = {name: tokens for name, tokens in plain[0].items() if name != "0-0.9"}
        assert others.items() <= found.items()
        if on_guess:
            assert found == plain[0]
            assert count.count("0-0.9") == 2
        else:
            assert last["0-0.9"].finish_reason == "error"
            assert "too complex" in last["0-0.9"].error
            assert found["0-0.9"] == plain[0]["0-0.9"][: len(found["0-0.9"])]
        assert engine._structured._states == {}
        assert collect_all(engine, frontend_requests(frontend))[0]["again"]


def frontend_requests(frontend: Frontend) -> list[Request]:
    sampling = SamplingParams(max_tokens=8, structured_outputs=KINDS[2])
    return frontend.requests("again", frontend.text_prompt("the cat"), sampling)
