"""`examples/`: `outrider check` accepts each, with checkpoints of full size, and plans it.

The checkpoints are sparse files with the real names and shapes (`helpers/outlines.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from outrider.cli.app import app
from outrider.config import EngineConfig
from outrider.engine.preflight import preflight as whole
from outrider.errors import ConfigError
from outrider.tests.helpers import outlines
from outrider.tests.helpers.files import ROOT
from outrider.tests.helpers.kubernetes import manifests
from outrider.workers.model.fit import observed_shapes as observe
from outrider.workers.model.info import ModelInfo

FILES = sorted((ROOT / "examples").glob("*.yaml"))
README = (ROOT / "examples" / "README.md").read_text()
MODELS = "/models/"
Check = Callable[[Path, str], Result]
IN_K8S = {
    "single-gpu.yaml": "single-gpu",
    "tp8.yaml": "tp8",
    "deepseek-r1-mtp.yaml": "deepseek-r1",
    "stages.yaml": "stages",
    "llama4-eagle3.yaml": "llama4-maverick",
    "drafter-nodes.yaml": "drafter-nodes",
}


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Check]:
    """`check(file, nodes)`: the command on an example with checkpoints; each is run once.

    What is found of files does not depend on nodes, so they are checked for the first alone; and
    what a model's attention is called with depends on its configuration.
    """
    folder, models = tmp_path_factory.mktemp("examples"), tmp_path_factory.mktemp("models")
    sound: dict[str, dict[str, Any]] = {}
    shapes: dict[tuple[str, ModelInfo], Any] = {}

    def preflight(config: EngineConfig, *, errors: list[ConfigError], **options: Any) -> Any:
        key = config.model_dump_json()
        if key in sound:
            return dict(sound[key])
        facts = whole(config, errors=errors, **options)
        if not errors:
            sound[key] = dict(facts)
        return facts

    def observed(model: Any, info: ModelInfo) -> Any:
        key = model.config.to_json_string(use_diff=False), info
        if key not in shapes:
            shapes[key] = observe(model, info)
        return shapes[key]

    @cache
    def run(file: Path, nodes: str) -> Result:
        text = file.read_text()
        for name in re.findall(rf" {MODELS}(\S+)", text):
            if not (models / name).exists():
                outlines.MAKERS[name](models / name)
        copy = folder / file.name
        text = text.replace(f" {MODELS}", f" {models}/").replace(" demo/", f" {ROOT}/demo/")
        copy.write_text(text)
        runner = CliRunner(env={"COLUMNS": "160"})
        return runner.invoke(app, ["check", str(copy), "--nodes", nodes])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.cli.check.preflight", preflight)
        patch.setattr("outrider.workers.model.fit.observed_shapes", observed)
        yield run


def described(file: Path) -> str:
    """The nodes in the example's comment."""
    found = re.search(r"--nodes (\S+)", file.read_text())
    return found[1] if found else "4cpu-8G"


def plan(result: Result) -> list[list[str]]:
    lines = result.stderr.partition("Plan: GiB of each device, estimated")[2].splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_the_page_lists_every_example() -> None:
    assert sorted(re.findall(r"^\| \[(\S+\.yaml)\]\(\1\) \|", README, re.MULTILINE)) == [
        file.name for file in FILES
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_example_is_sound_and_finds_room(file: Path, check: Check) -> None:
    result = check(file, described(file))
    assert result.exit_code == 0, result.stderr
    for row in plan(result):
        assert float(row[8]) <= float(row[9]), row
    assert "Without a worker" not in result.stderr, "a node that nothing uses"


@pytest.mark.parametrize(
    ("name", "nodes", "complaint"),
    [
        ("deepseek-r1-mtp.yaml", "8xH100-80G", "16 ranks of 1 GPU each"),
        ("deepseek-r1-mtp.yaml", "2x8xL40S-48G", "the target have room for|the target need"),
        ("stages.yaml", "2x8xL40S-48G", "ranks 8 to 15 of the target have room for 0 tokens"),
        ("llama4-eagle3.yaml", "8xH100-80G", "on nodes with H200, all on one node"),
        ("drafter-nodes.yaml", "4xH100-80G", "no place for the"),
        ("single-gpu.yaml", "1xL4-24G", "rank 0 of the target need"),
    ],
)
def test_what_is_too_small_is_named(name: str, nodes: str, complaint: str, check: Check) -> None:
    result = check(ROOT / "examples" / name, nodes)
    assert result.exit_code == 1, result.stderr
    assert re.search(complaint, result.stderr), result.stderr


def test_deepseek_s_estimate_is_the_published_size(check: Check) -> None:
    """671 billion parameters, in FP8 but for embeddings, norms and routers; 576 latent values a
    layer, of the MTP module as well."""
    file = ROOT / "examples" / "deepseek-r1-mtp.yaml"
    rows = plan(check(file, described(file)))
    assert [row[:3] for row in rows] == [
        ["node 0 (H100)", "GPU 0-7", "target 0-7"],
        ["node 1 (H100)", "GPU 0-7", "target 8-15"],
    ]
    weights, kv, tokens = float(rows[0][3]), float(rows[0][7]), int(rows[0][10].replace(",", ""))
    assert 671e9 / 16 < weights * 2**30 < 1.06 * 671e9 / 16
    assert kv * 2**30 / tokens == pytest.approx(2 * 62 * 576, rel=1e-3)


@pytest.mark.parametrize(("name", "overlay"), IN_K8S.items())
def test_the_overlay_has_the_example_s_settings(name: str, overlay: str) -> None:
    """For all but the CPUs, where a pod has limits that a machine has not."""
    assert {*IN_K8S, "cpu-demo.yaml"} == {file.name for file in FILES}
    example: dict[str, Any] = yaml.safe_load((ROOT / "examples" / name).read_text())
    path = manifests.OVERLAYS / overlay
    groups = example.pop("serve", {}).get("drafter_groups", [])
    assert yaml.safe_load((path / "args.yaml").read_text()) == example
    (application,) = manifests.serve_config(manifests.load(path))["applications"]
    own = {key: each for key, each in application["args"].items() if key != "serve"}
    assert own == example
    assert application["args"]["serve"].get("drafter_groups", []) == groups
