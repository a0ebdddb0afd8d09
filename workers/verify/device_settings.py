"""Settings of the device step: tensors by seat or by row, which kernels read.

Draws and edits with them equal those of the host path: tokens are those of `sample.draw`, and
edited logits those of `process.edit`, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

MAX_BIASES, MAX_ENDS, MAX_TOP = 64, 16, 20
MASK_BITS = 32  # tokens per word of a mask
"""Limits of a request on the device: logit biases, end tokens, and log-probabilities."""
WORD_BITS = 64  # nodes per word of ancestors
PROMPT = 1 << 30  # in a count: the token is in the prompt; lower bits count it in the output

REPETITION, FREQUENCY, PRESENCE, MIN_LEN, NUM_LOGPROBS, NUM_BIASES, NUM_ENDS = 0, 2, 4, 6, 7, 8, 9
EDIT_WORDS = np.dtype("f8, f8, f8, i4, i4, i4, i4")
NUM_WORDS = EDIT_WORDS.itemsize // 4
"""Columns of `EditTables.words`. Penalties are float64, in two int32 words each, as on the host."""


class DeviceSettings(NamedTuple):
    """Sampling settings per row of logits, on their device."""

    seeds: Tensor  # [num_rows] int64
    temperature: Tensor  # [num_rows] float32, 0 is greedy
    top_k: Tensor  # [num_rows] int32, 0 is off
    top_p: Tensor  # [num_rows] float32, 1 is off
    min_p: Tensor  # [num_rows] float32, 0 is off


@dataclass(frozen=True, slots=True)
class EditTables:
    """The edits of the requests of all seats; the last row is for padding."""

    words: Tensor  # [num_seats + 1, NUM_WORDS] int32
    bias_ids: Tensor  # [num_seats + 1, MAX_BIASES] int32; 0 beyond a seat's number of biases
    biases: Tensor  # [num_seats + 1, MAX_BIASES] int32, bits of float32; likewise
    ends: Tensor  # [num_seats + 1, MAX_ENDS] int32; likewise
    counts: Tensor  # [num_seats + 1, vocab] int32
    masks: Tensor  # [max_rows, mask_words] int32, by row of the current step, as in `Masks.bits`


@dataclass(frozen=True, slots=True)
class DeviceEdits:
    """Rows of a step: all of them, or some in any order."""

    tables: EditTables
    first: Tensor  # [num_rows] int32, row of the sequence's root in the step
    seats: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int32, of the rows' own tokens
    lanes: Tensor  # [num_rows] int32, distance from the root's row
    # [num_rows, num_words] int64; bit j % 64 of word j // 64 is set if node j is the row or is on
    # the path to it
    ancestors: Tensor
    masks: Tensor  # [num_rows] int32, index of the mask; -1: none
    token_ids: Tensor  # [num_rows of the step] int32; node j's token is at first + 1 + j
    max_nodes: int  # maximum per sequence


@dataclass(frozen=True, slots=True)
class DeviceWalk:
    """Inputs and outputs of the walk, between the draw and the update of the seats' tables."""

    token_ids: Tensor  # [num_rows] int32
    parents: Tensor  # [num_rows] int64, the parent's row of a node
    ancestors: Tensor  # [num_rows, num_words] int64, as in `DeviceEdits`; 0 for non-nodes
    depths: Tensor  # [num_rows] int32; 0 for rows that are not nodes
    slots: Tensor  # [num_rows] int64
    query_start: Tensor  # [num_seqs + 1] int32, each sequence's first row (its root)
    context_lens: Tensor  # [num_seqs] int32, tokens before the root
    seats: Tensor  # [num_seqs] int64; the last seat is for padding
    appends: Tensor  # [1] int32, whether emitted tokens are appended
    tokens: Tensor  # [num_seats + 1, width] int32, output
    lengths: Tensor  # [num_seats + 1] int32, output
    counts: Tensor | None  # [num_seats + 1, vocab] int32, output; None: tokens are not counted
    outcome: Tensor  # [num_rows] int32, output: drawn tokens; `~token` if not emitted
    spare_slot: int  # a slot whose keys are never read
    query_len: int  # maximum number of rows per sequence


@dataclass(frozen=True, slots=True)
class Settled:
    """The results of a step, in addition to seats and outcome."""

    source: Tensor  # [num_rows] int64, slots of accepted nodes to move; spare slots for other rows
    target: Tensor  # [num_rows] int64, their slots in a chain; only for steps with nodes
    last: Tensor  # [num_seqs] int64, the deepest accepted row
    emitted: Tensor  # [num_seqs] int64, token drawn at that row
    known: Tensor  # [num_seqs] int32, number of tokens up to that row
    base: Tensor  # [num_seqs] int64, index of that row in the sequence
