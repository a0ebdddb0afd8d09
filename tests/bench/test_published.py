"""Published figures beside the model of a step: what is quoted, and how far the two are apart."""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")

from outrider.bench import gpu_model, published  # noqa: E402

SHARES = {
    ("Llama-3.1-8B", False): (0.61, 0.78), ("Llama-3.1-8B", True): (0.41, 0.54),
    ("Llama-3.1-70B", False): (0.53, 0.57), ("Llama-3.1-70B", True): (0.31, 0.34),
    ("DeepSeek-V3", False): (0.53, 0.80),
}  # fmt: skip
"""Of the modelled tokens a second, the published: by model, and whether tokens are drafted. What
bench/RESULTS.md states, with 3% on both sides."""
STEP_MS = {
    ("Llama-3.1-8B", "none", 1): 4.75, ("Llama-3.1-8B", "chain 4", 1): 5.77,
    ("Llama-3.1-8B", "chain 3", 8): 5.59, ("Llama-3.1-8B", "chain 3", 64): 6.78,
    ("Llama-3.1-70B", "none", 1): 6.19, ("Llama-3.1-70B", "tree 63, 8 deep", 1): 8.19,
    ("DeepSeek-V3", "none", 8): 9.70, ("DeepSeek-V3", "none", 64): 23.09,
}  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return list(published.beside(tuple(gpu_model.targets()), lambda _: None))


def test_each_figure_is_quoted_with_its_source_and_setting():
    names = {each.name for each in gpu_model.targets()}
    assert {each.model for each in published.FIGURES} == names
    for each in published.FIGURES:
        assert each.device in gpu_model.DEVICES
        assert each.source.startswith(("arXiv:", "github.com/", "SGLang's documentation"))
        assert each.tokens_per_s or each.gain
        assert each.draft.num_nodes or (each.emitted == 1 and each.gain is None)
        assert each.emitted is None or 1 <= each.emitted <= each.draft.num_levels + 1
    engines = {each.engine.split()[0].rstrip(",") for each in published.FIGURES}
    assert engines == {"vLLM", "SGLang"}


def test_published_figures_are_as_far_from_the_model_as_stated(found):
    """No engine is faster than the model, and none of its settings leaves its band."""
    bands = {}
    for each in found:
        if each.share is not None:
            figure = each.published
            bands.setdefault((figure.model, figure.draft.num_nodes > 0), []).append(each.share)
    assert bands.keys() == SHARES.keys()
    for key, (low, high) in SHARES.items():
        assert low <= min(bands[key]) <= max(bands[key]) <= high < 1, (key, bands[key])


def test_the_step_of_a_published_setting_grows_no_longer(found):
    seen = {
        (each.published.model, str(each.published.draft), each.published.batch): each.step_ms
        for each in found
        if each.published.context_len != 52
    }
    for key, step_ms in STEP_MS.items():
        assert seen[key] == pytest.approx(step_ms, rel=0.03), key


def test_published_gains_are_within_reach(found):
    """A step with drafts takes less of the model's plain steps than of any published engine's."""
    gains = [each for each in found if each.published.gain]
    for each in gains:
        assert each.to_plain < (each.published_to_plain or 9)
        assert 1 < each.needs < each.published.draft.num_levels + 1
    of_64 = next(each for each in gains if each.published.batch == 64)
    assert of_64.needs == pytest.approx(1.38 * 1.25, rel=0.03)


def test_rows_and_lines(found):
    rows, lines = published.table(found)
    assert {len(row) for row in rows} == {len(published.COLUMNS)}
    assert len(rows) == len(found) == len(published.FIGURES)
    numbers = {int(row[-1]) for row in rows}
    assert numbers == set(range(1, len(lines)))  # the last line explains the columns
    assert published.table([]) == ([], [])
    for row in json.loads(json.dumps([each.row() for each in found])):
        assert row["launches"] > 200
        assert (row["share"] is None) == (
            None in (row["published"]["emitted"], row["tokens_per_s"])
        )
