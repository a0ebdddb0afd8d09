"""What the ranks answer: tokens that were accepted, and a head's next drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .arrays import FloatArray, IntArray, ints, lens_of
from .step import StepInput

if TYPE_CHECKING:
    from ..timer import ThreadChoice


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of emitted tokens under the model's own distribution."""

    chosen: FloatArray  # [num_emitted]
    top_ids: IntArray  # [num_emitted, top]
    top: FloatArray  # [num_emitted, top]


@dataclass(frozen=True, slots=True)
class NextDrafts:
    """What a head guesses for the step to come.

    Sequence i's tree is `tokens[start[i]:start[i+1]]`; it follows `lens[i]` known tokens and is
    stale once more tokens are known.
    """

    tokens: IntArray  # [num_nodes], of all sequences
    parents: IntArray  # [num_nodes], within the sequence; -1 is the root
    start: IntArray  # [num_seqs + 1]
    lens: IntArray  # [num_seqs]
    error: str = ""  # why there are none, if the head failed


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was accepted. Sequence i emits `emitted[emitted_start[i]:emitted_start[i+1]]`.

    `num_accepted[i] = num_emitted - 1` (0 when nothing was sampled) excludes the bonus token;
    the accepted node ids are `path[path_start[i]:path_start[i+1]]`, root to leaf.
    """

    step: int
    emitted: IntArray  # [num_emitted], of all sequences
    emitted_start: IntArray  # [num_seqs + 1]
    path: IntArray  # [num_accepted], of all sequences
    path_start: IntArray  # [num_seqs + 1]
    logprobs: Logprobs | None = None
    forward_ms: float = 0.0
    window: IntArray | None = None  # [num_window], most likely token after each window node
    window_start: IntArray | None = None  # [num_seqs + 1]
    next_drafts: NextDrafts | None = None  # where a head drafts inside the workers
    prompt_logprobs: Logprobs | None = None  # of `SamplingRows.num_prompt_logprobs`' rows
    compacted: bool = False  # the ranks have moved the accepted nodes' keys and values into place
    thread_choices: tuple[ThreadChoice, ...] | None = None  # on a CPU, whenever they are news

    @classmethod
    def empty(cls, step: int, num_seqs: int) -> Verdict:
        """Of a step in which no sequence was sampled."""
        none, starts = ints([]), np.zeros(num_seqs + 1, dtype=np.int32)
        return cls(step, none, starts, none, starts)

    @property
    def num_accepted(self) -> IntArray:  # [num_seqs]
        return lens_of(self.path_start)

    @property
    def num_emitted(self) -> IntArray:  # [num_seqs]
        return lens_of(self.emitted_start)

    def accepted_rows(self, step: StepInput) -> IntArray:  # [num_accepted], of all sequences
        """Flat rows of the accepted nodes."""
        return np.repeat(step.root_rows, self.num_accepted) + 1 + self.path

    def window_tokens(self, row: int) -> IntArray:
        """The target's most likely token after each of the row's window nodes."""
        if self.window is None or self.window_start is None:
            return ints([])
        return self.window[self.window_start[row] : self.window_start[row + 1]]

    def tokens(self, row: int) -> IntArray:
        return self.emitted[self.emitted_start[row] : self.emitted_start[row + 1]]

    def nodes(self, row: int) -> IntArray:
        return self.path[self.path_start[row] : self.path_start[row + 1]]
