"""A rank behind its socket: the next plan is taken in while the device computes a step."""

from __future__ import annotations

import random
import socket
import threading
from dataclasses import replace

from outrider.scheduler.loop import Loop, OverlapLoop
from outrider.tests.helpers.device_step import lives
from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.workers.model.conftest import checkpoint  # noqa: F401
from outrider.workers import seats
from outrider.workers.collective import Collective
from outrider.workers.device_step.seats import SeatSizes
from outrider.workers.model.target import load_model
from outrider.workers.target import PostedVerdict, TargetService
from outrider.workers.transport.socket_channel import SocketChannel, serve
from outrider.workers.verify import make_rule


class SlowDevice(PostedVerdict):
    """A device that is ready once the engine waits for it and has sent nothing else."""

    target: SocketTarget

    @property
    def is_ready(self) -> bool:
        target = self.target
        return target.num_sent == target.num_handled and target.is_waiting


class SocketTarget:
    """The target's service behind a step channel, as the engine sees it."""

    def __init__(self, model, num_blocks: int) -> None:
        sizes = SeatSizes(lives.SEATS, lives.MAX_LEN, num_blocks, lives.BLOCK)
        rule = make_rule("coupled")
        self.service = TargetService(model, num_blocks, lives.BLOCK, rule, device_step=sizes)
        ours, theirs = socket.socketpair()
        self.channel = SocketChannel([ours])
        self.num_sent = self.num_handled = 0
        self.is_waiting = False
        self.num_early = 0  # plans that came in before the verdict on the last one was sent
        self._last: PostedVerdict | None = None
        threading.Thread(target=serve, args=(theirs, 0, self._handle), daemon=True).start()

    def _handle(self, plan):
        self.num_early += self._last is not None and not self._last._is_settled
        reply = self.service.post(plan, 0)
        self._last = reply if isinstance(reply, PostedVerdict) else None
        if self._last is not None:
            reply.__class__ = SlowDevice
            reply.target = self
        self.num_handled += 1
        return reply

    def verify(self, batch, drafts):
        self.post(batch, drafts)
        return self.collect()

    def post(self, batch, drafts) -> None:
        plan = replace(batch.plan, drafts=seats.gather(drafts, batch.samples))
        self.num_sent += 1
        self.channel.send(plan, 60.0)

    def collect(self):
        self.is_waiting = True
        verdict = self.channel.receive(60.0)
        self.is_waiting = False
        return verdict


def test_random_lives(checkpoint):  # noqa: F811
    model = load_model(checkpoint("llama")[0], device=lives.CPU,
                       collective=Collective.single(), ops=TensorOps())  # fmt: skip
    requests, drafting = lives.requests_of(random.Random(3))[:6], lives.GuessingDrafting({}, 3)
    plain = lives.make(Loop, model, drafting, 120, on_device=False)
    wanted = lives.emitted(plain, requests, 3)
    loop = lives.make(OverlapLoop, model, drafting, 60, on_device=True)
    loop.target = SocketTarget(model, 60)
    assert lives.emitted(loop, requests, 3) == wanted
    assert loop.target.num_early > 10
    loop.scheduler.check()
    loop.target.channel.close()
