"""Attention by a library: FlashAttention 3, or FlashAttention 2 as included in torch.

For prompts, a library computes causal steps with long queries. Their keys and values are first
gathered from their slots, so any block size and a cache of codes are supported. For drafts,
FlashAttention 3 computes attention to the context alone, from its blocks, if more queries share a
key than a tile of our kernel has; our kernel continues from its result over the step's own keys.
Layers that the library does not support use our kernel, with which a library is compared before the
first request.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from ....errors import ConfigError
from ....scheduler.types import StepInput
from ...attention import KVCode
from ..plan import PagedStep
from ..protocol import AttentionSpec

log = logging.getLogger(__name__)

FIELD = "prompt_attention"
MIN_ROWS = 65  # of the longest query: more than a tile of our kernel has
_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_MAX_ERROR = 0.02  # relative, of results in bfloat16
_TRIED = ((0, 130), (75, 97))  # (context, rows)
_TRIED_WINDOW = 48
_TRIED_CONTEXTS, _TRIED_DRAFT = (97, 0, 600), 33  # contexts, and the rows behind each

Varlen = Callable[..., Tensor]
"""Queries, keys, values, each [num_rows, heads, head_dim]; first rows of sequences' queries and
keys, each [num_seqs + 1]; the longest of both; `scale`, and keys before its own that a row sees,
-1: all. To [num_rows, num_heads, head_dim]."""
Context = Callable[[Tensor, Tensor, Tensor, PagedStep, float], tuple[Tensor, Tensor]]
"""Queries [num_rows, num_heads, head_dim], keys and values in blocks
[num_blocks, block_size, num_kv_heads, head_dim], the step, and the scale. To what every row finds
in its sequence's context, and the natural logarithms of its sums [num_heads, num_rows] float32."""
Attend = Callable[[Tensor, Tensor, Tensor, PagedStep, AttentionSpec], Tensor]
"""The type of our kernel, as `ReferenceOps.attend`."""


def _varlen() -> Varlen:
    attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn

    def call(*rows: Tensor | int, scale: float, reach: int) -> Tensor:
        found: Tensor = attend(*rows, scale=scale, window_size=(reach, 0), enable_gqa=True)
        return found

    return call


def _flash_attn_3() -> Varlen:
    attend = importlib.import_module("flash_attn_interface").flash_attn_varlen_func

    def call(*rows: Tensor | int, scale: float, reach: int) -> Tensor:
        found = attend(*rows, softmax_scale=scale, causal=True, window_size=(reach, 0))
        result: Tensor = found[0] if isinstance(found, tuple) else found  # with log-sums in some
        return result

    return call


