"""DFlash, DFlash2 and DSpark: drafts against the equations written out, exactness, files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.dflash import (
    MASK,
    SELECTED,
    SLIDING,
    Reference,
    block_tensors,
    speculators_config,
    write_block,
    zlab_config,
)
from outrider.tests.helpers.drafts import drafts_seen
from outrider.tests.helpers.eagle import PROMPTS
from outrider.tests.helpers.engines import complete, engine_of, plain_outputs
from outrider.tests.helpers.heads.tokens import check_plain_tokens
from outrider.tests.helpers.models import write_guessable

SCALED = SELECTED | {"input_embedding_scale": 0.7}


@dataclass(frozen=True)
class Layout:
    """One published layout: files, and what their rows see."""

    kind: str
    config: dict[str, Any]
    tensors: dict[str, Any]
    views: tuple[tuple[bool, int | None], ...] = ((False, None), (False, None))
    length: int = 5
    mask_file: bool = False


LAYOUTS = {
    "z-lab": Layout("DFlash", zlab_config(), {}),
    "short": Layout("DFlash", zlab_config(rope_theta=5000.0), {}, length=3),
    "windows": Layout("DFlash", zlab_config(**SLIDING), {}, ((True, 5), (False, None))),
    "all windows": Layout(
        "DFlash",
        zlab_config(dflash_config={"use_swa": True, "swa_window_size": 4, "causal": False}),
        {},
        ((False, 4), (False, 4)),
        mask_file=True,
    ),
    "causal": Layout("DFlash", zlab_config(is_causal=True), {}, ((True, None), (True, None))),
    "speculators": Layout(
        "DFlash",
        speculators_config("dflash", draft_vocab_size=80),
        {"embed": True, "draft_vocab": 80},
    ),
    "dflash2": Layout(
        "DFlash",
        zlab_config(is_causal=False, dflash_config=SCALED, **SLIDING),
        {"convs": True, "selector": True},
        ((False, 5), (False, None)),
    ),
    "dspark": Layout(
        "DSpark",
        speculators_config("dspark", block_size=5, draft_vocab_size=80, markov_rank=16),
        {"markov": 16, "draft_vocab": 80, "confidence": "markov"},
    ),
    "dspark whole": Layout(
        "DSpark",
        speculators_config("dspark", sample_from_anchor=False),
        {"markov": 16, "confidence": "state"},
    ),
}


@pytest.fixture(scope="session")
def six(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("six") / "target"
    return write_guessable(folder, bos_token_id=0, eos_token_id=1)


@pytest.fixture(scope="session")
def heads(six, tmp_path_factory):
    """By layout: folder, reference."""
    made = {}
    for name, layout in LAYOUTS.items():
        tensors = block_tensors(six, **layout.tensors)
        folder = tmp_path_factory.mktemp("block") / "head"
        path, mask = write_block(folder, layout.config, tensors), None
        if layout.mask_file:
            mask = torch.randn(64, generator=torch.Generator().manual_seed(2)) * 0.3
            torch.save({"mask_token_id": MASK, "embedding": mask}, folder / "mask_embedding.pt")
        given = (six, layout.config, tensors, layout.length)
        made[name] = path, Reference(*given, views=layout.views, mask=mask)
    return made


def section(kind: str, folder: str, **fields):
    return {"decoding_type": kind, "speculative_model": folder, **fields}


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_follow_the_equations(six, heads, name, monkeypatch):
    """Chunked prefill, batches, accepted nodes and evicted blocks: no mask stays in the cache."""
    (folder, reference), layout = heads[name], LAYOUTS[name]
    options = {"max_num_batched_tokens": 18, "block_size": 4, "allow_pickle": layout.mask_file}
    if name in ("z-lab", "dspark"):
        options |= {"num_kv_blocks": 15, "max_model_len": 60, "max_num_batched_tokens": 32}
    small = "num_kv_blocks" in options
    prompts = [list(range(2, 11)) + prompt for prompt in PROMPTS] * (4 if small else 1)
    fields = section(layout.kind, folder, max_draft_len=layout.length)
    seen, stats = drafts_seen(monkeypatch, six, fields, prompts, max_tokens=20, **options)
    if name != "dflash2":  # whose random kernels and codebooks guess wrong
        assert stats["drafters"][layout.kind.lower()]["num_acc_tokens"] > 0
    if small:
        assert stats["requests"]["num_preemptions"] > 0
        assert stats["requests"]["num_hit_tokens"] > 0
    assert max(len(tokens) for _, tokens, _ in seen) == layout.length
    for text, tokens, parents in seen:
        assert parents == list(range(-1, len(parents) - 1))
        assert tokens == reference.chain(text, len(tokens))


@pytest.mark.parametrize(
    ("name", "at_once", "size", "placement"),
    [
        ("z-lab", 8, 1, "colocated"),
        ("dspark", 8, 2, "colocated"),
        ("dflash2", 8, 2, "colocated"),
        ("dspark", 8, 1, "separate"),
        pytest.param("windows", 1, 2, "separate", marks=pytest.mark.slow),
        pytest.param("speculators", 8, 2, "separate", marks=pytest.mark.slow),
        pytest.param("z-lab", 1, 1, "colocated", marks=pytest.mark.slow),
        pytest.param("dspark whole", 8, 1, "colocated", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_without_a_drafter(six, heads, name, at_once, size, placement):
    """Greedy and sampled, alone and eight at once, preempted, with prefix hits."""
    fields = section(LAYOUTS[name].kind, heads[name][0])
    if placement == "separate":
        fields |= {"placement": placement, "draft_timeout_s": 30}
    check_plain_tokens(six, fields, at_once=at_once, tensor_parallel_size=size)


@pytest.mark.parametrize("name", ["dspark", "dspark whole"])
def test_confidences_are_reported(six, heads, name, monkeypatch):
    (folder, reference), chances = heads[name], []
    fields = section("DSpark", folder)
    seen, stats = drafts_seen(monkeypatch, six, fields, PROMPTS, chances=chances)
    for (text, tokens, _), found in zip(seen, chances, strict=True):
        wanted = [reference.confidence(text, tokens[:depth]) for depth in range(len(tokens))]
        assert found == pytest.approx(wanted, abs=1e-4)
    assert 0 < stats["drafters"]["dspark"]["num_expected_tokens"] < sum(map(len, chances))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_are_greedy_at_zero(six, heads, rule):
    (wanted,) = plain_outputs(six, PROMPTS, {})
    for name in ("z-lab", "dspark"):
        with engine_of(
            six, section(LAYOUTS[name].kind, heads[name][0], verification=rule)
        ) as engine:
            assert complete(engine, PROMPTS)[0] == wanted
            complete(engine, PROMPTS, temperature=0.9)
            (drafter,) = engine.stats()["drafters"].values()
            assert drafter["faults"] == 0


@pytest.mark.parametrize("placement", ["colocated", "separate"])
@pytest.mark.parametrize("name", ["z-lab", "dspark"])
def test_cached_prefixes_keep_acceptance(six, heads, name, placement, monkeypatch):
    """The second request finds its prompt in the cache, and drafts what the first one drafted."""
    prompt, fields = list(range(2, 42)), section(LAYOUTS[name].kind, heads[name][0])
    if placement == "separate":
        fields |= {"placement": placement, "draft_timeout_s": 30}
    counts = []
    with engine_of(six, fields, block_size=4) as engine:
        for _ in range(2):
            before = engine.stats()
            complete(engine, [prompt], max_tokens=32)
            after = engine.stats()
            (old,), (new,) = before["drafters"].values(), after["drafters"].values()
            keys = ("num_gen_tokens", "num_acc_tokens")
            counts.append([new[key] - old[key] for key in keys])
        assert after["requests"]["num_hit_tokens"] >= 36
    assert counts[0] == counts[1]
    assert counts[0][1] > 3


def test_what_is_wrong_with_a_file_is_named(six, tmp_path):
    config, tensors = zlab_config(), block_tensors(six)
    inner = config["dflash_config"]
    spark = block_tensors(six, markov=16, confidence="markov")
    cut = {name: tensor for name, tensor in tensors.items() if name != "hidden_norm.weight"}
    layers = {"dflash_config": inner | {"target_layer_ids": [1, 2, 6]}}
    selected = block_tensors(six, convs=True, selector=True)
    codebook = "candidate_selector.successor_codebook"
    cases = {
        "a tensor less": (config, cut, "lacks tensor 'hidden_norm.weight'"),
        "a tensor more": (config, tensors | {"layers.0.extra.weight": torch.ones(2)}, "extra"),
        "layers": (config | layers, tensors, r"target_layer_ids of dflash_config.*0 to 5"),
        "two layers": (
            config | {"dflash_config": inner | {"target_layer_ids": [1, 2]}}, tensors,
            r"'fc.weight'.*\[64, 192\], expected \[64, 128\].*target_layer_ids",
        ),
        "mask": (config | {"dflash_config": inner | {"mask_token_id": 96}}, tensors,
                 "mask_token_id.*vocabulary of 96"),
        "no mask": (config | {"dflash_config": {"target_layer_ids": [1, 2, 4]}}, tensors,
                    "give the head's mask_token_id"),
        "no block": (config | {"block_size": "6"}, tensors, "block_size.*whole number"),
        "no window": (config | {"layer_types": ["sliding_attention"] * 2}, tensors,
                      "sliding_window"),
        "spark": (config, spark, "decoding_type DSpark"),
        "gated": (config, tensors | {"markov_head.gate_proj.weight": torch.ones(2)}, "gated"),
        "P-EAGLE": (config, tensors | {"mask_hidden": torch.ones(1, 192)}, "PEagle"),
        "no output": (config | {"draft_vocab_size": 80}, tensors, "'lm_head.weight'.*80"),
        "codebook": (zlab_config(dflash_config=SELECTED),
                     selected | {codebook: torch.ones(80, 8)}, codebook),
        "groups": (zlab_config(dflash_config=SELECTED | {"conv_group_size": 7}), selected,
                   "conv_group_size"),
        "no head": (config, {"norm.weight": torch.ones(64)}, "it is no block drafter"),
        "heads": (config | {"num_attention_heads": 5}, tensors, "do not fit 5 heads"),
    }  # fmt: skip
    for name, (keys, held, message) in cases.items():
        folder = write_block(tmp_path / name.replace(" ", ""), keys, held)
        with (
            pytest.raises(CheckpointError, match=message),
            engine_of(six, section("DFlash", folder)),
        ):
            pass
    folder = write_block(tmp_path / "sound", config, tensors)
    for fields, message in (
        ({"max_draft_len": 6}, "max_draft_len.*more than the 5 tokens"),
        ({"mask_token_id": 96}, "mask_token_id"),
        ({"target_layer_ids": [1, 2, 6]}, "target_layer_ids"),
        ({"output_layer": "own"}, "output_layer.*no tensor 'lm_head.weight'"),
    ):
        with (
            pytest.raises(ConfigError, match=message),
            engine_of(six, section("DFlash", folder, **fields)),
        ):
            pass
    with (
        pytest.raises(CheckpointError, match="use decoding_type DFlash"),
        engine_of(six, section("DSpark", folder)),
    ):
        pass
    torch.save(torch.ones(64), tmp_path / "sound" / "mask_embedding.pt")
    with (
        pytest.raises(CheckpointError, match="allow_pickle"),
        engine_of(six, section("DFlash", folder)),
    ):
        pass
    torch.save(torch.ones(32), tmp_path / "sound" / "mask_embedding.pt")
    with (
        pytest.raises(CheckpointError, match="64 numbers"),
        engine_of(six, section("DFlash", folder), allow_pickle=True),
    ):
        pass


def test_a_map_of_tokens_without_an_output_layer_is_not_used(six, tmp_path, monkeypatch):
    """Such a file drafts from the target's output layer; with one it may, if the section asks."""
    tensors = block_tensors(six)
    extra = {"d2t": torch.ones(96, dtype=torch.int64), "t2d": torch.ones(96, dtype=torch.bool)}
    folder = write_block(tmp_path / "map", zlab_config(), tensors | extra)
    reference = Reference(six, zlab_config(), tensors, 5)
    seen, _ = drafts_seen(monkeypatch, six, section("DFlash", folder), PROMPTS)
    assert all(tokens == reference.chain(text, len(tokens)) for text, tokens, _ in seen)
    own = block_tensors(six, draft_vocab=80)
    folder = write_block(tmp_path / "own", zlab_config(), own)
    fields = section("DFlash", folder, output_layer="target")
    left = {name: own[name] for name in own.keys() - {"lm_head.weight", "d2t", "t2d"}}
    reference = Reference(six, zlab_config(), left, 5)
    seen, _ = drafts_seen(monkeypatch, six, fields, PROMPTS)
    assert all(tokens == reference.chain(text, len(tokens)) for text, tokens, _ in seen)


