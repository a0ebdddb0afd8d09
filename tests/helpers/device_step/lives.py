"""Random lives of requests on a target's service, and drafts that guess what it emits."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from outrider.config import EngineConfig
from outrider.scheduler import tree
from outrider.scheduler.loop import OverlapLoop
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import Batch, Draft, Request, SpeculationOptions, Verdict, ints
from outrider.workers import seats
from outrider.workers.device_step.seats import SeatSizes
from outrider.workers.target import TargetService, follows
from outrider.workers.transport.channel import PendingReply, finished
from outrider.workers.verify import make_rule

CPU = torch.device("cpu")
VOCAB, BLOCK, MAX_LEN, SEATS = 101, 4, 96, 5
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.05},
]
LEAST_PROB = 0.03
PENALISED = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5}  # takes the host path


class InProcessTarget:
    """The target's service behind the loop's protocol."""

    def __init__(
        self,
        model,
        num_blocks: int,
        *,
        on_device: bool,
        head=None,
        num_draft_nodes: int = 0,
        vocab: int = 0,  # 0: requests with penalties and the like take the host path
        fed_layers: tuple[int, ...] = (),
        num_seats: int = SEATS,
    ) -> None:
        has_chances = bool(num_draft_nodes) and head.head.has_chances
        sizes = SeatSizes(
            num_seats, MAX_LEN, num_blocks, BLOCK, num_draft_nodes, vocab, has_chances
        )
        sizes = replace(sizes, fed_layers=fed_layers)
        rule, sizes = make_rule("coupled"), sizes if on_device else None
        self.service = TargetService(model, num_blocks, BLOCK, rule, head, sizes)
        self.posted: list[Verdict | PendingReply | None] = []
        self.num_behind = 0  # steps that were posted before the verdict on the one before
        self.num_compacted = 0  # steps with accepted nodes that were moved on the device

    def verify(self, batch: Batch, drafts: list[Draft]) -> Verdict:
        self.post(batch, drafts)
        return self.collect()

    def post(self, batch: Batch, drafts: list[Draft]) -> None:
        plan = replace(batch.plan, drafts=seats.gather(drafts, batch.samples))
        is_behind = bool(self.posted) and isinstance(self.posted[-1], PendingReply)
        self.num_behind += is_behind and follows(plan)
        before = self._num_device_steps
        self.posted.append(self.service.post(plan, 0))
        if self.service.device_step is not None and self.service._leaves_all:
            takes = self.service.device_step.takes(plan)
            assert self._num_device_steps - before == takes.any(), "whatever the others need"

    @property
    def _num_device_steps(self) -> int:
        return self.service.device_step.num_steps if self.service.device_step else 0

    def collect(self) -> Verdict:
        verdict = finished(self.posted.pop(0))
        assert verdict is not None
        for row in range(len(verdict.num_emitted) if verdict.compacted else 0):
            nodes = verdict.nodes(row).tolist()
            self.num_compacted += nodes != list(range(len(nodes)))
        return verdict


class GuessingDrafting:
    """Random trees around what plain decoding emits, sometimes wrong, sometimes empty."""

    may_rest, ranks_draft = True, False

    def __init__(self, truth: dict[str, tuple[int, ...]], seed: int) -> None:
        self.truth, self.random = truth, random.Random(seed)
        self.is_idle = not truth
        self.emitted: dict[str, int] = {}

    def open(self, requests) -> None:
        self.emitted.update({request.id: 0 for request in requests})

    def propose(self, batch: Batch) -> list[Draft]:
        if self.is_idle:
            return [tree.EMPTY] * batch.num_seqs
        return [
            self._tree(self.truth[name][self.emitted[name] :], int(batch.max_nodes[row]))
            for row, name in enumerate(batch.request_ids)
        ]

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        for row, name in enumerate(batch.request_ids):
            self.emitted[name] = self.emitted.get(name, 0) + len(verdict.tokens(row))

    def close(self, request_ids) -> None:
        pass

    def _tree(self, rest: tuple[int, ...], room: int) -> Draft:
        """Wrong nodes before right ones, so that accepted paths have to be compacted."""
        rng, tokens, parents, at, depth = self.random, [], [], -1, 0
        while len(tokens) < room and depth < len(rest) and rng.random() < 0.9:
            if rng.random() < 0.4:
                wrong = rng.randrange(VOCAB)
                taken = {t for t, p in zip(tokens, parents, strict=True) if p == at}
                if wrong != rest[depth] and wrong not in taken:
                    tokens.append(wrong)
                    parents.append(at)
                continue
            tokens.append(rest[depth])
            parents.append(at)
            at, depth = len(tokens) - 1, depth + 1
        return Draft(ints(tokens), ints(parents), source="guess")


def requests_of(rng: random.Random, vocab: int = VOCAB) -> list[Request]:
    requests = []
    for index in range(12):
        prompt = ints([rng.randrange(vocab) for _ in range(rng.randrange(1, 30))])
        is_penalised = index % 4 == 3
        chosen = PENALISED if is_penalised else rng.choice(SETTINGS)
        settings = SamplingParams(max_tokens=rng.randrange(1, 5 if is_penalised else 40), **chosen)
        stops = (rng.randrange(vocab),) if rng.random() < 0.3 else ()
        request = Request(
            f"r{index}", prompt, settings, seed=rng.randrange(1 << 62), eos_token_ids=stops
        )
        if index % 3 == 2:  # a head's drafts are cut
            request = replace(request, speculation=SpeculationOptions(min_prob=LEAST_PROB))
        requests.append(request)
    return requests


def emitted(loop, requests, seed, *, at_once: bool = False) -> dict[str, tuple[int, ...]]:
    rng, waiting = random.Random(seed), list(requests)
    outputs = {request.id: () for request in requests}
    for _ in range(3000):
        while waiting and at_once:
            loop.add(waiting.pop(0))
        if waiting and (not loop.has_work or rng.random() < 0.1):
            loop.add(waiting.pop(0))
        for delta in loop.step():
            assert delta.finish_reason != "error", delta
            outputs[delta.request_id] += delta.token_ids
        if not waiting and not loop.has_work:
            return outputs
    raise AssertionError("the loop did not come to an end")


def make(kind, model, drafting, num_blocks, *, on_device, **keys):
    speculative = {"decoding_type": "NGram", "adaptive_draft_len": False, "max_draft_len": 6}
    options = {"block_size": BLOCK, "max_num_seqs": SEATS, "max_num_batched_tokens": 24, **keys}
    config = EngineConfig.load({"model": "m", "speculative_config": speculative, **options})
    appends = kind is OverlapLoop
    scheduler = Scheduler(config, num_blocks, MAX_LEN, tree_drafts=True, ranks_append=appends)
    scheduler.budget.enabled = not drafting.is_idle
    return kind(scheduler, InProcessTarget(model, num_blocks, on_device=on_device), drafting)
