"""Penalties, biases, `min_tokens` and log-probabilities on the device equal those of the host."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.scheduler import tree
from outrider.scheduler.loop import Loop, OverlapLoop
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Masks, Opening, Request, SeatSettings, ints
from outrider.tests.helpers.device_step import lives
from outrider.tests.helpers.device_step.edited import check_edits
from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.workers.model.conftest import checkpoint  # noqa: F401
from outrider.workers.collective import Collective
from outrider.workers.device_step import seats
from outrider.workers.device_step.seats import SeatSizes
from outrider.workers.model.target import load_model

VOCAB = lives.VOCAB
KINDS = (
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.1},
    {"temperature": 0.0, "presence_penalty": -0.7, "logprobs": 4},
    {"temperature": 0.9, "logit_bias": {3: 5.0, 9: -100.0, 40: 2.5}},
    {"temperature": 0.0, "min_tokens": 8, "logprobs": 0},
    {"temperature": 1.1, "min_p": 0.02, "logprobs": 2, "frequency_penalty": 1.5},
    {"temperature": 0.7},
    {"temperature": 0.0, "prompt_logprobs": 1},
)


@pytest.mark.parametrize("num_nodes", [0, 3, 12, 70])
def test_equal_bits(num_nodes):
    with torch.inference_mode():
        for seed in range(4):
            check_edits(TensorOps(), seed, num_nodes)


def requests_of(rng: random.Random) -> list[Request]:
    """Of a few tokens each, so that they repeat, and with many end tokens."""
    requests = []
    for index in range(len(KINDS)):
        prompt = ints([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))])
        settings = SamplingParams(max_tokens=rng.randrange(9, 40), **KINDS[index % len(KINDS)])
        stops = tuple(rng.sample(range(VOCAB), 6))
        requests.append(
            Request(f"r{index}", prompt, settings, seed=rng.randrange(1 << 62), eos_token_ids=stops)
        )
    return requests


def lived(loop, requests) -> tuple[dict, dict]:
    """Tokens by request, and log-probabilities."""
    scores = {request.id: [] for request in requests}
    step = loop.step

    def stepped():
        deltas = step()
        for delta in deltas:
            scores[delta.request_id] += delta.logprobs
        return deltas

    loop.step = stepped
    return lives.emitted(loop, requests, 0), scores


def close(found, wanted) -> bool:
    """Whether two lists of log-probabilities have equal tokens and nearly equal values."""

    def flat(scores):
        return [(each.chosen, *[value for _, value in each.top]) for each in scores]

    def ids(scores):
        return [[token for token, _ in each.top] for each in scores]

    return ids(found) == ids(wanted) and all(
        np.allclose(one, other, rtol=1e-4, atol=1e-4)
        for one, other in zip(flat(found), flat(wanted), strict=True)
    )


def test_random_lives(checkpoint):  # noqa: F811
    """Plain steps and trees, with preemptions, in both loops."""
    path, _ = checkpoint("llama")
    model = load_model(path, device=lives.CPU, collective=Collective.single(), ops=TensorOps())
    requests = requests_of(random.Random(3))
    host = lives.make(Loop, model, lives.GuessingDrafting({}, 3), 120, on_device=False)
    wanted, scores = lived(host, requests)
    for kind, truth in ((Loop, wanted), (OverlapLoop, {})):
        loop = lives.make(kind, model, lives.GuessingDrafting(truth, 3), 30, on_device=False)
        loop.target = lives.InProcessTarget(model, 30, on_device=True, vocab=VOCAB)
        found, found_scores = lived(loop, requests)
        assert found == wanted
        assert all(close(found_scores[key], scores[key]) for key in scores)
        assert loop.target.service.device_step.num_steps > 10
        loop.scheduler.check()


class MaskedDrafting(lives.GuessingDrafting):
    """Half of the requests may only emit what a mask of their name and place allows."""

    def propose(self, batch):
        drafts = super().propose(batch)
        for row, name in enumerate(batch.request_ids):
            if int(name[1:]) % 2:
                begin, parents = self.emitted.get(name, 0), drafts[row].parents
                places = begin + np.append(0, tree.depths(parents))
                bits = np.stack([self.bits(name, int(place)) for place in places])
                masks = Masks(ints(range(len(places))), bits)
                drafts[row] = replace(drafts[row], masks=masks)
        return drafts

    @staticmethod
    def bits(name: str, place: int):
        return np.random.default_rng([int(name[1:]), place]).integers(0, 1 << 31, 4, np.int32)


def test_random_lives_with_masks(checkpoint):  # noqa: F811
    """Grammars' masks are rows on the device: beside other requests, over chains and trees."""
    path, _ = checkpoint("llama")
    model = load_model(path, device=lives.CPU, collective=Collective.single(), ops=TensorOps())
    requests = lives.requests_of(random.Random(4))
    host = lives.make(Loop, model, MaskedDrafting({}, 3), 120, on_device=False)
    wanted = lives.emitted(host, requests, 0)
    for name, tokens in wanted.items():
        for place, token in enumerate(tokens if int(name[1:]) % 2 else ()):
            assert MaskedDrafting.bits(name, place)[token // 32] >> token % 32 & 1
    for truth in ({}, wanted):
        loop = lives.make(Loop, model, MaskedDrafting(truth, 3), 40, on_device=False)
        loop.target = lives.InProcessTarget(model, 40, on_device=True, vocab=VOCAB)
        service, masked = loop.target.service.device_step, []

        def noted(plan, shape_of=service.shape_of, masked=masked):
            shape = shape_of(plan)
            if plan.drafts is not None and plan.drafts.masks is not None:
                masked.append(shape is not None)
            return shape

        service.shape_of = noted
        assert lives.emitted(loop, requests, 0) == wanted
        assert sum(masked) > 5
        loop.scheduler.check()


def test_rows_of_a_seat_are_padded_and_within_the_vocabulary():
    settings = SeatSettings(
        1, min_tokens=2, ends=ints([4, 200]), bias_ids=ints([-1, 7, 101]),
        bias_values=np.array([1.0, 2.0, 3.0], np.float32), num_logprobs=2,
    )  # fmt: skip
    rows = seats.edit_rows(Opening(0, ints([1, 2, 3]), 3, settings), VOCAB)
    assert rows["bias_ids"][:2].tolist() == [7, 0]
    assert rows["biases"][:1].view(np.float32).tolist() == [2.0]
    assert rows["ends"][:2].tolist() == [4, 0]
    assert rows["edits"][-4:].tolist() == [5, 2, 1, 1]


def test_large_tables_are_left_to_the_host():
    sizes = SeatSizes(2000, 64, 10, 4, vocab_size=152_000)
    assert sizes.edits_obstacle == "the counts of tokens would take 1160 MiB, more than 1024"
    assert not sizes.has_edits
    assert "edits" not in sizes.parts
    assert SeatSizes(256, 64, 10, 4, vocab_size=256_000).has_edits
