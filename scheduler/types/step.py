"""What a rank computes: a step's flat arrays, without draft nodes and with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .arrays import FloatArray, IntArray, lens_of
from .draft import DraftProbs, Masks


@dataclass(frozen=True, slots=True)
class Penalties:
    """Token history of one row, sent only when a penalty is on."""

    row: int
    repetition: float
    presence: float
    frequency: float
    prompt_ids: IntArray  # [num_prompt_unique]
    output_ids: IntArray  # [num_output_unique]
    output_counts: IntArray  # [num_output_unique]


@dataclass(frozen=True, slots=True)
class Bias:
    """Additive logit biases of one row."""

    row: int
    ids: IntArray  # [num_biased]
    values: FloatArray  # [num_biased]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling settings, one row per sequence of the batch."""

    temperature: FloatArray  # [num_seqs], 0 is greedy
    top_k: IntArray  # [num_seqs], 0 is off
    top_p: FloatArray  # [num_seqs], 1 is off
    min_p: FloatArray  # [num_seqs], 0 is off
    seeds: NDArray[np.int64]  # [num_seqs]
    min_new_tokens: IntArray  # [num_seqs], tokens still owed before `ends` may be sampled
    num_logprobs: IntArray  # [num_seqs], -1 is none
    ends: tuple[IntArray, ...] = ()  # per row, ids forbidden while min_new_tokens > 0
    penalties: tuple[Penalties, ...] = ()
    biases: tuple[Bias, ...] = ()
    thinking: NDArray[np.bool_] | None = None  # [num_seqs], the root is in a thinking phase
    # [num_seqs], rivals of every known token that the step computes, the root excepted; -1 is none
    num_prompt_logprobs: IntArray | None = None  # None: no request needs them


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The known part of a step, laid out on a rank; `joining.join` adds the draft nodes.

    Of sequence i, `token_ids[query_start[i]:query_start[i+1]]` are the tokens to compute.
    """

    step: int
    token_ids: IntArray  # [num_tokens]
    query_start: IntArray  # [num_seqs + 1]
    context_lens: IntArray  # [num_seqs]
    block_tables: IntArray  # [num_seqs, max_blocks]
    samples: NDArray[np.bool_]  # [num_seqs]
    max_nodes: IntArray  # [num_seqs]
    kv_moves: IntArray  # [num_moves, 2]
    sampling: SamplingRows
    next_tokens: IntArray | None = None  # [num_seqs], the known token after the chunk; -1: none

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    @property
    def chunk_lens(self) -> IntArray:  # [num_seqs]
        return lens_of(self.query_start)

    @property
    def known_lens(self) -> IntArray:  # [num_seqs]
        """Tokens in the KV cache after the step, draft nodes aside."""
        return self.context_lens + self.chunk_lens


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step's flat arrays on a rank: known tokens with the draft nodes joined on.

    Sequence i's query is its known chunk followed by its draft nodes. Draft node j of sequence
    i is `draft_tokens[draft_start[i] + j]` and attends to the whole context, to its chunk and to
    its own ancestors. Logit rows are, for each sampled sequence in order, the root's then the
    nodes': `rows` indexes them in the flat query.
    """

    step: int
    token_ids: IntArray  # [num_tokens], chunks with nodes
    positions: IntArray  # [num_tokens]
    slot_mapping: IntArray  # [num_tokens]
    query_start: IntArray  # [num_seqs + 1]
    context_lens: IntArray  # [num_seqs]
    block_tables: IntArray  # [num_seqs, max_blocks]
    samples: NDArray[np.bool_]  # [num_seqs]
    draft_tokens: IntArray  # [num_nodes], of all sequences
    draft_parents: IntArray  # [num_nodes], within the sequence; -1 is the root
    draft_start: IntArray  # [num_seqs + 1]
    draft_probs: DraftProbs | None  # rows of zeros for deterministic nodes
    rows: IntArray  # [num_rows]
    kv_moves: IntArray  # [num_moves, 2]
    sampling: SamplingRows
    num_window: IntArray | None = None  # [num_seqs], trailing nodes never accepted; None: none
    max_nodes: IntArray | None = None  # [num_seqs], nodes that the sequence might have drafted
    next_tokens: IntArray | None = None  # [num_seqs], as in `KnownTokens`
    masks: Masks | None = None  # of constrained sequences, by logit row; None: there are none

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    @property
    def num_nodes(self) -> IntArray:  # [num_seqs]
        """Draft nodes of every sequence."""
        return lens_of(self.draft_start)

    @property
    def query_lens(self) -> IntArray:  # [num_seqs]
        """Tokens of every sequence, chunk and nodes."""
        return lens_of(self.query_start)

    @property
    def root_rows(self) -> IntArray:  # [num_seqs]
        """Flat row of every chunk's last token; a sequence's nodes come after it."""
        return self.query_start[1:] - 1 - self.num_nodes
