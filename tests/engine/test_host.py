"""What the host checks before anything runs, and in which order it starts workers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.cluster.backend import backend_of
from outrider.config import EngineConfig
from outrider.engine.host import Backend, EngineHost
from outrider.engine.preflight import check_models
from outrider.errors import CheckpointError, ConfigError

from ..helpers.engines import tokenizer_at

FIELD = "speculative_config.speculative_model"
PLAIN = {"a": 0, "b": 1, "c": 2}
PIECES = [["a", -1.0], ["b", -2.0], ["c", -3.0]]


@pytest.fixture
def model_of(tmp_path, tiny):
    def make(name: str, *vocabulary) -> str:
        """The tiny target with a tokenizer, or with none."""
        folder = tmp_path / name
        tokenizer_at(folder, *vocabulary) if vocabulary else folder.mkdir()
        for file in ("config.json", "model.safetensors"):
            (folder / file).symlink_to(f"{tiny.target}/{file}")
        return str(folder)

    return make


def pair_of(target: str, draft: str, **options) -> EngineConfig:
    """A target and a draft model."""
    section = {"decoding_type": "DraftTarget", "speculative_model": draft}
    return EngineConfig.load({"model": target, "speculative_config": section, **options})


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        ([PLAIN], [PLAIN], None),
        ([PLAIN], [PIECES], None),
        ([PLAIN], [], None),
        ([], [PLAIN], None),
        ([PLAIN, [(3, "<s>")]], [PLAIN], None),  # the draft lacks it and never says it
        ([PLAIN], [{"a": 0, "b": 2, "c": 1}], "2 of 3 tokens differ, the first is 1: 'c', not 'b'"),
        ([PIECES], [PIECES[::-1]], "2 of 3 tokens differ"),
        ([PLAIN], [PLAIN | {"d": 3}], "the first is 3: 'd', not None"),
        ([PLAIN, [(3, "<s>")]], [PLAIN, [(3, "</s>")]], "the first is 3: '</s>', not '<s>'"),
    ],
)
def test_a_draft_model_speaks_the_targets_tokens(model_of, target, draft, words):
    target, draft = model_of("target", *target), model_of("draft", *draft)
    if words is None:
        check_models(pair_of(target, draft))
        return
    with pytest.raises(ConfigError, match=words) as caught:
        check_models(pair_of(target, draft))
    assert caught.value.field == FIELD


def test_the_tokenizer_that_is_used_counts(model_of, tmp_path):
    target, draft = model_of("target"), model_of("draft", {"a": 0, "c": 1})
    check_models(pair_of(target, draft))
    other = str(tokenizer_at(tmp_path / "other", {"a": 0, "b": 1}))
    with pytest.raises(ConfigError, match="another tokenizer"):
        check_models(pair_of(target, draft, tokenizer=other))


def test_a_broken_tokenizer_is_named(model_of, tmp_path):
    target, draft = model_of("target", PLAIN), model_of("draft", PLAIN)
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(ConfigError, match="tokenizer.json") as caught:
        check_models(pair_of(target, draft))
    assert caught.value.field == FIELD


@pytest.mark.parametrize(
    ("scope", "executor", "snapshot", "needed_by"),
    [
        ("cluster", "local", None, None),
        ("cluster", "ray", None, "speculative_config.pool_scope: cluster"),
        ("cluster", "ray", "pool.bin", "speculative_config.pool_scope: cluster"),
        ("tenant", "ray", "pool.bin", "speculative_config.pool_snapshot"),
        ("replica", "local", "pool.bin", "speculative_config.pool_snapshot"),
    ],
)
def test_a_pool_that_is_shared_or_kept_needs_a_tokenizer(
    tmp_path, scope, executor, snapshot, needed_by
):
    section = {"decoding_type": "NGram", "pool_scope": scope}
    if snapshot is not None:
        section["pool_snapshot"] = str(tmp_path / snapshot)
    config = EngineConfig.load({"model": "m", "executor": executor, "speculative_config": section})
    host = SimpleNamespace(
        _config=config, _backend=backend_of(config), tokenizer=Path(tmp_path), vocab_size=96
    )
    if needed_by is None:
        EngineHost.pool_link(host, config.speculative_config).shutdown()
        return
    with pytest.raises(ConfigError, match=f"{needed_by} needs one") as caught:
        EngineHost.pool_link(host, config.speculative_config)
    assert caught.value.field == "tokenizer"


class _Apart(Backend):
    """Groups in processes of their own would start at once: each waits until the other starts."""

    def __init__(self, failing: str = "") -> None:
        self.both, self.failing, self.ended = threading.Barrier(2), failing, []
        self.spins_s = {}

    def can_start_at_once(self, specs, resources):
        return [spec.target is not None for spec in specs] == [True, False]

    def group(self, spec, resources):
        role = "draft" if spec.target is None else "target"
        self.spins_s[role] = spec.spin_s
        self.both.wait(10.0)
        if role == self.failing:
            raise CheckpointError(f"{role} cannot be read")
        report = SimpleNamespace(head=None)
        end = lambda: self.ended.append(role)  # noqa: E731
        return SimpleNamespace(role=role, spec=spec, reports=[report], shutdown=end)


@pytest.mark.parametrize(("failing", "ended"), [("", ["target"]), ("target", ["draft"])])
def test_a_separate_draft_model_loads_beside_the_target(tiny, monkeypatch, failing, ended):
    taken = lambda group, *_, owned, **__: (group.role, owned)  # noqa: E731
    monkeypatch.setattr("outrider.engine.host.GroupDraftModel", taken)
    section = {"decoding_type": "DraftTarget", "speculative_model": tiny.draft}
    resources = {"spin_s": 0.03}
    config = EngineConfig.load(
        {"model": tiny.target, "speculative_config": section, "resources": resources}
    )
    backend = _Apart(failing)
    if failing:
        with pytest.raises(CheckpointError, match="target cannot be read"):
            EngineHost(config, backend)
    else:
        host = EngineHost(config, backend)
        assert host.draft_model(host.config.speculative_config) == ("draft", True)
        host.shutdown()
    assert backend.ended == ended
    assert backend.spins_s == {"target": 0.03, "draft": 0.03}


def test_a_draft_model_that_does_not_load_takes_the_target_along(tiny):
    section = {"decoding_type": "DraftTarget", "speculative_model": tiny.draft}
    config = EngineConfig.load({"model": tiny.target, "speculative_config": section})
    backend = _Apart("draft")
    host = EngineHost(config, backend)
    with pytest.raises(CheckpointError, match="draft cannot be read"):
        host.draft_model(host.config.speculative_config)
    host.shutdown()
    assert backend.ended == ["target"]
