"""Checks that two forwards of one model agree on a short text and on a tree of drafts behind it.

At load, the bridge is compared with the family's decoder that is made of its weights. If no test
covers the model's type, transformers' own attention is compared with the bridge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....scheduler.types import Draft, StepInput, ints
from ...attention import KVCache, KVShape
from ...collective import Collective
from ...seats import sample_step
from ...states import StateCache, StateShape
from ..info import ModelInfo

if TYPE_CHECKING:
    from ..paged import Runner


PROMPT_LEN = 9
PARENTS = (-1, -1, 0, 1, 1, 3)
NUM_TOKENS = PROMPT_LEN + len(PARENTS)
BLOCK_SIZE = 8
_TABLE = (2, 0, 3)  # blocks of the sample
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.12, torch.float16: 0.03}
"""Largest error of a row's logits, relative to their spread. In the narrow types, two forwards that
round in different orders differ by a few hundredths; a wrong one differs by about one.
"""


@torch.inference_mode()
def run(
    runner: Runner, info: ModelInfo, device: torch.device
) -> Tensor:  # [num_rows, vocab] float32
    """Returns logits of every row of both steps."""
    cache = sample_cache(runner.kv_shapes, info.dtype, device, runner.state_shapes)
    steps = sample_steps(_tokens(info))
    return torch.cat([runner.run(step, cache, ())[0].float() for step in steps])


@torch.inference_mode()
def run_own(
    model: Any, info: ModelInfo, device: torch.device
) -> Tensor:  # [num_rows, vocab] float32
    """Returns the same rows from transformers' own forward, with one text per path of the tree."""
    tokens = _tokens(info)
    paths = [_path(node) for node in range(len(PARENTS))]
    inner = {parent for parent in PARENTS if parent >= 0}
    rows: dict[tuple[int, ...], Tensor] = {}
    for path in (path for node, path in enumerate(paths) if node not in inner):
        text = tokens[:PROMPT_LEN] + [tokens[PROMPT_LEN + node] for node in path]
        logits = model(torch.tensor([text], device=device), use_cache=False).logits[0].float()
        rows |= {path[: depth + 1]: logits[PROMPT_LEN + depth] for depth in range(len(path))}
    return torch.cat([logits[:PROMPT_LEN], torch.stack([rows[path] for path in paths])])


def _path(node: int) -> tuple[int, ...]:
    """Returns the node's ancestors and the node."""
    return () if node < 0 else (*_path(PARENTS[node]), node)


def _tokens(info: ModelInfo) -> list[int]:
    return [(17 + 31 * index) % info.vocab_size for index in range(NUM_TOKENS)]


def sample_cache(
    shapes: Sequence[KVShape],
    dtype: torch.dtype,
    device: torch.device,
    states: Sequence[StateShape | None] = (),
) -> KVCache:
    """Returns a cache with room for both steps."""
    num_blocks, kept = max(_TABLE) + 1, None
    if any(states):
        kept = StateCache(states, num_blocks * BLOCK_SIZE, BLOCK_SIZE, dtype, device)
    return KVCache(shapes, num_blocks, BLOCK_SIZE, dtype, device, kept)


def sample_steps(tokens: Sequence[int]) -> tuple[StepInput, StepInput]:  # [NUM_TOKENS]
    """Returns the steps of a short text and of a tree behind it."""
    last = PROMPT_LEN - 1
    draft = Draft(ints(tokens[PROMPT_LEN:]), ints(PARENTS))
    return (
        sample_step(tokens[:last], 0, _TABLE, block_size=BLOCK_SIZE),
        sample_step(tokens[last:PROMPT_LEN], last, _TABLE, draft, block_size=BLOCK_SIZE),
    )


def mismatch(
    found: Tensor,  # [num_rows, vocab]
    wanted: Tensor,  # [num_rows, vocab]
    dtype: torch.dtype,
    collective: Collective,
) -> str:
    """Returns a description of a difference that is too large, else ""; the same on every rank.

    In the narrow types, a near tie in a mixture may send a row to another expert, so a quarter of
    the rows may differ there. On the meta device, tensors have no values and nothing differs.
    """
    if wanted.is_meta:
        return ""
    spread = (wanted - wanted.mean(dim=1, keepdim=True)).norm(dim=1)
    errors = ((found - wanted).norm(dim=1) / spread.clamp(min=1e-6)).nan_to_num(1e9, 1e9)
    share = 1.0 if dtype == torch.float32 else 0.75
    error = errors.sort().values[int(share * (len(errors) - 1))].reshape(1).contiguous()
    error = collective.all_reduce(error) / collective.size
    limit = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    return "" if float(error) <= limit else f"relative error {float(error):.2g}, allowed {limit}"
