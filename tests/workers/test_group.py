"""A worker group seen from the drafter whose model lives in it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider.config import DraftTargetConfig
from outrider.drafters.draft_target import DraftTarget
from outrider.drafters.drafting import Drafting
from outrider.drafters.members import Members
from outrider.drafters.protocol import Drafted
from outrider.errors import WorkerDiedError
from outrider.scheduler.types import ints
from outrider.workers.collective import Collective
from outrider.workers.drafter_ends import GroupDraftModel
from outrider.workers.group import _together
from outrider.workers.spec import ModelReport
from outrider.workers.transport.channel import ThreadChannel


class Group:
    """A group that answers at once; a restart gives new reports, as both real ones do."""

    alive, message_bytes = True, (0, 0)

    def __init__(self) -> None:
        self.restart()

    def restart(self, **changed: int) -> None:
        draft = ModelReport("Tiny", 9, 64, 4, 4, 8, (), "float32", "family", "", "cpu")
        draft = replace(draft, **changed)
        self.reports = [SimpleNamespace(target=None, draft=draft)]

    def call(self, message):
        return Drafted(ints([]), ints([0]), None)

    def shutdown(self) -> None: ...


def _draft(model: GroupDraftModel) -> None:
    model.ask(SimpleNamespace(plan=SimpleNamespace(step=-1)))  # type: ignore[arg-type]
    assert model.answer(0.0) is not None


def test_a_colocated_model_notices_that_the_target_took_its_cache_along():
    group = Group()
    model = GroupDraftModel(group, 64, owned=False)  # type: ignore[arg-type]
    _draft(model)
    group.restart()  # the engine did it: a rank died in the target's step
    with pytest.raises(WorkerDiedError, match="restarted"):
        _draft(model)
    assert model.revive()
    _draft(model)


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("num_kv_blocks", "num_blocks"),
        ("block_size", "block_size"),
        ("max_model_len", "max_model_len"),
    ],
)
def test_a_member_that_comes_back_smaller_is_not_used_and_the_reason_is_shown(key, part, caplog):
    group = Group()
    before = getattr(group.reports[0].draft, part)
    model = GroupDraftModel(group, 64, owned=True)  # type: ignore[arg-type]
    section = DraftTargetConfig(drafter_group="small", max_draft_len=2)
    source = SimpleNamespace(
        reason="", num_members=1, changes=lambda: [("one", model)], shutdown=lambda: None
    )
    members = Members(section, source, "draft_target", lambda each: DraftTarget(section, each))
    drafter = members._drafters["one"]
    source.changes = lambda: []
    drafting = Drafting(members, 9)
    drafter._lost("a rank died")
    group.restart(**{part: before - 1})
    for _ in range(2):
        assert not drafter.is_up()
    reason = f"{key}: the draft model came back with {before - 1}, not {before}"
    (health,) = drafting.all_health().values()
    assert (health["state"], health["reason"]) == ("down", reason)
    assert [each.message for each in caplog.records if reason in each.message] == [
        f"drafter draft_target: {reason}"  # once
    ]
    group.restart()
    assert drafter.is_up()
    assert drafting.all_health()["draft_target"]["reason"] == ""


def test_ranks_that_wait_for_one_that_failed_fail_with_it():
    members = Collective.threads(3, 3600.0)  # what a rank would wait

    def load(rank: int) -> None:
        if rank == 1:
            raise MemoryError("rank 1 has no room")
        members[rank].all_reduce(torch.ones(1))

    with (
        ThreadPoolExecutor(3) as pool,
        pytest.raises(MemoryError, match="rank 1 has no room"),
    ):
        _together(pool, load, range(3), members)  # type: ignore[arg-type]


def test_a_late_draft_is_counted_with_its_own_request_and_answer():
    class Sized(Group):
        message_bytes = (300, 90)

        def send(self, message): ...

        def receive(self, timeout_s):
            return Drafted(ints([]), ints([0]), None)

    group = Sized()
    model = GroupDraftModel(group, 64, owned=True)  # type: ignore[arg-type]
    model.ask(SimpleNamespace(plan=SimpleNamespace(step=-1)))  # type: ignore[arg-type]
    group.message_bytes = (9000, 91)  # another message since
    drafted = model.answer(0.0)
    assert (drafted.sent_bytes, drafted.received_bytes) == (300, 91)

    channel = ThreadChannel([lambda message: message])
    sizes = iter([10, 20])
    receive = channel._receive

    def sized(timeout_s):
        answer, channel.received_bytes = receive(timeout_s), next(sizes)
        return answer

    channel._receive = sized
    channel.send("a", 9.0)
    assert channel.call("b", 9.0) == "b"
    assert channel.received_bytes == 20
    assert channel.receive(9.0) == "a"
    assert channel.received_bytes == 10
    channel.close()
