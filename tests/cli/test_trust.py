"""A checkpoint's own Python is not run unless the user allows it, by whichever command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def hostile(tmp_path, model) -> Path:
    """A checkpoint of an unknown type whose code leaves a mark when it is imported."""
    folder = tmp_path / "hostile"
    shutil.copytree(model, folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["model_type"] = "unheard_of"
    settings["architectures"] = ["UnheardOfForCausalLM"]
    settings["auto_map"] = {
        "AutoConfig": "code.Settings",
        "AutoModelForCausalLM": "code.Model",
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "code.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(tmp_path / 'mark')!r}).write_text('ran')\n"
        "class Settings(LlamaConfig):\n    model_type = 'unheard_of'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Settings\n"
    )
    return folder


@pytest.fixture(autouse=True)
def no_cache_of_code(tmp_path, monkeypatch):
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.parametrize(
    "args",
    [
        ("generate", "-m", "MODEL", "--executor", "local", "x"),
        ("chat", "-m", "MODEL", "--executor", "local"),
        ("serve", "MODEL", "--port", "PORT"),
        ("check", "-m", "MODEL"),
        ("check", "-m", "GOOD", "-md", "MODEL"),
        ("check", "-m", "GOOD", "--tokenizer", "MODEL"),
        ("train", "medusa", "MODEL", "OUT", "-i", "TEXT"),
    ],
    ids=lambda args: "-".join(args[:2]),
)
def test_code_is_refused_by_name(outrider_cli, hostile, model, tmp_path, args, monkeypatch):
    from outrider.tests.helpers.ports import free_port

    # A server's Ray starts while checkpoints are checked; that it does is shown in `test_serve.py`.
    monkeypatch.setattr("outrider.cli.session.start_ray", lambda *args, **options: False)
    monkeypatch.setattr("outrider.cli.serve._start_serve", lambda *args: None)
    if "--tokenizer" in args:  # a tokenizer's class is code as well
        (hostile / "tokenizer_config.json").write_text(
            json.dumps({"auto_map": {"AutoTokenizer": ["code.Words", None]}})
        )
    (tmp_path / "text.txt").write_text("some words " * 500)
    places = {
        "MODEL": hostile,
        "GOOD": model,
        "OUT": tmp_path / "out",
        "TEXT": tmp_path / "text.txt",
        "PORT": free_port(),
    }
    result = outrider_cli(*(places.get(arg, arg) for arg in args), input="y\ny\ny\n")
    assert result.exit_code == 1
    assert str(hostile) in result.stderr
    assert "trust_remote_code" in result.stderr
    assert "Do you wish to run" not in result.stdout + result.stderr
    assert not (tmp_path / "mark").exists()


def test_code_runs_where_it_is_allowed(outrider_cli, hostile, tmp_path):
    args = ("generate", "-m", hostile, "--executor", "local", "--trust-remote-code", "-n", 4)
    result = outrider_cli(*args, "def f(x):")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "mark").exists()
