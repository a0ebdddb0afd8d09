"""Computes the processed distribution of every row, equal to that without speculation, and draws
from it.

Order: logit bias and min_new_tokens, then repetition, frequency and presence penalties (vLLM's
order); then temperature, top-k, top-p, min-p. The history of a draft node includes the tokens on
its own path.

Each stage processes only the rows that need it.

Ties: tokens are ranked by (logit, lower id first), and top-p sums integer masses, so a row's cut
depends neither on the order of summation nor on other rows.

Sources: Keskar et al. 2019, arXiv:1909.05858 (repetition); Holtzman et al. 2019,
arXiv:1904.09751 (top-p); Nguyen et al. 2024, arXiv:2407.01082 (min-p).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.types import FloatArray, IntArray, Logprobs, Masks, Penalties, SamplingRows
from . import noise
from .noise import argmax, nonzero, passes

GREEDY_BELOW = 1e-5  # lower temperatures count as 0: dividing by them overflows float32

RowIndex = NDArray[np.int64]
Seeds = NDArray[np.int64] | Tensor
Positions = IntArray | Tensor


class DrawSettings(NamedTuple):
    """Sampling settings per row of logits; on the CPU, except that seeds may be on the device."""

    seeds: Seeds  # [num_rows], of the rows' requests
    temperature: FloatArray  # [num_rows], 0 is greedy
    top_k: IntArray  # [num_rows], 0 is off
    top_p: FloatArray  # [num_rows], 1 is off
    min_p: FloatArray  # [num_rows], 0 is off

    @classmethod
    def of(cls, sampling: SamplingRows, seqs: RowIndex | IntArray) -> DrawSettings:
        """Returns the settings of rows that belong to these sequences [num_rows] of the batch."""
        heat = sampling.temperature
        return cls(sampling.seeds, heat, sampling.top_k, sampling.top_p, sampling.min_p).take(seqs)

    @property
    def greedy(self) -> NDArray[np.bool_]:  # [num_rows]
        return self.temperature < GREEDY_BELOW

    def take(self, rows: RowIndex | IntArray | NDArray[np.bool_]) -> DrawSettings:
        return DrawSettings._make(column[rows] for column in self)


def token_logprobs(
    logits: Tensor,  # [num_rows, vocab] float32
    tokens: IntArray,  # [num_rows]
    top: int,
) -> Logprobs:
    """Returns log-probabilities of one token per row and of the `top` most likely, and its rank.

    They are the model's own, without settings; ties go to the lower id.
    """
    raw = logits.log_softmax(1)
    chosen = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)[:, None]
    own = raw.gather(1, chosen)
    is_lower = torch.arange(logits.shape[1], device=logits.device) < chosen
    ranks = 1 + ((raw > own) | ((raw == own) & is_lower)).sum(1)
    ids = _best_ids(raw, min(top, logits.shape[1]))
    values = torch.cat([own, raw.gather(1, ids)], dim=1).cpu().numpy()
    counted = torch.cat([ranks[:, None], ids], dim=1).to(torch.int32).cpu().numpy()
    return Logprobs(values[:, 0], counted[:, 1:], values[:, 1:], counted[:, 0])


def _best_ids(
    raw: Tensor,  # [num_rows, vocab]
    count: int,
) -> Tensor:  # [num_rows, count], ids, best first
    """Returns the best ids; ties go to the lower id, also at the cut, where `topk` is arbitrary."""
    if count == 0:
        return torch.zeros((len(raw), 0), dtype=torch.int64, device=raw.device)
    width = min(count + _TIE_ROOM, raw.shape[1])
    ids = raw.topk(width, dim=1, sorted=False).indices.sort(dim=1).values
    best, order = raw.gather(1, ids).sort(dim=1, descending=True, stable=True)
    found = ids.gather(1, order[:, :count])
    tied = best[:, count - 1] == best[:, -1]  # there may be further tied tokens
    if width < raw.shape[1] and bool(tied.any()):
        found[tied] = raw[tied].sort(dim=1, descending=True, stable=True).indices[:, :count]
    return found


def spread(found: Logprobs, wanted: NDArray[np.bool_]) -> Logprobs:  # [num_emitted]
    """Returns `found`, which covers the wanted tokens, extended by zeros for the others."""
    columns = []
    for values in found.columns:
        columns.append(np.zeros((len(wanted), *values.shape[1:]), dtype=values.dtype))
        columns[-1][wanted] = values
    return Logprobs(*columns)


def joined_logprobs(
    parts: Sequence[Logprobs | None],
    counts: Sequence[int],
    order: RowIndex,  # [num_tokens]
) -> Logprobs:
    """Joins the parts' log-probabilities, reordered by `order`; a part of None has zeros."""
    known = [part for part in parts if part is not None]
    top = max(part.top.shape[1] for part in known)
    nothing = known[0].part(0, 0)
    found: list[list[NDArray[Any]]] = []
    for part, count in zip(parts, counts, strict=True):
        part = part or spread(nothing, np.zeros(count, dtype=np.bool_))
        missing = ((0, 0), (0, top - part.top.shape[1]))
        ids, values = np.pad(part.top_ids, missing), np.pad(part.top, missing)
        found.append([part.chosen, ids, values, part.ranks])
    columns: list[NDArray[Any]] = [np.concatenate(each)[order] for each in zip(*found)]
    return Logprobs(*columns)


