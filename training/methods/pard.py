"""Method `pard`: a draft model that also learns to predict several tokens ahead, behind masks.

Beside a window's tokens stand rows of mask tokens. Row (t, d) is the d-th mask behind the text up
to token t: it sees that text and the masks before it, and predicts token t + d + 1, so its teacher
is the target at position t + d. Rows (t, 0) are the tokens themselves. Of every next depth fewer
rows are trained, and those of one anchor t are dropped together with what follows them.

Source: An et al. 2025, arXiv:2504.18583, section 3.2 (conditional drop).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...drafters.pard import MASK_KEYS
from ..options import PARDOptions
from ..protocol import FrozenTarget, Losses, TargetStates, Windows
from .distil import Agreement, checked_mask, likeliest, rarest, soft_cross_entropy, teacher_of
from .draft import DraftMethod


@dataclass(frozen=True, slots=True)
class MaskRows:
    """A window's rows: its tokens, then the masks of each depth."""

    anchors: Tensor  # [num_rows] int64, the last token of the text that a row sees
    depths: Tensor  # [num_rows] int64; 0: a token
    counts: tuple[int, ...]  # by depth; the last token of a window is no anchor, but a row

    @classmethod
    def of(cls, window_len: int, num_depths: int, shares: float, least: float) -> MaskRows:
        """Rows of which depth d keeps the share max(shares ** d, least), drawn at random."""
        order = torch.randperm(window_len) if shares < 1 else torch.arange(window_len)
        anchors = [torch.arange(window_len)]
        for depth in range(1, num_depths):
            kept = order[: max(1, round(window_len * max(shares**depth, least)))].sort().values
            anchors.append(kept[kept < window_len - 1 - depth])
        depths = [torch.full_like(part, depth) for depth, part in enumerate(anchors)]
        return cls(torch.cat(anchors), torch.cat(depths), tuple(map(len, anchors)))

    def attention(self) -> Tensor:  # [1, 1, num_rows, num_rows] float32, added to scores
        """Every row sees the text up to its anchor, and the masks between that and itself."""
        anchor, depth = self.anchors[:, None], self.depths[:, None]
        of_text = (self.depths == 0) & (self.anchors <= anchor)
        of_chain = (self.anchors == anchor) & (self.depths > 0) & (self.depths <= depth)
        hidden = ~(of_text | of_chain)
        return torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo().min)[None, None]


class PARDMethod(DraftMethod):
    """Trains a whole model on tokens and masks."""

    _options: PARDOptions

    def __init__(self, options: PARDOptions, target: FrozenTarget) -> None:
        super().__init__(options, target)
        given = checked_mask(options.mask_token_id, target)
        stored = (getattr(self.module.config, key, None) for key in MASK_KEYS)
        found = next((token for token in stored if isinstance(token, int)), None)
        self._mask_token = found if given is None else given

    def prepare(self, token_counts: Tensor) -> None:  # [vocab]
        """The mask is the rarest token, unless one was given."""
        if self._mask_token is None:
            self._mask_token = rarest(token_counts)

    def loss(self, windows: Windows, states: TargetStates, target: FrozenTarget) -> Losses:
        """The mean over depths of the mean over rows whose token is within the window."""
        options, window_len = self._options, windows.tokens.shape[1]
        is_trained, depths = torch.is_grad_enabled(), options.num_depths
        if not is_trained:  # without gaps, so that whole chains are judged
            depths = max(depths, options.max_draft_len)
        shares = options.retention if is_trained else 1.0
        depths = min(depths, window_len - 1)
        rows = MaskRows.of(window_len, depths, shares, options.least_retention)
        teacher = teacher_of(states.logits, options.argmax_weight)
        logits = self._logits(windows.tokens, rows)
        agreement, loss = Agreement(), windows.weights.new_zeros(())
        parts = zip(logits.split(rows.counts, 1), rows.anchors.split(rows.counts), strict=True)
        for depth, (part, anchors) in enumerate(parts):
            if depth == 0:
                part, anchors = part[:, :-1], anchors[:-1]
            weights = windows.weights[:, anchors + depth + 1]
            if depth < options.num_depths:
                loss = loss + soft_cross_entropy(part, teacher.probs[:, anchors + depth], weights)
            if depth < (1 if is_trained else options.max_draft_len):
                best = teacher.best[:, anchors + depth]
                agreement.add(likeliest(part), best, weights > 0)
        return Losses(loss / min(depths, options.num_depths), *agreement.totals())

    def _logits(self, tokens: Tensor, rows: MaskRows) -> Tensor:  # [num_windows, num_rows, vocab]
        device = tokens.device
        assert self._mask_token is not None, "prepare() comes first"
        num_masks = len(rows.depths) - rows.counts[0]
        masks = tokens.new_full((len(tokens), num_masks), self._mask_token)
        places = (rows.anchors + rows.depths).to(device).expand(len(tokens), -1)
        logits: Tensor = self.module(
            input_ids=torch.cat([tokens, masks], dim=1),
            position_ids=places,
            attention_mask=rows.attention().to(device),
            use_cache=False,
        ).logits
        return logits

    def export(self, folder: Path) -> None:
        """As `draft`, with `pard_token` in `config.json`."""
        self.module.config.pard_token = self._mask_token
        super().export(folder)
