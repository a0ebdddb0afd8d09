"""The reference's operations with attention that groups sequences of similar length.

What serves where no kernels of our own do: torch's fused attention and norm, on any device.
Plans are made on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor
from torch.nn import functional

from ...scheduler.types import StepInput
from ..attention import KVCache, SdpaBackend, StepAttention
from .plan import PagedStep, plan_step
from .protocol import AttentionSpec, Norm, Rotation
from .reference import ReferenceOps, prepare, split_heads


@dataclass(frozen=True, slots=True)
class GroupedStep(PagedStep):
    """A step with the attention that was planned for it."""

    attention: StepAttention | None = None


class GroupedOps(ReferenceOps):
    """`Ops` for devices without kernels."""

    name = "torch"
    reads_device_only = False
    max_latent_heads = 0  # torch's attention has no shared values

    def plan(self, step: StepInput, cache: KVCache) -> PagedStep:
        flat = plan_step(step, cache.block_size, cache.device)
        attention = SdpaBackend().begin(step, cache)
        return GroupedStep(
            **{each.name: getattr(flat, each.name) for each in fields(flat)}, attention=attention
        )

    def norm(self, states: Tensor, norm: Norm) -> Tensor:
        # Torch's one call wants states and weight of one dtype; float32 is also the precision.
        out = functional.rms_norm(states.float(), states.shape[-1:], norm.weight, norm.eps)
        return out.to(states.dtype)

    def add_norm(
        self,
        residual: Tensor,  # [num_tokens, hidden_size], written
        update: Tensor | None,  # [num_tokens, hidden_size]
        after: Norm | None,
        scale: float,
        before: Norm | None,
    ) -> Tensor:  # [num_tokens, hidden_size]
        if update is not None:
            residual.add_(update if after is None else self.norm(update, after), alpha=scale)
        return residual if before is None else self.norm(residual, before)

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
        # Torch's attention stores what it reads, and needs the step on the host.
        if spec.shared_values or not isinstance(plan, GroupedStep):
            return super().rope_store_attend(
                joined, rotation, temperature, plan, cache, layer, spec
            )
        assert plan.attention is not None, "planned by `plan`"
        query, key, value = split_heads(joined, spec)
        query = prepare(query, spec.query_norm, rotation, spec)
        key = prepare(key, spec.key_norm, rotation, spec)
        if temperature is not None:
            query = (query * temperature[:, None, None]).to(query.dtype)
        out = plan.attention.attend(
            layer, query, key, value, spec.scale, spec.window, spec.softcap, spec.sinks, spec.chunk
        )
        return out.flatten(1)
