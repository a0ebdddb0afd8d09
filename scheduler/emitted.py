"""What one step gave one request: where its text ends, its counts, its log-probabilities.

Called by `Scheduler.commit`; reads sequences and changes none.
"""

from __future__ import annotations

from .sequence import Sequence
from .types import Delta, Draft, SpeculationUsage, StepTrace, TokenLogprobs, Verdict


def until_end(sequence: Sequence, emitted: list[int]) -> tuple[list[int], str | None]:
    """`emitted` cut at the first end token or at the limit, and why it ended, if it did."""
    room = sequence.limit - sequence.tokens.size
    ends = sequence.ends
    if ends and not ends.isdisjoint(emitted):
        owed = sequence.request.sampling.min_tokens - sequence.num_output
        for index, token in enumerate(emitted[:room]):
            if token in ends and index + 1 > owed:
                return emitted[: index + 1], "stop"
    if len(emitted) >= room:
        return emitted[:room], "length"
    return emitted, None


def delta_of(
    sequence: Sequence,
    draft: Draft,
    verdict: Verdict,
    row: int,
    emitted: list[int],
    path: list[int],
    reason: str | None,
) -> Delta:
    """What the edge streams, once `emitted` is part of the sequence."""
    return Delta(
        request_id=sequence.request.id,
        token_ids=tuple(emitted),
        num_accepted=min(len(path), len(emitted)),
        finish_reason=reason,
        stop_token_id=emitted[-1] if reason == "stop" else None,
        logprobs=(
            ()
            if verdict.logprobs is None
            else emitted_logprobs(sequence, verdict, row, len(emitted))
        ),
        num_cached_tokens=sequence.num_cached_tokens,
        usage=sequence.usage,
        prompt_logprobs=sequence.scores.whole() if sequence.scores else None,
        trace=step_trace(draft, path) if sequence.request.speculation.trace else None,
        times=sequence.first_times(),
    )


def count_step(usage: SpeculationUsage, draft: Draft, num_accepted: int) -> SpeculationUsage:
    """`usage` with one more step of the request."""
    num_nodes = len(draft.tokens)
    num_guesses = num_nodes - draft.num_window
    # Built and not replaced: `dataclasses.replace` takes three times as long.
    return SpeculationUsage(
        drafter=draft.source if num_nodes or usage.drafter == "none" else usage.drafter,
        num_steps=usage.num_steps + 1,
        num_drafts=usage.num_drafts + (num_guesses > 0),
        num_draft_tokens=usage.num_draft_tokens + num_guesses,
        num_accepted_tokens=usage.num_accepted_tokens + num_accepted,
        synthetic=usage.synthetic,
    )


def step_trace(draft: Draft, path: list[int]) -> StepTrace:
    """The draft and what was accepted of it, for requests that ask for it."""
    count = draft.num_guesses
    return StepTrace(
        tokens=tuple(draft.tokens[:count].tolist()),
        parents=tuple(draft.parents[:count].tolist()),
        origins=draft.origins or (draft.source,) * count,
        path=tuple(path),
    )


def emitted_logprobs(
    sequence: Sequence, verdict: Verdict, row: int, count: int
) -> tuple[TokenLogprobs, ...]:
    """This row's log-probabilities, with as many alternatives as the request specifies."""
    wanted = sequence.request.sampling.logprobs
    if wanted is None or verdict.logprobs is None:
        return ()
    table = verdict.logprobs
    begin = int(verdict.emitted_start[row])
    return tuple(
        TokenLogprobs(
            float(table.chosen[index]),
            tuple(
                zip(
                    table.top_ids[index, :wanted].tolist(),
                    table.top[index, :wanted].tolist(),
                    strict=True,
                )
            ),
        )
        for index in range(begin, begin + count)
    )
