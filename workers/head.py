"""Runs a head after each step and gives it access to parts of the target.

`HeadRunner` runs a head wherever it is placed. `HeadService` runs one inside the target's worker,
right after the verification rule; hidden states are replicated on every rank. If steps are
computed on the device, every rank runs it and all ranks draft the same. The target's embedding and
output layer stay sharded, and the head's own weights are sharded where that pays
(`model/sharding.py`). Otherwise, only rank 0 runs it, without collectives and with a full copy of
sharded weights. `remote_head.py` runs a head in its own worker.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..config import HeadConfig
from ..drafters.heads.protocol import (
    Attend,
    Cut,
    DraftLevels,
    DraftStart,
    Frontier,
    TargetFacts,
    Trees,
    Verified,
    drafts_of,
    frontier,
    log_of_best,
    on,
)
from ..drafters.heads.tree_drafting import (
    TreeDraftingHead,
    depth_of,
    draft,
    follows,
    grown,
    is_plain,
    joined,
    rows_of,
    runs,
)
from ..drafters.protocol import Drafted, Outcomes, Preparation
from ..scheduler.types import (
    IntArray,
    JoinedDrafts,
    NextDrafts,
    SamplingRows,
    StepInput,
    Verdict,
    ints,
    starts_of,
)
from .attention import KVCache, KVShape
from .block_program import BlockProgram
from .collective import Collective
from .head_layers import (
    CommittedRows,
    PagedAttend,
    PagedLevels,
    attention_specs,
    committed_rows,
    load_head,
)
from .head_program import HeadProgram
from .model.paged import PagedModel
from .model.sharding import MIN_SAVED_BYTES, WHOLE, HeadShards, ShardedOutput
from .model.target import whole_embedding, whole_ends
from .ops import PlannedOps
from .outcomes import OutcomeRows, Round, choose_outcomes, last_rows
from .spec import HeadReport
from .verify.noise import argmax
from .verify.process import GREEDY_BELOW, DrawSettings, draw

log = logging.getLogger(__name__)
_NONE = ints([])
_PREPARED_NOTHING = Drafted(_NONE, ints([0]), None, outcomes=Outcomes(*[_NONE] * 4))
_MOST_PUT_OFF = 256  # rows; steps with more rows are computed at once


class HeadRunner:
    """A loaded head; implements `HeadHost` for it.

    Args:
        ends: the target's embedding and output layer, unsharded.
        planned: the operations that run its layers and their attention.
        first_layer: the head's first layer in the cache.
        max_num_seqs: maximum number of sequences that draft in a step.
        fused: False: layers stay torch modules, for comparisons.
    """

    def __init__(
        self,
        config: HeadConfig,
        target: TargetFacts,
        ends: tuple[nn.Module, nn.Module],
        planned: PlannedOps,
        first_layer: int = 0,
        max_num_seqs: int = 1,
        *,
        fused: bool = True,
        shards: HeadShards = WHOLE,
    ) -> None:
        self.target, self._shards = target, shards
        # `module_reason`: why its layers are torch modules; "" if they are not
        self.head, self.module_reason = load_head(config, target, planned, shards, fused=fused)
        self.capture = tuple(sorted(set(self.head.capture)))  # layers whose inputs it reads
        self._embedding, self._output = ends
        self.planned, self._max_num_seqs = planned, max_num_seqs
        self._shares_noise, self._p_min = config.shares_noise, config.p_min
        self._num_prepared = config.num_prepared  # tokens
        self._cache: KVCache | None = None
        self.block_size = 0  # set by `attach`
        self.first_layer = first_layer
        # None: operations are called one by one
        self._program: HeadProgram | BlockProgram | None = None
        if shards.size == 1 and not self.module_reason:
            parts = (self.head, self._embedding, self._draft_output)
            self._program = HeadProgram.of(*parts) or BlockProgram.of(*parts)
        self._nothing = NextDrafts.empty(0)
        self._put_off: list[Verified] = []  # plain steps to compute, in order
        self._num_put_off = 0  # rows

    @property
    def collective(self) -> Collective:
        """The ranks that run it."""
        return self._shards.collective

    def report(self) -> HeadReport:
        """The report that the engine shows."""
        layers: Literal["operations", "modules"] = "modules" if self.module_reason else "operations"
        return HeadReport(self.capture, layers, self.module_reason)

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """KV shapes of the head's layers."""
        return tuple(
            KVShape(
                layer.num_kv_heads,
                layer.head_dim,
                layer.value_width,
                self._num_spare(layer.num_draft_rows),
            )
            for layer in self.head.layers
        )

    def _num_spare(self, num_draft_rows: int) -> int:
        """Returns a layer's spare slots for drafts of this many rows and for prepared ones."""
        return num_draft_rows * self._max_num_seqs + (self._num_prepared if num_draft_rows else 0)

    def kv_bytes_per_token(self) -> int:
        return sum(shape.num_elements for shape in self.kv_shapes) * self.target.dtype.itemsize

    def spare_bytes(self) -> int:
        """Returns the bytes of the slots after the blocks, which hold the drafts' own rows."""
        elements = sum(shape.num_spare * shape.num_elements for shape in self.kv_shapes)
        return elements * self.target.dtype.itemsize

    def attach(self, cache: KVCache) -> None:
        """Sets the cache that holds the head's rows."""
        self._cache, self.block_size = cache, cache.block_size
        for block_size in (cache.block_size, 1):  # of a step, and of a draft's levels
            specs = attention_specs(self.head.module)
            self.planned.ops.warm_up(specs, self.target.dtype, block_size)
        self.forget()

    def run(
        self,
        step: StepInput,
        verdict: Verdict,
        hidden: tuple[Tensor, ...],  # per captured layer, [num_tokens, hidden_size]
    ) -> NextDrafts:
        """Returns drafts for the next step; an exception of the head is returned as their `error`.

        With several ranks it is raised: the others may be waiting in one of the head's collectives.
        """
        done = Verified(step, verdict, dict(zip(self.capture, hidden, strict=True)))
        try:
            return self._run(done)
        except Exception as error:  # costs only this step's drafts, as with any drafter
            if self._shards.size > 1:
                raise
            log.debug("the head failed", exc_info=True)
            return NextDrafts.empty(step.num_seqs, f"{type(error).__name__}: {error}")

    def _run(self, done: Verified) -> NextDrafts:
        """Drafts, or defers rows without drafts: large batches cost little more."""
        step, num_rows = done.step, len(done.step.token_ids)
        plain = is_plain(step)
        fits = self._num_put_off + num_rows <= _MOST_PUT_OFF
        if plain and fits and self.head.layers and not _drafts(step):
            self._put_off.append(done)  # no later step overwrites its states
            self._num_put_off += num_rows
            return self._no_drafts(step.num_seqs)
        before = self._put_off
        self.forget()
        if not before:
            return self._draft(done)
        *earlier, last = runs([*before, done]) if plain else [*runs(before), [done]]
        for each in earlier:
            self._draft(joined(each))
        return self._draft(joined(last))

    def catch_up(self, step: StepInput | None = None) -> None:
        """Computes the deferred rows, unless `step` continues directly after them."""
        if self._put_off and not (step and follows(self._put_off[-1], step)):
            steps = self._put_off
            self.forget()
            for each in runs(steps):
                self._draft(joined(each))

    def _draft(self, done: Verified) -> NextDrafts:
        """Computes a step's rows and drafts behind the last committed ones."""
        step, program = done.step, self._program
        if program is None:
            return draft(self.head, done, self)
        assert self._cache is not None, "no cache is attached"
        ends = frontier(step, done.verdict) if _drafts(step) else None
        if ends is None or not len(ends.seqs):
            program.store(done, self._cache, self.first_layer)
            return self._no_drafts(step.num_seqs)
        if isinstance(program, BlockProgram):
            return self._draft_blocks(program, done, ends)
        if self.head.branches:
            return draft(self.head, done, self)
        depth, choose = self.head.room, None
        if step.max_nodes is not None:
            depth = min(depth, int(step.max_nodes[ends.seqs].max()))
        cut = self.cut(step.sampling, ends.seqs)
        if cut is not None or not self._is_greedy(step.sampling, ends.seqs):

            def choose(logits: Tensor, level: int) -> NDArray[np.int64]:
                if cut is not None:
                    cut.see(log_of_best(logits)[:, None])
                ids, positions = self.head.target_ids, ints(ends.lens + level)
                return self.draw(logits, step.sampling, ends.seqs, positions, ids).numpy()

        tokens = program.run(done, ends, depth, self._cache, self.first_layer, choose)
        sizes = None
        if cut is not None:
            sizes = cut.of(Trees(torch.from_numpy(tokens), None)).sizes
        parents = ints(np.arange(-1, tokens.shape[1] - 1))
        return drafts_of(step, ends, tokens, parents, None if sizes is None else sizes.numpy())

    def _draft_blocks(self, program: BlockProgram, done: Verified, ends: Frontier) -> NextDrafts:
        """Does the same as `_draft`, with a block drafter's program."""
        assert self._cache is not None, "no cache is attached"
        step, head, place = done.step, program.head, (self._cache, self.first_layer)
        depth = program.depth
        if head.is_chain:
            depth = min(depth, depth_of(step, ends))
        cut = self.cut(step.sampling, ends.seqs)
        if head.is_chain and cut is None and self._is_greedy(step.sampling, ends.seqs):
            tokens, chances = program.chains(done, ends, depth, *place)
            return drafts_of(step, ends, tokens, ints(np.arange(-1, depth - 1)), chances=chances)
        if cut is None and not (head.is_chain or head.module.is_sequential):
            max_nodes = min(head.num_best, depth_of(step, ends))
            return drafts_of(step, ends, *program.trees(done, ends, max_nodes, *place))
        read = program.read(done, ends, depth, *place)
        none = read[:, 0, :0]

        def grow(start: DraftStart, depth: int) -> Trees:
            return head.drafts(start, read, depth, self)

        return grown(head, done, ends, (none, none, None), grow, self)

    @torch.inference_mode()
    def prepare(
        self,
        done: Verified,  # the last step that was run
        chains: JoinedDrafts,  # the chains that are verified after it
        preparation: Preparation,
    ) -> Drafted:
        """Draws chains behind likely outcomes of the round that follows a step.

        The target's states of the round's tokens are not available yet, so the head uses its own
        output in their place, as within a draft. All rows except those of the step lie in spare
        slots, which are invalid once the target's states arrive.
        """
        self.catch_up()
        step, head = replace(done.step, max_nodes=preparation.num_outcomes), self.head
        assert isinstance(head, TreeDraftingHead), type(head)
        ends = frontier(step, done.verdict)
        if not len(ends.seqs):
            return _PREPARED_NOTHING
        owner = np.arange(step.num_seqs).repeat(chains.num_nodes)
        tokens, num_nodes = chains.tokens[np.isin(owner, ends.seqs)], chains.num_nodes[ends.seqs]
        assert self._cache is not None, "no cache is attached"
        room = int(num_nodes.max())
        rows = committed_rows(done.step, done.verdict, ends, self._cache, room)
        features, reads = self._follow(head, done, ends, rows, tokens, num_nodes)
        logits = self.draft_logits(reads).float()
        outcomes, lens = choose_outcomes(
            preparation.of(ends.seqs),
            Round(
                tokens, num_nodes, ends.lens, np.ones(len(ends.seqs), dtype=np.bool_),
                step.sampling, ends.seqs,
            ),
            self.over_vocabulary(logits, head.target_ids),
            self.collective,
        )  # fmt: skip
        if not len(outcomes.seqs):
            return _PREPARED_NOTHING
        drawn, lens = self._draw_behind(head, step, ends, rows, features, outcomes, lens)
        kept = np.arange(drawn.shape[1]) < lens[:, None]
        outcomes = replace(outcomes, seqs=ints(ends.seqs[outcomes.seqs]))
        return Drafted(ints(drawn[kept]), starts_of(lens), None, outcomes=outcomes)

    def _follow(
        self,
        head: TreeDraftingHead,
        done: Verified,
        ends: Frontier,
        rows: CommittedRows,
        tokens: IntArray,  # [num_nodes], of all chains
        num_nodes: IntArray,  # [num_drafts]
    ) -> tuple[Tensor, Tensor]:  # [num_drafts, room + 1, feature], [num_rows, hidden_size]
        """Returns features of the last rows and of the given chains behind them.

        Also returns the output layer's inputs of the valid rows, sequence by sequence.
        """
        room = int(num_nodes.max())
        last = last_rows(done, ends, rows)
        feature, read = head.rows(rows_of(last, self), self)
        features, reads = [feature.clone()], [read.clone()]  # buffers are reused
        lanes = np.zeros((len(num_nodes), room), dtype=np.int32)
        lanes[np.arange(room) < num_nodes[:, None]] = tokens
        levels = self._levels(rows, room)
        for level, column in enumerate(on(lanes.T, self.target.device), 1):
            attend = levels.chain(1)
            feature, read = head.advance(
                level, column, features[-1], attend.positions, attend, self
            )
            features.append(feature.clone())
            reads.append(read.clone())
        is_there = torch.from_numpy(np.arange(room + 1) <= num_nodes[:, None])
        read = torch.stack(reads, dim=1)
        return torch.stack(features, dim=1), read[is_there.to(read.device)]

    def _draw_behind(
        self,
        head: TreeDraftingHead,
        step: StepInput,
        ends: Frontier,
        rows: CommittedRows,
        features: Tensor,  # [num_drafts, room + 1, feature]
        outcomes: Outcomes,  # of sequences of `ends`
        lens: IntArray,  # [num_outcomes], tokens to draw
    ) -> tuple[IntArray, IntArray]:  # [num_outcomes, depth], [num_outcomes]
        """Draws a chain behind each outcome; returns the chains and their lengths."""
        assert self._cache is not None, "no cache is attached"
        order = np.argsort(-lens, kind="stable")  # lanes of a level are a prefix of the last's
        lens, seqs, depth = lens[order], ends.seqs[outcomes.seqs[order]], int(lens.max())
        owner, accepted, tokens = (
            on(part[order], self.target.device)
            for part in (outcomes.seqs, outcomes.num_accepted, outcomes.bonus)
        )
        room = features.shape[1] - 1
        behind = OutcomeRows(self._cache, rows, room, owner, accepted, depth)
        feature, first = head.resume(features[owner, accepted], accepted)
        ahead = ints(ends.lens[outcomes.seqs] + outcomes.num_accepted + 1)[order]
        drawn, cut = np.zeros((len(lens), depth), dtype=np.int32), self.cut(step.sampling, seqs)
        for level in range(depth):
            count = len(lens) if cut is not None else int((lens > level).sum())
            attend = self._levels(behind.at(level, count), 1).chain(1)
            feature, read = head.advance(
                first + level, tokens[:count], feature[:count], attend.positions, attend, self
            )
            logits = self.draft_logits(read)
            if cut is not None:
                cut.see(log_of_best(logits)[:, None])
            tokens = self.draw(
                logits, step.sampling, seqs[:count], ahead[:count] + level, head.target_ids
            )
            drawn[:count, level] = tokens.cpu().numpy()
        if cut is not None:
            sizes = cut.of(Trees(torch.from_numpy(drawn), None)).sizes
            assert sizes is not None, "chains are cut to sizes"
            lens = np.minimum(lens, ints(sizes.cpu().numpy()))
        back = np.argsort(order, kind="stable")
        return drawn[back], lens[back]

    def _no_drafts(self, num_seqs: int) -> NextDrafts:
        if len(self._nothing.lens) != num_seqs:
            self._nothing = NextDrafts.empty(num_seqs)
        return self._nothing

    def drop_program(self) -> None:
        """Calls operations one by one from now on, for comparisons."""
        self._program = None

    def forget(self) -> None:
        """Drops the deferred rows."""
        self._put_off, self._num_put_off = [], 0

    def embed(self, token_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden_size]
        return self._embedding(token_ids)

    def part_of_logits(
        self,
        states: Tensor,  # [num_rows, hidden_size]
    ) -> tuple[Tensor, int]:  # [num_rows, width]
        """Returns logits of the layer that drafts are drawn from, and this rank's first column."""
        output = self._draft_output.forward
        if isinstance(output, ShardedOutput):
            return output.part(states), output.first
        return self.draft_logits(states), 0

    def draft_logits(self, states: Tensor) -> Tensor:
        return self._draft_output(states)

    def logits_of_own_rows(
        self, states: Tensor
    ) -> Tensor | None:  # [num_rows, hidden_size] -> [ceil(num_rows / size), draft_vocab]
        """Returns those logits for this rank's share of the rows; None: every rank has all rows."""
        output = self._draft_output.forward
        if isinstance(output, ShardedOutput):
            return output.own_rows(states)
        return None

    @property
    def _draft_output(self) -> nn.Module:
        return next(iter(self.head.outputs), self._output)

    def attention(self, step: StepInput) -> Attend:
        assert self._cache is not None, "no cache is attached"
        plan = self.planned.plan(step, self._cache)
        return PagedAttend(self.planned, plan, self._cache, self.first_layer)

    def draft_attention(self, step: StepInput, verdict: Verdict, ends: Frontier) -> DraftLevels:
        assert self._cache is not None, "no cache is attached"
        assert len(ends.seqs) <= self._max_num_seqs, (len(ends.seqs), self._max_num_seqs)
        rows = committed_rows(step, verdict, ends, self._cache, self.head.room)
        return self._levels(rows, self.head.room)

    def _levels(self, rows: CommittedRows, room: int) -> PagedLevels:
        assert self._cache is not None, "no cache is attached"
        place = (self.planned, self._cache, self.first_layer)
        return PagedLevels(*place, rows, room, branches=self.head.branches)

    def cached(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        assert self._cache is not None, "no cache is attached"
        flat, shape = slots.reshape(-1), slots.shape
        return (
            self._cache.keys[self.first_layer + layer].index_select(0, flat).unflatten(0, shape),
            self._cache.values[self.first_layer + layer].index_select(0, flat).unflatten(0, shape),
        )

    def keep(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        assert self._cache is not None, "no cache is attached"
        self._cache.write(self.first_layer + layer, slots, key, value)

    def cut(self, sampling: SamplingRows, seqs: NDArray[np.int64]) -> Cut | None:
        least = np.full(len(seqs), self._p_min, dtype=np.float32)
        if sampling.min_probs is not None:
            own = sampling.min_probs[seqs]
            least = np.where(own < 0, least, own)
        return Cut(torch.from_numpy(least).to(self.target.device)) if least.any() else None

    def draw(
        self, logits: Tensor, sampling: SamplingRows, seqs: NDArray[np.int64], positions: IntArray,
        ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        logits = logits.float()
        if self._is_greedy(sampling, seqs):
            best = argmax(logits)
            return best if ids is None else ids[best]
        whole = self.over_vocabulary(logits, ids)
        return draw(whole, positions, DrawSettings.of(sampling, seqs)).to(torch.int64)

    def _is_greedy(self, sampling: SamplingRows, seqs: NDArray[np.int64]) -> bool:
        """Returns True if the likeliest tokens are drafted.

        Rules that do not share the target's noise accept these most often.
        """
        return not self._shares_noise or bool((sampling.temperature[seqs] < GREEDY_BELOW).all())

    def over_vocabulary(
        self,
        logits: Tensor,  # [num_rows, draft_vocab]
        ids: Tensor | None,  # [draft_vocab], the target's; None: the same
    ) -> Tensor:  # [num_rows, vocab]
        """Returns logits by the target's token ids, which index the noise."""
        if ids is None:
            return logits
        whole = logits.new_full((len(logits), self.target.vocab_size), -torch.inf)
        return whole.index_copy_(1, ids, logits)


def _drafts(step: StepInput) -> bool:
    """Returns True if any sequence may have nodes in the next step."""
    return step.max_nodes is None or any(step.max_nodes.tolist())


class HeadService(HeadRunner):
    """A head inside the target's worker; its cache layers follow the target's."""

    def __init__(
        self,
        config: HeadConfig,
        model: PagedModel,
        path: Path,
        max_num_seqs: int = 1,
        *,
        fused: bool = True,
        allow_pickle: bool = False,
        on_every_rank: bool = False,
        min_saved_bytes: int = MIN_SAVED_BYTES,  # minimum saving for which weights are sharded
    ) -> None:
        info = model.info
        target = TargetFacts.of(info, model.device, allow_pickle)
        planned = model.runner.planned
        self.on_every_rank = on_every_rank
        collective = model.collective if on_every_rank else Collective.single()
        ends = model.ends
        if collective.size < model.collective.size:  # a rank that runs alone needs the whole layers
            ends = whole_ends(
                model.module, path, info.dtype, model.device, allow_pickle=allow_pickle
            )
        elif not model.has_embedding:
            embedding = whole_embedding(
                model.module, path, info.dtype, model.device, allow_pickle=allow_pickle
            )
            ends = embedding, ends[1]
        super().__init__(
            config,
            target,
            ends,
            planned,
            len(model.kv_shapes),
            max_num_seqs,
            fused=fused,
            shards=HeadShards(collective, min_saved_bytes),
        )

    def draft(self, step: StepInput, verdict: Verdict, hidden: tuple[Tensor, ...]) -> Verdict:
        """Returns `verdict` with the drafts for the next step."""
        drafts = self.run(step, verdict, hidden)
        return verdict if drafts is self._nothing else replace(verdict, next_drafts=drafts)
