"""An engine of pipeline stages emits what one of a single stage does, with every drafter."""

from __future__ import annotations

import pytest

from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.head_files import (
    eagle_tensors,
    medusa_tensors,
    write_eagle,
    write_medusa,
)
from outrider.tests.helpers.heads.tokens import check_plain_tokens
from outrider.tests.helpers.models import write_guessable
from outrider.tests.helpers.mtp import Made

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts

PROMPTS = random_prompts(8, 96)
SAMPLED = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "logit_bias": {5: 1.5},
    "min_tokens": 4,
}


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> str:
    return write_guessable(
        tmp_path_factory.mktemp("six") / "target", bos_token_id=0, eos_token_id=1
    )


@pytest.fixture(scope="module")
def plain(tiny):
    return plain_outputs(tiny.target, PROMPTS, {}, SAMPLED)


@pytest.mark.parametrize("name", ["none", "ngram", "suffix", "separate draft", "colocated draft"])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_drafter_emits_the_plain_tokens(tiny, plain, name, size):
    draft = {"decoding_type": "DraftTarget", "speculative_model": tiny.draft, "max_draft_len": 4}
    known = {
        "none": None,
        "ngram": {"decoding_type": "NGram", "max_draft_len": 4},
        "suffix": {"decoding_type": "SA", "max_draft_len": 4},
        "separate draft": {**draft, "draft_timeout_s": 30},
        "colocated draft": {**draft, "placement": "colocated"},
    }
    options = {"pipeline_parallel_size": 2, "tensor_parallel_size": size}
    with engine_of(tiny.target, known[name], **options) as engine:
        for wanted, sampling in zip(plain, ({}, SAMPLED), strict=True):
            assert complete(engine, PROMPTS, **sampling)[0] == wanted
        stats = engine.stats()
    for drafter in stats["drafters"].values():
        assert drafter["faults"] == 0
        assert name == "none" or drafter["num_acc_tokens"] > 0


SHAPES = {
    "chain": {"max_draft_len": 3},
    "tree": {
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 3,
        "max_draft_len": 3,
        "max_total_draft_tokens": 8,
    },
}


