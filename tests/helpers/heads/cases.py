"""Heads of every kind for the device step, and their files over one target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.config import (
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    MTPConfig,
    ReDrafterConfig,
)
from outrider.tests.helpers.head_files import (
    eagle_tensors,
    medusa_tensors,
    write_eagle,
    write_medusa,
)
from outrider.tests.helpers.redrafter import redrafter_tensors, write_redrafter

NODES = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
DYNAMIC = {
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 5,
    "max_draft_len": 3,
    "max_total_draft_tokens": 9,
}
# By case: section, options of its files, keys of the section.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "chain": (Eagle3Config, {"draft_vocab": 80}, {"max_draft_len": 4}),
    "fixed": (EagleConfig, {"num_layers": 2}, {"eagle_choices": NODES}),
    "dynamic": (Eagle3Config, {"draft_vocab": 80}, DYNAMIC),
    "one-pass": (MedusaConfig, {}, {"medusa_choices": NODES[:5]}),
    "modules": (MTPConfig, {}, {"max_draft_len": 4}),
    "beams": (ReDrafterConfig, {}, {"max_draft_len": 3, "redrafter_num_beams": 3}),
}


def section_of(case: tuple[Any, dict[str, Any], dict[str, Any]], target: Path, folder: Path) -> Any:
    """The case's section over files in `folder`; MTP's modules are in the target's own."""
    section, options, keys = case
    if section is MTPConfig:
        path = str(target)
    elif section is ReDrafterConfig:
        path = write_redrafter(folder, redrafter_tensors(str(target)))
    elif section is MedusaConfig:
        path = write_medusa(folder, medusa_tensors(str(target), 2), "safetensors")
    else:
        version = 3 if section is Eagle3Config else 1
        path = write_eagle(folder, *eagle_tensors(str(target), version, **options))
    return section(speculative_model=path, **keys)
