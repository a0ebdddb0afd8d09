"""A tokenizer's vocabulary, its fingerprint, and the differences between two vocabularies.

N-gram tables and pools, which outlive an engine or are shared by several, store the fingerprint. A
draft model's vocabulary is compared with the target's. A drafter that drafts in one forward reads a
mask token in place of every token that is not drafted yet.

A draft model with another vocabulary drafts the tokens whose text both have (token-level
intersection: Timor et al. 2025, arXiv:2502.05202). `translation` finds them, and the tokens that
the draft model reads for the others: one for each of the target's, so that positions are equal.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..config import PARDConfig
from ..errors import CheckpointError, ConfigError

FIELD = "tokenizer"
MASK_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")
"""Keys of `config.json` that name the mask token, by trainer."""
PROJECTION_FILE = "warp_model"
"""Name without suffix of the file with which a draft model reads the target's states (PARD-2)."""
_SECTION = "speculative_config."
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


_ROLES = ("eos_token", "bos_token")  # the end comes first: a token that is both is drafted


def _byte_level() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {chr(byte): byte for byte in printable}
    return shown | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_LEVEL: Mapping[str, int] = MappingProxyType(_byte_level())
"""The bytes that the characters of byte-level BPE stand for."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id."""

    base: dict[int, str]
    added: dict[int, str]  # special and other added tokens; they override the base
    space: str = ""  # stands for a space in the base; empty: a space
    is_byte_level: bool = False  # a character of the base stands for a byte, as in GPT-2
    has_bytes: bool = False  # a base token such as <0xE2> is a byte
    unknown: str = ""  # stands for text without tokens; empty: there is none

    @property
    def tokens(self) -> dict[int, str]:
        return self.base | self.added

    def bytes_of(self, index: int) -> bytes:
        """Returns the UTF-8 text of a token, which may be a part of a character."""
        token = self.added.get(index)
        if token is None:
            token = self.base[index]
            if self.has_bytes and (byte := _BYTE_TOKEN.fullmatch(token)):
                return bytes([int(byte[1], 16)])
            if self.is_byte_level and BYTE_LEVEL.keys() >= set(token):
                return bytes(map(BYTE_LEVEL.__getitem__, token))
            if self.space:
                token = token.replace(self.space, " ")
        return token.encode("utf-8", "surrogatepass")


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
        found = Vocabulary(base, added, **_form(data))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError.at(
            FIELD,
            f"{path} is not a readable tokenizer.json ({type(error).__name__}); "
            f"{needed_by} needs one to compare token ids",
        ) from None
    return found


def _form(data: Any) -> dict[str, Any]:
    """Returns how a `tokenizer.json` encodes the text of its tokens, as fields of `Vocabulary`."""
    parts = [*_steps(data.get("pre_tokenizer")), *_steps(data.get("decoder"))]
    kinds, model, spaces = {each["type"] for each in parts}, data["model"], [""]
    for each in parts:
        if each["type"] == "Metaspace":
            spaces.append(each["replacement"])
        elif each["type"] == "Replace" and each["content"] == " ":
            spaces.append(each["pattern"].get("String", ""))
    unknown = model.get("unk_token")
    if unknown is None and model.get("unk_id") is not None:
        unknown = model["vocab"][model["unk_id"]][0]
    return {
        "space": max(spaces),
        "is_byte_level": "ByteLevel" in kinds,
        "has_bytes": "ByteFallback" in kinds or bool(model.get("byte_fallback")),
        "unknown": unknown or "",
    }


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yields a pre-tokenizer or decoder and its parts."""
    if part is not None:
        yield part
        for inner in part.get("pretokenizers") or part.get("decoders") or ():
            yield from _steps(inner)


def fingerprint(
    tokenizer: Path, vocab_size: int | None = None, *, needed_by: str = "an n-gram table"
) -> str:
    """Returns a hash of the tokens by id and of `vocab_size`, if given.

    Raises:
        CheckpointError: as in `read`.
    """
    tokens = sorted(read(tokenizer, needed_by).tokens.items())
    text = json.dumps([vocab_size, tokens], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def differing(ours: Vocabulary, theirs: Vocabulary) -> list[int]:
    """Returns ids that stand for different tokens, ascending.

    An added token that the other vocabulary lacks is not a difference: the other never emits it.
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


@dataclass(frozen=True, slots=True)
class Translation:
    """Maps the target's tokens to those of a draft model with another vocabulary.

    A token maps to the draft model's token with the same text; a token that begins or ends a text
    maps to the token with the same role. Otherwise, the draft model reads the last token into which
    its tokenizer splits the text, since the next token follows that one. A part of a character is
    read as its last byte. No two tokens share a drafted one.
    """

    table: (
        bytes  # int32 [target_vocab], the draft model's tokens; -1 - token: only read, not drafted
    )
    num_shared: int
    sizes: tuple[int, int]  # of the target's and the draft model's vocabularies

    @property
    def is_poor(self) -> bool:
        """Whether so few tokens are shared that drafts are seldom accepted."""
        return 2 * self.num_shared < min(self.sizes)

    def __str__(self) -> str:
        target, draft = self.sizes
        found = f"{self.num_shared:,} tokens are shared, of the target's {target:,} and {draft:,}"
        few = "; these are few, so that drafts are seldom accepted" if self.is_poor else ""
        return f"another one: {found}{few}"


def translation(
    target: Path,  # its tokenizer: a folder, or a `tokenizer.json`
    draft: Path,
    sizes: tuple[int, int],  # of the vocabularies of the target's and the draft model's logits
) -> Translation:
    """Returns the translation between two vocabularies.

    Raises:
        CheckpointError: as in `read`, or the draft model's tokenizer cannot split text.
    """
    files = [each / "tokenizer.json" if each.is_dir() else each for each in (target, draft)]
    stamps = [file.stat().st_mtime_ns if file.is_file() else 0 for file in files]
    return _translation(*files, *sizes, *stamps)


