"""Settings of the device step: tensors by seat or by row, which kernels read.

What is drawn and edited by them equals the host path: tokens are those of `sample.draw`, edited
logits those of `process.edit` bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

MAX_BIASES, MAX_ENDS, MAX_TOP = 64, 16, 20
MASK_BITS = 32  # tokens per word of a mask
"""Logit biases, end tokens under `min_tokens` and log-probabilities of a request on the device."""
WORD_BITS = 64  # nodes per word of ancestors
PROMPT = 1 << 30  # in a count: the token is in the prompt; lower bits count it in the output

REPETITION, FREQUENCY, PRESENCE, MIN_LEN, NUM_LOGPROBS, NUM_BIASES, NUM_ENDS = 0, 2, 4, 6, 7, 8, 9
EDIT_WORDS = np.dtype("f8, f8, f8, i4, i4, i4, i4")
NUM_WORDS = EDIT_WORDS.itemsize // 4
"""Columns of `EditTables.words`. Penalties are float64, two int32 words each, as on the host."""


class DeviceSettings(NamedTuple):
    """Sampling settings per row of logits, on their device."""

    seeds: Tensor  # [num_rows] int64
    temperature: Tensor  # [num_rows] float32, 0 is greedy
    top_k: Tensor  # [num_rows] int32, 0 is off
    top_p: Tensor  # [num_rows] float32, 1 is off
    min_p: Tensor  # [num_rows] float32, 0 is off


@dataclass(frozen=True, slots=True)
class EditTables:
    """What the requests of all seats edit with; the last row is the padding's."""

    words: Tensor  # [num_seats + 1, NUM_WORDS] int32
    bias_ids: Tensor  # [num_seats + 1, MAX_BIASES] int32, 0 beyond a seat's number
    biases: Tensor  # [num_seats + 1, MAX_BIASES] int32, bits of float32; alike
    ends: Tensor  # [num_seats + 1, MAX_ENDS] int32; alike
    counts: Tensor  # [num_seats + 1, vocab] int32
    masks: Tensor  # [max_rows, mask_words] int32, of rows of the step at hand, as `Masks.bits`


@dataclass(frozen=True, slots=True)
class DeviceEdits:
    """Rows of a step: all, or some of them in any order."""

    tables: EditTables
    first: Tensor  # [num_rows] int32, the row of the step that has the sequence's root
    seats: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int32, of the rows' own tokens
    lanes: Tensor  # [num_rows] int32, rows behind the root
    # [num_rows, num_words] int64, bit j % 64 of word j // 64: node j is on the path to the row, or
    # the row.
    ancestors: Tensor
    masks: Tensor  # [num_rows] int32, which of the tables' masks; -1 is none
    token_ids: Tensor  # [num_rows of the step] int32; node j's is at first + 1 + j
    max_nodes: int  # of a sequence


@dataclass(frozen=True, slots=True)
class DeviceWalk:
    """Rows of a step between the draw and the update of the seats, whose tables it writes."""

    token_ids: Tensor  # [num_rows] int32
    parents: Tensor  # [num_rows] int64, a node's parent's row
    ancestors: Tensor  # [num_rows, num_words] int64, as of `DeviceEdits`; 0 of what is no node
    depths: Tensor  # [num_rows] int32, 0 of what is no node
    slots: Tensor  # [num_rows] int64
    query_start: Tensor  # [num_seqs + 1] int32, each sequence's first row, its root's
    context_lens: Tensor  # [num_seqs] int32, tokens before the root
    seats: Tensor  # [num_seqs] int64, the last for padding
    appends: Tensor  # [1] int32, whether emitted tokens are appended
    tokens: Tensor  # [num_seats + 1, width] int32, written
    lengths: Tensor  # [num_seats + 1] int32, written
    counts: Tensor | None  # [num_seats + 1, vocab] int32, written; None: tokens are not counted
    outcome: Tensor  # [num_rows] int32, written: the draw; `~token` where it is not emitted
    spare_slot: int  # whose keys mean nothing
    query_len: int  # rows of a sequence, at most


@dataclass(frozen=True, slots=True)
class Settled:
    """What a step leaves, beside seats and outcome."""

    source: Tensor  # [num_rows] int64, slots of accepted nodes that move; others' are spare
    target: Tensor  # [num_rows] int64, to where a chain's would be; with nodes alone
    last: Tensor  # [num_seqs] int64, the deepest accepted row
    emitted: Tensor  # [num_seqs] int64, what is drawn there
    known: Tensor  # [num_seqs] int32, tokens of the sequence up to that row
    base: Tensor  # [num_seqs] int64, index of that row in the sequence