def _flash_attn_3_context() -> Context:
    attend = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache

    def call(
        query: Tensor, keys: Tensor, values: Tensor, plan: PagedStep, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, logs, *_ = attend(
            query, keys, values, cache_seqlens=plan.context_lens, page_table=plan.block_tables,
            cu_seqlens_q=plan.query_start, max_seqlen_q=plan.max_query_len, softmax_scale=scale,
            causal=False, return_softmax_lse=True,
        )  # fmt: skip
        return out, logs

    return call


def _varlen_lacks(capability: tuple[int, int]) -> str:
    try:
        attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        known = "enable_gqa" in inspect.signature(attend).parameters
    except (ImportError, AttributeError):
        known = False
    if not known:
        return f"torch {torch.__version__} has no varlen_attn for grouped heads"
    return "" if capability >= (8, 0) else f"needs compute capability 8.0, not {_named(capability)}"


def _flash_attn_3_lacks(capability: tuple[int, int]) -> str:
    if find_spec("flash_attn_interface") is None:
        return "the package flash_attn_interface (FlashAttention 3) is not installed"
    return "" if capability[0] == 9 else f"needs compute capability 9.0, not {_named(capability)}"


def _named(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


_LIBRARIES = {
    "flash_attn_3": (_flash_attn_3, _flash_attn_3_lacks),
    "varlen": (_varlen, _varlen_lacks),
}
"""By configured name: functions that build the library and return why it cannot be used."""


def refused(wish: str, why: str) -> ConfigError:
    return ConfigError.at(FIELD, f"{wish!r} is not available: {why}; allowed here: 'auto', 'own'")


@dataclass(slots=True)
class AttentionLibrary:
    """A library that computes prompts."""

    name: str
    call: Varlen
    is_wished: bool  # by its name: what it does not serve is an error
    context: Context | None  # of drafts behind a context; None: it computes prompts alone

    @classmethod
    def of(cls, wish: str, device: torch.device) -> AttentionLibrary | None:
        """Returns the library of `prompt_attention`; None: our kernel computes prompts.

        `auto` selects FlashAttention 3 if it is installed, and torch's on GPUs of capability 8, for
        prompts only: whether contexts pay depends on their lengths, which no shape has.

        Raises:
            ConfigError: the requested library cannot be used here.
        """
        if wish == "own" or (wish == "auto" and torch.version.hip is not None):
            return None
        if torch.version.hip is not None:
            raise refused(wish, "it needs an NVIDIA GPU")
        capability = torch.cuda.get_device_capability(device)
        name = wish
        if wish == "auto":
            name = "varlen" if capability[0] == 8 else "flash_attn_3"
        make, lacks = _LIBRARIES[name]
        if lack := lacks(capability):
            if wish == "auto":
                return None
            raise refused(wish, lack)
        context = _flash_attn_3_context() if wish == "flash_attn_3" else None
        return cls(name, make(), wish != "auto", context)

    @staticmethod
    def lacks(spec: AttentionSpec, dtype: torch.dtype) -> str:
        """Returns why it cannot compute such a layer; "" if it can."""
        if dtype not in _DTYPES:
            return f"no {str(dtype).removeprefix('torch.')}, only bfloat16 and float16"
        if spec.shared_values or spec.is_prepared:
            return "no latent attention"
        if spec.head_dim != spec.value_dim or spec.head_dim > _MAX_HEAD_DIM or spec.head_dim % 8:
            sizes = f"{spec.head_dim} and values of {spec.value_dim}"
            return f"no heads of {sizes}, only equal sizes up to {_MAX_HEAD_DIM}, multiples of 8"
        for name in ("chunk", "softcap", "sinks"):
            if getattr(spec, name) is not None:
                return f"no layers with {_WORDS[name]}"
        return ""

    def takes(self, plan: PagedStep, spec: AttentionSpec, dtype: torch.dtype) -> bool:
        """Returns True if it computes a layer of such a step, by lengths and drafts only."""
        if plan.host is None or plan.max_query_len < MIN_ROWS or self.lacks(spec, dtype):
            return False
        if _is_causal not in plan.derived:
            plan.derived[_is_causal] = _is_causal(plan.host)
        return bool(plan.derived[_is_causal])

    def merges(self, spec: AttentionSpec, dtype: torch.dtype) -> bool:
        """Returns True if it computes contexts of such a layer: all rows must see all of them."""
        return self.context is not None and spec.window is None and not self.lacks(spec, dtype)

    def context_of(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        keys: Tensor,  # [num_slots, num_kv_heads, head_dim]
        values: Tensor,
        plan: PagedStep,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor] | None:
        """Computes attention to the context alone for our kernel; None: ours computes all of it.

        The choice depends only on shapes, so a graph may contain it.
        """
        rows = plan.max_query_len
        if not (rows < MIN_ROWS <= rows * (spec.num_heads // spec.num_kv_heads)):
            return None
        if self.context is None or not self.merges(spec, query.dtype):
            return None
        size = plan.block_size  # behind the last block there may be spare slots
        keys, values = (
            each[: len(each) // size * size].unflatten(0, (-1, size)) for each in (keys, values)
        )
        return self.context(query, keys, values, plan, spec.scale)

    def attend(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        keys: Tensor,  # [num_slots, num_kv_heads, head_dim]
        values: Tensor,
        plan: PagedStep,
        spec: AttentionSpec,
        code: KVCode | None = None,  # of keys and values
    ) -> Tensor:  # [num_tokens, num_heads, head_dim]
        """Computes attention over keys that are in their slots."""
        if _contexts not in plan.derived:
            assert plan.host is not None, "planned on the host"
            found = _contexts(plan.host, plan.block_size)
            plan.derived[_contexts] = [torch.from_numpy(each).to(query.device) for each in found]
        slots, key_start = plan.derived[_contexts]
        keys, values = keys[slots], values[slots]
        if code is not None:
            keys, values = code.keys(keys, query.dtype), code.values(values, query.dtype)
        reach = -1 if spec.window is None else spec.window - 1
        return self.call(
            query, keys, values, plan.query_start, key_start, plan.max_query_len, plan.max_key_len,
            scale=spec.scale, reach=reach,
        )  # fmt: skip

    def check(
        self,
        specs: Collection[AttentionSpec],
        dtype: torch.dtype,
        device: torch.device,
        ours: Attend,
        block_size: int = 16,  # of the cache
    ) -> str:
        """Returns why it must not be used, for some or all layers; "" if it can be.

        Raises:
            ConfigError: it was requested by name.
        """
        reason = next((lack for spec in specs if (lack := self.lacks(spec, dtype))), "")
        if reason and self.is_wished:
            raise refused(self.name, f"it has {reason}")
        for spec in specs:
            if self.lacks(spec, dtype):
                continue
            try:
                error = max(self._error(spec, dtype, device, ours, *sizes) for sizes in _TRIED)
                if self.merges(spec, dtype):
                    error = max(error, self._context_error(spec, dtype, device, block_size))
            except (RuntimeError, TypeError, ValueError) as problem:
                reason = f"it failed: {problem}"
            else:
                reason = "" if error <= _MAX_ERROR else f"its results are {error:.2g} off"
            if reason and self.is_wished:
                raise refused(self.name, reason)
            if reason:
                log.warning("prompts are left to our kernel, not to %s: %s", self.name, reason)
                return reason
        return ""

    def _error(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, ours: Attend,
        context: int, rows: int,
    ) -> float:  # fmt: skip
        """Returns the largest error of a row of a prompt's chunk, relative to our kernel's result.

        Windows are reduced so that they hide keys from most rows.
        """
        if spec.window is not None:
            spec = replace(spec, window=min(spec.window, _TRIED_WINDOW))
        total, heads = context + rows, spec.num_heads + 2 * spec.num_kv_heads
        source = torch.Generator().manual_seed(0)
        joined = torch.randn(total, heads, spec.head_dim, generator=source).to(device, dtype)
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        query, keys, values = (each.contiguous() for each in joined.split(sizes, dim=1))
        ints = torch.arange(total, dtype=torch.int32, device=device)
        ends = torch.tensor([[0, rows], [context, total]], dtype=torch.int32, device=device)
        own = ints[context:]
        plan = PagedStep(
            token_ids=own, positions=own, slots=own, row_seq=own * 0, row_index=own,
            query_start=ends[0], context_lens=ends[1, :1], tree_start=ends[1, 1:],
            block_tables=ints[None], ancestors=own[:, None].long() * 0, block_size=1,
            max_query_len=rows, max_key_len=total,
        )  # fmt: skip
        plan.derived[_contexts] = [ints.long(), ends[:, 1] * ends.new_tensor([0, 1])]
        read = (keys, values, plan, spec)
        wanted = ours(query[context:].contiguous(), *read).float()
        found = self.attend(query[context:].contiguous(), *read).float()
        errors = (found - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
        return float(errors.nan_to_num(1.0).max())

    def _context_error(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int
    ) -> float:
        """Returns the largest error of a row behind a context in blocks, or of its logarithm.

        The reference is float32.
        """
        assert self.context is not None
        rows, source = _TRIED_DRAFT, torch.Generator().manual_seed(0)
        lens = torch.tensor(_TRIED_CONTEXTS, dtype=torch.int32)
        width = -(-int(lens.max()) // block_size)
        tables = torch.randperm(len(lens) * width, generator=source).view(-1, width).int()
        size = (tables.numel() * block_size, 2 * spec.num_kv_heads, spec.head_dim)
        stored = torch.randn(size, generator=source).to(device, dtype)
        keys, values = (each.contiguous() for each in stored.chunk(2, dim=1))
        size = (len(lens) * rows, spec.num_heads, spec.head_dim)
        query = torch.randn(size, generator=source).to(device, dtype)
        own = torch.zeros(len(query), dtype=torch.int32, device=device)
        start = torch.arange(len(lens) + 1, dtype=torch.int32, device=device) * rows
        plan = PagedStep(
            token_ids=own, positions=own, slots=own, row_seq=own, row_index=own, query_start=start,
            context_lens=lens.to(device), tree_start=lens.to(device),
            block_tables=tables.to(device), ancestors=own[:, None].long(), block_size=block_size,
            max_query_len=rows, max_key_len=width * block_size,
        )  # fmt: skip
        blocks = (-1, block_size)
        found, logs = self.context(
            query, keys.unflatten(0, blocks), values.unflatten(0, blocks), plan, spec.scale
        )
        errors, group = [0.0], spec.num_heads // spec.num_kv_heads
        for seq, length in enumerate(lens.tolist()):
            if not length:
                continue
            part, index = slice(seq * rows, (seq + 1) * rows), torch.arange(length)
            slots = (tables[seq, index // block_size] * block_size + index % block_size).to(device)
            wide = (each[slots].float().repeat_interleave(group, 1) for each in (keys, values))
            key, value = (each.transpose(0, 1) for each in wide)  # [num_heads, length, head_dim]
            scores = query[part].float().transpose(0, 1) @ key.mT * spec.scale
            wanted = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
            off = (found[part].float().flatten(1) - wanted).norm(dim=1) / wanted.norm(dim=1)
            logs_off = (logs[:, part] - scores.logsumexp(-1)).abs()
            errors += [float(each.nan_to_num(1.0).max()) for each in (off, logs_off)]
        return max(errors)


_WORDS = {"chunk": "attention in chunks", "softcap": "a soft cap", "sinks": "sinks"}


def _is_causal(host: StepInput) -> bool:
    """Returns True if every draft of a step is a chain."""
    first = np.repeat(host.draft_start[:-1], np.diff(host.draft_start))
    return bool((host.draft_parents == np.arange(len(host.draft_parents)) - first - 1).all())


def _contexts(host: StepInput, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns slots of all keys by sequence, int64, and offsets [num_seqs + 1] int32."""
    lens = host.context_lens + host.query_lens
    ends = np.concatenate([[0], np.cumsum(lens)])
    seq = np.repeat(np.arange(len(lens)), lens)
    index = np.arange(ends[-1]) - ends[seq]
    slots = host.block_tables[seq, index // block_size].astype(np.int64) * block_size
    return slots + index % block_size, ends.astype(np.int32)
