"""`SamplingParams`: what a user may ask of one completion. Validated once, frozen after.

The scheduler turns it into rows of `SamplingRows`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ..errors import InvalidRequestError, in_words, renamed, shortened, shown_value

MAX_GRAMMAR_CHARS = 2**16  # characters of a schema, a pattern, a grammar, or of all choices
MAX_CHOICES = 4096
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_STRUCTURED = "structured_outputs"


class StructuredOutputs(BaseModel):
    """Exactly one of a JSON schema, a regular expression, a list of texts, a grammar, any object.

    A schema may be given as a dict or as text; it is stored as text.

    Raises:
        InvalidRequestError: a field is unknown or wrong; names the field.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    json_schema: str | None = Field(
        None,
        alias="json",
        max_length=MAX_GRAMMAR_CHARS,
        description="A JSON schema, as a text or a mapping.",
    )
    regex: str | None = Field(
        None,
        max_length=MAX_GRAMMAR_CHARS,
        description="A regular expression that the whole text matches (Rust's syntax, no "
        "look-around).",
    )
    choice: tuple[str, ...] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, description="The texts to choose from."
    )
    grammar: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_GRAMMAR_CHARS,
        description="A context-free grammar, in Lark's or llama.cpp's (GBNF) notation.",
    )
    json_object: bool | None = Field(None, description="`true`: any JSON object.")
    whitespace_pattern: str | None = Field(
        None,
        max_length=256,
        description="A regular expression for the white space between JSON's tokens.",
    )
    disable_any_whitespace: bool = Field(False, description="No white space between JSON's tokens.")
    frame: str | None = Field(
        None,
        max_length=MAX_GRAMMAR_CHARS,
        description="A Lark grammar of the whole text that refers to the constrained part as "
        "`@answer`; default: that part is the whole text.",
    )

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise renamed(invalid_request(error), [(r"^body\b", _STRUCTURED)]) from None

    @field_validator("json_schema", mode="before")
    @classmethod
    def _as_text(cls, schema: Any) -> Any:
        return json.dumps(schema) if isinstance(schema, (dict, bool)) else schema

    @field_validator("choice")
    @classmethod
    def _short(cls, choice: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if choice is not None and sum(map(len, choice)) > MAX_GRAMMAR_CHARS:
            raise ValueError(f"more than {MAX_GRAMMAR_CHARS} characters")
        if choice is not None and "" in choice:
            raise ValueError("an empty text is no choice")
        return choice

    @field_validator("frame")
    @classmethod
    def _around_it(cls, frame: str | None) -> str | None:
        if frame is not None and "@answer" not in frame:
            raise ValueError("it has to refer to @answer")
        return frame

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = self._given
        if len(given) != 1:
            what = " and ".join(given) if given else "none"
            raise ValueError(f"exactly one of {', '.join(_KINDS)} has to be given, not {what}")
        if self.is_json:
            if self.whitespace_pattern is not None and self.disable_any_whitespace:
                raise ValueError("whitespace_pattern and disable_any_whitespace exclude each other")
        elif self.whitespace_pattern is not None or self.disable_any_whitespace:
            raise ValueError("whitespace_pattern and disable_any_whitespace are for JSON")
        return self

    @property
    def kind(self) -> str:
        """Which of the five it is, by its public name."""
        return self._given[0]

    @property
    def is_json(self) -> bool:
        return self.json_schema is not None or bool(self.json_object)

    @property
    def _given(self) -> list[str]:
        values = {**vars(self), "json": self.json_schema}
        return [name for name in _KINDS if values[name] not in (None, False)]


class ThinkingBudget(BaseModel):
    """Limit on the tokens of an answer's thinking, after which its end mark is forced.

    Tokens between the two marks count. Chats fill in the marks of the model's format.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int = Field(ge=0, description="Most tokens between the marks.")
    begin: str = Field(min_length=1, max_length=64, description="Mark that begins thinking.")
    end: str = Field(min_length=1, max_length=64, description="Mark that ends it.")
    is_open: bool = Field(False, description="Whether the prompt ends within it.")


MAX_STOPS = 16  # stop strings of a request
MAX_BAD_WORDS = 1024
MAX_BAD_CHARS = 2**16  # characters of all bad words together
MAX_ALLOWED_IDS = 2**18


def _as_list(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


class SamplingParams(BaseModel):
    """Sampling settings of one request.

    Processing order at every position: biases, penalties, temperature, top-k, top-p, min-p.

    Raises:
        InvalidRequestError: a field is unknown or out of range; names the field.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(
        1.0, ge=0.0, le=100.0, allow_inf_nan=False, description="Temperature; 0 is greedy."
    )
    top_k: int = Field(
        0, ge=-1, lt=2**31, description="Number of likeliest tokens to draw from; 0 and -1: all."
    )
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Probability that the tokens to draw from add up to."
    )
    min_p: float = Field(
        0.0, ge=0.0, le=1.0, description="Least probability, relative to the likeliest token's."
    )
    # A logit multiplied or divided by these bounds is finite in float32.
    repetition_penalty: float = Field(
        1.0, ge=1e-6, le=1e6, description="Divides the logits of tokens that occurred."
    )
    presence_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="Subtracted from the logits of emitted tokens."
    )
    frequency_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="The same, for each time that they were emitted."
    )
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict,
        description="By token id, -100 to 100: added to the token's logit, before all else.",
    )
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="Same seed, same text, any drafter."
    )
    max_tokens: int | None = Field(16, ge=0, description="Most tokens of an answer.")
    min_tokens: int = Field(
        0, ge=0, lt=2**31, description="No end token and no stop ends the answer before."
    )
    stop: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(
        (), max_length=MAX_STOPS, description="Text that ends the answer; may be repeated."
    )
    stop_token_ids: tuple[int, ...] = Field((), description="Tokens that end the answer.")
    ignore_eos: bool = Field(False, description="Continue after an end token.")
    include_stop_str_in_output: bool = Field(
        False, description="The text keeps the stop string that ended it."
    )
    skip_special_tokens: bool = Field(True, description="The text has no special tokens.")
    n: int = Field(1, ge=1, le=128, description="Completions of the prompt.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="Log-probabilities of each emitted token and of so many likeliest ones.",
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="The same for the prompt's tokens."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="What the text has to match."
    )
    allowed_token_ids: tuple[int, ...] | None = Field(
        None,
        min_length=1,
        max_length=MAX_ALLOWED_IDS,
        description="The only tokens that may be emitted, end tokens too; default: all.",
    )
    bad_words: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(
        (), max_length=MAX_BAD_WORDS, description="Texts that may not be emitted."
    )
    thinking_budget: ThinkingBudget | None = Field(
        None, description="Most tokens of the thinking before an answer, and its marks."
    )

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise invalid_request(error) from None
        except InvalidRequestError as error:  # raised by `StructuredOutputs` for a mapping
            raise renamed(error, [(rf"^(?!{_STRUCTURED}\b)", f"{_STRUCTURED}.")]) from None

    @field_validator("structured_outputs", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and not all(isinstance(name, str) for name in given):
            raise ValueError("its fields have names")
        return given

    @field_validator("stop")
    @classmethod
    def _stops(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("an empty string stops everything")
        return stop

    @field_validator("bad_words")
    @classmethod
    def _words(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        if sum(map(len, words)) > MAX_BAD_CHARS:
            raise ValueError(f"more than {MAX_BAD_CHARS} characters")
        for word in words:
            if not word.strip():
                raise ValueError("a word without characters but white space forbids nothing")
        return words


# Parts of an error's location that pydantic adds for mappings and unions; the user wrote neither.
_MARKS = ("[key]", "dict[str,any]", "str", "int")


def invalid_request(error: ValidationError) -> InvalidRequestError:
    """Converts pydantic's first error into an `InvalidRequestError` that names the field."""
    first = error.errors()[0]
    parts = [shortened(str(part)) for part in first["loc"] if part not in _MARKS]
    name = ".".join(parts) or "body"
    value = first.get("input")
    shown = "" if first["type"] == "missing" else f" (got {shown_value(value)})"
    return InvalidRequestError.at(name, f"{in_words(first)}{shown}")
