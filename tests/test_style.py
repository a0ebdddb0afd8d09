"""The habits of the house that a program can check."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest

import outrider
from outrider.tests.helpers.files import ROOT, SOURCES, TESTS, relative

# Which folder may import which of ours (ARCHITECTURE.md, "Layout").
LAYERS = {
    "errors.py": set(),
    "compiled.py": set(),
    "workers/transport/socket_channel.py": set(),
    "config": {"config", "errors"},
    "scheduler": {"config", "errors", "scheduler"},
    "drafters": {"compiled", "config", "errors", "scheduler", "drafters"},
    "workers": {"compiled", "config", "errors", "scheduler", "drafters", "workers"},
    "training": {"config", "errors", "scheduler", "drafters", "workers", "training"},
    "engine": {"config", "errors", "scheduler", "drafters", "workers", "engine"},
    "cluster": {"config", "errors", "scheduler", "drafters", "workers", "engine", "cluster"},
    "bench": {
        "config", "errors", "scheduler", "drafters", "workers", "engine", "cluster", "bench",
        "client",
    },
    "demo": {"training", "demo"},
    "cli": {
        "config", "errors", "scheduler", "drafters", "workers", "training", "engine", "cluster",
        "bench", "cli",
    },
    "client.py": set(),
    "k8s": set(),
    "docs": {"config", "scheduler", "workers", "cluster", "serve_llm", "data"},
    "__init__.py": {"scheduler", "engine", "cluster"},
    "__main__.py": {"cli"},
    "serve_llm.py": {"cluster"},
    "data.py": {"cluster"},
}  # fmt: skip
# Pages that describe the present tree; a changelog and records of measurements describe past ones.
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *(ROOT / folder / "README.md" for folder in ("bench", "demo", "examples", "k8s")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOREIGN = {
    "sglang/", "tensorrt_llm/", "vllm/",  # other projects' sources
    "openai.", "serve.",  # a client's package; a section of the configuration
    ".clients/", "OUT/training/", "project/", "report.md",  # written by a command
    "README_WEIGHTS.md", "phrasebook.py",  # DeepSeek's; a user's
}  # fmt: skip
PUBLIC = {*outrider.__all__}  # what the package itself exports
VERSION = "__version__"  # a constant: every layer may name it
USES_PUBLIC = {"bench", "demo", "cli", "docs"}  # the last: programs of users
RAY_FREE = {"scheduler", "drafters", "workers", "training", "engine", "config", "errors.py"}
LONGEST_FILE, LONGEST_FUNCTION = 800, 80  # a file holds one idea, of 100 to 700 lines


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Garbage is not looked for in syntax trees, which takes longer than all else here."""
    gc.disable()
    yield
    parsed.cache_clear()
    gc.enable()


def each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Makes the check of one file a test of all: a test for each costs more than its check."""

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            problems = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    problems.append(f"{relative(path)}: {error}")
            assert not problems, "\n".join(problems)

        test.__doc__ = check.__doc__
        return test

    return decorate


def imports(path: Path) -> list[str]:
    """Absolute dotted names of what a file imports, our own as `outrider...`."""
    package = ("outrider", *path.relative_to(ROOT).parent.parts)
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{stem}.{alias.name}" for alias in node.names]
    return found


@each(SOURCES)
def test_layers(path):
    top = path.relative_to(ROOT).parts[0]
    allowed = LAYERS[top] | {VERSION} | (PUBLIC if top in USES_PUBLIC else set())
    for name in imports(path):
        if name.startswith("outrider."):
            assert name.split(".")[1] in allowed, f"{top} must not import {name}"
        if top in RAY_FREE:
            assert name.split(".")[0] not in ("ray", "fastapi"), f"{top} must not import {name}"
        if top == "scheduler":
            assert name.split(".")[0] != "torch", "the scheduler runs without torch"


@each(SOURCES)
def test_sizes_and_docstrings(path):
    text = path.read_text()
    module = parsed(path)
    assert not text.strip() or ast.get_docstring(module), "a module says what it is for"
    assert len(text.splitlines()) <= LONGEST_FILE
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines"
            names = {arg.arg for arg in [*node.args.args, *node.args.kwonlyargs]}
            assert not names & {"p", "q"}, f"{node.name}: say target_probs and draft_probs"


@each(SOURCES)
def test_no_mutable_globals(path):
    for node in parsed(path).body:
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if isinstance(value, (ast.List, ast.Dict, ast.Set)):
                constant = all(re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__all__", name) for name in names)
                assert constant, f"{names} is a mutable global"


def test_layers_point_one_way():
    """The table itself has no cycle, and each folder in it exists."""
    done: set[str] = set()
    while len(done) < len(LAYERS):
        ready = {top for top, below in LAYERS.items() if top not in done}
        ready = {top for top in ready if {at_top(name) for name in LAYERS[top]} <= done | {top}}
        assert ready, f"a cycle among {set(LAYERS) - done}"
        done |= ready
    assert all((ROOT / top).exists() for top in LAYERS)


def test_no_imports_go_in_a_circle():
    """Of modules, deferred imports and those for types included; the package itself left out."""
    by_name = {".".join(["outrider", *module_of(path)]): path for path in SOURCES}
    left = {
        name: {found for found in map(partial(module_in, by_name), imports(path)) if found}
        for name, path in by_name.items()
    }
    while ends := {name for name, needs in left.items() if not needs - {name} & left.keys()}:
        left = {name: needs - ends for name, needs in left.items() if name not in ends}
    assert not left


def module_of(path: Path) -> list[str]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return [*parts[: -1 if parts[-1] == "__init__" else None]]


def module_in(by_name: dict[str, Path], name: str) -> str:
    """The module that has a name, or is it; "" for the package itself and for others' modules."""
    while name not in by_name and "." in name:
        name = name.rpartition(".")[0]
    return "" if name == "outrider" or name not in by_name else name


