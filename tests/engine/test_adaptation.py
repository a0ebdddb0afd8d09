"""A head that goes on learning while it serves: what it learns from, when it serves, what fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli.app import app
from outrider.config import EngineConfig, OnlineAdaptationConfig
from outrider.engine import adaptation
from outrider.engine.adaptation import Adaptation, Sample, Samples, is_worse, may_use, mean
from outrider.engine.checkpoints import check_adaptation
from outrider.engine.engine import Engine
from outrider.engine.weights import DrafterChange
from outrider.errors import ConfigError, InvalidRequestError
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Delta, Request, SpeculationOptions, SpeculationUsage, ints

from ..helpers.eagle import section as eagle_section
from ..helpers.engines import Box, complete, engine_of, plain_outputs, random_prompts
from ..helpers.head_files import eagle_tensors, write_eagle
from ..helpers.models import write_guessable
from ..helpers.ports import wait_for

PROMPTS = random_prompts(24, 96)
FAST = {
    "automatic": False, "steps": 60, "batch": 8, "window": 40, "adam_lr": 3e-3, "muon_lr": 2e-2,
    "heldout": 0.25, "trial_drafts": 0, "niceness": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target with a tokenizer, a head that guesses often right, and the same with noise."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models")
    target = write_guessable(folder / "target", num_layers=3)
    words = {f"w{index}": index for index in range(96)}
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")))
    fast.save_pretrained(target)
    config, tensors = eagle_tensors(target, 3)
    good = write_eagle(folder / "good", config, tensors)
    generator = torch.Generator().manual_seed(3)
    noisy = dict(tensors)
    for name in ("fc.weight", "midlayer.self_attn.o_proj.weight"):
        noise = torch.randn(tensors[name].shape, generator=generator)
        noisy[name] = tensors[name] + 1.0 * noise * tensors[name].std()
    return {"target": target, "good": good, "noisy": write_eagle(folder / "noisy", config, noisy)}


def head(folder: str, **keys: Any) -> dict[str, Any]:
    return {**eagle_section(folder, max_draft_len=3, **keys), "decoding_type": "Eagle3"}


def section(folder: Path, **keys: Any) -> dict[str, Any]:
    return {**FAST, "folder": str(folder), **keys}


def served(engine: Engine) -> str:
    return str(engine.drafters()["drafters"][0]["speculative_model"])


def of(engine: Engine) -> Adaptation:
    assert engine.adaptation is not None
    return engine.adaptation


def accepted(engine: Engine) -> float:
    """Accepted tokens of a draft, by the drafter's counts."""
    (stats,) = engine.stats()["drafters"].values()
    return float(stats["num_acc_tokens"] / stats["num_gen_drafts"])


def state_after(engine: Engine, action: str = "run", timeout_s: float | None = 120.0) -> Any:
    return engine.adapt(action, timeout_s)


@pytest.mark.parametrize(
    "placement", ["colocated", pytest.param("separate", marks=pytest.mark.slow)]
)
def test_a_head_learns_and_serves(models, tmp_path, placement):
    """Its drafts are accepted for longer, outputs stay, and another start finds it."""
    target, folder = models["target"], tmp_path / "heads"
    wanted = plain_outputs(target, PROMPTS, {})[0]
    speculative = head(models["noisy"], placement=placement)
    with engine_of(target, speculative, online_adaptation=section(folder)) as engine:
        assert complete(engine, PROMPTS)[0] == wanted
        before = accepted(engine)
        state = state_after(engine)
        (round_,) = state["rounds"]
        assert round_["outcome"] == "swapped", round_
        assert round_["accepted_after"] > round_["accepted_before"] + 0.1
        assert (round_["num_samples"], round_["num_tokens"]) == (18, 18 * 32)
        assert served(engine) == round_["folder"] == str(folder / "head-0001")
        assert complete(engine, PROMPTS)[0] == wanted
        assert accepted(engine) > before + 0.1
        assert state["state"] == "collecting"
        assert state["outcomes"] == {"swapped": 1}
        assert engine.drafters()["num_changes"] == 1
        assert engine.stats()["online_adaptation"]["num_rounds"] == 1
    assert sorted(each.name for each in folder.iterdir()) == ["current", "head-0001"]
    files = {each.name for each in (folder / "head-0001").iterdir()}
    assert files == {"config.json", "log.jsonl", "model.safetensors", "training.png"}, "no texts"
    stored = load_file(folder / "head-0001" / "model.safetensors")
    first = load_file(Path(models["noisy"]) / "model.safetensors")
    assert {name: each.shape for name, each in stored.items()} == {
        name: each.shape for name, each in first.items()
    }
    with engine_of(target, head(str(folder / "current"), placement=placement)) as engine:
        assert complete(engine, PROMPTS)[0] == wanted
        assert accepted(engine) > before + 0.1


