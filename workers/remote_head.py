"""A head in its own worker: the target's two ends, a cache of its rows, and a feature link.

The cache has the target's number of slots, so the slots, block tables, moves and rewinds in each
step apply unchanged. Steps are processed in order, each once; the answer to the engine's request
has the drafts after the last step. Rows whose features were lost are excluded from all later steps
(`SlotValidity.visible`), so the head only reads rows that it wrote.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import HeadConfig
from ..drafters.heads.protocol import TargetFacts, Verified
from ..drafters.protocol import HeadAnswer, HeadAsk
from ..errors import ConfigError, WorkerError
from ..scheduler.types import IntArray, NextDrafts, StepInput, slots_of
from .attention import KVCache
from .head import HeadRunner
from .model.target import load_ends
from .ops import PlannedOps, make_ops
from .spec import HeadReport, ModelSpec
from .threads import Threads
from .transport.channel import LinkOffer, ListenFeatures
from .transport.features import FeatureQueue, Features, SocketReceiver

log = logging.getLogger(__name__)
_HALFWAY = -1  # matches no step's serial: a step that fails halfway counts as missed


class SlotValidity:
    """A head's cache, with one bit per slot: whether its row was written from received features.

    The target's accounting assigns slots to requests, but features can be lost on their way to the
    head. A row without features is excluded from all later steps, so that the head attends neither
    to zeros nor to rows of the slot's previous owner.

    Validity is kept per slot, not per request: a step's tokens overwrite their slots before any
    later step reads them as context, so the bit always describes the last write.

    Layers without values hold state from which the next token's row is computed. Where that state
    is missing, the sequence restarts for the head: no context rows, and zeros as previous state.
    """

    def __init__(self, cache: KVCache, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size
        layers = zip(cache.keys, cache.values, strict=True)
        self._carried = [keys for keys, values in layers if not values.numel()]
        self.valid = np.zeros(cache.num_slots, dtype=np.bool_)

    def invalidate_all(self) -> None:
        """Marks all slots invalid: steps were missed, or the target restarted."""
        self.valid[:] = False

    def apply_moves(self, kv_moves: IntArray) -> None:  # [num_moves, 2], (source, destination)
        """Applies the target's compaction to rows and validity."""
        self._cache.apply_moves(kv_moves)
        if len(kv_moves):
            self.valid[kv_moves[:, 1]] = self.valid[kv_moves[:, 0]]

    def invalidate(self, step: StepInput) -> None:
        """Marks the slots that `step` overwrites as invalid."""
        self.valid[step.slot_mapping] = False

    def mark_valid(self, step: StepInput, rows: IntArray) -> None:  # [num_rows], flat, ascending
        """Marks the slots of `rows` as valid."""
        self.valid[step.slot_mapping[rows]] = True

    def visible(self, step: StepInput) -> StepInput:
        """Returns `step` over blocks of one slot, without invalid context rows."""
        size, longest = self._block_size, int(step.context_lens.max(initial=0))
        blocks = step.block_tables[:, : -(-longest // size), None]
        slots = (blocks * size + np.arange(size, dtype=np.int32)).reshape(step.num_seqs, -1)
        index = np.arange(slots.shape[1])
        seen = self.valid[slots] & (index < step.context_lens[:, None])
        if self._carried:
            seen &= self._previous_row_valid(step)[:, None]
        begin = seen.sum(axis=1)[:, None]
        end = begin + step.query_lens[:, None]
        lane = np.arange(int(end.max(initial=0)))
        tables = np.zeros((step.num_seqs, len(lane)), dtype=np.int32)
        tables[lane < begin] = slots[seen]
        tables[(lane >= begin) & (lane < end)] = step.slot_mapping
        return replace(step, block_tables=tables, context_lens=begin[:, 0].astype(np.int32))

    def _previous_row_valid(self, step: StepInput) -> NDArray[np.bool_]:  # [num_seqs]
        """Returns whether the row before the new tokens is valid; zeroes invalid rows."""
        last = np.maximum(step.context_lens - 1, 0)
        going = self.valid[slots_of(step.block_tables, last[:, None], self._block_size)[:, 0]]
        going &= step.context_lens > 0
        # A new sequence reads the slot of its own first token before that slot is written.
        first = step.slot_mapping[step.query_start[:-1][~going]]
        for layer in self._carried:
            layer[torch.from_numpy(first).to(layer.device, torch.int64)] = 0
        return going


class RemoteHeadWorker:
    """A loaded head, its rows, and its end of the link.

    Args:
        spec: the target; the head loads its ends and uses its number of blocks.
        host: address of this node.
    """

    def __init__(
        self,
        config: HeadConfig,
        spec: ModelSpec,
        dtype: torch.dtype | None,
        device: torch.device,
        host: str,
        timeout_s: float,
    ) -> None:
        info, *ends = load_ends(spec.folder, dtype, device, **spec.trust)
        self._runner = HeadRunner(
            config,
            TargetFacts.of(info, device, spec.allow_pickle),
            (ends[0], ends[1]),
            PlannedOps(make_ops(device, info.dtype)),
            max_num_seqs=spec.max_num_seqs,
        )
        self._spec = spec
        self._device = device
        self._host = host
        self._timeout_s = timeout_s
        self._rows: SlotValidity | None = None
        self._receiver: FeatureQueue | SocketReceiver | None = None
        self._serial = 0  # number that the next step must have
        self._processed = -1  # number of the last step
        self._prepares = config.num_prepared > 0
        self._last: Verified | None = None  # the last step, if drafts may be prepared behind it

    def report(self) -> HeadReport:
        return self._runner.report()

    def allocate(self) -> None:
        """Creates the cache, if the head has cached layers.

        Raises:
            ConfigError: there is not enough memory for it.
        """
        shapes, spec = self._runner.kv_shapes, self._spec
        if not shapes:
            return
        assert spec.num_blocks is not None, "the target's number of blocks must be set"
        num_slots = spec.num_blocks * spec.block_size
        if self._device.type == "cuda":
            wanted = num_slots * self._runner.kv_bytes_per_token() + self._runner.spare_bytes()
            free = torch.cuda.mem_get_info(self._device)[0]
            if wanted > free:
                raise ConfigError.at(
                    "num_kv_blocks",
                    f"the head needs {wanted} bytes for the target's "
                    f"{spec.num_blocks} blocks, but its device has {free} bytes free; lower "
                    "num_kv_blocks or place the head on another device",
                )
        # Blocks of one slot: a step's block tables list exactly the rows that it may read.
        cache = KVCache(shapes, num_slots, 1, self._runner.target.dtype, self._device)
        self._runner.attach(cache)
        self._rows = SlotValidity(cache, spec.block_size)

    def listen(self, message: ListenFeatures) -> LinkOffer:
        """Opens a new link; all rows received over an earlier one become invalid."""
        self.close_links()
        self._last = None
        if self._rows is not None:
            self._rows.invalidate_all()
        self._serial = 0
        if message.here:
            queue = FeatureQueue()
            self._receiver = queue
            return LinkOffer(queue=queue)
        receiver = SocketReceiver(
            self._host if message.remote else None, self._device, self._timeout_s
        )
        self._receiver = receiver
        store_host = self._host if message.remote else "127.0.0.1"
        return receiver.offer(secrets.token_bytes(32), store_host if message.distributed else None)

    def close_links(self) -> None:
        """Closes the link."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def draft(self, ask: HeadAsk, threads: Threads) -> HeadAnswer:
        """Processes steps up to the requested one and returns the drafts after it.

        For a preparation, it returns drafts behind likely outcomes of the round that follows.
        """
        start = time.monotonic()
        answer = self._answer(ask, threads)
        if ask.preparation is not None:
            if not answer.error and answer.linked:
                answer = self._prepared(answer, ask, threads)
            answer = replace(answer, drafts=None, is_preparation=True)
        return replace(answer, took_s=time.monotonic() - start)

    def _answer(self, ask: HeadAsk, threads: Threads) -> HeadAnswer:
        deadline = time.monotonic() + ask.wait_s
        drafts, reason = None, ""
        while self._processed < ask.step:
            receiver = self._receiver
            if receiver is None:
                return HeadAnswer(ask.step, None, "there is no feature link", linked=False)
            try:
                item = receiver.take(max(0.0, deadline - time.monotonic()))
            except WorkerError as error:
                self.close_links()
                return HeadAnswer(ask.step, None, error.message, linked=False)
            if item is None:
                reason = f"no features of the step arrived within {ask.wait_s} s"
                return HeadAnswer(ask.step, None, reason)
            is_last = item.step.step == ask.step
            with threads.step(len(item.step.token_ids)):
                drafts = self._process(item, ask if is_last else None)
            reason = "the features of the step were lost" if item.hidden is None else ""
            self._serial, self._processed = item.serial + 1, item.step.step
        return HeadAnswer(ask.step, drafts, reason if drafts is None else drafts.error)

    def _prepared(self, answer: HeadAnswer, ask: HeadAsk, threads: Threads) -> HeadAnswer:
        """Returns `answer` with the prepared drafts, or with the error that prevented them."""
        done, chains, preparation = self._last, ask.chains, ask.preparation
        assert chains is not None, "they go together"
        assert preparation is not None, "they go together"
        if done is None or done.step.step != ask.step:  # its features were lost
            return answer
        start = time.perf_counter()
        num_tokens = len(chains.tokens) + int(preparation.num_outcomes.sum())
        try:
            with threads.step(max(1, num_tokens)):
                drafted = self._runner.prepare(done, chains, preparation)
        except Exception as error:  # costs only the prepared drafts, as with any drafter
            log.debug("the head failed", exc_info=True)
            # Deferred rows may be missing, so all rows are marked invalid.
            self._runner.forget()
            self._serial, self._last = _HALFWAY, None
            return replace(answer, error=f"{type(error).__name__}: {error}")
        took_ms = (time.perf_counter() - start) * 1e3
        return replace(answer, drafted=replace(drafted, forward_ms=took_ms, step=ask.step))

    @torch.inference_mode()
    def _process(self, item: Features, ask: HeadAsk | None) -> NextDrafts | None:
        """Updates rows with a step; returns the drafts for `ask` if its features arrived."""
        drafting = ask is not None and ask.preparation is None
        self._last = None
        step, rows, hidden = item.step, self._rows, item.hidden
        missed, self._serial = item.serial != self._serial, _HALFWAY
        if missed:
            self._runner.forget()
        if rows is not None:
            self._runner.catch_up(step)  # before the rows that it reads change
            if missed:
                rows.invalidate_all()
            rows.apply_moves(step.kv_moves)
            rows.invalidate(step)
        if hidden is None or (rows is None and not drafting):
            return None
        view = step if rows is None else rows.visible(step)
        if not drafting:  # only the rows are needed
            view = replace(view, max_nodes=np.zeros(step.num_seqs, dtype=np.int32))
        elif ask is not None and ask.wanted is not None:
            assert view.max_nodes is not None, "a plan says it"
            view = replace(view, max_nodes=np.where(ask.wanted, view.max_nodes, 0))
        states = tuple(self._spread(part, item) for part in hidden)
        drafts = self._runner.run(view, item.verdict, states)
        if self._prepares and not drafts.error:
            self._last = Verified(
                view, item.verdict, dict(zip(self._runner.capture, states, strict=True))
            )
        if rows is not None and not drafts.error:
            rows.mark_valid(step, item.rows)
        return drafts if drafting else None

    def _spread(
        self,
        part: Tensor,  # [num_rows, hidden_size]
        item: Features,
    ) -> Tensor:  # [num_tokens, hidden_size]
        """Returns states in the step's order, with zeros for rejected nodes."""
        part = part.to(self._device, self._runner.target.dtype)
        num_tokens = len(item.step.token_ids)
        if len(part) == num_tokens:
            return part
        whole = part.new_zeros(num_tokens, part.shape[1])
        index = torch.from_numpy(item.rows).to(self._device, torch.int64)
        return whole.index_copy_(0, index, part)