def at_top(name: str) -> str:
    return name if name in LAYERS else f"{name}.py"


@each(TESTS)
def test_tests_mirror_the_source(path):
    """A test lies in the folder of what it tests; what tests share lies in `helpers/`."""
    folder = path.parent.relative_to(ROOT / "tests")
    if folder.parts[:1] != ("helpers",):
        assert path.name.startswith("test_") or path.name == "conftest.py", "helpers/ is for this"
        assert folder.as_posix() == "gpu" or (ROOT / folder).is_dir(), f"no {folder}/ to test"


DRAFTER_NAMES = re.compile(
    r"ngram|(?<![a-z])n_gram|lookahead|medusa|redrafter|eagle|mtp|prompt_?lookup|draft_?target",
    re.IGNORECASE,
)
# Where a drafter may be named: its own code, its options and what trains it; and who must.
NAMED_IN = {
    "drafters/": "the drafters",
    "config/": "their sections, and other servers' names of them",
    "training/methods/": "what trains them",
    "training/options.py": "the options of what trains them, and their table",
    "bench/": "compares them by name",
    "demo/run.py": "shows one",
    "demo/train_heads.py": "trains the shipped heads",
    "cli/app.py": "`outrider ngram` is a command",
    "cli/ngram.py": "that command: it reads and writes the tables' files",
    "cli/options.py": "options named after the drafters, as in llama.cpp, and help with examples",
    "docs/examples/": "programs of users",
    "docs/scripts/": "the pages that list their keys",
    "cli/bench.py": "the baseline of transformers has a parameter of this name",
    "workers/model/bridge.py": "tensors of a checkpoint",
}


