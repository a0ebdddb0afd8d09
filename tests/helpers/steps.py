"""Steps over a paged cache in every shape, and the comparison of two implementations' results."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import torch

from outrider.workers.ops.protocol import Norm
from outrider.workers.ops.reference import ReferenceOps


def assert_close(found, expected, scale=1.0):
    """float32 to rounding errors of sums, narrow types to a unit in the last place and a little."""
    assert found.dtype == expected.dtype
    narrow = found.dtype != torch.float32
    torch.testing.assert_close(
        found.float(),
        expected.float(),
        rtol=1.6e-2 if narrow else 2e-5,
        atol=(1e-2 if narrow else 1e-5) * scale,
    )


def assert_norms(ops, dtype, size, scale=1.0):
    """Norms and residual updates as the reference computes them.

    Args:
        scale: of the tolerance of results that are made of sums which were rounded before.
    """
    torch.manual_seed(size)
    reference = ReferenceOps()
    weighted, plain = Norm(torch.randn(size), 1e-5), Norm(None, 1e-2)
    wide = torch.randn(5, 2 * size + 1).to(dtype)
    for norm in (weighted, plain):
        states = wide[:, size : 2 * size]
        assert_close(ops.norm(states, norm), reference.norm(states, norm))
    update, kept = (torch.randn(5, size).to(dtype) for _ in range(2))
    norms = (None, weighted, plain)
    for after, before, added, copy in product(norms, norms, (None, update), (None, kept)):
        mine, theirs = wide[:, :size].clone(), wide[:, :size].clone()
        found = ops.add_norm(mine, added, after, 0.7, before, copy)
        expected = reference.add_norm(theirs, added, after, 0.7, before)
        assert_close(mine, theirs)
        assert_close(found, expected, scale)
        assert before is not None or found is mine
        assert copy is None or torch.equal(kept, mine)


def covering(axes: dict[str, tuple], strength: int, seed: int = 0) -> list[dict]:
    """Settings in which every combination of values of any `strength` axes occurs.

    Greedy: each case is the best of a few random ones that contain a combination still missing.
    """
    rng = np.random.default_rng(seed)
    names = list(axes)
    missing = {
        tuple(zip(chosen, numbers))
        for chosen in combinations(names, strength)
        for numbers in product(*(range(len(axes[name])) for name in chosen))
    }
    cases = []
    while missing:
        fixed = min(missing)
        best, most = {}, -1
        for _ in range(20):
            case = {name: int(rng.integers(len(axes[name]))) for name in names} | dict(fixed)
            covered = sum(tuple(zip(key, (case[k] for k in key))) in missing
                          for key in combinations(names, strength))  # fmt: skip
            if covered > most:
                best, most = case, covered
        missing -= {
            tuple(zip(key, (best[k] for k in key))) for key in combinations(names, strength)
        }
        cases.append({name: axes[name][number] for name, number in best.items()})
    return cases


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale,
    causal, return_softmax_lse,
):  # fmt: skip
    """As FlashAttention 3's, which leaves anything where a context is empty."""
    assert (causal, return_softmax_lse) == (False, True)
    assert {each.dtype for each in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
    assert int(torch.diff(cu_seqlens_q).max()) <= max_seqlen_q
    out, logs = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan)
    for seq, length in enumerate(cache_seqlens.tolist()):
        own, pages = slice(*cu_seqlens_q[seq : seq + 2]), page_table[seq].long()
        wide = (
            each[pages]
            .flatten(0, 1)[:length]
            .float()
            .repeat_interleave(q.shape[1] // each.shape[2], 1)
            for each in (k_cache, v_cache)
        )
        key, value = (each.transpose(0, 1) for each in wide)
        scores = q[own].float().transpose(0, 1) @ key.mT * softmax_scale
        if length:
            out[own] = (scores.softmax(-1) @ value).transpose(0, 1).to(q.dtype)
            logs[:, own] = scores.logsumexp(-1)
    return out, logs, None, None
