"""A section for every drafter, the heads and the draft model being the demo target's.

`outrider bench suite --drafters NAME,...` measures them; `tests/test_heldout.py` checks them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parent.parent / "demo" / "models"
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]]
GROWN = {  # EAGLE-2's tree
    "use_dynamic_tree": True,
    "max_draft_len": 5,
    "dynamic_tree_max_topK": 4,
    "max_total_draft_tokens": 16,
}
BEST = {"shape": "tree", "max_draft_len": 7, "max_total_draft_tokens": 14}


def _head(kind: str, folder: str, **options: Any) -> dict[str, Any]:
    return {"decoding_type": kind, "speculative_model": str(MODELS / folder), **options}


HEADS = {
    "Medusa": _head("Medusa", "medusa"),
    "Medusa tree": _head("Medusa", "medusa", medusa_choices=TREE),
    "ReDrafter": _head("ReDrafter", "redrafter"),
    "Eagle": _head("Eagle", "eagle", max_draft_len=4),
    "Eagle tree": _head("Eagle", "eagle", eagle_choices=TREE),
    "Eagle2": _head("Eagle", "eagle", **GROWN),
    "Eagle3": _head("Eagle3", "eagle3", max_draft_len=4),
    "Eagle3 grown": _head("Eagle3", "eagle3", **GROWN),
    "DFlash": _head("DFlash", "dflash", max_draft_len=5),
    "DFlash tree": _head("DFlash", "dflash", **BEST),
    "DSpark": _head("DSpark", "dspark", max_draft_len=5),
    "DSpark tree": _head("DSpark", "dspark", **BEST),
    "MTP": _head("MTP", "mtp", max_draft_len=4),
    "MTP grown": _head("MTP", "mtp", **GROWN),
}
SUFFIX = {"decoding_type": "Suffix", "max_draft_len": 8}
SECTIONS: dict[str, dict[str, Any]] = {
    "none": {"decoding_type": "None"},
    "DraftTarget": {
        "decoding_type": "DraftTarget",
        "speculative_model": str(MODELS / "draft"),
        "max_draft_len": 4,
    },
    "NGram": {"decoding_type": "NGram", "max_draft_len": 8},
    "NGram shared": {"decoding_type": "NGram", "max_draft_len": 8, "pool_scope": "tenant"},
    "PromptLookup": {"decoding_type": "PromptLookup"},
    "NGramSimple": {"decoding_type": "NGramSimple", "ngram_size_n": 4, "ngram_size_m": 8},
    "NGramMapK": {"decoding_type": "NGramMapK", "ngram_size_n": 4, "ngram_size_m": 8},
    "NGramMapK4V": {"decoding_type": "NGramMapK4V", "ngram_size_n": 4, "ngram_size_m": 8},
    "NGramMod": {"decoding_type": "NGramMod", "n_match": 4, "n_min": 1, "n_max": 8},
    "NGramCache": {"decoding_type": "NGramCache", "max_draft_len": 8},
    "Suffix": SUFFIX,
    "Suffix tree": {**SUFFIX, "shape": "tree"},
    "User": {
        "decoding_type": "User",
        "drafter": "outrider.bench.user_drafter:LastTime",
        "max_draft_len": 8,
    },
    "Lookahead": {"decoding_type": "Lookahead"},
    **HEADS,
    "Eagle3 separate": {**HEADS["Eagle3"], "placement": "separate"},
    "Suffix or Eagle3": {"decoding_type": "Compose", "members": [SUFFIX, HEADS["Eagle3"]]},
    "Suffix with Eagle3": {
        "decoding_type": "Compose",
        "mode": "merge",
        "members": [SUFFIX, HEADS["Eagle3"]],
        "max_draft_len": 10,
    },
}
