"""Every head in every corner at once: what it drafts hangs on the text, and on nothing else.

One run has chunked prefill, preemptions, prefix hits, a mix of temperatures, prompts of one token,
drafts that are cut by limits, stop tokens and aborts. Each of its drafts is compared with the one
that a fresh engine makes right after computing the same text in one piece.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from outrider.config import EngineConfig
from outrider.drafters import head_drafters
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Delta, NextDrafts, Request, SpeculationOptions, ints
from outrider.tests.helpers.head_files import (
    Tensors,
    eagle_tensors,
    medusa_tensors,
    write_eagle,
    write_medusa,
)
from outrider.tests.helpers.mtp import Made
from outrider.tests.helpers.redrafter import redrafter_tensors, write_redrafter, write_target

from ...helpers.engines import Box, engine_of

TRAINED = 8  # tokens: what the heads' configurations say, and every text exceeds
DYNAMIC = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_draft_len": 3}
FIXED = [[0, 0, 0], [0, 1], [1, 0], [2]]
SECTIONS = {
    "medusa": {"decoding_type": "Medusa", "medusa_choices": [[0, 0, 0], [0, 1], [1, 0]]},
    "redrafter": {
        "decoding_type": "ReDrafter",
        "redrafter_num_beams": 3,
        "redrafter_draft_len_per_beam": 3,
    },
    "eagle-chain": {"decoding_type": "Eagle", "max_draft_len": 3},
    "eagle-fixed": {"decoding_type": "Eagle", "eagle_choices": FIXED},
    "eagle-dynamic": {"decoding_type": "Eagle", "max_total_draft_tokens": 9, **DYNAMIC},
    "eagle3-chain": {"decoding_type": "Eagle3", "max_draft_len": 3},
    "eagle3-dynamic": {"decoding_type": "Eagle3", "max_total_draft_tokens": 9, **DYNAMIC},
    "mtp-one": {"decoding_type": "MTP", "use_mtp_vanilla": False, "max_draft_len": 3},
    "mtp-several": {"decoding_type": "MTP", "max_draft_len": 3},
    "mtp-dynamic": {"decoding_type": "MTP", "max_total_draft_tokens": 7, **DYNAMIC},
}
PREFIX = list(range(2, 10))  # two blocks, which end where texts part
HARD = {"max_num_batched_tokens": 28, "block_size": 4, "num_kv_blocks": 16, "max_model_len": 60}
EASY = {"max_num_batched_tokens": 8192, "num_kv_blocks": 512, "enable_prefix_caching": False}


@dataclass(frozen=True)
class Seen:
    """A draft and what it was made for."""

    request: Request
    text: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    room: int  # nodes that the request might have drafted


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Callable[[str], tuple[str, str]]:
    """By the head's kind: target and head."""
    folder = tmp_path_factory.mktemp("corners")
    target = write_target(folder / "target", num_layers=4)
    short = {"max_position_embeddings": TRAINED}
    captured = short | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    one = eagle_tensors(target, 1, config=short)
    three = eagle_tensors(target, 3, draft_vocab=80, config=captured)
    made = Made(folder / "mtp", "llama", 3)
    config = json.loads((Path(made.alone) / "config.json").read_text()) | short
    alone = write_eagle(folder / "modules", config, retrospective(made.extra, 12.0))
    known = {
        "medusa": (target, write_medusa(folder / "medusa", medusa_tensors(target, 3), "vllm")),
        "redrafter": (target, write_redrafter(folder / "rd", redrafter_tensors(target, rnn=True))),
        "eagle": (target, write_eagle(folder / "one", one[0], retrospective(one[1], 2.0))),
        "eagle3": (target, write_eagle(folder / "three", three[0], retrospective(three[1], 0.7))),
        "mtp": (str(folder / "mtp" / "plain"), alone),
    }
    return lambda case: known[case.partition("-")[0]]


def retrospective(tensors: Tensors, scale: float) -> Tensors:
    """A head whose guesses hang on all of the text, so that every row of it counts."""
    changed = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("o_proj.weight"):
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
            changed[name] = tensor + noise * tensor.std() * scale
        elif name.endswith("q_proj.weight"):
            changed[name] = tensor * 0.5  # looks at many rows at once
    return changed


def requests_of(stop: int) -> list[Request]:
    """All kinds that may meet in a batch; `stop` is a token that the fourth one emits."""
    greedy, hot = {"temperature": 0.0}, {"temperature": 0.9}
    off, one = SpeculationOptions(enabled=False), SpeculationOptions(max_draft_len=1)
    kinds = [
        ([*PREFIX, 7, 3, 50, 21, 9, 4, 33, 80, 61, *range(60, 75)], greedy, {}),
        ([5], greedy, {}),
        ([*PREFIX, 6], hot, {}),
        ([*PREFIX, 11, 12, 13, 90], greedy | {"stop_token_ids": (stop,)}, {}),
        ([*PREFIX, 77], greedy, {"speculation": off}),
        ([*PREFIX, 14, 15], greedy, {"speculation": one}),
        ([8], hot | {"top_k": 8}, {}),
        ([*PREFIX, 91, 92, 93], greedy | {"max_tokens": 1}, {}),
        ([*PREFIX, 40, 41], greedy | {"max_tokens": 4}, {}),
        ([*PREFIX, 31, 32, 33, 34, 35], greedy, {}),  # aborted
    ]
    return [
        Request(
            str(index),
            ints(prompt),
            SamplingParams(**{"max_tokens": 18, "ignore_eos": True, **sampling}),
            seed=100 + index,
            **fields,
        )
        for index, (prompt, sampling, fields) in enumerate(kinds)
    ]


