"""What the workers' tests share: step inputs from plain lists, and ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.scheduler import tree
from outrider.scheduler.types import (
    Draft,
    IntArray,
    NextDrafts,
    SamplingRows,
    StepInput,
    Verdict,
    ints,
)
from outrider.tests.helpers.dense_head import attend_densely
from outrider.workers import seats
from outrider.workers.collective import Collective
from outrider.workers.head import HeadService
from outrider.workers.model.target import load_model


@dataclass(frozen=True)
class Part:
    """One sequence of a step."""

    tokens: Sequence[int]  # the known chunk
    context_len: int
    table: Sequence[int]  # blocks
    draft: Draft = tree.EMPTY


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Tiny tensors: a pool of threads only gets in the way of the ranks' own threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def part() -> type[Part]:
    return Part


@pytest.fixture
def build_step() -> Callable[..., StepInput]:
    """`build_step(parts, block_size, kv_moves)`; every sequence samples."""

    def build(
        parts: Sequence[Part], block_size: int, kv_moves: Sequence[tuple[int, int]] = ()
    ) -> StepInput:
        chunks = [len(part.tokens) for part in parts]
        width = max(len(part.table) for part in parts)
        samples = np.ones(len(parts), dtype=np.bool_)
        return seats.lay_out(
            token_ids=ints([token for part in parts for token in part.tokens]),
            query_start=ints(np.concatenate([[0], np.cumsum(chunks)])),
            context_lens=ints([part.context_len for part in parts]),
            block_tables=ints([[*part.table, *[0] * (width - len(part.table))] for part in parts]),
            samples=samples,
            max_nodes=ints([part.draft.num_nodes for part in parts]),
            kv_moves=ints(list(kv_moves)).reshape(-1, 2),
            sampling=greedy(len(parts)),
            drafts=seats.gather([part.draft for part in parts], samples),
            block_size=block_size,
        )

    return build


@pytest.fixture
def head_drafts(part, build_step):
    """`head_drafts(target, config)`: the head, and its drafts of two sequences.

    They are drafted after the prompts, and after a tree that was judged. With `dense`, by torch
    modules over dense copies of the context. `grants`: nodes per sequence and step.
    """

    @torch.inference_mode()
    def run(
        target: str,
        config,
        *,
        dense: bool = False,
        temperature: float = 0.0,
        grants: Sequence[Sequence[int]] = ((40, 40), (40, 40)),
        min_probs: Sequence[float] = (),
    ) -> tuple[HeadService, list]:
        model = load_model(
            Path(target),
            dtype=torch.float32,
            device=torch.device("cpu"),
            collective=Collective(0, 1, None),
        )
        head = HeadService(config, model, Path(target), max_num_seqs=2, fused=not dense)
        cache = model.new_cache(16, 4, head.kv_shapes)
        head.attach(cache)
        if dense:
            attend_densely(head)
        tables = [4, 2, 7, 9], [1, 3, 8, 11]
        prompts = build_step(
            [part([7, 3, 50, 21, 9, 4], 0, tables[0]), part([11, 12, 13], 0, tables[1])], 4
        )
        trees = build_step(
            [
                part([5], 6, tables[0], draft=Draft(ints([20, 21, 22, 23]), ints([-1, -1, 1, 2]))),
                part([6], 3, tables[1], draft=Draft(ints([30, 31]), ints([-1, 0]))),
            ],
            4,
        )
        verdicts = (
            Verdict(0, ints([5, 6]), ints([0, 1, 2]), ints([]), ints([0, 0, 0])),
            # nodes 1 and 2 of the first are accepted: they are not where the next step has them
            Verdict(0, ints([21, 22, 40, 41]), ints([0, 3, 4]), ints([1, 2]), ints([0, 2, 2])),
        )
        found = []
        for step, verdict, most in zip((prompts, trees), verdicts, grants, strict=True):
            sampling = replace(
                step.sampling,
                temperature=np.full(2, temperature, np.float32),
                min_probs=np.array(min_probs, np.float32) if min_probs else None,
            )
            step = replace(step, max_nodes=ints(list(most)), sampling=sampling)
            hidden = model.forward_capturing(step, cache, head.capture)[1]
            drafts = head.draft(step, verdict, hidden).next_drafts
            if drafts is None:  # nothing was granted
                assert not any(most)
                drafts = NextDrafts.empty(2)
            assert not drafts.error, drafts.error
            found.append([part.tolist() for part in (drafts.tokens, drafts.parents, drafts.start)])
        return head, found

    return run


@pytest.fixture
def run_ranks() -> Callable[[int, Callable[[Collective], Any]], list[Any]]:
    """`run_ranks(size, work)`: `work(collective)` on that many threads; what each returned."""

    def run(size: int, work: Callable[[Collective], Any]) -> list[Any]:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(work, Collective.threads(size, timeout_s=60)))

    return run


@pytest.fixture
def random_tree() -> Callable[..., IntArray]:
    """`random_tree(generator, num_nodes)`: parents, each before its node."""

    def grow(generator: np.random.Generator, num_nodes: int) -> IntArray:
        return ints([int(generator.integers(-1, node)) for node in range(num_nodes)])

    return grow


def greedy(num_seqs: int) -> SamplingRows:
    zeros, ones = np.zeros(num_seqs, np.float32), np.ones(num_seqs, np.float32)
    none = ints(np.zeros(num_seqs))
    return SamplingRows(
        temperature=zeros,
        top_k=none,
        top_p=ones,
        min_p=zeros,
        seeds=np.zeros(num_seqs, np.int64),
        min_new_tokens=none,
        num_logprobs=none - 1,
    )
