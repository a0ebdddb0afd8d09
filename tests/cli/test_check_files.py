"""`outrider check` and damaged files, impossible sizes, heads given as models, templates."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from outrider.config import EngineConfig
from outrider.engine.preflight import check_new_drafters
from outrider.errors import ConfigError
from outrider.tests.helpers.gguf_files import write_gguf
from outrider.tests.helpers.pooling import embedding_model, reranker

LOCAL = ("--executor", "local")


@pytest.fixture
def copy(tmp_path, model) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(model, tmp_path / "copy"))


def refused(result, field: str, *parts: str) -> None:
    assert result.exit_code == 1, result.stdout + result.stderr
    assert result.stderr.startswith(f"error: {field}"), result.stderr
    assert all(part in result.stderr for part in parts), result.stderr
    assert "sound" not in result.stderr


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garble_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:12] = b"\xff\xfe\xfd\xfc"
    file.write_bytes(data)


def narrow(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def drop(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, "truncated"),
        (garble_header, "cannot be read"),
        (narrow, "'model.norm.weight'"),
        (drop, "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_damaged_weights(outrider_cli, copy, target, damage, named):
    damage(copy)
    refused(outrider_cli("check", "-m", copy), "model", named)
    as_draft = outrider_cli("check", "-m", target, "-md", copy)
    refused(as_draft, "speculative_config.speculative_model", named)
    refused(outrider_cli("generate", "-m", copy, *LOCAL, "x"), "model", named)


def changed(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("file", "content", "field", "named"),
    [
        ("config.json", b"", "model", "it is empty"),
        ("config.json", b"[]", "model", "must hold a mapping"),
        ("config.json", b'{"a":', "model", "line 1 column 6"),
        ("config.json", b"\xff\xfe", "model", "can't decode"),
        ("config.json", {"model_type": "nonesuch"}, "model", "`nonesuch`"),
        ("config.json", {"hidden_size": "many"}, "model", "expected int"),
        ("config.json", {"hidden_size": -160}, "model", "hidden_size is -160; allowed: at least 1"),
        ("config.json", {"hidden_act": "wibble"}, "model", "unknown name 'wibble'"),
        ("config.json", {"rope_scaling": {"rope_type": "wibble"}}, "model", "'wibble'"),
        ("generation_config.json", b"{", "model", "generation_config.json"),
        ("generation_config.json", {"eos_token_id": "end"}, "model", "no token id: 'end'"),
        ("generation_config.json", {"temperature": "hot"}, "generation_config", "a number"),
        ("tokenizer.json", None, "tokenizer", "no tokenizer.json"),
        ("tokenizer.json", b"{}", "tokenizer", "Model missing"),
        ("tokenizer_config.json", b"{", "tokenizer", "tokenizer_config.json"),
        ("tokenizer_config.json", b"[1]", "tokenizer", "must hold a mapping"),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}, "chat_template", "line 1"),
        ("tokenizer_config.json", {"chat_template": 7}, "chat_template", "no text: 7"),
        ("tokenizer_config.json", {"chat_template": [7]}, "chat_template", "no text: None"),
        ("model.safetensors.index.json", b'{"weight_map": []}', "model", "'weight_map'"),
        ("model.safetensors", b"version https://git-lfs\n", "model", "git lfs pull"),
        ("modules.json", b"{", "model", "no list of modules"),
    ],
)  # fmt: skip
def test_every_file_of_a_folder(outrider_cli, copy, file, content, field, named):
    """One fault is one error, without a traceback, and on one line."""
    if content is None:
        (copy / file).unlink()
    elif isinstance(content, dict):
        changed(copy / file, **content)
    else:
        (copy / file).write_bytes(content)
    result = outrider_cli("check", copy)
    refused(result, f"{field}: ", named)
    assert len(result.stderr.splitlines()) == 1


def test_a_fault_does_not_hide_those_of_other_files(outrider_cli, copy, target):
    changed(copy / "config.json", vocab_size=77)
    args = ("--tensor-parallel-size", 3, "--tokenizer", "/nowhere", "--max-model-len", 10**7)
    result = outrider_cli("check", copy, *args)
    fields = [line.split(": ")[1].partition("=")[0] for line in result.stderr.splitlines()]
    assert fields == ["tokenizer", "tensor_parallel_size", "max_model_len", "model"]
    (copy / "config.json").write_text("{")
    result = outrider_cli("check", target, "--draft-model", copy, "--chat-template", "{% if %}")
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == [
        "chat_template", "speculative_config.speculative_model"
    ]  # fmt: skip


def test_a_part_of_a_checkpoint_and_a_head_are_no_target(outrider_cli, copy, model):
    for name in ("config.json", "model.safetensors"):
        refused(outrider_cli("check", copy / name), "config", f"give its folder, {copy}")
    head = outrider_cli("check", model.parent / "eagle3")
    assert "model: " in head.stderr
    assert "the tensors of a head, which drafts for a target" in head.stderr


def test_a_head_is_no_draft_model(outrider_cli, target, copy):
    settings = json.loads((copy / "config.json").read_text())
    settings |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    (copy / "config.json").write_text(json.dumps(settings))
    tensors = {"fc.weight": torch.zeros(8, 24), "midlayer.mlp.up_proj.weight": torch.zeros(8, 8)}
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    result = outrider_cli("check", "-m", target, "-md", copy)
    refused(result, "speculative_config.speculative_model", "tensors of a head", "decoding_type")


WITHOUT_TORCH = """
import json, sys
from typer.testing import CliRunner
from outrider.cli.app import app
for args in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, args)
    found = [name for name in ("torch", "numba", "transformers") if name in sys.modules]
    print(json.dumps([result.exit_code, result.stderr, found]))
