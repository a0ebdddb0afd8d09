"""P-EAGLE: drafts against the equations written out, exactness, trees, files."""

from __future__ import annotations

import pytest
import torch

from outrider.config import PEagleConfig, parse
from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.drafts import drafts_seen
from outrider.tests.helpers.eagle import PROMPTS, SHAPES, MaskReference
from outrider.tests.helpers.head_files import eagle_tensors, write_eagle
from outrider.tests.helpers.models import write_guessable

from ...helpers.engines import check_plain_tokens, complete, engine_of, plain_outputs

CAPTURE, MASK, WIDTH = (2, 3, 3), 95, 64
SPECULATORS = {
    "speculators_model_type": "peagle",
    "architectures": ["PEagleSpeculator"],
    "mask_token_id": MASK,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
}
CASES = {
    "one layer": {"config": {"ptd_token_id": MASK}},
    "four layers": {"num_layers": 4, "layer": "layers.0", "draft_vocab": 80, "fc_norm": True,
                    "config": {"pard_token": MASK, "rope_theta": 500.0}},
    "speculators": {"layer": "layers.0", "embed": True, "config": SPECULATORS},
}  # fmt: skip
FIXED = [[0, 0, 0], [0, 1], [1, 0], [2]]
DYNAMIC = {
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 3,
    "max_draft_len": 3,
    "max_total_draft_tokens": 9,
}


@pytest.fixture(scope="session")
def six(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("six") / "target"
    return write_guessable(folder, bos_token_id=0, eos_token_id=1)


@pytest.fixture(scope="session")
def heads(six, tmp_path_factory):
    """By case: folder, reference."""
    made = {}
    for name, options in CASES.items():
        config, tensors = eagle_tensors(six, 3, **options)
        shape = (1, 1, 3 * WIDTH) if name == "speculators" else (1, 3 * WIDTH)
        tensors["mask_hidden"] = torch.randn(shape, generator=torch.Generator().manual_seed(4))
        capture = CAPTURE
        if name == "speculators":
            layer = {key: config[key] for key in list(config) if key not in SPECULATORS}
            config, capture = SPECULATORS | {"transformer_layer_config": layer}, (1, 3, 5)
        folder = write_eagle(tmp_path_factory.mktemp("peagle") / name[:3], config, tensors)
        made[name] = folder, MaskReference(six, config, tensors, 3, capture)
    return made


def section(folder: str, **fields):
    return {"decoding_type": "PEagle", "speculative_model": folder, **fields}


def paths_of(tokens, parents):
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


@pytest.mark.parametrize("case", CASES)
def test_chains_follow_the_equations(six, heads, case, monkeypatch):
    """Chunked prefill, batches, accepted nodes and evicted blocks: no mask stays in the cache."""
    folder, reference = heads[case]
    options = {"max_num_batched_tokens": 9, "block_size": 4}
    if case == "one layer":
        options |= {"num_kv_blocks": 15, "max_model_len": 60, "max_num_batched_tokens": 32}
    prompts = [list(range(2, 11)) + prompt for prompt in PROMPTS] * (2 if len(options) > 2 else 1)
    fields = section(folder, max_draft_len=3)
    seen, stats = drafts_seen(monkeypatch, six, fields, prompts, max_tokens=20, **options)
    assert stats["drafters"]["peagle"]["num_acc_tokens"] > 0
    if case == "one layer":
        assert stats["requests"]["num_preemptions"] > 0
        assert stats["requests"]["num_hit_tokens"] > 0
    assert max(len(tokens) for _, tokens, _ in seen) == 3
    for text, tokens, parents in seen:
        assert parents == list(range(-1, len(parents) - 1))
        assert tokens == reference.chain(text, len(tokens))


@pytest.mark.parametrize("case", ["one layer", "four layers"])
def test_trees_follow_the_equations(six, heads, case, monkeypatch):
    folder, reference = heads[case]
    config = parse(PEagleConfig, section(folder, eagle_choices=FIXED))
    fields = section(folder, eagle_choices=FIXED)
    seen, _ = drafts_seen(monkeypatch, six, fields, PROMPTS, max_tokens=16)
    for text, tokens, parents in seen:
        nodes = list(config.nodes)
        assert tokens == reference.fixed(text, nodes)[: len(tokens)]
        places = {node: index for index, node in enumerate(nodes)}
        assert parents == [places.get(node[:-1], -1) for node in nodes][: len(parents)]
    fields = section(folder, **DYNAMIC)
    seen, _ = drafts_seen(monkeypatch, six, fields, PROMPTS, max_tokens=16)
    whole = [each for each in seen if len(each[1]) == 9]
    assert len(whole) > 5
    for text, tokens, parents in whole:
        assert paths_of(tokens, parents) == reference.dynamic(text, 3, 3, 9)


@pytest.mark.parametrize(
    ("case", "shape", "options"),
    [
        ("one layer", "chain", {}),
        ("four layers", "dynamic", {"tensor_parallel_size": 2}),
        ("one layer", "fixed", {}),
        ("four layers", "chain", {"placement": "separate"}),
    ],
)
def test_tokens_are_those_without_a_drafter(six, heads, case, shape, options):
    fields = section(heads[case][0], **{**SHAPES, "fixed": {"eagle_choices": FIXED}}[shape])
    check_plain_tokens(six, fields, **options)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_are_greedy_at_zero(six, heads, rule):
    (wanted,) = plain_outputs(six, PROMPTS, {})
    with engine_of(six, section(heads["one layer"][0], verification=rule)) as engine:
        assert complete(engine, PROMPTS)[0] == wanted
        complete(engine, PROMPTS, temperature=0.9)
        assert engine.stats()["drafters"]["peagle"]["faults"] == 0


def test_what_is_wrong_with_a_file_is_named(six, tmp_path):
    config, tensors = eagle_tensors(six, 3, config={"pard_token": MASK})
    masked = tensors | {"mask_hidden": torch.ones(1, 1, 3 * WIDTH)}
    cases = {
        "no masks": (config, tensors, {}, r"'mask_hidden' of shape \[1, 1, 192\].*Eagle3"),
        "narrow": (config, masked | {"mask_hidden": torch.ones(1, 64)}, {},
                   r"'mask_hidden'.*\[1, 64\], expected \[1, 192\]"),
        "no token": (config | {"pard_token": None}, masked, {}, "none of pard_token"),
        "outside": (config | {"pard_token": 96}, masked, {}, "pard_token.*vocabulary of 96"),
        "one": (*eagle_tensors(six, 1), {}, "EAGLE-1"),
        "as another": (config, masked, {"decoding_type": "Eagle3"}, "'mask_hidden'.*PEagle"),
    }  # fmt: skip
    for name, (keys, held, fields, message) in cases.items():
        folder = write_eagle(tmp_path / name.replace(" ", ""), keys, held)
        with (
            pytest.raises(CheckpointError, match=message),
            engine_of(six, section(folder) | fields),
        ):
            pass
    folder = write_eagle(tmp_path / "sound", config, masked)
    for fields, message in (
        ({"mask_token_id": 96}, "speculative_config.mask_token_id"),
        ({"recycle": "post_norm"}, "speculative_config.recycle"),
    ):
        with pytest.raises(ConfigError, match=message), engine_of(six, section(folder) | fields):
            pass
