"""Deltas become text; how many tokens a draft brought along is invisible."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from outrider.engine.outputs import Assembler, RequestOutput, Vocabulary, add_usage
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Delta, SpeculationUsage, StepTrace, TokenLogprobs

EOS = 299


def run(tokenizer: Any, ids: list[int], sampling: SamplingParams, seed: int) -> Assembler:
    """The assembler after `ids` in random deltas."""
    rng = random.Random(seed)
    assembler = Assembler(Vocabulary(tokenizer), sampling, EOS)
    at = 0
    while at < len(ids) and not assembler.finished:
        size = rng.randint(1, 6)
        part = tuple(ids[at : at + size])
        at += size
        ended = at >= len(ids)
        stop = ids[-1] if ended and ids[-1] == EOS else None
        reason = ("stop" if stop is not None else "length") if ended else None
        assembler.push(Delta("r", part, finish_reason=reason, stop_token_id=stop))
    return assembler


@pytest.mark.parametrize("seed", range(30))
def test_a_stop_string_inside_a_delta_cuts_tokens_too(tokenizer: Any, seed: int) -> None:
    ids = tokenizer.encode("the cat sat on the mat and the other cat")
    output = run(tokenizer, ids, SamplingParams(stop="at on"), seed).output()
    assert (output.text, output.finish_reason) == ("the cat s", "stop")
    assert output.stop_reason == "at on"
    text = tokenizer.decode(list(output.token_ids))
    assert "at on" in text
    assert "at on" not in tokenizer.decode(list(output.token_ids[:-1]))


@pytest.mark.parametrize("seed", range(10))
def test_end_of_text_is_a_token_without_text(tokenizer: Any, seed: int) -> None:
    ids = [*tokenizer.encode("the cat"), EOS]
    output = run(tokenizer, ids, SamplingParams(skip_special_tokens=False), seed).output()
    assert (output.text, output.finish_reason, output.stop_reason) == ("the cat", "stop", None)
    assert output.token_ids == tuple(ids)


def test_a_stop_token_is_the_stop_reason(tokenizer: Any) -> None:
    ids = tokenizer.encode("the cat")
    assembler = Assembler(Vocabulary(tokenizer), SamplingParams(stop_token_ids=(ids[-1],)), EOS)
    assembler.push(Delta("r", tuple(ids), finish_reason="stop", stop_token_id=ids[-1]))
    output = assembler.output()
    assert output.stop_reason == ids[-1]
    assert output.text == tokenizer.decode(ids[:-1])


def test_included_stop_string(tokenizer: Any) -> None:
    ids = tokenizer.encode("the cat sat on the mat")
    sampling = SamplingParams(stop=["sat"], include_stop_str_in_output=True)
    assert run(tokenizer, ids, sampling, 0).output().text == "the cat sat"


def test_min_tokens_keeps_stop_strings_off(tokenizer: Any) -> None:
    ids = tokenizer.encode("the cat, the cat, the cat")
    sampling = SamplingParams(stop="cat", min_tokens=len(tokenizer.encode("the cat,")))
    assert run(tokenizer, ids, sampling, 1).output().text == "the cat, the "


@pytest.mark.parametrize("seed", range(10))
def test_a_stop_string_may_begin_before_min_tokens(tokenizer: Any, seed: int) -> None:
    """It counts if a token after the first `min_tokens` completes it; all of it is cut off."""
    ids = tokenizer.encode("sat x sat x sat")
    first = next(n for n in range(len(ids)) if "sat" in tokenizer.decode(ids[: n + 1])) + 1
    second = (
        next(n for n in range(len(ids)) if tokenizer.decode(ids[: n + 1]).count("sat") == 2) + 1
    )
    for min_tokens, text in ((first - 1, ""), (first, "sat x "), (second - 1, "sat x ")):
        sampling = SamplingParams(stop="sat", min_tokens=min_tokens)
        assert run(tokenizer, ids, sampling, seed).output().text == text
    assert run(tokenizer, ids, SamplingParams(stop="sat", min_tokens=second), seed).output().text


@pytest.mark.parametrize("seed", range(10))
def test_offsets_are_places_in_the_text(tokenizer: Any, seed: int) -> None:
    text = "naïve 日本 the cat"
    ids = tokenizer.encode(text)
    rng, at, offsets = random.Random(seed), 0, []
    assembler = Assembler(Vocabulary(tokenizer), SamplingParams(logprobs=0), EOS)
    while at < len(ids):
        part = tuple(ids[at : at + rng.randint(1, 5)])
        at += len(part)
        offsets += assembler.push(
            Delta("r", part, logprobs=(TokenLogprobs(-1.0),) * len(part))
        ).offsets
    assert offsets == assembler.offsets
    whole = [len(tokenizer.decode(ids[:n]).rstrip("\ufffd")) for n in range(len(ids))]
    assert offsets == whole


def test_the_first_that_proposed_names_the_drafter() -> None:
    usages = [
        SpeculationUsage("asked", 3),
        SpeculationUsage("none", 1),
        SpeculationUsage("a", 2, 1),
    ]
    assert add_usage(usages) == SpeculationUsage("a", 6, 1)
    assert add_usage(usages[:2]).drafter == "asked"
    assert add_usage([]).drafter == "none"


def test_a_half_stop_string_is_given_out_at_the_end(tokenizer: Any) -> None:
    ids = tokenizer.encode("the cat")
    output = run(tokenizer, ids, SamplingParams(stop="cattle"), 0).output()
    assert (output.text, output.finish_reason) == ("the cat", "length")


def test_logprobs_and_late_statistics(tokenizer: Any) -> None:
    ids = tokenizer.encode("the cat sat")
    assembler = Assembler(Vocabulary(tokenizer), SamplingParams(logprobs=1, stop="cat"), EOS)
    logprobs = tuple(TokenLogprobs(-1.0, ((id + 1, -0.5),), 7) for id in ids)
    assembler.push(Delta("r", tuple(ids), logprobs=logprobs))
    assert assembler.finished
    usage = SpeculationUsage("fake", 2, 2, 6, 3)
    assembler.push(Delta("r", tuple(ids), finish_reason="abort", usage=usage))
    output = assembler.output()
    assert output.finish_reason == "stop"
    assert output.speculation.mean_accepted_len == 1.5
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    assert output.logprobs[0][ids[0]].logprob == -1.0
    assert output.logprobs[0][ids[0]].rank == 7
    assert output.logprobs[0][ids[0] + 1].rank == 1


def test_a_notebook_shows_drafted_tokens_by_origin_and_escapes_text(tokenizer: Any) -> None:
    ids = tokenizer.encode("the cat sat")
    guess = tokenizer.encode(" dog")[-1]
    trace = StepTrace(
        tokens=(ids[0], guess), parents=(-1, 0), origins=("n<g>ram", "head"), path=(0,)
    )
    assembler = Assembler(Vocabulary(tokenizer), SamplingParams(), EOS)
    assembler.push(Delta("r", tuple(ids), finish_reason="length", trace=trace))
    output = RequestOutput("r", "<b>", [1], [assembler.output()], finished=True)
    page = output._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    drafted = re.findall(r'<span style="background:[^"]*" title="([^"]*)">([^<]*)</span>', page)
    rejected = assembler.vocabulary.token_text(guess)
    assert drafted == [(f"rejected: {rejected}", tokenizer.decode(ids[:1]))]
    assert re.search(r'<span style="background:[^"]*">n&lt;g&gt;ram</span>', page)  # the legend
    failed = RequestOutput("r", None, [1, 2], [], finished=True, error="too <long>")
    assert "2 tokens" in failed._repr_html_()
    assert "too &lt;long&gt;" in failed._repr_html_()
    untraced = replace(assembler.output(), speculation_trace=None)
    shown = RequestOutput("r", "p", [1], [untraced], finished=True)._repr_html_()
    assert tokenizer.decode(ids) in shown
    assert "background" not in shown


def test_versions_of_weights_are_spans(tokenizer):
    """Those of the start count once there are others."""
    assembler = Assembler(Vocabulary(tokenizer), SamplingParams(max_tokens=9), EOS)
    for version, ids in (("", (11, 12)), ("", (13,))):
        assembler.push(Delta("a", ids, weight_version=version))
    assert assembler.output().weight_versions == ()
    for version, ids in (("a", (14,)), ("a", (15, 16)), ("b", (17,))):
        assembler.push(Delta("a", ids, weight_version=version))
    assert assembler.output().weight_versions == (("", 3), ("a", 3), ("b", 1))
