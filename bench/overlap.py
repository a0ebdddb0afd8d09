"""What overlaps with a step: the engine's own work (`overlap_scheduling`), and drafting.

    python -m outrider.bench.overlap [--model FOLDER] [--streams 1 8 32] [--rounds 10]
    python -m outrider.bench.overlap --drafts --model FOLDER --draft-model FOLDER

The first compares steps that overlap with the workers with steps that wait for them: two engines
over Ray, one of each kind, take turns on the same prompts, plain and greedy.

The second compares ways to draft with a draft model: in the target's workers, in workers of its
own, and there with a speculation cache, which prepares drafts while the target verifies. *Asked*:
the target sends the model no verdicts, so that a draft after a miss begins when it is asked for.
Each worker has one thread; engines whose drafter has no core of its own run with two as well. The
demo target is too fast for its draft model: `bench/models.py` writes a padded one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from ..cluster.backend import LLM
from ..scheduler.sampling import SamplingParams
from .drafters import MODELS
from .measure import Rows, in_turn, ratio_of_rounds
from .suite.workloads import load_prompts

_MODEL: dict[str, Any] = {"decoding_type": "DraftTarget", "speculative_model": ""}
_COLOCATED = {**_MODEL, "placement": "colocated"}
# Section, and threads of a worker.
CONTENDERS: dict[str, tuple[dict[str, Any], int]] = {
    "plain, 1 core": ({"decoding_type": "None"}, 1),
    "plain, 2 cores": ({"decoding_type": "None"}, 2),
    "colocated, 1 core": (_COLOCATED, 1),
    "colocated, 2 cores": (_COLOCATED, 2),
    "separate, 1 + 1": (_MODEL, 1),
    "with a cache, 1 + 1": ({**_MODEL, "speculation_cache": {}}, 1),
    "with a cache, asked, 1 + 1": ({**_MODEL, "speculation_cache": {}}, 1),
    "with a cache, no waiting, 1 + 1": ({**_MODEL, "speculation_cache": {"on_miss": "none"}}, 1),
}


_OF_CACHE = ("num_begun", "num_waited_drafts", "missed_ms")
_TITLES = (
    *("streams", "contender", "tokens/s", "to plain on as many cores", "tokens/step"),
    *("drafting / verifying", "waited, ms/step", "hidden", "hits", "after a miss, ms", "begun"),
    *("bytes to the drafter", "bytes back", "link / drafting"),
)


def steps(options: argparse.Namespace) -> None:
    """Prints a row per number of streams: steps that overlap, and steps that wait."""
    sampling = _sampling(options.tokens)
    engines = {
        name: LLM(options.model, dtype=options.dtype, overlap_scheduling=name == "overlapped")
        for name in ("overlapped", "waiting")
    }
    table = Rows("streams", "overlapped, ms/step", "waiting, ms/step", "overlapped / waiting")
    for num_streams in options.streams:
        prompts = [[stream + 5] * 20 for stream in range(num_streams)]
        calls = {
            name: partial(engine.generate, prompts, sampling, use_tqdm=False)
            for name, engine in engines.items()
        }
        times = in_turn(calls, options.rounds).values()
        medians = (f"{statistics.median(each) / options.tokens:.2f}" for each in times)
        table.add(num_streams, *medians, ratio_of_rounds(*times))
    for engine in engines.values():
        engine.close()


def drafts(options: argparse.Namespace) -> None:
    """Prints a row per number of streams and way to draft."""
    table = Rows(*_TITLES)
    texts = load_prompts(None, 64)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                LLM(
                    options.model,
                    dtype=options.dtype,
                    max_num_seqs=max(options.streams),
                    num_kv_blocks=64 * max(options.streams) // 2 + 64,
                    enable_prefix_caching=False,
                    resources={"cpus_per_worker": 0, "threads_per_worker": threads},
                    speculative_config={**section, **_given(section, options)},
                )
            )
            for name, (section, threads) in CONTENDERS.items()
            if name in options.contenders
        }
        for name, engine in engines.items():
            if "asked" in name:
                _ask_for_all(engine)
        for num_streams in options.streams:
            speeds: dict[str, list[float]] = {name: [] for name in engines}
            parts: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
            for turn in range(options.rounds + 1):  # the first warms up
                first = turn * num_streams  # other prompts in every round
                places = [(first + index) % len(texts) for index in range(num_streams)]
                prompts = [texts[place] for place in places]
                for name, engine in engines.items():
                    speed, found = _round(engine, prompts, options.tokens)
                    if turn:
                        speeds[name].append(speed)
                        parts[name].append(found)
            for name in engines:
                table.add(num_streams, name, *_cells(name, speeds, parts[name]))


def _ask_for_all(engine: LLM) -> None:
    """Has the target send the draft model no verdicts."""
    engine.generate([[5] * 20], _sampling(16), use_tqdm=False)  # the link is open
    assert engine._engine is not None, "it generates"
    for part in engine._engine._drafting.parts:
        part.drafter.detach()


def _given(section: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What the options say of a contender's section."""
    if "speculative_model" not in section:
        return {}
    given = {"max_draft_len": options.draft_len, "speculative_model": options.draft_model}
    for key in section.keys() & {"speculation_cache"}:
        given[key] = {**section[key], **options.cache}
    return given


