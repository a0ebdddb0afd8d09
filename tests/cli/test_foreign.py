"""Other engines' speculative options on the command line."""

from __future__ import annotations

import pytest

from outrider.cli.foreign import read_keys, rewrite
from outrider.cli.options import EngineOptions
from outrider.errors import ConfigError

NATIVE = {"spec-key", "spec-type", "max-draft-len", "draft-model", "speculative-config", "model"}


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
        (["--", "--speculative-num-steps"], ["--", "--speculative-num-steps"]),
    ],
)  # fmt: skip
def test_options_become_keys(args, wanted):
    assert rewrite(args, NATIVE) == wanted


def resolved(*args, **options):
    pairs = rewrite(args, NATIVE)
    keys = [pair for pair in pairs if pair != "--spec-key"]
    return EngineOptions(model="m", spec_key=keys, **options).resolve().speculative_config


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
        (["--speculative-algorithm", "DFLASH"], "speculative_config.speculative_algorithm"),
        (["--spec-draft-p-split", "0.1"], "speculative_config.spec_draft_p_split"),
        (["-ngld", "99"], "speculative_config.n_gpu_layers_draft"),
        (["--speculative-token-map", "f"], "speculative_config.speculative_token_map"),
    ],
)
def test_what_is_refused_is_named(args, field):
    with pytest.raises(ConfigError) as caught:
        resolved(*args, draft_model="d")
    assert caught.value.field == field


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


def test_chat_parsers_by_other_names():
    options = EngineOptions(
        model="m",
        tool_call_parser="gpt-oss",
        reasoning_parser="openai_gptoss",
        enable_auto_tool_choice=True,
    )
    config = options.resolve()
    assert (config.tool_call_parser, config.reasoning_parser) == ("harmony", "harmony")
