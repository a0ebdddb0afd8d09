"""What drafters report of themselves: slow, lost, disabled, or failing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.config import EngineConfig
from outrider.drafters.compose import Compose, Member
from outrider.drafters.drafting import Drafting
from outrider.drafters.protocol import Drafter, Health, Needs
from outrider.errors import WorkerDiedError
from outrider.scheduler.types import Verdict

from ..helpers.lookups import batch_of


class Worried(Drafter):
    """A drafter with a worker that is in a given state."""

    needs = Needs()

    def __init__(self, name: str, health: Health) -> None:
        self.name = name
        self._health = health

    def open(self, requests): ...
    def close(self, request_ids): ...
    def shutdown(self): ...

    def observe(self, batch, verdict): ...

    def propose(self, batch, budgets):
        raise WorkerDiedError("its process is gone")

    def health(self) -> Health:
        return self._health


@pytest.fixture
def section():
    config = {"decoding_type": "NGram", "acceptance_window": 1, "acceptance_length_threshold": 5}
    return EngineConfig.load({"model": "m", "speculative_config": config}).speculative_config


def test_faults_and_states_are_told():
    down = Health("down", "restarted in the background: gone")
    drafting = Drafting(Worried("w", down), vocab_size=9)
    assert drafting.all_health()["w"] == {
        "state": "down", "reason": "restarted in the background: gone", "last_fault": "",
    }  # fmt: skip
    drafting.propose(batch_of(["r"], [2]))
    assert drafting.all_health()["w"]["last_fault"] == "propose: its process is gone"


def test_a_closed_gate_disables_every_member(section):
    config = EngineConfig.load(
        {
            "model": "m",
            "speculative_config": {
                "decoding_type": "Compose",
                "members": [{"decoding_type": "NGram"}, {"decoding_type": "NGram"}],
            },
        }
    ).speculative_config
    members = [Member(Worried("w", Health("late", "slow")), 3, False) for _ in range(2)]
    drafting = Drafting(Compose(config, members, 9), 9, section=section)
    assert [each["state"] for each in drafting.all_health().values()] == ["late", "late"]
    gate = drafting._gate
    gate.proposed(SimpleNamespace(step=1, request_ids=["r"]), [SimpleNamespace(num_guesses=1)])
    gate.observe(SimpleNamespace(step=1, request_ids=["r"]), Verdict.empty(1, 1))
    gate.close(["r"])
    for each in drafting.all_health().values():
        assert each["state"] == "disabled"
        assert "acceptance_length_threshold = 5" in each["reason"]
