"""What a request's text has to match, as a grammar of the library llguidance, and its check.

Called by the front end for every constrained request, before anything is queued, and by
`compiler.py`. Time and memory are bounded by the limits of the library's parser; white space
between JSON's tokens is bounded here, because a model may otherwise never stop writing it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from ...errors import InvalidRequestError
from ...scheduler.sampling import SamplingParams
from ...scheduler.structured import StructuredOutputs
from ..chat.lark import WHITESPACE
from .bounds import check_lark, check_pattern, check_schema_bounds, check_text

_MAX_NESTING: Final = 128  # brackets within brackets of a grammar
_STOP_REASONS: Final = {"NoExtensionBias": "no text of finite length matches it"}
_MAX_MESSAGE: Final = 300  # characters of the library's message


def parser_limits() -> LLParserLimits:
    """Bounds of compiling a grammar and of computing a mask: some tens of milliseconds each."""
    return LLParserLimits(
        initial_lexer_fuel=2_000_000,
        step_lexer_fuel=400_000,
        max_lexer_states=100_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def grammar_of(wanted: StructuredOutputs) -> str:
    """The grammar in the library's own notation.

    Raises:
        ValueError: it cannot be translated, or asks for too much.
    """
    _check_bounds(wanted)
    if wanted.frame is not None:
        return _framed(wanted.frame, wanted.model_copy(update={"frame": None}))
    if wanted.is_json:
        return _json_grammar(wanted)
    if wanted.regex is not None:
        return str(LLMatcher.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        texts = " | ".join(json.dumps(text) for text in wanted.choice)
        return str(LLMatcher.grammar_from_lark(f"start: {texts}"))
    assert wanted.grammar is not None, wanted
    _check_nesting(wanted.grammar)
    try:
        lark = any_to_lark(wanted.grammar)
        check_lark(lark)
        return str(LLMatcher.grammar_from_lark(lark))
    except GbnfToLarkError as error:
        raise ValueError(str(error)) from None


def check(sampling: SamplingParams, eos_token_ids: tuple[int, ...], field: str = "") -> None:
    """Checks the constraint on the text in `sampling`; `field` is the user's name for it.

    Raises:
        InvalidRequestError: the grammar is wrong or too large, or contradicts another field.
    """
    wanted = sampling.structured_outputs
    if wanted is None:
        return
    field = field or f"structured_outputs.{wanted.kind}"
    for name, is_set in (("ignore_eos", sampling.ignore_eos), ("min_tokens", sampling.min_tokens)):
        if is_set:
            raise InvalidRequestError(
                f"{name}: a text that has to match {field} ends where that does; leave it out",
                field=name,
            )
    if not eos_token_ids:
        raise InvalidRequestError(f"{field}: this model has no end token", field=field)
    try:
        problem = LLMatcher.validate_grammar(grammar_of(wanted), limits=parser_limits())
    except (ValueError, RecursionError) as error:
        problem = str(error) or "nested too deeply"
    if problem and not problem.startswith("WARNING"):
        raise invalid(field, problem)


def check_schema(schema: Mapping[str, Any], field: str) -> None:
    """Raises `InvalidRequestError`, which names `field`, for a JSON schema that has no grammar."""
    try:
        check_schema_bounds(schema)
        text = str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        problem = LLMatcher.validate_grammar(text, limits=parser_limits())
    except (ValueError, TypeError, RecursionError) as error:
        problem = str(error) or "nested too deeply"
    if problem and not problem.startswith("WARNING"):
        raise invalid(field, problem)


def invalid(field: str, problem: str) -> InvalidRequestError:
    """The library's complaint as an error that names the field."""
    brief = " ".join(problem.replace("<non-verbose/>", "").split())
    brief = _STOP_REASONS.get(brief, brief)
    if len(brief) > _MAX_MESSAGE:
        brief = brief[:_MAX_MESSAGE] + "..."
    return InvalidRequestError(f"{field}: {brief}", field=field)


def _check_bounds(wanted: StructuredOutputs) -> None:
    """Raises `ValueError` for what the library's own limits do not bound, but a grammar's."""
    if wanted.regex is not None:
        check_pattern(wanted.regex)
    if wanted.whitespace_pattern is not None:
        check_pattern(wanted.whitespace_pattern)
    for text in wanted.choice or ():
        check_text(text)
    if wanted.json_schema is not None:
        check_schema_bounds(_schema(wanted)[0])


def _framed(frame: str, answer: StructuredOutputs) -> str:
    """The grammar `answer` within the frame."""
    _check_nesting(frame)
    if answer.is_json:
        schema, options = _schema(answer)
        inner: dict[str, Any] = {"json_schema": {**schema, "x-guidance": options}}
    else:
        text = grammar_of(answer)  # the library wraps some kinds in JSON of its own
        inner = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return json.dumps({"grammars": [{"lark_grammar": frame}, {**inner, "name": "answer"}]})


def _json_grammar(wanted: StructuredOutputs) -> str:
    schema, options = _schema(wanted)
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


def _schema(wanted: StructuredOutputs) -> tuple[dict[str, Any], Any]:
    """The JSON schema, and the library's options for it."""
    schema: Any = {"type": "object"}
    if wanted.json_schema is not None:
        try:
            schema = json.loads(wanted.json_schema)
        except ValueError as error:
            raise ValueError(f"it is no JSON: {error}") from None
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    options: Any = {"whitespace_pattern": wanted.whitespace_pattern or WHITESPACE}
    if wanted.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    return schema, options


def _check_nesting(grammar: str) -> None:
    """Raises `ValueError` for brackets so deep that a recursive parser might not return."""
    depth = 0
    for bracket in re.findall(r"[()\[\]{}]", grammar):
        depth = depth + 1 if bracket in "([{" else max(0, depth - 1)
        if depth > _MAX_NESTING:
            raise ValueError(f"brackets nested more than {_MAX_NESTING} deep")
