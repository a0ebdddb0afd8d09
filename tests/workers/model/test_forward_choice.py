"""Which forward serves: the family's where it agrees with the bridge, otherwise the bridge."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from outrider.errors import ConfigError
from outrider.workers.collective import Collective
from outrider.workers.model import target
from outrider.workers.model.family import FamilySpec
from outrider.workers.model.family.spec import read_spec
from outrider.workers.model.target import load_model

CPU = torch.device("cpu")
TEXT = [5, 17, 60, 3, 88, 9]


def load(path, **settings):
    return load_model(path, device=CPU, collective=Collective.single(), **settings)


def logits_of(model, part, build_step):
    return model.forward(build_step([part(TEXT, 0, [3, 1])], 4), model.new_cache(8, 4))[-1]


def expected(oracle):
    with torch.inference_mode():
        return oracle(torch.tensor([TEXT])).logits[0, -1]


def test_auto_takes_the_family(checkpoint):
    path, _ = checkpoint("llama")
    choice = load(path).forward_choice
    assert (choice.kind, choice.reason) == ("family", "")
    assert load(path, forward="bridge").forward_choice.kind == "bridge"


def test_an_unknown_architecture_is_the_bridges(checkpoint, part, build_step):
    path, oracle = checkpoint("gpt_neox")
    model = load(path)
    assert model.forward_choice.kind == "bridge"
    assert "'gpt_neox' is not of the family" in model.forward_choice.reason
    torch.testing.assert_close(logits_of(model, part, build_step), expected(oracle))
    with pytest.raises(ConfigError, match="gpt_neox.*'auto' and 'bridge'") as caught:
        load(path, forward="family")
    assert caught.value.field == "forward"


def test_auto_is_the_bridge_where_there_are_no_kernels(checkpoint):
    path, _ = checkpoint("llama")
    choice = load(path, dtype=torch.float16).forward_choice
    assert (choice.kind, choice.reason) == ("bridge", "no kernels for torch.float16 on cpu")
    assert load(path, dtype=torch.float16, forward="family").forward_choice.kind == "family"


def test_an_unknown_activation_is_the_bridges(checkpoint):
    path, _ = checkpoint("llama", hidden_act="tanh")
    assert "activation 'tanh'" in load(path).forward_choice.reason


@pytest.mark.parametrize("name", ["llama", "tied", "qwen3_moe"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_mismatch_is_the_bridges(
    checkpoint, name, size, part, build_step, run_ranks, monkeypatch
):
    """The family has used the weights up by then: the bridge reads them again."""

    def wrong(config):
        spec = read_spec(config)
        assert isinstance(spec, FamilySpec)
        return replace(spec, residual_scale=0.5)

    path, oracle = checkpoint(name)
    monkeypatch.setattr(target, "read_spec", wrong)

    def work(collective):
        model = load_model(path, device=CPU, collective=collective)
        return model.forward_choice, logits_of(model, part, build_step)

    for choice, logits in run_ranks(size, work):
        assert choice.kind == "bridge"
        assert "logits differ" in choice.reason
        torch.testing.assert_close(logits, expected(oracle), rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="logits differ"):
        load(path, forward="family")


def test_weights_are_in_memory_once(checkpoint, monkeypatch):
    """The bridge's layers are let go one by one while the family's are built."""
    path, _ = checkpoint("llama", num_hidden_layers=4)
    alive, most = [], []
    modules = target._load_modules
    gc.collect()
    gc.freeze()  # the collections below look only at what is made from here on

    def watched(*args, **options):
        model, plan = modules(*args, **options)
        alive.extend(weakref.ref(layer.self_attn.q_proj.weight) for layer in model.model.layers)
        return model, plan

    pack = target.make_ops(CPU, torch.float32)
    plain = pack.pack

    def counting(weight, bias):
        gc.collect()
        most.append(sum(each() is not None for each in alive))
        return plain(weight, bias)

    pack.pack = counting
    monkeypatch.setattr(target, "_load_modules", watched)
    model = load(path, ops=pack)
    assert model.forward_choice.kind == "family"
    assert most[0] == 4
    assert most[-1] == 1
    gc.collect()
    assert not any(each() is not None for each in alive)
    names = [name for name, _ in model.module.named_parameters()]
    assert not [name for name in names if "layers" in name], names
