"""`docs/gpu.md`: its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import outrider
from outrider.workers.device_step.chains import ChainSizes
from outrider.workers.device_step.seats import MAX_COUNT_BYTES
from outrider.workers.device_step.shape import MAX_NODES, MAX_QUERY_LEN, ROWS, sizes, smallest
from outrider.workers.verify.device_settings import MAX_BIASES, MAX_ENDS, MAX_TOP

PAGE = (Path(outrider.__file__).parent / "docs" / "gpu.md").read_text()
PLENTY = 1024  # seats


def rows_below(heading: str) -> list[list[str]]:
    """The cells of a table's rows."""
    lines = PAGE.partition(f"| {heading} |")[2].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def most_seqs(num_nodes: int, of_head: int = 0) -> int:
    """Sequences of the largest shape with room for such drafts, of a head for all of them."""
    fitting = [
        size
        for size, length, rows in sizes(PLENTY, of_head)
        if length > num_nodes and (not of_head or rows == size * length)
    ]
    return max(fitting, default=0)


def test_shapes_without_a_head():
    assert f"padded to the next of {len(ROWS)} numbers" in PAGE
    assert f"more than {ROWS[-1]} in a step, or a draft of {MAX_QUERY_LEN} nodes" in PAGE
    assert max(rows for _, _, rows in sizes(PLENTY)) == ROWS[-1]
    assert most_seqs(0) == most_seqs(MAX_QUERY_LEN - 1) == ROWS[-1]
    assert most_seqs(MAX_QUERY_LEN) == 0
    assert min(each for each in ROWS if each >= 17 * 5) == 88
    assert "17 sequences with chains of 4 nodes are 85 rows and run as 88" in PAGE


def test_shapes_of_a_draft_model():
    sizes = ChainSizes(PLENTY, 4, 4096, 100, 16)
    assert f"graphs, {len(sizes.shapes)} at most, hold up to {sizes.seqs[-1]} sequences" in PAGE


def test_shapes_with_a_head():
    rows = rows_below("nodes of a draft, at most | sequences with a whole draft | with half of one")
    assert len(rows) == 6
    for nodes, whole, half in (map(int, row) for row in rows):
        assert most_seqs(nodes, nodes) == whole
        assert most_seqs(-(-nodes // 2), nodes) == half
        assert most_seqs(0, nodes) == ROWS[-1]
    assert int(rows[-1][0]) == MAX_NODES
    assert "64 requests of which 16 draft a chain of 4 nodes are 128 rows and run as 128" in PAGE
    assert smallest(64, 5, 64 + 16 * 4, PLENTY, 4) == (64, 5, 128)
    assert "as long as these are granted 448 nodes together" in PAGE
    assert smallest(64, 33, 64 + 448, PLENTY, 32) == (64, 33, 512)
    assert smallest(64, 33, 64 + 449, PLENTY, 32) is None


def test_limits_of_a_request():
    limits = dict(rows_below("request or draft | limit"))
    assert limits["logit biases"] == f"more than {MAX_BIASES} in a request"
    assert limits["`min_tokens`"] == f"more than {MAX_ENDS} end tokens"
    assert limits["`logprobs`"] == f"more than {MAX_TOP} in a request"
    assert MAX_COUNT_BYTES == 1 << 30


def test_reasons_are_those_of_the_code():
    """Every quoted reason stands in a source file."""
    root = Path(outrider.__file__).parent / "workers"
    sources = "".join(path.read_text() for path in root.rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    reasons = [row[2] for row in rows_below("cause | way | reported as")]
    quoted = [text for each in reasons for text in each.split("`")[1::2] if " " in text]
    assert len(quoted) == 9
    for text in quoted:
        parts = re.split(r"\.\.\.|'torch'|255", text)
        assert all(part.strip("'") in sources for part in parts), text
