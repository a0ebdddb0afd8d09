"""The acceptance gate: the last requests' mean decides, and what it decides stays."""

from __future__ import annotations

from outrider.config import EngineConfig
from outrider.drafters.drafting import Drafting
from outrider.drafters.protocol import NoDrafter
from outrider.scheduler import tree
from outrider.scheduler.types import Verdict, ints
from outrider.tests.helpers.lookups import batch_of


class Two(NoDrafter):
    """Always drafts two tokens."""

    def propose(self, batch, budgets):
        return [tree.chain(ints([1, 2]), "two") if budget else tree.EMPTY for budget in budgets]


def drafting_of(window: int, threshold: float) -> Drafting:
    section = {
        "decoding_type": "NGram",
        "acceptance_window": window,
        "acceptance_length_threshold": threshold,
    }
    config = EngineConfig.load({"model": "m", "speculative_config": section})
    return Drafting(Two(), 10, section=config.speculative_config)


def finish(drafting: Drafting, name: str, accepted: list[int]) -> int:
    """A request whose steps accept so many tokens; how many nodes were drafted for it."""
    num_nodes = 0
    for count in accepted:
        batch = batch_of([name], [2])
        (draft,) = drafting.propose(batch)
        num_nodes += draft.num_nodes
        path = list(range(min(count, draft.num_nodes)))
        verdict = Verdict(
            0, ints([1] * (len(path) + 1)), ints([0, len(path) + 1]), ints(path),
            ints([0, len(path)]),
        )  # fmt: skip
        drafting.observe(batch, verdict)
    drafting.close([name])
    return num_nodes


def test_a_low_mean_ends_drafting_for_good():
    drafting = drafting_of(2, 1.0)
    assert finish(drafting, "a", [0, 0, 0]) == 6, "one request is no window"
    assert finish(drafting, "b", [2, 2]) == 4, "their mean is not below the threshold"
    assert finish(drafting, "c", [0]) == 2
    assert finish(drafting, "d", [1, 0, 0]) == 6, "2 and 0 have the mean 1"
    assert finish(drafting, "e", [2, 2]) == 0, "0 and 1/3 have not"
    assert finish(drafting, "f", [2]) == 0


def test_requests_without_a_draft_do_not_count():
    drafting = drafting_of(1, 1.0)
    batch = batch_of(["a"], [0])
    drafting.propose(batch)
    drafting.observe(batch, Verdict(0, ints([1]), ints([0, 1]), ints([]), ints([0, 0])))
    drafting.close(["a"])
    assert finish(drafting, "b", [2]) == 2
    assert finish(drafting, "c", [0]) == 2
