"""Training text: one sequence of tokens with weights, from files or written by the target.

A `.txt` file is one document; each line of a `.jsonl` file is a document with the key `text`,
`messages`, `prompt` and `completion`, or `tokens`. Windows are selected by step number, so that a
resumed run reads the same ones.

When serving, a head drafts text of its target rather than of the corpus; heads trained on such text
have a higher acceptance (Zhou et al. 2024, arXiv:2310.08461). The target continues prompts from the
corpus, once per run and batch by batch, into a file of `tokens` and `weights`; an interrupted run
resumes after the last batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from ..errors import ConfigError
from .parallel import Ranks, Stop
from .protocol import FrozenTarget, Windows

_PIECE_BYTES = 1 << 20  # of text tokenized at a time
_MOST = 1e6  # largest weight of a token
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")

# Tokens, and the loss weight of each.
Part = tuple[list[int], float | list[float]]
Weighted = list[Part]


@dataclass(frozen=True, slots=True)
class Documents:
    """Concatenated documents."""

    tokens: Tensor  # [num_tokens] int32
    weights: Tensor  # [num_tokens] float32
    starts: Tensor  # [num_documents + 1] int64

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # [length] each
        if not 0 <= index < len(self):
            raise IndexError(index)
        here = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return self.tokens[here], self.weights[here]


def pack(documents: Iterable[tuple[Any, Any]]) -> Documents:
    """Concatenates the tokens and weights of all documents."""
    tokens = [np.zeros(0, dtype=np.int32)]
    weights = [np.zeros(0, dtype=np.float32)]
    for ids, counts in documents:
        tokens.append(np.asarray(ids, dtype=np.int32))
        weights.append(np.asarray(counts, dtype=np.float32))
    starts = np.cumsum([len(ids) for ids in tokens])
    return Documents(
        torch.from_numpy(np.concatenate(tokens)),
        torch.from_numpy(np.concatenate(weights)),
        torch.from_numpy(starts.astype(np.int64)),
    )


def split(documents: Documents, fraction: float, window: int) -> tuple[Documents, Documents]:
    """Splits off the last documents as held-out text; cuts a document that is far too long.

    Raises:
        ConfigError: nothing is left to train on or to evaluate.
    """
    wanted = max(window, round(fraction * documents.num_tokens))
    if documents.num_tokens < wanted + window:
        raise ConfigError.at(
            "--input",
            f"{documents.num_tokens} tokens are too few: {wanted} are held out, and one "
            f"window has {window}",
        )
    first = documents.num_tokens - wanted
    begins = documents.starts[:-1]
    index = int(torch.searchsorted(begins, first, right=True)) - 1
    whole = int(begins[index])
    if documents.num_tokens - whole <= 2 * wanted and whole >= window:
        first = whole
    tokens, weights, starts = documents.tokens, documents.weights, documents.starts
    before, edge, after = starts[starts < first], torch.tensor([first]), starts[starts > first]
    kept = Documents(tokens[:first], weights[:first], torch.cat([before, edge]))
    held = Documents(tokens[first:], weights[first:], torch.cat([edge, after]) - first)
    for part, name in ((kept, "first"), (held, "held-out")):
        if not bool((part.weights > 0).any()):
            raise ConfigError.at(
                "--heldout",
                f"no token of the {name} part has a weight; hold out another part, or "
                "give --heldout-file",
            )
    return kept, held


class Reader:
    """Reads files with a target's tokenizer.

    Args:
        all_tokens: train on every token of a conversation, not only on the assistant's.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, *, all_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._all_tokens = all_tokens
        self._eos: int | None = tokenizer.eos_token_id

    def read(self, paths: Iterable[Path], option: str = "--input") -> Documents:
        """Reads all documents of all files.

        Raises:
            ConfigError: a file or a line is invalid, or the files are empty.
        """
        found = pack(document for path in paths for document in self._file(path, option))
        if not found.num_tokens:
            raise ConfigError.at(option, "the files hold no text")
        if not bool((found.weights > 0).any()):
            raise ConfigError.at(option, "no token in the files has a weight")
        return found

    def _file(self, path: Path, option: str) -> Iterator[tuple[Any, Any]]:
        if path.suffix not in (".txt", ".jsonl"):
            ending = f"ends in {path.suffix!r}" if path.suffix else "has no ending"
            raise ConfigError.at(option, f"{path} {ending}; allowed: .txt, .jsonl")
        where = str(path)
        try:
            with path.open(encoding="utf-8") as file:
                if path.suffix == ".txt":
                    yield from self._document(self._text(file))
                    return
                for number, line in enumerate(file, start=1):
                    where = f"{path}:{number}"
                    if line.strip():
                        yield from self._line(line)
        except OSError as error:
            raise ConfigError.at(option, f"{path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError.at(option, f"{path} is not UTF-8: {error}") from None
        except _BadValueError as error:
            raise ConfigError.at(option, f"{where}: {error}") from None

    def _line(self, line: str) -> Iterator[tuple[Any, Any]]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _BadValueError(f"not JSON: {error}") from None
        keys = [key for key in _FORMS if isinstance(row, dict) and key in row]
        if len(keys) != 1:
            held = f"has {', '.join(map(repr, row))}" if isinstance(row, dict) else "is no object"
            wanted = ", ".join(map(repr, _FORMS))
            raise _BadValueError(f"the line {held}; expected exactly one of {wanted}")
        for parts in _FORMS[keys[0]](self, row):
            yield from self._document(parts)

    def _document(self, parts: Iterable[Part]) -> Iterator[tuple[Any, Any]]:
        """Yields the parts as one document if they are not empty."""
        ids: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        counts: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        for tokens, weight in parts:
            ids.append(np.array(tokens, dtype=np.int64))
            counts.append(np.broadcast_to(np.asarray(weight, dtype=np.float32), (len(tokens),)))
        joined = np.concatenate([np.zeros(0, dtype=np.int64), *ids])
        if len(joined) == 0:
            return
        wrong = joined[(joined < 0) | (joined >= self._vocab_size)]
        if len(wrong):
            raise _BadValueError(
                f"token {wrong[0]} is outside the target's vocabulary of {self._vocab_size}"
            )
        yield joined, np.concatenate(counts)

    def _text(self, lines: Any) -> Iterator[Part]:
        """Yields a text file, some lines at a time, with the first tokens and an end token."""
        special = True
        while some := lines.readlines(_PIECE_BYTES):
            ids = self._encode("".join(some), special=special)
            yield ids, 1.0
            special = False
        if not special:
            yield self._end(ids, 1.0)

    def _plain(self, row: dict[str, Any]) -> Iterator[Weighted]:
        ids = self._encode(_string(row, "text"), special=True)
        yield [(ids, 1.0), self._end(ids, 1.0)]

    def _completion(self, row: dict[str, Any]) -> Iterator[Weighted]:
        ids = self._encode(_string(row, "completion"))
        prompt = self._encode(_string(row, "prompt"), special=True)
        yield [(prompt, 0.0), (ids, 1.0), self._end(ids, 1.0)]

    def _ids(self, row: dict[str, Any]) -> Iterator[Weighted]:
        ids = row["tokens"]
        if not isinstance(ids, list) or not all(
            type(token) is int and abs(token) < 2**31 for token in ids
        ):
            raise _BadValueError("tokens: expected a list of token ids")
        weights = row.get("weights", [1.0] * len(ids))
        if (
            not isinstance(weights, list)
            or len(weights) != len(ids)
            or not all(type(w) in (int, float) and 0 <= w <= _MOST for w in weights)
        ):
            raise _BadValueError(f"weights: expected {len(ids)} numbers from 0 to {_MOST:g}")
        yield [(ids, weights), self._end(ids, 0.0)]

    def _messages(self, row: dict[str, Any]) -> Iterator[Weighted]:
        """Returns a conversation; one document per answer if the template rewrites earlier ones."""
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise _BadValueError("messages: expected a list of messages")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise _BadValueError("messages: every message needs a 'role'")
            if message["role"] not in _ROLES:  # many templates render unknown roles
                raise _BadValueError(
                    f"messages: unknown role {message['role']!r}; known: {', '.join(_ROLES)}"
                )
        if not self._tokenizer.chat_template:
            raise _BadValueError(
                "messages: the target has no chat template; give 'prompt' and 'completion', or "
                "'text'"
            )
        text = self._render(messages)
        if self._all_tokens:
            ids = self._encode(text)
            yield [(ids, 1.0), self._end(ids, 0.0)]
            return
        turns = []  # the text before each answer, and the text including it
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._render(messages[:index], add_generation_prompt=True)
                turns.append((prompt, self._render(messages[: index + 1])))
        if not turns:
            raise _BadValueError("messages: no message has the role 'assistant'")
        if not all(whole.startswith(prompt) for prompt, whole in turns):
            raise _BadValueError(
                "messages: the chat template renders an answer that does not start with its prompt"
            )
        if all(text.startswith(whole) for _, whole in turns):
            yield self._answers(text, [(len(prompt), len(whole)) for prompt, whole in turns])
            return
        for prompt, whole in turns:
            yield self._answers(whole, [(len(prompt), len(whole))])

    def _answers(self, text: str, spans: list[tuple[int, int]]) -> Weighted:
        """Tokenizes a conversation in the pieces in which a server would."""
        parts: Weighted = []
        done = 0
        for begin, end in spans:
            parts += [(self._encode(text[done:begin]), 0.0), (self._encode(text[begin:end]), 1.0)]
            done = end
        parts.append((self._encode(text[done:]), 0.0))
        last = next((ids for ids, _ in reversed(parts) if ids), [])
        return [*parts, self._end(last, 0.0)]

    def _render(self, messages: list[Any], **options: Any) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
            raise _BadValueError(f"messages: the chat template refuses them: {error}") from None
        return text

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        try:
            ids: list[int] = self._tokenizer(
                text, add_special_tokens=special, verbose=False
            ).input_ids
        except TypeError:  # JSON escapes can encode a lone surrogate
            raise _BadValueError("the text contains a lone surrogate") from None
        return ids

    def _end(self, ids: list[int], weight: float) -> Part:
        """Returns the separator between documents."""
        if self._eos is None or ids[-1:] == [self._eos]:
            return [], weight
        return [self._eos], weight


class _BadValueError(Exception):
    """A file or one of its lines is invalid; the message does not name them."""


def _string(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise _BadValueError(f"{key}: expected a string, got {value!r:.60}")
    return value


# By the key that identifies a line's form.
_FORMS: Mapping[str, Callable[[Reader, dict[str, Any]], Iterator[Weighted]]] = {
    "text": Reader._plain,
    "messages": Reader._messages,
    "prompt": Reader._completion,
    "tokens": Reader._ids,
}


_EPOCH_SEEDS = 1_000_003  # a prime, so that epochs of neighbouring seeds differ


def padded(
    tokens: Tensor,  # [length]
    weights: Tensor,  # [length]
    window_len: int,
) -> tuple[Tensor, Tensor]:  # [window_len] each
    """Returns the first `window_len` tokens of a document, padded with weight 0."""
    missing = (0, max(0, window_len - len(tokens)))
    return pad(tokens[:window_len], missing), pad(weights[:window_len], missing)


class DocumentWindows:
    """An endless sequence of windows, `count` of them per epoch in a seeded order.

    One document per window.
    """

    def __init__(
        self, documents: Documents, window_len: int, seed: int, count: int | None = None
    ) -> None:
        self._documents = documents
        self._window_len = window_len
        self._seed, self._count = seed, len(documents) if count is None else count
        self._epoch, self._order, self._offset = -1, torch.empty(0), 0

    def window(self, index: int) -> tuple[Tensor, Tensor]:  # [window_len] each
        """Returns tokens and weights."""
        return padded(*self._documents[self._place(index)], self._window_len)

    def _place(self, index: int) -> int:
        """Returns which of the epoch's windows has this index."""
        epoch, place = divmod(index, self._count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * _EPOCH_SEEDS + epoch)
            self._order = torch.randperm(self._count, generator=generator)
            self._offset = int(torch.randint(self._window_len, (1,), generator=generator))
            self._epoch = epoch
        return int(self._order[place])


class CorpusWindows(DocumentWindows):
    """Windows of the concatenated documents.

    Every epoch uses another offset; a window past the end wraps around to the beginning.
    """

    def __init__(self, documents: Documents, window_len: int, seed: int) -> None:
        count = max(1, documents.num_tokens // window_len)
        super().__init__(documents, window_len, seed, count)

    def window(self, index: int) -> tuple[Tensor, Tensor]:  # [window_len] each
        documents, length = self._documents, self._window_len
        if documents.num_tokens < length:
            return padded(documents.tokens, documents.weights, length)
        start = self._place(index) * length + self._offset
        rows = torch.arange(start, start + length) % documents.num_tokens
        return documents.tokens[rows], documents.weights[rows]


def in_order(documents: Documents, window_len: int, most: int) -> list[tuple[Tensor, Tensor]]:
    """Returns evenly spaced windows of held-out text."""
    count = max(1, documents.num_tokens // window_len)
    kept = [count * index // min(most, count) for index in range(min(most, count))]
    parts = [slice(index * window_len, (index + 1) * window_len) for index in kept]
    return [padded(documents.tokens[at], documents.weights[at], window_len) for at in parts]


@dataclass(frozen=True, slots=True)
class Batches:
    """Windows per step: corpus text and a share `own_share` of text generated by the target."""

    corpus: CorpusWindows
    own: DocumentWindows | None
    own_share: float
    size: int  # windows per step

    def at(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Returns all windows of a step, over all processes."""
        share = 0.0 if self.own is None else self.own_share
        first, last = (int(self.size * count * share + 1e-9) for count in (step, step + 1))
        drawn = [self.own.window(index) for index in range(first, last)] if self.own else []
        rest = range(self.size * step - first, self.size * (step + 1) - last)
        return drawn + [self.corpus.window(index) for index in rest]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Windows of one forward, and their share of the step's weight."""

    windows: Windows
    share: float
    first: int  # index of the first window in the step


def micro_batches(
    rows: Sequence[tuple[Tensor, Tensor]],
    micro_batch: int,
    rank: int,
    num_ranks: int,
    device: torch.device,
) -> list[MicroBatch]:
    """Returns a rank's micro-batches of a step; the shares of all ranks sum to 1."""
    total = max(sum(float(weights.sum()) for _, weights in rows), 1e-6)
    begin, end = len(rows) * rank // num_ranks, len(rows) * (rank + 1) // num_ranks
    found = []
    for first in range(begin, end, micro_batch):
        some = rows[first : min(end, first + micro_batch)]
        tokens = torch.stack([tokens for tokens, _ in some]).long()
        weights = torch.stack([weights for _, weights in some])
        share = float(weights.sum()) / total
        found.append(MicroBatch(Windows(tokens.to(device), weights.to(device)), share, first))
    return found


# -- text generated by the target

BATCH = 64  # texts generated at once
_LONGEST_PROMPT = 0.75  # of a window
_PROMPT = 0.25  # of a window, if the text does not mark the beginning of an answer


def prompts_of(documents: Documents, count: int, window_len: int, seed: int) -> list[Tensor]:
    """Takes prompts from documents, in a seeded order.

    An answer begins where a document's weights become positive; the text before it is the prompt.
    Documents without such a place are cut at random.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(documents), generator=generator)
    lengths = documents.starts.diff()[order].double()
    # Documents are drawn in proportion to their length, so that file boundaries have no effect.
    edges = lengths.cumsum(0)
    places = (torch.arange(count) + 0.5) / count * edges[-1]
    prompts = []
    for document in order[torch.searchsorted(edges, places).clamp(max=len(order) - 1)].tolist():
        tokens, weights = documents[document]
        counted = weights > 0
        begins = (counted[1:] & ~counted[:-1]).nonzero().flatten() + 1
        draw = torch.rand((), generator=generator).item()
        if len(begins):
            end = int(begins[int(draw * len(begins))])
            start = max(0, end - max(1, int(_LONGEST_PROMPT * window_len)))
        else:
            size = max(1, int(_PROMPT * window_len))
            start = int(draw * max(1, len(tokens) - size))
            end = min(len(tokens), start + size)
        prompts.append(tokens[start:end].long())
    return prompts


class Writer:
    """Generates continuations of prompts with the target.

    Args:
        temperature: 0 is greedy.
    """

    def __init__(
        self, target: FrozenTarget, window_len: int, temperature: float, seed: int
    ) -> None:
        self._target = target
        self._window_len = window_len
        self._seed = seed
        eos = target.model.generation_config.eos_token_id
        eos = target.config.eos_token_id if eos is None else eos
        self._eos: set[int] = {eos} if isinstance(eos, int) else set(eos or ())
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self._options = {"eos_token_id": sorted(self._eos) or None, "pad_token_id": 0, **sampling}

    @torch.no_grad()
    def write(self, prompts: list[Tensor], number: int) -> list[tuple[list[int], list[int]]]:
        """Generates batch `number`; returns tokens and weights, which are 0 for the prompt."""
        torch.manual_seed((self._seed << 20) + number)
        device = self._target.facts.device
        ids, mask = (
            pad_sequence(parts, batch_first=True, padding_side="left")
            for parts in (prompts, [torch.ones_like(prompt) for prompt in prompts])
        )
        most = self._window_len - min(len(prompt) for prompt in prompts)
        config = GenerationConfig(max_new_tokens=max(1, most), **self._options)
        out = self._target.model.generate(
            ids.to(device), attention_mask=mask.to(device), generation_config=config
        )
        texts = []
        for prompt, written in zip(prompts, out[:, ids.shape[1] :].tolist(), strict=True):
            room = self._window_len - len(prompt)
            end = next((at + 1 for at, token in enumerate(written) if token in self._eos), room)
            answer = written[: min(end, room)]
            texts.append(([*prompt.tolist(), *answer], [0] * len(prompt) + [1] * len(answer)))
        return texts


def write_all(
    writer: Writer,
    prompts: list[Tensor],
    path: Path,
    ranks: Ranks,
    stop: Stop,
    advance: Callable[[int], None],
) -> Documents | None:
    """Generates the batches that `path` lacks, shared among processes, and reads all texts.

    Returns:
        All texts; None if the run was asked to stop earlier, which keeps the written batches.

    Raises:
        ConfigError: the file belongs to another run.
    """
    num_batches = -(-len(prompts) // BATCH)
    done = ranks.gather(_kept(path, len(prompts)) if ranks.first else 0)[0]
    advance(min(done * BATCH, len(prompts)))
    while done < num_batches:
        if any(ranks.gather(stop.asked)):
            return None
        mine = done + ranks.rank
        some = prompts[mine * BATCH : (mine + 1) * BATCH]
        for texts in ranks.gather(writer.write(some, mine) if some else []):
            if ranks.first:
                with path.open("a", encoding="utf-8") as file:
                    for tokens, weights in texts:
                        file.write(json.dumps({"tokens": tokens, "weights": weights}) + "\n")
            advance(len(texts))
        done += ranks.num_ranks
    ranks.wait()
    with path.open(encoding="utf-8") as file:
        rows = (json.loads(line) for line in file)
        documents = pack((row["tokens"], row["weights"]) for row in rows)
    if len(documents) != len(prompts):
        raise ConfigError.at(
            "generate",
            f"{path} holds {len(documents)} texts, this run has {len(prompts)}; give "
            "another output folder",
        )
    return documents


def _kept(path: Path, wanted: int) -> int:
    """Returns the number of complete batches in the file; removes an incomplete one."""
    if not path.is_file():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    whole = sum(line.endswith(b"\n") for line in lines)
    if whole == len(lines) == wanted:
        return -(-wanted // BATCH)
    done = whole // BATCH
    path.write_bytes(b"".join(lines[: done * BATCH]))
    return done
