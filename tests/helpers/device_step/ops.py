"""The verbs of the device step in torch: the oracle of its kernels, on any device.

Every row is computed over the whole vocabulary, whatever its settings are, because rows cannot be
told apart without a look at them. Tokens equal those of `workers/verify/process.py`, edited logits
those of `workers/verify/process.py` bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.tests.helpers.device_step.rows import (
    draft_level_by_tensors,
    draft_slots_by_tensors,
    keep_by_tensors,
    lay_out_by_tensors,
    settle_by_tensors,
)
from outrider.workers.ops import ReferenceOps
from outrider.workers.verify import noise
from outrider.workers.verify.device_settings import (
    FREQUENCY,
    MASK_BITS,
    MAX_ENDS,
    MAX_TOP,
    MIN_LEN,
    NUM_ENDS,
    PRESENCE,
    PROMPT,
    REPETITION,
    WORD_BITS,
    DeviceEdits,
    DeviceSettings,
)
from outrider.workers.verify.process import GREEDY_BELOW, masses


class TensorOps(ReferenceOps):
    """`DeviceOps` in torch operations."""

    reads_device_only = True

    def draw_on_device(self, logits, positions, settings, tokens=None):
        return draw_by_tensors(logits, positions, settings, tokens)

    def gumbel_argmax_on_device(self, logits, positions, settings, tokens, ahead=0):
        return gumbel_argmax(logits, positions, settings, tokens, ahead)

    def edit_on_device(self, logits, edits):
        edit(logits, edits)

    def logprobs_on_device(self, logits, tokens, edits):
        return logprobs(logits, tokens)

    def lay_out_on_device(self, staged):
        return lay_out_by_tensors(staged)

    def settle_on_device(self, drawn, walk):
        return settle_by_tensors(drawn, walk)

    def move_on_device(self, cache, places, settled, query_start, query_len):
        cache.move(settled.source, settled.target)

    def keep_on_device(self, kept):
        keep_by_tensors(kept)

    def draft_slots_on_device(self, *rows):
        return draft_slots_by_tensors(*rows)

    def draft_level_on_device(self, level):
        return draft_level_by_tensors(level)


def draw_by_tensors(
    logits: Tensor,  # [num_rows, width] float32
    positions: Tensor,  # [num_rows], index of the drawn token in prompt + output
    settings: DeviceSettings,
    tokens: Tensor | None = None,  # [width] int64, ascending, of the columns; None: the same
) -> Tensor:  # [num_rows] int32
    """One token per row, with the target's noise; temperature 0 is the argmax."""
    if tokens is None:
        tokens = torch.arange(logits.shape[1], device=logits.device)
    greedy = settings.temperature < GREEDY_BELOW
    scaled = logits / torch.where(greedy, 1.0, settings.temperature)[:, None]
    cut = scaled.masked_fill(~_kept(scaled, settings), -torch.inf)
    row_keys = noise.keys(settings.seeds, positions)
    perturbed = noise.gumbel(row_keys, tokens[None]) + cut
    return tokens[torch.where(greedy[:, None], logits, perturbed).argmax(1)].to(torch.int32)


def gumbel_argmax(
    logits: Tensor,  # [num_rows, width], of any part of the vocabulary
    positions: Tensor,  # [num_rows], index of the drawn token in prompt + output
    settings: DeviceSettings,  # by temperature alone
    tokens: Tensor | int,  # [width], of the columns, or of the first of neighbours
    ahead: int = 0,  # of all positions
) -> tuple[Tensor, Tensor]:  # each [num_rows]: float32; int32, or as `tokens`
    """The best score of every row and its first token.

    The best of all parts' scores is what `draw` draws where no cut is on: no score depends on the
    other tokens.
    """
    num_rows, width = logits.shape
    kind = torch.int32 if isinstance(tokens, int) else tokens.dtype
    if not width:
        none = logits.new_full((num_rows,), -torch.inf, dtype=torch.float32)
        return none, torch.zeros_like(positions, dtype=kind)
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, tokens + width, device=logits.device)
    greedy = (settings.temperature < GREEDY_BELOW)[:, None]
    logits = logits.float()
    scaled = logits / torch.where(greedy, 1.0, settings.temperature[:, None])
    row_keys = noise.keys(settings.seeds, positions + ahead)
    scores = torch.where(greedy, logits, noise.gumbel(row_keys, tokens[None]) + scaled)
    best = scores.argmax(1, keepdim=True)  # of equal ones the first
    return scores.gather(1, best)[:, 0], tokens[best[:, 0]].to(kind)


