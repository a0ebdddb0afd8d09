"""Other engines' speculative options on the command line."""

from __future__ import annotations

import pytest
import yaml

from outrider.cli.foreign import read_keys, rewrite
from outrider.cli.options import EngineOptions
from outrider.errors import ConfigError

NATIVE = {"spec-key", "spec-type", "max-draft-len", "draft-model", "speculative-config", "model"}
NATIVE |= {"max-model-len", "tensor-parallel-size"}


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["-sc", "{}"], ["--speculative-config", "{}"]),
        (["--speculative-config.method", "ngram"], ["--spec-key", "method=ngram"]),
        (["--speculative-config.num_speculative_tokens=3"],
         ["--spec-key", "num_speculative_tokens=3"]),
        (["--spec-model", "d", "-m", "x"], ["--spec-key", "model=d", "-m", "x"]),
        (["--speculative-num-steps", "3"], ["--spec-key", "speculative_num_steps=3"]),
        (["--speculative-adaptive", "--model", "m"],
         ["--spec-key", "speculative_adaptive=true", "--model", "m"]),
        (["--no-spec-draft-backend-sampling"],
         ["--spec-key", "spec_draft_backend_sampling=false"]),
        (["-ngld", "99"], ["--spec-key", "n_gpu_layers_draft=99"]),
        (["--spec-tokens", "5", "--draft-max", "4"], ["--spec-tokens", "5", "--draft-max", "4"]),
        (["--enforce-eager", "MODEL"], ["--engine-key", "enforce_eager=true", "MODEL"]),
        (["--no-enable-log-requests", "M"], ["--engine-key", "enable_log_requests=false", "M"]),
        (["--no-mmap", "MODEL"], ["--engine-key", "no_mmap=true", "MODEL"]),
        (["--swap_space", "4", "M"], ["--engine-key", "swap_space=4", "M"]),
        (["--enable-multi-layer-eagle", "M"], ["--spec-key", "enable_multi_layer_eagle=true", "M"]),
        (["--speculative-use-rejection-sampling", "M"],
         ["--spec-key", "speculative_use_rejection_sampling=true", "M"]),
        (["--speculative-use-rejection-sampling", "False", "M"],
         ["--spec-key", "speculative_use_rejection_sampling=False", "M"]),
        (["--spec-draft-cpu-moe", "M"], ["--spec-key", "spec_draft_cpu_moe=true", "M"]),
        (["--spec-default", "M"], ["--spec-key", "spec_default=true", "M"]),
        (["--speculative-config.parallel_drafting", "x", "M"],
         ["--spec-key", "parallel_drafting=x", "M"]),
        (["--async-scheduling", "M"], ["--engine-key", "async_scheduling=true", "M"]),
        (["--disable-custom-all-reduce", "M"],
         ["--engine-key", "disable_custom_all_reduce=true", "M"]),
        (["--enable-sleep-mode", "M"], ["--engine-key", "enable_sleep_mode=true", "M"]),
        (["--lora-modules", "a=x", "b=y", "M"],
         ["--lora-modules", "a=x", "--lora-modules", "b=y", "M"]),
        (["--lora_modules=a=x", '{"name": "b"}', "--max-loras", "2"],
         ["--lora-modules", "a=x", "--lora-modules", '{"name": "b"}',
          "--engine-key", "max_loras=2"]),
        (["--use-tqdm-on-load", "M"], ["--engine-key", "use_tqdm_on_load=true", "M"]),
        (["-ngl", "99", "M"], ["--engine-key", "n_gpu_layers=99", "M"]),
        (["-cb", "-c", "512", "M"],
         ["--engine-key", "cont_batching=true", "--max-model-len", "512", "M"]),
        (["--lora-paths", "a=x", "b=y", "M"],
         ["--lora-modules", "a=x", "--lora-modules", "b=y", "M"]),
        (["--seed", "0", "--random-seed=1"],
         ["--engine-key", "seed=0", "--engine-key", "random_seed=1"]),
        (["--model-path", "x", "--tp", "2"], ["--model-path", "x", "--tp", "2"]),
        (["--compilation-config={}", "M"], ["--engine-key", "compilation_config={}", "M"]),
        (["--", "--speculative-num-steps"], ["--", "--speculative-num-steps"]),
    ],
)  # fmt: skip
def test_options_become_keys(args, wanted):
    assert rewrite(args, NATIVE) == wanted


def resolved(*args, **options):
    pairs = rewrite(args, NATIVE)
    keys = {name: [pair for option, pair in zip(pairs[::2], pairs[1::2], strict=True)
                   if option == name] for name in pairs[::2]}  # fmt: skip
    given = {"spec_key": keys.get("--spec-key", []), "engine_key": keys.get("--engine-key", [])}
    return EngineOptions(model="m", **given, **options).resolve().speculative_config


