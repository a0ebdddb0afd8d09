"""A worker group seen from the drafter whose model lives in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.drafters.protocol import Drafted
from outrider.errors import WorkerDiedError
from outrider.scheduler.types import ints
from outrider.workers.group import GroupDraftModel
from outrider.workers.spec import ModelReport


class Group:
    """A group that answers at once; a restart gives new reports, as both real ones do."""

    alive = True

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        draft = ModelReport("Tiny", 9, 64, 4, 4, 8, (), "float32", "family", "", "cpu")
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
