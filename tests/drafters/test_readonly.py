"""A user's drafter reads what the engine computes with; a write raises and changes nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from outrider.config import UserConfig
from outrider.drafters.drafting import Drafting
from outrider.drafters.protocol import NoDrafter
from outrider.drafters.user import User, readonly
from outrider.scheduler import tree

from ..helpers.toy import VOCAB, continuation, next_token


class Writes(NoDrafter):
    """Drafts well, and scribbles over one array that it is handed."""

    name = "writes"

    def __init__(self, path: str) -> None:
        self.path = path.split(".")
        self.texts: dict[str, list[int]] = {}

    def write(self, **given: Any) -> None:
        value = given.get(self.path[0])
        for name in self.path[1:]:
            value = getattr(value, name, None)
        if value is not None and len(value):
            value[...] = 1

    def open(self, requests):
        for request in requests:
            self.texts[request.id] = request.prompt.tolist()
            self.write(request=request)

    def propose(self, batch, budgets):
        drafts = [tree.chain([next_token(tuple(self.texts["a"]))][:n], "writes") for n in budgets]
        budgets -= 1  # these are its own
        self.write(batch=batch)
        return drafts

    def observe(self, batch, verdict):
        self.texts["a"] += verdict.tokens(0).tolist()
        self.write(verdict=verdict)


class Forgets(NoDrafter):
    """Changes what is no array: settings of a request, and lists."""

    def open(self, requests):
        requests[0].sampling.logit_bias.clear()
        requests.clear()

    def close(self, request_ids):
        request_ids.clear()


def drafting_of(drafter: type, **options: Any) -> Drafting:
    path = f"{__name__}:{drafter.__name__}"
    return Drafting(User(UserConfig(drafter=path, options=options, timeout_s=10)), VOCAB)


@pytest.mark.parametrize(
    "path",
    [
        "request.prompt", "batch.samples", "batch.max_nodes", "batch.max_depth",
        "batch.plan.seats", "batch.plan.context_lens", "batch.plan.chunk_lens",
        "batch.plan.tokens", "batch.plan.blocks", "verdict.emitted", "verdict.emitted_start",
        "verdict.path_start",
    ],
)  # fmt: skip
def test_a_write_is_a_fault_and_the_tokens_stay(make_loop, request_of, drive, caplog, path):
    drafting = drafting_of(Writes, path=path)
    loop = make_loop(drafting=drafting)
    loop.add(request_of("a", (1, 2), 20))
    with caplog.at_level(logging.ERROR):
        assert drive(loop) == {"a": continuation((1, 2), 20)}
    assert drafting.stats.faults >= 1
    (record,) = caplog.records
    assert "read-only" in str(record.exc_info[1].__cause__)
    drafting.shutdown()


def test_one_that_only_reads_has_no_faults(make_loop, request_of, drive):
    drafting = drafting_of(Writes, path="nothing")
    loop = make_loop(drafting=drafting)
    loop.add(request_of("a", (1, 2), 20))
    assert drive(loop) == {"a": continuation((1, 2), 20)}
    assert drafting.stats.faults == 0
    assert drafting.stats.num_acc_tokens == 10
    drafting.shutdown()


def test_settings_and_lists_are_copies(make_loop, request_of):
    drafting = drafting_of(Forgets)
    loop = make_loop(drafting=drafting)
    request = request_of("a", (1, 2), 20, sampling={"logit_bias": {3: 1.0}})
    loop.add(request)
    ended = ["a"]
    drafting.close(ended)
    assert (request.sampling.logit_bias, ended) == ({3: 1.0}, ["a"])
    assert drafting.stats.faults == 0
    drafting.shutdown()


def test_arrays_are_views_and_stay_writable_for_the_engine(request_of):
    request = request_of("a", (1, 2), tenant="t")
    shown = readonly(request)
    assert shown.prompt.base is request.prompt
    assert (shown.prompt.flags.writeable, request.prompt.flags.writeable) == (False, True)
    assert (shown.id, shown.tenant, shown.sampling) == ("a", "t", request.sampling)
