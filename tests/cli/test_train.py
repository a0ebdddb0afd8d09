"""`outrider train` as a user types it."""

from __future__ import annotations

import re
import signal

import pytest
import typer

from outrider.cli import train as command
from outrider.training import state
from outrider.training.options import METHODS, TrainingOptions

QUICK = ("--steps", 2, "--window", 16, "--batch", 2, "--eval-windows", 2, "--threads", 1)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("def sum(items):\n    return items\n" * 60)
    return path


def test_a_run(outrider_cli, model, text, tmp_path):
    out = tmp_path / "out"
    result = outrider_cli("train", "medusa", model, out, "-i", text, "--num-heads", 2, *QUICK)
    assert result.exit_code == 0, result.stderr
    assert (out / "model.safetensors").is_file()
    assert "tokens per step" in result.stderr
    assert f"{out}: medusa, 2 steps" in result.stderr
    again = outrider_cli("train", "medusa", model, out, "-i", text, "--num-heads", 2, *QUICK)
    assert again.exit_code == 1
    assert f"OUT: {out} holds a training run; give --resume" in again.stderr


def test_an_interrupted_run_says_how_to_go_on(outrider_cli, model, text, tmp_path, monkeypatch):
    words = ["train", "medusa", str(model), str(tmp_path / "an out"), "-i", str(text)]
    words += [str(word) for word in (*QUICK, "--steps", 3)]

    def append(path, row, old=state.append):
        old(path, row)
        if row["step"] == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(state, "append", append)
        patch.setattr("sys.argv", ["outrider", *words])
        result = outrider_cli(*words)
    assert result.exit_code == 130
    assert "Saved after step 2. Resume with:" in result.stderr
    assert f"-i {text} --steps 2 --window" in result.stderr
    assert "an out' " in result.stderr
    assert result.stderr.rstrip().endswith("--resume")
    assert outrider_cli(*words, "--resume").exit_code == 0


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--window", 4), "--window: "),
        (("--batch", 3, "--num-processes", 2), "--batch: 3 windows cannot"),
        (("--optimizer", "sgd"), "--optimizer: .*'muon'"),
        (("--own-share", 2), "--own-share: "),
        (("--temperature", 1), "--temperature: it is of generated texts; give --generate"),
        (("--heldout", 0.1, "--heldout-file", "a.txt"), "--heldout: --heldout-file names"),
        (("--generate", 10**30), "--generate: at most 10000000"),
        (("--num-heads", 0), "--num-heads: "),
        (("--threads", 10**6), "--threads: at most 4096"),
        (("--heldout-file", "x" * 300), "--heldout-file: .* longer than any name of a file"),
        (("--heldout-file", "missing.txt"), "--heldout-file: missing.txt: No such file"),
        (("--window", 1 << 20), "--window: .* positions"),
        (("--window", 1024), "--input: .* tokens are too few"),
    ],
)
def test_bad_options_are_named(outrider_cli, model, text, tmp_path, args, named):
    result = outrider_cli("train", "medusa", model, tmp_path / "out", "-i", text, *args)
    assert result.exit_code == 1
    assert re.search(named, result.stderr.replace("\n", " ")), result.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named(outrider_cli, model, text, tmp_path):
    long = "x" * 300
    for name, place in (("TARGET", (long, tmp_path / "out")), ("OUT", (tmp_path, long))):
        result = outrider_cli("train", "draft", *place, "-i", text)
        assert result.exit_code == 1
        assert f"{name}: 'xxx" in result.stderr
    result = outrider_cli("train", "draft", tmp_path / "no", tmp_path / "out", "-i", text)
    assert result.exit_code == 1
    assert "TARGET: " in result.stderr
    result = outrider_cli("train", "draft", model, tmp_path / "out")
    assert result.exit_code == 2
    assert "--input" in result.stderr


@pytest.mark.parametrize("method", METHODS)
def test_every_setting_has_a_described_option(method):
    shared, own = TrainingOptions.model_fields, METHODS[method].options.model_fields
    assert not shared.keys() & own.keys()
    made = typer.main.get_group(command.app).get_command(None, method)
    options = {param.name: param for param in made.params}
    assert options.keys() == shared.keys() | own.keys()
    for name, field in {**shared, **own}.items():
        if name not in ("target", "out"):
            assert options[name].default is None, name
            assert field.description.endswith("."), name
            assert field.description.removesuffix(".") in options[name].help, name


def test_help_shows_true_defaults(outrider_cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    shown = " ".join(outrider_cli("train", "medusa", "--help").stdout.split())
    assert "conversations too; default no." in shown
    assert "Temperature of generated texts; 0 is greedy; default 0." in shown
    assert "Number of heads: tokens drafted ahead; default 4." in shown
    listed = " ".join(outrider_cli("train", "--help").stdout.split())
    for method, entry in METHODS.items():
        assert f" {method} {entry.summary[:25]}" in listed  # a narrow terminal cuts the rest
