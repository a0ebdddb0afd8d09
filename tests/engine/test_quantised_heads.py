"""Heads on quantised targets: greedy tokens are those of no drafter, and drafts are accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ..helpers.engines import complete, engine_of, random_prompts
from ..helpers.head_files import eagle_tensors, medusa_tensors, write_eagle, write_medusa
from ..helpers.mtp import Made
from ..helpers.quantised.formats import KINDS, write_coded
from ..helpers.quantised.scaled import BLOCKS, quantise
from ..helpers.redrafter import redrafter_tensors, write_redrafter
from ..helpers.redrafter import write_target as write_guessable_target

PROMPTS = random_prompts(3, 96, longest=12)


def fp8(weight):
    stored, scales, wide = quantise(weight, (128, 128), torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scales}, wide


FORMATS = {**KINDS, "fp8": (BLOCKS, fp8)}


def eagle(version: int) -> Callable[[str, Path], str]:
    def write(target: str, folder: Path) -> str:
        return write_eagle(folder, *eagle_tensors(target, version))

    return write


def medusa(target: str, folder: Path) -> str:
    return write_medusa(folder, medusa_tensors(target, 2), "safetensors")


def redrafter(target: str, folder: Path) -> str:
    return write_redrafter(folder, redrafter_tensors(target))


HEADS = {
    "Eagle": (eagle(1), {"max_draft_len": 3}),
    "Eagle3": (eagle(3), {"max_draft_len": 3}),
    "Medusa": (medusa, {"medusa_choices": [[0], [1], [0, 0]]}),
    "ReDrafter": (redrafter, {"redrafter_num_beams": 2, "redrafter_draft_len_per_beam": 3}),
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "head", "size"),
    [
        ("fp8", "Eagle", 1),
        ("awq", "Eagle3", 1),
        ("gptq desc_act", "Medusa", 2),
        ("packed, zeros", "ReDrafter", 1),
        ("fp8", "MTP", 1),
        *(
            pytest.param(kind, head, 1, marks=SLOW)
            for kind in ("fp8", "awq", "gptq", "packed")
            for head in (*HEADS, "MTP")
            if (kind, head) not in (("fp8", "Eagle"), ("awq", "Eagle3"), ("fp8", "MTP"))
        ),
    ],
)
def test_greedy_tokens_are_those_of_no_drafter(tmp_path, kind, head, size):
    coded = tmp_path / "coded"
    if head == "MTP":
        # In DeepSeek's and Qwen's fp8 checkpoints the modules are beside the target, in fp8 too.
        made = Made(tmp_path, "llama")
        plain = Path(made.folder if kind == "fp8" else tmp_path / "plain")
        section = {"max_draft_len": 3} if kind == "fp8" else {"speculative_model": made.alone}
    else:
        plain = Path(write_guessable_target(tmp_path / "target", 6))
    write_coded(plain, coded, *FORMATS[kind])
    if head != "MTP":
        write, section = HEADS[head]  # of what `plain` has become
        section = section | {"speculative_model": write(str(plain), tmp_path / "head")}
    section = {"decoding_type": head, **section}
    options = {"tensor_parallel_size": size, "num_kv_blocks": 64, "max_num_seqs": 4}
    with engine_of(str(plain), **options) as engine:
        wanted = complete(engine, PROMPTS, max_tokens=16)[0]
    with engine_of(str(coded), **options) as engine:
        assert complete(engine, PROMPTS, max_tokens=16)[0] == wanted
    counts = []
    for target in (plain, coded):  # the same values, widened and coded
        with engine_of(str(target), section, **options) as engine:
            assert complete(engine, PROMPTS, max_tokens=16)[0] == wanted
            stats = engine.stats()["drafters"][head.lower()]
        assert stats["faults"] == 0
        counts.append((stats["num_gen_tokens"] > 0, stats["num_acc_tokens"] > 0))
    assert counts[0] == counts[1]
    assert counts[0][0]
