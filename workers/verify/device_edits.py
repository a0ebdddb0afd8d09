"""`process.edit` and `logprobs.token_logprobs` for settings that are tensors on the device.

The device step edits with it where no kernel does. Every row is computed over the whole
vocabulary, whatever its settings are, because rows cannot be told apart without a look at them;
results equal those of the host path, the logits bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_BIASES, MAX_ENDS, MAX_TOP = 64, 16, 20
"""Logit biases, end tokens under `min_tokens` and log-probabilities of a request on the device."""
WORD_BITS = 64  # nodes per word of ancestors
PROMPT = 1 << 30  # in a count: the token is in the prompt; lower bits count it in the output

REPETITION, FREQUENCY, PRESENCE, MIN_LEN, NUM_LOGPROBS, NUM_BIASES, NUM_ENDS = 0, 2, 4, 6, 7, 8, 9
NUM_WORDS = 10
"""Columns of `EditTables.words`. Penalties are float64, two words each, as on the host."""


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


def neutral_words() -> list[int]:
    """The words of a seat without edits."""
    words = torch.zeros(NUM_WORDS, dtype=torch.int32)
    words[REPETITION : REPETITION + 2].view(torch.float64).fill_(1.0)
    words[NUM_LOGPROBS] = -1
    return words.tolist()


def edit(
    logits: Tensor,  # [num_rows, vocab] float32, written
    edits: DeviceEdits,
) -> None:
    """Applies biases, forbidden ends and penalties."""
    tables, query_len = edits.tables, edits.query_len
    seats = edits.seats.repeat_interleave(query_len, output_size=len(logits))
    words = tables.words.index_select(0, seats)
    ids = tables.bias_ids.index_select(0, seats).long()
    logits.scatter_add_(1, ids, tables.biases.index_select(0, seats).view(torch.float32))
    ends = tables.ends.index_select(0, seats).long()
    is_end = torch.arange(MAX_ENDS, device=logits.device) < words[:, NUM_ENDS, None]
    owed = words[:, MIN_LEN] > edits.positions + 1
    forbidden = torch.where(is_end & owed[:, None], -torch.inf, 0.0)
    logits.scatter_add_(1, ends, forbidden)
    held = tables.counts.index_select(0, seats)
    _penalise(logits, held & (PROMPT - 1), held > 0, words, edits)


def _penalise(
    logits: Tensor,  # [num_rows, vocab] float32, written
    counts: Tensor,  # [num_rows, vocab] int32, in the output, edited
    seen: Tensor,  # [num_rows, vocab] bool, in prompt or output
    words: Tensor,  # [num_rows, NUM_WORDS]
    edits: DeviceEdits,
) -> None:
    num_nodes = edits.nodes.shape[1]
    if num_nodes:
        node = torch.arange(num_nodes, device=logits.device)
        on_path = (edits.ancestors[:, node // WORD_BITS] >> node % WORD_BITS & 1).to(torch.int32)
        path = edits.nodes.long().repeat_interleave(edits.query_len, 0, output_size=len(logits))
        counts = counts.scatter_add(1, path, on_path)
    repetition, frequency, presence = (
        words[:, column : column + 2].contiguous().view(torch.float64)
        for column in (REPETITION, FREQUENCY, PRESENCE)
    )
    factor = torch.where(seen | (counts > 0), repetition, 1.0).float()
    less = (frequency * counts + presence * (counts > 0)).float()
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor) - less)


def logprobs(
    logits: Tensor,  # [num_rows, vocab], unedited
    tokens: Tensor,  # [num_rows] int32, drawn
) -> tuple[Tensor, Tensor]:  # values [num_rows, 1 + MAX_TOP] float32, ids [num_rows, MAX_TOP] int32
    """Log-probabilities of the drawn token and of the most likely, best first.

    Ties go to the lower id; columns beyond the vocabulary are unspecified.
    """
    raw = logits.float().log_softmax(1)
    top = min(MAX_TOP, logits.shape[1])
    ids = raw.topk(top, dim=1).indices.sort(dim=1).values
    best, order = raw.gather(1, ids).sort(dim=1, descending=True, stable=True)
    values = torch.cat([raw.gather(1, tokens.long()[:, None]), best], dim=1)
    missing = (0, MAX_TOP - top)
    ids = ids.gather(1, order).to(torch.int32)
    return torch.nn.functional.pad(values, missing), torch.nn.functional.pad(ids, missing)
