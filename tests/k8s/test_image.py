"""The Dockerfile, as far as it can be read without an engine that builds it."""

from __future__ import annotations

import fnmatch
import re
import shlex

from outrider.tests.helpers.kubernetes import manifests

TEXT = (manifests.ROOT / "Dockerfile").read_text(encoding="utf-8")
# One instruction a line: comments gone, continued lines joined.
LINES = [
    line.strip()
    for line in re.sub(
        r"\\\n", " ", re.sub(r"^\s*#.*\n", "", TEXT, flags=re.MULTILINE)
    ).splitlines()
    if line.strip()
]
IGNORED = (manifests.ROOT / ".dockerignore").read_text(encoding="utf-8").split()


def instructions(name: str) -> list[str]:
    """The arguments of every instruction of one kind."""
    return [line.split(maxsplit=1)[1] for line in LINES if line.split()[0] == name]


def test_the_last_user_is_not_root_and_given_by_number() -> None:
    users = instructions("USER")
    assert users
    assert users[-1].isdigit()
    assert int(users[-1]) > 0


def test_the_base_pins_python_and_can_be_replaced() -> None:
    (base,) = [line for line in instructions("ARG") if line.startswith("BASE_IMAGE=")]
    assert re.fullmatch(r"BASE_IMAGE=python:3\.1[0-2]\.\d+-\S+", base)
    assert instructions("FROM")[0] == "${BASE_IMAGE} AS base"


def test_no_package_host_is_named() -> None:
    assert re.search(r"https?://|--index-url|--extra-index-url", TEXT) is None


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    sources = [
        source
        for line in instructions("COPY")
        if "--from=" not in line
        for source in shlex.split(line)[:-1]
    ]
    assert sources
    for source in sources:
        assert (manifests.ROOT / source).exists()
        assert not any(fnmatch.fnmatch(source, pattern) for pattern in IGNORED)


def test_the_package_s_own_files_are_not_ignored() -> None:
    for needed in ("pyproject.toml", "README.md", "LICENSE", "py.typed", "cluster", "workers"):
        assert needed not in IGNORED


def test_every_argument_is_declared() -> None:
    declared = {line.split("=")[0] for line in instructions("ARG")}
    used = set(re.findall(r"\$\{(\w+)\}", "\n".join(LINES)))
    assert used == declared


def test_pythons_entry_points_are_on_path_in_login_shells_too() -> None:
    (path,) = re.findall(r"PATH=(\S+):\$PATH' > /etc/profile\.d/\S+\.sh", TEXT)
    assert any(f"PATH={path}:$PATH" in line for line in instructions("ENV"))
    assert f"COPY --from=build {path.removesuffix('/bin')} " in TEXT


def test_the_demo_models_are_where_the_manifest_looks() -> None:
    demo = manifests.load(manifests.DEMO)
    (app,) = manifests.serve_config(demo)["applications"]
    in_image, name = app["args"]["model"].rsplit("/", 1)
    assert re.search(rf"ln -s \S+/outrider/demo/models {in_image}$", TEXT, re.MULTILINE)
    assert (manifests.ROOT / "demo" / "models" / name / "config.json").is_file()
