"""`device: auto` does not leave a GPU idle without a word, and errors give the reason."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest
import torch

from outrider.cluster import rank_actors
from outrider.config import EngineConfig, ResourcesConfig
from outrider.engine.estimate import _gpu_facts
from outrider.errors import ConfigError
from outrider.workers import devices
from outrider.workers.devices import gpu_obstacle, pick_device, require_cuda

OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture
def machine(monkeypatch):
    """A machine whose GPUs torch does not see."""

    def make(gpus: int, cuda: str | None = None, error: str = "", visible: str | None = None):
        def init() -> None:
            if error:
                raise RuntimeError(error)

        devices._warn_of_idle_gpus.cache_clear()
        monkeypatch.setattr(devices, "num_nvidia_gpus", lambda: gpus)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


REASONS = {
    "a torch for CPUs": ((2,), "2 NVIDIA GPUs, but torch .* is built without CUDA"),
    "an old driver": ((1, "12.8", OLD), r"1 NVIDIA GPU, but CUDA 12.8 does not start: .*too old"),
    "devices that fail": ((8, "12.8"), "8 NVIDIA GPUs, but CUDA 12.8 finds none"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_gpu_that_cannot_be_used(machine, caplog, name):
    """A warning with the reason, once; an error where one is asked for or reserved."""
    given, reason = REASONS[name]
    machine(*given)
    with caplog.at_level(logging.WARNING):
        assert pick_device("auto") == pick_device("auto") == torch.device("cpu")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("device 'auto' is the CPU here: this machine has ")
    with pytest.raises(ConfigError, match=f"no CUDA device is visible: .*{reason}") as error:
        pick_device("cuda")
    assert error.value.field == "device"
    with pytest.raises(ConfigError, match=f"Ray has reserved a GPU .*{reason}") as error:
        pick_device("auto", granted=True)
    assert error.value.field == "device"
    caplog.clear()
    assert pick_device("cpu", granted=True) == torch.device("cpu")
    assert not caplog.records, "who asks for a CPU is not warned"


@pytest.mark.parametrize(
    "given", [{"gpus": 0}, {"gpus": 2, "visible": ""}, {"gpus": 2, "visible": "-1"}]
)
def test_machines_without_gpus_or_with_hidden_ones(machine, caplog, given):
    machine(**given)
    assert gpu_obstacle() == ""
    assert pick_device("auto") == torch.device("cpu")
    assert not caplog.records
    with pytest.raises(ConfigError, match="no CUDA device is visible$"):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True), ((8, 9), ["sm_80", "sm_90"], True),
        ((10, 3), ["sm_90", "sm_100"], True), ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_80", "sm_90"], False), ((12, 0), ["sm_90", "compute_90"], True),
        ((9, 0), ["sm_90a"], True), ((10, 0), ["sm_90a", "sm_80"], False),
        ((6, 1), [], True), ((6, 1), ["unheard of"], True),
    ],
)  # fmt: skip
def test_a_gpu_that_torch_has_no_kernels_for(monkeypatch, caplog, capability, built, runs):
    devices._warn_of_idle_gpus.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    if runs:
        assert pick_device("cuda") == pick_device("auto") == torch.device("cuda", 0)
        return
    major, minor = capability
    told = f"has no kernels for a GPU, whose compute capability is {major}.{minor}, only for "
    with pytest.raises(ConfigError, match=re.escape(told + built[0])):
        pick_device("cuda")
    with pytest.raises(ConfigError, match="Ray has reserved a GPU"):
        pick_device("auto", granted=True)
    assert pick_device("auto") == torch.device("cpu")
    assert told in caplog.text


CPU_BUILD = "__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA_BUILD = CPU_BUILD.replace("cuda: Optional[str] = None", "cuda: Optional[str] = '12.8'")
ROCM_BUILD = CPU_BUILD.replace("hip: Optional[str] = None", "hip: Optional[str] = '6.4'")


@pytest.mark.parametrize(
    ("build", "driver", "gpus", "reason"),
    [
        (CPU_BUILD, False, 0, "is visible$"),
        (CPU_BUILD, True, 2, "2 NVIDIA GPUs, but torch 2.9.0.cpu is built without CUDA"),
        (CUDA_BUILD, False, 0, "is visible$"),
        (CUDA_BUILD, True, 2, None),
        (ROCM_BUILD, False, 0, None),
        ("cuda = None\n", False, 0, None),
        ("cuda: Optional[str] = compute()\n", False, 0, None),
    ],
)
def test_an_installation_shows_that_there_is_no_gpu(
    monkeypatch, tmp_path, build, driver, gpus, reason
):
    """Before torch is imported; where that is not certain, torch is asked."""
    asked = []
    (tmp_path / "version.py").write_text(build)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "find_spec", lambda _: spec)
    monkeypatch.setattr(devices, "sys", SimpleNamespace(modules={}))
    monkeypatch.setattr(devices, "_has_driver", lambda: driver)
    monkeypatch.setattr(devices, "num_nvidia_gpus", lambda: gpus)
    monkeypatch.setattr(devices, "pick_device", asked.append)
    if reason is None:
        require_cuda()
        assert asked == ["cuda"]
        return
    with pytest.raises(ConfigError, match=reason) as error:
        require_cuda()
    assert error.value.field == "device"
    assert not asked


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl", "dxg", "nvhost-gpu", "nvmap"])
def test_a_driver_may_be_there_by_its_device_files(monkeypatch, tmp_path, name):
    monkeypatch.setattr(devices, "Path", lambda _: tmp_path)
    monkeypatch.setattr(devices, "_DRIVER", "libnothing-of-this-name.so.1")
    assert not devices._has_driver()
    (tmp_path / name).touch()
    assert devices._has_driver()


def test_a_driver_is_there_by_its_library(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "Path", lambda _: tmp_path)
    monkeypatch.setattr(devices, "_DRIVER", "libc.so.6")
    assert devices._has_driver()


def test_device_files_are_counted(monkeypatch, tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "Path", lambda _: tmp_path)
    assert devices.num_nvidia_gpus() == 3


def test_the_facts_of_a_gpu(monkeypatch):
    """As `outrider check` prints them."""
    pytest.importorskip("triton")
    device = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CC", "gcc-13")
    config = EngineConfig.load({"model": "m"})
    facts = _gpu_facts(config, torch.device("cuda", 0), torch.bfloat16)
    assert facts["GPU"] == "8 x NVIDIA H100, capability 9.0"
    assert facts["CUDA of torch"] == "12.8"
    assert facts["kernels"].startswith("triton ")
    assert facts["kernels"].endswith("; C compiler: gcc-13")
    facts = _gpu_facts(config, torch.device("cuda", 0), torch.float64)
    assert facts["kernels"] == "no kernels for torch.float64 on cuda"


@pytest.mark.parametrize(("device", "size", "warned"), [("auto", 4, True), ("auto", 2, False),
                                                       ("cpu", 4, False)])  # fmt: skip
def test_a_cluster_with_too_few_gpus(monkeypatch, caplog, device, size, warned):
    class Placed(Exception):
        pass

    def place(*_):
        raise Placed

    monkeypatch.setattr(rank_actors.ray, "cluster_resources", lambda: {"GPU": 2.0})
    monkeypatch.setattr(rank_actors.placement, "bundle_of", place)
    spec = SimpleNamespace(device=device, size=size, target=None, head_target=None)
    with pytest.raises(Placed):
        rank_actors.place(spec, ResourcesConfig(), (1.0, 0.0))
    assert ("the cluster has 2 GPUs, and 4 ranks need one each" in caplog.text) == warned
