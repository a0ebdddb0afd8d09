"""The tokenizer of a configuration, and text in its tokens.

Called by `frontend.py`; the grammar compiler and the commands load a tokenizer alone.
"""

from __future__ import annotations

from typing import Any

from ..config import EngineConfig
from ..config.trust import reason
from ..errors import CheckpointError, InvalidRequestError, PromptTooLongError
from .text_bound import text_bound

# A list of more tokens than this above the context is not even made.
MAX_KEPT_TOKENS = 2**16


class Encoder:
    """Text in tokens, as long as they fit into the context.

    Args:
        tokenizer: what `load_tokenizer` returns.
        max_model_len: tokens of the context.
    """

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._bound = text_bound(tokenizer)
        self._backend = _plain_backend(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
        """`text` in tokens.

        Raises:
            PromptTooLongError: it cannot fit, which is found before it is encoded.
            InvalidRequestError: it is not text.
        """
        if self._bound is not None:
            at_least = self._bound.min_tokens(text)
            if at_least >= self._max_model_len:
                raise too_long(f"at least {at_least}", self._max_model_len, field)
        check_text(field, text)
        if self._backend is None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return ids
        # Of the tokenizers' calls this one lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if len(encoding) > MAX_KEPT_TOKENS + self._max_model_len:
            raise too_long(str(len(encoding)), self._max_model_len, field)
        fast_ids: list[int] = encoding.ids
        return fast_ids


def too_long(how_many: str, max_model_len: int, field: str) -> PromptTooLongError:
    """A prompt that leaves no room for output."""
    return PromptTooLongError(
        f"{field}: This model's maximum context length is {max_model_len} tokens. "
        f"However, your prompt has {how_many} tokens, which leaves no room for output.",
        field=field,
    )


def check_text(field: str, text: str) -> None:
    """Refuses a lone surrogate (JSON allows "\ud800"), which no tokenizer and no codec takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{field}: character {error.start} is half of a surrogate pair, which is not text",
            field=field,
        ) from None


def load_tokenizer(config: EngineConfig) -> Any:
    """The tokenizer of a configuration.

    Raises:
        CheckpointError: it cannot be loaded from local files.
    """
    from transformers import AutoTokenizer

    path = config.tokenizer or config.model
    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = reason(error, path).splitlines()[0]
        raise CheckpointError(
            f"tokenizer: none can be loaded from {path!r}: {why}", field="tokenizer"
        ) from None


def _plain_backend(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` below, where transformers adds nothing to its encoding."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return None
    for name in ("encode", "_encode_plus"):
        if getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name):
            return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend
