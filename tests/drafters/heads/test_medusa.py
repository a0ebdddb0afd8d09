"""Medusa: its tree, its files, its exactness, and its drafts against the equations."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

from outrider.config import EngineConfig, MedusaConfig, parse
from outrider.drafters import head_drafters
from outrider.drafters.heads.medusa import MedusaHead
from outrider.errors import CheckpointError, ConfigError
from outrider.scheduler import tree
from outrider.tests.helpers.head_files import medusa_tensors, write_medusa
from outrider.tests.helpers.heads.tokens import check_plain_tokens
from outrider.workers.head import HeadService

from ...helpers.engines import complete, engine_of, plain_outputs, random_prompts

PATHS = [[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]]
NODES = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 1], [0, 1, 0], [1], [1, 0], [1, 1]]
LAYOUTS = ["pt", "safetensors", "whole", "vllm"]


@pytest.fixture(scope="session")
def heads(tiny, tmp_path_factory):
    """Four heads in every layout: folder by layout, and the tensors."""
    folder = tmp_path_factory.mktemp("medusa")
    tensors = medusa_tensors(tiny.target, 4)
    return {layout: write_medusa(folder / layout, tensors, layout) for layout in LAYOUTS}, tensors


def section(folder: str, **fields):
    return {
        "decoding_type": "Medusa",
        "speculative_model": folder,
        "medusa_choices": PATHS,
        **fields,
    }


def test_paths_and_nodes_are_the_same_tree():
    by_paths = parse(MedusaConfig, section("m"))
    by_nodes = parse(MedusaConfig, section("m", medusa_choices=NODES))
    shuffled = random.Random(0).sample(NODES, len(NODES))
    assert by_paths.nodes == by_nodes.nodes
    assert by_paths.nodes == parse(MedusaConfig, section("m", medusa_choices=shuffled)).nodes
    assert sorted(by_paths.nodes) == sorted(tuple(node) for node in NODES)
    assert by_paths.draft_len == 9  # ten nodes with the root
    for index, path in enumerate(by_paths.nodes):
        assert len(path) == 1 or path[:-1] in by_paths.nodes[:index]


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ([[0], [0, 0, 0]], r"path \[0, 0, 0\] has no parent \[0, 0\]"),
        ([[0], [1], [0]], r"path \[0\] is given twice"),
        ([[0, 10]], r"path \[0, 10\] asks for rank 10"),
        ([[0, -1]], r"path \[0, -1\]"),
        ([[]], r"path \[\]"),
        ([], "medusa_choices is empty"),
        ([[0, 0, 0]], r"path \[0, 0, 0\] is 3 deep"),
    ],
)
def test_a_wrong_tree_names_the_path(choices, named):
    with pytest.raises(ConfigError, match=named):
        parse(MedusaConfig, section("m", medusa_choices=choices, num_medusa_heads=2))


def test_other_spellings():
    vllm = {"method": "medusa", "model": "heads", "num_speculative_tokens": 3}
    config = EngineConfig.load({"model": "m", "speculative_config": vllm}).speculative_config
    assert isinstance(config, MedusaConfig)
    assert config.nodes == ((0,), (0, 0), (0, 0, 0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_follow_the_equations(tiny, heads, layout, monkeypatch):
    """Every draft against a dense forward without cache, in every file layout."""
    folders, tensors = heads
    checked = []
    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32)
    observe = head_drafters.Colocated.observe
    prompt = [5, 17, 3, 44, 60, 7]
    text = list(prompt)

    def spy(self, batch, verdict):
        text.extend(verdict.tokens(0).tolist())
        drafts = verdict.next_drafts
        if drafts is not None and drafts.start[1]:
            assert drafts.lens[0] == len(text)
            with torch.no_grad():
                x = model.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
            ranked = []
            for head in range(4):
                weight = tensors[f"{head}.0.linear.weight"]
                state = x + silu(weight @ x + tensors[f"{head}.0.linear.bias"])
                ranked.append((tensors[f"{head}.1.weight"] @ state).argsort(descending=True))
            nodes = parse(MedusaConfig, section("m")).nodes
            wanted = [int(ranked[len(path) - 1][path[-1]]) for path in nodes]
            assert drafts.tokens.tolist() == wanted[: len(drafts.tokens)]
            assert tree.depths(drafts.parents).tolist() == [
                len(path) for path in nodes[: len(drafts.tokens)]
            ]
            checked.append(len(wanted))
        observe(self, batch, verdict)

    monkeypatch.setattr(head_drafters.Colocated, "observe", spy)
    pickles = {"allow_pickle": layout == "pt"}
    with engine_of(tiny.target, section(folders[layout]), **pickles) as engine:
        complete(engine, [prompt], max_tokens=24)
    assert len(checked) > 4


@pytest.mark.parametrize(("at_once", "tensor_parallel_size"), [(1, 1), (8, 1), (8, 2)])
def test_tokens_are_those_without_a_drafter(tiny, heads, tensor_parallel_size, at_once):
    """Greedy and sampled, with chunked prefill, preemptions and prefix hits."""
    check_plain_tokens(
        tiny.target,
        section(heads[0]["safetensors"]),
        at_once=at_once,
        tensor_parallel_size=tensor_parallel_size,
    )


def test_who_opts_out_is_not_drafted_for(tiny, heads, monkeypatch):
    counts = []
    draft = HeadService.draft

    def spy(self, step, verdict, hidden):
        verdict = draft(self, step, verdict, hidden)
        counts.append(verdict.next_drafts.start[-1])
        return verdict

    monkeypatch.setattr(HeadService, "draft", spy)
    with engine_of(tiny.target, section(heads[0]["safetensors"])) as engine:
        engine.reconfigure({"enabled": False})
        complete(engine, [[3, 4, 5]], max_tokens=8)
    assert counts
    assert not any(counts)


def test_what_is_wrong_with_a_file_is_named(tiny, heads, tmp_path):
    tensors = heads[1]
    cases = {
        "missing": (
            {k: v for k, v in tensors.items() if k != "2.0.linear.bias"},
            "2.0.linear.bias",
        ),
        "surplus": (tensors | {"9.9.other": torch.ones(2)}, "9.9.other"),
        "size": (
            tensors | {"1.0.linear.weight": torch.ones(32, 32)},
            r"1\.0\.linear\.weight.*\[32, 32\], expected \[64, 64\]",
        ),
        "vocab": (
            tensors | {"0.1.weight": torch.ones(95, 64)},
            r"\[95, 64\], expected \[96, 64\]",
        ),
    }
    for name, (changed, message) in cases.items():
        folder = write_medusa(tmp_path / name, changed, "safetensors")
        with pytest.raises(CheckpointError, match=message):
            HeadOf(tiny.target, section(folder))
    with pytest.raises(CheckpointError, match="is not a folder"):
        HeadOf(tiny.target, section(str(tmp_path / "absent")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has none of medusa_lm_head"):
        HeadOf(tiny.target, section(str(tmp_path / "empty")))
    with pytest.raises(ConfigError, match=r"path \[0, 0, 0, 0, 0\] is 5 deep"):
        HeadOf(tiny.target, section(heads[0]["safetensors"], medusa_choices=[[0] * 5]))


def HeadOf(target: str, fields: dict) -> None:
    """Starts an engine with the head, and ends it."""
    with engine_of(target, fields):
        pass


def test_typical_is_greedy_at_temperature_0_and_longer_above(tiny, heads):
    lossy = section(heads[0]["safetensors"], verification="typical", lossy=True)
    prompts = random_prompts(6, 96)
    (greedy,) = plain_outputs(tiny.target, prompts, {})
    with engine_of(tiny.target, lossy) as engine:
        assert complete(engine, prompts)[0] == greedy
        hot, _ = complete(engine, prompts, temperature=1.0)
        assert all(len(tokens) == 32 for tokens in hot.values())
        assert engine.stats()["drafters"]["medusa"]["faults"] == 0


def test_as_a_member_of_a_composition(tiny, heads):
    prompts = random_prompts(6, 96)
    (wanted,) = plain_outputs(tiny.target, prompts, {"temperature": 0.7})
    for mode in ("precedence", "merge"):
        members = [{"decoding_type": "NGram", "max_draft_len": 3}, section(heads[0]["safetensors"])]
        composed = {"decoding_type": "Compose", "members": members, "mode": mode}
        with engine_of(tiny.target, composed) as engine:
            assert complete(engine, prompts, temperature=0.7)[0] == wanted
            stats = engine.stats()["drafters"]
        assert all(each["faults"] == 0 for each in stats.values())
        assert any("medusa" in name and each["num_gen_drafts"] for name, each in stats.items())
    members = [section(heads[0]["safetensors"])] * 2
    with (
        pytest.raises(ConfigError, match="one head at most"),
        engine_of(tiny.target, {"decoding_type": "Compose", "members": members}),
    ):
        pass


def test_a_head_that_raises_costs_speed_and_nothing_else(tiny, heads, monkeypatch):
    calls = []
    rows = MedusaHead.rows

    def fail_often(self, step, host):
        calls.append(step)
        if len(calls) % 3 == 0:
            raise RuntimeError("out of memory")
        return rows(self, step, host)

    monkeypatch.setattr(MedusaHead, "rows", fail_often)
    prompts = random_prompts(4, 96)
    (wanted,) = plain_outputs(tiny.target, prompts, {})
    with engine_of(tiny.target, section(heads[0]["safetensors"])) as engine:
        assert complete(engine, prompts)[0] == wanted
        stats = engine.stats()
    assert stats["num_failed_steps"] == 0
    assert stats["drafters"]["medusa"]["faults"] == len(calls) // 3
    assert stats["drafters"]["medusa"]["num_gen_drafts"] > 0