def test_sglangs_options_are_a_section():
    section = resolved(
        "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "h",
        "--speculative-num-steps", "5", "--speculative-eagle-topk", "4",
        "--speculative-num-draft-tokens", "16",
    )  # fmt: skip
    assert (section.decoding_type, section.speculative_model) == ("Eagle3", "h")
    assert (section.draft_len, section.max_nodes, section.dynamic_tree_max_topK) == (5, 15, 4)


def test_keys_of_the_section_one_by_one(tmp_path):
    section = resolved(
        "--speculative-config.method", "ngram", "--speculative-config.prompt_lookup_max=4"
    )
    assert (section.min_matching_ngram_size, section.max_matching_ngram_size) == (4, 4)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    assert resolved("--spec-model", str(tmp_path)).decoding_type == "Eagle3"
    refined = resolved("--speculative-config.draft_len_schedule.4=2", spec_type="ngram-mod")
    assert refined.draft_len_schedule == {4: 2}


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--speculative-algorithm", "UNO"], "speculative_config.speculative_algorithm"),
        (["--spec-draft-p-split", "0.1"], "speculative_config.spec_draft_p_split"),
        (["-ngl", "9", "--lora", "x"], "lora"),
        (["--hf-overrides", '{"a": 1}'], "hf_overrides"),
        (["--lora-dtype", "float16"], "lora_dtype"),
        (["--speculative-token-map", "f"], "speculative_config.speculative_token_map"),
        (["--enable-multi-layer-eagle"], "speculative_config.enable_multi_layer_eagle"),
        (["--speculative-use-rejection-sampling", "1"],
         "speculative_config.speculative_use_rejection_sampling"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(args, field):
    with pytest.raises(ConfigError) as caught:
        resolved(*args, draft_model="d")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "field", "other"),
    [
        ({"speculative_config": '{"method": "suffix"}', "spec_type": "ngram"},
         "spec_type", "method: 'suffix'"),
        ({"speculative_config": '{"decoding_type": "NGram"}', "spec_type": "ngram-mod,ngram-cache"},
         "spec_type", "decoding_type: 'NGram'"),
        ({"speculative_config": '{"method": "suffix"}', "spec_key": ["method=ngram"]},
         "method", "method: 'suffix'"),
        ({"spec_type": "ngram", "max_draft_len": 3, "spec_key": ["max_draft_len=4"]},
         "max_draft_len", "--max-draft-len 3 contradicts --spec-key max_draft_len=4"),
        ({"spec_type": "ngram,none"}, "spec_type", "none goes with no other drafter"),
        ({"spec_key": ["x"]}, "spec_key", "expected KEY=VALUE, got 'x'"),
        ({"engine_key": ["x"]}, "engine_key", "expected KEY=VALUE, got 'x'"),
        ({"speculative_config": "\0"}, "speculative_config", "cannot read '\\x00': embedded null"),
    ],
)  # fmt: skip
def test_options_that_are_none_or_contradict_one_another_are_named(options, field, other):
    with pytest.raises(ConfigError) as caught:
        EngineOptions(model="m", **options).resolve()
    assert caught.value.field == field
    assert other in caught.value.message


def test_options_that_say_the_same_twice():
    section = '{"method": "ngram-mod", "n_match": 9}'
    twice = {"max_draft_len": 64, "spec_key": ["max_draft_len=64"]}
    for kind in ("ngram-mod", "NGramMod"):
        given = EngineOptions(model="m", speculative_config=section, spec_type=kind, **twice)
        config = given.resolve().speculative_config
        assert (config.n_match, config.draft_len) == (9, 64)


def test_pairs():
    assert read_keys(["a=3", "b.c=[1, 2]", "d=true"]) == {"a": 3, "b": {"c": [1, 2]}, "d": True}
    for wrong in (["a"], ["a=1", "a=2"], ["a=[", "b=1"], ["a=1", "a.b=2"]):
        with pytest.raises(ConfigError):
            read_keys(wrong)


def test_a_draft_models_shortest_draft():
    """llama-server: -md /d --draft-max 16 --draft-min 5."""
    section = (
        EngineOptions(model="m", draft_model="d", max_draft_len=16, spec_draft_n_min=5)
        .resolve()
        .speculative_config
    )
    assert (section.decoding_type, section.draft_len, section.draft_min) == ("DraftTarget", 16, 5)


