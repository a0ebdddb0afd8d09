"""What a step does on the host, each part against the plainest code that does the same."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...config import EngineConfig
from ...engine.checkpoints import load_tokenizer
from ...engine.structured.constraints import (
    Both,
    Compiler,
    Constraint,
    ThinkingConstraint,
    TokenConstraint,
)
from ...engine.structured.drafting import ConstrainedDrafting
from ...scheduler.blocks import BlockPool
from ...scheduler.sampling import SamplingParams, ThinkingBudget
from ...scheduler.scheduler import Scheduler
from ...scheduler.tree import EMPTY, chain, is_chain
from ...scheduler.types import Draft, IntArray, Request, Verdict, ints
from ...workers.ops.plan import plan_step
from ...workers.seats import gather, lay_out
from ...workers.transport import wire
from ...workers.transport.socket_channel import SocketChannel, serve
from ...workers.verify import DrawSettings, draw, make_rule, noise, verify
from ..drafters import MODELS
from ..measure import Pair
from .operations import BLOCK_SIZE, CPU, decode_batch, decode_plan, decode_step, random_parents

VOCAB = 4096


def host() -> Iterator[Pair]:
    yield from _blocks()
    yield from _scheduling()
    yield from _trees()
    yield from _messages()
    yield from _round_trips()
    yield from _verification()
    yield from _thinking()


def _blocks() -> Iterator[Pair]:
    """Allocating and freeing a sequence of 64 blocks, against a bare list."""
    pool, free = BlockPool(4096, BLOCK_SIZE), list(range(4096))

    def ours() -> None:
        blocks = pool.allocate(64)
        assert blocks is not None, "they were given back"
        pool.free(blocks)

    def reference() -> None:
        taken = [free.pop() for _ in range(64)]
        free.extend(taken)

    yield Pair("block manager", "64 blocks", ours, reference)


def ancestor_mask(parents: IntArray) -> NDArray[np.bool_]:
    """`mask[i, j]`: node i sees node j, its ancestor or itself. Shape [num_nodes, num_nodes]."""
    num_nodes = len(parents)
    if is_chain(parents):
        return np.tri(num_nodes, dtype=np.bool_)
    mask = np.eye(num_nodes, dtype=np.bool_)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def _trees() -> Iterator[Pair]:
    for batch_size in (1, 8, 32):
        for num_nodes in (0, 7, 63):
            case = f"batch {batch_size}, {num_nodes} nodes"
            known = decode_batch(batch_size, 200, num_nodes)
            draft = Draft(ints(np.arange(num_nodes)), ints(random_parents(num_nodes)))
            drafts, step = [draft] * batch_size, decode_step(batch_size, 200, num_nodes)

            def layout(known=known, drafts=drafts) -> object:  # type: ignore[no-untyped-def]
                return lay_out(**known, drafts=gather(drafts, known["samples"]))

            def masks(drafts=drafts) -> object:  # type: ignore[no-untyped-def]
                return [ancestor_mask(draft.parents) for draft in drafts]

            def flat(step=step) -> object:  # type: ignore[no-untyped-def]
                return plan_step(step, BLOCK_SIZE, CPU)

            yield Pair("tree layout (to its masks alone)", case, layout, masks)
            yield Pair("attention plan (to the masks alone)", case, flat, masks)


def _messages() -> Iterator[Pair]:
    """A step to bytes and back, against pickle."""
    for batch_size in (1, 8, 32):
        plan = decode_plan(batch_size, 200, 7)

        def ours(plan=plan) -> object:  # type: ignore[no-untyped-def]
            return wire.decode(wire.encode(plan))

        def reference(plan=plan) -> object:  # type: ignore[no-untyped-def]
            return pickle.loads(pickle.dumps(plan))

        yield Pair("channel's messages (to pickle)", f"batch {batch_size}", ours, reference)


def _round_trips() -> Iterator[Pair]:
    """A step to another thread and its verdict back, against a pipe of pickles."""
    for batch_size in (1, 8, 32):
        plan = decode_plan(batch_size, 200, 7)
        verdict = Verdict.empty(0, batch_size)
        near, far = socket.socketpair()
        channel = SocketChannel([near])
        ours_end, their_end = multiprocessing.Pipe()
        answer = lambda _, verdict=verdict: verdict  # noqa: E731
        for target, arguments in ((serve, (far, 0, answer)), (_echo, (their_end, verdict))):
            threading.Thread(target=target, args=arguments, daemon=True).start()

        def ours(channel=channel, plan=plan) -> object:  # type: ignore[no-untyped-def]
            return channel.call(plan, 10.0)

        def reference(pipe=ours_end, plan=plan) -> object:  # type: ignore[no-untyped-def]
            pipe.send(plan)
            return pipe.recv()

        case = f"batch {batch_size}"
        yield Pair("channel's round trip (to a pipe of pickles)", case, ours, reference, waits=True)
        channel.close()
        ours_end.close()


def _echo(pipe: Connection, verdict: Verdict) -> None:
    """Answers every message with `verdict` until the other end is closed."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.recv()
            pipe.send(verdict)


