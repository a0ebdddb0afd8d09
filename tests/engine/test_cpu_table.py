"""No entry of the table of kernels changes a token: AMX's, forced, on whole engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outrider.workers.ops.table import VARIABLE

from ..helpers.engines import complete, engine_of

DEMO = str(Path(__file__).resolve().parents[2] / "demo" / "models" / "target")
NGRAM = {"decoding_type": "NGram", "max_draft_len": 6, "max_matching_ngram_size": 1}
MIXED = {"dtype": "bfloat16", "max_num_batched_tokens": 160}


@pytest.fixture(scope="module")
def prompts():
    """Repetitive texts of 20 to 330 tokens: cut into chunks, beside each other's decoding."""
    rng = np.random.default_rng(0)
    words = [rng.integers(100, 4000, 9).tolist() for _ in range(4)]
    return [words[index] * repeats for index, repeats in enumerate((2, 12, 23, 36))]


def texts(prompts, speculative=None, **options):
    with engine_of(DEMO, speculative, **MIXED, **options) as engine:
        found, last = complete(engine, prompts, at_once=4)
        again, _ = complete(engine, prompts[2:], at_once=2)  # behind cached prefixes
        accepted = sum(delta.usage.num_accepted_tokens for delta in last.values())
    return found, again, accepted


def test_the_same_tokens_with_any_table_and_drafter(prompts, monkeypatch):
    usual = texts(prompts)
    monkeypatch.setenv(VARIABLE, "amx")
    plain = texts(prompts)
    assert plain == usual
    drafted = texts(prompts, NGRAM)
    assert drafted[:2] == plain[:2]
    assert drafted[2] > 0
    assert texts(prompts, NGRAM, resources={"threads_per_worker": 2})[:2] == plain[:2]
