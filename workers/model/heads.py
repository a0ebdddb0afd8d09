"""How attention heads, and widths, are divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError

Range = tuple[int, int]

FIELD = "tensor_parallel_size"


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of the whole model and how they are divided."""

    num_heads: int
    num_kv_heads: int
    rank: int
    size: int

    def check(self) -> None:
        """Raise when `size` ranks cannot share these heads."""
        if self.num_heads % self.size:
            raise _indivisible("num_attention_heads", self.num_heads, self.size)
        if self.num_kv_heads % self.size and self.size % self.num_kv_heads:
            raise _indivisible("num_key_value_heads", self.num_kv_heads, self.size)

    @property
    def local(self) -> int:
        return self.num_heads // self.size

    @property
    def kv_range(self) -> Range:
        """This rank's key heads; where there are fewer than ranks, neighbours share one."""
        begin = self.rank * self.num_kv_heads // self.size
        return begin, begin + max(1, self.num_kv_heads // self.size)


def split(total: int, rank: int, size: int, what: str) -> Range:
    """`rank`'s even share of `[0, total)`."""
    if total % size:
        raise _indivisible(what, total, size)
    return rank * total // size, (rank + 1) * total // size


def _indivisible(what: str, total: int, size: int) -> ConfigError:
    return ConfigError(f"{FIELD}={size} does not divide {what}={total} of this model", field=FIELD)