def test_a_head_that_gains_too_little_does_not_serve(models, tmp_path, monkeypatch):
    """No draft of three has four tokens more accepted."""

    def trained_here(self: Any, command: list[str], *_: Any) -> None:
        result = CliRunner().invoke(app, command[5:])  # what the process would run
        assert result.exit_code == 0, result.output

    monkeypatch.setattr(Adaptation, "_await", trained_here)
    bad = section(tmp_path, steps=8, min_gain=4.0)
    with engine_of(models["target"], head(models["good"]), online_adaptation=bad) as engine:
        complete(engine, PROMPTS)
        (round_,) = state_after(engine)["rounds"]
        assert round_["outcome"] == "kept"
        assert 0 <= round_["accepted_after"] < round_["accepted_before"] + 4
        assert served(engine) == models["good"]
    assert not [*tmp_path.iterdir()]


def test_a_head_that_is_worse_live_goes_again(models, tmp_path, monkeypatch):
    """Held-out texts spoke for it, live drafts do not."""

    def made(self: Any, found: Any, *_: Any) -> Path:
        found.accepted_before, found.accepted_after = 1.0, 2.0
        return adaptation._placed(Path(models["noisy"]), tmp_path)

    monkeypatch.setattr(Adaptation, "_made_head", made)
    wanted = plain_outputs(models["target"], PROMPTS, {})[0]
    asked = section(tmp_path, trial_drafts=60)
    with engine_of(models["target"], head(models["good"]), online_adaptation=asked) as engine:
        assert complete(engine, PROMPTS)[0] == wanted
        state = state_after(engine)
        assert (state["state"], served(engine)) == ("trial", str(tmp_path / "head-0001"))
        assert (tmp_path / "current").resolve() == tmp_path / "head-0001"
        assert complete(engine, PROMPTS)[0] == wanted
        wait_for(lambda: served(engine) == models["good"])
        wait_for(lambda: engine.stats()["online_adaptation"]["state"] == "collecting")
        (round_,) = engine.stats()["online_adaptation"]["rounds"]
        assert round_["outcome"] == "rolled back"
        assert round_["live_after"] < round_["live_before"]
        assert (tmp_path / "current").resolve() == Path(models["good"])
        assert not (tmp_path / "head-0001").exists()
        assert complete(engine, PROMPTS)[0] == wanted


def test_rounds_begin_by_themselves(models, tmp_path, monkeypatch):
    began: list[int] = []

    def made(self: Any, found: Any, *_: Any) -> None:
        began.append(self.samples.num_output)
        found.outcome = "kept"

    monkeypatch.setattr(Adaptation, "_made_head", made)
    asked = section(tmp_path, automatic=True, min_tokens=300, interval_s=0.0)
    with engine_of(models["target"], head(models["good"]), online_adaptation=asked) as engine:
        complete(engine, PROMPTS[:8])  # 256 tokens
        assert not began
        complete(engine, PROMPTS[:8])
        wait_for(lambda: began == [512])
        engine.adapt("pause")
        complete(engine, PROMPTS[:16])
        assert engine.stats()["online_adaptation"]["state"] == "paused"
        assert began == [512]
        engine.adapt("resume")
        wait_for(lambda: began == [512, 1024])


