"""Which backend an executor names, that `local` needs no Ray, and what workers find on a node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import outrider
from outrider.cluster import backend
from outrider.config import EngineConfig, ResourcesConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError

DEMO = Path(outrider.__file__).parent / "demo" / "models" / "target"
GIB = 2**30
V2 = ("memory.max", "memory.current")
V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
NO_RAY = """
import sys
sys.modules["ray"] = None  # importing it raises, as where it is not installed
from outrider import LLM, SamplingParams
with LLM(sys.argv[1], executor="local", max_model_len=256) as llm:
    output = llm.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
assert len(output[0].outputs[0].token_ids) == 4
"""
ONE_GPU = """
import sys, time
import ray
ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
from outrider import LLM, SamplingParams
from outrider.errors import ConfigError
draft = {"decoding_type": "DraftTarget", "speculative_model": sys.argv[2], "max_draft_len": 3}
shared = {"max_model_len": 256, "device": "cpu", "resources": {"gpus_per_worker": 1}}
begun = time.monotonic()
try:
    LLM(sys.argv[1], **shared, speculative_config={**draft, "placement": "separate"})
except ConfigError as error:
    assert error.field == "speculative_config.placement", error
    assert "cannot be placed beside the target" in error.message, error
else:
    raise AssertionError("a second GPU was found")
assert time.monotonic() - begun < 30
found = []
for section in (None, draft):
    keys = {} if section is None else {"speculative_config": section}
    with LLM(sys.argv[1], **shared, **keys) as llm:
        asked = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        output = llm.generate([5, 6, 7], asked, use_tqdm=False)[0]
        found.append(output.outputs[0].token_ids)
        if section is not None:
            roles = [each["role"] for each in llm.stats()["workers"] if each["state"] == "active"]
            assert roles == ["target"], roles
            assert list(llm.stats()["drafters"]), llm.stats()
assert found[0] == found[1], found
"""


@pytest.mark.slow
def test_a_draft_model_starts_beside_its_target_on_one_gpu():
    """By Ray's count of GPUs: the workers compute on the CPU."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_GPU, str(DEMO), str(DEMO.parent / "draft")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_local_executor_runs_where_ray_is_not_installed():
    done = subprocess.run([sys.executable, "-c", NO_RAY, str(DEMO)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_engine_without_a_backend_runs_locally_only():
    with pytest.raises(ConfigError, match="^executor: 'ray' needs a backend"):
        Engine.start(EngineConfig.load({"model": str(DEMO), "executor": "ray"}))


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),  # a bare machine
        ({V2[0]: "max\n", V2[1]: f"{GIB}\n"}, None),
        ({V2[0]: f"{3 * GIB}\n", V2[1]: f"{3 * GIB - 4096}\n"}, 4096),
        ({V1[0]: f"{2 * GIB}\n", V1[1]: f"{2 * GIB - 512}\n"}, 512),
        ({V1[0]: "9223372036854771712\n", V1[1]: f"{GIB}\n"}, None),
    ],
)
def test_free_memory_of_a_node_or_its_container(tmp_path, monkeypatch, files, left):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(backend, "_CGROUPS", tmp_path)
    if left is not None:
        assert backend.free_bytes() == left
    else:
        assert backend.free_bytes() > GIB // 4, "what the kernel says is available"


@pytest.mark.parametrize(
    ("num_nodes", "free", "section", "at_once"),
    [
        (1, {"CPU": 3.0}, {}, True),
        (1, {"CPU": 2.0}, {}, False),  # of which one would take the other's
        (1, {}, {}, False),
        (2, {"CPU": 8.0}, {}, False),  # the target's ranks are to share a node
        (1, {"CPU": 8.0, "GPU": 4.0}, {}, False),  # the target measures its memory first
        (1, {"CPU": 8.0}, {"accelerator_type": "H200"}, False),
        (1, {"CPU": 8.0}, {"drafter_accelerator_type": "L4"}, False),
        (1, {"CPU": 2.0}, {"cpus_per_worker": 0.5}, True),
    ],
)
def test_groups_start_at_once_where_none_takes_what_another_needs(
    monkeypatch, num_nodes, free, section, at_once
):
    dead = {"Alive": False}
    monkeypatch.setattr("ray.nodes", lambda: [dead, *[{"Alive": True}] * num_nodes])
    monkeypatch.setattr("ray.available_resources", lambda: free)
    monkeypatch.setattr("ray.cluster_resources", lambda: free)
    kinds = [(2, "target"), (1, None)]
    specs = [
        SimpleNamespace(size=size, device="auto", target=target, head_target=None)
        for size, target in kinds
    ]
    resources = ResourcesConfig(**section)
    assert backend.RayBackend().can_start_at_once(specs, resources) == at_once
