"""Which operations a device gets, and why it gets none of our own."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import ConfigError
from outrider.workers import ops
from outrider.workers.ops import make_invariant_ops, make_ops, missing_kernels

CUDA = torch.device("cuda")


def test_cuda_takes_triton_where_it_is_installed(monkeypatch):
    for installed, reason in ((True, ""), (False, "no kernels on cuda without the package triton")):
        monkeypatch.setattr(ops, "has_triton", lambda installed=installed: installed)
        for dtype in (None, torch.bfloat16, torch.float16, torch.float32):
            assert missing_kernels(CUDA, dtype) == reason
    assert make_ops(CUDA, torch.bfloat16).name == "torch", "the family serves without kernels"


def test_triton_takes_a_compiler_or_what_it_has_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    reason = missing_kernels(CUDA, torch.bfloat16)
    assert reason.startswith("no kernels on cuda without a C compiler, which Triton needs")
    assert make_ops(CUDA, torch.bfloat16).name == "torch"
    with pytest.raises(ConfigError, match="deterministic: not available on cuda without a C comp"):
        make_invariant_ops(CUDA, torch.bfloat16)
    monkeypatch.setenv("CC", "tcc")
    assert missing_kernels(CUDA, torch.bfloat16) == ""
    monkeypatch.delenv("CC")
    (tmp_path / "ABC").mkdir()
    (tmp_path / "ABC" / "cuda_utils.cpython-311-x86_64-linux-gnu.so").touch()
    assert missing_kernels(CUDA, torch.bfloat16) == ""


def test_a_dtype_without_kernels_is_named(monkeypatch):
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    assert missing_kernels(CUDA, torch.float64) == "no kernels for torch.float64 on cuda"
    assert make_ops(CUDA, torch.float64).name == "torch"
    assert make_ops(torch.device("cpu"), torch.float32).name == "cpu"


def test_triton_serves_cuda():
    pytest.importorskip("triton")
    from outrider.workers.ops.cuda.ops import CudaOps

    assert CudaOps.name == "triton"