def test_a_trainer_that_is_killed_costs_its_round(models, tmp_path, monkeypatch):
    started: list[subprocess.Popen[bytes]] = []

    def popen(*given: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*given, **options))
        return started[-1]

    fake = type("fake", (), {**vars(subprocess), "Popen": staticmethod(popen)})
    monkeypatch.setattr(adaptation, "subprocess", fake)
    wanted = plain_outputs(models["target"], PROMPTS, {})[0]
    asked = section(tmp_path, steps=10**6, max_tokens=10**6)
    monkeypatch.setattr(adaptation, "_MAX_PASSES", 10**6)
    with engine_of(models["target"], head(models["good"]), online_adaptation=asked) as engine:
        complete(engine, PROMPTS)
        asked_for = of(engine).ask("run")
        assert asked_for is not None
        wait_for(lambda: bool(started))
        os.kill(started[0].pid, signal.SIGKILL)
        round_ = asked_for.result(60)
        assert round_.outcome == "failed"
        assert round_.reason.startswith("the process has ended with -9")
        assert complete(engine, PROMPTS)[0] == wanted
        # Another change of drafters, new weights and a pause each end a round.
        for change in (
            lambda: engine.change_drafters(DrafterChange(head(models["noisy"]), "eagle3")),
            lambda: engine.update_weights(models["target"]),
            lambda: engine.adapt("pause"),
            lambda: engine.sleep(),
        ):
            asked_for = of(engine).ask("run")
            assert asked_for is not None
            count = len(started)
            wait_for(lambda count=count: len(started) > count or started[-1].poll() is None)
            change()
            assert asked_for.result(60).outcome == "cancelled"
            assert started[-1].poll() is not None
            engine.adapt("resume")
        engine.wake_up()
        asked_for = of(engine).ask("run")
        wait_for(lambda: started[-1].poll() is None)
    assert started[-1].poll() is not None, "it ends with the engine"
    assert not [*tmp_path.iterdir()]


