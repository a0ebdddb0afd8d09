"""Prompts for a server under load, from files and at random, each with the tokens of its answer.

Formats, names and defaults are those of `vllm bench serve` where it has them: `random`,
`sharegpt`, `custom` and `spec_bench`; `humaneval` is OpenAI's file of programming tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import httpx
import numpy as np

from ...errors import ConfigError
from ..suite.workloads import (
    TextCutter,
    is_json_lines,
    json_record,
    read_lines,
    read_text,
    string_of,
)

_FIELD = "dataset_path"
_TRIES = 8  # to make a text of a number of tokens
_OUTPUT_LEN = 256  # of a prompt that says nothing about its answer
# Of conversations: shorter and longer ones are left out.
_LEAST_TOKENS, _MOST_PROMPT_TOKENS, _MOST_TOKENS = 4, 1024, 2048
_USERS = ("human", "user")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    prompt: str
    output_len: int  # tokens that are asked for


class Tokens(Protocol):
    """A model's tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids, without those that are added before a prompt."""
        ...

    def decode(self, token_ids: list[int]) -> str: ...


class FolderTokens:
    """The tokenizer of a checkpoint.

    Raises:
        ConfigError: there is none in `folder`.
    """

    def __init__(self, folder: str, trust_remote_code: bool = False) -> None:
        self._tokenizer = TextCutter(folder, trust_remote_code).tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


class ServerTokens:
    """The tokenizer behind a server's `/tokenize` and `/detokenize`, as vLLM has them."""

    def __init__(self, http: httpx.Client, model: str, first: list[int]) -> None:
        self._http = http
        self._model = model
        self._first = first  # what is added before a prompt

    @classmethod
    def find(cls, http: httpx.Client, model: str) -> ServerTokens | None:
        """None where the server has no such paths."""
        try:
            found = cls(http, model, [])
            found._first = found.encode("")
            found.decode(found.encode("a"))
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None
        return found

    def encode(self, text: str) -> list[int]:
        token_ids = list(self._post("/tokenize", prompt=text)["tokens"])
        return token_ids[len(self._first) :]

    def decode(self, token_ids: list[int]) -> str:
        return str(self._post("/detokenize", tokens=token_ids)["prompt"])

    def _post(self, path: str, **body: Any) -> Any:
        response = self._http.post(path, json={"model": self._model, **body})
        return response.raise_for_status().json()


@dataclass(frozen=True)
class Dataset:
    """What prompts are made from."""

    name: str
    path: Path | None = None
    num_prompts: int = 1000
    seed: int = 0
    output_len: int | None = None  # of every answer; None: as the dataset has it
    shuffle: bool = True
    oversample: bool = True  # prompts are repeated where there are fewer than `num_prompts`
    category: str | None = None  # of spec_bench
    input_len: int = 1024  # of random prompts
    random_output_len: int = 128
    range_ratio: float = 0.0  # lengths are from (1 - ratio) to (1 + ratio) times the given ones
    prefix_len: int = 0  # tokens that all random prompts begin with


@dataclass(frozen=True)
class Loaded:
    """Prompts, and what a reader of the results should know of them."""

    samples: list[Sample]
    notes: tuple[str, ...] = ()


