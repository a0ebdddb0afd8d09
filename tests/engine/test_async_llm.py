"""`AsyncLLM`: many requests of one event loop, aborts, and the same tokens as `LLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import AsyncLLM, RequestOutput, SamplingParams
from outrider.errors import InvalidRequestError

DEMO = str(Path(__file__).resolve().parents[2] / "demo" / "models" / "target")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7, 5, 6], [9, 8, 7, 9, 8, 7], [1, 2, 3], [4, 4, 4, 4]]


async def last(llm: AsyncLLM, prompt: Any, sampling: SamplingParams = GREEDY) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, sampling)]
    assert outputs[-1].finished
    return outputs[-1]


@pytest.fixture
def run() -> Callable[..., Any]:
    def run(talk: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
        async def whole() -> Any:
            options.setdefault("speculative_config", {"decoding_type": "NGram"})
            async with AsyncLLM(DEMO, executor="local", **options) as llm:
                return await talk(llm)

        return asyncio.run(whole())

    return run


def test_many_at_once_have_the_tokens_of_each_alone(run: Callable[..., Any]) -> None:
    async def talk(llm: AsyncLLM) -> None:
        together = await asyncio.gather(*(last(llm, prompt) for prompt in PROMPTS * 4))
        alone = llm.llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in together]
        assert tokens == [output.outputs[0].token_ids for output in alone] * 4
        assert llm.stats()["running"] == 0

    run(talk, max_queued_requests=3, max_num_seqs=2)  # more than the queue takes


def test_outputs_grow_and_a_request_can_be_aborted(run: Callable[..., Any]) -> None:
    long = GREEDY.model_copy(update={"max_tokens": 200})

    async def talk(llm: AsyncLLM) -> None:
        seen: list[RequestOutput] = []
        async for output in llm.generate(PROMPTS[0], long, "mine"):
            seen.append(output)
            if len(seen) == 2:
                with pytest.raises(InvalidRequestError, match="^request_id: 'mine' runs already"):
                    await anext(llm.generate(PROMPTS[0], long, "mine"))
                await llm.abort("mine")
        lengths = [len(output.outputs[0].token_ids) for output in seen]
        assert lengths == sorted(lengths)
        assert lengths[-1] < 200
        assert seen[-1].outputs[0].finish_reason == "abort"
        await llm.abort("unknown")

        stream = llm.generate(PROMPTS[1], long)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(last(llm, PROMPTS[2], long))
        await asyncio.sleep(0.05)
        task.cancel()
        while llm.stats()["running"]:
            await asyncio.sleep(0.01)

    run(talk)


def test_errors_reach_their_own_request(run: Callable[..., Any]) -> None:
    async def talk(llm: AsyncLLM) -> None:
        outcomes = await asyncio.gather(
            last(llm, PROMPTS[0]), last(llm, [10**6]), last(llm, ""), return_exceptions=True
        )
        assert isinstance(outcomes[0], RequestOutput)
        assert all(isinstance(error, InvalidRequestError) for error in outcomes[1:])
        await llm.check_health()

    run(talk)


def test_a_reset_prefix_cache_finds_nothing(run: Callable[..., Any]) -> None:
    prompt = list(range(300, 340))

    async def talk(llm: AsyncLLM) -> None:
        first = await last(llm, prompt)
        again = await last(llm, prompt)
        assert await llm.reset_prefix_cache()
        reset = await last(llm, prompt)
        assert again.num_cached_tokens > 0 == first.num_cached_tokens == reset.num_cached_tokens
        assert first.outputs[0].token_ids == reset.outputs[0].token_ids

    run(talk, block_size=8)