def test_a_trainer_ends_with_the_process_of_its_engine():
    command = [sys.executable, "-c", adaptation._PROGRAM, "0", "http.server", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 1


def test_an_unusable_target_fails_with_its_reason(models, tmp_path):
    asked = section(tmp_path / "heads")
    with engine_of(models["target"], head(models["good"]), online_adaptation=asked) as engine:
        complete(engine, PROMPTS[:8])
        of(engine).engine_config = engine._config.model_copy(update={"dtype": "nonsense"})
        round_ = state_after(engine)["rounds"][-1]
        assert round_["outcome"] == "failed"
        assert "dtype" in round_["reason"]


def request_of(tenant: str = "", **keys: Any) -> Request:
    return Request("one", ints([1, 2]), SamplingParams(), seed=0, tenant=tenant, **keys)


def test_whose_text_may_be_used():
    """Without a word about tenants, no tenant's; then those of the named ones alone."""
    default = OnlineAdaptationConfig(folder="a")
    assert may_use(default, request_of())
    assert not may_use(default, request_of("acme"))
    named = OnlineAdaptationConfig(folder="a", tenants=("acme",))
    assert may_use(named, request_of("acme"))
    assert not may_use(named, request_of("other"))
    assert not may_use(named, request_of())
    mixed = OnlineAdaptationConfig(folder="a", tenants=("acme", ""), mixes_tenants=True)
    assert [may_use(mixed, request_of(each)) for each in ("acme", "", "other")] == [
        True,
        True,
        False,
    ]
    for config, tenant in ((default, ""), (named, "acme")):
        isolated = SpeculationOptions(isolated=True)
        assert not may_use(config, request_of(tenant, speculation=isolated))
        assert not may_use(config, request_of(tenant, adapter="lora"))
        assert not may_use(config, request_of(tenant, pools=True))


def test_texts_of_other_tenants_are_not_kept(models, tmp_path):
    asked = section(tmp_path, tenants=["acme"])
    with engine_of(models["target"], head(models["good"]), online_adaptation=asked) as engine:
        box = Box()
        for index, tenant in enumerate(("acme", "other", "", "acme")):
            sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            prompt = ints([10 + index, 3])
            request = Request(str(index), prompt, sampling, seed=1, tenant=tenant)
            engine.submit(request, box)
            box.last()
        kept = [each for some in of(engine).samples.taken() for each in some]
        assert sorted(int(each.prompt[0]) for each in kept) == [10, 13]
        assert {len(each.output) for each in kept} == {8}
        state = engine.stats()["online_adaptation"]
        assert (state["num_samples"], state["num_excluded"]) == (2, 2)
        assert state["num_output_tokens"] == 16


def sample(length: int, first: int = 0) -> Sample:
    return Sample(ints([first]), tuple(range(length - 1)))


def test_the_newest_texts_stay_and_a_share_is_held_out():
    config = OnlineAdaptationConfig(folder="a", max_tokens=1024, heldout=0.25)
    samples = Samples(config)
    for index in range(100):
        samples.add(sample(32, index))
    learnt, heldout = samples.taken()
    assert len(learnt) == 24  # 768 tokens
    assert len(heldout) == 8
    assert [int(each.prompt[0]) for each in heldout] == list(range(71, 100, 4))
    assert int(learnt[-1].prompt[0]) == 98
    assert samples.num_output == 3100
    samples.add(sample(5000))  # longer than all that may be kept: alone
    assert len(samples.taken()[0]) == 1


def test_only_the_output_is_learnt_from():
    assert Sample(ints([7, 8]), (9, 1)).line() == (
        b'{"tokens": [7, 8, 9, 1], "weights": [0, 0, 1, 1]}\n'
    )


def test_requests_that_span_a_change_do_not_count(models, tmp_path):
    """Of live drafts those count whose request began and ended with one head."""
    asked = section(tmp_path)
    with engine_of(models["target"], head(models["good"]), online_adaptation=asked) as engine:
        one = of(engine)
        usage = SpeculationUsage(num_steps=4, num_drafts=4, num_accepted_tokens=6)
        last = Delta("one", (1, 2, 3), finish_reason="stop", usage=usage)
        one.begin(request_of("acme"))  # its text may not be used; figures are no text
        one.observe([last])
        assert one._drafts_of(one.era) == [(4, 6)]
        one.begin(request_of())
        engine.change_drafters(DrafterChange(head(models["noisy"]), "eagle3"))
        one.observe([last])
        assert not one._drafts_of(one.era)
        assert one.samples.num_samples == 1


def test_worse_by_more_than_chance():
    """Against draws: of equal heads few seem worse, of a worse one most do."""
    rng = np.random.default_rng(0)

    def drawn(chance: float) -> list[tuple[int, int]]:
        """Requests differ: some texts are easier than others."""
        shares = rng.beta(chance * 8, (1 - chance) * 8, 40)
        return [(12, int(rng.binomial(36, share))) for share in shares]

    equal = sum(is_worse(drawn(0.6), drawn(0.6)) for _ in range(400))
    worse = sum(is_worse(drawn(0.6), drawn(0.4)) for _ in range(400))
    assert equal < 30  # 2.3% are expected
    assert worse > 370
    assert mean([(2, 3), (2, 1)]) == 1.0


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"folder": ""}, "folder"),
        ({"heldout": 0.9}, "heldout"),
        ({"steps": 0}, "steps"),
        ({"tenants": ["a", "b"]}, "tenants"),
        ({"tenant": "a"}, "tenant"),
        ({"device": "tpu"}, "device"),
        ({"cuda_visible_devices": "1"}, "cuda_visible_devices"),
        ({"niceness": -1}, "niceness"),
    ],
)
def test_wrong_settings_are_named(given, name):
    asked = {"model": "m", "online_adaptation": {"folder": "f", **given}}
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(asked)
    assert caught.value.field == f"online_adaptation.{name}"
    with pytest.raises(ConfigError, match=r"online_adaptation\.folder"):
        EngineConfig.load({"model": "m", "online_adaptation": {}})


