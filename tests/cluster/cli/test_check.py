"""`outrider check`: what is sound is printed in full, what is not is named."""

from __future__ import annotations

import json

import pytest
import yaml

NGRAM = "speculative_config: {decoding_type: NGram, max_draft_len: 3}\n"


def test_resolved_configuration_is_yaml(outrider_cli, config_file, model):
    path = config_file(f"model: {model}\nmax_num_seqs: 8\n{NGRAM}")
    result = outrider_cli("check", path, "--max-num-seqs", 4)
    assert result.exit_code == 0, result.stderr
    resolved = yaml.safe_load(result.stdout)
    assert resolved["max_num_seqs"] == 4, "an option overrides the file"
    assert resolved["speculative_config"]["max_draft_len"] == 3
    assert resolved["tensor_parallel_size"] == 1
    assert "LlamaForCausalLM" in result.stderr


def test_resolved_configuration_is_a_configuration(outrider_cli, config_file, model):
    first = outrider_cli("check", config_file(f"model: {model}\n{NGRAM}"))
    again = outrider_cli("check", config_file(first.stdout, "again.yaml"))
    assert again.stdout == first.stdout


def test_tensorrt_llm_keys(outrider_cli, config_file, model):
    path = config_file(
        f"model: {model}\nmax_batch_size: 8\nmax_seq_len: 512\n"
        "kv_cache_config: {enable_block_reuse: false}\n" + NGRAM
    )
    # The option and the key mean the same setting: the option wins.
    result = outrider_cli("check", path, "--max-num-seqs", 2)
    assert result.exit_code == 0, result.stderr
    resolved = yaml.safe_load(result.stdout)
    assert (resolved["max_num_seqs"], resolved["max_model_len"]) == (2, 512)
    assert resolved["enable_prefix_caching"] is False


def test_vllm_json(outrider_cli, config_file, model):
    section = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}
    given = outrider_cli("check", "-m", model, "--speculative-config", json.dumps(section))
    path = config_file(json.dumps(section), "spec.json")
    from_file = outrider_cli("check", path, "-m", model)
    assert given.exit_code == 0, given.stderr
    assert given.stdout == from_file.stdout
    resolved = yaml.safe_load(given.stdout)["speculative_config"]
    assert resolved["decoding_type"] == "NGram"
    assert (resolved["max_draft_len"], resolved["max_matching_ngram_size"]) == (3, 5)


def test_llama_cpp_options(outrider_cli, model, target):
    args = ("--model-draft", model, "--draft-max", 5, "--ctx-size", 256, "-np", 2)
    result = outrider_cli("check", "-m", target, *args)
    assert result.exit_code == 0, result.stderr
    resolved = yaml.safe_load(result.stdout)
    assert resolved["speculative_config"]["decoding_type"] == "DraftTarget"
    assert resolved["speculative_config"]["max_draft_len"] == 5
    assert (resolved["max_model_len"], resolved["max_num_seqs"]) == (256, 2)


def test_short_options_refine_a_section(outrider_cli, config_file, model):
    path = config_file(f"model: {model}\n{NGRAM}")
    refined = yaml.safe_load(outrider_cli("check", path, "--draft-max", 7).stdout)
    assert refined["speculative_config"]["max_draft_len"] == 7
    off = yaml.safe_load(outrider_cli("check", path, "--spec-type", "none").stdout)
    assert off["speculative_config"]["decoding_type"] == "None"


@pytest.mark.parametrize(
    ("text", "field", "hint"),
    [
        ("max_num_seq: 3\n", "max_num_seq", "did you mean 'max_num_seqs'"),
        ("max_num_seqs: 0\n", "max_num_seqs", "greater than or equal to 1"),
        ("kv_cache_config: {blocks: 3}\n", "kv_cache_config.blocks", "tokens_per_block"),
        (
            "speculative_config: {decoding_type: NGram, max_draft_length: 3}\n",
            "speculative_config.max_draft_length",
            "did you mean 'max_draft_len'",
        ),
        (
            "speculative_config: {decoding_type: Ngramm}\n",
            "speculative_config.decoding_type",
            "'NGram'",
        ),
        (
            "speculative_config: {method: eagle9}\n",
            "speculative_config.method",
            "draft_model",
        ),
        ("speculative_config: {max_draft_len: 3}\n", "decoding_type", "required"),
        ("serve: {replicas: 3}\n", "serve.replicas", "num_replicas"),
        ("tensor_parallel_size: 3\n", "tensor_parallel_size", "num_attention_heads"),
        ("dtype: int4\n", "dtype", "bfloat16"),
    ],
)
def test_mistakes_are_named(outrider_cli, config_file, model, text, field, hint):
    result = outrider_cli("check", config_file(f"model: {model}\n{text}"))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert field in result.stderr
    assert hint in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) < 25


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("/nowhere.yaml",), "config"),
        (("--model", "/nowhere"), "model"),
        ((), "model"),
        (("--speculative-config", '{"method": "ngram"'), "speculative_config"),
        (("--speculative-config", "[1]"), "speculative_config"),
        (("--speculative-config", "nowhere.json"), "speculative_config"),
    ],
)
def test_missing_files_and_bad_json(outrider_cli, args, field):
    result = outrider_cli("check", *args)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {field}")


def test_configuration_that_is_no_mapping(outrider_cli, config_file):
    for text in ("- a\n", "a: [1\n"):
        result = outrider_cli("check", config_file(text))
        assert result.exit_code == 1
        assert result.stderr.startswith("error: config: ")


def test_draft_model_must_share_the_vocabulary(outrider_cli, tmp_path, target):
    other = tmp_path / "other"
    other.mkdir()
    settings = json.loads((target / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "vocab_size": 77}))
    (other / "model.safetensors").write_bytes(b"")
    result = outrider_cli("check", "-m", target, "--draft-model", other)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: speculative_config.speculative_model")


def test_draft_model_is_checked_at_its_own_size(outrider_cli, model, target):
    section = {
        "decoding_type": "DraftTarget",
        "speculative_model": str(model),
        "draft_tensor_parallel_size": 3,
    }
    result = outrider_cli("check", "-m", target, "--speculative-config", json.dumps(section))
    assert result.exit_code == 1
    assert "speculative_config.speculative_model" in result.stderr
