"""Every drafter on three kinds of prompt, against no speculation, in one run.

`python -m outrider.bench.drafters`. Kinds: *code* continues held-out Python; *edit* shows a piece
of code and asks for it again with type hints, so that the output copies; *prose* continues English
text (docstrings). The models are the demo's; what counts is how much of what they write repeats.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config import EngineConfig
from ..scheduler.sampling import SamplingParams
from .compare import Plan, compare, equality, summarise
from .contenders import EngineContender
from .prompts import load_prompts

MODELS = Path(__file__).resolve().parent.parent / "demo" / "models"
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]]
GROWN = {  # EAGLE-2's tree
    "use_dynamic_tree": True,
    "max_draft_len": 5,
    "dynamic_tree_max_topK": 4,
    "max_total_draft_tokens": 16,
}


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
PROSE = (argparse.ArgumentParser, inspect, json, Path, dict, str, list, int, set, Console)


def kinds(num_prompts: int) -> dict[str, list[str]]:
    """Prompts by kind."""
    code = load_prompts(None, num_prompts)
    edit = [
        f"{_lines(text, 14)}\n\n\n# The same again, with type hints.\n{_lines(text, 3)}"
        for text in code
    ]
    docs = [inspect.getdoc(each) or "" for each in PROSE]
    pieces = [doc for doc in docs if len(doc) > 80] + [
        inspect.getdoc(getattr(str, name)) or "" for name in sorted(dir(str))
    ]
    prose = [f'"""{piece[: len(piece) * 2 // 3]}' for piece in pieces if len(piece) > 120]
    return {"code": code, "edit": edit, "prose": prose[:num_prompts]}


def measure(
    names: list[str], plan_of: Callable[[list[str]], Plan], num_prompts: int, dtype: str
) -> Iterator[dict[str, Any]]:
    """One row per kind, drafter and batch size."""
    console = Console(stderr=True)
    for kind, prompts in kinds(num_prompts).items():
        contenders = [
            EngineContender(
                name,
                EngineConfig.load(
                    {
                        "model": str(MODELS / "target"),
                        "executor": "local",
                        "dtype": dtype,
                        "enable_prefix_caching": False,
                        "kv_cpu_bytes": 2**28,
                        "resources": {"threads_per_worker": 1},  # the same for all
                        "speculative_config": SECTIONS[name],
                    }
                ),
            )
            for name in names
        ]
        with console.status(kind) as status:
            runs = compare(contenders, plan_of(prompts), status.update)
        for contender in contenders:
            contender.close()
        same = {
            (row["contender"], row["batch_size"]): row["num_differing"]
            for row in equality(runs, "none")
        }
        for row in summarise(runs, "none"):
            key = (row["contender"], row["batch_size"])
            yield {"kind": kind, "num_differing": same[key], **row}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafters", default=",".join(SECTIONS), help="Names, comma-separated.")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    sizes = [int(size) for size in options.batch_sizes.split(",")]
    names = ["none", *[name for name in options.drafters.split(",") if name != "none"]]

    def plan_of(prompts: list[str]) -> Plan:
        return Plan(prompts, sampling, sizes, options.rounds)

    table = Table("kind", "drafter", "batch", "accepted", "tokens/step", "to none", "differ")
    rows = []
    for row in measure(names, plan_of, options.num_prompts, options.dtype):
        rows.append(row)
        drafted = row["acceptance"]
        table.add_row(
            row["kind"],
            row["contender"],
            str(row["batch_size"]),
            f"{drafted['rate']:.0%}" if drafted else "-",
            f"{row['tokens_per_step']:.2f}",
            f"{row['ratio']['median']:.2f} ({row['ratio']['low']:.2f}-{row['ratio']['high']:.2f})",
            str(row["num_differing"]),
        )
    Console(width=110).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


def _lines(text: str, count: int) -> str:
    return "\n".join(text.splitlines()[:count])


if __name__ == "__main__":
    main()
