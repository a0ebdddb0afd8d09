"""Separate drafters seen from the engine: which way the target sends, and who is given up."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from outrider.drafters.protocol import Drafted, HeadAnswer, HeadAsk
from outrider.errors import WorkerDiedError, WorkerError, WorkersReplacedError
from outrider.scheduler.types import ints
from outrider.workers.drafter_ends import GroupDraftModel, GroupHead
from outrider.workers.spec import ModelReport, RankLocation
from outrider.workers.transport.channel import (
    LinkOffer,
    ListenFeatures,
    NoAnswerError,
    OpenFeatures,
)


class Group:
    """Answers by a script; a question without an answer stays open."""

    def __init__(self, location: RankLocation) -> None:
        self.location = location
        self.reports = [SimpleNamespace(location=location, head=SimpleNamespace(capture=(3,)))]
        self.on_restart = []
        self.on_death = []
        self.sent = []
        self.answers = []
        self.alive = True
        self.is_being_replaced = False

    def send(self, message) -> None:
        if not self.alive:
            raise WorkerDiedError("the workers are down")
        self.sent.append(message)
        if isinstance(message, ListenFeatures):
            self.answers.append(LinkOffer())

    def receive(self, timeout_s):
        if not self.answers:
            raise NoAnswerError
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, message):
        self.sent.append(message)

    def restart(self) -> None:
        self.alive = True

    def shutdown(self) -> None:
        self.alive = False

    drop = shutdown


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def pair(ours: RankLocation, theirs: RankLocation, transport="auto", timeout_s=100.0):
    target, group = Group(theirs), Group(ours)
    return GroupHead(target, group, 7, transport, timeout_s), target, group


@pytest.mark.parametrize(
    ("ours", "theirs", "transport", "way"),
    [
        (RankLocation("a", 1), RankLocation("a", 1), "auto", (True, False, False)),
        (RankLocation("a", 1), RankLocation("a", 1), "socket", (False, False, False)),
        (RankLocation("a", 1), RankLocation("a", 1), "distributed", (False, False, True)),
        (RankLocation("a", 1), RankLocation("a", 2), "auto", (False, False, False)),
        (RankLocation("a", 1), RankLocation("b", 1), "auto", (False, True, False)),
        (RankLocation("a", 1, "x"), RankLocation("a", 2, "y"), "auto", (False, False, True)),
        (RankLocation("a", 1, "x"), RankLocation("a", 2, "x"), "auto", (False, False, False)),
        (RankLocation("a", 1, "x"), RankLocation("b", 2), "auto", (False, True, False)),
    ],
)
def test_the_shortest_way_is_taken(ours, theirs, transport, way):
    _, target, group = pair(ours, theirs, transport)
    assert group.sent == [ListenFeatures(*way)]
    (opened,) = target.sent
    assert isinstance(opened, OpenFeatures)
    assert (opened.link, opened.capture) == (7, (3,))


def test_a_group_that_broke_is_not_tried_again():
    head, _, group = pair(RankLocation("a", 1, "x"), RankLocation("a", 2, "y"))
    head.ask(HeadAsk(1, 1.0))
    group.answers = [HeadAnswer(1, None, "broken", linked=False)]
    assert head.answer(0.0).error == "broken"
    assert wait_for(head.revive)
    assert [each.distributed for each in group.sent if isinstance(each, ListenFeatures)] == [
        True,
        False,
    ]


def test_answers_from_before_a_restart_are_not_taken_for_others():
    head, target, group = pair(RankLocation("a", 1), RankLocation("a", 2))
    head.ask(HeadAsk(1, 1.0))
    head.ask(HeadAsk(2, 1.0))
    group.answers = [HeadAnswer(1, None), HeadAnswer(2, None)]
    for told in target.on_restart:
        told()
    assert head.num_outstanding == 0
    assert wait_for(head.revive)
    head.ask(HeadAsk(3, 1.0))
    group.answers.append(HeadAnswer(3, None))
    assert head.answer(0.0).step == 3
    assert group.sent[-1] == HeadAsk(3, 1.0)


def test_a_question_that_failed_does_not_keep_the_link_from_being_opened():
    """The target is restarted while two answers are on their way, and the first is an error."""
    head, target, group = pair(RankLocation("a", 1), RankLocation("a", 2))
    head.ask(HeadAsk(1, 1.0))
    head.ask(HeadAsk(2, 1.0))
    group.answers = [WorkerError("out of memory"), HeadAnswer(2, None)]
    for told in target.on_restart:
        told()
    assert wait_for(head.revive)
    assert [type(each) for each in target.sent] == [OpenFeatures, OpenFeatures]
    head.ask(HeadAsk(3, 1.0))
    group.answers.append(HeadAnswer(3, None))
    assert head.answer(0.0).step == 3


def test_steps_go_on_while_a_busy_head_is_asked_where_it_listens():
    """Its offer comes behind what it computes, which may take as long as it likes."""
    head, target, group = pair(RankLocation("a", 1), RankLocation("a", 2))
    may_answer, receive = threading.Event(), group.receive

    def busy(timeout_s):
        assert may_answer.wait(min(timeout_s, 60))
        return receive(timeout_s)

    group.receive = busy
    for _ in range(2):  # the target may die again meanwhile
        for told in target.on_restart:
            told()
        assert not head.revive()
        with pytest.raises(WorkersReplacedError, match="being opened"):
            head.ask(HeadAsk(1, 1.0))
    assert len(group.sent) == len(target.sent) + 1 == 2
    may_answer.set()
    assert wait_for(head.revive)
    assert len(group.sent) == len(target.sent) == 2
    head.ask(HeadAsk(1, 1.0))
    group.answers.append(HeadAnswer(1, None))
    assert head.answer(0.0).step == 1


def test_a_head_that_hangs_as_it_is_asked_where_it_listens_is_given_up():
    head, target, group = pair(RankLocation("a", 1), RankLocation("a", 2))
    group.send = lambda message: None  # there will be no answer
    for told in target.on_restart:
        told()
    assert wait_for(lambda: not group.alive)
    del group.send
    assert wait_for(head.revive)  # once it was started again
    assert isinstance(target.sent[-1], OpenFeatures)


def test_a_head_that_died_before_it_was_linked_owes_nothing():
    """Its successor would be waited for, and given up, for answers that it was never asked."""
    head, target, group = pair(RankLocation("a", 1), RankLocation("a", 2))
    head.ask(HeadAsk(1, 1.0))
    send, group.send = group.send, None
    group.send = lambda message: (group.shutdown(), send(message))
    for told in target.on_restart:
        told()
    assert head.num_outstanding == 0
    with pytest.raises(WorkerDiedError, match="not linked"):
        head.ask(HeadAsk(2, 1.0))
    group.is_being_replaced = True  # as an engine's sleep has it
    with pytest.raises(WorkersReplacedError):
        head.ask(HeadAsk(3, 1.0))


def test_a_silent_head_is_given_up():
    head, _, group = pair(RankLocation("a", 1), RankLocation("a", 2), timeout_s=0.0)
    head.ask(HeadAsk(1, 1.0))
    with pytest.raises(WorkerDiedError, match="did not answer"):
        head.answer(0.0)
    assert not group.alive
    assert head.num_outstanding == 0


# -- a draft model that the target sends its verdicts


def told_model():
    target, group = Group(RankLocation("a", 1)), Group(RankLocation("a", 2))
    draft = ModelReport("Tiny", 9, 64, 4, 4, 8, (), "float32", "family", "", "cpu")
    for each in (target, group):
        each.message_bytes = (0, 0)
        each.reports = [SimpleNamespace(location=each.location, target=None, draft=draft)]
    model = GroupDraftModel(group, 64, owned=True, verdicts_of=(target, 5))
    return model, target, group


def drafted(model: GroupDraftModel, group: Group, step: int) -> None:
    """A request and its answer, behind offers that were asked for before."""
    model.ask(SimpleNamespace(plan=SimpleNamespace(step=step)))
    group.answers.append(Drafted(ints([]), ints([0]), None, step=step))
    answer = model.answer(0.0)
    assert answer is not None
    assert answer.step == step


def test_a_draft_model_is_linked_with_its_first_answer_and_again_after_restarts():
    model, target, group = told_model()
    assert group.sent == [ListenFeatures(here=False, remote=False, distributed=False)]
    assert not model.reads_verdicts
    drafted(model, group, 1)
    assert model.reads_verdicts
    (opened,) = target.sent
    assert (opened.link, opened.capture) == (5, ())
    drafted(model, group, 2)
    assert len(target.sent) == 1
    for told in target.on_restart:
        told()
    assert not model.reads_verdicts
    drafted(model, group, 3)
    assert model.reads_verdicts
    group.reports = [*group.reports]  # it died, and others are there
    group.answers.clear()
    assert model.revive()
    assert not model.reads_verdicts
    drafted(model, group, 4)
    assert model.reads_verdicts
    assert [type(each) for each in target.sent] == [OpenFeatures] * 3
    model.detach()
    assert not model.reads_verdicts
    assert target.sent[-1].offer is None
    assert not target.on_restart
    model.detach()  # as drafters are that are ended twice


def test_a_draft_model_drafts_where_the_target_cannot_be_linked():
    model, target, group = told_model()

    def dead(message):
        raise WorkerDiedError("the workers are down")

    target.call = dead
    drafted(model, group, 1)
    assert not model.reads_verdicts
    del target.call
    for told in target.on_restart:
        told()
    group.alive = False  # it died meanwhile: its own restart opens a link
    for told in target.on_restart:
        told()
    assert sum(isinstance(each, ListenFeatures) for each in group.sent) == 2
