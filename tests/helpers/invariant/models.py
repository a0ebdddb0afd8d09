"""Small random models in bfloat16, and the check of their rotations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.tests.helpers.invariant.texts import VOCAB

POSITIONS = 50


def write_random(folder: Path, kind: str, **keys: Any) -> Path:
    """A model of architecture `kind` whose logits differ much from token to token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, vocab_size=VOCAB, max_position_embeddings=512, initializer_range=0.3, **keys
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def check_angles(ops: Any, others: Any, *, atol: float) -> None:
    """Rotations are those of the position alone, in any company; `others` are new operations."""
    frequencies = torch.rand(37)
    positions = torch.arange(POSITIONS, dtype=torch.int32)
    whole = ops.rotation(positions, frequencies, 1.3)
    part = others.rotation(positions[[49, 3]], frequencies, 1.3)
    sets = ops.rotation(positions, frequencies.expand(POSITIONS, -1).contiguous(), 1.3)
    angles = (positions[:, None] * frequencies).double()
    for every, some, own, exact in zip(
        whole, part, sets, (angles.cos(), angles.sin()), strict=True
    ):
        assert torch.equal(every[[49, 3]], some)
        assert torch.equal(every, own)
        assert torch.allclose(every.double(), exact * 1.3, atol=atol)
    assert ops.rotation(positions[:0], frequencies, 1.0)[0].numel() == 0
