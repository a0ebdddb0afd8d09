"""Heads in the device step: drafts and tokens are the host path's, without a value on the host."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.config import (
    EngineConfig,
    MTPConfig,
)
from outrider.drafters.drafting import Drafting
from outrider.drafters.head_drafters import Colocated
from outrider.drafters.heads.protocol import Trees
from outrider.scheduler import tree
from outrider.scheduler.budget import likeliest
from outrider.scheduler.loop import Loop, OverlapLoop
from outrider.scheduler.sampling import SamplingParams
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
from outrider.tests.helpers.device_step.plans import SIZES, open_plan, stage
from outrider.tests.helpers.heads import cases
from outrider.tests.helpers.heads.cases import CASES
from outrider.tests.helpers.models import write_guessable
from outrider.tests.helpers.mtp import Made
from outrider.tests.workers.device_step.conftest import RecordedGraphs, Tape, WeightsOnMeta
from outrider.workers.attention import KVCache
from outrider.workers.collective import Collective
from outrider.workers.device_step import draft
from outrider.workers.device_step.draft import DeviceHead, head_obstacle
from outrider.workers.device_step.seats import DeviceSeats
from outrider.workers.device_step.service import DeviceStep
from outrider.workers.device_step.shape import Sampler, all_shapes
from outrider.workers.head import HeadService
from outrider.workers.model.target import load_model

CPU = torch.device("cpu")
VOCAB = 96


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[type, Path]:
    """A target by section, and one for the others (`object`)."""
    modules = Made(tmp_path_factory.mktemp("modules"), "llama", 3)
    return {
        MTPConfig: Path(modules.folder),
        object: Path(write_guessable(tmp_path_factory.mktemp("target"))),
    }


@pytest.fixture
def target(request, folders) -> Path:
    """The target of the test's case."""
    case = request.node.callspec.params["case"] if hasattr(request.node, "callspec") else "chain"
    return folders.get(CASES[case][0], folders[object])


@pytest.fixture(scope="module")
def loaded(folders):
    single = Collective.single()
    return {
        path: load_model(path, device=CPU, collective=single, ops=TensorOps())
        for path in folders.values()
    }


@pytest.fixture
def model(target, loaded):
    return loaded[target]


@pytest.fixture(scope="module")
def section_of(folders, tmp_path_factory):
    """`section_of(case)`: its section, over files written once."""
    made = {}

    def make(case):
        if case not in made:
            target = folders.get(CASES[case][0], folders[object])
            made[case] = cases.section_of(CASES[case], target, tmp_path_factory.mktemp(case))
        return made[case]

    return make


@pytest.fixture
def head_of(model, target, section_of):
    return lambda case: HeadService(section_of(case), model, target, SEATS)


class DraftingTarget(InProcessTarget):
    """Collects every draft of the head, by request and number of known tokens."""

    def __init__(self, model, num_blocks, **options) -> None:
        super().__init__(model, num_blocks, **options)
        self._has_chances = options["head"].head.has_chances
        self.drafted: dict[tuple[str, int], tuple] = {}
        self.num_ahead = 0  # steps planned with drafts that only the ranks had
        self.names: list[tuple[str, ...]] = []  # of posted steps

    def post(self, batch, drafts) -> None:
        super().post(batch, drafts)
        self.num_ahead += bool(batch.plan.own_drafts and batch.max_nodes.any())
        self.names.append(batch.request_ids)

    def collect(self):
        verdict, names = super().collect(), self.names.pop(0)
        made = verdict.next_drafts
        assert made is None or not made.error
        if made is not None and made.tokens.size:
            assert (made.chances is not None) == self._has_chances
            assert made.chances is None or ((made.chances > 0) & (made.chances < 1)).all()
        for row, name in enumerate(names if made is not None else ()):
            span = slice(made.start[row], made.start[row + 1])
            if made.lens[row]:
                tree = made.tokens[span].tolist(), made.parents[span].tolist()
                self.drafted[name, int(made.lens[row])] = tree
        return verdict


def make(kind, model, section, head, num_blocks, *, on_device, vocab=0, num_seats=SEATS):
    num_tokens = 64 if num_seats == SEATS else 512
    options = {"block_size": BLOCK, "max_num_seqs": num_seats, "max_num_batched_tokens": num_tokens}
    section = section.model_copy(update={"adaptive_draft_len": False})
    config = EngineConfig.load({"model": "m", "speculative_config": section, **options})
    overlaps = kind is OverlapLoop
    scheduler = Scheduler(config, num_blocks, MAX_LEN, tree_drafts=True, ranks_append=overlaps)
    drafting = Drafting(Colocated("head"), VOCAB, section=section, ranks_draft=overlaps)
    target = DraftingTarget(
        model,
        num_blocks,
        on_device=on_device,
        head=head,
        num_draft_nodes=section.max_nodes,
        vocab=vocab,
        num_seats=num_seats,
    )
    return kind(scheduler, target, drafting)


