"""A tokenizer's vocabulary, its fingerprint, and the differences between two vocabularies.

N-gram tables and pools, which outlive an engine or are shared by several, store the fingerprint;
a draft model's vocabulary is compared with the target's. A drafter of a whole draft in one forward
reads a mask token in the place of every token that is not drafted yet.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ..config import PARDConfig
from ..errors import CheckpointError, ConfigError

FIELD = "tokenizer"
MASK_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")
"""Keys of `config.json` that name the mask token, by different trainers."""
_SECTION = "speculative_config."


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


def mask_token(config: PARDConfig, vocab_size: int) -> int:
    """The token that stands for those to be drafted.

    Raises:
        CheckpointError: the checkpoint names none, or one outside the vocabulary, or is PARD-2's.
        ConfigError: the section names one outside the vocabulary.
    """
    folder = Path(config.speculative_model)
    field = f"{_SECTION}{'drafter_group' if config.drafter_group else 'speculative_model'}"
    if (folder / "warp_model.bin").exists():
        raise CheckpointError.at(
            field,
            f"{str(folder)!r} has 'warp_model.bin', with which PARD-2 reads the target's features; "
            "that is not implemented: use a checkpoint of PARD",
        )
    token = config.mask_token_id
    if token is not None:
        if token >= vocab_size:
            raise ConfigError.at(
                f"{_SECTION}mask_token_id",
                f"{token} is outside the draft model's vocabulary of {vocab_size} tokens",
            )
        return token
    stored = _config_of(folder, field)
    key = next((key for key in MASK_KEYS if stored.get(key) is not None), None)
    if key is None:
        raise CheckpointError.at(
            field,
            f"config.json of {str(folder)!r} has no 'pard_token', so that it is no checkpoint of "
            "PARD; give its mask_token_id, or use decoding_type DraftTarget",
        )
    found = stored[key]
    if type(found) is not int or not 0 <= found < vocab_size:
        raise CheckpointError.at(
            field,
            f"{key!r} in config.json of {str(folder)!r} is {found!r}, expected a token of the "
            f"draft model's vocabulary of {vocab_size}",
        )
    return found


def mask_candidates(folder: Path) -> tuple[int, ...]:
    """Tokens that a checkpoint's mask may be, by what its `config.json` names."""
    stored = _config_of(folder, f"{_SECTION}speculative_model")
    for section in ("transformer_layer_config", "dflash_config"):  # of block drafters
        inner = stored.get(section)
        stored |= inner if isinstance(inner, dict) else {}
    size = stored.get("vocab_size")
    named = [stored.get(key) for key in (*MASK_KEYS, "pad_token_id")]
    last = [size - 1] if type(size) is int else []
    return tuple(dict.fromkeys(each for each in (*named, *last) if type(each) is int))


def _config_of(folder: Path, field: str) -> dict[str, object]:
    """The checkpoint's `config.json`."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError.at(
            field, f"config.json of {str(folder)!r} cannot be read: {error}"
        ) from None
    return data if isinstance(data, dict) else {}
