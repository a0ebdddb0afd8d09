"""How many torch operations a step may dispatch: what a small model's time is made of."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.scheduler.types import Draft, ints
from outrider.workers.collective import Collective
from outrider.workers.model.target import load_model

CPU = torch.device("cpu")
DENSE = ["llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "gemma2", "gemma3_two_ropes",
         "olmo2", "smollm3", "tied"]  # fmt: skip


class Counting(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


MIXTURES = {"mixtral": 17, "qwen3_moe": 17, "gpt_oss": 18, "glm4_moe": 17, "llama4": 17,
            "qwen3_next": 27, "deepseek_v2": 27, "deepseek_v3": 31}  # fmt: skip
"""With experts, and of some a shared one, gates or latents: the most operations of a layer. Eight
of them are what torch counts of arrays that routing shares with it."""


@pytest.mark.parametrize(("name", "most"), [*((name, 12) for name in DENSE), *MIXTURES.items()])
@pytest.mark.parametrize("num_nodes", [0, 6])
def test_a_step(checkpoint, name, most, num_nodes, part, build_step):
    """So many a layer, a dense one 12, and 20 beside; Granite's and Gemma's scales are among them.

    A router in float32 beside bfloat16 would be torch's linear.
    """
    path, _ = checkpoint(name)
    model = load_model(path, device=CPU, collective=Collective.single(), forward="family")
    cache = model.new_cache(24, 4)
    table = [3, 1, 2, 5, 7, 9]
    model.forward(build_step([part([5, 17, 60], 0, table)], 4), cache)
    draft = Draft(ints(range(num_nodes)), ints([-1, -1, 0, 1, 1, 3][:num_nodes]))
    step = build_step([part([3], 3, table, draft)], 4)
    with Counting() as counting:
        model.forward(step, cache)
    bound = most * model.info.num_layers + 20
    assert counting.counts.total() <= bound, counting.counts.most_common()
