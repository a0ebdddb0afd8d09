"""Drawing by matplotlib, which is loaded when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def figure(num_rows: int, num_columns: int, width: float | None = None) -> tuple[Any, Any]:
    """A figure and its axes, by row and column.

    Args:
        width: in inches; default: by the number of columns.
    """
    # Not at the top: a run that cannot begin does not wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (width or 3.4 * num_columns + 0.6, 3.4 * num_rows)
    made = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(made)
    return made, made.subplots(num_rows, num_columns, squeeze=False)


def save(made: Any, path: Path) -> Path:
    """Writes a figure; the suffix of `path` is the format."""
    made.savefig(path, dpi=110)
    return path