def test_a_length_is_of_the_types_that_can_have_it():
    """llama-server: --spec-type ngram-mod,draft-simple --draft-max 8, and others."""
    common = {"model": "m", "draft_model": "d", "spec_type": "ngram-mod,draft-simple"}
    mod, draft = EngineOptions(**common, max_draft_len=8).resolve().speculative_config.members
    assert (mod.n_min, mod.max_draft_len, draft.max_draft_len) == (48, 64, 8)
    mod, draft = EngineOptions(**common, max_draft_len=50).resolve().speculative_config.members
    assert (mod.n_min, mod.max_draft_len, draft.max_draft_len) == (48, 50, 50)
    own = ["spec_ngram_mod_n_min=4", "spec_ngram_mod_n_max=6"]
    options = EngineOptions(**common, max_draft_len=8, spec_key=own)
    mod, draft = options.resolve().speculative_config.members
    assert (mod.n_min, mod.max_draft_len, draft.max_draft_len) == (4, 6, 8)
    with pytest.raises(ConfigError, match=r"n_min \(48\) must not exceed max_draft_len \(8"):
        EngineOptions(model="m", spec_type="ngram-mod", max_draft_len=8).resolve()


def test_chat_parsers_by_other_names():
    options = EngineOptions(
        model="m",
        tool_call_parser="gpt-oss",
        reasoning_parser="openai_gptoss",
        enable_auto_tool_choice=True,
    )
    config = options.resolve()
    assert (config.tool_call_parser, config.reasoning_parser) == ("harmony", "harmony")


def test_an_engines_options_win_over_the_file(tmp_path, caplog):
    (tmp_path / "c.yaml").write_text("model: m\noverlap_scheduling: true\nenforce_eager: true\n")
    options = EngineOptions(
        config=tmp_path / "c.yaml", engine_key=["disable_overlap_schedule=true", "swap_space=4"]
    )
    assert options.resolve().overlap_scheduling is False
    assert [each.split(" ")[0] for each in caplog.messages] == ["enforce_eager", "swap_space"]


@pytest.mark.parametrize(
    ("option", "meant"),
    [("--num-speculative-tokns=3", "--num-speculative-tokens"),
     ("--enforce-egaer", "--enforce-eager"),
     ("--speculative-num-step", "--speculative-num-steps"),
     ("--max-num-seq", "--max-num-seqs")],
)  # fmt: skip
def test_a_misspelt_option_of_another_engine(outrider_cli, model, option, meant):
    result = outrider_cli("check", model, option)
    assert result.exit_code == 2
    assert f"(Possible options: {meant}" in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("option", ["--temp", "--temperature=0", "--repeat-penalty=1"])
def test_a_setting_of_requests_is_no_option_of_a_server(outrider_cli, model, option):
    result = outrider_cli("serve", model, option)
    field = "repetition_penalty" if "penalty" in option else "temperature"
    said = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2
    assert f"No such option: {option} (each request decides: its field {field})" in said


def test_command_lines_of_other_servers(outrider_cli, model):
    line = (
        *("check", "--model-path", model, "--tokenizer-path", model, "--tp", "1", "--dp", "1"),
        *("--dtype", "float", "--page-size", "32", "-c", "256", "-kvu", "-a", "small"),
        *("--random-seed", "7", "--sampling-defaults", "openai", "--executor", "local"),
        *("--enable-deterministic-inference", "--logprobs-mode", "raw_logprobs"),
    )
    result = outrider_cli(*line, "--download-dir", "x", "--logprobs-mode=processed_logits")
    assert result.exit_code == 1
    assert "logprobs_mode: given twice" in result.stderr
    assert "download_dir: refused" in outrider_cli(*line, "--download-dir", "x").stderr
    result = outrider_cli(*line)
    assert result.exit_code == 0, result.stderr
    found = yaml.safe_load(result.stdout.split("The configuration")[0])
    wanted = {
        "model": str(model), "tokenizer": str(model), "served_model_name": "small", "seed": 7,
        "dtype": "float32", "block_size": 32, "max_model_len": 256, "deterministic": True,
        "generation_config": "vllm",
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("model: t\ndecoding_type: NGram\nmax_draft_len: 4", None),
        ("model: t\ndecoding_type: NGram\nmax_draft_len: 4", "m"),
        ("method: suffix\nmax_draft_len: 4\nnum_kv_blocks: 9", "m"),
        ("method: suffix\nmax_draft_len: 4\nserve: {port: 9000}", "m"),
        ("method: suffix\nmax_draft_len: 4\nspeculative_config: {method: ngram}", "m"),
        ("method: eagle3\nmodel: h\nmax_draft_len: 4", None),
    ],
)
def test_a_file_with_keys_of_a_section_beside_the_engines(config_file, text, model):
    options = EngineOptions(config=config_file(text), **({"model": model} if model else {}))
    with pytest.raises(ConfigError, match=r"^(decoding_type|max_draft_len): a key of spec"):
        options.settings()


