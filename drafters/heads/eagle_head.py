"""EAGLE in the worker: computes rows for committed tokens, then drafts from the head's own output.

Every computed token, drafted nodes included, gets a row (`eagle.py`) in the target's slot: a
rejected node's row is freed with its slot, an accepted one's moves with it, and a cached prefix
includes its rows. A row depends on the following token, so blocks are shared only if the token
after them is equal too (`reach` in `config/section.py`). `tree_drafting.py` builds the draft.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...config import EagleConfig
from ...scheduler.types import NextDrafts
from .eagle import EagleModule
from .eagle_load import read_eagle
from .protocol import Attend, HeadHost, HeadLayer, HeadRows, TargetFacts, Verified
from .step_rows import rows_of
from .tree_drafting import TreeDrafter, room_of


class EagleHead:
    """Runs the module over a step."""

    def __init__(self, config: EagleConfig, target: TargetFacts) -> None:
        loaded = read_eagle(config, target)
        self.module: EagleModule = loaded.module
        self.target_ids = loaded.target_ids
        self.capture: tuple[int, ...] = loaded.capture
        room = room_of(config)
        self.layers = tuple(
            HeadLayer(sizes.num_kv_heads, sizes.head_dim, num_draft_rows=room)
            for sizes in self.module.layer_sizes
        )
        self.drafting = TreeDrafter(config, self, len(self.layers))

    @property
    def outputs(self) -> tuple[nn.Linear, ...]:
        own = self.module.lm_head
        return () if own is None else (own,)

    def draft(self, done: Verified, host: HeadHost) -> NextDrafts:
        return self.drafting.draft(done, *self.rows(rows_of(done, host), host), host)

    def rows(self, step: HeadRows, host: HeadHost) -> tuple[Tensor, Tensor]:
        states = torch.cat([step.hidden[layer] for layer in self.capture], dim=-1)
        out: tuple[Tensor, Tensor] = self.module(
            self._embed(step.next_tokens, host),
            self.module.fuse(states),
            step.positions,
            step.attend,
        )
        return out

    def advance(
        self,
        level: int,
        token_ids: Tensor,  # [num_rows]
        feature: Tensor,  # [num_rows, hidden_size]
        positions: Tensor,  # [num_rows]
        attend: Attend,
        host: HeadHost,
    ) -> tuple[Tensor, Tensor]:  # [num_rows, hidden_size] each
        """Runs the module on its own output."""
        grown: tuple[Tensor, Tensor] = self.module(
            self._embed(token_ids, host), feature, positions, attend
        )
        return grown

    def logits(self, read: Tensor, host: HeadHost) -> Tensor:  # [num_rows, draft_vocab]
        """Logits of rows [num_rows, hidden_size]."""
        own = self.module.lm_head
        logits: Tensor = host.unembed(read) if own is None else own(read)
        return logits

    def _embed(self, token_ids: Tensor, host: HeadHost) -> Tensor:
        own = self.module.embed_tokens
        return host.embed(token_ids) if own is None else own(token_ids)


def load_eagle(config: EagleConfig, target: TargetFacts) -> EagleHead:
    """Loads the head of `config`'s folder (raises as `read_eagle` does)."""
    return EagleHead(config, target)
