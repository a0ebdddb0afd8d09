"""The README and the docs, and the code that they show."""

from __future__ import annotations

import re
from pathlib import Path

import outrider

ROOT = Path(outrider.__file__).resolve().parent
PAGES = [
    *(ROOT / name for name in ("README.md", "bench/README.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