# Of a kind that others resemble, in the slow tests.
RESEMBLED = "fixed", "masks", "masks-best", "block", "block-best", "block-markov", "states-best"


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.slow] * (each in RESEMBLED)) for each in CASES]
)
def test_random_lives(model, head_of, section_of, case):
    """Few blocks, so that requests are preempted; prompts in chunks; all temperatures."""
    rng, section = random.Random(case), section_of(case)
    requests = requests_of(rng, VOCAB)[:6]
    plain = make(Loop, model, section, head_of(case), 120, on_device=False)
    wanted = emitted(plain, requests, 0)
    for kind, num_blocks in ((Loop, 120), (OverlapLoop, 40)):
        loop = make(kind, model, section, head_of(case), num_blocks, on_device=True)
        assert emitted(loop, requests, 0) == wanted
        loop.scheduler.check()
        assert loop.target.service.device_step.num_steps > 20
        assert loop.drafting.stats.num_acc_tokens > 2
        assert (loop.target.num_ahead > 10) == (kind is OverlapLoop)
        assert (loop.target.num_behind > 10) == (kind is OverlapLoop)
        assert loop.drafting.stats.faults == 0
        common = loop.target.drafted.keys() & plain.target.drafted.keys()
        assert len(common) > 20
        # What the token budget leaves may differ, so one is a prefix of the other.
        for key in common:
            pair = loop.target.drafted[key], plain.target.drafted[key]
            if case == "beams" and min(len(trees[0]) for trees in pair) < section.draft_len:
                continue  # a shorter search, which other beams survive
            for ours, theirs in zip(*pair, strict=True):
                assert ours[: len(theirs)] == theirs[: len(ours)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["chain", "dynamic"])
def test_random_lives_on_replays(model, head_of, section_of, case):
    """Every step of every shape is the replay of a recording made before the first request."""
    section, api = section_of(case), RecordedGraphs()
    requests = requests_of(random.Random(3), VOCAB)[:5]
    plain = make(Loop, model, section, head_of(case), 120, on_device=False)
    wanted = emitted(plain, requests, 0)
    loop = make(Loop, model, section, head_of(case), 120, on_device=True)
    device_step = loop.target.service.device_step
    device_step.capture(api)
    assert device_step.report.num_captured == device_step.report.num_shapes
    assert emitted(loop, requests, 0) == wanted
    assert api.num_replays == device_step.num_steps > 10
    assert loop.target.drafted == plain.target.drafted


@pytest.mark.parametrize("case", ["chain", "dynamic"])
def test_unequal_drafts_share_the_rows_of_a_step(model, target, section_of, case):
    """Each request with a length of its own, from none to a whole draft: the host path's tokens."""
    section, num_seats = section_of(case), 16
    own = [0, 0, 1, 0, None]  # nodes of each request; None: all
    requests = []
    for index, each in enumerate(requests_of(random.Random(case), VOCAB)):
        sampling = each.sampling.model_copy(update={"max_tokens": 16})
        wish = replace(each.speculation, max_draft_len=own[index % 5])
        requests.append(replace(each, sampling=sampling, speculation=wish, eos_token_ids=()))
    found, shapes = [], []
    for kind, on_device in ((Loop, False), (Loop, True), (OverlapLoop, True)):
        head = HeadService(section, model, target, num_seats)
        options = {"on_device": on_device, "num_seats": num_seats}
        loop = make(kind, model, section, head, 400, **options)
        if on_device:
            captured = loop.target.service.device_step._captured
            run = captured.run
            captured.run = lambda shape, run=run: (shapes.append(shape), run(shape))
        found.append(emitted(loop, requests, 0, at_once=True))
        loop.scheduler.check()
        assert loop.drafting.stats.num_acc_tokens > 2
    assert found[0] == found[1] == found[2]
    uneven = [each for each in shapes if each.num_rows < each.num_seqs * each.query_len]
    assert len(uneven) > 5, (len(uneven), len(shapes))
    assert {each.num_nodes for each in uneven} == {section.max_nodes}


