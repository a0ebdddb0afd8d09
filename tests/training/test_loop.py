"""Runs: what they learn, how they resume, several processes, refusals."""

from __future__ import annotations

import io
import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from outrider.errors import CheckpointError, ConfigError
from outrider.training import state
from outrider.training.loop import Optimization, rate, train
from outrider.training.options import DraftOptions, MedusaOptions, PARD2Options, TrainingOptions

FILE = "model.safetensors"
RUNS = [("medusa", MedusaOptions(num_heads=2)), ("pard2", PARD2Options(num_depths=3))]


@pytest.fixture
def options(target_path, corpus, tmp_path):
    """`options("name", steps=...)`: a small run in float32."""

    def make(name: str, **fields) -> TrainingOptions:
        fields = {
            "window": 24, "batch": 4, "micro_batch": 2, "steps": 8, "warmup": 2, "eval_every": 4,
            "save_every": 100, "eval_windows": 6, "dtype": "float32", "threads": 1,
            "target": target_path, "inputs": (corpus,), "generate": 9, "device": "cpu", **fields,
        }  # fmt: skip
        return TrainingOptions(out=tmp_path / name, **fields)

    return make


def log_of(options: TrainingOptions) -> list[dict]:
    return state.read_log(options.out / "log.jsonl")


@pytest.mark.parametrize(("method", "own"), RUNS)
def test_an_interrupted_run_equals_a_whole_one(options, monkeypatch, method, own):
    whole, cut = options("whole"), options("cut")
    outcome = train(method, whole, own)
    assert (outcome.step, outcome.finished) == (8, True)
    assert set(outcome.scores) == {"text", "own"}

    def append(path, row, old=state.append):
        old(path, row)
        if row["step"] == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(state, "append", append)
        outcome = train(method, cut, own)
    assert (outcome.step, outcome.finished) == (4, False)
    assert not (cut.out / FILE).exists()
    # What a killed run wrote after its last checkpoint is forgotten.
    state.append(cut.out / "log.jsonl", {"step": 5, "loss": -1.0, "grad_norm": 0.0})
    outcome = train(method, options("cut", resume=True), own)
    assert outcome.finished
    assert log_of(cut) == log_of(whole)
    for path in (FILE, "config.json", "training/own.jsonl"):
        assert (cut.out / path).read_bytes() == (whole.out / path).read_bytes()
    assert (cut.out / "training.png").read_bytes()[:4] == b"\x89PNG"
    fewer = options("cut", resume=True, eval_windows=3)  # which windows there are stays
    again = train(method, fewer, own)
    assert again.scores == outcome.scores, "nothing was left to do"


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("name", ["medusa", "draft"])
def test_training_helps(options, name, optimizer):
    own = {"medusa": MedusaOptions(num_heads=2), "draft": DraftOptions(max_draft_len=2)}[name]
    fast = {"muon_lr": 0.05, "adam_lr": 0.02}
    settings = options("out", steps=40, optimizer=optimizer, generate=0, eval_every=40, **fast)
    outcome = train(name, settings, own)
    before, after = (row["heldout"]["text"] for row in log_of(settings) if "heldout" in row)
    assert after["loss"] < before["loss"] - 0.3
    assert after["acceptance"][0] > before["acceptance"][0] + 0.1
    assert outcome.scores["text"].acceptance == tuple(after["acceptance"])


@pytest.mark.slow
@pytest.mark.parametrize(("method", "own"), RUNS)
def test_two_processes_equal_one(options, method, own):
    one, two = options("one"), options("two", num_processes=2)
    for settings in (one, two):
        assert train(method, settings, own).finished
    for before, after in zip(log_of(one), log_of(two), strict=True):
        assert before.keys() == after.keys()
        if "loss" in before:
            assert before["loss"] == pytest.approx(after["loss"], rel=1e-4)
        else:
            assert before["heldout"]["own"]["loss"] == pytest.approx(
                after["heldout"]["own"]["loss"], rel=1e-4
            )
    theirs = load_file(two.out / FILE)
    for key, tensor in load_file(one.out / FILE).items():
        torch.testing.assert_close(theirs[key], tensor, rtol=1e-3, atol=1e-4)
    own = "training/own.jsonl"
    assert (one.out / own).read_bytes() == (two.out / own).read_bytes()


def test_bfloat16_trains_in_float32(options):
    settings = options("out", dtype="bfloat16", steps=4, generate=0)
    train("medusa", settings, MedusaOptions(num_heads=1))
    saved = torch.load(settings.out / "training/checkpoint.pt")
    assert {tensor.dtype for tensor in saved["module"].values()} == {torch.float32}
    stored = load_file(settings.out / FILE)
    assert {t.dtype for t in stored.values()} == {torch.float32}, "as the target's checkpoint"


