"""Engines with a head emit what they do without."""

from __future__ import annotations

from typing import Any

from outrider.tests.helpers.engines import complete, engine_of, plain_outputs, random_prompts


def check_plain_tokens(target: str, section: dict[str, Any], *, at_once: int, **sizes: int) -> None:
    """Greedy and sampled, with chunked prefill, prefix hits and, eight at once, preemptions."""
    shared = list(range(2, 40))
    prompts = [shared + prompt for prompt in random_prompts(10, 96, longest=60)]
    samplings = {"max_tokens": 40}, {"max_tokens": 40, "temperature": 0.8}
    wanted = plain_outputs(target, prompts, *samplings)
    small = {"max_num_batched_tokens": 64, "block_size": 4, "num_kv_blocks": 120}
    small |= sizes
    with engine_of(target, section, **small) as engine:
        for sampling, outputs in zip(samplings, wanted, strict=True):
            assert complete(engine, prompts, at_once=at_once, **sampling)[0] == outputs
        stats = engine.stats()
    (drafter,) = stats["drafters"].values()
    assert drafter["faults"] == 0
    assert drafter["num_acc_tokens"] > 0
    assert stats["requests"]["num_hit_tokens"] > 0
    if at_once == 8:
        assert stats["requests"]["num_preemptions"] > 0