def allow(
    logits: Tensor,  # [num_rows, vocab]
    masks: Masks | None,
) -> Tensor:  # [num_rows, vocab]; `logits` itself if no row is masked
    """Returns `logits` with -inf where `masks` has no bit; the input is not modified.

    Applied after biases and penalties and before temperature and cuts, for every rule: a token that
    the grammar forbids has probability 0, and the others are renormalised.
    """
    if masks is None:
        return logits
    device, vocab = logits.device, logits.shape[1]
    rows = torch.from_numpy(masks.rows).to(device, torch.int64)
    bits = torch.from_numpy(masks.bits).to(device)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    allowed = ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab]
    masked = logits.clone()
    masked[rows] = masked[rows].masked_fill(~allowed, -torch.inf)
    return masked


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The logit rows of a step: for each sampled sequence its root, then its draft nodes.

    The arrays are on the host and do not include logits; `rules.rows_of` creates them.
    """

    seq: NDArray[np.int64]  # [num_rows], sequence in the batch
    root: NDArray[np.int64]  # [num_rows], row of the sequence's root
    parent: NDArray[np.int64]  # [num_rows], row of the parent; a root is its own parent
    nodes: NDArray[np.int64]  # [num_rows], index into the step's draft_tokens; -1 at roots
    tokens: IntArray  # [num_rows], the node's token; -1 at roots
    depth: IntArray  # [num_rows], 0 at roots
    positions: IntArray  # [num_rows], position of the token drawn at the row
    seeds: NDArray[np.int64]  # [num_rows]
    window: NDArray[np.bool_]  # [num_rows], the node is computed but never accepted
    num_seqs: int

    @property
    def num_rows(self) -> int:
        return len(self.seq)

    @property
    def is_root(self) -> NDArray[np.bool_]:  # [num_rows]
        return self.nodes < 0

    @property
    def drafted(self) -> NDArray[np.bool_]:  # [num_rows]
        """Nodes that may be accepted."""
        return (self.nodes >= 0) & ~self.window


_WIDTH = 256  # candidates tried before the whole vocabulary
_TIE_ROOM = 16  # candidates beyond top_k, so that ties at the cut are included
_BUCKETS_PER_NAT, _NUM_BUCKETS = 32, 1024  # `_nucleus`: resolution, and reach of 32 nats
MASS = 2.0**40  # the most likely token's mass; a vocabulary's sum fits int64

Entries = tuple[NDArray[Any], ...]  # flat indices into the logits, then values of equal length


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """Rows of one kind: greedy, over the whole vocabulary, or over few candidates."""

    rows: RowIndex  # [num_pooled], rows of the logits
    logits: Tensor  # [num_pooled, num_candidates], divided by the temperature; -inf is cut off
    ids: Tensor | None  # [num_pooled, num_candidates], ascending; None: the whole vocabulary
    greedy: bool = False  # only the argmax counts

    def find(
        self,
        part: slice | Tensor,  # of the pool's rows
        tokens: Tensor,  # [num_rows, num_tokens] int64, of that part
    ) -> tuple[Tensor, Tensor]:  # [num_rows, num_tokens]: columns, and which are candidates
        """Returns the columns of `tokens`, arbitrary for tokens that are not candidates."""
        last = self.logits.shape[1] - 1
        if self.ids is None:
            index = tokens.clamp(0, last)
            return index, index == tokens
        ids = self.ids[part]
        index = torch.searchsorted(ids, tokens).clamp_(max=last)
        return index, ids.gather(1, index) == tokens


# -- edits that depend on tokens: penalties, biases, forbidden ends


def edit(
    rows: DraftRows,
    sampling: SamplingRows,
    logits: Tensor,  # [num_rows, vocab] float32
) -> Tensor:  # [num_rows, vocab]; `logits` itself when there is nothing to edit
    """`logits` with penalties, biases and forbidden ends applied; the input is not modified."""
    if not (sampling.penalties or sampling.biases or sampling.ends):
        return logits
    vocab = logits.shape[1]
    scaled = [_penalised(rows, penalties, vocab) for penalties in sampling.penalties]
    shifted = []
    for bias in sampling.biases:
        of_seq = np.flatnonzero(rows.seq == bias.row)
        shifted.append(_entries(of_seq, bias.ids, vocab, np.tile(bias.values, len(of_seq))))
    owed = sampling.min_new_tokens[rows.seq] > rows.depth
    for seq in np.unique(rows.seq[owed]).tolist() if sampling.ends and owed.any() else ():
        of_seq = np.flatnonzero(owed & (rows.seq == seq))
        ends = sampling.ends[seq]
        shifted.append(_entries(of_seq, ends, vocab, np.full(len(of_seq) * len(ends), -np.inf)))

    scaled = [entries for entries in scaled if len(entries[0])]  # drops empty ones
    shifted = [entries for entries in shifted if len(entries[0])]
    edited = logits
    if shifted:
        at, more = _upload(shifted, logits.device)
        edited = edited.clone()
        edited.view(-1).index_put_((at,), more, accumulate=True)
    if scaled:
        at, factor, less = _upload(scaled, logits.device)
        edited = edited.clone() if edited is logits else edited
        flat = edited.view(-1)
        value = flat[at]
        flat[at] = torch.where(value > 0, value / factor, value * factor) - less
    return edited


def _penalised(rows: DraftRows, penalties: Penalties, vocab: int) -> Entries:
    """Returns one sequence's (flat index, repetition factor, subtrahend) per row and token."""
    of_seq = np.flatnonzero(rows.seq == penalties.row)
    num_rows, path = len(of_seq), rows.tokens[of_seq[1:]]
    prompt, output = penalties.prompt_ids, penalties.output_ids
    ids, column = np.unique(np.concatenate([prompt, output, path]), return_inverse=True)
    counts = np.zeros((num_rows, len(ids)))
    seen = np.zeros(len(ids), dtype=np.bool_)
    seen[column[: len(prompt)]] = True
    counts[:1, column[len(prompt) : len(prompt) + len(output)]] = penalties.output_counts
    path_column = column[len(prompt) + len(output) :]
    parents = rows.parent[of_seq] - of_seq[:1]
    for row in range(1, num_rows):  # a node's history is its parent's plus its own token
        counts[row] = counts[parents[row]]
        counts[row, path_column[row - 1]] += 1
    factor = np.where(seen | (counts > 0), penalties.repetition, 1.0)
    less = penalties.frequency * counts + penalties.presence * (counts > 0)
    return _entries(of_seq, ids, vocab, factor.ravel(), less.ravel())