def _scheduling() -> Iterator[Pair]:
    """Planning and committing a step that emits a token of each, against appending it to a list."""
    for batch_size in (1, 8, 32):
        config = EngineConfig.load({"model": "none", "max_num_seqs": 32})
        scheduler = Scheduler(config, 4096, 1 << 15)
        for index in range(batch_size):
            prompt, sampling = ints(np.arange(16)), SamplingParams(max_tokens=None)
            scheduler.add(Request(str(index), prompt, sampling, index))
        starts, none = ints(np.arange(batch_size + 1)), ints([])
        nowhere = ints(np.zeros(batch_size + 1))
        one_each = Verdict(0, starts[:-1] + np.int32(7), starts, none, nowhere)
        bare: list[list[int]] = [[] for _ in range(batch_size)]

        def step(scheduler=scheduler, verdict=one_each, size=batch_size) -> object:  # type: ignore[no-untyped-def]
            batch = scheduler.schedule()
            assert batch.samples.sum() == size, "every request decodes"
            return scheduler.commit(batch, [EMPTY] * size, verdict)

        def reference(bare=bare, verdict=one_each) -> None:  # type: ignore[no-untyped-def]
            for tokens, token in zip(bare, verdict.emitted.tolist(), strict=True):
                tokens.append(token)

        case = f"batch {batch_size}"
        yield Pair("scheduler's plan and commit (to bare lists)", case, step, reference)


def _verification() -> Iterator[Pair]:
    rule = make_rule("coupled")
    for batch_size in (1, 8, 32):
        step = decode_step(batch_size, 200, 7)
        settings = replace(step.sampling, temperature=np.ones(batch_size, np.float32))
        hot = replace(step, sampling=settings)
        logits = torch.randn(len(step.rows), VOCAB)
        positions = step.positions[step.rows] + 1
        seeds = np.repeat(step.sampling.seeds, 8)
        drawn_by = DrawSettings.of(hot.sampling, np.repeat(np.arange(batch_size), 8))

        def greedy(step=step, logits=logits) -> object:  # type: ignore[no-untyped-def]
            return verify(rule, step, logits)

        def argmax(logits=logits) -> object:  # type: ignore[no-untyped-def]
            return logits.numpy().argmax(1)

        def drawn(logits=logits, positions=positions, drawn_by=drawn_by) -> object:  # type: ignore[no-untyped-def]
            return draw(logits, positions, drawn_by)

        def perturbed(logits=logits, seeds=seeds, positions=positions) -> object:  # type: ignore[no-untyped-def]
            keys = noise.keys(seeds, positions)
            return (noise.gumbel(keys, VOCAB) + logits).argmax(1)

        def sampled(step=hot, logits=logits) -> object:  # type: ignore[no-untyped-def]
            return verify(rule, step, logits)

        case = f"batch {batch_size}, 7 nodes, {VOCAB} tokens"
        yield Pair("verification, greedy (to argmax)", case, greedy, argmax)
        yield Pair("coupled draw (to torch)", case, drawn, perturbed)
        yield Pair("verification, sampled (to torch's draw)", case, sampled, perturbed)


class _Drafts:
    """In place of the engine's drafters: the same chain for every row."""

    drafter, proposes_trees, may_rest, ranks_draft = None, False, True, True

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def propose(self, batch: Any) -> list[Draft]:
        return [self._draft] * len(batch.request_ids)

    def observe(self, batch: Any, verdict: Any) -> None: ...

    def open(self, requests: Any) -> None: ...


def _thinking() -> Iterator[Pair]:
    """Drafts and emitted tokens under a budget that is far from spent, against masks at each node.

    Chains of 4, of which 2 are accepted, and a vocabulary of 151,936 tokens.
    """
    config = EngineConfig.load({"model": str(MODELS / "target"), "executor": "local"})
    vocab, length, emitted = 151_936, 4, 3
    budget = ThinkingBudget(max_tokens=10**9, begin="<think>", end="</think>", is_open=True)
    text = load_tokenizer(config).encode("def add(a, b):\n    return a + b")
    compiler, drafts = Compiler(config, vocab, (0,)), _Drafts(chain(text[:length], "x"))
    for batch_size in (1, 8):
        ids = tuple(map(str, range(batch_size)))
        batch = SimpleNamespace(
            step=0, request_ids=ids, samples=np.ones(batch_size, dtype=np.bool_),
            max_nodes=np.full(batch_size, length), max_depth=np.full(batch_size, length),
        )  # fmt: skip
        starts = [
            np.arange(batch_size + 1, dtype=np.int32) * each for each in (emitted, emitted - 1)
        ]
        given = ints(text[:emitted] * batch_size), ints([*range(emitted - 1)] * batch_size)
        verdict = Verdict(0, given[0], starts[0], given[1], starts[1])
        steps: list[Callable[[], None]] = []
        for has_masks in (False, True):
            drafting = ConstrainedDrafting(drafts, compiler, lambda: length)  # type: ignore[arg-type]
            opened: dict[str, Constraint] = {}
            sampling = SamplingParams(thinking_budget=budget)
            requests = [Request(each, ints(text), sampling, seed=0) for each in ids]
            for request in requests:
                found = compiler.open(request)
                assert isinstance(found, ThinkingConstraint), "it has a budget alone"
                free = TokenConstraint(vocab, None, ())
                opened[request.id] = Both(found, free) if has_masks else found
            drafting.expect(opened)
            drafting.open(requests)

            def step(drafting=drafting, batch=batch, verdict=verdict) -> None:  # type: ignore[no-untyped-def]
                drafting.propose(batch)
                drafting.observe(batch, verdict)

            steps.append(step)
        yield Pair("thinking budget (to masks)", f"batch {batch_size}", steps[0], steps[1])