def _kept(
    scaled: Tensor,  # [num_rows, vocab], divided by the temperature
    settings: DeviceSettings,
) -> Tensor:  # [num_rows, vocab] bool
    """What top-k, then top-p, then min-p keep: each a prefix of the ranking."""
    vocab = scaled.shape[1]
    values, order = scaled.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=scaled.device)
    most = torch.where(settings.top_k > 0, settings.top_k, vocab)[:, None]
    kept = (ranks < most) & (values > -torch.inf)
    mass = masses(values) * kept
    before = (mass.cumsum(1) - mass).double()
    top_p = settings.top_p.double()[:, None]
    # Rank 0 is kept even if `top_p` is so small that it is 0 in float32.
    kept &= (before < top_p * mass.sum(1, keepdim=True)) | (top_p >= 1) | (ranks == 0)
    # As `process` rounds it: the logarithm in float64, then to float32.
    kept &= values >= values[:, :1] + settings.min_p.double().log().float()[:, None]
    return torch.zeros_like(kept).scatter(1, order, kept)


def edit(
    logits: Tensor,  # [num_rows, vocab] float32, written
    edits: DeviceEdits,
) -> None:
    """Applies biases, forbidden ends and penalties."""
    tables, seats = edits.tables, edits.seats
    words = tables.words.index_select(0, seats)
    ids = tables.bias_ids.index_select(0, seats).long()
    logits.scatter_add_(1, ids, tables.biases.index_select(0, seats).view(torch.float32))
    ends = tables.ends.index_select(0, seats).long()
    is_end = torch.arange(MAX_ENDS, device=logits.device) < words[:, NUM_ENDS, None]
    owed = words[:, MIN_LEN] > edits.positions + 1
    forbidden = torch.where(is_end & owed[:, None], -torch.inf, 0.0)
    logits.scatter_add_(1, ends, forbidden)
    held = tables.counts.index_select(0, seats)
    _penalise(logits, held & (PROMPT - 1), held > 0, words, edits)
    bits = tables.masks.index_select(0, edits.masks.clamp(min=0))
    shifts = torch.arange(MASK_BITS, device=logits.device, dtype=torch.int32)
    allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]] != 0
    logits.masked_fill_(~allowed & (edits.masks >= 0)[:, None], -torch.inf)


def _penalise(
    logits: Tensor,  # [num_rows, vocab] float32, written
    counts: Tensor,  # [num_rows, vocab] int32, in the output, edited
    seen: Tensor,  # [num_rows, vocab] bool, in prompt or output
    words: Tensor,  # [num_rows, NUM_WORDS]
    edits: DeviceEdits,
) -> None:
    if edits.max_nodes:
        node = torch.arange(edits.max_nodes, device=logits.device)
        on_path = (edits.ancestors[:, node // WORD_BITS] >> node % WORD_BITS & 1).to(torch.int32)
        rows = (edits.first.long()[:, None] + 1 + node).clamp(max=len(edits.token_ids) - 1)
        path = edits.token_ids.long()[rows]
        counts = counts.scatter_add(1, path, on_path)
    repetition, frequency, presence = (
        words[:, column : column + 2].contiguous().view(torch.float64)
        for column in (REPETITION, FREQUENCY, PRESENCE)
    )
    factor = torch.where(seen | (counts > 0), repetition, 1.0).float()
    less = (frequency * counts + presence * (counts > 0)).float()
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor) - less)


def logprobs(
    logits: Tensor,  # [num_rows, vocab], unedited
    tokens: Tensor,  # [num_rows] int32, drawn
) -> tuple[Tensor, Tensor]:  # each [num_rows, 1 + MAX_TOP]: float32, int32
    """Log-probabilities of the drawn token and of the most likely, its rank and their ids.

    Ties go to the lower id; columns beyond the vocabulary are unspecified.
    """
    raw = logits.float().log_softmax(1)
    top = min(MAX_TOP, logits.shape[1])
    ids = raw.topk(top, dim=1).indices.sort(dim=1).values
    best, order = raw.gather(1, ids).sort(dim=1, descending=True, stable=True)
    chosen = tokens.long()[:, None]
    own = raw.gather(1, chosen)
    is_lower = torch.arange(logits.shape[1], device=logits.device) < chosen
    ranks = 1 + ((raw > own) | ((raw == own) & is_lower)).sum(1, keepdim=True)
    values = torch.cat([own, best], dim=1)
    missing = (0, MAX_TOP - top)
    ids = torch.cat([ranks, ids.gather(1, order)], dim=1).to(torch.int32)
    return pad(values, missing), pad(ids, missing)
