"""Collects the Python source the demo models are trained on, and cuts the held-out prompts.

Duty: list the source files of the standard library and of a fixed set of
permissively licensed packages, record what was taken in ``corpus.json``, split off the
held-out files, and choose stretches of 100 to 300 tokens of whole lines from them.

The split follows the usual hash-bucket rule: a file is held out when a stable
hash of its name falls in bucket 0, so adding a package never moves a file.
"""

import hashlib
import json
import platform
import random
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from transformers import PreTrainedTokenizerBase

DEMO_DIR = Path(__file__).resolve().parent
MANIFEST_PATH = DEMO_DIR / "corpus.json"
HELDOUT_PATH = DEMO_DIR / "heldout.jsonl"
NUM_PROMPTS = 64
NUM_PROMPT_ROUNDS = 6
MIN_PROMPT_TOKENS = 100
MAX_PROMPT_TOKENS = 300

STDLIB = "stdlib"
STDLIB_LICENCE = "PSF-2.0"
HELDOUT_NUM_BUCKETS = 16
MAX_FILE_BYTES = 200_000
MIN_FILE_BYTES = 200
MAX_DIGIT_FRACTION = 0.10

# Package name -> SPDX licence, checked against each package's own metadata.
PACKAGE_LICENCES = {
    "accelerate": "Apache-2.0",
    "aiohttp": "Apache-2.0 AND MIT",
    "anyio": "MIT",
    "attrs": "MIT",
    "click": "BSD-3-Clause",
    "fastapi": "MIT",
    "fsspec": "BSD-3-Clause",
    "httpcore": "BSD-3-Clause",
    "httpx": "BSD-3-Clause",
    "huggingface_hub": "Apache-2.0",
    "jinja2": "BSD-3-Clause",
    "mpmath": "BSD-3-Clause",
    "mypy": "MIT",
    "networkx": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "openai": "Apache-2.0",
    "packaging": "Apache-2.0 OR BSD-2-Clause",
    "pip": "MIT",
    "pydantic": "MIT",
    "pytest": "MIT",
    "ray": "Apache-2.0",
    "requests": "Apache-2.0",
    "rich": "MIT",
    "setuptools": "MIT",
    "starlette": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "typer": "MIT",
    "urllib3": "MIT",
    "uvicorn": "BSD-3-Clause",
    "websockets": "BSD-3-Clause",
}
IMPORT_NAMES = {"attrs": "attr", "pytest": "_pytest"}
# The large packages are capped so that none of them dominates the corpus.
MAX_PACKAGE_BYTES = 1_000_000
SKIPPED_DIRS = frozenset(
    {
        "__pycache__",
        "_distutils",
        "_vendor",
        "distutils",
        "encodings",
        "idle_test",
        "pydoc_data",
        "site-packages",
        "test",
        "testing",
        "tests",
        "thirdparty",
        "thirdparty_files",
        "turtledemo",
    }
)


@dataclass(frozen=True)
class SourceFile:
    """One Python file of the corpus; ``source`` is its machine-independent name."""

    package: str
    source: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Length of the text in UTF-8 bytes."""
        return len(self.text.encode("utf-8"))


def stable_hash(name: str) -> int:
    """Return a 64-bit hash of ``name`` that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8"), digest_size=8).digest(), "big")


def is_held_out(source: str) -> bool:
    """Tell whether the file named ``source`` is kept out of all training."""
    return source.startswith(f"{STDLIB}:") and stable_hash(source) % HELDOUT_NUM_BUCKETS == 0


def package_root(package: str) -> Path | None:
    """Return the folder of an installed package, or None where it is missing."""
    if package == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = util.find_spec(IMPORT_NAMES.get(package, package))
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def package_version(package: str) -> str:
    """Return the version that the corpus table records for ``package``."""
    return platform.python_version() if package == STDLIB else metadata.version(package)


def read_source(path: Path) -> str | None:
    """Return the text of one file, or None where it is not useful training text."""
    if not MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    num_digits = sum(char.isdigit() for char in text)
    return None if num_digits > MAX_DIGIT_FRACTION * len(text) else text


