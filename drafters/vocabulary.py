"""What token ids mean: a tokenizer's vocabulary, its fingerprint, and where two of them differ.

Tables and pools of tokens, which outlive an engine or are shared by several, are bound to the
fingerprint; a draft model's vocabulary is compared with the target's.
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
    added: dict[int, str]  # special ones and others beside the base; they come first

    @property
    def tokens(self) -> dict[int, str]:
        return self.base | self.added


def read(tokenizer: Path, needed_by: str = "the vocabulary's check") -> Vocabulary:
    """The vocabulary in a folder's `tokenizer.json`, of any kind: named ids, or a list of pieces.

    Raises:
        CheckpointError: there is none, or it is not one.
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
        raise CheckpointError(
            f"{FIELD}: {path} is not a readable tokenizer.json ({type(error).__name__}); "
            f"{needed_by} needs one, to know what token ids mean",
            field=FIELD,
        ) from None
    return Vocabulary(base, added)


def fingerprint(
    tokenizer: Path, vocab_size: int | None = None, *, needed_by: str = "an n-gram table"
) -> str:
    """Equal where ids mean the same tokens, and the model, if it counts, has as many of them.

    Raises:
        CheckpointError: as `read`.
    """
    tokens = sorted(read(tokenizer, needed_by).tokens.items())
    text = json.dumps([vocab_size, tokens], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def differing(ours: Vocabulary, theirs: Vocabulary) -> list[int]:
    """Ids that do not mean the same, ascending.

    An added token that the other lacks altogether is no difference: the other never says it.
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
