"""Bytes that are no text, files that cannot be written, help on a narrow terminal."""

from __future__ import annotations

import io
import sys

import pytest

from outrider.cli.console import read_stdin, say, stdin_lines
from outrider.errors import ConfigError


@pytest.mark.parametrize("command", [("chat",), ("generate", "-")])
def test_bytes_that_are_no_text(outrider_cli, model, command):
    args = (*command, "-m", model, "--executor", "local", "--num-kv-blocks", 64)
    result = outrider_cli(*args, input=b"caf\xe9\n")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: stdin: byte 0xe9 is not UTF-8")


@pytest.mark.parametrize("read", [read_stdin, lambda: list(stdin_lines())])
def test_bytes_that_are_no_text_in_the_c_locale(monkeypatch, read):
    """Python passes them on there, as halves of surrogates."""
    bytes_in = io.BytesIO(b"caf\xe9\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(bytes_in, "utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match="stdin: byte 0xe9 is not UTF-8"):
        read()


def test_a_path_that_is_no_text_is_shown_as_escapes(monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", shown)
    say("caf\udce9: ok \u2713")
    assert shown.buffer.getvalue().decode() == "caf\\udce9: ok \u2713\n"


@pytest.mark.parametrize(
    ("args", "field"), [(("bench", "--json"), "json"), (("calibrate", "--out"), "out")]
)
def test_results_that_cannot_be_written_are_found_first(outrider_cli, model, tmp_path, args, field):
    result = outrider_cli(*args, tmp_path / "none" / "x.json", "-m", model)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {field}: cannot write")
    assert outrider_cli(*args, tmp_path / "x.json", "-m", "/nowhere").exit_code == 1
    assert not (tmp_path / "x.json").exists(), "nothing is left where nothing was"


@pytest.mark.parametrize("command", ["serve", "check", "bench"])
def test_help_on_a_narrow_terminal_names_options_in_full(outrider_cli, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    shown = outrider_cli(command, "--help-all", color=False).stdout
    assert "--spec-ngram-map-k4v-min-hits" in shown
    assert "--enable-prefix-caching" in shown
    assert "…" not in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("serve", "a", "-m", "b"), "model: --model b contradicts the argument a"),
        (("drafter", "a", "-m", "b", "--name", "g"), "model: --model b contradicts"),
        (("check", "a.yaml", "--config", "b.yaml"), "config: --config b.yaml contradicts"),
        (("run-batch", "a", "-m", "b", "-i", "i", "-o", "o"), "model: --model b contradicts"),
        (("bench", "serve", "--base-url", ""), "base_url: expected a server's URL, got ''"),
        (("simulate", "--json", "x" * 5000), "json: cannot write"),
        (("check", "x" * 5000), "config: cannot read"),
        (("bench", "serve", "--result-filename", "\0"), r"result_filename: cannot write '\x00'"),
        (("bench", "serve", "--result-filename", ""), "result_filename: cannot write .: Is a dir"),
    ],
)
def test_options_that_would_be_ignored_or_cannot_be_used(outrider_cli, args, message):
    result = outrider_cli(*args)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("option", "value"), [("--port", 99999), ("--num-prompts", 10**23), ("--input-len", 10**23)]
)
def test_a_port_or_a_number_that_is_none_is_a_usage_error(outrider_cli, option, value):
    assert outrider_cli("bench", "serve", option, value).exit_code == 2
