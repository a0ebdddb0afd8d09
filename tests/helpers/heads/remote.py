"""Heads of every shape over one target, and engines whose drafts are collected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.drafters import head_drafters
from outrider.tests.helpers.dflash import write_kind
from outrider.tests.helpers.engines import complete, engine_of, plain_outputs, random_prompts
from outrider.tests.helpers.head_files import (
    eagle_tensors,
    medusa_tensors,
    write_eagle,
    write_medusa,
)
from outrider.tests.helpers.mtp import Made
from outrider.tests.helpers.redrafter import redrafter_tensors, write_redrafter

SMALL = {"block_size": 4, "max_num_batched_tokens": 32, "num_kv_blocks": 28, "max_model_len": 96}
PROMPTS = [list(range(2, 14)) + prompt for prompt in random_prompts(9, 96, longest=14)]
DYNAMIC = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "medusa-chain": {"max_draft_len": 3},
    "medusa-tree": {"medusa_choices": [[0, 0, 0], [0, 1], [1, 0], [2]]},
    "eagle1-chain": {"max_draft_len": 3},
    "eagle1-tree": {"eagle_choices": [[0, 0, 0], [0, 1], [1, 0], [2]]},
    "eagle3-chain": {"max_draft_len": 3},
    "eagle3-dynamic": {"max_draft_len": 3, **DYNAMIC},
    "redrafter": {"redrafter_num_beams": 3, "max_draft_len": 3},
    "mtp": {"max_draft_len": 3},
    "dflash": {"max_draft_len": 3},
    "dspark": {"max_draft_len": 3},
}
LEAVING = {"medusa-tree": "distributed", "eagle1-tree": "socket", "mtp": "socket"}


def write_shapes(six: str, folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """By shape: the target and the head's section."""
    medusa = write_medusa(folder / "medusa", medusa_tensors(six, 3), "safetensors")
    one = write_eagle(folder / "one", *eagle_tensors(six, 1))
    three = write_eagle(folder / "three", *eagle_tensors(six, 3, draft_vocab=80))
    redrafter = write_redrafter(folder / "redrafter", redrafter_tensors(six, rnn=True))
    kinds = {"medusa": ("Medusa", medusa), "eagle1": ("Eagle", one), "eagle3": ("Eagle3", three)}
    kinds["redrafter"] = ("ReDrafter", redrafter)
    kinds["dflash"] = ("DFlash", write_kind(folder / "dflash", six, "plain"))
    kinds["dspark"] = ("DSpark", write_kind(folder / "dspark", six, "markov"))
    modules = Made(folder / "mtp", "llama", 3)
    sections = {}
    for shape, fields in SHAPES.items():
        if shape == "mtp":
            sections[shape] = modules.folder, {"decoding_type": "MTP", **fields}
            continue
        kind, head = kinds[shape.partition("-")[0]]
        fields = {"decoding_type": kind, "speculative_model": head, **fields}
        sections[shape] = six, fields
    return sections


def plain(target: str, **sampling: Any) -> Any:
    """What is emitted without a drafter."""
    return plain_outputs(target, PROMPTS, {"max_tokens": 24, **sampling})[0]


@dataclass
class Seen:
    """What an engine's head guessed, by request and length of the text."""

    drafts: dict[tuple[str, int], tuple[list[int], list[int]]] = field(default_factory=dict)
    largest: dict[tuple[str, int], int] = field(default_factory=dict)  # draft made along with it
    outputs: Any = None
    stats: Any = None

    @property
    def drafter(self) -> Any:
        (only,) = self.stats["drafters"].values()
        return only


def runner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seen]:
    """`run(target, section, ...)`: all prompts through an engine; what was seen of it."""

    def go(target, section, *, strike=None, sampling=None, at_once=8, **options) -> Seen:
        seen = Seen()
        keep = head_drafters.Colocated.keep

        def spy(self, request_ids, guessed):
            for row, request_id in enumerate(request_ids):
                span = guessed and slice(guessed.start[row], guessed.start[row + 1])
                if guessed and span.start < span.stop:
                    item = guessed.tokens[span].tolist(), guessed.parents[span].tolist()
                    key = request_id, int(guessed.lens[row])
                    seen.drafts[key], seen.largest[key] = item, int(np.diff(guessed.start).max())
            keep(self, request_ids, guessed)

        options = {**SMALL, **options}
        with monkeypatch.context() as patch, engine_of(target, section, **options) as engine:
            patch.setattr(head_drafters.Colocated, "keep", spy)
            on_delta = strike and (lambda count, delta: strike(engine, count))
            seen.outputs = complete(
                engine,
                PROMPTS[: 3 if at_once == 1 else None],
                at_once=at_once,
                on_delta=on_delta,
                together=True,
                max_tokens=24,
                **(sampling or {}),
            )[0]
            seen.stats = engine.stats()
        return seen

    return go


def separate(section: dict[str, Any], **fields) -> dict[str, Any]:
    return {**section, "placement": "separate", "draft_timeout_s": 30, **fields}


def assert_same_drafts(
    one: Seen, other: Seen, num_levels: int = 0, least_share: float = 0.8
) -> None:
    """Where both guessed, they guessed alike; one may have had less room.

    Args:
        num_levels: of a beam search, which ends earlier where no sequence of the step has room for
            a whole path; the paths that have survived until then are others. 0: it is none.
        least_share: of the drafts, which both must have made.
    """
    both = one.drafts.keys() & other.drafts.keys()
    assert len(both) > least_share * max(len(one.drafts), len(other.drafts)) > 16
    for key in both:
        depths = [min(seen.largest[key], num_levels) for seen in (one, other)]
        if depths[0] != depths[1]:
            continue
        for mine, theirs in zip(one.drafts[key], other.drafts[key], strict=True):
            length = min(len(mine), len(theirs))
            assert mine[:length] == theirs[:length], key
