"""Constraints of one engine: grammars are compiled once each, off the loop, and kept for reuse.

`Compiler.open` gives every request a `Constraint` of its own, advanced by the tokens that it has
emitted already. Nothing else of a constraint is state, so that a replay, or a move to another
replica, rebuilds it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ...config import EngineConfig
from ...errors import CheckpointError, InvalidRequestError
from ...scheduler.sampling import SamplingParams
from ...scheduler.types import IntArray, Request
from ..encoder import load_tokenizer
from .constraint import Constraint, ConstraintError, DeadEndError
from .grammar import grammar_of, invalid, parser_limits
from .words import Both, Spellings, TokenConstraint, spellings

_MAX_KEPT: Final = 64  # compiled grammars


class Compiler:
    """Compiles for one tokenizer; called from any thread.

    Args:
        config: names the tokenizer, which is loaded with the first constrained request.
        vocab_size: of the target's logits.
        eos_token_ids: the tokens that end a text.
    """

    def __init__(
        self, config: EngineConfig, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._plain: Any = None  # the tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._spelled: tuple[tuple[str, ...], Spellings] = ((), ())  # the last request's bad words
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()  # fresh; least recent first
        self._lock = threading.Lock()

    def open(self, request: Request) -> Constraint | None:
        """The constraint of a request, after what it has emitted; None: it has none.

        Raises:
            InvalidRequestError: the grammar does not compile with this tokenizer, or no token may
                come first.
        """
        wanted = request.sampling.structured_outputs
        field = constraint_field(request.sampling)
        if not field:
            return None
        try:
            tokens = self._token_constraint(request)
            constraint: Constraint | None = tokens
            if wanted is not None:
                grammar = GrammarConstraint(self._compiled(grammar_of(wanted)), self._vocab_size)
                constraint = grammar if tokens is None else Both(grammar, tokens)
            assert constraint is not None, request.sampling
            for token in request.emitted.tolist():
                constraint.consume(token)
            constraint.allowed()
        except InvalidRequestError:
            raise
        except (ValueError, ConstraintError, CheckpointError) as error:
            raise invalid(field, str(error)) from None
        return constraint

    def _token_constraint(self, request: Request) -> TokenConstraint | None:
        sampling = request.sampling
        if sampling.allowed_token_ids is None and not sampling.bad_words:
            return None
        with self._lock:
            if sampling.bad_words != self._spelled[0]:
                found = spellings(self._plain_tokenizer(), sampling.bad_words, self._vocab_size)
                self._spelled = sampling.bad_words, found
            bad = self._spelled[1]
        ends = (*request.eos_token_ids, *sampling.stop_token_ids)
        return TokenConstraint(
            self._vocab_size, sampling.allowed_token_ids, bad, ends, sampling.min_tokens
        )

    def _compiled(self, grammar: str) -> LLMatcher:
        with self._lock:
            matcher = self._matchers.get(grammar)
            if matcher is None:
                matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=parser_limits())
                if matcher.is_error():
                    raise ValueError(matcher.get_error())
                self._matchers[grammar] = matcher
            self._matchers.move_to_end(grammar)
            if len(self._matchers) > _MAX_KEPT:
                self._matchers.popitem(last=False)
            return matcher.deep_copy()

    def _tokens(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance.hf import from_tokenizer

            tokenizer = self._plain_tokenizer()
            size = max(self._vocab_size, len(tokenizer))
            self._tokenizer = from_tokenizer(
                tokenizer, n_vocab=size, eos_token=list(self._eos_token_ids)
            )
        return self._tokenizer

    def _plain_tokenizer(self) -> Any:
        if self._plain is None:
            self._plain = load_tokenizer(self._config)
        return self._plain


def constraint_field(sampling: SamplingParams) -> str:
    """The field that constrains the text, for messages; empty: none does."""
    if sampling.bad_words:
        return "bad_words"
    if sampling.allowed_token_ids is not None:
        return "allowed_token_ids"
    wanted = sampling.structured_outputs
    return "" if wanted is None else f"structured_outputs.{wanted.kind}"


class GrammarConstraint:
    """A `Constraint` on the library's matcher."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._last_word = np.int32(-1)  # bits of the last word that are tokens
        if vocab_size % 32:
            self._last_word = np.int32((1 << vocab_size % 32) - 1)

    def allowed(self) -> IntArray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        self._check()
        bits = bits[: self._num_words].copy()
        bits[-1] &= self._last_word
        if not bits.any():
            raise DeadEndError("no token of the vocabulary can continue the text")
        return bits

    def forced(self) -> list[int]:
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return list(tokens)

    def consume(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._check()
            raise ConstraintError(f"token {token} does not match")

    def rewind(self, num_tokens: int) -> None:
        if num_tokens and not self._matcher.rollback(num_tokens):
            self._check()
            raise ConstraintError(f"{num_tokens} tokens cannot be taken back")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(self._matcher.get_error())
