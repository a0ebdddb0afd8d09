"""MTP modules: drafts against the equations, exactness, layouts, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from outrider.config import EngineConfig, MTPConfig, parse
from outrider.drafters.heads.mtp import dequantised
from outrider.engine.preflight import preflight
from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers import drafts
from outrider.tests.helpers.mtp import Made, Reference

from ...helpers.engines import complete, engine_of, random_prompts

COUNTS = {"deepseek": 2, "glm": 1, "qwen": 1, "llama": 3, "qwen2_moe": 1, "mimo": 1, "ernie": 2}
NOT_OF_THE_FAMILY = ("qwen2_moe",)
PROMPTS = [[7, 3, 50, 21, 9, 4, 33, 80, 61], [5, 6], [11, 12, 13, 90, 14, 15, 16], [8]]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """By architecture: a target and its modules; each is made when it is asked for."""
    known: dict[str, Made] = {}

    def of(kind: str) -> Made:
        if kind not in known:
            known[kind] = Made(tmp_path_factory.mktemp(kind), kind, COUNTS[kind])
        return known[kind]

    return of


def section(**fields):
    return {"decoding_type": "MTP", **fields}


def drafts_seen(monkeypatch, target, speculative, prompts, **options):
    seen, stats = drafts.drafts_seen(monkeypatch, target, speculative, prompts, **options)
    assert stats["drafters"]["mtp"]["num_acc_tokens"] > 0
    (head,) = stats["heads"]
    kind = json.loads((Path(target) / "config.json").read_text())["model_type"]
    of_family = kind not in NOT_OF_THE_FAMILY
    assert head["layers"] == ("operations" if of_family else "modules")
    assert bool(head["layers_reason"]) != of_family
    return seen, stats


def paths_of(tokens, parents):
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


CHAINS = {
    "one-mla": ("deepseek", {"use_mtp_vanilla": False, "max_draft_len": 3}, {"count": 1}),
    "two-mla": ("deepseek", {"use_mtp_vanilla": True, "max_draft_len": 2}, {}),
    "two-again": ("deepseek", {"max_draft_len": 4}, {}),
    "glm": ("glm", {"num_nextn_predict_layers": 2, "recycle": "pre_norm"}, {"pre_norm": True}),
    "qwen": ("qwen", {"max_draft_len": 2}, {}),
    "fallback": ("qwen2_moe", {"max_draft_len": 2}, {}),
    "mimo": ("mimo", {"max_draft_len": 3}, {}),
    "mimo-as-others": (
        "mimo",
        {"max_draft_len": 2, "target_state": "post_norm", "zero_first_embedding": True},
        {"before": False, "zero_first": True},
    ),
    "ernie": ("ernie", {"max_draft_len": 2, "use_mtp_vanilla": False}, {"count": 1}),
    "ernie-two": ("ernie", {"max_draft_len": 3}, {}),
    "ernie-as-others": (
        "ernie",
        {"max_draft_len": 2, "recycle": "post_norm", "target_state": "post_norm"},
        {"before": False, "pre_norm": False},
    ),
    "before": (
        "qwen",
        {"max_draft_len": 2, "recycle": "pre_norm", "target_state": "pre_norm"},
        {"before": True, "pre_norm": True},
    ),
    "three": ("llama", {"max_draft_len": 3}, {}),
    "zero": (
        "llama",
        {"max_draft_len": 2, "recycle": "pre_norm", "zero_first_embedding": True},
        {"count": 2, "pre_norm": True, "zero_first": True},
    ),
}


@pytest.mark.parametrize("case", CHAINS)
def test_chains_follow_the_equations(made, case, monkeypatch):
    """Chunked prefill, batches and accepted nodes: each module's cache holds what it should."""
    kind, fields, variant = CHAINS[case]
    reference = Reference(made(kind), **variant)
    seen, _ = drafts_seen(
        monkeypatch,
        made(kind).folder,
        section(**fields),
        PROMPTS,
        max_num_batched_tokens=9,
        block_size=4,
    )
    for text, tokens, parents in seen:
        assert parents == list(range(-1, len(parents) - 1))
        assert tokens == reference.chain(text, len(tokens))


