"""`outrider generate` and `outrider chat` on a demo model in this process."""

from __future__ import annotations

import pytest

from outrider.tests.helpers.adapters import write_adapter

PROMPT = "def __init__(self, name):\n        self.name"
LOCAL = ("--executor", "local", "--dtype", "float32", "--num-kv-blocks", 256)


def test_streams_the_text_and_the_statistics(outrider_cli, model):
    args = ("generate", PROMPT, "-m", model, *LOCAL, "--max-tokens", 24, "--ignore-eos")
    drafted = outrider_cli(*args, "--spec-type", "ngram")
    assert drafted.exit_code == 0, drafted.stderr
    assert "draft acceptance rate = " in drafted.stderr
    assert "statistics ngram: #calls(b,g,a) = 1 " in drafted.stderr
    assert "output tokens" in drafted.stderr
    plain = outrider_cli(*args, "--no-stream", "--no-stats")
    assert plain.stdout == drafted.stdout, "a drafter never changes the text"
    assert "output tokens" not in plain.stderr


def test_a_list_of_drafters_never_changes_the_text(outrider_cli, model):
    args = ("generate", PROMPT, "-m", model, *LOCAL, "--max-tokens", 24, "--ignore-eos")
    types = ("--spec-type", "ngram-mod,ngram-simple", "--spec-ngram-simple-size-n", 2)
    drafted = outrider_cli(*args, *types, "--spec-ngram-simple-size-m", 4, "-md", model)
    assert drafted.exit_code == 0, drafted.stderr
    names = [line.split(":")[0] for line in drafted.stderr.splitlines() if "#calls" in line]
    assert names == [f"statistics {each}" for each in ("ngram_simple", "ngram_mod", "draft_target")]
    assert outrider_cli(*args, "--no-stream", "--no-stats").stdout == drafted.stdout


def test_a_drafter_that_only_fails_is_shown(outrider_cli, model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing.py").write_text(
        "class Failing:\n    def draft(self, token_ids, max_tokens):\n        raise ValueError\n"
    )
    section = '{"decoding_type": "User", "drafter": "failing:Failing"}'
    args = ("generate", "a", "-m", model, *LOCAL, "-n", 4, "--ignore-eos")
    result = outrider_cli(*args, "--speculative-config", section)
    assert result.exit_code == 0, result.stderr
    assert "statistics failing: #calls(b,g,a) = 1 " in result.stderr
    assert "faults failing = " in result.stderr
    assert "#calls" not in outrider_cli(*args).stderr, "no speculation, no drafter"


def test_several_prompts(outrider_cli, model):
    result = outrider_cli("generate", "a", "b", "-m", model, *LOCAL, "-n", 4)
    assert result.exit_code == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if line.startswith("===")] == [
        "=== a",
        "=== b",
    ]


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("-m", "/nowhere"), "model"),
        (("-m", "/nowhere", "--temperature", -1), "temperature"),
        (("-m", "/nowhere", "--top-p", 2), "top_p"),
        (("-m", "/nowhere", "--stop", ""), "stop: an empty string stops everything"),
        (("-m", "/nowhere", "--max-tokens", 0), "max_tokens"),
        (("-m", "/nowhere", "--config", "/nowhere.yaml"), "config"),
        (("-m", "/nowhere", "--dtype", "int3"), "dtype"),
    ],
)
def test_mistakes_are_named(outrider_cli, args, field):
    result = outrider_cli("generate", "x", *args, "--executor", "local")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {field}")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("x", "-n", 100_000), "max_tokens: 100000 with a prompt exceed"),
        (("x", "-n", 64, "--max-model-len", 64), "max_tokens: 64 with a prompt exceed"),
        (("a", ""), "prompt: it is empty"),
        (("x", "-m", ""), "model: the name is empty"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "explain"])
def test_requests_that_cannot_be_are_found_before_loading(
    outrider_cli, model, monkeypatch, command, args, message
):
    monkeypatch.setattr("outrider.cli.session.check_files", None)
    args = args[1:] if command == "explain" and "" in args[:2] else args
    result = outrider_cli(command, "-m", model, *args, *LOCAL)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {message}")


def test_chat_with_piped_input(outrider_cli, model):
    result = outrider_cli(
        "chat",
        *("-m", model, *LOCAL, "--max-tokens", 8, "--spec-type", "ngram"),
        input="hello\n/stats\n/reset\n/what\n\nhello\n/exit\nunseen\n",
    )
    assert result.exit_code == 0, result.stderr
    assert "forgotten" in result.stderr
    assert "/what: unknown command" in result.stderr
    half = len(result.stdout) // 2
    assert result.stdout[:half] == result.stdout[half:], "a reset conversation starts afresh"


def test_chat_raw_continues_the_text(outrider_cli, model):
    args = ("-m", model, *LOCAL, "--max-tokens", 8, "--ignore-eos")
    chatted = outrider_cli("chat", *args, "--raw", input="import os\n")
    generated = outrider_cli("generate", "import os", *args)
    assert chatted.stdout == generated.stdout


def test_chat_with_no_server(outrider_cli):
    result = outrider_cli("chat", "--url", "127.0.0.1:9", input="hello\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: url: no server answers at http://127.0.0.1:9")


def test_an_adapter_is_chosen_by_name(outrider_cli, model, tmp_path):
    folder = write_adapter(tmp_path / "a", str(model), seed=1, alpha=2.0)
    given = ("-m", model, *LOCAL, "--max-tokens", 12, "--ignore-eos", "--lora-modules")
    args = ("generate", PROMPT, *given, f"a={folder}")
    plain, adapted = outrider_cli(*args), outrider_cli(*args, "--adapter", "a", "--no-stream")
    assert plain.exit_code == adapted.exit_code == 0, adapted.stderr
    assert plain.stdout != adapted.stdout
    drafted = outrider_cli(*args, "--adapter", "a", "--spec-type", "ngram")
    assert drafted.stdout == adapted.stdout
    unknown = outrider_cli(*args, "--adapter", "b")
    assert unknown.exit_code != 0
    assert unknown.stderr.startswith("error: adapter: 'b' is not served; there is 'a'")
    talk = outrider_cli("chat", "--raw", *given, f"a={folder}", "--adapter", "a", input=PROMPT)
    assert talk.exit_code == 0, talk.stderr
