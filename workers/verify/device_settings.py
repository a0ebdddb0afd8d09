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

    def take(self, rows: slice) -> DeviceSettings:
        return DeviceSettings._make(column[rows] for column in self)


@dataclass(frozen=True, slots=True)
class EditTables:
    """What the requests of all seats edit with; the last row is the padding's."""

    words: Tensor  # [num_seats + 1, NUM_WORDS] int32
    bias_ids: Tensor  # [num_seats + 1, MAX_BIASES] int32, 0 beyond a seat's number
    biases: Tensor  # [num_seats + 1, MAX_BIASES] int32, bits of float32; alike
    ends: Tensor  # [num_seats + 1, MAX_ENDS] int32; alike
    counts: Tensor  # [num_seats + 1, vocab] int32


@dataclass(frozen=True, slots=True)
class DeviceEdits:
    """The rows of a step: row s * query_len + l is lane l of sequence s."""

    tables: EditTables
    seats: Tensor  # [num_seqs] int64
    positions: Tensor  # [num_rows] int32, of the rows' own tokens
    # [num_rows, num_words] int64, bit j % 64 of word j // 64: node j is on the path to the row, or
    # the row.
    ancestors: Tensor
    nodes: Tensor  # [num_seqs, num_nodes] int32, tokens

    @property
    def query_len(self) -> int:
        return self.nodes.shape[1] + 1
