"""How a head that runs on every rank of a target is divided among them.

Where the target's steps are computed on the device, its heads run on every rank, so that nothing is
broadcast (`workers/device_step/`). A part is cut if a rank then reads so much less of it that the
collective pays; otherwise every rank computes it whole. Called by `workers/head_loading.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..collective import Collective
from .heads import Heads
from .parallel import ShardedOutput

MIN_SAVED_BYTES = 32 << 20
"""Bytes less to read for one collective: about 10 us at 3 TB/s, which is what a small one takes."""


@dataclass(frozen=True, slots=True)
class HeadShards:
    """This rank's part of a head; with one rank nothing is cut."""

    collective: Collective
    min_saved_bytes: int = MIN_SAVED_BYTES

    @property
    def rank(self) -> int:
        return self.collective.rank

    @property
    def size(self) -> int:
        return self.collective.size

    def pays(self, num_bytes: int, num_collectives: int) -> bool:
        """Whether to cut weights of so many bytes, if that takes so many collectives."""
        saved = num_bytes - num_bytes // self.size
        return self.size > 1 and saved >= num_collectives * self.min_saved_bytes

    def heads(self, num_heads: int, num_kv_heads: int) -> Heads:
        """How attention heads are divided; `check` raises if they cannot be."""
        return Heads(num_heads, num_kv_heads, self.rank, self.size)

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's even share along `dim`."""
        return tensor.chunk(self.size, dim)[self.rank]

    def cut_output(self, linear: nn.Linear) -> int | None:
        """Cuts an output layer over its vocabulary if that pays; returns the vocabulary's size.

        `connect_output` comes once its weights are laid out.
        """
        weight = linear.weight.detach()
        if not self.pays(weight.numel() * weight.element_size(), 1) or linear.bias is not None:
            return None
        length = -(-len(weight) // self.size)
        own = weight[self.rank * length : (self.rank + 1) * length]
        padded = weight.new_zeros(length, weight.shape[1])
        padded[: len(own)] = own
        linear.weight = nn.Parameter(padded, requires_grad=False)
        return len(weight)

    def connect_output(self, linear: nn.Linear, vocab_size: int) -> None:
        """Gives a cut output layer the forward that gathers the ranks' logits."""
        output = ShardedOutput(linear, self.collective, vocab_size)
        object.__setattr__(linear, "forward", output)


WHOLE = HeadShards(Collective.single())
