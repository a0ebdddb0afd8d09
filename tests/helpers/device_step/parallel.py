"""The target's services of several ranks, which compare what every step left on them."""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.tests.helpers.device_step import lives
from outrider.workers.device_step.seats import SeatSizes
from outrider.workers.seats import gather
from outrider.workers.target import TargetService
from outrider.workers.transport.channel import ThreadChannel, finished
from outrider.workers.verify import make_rule

RANKS = 2


class ParallelTarget:
    """The ranks' services behind the loop's protocol; compares what every step left on them."""

    def __init__(
        self, models, num_blocks: int, *, on_device: bool, heads=(), num_draft_nodes: int = 0
    ) -> None:
        vocab = models[0].info.vocab_size
        sizes = SeatSizes(
            lives.SEATS, lives.MAX_LEN, num_blocks, lives.BLOCK, num_draft_nodes, vocab
        )
        self.services = [
            TargetService(
                model,
                num_blocks,
                lives.BLOCK,
                make_rule("coupled"),
                head,
                device_step=sizes if on_device else None,
            )
            for model, head in zip(models, heads or [None] * len(models), strict=True)
        ]
        self.drafted: dict[tuple[str, int], tuple] = {}  # by request and number of known tokens
        self.posted: list[tuple[str, ...]] = []
        self.on_device = on_device
        self.left: list[list[list[torch.Tensor]]] = [[] for _ in models]  # by rank and step
        self.channel = ThreadChannel(
            [lambda plan, rank=rank: self._verify(rank, plan) for rank in range(len(models))]
        )
        self.num_equal = 0  # device steps after which the ranks were compared

    def verify(self, batch, drafts):
        self.post(batch, drafts)
        return self.collect()

    def post(self, batch, drafts) -> None:
        plan = replace(batch.plan, drafts=gather(drafts, batch.samples))
        self.posted.append(batch.request_ids)
        self.channel.send(plan, 60.0)

    def collect(self):
        verdict = self.channel.receive(60.0)
        if self.on_device:
            first, *others = [steps.pop(0) for steps in self.left]
            for other in others:
                assert all(map(torch.equal, first, other))
            self.num_equal += verdict.compacted
        names, made = self.posted.pop(0), verdict.next_drafts
        for row, name in enumerate(names if made is not None else ()):
            assert not made.error
            span = slice(made.start[row], made.start[row + 1])
            if made.lens[row]:
                tree_of = made.tokens[span].tolist(), made.parents[span].tolist()
                self.drafted[name, int(made.lens[row])] = tree_of
        return verdict

    def _verify(self, rank: int, plan):
        service = self.services[rank]
        verdict = finished(service.post(plan, rank))
        assert (verdict is None) == (rank > 0)
        if service.device_step is not None:
            step, seats = service.device_step._step, service.device_step.seats
            left = [step.outcome, step.logprobs, seats.memory, seats.edits.counts]
            self.left[rank].append([tensor.clone() for tensor in left])
        return verdict