def test_drafts_are_those_of_transformers(six, tmp_path, monkeypatch):
    """`MuseGlimmerAssistantModel` on whole texts, and its files."""
    from transformers import AutoModelForCausalLM, MuseGlimmerAssistantConfig
    from transformers.cache_utils import DFlashCache
    from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantModel

    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, block_size=5, mask_token_id=MASK, sliding_window=200,
        target_layer_ids=[1, 2, 4], layer_types=["sliding_attention", "full_attention"],
        attn_implementation="eager", initializer_range=0.2,
    )  # fmt: skip
    drafter = MuseGlimmerAssistantModel(config).eval()
    drafter.save_pretrained(tmp_path / "muse")
    target = AutoModelForCausalLM.from_pretrained(six, dtype=torch.float32)

    @torch.no_grad()
    def drafted(text):
        known = torch.tensor([text[:-1]])
        states = target(known, output_hidden_states=True).hidden_states
        cache = DFlashCache(config=config)
        cache.set_previous_accepted_tokens(len(text) - 1)
        block = target.get_input_embeddings()(torch.tensor([[text[-1], *[MASK] * 4]]))
        read = drafter(
            noise_embeds=block,
            context_hidden_states=torch.cat([states[each + 1] for each in (1, 2, 4)], dim=-1),
            position_ids=torch.arange(len(text) + 4)[None],
            past_key_values=cache,
        ).last_hidden_state[0, 1:]
        return target.get_output_embeddings()(read).argmax(-1).tolist()

    fields = section("DFlash", str(tmp_path / "muse"), max_draft_len=4)
    seen, _ = drafts_seen(monkeypatch, six, fields, PROMPTS)
    assert all(tokens == drafted(text)[: len(tokens)] for text, tokens, _ in seen)
