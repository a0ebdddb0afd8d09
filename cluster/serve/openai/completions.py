"""`/v1/completions`: completes prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from ....engine.outputs import Chunk
from ....errors import InvalidRequestError
from .answers import Completion, CompletionChoice
from .generation import Generation, Job, Step, completion_logprobs, stream_events
from .protocol import CompletionBody

MAX_PROMPTS = 1024


def add(generation: Generation, body: CompletionBody, request_id: str) -> None:
    """Checks the body and adds its prompts.

    Raises:
        InvalidRequestError: names the field.
    """
    sampling, options = body.sampling(), body.options()
    given = _given(body)
    if len(given) * sampling.n > MAX_PROMPTS:
        raise InvalidRequestError.at(
            "prompt", f"{len(given)} prompts x n = {sampling.n}; at most {MAX_PROMPTS} completions"
        )
    if body.prediction is not None and len(given) > 1:
        raise InvalidRequestError.at(
            "prediction", f"it is of one completion's text; this request has {len(given)} prompts"
        )
    generation.check_count(len(given), sampling.n)
    frontend = generation.frontend
    prompts = [
        frontend.text_prompt(item, add_special_tokens=body.add_special_tokens)
        if isinstance(item, str)
        else frontend.token_prompt(item, _field(body))
        for item in given
    ]
    for index, prompt in enumerate(prompts):
        prompt = frontend.truncated(prompt, body.truncate_prompt_tokens, sampling)
        generation.add(f"{request_id}-{index}", prompt, sampling, options, _field(body))


async def answer(generation: Generation, body: CompletionBody, request_id: str) -> Completion:
    """Returns the whole answer, after everything has finished."""
    choices = [
        await job.described(partial(_choice, body, job, index))
        for index, job in enumerate(_kept(generation.jobs, body))
    ]
    return {
        **generation.head(request_id),
        "object": "text_completion",
        "choices": choices,
        "usage": generation.usage(),
    }


def events(
    generation: Generation, body: CompletionBody, request_id: str
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the chunks of the answer."""
    begun = {job.index for job in generation.jobs if generation.mark(job).begun}

    async def events_of(step: Step) -> list[dict[str, Any]]:
        job, chunk, last = step.job, step.chunk, step.last
        index = job.index
        if step.seen:
            if not last or generation.mark(job).ended:
                return []
            chunk = Chunk("", ())
        text, logprobs = chunk.text, None
        first = index not in begun
        if body.echo and first:
            text = job.prompt_text + text
        begun.add(index)
        if body.logprobs is not None:
            describe = partial(completion_logprobs, body, job, chunk, echo=first)
            logprobs = await job.described(describe)
        extras: dict[str, Any] = {**job.chunk_extras(chunk, with_ids=body.return_token_ids)}
        if body.return_token_ids and first:
            extras["prompt_token_ids"] = list(job.prompt.token_ids)
        if not (text or logprobs is not None or extras or last):
            return []
        generation.sends(step, end=last)
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": job.assembler.finish_reason if last else None,
            "stop_reason": job.assembler.stop_reason if last else None,
            **extras,
        }
        return [{"choices": [choice]}]

    return stream_events(generation, body, request_id, "text_completion", events_of)


def _given(body: CompletionBody) -> list[Any]:
    """Returns the prompts, each a text or a list of token ids."""
    given: Any = body.prompt if body.prompt is not None else body.prompt_token_ids
    if (body.prompt is None) == (body.prompt_token_ids is None):
        raise InvalidRequestError.at("prompt", "either prompt or prompt_token_ids")
    if not given and not isinstance(given, str):
        raise InvalidRequestError.at(_field(body), "the list is empty")
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def _field(body: CompletionBody) -> str:
    return "prompt" if body.prompt_token_ids is None else "prompt_token_ids"


def _kept(jobs: list[Job], body: CompletionBody) -> list[Job]:
    """Returns the jobs to send: the n most likely per token of each prompt's `best_of`."""
    if not body.chooses or body.best_of is None:
        return jobs
    kept: list[Job] = []
    for begin in range(0, len(jobs), body.best_of):
        ranked = sorted(jobs[begin : begin + body.best_of], key=_mean_logprob, reverse=True)
        kept += ranked[: body.n or 1]
    return kept


def _mean_logprob(job: Job) -> float:
    values = [entry.chosen for entry in job.assembler.logprobs]
    return sum(values) / max(1, len(values))


def _choice(body: CompletionBody, job: Job, index: int) -> CompletionChoice:
    output, logprobs = job.assembler.output(), None
    if body.logprobs is not None:
        logprobs = completion_logprobs(body, job, job.assembler.chunk(), echo=True)
    return {
        "index": index,
        "text": (job.prompt_text if body.echo else "") + output.text,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        **job.extras(body),
        **job.prompt_extras(body),
    }
