"""The generated page lists every key of every dialect and is up to date."""

from __future__ import annotations

from outrider.config.compat.table import DIALECTS, Into
from outrider.docs.scripts import compatibility as page


def test_the_page_is_up_to_date():
    assert page.PAGE.read_text(encoding="utf-8") == page.render(), (
        "run: python -m outrider.docs.scripts.compatibility"
    )
    for dialect in DIALECTS:
        for key, entry in dialect.keys.items():
            assert f"`{key}`" in page.render()
            assert not isinstance(entry, Into) or entry.note
