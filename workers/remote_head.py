"""A head in a worker of its own: the target's two ends, a cache of its rows, a feature link.

The cache has the target's number of slots, so the slots, block tables, moves and rewinds in each
step apply unchanged. Steps are processed in order, each once; the engine's request is answered with
the drafts after the last one. Rows whose features were lost are excluded from all later steps
(`SlotValidity.visible`), so the head only reads rows that it wrote. Called by `worker.py`.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..config import HeadConfig
from ..drafters.heads.protocol import TargetFacts
from ..drafters.messages import HeadAnswer, HeadAsk
from ..errors import ConfigError, WorkerError
from ..scheduler.types import NextDrafts
from .attention import KVCache, SdpaBackend
from .head import HeadRunner, plan_ops
from .model import load_ends
from .slot_validity import SlotValidity
from .spec import HeadReport, ModelSpec
from .threads import Threads
from .transport.features import FeatureQueue, FeatureReceiver, Features, SocketReceiver
from .transport.links import LinkOffer, ListenFeatures

_HALFWAY = -1  # matches no step's serial: a step that fails halfway counts as missed


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
        info, *ends = load_ends(
            Path(spec.path),
            dtype,
            device,
            trust_remote_code=spec.trust_remote_code,
            allow_pickle=spec.allow_pickle,
        )
        facts = TargetFacts(info.hidden_size, info.vocab_size, info.num_layers, info.dtype, device)
        self._runner = HeadRunner(
            config,
            facts,
            (ends[0], ends[1]),
            plan_ops(device, info.dtype),
            SdpaBackend().begin,
            max_num_seqs=spec.max_num_seqs,
        )
        self._spec = spec
        self._device = device
        self._host = host
        self._timeout_s = timeout_s
        self._rows: SlotValidity | None = None
        self._receiver: FeatureReceiver | None = None
        self._serial = 0  # expected of the next step
        self._processed = -1  # number of the last step

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
                raise ConfigError(
                    f"num_kv_blocks: the head needs {wanted} bytes for the target's "
                    f"{spec.num_blocks} blocks, but its device has {free} bytes free; lower "
                    "num_kv_blocks or place the head on another device",
                    field="num_kv_blocks",
                )
        # Blocks of one slot: a step's block tables list exactly the rows that it may read.
        cache = KVCache(shapes, num_slots, 1, self._runner.target.dtype, self._device)
        self._runner.attach(cache)
        self._rows = SlotValidity(cache, spec.block_size)

    def listen(self, message: ListenFeatures) -> LinkOffer:
        """Opens a new link; all rows received over an earlier one become invalid."""
        self.close_links()
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
        """Processes steps up to the requested one and returns the drafts after it."""
        start = time.monotonic()
        return replace(self._answer(ask, threads), took_s=time.monotonic() - start)

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
            with threads.step(len(item.step.token_ids)):
                drafts = self._process(item, drafting=item.step.step == ask.step)
            reason = "the features of the step were lost" if item.hidden is None else ""
            self._serial, self._processed = item.serial + 1, item.step.step
        return HeadAnswer(ask.step, drafts, reason if drafts is None else drafts.error)

    @torch.inference_mode()
    def _process(self, item: Features, *, drafting: bool) -> NextDrafts | None:
        """Updates the rows with a step; returns its drafts if requested and features arrived."""
        step, rows, hidden = item.step, self._rows, item.hidden
        missed, self._serial = item.serial != self._serial, _HALFWAY
        if rows is not None:
            if missed:
                rows.invalidate_all()
            rows.apply_moves(step.kv_moves)
            rows.invalidate(step)
        if hidden is None or (rows is None and not drafting):
            return None
        view = step if rows is None else rows.visible(step)
        if not drafting:  # only the rows are needed
            view = replace(view, max_nodes=np.zeros(step.num_seqs, dtype=np.int32))
        states = tuple(self._spread(part, item) for part in hidden)
        drafts = self._runner.run(view, item.verdict, states)
        if rows is not None and not drafts.error:
            rows.mark_valid(step, item.rows)
        return drafts if drafting else None

    def _spread(
        self,
        part: Tensor,  # [num_rows, hidden_size]
        item: Features,
    ) -> Tensor:  # [num_tokens, hidden_size]
        """States in the step's order, with zeros for rejected nodes."""
        part = part.to(self._device, self._runner.target.dtype)
        num_tokens = len(item.step.token_ids)
        if len(part) == num_tokens:
            return part
        whole = part.new_zeros(num_tokens, part.shape[1])
        index = torch.from_numpy(item.rows).to(self._device, torch.int64)
        return whole.index_copy_(0, index, part)
