"""Kernels compiled ahead of serving: kept under their keys; what is left to a start is named."""

from __future__ import annotations

import os

import pytest
import torch
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.config import EngineConfig
from outrider.tests.helpers.files import ROOT

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")

from outrider.bench import ahead  # noqa: E402

MODELS = ROOT / "demo" / "models"


def config(**keys) -> EngineConfig:
    given = {"model": str(MODELS / "target"), "dtype": "bfloat16", "max_num_seqs": 4}
    return EngineConfig.model_validate(given | keys)


def test_the_cache_is_filled_without_a_gpu(tmp_path, monkeypatch):
    """A second time nothing is compiled: the keys are those of Triton's own look at a launch."""
    from triton import knobs

    from outrider.workers.ops.cuda import elementwise
    from outrider.workers.ops.protocol import Norm

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))

    def launch() -> dict:
        states = torch.empty(4, 64, dtype=torch.bfloat16, device="meta")
        with ahead.compiling("sm90") as found:
            elementwise.norm(states, Norm(torch.empty(64, device="meta"), 1e-6))
        return found

    assert [*launch()] == ["_norm_kernel"]
    (cubin,) = tmp_path.rglob("_norm_kernel.cubin")
    written = cubin.stat().st_mtime_ns
    launch()
    assert [*tmp_path.rglob("*.cubin")] == [cubin]
    assert cubin.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("keys", "field"),
    [({"dtype": "float16"}, "dtype"), ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
     ({"forward": "bridge"}, "forward"),
     ({"deterministic": True}, "deterministic"), ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype")],
)  # fmt: skip
def test_what_is_not_compiled_ahead_is_named(keys, field):
    with pytest.raises(ahead.ConfigError) as refused:
        ahead.compile_ahead(config(**keys), "sm90", 132)
    assert refused.value.field == field


def test_the_command(monkeypatch):
    monkeypatch.setattr(ahead, "compile_ahead", lambda _, arch, num: {arch: num})
    given = ["check", "--model", str(MODELS / "target"), "--executor", "local", "--compile"]
    done = CliRunner().invoke(app, [*given, "sm90"])
    assert done.exit_code == 0, done.output
    assert "132 kernels for sm90 with 132 processors are in" in " ".join(done.output.split())
    done = CliRunner().invoke(app, [*given, "sm90", "--compile-processors", "114"])
    assert "114 kernels for sm90 with 114 processors are in" in " ".join(done.output.split())
    refused = CliRunner().invoke(app, [*given, "sm90", "--compile-processors", "0"])
    assert refused.exit_code == 2, refused.output
    refused = CliRunner().invoke(app, [*given[:-1], "--compile-processors", "114"])
    assert "compile_processors: only valid with --compile" in " ".join(refused.output.split())
    wrong = CliRunner().invoke(app, [*given, "sm1"])
    assert wrong.exit_code == 1
    assert "compile: expected 'sm80'," in " ".join(wrong.output.split())
    assert "Checked" not in wrong.output, "it is refused before anything is looked at"
    apart = '{"decoding_type": "DraftTarget", "speculative_model": "%s"}' % (MODELS / "draft")
    done = CliRunner().invoke(app, [*given, "sm90", "--speculative-config", apart])
    assert "Left to the start: draft models" in " ".join(done.output.split())
