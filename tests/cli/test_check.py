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


@pytest.mark.parametrize("option", ["--extra_llm_api_options", "--extra-llm-api-options"])
@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
def test_tensorrt_llms_name_of_the_file(outrider_cli, config_file, model, option, form):
    """The file of `trtllm-serve`, which options override; by one name or the other."""
    path = config_file(
        "disable_overlap_scheduler: true\nmax_batch_size: 4\n"
        "kv_cache_config: {enable_block_reuse: false}\n"
        "speculative_config: {decoding_type: NGram, max_draft_len: 3, is_public_pool: true}\n"
    )
    given = ("check", "-m", model, "--max_seq_len", 64)
    result = outrider_cli(*given, *form.format(option, path).split())
    assert result.exit_code == 0, result.stderr
    assert result.stdout == outrider_cli(*given, "--config", path).stdout
    found = yaml.safe_load(result.stdout)
    assert found["overlap_scheduling"] is False
    assert found["enable_prefix_caching"] is False
    assert (found["max_num_seqs"], found["max_model_len"]) == (4, 64)
    assert found["speculative_config"]["pool_scope"] == "tenant"
    more = outrider_cli(*given, option, path, "--max_batch_size", 6)
    assert yaml.safe_load(more.stdout)["max_num_seqs"] == 6
    lost = outrider_cli(*given, option, path.with_name("lost.yaml"))
    assert (lost.exit_code, lost.stderr.startswith("error: config: cannot read")) == (1, True)


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


def section_of(outrider_cli, *args):
    result = outrider_cli("check", *args)
    assert result.exit_code == 0, result.stderr
    return yaml.safe_load(result.stdout)["speculative_config"]


@pytest.mark.parametrize("kind", ["simple", "map-k", "map-k4v"])
def test_llama_cpp_options_by_type(outrider_cli, model, kind):
    args = ("-m", model, "--spec-type", f"ngram-{kind}", "--spec-draft-n-max", 20)
    sizes = (f"--spec-ngram-{kind}-size-n", 9, f"--spec-ngram-{kind}-size-m", 11)
    hits = 1 if kind == "simple" else 2  # which does not count them
    section = section_of(outrider_cli, *args, *sizes, f"--spec-ngram-{kind}-min-hits", hits)
    assert (section["ngram_size_n"], section["ngram_size_m"]) == (9, 11)
    assert (section.get("min_hits", 1), section["max_draft_len"]) == (hits, 20)
    older = ("--spec-ngram-size-n", 9, "--spec-ngram-size-m", 11)
    if hits > 1:
        older += ("--spec-ngram-min-hits", hits)
    assert section == section_of(outrider_cli, *args, *older)


def test_llama_cpp_lists_of_types(outrider_cli, model, target):
    args = ("--spec-type", "ngram-mod,ngram-map-k4v", "--spec-ngram-mod-n-match", 20)
    section = section_of(
        outrider_cli, "-m", target, *args, "--spec-ngram-map-k4v-size-n", 8, "-md", model
    )
    members = section["members"]
    assert [each["decoding_type"] for each in members] == ["NGramMapK4V", "NGramMod", "DraftTarget"]
    assert (members[0]["ngram_size_n"], members[1]["n_match"]) == (8, 20)
    assert members[2]["speculative_model"] == str(model)


def test_options_win_over_the_file(outrider_cli, config_file, model):
    text = "speculative_config: {decoding_type: NGramMod, n_match: 24, n_min: 8}\n"
    path = config_file(f"model: {model}\n{text}")
    section = section_of(outrider_cli, path, "--spec-ngram-size-n", 20, "--draft-min", 4)
    assert (section["n_match"], section["n_min"]) == (20, 4)
    twice = outrider_cli("check", path, "--spec-ngram-size-n", 2, "--spec-ngram-mod-n-match", 3)
    assert twice.exit_code == 1
    assert "spec_ngram_mod_n_match: given twice; spec_ngram_size_n" in twice.stderr


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"decoding_type": "User", "drafter": "no_such.module:Drafter"}, "drafter"),
        ({"decoding_type": "User", "drafter": "json:nothing"}, "drafter"),
        ({"decoding_type": "User", "drafter": "collections:OrderedDict"}, "drafter"),
        (
            {"decoding_type": "User", "drafter": "collections:Counter", "options": {"1": {}}},
            "drafter",
        ),
        (
            {"decoding_type": "User", "drafter": "fractions:Fraction", "options": {"x": 1}},
            "options",
        ),
        ({"decoding_type": "NGram", "pool_scope": "tenant", "pool_snapshot": "FILE"},
         "pool_snapshot"),
        ({"decoding_type": "NGramCache", "lookup_cache_static": "FILE"}, "lookup_cache_static"),
        ({"decoding_type": "NGramCache", "lookup_cache_dynamic": "FILE"}, "lookup_cache_dynamic"),
        ({"decoding_type": "NGramCache", "lookup_cache_static": "/nowhere"},
         "lookup_cache_static"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("alone", [True, False])
def test_files_and_code_of_drafters_are_tried(outrider_cli, tmp_path, model, section, field, alone):
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"neither a table nor a snapshot")
    given = {key: str(garbage) if text == "FILE" else text for key, text in section.items()}
    if not alone:
        given = {"decoding_type": "Compose", "members": [{"decoding_type": "Suffix"}, given]}
    result = outrider_cli("check", "-m", model, "--speculative-config", json.dumps(given))
    assert result.exit_code == 1, result.stderr
    assert result.stderr.startswith(f"error: speculative_config.{field}: ")
    assert "Traceback" not in result.stderr


