"""Selects the formats of tool calls and reasoning by their names in the configuration.

`auto` searches the chat template, which contains the format's marks because it renders the calls of
earlier turns.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidRequestError
from ...scheduler.sampling import ThinkingBudget
from . import lark
from .arguments import UnenforceableError
from .formats import (
    deepseek,
    glm,
    harmony,
    hermes,
    kimi,
    llama_json,
    mistral,
    plain,
    pythonic,
    qwen_coder,
)
from .lark import Block, CallLayout, Function, Lark, call_rules, free_calls, grammar, thinking_rules
from .reader import Content, Flow, Parser, Reader

NONE, AUTO, HARMONY = "none", "auto", "harmony"


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A family's format of tool calls.

    Args:
        code: a module of `formats`. Its `MARKS` are texts that a tokenizer may treat as special
            tokens; `parse` reads content and calls; `layout` describes grammars.
        is_used: returns True if a chat template writes calls in this format.
        new_id: creates an id in the form that the family's templates accept.
    """

    code: Any
    is_used: Callable[[str], bool]
    new_id: Callable[[], str] = _call_id


# `auto` takes the first format whose `is_used` returns True.
CALLS: Mapping[str, CallFormat] = {
    "harmony": CallFormat(harmony, lambda text: harmony.CHANNEL in text),
    "deepseek_v3": CallFormat(deepseek, lambda text: deepseek.CALLS in text),
    "mistral": CallFormat(mistral, lambda text: mistral.MARK in text, _short_id),
    "kimi_k2": CallFormat(kimi, lambda text: kimi.CALLS in text),
    "qwen3_coder": CallFormat(
        qwen_coder, lambda text: qwen_coder.FUNCTION in text and qwen_coder.PARAMETER in text
    ),
    "glm45": CallFormat(glm, lambda text: glm.KEY in text),
    "hermes": CallFormat(
        hermes, lambda text: hermes.BEGIN in text and qwen_coder.FUNCTION not in text
    ),
    "pythonic": CallFormat(pythonic, lambda text: "[func_name1(" in text or "[func_name(" in text),
    "llama3_json": CallFormat(
        llama_json,
        lambda text: all(each in text for each in ('"parameters":', '{"name":', "ipython")),
    ),
}
# For required calls if the model's format is unknown; the grammar itself defines the format.
_PLAIN = CallFormat(plain, lambda text: False)
# `harmony` formats the whole text and therefore has no block.
REASONING: Mapping[str, Block | None] = {
    "harmony": None,
    "mistral": Block("[THINK]", "[/THINK]"),
    "qwen3": Block("<think>", "</think>"),
    "deepseek_r1": Block("<think>", "</think>", always=True),
}


def call_format(name: str, template: str) -> str:
    """Resolves `auto` with this template; returns a name of `CALLS`, or `none`."""
    if name != AUTO:
        return name
    return next((key for key, each in CALLS.items() if each.is_used(template)), NONE)


def reasoning_format(name: str, template: str) -> str:
    """Resolves `auto` with this template; returns a name of `REASONING`, or `none`."""
    if name != AUTO:
        return name
    if harmony.CHANNEL in template:
        return HARMONY
    for key, block in REASONING.items():
        if block is not None and block.begin in template:
            return key
    # The template only removes reasoning from earlier turns, so the model opens the block itself.
    return "deepseek_r1" if "</think>" in template else NONE


