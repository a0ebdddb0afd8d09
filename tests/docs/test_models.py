"""The page of models lists those that tests cover."""

from __future__ import annotations

import re
from pathlib import Path

import outrider
from outrider.workers.model.family import spec
from outrider.workers.model.info import TESTED

PAGE = (Path(outrider.__file__).resolve().parent / "docs" / "models.md").read_text()


def test_every_type_is_listed_where_it_is_served():
    family, rest = PAGE.partition("## Over the bridge")[::2]
    assert set(re.findall(r"^\| `([\w-]+)` \|", family, re.MULTILINE)) == spec._READERS.keys() | {
        "model_type"
    }
    listed = re.findall(r"`([\w-]+)`", rest.partition("## Others")[0])
    assert sorted(listed) == sorted(TESTED - spec._READERS.keys())