def test_a_file_with_a_section_alone(config_file):
    file = config_file("method: eagle3\nmodel: h\nnum_speculative_tokens: 4")
    section = EngineOptions(config=file, model="m").settings().speculative_config
    assert (section.decoding_type, section.speculative_model) == ("Eagle3", "h")


MAX, MIN, P_MIN = "LLAMA_ARG_DRAFT_MAX", "LLAMA_ARG_DRAFT_MIN", "LLAMA_ARG_DRAFT_P_MIN"
TYPE, DRAFT = "LLAMA_ARG_SPEC_TYPE", "LLAMA_ARG_MODEL_DRAFT"
SIMPLE = {"spec_type": "ngram-simple"}


@pytest.mark.parametrize(
    ("variables", "options", "wanted"),
    [
        ({MAX: "64", MIN: "5"}, SIMPLE, {"max_draft_len": 64, "draft_min": 5}),
        ({"LLAMA_ARG_SPEC_DRAFT_N_MAX": "64", MAX: "64"}, SIMPLE, {"max_draft_len": 64}),
        ({MAX: "64"}, {**SIMPLE, "max_draft_len": 20}, {"max_draft_len": 20}),
        ({MAX: "64"}, {**SIMPLE, "spec_key": ["n_max=20"]}, {"max_draft_len": 20}),
        ({MAX: "8"}, {"spec_key": ["method=ngram", "num_speculative_tokens=4"]},
         {"max_draft_len": 4}),
        ({MAX: "8", MIN: "6"}, {"spec_type": "ngram-mod"}, {"max_draft_len": 8, "n_min": 6}),
        ({MAX: "8", P_MIN: "0.5"}, {"draft_model": "d"}, {"max_draft_len": 8, "p_min": 0.5}),
        ({MAX: "8", DRAFT: "d"}, {}, {"decoding_type": "DraftTarget", "speculative_model": "d"}),
        ({MAX: "8", DRAFT: "d"}, {"draft_model": "e"}, {"speculative_model": "e"}),
        ({TYPE: "ngram-mod", MAX: "50"}, {}, {"decoding_type": "NGramMod", "max_draft_len": 50}),
        ({TYPE: "ngram-mod"}, SIMPLE, {"decoding_type": "NGramSimple"}),
        ({MAX: "8"}, {"speculative_config": '{"method": "suffix"}'}, {"max_draft_len": 8}),
        ({MAX: "8"}, {"speculative_config": '{"method": "suffix", "num_speculative_tokens": 3}'},
         {"max_draft_len": 3}),
        ({TYPE: "ngram-mod", DRAFT: "d"}, {"speculative_config": '{"method": "suffix"}'},
         {"decoding_type": "Suffix"}),
        ({MAX: "8", MIN: "2"}, {"spec_type": "none"}, {"decoding_type": "None"}),
        ({MAX: " "}, SIMPLE, {"max_draft_len": None}),
    ],
)  # fmt: skip
def test_llama_cpps_variables_are_its_options(monkeypatch, variables, options, wanted):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    section = EngineOptions(model="m", **options).settings().speculative_config
    assert {key: getattr(section, key) for key in wanted} == wanted


def test_a_variable_wins_over_the_file(monkeypatch, config_file):
    monkeypatch.setenv(MAX, "7")
    path = config_file("model: m\nspeculative_config: {method: ngram, num_speculative_tokens: 3}\n")
    assert EngineOptions(config=path).settings().speculative_config.max_draft_len == 7
    options = EngineOptions(config=path, max_draft_len=5)
    assert options.settings().speculative_config.max_draft_len == 5


@pytest.mark.parametrize(
    ("variables", "options", "field", "hint"),
    [
        ({MAX: "many"}, SIMPLE, MAX, "expected a number, got 'many'"),
        ({MAX: "8", "LLAMA_ARG_SPEC_DRAFT_N_MAX": "9"}, SIMPLE, MAX,
         "contradicts LLAMA_ARG_SPEC_DRAFT_N_MAX"),
        ({P_MIN: "0.5"}, SIMPLE, f"speculative_config.{P_MIN}", "it is an option of DraftTarget"),
        ({TYPE: "ngram-big"}, {}, "spec_type", "unknown drafter 'ngram-big'"),
        ({MAX: "0.5"}, SIMPLE, "speculative_config.max_draft_len", "got 0.5"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_variable_is_named(monkeypatch, variables, options, field, hint):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as caught:
        EngineOptions(model="m", **options).settings()
    assert (caught.value.field, hint in caught.value.message) == (field, True), caught.value.message


def test_a_variable_without_a_drafter_has_no_effect(monkeypatch, caplog):
    monkeypatch.setenv(MAX, "8")
    assert EngineOptions(model="m").settings().speculative_config.decoding_type == "None"
    assert f"{MAX}: no effect, because there is no drafter" in caplog.text
