"""`bad_words` and `allowed_token_ids`: masks against an oracle, and requests in an engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outrider.engine.frontend import Frontend, RequestOptions
from outrider.engine.structured.constraints import (
    Both,
    ConstraintError,
    DeadEndError,
    ThinkingConstraint,
    TokenConstraint,
    is_allowed,
    spellings,
)
from outrider.engine.structured.drafting import constrained
from outrider.errors import InvalidRequestError
from outrider.scheduler import tree
from outrider.scheduler.sampling import SamplingParams, ThinkingBudget
from outrider.scheduler.types import DraftProbs, SpeculationOptions, ints
from outrider.tests.helpers.engines import Box, collect_all, engine_of
from outrider.tests.helpers.frontend import EOS
from outrider.tests.helpers.models import write_models
from outrider.tests.helpers.verification import (
    RULES,
    distance_from_target,
    emission_law,
    fixed_drafter,
    random_target,
    sampled_drafter,
)
from outrider.workers.group import LocalGroup

BAD = ((2,), (0, 1), (1, 1, 0))


def oracle(text, vocab, allowed, bad) -> list[int]:
    """Tokens that complete no bad sequence."""
    tokens = range(vocab) if allowed is None else allowed
    ends = [(*text, token) for token in tokens]
    return [end[-1] for end in ends if not any(end[-len(b) :] == b for b in bad)]


@pytest.mark.parametrize("allowed", [None, (0, 1, 3, 33, 63, 64)])
def test_masks(allowed):
    vocab, rng = 70, np.random.default_rng(0)
    bad = (*BAD, (63, 64), (33, 0, 33, 31), (64, 63))
    constraint, text = TokenConstraint(vocab, allowed, bad), ()
    for _ in range(300):
        bits = constraint.allowed()
        may = [token for token in range(96) if is_allowed(bits, token)]
        assert may == oracle(text, vocab, allowed, bad)
        for token in sorted(set(range(vocab)) - set(may))[:3]:
            with pytest.raises(ConstraintError):
                constraint.consume(token)
        token = int(rng.choice([t for t in may if t in (0, 1, 33, 63, 64)]))
        constraint.consume(token)
        text = (*text, token)
        if len(text) > 3 and rng.random() < 0.3:
            count = int(rng.integers(1, 4))
            constraint.rewind(count)
            text = text[:-count]


def test_ends_wait_for_min_tokens():
    constraint = TokenConstraint(4, (1, 3), (), (3,), 1)
    assert not is_allowed(constraint.allowed(), 3)
    constraint.consume(1)
    assert is_allowed(constraint.allowed(), 3)
    with pytest.raises(DeadEndError):
        TokenConstraint(4, (3,), (), (3,), 1).allowed()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parents", [[-1], [-1, 0, 1], [-1, -1, 0]], ids=str)
def test_the_law_is_the_masked_targets(rule, parents):
    vocab = 3
    base = random_target(vocab, 5)

    def target(prefix):
        weights = np.zeros(vocab)
        kept = oracle(prefix, vocab, None, BAD)
        weights[kept] = base(prefix)[kept] + 1e-3
        return weights / weights.sum()

    def held(drafter):
        def drafts(prefix):
            for chance, draft in drafter(prefix):
                words = TokenConstraint(vocab, None, BAD)
                words._text = list(prefix)  # also those of probability 0
                yield chance, constrained(words, draft, words.allowed(), frozenset(), 4, 4)

        return lambda prefix: list(drafts(prefix))

    # 0 1 is bad, and so is 2: only 0 follows 0; a drawn guess of 1 stays as a leaf.
    drafters = [fixed_drafter(vocab, parents, 1)]
    if rule != "coupled":
        drafters.append(sampled_drafter(vocab, parents, random_target(vocab, 55)))
    for drafter in drafters:
        law = emission_law(RULES[rule], target, held(drafter), length=4)
        assert distance_from_target(law, target, length=4) < 1e-6


class Three:
    """Tokens 0, 1 and 2 are a, b and /; thinking ends with /b."""

    def encode(self, text: str, **_: object) -> list[int]:
        return ["ab/".index(character) for character in text]

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join("ab/"[token] for token in tokens)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parents", [[-1], [-1, 0, 1], [-1, -1, 0]], ids=str)
@pytest.mark.parametrize("begin", ["t", "ab"], ids=["open", "begins"])
def test_the_law_is_that_of_a_target_whose_thinking_is_bounded(rule, parents, begin):
    vocab, most = 3, 1
    base = random_target(vocab, 7)
    budget = ThinkingBudget(max_tokens=most, begin=begin, end="/b", is_open=begin == "t")

    def expected(prefix) -> list[int]:
        """The tokens that may come next, from the text alone."""
        text = Three().decode(prefix)
        if not budget.is_open:
            if not text.startswith(begin):
                return [0, 1, 2]
            text = text.removeprefix(begin)
        if "/b" in text or len(text) < most:
            return [0, 1, 2]
        return [1] if text.endswith("/") else [2]

    def target(prefix):
        weights = np.zeros(vocab)
        kept = expected(prefix)
        weights[kept] = base(prefix)[kept] + 1e-3
        return weights / weights.sum()

    def held(drafter):
        def drafts(prefix):
            for chance, draft in drafter(prefix):
                thinking = ThinkingConstraint(Three(), budget, vocab, lambda one: "ab/"[one])
                for at, token in enumerate(prefix):
                    if token not in expected(prefix[:at]):
                        return  # of probability 0
                    assert is_allowed(thinking.allowed(), token)
                    thinking.consume(token)
                if thinking.num_free() <= draft.num_nodes:  # as in `ConstrainedDrafting.propose`
                    allowed = thinking.allowed()
                    draft = constrained(thinking, draft, allowed, frozenset(), 4, 4)
                yield chance, draft

        return lambda prefix: list(drafts(prefix))

    drafters = [fixed_drafter(vocab, parents, 1)]
    if rule != "coupled":
        drafters.append(sampled_drafter(vocab, parents, random_target(vocab, 77)))
    for drafter in drafters:
        law = emission_law(RULES[rule], target, held(drafter), length=5)
        assert distance_from_target(law, target, length=5) < 1e-6


def test_a_guess_after_which_nothing_may_come():
    """A drawn one stays as a leaf, since rejection has to weigh it; any other is left out."""
    both = Both(TokenConstraint(4, None, ()), TokenConstraint(4, (0, 1), ((1, 0), (1, 1))))
    guess = tree.chain([0, 1, 0], "x")
    draft = constrained(both, guess, both.allowed(), frozenset([3]), 5, 5)
    assert draft.tokens.tolist() == [0]
    assert draft.masks is not None
    assert is_allowed(draft.masks.bits[-1], 1), "the target may emit it, and the request then fails"
    assert is_allowed(both.allowed(), 1), "left where it was"
    probs = DraftProbs(ints([[0, 1]] * 3), np.full((3, 2), 0.5, np.float32))
    draft = constrained(both, replace(guess, probs=probs), both.allowed(), frozenset([3]), 5, 5)
    assert draft.tokens.tolist() == [0, 1]
    assert draft.masks is not None
    assert not is_allowed(draft.masks.bits[-1], 3)
    assert is_allowed(both.allowed(), 1), "left where it was"


def test_spellings_as_in_vllm(tokenizer):
    """With a space: as many tokens, and another first one."""

    def encode(text):
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    for word in ("cat", "the", " cat", "c", "zebra", "cat sat", "Q"):
        plain, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
        added = len(plain) == len(spaced) and plain[0] != spaced[0]
        expected = (plain, spaced) if added else (plain,)
        assert spellings(tokenizer, (word, word), 304) == expected
    with pytest.raises(InvalidRequestError) as caught:
        spellings(tokenizer, ("a", "<|eos|>"), EOS)
    assert caught.value.field == "bad_words.1"


@pytest.fixture(scope="module")
def models(tokenizer_path, tmp_path_factory):
    return write_models(tokenizer_path, tmp_path_factory.mktemp("words"))


def requests_of(frontend: Frontend, bad: tuple[str, ...], allowed: tuple[int, ...]):
    prompt = frontend.text_prompt("the cat sat on the mat")
    kinds = (
        {"bad_words": bad, "ignore_eos": True},
        {"allowed_token_ids": allowed, "min_tokens": 5},
        {"allowed_token_ids": allowed, "bad_words": bad[:2]},
        {"structured_outputs": {"regex": "[a-e]{8,12}"}, "bad_words": ["ab", "c", "dd"]},
    )
    return [
        request
        for index, kind in enumerate(kinds)
        for temperature in (0.0, 0.9)
        for request in frontend.requests(
            f"{index}-{temperature}",
            prompt,
            SamplingParams(temperature=temperature, seed=index, max_tokens=32, **kind),
        )
    ]


def test_every_drafter_emits_the_plain_tokens(models, monkeypatch):
    """Where steps overlap with the workers, as over Ray, which they do not for what is compared."""
    draft = {
        "decoding_type": "DraftTarget",
        "speculative_model": models["draft"],
        "max_draft_len": 4,
    }
    ngram = {"decoding_type": "NGram", "max_draft_len": 4}
    merged = {"decoding_type": "Compose", "mode": "merge", "max_draft_len": 8}
    merged["members"] = [ngram, {**draft, "max_draft_len": 3}]
    sampled = {**draft, "verification": "rejection"}
    plain, requests = {}, []
    for section in (None, None, ngram, draft, merged, sampled):
        monkeypatch.setattr(LocalGroup, "is_concurrent", bool(plain))
        with engine_of(models["target"], section) as engine:
            frontend = Frontend(engine._config, engine.info)
            if not plain:
                prompt = frontend.text_prompt("the cat sat on the mat")
                (free,) = frontend.requests(
                    "free", prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
                )
                tokens = collect_all(engine, [free])[0]["free"]
                # Words that the model would write, of one token and of several.
                texts = [frontend.vocabulary.text(tokens[at : at + 2]) for at in range(0, 24, 3)]
                bad = (*[text for text in texts if text.strip() and "\ufffd" not in text], "cat")
                requests = requests_of(frontend, bad, (*range(64, 100), EOS))
            found, last = collect_all(engine, requests)
            assert not any(delta.error for delta in last.values()), last
            for request in requests:
                check(frontend, request, found[request.id])
            plain = plain or found
            greedy = {name for name in plain if section is not sampled or name.endswith("-0.0")}
            assert {name: found[name] for name in greedy} == {name: plain[name] for name in greedy}
            replayed = [replace(each, emitted=ints(found[each.id][:-1][:5])) for each in requests]
            if section is not sampled:
                assert collect_all(engine, replayed)[0] == plain


def check(frontend: Frontend, request, tokens: tuple[int, ...]) -> None:
    sampling = request.sampling
    assert len(tokens) > max(1, sampling.min_tokens)
    assert set(tokens) <= set(sampling.allowed_token_ids or range(304))
    for sequence in spellings(frontend.tokenizer, sampling.bad_words, 304):
        width = len(sequence)
        assert sequence not in [tokens[at : at + width] for at in range(len(tokens))]


THINKING = {"max_tokens": 3, "begin": "<t>", "end": "</t>", "is_open": True}
CROWDED = "start: " + " | ".join(f'"{index}" "."' for index in range(2100))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "[ab]+"}, "allowed_token_ids": [3]}, "allowed_token_ids"),
        ({"structured_outputs": {"choice": ["c"]}, "bad_words": ["c"]}, "bad_words"),
        ({"structured_outputs": {"grammar": CROWDED}}, "structured_outputs.grammar"),
        ({"thinking_budget": THINKING, "bad_words": ["/"]}, "bad_words"),
        ({"thinking_budget": THINKING, "allowed_token_ids": [5, 6, EOS]}, "allowed_token_ids"),
    ],
)
def test_where_nothing_is_left(models, settings, field):
    """At once: refused. On the way: the request fails, and says why."""
    with engine_of(models["target"], {"decoding_type": "NGram", "max_draft_len": 4}) as engine:
        frontend = Frontend(engine._config, engine.info)
        prompt = frontend.text_prompt("the cat")
        (request,) = frontend.requests("r", prompt, SamplingParams(**settings))
        with pytest.raises(InvalidRequestError) as caught:
            engine.submit(request, Box())
        assert caught.value.field == field
        later = SamplingParams(structured_outputs={"regex": "#[$]!"}, bad_words=["#$"])
        options = RequestOptions(SpeculationOptions(enabled=False))
        plain, _ = collect_all(engine, frontend.requests("later", prompt, later, options))
        found, last = collect_all(engine, frontend.requests("later", prompt, later))
        assert found == plain == {"later": tuple(frontend.tokenizer.encode("#"))}
        assert last["later"].finish_reason == "error"
        assert last["later"].error.startswith("bad_words: the text cannot go on: every token")
        assert isinstance(last["later"].failure, InvalidRequestError)
        assert last["later"].failure.field == "bad_words"
        crowded = f"start: /[ab]{{3}}/ b\nb:{CROWDED[6:]}"
        later = SamplingParams(structured_outputs={"grammar": crowded}, max_tokens=99)
        _, last = collect_all(engine, frontend.requests("later", prompt, later))
        assert "2101 alternatives and more in one place; at most 2000" in last["later"].error
        assert last["later"].failure.field == "structured_outputs.grammar"


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("text", "is_open", "forced"),
    [
        ("abc", True, "</t>"),  # the budget is spent
        ("ab", True, ""),
        ("abc</", True, "t>"),
        ("ab</t>xyz", True, ""),  # it ended by itself
        ("a</t>", True, ""),
        ("abc</t>xyz<t>abcd", True, ""),  # one section
        (" <t>abc", False, "</t>"),
        ("<t>ab", False, ""),
        ("abcdef", False, ""),  # it never began
        ("<", False, ""),
    ],
)
def test_thinking_is_closed_after_its_budget(text: str, is_open: bool, forced: str) -> None:
    budget = ThinkingBudget(max_tokens=3, begin="<t>", end="</t>", is_open=is_open)
    constraint = ThinkingConstraint(Letters(), budget, 128, chr)
    seen = []
    for character in text:
        seen.append(constraint.allowed().tolist())
        constraint.consume(ord(character))
    assert constraint.forced() == Letters().encode(forced)
    if forced:
        assert is_allowed(constraint.allowed(), ord(forced[0]))
        with pytest.raises(ConstraintError, match="forbidden"):
            constraint.consume(ord("x"))
    for before in reversed(seen):
        constraint.rewind(1)
        assert constraint.allowed().tolist() == before


def test_what_forbids_the_end_of_thinking_is_found_before_it_begins():
    budget = ThinkingBudget(max_tokens=3, begin="<t>", end="</t>", is_open=True)
    constraint = ThinkingConstraint(Letters(), budget, 128, chr)
    mark = [ord(each) for each in "</t>"]
    for allowed, bad in (([97, *mark[:2]], ()), (None, ((mark[3],),)), (None, (tuple(mark[1:]),))):
        tokens = TokenConstraint(128, allowed, bad)
        with pytest.raises(ConstraintError, match=r"is forbidden here, with which '</t>' ends"):
            constraint.check_end(tokens)
        tokens.consume(97)  # it is where it was
        tokens.rewind(1)
    tokens = TokenConstraint(128, [97, *mark], ((97, 97),))
    constraint.check_end(tokens)
    for token in (97, *mark):
        tokens.consume(token)


def test_how_many_tokens_a_budget_leaves_free():
    budget = ThinkingBudget(max_tokens=3, begin="<t>", end="</t>", is_open=True)
    constraint = ThinkingConstraint(Letters(), budget, 128, chr)
    free = [constraint.num_free()]
    for character in "ab</t>x":
        constraint.consume(ord(character))
        free.append(constraint.num_free())
    assert free == [3, 2, 1, 0, 0, 0, np.inf, np.inf]
    later = budget.model_copy(update={"is_open": False})
    assert ThinkingConstraint(Letters(), later, 128, chr).num_free() == 3
    never = ThinkingConstraint(Letters(), later, 128, chr)
    never.consume(ord("x"))
    assert never.num_free() == np.inf
    assert Both(never, TokenConstraint(128, None, ((1, 2),))).num_free() == 0
