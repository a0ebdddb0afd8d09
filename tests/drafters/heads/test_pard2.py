"""PARD-2: drafts against the equations written out, exactness, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import EngineConfig, PARD2Config
from outrider.drafters.heads.protocol import TargetFacts
from outrider.drafters.registry import check_head, method_of
from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.drafts import drafts_seen
from outrider.tests.helpers.eagle import PROMPTS
from outrider.tests.helpers.models import write_guessable
from outrider.tests.helpers.pard2 import KINDS, Reference, write_pard2

from ...helpers.engines import check_plain_tokens, complete, engine_of, plain_outputs

TREE = {"shape": "tree", "max_draft_len": 3, "max_total_draft_tokens": 8}


@pytest.fixture(scope="session")
def six(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("six") / "target"
    return write_guessable(folder, bos_token_id=0, eos_token_id=1)


@pytest.fixture(scope="session")
def models(six, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pard2")
    return {kind: write_pard2(folder / kind, six, kind) for kind in KINDS}


def section(folder: str, **fields: Any) -> dict[str, Any]:
    return {"decoding_type": "PARD2", "speculative_model": folder, **fields}


@pytest.mark.parametrize("kind", KINDS)
def test_chains_follow_the_equations(six, models, kind, monkeypatch):
    """Chunked prefill, batches, accepted nodes, evicted blocks and cached prefixes: the row of a
    token reads the states of the token before, wherever that was computed."""
    options: dict[str, Any] = {"max_num_batched_tokens": 15, "block_size": 4, "allow_pickle": True}
    if kind == "llama":
        options |= {"num_kv_blocks": 15, "max_model_len": 60, "max_num_batched_tokens": 32}
    prompts = [list(range(2, 11)) + prompt for prompt in PROMPTS] * (2 if kind == "llama" else 1)
    fields = section(models[kind], max_draft_len=4, adaptive_draft_len=False)
    seen, stats = drafts_seen(monkeypatch, six, fields, prompts, max_tokens=20, **options)
    assert stats["drafters"]["pard2"]["num_acc_tokens"] > 0 or kind == "tied"
    if kind == "llama":
        assert stats["requests"]["num_preemptions"] > 0
        assert stats["requests"]["num_hit_tokens"] > 0
    assert max(len(tokens) for _, tokens, _ in seen) == 4
    reference, without = Reference(six, models[kind]), Reference(six, models[kind], scale=0.0)
    for text, tokens, parents in seen:
        assert parents == list(range(-1, len(parents) - 1))
        assert tokens == reference.chain(text, len(tokens))
    assert any(tokens != without.chain(text, len(tokens)) for text, tokens, _ in seen)


def test_trees_are_the_best_ones(six, models, monkeypatch):
    options = {"allow_pickle": True, "max_tokens": 12}
    fields, reference = section(models["llama"], **TREE), Reference(six, models["llama"])
    seen, _ = drafts_seen(monkeypatch, six, fields, PROMPTS, **options)
    for text, tokens, parents in seen:
        logs = reference.logs(tuple(text), 3)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        scores = [sum(float(logs[at, token]) for at, token in enumerate(path)) for path in paths]
        assert scores == sorted(scores, reverse=True)
        best = logs[0].topk(8).values
        deeper = (best[:, None] + logs[1].topk(8).values).flatten()
        deepest = (deeper[:, None] + logs[2].topk(8).values).flatten()
        every = torch.cat([best, deeper, deepest]).sort(descending=True).values
        torch.testing.assert_close(torch.tensor(scores), every[: len(scores)])


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("llama", {"max_draft_len": 4}, {}),
        ("qwen3", {"max_draft_len": 3}, {"tensor_parallel_size": 2}),
        ("qwen3", TREE, {}),
        ("llama", {"max_draft_len": 4}, {"placement": "separate"}),
        ("llama", TREE, {"tensor_parallel_size": 2, "placement": "separate"}),
    ],
)
def test_tokens_are_those_without_a_drafter(six, models, kind, shape, options):
    check_plain_tokens(six, section(models[kind], **shape), allow_pickle=True, **options)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_are_greedy_at_zero(six, models, rule):
    (wanted,) = plain_outputs(six, PROMPTS, {})
    fields = section(models["llama"], verification=rule)
    with engine_of(six, fields, allow_pickle=True) as engine:
        assert complete(engine, PROMPTS)[0] == wanted
        complete(engine, PROMPTS, temperature=0.9)
        assert engine.stats()["drafters"]["pard2"]["faults"] == 0


def test_a_model_alone_is_recognised(models):
    data = {"model": "m", "speculative_config": {"model": models["llama"]}}
    assert isinstance(EngineConfig.load(data).speculative_config, PARD2Config)


def test_a_projection_without_pickles_is_read(six, models, tmp_path):
    folder = write_pard2(tmp_path / "model", six, pickled=False)
    found = {}
    for path, allow_pickle in ((models["llama"], True), (folder, False)):
        fields = section(path, max_draft_len=4)
        with engine_of(six, fields, allow_pickle=allow_pickle) as engine:
            complete(engine, PROMPTS)
            found[path] = engine.stats()["drafters"]["pard2"]["num_acc_tokens"]
    assert len(set(found.values())) == 1, found
    assert found[folder] > 0


def altered(folder: Path, six: str, tensors: Any = None, warp: Any = None, **keys: Any) -> str:
    """A checkpoint of which files are changed; None removes a tensor."""
    path = write_pard2(folder, six, **keys)
    for file, changes, load, save in (
        ("model.safetensors", tensors or {}, load_file, save_file),
        ("warp_model.bin", warp or {}, torch.load, torch.save),
    ):
        held = load(folder / file) | changes
        save({name: each for name, each in held.items() if each is not None}, folder / file)
    return path


BASE = "model.layers.1.mlp.up_proj.weight"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"tensors": {BASE: None}}, "lacks tensor 'layers.1.mlp.up_proj.weight'"),
    "surplus": ({"tensors": {"model.extra.weight": torch.ones(2)}}, "extra.weight"),
    "shape": ({"tensors": {BASE: torch.ones(2, 64)}}, r"up_proj.weight.*\[2, 64\], expected"),
    "integer": ({"tensors": {BASE: torch.ones(48, 64, dtype=torch.int32)}}, "up_proj.*int32"),
    "few tokens": (
        {"tensors": {"model.embed_tokens.weight": torch.ones(80, 64)}},
        r"embed_tokens.weight.*\[80, 64\], expected at least 96 rows.*another target",
    ),
    "few rows": (
        {"tensors": {"lm_head.weight": torch.ones(80, 64)}},
        r"lm_head.weight.*\[80, 64\], expected at least 96 rows",
    ),
    "untied": ({"tensors": {"lm_head.weight": None}}, "lacks tensor 'lm_head.weight'"),
    "no projection": ({"warp": {"target_proj.weight": None}}, "lacks tensor 'target_proj.weight'"),
    "another target": (
        {"warp": {"target_proj.weight": torch.ones(64, 48)}},
        r"'target_proj.weight'.*\[64, 48\], expected \[64, 64\]",
    ),
    "no bias": (
        {"warp": {"target_proj.bias": None}, "pard2_proj_bias": True},
        "lacks tensor 'target_proj.bias'",
    ),
    "bias": ({"warp": {"target_proj.bias": torch.ones(64)}}, "target_proj.bias"),
    "no tensors": (
        {"warp": {"target_proj.weight": torch.ones(64)}},
        r"'target_proj.weight'.*\[64\]",
    ),
    "beside": ({"warp": {"head.weight": torch.ones(3)}}, "head.weight"),
    "layers": ({"pard2_target_layers": [7]}, r"pard2_target_layers.*\[7\], expected.*6 layers"),
    "no layers": ({"pard2_target_layers": "all"}, "pard2_target_layers.*a list of layers"),
    "scale": ({"pard2_scale": -1}, "pard2_scale.*-1, expected a number above 0"),
    "no mask": ({"pard_token": None}, "none of pard_token"),
    "mask": ({"pard_token": 100}, "pard_token.*100, expected a token of the vocabulary of 100"),
    "kind": ({"model_type": "gemma2"}, "model_type.*gemma2.*llama, qwen2, qwen3"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_a_file_is_named(six, tmp_path, name):
    """Before weights are read, with what `outrider check` reads."""
    changes, message = FAULTS[name]
    folder = altered(tmp_path / "model", six, **changes)
    facts = TargetFacts(64, 96, 6, torch.float32, torch.device("cpu"), allow_pickle=True)
    with pytest.raises(CheckpointError, match=message) as caught:
        check_head(PARD2Config(speculative_model=folder), facts)
    assert caught.value.message.startswith("speculative_config.speculative_model")
    with pytest.raises(CheckpointError), engine_of(six, section(folder), allow_pickle=True):
        pass


def test_what_is_wrong_with_a_section_is_named(six, models, tmp_path):
    facts = TargetFacts(64, 96, 6, torch.float32, torch.device("cpu"), allow_pickle=True)
    for fields, message in (
        ({"mask_token_id": 100}, "speculative_config.mask_token_id"),
        ({"pard2_target_layers": [0, 7]}, r"speculative_config.pard2_target_layers: \[0, 7\]"),
        ({"pard2_target_layers": [-8]}, "speculative_config.pard2_target_layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_head(PARD2Config(speculative_model=models["llama"], **fields), facts)
    for fields, message in (
        ({"pard2_scale": 0}, "pard2_scale"),
        ({"max_total_draft_tokens": 20}, "belongs to shape 'tree'"),
        ({"shape": "tree", "max_draft_len": 5, "max_total_draft_tokens": 3}, "below the 5 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.load(
                {"model": "m", "speculative_config": section(models["llama"], **fields)}
            )
    fields = section(models["llama"])
    with pytest.raises(CheckpointError, match="allow_pickle: true"), engine_of(six, fields):
        pass
    Path(folder := write_pard2(tmp_path / "plain", six), "warp_model.bin").unlink()
    with pytest.raises(CheckpointError, match="use decoding_type PARD"):
        check_head(PARD2Config(speculative_model=folder), facts)


def test_calibration_tries_what_files_disagree_on():
    variants = method_of(PARD2Config(speculative_model="m")).variants
    assert variants is not None
    found = {each.key: each.values for each in variants((0, 3, 6), 6, 500.0)}
    assert found["pard2_target_layers"] == ((0, 3, 6),)
    assert {each.key: each.values for each in variants((6,), 6, None)}["pard2_target_layers"] == (
        (5,), (6,),
    )  # fmt: skip
    assert set(found) == {"pard2_target_layers", "pard2_scale", "rope_theta", "rope_layout"}