def test_another_run_is_refused(options, target_path, tmp_path):
    own = MedusaOptions(num_heads=1)
    settings = {"steps": 2, "generate": 0}
    with pytest.raises(ConfigError, match="resume: .*out holds no training run"):
        train("medusa", options("out", resume=True, **settings), own)
    train("medusa", options("out", **settings), own)
    with pytest.raises(ConfigError, match="holds a training run; give --resume"):
        train("medusa", options("out", **settings), own)
    for key, method, changed, its in [
        ("medusa.num_heads", "medusa", {}, MedusaOptions(num_heads=2)),
        ("batch", "medusa", {"batch": 8}, own),
        ("seed", "medusa", {"seed": 1}, own),
        ("data", "medusa", {"heldout": 0.1}, own),
    ]:
        with pytest.raises(CheckpointError, match="resume: .*was trained with") as caught:
            train(method, options("out", resume=True, **{**settings, **changed}), its)
        assert caught.value.field == key
    with pytest.raises(CheckpointError, match="method = 'medusa', this run has 'draft'"):
        train("draft", options("out", resume=True, **settings), DraftOptions())
    with pytest.raises(ConfigError, match="steps: 1, but the saved run has taken 2"):
        train("medusa", options("out", resume=True, steps=1, generate=0), own)
    # More steps are no other run.
    assert train("medusa", options("out", resume=True, steps=3, generate=0), own).step == 3


def test_only_the_files_layout_may_change_when_nothing_is_left(options):
    settings = {"steps": 1, "generate": 0}
    train("medusa", options("out", **settings), MedusaOptions(num_heads=1))
    other = MedusaOptions(num_heads=1, layout="reference")
    assert train("medusa", options("out", resume=True, **settings), other).finished
    assert (options("out").out / "medusa_lm_head.safetensors").is_file()


