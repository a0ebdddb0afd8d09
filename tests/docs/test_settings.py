"""The generated page lists every key, each with a description, and is up to date."""

from __future__ import annotations

import pytest

from outrider.config import SECTIONS, Strict
from outrider.docs.scripts import settings
from outrider.training import options as training_options


def models(kind: type[Strict]) -> set[type[Strict]]:
    return {kind}.union(*(models(each) for each in kind.__subclasses__()))


def test_the_page_is_up_to_date():
    assert settings.PAGE.read_text() == settings.render(), (
        "python -m outrider.docs.scripts.settings"
    )


def test_every_key_has_a_description():
    assert training_options
    kinds = [each for each in models(Strict) if each.__module__.startswith("outrider.")]
    without = {
        f"{kind.__name__}.{name}"
        for kind in kinds
        if ".tests." not in kind.__module__
        for name, field in kind.model_fields.items()
        if not field.description and name not in ("decoding_type", "hash")
    }
    assert not without


@pytest.mark.parametrize("name", SECTIONS)
def test_every_drafter_has_a_section_with_its_keys(name):
    text = settings.render().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    own = SECTIONS[name].__annotations__.keys() - {"decoding_type"}
    assert own <= {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