def run(engine, requests: list[Request], aborted: str = "") -> dict[str, tuple]:
    """Tokens and reason of every request; one may be aborted after its first tokens."""
    box, tokens, ends = Box(), {request.id: () for request in requests}, {}
    engine.submit_all(requests, box)
    while len(ends) < len(requests):
        delta: Delta = box.deltas.get(timeout=60)
        tokens[delta.request_id] += delta.token_ids
        if delta.finish_reason:
            ends[delta.request_id] = delta.finish_reason
        elif delta.request_id == aborted:
            engine.abort(aborted)
    return {name: (tokens[name], ends[name]) for name in tokens}


def watch(monkeypatch, requests: list[Request]) -> tuple[list[Seen], list]:
    """Every draft that comes with a verdict from now on, and every step."""
    by_id = {request.id: request for request in requests}
    texts = {name: request.prompt.tolist() for name, request in by_id.items()}
    seen: list[Seen] = []
    steps: list = []
    observe = head_drafters.Colocated.observe

    def spy(self, batch, verdict):
        steps.append((batch, verdict))
        drafts = verdict.next_drafts or NextDrafts.empty(batch.num_seqs)
        for row, name in enumerate(batch.request_ids):
            texts[name] += verdict.tokens(row).tolist()
            span = slice(drafts.start[row], drafts.start[row + 1])
            if drafts.start[row] == drafts.start[row + 1]:
                continue
            assert drafts.lens[row] == len(texts[name])
            tokens, parents = drafts.tokens[span].tolist(), drafts.parents[span].tolist()
            known, room = tuple(texts[name]), int(batch.max_nodes[row])
            seen.append(Seen(by_id[name], known, tuple(tokens), tuple(parents), room))
        observe(self, batch, verdict)

    monkeypatch.setattr(head_drafters.Colocated, "observe", spy)
    return seen, steps


def afresh(engine, monkeypatch, seen: list[Seen], nodes: int) -> list[Seen]:
    """The drafts for the same texts, each computed in one piece by an engine that knows nothing."""
    sampling = {"max_tokens": nodes + 2, "stop_token_ids": ()}
    requests = [
        replace(
            each.request,
            id=f"again-{index}",
            prompt=ints(each.text[:-1]),
            sampling=each.request.sampling.model_copy(update=sampling),
            speculation=SpeculationOptions(),
        )
        for index, each in enumerate(seen)
    ]
    with monkeypatch.context() as patch:
        again, _ = watch(patch, requests)
        run(engine, requests)
    first = {}
    for each in again:
        first.setdefault(each.request.id, each)
    return [first[request.id] for request in requests]


@pytest.fixture(scope="module")
def plain() -> Callable[[str], tuple[int, dict[str, tuple]]]:
    """By target: the stop token, and what comes of all requests without a drafter."""
    known: dict[str, tuple[int, dict[str, tuple]]] = {}

    def of(target: str) -> tuple[int, dict[str, tuple]]:
        if target not in known:
            with engine_of(target, **EASY) as engine:
                stop = run(engine, requests_of(stop=95))["3"][0][9]
                known[target] = stop, run(engine, requests_of(stop))
        return known[target]

    return of


@pytest.mark.parametrize("case", SECTIONS)
def test_a_draft_hangs_on_the_text_alone(places, plain, case, monkeypatch):
    target, head = places(case)
    stop, wanted = plain(target)
    assert wanted["3"][1] == "stop"
    requests = requests_of(stop)
    section = SECTIONS[case] | {"speculative_model": head}
    parsed = EngineConfig.load({"model": target, "speculative_config": section}).speculative_config
    nodes = parsed.max_nodes
    with monkeypatch.context() as patch, engine_of(target, section, **HARD) as engine:
        seen, steps = watch(patch, requests)
        got = run(engine, requests, aborted="9")
        stats = engine.stats()
    assert got.pop("9")[1] == "abort"
    assert got == {name: wanted[name] for name in got}
    drafter = next(iter(stats["drafters"].values()))
    assert drafter["faults"] == 0
    assert stats["requests"]["num_hit_tokens"] > 0
    assert stats["requests"]["num_preemptions"] > 0
    assert any(not batch.samples.all() for batch, _ in steps)  # a part of a prompt
    assert any(set(batch.max_nodes) > {0} for batch, _ in steps)  # some may draft, some not
    assert {each.request.id for each in seen} == {"0", "1", "2", "3", "5", "6", "8", "9"}
    assert any(
        len(verdict.nodes(row)) and known > TRAINED
        for batch, verdict in steps
        for row, known in enumerate(batch.plan.context_lens)
    )
    with engine_of(target, section, **EASY) as engine:
        again = afresh(engine, monkeypatch, seen, nodes)
    for mine, theirs in zip(seen, again, strict=True):
        assert mine.text == theirs.text
        if parsed.decoding_type == "ReDrafter" and mine.room < nodes:
            continue  # a smaller tree has shorter beams
        count = len(mine.tokens)
        assert mine.tokens == theirs.tokens[:count], mine
        assert mine.parents == theirs.parents[:count], mine