def load_dataset(dataset: Dataset, tokens: Tokens | None) -> Loaded:
    """The requests, at most `num_prompts`, the same ones for a seed.

    Raises:
        ConfigError: no such format, a file is missing or malformed (names the line), or there is
            no tokenizer where one is needed.
    """
    read = FORMATS.get(dataset.name)
    if read is None:
        raise ConfigError.at("dataset_name", f"{dataset.name!r} is none of {', '.join(FORMATS)}")
    if (dataset.path is None) != (dataset.name == "random"):
        reason = "needed" if dataset.path is None else "not read"
        raise ConfigError.at(_FIELD, f"{reason} with --dataset-name {dataset.name}")
    samples = read(dataset, tokens)
    if not samples:
        reason = f"{dataset.path} has no prompt that can be used"
        if dataset.name == "sharegpt":
            reason += (
                f"; as with vLLM, prompts and answers of fewer than {_LEAST_TOKENS} tokens are "
                f"left out, prompts of more than {_MOST_PROMPT_TOKENS}, and what is more than "
                f"{_MOST_TOKENS} together"
            )
        raise ConfigError.at(_FIELD, reason)
    if len(samples) >= dataset.num_prompts:
        return Loaded(samples[: dataset.num_prompts], _notes(dataset, tokens))
    if not dataset.oversample:
        note = f"The dataset has {len(samples)} prompts, not {dataset.num_prompts}."
        return Loaded(samples, (note,))
    note = (
        f"The dataset has {len(samples)} prompts; they are repeated up to {dataset.num_prompts}, "
        "so caches may have seen them."
    )
    repeated = [samples[index % len(samples)] for index in range(dataset.num_prompts)]
    return Loaded(repeated, (note,))


def _notes(dataset: Dataset, tokens: Tokens | None) -> tuple[str, ...]:
    if dataset.name == "random" and tokens is None:
        return ("Lengths of prompts are words: neither --tokenizer nor the server counts tokens.",)
    return ()


def _random(dataset: Dataset, tokens: Tokens | None) -> list[Sample]:
    rng = np.random.default_rng(dataset.seed)
    prefix = _text(rng, "", dataset.prefix_len, tokens)
    samples = []
    for _ in range(dataset.num_prompts):
        num_tokens = dataset.prefix_len + _around(rng, dataset.input_len, dataset.range_ratio)
        output_len = dataset.output_len
        if output_len is None:
            output_len = _around(rng, dataset.random_output_len, dataset.range_ratio)
        text = _text(rng, prefix, num_tokens, tokens)
        samples.append(Sample(text, output_len))
    return samples


def _around(rng: np.random.Generator, length: int, ratio: float) -> int:
    """A length at random, at least 1."""
    low, high = int(length * (1 - ratio)), int(length * (1 + ratio))
    return max(int(rng.integers(low, high + 1)), 1)


def _text(rng: np.random.Generator, prefix: str, num_tokens: int, tokens: Tokens | None) -> str:
    """Words of random letters after `prefix`, together `num_tokens` tokens.

    One more or less where no cut gives the number; words where there is no tokenizer.
    """
    lengths = rng.integers(2, 8, num_tokens)
    letters = rng.integers(ord("a"), ord("z") + 1, int(lengths.sum()), dtype=np.uint8)
    letters_text, ends = letters.tobytes().decode("ascii"), np.cumsum(lengths).tolist()
    words = [letters_text[begin:end] for begin, end in zip([0, *ends], ends)]
    before = prefix.split(" ") if prefix else []
    if tokens is None:
        return " ".join([*before, *words][:num_tokens])
    token_ids = tokens.encode(" ".join([*before, *words]))  # a word has at least one
    text, length = "", num_tokens
    for _ in range(_TRIES):
        text = tokens.decode(token_ids[:length])
        off = len(tokens.encode(text)) - num_tokens
        if off == 0:
            break
        length = max(length - off, 1)
    return text