def test_the_equations_are_those_of_transformers(made, monkeypatch):
    """Its own modules, several at once, over a whole text."""
    source, reference = made("deepseek"), Reference(made("deepseek"))
    pattern = [r"model\.layers\.[23]\."]  # where transformers looks for modules
    kind = type(source.target)
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", pattern)
    target = kind.from_pretrained(source.folder).eval()
    modules = MtpModel.from_pretrained(target).eval()
    text = PROMPTS[0]
    with torch.no_grad():
        drafted, logits, _ = modules(
            input_ids=torch.tensor([text[1:]]),
            last_hidden_states=target.model(torch.tensor([text[:-1]])).last_hidden_state,
            attention_mask=None,
            position_ids=torch.arange(1, len(text))[None],
            mtp_cache=MtpCache(config=target.config.get_mtp_config()),
        )
    assert drafted[0].tolist() == reference.chain(text, 2)
    torch.testing.assert_close(logits[0, 0].log_softmax(-1), reference.after(text, []))
    # The second module reads zeros at its first token here, and nothing there.
    second = reference.after(text, drafted[0, :1].tolist())
    torch.testing.assert_close(logits[0, 1].log_softmax(-1), second, rtol=0, atol=0.2)


@pytest.mark.parametrize(("kind", "variant"), [("deepseek", {}), ("llama", {"count": 1})])
def test_trees_follow_the_equations(made, kind, variant, monkeypatch):
    """A tree of two modules, and one of a single one in a folder of its own."""
    reference = Reference(made(kind), **variant)
    fields = {
        "speculative_model": made(kind).alone,
        "use_mtp_vanilla": False if variant else None,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 3,
        "max_draft_len": 2,
        "max_total_draft_tokens": 7,
    }
    target = made(kind).folder if kind == "deepseek" else made(kind).folder + "/../plain"
    seen, _ = drafts_seen(monkeypatch, target, section(**fields), PROMPTS[:3])
    whole = [each for each in seen if len(each[1]) == 7]
    assert len(whole) > 5
    for text, tokens, parents in whole:
        assert paths_of(tokens, parents) == reference.dynamic(text, 3, 2, 7)


def test_fixed_trees_follow_the_equations(made, monkeypatch):
    reference = Reference(made("deepseek"))
    fields = section(mtp_choices=[[0, 0, 0], [0, 1], [1, 0], [2]])
    nodes = list(parse(MTPConfig, fields).nodes)
    seen, _ = drafts_seen(monkeypatch, made("deepseek").folder, fields, PROMPTS[:2])
    for text, tokens, _ in seen:
        assert tokens == reference.fixed(text, nodes)[: len(tokens)]


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_preempted_and_cached_sequences_keep_their_rows(made, tree, monkeypatch):
    """Rows and kept features that moved, were computed again, or came with a cached prefix."""
    reference = Reference(made("llama"), count=2)
    fields = {"max_draft_len": 2, "use_dynamic_tree": tree}
    if tree:
        fields |= {"dynamic_tree_max_topK": 3}
    prompts = [list(range(2, 11)) + prompt for prompt in PROMPTS]
    small = {"block_size": 4, "num_kv_blocks": 12, "max_model_len": 48}
    seen, stats = drafts_seen(
        monkeypatch,
        made("llama").folder,
        section(**fields),
        prompts,
        max_tokens=20,
        max_num_batched_tokens=32,
        **small,
    )
    assert stats["requests"]["num_hit_tokens"] > 0
    assert stats["requests"]["num_preemptions"] > 0
    for text, tokens, parents in seen:
        if not tree:
            assert tokens == reference.chain(text, len(tokens))
        elif len(tokens) == 12:
            assert paths_of(tokens, parents) == reference.dynamic(text, 3, 2, 12)


SHAPES = {
    "chain": {"max_draft_len": 3},
    "tree": {
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 3,
        "max_draft_len": 3,
        "max_total_draft_tokens": 8,
    },
}