def _entries(
    of_seq: RowIndex,
    ids: IntArray,
    vocab: int,
    *values: NDArray[np.floating],  # each [num_rows of the sequence * num_ids]
) -> Entries:
    """Returns flat indices of (row, id) with their values; drops ids outside the vocabulary."""
    known = np.tile((ids >= 0) & (ids < vocab), len(of_seq))
    at = (of_seq[:, None] * vocab + ids).ravel()
    return at[known], *(value[known] for value in values)


def _upload(parts: list[Entries], device: torch.device) -> tuple[Tensor, ...]:
    at, *values = (np.concatenate(column) for column in zip(*parts))
    return torch.from_numpy(at.astype(np.int64)).to(device), *(
        torch.from_numpy(value.astype(np.float32)).to(device) for value in values
    )


# -- cuts that depend only on logits: temperature, top-k, top-p, min-p


def pools(
    logits: Tensor,  # [num_rows, vocab] float32, edited
    of_rows: DrawSettings,
) -> Iterator[CandidatePool]:
    """Partitions the rows into pools by their settings."""
    vocab = logits.shape[1]
    greedy = of_rows.greedy
    if greedy.any():
        chosen, rows = _select(logits, greedy)
        yield CandidatePool(rows, chosen, None, greedy=True)
        if len(rows) == len(greedy):
            return
    ranked = ((of_rows.top_k > 0) & (of_rows.top_k < vocab)) | (of_rows.top_p < 1)
    whole = ~greedy & ~ranked
    if whole.any():
        chosen, rows = _select(logits, whole)
        yield CandidatePool(rows, _min_p(_scaled(chosen, of_rows, rows), of_rows.min_p[rows]), None)
    ranked &= ~greedy
    if ranked.any():
        chosen, rows = _select(logits, ranked)
        yield from _ranked(_scaled(chosen, of_rows, rows), rows, of_rows.take(rows))


