"""A block drafter's program drafts and stores what its operations do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.config import DFlashConfig, DSparkConfig
from outrider.tests.helpers.dflash import (
    block_tensors,
    speculators_config,
    write_block,
    zlab_config,
)
from outrider.tests.helpers.heads.cases import GRANTS, stored
from outrider.tests.helpers.models import write_guessable
from outrider.workers.block_program import BlockProgram

SPARK = {"block_size": 5, "markov_rank": 16}
CASES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "plain": (DFlashConfig, zlab_config(), {}),
    "causal": (DFlashConfig, zlab_config(is_causal=True), {}),
    "own vocabulary": (
        DFlashConfig,
        speculators_config("dflash", draft_vocab_size=80),
        {"embed": True, "draft_vocab": 80},
    ),
    "capped": (
        DFlashConfig,
        zlab_config(dflash_config={"final_logit_softcapping": 5.0, "output_multiplier": 1.5}),
        {},
    ),
    "markov": (
        DSparkConfig,
        speculators_config("dspark", draft_vocab_size=80, **SPARK),
        {"markov": 16, "draft_vocab": 80, "confidence": "markov"},
    ),
    "markov behind an anchor": (
        DSparkConfig,
        speculators_config("dspark", sample_from_anchor=False),
        {"markov": 16, "confidence": "state"},
    ),
}
TREE = {"shape": "tree", "max_total_draft_tokens": 9}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return write_guessable(tmp_path_factory.mktemp("six") / "target")


@pytest.fixture(scope="module")
def section(target, tmp_path_factory):
    """`section(case, **fields)`: the section of the case's head."""
    folder = tmp_path_factory.mktemp("heads")

    def of(case, **fields):
        kind, config, options = CASES[case]
        path = folder / case.replace(" ", "-")
        if not path.exists():
            write_block(path, config, block_tensors(target, **options))
        return kind(speculative_model=str(path), **fields)

    return of


@pytest.fixture
def both(target, head_drafts, monkeypatch):
    """`both(config, **options)`: head and drafts with the program, and without."""

    def run(config, **options):
        head, found = head_drafts(target, config, **options)
        assert isinstance(head._program, BlockProgram), head.module_reason
        with monkeypatch.context() as patch:
            patch.setattr(BlockProgram, "of", lambda *_: None)
            return (head, found), head_drafts(target, config, **options)

    return run


@pytest.mark.parametrize("grants", GRANTS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("case", CASES)
def test_drafts_and_rows_are_those_of_the_operations(section, both, case, temperature, grants):
    options = {"temperature": temperature, "grants": GRANTS[grants]}
    (head, found), (other, wanted) = both(section(case), **options)
    assert found == wanted
    assert found[-1][2][-1] > 0
    torch.testing.assert_close(stored(head), stored(other))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("case", ["plain", "markov"])
def test_trees_are_those_of_the_operations(section, both, case, num_threads):
    torch.set_num_threads(num_threads)
    (_, found), (_, wanted) = both(section(case, **TREE))
    assert found == wanted
    assert found[-1][2] == [0, 9, 18]


def test_chains_end_where_those_of_the_operations_do(section, both):
    sizes = set()
    for least in (0.0, 0.02, 0.03, 0.05, 0.1):
        (_, found), (_, wanted) = both(section("plain", p_min=1.0), min_probs=(least, 0.0))
        assert found == wanted
        sizes.add(found[-1][2][1])
    assert len(sizes) > 1
