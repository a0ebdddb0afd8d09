"""What is asked: one completion, with its tokens as its complete state."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..sampling import SamplingParams
from .arrays import IntArray, ints


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What one request asks of speculation; None leaves the choice to the engine."""

    enabled: bool = True
    max_draft_len: int | None = None
    trace: bool = False  # whether every delta carries a `StepTrace`


@dataclass(frozen=True, slots=True)
class Keep:
    """Whose tokens a replica keeps once their stream broke, and who may take them."""

    stream: str  # the id that the client has
    index: int  # of the completion within the stream
    owner: str  # the holder of the API key; empty where there are no keys


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to produce. Its tokens (prompt, then emitted) are its complete state."""

    id: str
    prompt: IntArray  # [prompt_len]
    sampling: SamplingParams
    seed: int  # the coupled noise's key; drawn at the edge when the user gave none
    eos_token_ids: tuple[int, ...] = ()
    speculation: SpeculationOptions = SpeculationOptions()
    priority: int = 0  # lower runs first
    tenant: str = ""
    emitted: IntArray = field(default_factory=lambda: ints([]))  # tokens streamed before a replay
    timeout_s: float | None = None  # what is left of its time as it is sent; None: any
    keep: Keep | None = None  # None: its stream cannot be resumed
    was_accepted: bool = False  # by an engine that was lost: a full queue does not refuse it

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end it once `min_tokens` are emitted."""
        stops = frozenset(self.sampling.stop_token_ids)
        return stops if self.sampling.ignore_eos else stops | frozenset(self.eos_token_ids)
