"""What may be wrong with a head, whichever it is: every fault is a typed error that says where."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save

import outrider
from outrider.config import EngineConfig, HeadConfig
from outrider.drafters.heads.protocol import TargetFacts
from outrider.drafters.registry import build_head, check_head
from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.head_files import Tensors, eagle_tensors, medusa_tensors
from outrider.tests.helpers.mtp import Made
from outrider.tests.helpers.redrafter import redrafter_tensors, write_target

FIELD = "speculative_config.speculative_model"
KINDS = ("medusa", "redrafter", "eagle", "eagle3", "peagle", "mtp")


@dataclass(frozen=True)
class Source:
    """A sound head: what its folder holds, and what it must fit."""

    section: dict[str, Any]
    config: dict[str, Any]
    tensors: Tensors
    stem: str
    facts: TargetFacts

    def write(self, folder: Path, tensors: Tensors | None = None, **config: Any) -> HeadConfig:
        """A folder with the head, changed."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config | config))
        held = self.tensors if tensors is None else tensors
        raw = save({name: tensor.contiguous() for name, tensor in held.items()})
        (folder / f"{self.stem}.safetensors").write_bytes(raw)
        return self.at(folder)

    def at(self, folder: Path) -> HeadConfig:
        section = {**self.section, "speculative_model": str(folder)}
        return EngineConfig.load({"model": "m", "speculative_config": section}).speculative_config


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Source]:
    folder = tmp_path_factory.mktemp("sources")
    target = write_target(folder / "target", num_layers=6)
    facts = TargetFacts(64, 96, 6, torch.float32, torch.device("cpu"), allow_pickle=True)
    made = Made(folder / "mtp", "llama", 1)
    theirs = json.loads((Path(made.alone) / "config.json").read_text())
    few = replace(facts, hidden_size=32, num_layers=2)
    one, three = eagle_tensors(target, 1), eagle_tensors(target, 3, draft_vocab=40)
    masked = three[1] | {"mask_hidden": torch.ones(1, 1, 3 * 64)}
    recurrent = redrafter_tensors(target, 1, 48, rnn=True)
    kinds = {
        "medusa": ({}, {}, medusa_tensors(target, 2), "medusa_lm_head", facts),
        "redrafter": ({}, {}, recurrent, "model", facts),
        "eagle": ({}, *one, "model", facts),
        "eagle3": ({}, *three, "model", facts),
        "peagle": ({}, {**three[0], "pard_token": 9}, masked, "model", facts),
        "mtp": ({}, theirs, made.extra, "model", few),
    }
    types = ("Medusa", "ReDrafter", "Eagle", "Eagle3", "PEagle", "MTP")
    return {
        kind: Source({"decoding_type": name}, *kinds[kind][1:])
        for kind, name in zip(KINDS, types, strict=True)
    }