def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def _round(engine: LLM, prompts: Sequence[Any], num_tokens: int) -> tuple[float, dict[str, float]]:
    """Tokens per second, and what the engine counted meanwhile."""
    before = _counts(engine)
    start = time.perf_counter()
    engine.generate(prompts, _sampling(num_tokens), use_tqdm=False)
    wall_s = time.perf_counter() - start
    after = _counts(engine)
    return len(prompts) * num_tokens / wall_s, {name: after[name] - before[name] for name in after}


def _counts(engine: LLM) -> dict[str, float]:
    """Of the steps, and of the speculation cache; a cache's draft time is the model's own."""
    stats = engine.stats()
    steps, found = stats["steps"], {}
    for name in ("num_steps", "num_sampled", "propose_ms", "forward_ms"):
        found[name] = steps[name]
    found["num_tokens"] = stats["requests"]["num_output_tokens"]
    for drafter in stats["drafters"].values():
        cache = drafter.get("speculation_cache") or {}
        for name in (*_OF_CACHE, "draft_ms", "hidden_ms", "num_hits", "num_lookups"):
            found[name] = cache.get(name, 0.0)
        for name, counted in (drafter.get("link") or {}).items():
            found[name], found[f"{name}, count"] = counted["sum"], sum(counted["counts"])
    return found


def _cells(name: str, speeds: dict[str, list[float]], parts: list[dict[str, float]]) -> list[str]:
    """Of one contender: medians and ratios of rounds, totals of all rounds."""
    plain = "plain, 1 core" if name.endswith("1 core") else "plain, 2 cores"
    total = {key: sum(part.get(key, 0.0) for part in parts) for key in parts[0]}
    drafted_ms = total.get("draft_ms") or total["propose_ms"]
    has_cache, drafts = bool(total.get("num_lookups")), not name.startswith("plain")
    return [
        f"{statistics.median(speeds[name]):.0f}",
        str(ratio_of_rounds(speeds[name], speeds[plain])) if plain in speeds else "-",
        f"{total['num_tokens'] / total['num_sampled']:.2f}",
        f"{drafted_ms / total['forward_ms']:.2f}" if drafts else "-",
        f"{total['propose_ms'] / total['num_steps']:.2f}" if drafts else "-",
        f"{total['hidden_ms'] / total['draft_ms']:.0%}" if has_cache else "-",
        f"{total['num_hits'] / total['num_lookups']:.0%}" if has_cache else "-",
        f"{total['missed_ms'] / (total['num_waited_drafts'] or 1):.2f}" if has_cache else "-",
        f"{total['num_begun'] / max(1, total['num_lookups'] - total['num_hits']):.0%}"
        if has_cache
        else "-",
        *(_mean(total, name, ".0f") for name in ("sent_bytes", "received_bytes")),
        _link_share(total),
    ]


def _mean(total: dict[str, float], name: str, form: str) -> str:
    """Of a histogram's values."""
    count = total.get(f"{name}, count", 0)
    return format(total[name] / count, form) if count else "-"


def _link_share(total: dict[str, float]) -> str:
    """Of the time that answers took which steps waited for, that beside the model's own."""
    num_awaited, num_all = (total.get(f"{name}, count", 0) for name in ("link_s", "sent_bytes"))
    if not num_awaited:
        return "-"
    link_ms = 1e3 * total["link_s"] / num_awaited
    draft_ms = (total.get("draft_ms") or total["propose_ms"]) / num_all
    return f"{link_ms / draft_ms:.2f}"


def main() -> None:
    """Prints the table that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.overlap")
    parser.add_argument("--model", default=str(MODELS / "target"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafts", action="store_true", help="compare ways to draft")
    parser.add_argument("--draft-model", default=str(MODELS / "draft"))
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS], help="of --drafts"
    )
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--cache", type=json.loads, default={}, help="its section, as JSON")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    (drafts if options.drafts else steps)(options)


if __name__ == "__main__":
    main()