def _select(logits: Tensor, mask: NDArray[np.bool_]) -> tuple[Tensor, RowIndex]:
    rows = np.flatnonzero(mask)
    return (logits if mask.all() else logits[torch.from_numpy(rows).to(logits.device)]), rows


def _scaled(logits: Tensor, of_rows: DrawSettings, rows: RowIndex) -> Tensor:
    temperature = of_rows.temperature[rows]
    return logits if (temperature == 1).all() else logits / _column(temperature, logits)


def _column(values: NDArray[np.generic], like: Tensor) -> Tensor:  # [num_rows, 1]
    return torch.from_numpy(values).to(like.device)[:, None]


def _log(min_p: FloatArray) -> FloatArray:
    """Computes the logarithm in float64 and rounds once, so every device gets the same bits."""
    with np.errstate(divide="ignore"):
        return np.log(min_p.astype(np.float64)).astype(np.float32)


def _min_p(scaled: Tensor, min_p: FloatArray) -> Tensor:
    """Removes tokens less likely than `min_p` times the most likely one."""
    if not (min_p > 0).any():
        return scaled
    floor = scaled.amax(1, keepdim=True) + _column(_log(min_p), scaled)
    return scaled.masked_fill(scaled < floor, -torch.inf)


def _ranked(
    scaled: Tensor,  # [num_ranked, vocab]
    rows: RowIndex,  # [num_ranked]
    limits: DrawSettings,
) -> Iterator[CandidatePool]:
    """Yields pools of the rows with top-k or top-p, with an increasing number of candidates.

    A row is done when its cut is strictly above the last candidate, so that no token that ties
    with a kept one is missed.
    """
    vocab = scaled.shape[1]
    totals = _totals(scaled, limits)
    for width in _widths(limits, vocab):
        if width >= vocab:
            yield CandidatePool(rows, _cut_whole(scaled, limits, totals), None)
            return
        ids = scaled.topk(width, dim=1, sorted=False).indices.sort(dim=1).values
        candidates = scaled.gather(1, ids)
        kept, last_kept = _keep(candidates, limits, totals)
        done = (last_kept > candidates.amin(1)).cpu().numpy()
        candidates.masked_fill_(~kept, -torch.inf)
        if done.all():
            yield CandidatePool(rows, candidates, ids)
            return
        if done.any():
            on_device = torch.from_numpy(done).to(scaled.device)
            yield CandidatePool(rows[done], candidates[on_device], ids[on_device])
            scaled, totals = scaled[~on_device], totals[~on_device]
            rows, limits = rows[~done], limits.take(~done)


