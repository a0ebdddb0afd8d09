"""`Ops` on a GPU: Triton kernels, and torch's own products (cuBLAS).

`plan` is made on the host like everywhere; every other verb can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ...attention import KVCache
from ...verify.device_draw import DeviceSettings
from ...verify.device_edits import DeviceEdits
from ...verify.settings import DrawSettings, Positions
from ..plan import PagedStep
from ..protocol import AttentionSpec, Experts, Gate, Mixture, Norm, Projection, Rotation
from ..quantised import QuantisedTensor
from ..reference import ReferenceOps, prepare, split_heads
from . import elementwise
from .attention import attend
from .contest import contest
from .draw import draw
from .edit import edit, logprobs
from .experts import CudaMixture
from .linear import TiledProduct
from .prepare import can_prepare, prepare_and_store

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETED_PROCESSORS = 4  # stands in for a device's where kernels run under the interpreter


class CudaOps(ReferenceOps):
    """`Ops` for one device. What is not overridden is torch's, without a host's look at values."""

    name = "triton"
    keeps_quantised = True

    def __init__(self, device: torch.device, splits: int | None = None) -> None:
        """`splits`: parts that every context is cut into; None: chosen from each step's shape."""
        self._splits = splits
        self.num_processors = INTERPRETED_PROCESSORS
        if device.type == "cuda":
            self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def pack(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if isinstance(weight, QuantisedTensor):
            return TiledProduct(weight, bias, self.num_processors, fixed_rows=False)
        return super().pack(weight, bias)

    def pack_experts(self, experts: Experts) -> Mixture:
        return CudaMixture(experts)

    def norm(self, states: Tensor, norm: Norm) -> Tensor:
        return elementwise.norm(states, norm)

    def add_norm(
        self,
        residual: Tensor,  # [num_tokens, hidden_size], written
        update: Tensor | None,  # [num_tokens, hidden_size]
        after: Norm | None,
        scale: float,
        before: Norm | None,
    ) -> Tensor:  # [num_tokens, hidden_size]
        if update is None:
            return residual if before is None else elementwise.norm(residual, before)
        return elementwise.add_norm(residual, update, after, scale, before)

    def rope_store_attend(
        self,
        joined: Tensor,  # [num_tokens, spec.joined_width]
        rotation: Rotation | None,
        temperature: Tensor | None,  # [num_tokens] float32
        plan: PagedStep,
        cache: KVCache,
        layer: int,
        spec: AttentionSpec,
    ) -> Tensor:  # [num_tokens, num_heads * value_dim]
        keys, values = cache.keys[layer], cache.values[layer]
        if can_prepare(spec):
            query = prepare_and_store(joined, rotation, temperature, plan, keys, values, spec)
        else:
            query, key, value = split_heads(joined, spec)
            query = prepare(query, spec.query_norm, rotation, spec)
            if temperature is not None:
                query = (query * temperature[:, None, None]).to(query.dtype)
            query = query.contiguous()
            keys.index_copy_(0, plan.slots.long(), prepare(key, spec.key_norm, rotation, spec))
            if not spec.shared_values:
                values.index_copy_(0, plan.slots.long(), value)
        out = attend(query, keys, values, plan, spec, self.num_processors, self._splits)
        return out.flatten(1)

    def gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        return elementwise.gate(gate_up, gate)

    def draw(
        self,
        logits: Tensor,  # [num_rows, vocab] float32
        positions: Positions,  # [num_rows]
        settings: DrawSettings,  # of the rows, on the host
    ) -> Tensor:  # [num_rows] int32
        top_k = settings.top_k
        limits = (settings.top_p < 1) | ((top_k > 0) & (top_k < logits.shape[1]))
        is_cut = bool(limits.any())

        def put(values: NDArray[Any] | Tensor) -> Tensor:
            return torch.as_tensor(values).to(logits.device, non_blocking=True)

        return draw(
            logits,
            put(settings.seeds),
            put(positions),
            put(settings.temperature),
            put(top_k) if is_cut else None,
            put(settings.top_p) if is_cut else None,
            put(settings.min_p),
            self.num_processors,
        )

    def edit_on_device(self, logits: Tensor, edits: DeviceEdits) -> None:
        edit(logits, edits, self.num_processors)

    def logprobs_on_device(
        self, logits: Tensor, tokens: Tensor, edits: DeviceEdits
    ) -> tuple[Tensor, Tensor]:
        return logprobs(logits, tokens, edits)

    def contest_on_device(
        self, logits: Tensor, positions: Tensor, settings: DeviceSettings, tokens: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        return contest(logits, positions, settings, tokens, self.num_processors)

    def draw_on_device(self, logits: Tensor, positions: Tensor, settings: DeviceSettings) -> Tensor:
        return draw(
            logits,
            settings.seeds,
            positions,
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.min_p,
            self.num_processors,
        )