def test_a_tenants_table_is_nobody_elses(outrider_cli, tmp_path, model):
    from outrider.drafters.lookup.ngram_file import Arrays, save
    from outrider.drafters.vocabulary import fingerprint
    from outrider.scheduler.types import ints

    table = Arrays("somebody", ints([[1, 2]]), ints([1]), ints([[3, 1]]))
    save(tmp_path / "table", [table], fingerprint(model), {})
    for key, code in (("lookup_cache_dynamic", 0), ("lookup_cache_static", 1)):
        section = {"decoding_type": "NGramCache", key: str(tmp_path / "table")}
        result = outrider_cli("check", "-m", model, "--speculative-config", json.dumps(section))
        assert result.exit_code == code, result.stderr
    assert "speculative_config.lookup_cache_static" in result.stderr


@pytest.mark.slow
def test_sound_drafters_pass(outrider_cli, tmp_path, model, monkeypatch):
    from outrider import LLM

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "silence.py").write_text(
        "class Silent:\n    def draft(self, token_ids, max_tokens):\n        return []\n"
    )
    snapshot = tmp_path / "pool"
    user = {"decoding_type": "User", "drafter": "silence:Silent"}
    pool = {"decoding_type": "NGram", "pool_scope": "replica", "pool_snapshot": str(snapshot)}
    past = {"decoding_type": "NGramCache", "lookup_cache_dynamic": str(tmp_path / "past")}
    both = {"decoding_type": "Compose", "members": [user, pool, past]}
    args = ("check", "-m", model, "--speculative-config", json.dumps(both))
    for _ in range(2):  # without the files, and with those that an engine left
        result = outrider_cli(*args)
        assert result.exit_code == 0, result.stderr
        assert "silence:Silent" in result.stderr
        with LLM(str(model), speculative_config=both, executor="local", num_kv_blocks=64) as llm:
            llm.generate("a b a b a b", use_tqdm=False)
    assert snapshot.exists()
    assert (tmp_path / "past").exists()


def test_a_drafter_of_ones_own_from_the_command_line(outrider_cli, tmp_path, model, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "quiet.py").write_text(
        "class Quiet:\n    def draft(self, token_ids, max_tokens):\n        return []\n"
    )
    given = ("--drafter", "quiet:Quiet", "--max-draft-len", 3)
    section = section_of(outrider_cli, "-m", model, "--spec-type", "user", *given)
    assert (section["decoding_type"], section["drafter"]) == ("User", "quiet:Quiet")
    assert section["max_draft_len"] == 3
    assert section_of(outrider_cli, "-m", model, *given) == section
    alone = outrider_cli("check", "-m", model, "--spec-type", "user")
    assert alone.exit_code == 1
    assert "drafter: this key is required" in alone.stderr


@pytest.mark.parametrize(
    ("text", "field", "hint"),
    [
        ("max_num_seq: 3\n", "max_num_seq", "did you mean 'max_num_seqs'"),
        ("max_num_seqs: 0\n", "max_num_seqs", "at least 1"),
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
        ("forward: eager\n", "forward", "bridge"),
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


def test_every_error_is_reported_with_its_field(outrider_cli, target):
    """Of a folder's files, beside one another; the first does not hide the others."""
    args = ("-tp", 5, "--max-model-len", 10**6, "--chat-template", "{% if %}")
    result = outrider_cli("check", target, *args, "--drafter", "no_such:Drafter")
    assert result.exit_code == 1
    assert result.stdout == ""
    fields = [line.split(": ")[1].partition("=")[0] for line in result.stderr.splitlines()]
    assert sorted(fields) == [
        "chat_template", "max_model_len", "speculative_config.drafter", "tensor_parallel_size"
    ]  # fmt: skip


def test_every_wrong_key_is_reported(outrider_cli, config_file, target):
    text = "max_num_seqs: 0\ndtype: int4\nblok_size: 3\nresources: {spin_s: 7, spare_workers: 3}\n"
    result = outrider_cli("check", config_file(f"model: {target}\n{text}"))
    assert result.exit_code == 1
    assert {line.split(": ")[1] for line in result.stderr.splitlines()} >= {
        "max_num_seqs", "dtype", "blok_size", "resources.spin_s", "resources.spare_workers"
    }  # fmt: skip


def test_a_folder_is_a_checkpoint(outrider_cli, tmp_path, target):
    assert outrider_cli("check", target).exit_code == 0
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((target / name).read_bytes()[:40_000])
    result = outrider_cli("check", tmp_path)
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert any("model.safetensors cannot be read, it may be truncated" in line for line in lines)
    assert any("tokenizer" in line for line in lines)


def test_a_gpu_that_cannot_be_used_is_named(outrider_cli, config_file, model, monkeypatch):
    """With its reason: a line of what was checked with `auto`, an error with `cuda`."""
    import torch

    from outrider.workers import devices

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "num_nvidia_gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    path = config_file(f"model: {model}\nexecutor: local\n")
    found = outrider_cli("check", path)
    assert found.exit_code == 0, found.stderr
    words = " ".join(found.stderr.split())
    assert "not used: this machine has 2 NVIDIA GPUs, but torch" in words
    refused = outrider_cli("check", path, "--device", "cuda")
    assert refused.exit_code == 1
    assert "built without CUDA" in " ".join(refused.stderr.split())
    chosen = outrider_cli("check", path, "--device", "cpu")
    assert chosen.exit_code == 0
    assert "NVIDIA" not in chosen.stderr