def test_what_cannot_be_adapted_is_refused(models, tmp_path):
    ngram = {"decoding_type": "NGram", "pool_scope": "tenant"}
    asked = section(tmp_path, tenants=["a", "b"], mixes_tenants=True)
    members = {"decoding_type": "Compose", "members": [ngram, head(models["good"])]}
    wrong = {"model": models["target"], "executor": "local"}
    with pytest.raises(ConfigError, match=r"^online_adaptation\.mixes_tenants: .*pool_scope"):
        EngineConfig.load({**wrong, "speculative_config": members, "online_adaptation": asked})
    with pytest.raises(ConfigError, match=r"^online_adaptation: .*pipeline_parallel_size"):
        EngineConfig.load(
            {
                **wrong,
                "pipeline_parallel_size": 2,
                "speculative_config": head(models["good"]),
                "online_adaptation": section(tmp_path),
            }
        )
    for speculative in (None, {"decoding_type": "NGram"}):
        with (
            pytest.raises(ConfigError, match="^online_adaptation: .*'Eagle3'.*no heads"),
            engine_of(models["target"], speculative, online_adaptation=section(tmp_path)),
        ):
            pass
    file = tmp_path / "file"
    file.write_text("")
    with (
        pytest.raises(ConfigError, match=r"^online_adaptation\.folder: .*cannot be written"),
        engine_of(models["target"], head(models["good"]), online_adaptation=section(file)),
    ):
        pass


@pytest.mark.parametrize("kind", ["DFlash", "DSpark", "PEagle", "Medusa", "ReDrafter"])
def test_heads_that_cannot_go_on_learning_are_refused_by_name(models, tmp_path, kind):
    config = EngineConfig.load(
        {
            "model": str(models["target"]),
            "speculative_config": {"decoding_type": kind, "speculative_model": str(tmp_path)},
            "online_adaptation": section(tmp_path),
        }
    )
    with pytest.raises(ConfigError, match=f"^online_adaptation: .*'MTP'.*; here are {kind}$"):
        check_adaptation(config)


def test_wrong_wishes_are_named(models, tmp_path):
    with LLM(models["target"], executor="local", dtype="float32", num_kv_blocks=64) as llm:
        assert llm.stats()["online_adaptation"] is None
        with pytest.raises(InvalidRequestError, match="^online_adaptation: it is off") as caught:
            llm.adapt()
        assert caught.value.field == "online_adaptation"
    asked = section(tmp_path)
    with engine_of(models["target"], head(models["good"]), online_adaptation=asked) as engine:
        with pytest.raises(InvalidRequestError, match="^action: .*'run', 'pause'.*got 'go'"):
            engine.adapt("go")
        with pytest.raises(InvalidRequestError, match="^action: .*not enough texts"):
            engine.adapt("run")
        engine.adapt("pause")
        with pytest.raises(InvalidRequestError, match="^action: .*it is paused"):
            engine.adapt("run")
        engine.adapt("resume")
        complete(engine, PROMPTS[:8])
        engine.change_drafters(DrafterChange({"decoding_type": "NGram"}, "eagle3"))
        with pytest.raises(InvalidRequestError, match="^action: .*no head of .* is served"):
            engine.adapt("run")
        engine.sleep()
        with pytest.raises(InvalidRequestError, match="^action: .*sleeps"):
            engine.adapt("run")


def test_several_engines_number_their_heads_apart(models, tmp_path):
    first, second = (adaptation._placed(Path(models["good"]), tmp_path) for _ in range(2))
    assert (first.name, second.name) == ("head-0001", "head-0002")
    save_file({"a": torch.zeros(1)}, tmp_path / "head-0009x")  # no number
    assert adaptation._placed(Path(models["good"]), tmp_path).name == "head-0003"
