"""Pipeline stages: together they compute what the whole model does, from their own tensors."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import ConfigError
from outrider.tests.helpers.equality import TEXTS, script
from outrider.tests.helpers.models import (
    BLOCK,
    CPU,
    NOT_OF_THE_FAMILY,
    full_logits,
)
from outrider.workers.model import stages, target
from outrider.workers.model.info import stage_layers
from outrider.workers.model.stages import Stage
from outrider.workers.model.target import load_model


def test_layers_are_shared_out_evenly_and_in_order():
    shares = stage_layers(11, 4)
    assert [len(each) for each in shares] == [3, 3, 3, 2]
    assert [layer for each in shares for layer in each] == list(range(11))
    with pytest.raises(ConfigError, match=r"4 stages of a model of 3 layers; allowed: 1 to 3") as e:
        stage_layers(3, 4)
    assert e.value.field == "pipeline_parallel_size"


def test_rank_0_is_in_the_last_stage(run_ranks):
    def work(collective):
        own, stage = Stage.join(collective, 3)
        total = own.all_reduce(torch.tensor([float(collective.rank)]))
        if not stage.is_first:
            received = stage.receive(torch.zeros(1, 2, 3))
        if not stage.is_last:
            sent = torch.full((2, 3), float(10 * stage.index + own.rank))
            stage.send([sent])
        layers = stage.capture_of_last((2, 5) if collective.rank == 0 else (), 6, CPU)
        taken = None if stage.is_first else float(received.mean())
        return stage.index, own.rank, float(total), taken, layers

    assert run_ranks(6, work) == [
        (2, 0, 1.0, 10.0, (2, 5)),
        (2, 1, 1.0, 11.0, ()),
        (1, 0, 5.0, 0.0, (2, 5)),
        (1, 1, 5.0, 1.0, ()),
        (0, 0, 9.0, None, (2, 5)),
        (0, 1, 9.0, None, ()),
    ]


def skip_other(variant):
    if variant in NOT_OF_THE_FAMILY:
        pytest.skip("has no stages")


@pytest.fixture
def check(checkpoint, part, build_step, run_ranks):
    """`check(name, size, count)`: logits and captured states, of `count` stages of `size` ranks."""

    def run(name, size, count):
        path, oracle = checkpoint(name)
        steps = script(TEXTS, part, build_step)
        num_layers = oracle.config.num_hidden_layers
        capture = (0, num_layers - 1, num_layers)

        def work(collective):
            own, stage = (collective, None)
            if collective.size > 1:
                own, stage = Stage.join(collective, count)
            model = load_model(path, device=CPU, collective=own, forward="family", stage=stage)
            cache = model.new_cache(24, BLOCK)
            found = [model.forward_capturing(step, cache, capture) for step, _ in steps]
            return found, model  # which keeps what is sent, until all have it

        ((whole, _),) = run_ranks(1, work)
        assert len(whole) == len(steps)
        for found, _ in run_ranks(size * count, work)[:size]:  # of the last stage
            for (logits, states), (wanted, others), (_, expected) in zip(
                found, whole, steps, strict=True
            ):
                full = torch.stack([full_logits(oracle, text)[row] for text, row in expected])
                torch.testing.assert_close(logits, full, rtol=2e-4, atol=2e-4)
                torch.testing.assert_close(logits, wanted, rtol=2e-5, atol=2e-5)
                for mine, theirs in zip(states, others, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)

    return run


def test_every_architecture_in_two_stages(check, variant):
    """Every kind of step, with the states that heads read."""
    skip_other(variant)
    check(variant, 1, 2)


@pytest.mark.parametrize("name", ["tied", "llama4", "deepseek_v3"])
def test_stages_of_two_ranks(check, name):
    check(name, 2, 2)


@pytest.mark.slow
def test_every_architecture_in_stages_of_two_ranks(check, variant):
    skip_other(variant)
    check(variant, 2, 2)


def test_a_layer_a_stage(check):
    check("llama4", 1, 4)


def test_made_up_states_do_not_depend_on_the_default_dtype():
    """transformers changes it for the whole process while another thread loads."""
    made_up, tokens = stages._MadeUp(torch.nn.Embedding(8, 64)), torch.arange(8)
    wanted = made_up(tokens)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(made_up(tokens), wanted)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(set(map(tuple, wanted.tolist()))) == 8


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_a_stage_reads_its_own_tensors(checkpoint, run_ranks, name, elements_read):
    path, oracle = checkpoint(name)
    made = {}

    def work(collective):
        own, stage = Stage.join(collective, 2)
        made[stage.index] = load_model(path, device=CPU, collective=own, stage=stage)

    run_ranks(2, work)
    counts = sorted(elements_read.values())
    state = oracle.state_dict()
    own = {name: each.numel() for name, each in state.items()}
    embedding, norm = own["model.embed_tokens.weight"], own["model.norm.weight"]
    layers = [
        sum(size for name, size in own.items() if name.startswith(f"model.layers.{index}."))
        for index in range(2)
    ]
    output = own["lm_head.weight"]
    assert counts == sorted([embedding + layers[0] + norm, output + layers[1] + norm])
    for index, model in made.items():
        sizes = [end.weight.untyped_storage().nbytes() for end in model.ends]
        assert [size > 4 for size in sizes] == [index == 0, index == 1]
        assert len(model.kv_shapes) == 1


def test_what_the_family_does_not_compute_has_no_stages(checkpoint, run_ranks):
    path, _ = checkpoint(NOT_OF_THE_FAMILY[0])

    def work(collective):
        own, stage = Stage.join(collective, 2)
        with pytest.raises(ConfigError, match="not available for .*: stages") as caught:
            load_model(path, device=CPU, collective=own, stage=stage)
        return caught.value.field

    assert run_ranks(2, work) == ["pipeline_parallel_size"] * 2


def test_a_stage_that_differs_from_the_bridge_is_refused(checkpoint, run_ranks, monkeypatch):
    path, _ = checkpoint("llama")
    monkeypatch.setattr(target.compare, "mismatch", lambda *_: "by design")

    def work(collective):
        own, stage = Stage.join(collective, 2)
        with pytest.raises(ConfigError, match="differ from the bridge's: by design"):
            load_model(path, device=CPU, collective=own, stage=stage)

    run_ranks(2, work)