@pytest.mark.parametrize(
    ("kind", "size", "shape"),
    [
        ("qwen", 1, "tree"),
        ("deepseek", 2, "chain"),
        ("mimo", 1, "chain"),
        ("mimo", 2, "tree"),
        ("ernie", 1, "tree"),
        ("ernie", 2, "chain"),
    ],
)
def test_tokens_are_those_without_a_drafter(made, kind, size, shape):
    """Greedy and sampled, alone and eight at once, with prefix hits."""
    prompts = [list(range(2, 14)) + prompt for prompt in random_prompts(8, 96, longest=10)]
    target = made(kind).folder
    with engine_of(target) as engine:
        greedy, _ = complete(engine, prompts, max_tokens=16)
        sampled, _ = complete(engine, prompts, max_tokens=16, temperature=0.8)
    options = {"max_num_batched_tokens": 32, "block_size": 4, "num_kv_blocks": 24}
    options |= {"tensor_parallel_size": size, "max_model_len": 64}
    with engine_of(target, section(**SHAPES[shape]), **options) as engine:
        assert complete(engine, prompts, max_tokens=16)[0] == greedy
        hot = complete(engine, prompts, at_once=1, max_tokens=16, temperature=0.8)[0]
        assert hot == sampled
        stats = engine.stats()
    assert stats["drafters"]["mtp"]["faults"] == 0
    assert stats["drafters"]["mtp"]["num_acc_tokens"] > 0
    assert stats["requests"]["num_hit_tokens"] > 0


@pytest.mark.parametrize("kind", ["deepseek", "glm"])
def test_ranks_with_whole_experts(made, kind):
    """Expert parallelism of the target; the module's experts stay as they are."""
    target, options = str(made(kind).folder), {"tensor_parallel_size": 2}
    with engine_of(target, **options) as engine:
        expected = complete(engine, PROMPTS, max_tokens=12)[0]
    with engine_of(target, section(max_draft_len=2), enable_expert_parallel=True, **options) as own:
        found, last = complete(own, PROMPTS, max_tokens=12)
        assert sum(each.usage.num_accepted_tokens for each in last.values()) > 0
    assert found == expected


def test_experts_that_ranks_cannot_share_out(made):
    cases = [
        (str(made("llama").folder), 2, "has no experts"),
        (str(made("deepseek").folder), 1, None),
    ]
    for target, size, message in cases:
        config = EngineConfig.load({
            "model": target, "executor": "local", "enable_expert_parallel": True,
            "tensor_parallel_size": size,
        })  # fmt: skip
        errors: list[ConfigError] = []
        preflight(config, errors=errors)
        found = [each for each in errors if each.field == "enable_expert_parallel"]
        assert [message in each.message for each in found] == ([] if message is None else [True])


