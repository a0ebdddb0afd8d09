"""`Constraint`: the interface that drafting and verification use for grammars and other limits."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from ...config import EngineConfig
from ...errors import CheckpointError, InvalidRequestError
from ...scheduler.sampling import SamplingParams, ThinkingBudget
from ...scheduler.types import IntArray, Request
from ..checkpoints import load_tokenizer
from .grammar import grammar_of, invalid, parser_limits


class ConstraintError(Exception):
    """A constraint failed: the grammar became too complex, or a token does not match."""


class DeadEndError(ConstraintError):
    """No token may come next; the constraint can still be rewound."""


class Constraint(Protocol):
    """Tracks which tokens may follow those consumed so far; drafting sees only this interface."""

    def allowed(self) -> IntArray:  # [num_words], one bit per token
        """Returns the tokens that may come next, including end tokens if the text may end.

        Raises:
            DeadEndError: no token may come next.
            ConstraintError: the tokens cannot be computed.
        """

    def forced(self) -> list[int]:
        """Returns the tokens that must come next, regardless of the model."""

    def consume(self, token: int) -> None:
        """Advances by an allowed token, which is no end token; raises `ConstraintError`."""

    def rewind(self, num_tokens: int) -> None:
        """Undoes the last `num_tokens` tokens; raises `ConstraintError`."""

    def num_free(self) -> float:
        """Returns a lower bound of how many tokens are unrestricted next; infinity if all are."""


def packed(allowed: NDArray[np.bool_]) -> IntArray:  # [vocab] -> [num_words]
    """Packs one bit per token into 32-bit words."""
    padded = np.pad(allowed, (0, -len(allowed) % 32))
    words: IntArray = np.packbits(padded, bitorder="little").view("<i4").astype(np.int32)
    return words


def is_allowed(bits: IntArray, token: int) -> bool:
    """Returns True if the mask `bits` allows the token."""
    return token >> 5 < len(bits) and bool(int(bits[token >> 5]) >> (token & 31) & 1)


# Constraints on tokens instead of text: `allowed_token_ids` and `bad_words`, as in vLLM.

Spellings = tuple[tuple[int, ...], ...]


def spellings(tokenizer: Any, bad_words: Sequence[str], vocab_size: int) -> Spellings:
    """Returns the token sequences of `bad_words`, at the beginning of a text and after a space.

    As in vLLM, the sequence after a space is added only if it has as many tokens as the other and a
    different first token. Otherwise, a tokenizer that writes the space as a separate token would
    add sequences that begin with it.

    Raises:
        InvalidRequestError: a word has no token, or a token outside the model's vocabulary.
    """
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(bad_words):
        field = f"bad_words.{index}"
        text = word.lstrip()
        plain, spaced = (
            tuple(tokenizer.encode(prefix + text, add_special_tokens=False)) for prefix in ("", " ")
        )
        if not plain:
            raise InvalidRequestError.at(field, f"it has no token (got {word!r})")
        for token in (*plain, *spaced):
            if not 0 <= token < vocab_size:
                raise InvalidRequestError.at(
                    field, f"its token {token} is not in the vocabulary (0 to {vocab_size - 1})"
                )
        found[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found[spaced] = None
    return tuple(found)


class TokenConstraint:
    """A `Constraint` that forbids tokens, some of them only after certain other tokens.

    Args:
        allowed: the only tokens that may be emitted; None: all.
        bad: sequences that may not be emitted; tokens of the prompt do not count.
        ends: tokens that are also forbidden until `min_tokens` tokens are emitted.
    """

    def __init__(
        self,
        vocab_size: int,
        allowed: Sequence[int] | None,
        bad: Spellings,
        ends: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        may = np.full(vocab_size, allowed is None)
        if allowed is not None:
            may[list(allowed)] = True
        may[[sequence[0] for sequence in bad if len(sequence) == 1]] = False
        self._bits = packed(may)
        may[list(ends)] = False
        self._early_bits, self._min_tokens = packed(may), min_tokens
        # last token before the forbidden one -> (tokens before the forbidden one, forbidden token)
        self._bad: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for sequence in bad:
            if len(sequence) > 1:
                self._bad[sequence[-2]].append((list(sequence[:-1]), sequence[-1]))
        self._text: list[int] = []

    def allowed(self) -> IntArray:
        bits = self.bits()
        if not bits.any():
            raise DeadEndError("no token is left that may come next")
        return bits

    def bits(self) -> IntArray:  # [num_words]
        """Returns the mask, which may be empty."""
        text = self._text
        bits = (self._early_bits if len(text) < self._min_tokens else self._bits).copy()
        for before, token in self._bad.get(text[-1], ()) if text else ():
            if text[-len(before) :] == before:
                bits[token >> 5] &= np.int32(~_bit(token))
        return bits

    def forced(self) -> list[int]:
        return []

    def consume(self, token: int) -> None:
        if not is_allowed(self.bits(), token):
            raise ConstraintError(f"token {token} is forbidden here")
        self._text.append(token)

    def rewind(self, num_tokens: int) -> None:
        assert num_tokens <= len(self._text), (num_tokens, self._text)
        del self._text[len(self._text) - num_tokens :]

    def num_free(self) -> float:
        return 0


class ThinkingConstraint:
    """A `Constraint` that closes thinking after a number of tokens and restricts nothing else.

    The beginning and end of thinking are found in the text, as a parser finds them, because a model
    may write the marks with other tokens than the tokenizer.

    Args:
        text_of: returns the text of one token; the results are cached.
    """

    def __init__(
        self,
        tokenizer: Any,
        budget: ThinkingBudget,
        vocab_size: int,
        text_of: Callable[[int], str],
    ) -> None:
        self._tokenizer, self._budget, self._text_of = tokenizer, budget, text_of
        self._end: list[int] = tokenizer.encode(budget.end, add_special_tokens=False)
        self._all = packed(np.ones(vocab_size, dtype=np.bool_))
        self._text: list[int] = []
        # Start of thinking after each token; None: not begun, -1: over, or it will not come.
        self._begins: list[int | None] = [0 if budget.is_open else None]

    def allowed(self) -> IntArray:
        return self.bits()

    def bits(self) -> IntArray:  # [num_words]
        """Returns the mask, which is never empty."""
        left = self._closing()
        if not left:
            return self._all
        bits = np.zeros_like(self._all)
        bits[left[0] >> 5] = np.int32(_bit(left[0]))
        return bits

    def forced(self) -> list[int]:
        return self._closing()

    def consume(self, token: int) -> None:
        if not is_allowed(self.bits(), token):
            raise ConstraintError(f"token {token} is forbidden here")
        self._text.append(token)
        self._begins.append(self._following())

    def rewind(self, num_tokens: int) -> None:
        assert num_tokens <= len(self._text), (num_tokens, self._text)
        del self._text[len(self._text) - num_tokens :]
        del self._begins[len(self._begins) - num_tokens :]

    def check_end(self, tokens: TokenConstraint) -> None:
        """Raises `ConstraintError` where the end mark is forbidden, so that nothing could follow
        thinking whose budget is spent."""
        for number, token in enumerate(self._end):
            try:
                tokens.consume(token)
            except ConstraintError as error:
                tokens.rewind(number)
                mark = self._budget.end
                raise ConstraintError(f"{error}, with which {mark!r} ends the thinking") from None
        tokens.rewind(len(self._end))

    def num_free(self) -> float:
        begin, most = self._begins[-1], self._budget.max_tokens
        if begin is None:
            return most
        return math.inf if begin < 0 else max(0, begin + most - len(self._text))

    def _closing(self) -> list[int]:
        """Returns the remaining tokens of the end mark once the budget is spent, otherwise none."""
        begin = self._begins[-1]
        if begin is None or begin < 0 or len(self._text) - begin < self._budget.max_tokens:
            return []
        return self._end[self._num_written(begin) :]

    def _num_written(self, begin: int) -> int:
        """Returns how many tokens of the end mark the thinking ends with."""
        most = min(len(self._end), len(self._text) - begin)
        ends = (size for size in range(most, 0, -1) if self._text[-size:] == self._end[:size])
        return next(ends, 0)

    def _following(self) -> int | None:
        """Returns the start of thinking after the last token, in the form of `_begins`."""
        begin, budget = self._begins[-1], self._budget
        if begin is None:
            text = self._decoded(self._text).lstrip()
            if text.startswith(budget.begin):
                return len(self._text)
            return None if budget.begin.startswith(text) else -1
        if begin >= 0 and self._may_end(self._text[-1]):
            # A character of the mark takes at most one token; 8 tokens are added for empty ones.
            window = max(begin, len(self._text) - len(budget.end) - 8)
            is_written = self._num_written(begin) == len(self._end)
            if is_written or budget.end in self._decoded(self._text[window:]):
                return -1
        return begin

    def _may_end(self, token: int) -> bool:
        """Returns False if the end mark cannot end with `token`, which holds for most tokens."""
        text = self._text_of(token)
        return self._budget.end[-1] in text or "\ufffd" in text  # a part of a character

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


class Both:
    """Combines a grammar or another constraint with tokens that are forbidden in addition."""

    def __init__(self, grammar: Constraint, tokens: TokenConstraint | ThinkingConstraint) -> None:
        self._grammar, self._tokens = grammar, tokens

    def allowed(self) -> IntArray:
        bits: IntArray = self._grammar.allowed() & self._tokens.bits()
        if not bits.any():
            raise DeadEndError("every token that the grammar allows next is forbidden")
        return bits

    def forced(self) -> list[int]:
        """Returns the tokens that the grammar forces, up to the first forbidden one."""
        tokens = self._grammar.forced()
        num_allowed = 0
        try:
            for token in tokens:
                self._tokens.consume(token)
                num_allowed += 1
        except ConstraintError:
            pass
        self._tokens.rewind(num_allowed)
        return tokens[:num_allowed]

    def consume(self, token: int) -> None:
        self._grammar.consume(token)
        self._tokens.consume(token)

    def rewind(self, num_tokens: int) -> None:
        self._grammar.rewind(num_tokens)
        self._tokens.rewind(num_tokens)

    def num_free(self) -> float:
        return min(self._grammar.num_free(), self._tokens.num_free())


class Prolonged:
    """A constraint that allows end tokens after `least` tokens, or if nothing else may come."""

    def __init__(
        self, constraint: Constraint, vocab_size: int, ends: Sequence[int], least: float
    ) -> None:
        self._constraint, self._least, self._num_tokens = constraint, least, 0
        may = np.ones(vocab_size, dtype=np.bool_)
        may[list(ends)] = False
        self._others = packed(may)

    def allowed(self) -> IntArray:
        bits = self._constraint.allowed()
        if self._num_tokens < self._least and (others := bits & self._others).any():
            return others
        return bits

    def forced(self) -> list[int]:
        return self._constraint.forced()

    def consume(self, token: int) -> None:
        self._constraint.consume(token)
        self._num_tokens += 1

    def rewind(self, num_tokens: int) -> None:
        self._constraint.rewind(num_tokens)
        self._num_tokens -= num_tokens

    def num_free(self) -> float:
        return 0


def _bit(token: int) -> int:
    """Returns the token's bit in its 32-bit word, as a signed number."""
    bit = 1 << (token & 31)
    return bit - (1 << 32) if bit >> 31 else bit