def _widths(limits: DrawSettings, vocab: int) -> list[int]:
    """Returns the numbers of candidates to try; the last is the vocabulary's size."""
    enough = int(limits.top_k.max()) + _TIE_ROOM
    width = enough if (limits.top_k > 0).all() else max(_WIDTH, enough)
    return [width, vocab] if width * 4 <= vocab else [vocab]


def _totals(scaled: Tensor, limits: DrawSettings) -> Tensor:  # [num_ranked], int64
    """Returns each row's mass over the vocabulary, if top-p needs it."""
    totals = torch.zeros(len(scaled), dtype=torch.int64, device=scaled.device)
    if ((limits.top_p < 1) & (limits.top_k <= 0)).any():
        for part in passes(len(scaled), scaled.shape[1], scaled.device):
            totals[part] = masses(scaled[part]).sum(1)
    return totals


def masses(scaled: Tensor) -> Tensor:  # same shape, int64
    """Returns unnormalised probabilities in fixed point, whose sums do not depend on the order."""
    peak = scaled.amax(1, keepdim=True).clamp_(min=torch.finfo(scaled.dtype).min)
    return (scaled - peak).exp_().mul_(MASS).to(torch.int64)


def _keep(
    candidates: Tensor,  # [num_ranked, num_candidates], ids ascending
    limits: DrawSettings,
    totals: Tensor,  # [num_ranked], int64
) -> tuple[Tensor, Tensor]:  # [num_ranked, num_candidates] bool; [num_ranked], least kept logit
    """Returns the candidates that are kept; each cut keeps a prefix of the ranking."""
    values, order = candidates.sort(dim=1, descending=True, stable=True)
    top_k = np.where(limits.top_k > 0, limits.top_k, candidates.shape[1])
    ranks = torch.arange(candidates.shape[1], device=candidates.device)
    kept = (ranks < _column(top_k, values)) & (values > -torch.inf)
    if (limits.top_p < 1).any():
        mass = masses(values) * kept  # top-p applies to the tokens left by top-k
        cut = torch.from_numpy(limits.top_k > 0).to(values.device)
        totals = torch.where(cut, mass.sum(1), totals)
        top_p = _column(limits.top_p.astype(np.float64), values)
        before = (mass.cumsum(1) - mass).double()
        # Rank 0 is kept even if `top_p` is so small that it is 0 in float32.
        kept &= (before < top_p * totals[:, None]) | (top_p >= 1) | (ranks == 0)
    if (limits.min_p > 0).any():
        kept &= values >= values[:, :1] + _column(_log(limits.min_p), values)
    last = (kept.sum(1, keepdim=True) - 1).clamp_(min=0)
    return torch.zeros_like(kept).scatter_(1, order, kept), values.gather(1, last)[:, 0]


