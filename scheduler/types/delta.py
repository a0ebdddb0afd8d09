"""What the edge streams: the tokens of one step for one request, and their statistics."""

from __future__ import annotations

from dataclasses import dataclass

from .record import record
from .verdict import Logprobs


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one emitted token, with its most likely rivals."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first


@record
class SpeculationUsage:
    """How speculation went for one request so far."""

    drafter: str = "none"  # that proposed last, or that was asked, if none has proposed
    num_steps: int = 0  # target steps that emitted
    num_drafts: int = 0  # with a guess
    num_draft_tokens: int = 0  # guesses; a window's nodes are none
    num_accepted_tokens: int = 0
    synthetic: bool = False  # accepted by coins and not by the target

    @property
    def mean_accepted_len(self) -> float:
        """Accepted draft tokens per step; 0 before the first."""
        return self.num_accepted_tokens / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The guesses of one request's draft in one step, and which of them were accepted."""

    tokens: tuple[int, ...]  # [num_guesses]
    parents: tuple[int, ...]  # [num_guesses]; -1 is the root
    origins: tuple[str, ...]  # [num_guesses], name of the drafter
    path: tuple[int, ...]  # [num_accepted], accepted guesses, root to leaf


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What came before a request's first token, on the engine's clock."""

    queue_s: float  # waiting for a seat
    prefill_s: float  # from the seat to the first token


@record
class Delta:
    """What one step gave one request. `finish_reason` is None while it runs."""

    request_id: str
    token_ids: tuple[int, ...]
    num_accepted: int = 0  # the first so many came from the draft; the rest from the target
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_token_id: int | None = None  # the end token that stopped it, if one did
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    usage: SpeculationUsage | None = None  # so far
    error: str | None = None
    # Of the prompt's tokens but the first; with the first tokens, if the request asked for them.
    prompt_logprobs: Logprobs | None = None
    trace: StepTrace | None = None  # where the request asked for it
    times: RequestTimes | None = None  # with the first tokens