@pytest.fixture(scope="module")
def eagle3(six, tmp_path_factory):
    """It reads layers of the first stage, of the second, and the last state's input."""
    config, tensors = eagle_tensors(six, 3)
    config = {**config, "eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    return str(write_eagle(tmp_path_factory.mktemp("eagle") / "head", config, tensors))


@pytest.mark.parametrize(
    ("shape", "placement", "stages", "size"),
    [
        ("chain", "colocated", 2, 1),
        ("tree", "colocated", 3, 1),
        ("chain", "separate", 2, 1),
        pytest.param("tree", "colocated", 2, 2, marks=pytest.mark.slow),
        pytest.param("tree", "separate", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_features_of_all_stages_reach_a_head(six, eagle3, shape, placement, stages, size):
    """Chunked prompts, prefix hits and preemptions, each stage with its own layers' cache."""
    section = {"decoding_type": "Eagle3", "speculative_model": eagle3, **SHAPES[shape]}
    if placement == "separate":
        section |= {"placement": placement, "draft_timeout_s": 30}
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
    check_plain_tokens(six, section, at_once=8, **sizes)


def test_drafts_are_those_of_a_single_stage(six, eagle3):
    """As many accepted tokens: the head reads the same states."""
    section = {"decoding_type": "Eagle3", "speculative_model": eagle3, "max_draft_len": 3}
    counts = []
    for stages in (1, 3):
        with engine_of(six, section, pipeline_parallel_size=stages) as engine:
            complete(engine, PROMPTS, together=True)
            (drafter,) = engine.stats()["drafters"].values()
            counts.append((drafter["num_gen_tokens"], drafter["num_acc_tokens"]))
    assert counts[0] == counts[1]
    assert counts[0][1] > 0


@pytest.mark.parametrize(("overlaps", "most"), [(True, 2), (False, 1)])
def test_every_stage_has_a_step_of_other_requests(tiny, plain, overlaps, most):
    section = {"decoding_type": "NGram", "max_draft_len": 4}
    options = {"pipeline_parallel_size": 2, "overlap_scheduling": overlaps}
    with engine_of(tiny.target, section, **options) as engine:
        scheduler, counts = engine._loop.scheduler, []
        plan = scheduler._batch

        def planned(*args, **named):
            batch = plan(*args, **named)
            names = [name for each in scheduler.in_flight for name in each.request_ids]
            assert len(names) == len({*names}), "a request is in one step at a time"
            counts.append(len(scheduler.in_flight))
            return batch

        scheduler._batch = planned
        assert complete(engine, PROMPTS)[0] == plain[0]
    assert max(counts) == most


def test_a_link_is_opened_while_steps_are_in_flight(six, eagle3):
    """The answer to its message comes behind the verdicts of steps before it."""
    section = {"decoding_type": "Eagle3", "speculative_model": eagle3, "max_draft_len": 3}
    section |= {"placement": "separate", "draft_timeout_s": 30}
    wanted = plain_outputs(six, PROMPTS, {})[0]
    with engine_of(six, section, pipeline_parallel_size=2) as engine:

        def strike(count, delta):
            if count in (20, 60):
                drafter = engine._parts.drafting.drafter
                drafter._model._linked, drafter._down = False, "struck"

        assert complete(engine, PROMPTS, on_delta=strike)[0] == wanted
        assert engine.stats()["num_restarts"] == 0


def test_medusa(tiny, tmp_path_factory):
    tensors = medusa_tensors(tiny.target, 2)
    folder = write_medusa(tmp_path_factory.mktemp("medusa"), tensors, "safetensors")
    section = {"decoding_type": "Medusa", "speculative_model": folder, "max_draft_len": 2}
    check_plain_tokens(
        tiny.target, section, at_once=8, tensor_parallel_size=1, pipeline_parallel_size=2
    )


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mtp(tmp_path_factory, size):
    """Latent attention; the modules are a part of the target's checkpoint."""
    target = Made(tmp_path_factory.mktemp("deepseek"), "deepseek", 2).folder
    samplings = {"max_tokens": 16}, {"max_tokens": 16, "temperature": 0.8}
    wanted = plain_outputs(target, PROMPTS, *samplings)
    section = {"decoding_type": "MTP", "max_draft_len": 2}
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": 2}
    with engine_of(target, section, **sizes) as engine:
        for outputs, sampling in zip(wanted, samplings, strict=True):
            assert complete(engine, PROMPTS, **sampling)[0] == outputs
        (drafter,) = engine.stats()["drafters"].values()
    assert drafter["faults"] == 0
    assert drafter["num_acc_tokens"] > 0


def test_weights_are_replaced_on_every_stage(tiny):
    plain = plain_outputs(tiny.draft, PROMPTS, {})[0]
    with engine_of(tiny.target, pipeline_parallel_size=2) as engine:
        complete(engine, PROMPTS[:2])
        engine.update_weights(tiny.draft)
        assert complete(engine, PROMPTS)[0] == plain
        with pytest.raises(CheckpointError, match="is another model"):
            engine.update_weights(tiny.other_vocabulary)
        assert complete(engine, PROMPTS)[0] == plain


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel_size": 3}, "3 stages of a model of 2 layers; allowed: 1 to 2"),
        ({"forward": "bridge"}, "not available with forward 'bridge'"),
    ],
)
def test_what_stages_cannot_do_is_refused(tiny, changes, reason):
    options = {"pipeline_parallel_size": 2, **changes}
    with pytest.raises(ConfigError, match=reason) as caught, engine_of(tiny.target, **options):
        pass
    assert caught.value.field == "pipeline_parallel_size"