@pytest.mark.parametrize("seed", range(8))
def test_the_likeliest_nodes_of_all_drafts_are_kept(seed):
    """As the host chooses, with nodes alike, drafts that ended, and rooms."""
    rng, (num_drafts, num_nodes) = np.random.default_rng(seed), (9, 6)
    levels = rng.random(4 if seed % 2 else 100) * 0.9 + 0.1
    chances = rng.choice([*levels, 1.0], (num_drafts, num_nodes)).astype(np.float32)
    sizes, room = (ints(rng.integers(0, num_nodes + 1, num_drafts)) for _ in range(2))
    sizes = sizes if seed % 3 else np.full_like(sizes, num_nodes)
    ends = np.minimum(sizes, room)
    drafts = [
        replace(tree.chain(range(end), "head"), chances=row[:end])
        for row, end in zip(chances, ends.tolist(), strict=True)
    ]
    given = Trees(
        torch.zeros(chances.shape, dtype=torch.int64),
        None,
        torch.from_numpy(sizes) if seed % 3 else None,
    )
    tensors = torch.from_numpy(chances), torch.from_numpy(room)
    for num_kept in (0, 1, 7, int(ends.sum()) - 1, int(ends.sum()), 1000):
        wanted = [each.num_nodes for each in likeliest(drafts, num_kept)]
        found = draft.likeliest(given, *tensors, torch.tensor([num_kept], dtype=torch.int32))
        assert found.sizes.tolist() == wanted
        assert sum(wanted) == min(max(num_kept, 0), ends.sum())


@pytest.mark.parametrize("case", ["block-markov"])
def test_ranks_choose_the_nodes_of_a_step(model, target, section_of, monkeypatch, case):
    """A number of nodes for all requests together: tokens are those without a drafter, whether
    the host knows the drafts before it plans their step, or only the device."""
    section, num_seats, rng = section_of(case), 16, random.Random(0)
    requests = []
    for each in requests_of(random.Random(case), VOCAB):
        sampling = each.sampling.model_copy(update={"max_tokens": 24})
        requests.append(replace(each, sampling=sampling, eos_token_ids=()))

    def loop_of(kind, **options):
        head = HeadService(section, model, target, num_seats)
        return make(kind, model, section, head, 400, num_seats=num_seats, **options)

    plain = loop_of(Loop, on_device=False)
    plain.scheduler.budget.enabled = False
    wanted = emitted(plain, requests, 0, at_once=True)
    for kind in (Loop, OverlapLoop):
        loop, shapes, counts = loop_of(kind, on_device=True), [], []
        budget, device_step = loop.scheduler.budget, loop.target.service.device_step
        assert device_step.report.chooses
        wishes, run = budget.wishes, device_step._captured.run

        def granted(*args, wishes=wishes, budget=budget):
            found = wishes(*args)
            budget.num_kept = rng.choice((6, 18, 24)) if found else -1
            return found

        def spy(shape, run=run, shapes=shapes, counts=counts, seats=device_step.seats):
            run(shape)
            shapes.append(shape)
            who = seats._views["seats"][: shape.num_seqs].long()
            counts.append(int(seats.draft_counts[who].sum()))

        monkeypatch.setattr(budget, "wishes", granted)
        monkeypatch.setattr(device_step._captured, "run", spy)
        loop.drafting.shorten = lambda batch, drafts: likeliest(drafts, batch.plan.num_kept)
        assert emitted(loop, requests, 0, at_once=True) == wanted
        loop.scheduler.check()
        assert loop.drafting.stats.num_acc_tokens > 10
        assert loop.drafting.stats.faults == 0
        assert (loop.target.num_ahead > 10) == (kind is OverlapLoop)
        drafting = [each for each in shapes if each.num_nodes]
        assert max(each.num_rows for each in drafting) < 60, "as many as all of twelve have"
        assert {6, 18, 24} <= set(counts), sorted(set(counts))
        assert max(counts) == 24
        uneven = [each for each in drafting if each.num_rows < each.num_seqs * each.query_len]
        assert len(uneven) > 5


EDITED = (
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    {"temperature": 0.8, "logit_bias": {3: 5.0, 9: -100.0}, "logprobs": 2},
    {"temperature": 0.0, "min_tokens": 6, "logprobs": 0},
    {"temperature": 0.0},
)


