"""A draft model's chains in one graph: the same as of forwards that the host launches in turn."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outrider.config import DraftTargetConfig, EngineConfig
from outrider.drafters.draft_target import DraftTarget
from outrider.drafters.drafting import Drafting
from outrider.drafters.protocol import Drafted, DraftStep
from outrider.scheduler.loop import Loop, OverlapLoop
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import ints
from outrider.tests.helpers.device_step.lives import (
    BLOCK,
    MAX_LEN,
    SEATS,
    InProcessTarget,
    emitted,
    requests_of,
)
from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.workers.device_step.conftest import (
    RecordedGraphs,
    TapedCollective,
    WeightsOnMeta,
)
from outrider.workers.attention import KVCache
from outrider.workers.collective import Collective
from outrider.workers.device_step.chains import (
    ChainShape,
    ChainSizes,
    ChainStep,
    chain_bytes,
    chain_obstacle,
)
from outrider.workers.device_step.seats import BYTES_PER_GRAPH
from outrider.workers.device_step.shape import Sampler
from outrider.workers.draft import DraftService
from outrider.workers.model.target import load_model
from outrider.workers.spec import ModelSpec, WorkerSpec

CPU = torch.device("cpu")
VOCAB, CHAIN, STEP_TOKENS = 96, 4, 24


@pytest.fixture(scope="module")
def models(tiny):
    """A target, and a draft model that often agrees with it."""
    return [loaded(path, Collective.single()) for path in (tiny.target, tiny.draft)]


def loaded(path: str, collective: Collective):
    return load_model(Path(path), device=CPU, collective=collective, ops=TensorOps())


class InProcessDraftModel:
    """The draft model's service behind the drafter's protocol; keeps every chain."""

    vocab_size, max_model_len, block_size = VOCAB, MAX_LEN, BLOCK
    max_num_batched_tokens = STEP_TOKENS
    reads_verdicts = False

    def __init__(
        self, model, num_blocks: int, chains: ChainSizes | None, translation: bytes = b""
    ) -> None:
        self.num_blocks = num_blocks
        given = (num_blocks, BLOCK, model.collective, 0, translation, chains)
        self.service = DraftService(model, *given)
        self.drafted: Drafted | None = None
        self.chains: dict[tuple[int, int], list[int]] = {}  # by seed and number of known tokens
        self.num_drawing = 0  # rounds with chains
        self.num_hits = 0  # tokens of new sequences that were in the cache

    def ask(self, step: DraftStep) -> None:
        self.drafted = drafted = self.service.draft(step)
        plan, starts = step.plan, drafted.start
        assert (np.diff(starts) <= plan.max_nodes).all()
        self.num_drawing += bool((plan.max_nodes > 0).any())
        is_new = np.isin(plan.seats, [opening.seat for opening in plan.openings])
        self.num_hits += int(plan.context_lens[is_new].sum())
        seeds = self.service._seats._columns["seed"][plan.seats].tolist()
        known = self.service._seats.known_lens(plan).tolist()
        for row in np.flatnonzero(plan.max_nodes).tolist():
            chain = drafted.tokens[starts[row] : starts[row + 1]].tolist()
            self.chains[seeds[row], known[row]] = chain

    def answer(self, timeout_s: float) -> Drafted | None:
        drafted, self.drafted = self.drafted, None
        return drafted

    def revive(self) -> bool:
        return True

    def shutdown(self) -> None: ...


def sizes_of(num_blocks: int, **sizes) -> ChainSizes:
    return replace(ChainSizes(SEATS, CHAIN, MAX_LEN, num_blocks, BLOCK), **sizes)


def make(
    kind, models, num_blocks, *, on_device, num_draft_blocks=120, adaptive=False,
    translation=b"", **keys
):  # fmt: skip
    section = DraftTargetConfig(
        speculative_model="m", max_draft_len=CHAIN, adaptive_draft_len=adaptive, **keys
    )
    options = {"block_size": BLOCK, "max_num_seqs": SEATS, "max_num_batched_tokens": 64}
    config = EngineConfig.load({"model": "m", "speculative_config": section, **options})
    appends = kind is OverlapLoop
    scheduler = Scheduler(config, num_blocks, MAX_LEN, ranks_append=appends)
    chains = sizes_of(num_draft_blocks) if on_device else None
    if chains is not None and translation:
        chains = replace(chains, samplers=(Sampler.SAMPLED,))
    model = InProcessDraftModel(models[1], num_draft_blocks, chains, translation)
    drafter = DraftTarget(section, model)
    target = InProcessTarget(models[0], num_blocks, on_device=on_device)
    return kind(scheduler, target, Drafting(drafter, VOCAB, section=section))


def together(loop, requests) -> dict[str, tuple[int, ...]]:
    """What requests emit that come at once."""
    outputs = {request.id: () for request in requests}
    for request in requests:
        loop.add(request)
    while loop.has_work:
        for delta in loop.step():
            outputs[delta.request_id] += delta.token_ids
    return outputs


def drafter_of(loop) -> InProcessDraftModel:
    return loop.drafting.drafter._model


OTHER = np.arange(VOCAB, dtype=np.int32)  # a vocabulary that has two of three tokens
OTHER[::3] = -1 - OTHER[::3]
LIVES = {
    "whole": {},
    "adaptive": {"adaptive": True},
    "unsure": {"p_min": 0.5},
    "translated": {"translation": OTHER.tobytes()},
}


@pytest.mark.parametrize("keys", LIVES.values(), ids=LIVES)
def test_random_lives(models, keys):
    """Few blocks of either model, prompts in chunks, all temperatures and cuts."""
    requests = requests_of(random.Random(0), VOCAB)[:7]
    plain = make(Loop, models, 120, on_device=False, **keys)
    wanted = emitted(plain, requests, 0)
    for kind, num_blocks, num_draft_blocks in ((Loop, 120, 40), (OverlapLoop, 40, 120)):
        blocks = {"num_blocks": num_blocks, "num_draft_blocks": num_draft_blocks}
        loop = make(kind, models, on_device=True, **blocks, **keys)
        assert emitted(loop, requests, 0) == wanted
        loop.scheduler.check()
        loop.drafting.drafter.check()
        assert loop.drafting.stats.faults == 0
        assert loop.drafting.stats.num_acc_tokens > 5
        ours, theirs = drafter_of(loop), drafter_of(plain)
        assert ours.service.device_step.num_steps == ours.num_drawing > 10
        common = ours.chains.keys() & theirs.chains.keys()
        assert len(common) > 10
        for key in common:  # budgets may differ, so one is a prefix of the other
            pair = ours.chains[key], theirs.chains[key]
            assert pair[0][: len(pair[1])] == pair[1][: len(pair[0])]
        lens = {len(chain) for chain in ours.chains.values()}
        assert lens >= ({0, 1} if "p_min" in keys else {CHAIN})


def test_a_stored_prefix_is_not_computed_again(models):
    """Requests with one beginning: chains behind a cached prefix are those without the cache."""
    rng = random.Random(4)
    first, *others = requests_of(rng, VOCAB)[:5]
    prompt = ints([rng.randrange(VOCAB) for _ in range(40)])
    requests = [replace(each, prompt=np.append(prompt, each.prompt[:3])) for each in others]
    requests.insert(0, replace(first, prompt=prompt))
    loops = [make(Loop, models, 120, on_device=on_device) for on_device in (False, True)]
    wanted, found = (emitted(loop, requests, 2) for loop in loops)
    assert found == wanted
    assert drafter_of(loops[0]).chains == drafter_of(loops[1]).chains
    assert drafter_of(loops[1]).num_hits == drafter_of(loops[0]).num_hits > 0


def test_every_shape_is_replayed(models):
    """Recorded before the first request, with padding alone."""
    requests = requests_of(random.Random(3), VOCAB)[:5]
    plain = make(Loop, models, 120, on_device=False)
    wanted = together(plain, requests)
    loop, api = make(Loop, models, 120, on_device=True), RecordedGraphs()
    device_step = drafter_of(loop).service.device_step
    device_step.capture(api)
    report = device_step.report
    assert report.num_captured == report.num_shapes == 4 * len(sizes_of(120).seqs)
    assert together(loop, requests) == wanted
    assert api.num_replays == device_step.num_steps > 10
    assert drafter_of(loop).chains == drafter_of(plain).chains


def test_what_no_graph_holds_is_drawn_on_the_host(models, monkeypatch):
    """Here, what more than one sequence draws."""
    monkeypatch.setattr(ChainSizes, "seqs", (1,))
    requests = requests_of(random.Random(3), VOCAB)[:5]
    wanted = together(make(Loop, models, 120, on_device=False), requests)
    loop = make(Loop, models, 120, on_device=True)
    assert together(loop, requests) == wanted
    assert drafter_of(loop).num_drawing > drafter_of(loop).service.device_step.num_steps > 0


def test_the_smallest_shape_serves():
    sizes, plain = sizes_of(120, max_num_seqs=5), Sampler.PLAIN
    assert sizes.seqs == (1, 2, 3, 4, 5)
    assert sizes_of(120, max_num_seqs=300).seqs[-3:] == (32, 48, 64)
    assert sizes.shape(2, 3, plain) == ChainShape(2, 4, plain)
    assert sizes.shape(5, 2, plain) == ChainShape(5, 2, plain)
    assert sizes.shape(6, 2, plain) is sizes.shape(1, 5, plain) is None


def step_of(model, device=CPU) -> ChainStep:
    sizes, dtype = sizes_of(20), model.info.dtype
    cache = KVCache(model.kv_shapes, sizes.num_blocks + 1, BLOCK, dtype, device)
    return ChainStep(model.runner.model, cache, sizes)


@torch.inference_mode()
def test_it_completes_without_values(models):
    """On the meta device, where whatever reads a value raises."""
    step = step_of(models[1], torch.device("meta"))
    with WeightsOnMeta():
        for shape in sizes_of(20).shapes:
            step.run(shape)


def test_no_level_writes_beyond_its_budget(models):
    """Blocks that no sequence of the step owns stay as they are, whatever their tables hold."""
    model = InProcessDraftModel(models[1], 60, sizes_of(60))
    loop = make(Loop, models, 120, on_device=True)
    loop.drafting.drafter._model = model
    storages, ask = model.service._cache._storages, model.ask

    def asked(step):
        before = [storage.clone() for storage in storages]
        ask(step)
        drafter, plan = loop.drafting.drafter, step.plan
        owned = {block for each in drafter._sequences.values() if each.seat in plan.seats.tolist()
                 for block in each.blocks}  # fmt: skip
        slots = np.arange(60 * BLOCK).reshape(60, BLOCK)
        others = torch.from_numpy(slots[[b for b in range(60) if b not in owned]].ravel())
        for one, other in zip(before, storages, strict=True):
            assert torch.equal(one[others], other[others])

    model.ask = asked
    together(loop, requests_of(random.Random(1), VOCAB)[:5])
    assert model.service.device_step.num_steps > 10


def test_ranks_draw_alike(run_ranks, tiny, models):
    """Two ranks with a part of the vocabulary each, eagerly and from recordings."""
    whole = InProcessDraftModel(models[1], 120, None)
    requests = requests_of(random.Random(5), VOCAB)[:7]

    def work(group):
        collective = TapedCollective(group)
        model = loaded(tiny.draft, collective)
        service = DraftService(model, 120, BLOCK, collective, chains=sizes_of(120))
        assert service.device_step is not None
        service.device_step.capture(RecordedGraphs(collective))
        drafted = [service.draft(step) for step in steps]
        return service.device_step.report.num_captured, service.device_step.num_steps, drafted

    steps: list[DraftStep] = []
    loop = make(Loop, models, 120, on_device=False)
    loop.drafting.drafter._model = whole
    ask, wanted = whole.ask, []

    def asked(step):
        steps.append(step)
        ask(step)
        wanted.append(whole.drafted)

    whole.ask = asked
    together(loop, requests)
    for num_captured, num_steps, drafted in run_ranks(2, work):
        assert num_captured == len(sizes_of(120).shapes)
        assert num_steps == whole.num_drawing > 10
        for ours, theirs in zip(drafted, wanted, strict=True):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert ours.start.tolist() == theirs.start.tolist()


def test_obstacles(models, tiny):
    draft = ModelSpec(tiny.draft, "auto", 16, 64, 128, 8, 256, 1 << 26, 0.5, max_draft_len=4)
    spec = WorkerSpec(1, "cuda", None, 60.0, draft=draft)

    def found(model=models[1], num_leases=0, **keys):
        own = replace(spec, num_leases=num_leases, draft=replace(draft, **keys))
        return chain_obstacle(model, own)

    assert found() == ""
    assert found(num_leases=2) == "several engines share the draft model"
    assert "token by token with the target's noise" in found(max_draft_len=0)
    assert "256 tokens is longer than a step's 255" in found(max_draft_len=256)


def test_memory_holds_logits_and_graphs():
    info = SimpleNamespace(vocab_size=128_000, hidden_size=2048)
    sizes = ChainSizes(256, 4, 32_768, 1000, 16)
    least = 64 * info.vocab_size * 4 + len(sizes.shapes) * BYTES_PER_GRAPH
    assert len(sizes.shapes) == 48
    assert least < chain_bytes(sizes, info) < least + (1 << 29)
    assert chain_bytes(sizes, info, 2) > chain_bytes(sizes, info)