@lru_cache(maxsize=4)
def _translation(
    target: Path, draft: Path, target_size: int, draft_size: int, *stamps: int
) -> Translation:
    import numpy as np  # deferred, to keep the help of commands fast

    needed_by = f"{_SECTION}use_heterogeneous_vocab"
    ours, theirs = read(target, needed_by), read(draft, needed_by)
    by_text = _by_text(theirs, draft_size)
    found = np.full(target_size, -1, dtype=np.int32)
    for text, index in _by_text(ours, target_size).items():
        found[index] = by_text.get(text, -1)
    roles = [_roles(each, file) for each, file in ((ours, target), (theirs, draft))]
    used = set(found.tolist())
    for role in _ROLES:
        index, other = (each.get(role, -1) for each in roles)
        fits = 0 <= index < target_size and 0 <= other < draft_size
        if fits and found[index] < 0 and other not in used:
            found[index] = other
            used.add(other)
    ids = {token: index for index, token in theirs.tokens.items() if token}
    rest = ids.get(theirs.unknown, roles[1].get(_ROLES[0], 0))
    found[found < 0] = -1 - (rest if rest < draft_size else 0)
    left = [index for index in ours.tokens if index < target_size and found[index] < 0]
    for index, read_as in zip(left, _last_tokens(ours, left, by_text, draft), strict=True):
        if read_as is not None and read_as < draft_size:
            found[index] = -1 - read_as
    counts = [
        sum(index < size for index in vocabulary.tokens)
        for vocabulary, size in ((ours, target_size), (theirs, draft_size))
    ]
    return Translation(found.tobytes(), int((found >= 0).sum()), (counts[0], counts[1]))


def _by_text(vocabulary: Vocabulary, size: int) -> dict[bytes, int]:
    """Returns the token of every text; if there are several, the first, and bytes last."""
    found: dict[bytes, int] = {}
    of_bytes: dict[bytes, int] = {}
    for index, token in sorted(vocabulary.tokens.items()):
        if index < size and token:
            is_byte = vocabulary.has_bytes and _BYTE_TOKEN.fullmatch(token)
            (of_bytes if is_byte else found).setdefault(vocabulary.bytes_of(index), index)
    return of_bytes | found


def _roles(vocabulary: Vocabulary, file: Path) -> dict[str, int]:
    """Returns the tokens that begin and end a text, from `tokenizer_config.json` beside `file`."""
    path = file.parent / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        given = {role: data.get(role) for role in _ROLES}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError.at(FIELD, f"{path} cannot be read: {error}") from None
    ids = {token: index for index, token in vocabulary.tokens.items()}
    texts = {
        role: each.get("content") if isinstance(each, dict) else each
        for role, each in given.items()
    }
    return {role: ids[text] for role, text in texts.items() if text in ids}


def _last_tokens(
    vocabulary: Vocabulary, indices: list[int], by_text: Mapping[bytes, int], draft: Path
) -> list[int | None]:
    """Returns the last token into which a tokenizer splits each token's text; None if none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(draft))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        every = [vocabulary.bytes_of(index) for index in indices]
        texts = [each.decode("utf-8", "replace") for each in every]
        split = tokenizer.encode_batch(texts, add_special_tokens=False)
    except Exception as error:  # noqa: BLE001, it raises nothing narrower
        raise CheckpointError.at(FIELD, f"{draft} cannot split a text: {error}") from None
    found: list[int | None] = []
    for data, text, parts in zip(every, texts, split, strict=True):
        last = parts.ids[-1] if parts.ids else None
        found.append(by_text.get(data[-1:], last) if text.encode() != data else last)
    return found


def mask_token(config: PARDConfig, vocab_size: int) -> int:
    """Returns the token that stands for those to be drafted.

    Raises:
        CheckpointError: the checkpoint names none, or one outside the vocabulary, or is PARD-2's.
        ConfigError: the section names one outside the vocabulary.
    """
    folder = Path(config.speculative_model)
    field = f"{_SECTION}{'drafter_group' if config.drafter_group else 'speculative_model'}"
    if reads_states(folder):
        raise CheckpointError.at(
            field,
            f"{str(folder)!r} has a file {PROJECTION_FILE!r}, with which PARD-2 reads the target's "
            "states: use decoding_type PARD2",
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


def reads_states(folder: Path) -> bool:
    """Returns True if a draft model's folder has a projection of the target's states."""
    return any((folder / f"{PROJECTION_FILE}{end}").is_file() for end in (".safetensors", ".bin"))


def mask_candidates(folder: Path) -> tuple[int, ...]:
    """Returns tokens that may be a checkpoint's mask, from its `config.json`."""
    stored = _config_of(folder, f"{_SECTION}speculative_model")
    for section in ("transformer_layer_config", "dflash_config"):  # of block drafters
        inner = stored.get(section)
        stored |= inner if isinstance(inner, dict) else {}
    size = stored.get("vocab_size")
    named = [stored.get(key) for key in (*MASK_KEYS, "pad_token_id")]
    last = [size - 1] if type(size) is int else []
    return tuple(dict.fromkeys(each for each in (*named, *last) if type(each) is int))


def _config_of(folder: Path, field: str) -> dict[str, object]:
    """Returns the checkpoint's `config.json`."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError.at(
            field, f"config.json of {str(folder)!r} cannot be read: {error}"
        ) from None
    return data if isinstance(data, dict) else {}