def words_of(path: Path) -> list[tuple[int, str]]:
    """Identifiers, imported modules and strings of a file, without its docstrings."""
    module = parsed(path)
    plain = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(module):
        at = getattr(node, "lineno", 0)
        for name in ("id", "attr", "name", "arg", "asname", "module"):
            if isinstance(getattr(node, name, None), str):
                found.append((at, getattr(node, name)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in plain:
            found.append((at, node.value))
    return found


def named_drafters(path: Path) -> list[str]:
    hits = [(at, word) for at, word in words_of(path) if DRAFTER_NAMES.search(word)]
    return [f"{relative(path)}:{at}: {word!r}" for at, word in hits]


@each(TESTS)
def test_tests_share_code_through_helpers(path):
    """No test imports another, or runs another's fixtures by accident."""
    found = re.findall(r"^from (\S+) import", path.read_text(), re.MULTILINE)
    assert not [name for name in found if name.rpartition(".")[2].startswith("test_")]


@each(SOURCES)
def test_drafters_are_named_in_their_own_folder_only(path):
    if not relative(path).startswith(tuple(NAMED_IN)):
        assert not named_drafters(path), "a drafter's name outside of its own code"


def test_files_beside_the_packages_have_names_of_their_kind():
    """What a command has written where it ran is none of them."""
    known = {"LICENSE", "Makefile", "Dockerfile"}
    beside = [each for each in ROOT.iterdir() if each.is_file() and not each.name.startswith(".")]
    assert not [each.name for each in beside if not each.suffix and each.name not in known]


def test_no_exemption_is_idle():
    for prefix in NAMED_IN:
        assert any(named_drafters(path) for path in SOURCES if relative(path).startswith(prefix))


@each(SOURCES)
def test_every_auto_class_is_passed_trust_remote_code(path):
    for node in ast.walk(parsed(path)):
        call = node.func if isinstance(node, ast.Call) else None
        if not isinstance(call, ast.Attribute) or not isinstance(call.value, ast.Name):
            continue
        if call.attr in ("from_pretrained", "from_config") and call.value.id.startswith("Auto"):
            passed = {keyword.arg for keyword in node.keywords}
            assert "trust_remote_code" in passed, f"line {node.lineno}"


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a page, or of a Python file's docstrings and comments."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for node in ast.walk(parsed(path)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield from enumerate(value.value.splitlines(), node.lineno)
    for at, line in enumerate(text.splitlines(), 1):
        if comment := COMMENT.search(line):
            yield at, comment[1]


COMMENT = re.compile(r"(?:^|\s)#\s(.*)")
PATH = re.compile(r"(?<![\w./:*{}<>~-])(?:[\w-]+/)*[\w-]+\.(?:py|md)\b(?![.\w])")
FOLDER = re.compile(r"(?:\.?[\w-]+/)+")
DOTTED = re.compile(r"(outrider\.)?((?:[a-z_]\w*\.)+)([A-Za-z_]\w*)(?:\(.*\))?")
SUFFIXES = {"py", "md", "json", "yaml", "safetensors", "pt", "png"}  # `config.json` is a file


@cache
def module_names() -> dict[str, list[set[str]]]:
    """Every module under its full and its shortened dotted names: the identifiers in it."""
    found: dict[str, list[set[str]]] = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        names = {word for _, word in words_of(path) if word.isidentifier()}
        if path.name == "__init__.py":
            names |= {beside.stem for beside in path.parent.iterdir()}
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), []).append(names)
    return found


@cache
def file_tails() -> set[str]:
    """Every file and folder of the project, under its full and its shortened paths."""
    files = [*SOURCES, *TESTS, *PAGES, *(ROOT / ".ci").glob("*"), *ROOT.glob("*.md")]
    files += [
        *(ROOT / "bench").glob("*.md"),
        *(ROOT / "demo").rglob("*/"),
        *(ROOT / "k8s").rglob("*"),
    ]
    tails = set()
    for file in files:
        parts = file.relative_to(ROOT).parts
        for end in range(1, len(parts) + 1):
            slash = "" if end == len(parts) and not file.is_dir() else "/"
            tails |= {"/".join(parts[start:end]) + slash for start in range(end)}
    return tails


def stale_mentions(path: Path, line: str) -> list[str]:
    """Files, folders and `module.name`s in a line of prose of `path` that do not exist.

    A path in a Python file starts at its own folder or one above it; on a page, anywhere.
    """
    code = path.suffix == ".py"
    bases = [folder for folder in path.parents if folder.is_relative_to(ROOT)] if code else []
    stale = [
        name
        for name in (PATH.findall(line) if ".py" in line or ".md" in line else ())
        if not (
            any((base / name).exists() for base in bases) or (not code and name in file_tails())
        )
    ]
    for quoted in re.findall(r"`([^`]+)`", line):
        dotted = DOTTED.fullmatch(quoted)
        if FOLDER.fullmatch(quoted):
            stale += [] if quoted in file_tails() else [quoted]
        elif dotted and dotted[3] not in SUFFIXES and (code or path.name == "ARCHITECTURE.md"):
            module, name = dotted[2][:-1], dotted[3]
            modules = module_names().get(module, [])
            known = f"{module}.{name}" in module_names() or any(name in names for names in modules)
            stale += [] if known or not modules else [quoted]
    return [name for name in stale if not name.startswith(tuple(FOREIGN))]


@each([*SOURCES, *TESTS, *PAGES])
def test_what_prose_mentions_exists(path):
    """Paths, and names in our modules, in docstrings, comments and pages."""
    found = [
        f"line {at}: {name}" for at, line in prose(path) for name in stale_mentions(path, line)
    ]
    assert not found, ", ".join(found)


def test_stale_mentions_are_found():
    here = ROOT / "workers" / "target.py"
    good = "`seats.py`, workers/verify/rules.py, `workers/ops/`, `rules.Coupled`, `vllm/x.py`"
    stale = ["`seat.py`", "workers/verify/coupled.py", "`workers/op/`", "`rules.no_such_name`"]
    assert stale_mentions(here, good) == []
    for mention in stale:
        assert stale_mentions(here, mention) == [mention.strip("`")]
        assert stale_mentions(ROOT / "ARCHITECTURE.md", mention) == [mention.strip("`")]