def _cut_whole(
    scaled: Tensor,  # [num_ranked, vocab]
    limits: DrawSettings,
    totals: Tensor,  # [num_ranked], int64
) -> Tensor:  # [num_ranked, vocab]
    """Applies the same cut over the whole vocabulary, by a sort or, on a CPU, by `_nucleus`."""
    if scaled.device.type != "cpu" or scaled.shape[1] <= _WIDTH or (limits.top_k > 0).any():
        kept, _ = _keep(scaled, limits, totals)
        return scaled.masked_fill(~kept, -torch.inf)
    cut = torch.empty_like(scaled)
    for row, (top_p, total) in enumerate(zip(limits.top_p.tolist(), totals.tolist())):
        cut[row] = _nucleus(scaled[row], top_p, total) if top_p < 1 else scaled[row]
    return _min_p(cut, limits.min_p)


def _nucleus(scaled: Tensor, top_p: float, total: int) -> Tensor:  # [vocab] -> [vocab]
    """Applies top-p without sorting the vocabulary; sorts only the bucket of the cut."""
    of_tokens = masses(scaled[None])[0]
    distance = (scaled.amax() - scaled).mul_(_BUCKETS_PER_NAT)
    distance.nan_to_num_(nan=_NUM_BUCKETS).clamp_(max=_NUM_BUCKETS - 1)
    bucket = distance.to(torch.int64)  # non-increasing in the logit
    mass = torch.zeros(_NUM_BUCKETS, dtype=torch.int64).index_add_(0, bucket, of_tokens)
    before = mass.cumsum(0) - mass
    reach = max(top_p * total, 1.0)  # rank 0 is kept for any `top_p`
    last = int((before.double() < reach).sum()) - 1  # the bucket that contains the cut
    inside = nonzero(bucket == last)
    values, order = scaled[inside].sort(descending=True, stable=True)
    ranked = of_tokens[inside[order]]
    ahead = before[last] + ranked.cumsum(0) - ranked
    out = scaled.masked_fill(bucket >= last, -torch.inf)
    out[inside[order]] = values.masked_fill(ahead.double() >= reach, -torch.inf)
    return out


# -- draws from processed distributions, for the target's rules and for drafters
#
# `draw` uses the noise that the coupled rule verifies with, so that a drafter's draws agree with
# the target's as often as shared noise allows (Daliri, Musco, Suresh 2024, arXiv:2408.07978).
# `draw_siblings` uses a separate stream, as exact rejection requires, and returns the truncated
# distribution that it drew from.


def draw(
    logits: Tensor,  # [num_rows, vocab] float32
    positions: Positions,  # [num_rows], index of the drawn token in prompt + output
    settings: DrawSettings,  # of the rows
) -> Tensor:  # [num_rows], int32, on the device of `logits`
    """Draws one token per row with the target's noise; temperature 0 is the argmax."""
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    row_keys: Tensor | None = None
    for pool in pools(logits, settings):
        rows = torch.from_numpy(pool.rows).to(logits.device)
        if pool.greedy:
            drawn = argmax(pool.logits)
        else:
            if row_keys is None:
                row_keys = noise.keys(settings.seeds, positions).to(logits.device)
            own = row_keys if len(rows) == len(tokens) else row_keys[rows]
            drawn = noise.perturbed_argmax(pool.logits, own, pool.ids)
            if pool.ids is not None:
                drawn = pool.ids.gather(1, drawn[:, None])[:, 0]
        if len(rows) == len(tokens):
            return drawn.to(torch.int32)
        tokens[rows] = drawn.to(torch.int32)
    return tokens


