"""A tokenizer's vocabulary, its fingerprint, and the differences between two vocabularies.

N-gram tables and pools, which outlive an engine or are shared by several, store the fingerprint;
a draft model's vocabulary is compared with the target's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError

FIELD = "tokenizer"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id."""

    base: dict[int, str]
    added: dict[int, str]  # special and other added tokens; they override the base

    @property
    def tokens(self) -> dict[int, str]:
        return self.base | self.added


def read(tokenizer: Path, needed_by: str = "the vocabulary's check") -> Vocabulary:
    """Reads the vocabulary of a folder's `tokenizer.json`: a mapping to ids or a list of pieces.

    Raises:
        CheckpointError: the file is missing or malformed.
    """
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        pieces = data["model"]["vocab"]
        if isinstance(pieces, list):  # of (token, score)
            base = {index: token for index, (token, _) in enumerate(pieces)}
        else:
            base = {index: token for token, index in sorted(pieces.items())}
        added = {each["id"]: each["content"] for each in data.get("added_tokens") or []}
        for index, token in [*base.items(), *added.items()]:
            if type(index) is not int or type(token) is not str:
                raise TypeError(f"{token!r} with the id {index!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError.at(
            FIELD,
            f"{path} is not a readable tokenizer.json ({type(error).__name__}); "
            f"{needed_by} needs one to compare token ids",
        ) from None
    return Vocabulary(base, added)


def fingerprint(
    tokenizer: Path, vocab_size: int | None = None, *, needed_by: str = "an n-gram table"
) -> str:
    """A hash of the tokens by id and of `vocab_size`, if given.

    Raises:
        CheckpointError: as `read`.
    """
    tokens = sorted(read(tokenizer, needed_by).tokens.items())
    text = json.dumps([vocab_size, tokens], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def differing(ours: Vocabulary, theirs: Vocabulary) -> list[int]:
    """Ids that stand for different tokens, ascending.

    An added token that the other vocabulary lacks is no difference: the other never emits it.
    """

    def is_extra(index: int, vocabulary: Vocabulary, known: set[str]) -> bool:
        return index in vocabulary.added and vocabulary.added[index] not in known

    one, other = ours.tokens, theirs.tokens
    texts, other_texts = set(one.values()), set(other.values())
    return sorted(
        index
        for index in one.keys() | other.keys()
        if one.get(index) != other.get(index)
        and not (index not in other and is_extra(index, ours, other_texts))
        and not (index not in one and is_extra(index, theirs, texts))
    )
