"""Help, version, exit codes, and what must not be imported to get there."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import outrider
from outrider.cli.app import SUMMARIES
from outrider.cli.foreign import ALIASES, canonical
from outrider.cli.options import EngineOptions
from outrider.cluster.serve.args import ServeConfig
from outrider.config import EngineConfig, NGramModConfig
from outrider.scheduler.sampling import SamplingParams
from outrider.training.options import METHODS

COMMANDS = ("serve", "generate", "chat", "bench", "check")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(outrider_cli, command):
    result = outrider_cli(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout
    assert "--speculative-config" in result.stdout


@pytest.mark.parametrize(
    ("command", "own"),
    [
        (("serve",), "--port"),
        (("generate",), "--stream"),
        (("chat",), "--system"),
        (("calibrate",), "--sweep"),
        (("check",), "--load"),
        (("bench",), "--prompts"),
        (("bench", "suite"), "--peer"),
    ],
)
@pytest.mark.parametrize("columns", ["80", "140"])
def test_help_shows_a_commands_own_options_before_the_engines(
    outrider_cli, monkeypatch, command, own, columns
):
    monkeypatch.setenv("COLUMNS", columns)
    shown = outrider_cli(*command, "--help", color=False).stdout
    in_full = outrider_cli(*command, "--help-all", color=False).stdout
    for text in (shown, in_full):
        assert 0 < text.index(f" {own} ") < text.index("--speculative-config ")
        assert "default []" not in text
    for name in ("--max-num-seqs", "--trust-remote-code", "--spec-ngram-mod-n-min"):
        assert name not in shown
        assert name in in_full
    assert in_full.index(f" {own} ") < in_full.index("--max-num-seqs")
    assert "--help-all shows" in shown
    assert ("--tp-size" in shown, "--tp-size" in in_full) == (False, True), "other engines' names"
    assert len(shown.splitlines()) < 100 < len(in_full.splitlines())


def test_help_lists_the_commands(outrider_cli):
    result = outrider_cli("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)


def test_version(outrider_cli):
    result = outrider_cli("--version")
    assert result.exit_code == 0
    assert result.stdout == f"outrider {outrider.__version__}\n"


@pytest.mark.parametrize(
    "args",
    [("generate", "x", "--bogus"), ("nothing",), ("serve", "m", "--stats-interval-s", "-1"), ()],
)
def test_usage_errors_exit_with_2(outrider_cli, args):
    assert outrider_cli(*args).exit_code == 2


EVERY = [
    *([name] for name in SUMMARIES),
    *(["train", name] for name in METHODS),
    *(["ngram", name] for name in ("build", "inspect")),
    ["bench", "suite"],
]


@pytest.mark.parametrize(("commands", "allowed"), [([[]], set()), (EVERY, {"pydantic"})])
def test_help_imports_nothing_heavy(commands, allowed):
    script = (
        "import sys\n"
        "from outrider.cli.app import app\n"
        f"for words in {commands}:\n"
        "    app([*words, '--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'ray', 'transformers', 'pydantic', 'fastapi', 'numpy', 'numba'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.count("Usage:") == len(commands)
    assert set(ast.literal_eval(result.stderr)) <= allowed


def test_settings_of_the_engine_are_options(outrider_cli):
    """All but sections, and those of another command's name; switches work both ways."""
    shown = " ".join(outrider_cli("check", "--help-all", color=False).stdout.split())
    apart = {"resources", "seed", "stats_interval_s", "hf_overrides", "online_adaptation"}
    for name, field in EngineConfig.model_fields.items():
        assert (f"--{name.replace('_', '-')} " in shown) == (name not in apart), name
        assert field.description or name in {*apart, "model", "speculative_config"}, name
    options = EngineOptions(model="m", max_restarts=7, enable_prefix_caching=False)
    config = options.resolve()
    assert (config.max_restarts, config.enable_prefix_caching) == (7, False)


@pytest.mark.parametrize(
    ("command", "model", "names", "defaults"),
    [
        ("generate", SamplingParams, ("temperature", "top_p", "max_tokens", "stop"),
         ("default 0.", "default 128.")),
        ("serve", ServeConfig, ("num_replicas", "name", "route_prefix"), ("default outrider.",)),
        ("check", NGramModConfig, ("n_match", "n_min"), ()),
    ],
)  # fmt: skip
def test_options_have_their_models_descriptions(outrider_cli, command, model, names, defaults):
    shown = " ".join(
        outrider_cli(command, "--help-all", color=False).stdout.replace("│", " ").split()
    )
    for name in names:
        words = (model.model_fields[name].description or "").removesuffix(".").lower().split()
        assert all(word in shown.lower() for word in words), name
    assert all(default in shown for default in defaults)


def test_module_runs_as_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "outrider", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("outrider ")


def test_debug_keeps_the_traceback(outrider_cli, monkeypatch):
    args = ("check", "--model", "/nowhere")
    assert outrider_cli(*args).exception.__class__ is SystemExit
    assert outrider_cli("--debug", *args).exception.__class__.__name__ == "CheckpointError"
    monkeypatch.setenv("OUTRIDER_DEBUG", "1")
    assert outrider_cli(*args).exception.__class__.__name__ == "CheckpointError"


def test_aliases_lead_to_options(outrider_cli):
    """Every alias names an option that some command has."""
    shown = "".join(outrider_cli(command, "--help-all", color=False).stdout for command in COMMANDS)
    assert [name for name in ALIASES.values() if f"--{name}" not in shown] == []


def test_underscores_are_hyphens():
    assert canonical("tensor_parallel_size") == "tensor-parallel-size"
    assert canonical("draft_max") == "max-draft-len"