def draw_siblings(
    logits: Tensor,  # [num_rows, vocab] float32
    positions: Positions,  # [num_rows]
    settings: DrawSettings,  # of the rows
    top: int,
    num_siblings: int = 1,
    rounds: Positions | None = None,  # [num_rows]
) -> tuple[Tensor, Tensor, Tensor]:  # [num_rows, num_siblings], [num_rows, top], [num_rows, top]
    """Draws siblings per row, in order and without replacement.

    Returns (tokens, ids, probs) of `DraftProbs`. The distribution is the processed one, truncated
    to its `top` most likely tokens and renormalised; ids beyond its support have probability 0.
    Greedy rows have all-zero probabilities, which mark deterministic nodes: their siblings are the
    most likely tokens. A token of -1 means that the support has no further token. `rounds` is the
    position of each round's first token, for rules that need fresh noise in every round; None draws
    by position only.

    The largest perturbed log-probabilities, in order, are such a sample (Kool, van Hoof, Welling
    2019, arXiv:1903.06059).
    """
    assert num_siblings <= top, (num_siblings, top)
    ids, best = _likeliest(logits, settings, top)
    stream: int | Tensor = noise.DRAFT
    if rounds is not None:
        stream = torch.as_tensor(rounds, dtype=torch.int64) + noise.ROUND_DRAFT
    row_keys = noise.keys(settings.seeds, positions, stream).to(logits.device)
    deterministic = torch.from_numpy(settings.greedy).to(logits.device)[:, None]
    scores = torch.where(deterministic, best, best + noise.gumbel(row_keys, ids))
    score, order = scores.topk(min(num_siblings, ids.shape[1]), dim=1)
    tokens = ids.gather(1, order).masked_fill(score == -torch.inf, -1)
    return tokens, ids, best.softmax(1).masked_fill(deterministic, 0.0)


_NUM_RANKED = 128  # number of tokens that noise may bring to the front


def rank_draws(
    logits: Tensor,  # [num_rows, vocab] float32
    positions: Positions,  # [num_rows]
    settings: DrawSettings,  # of the rows
    num_ranked: int,
    *,
    shares_noise: bool,
) -> tuple[Tensor, Tensor]:  # [num_rows, num_ranked] int32, and float32
    """Returns tokens that a model with similar logits most likely draws, and their weights.

    If that model uses the target's noise, the order is that of the perturbed log-probabilities, and
    the first is this model's own draw. Weights sum to at most 1; a token of -1 has weight 0.
    """
    greedy = settings.greedy
    settings = settings._replace(
        top_p=np.where(greedy, np.float32(1), settings.top_p),
        min_p=np.where(greedy, np.float32(0), settings.min_p),
    )
    ids, scores = _likeliest(logits, settings, max(num_ranked, _NUM_RANKED))
    if shares_noise and not greedy.all():
        row_keys = noise.keys(settings.seeds, positions).to(logits.device)
        deterministic = torch.from_numpy(greedy).to(logits.device)[:, None]
        scores = torch.where(deterministic, scores, scores + noise.gumbel(row_keys, ids))
    best, order = scores.softmax(1).topk(min(num_ranked, ids.shape[1]), dim=1)
    return ids.gather(1, order).masked_fill(best == 0, -1), best


def _likeliest(
    logits: Tensor,  # [num_rows, vocab] float32
    settings: DrawSettings,  # of the rows
    top: int,
) -> tuple[Tensor, Tensor]:  # [num_rows, top] int32, and float32
    """Returns the most likely tokens of every row and their processed logits, -inf if cut off.

    Greedy rows are processed as if at temperature 1.
    """
    top, top_k = min(top, logits.shape[1]), settings.top_k
    cut = settings._replace(
        temperature=np.where(settings.greedy, np.float32(1), settings.temperature),
        top_k=np.where((top_k > 0) & (top_k < top), top_k, top).astype(np.int32),
    )
    shape, device = (len(logits), top), logits.device
    ids = torch.zeros(shape, dtype=torch.int32, device=device)
    best = torch.full(shape, -torch.inf, device=device)
    for pool in pools(logits, cut):
        rows = torch.from_numpy(pool.rows).to(device)
        width = min(top, pool.logits.shape[1])  # a small top-k leaves fewer candidates
        best[rows, :width], order = pool.logits.topk(width, dim=1)
        found = order if pool.ids is None else pool.ids.gather(1, order)
        ids[rows, :width] = found.to(torch.int32)
    return ids, best
