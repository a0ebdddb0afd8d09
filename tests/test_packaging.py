"""The wheel holds every module and asset of the tree, and importing the package stays cheap."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import outrider

ROOT = Path(outrider.__file__).resolve().parent
APART = {"tests", "k8s", "examples", "build", "dist"}  # beside the package, not in it
ASSETS = {
    ".py",
    ".json",
    ".jsonl",
    ".yaml",
    ".safetensors",
    ".typed",
    ".jinja",
    ".html",
    ".css",
    ".js",
    ".svg",
}


def tree() -> list[Path]:
    """Files that belong into the wheel, relative to the root."""
    found = []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith((".", "__pycache__")) for part in parts)
        if path.is_file() and not hidden and parts[0] not in APART and "work" not in parts:
            found.append(path.relative_to(ROOT))
    return found


@pytest.mark.slow
def test_wheel_holds_the_tree(tmp_path):
    source = tmp_path / "source"
    for name in tree():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation",
         "--quiet", "--wheel-dir", tmp_path, source],
        check=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("outrider-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("outrider/")}
    wanted = {
        f"outrider/{name.as_posix()}"
        for name in tree()
        if name.suffix in ASSETS and name.parts[0] != "docs"
    }
    assert wanted - held == set()
    assert not [name for name in held if {"work", "tests"} & {*name.split("/")}]


def test_the_list_of_packages_has_what_exists():
    """An editable installation fails where a package is listed that is gone."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {path.parent for path in tree() if path.name == "__init__.py"}
    assert sorted(listed) == sorted(".".join(("outrider", *each.parts)) for each in packages)


def test_what_gpus_need_has_two_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras["cuda"] == extras["gpu"]


def test_version_is_the_same_everywhere():
    result = subprocess.run(
        [sys.executable, "-m", "outrider", "--version"], capture_output=True, text=True, check=True
    )
    assert outrider.__version__ in result.stdout
    assert f'version = "{outrider.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_import_loads_neither_torch_nor_ray():
    code = "import sys, outrider; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "ray", "transformers", "numpy"} & set(result.stdout.split())


def test_every_module_imports_without_a_gpu_or_a_cluster():
    modules = [
        "outrider." + ".".join(path.with_suffix("").parts)
        for path in tree()
        if path.suffix == ".py" and path.name not in ("__init__.py", "__main__.py")
    ]
    for module in modules:
        importlib.import_module(module)
