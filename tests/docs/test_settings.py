"""The generated pages list every key, each with a description, and are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.config import SECTIONS, Strict
from outrider.docs.scripts import settings
from outrider.scheduler.sampling import SamplingParams, StructuredOutputs
from outrider.training import options as training_options


def models(kind: type[Strict]) -> set[type[Strict]]:
    return {kind}.union(*(models(each) for each in kind.__subclasses__()))


@pytest.mark.parametrize("page", settings.PAGES, ids=lambda page: page.name)
def test_the_page_is_up_to_date(page):
    assert page.read_text() == settings.PAGES[page](), "python -m outrider.docs.scripts.settings"


@pytest.mark.parametrize("kind", [SamplingParams, StructuredOutputs])
def test_the_page_of_sampling_has_every_field_with_its_meaning(kind):
    text = settings.render_sampling()
    for name, field in kind.model_fields.items():
        assert field.description, name
        (row,) = re.findall(rf"^\| `{field.alias or name}` \|.*\|$", text, re.MULTILINE)
        assert field.description in row, name


def test_the_page_of_sampling_is_found():
    docs = Path(settings.__file__).parents[1]
    for page in ("python.md", "http.md", "README.md"):
        assert "](sampling.md)" in (docs / page).read_text(), page
    assert "sampling.md" in (docs.parent / "mkdocs.yml").read_text()


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