def package_files(package: str) -> list[SourceFile]:
    """Return the usable files of one package, capped, in order of their name's hash."""
    root = package_root(package)
    if root is None:
        return []
    relative_paths = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [path for path in relative_paths if not SKIPPED_DIRS.intersection(path.parts[:-1])]
    kept.sort(key=lambda path: (stable_hash(f"{package}:{path.as_posix()}"), path.as_posix()))
    files: list[SourceFile] = []
    num_bytes = 0
    for path in kept:
        text = read_source(root / path)
        if text is None:
            continue
        file = SourceFile(package, f"{package}:{path.as_posix()}", text)
        num_bytes += file.num_bytes
        if package != STDLIB and num_bytes > MAX_PACKAGE_BYTES:
            break
        files.append(file)
    return files


def collect_files() -> list[SourceFile]:
    """Return every file of the corpus, held-out ones included, without duplicates.

    The standard library comes first, so that a copy of one of its files in a
    package is the one dropped.
    """
    files: list[SourceFile] = []
    seen: set[str] = set()
    for package in [STDLIB, *sorted(PACKAGE_LICENCES)]:
        for file in package_files(package):
            digest = hashlib.sha256(file.text.encode("utf-8")).hexdigest()
            if digest not in seen:
                seen.add(digest)
                files.append(file)
    return files


def training_files(files: Iterable[SourceFile]) -> list[SourceFile]:
    """Return the files that may be trained on."""
    return [file for file in files if not is_held_out(file.source)]


def heldout_files(files: Iterable[SourceFile]) -> list[SourceFile]:
    """Return the held-out files, sorted by name."""
    return sorted((file for file in files if is_held_out(file.source)), key=lambda f: f.source)


def write_manifest(files: list[SourceFile]) -> None:
    """Record packages, versions, licences and sizes in ``corpus.json``."""
    packages = []
    for package in sorted({file.package for file in files}):
        members = [file for file in files if file.package == package]
        train = training_files(members)
        packages.append(
            {
                "package": package,
                "version": package_version(package),
                "licence": PACKAGE_LICENCES.get(package, STDLIB_LICENCE),
                "num_training_files": len(train),
                "num_training_bytes": sum(file.num_bytes for file in train),
            }
        )
    manifest = {
        "packages": packages,
        "num_training_bytes": sum(file.num_bytes for file in training_files(files)),
        "heldout_sources": [file.source for file in heldout_files(files)],
    }
    MANIFEST_PATH.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def cut_prompt(text: str, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> str | None:
    """Cut one prompt of whole lines out of ``text``, or None where it is too short."""
    lines = text.splitlines(keepends=True)
    target_num_tokens = rng.randint(MIN_PROMPT_TOKENS + 20, MAX_PROMPT_TOKENS - 40)
    starts = [
        index
        for index, line in enumerate(lines)
        if line.startswith(("def ", "class ", "    def ", "@", "import ", "from "))
    ]
    if not starts:
        return None
    start = rng.choice(starts)
    num_tokens = 0
    for end in range(start, len(lines)):
        num_tokens += len(tokenizer.encode(lines[end], add_special_tokens=False))
        if num_tokens > MAX_PROMPT_TOKENS:
            return None
        if num_tokens >= target_num_tokens and lines[end].strip():
            # No final line break: the model continues with one and the indentation.
            return "".join(lines[start : end + 1]).rstrip()
    return None


def write_prompts(files: list[SourceFile], tokenizer: PreTrainedTokenizerBase) -> int:
    """Cut the held-out prompts into ``heldout.jsonl``; return how many were written."""
    rng = random.Random(0)
    candidates = heldout_files(files)
    prompts: list[dict[str, str]] = []
    first_lines: set[str] = set()
    for _ in range(NUM_PROMPT_ROUNDS):
        for file in candidates:
            text = cut_prompt(file.text, tokenizer, rng)
            if text is None or len(prompts) == NUM_PROMPTS:
                continue
            first_line = text.splitlines()[0]
            if first_line not in first_lines:
                first_lines.add(first_line)
                prompts.append({"source": file.source, "text": text})
    prompts.sort(key=lambda prompt: prompt["source"])
    lines = [json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts]
    HELDOUT_PATH.write_text("".join(lines), encoding="utf-8")
    return len(prompts)


def load_prompts() -> list[str]:
    """Return the texts of the held-out prompts."""
    lines = HELDOUT_PATH.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]