def _conversations(dataset: Dataset, tokens: Tokens | None) -> list[Sample]:
    """The first question of each conversation, with an answer as long as the recorded one."""
    assert dataset.path is not None, dataset
    if tokens is None and dataset.output_len is None:
        raise ConfigError.at(
            "tokenizer",
            "needed for lengths of answers, since the server counts no tokens; "
            "or give --sharegpt-output-len",
        )
    samples: list[Sample] = []
    for place, entry in _shuffled(list(_entries(dataset.path)), dataset):
        found = _first_turn(entry, f"{dataset.path}, {place}")
        if found is None:
            continue
        question, answer = found
        output_len = dataset.output_len
        if tokens is not None:
            num_prompt_tokens = len(tokens.encode(question))
            output_len = output_len or len(tokens.encode(answer))
            if min(num_prompt_tokens, output_len) < _LEAST_TOKENS:
                continue
            if num_prompt_tokens > _MOST_PROMPT_TOKENS:
                continue
            if num_prompt_tokens + output_len > _MOST_TOKENS:
                continue
        assert output_len is not None, dataset
        samples.append(Sample(question, output_len))
        if len(samples) == dataset.num_prompts:
            break
    return samples


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """The conversations of a JSON list, or of JSON lines, each with its place."""
    if is_json_lines(path):
        for number, line in read_lines(path, _FIELD):
            yield f"line {number}", json_record(path, number, line, _FIELD)
        return
    try:
        data = json.loads(read_text(path, _FIELD))
    except json.JSONDecodeError as error:
        reason = f"{path}, line {error.lineno}: not JSON: {error.msg}"
        raise ConfigError.at(_FIELD, reason) from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits
        raise ConfigError.at(_FIELD, f"{path}: not JSON: {error}") from None
    if not isinstance(data, list):
        raise ConfigError.at(_FIELD, f"{path}: expected a list of conversations")
    for index, entry in enumerate(data):
        yield f"entry {index}", entry


def _first_turn(entry: Any, place: str) -> tuple[str, str] | None:
    """A user's message and the one after it; None of a conversation without these.

    Raises:
        ConfigError: it is no conversation.
    """
    turns = entry.get("conversations", entry.get("messages")) if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ConfigError.at(_FIELD, f"{place}: no list `conversations`")
    texts = [turn.get("value") or turn.get("content") for turn in turns]
    for index, turn in enumerate(turns[:-1]):
        speaker = turn.get("from") or turn.get("role")
        both = texts[index], texts[index + 1]
        if speaker in _USERS:
            return both if all(isinstance(text, str) for text in both) else None
    return None


def _lines(dataset: Dataset, tokens: Tokens | None) -> list[Sample]:
    """`prompt` or `text` of JSON lines, with `output_tokens` if it is there; or lines of text."""
    assert dataset.path is not None, dataset
    samples = []
    for number, line in _shuffled(read_lines(dataset.path, _FIELD), dataset):
        record: dict[str, Any] = {"prompt": line}
        if is_json_lines(dataset.path):
            record = json_record(dataset.path, number, line, _FIELD)
        prompt = string_of(record, ("prompt", "text"), dataset.path, number, _FIELD)
        wanted = record.get("output_tokens", _OUTPUT_LEN)
        if type(wanted) is not int or wanted < 1:
            reason = f"{dataset.path}, line {number}: `output_tokens`: at least 1, got {wanted!r}"
            raise ConfigError.at(_FIELD, reason)
        samples.append(Sample(prompt, dataset.output_len or wanted))
    return samples


def _spec_bench(dataset: Dataset, tokens: Tokens | None) -> list[Sample]:
    """The first of `turns`, of all categories or of one."""
    assert dataset.path is not None, dataset
    samples, categories = [], set()
    for number, line in _shuffled(read_lines(dataset.path, _FIELD), dataset):
        record = json_record(dataset.path, number, line, _FIELD)
        turns = record.get("turns")
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ConfigError.at(_FIELD, f"{dataset.path}, line {number}: no `turns`")
        categories.add(str(record.get("category")))
        if dataset.category in (None, record.get("category")):
            samples.append(Sample(turns[0], dataset.output_len or _OUTPUT_LEN))
    if not samples:
        there = ", ".join(sorted(categories))
        raise ConfigError.at("spec_bench_category", f"{dataset.category!r} is none of {there}")
    return samples


def _shuffled(rows: list[Any], dataset: Dataset) -> Iterable[Any]:
    if not dataset.shuffle:
        return rows
    return [rows[index] for index in np.random.default_rng(dataset.seed).permutation(len(rows))]


FORMATS: Mapping[str, Callable[[Dataset, Tokens | None], list[Sample]]] = MappingProxyType(
    {
        "random": _random,
        "sharegpt": _conversations,
        "custom": _lines,
        "humaneval": _lines,
        "spec_bench": _spec_bench,
    }
)
