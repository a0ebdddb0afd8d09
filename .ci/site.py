"""mkdocs hooks: pages that lie beside `docs/` become part of the site, and links lead to them.

Markdown files of the project that a page links to (`../ARCHITECTURE.md`) are added under
`project/`; links to other files of the project are shown as their names.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = (
    "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md",
    "bench/RESULTS.md", "demo/README.md", "examples/README.md", "k8s/README.md",
)  # fmt: skip
_LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
_UNTESTED = re.compile(r"^(```\w+) notest$", re.MULTILINE)  # to mkdocs, no start of a block
_IMAGES = (".png", ".svg")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and the images of the project that lie outside `docs/`."""
    from mkdocs.structure.files import File

    images = [path for path in (ROOT / "bench").rglob("*") if path.suffix in _IMAGES]
    names = [*OUTSIDE, *(path.relative_to(ROOT).as_posix() for path in images)]
    for name in names:
        if (ROOT / name).is_file():
            files.append(File.generated(config, f"project/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Links of the repository as links of the site."""
    source = page.file.src_uri
    outside = source.startswith("project/")
    home = source.removeprefix("project/") if outside else f"docs/{source}"

    def rewritten(found: re.Match[str]) -> str:
        image, text, target, anchor = (part or "" for part in found.groups())
        if not target or ":" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), target))
        inside = path.removeprefix("docs/")
        uri = inside if inside != path else f"project/{path}"
        if files.get_file_from_path(uri) is None and (ROOT / path).exists():
            return text  # a file of the repository that is no page
        relative = posixpath.relpath(uri, posixpath.dirname(source) or ".")
        return f"{image}[{text}]({relative}{anchor})"

    return _LINK.sub(rewritten, _UNTESTED.sub(r"\1", markdown))