class ChatText:
    """The formats of a model: creates parsers of its answers and grammars that constrain them.

    Args:
        call_parser: a name of `CALLS`, `auto` or `none`.
        reasoning_parser: a name of `REASONING`, `auto` or `none`.
        template: text of the chat template.
        tokenizer: a transformers tokenizer.
    """

    def __init__(
        self, call_parser: str, reasoning_parser: str, template: str, tokenizer: Any
    ) -> None:
        calls = call_format(call_parser, template)
        reasoning = reasoning_format(reasoning_parser, template)
        # Harmony covers the whole text, so it gives way to another format that was chosen.
        if reasoning == HARMONY and calls not in (HARMONY, NONE):
            reasoning = NONE
        if calls == HARMONY and reasoning not in (HARMONY, NONE):
            calls = NONE
        self.calls_name, self.reasoning_name = calls, reasoning
        self._is_harmony = HARMONY in (calls, reasoning)
        self._format = CALLS.get(calls, CALLS[HARMONY] if self._is_harmony else _PLAIN)
        self._block = REASONING.get(reasoning)
        self._template = template
        added = _added_tokens(tokenizer)
        self._token_ids = {text: id for text, (id, special) in added.items() if special}
        marks = {*self._format.code.MARKS}
        if self._is_harmony:
            marks.update(harmony.MARKS)
        if self._block is not None:
            marks.update((self._block.begin, self._block.end))
        # Special tokens that the parsers need as text.
        self.shown_ids = frozenset(added[mark][0] for mark in marks if mark in added)
        self._lark = Lark(self._token_ids.get, template)

    @property
    def has_calls(self) -> bool:
        """True if the model's own tool calls are parsed; required calls always are."""
        return self.calls_name != NONE

    @property
    def has_reasoning(self) -> bool:
        """True if reasoning is separated from content."""
        return self.reasoning_name != NONE

    def effort(self, wanted: str | None) -> dict[str, Any]:
        """Returns the template's settings for OpenAI's `reasoning_effort`.

        Raises:
            InvalidRequestError: the template has no such setting.
        """
        if wanted == "none" and "enable_thinking" in self._template:
            return {"enable_thinking": False}
        if wanted is None or (wanted == "none" and not self.has_reasoning):
            return {}
        if "reasoning_effort" not in self._template:
            raise InvalidRequestError.at(
                "reasoning_effort",
                f"the chat template has no such setting (got {wanted!r}); leave it out",
            )
        return {"reasoning_effort": wanted}

    def new_id(self) -> str:
        """Creates the id of a call."""
        return self._format.new_id()

    def parser(
        self, prompt: str, functions: Sequence[Function], *, continued: bool = False
    ) -> Parser | None:
        """Returns a parser for one completion of `prompt`; None if all of its text is content.

        Args:
            functions: functions that may be called; if empty, calls are not parsed.
            continued: whether the prompt ends within an answer.
        """
        named = {function.name: function for function in functions}
        if not self.has_reasoning and not named and not self._is_harmony:
            return None
        is_open = self._is_open(prompt, continued)
        return Parser(lambda reader: self._flow(reader, named, is_open))

    def check_function(self, function: Function, field: str) -> None:
        """Rejects parameters that no grammar of the model's format can enforce.

        Raises:
            InvalidRequestError: the message names `field`.
        """
        try:
            self._layout([function])
        except UnenforceableError as error:
            raise InvalidRequestError.at(
                field, f"{error}; {self.calls_name} calls cannot be held to it"
            ) from None

    def required(
        self, functions: Sequence[Function], prompt: str, *, parallel: bool, continued: bool = False
    ) -> str:
        """Returns a grammar that only admits answers consisting of calls."""
        rules = call_rules(self._layout(functions), self._lark, parallel)
        return grammar("calls", rules, self._lead(prompt, continued, to_final=False))

    def strict(
        self, functions: Sequence[Function], prompt: str, *, continued: bool = False
    ) -> str | None:
        """Returns a grammar for text with valid calls; None if the format has no mark of calls."""
        layout = self._layout(functions)
        if not layout.trigger:
            return None
        start, rules = free_calls(layout, self._lark)
        calls = [each for each in call_rules(layout, self._lark, True) if each[:6] != "calls:"]
        lead = self._lead(prompt, continued, to_final=False)
        return grammar(start, [*rules, *calls], lead)

    def frame(
        self,
        prompt: str,
        functions: Sequence[Function] = (),
        *,
        parallel: bool = True,
        continued: bool = False,
    ) -> str | None:
        """Returns the grammar around a constrained answer: reasoning first, or calls instead."""
        answer, rules = "@answer", list[str]()
        lead = self._lead(prompt, continued, to_final=not functions)
        if functions:
            rules = call_rules(self._layout(functions), self._lark, parallel)
            final = harmony.final_header(self._lark) if self.reasoning_name == HARMONY else ""
            answer = f"(calls | {final} @answer)"
        return grammar(answer, rules, lead) if rules or lead else None

    def budget(
        self, prompt: str, max_tokens: int, field: str, *, continued: bool = False
    ) -> ThinkingBudget | None:
        """Returns the limit on an answer's reasoning; None if the template has closed the block.

        Raises:
            InvalidRequestError: the model has no known marks of reasoning; the message names
                `field`.
        """
        if self._block is None:
            nearest = "reasoning_effort" if self.reasoning_name == HARMONY else "max_tokens"
            raise InvalidRequestError.at(
                field,
                "answers of this model have no section of thinking that can be closed; use "
                f"{nearest}, or set reasoning_parser in the configuration if it thinks",
            )
        if self._block.is_closed(prompt):
            return None
        block, is_open = self._block, self._is_open(prompt, continued)
        return ThinkingBudget(
            max_tokens=max_tokens, begin=block.begin, end=block.end, is_open=is_open
        )

    def _flow(self, reader: Reader, functions: Mapping[str, Function], is_open: bool) -> Flow[None]:
        if self._is_harmony:
            thinks = self.has_reasoning
            yield from harmony.parse(reader, functions, calls=bool(functions), reasoning=thinks)
            return
        if self._block is not None:
            yield from lark.split(reader, self._block, is_open)
        if functions:
            yield from self._format.code.parse(reader, functions)
        else:
            yield from reader.prose((), Content, trim=False)

    def _layout(self, functions: Sequence[Function]) -> CallLayout:
        return self._format.code.layout(functions, self._lark)

    def _is_open(self, prompt: str, continued: bool) -> bool:
        return self._block is not None and self._block.is_open(prompt, continued)

    def _lead(self, prompt: str, continued: bool, *, to_final: bool) -> list[str]:
        """Returns the rules of `lead`; empty if the answer begins at once."""
        if self.reasoning_name == HARMONY:
            return harmony.lead_rules(self._lark, to_final=to_final)
        if self._block is None or self._block.is_closed(prompt):
            return []
        return thinking_rules(self._lark, self._block, self._is_open(prompt, continued))


def _added_tokens(tokenizer: Any) -> dict[str, tuple[int, bool]]:
    """Returns the id of each added token and whether grammars refer to it by id."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {}
    return {
        token.content: (id, token.special or (token.content[:1], token.content[-1:]) == ("<", ">"))
        for id, token in backend.get_added_tokens_decoder().items()
    }
