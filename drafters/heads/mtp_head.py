"""MTP modules in the worker: rows for committed tokens, then a draft from the modules' own output.

Rows are stored as EAGLE's are (`eagle_head.py`): each computed token has one per module, in its own
slot. In token j's slot, module m stores its row j - m, which consumes the embedding of token j + 1
and the feature of module m - 1 at token j - 1. No row depends on tokens beyond j + 1. The next step
needs the features at the last token; they are cached next to the keys and so survive a rewind, a
replay or a prefix hit. Before the first token there are no features: module m reads zeros at its
first m tokens.

While drafting, module l predicts level l. A draft longer than the number of modules starts again
with the first one, which reads the last module's feature in place of the target's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ...config import MTPConfig
from ...scheduler.types import NextDrafts
from .mtp_load import read_mtp
from .protocol import (
    Attend,
    EarlierRows,
    HeadHost,
    HeadLayer,
    HeadRows,
    TargetFacts,
    Verified,
)
from .step_rows import rows_of
from .tree_drafting import TreeDrafter, room_of


class MTPHead:
    """Runs the modules over a step."""

    target_ids: Tensor | None = None  # draft ids are the target's
    outputs: tuple[nn.Linear, ...] = ()  # the target's output layer serves

    def __init__(self, config: MTPConfig, target: TargetFacts) -> None:
        self.module: nn.ModuleList = read_mtp(config, target)
        count = len(self.module)
        self.capture: tuple[int, ...] = (target.num_layers,)
        # The modules' own layers, then the stored features of all but the last module.
        self.layers = (
            *(
                replace(module.kept(), num_draft_rows=room_of(config))  # type: ignore[operator]
                for module in self.module
            ),
            *(HeadLayer(1, target.hidden_size, 0) for _ in range(count - 1)),
        )
        self._zero_first = config.zero_first_embedding
        self._begins_again = config.draft_len > count
        self.drafting = TreeDrafter(config, self, count)

    def draft(self, done: Verified, host: HeadHost) -> NextDrafts:
        return self.drafting.draft(done, *self.rows(rows_of(done, host), host), host)

    def rows(self, step: HeadRows, host: HeadHost) -> tuple[Tensor, Tensor]:
        embedded = host.embed(step.next_tokens)
        if self._zero_first:
            embedded = embedded.masked_fill((step.positions == 0)[:, None], 0)
        feature, features = step.hidden[self.capture[0]], []
        first = feature
        for index in range(len(self.module)):
            if index:
                feature = self._a_token_earlier(index - 1, feature, step.earlier(), host)
            feature, read = self._run(index, embedded, feature, step.positions, step.attend)
            features.append(feature)
            if index == 0:
                first = read
        return torch.cat(features, dim=-1), first

    def advance(
        self,
        level: int,
        token_ids: Tensor,  # [num_rows]
        feature: Tensor,  # [num_rows, num_modules * hidden_size]
        positions: Tensor,  # [num_rows]
        attend: Attend,
        host: HeadHost,
    ) -> tuple[Tensor, Tensor]:  # [num_rows, num_modules * hidden_size]; [num_rows, hidden_size]
        """Runs every module whose feature a later level may read; returns the level's output."""
        count = len(self.module)
        above = feature.chunk(count, dim=-1)
        here, embedded = list(above), host.embed(token_ids)
        first = 0 if self._begins_again else level
        read = feature
        for index in range(first, count):
            source = above[index - 1] if index else above[(level - 1) % count]
            here[index], normed = self._run(index, embedded, source, positions, attend)
            if index == level % count:
                read = normed
        return torch.cat(here, dim=-1), read

    def logits(self, read: Tensor, host: HeadHost) -> Tensor:  # [num_rows, vocab]
        """Logits of rows [num_rows, hidden_size]."""
        return host.unembed(read)

    def _run(
        self,
        index: int,
        embedded: Tensor,  # [num_rows, hidden_size]
        feature: Tensor,  # [num_rows, hidden_size]
        positions: Tensor,  # [num_rows]
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:  # [num_rows, hidden_size] each
        """Runs one module; its first `index` positions read zeros."""
        if index:
            before = (positions < index)[:, None]
            embedded, feature = embedded.masked_fill(before, 0), feature.masked_fill(before, 0)
        out: tuple[Tensor, Tensor] = self.module[index](embedded, feature, positions, attend)
        return out

    def _a_token_earlier(
        self, index: int, feature: Tensor, earlier: EarlierRows, host: HeadHost
    ) -> Tensor:  # [num_rows, hidden_size], same shape
        """Stores module `index`'s features; returns those of the token before each."""
        layer = len(self.module) + index
        left = host.cached(layer, earlier.last_slots)[0][:, 0]
        nothing = feature.new_zeros(len(feature), 1, 0)
        host.keep(layer, earlier.slots, feature[:, None], nothing)
        return torch.cat([feature, left])[earlier.rows]


def load_mtp(config: MTPConfig, target: TargetFacts) -> MTPHead:
    """Loads the modules of `config`'s folder (raises as `read_mtp` does)."""
    return MTPHead(config, target)