def refused(section: HeadConfig, facts: TargetFacts, *says: str) -> None:
    """The check before anything starts and the load both say it, alike."""
    messages = []
    for load in (check_head, build_head):
        with pytest.raises(CheckpointError) as caught:
            load(section, facts)
        assert caught.value.field == FIELD
        for part in says:
            assert part in caught.value.message, (part, caught.value.message)
        messages.append(caught.value.message)
    assert messages[0] == messages[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_head_passes(sources, kind, tmp_path):
    section = sources[kind].write(tmp_path / "head")
    check_head(section, sources[kind].facts)
    build_head(section, sources[kind].facts)


OPTIONAL = {"fc.bias", "embed_tokens.weight", "t2d"}  # there are heads without


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_needed_in_its_shape_and_as_numbers(sources, kind, tmp_path):
    source = sources[kind]
    for index, (name, tensor) in enumerate(source.tensors.items()):
        less = {key: value for key, value in source.tensors.items() if key != name}
        if name not in OPTIONAL:
            refused(source.write(tmp_path / f"less{index}", less), source.facts, _layer(name))
        for shape in ((), (3,), (2, 2, 2)):
            folder = tmp_path / f"{index}-{len(shape)}"
            section = source.write(folder, source.tensors | {name: torch.ones(shape)})
            refused(section, source.facts, _layer(name))
        if tensor.is_floating_point():
            narrow = {name: torch.ones(tensor.shape, dtype=torch.int8)}
            section = source.write(tmp_path / f"int{index}", source.tensors | narrow)
            refused(section, source.facts, repr(name), "torch.int8", "torch.float32")
        else:
            wide = {name: torch.ones(tensor.shape)}
            section = source.write(tmp_path / f"float{index}", source.tensors | wide)
            refused(section, source.facts, repr(name), "torch.float32", "whole numbers")


def _layer(name: str) -> str:
    """What an error names at least: heads are found by the first tensor of a layer."""
    return name.rpartition(".")[0].partition(".linear")[0].rpartition(".")[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_for_another_target_is_refused(sources, kind, tmp_path):
    source = sources[kind]
    section = source.write(tmp_path / "head", **({} if kind != "eagle" else {"vocab_size": 96}))
    for other in ({"hidden_size": 128}, {"vocab_size": 104}):
        refused(section, replace(source.facts, **other), "expected")


def test_a_head_that_shows_no_vocabulary_is_known_by_its_configuration(sources, tmp_path):
    source = sources["eagle"]
    bare = {name: t for name, t in source.tensors.items() if name != "embed_tokens.weight"}
    refused(source.write(tmp_path / "a", bare, vocab_size=97), source.facts, "vocab_size", "97")
    check_head(source.write(tmp_path / "b", bare, vocab_size=96), source.facts)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _pickled(value: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        held = io.BytesIO()
        torch.save(value, held)
        file.unlink()
        file.with_suffix(".bin").write_bytes(held.getvalue())

    return change


def _index(text: str) -> Callable[[Path], None]:
    return lambda file: Path(f"{file}.index.json").write_text(text) and None


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (_cut, "may be truncated"),
    "empty": (lambda file: file.write_bytes(b""), "may be truncated"),
    "noise": (lambda file: file.write_bytes(b"\xff" * 64), "may be truncated"),
    "gone": (Path.unlink, "has none of"),
    "list": (_pickled([1]), "holds no tensors by name"),
    "numbered": (_pickled({1: torch.ones(1)}), "holds no tensors by name"),
    "code": (_pickled({"a": Path("x")}), "holds objects other than tensors"),
    "index": (_index("{"), "is not JSON"),
    "index-list": (_index("[]"), "must hold a mapping"),
    "index-bare": (_index("{}"), "'weight_map'"),
    "index-number": (_index('{"weight_map": {"mtp.a": 3, "b": 3}}'), "'weight_map'"),
    "index-absent": (_index('{"weight_map": {"mtp.a": "x.bin"}}'), "'x.bin', which does not exist"),
}


@pytest.mark.parametrize("fault", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named(sources, kind, fault, tmp_path):
    source, (change, says) = sources[kind], FILES[fault]
    section = source.write(tmp_path / "head")
    change(tmp_path / "head" / f"{source.stem}.safetensors")
    refused(section, source.facts, says)


@pytest.mark.parametrize("kind", KINDS)
def test_pickled_weights_are_read_where_they_are_allowed(sources, kind, tmp_path):
    """Under the target's setting and with its message; safetensors of any name come first."""
    source = sources[kind]
    section = source.write(tmp_path / "head")
    stored = tmp_path / "head" / f"{source.stem}.safetensors"
    kept = stored.read_bytes()
    _pickled(source.tensors)(stored)
    build_head(section, source.facts)
    safe = replace(source.facts, allow_pickle=False)
    refused(section, safe, "holds only pickled weights; set allow_pickle: true")
    (tmp_path / "head" / "model.safetensors").write_bytes(kept)
    build_head(section, safe)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_is_none_is_named(sources, kind, tmp_path):
    source = sources[kind]
    with pytest.raises(CheckpointError, match=r"absent") as caught:
        build_head(source.at(tmp_path / "absent"), source.facts)
    assert caught.value.field == FIELD


@pytest.mark.parametrize("text", ["{", "[]", "null", "\x00"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])  # the others read tensors alone
def test_a_broken_configuration_is_named(sources, kind, text, tmp_path):
    section = sources[kind].write(tmp_path / "head")
    (tmp_path / "head" / "config.json").write_text(text)
    refused(section, sources[kind].facts, "config.json")


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0}
CONFIG = [
    ("num_attention_heads", None, "a whole number above 0"),
    ("num_attention_heads", "4", "a whole number above 0"),
    ("num_attention_heads", True, "a whole number above 0"),
    ("num_attention_heads", 3, "do not fit 3 heads"),
    ("head_dim", 33, "do not fit 4 heads of 33"),
    ("rms_norm_eps", "small", "a number above 0"),
    ("rms_norm_eps", float("inf"), "a number above 0"),
    ("rope_theta", -1, "a number above 0"),
    ("rope_scaling", "llama3", "a mapping"),
    ("rope_scaling", {"rope_type": "dynamic"}, "allowed: default, linear, llama3, yarn"),
    ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
    ("rope_scaling", YARN | {"beta_fast": "32"}, "beta_fast"),
    ("rope_scaling", YARN | {"truncate": 1}, "true or false"),
    ("rope_parameters", YARN | {"rope_theta": 1.0}, "expected a number above 1"),
    ("rope_scaling", LLAMA3, "low_freq_factor"),
    ("rope_parameters", {"rope_type": "linear", "factor": 0}, "a number above 0"),
    ("hidden_act", "gelu", "silu"),
    ("eagle_config", [1], "a mapping"),
    ("transformer_layer_config", 1, "a mapping"),
]
CONFIG3 = [
    ("eagle_aux_hidden_state_layer_ids", [1, "2", 3], "a list of layers"),
    ("eagle_aux_hidden_state_layer_ids", [1.5, 2, 3], "a list of layers"),
    ("eagle_aux_hidden_state_layer_ids", [1, 2], "expected [64, 128]"),
    ("eagle_aux_hidden_state_layer_ids", [1, 2, 6], "the target has layers 0 to 5"),
    ("norm_before_residual", "yes", "true or false"),
    ("fc_norm", True, "fc_norm.0.weight"),
    ("norm_before_fc", True, "input_norm.weight"),
]


@pytest.mark.parametrize(
    ("kind", "key", "value", "says"),
    [("eagle", *case) for case in CONFIG] + [("eagle3", *case) for case in CONFIG3],
)
def test_what_a_configuration_may_not_say_is_named(sources, kind, key, value, says, tmp_path):
    source = sources[kind]
    refused(source.write(tmp_path / "head", **{key: value}), source.facts, says)


def test_a_vocabulary_that_leads_astray_is_named(sources, tmp_path):
    source = sources["eagle3"]
    d2t = source.tensors["d2t"]
    ids = d2t + torch.arange(len(d2t))
    cases = {
        "beyond": (d2t + 96, f"makes draft token 0 token {int(ids[0]) + 96}"),
        "before": (d2t - 96, f"makes draft token 0 token {int(ids[0]) - 96}"),
        "twice": (d2t - torch.arange(40), "makes draft token"),
    }
    for name, (changed, says) in cases.items():
        held = source.tensors | {"d2t": changed}
        with pytest.raises(CheckpointError, match=says):
            build_head(source.write(tmp_path / name, held), source.facts)
    less = {name: t for name, t in source.tensors.items() if name not in ("lm_head.weight", "d2t")}
    section = source.write(tmp_path / "none", less, draft_vocab_size=40)
    refused(section, source.facts, "lm_head.weight", "draft_vocab_size is 40")


def test_layers_that_the_target_has_not_are_the_users_mistake(sources, tmp_path):
    section = sources["eagle3"].write(tmp_path / "head")
    key = "speculative_config.eagle3_layers_to_capture"
    for kind, layers, says in (
        ("eagle3", (1, 2, 5), "allowed are 0 to 4, and -1 for the normed final state"),
        ("eagle", (0, 1, 2), "no meaning"),
    ):
        section = sources[kind].write(tmp_path / kind)
        section = section.model_copy(update={"eagle3_layers_to_capture": layers})
        with pytest.raises(ConfigError, match=says) as caught:
            check_head(section, sources[kind].facts)
        assert caught.value.field == key


TREES = [
    ([], "is empty"),
    ([[]], r"path \[\] must be ranks"),
    ([[0], [0, 0, 0]], r"path \[0, 0, 0\] has no parent \[0, 0\]"),
    ([[0, -1]], r"path \[0, -1\] must be ranks"),
    ([[0, 64]], r"path \[0, 64\] asks for rank 64"),
    ([[0] * 65], "a path is 65 deep"),
    ([[a, b, c] for a in range(10) for b in range(10) for c in range(10)], "1110 nodes"),
    ([[0, 0.0]], r"choices\.0\.1"),
    ([["0"]], r"choices\.0\.0"),
    ([[True]], r"choices\.0\.0"),
    ([0], r"choices\.0"),
    ("[[0]", "choices"),
]


@pytest.mark.parametrize(("tree", "says"), TREES, ids=range(len(TREES)))
@pytest.mark.parametrize("kind", ["Medusa", "Eagle", "MTP"])
def test_a_malformed_tree_names_its_key(kind, tree, says):
    key = f"{kind.lower()}_choices"
    section = {"decoding_type": kind, "speculative_model": "h", key: tree}
    with pytest.raises(ConfigError, match=says) as caught:
        EngineConfig.load({"model": "m", "speculative_config": section})
    assert key in caught.value.message


def test_trees_of_tensorrt_llm_may_be_text_and_repeat_a_path_and_ours_may_not():
    def load(kind, tree):
        key = f"{kind.lower()}_choices"
        section = {"decoding_type": kind, "speculative_model": "h", key: tree}
        loaded = EngineConfig.load({"model": "m", "speculative_config": section})
        return getattr(loaded.speculative_config, key)

    for kind in ("Medusa", "Eagle"):
        assert load(kind, "[[0], [1]]") == load(kind, [[0], [1], [0]]) == ((0,), (1,))
    with pytest.raises(ConfigError, match=r"path \[0\] is given twice"):
        load("MTP", [[0], [0]])
    with pytest.raises(ConfigError, match="mtp_choices"):
        load("MTP", "[[0]]")


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"decoding_type": "Eagle", "speculative_model": ""}, "speculative_model"),
        ({"decoding_type": "Eagle", "dynamic_tree_max_topK": 4}, "dynamic_tree_max_topK .4. bel"),
        ({"decoding_type": "Eagle", "rope_theta": float("inf")}, "rope_theta"),
        ({"decoding_type": "Eagle", "eagle3_layers_to_capture": []}, "eagle3_layers_to_capture"),
        ({"decoding_type": "Eagle", "eagle3_layers_to_capture": [-2]}, "eagle3_layers_to_capture"),
        ({"decoding_type": "Medusa", "num_medusa_heads": 2, "max_draft_len": 3}, "max_draft_len"),
    ],
)
def test_a_wrong_section_names_the_key(section, says):
    section = {"speculative_model": "h", **section}
    with pytest.raises(ConfigError, match=says):
        EngineConfig.load({"model": "m", "speculative_config": section})


DEMO = Path(outrider.__file__).parent / "demo" / "models" / "target"


@pytest.mark.skipif(not DEMO.is_dir(), reason="without the shipped models")
def test_it_is_said_before_anything_starts(sources, tmp_path):
    """By the command, with its options or a file, and by the class."""
    from typer.testing import CliRunner

    from outrider import LLM
    from outrider.cli.app import app

    sources["medusa"].write(tmp_path / "head")
    section = {"decoding_type": "Medusa", "speculative_model": str(tmp_path / "head")}
    settings = {"model": str(DEMO), "speculative_config": section}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    says = "tensor '0.0.linear.weight'"
    options = ["-m", str(DEMO), "--speculative-config", json.dumps(section)]
    for words in (["check", str(tmp_path / "settings.yaml")], ["check", *options]):
        answer = CliRunner().invoke(app, words)
        assert answer.exit_code == 1
        assert says in " ".join(answer.output.split())
    for executor in ("local", "ray"):
        with pytest.raises(CheckpointError, match=says):
            LLM(str(DEMO), speculative_config=section, executor=executor)
