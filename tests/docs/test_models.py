"""The page of models has every type that tests compare, and its table is that of the code."""

from __future__ import annotations

import re
from typing import Any

import pytest

from outrider.config.files import SERVED_AS
from outrider.docs.scripts import models as script
from outrider.workers.model.checkpoint.gguf_checkpoint import ARCHITECTURES
from outrider.workers.model.family import spec
from outrider.workers.model.info import TESTED, TESTED_ALONE

PAGE = script.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """The page's table: columns by type."""
    names = [name.strip("`") for name in script._COLUMNS]
    lines = PAGE.partition(script.BEGIN)[2].partition(script.END)[0].splitlines()
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines[3:]]
    return {row[0].strip("| `"): dict(zip(names, row, strict=True)) for row in cells}


def test_the_table_is_up_to_date():
    assert script.written(PAGE) == PAGE, "run: python -m outrider.docs.scripts.models"


def test_every_type_that_is_tested_has_a_row_where_it_is_served(rows):
    family = spec._READERS.keys() | SERVED_AS.keys()
    assert rows.keys() == TESTED | TESTED_ALONE | SERVED_AS.keys()
    assert script.MODELS.keys() == family
    for kind, row in rows.items():
        assert row["forward"] == ("family" if kind in family else "bridge"), kind
        assert bool(row["states"]) == (kind in spec._RECURRENT), kind
        assert bool(row["stages"]) == (kind in family), kind


def test_every_architecture_of_files_is_in_the_table(rows):
    named = {name for row in rows.values() for name in re.findall(r"`(.+?)`", row["GGUF"])}
    assert named == ARCHITECTURES.keys()


def test_heads_are_of_types_that_are_served():
    assert script.HEADS.keys() <= TESTED | TESTED_ALONE | SERVED_AS.keys()
