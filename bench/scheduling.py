"""What draft nodes cost other requests, in steps: every drafter against none, without a model.

    python -m outrider.bench.scheduling

Counts steps, not time, so that the table is the same on every machine. The target emits a text
that is known beforehand: one that never repeats, where look-ups find nothing, or one that does.
`tests/scheduler/test_shares.py` holds the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..config import EngineConfig, SpeculationBase
from ..drafters.drafting import Drafting
from ..drafters.protocol import Drafter, Needs
from ..drafters.registry import build
from ..scheduler import tree
from ..scheduler.loop import Loop
from ..scheduler.sampling import SamplingParams
from ..scheduler.scheduler import Scheduler
from ..scheduler.types import Batch, Draft, IntArray, Request, Verdict, ints
from .measure import Rows

VOCAB = 2**17
BLOCK_SIZE = 16
BUDGETS = (64, 512, 2048)
_NGRAM = {"decoding_type": "NGram", "max_draft_len": 4}
_PLAIN: dict[str, Any] = {"decoding_type": "None"}
# Drafters that need no checkpoint, and two stand-ins that ask for as much as a head's tree.
DRAFTERS: dict[str, dict[str, Any]] = {
    "NGram(4)": _NGRAM,
    "PromptLookup": {"decoding_type": "PromptLookup", "max_draft_len": 10},
    "NGramSimple": {"decoding_type": "NGramSimple"},
    "NGramMapK": {"decoding_type": "NGramMapK"},
    "NGramMapK4V": {"decoding_type": "NGramMapK4V"},
    "NGramMod": {"decoding_type": "NGramMod", "max_draft_len": 32, "n_min": 8},
    "NGramCache": {"decoding_type": "NGramCache"},
    "Suffix": {"decoding_type": "Suffix"},
    "Lookahead": {"decoding_type": "Lookahead"},
    "Compose": {
        "decoding_type": "Compose",
        "mode": "merge",
        "members": [_NGRAM, {"decoding_type": "Suffix", "max_draft_len": 8}],
    },
    "silent": {"decoding_type": "NGram", "max_draft_len": 32},
    "wrong": {"decoding_type": "NGram", "max_draft_len": 32},
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to, in steps."""

    num_steps: int
    max_running: int  # requests of one step
    first_token: int  # steps from the arrival of the last to arrive to its first token
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and when it comes."""

    step: int
    prompt_len: int
    max_tokens: int
    priority: int = 0


def short() -> list[Arrival]:
    """100 short requests at once."""
    return [Arrival(0, 8 + index % 16, 40) for index in range(100)]


def long_prompt() -> list[Arrival]:
    """A long prompt beside 31 requests that decode."""
    return [*(Arrival(0, 16, 96) for _ in range(31)), Arrival(20, 2000, 8)]


def urgent() -> list[Arrival]:
    """An urgent request beside 63 ordinary ones, one of them with a long prompt."""
    ordinary = [*(Arrival(0, 16, 64) for _ in range(62)), Arrival(10, 6000, 8)]
    return [*ordinary, Arrival(12, 32, 8, priority=-1)]


SCENARIOS: dict[str, Callable[[], list[Arrival]]] = {
    "short": short,
    "long prompt": long_prompt,
    "urgent": urgent,
}


class KnownTextTarget:
    """Emits what follows in texts that are known beforehand."""

    def __init__(self, *, repeating: bool) -> None:
        self._period = 12 if repeating else VOCAB
        self._texts: dict[str, IntArray] = {}
        self.max_running = 0

    def text(self, index: int, request_id: str, length: int) -> IntArray:
        """The text of a request, prompt and output; its tokens differ from each other."""
        positions = np.arange(length + 64) % self._period
        self._texts[request_id] = ints((index * 8209 + positions) % VOCAB)
        return self._texts[request_id][:length]

    def verify(self, batch: Batch, drafts: Sequence[Draft]) -> Verdict:
        self.max_running = max(self.max_running, batch.num_seqs)
        emitted: list[int] = []
        path: list[int] = []
        starts = [[0], [0]]
        lens = batch.known_lens
        for row, draft in enumerate(drafts):
            assert draft.num_nodes <= batch.max_nodes[row], (draft, batch.max_nodes[row])
            if batch.samples[row]:
                following = self._texts[batch.request_ids[row]][lens[row] :].tolist()
                nodes = tree.follow(draft, following)
                path += nodes
                emitted += following[: len(nodes) + 1]
            starts[0].append(len(emitted))
            starts[1].append(len(path))
        window = [draft.tokens[draft.num_guesses :] for draft in drafts]  # any token will do
        ends = np.cumsum([0, *(len(cells) for cells in window)])
        return Verdict(
            batch.step,
            ints(emitted),
            ints(starts[0]),
            ints(path),
            ints(starts[1]),
            window=np.concatenate(window),
            window_start=ints(ends),
        )


class StandIn(Drafter):
    """A drafter that asks for nodes all the time: it uses none of them, or all in vain."""

    needs = Needs(shape="tree")

    def __init__(self, name: str) -> None:
        self.name = name

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        if self.name == "silent":
            return [tree.EMPTY] * batch.num_seqs
        return [tree.chain([VOCAB - 1] * budget, self.name) for budget in budgets.tolist()]


def run(
    scenario: str,
    section: dict[str, Any] | None,
    budget: int,
    *,
    stand_in: str | None = None,
    repeating: bool = False,
    num_blocks: int = 1024,
) -> Outcome:
    """One scenario from its first request to its last token."""
    config = EngineConfig.load(
        {
            "model": "none",
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": budget,
            "speculative_config": section or _PLAIN,
        }
    )
    target = KnownTextTarget(repeating=repeating)
    drafter = StandIn(stand_in) if stand_in else _drafter(config.speculative_config)
    drafting = Drafting(drafter, VOCAB)
    trees = drafting.proposes_trees
    scheduler = Scheduler(config, num_blocks, max_model_len=8192, tree_drafts=trees)
    loop = Loop(scheduler, target, drafting)
    arrivals = SCENARIOS[scenario]()
    last = str(len(arrivals) - 1)
    step = first_token = 0
    while scheduler.has_work or step <= arrivals[-1].step:
        for index, arrival in enumerate(arrivals):
            if arrival.step == step:
                loop.add(_request(target, index, arrival))
        step += 1
        for delta in loop.step():
            if delta.request_id == last and not first_token:
                first_token = step - arrivals[-1].step
        scheduler.check()
    return Outcome(step, target.max_running, first_token, scheduler.counts.num_preemptions)


def drafter_run(scenario: str, name: str, budget: int, **options: Any) -> Outcome:
    """`run` with one of `DRAFTERS`."""
    stand_in = name if name in ("silent", "wrong") else None
    return run(scenario, DRAFTERS[name], budget, stand_in=stand_in, **options)


def _drafter(section: SpeculationBase) -> Drafter:
    host: Any = SimpleNamespace(tokenizer=Path(), vocab_size=VOCAB)
    return build(section, host)


def _request(target: KnownTextTarget, index: int, arrival: Arrival) -> Request:
    name = str(index)
    text = target.text(index, name, arrival.prompt_len + arrival.max_tokens)
    sampling = SamplingParams(temperature=0.0, max_tokens=arrival.max_tokens)
    prompt = text[: arrival.prompt_len]
    return Request(name, prompt, sampling, seed=index, priority=arrival.priority)


def main() -> None:
    """Prints the table: steps / most running / steps to the latecomer's first token."""
    heads = [f"{scenario}, {budget}" for scenario in SCENARIOS for budget in BUDGETS]
    table = Rows("drafter", "text", *heads)
    for repeating in (False, True):
        text = "repeats" if repeating else "new"
        for name in ("none", *DRAFTERS):
            cells = []
            for scenario in SCENARIOS:
                for budget in BUDGETS:
                    done = (
                        run(scenario, None, budget, repeating=repeating)
                        if name == "none"
                        else drafter_run(scenario, name, budget, repeating=repeating)
                    )
                    cells.append(f"{done.num_steps} / {done.max_running} / {done.first_token}")
            table.add(name, text, *cells)


if __name__ == "__main__":
    main()