def test_requests_with_edits_beside_a_head(model, head_of, section_of):
    """Penalties, biases, `min_tokens` and log-probabilities in the batches that a head drafts."""
    rng, section = random.Random(2), section_of("chain")
    requests = [
        replace(request, sampling=SamplingParams(max_tokens=12, **EDITED[index % len(EDITED)]))
        for index, request in enumerate(requests_of(rng, VOCAB)[:6])
    ]
    results = []
    for on_device in (False, True):
        loop = make(Loop, model, section, head_of("chain"), 120, on_device=on_device, vocab=VOCAB)
        step, scores = loop.step, {request.id: [] for request in requests}

        def stepped(step=step, scores=scores):
            deltas = step()
            for delta in deltas:
                scores[delta.request_id] += [each.chosen for each in delta.logprobs]
            return deltas

        loop.step = stepped
        results.append((emitted(loop, requests, 0), scores))
        assert loop.drafting.stats.num_acc_tokens > 2
    assert loop.target.service.device_step.num_steps > 10
    (wanted, host_scores), (found, scores) = results
    assert found == wanted
    for name, values in host_scores.items():
        assert scores[name] == pytest.approx(values, abs=1e-4)
    assert sum(map(len, scores.values())) > 20


def step_of(model, head, num_draft_nodes, device=CPU) -> DeviceStep:
    vocab = model.info.vocab_size
    given = {"num_draft_nodes": num_draft_nodes, "has_chances": head.head.has_chances}
    sizes = replace(SIZES, vocab_size=vocab, **given)
    shapes = (*model.kv_shapes, *head.kv_shapes)
    cache = KVCache(shapes, SIZES.num_blocks + 1, SIZES.block_size, model.info.dtype, device)
    head.attach(cache)
    seats = DeviceSeats(sizes, device)
    return DeviceStep(model.runner.model, cache, seats, DeviceHead(head, cache, seats))


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_it_completes_without_values(model, target, section_of, case):
    """On the meta device, where whatever reads a value raises.

    With and without a draft, greedy and sampled; each with each for a chain and a tree.
    """
    section = section_of(case)
    head = HeadService(section, model, target, SIZES.num_seats)
    step = step_of(model, head, section.max_nodes, torch.device("meta"))
    ids = head.head.target_ids
    if ids is not None:
        head.head.target_ids = ids.to("meta")
    with WeightsOnMeta():
        for shape in all_shapes(SIZES.num_seats, section.max_nodes):
            is_whole = shape.num_seqs == SIZES.num_seats and shape.num_nodes in (
                0,
                section.max_nodes,
            )
            is_drafted, is_sampled = shape.num_nodes > 0, shape.sampler is Sampler.SAMPLED
            if is_whole and (case in ("chain", "dynamic") or is_drafted == is_sampled):
                step.run(shape)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@torch.inference_mode()
def test_one_tape_for_all_data_of_a_shape(model, target, section_of, case, temperature):
    """Operations, shapes and addresses do not depend on data; a replay computes new data."""
    section, rng = section_of(case), np.random.default_rng(0)
    num_nodes = section.max_nodes
    head = HeadService(section, model, target, SIZES.num_seats)
    step = step_of(model, head, num_nodes)
    for storage in step.cache._storages:
        storage.copy_(torch.from_numpy(rng.normal(size=storage.shape)))
    state = [step.seats.memory, step.outcome, *step.cache._storages]
    step.run(stage(step, open_plan(rng, 4, num_nodes, temperature, VOCAB)))  # places constants
    tapes = []
    for num_seqs in (3, 4):
        plan = open_plan(rng, num_seqs, num_nodes, temperature, VOCAB)
        shape = stage(step, plan, (4, num_nodes))
        assert shape.num_nodes == num_nodes
        before = [tensor.clone() for tensor in state]
        with Tape() as tape:
            step.run(shape)
        tapes.append(tape)
    assert tapes[0].signature() == tapes[1].signature()
    eager = [tensor.clone() for tensor in state]
    for tensor, old in zip(state, before, strict=True):
        tensor.copy_(old)
    tapes[0].replay()
    for tensor, computed in zip(state, eager, strict=True):
        assert torch.equal(tensor, computed)
    assert not torch.equal(before[1], eager[1])


def test_obstacles(model, target, section_of):
    def found(section, model=model, **options):
        head = HeadService(section, model, target, **options)
        return head_obstacle(head, section.max_nodes)

    for case in CASES.keys() - {"modules"}:
        assert found(section_of(case)) == ""
    chain = section_of("chain")
    assert "run as torch modules: the caller" in found(chain, fused=False)
    long = chain.model_copy(update={"max_draft_len": 256})
    assert "256 nodes is longer than a step's 255" in found(long)
    host = load_model(target, device=CPU, collective=Collective.single())
    assert "'cpu' plan steps" in found(chain, host)