"""
AS_DRAFT, AS_HEAD = "speculative_config.speculative_model", "holds no tensor of a head"


@pytest.mark.parametrize("part", ["device", "files"])
def test_what_needs_no_torch(target, tmp_path, part):
    """These mistakes are found from names of files and tensors, before anything large loads."""
    cases = [
        (("--device", "cuda"), "device", "no CUDA device is visible"),
        (("--tokenizer", "{empty}"), "tokenizer", "it has no tokenizer.json"),
        (("--tokenizer", "{models}/eagle3"), "tokenizer", "it has no tokenizer.json"),
        (("-md", "{models}/eagle3"), AS_DRAFT, "the tensors of a head"),
        (("-md", "{models}/medusa"), AS_DRAFT, "the tensors of a head"),
        (("-md", "{models}/redrafter"), AS_DRAFT, "the tensors of a head"),
        (("-m", "{models}/eagle"), "model", "the tensors of a head"),
        (("--spec-type", "eagle3", "-md", "{models}/draft"), AS_DRAFT,
         f"{AS_HEAD} of decoding_type Eagle3; it is a whole model, LlamaForCausalLM: name it as"),
        (("--spec-type", "medusa", "-md", "{models}/eagle3"), AS_DRAFT, AS_HEAD),
        (("--spec-type", "mtp"), AS_DRAFT, AS_HEAD),
    ]  # fmt: skip
    if part == "device" and (torch.version.cuda or torch.version.hip):
        pytest.skip("this torch looks for the device")
    cases = cases[:1] if part == "device" else cases[1:]
    places = {"models": target.parent, "empty": tmp_path}
    commands = [
        ["serve", *([] if "-m" in args else [str(target)]), "--port", "18431",
         *(each.format(**places) for each in args)]
        for args, _, _ in cases
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)],
        env={**os.environ, "RAY_ADDRESS": "local", "COLUMNS": "500"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for line, (args, field, named) in zip(done.stdout.splitlines(), cases, strict=True):
        status, text, imported = json.loads(line)
        (error,) = [each for each in text.splitlines() if each.startswith("error: ")]
        assert status == 1, args
        assert error.startswith(f"error: {field}: "), args
        assert named in error, args
        assert imported == [], args


@pytest.mark.parametrize(
    ("args", "field", "named"),
    [
        (("--num-kv-blocks", 50, "--max-model-len", 2048), "num_kv_blocks", "2048"),
        (("--num-kv-blocks", 999999999), "num_kv_blocks", "GiB of memory"),
        (("--device", "cuda"), "device", "no CUDA device"),
    ],
)
def test_what_the_machine_does_not_have(outrider_cli, model, monkeypatch, args, field, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    refused(outrider_cli("check", "-m", model, *args), field, named)
    refused(outrider_cli("generate", "-m", model, *LOCAL, *args, "x"), field, named)


@pytest.mark.parametrize(
    "template", ["{{ messages[0].nothing.more }}", "{% for m in messages %}", "{{ 1 / 0 }}"]
)
def test_a_broken_chat_template(outrider_cli, copy, template):
    (copy / "chat_template.jinja").write_text(template)
    refused(outrider_cli("check", "-m", copy), "chat_template")
    refused(outrider_cli("check", "-m", copy, "--chat-template", template), "chat_template")


def test_load_starts_and_stops_the_workers(outrider_cli, model):
    result = outrider_cli("check", "-m", model, *LOCAL, "--num-kv-blocks", 64, "--load")
    assert result.exit_code == 0, result.stderr
    assert "decoded a token" in result.stderr


def test_a_gguf_file(outrider_cli, model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(model, tmp_path / "x.gguf", "Q4_0")
    result = outrider_cli("check", file, "--spec-type", "ngram")
    assert result.exit_code == 0, result.stderr
    assert yaml.safe_load(result.stdout)["served_model_name"] == "x.gguf"
    told = " ".join(result.stderr.replace("│", " ").split())  # wrapped where the path ends
    assert "unpacked, its weights take 0.00 GiB" in told
    result = outrider_cli("check", "-m", file, "-md", file)
    assert result.exit_code == 0, result.stderr
    file.write_bytes(file.read_bytes()[:1000])
    for command in ("check", "serve"):
        refused(outrider_cli(command, file), "model: ", "x.gguf", "may be truncated")
    refused(
        outrider_cli("check", "-m", model, "-md", file),
        "speculative_config.speculative_model: ",
        "may be truncated",
    )


def test_drafters_of_a_model_without_text(outrider_cli, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.cli.session.start_ray", lambda *_, **__: False)
    path = embedding_model(tmp_path / "embedding")
    for command in ("check", "serve"):
        result = outrider_cli(command, path, "--spec-type", "ngram")
        refused(result, "speculative_config: 'NGram' has no text to draft", str(path))
    section = {"decoding_type": "NGram"}
    config = EngineConfig.load({"model": str(path), "speculative_config": section})
    with pytest.raises(ConfigError, match="no text to draft"):  # as one that joins an engine
        check_new_drafters(config, 0)
    plain = outrider_cli("check", "-m", path)
    assert plain.exit_code == 0, plain.stderr
    drafts = outrider_cli("check", "-m", reranker(tmp_path / "both"), "--spec-type", "ngram")
    assert drafts.exit_code == 0, drafts.stderr
