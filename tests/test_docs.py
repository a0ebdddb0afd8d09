"""What the README and the docs show is true: settings load, commands parse, Python runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import outrider
from outrider.config import EngineConfig
from outrider.config.compat.translate import translate_engine
from outrider.errors import ConfigError
from outrider.tests.helpers.pages import BLOCK, PAGES, ROOT


def blocks(*languages: str) -> list[tuple[Path, str]]:
    """Code blocks of all pages in one of the languages, without those marked `notest`."""
    return [
        (page, text)
        for page in PAGES
        for language, info, text in BLOCK.findall(page.read_text())
        if language in languages and "notest" not in info
    ]


def name(value: object) -> str:
    return value.relative_to(ROOT).as_posix() if isinstance(value, Path) else ""


@pytest.mark.parametrize(("page", "text"), blocks("yaml"), ids=name)
def test_settings_load(page, text):
    data = yaml.safe_load(text)
    data.pop("serve", None)
    EngineConfig.load({"model": "demo/models/target", **data})


def commands() -> list[tuple[Path, str]]:
    return [
        (page, line)
        for page, text in blocks("sh", "bash")
        for line in text.replace("\\\n", " ").splitlines()
        if line.startswith("outrider ")
    ]


@pytest.mark.parametrize(("page", "line"), commands(), ids=name)
def test_commands_parse(page, line):
    import typer.main

    from outrider.cli.app import app

    command, words = typer.main.get_command(app), shlex.split(line, comments=True)[1:]
    context = command.make_context("outrider", list(words))
    while getattr(context.command, "commands", None):
        left = [*context._protected_args, *context.args]
        if not left and context.command.invoke_without_command:
            break  # a group that is a command of its own
        word, sub, rest = context.command.resolve_command(context, left)
        context = sub.make_context(word, rest, parent=context)


@pytest.mark.slow
def test_python_runs(tmp_path):
    """Every Python block, from the project's root, each as a script; in one process, one by one."""
    scripts = []
    for number, (page, text) in enumerate(blocks("python")):
        scripts.append(tmp_path / f"{name(page).replace('/', '-')}-{number}.py")
        scripts[-1].write_text(text)
    assert scripts
    program = (
        "import runpy, sys\nfor script in sys.argv[1:]: runpy.run_path(script, None, '__main__')"
    )
    subprocess.run([sys.executable, "-c", program, *scripts], cwd=ROOT, check=True, timeout=280)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def pages_of(entries: list) -> list[str]:
    """Every page of a navigation."""
    found = []
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += pages_of(value) if isinstance(value, list) else [value]
    return found


def test_the_site_lists_every_page():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = pages_of(settings["nav"])
    assert len(listed) == len(set(listed))
    own = {page for page in listed if not page.startswith("project/")}
    docs = ROOT / "docs"
    assert own == {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    """A broken link or anchor is an error; no page, style or script has a foreign address."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    foreign = re.compile(r"<(?:script|img|link)[^>]*(?:src|href)=.?(https?:)?//")
    for page in tmp_path.rglob("*.html"):
        found = foreign.search(page.read_text())
        assert found is None, (page, found)


def test_the_landing_page_and_the_readme_state_the_same_limits():
    """Beside what the page is for, how it is installed and which version it is about."""
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/README.md")]
    limits = [page.partition("## Limits\n")[2].partition("\n## ")[0] for page in pages]
    words = [re.sub(r"\]\([^)]*\)", "]", text) for text in limits]
    assert words[0] == words[1] != ""
    assert outrider.__version__ in limits[0]
    for part in ("**For whom.**", "**Install.**", f"**Version.** {outrider.__version__}"):
        assert part in pages[1]
    python = re.search(r'requires-python = ">=(.*),<3.(.*)"', (ROOT / "pyproject.toml").read_text())
    assert f"Python {python[1]} to 3.{int(python[2]) - 1}" in limits[0]


@pytest.mark.parametrize(
    "limit",
    [
        {"lora_modules": ["a=/x"], "forward": "bridge"},
        {"pipeline_parallel_size": 2, "forward": "bridge"},
        {"cpu_offload_gb": 4},
    ],
    ids=str,
)
def test_what_the_limits_refuse_is_refused(limit):
    field = next(iter(limit))
    with pytest.raises(ConfigError, match=field):
        EngineConfig.load(translate_engine({"model": "m", **limit}))
