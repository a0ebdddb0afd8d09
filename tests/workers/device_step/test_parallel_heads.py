"""Heads on two ranks: all of them draft, alike, what one rank drafts on the host."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from outrider.config import EagleConfig, EngineConfig
from outrider.drafters.drafting import Drafting
from outrider.drafters.head_drafters import Colocated
from outrider.scheduler.loop import Loop, OverlapLoop
from outrider.scheduler.scheduler import Scheduler
from outrider.tests.helpers.device_step import lives
from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.helpers.device_step.parallel import RANKS, ParallelTarget
from outrider.tests.helpers.heads import cases
from outrider.tests.helpers.models import write_guessable
from outrider.tests.helpers.mtp import Made
from outrider.tests.workers.device_step.conftest import RecordedGraphs, TapedCollective
from outrider.workers.device_step.draft import head_obstacle
from outrider.workers.head import HeadService
from outrider.workers.model.target import load_model

VOCAB = 96
CASES = {name: case for name, case in cases.CASES.items() if name != "beams"} | {
    "targets-output": (EagleConfig, {"num_layers": 2}, {"max_draft_len": 3}),
}


class Setup:
    """A target on two ranks, and a head's section."""

    def __init__(self, case: str, tmp_path: Path, run_ranks) -> None:
        if case == "modules":
            self.target = Path(Made(tmp_path, "llama", 3).folder)
        else:
            self.target = Path(write_guessable(tmp_path / "target"))
        self.section = cases.section_of(CASES[case], self.target, tmp_path / "head")
        self._run_ranks = run_ranks
        self.models = run_ranks(RANKS, self._load)

    def _load(self, group):
        collective = TapedCollective(group)
        return load_model(self.target, device=lives.CPU, collective=collective, ops=TensorOps())

    def heads(self, *, on_every_rank: bool, min_saved_bytes: int = 0) -> list[HeadService | None]:
        def load(group):
            if group.rank and not on_every_rank:
                return None
            return HeadService(
                self.section,
                self.models[group.rank],
                self.target,
                lives.SEATS,
                on_every_rank=on_every_rank,
                min_saved_bytes=min_saved_bytes,
            )

        return self._run_ranks(RANKS, load)

    def loop(self, kind, num_blocks: int, heads, *, on_device: bool):
        options = {"block_size": lives.BLOCK, "max_num_seqs": lives.SEATS}
        section = self.section.model_copy(update={"adaptive_draft_len": False})
        options |= {"model": "m", "speculative_config": section, "max_num_batched_tokens": 64}
        overlaps = kind is OverlapLoop
        scheduler = Scheduler(
            EngineConfig.load(options),
            num_blocks,
            lives.MAX_LEN,
            tree_drafts=True,
            ranks_append=overlaps,
        )
        drafting = Drafting(
            Colocated("head"), VOCAB, section=self.section, ranks_draft=overlaps and on_device
        )
        num_nodes = self.section.max_nodes
        target = ParallelTarget(
            self.models, num_blocks, on_device=on_device, heads=heads, num_draft_nodes=num_nodes
        )
        return kind(scheduler, target, drafting)


@pytest.mark.parametrize(
    "case",
    [
        "chain",
        *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "chain"),
    ],
)
def test_random_lives(case, tmp_path, run_ranks):
    """Preemptions, prompts in chunks, all temperatures; after each step all ranks are equal."""
    setup = Setup(case, tmp_path, run_ranks)
    requests = lives.requests_of(random.Random(case), VOCAB)[:5]
    plain = setup.loop(Loop, 120, setup.heads(on_every_rank=False), on_device=False)
    wanted = lives.emitted(plain, requests, 0)
    heads = setup.heads(on_every_rank=True)
    assert [head_obstacle(head, setup.section.max_nodes) for head in heads] == ["", ""]
    for kind, num_blocks in ((Loop, 120), (OverlapLoop, 40)):
        loop = setup.loop(kind, num_blocks, heads, on_device=True)
        assert lives.emitted(loop, requests, 0) == wanted
        loop.scheduler.check()
        assert loop.target.num_equal > 10
        assert loop.drafting.stats.faults == 0
        assert loop.drafting.stats.num_acc_tokens > 2
        common = loop.target.drafted.keys() & plain.target.drafted.keys()
        assert len(common) > 10
        # What the token budget leaves may differ, so one is a prefix of the other.
        for key in common:
            pair = loop.target.drafted[key], plain.target.drafted[key]
            for ours, theirs in zip(*pair, strict=True):
                assert ours[: len(theirs)] == theirs[: len(ours)]


def test_a_cut_head_holds_its_part(tmp_path, run_ranks):
    """Weights and keys are halved where that pays, and whole where it does not."""
    setup = Setup("chain", tmp_path, run_ranks)
    (whole, *_) = setup.heads(on_every_rank=True, min_saved_bytes=1 << 40)
    heads = setup.heads(on_every_rank=True)
    for head in heads:
        (cut,), (full,) = head.kv_shapes, whole.kv_shapes
        assert 2 * cut.num_kv_heads == full.num_kv_heads
        (own,), (output,) = head.head.outputs, whole.head.outputs
        assert 2 * len(own.weight) == len(output.weight) == 80

    def logits(group):
        states = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            return heads[group.rank].draft_logits(states)

    with torch.inference_mode():
        states = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
        wanted = whole.draft_logits(states)
    for found in run_ranks(RANKS, logits):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["chain", "dynamic"])
def test_random_lives_on_replays(case, tmp_path, run_ranks):
    """Every step is a replay on both ranks, with the head's collectives in it."""
    setup = Setup(case, tmp_path, run_ranks)
    requests = lives.requests_of(random.Random(5), VOCAB)[:5]
    plain = setup.loop(Loop, 120, setup.heads(on_every_rank=False), on_device=False)
    wanted = lives.emitted(plain, requests, 0)
    loop = setup.loop(Loop, 120, setup.heads(on_every_rank=True), on_device=True)
    apis = [RecordedGraphs(model.collective) for model in setup.models]
    services = [service.device_step for service in loop.target.services]
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda service, api: service.capture(api), services, apis))
    for service in services:
        assert service.report.num_captured == service.report.num_shapes
        for left in (service._step.outcome, service._step.logprobs, *service.seats.drafts):
            left.zero_()
    assert lives.emitted(loop, requests, 0) == wanted
    assert loop.target.drafted == plain.target.drafted
    for service, api in zip(services, apis, strict=True):
        assert api.num_replays == service.num_steps > 10


def test_an_exception_of_a_divided_head_is_raised(tmp_path, run_ranks, monkeypatch):
    """The other rank may be waiting in a collective, so the step must not go on."""
    setup = Setup("one-pass", tmp_path, run_ranks)
    head = setup.heads(on_every_rank=True)[0]

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(head, "_run", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        head.run(None, None, (torch.zeros(1),))
