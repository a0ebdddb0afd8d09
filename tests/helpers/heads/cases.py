"""Heads of every kind for the device step, and their files over one target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.config import (
    DFlashConfig,
    DSparkConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    MTPConfig,
    PARD2Config,
    PEagleConfig,
    ReDrafterConfig,
)
from outrider.tests.helpers.dflash import write_kind
from outrider.tests.helpers.head_files import (
    eagle_tensors,
    medusa_tensors,
    write_eagle,
    write_medusa,
)
from outrider.tests.helpers.pard2 import write_pard2
from outrider.tests.helpers.redrafter import redrafter_tensors, write_redrafter
from outrider.workers.head import HeadRunner

NODES = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
DYNAMIC = {
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 5,
    "max_draft_len": 3,
    "max_total_draft_tokens": 9,
}
BEST = {"shape": "tree", "max_draft_len": 3, "max_total_draft_tokens": 9}
# By case: section, options of its files, keys of the section.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "chain": (Eagle3Config, {"draft_vocab": 80}, {"max_draft_len": 4}),
    "fixed": (EagleConfig, {"num_layers": 2}, {"eagle_choices": NODES}),
    "dynamic": (Eagle3Config, {"draft_vocab": 80}, DYNAMIC),
    "masks": (PEagleConfig, {"draft_vocab": 80}, {"max_draft_len": 4}),
    "masks-grown": (PEagleConfig, {}, DYNAMIC),
    "masks-best": (PEagleConfig, {"draft_vocab": 80}, BEST),
    "block": (DFlashConfig, {"kind": "plain"}, {"max_draft_len": 4}),
    "block-best": (DFlashConfig, {"kind": "plain"}, BEST),
    "block-selected": (DFlashConfig, {"kind": "selected"}, {"max_draft_len": 4}),
    "block-markov": (DSparkConfig, {"kind": "markov"}, {"max_draft_len": 4}),
    "block-markov-best": (DSparkConfig, {"kind": "markov"}, BEST),
    "states": (PARD2Config, {}, {"max_draft_len": 4}),
    "states-best": (PARD2Config, {}, BEST),
    "one-pass": (MedusaConfig, {}, {"medusa_choices": NODES[:5]}),
    "one-pass-best": (MedusaConfig, {}, {"shape": "tree", "num_medusa_heads": 2}),
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
    elif section is PARD2Config:
        path = write_pard2(folder, str(target), pickled=False)
    elif "kind" in options:
        path = write_kind(folder, str(target), options["kind"])
    elif section is MedusaConfig:
        path = write_medusa(folder, medusa_tensors(str(target), 2), "safetensors")
    else:
        version = 1 if section is EagleConfig else 3
        config, tensors = eagle_tensors(str(target), version, **options)
        if section is PEagleConfig:
            config["pard_token"] = 95
            noise = torch.randn(1, tensors["fc.weight"].shape[1], generator=torch.manual_seed(0))
            tensors["mask_hidden"] = noise
        path = write_eagle(folder, config, tensors)
    return section(speculative_model=path, **keys)


# Nodes of two sequences, for their prompts and for a step that judged trees (`head_drafts`).
GRANTS = {
    "both": ((40, 40), (40, 40)),
    "late": ((0, 0), (40, 40)),  # of the prompts, only keys and values are computed
    "one": ((40, 0), (0, 3)),
    "short": ((1, 2), (2, 1)),
}


def stored(head: HeadRunner) -> torch.Tensor:
    """Keys and values of the head's layers, without those of drafts."""
    cache, layers = head._cache, slice(head.first_layer, None)
    assert cache is not None
    kept = [*cache.keys[layers], *cache.values[layers]]
    return torch.cat([each[: cache.num_slots] for each in kept])
