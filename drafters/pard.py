"""PARD: a small model of the same vocabulary drafts a chain in one forward (arXiv:2504.18583).

Its input is what the target emitted and a mask token for every drafted token but the first; the
rows of the last emitted token and of the masks give the chain. No row depends on a drafted token,
so each is drawn from a distribution that is known before. `draft_target.py` does the rest: the
rows of masks are no part of the model's cache, and an accepted token is computed in the next round.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..config import PARDConfig
from ..errors import CheckpointError, ConfigError
from .draft_target import DraftTarget
from .protocol import DraftModel

MASK_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")
"""Keys of `config.json` that name the mask token, by different trainers."""
_FIELD = "speculative_config."


class PARD(DraftTarget):
    """`DraftTarget` with masks."""

    name = "pard"

    def __init__(self, config: PARDConfig, model: DraftModel) -> None:
        self.mask_token = mask_token(config, model.vocab_size)
        super().__init__(config, model)


def mask_token(config: PARDConfig, vocab_size: int) -> int:
    """The token that stands for those to be drafted.

    Raises:
        CheckpointError: the checkpoint names none, or one outside the vocabulary, or is PARD-2's.
        ConfigError: the section names one outside the vocabulary.
    """
    folder = Path(config.speculative_model)
    field = f"{_FIELD}{'drafter_group' if config.drafter_group else 'speculative_model'}"
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
                f"{_FIELD}mask_token_id",
                f"{token} is outside the draft model's vocabulary of {vocab_size} tokens",
            )
        return token
    stored = _stored(folder, field)
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
    stored = _stored(folder, f"{_FIELD}speculative_model")
    for section in ("transformer_layer_config", "dflash_config"):  # of block drafters
        inner = stored.get(section)
        stored |= inner if isinstance(inner, dict) else {}
    size = stored.get("vocab_size")
    named = [stored.get(key) for key in (*MASK_KEYS, "pad_token_id")]
    last = [size - 1] if type(size) is int else []
    return tuple(dict.fromkeys(each for each in (*named, *last) if type(each) is int))


def _stored(folder: Path, field: str) -> dict[str, object]:
    """The checkpoint's `config.json`."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError.at(
            field, f"config.json of {str(folder)!r} cannot be read: {error}"
        ) from None
    return data if isinstance(data, dict) else {}