_MAX_KEPT: Final = 64  # compiled grammars
_MAX_TEXTS: Final = 2**16  # cached texts of single tokens
_MAX_BEGUN: Final = 16  # allowed first tokens that a new grammar is tried with


class Compiler:
    """Creates the constraints of one engine; compiled grammars are cached.

    The state of a constraint is a function of the emitted tokens. A replay, or a move to another
    replica, can therefore rebuild it. Thread-safe.

    Args:
        config: names the tokenizer, which is loaded for the first constrained request.
        vocab_size: size of the target's logits.
        eos_token_ids: the tokens that end a text.
    """

    def __init__(
        self, config: EngineConfig, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._spellings = lru_cache(1)(self._spell)  # caches the last request's bad words
        self._matcher = lru_cache(_MAX_KEPT)(self._compile)
        self._text_of = lru_cache(_MAX_TEXTS)(self._decoded)
        self._lock = threading.Lock()

    def open(self, request: Request) -> Constraint | None:
        """Returns a request's constraint after its emitted tokens; None if it has none.

        Raises:
            InvalidRequestError: the grammar does not compile with this tokenizer, or no first token
                is allowed.
        """
        wanted, budget = request.sampling.structured_outputs, request.sampling.thinking_budget
        field = constraint_field(request.sampling)
        if not field:
            return None
        try:
            tokens = self._token_constraint(request)
            constraint: Constraint | None = tokens
            if budget is not None:
                thinking = ThinkingConstraint(
                    self._tokenizer, budget, self._vocab_size, self._text_of
                )
                if tokens is not None:
                    thinking.check_end(tokens)
                constraint = thinking if tokens is None else Both(thinking, tokens)
            if wanted is not None:
                matcher = self._compiled(grammar_of(wanted), wanted.is_json)
                grammar = GrammarConstraint(matcher, self._vocab_size)
                constraint = grammar if tokens is None else Both(grammar, tokens)
                if budget is not None:
                    constraint = Both(constraint, thinking)
                least = math.inf if request.sampling.ignore_eos else request.sampling.min_tokens
                if least:
                    ends = (*request.eos_token_ids, *request.sampling.stop_token_ids)
                    constraint = Prolonged(constraint, self._vocab_size, ends, least)
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
            bad = self._spellings(sampling.bad_words) if sampling.bad_words else ()
        ends = (*request.eos_token_ids, *sampling.stop_token_ids)
        return TokenConstraint(
            self._vocab_size, sampling.allowed_token_ids, bad, ends, request.min_tokens
        )

    def _compiled(self, grammar: str, is_json: bool) -> LLMatcher:
        with self._lock:
            return self._matcher(grammar, is_json).deep_copy()

    def _compile(self, grammar: str, is_json: bool) -> LLMatcher:
        limits = parser_limits(is_json=is_json)
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        # The parser only reports too many alternatives at the beginning after consuming a token.
        bits = np.frombuffer(matcher.deep_copy().compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        for token in allowed[:_MAX_BEGUN]:
            begun = matcher.deep_copy()
            begun.consume_token(token)
            if begun.is_error():
                raise ValueError(begun.get_error())
        return matcher

    def _spell(self, bad_words: tuple[str, ...]) -> Spellings:
        return spellings(self._tokenizer, bad_words, self._vocab_size)

    def _decoded(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._config)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        """The tokenizer in llguidance's form."""
        from llguidance.hf import from_tokenizer

        size = max(self._vocab_size, len(self._tokenizer))
        return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=list(self._eos_token_ids))


def constraint_field(sampling: SamplingParams) -> str:
    """Returns the field that constrains the text, for messages; empty if none does."""
    if sampling.bad_words:
        return "bad_words"
    if sampling.allowed_token_ids is not None:
        return "allowed_token_ids"
    wanted = sampling.structured_outputs
    if wanted is not None:
        return f"structured_outputs.{wanted.kind}"
    return "" if sampling.thinking_budget is None else "thinking_budget"


class GrammarConstraint:
    """A `Constraint` on llguidance's matcher."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._last_word = np.int32(-1)  # valid bits of the last word
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

    def num_free(self) -> float:
        return 0

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(self._matcher.get_error())
