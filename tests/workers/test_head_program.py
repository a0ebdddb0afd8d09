"""A head's program drafts and stores what its operations do, and falls back to them."""

from __future__ import annotations

import itertools

import pytest
import torch

from outrider.config import Eagle3Config, EagleConfig, MTPConfig
from outrider.tests.helpers.head_files import eagle_tensors, joined_first, write_eagle
from outrider.tests.helpers.heads.cases import GRANTS, stored
from outrider.tests.helpers.models import write_guessable
from outrider.tests.helpers.mtp import Made
from outrider.workers.head_program import HeadProgram

CASES = {
    "one": (1, {"draft_vocab": 70}),
    "one-target-output": (1, {"fc_bias": False}),
    "one-norms": (1, {"para_norm": True, "final_norm": True, "input_norm": True}),
    "three": (3, {"draft_vocab": 80}),
    "three-norms": (
        3,
        {"qk_norm": True, "fc_norm": True, "config": {"norm_before_residual": True}},
    ),
    "three-fused-norm": (3, {"norm_before_fc": True, "draft_vocab": 80}),
    "three-joined": (3, {"draft_vocab": 80, "input_norm": True, "norm_name": "hidden_norm"}),
    "three-recycled": (3, {"draft_vocab": 80}),
    "three-recycled-normed": (3, {"config": {"norm_before_residual": True}}),
}
OTHERS = {
    "deep": (3, {"num_layers": 2, "layer": "layers.0"}),
    "llama4": (1, {"num_layers": 2}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return write_guessable(tmp_path_factory.mktemp("six") / "target")


@pytest.fixture(scope="module")
def section(target, tmp_path_factory):
    """`section(case, **fields)`: the target and the section of its head."""
    folder = tmp_path_factory.mktemp("heads")

    def of(case, **fields):
        if case == "mtp":
            made = Made(folder / "mtp", "llama", 1).folder
            return made, MTPConfig(speculative_model=made, **fields)
        version, options = (CASES | OTHERS)[case]
        if "recycled" in case:
            fields["recycle"] = "post_norm"
        raw, tensors = eagle_tensors(target, version, **options)
        if case == "three-joined":
            tensors = joined_first(tensors)
        head = write_eagle(folder / case, raw, tensors)
        kind = EagleConfig if version == 1 else Eagle3Config
        return target, kind(speculative_model=head, **fields)

    return of


@pytest.fixture
def by_operations(monkeypatch):
    """`by_operations(work)`: the result of `work()` without programs of heads."""

    def run(work):
        with monkeypatch.context() as patch:
            patch.setattr(HeadProgram, "of", lambda *_: None)
            return work()

    return run


@pytest.mark.parametrize("grants", GRANTS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("case", [*CASES, "mtp"])
def test_drafts_and_rows_are_those_of_the_operations(
    section, head_drafts, by_operations, case, temperature, grants
):
    folder, config = section(case, max_draft_len=4)
    options = {"temperature": temperature, "grants": GRANTS[grants]}
    head, found = head_drafts(folder, config, **options)
    assert head._program is not None
    other, wanted = by_operations(lambda: head_drafts(folder, config, **options))
    assert found == wanted
    assert found[-1][2][-1] > 0
    torch.testing.assert_close(stored(head), stored(other))


def test_drafts_end_where_those_of_the_operations_do(section, head_drafts, by_operations):
    folder, config = section("three", max_draft_len=4, p_min=1.0)
    sizes = set()
    for own, temperature in itertools.product((0.0, 0.2, 0.3, 0.4, 0.5), (0.0, 0.9)):
        options = {"temperature": temperature, "min_probs": (own, -1.0)}
        _, found = head_drafts(folder, config, **options)
        _, wanted = by_operations(lambda options=options: head_drafts(folder, config, **options))
        assert found == wanted
        for _, _, starts in found:
            assert starts[1] == starts[2]  # the section's own cuts everything
            assert starts[1] == 4 or own
            sizes.add(starts[1])
    assert len(sizes) > 2


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_tree_is_drafted_by_operations_from_rows_of_the_program(
    section, head_drafts, by_operations, num_threads
):
    torch.set_num_threads(num_threads)
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 9}
    folder, config = section("three", max_draft_len=3, **tree)
    options = {"grants": GRANTS["late"]}
    head, found = head_drafts(folder, config, **options)
    assert head._program is not None
    _, wanted = by_operations(lambda: head_drafts(folder, config, **options))
    assert found == wanted


@pytest.mark.parametrize("case", OTHERS)
def test_rows_of_several_layers_are_computed_in_whole(section, head_drafts, case):
    head, _ = head_drafts(*section(case, max_draft_len=2))
    assert not head.module_reason
    assert head._program is None