def test_blocks_of_fp8_are_widened():
    weight = torch.randn(200, 130).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2)
    wide = dequantised(weight, scale)
    for row, column in [(0, 0), (127, 128), (128, 127), (199, 129)]:
        wanted = float(weight[row, column]) * scale[row // 128, column // 128]
        assert wide[row, column] == wanted


def test_a_module_in_fp8_drafts_as_its_widened_twin(made, tmp_path, monkeypatch):
    """In a folder that counts from 0, as modules that are published alone do."""
    source = made("deepseek")
    narrow, wide = {}, {}
    for name, tensor in source.extra.items():
        if not name.startswith("model.layers.2."):
            continue
        name = name.replace("layers.2.", "layers.0.")
        narrow[name] = wide[name] = tensor
        if tensor.dim() == 2 and "mlp.gate." not in name:
            narrow[name] = (tensor * 4).to(torch.float8_e4m3fn)
            narrow[name + "_scale_inv"] = torch.full((1, 1), 0.25)
            wide[name] = narrow[name].float() / 4
    drafted = []
    for name, tensors in (("narrow", narrow), ("wide", wide)):
        folder = copy_of(source.alone, tmp_path / name, tensors)
        config = json.loads((Path(folder) / "config.json").read_text()) | {"num_hidden_layers": 1}
        if name == "narrow":
            config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        fields = section(speculative_model=folder, max_draft_len=2)
        drafted.append(drafts_seen(monkeypatch, source.folder, fields, PROMPTS[:2])[0])
    # When a request joins a batch is left to chance, and with it the order.
    assert sorted(drafted[0]) == sorted(drafted[1])
    del narrow["model.layers.0.eh_proj.weight_scale_inv"]
    says_no(copy_of(source.alone, tmp_path / "less", narrow), source, "eh_proj.weight_scale_inv")


def copy_of(folder, to, tensors) -> str:
    to.mkdir()
    (to / "config.json").write_text((Path(folder) / "config.json").read_text())
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


def says_no(folder, source, message, **fields):
    section_ = section(speculative_model=folder, **fields)
    with pytest.raises(CheckpointError, match=message), engine_of(source.folder, section_):
        pass


BAD = {
    "missing": ({"model.layers.2.eh_proj.weight": None}, r"'model\.layers\.2\.eh_proj\.weight'"),
    "narrow": ({"model.layers.2.eh_proj.weight": (16, 32)}, r"\[16, 32\], expected \[32, 64\]"),
    "norm": ({"model.layers.2.shared_head.norm.weight": None}, "shared_head.norm.weight"),
    "copy": ({"model.layers.2.embed_tokens.weight": (95, 32)}, r"\[95, 32\], expected \[96, 32\]"),
    "attention": (
        {"model.layers.2.self_attn.o_proj.weight": None},
        r"'model\.layers\.2\.self_attn\.o_proj\.weight' of shape \[32, 48\] is missing",
    ),
    "expert": (
        {"model.layers.2.mlp.experts.3.down_proj.weight": None},
        r"'model\.layers\.2\.mlp\.experts\.down_proj' has shape \[3, 32, 16\]",
    ),
    "width": (
        {"model.layers.2.mlp.experts.3.up_proj.weight": (7, 32)},
        r"parts of tensor 'model\.layers\.2\.mlp\.experts\.gate_up_proj'",
    ),
    "stray": ({"model.layers.2.mlp.other.weight": (2,)}, r"'model\.layers\.2\.mlp\.other\.weight'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_file_is_named(made, case, tmp_path):
    source = made("deepseek")
    changes, message = BAD[case]
    tensors = dict(source.extra)
    for name, shape in changes.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape)
    says_no(copy_of(source.alone, tmp_path / "head", tensors), source, message)


def test_what_a_folder_does_not_hold_is_named(made, tiny, tmp_path):
    source = made("deepseek")
    says_no(source.alone, source, "holds 2: ", use_mtp_vanilla=True, max_draft_len=3)
    says_no(str(tmp_path / "none"), source, "is not a folder")
    message = r"no MTP module.*'model\.layers\.2\.eh_proj"
    with pytest.raises(CheckpointError, match=message), engine_of(tiny.target, section()):
        pass
    announced = json.loads((Path(source.folder) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(announced | {"num_nextn_predict_layers": 1}))
    save_file(load_file(source.folder + "/model.safetensors"), tmp_path / "model.safetensors")
    message = r"surplus model\.layers\.3"
    with pytest.raises(CheckpointError, match=message), engine_of(str(tmp_path)):
        pass
    (tmp_path / "config.json").write_text("{}")
    save_file(load_file(source.alone + "/model.safetensors"), tmp_path / "model.safetensors")
    says_no(str(tmp_path), source, "config.json")


def test_other_spellings():
    for method in ("mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp"):
        vllm = {"method": method, "num_speculative_tokens": 3}
        config = EngineConfig.load({"model": "m", "speculative_config": vllm}).speculative_config
        assert isinstance(config, MTPConfig)
        assert (config.max_nodes, config.folder_beside("m")) == (3, Path("m"))
    assert parse(MTPConfig, {"num_nextn_predict_layers": 2}).max_nodes == 2
    assert parse(MTPConfig, {"speculative_model": "head"}).folder_beside("m") == Path("head")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mtp_choices": [[0], [0, 0, 0]]}, r"path \[0, 0, 0\] has no parent"),
        ({"mtp_choices": [[0]], "use_dynamic_tree": True}, "give one"),
        ({"recycle": "both"}, "recycle"),
    ],
)
def test_what_contradicts_is_named(fields, named):
    with pytest.raises(ConfigError, match=named):
        parse(MTPConfig, fields)