def test_a_run_killed_before_it_saved_begins_anew(options):
    settings = options("out", steps=2, generate=0)
    train("medusa", settings, MedusaOptions(num_heads=1))
    whole = log_of(settings)
    (settings.out / "training" / "checkpoint.pt").unlink()
    with (settings.out / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    train("medusa", options("out", steps=2, generate=0, resume=True), MedusaOptions(num_heads=1))
    assert log_of(settings) == whole


def test_a_run_killed_while_it_saved_goes_on_from_before(options, monkeypatch):
    own = MedusaOptions(num_heads=1)
    settings = {"steps": 4, "generate": 0, "save_every": 2}
    whole, cut = options("whole", **settings), options("cut", **settings)
    train("medusa", whole, own)

    class KilledError(Exception):
        pass

    def save(content, path, old=torch.save):
        if content["step"] == 4:
            path.write_bytes(b"half")
            raise KilledError
        old(content, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        with pytest.raises(KilledError):
            train("medusa", cut, own)
    train("medusa", options("cut", resume=True, **settings), own)
    assert log_of(cut) == log_of(whole)
    assert (cut.out / FILE).read_bytes() == (whole.out / FILE).read_bytes()


def test_damage_is_named(options):
    own = MedusaOptions(num_heads=1)
    settings = {"steps": 1, "generate": 0}
    out = options("out").out
    train("medusa", options("out", **settings), own)
    checkpoint = out / "training" / "checkpoint.pt"
    other = io.BytesIO()
    torch.save([1, 2], other)
    log = out / "log.jsonl"
    lines = log.read_text()
    for damage in ("[1]\n", "{}\n", "{\n", '{"step": "x"}\n'):
        log.write_text(lines + damage)
        with pytest.raises(CheckpointError, match=r"resume: .*log\.jsonl is damaged"):
            train("medusa", options("out", resume=True, **settings), own)
    for content in (b"", b"nonsense", other.getvalue(), checkpoint.read_bytes()[:2000]):
        checkpoint.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"resume: .*checkpoint\.pt cannot be read"):
            train("medusa", options("out", resume=True, **settings), own)
    for damage in ("{", "[1]", "5"):
        (out / "training" / "run.json").write_text(damage)
        with pytest.raises(CheckpointError, match=r"resume: .*run\.json is damaged"):
            train("medusa", options("out", resume=True, **settings), own)


def test_other_files_are_left_alone(options, target_path, tmp_path):
    before = sorted(path.name for path in target_path.iterdir())
    with pytest.raises(ConfigError, match=r"out: .* holds other files \(.*config\.json") as caught:
        train("medusa", TrainingOptions(**{**dict(options("x")), "out": target_path}),
              MedusaOptions())  # fmt: skip
    assert caught.value.field == "out"
    assert sorted(path.name for path in target_path.iterdir()) == before


def test_options_that_do_not_fit_leave_no_run_behind(options):
    settings = options("out", generate=0, steps=1)
    with pytest.raises(ConfigError, match="does not divide hidden_size"):
        train("draft", settings, DraftOptions(num_attention_heads=3))
    assert train("draft", settings, DraftOptions()).finished


def test_a_rate_that_is_too_high_is_named(options):
    settings = options("out", generate=0, adam_lr=1e30, warmup=0, optimizer="adamw")
    with pytest.raises(ConfigError, match="adam_lr: the gradient norm of step . is nan|inf"):
        train("medusa", settings, MedusaOptions(num_heads=1))


def test_a_checkpoint_of_another_shape_is_named(tmp_path):
    path = tmp_path / "checkpoint.pt"
    state.save(path, torch.nn.Linear(3, 2), [], 1)
    for module, named in [
        (torch.nn.Linear(4, 2), r"'weight' .* has shape \(2, 3\), expected \(2, 4\)"),
        (torch.nn.Linear(3, 2, bias=False), r"'bias' .* has shape \(2,\), expected None"),
    ]:
        with pytest.raises(CheckpointError, match=named):
            state.load(path, module)


def test_the_targets_mark(target_path, tmp_path):
    (tmp_path / "config.json").write_text((target_path / "config.json").read_text())
    weights = (target_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert state.target_mark(tmp_path) == state.target_mark(target_path)
    (tmp_path / "model.safetensors").write_bytes(weights[:-1] + b"\0")
    assert state.target_mark(tmp_path) != state.target_mark(target_path)


def test_refusals(options, target_path, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="unknown method 'nonsense'; known: medusa"):
        train("nonsense", options("out"), MedusaOptions())
    with pytest.raises(CheckpointError, match="target: .* has no config.json"):
        train("medusa", options("out", target=tmp_path), MedusaOptions())
    with pytest.raises(ConfigError, match="window: 129 tokens exceed the target's 128 positions"):
        train("medusa", options("out", window=129), MedusaOptions())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="device: 'cuda' was requested, but there is no GPU"):
        train("medusa", options("out", device="cuda"), MedusaOptions())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ConfigError, match="num_processes: 2 processes need as many GPUs, but there"
    ):
        train("medusa", options("out", device="cuda", num_processes=2), MedusaOptions())
    (tmp_path / "config.json").write_text((target_path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"target: .* has no \*.safetensors file"):
        train("medusa", options("out", target=tmp_path), MedusaOptions())
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="target: the tokenizer of"):
        train("medusa", options("out", target=tmp_path), MedusaOptions())
    shutil.copytree(target_path, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    more = {**config, "num_hidden_layers": config["num_hidden_layers"] + 1}
    (tmp_path / "config.json").write_text(json.dumps(more))
    with pytest.raises(CheckpointError, match="target: the tensors of .* missing"):
        train("medusa", options("out", target=tmp_path), MedusaOptions())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": "x"}))
    with pytest.raises(CheckpointError, match=r"target: .*config\.json is not a configuration"):
        train("medusa", options("out", target=tmp_path), MedusaOptions())
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="out: cannot write"):
        train("medusa", options("file/out"), MedusaOptions())


def test_the_schedule(options):
    settings = options("out", steps=10, warmup=4, decay=0.5)
    rates = [rate(step, settings) for step in range(10)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]


def test_which_optimizer_takes_what(options):
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(7, 4)
            self.middle = torch.nn.Linear(4, 4)
            self.lm_head = torch.nn.Linear(4, 5)  # a part of the vocabulary
            self.heads = torch.nn.ModuleList([torch.nn.Linear(4, 9, bias=False)])
            self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)

    module = Module()
    muon, adam = Optimization(module, options("out"), 1e-3, 1e-2, 9)._optimizers
    assert [p.data_ptr() for p in muon.param_groups[0]["params"]] == [
        module.middle.weight.data_ptr()
    ]
    assert sum(len(group["params"]) for group in adam.param_groups) == 5
    with pytest.raises(ConfigError, match="'muon' needs hidden matrices"):
        Optimization(module.lm_head, options("out", optimizer="muon"), 1e-3, 1e-2, 5)


@pytest.mark.slow
def test_a_faulty_process_says_why(options):
    """A typed error crosses over from where it was raised."""
    own = DraftOptions(num_attention_heads=3)
    with pytest.raises(ConfigError, match="3 does not divide hidden_size") as caught:
        train("draft", options("out", num_processes=2, generate=0), own)
    assert caught.value.field == "num_attention_heads"


def test_identity_is_json(options):
    assert json.loads(json.dumps(options("out").identity())) == options("out").identity()
