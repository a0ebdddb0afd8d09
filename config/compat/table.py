"""The tables of other engines' options: a YAML file per engine, a row per option or several.

A row's key is an option's name, or several with commas between. Its value is a row's fields, or,
for an option that is only named otherwise, our name of it. `translate.py` parses with the tables;
`docs/scripts/compatibility.py` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field

from ..strict import Strict
from . import conversions
from .conversions import Keys

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the second takes ten times as long
# A function of `conversions.py`, by its name.
Conversion = Annotated[Callable[[Any], Any], BeforeValidator(lambda name: vars(conversions)[name])]


class Row(Strict):
    """An option, and what it is here."""

    owner: str | None = None
    """The only drafter that the key is for; None is every one that has it."""
    switch: bool = False
    """On the command line it has no value, though none of its values here is a boolean."""
    agrees: bool = False
    """May be given beside another spelling of the same key if both have one value."""

    @property
    def is_switch(self) -> bool:
        """Whether it has no value on the command line."""
        return self.switch

    def keys(self, given: Any) -> Keys:
        """The value as keys of ours.

        Raises:
            ValueError: it is refused; has the reason, what is allowed, and what to use instead.
        """
        raise NotImplementedError


class To(Row):
    """Accepted as a key (or a drafter) of ours."""

    to: str
    """Our name."""
    note: str = ""
    """For the page: what is to be known beside that."""
    rename: Mapping[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Our value -> other names of it."""
    convert: Conversion | None = None
    """The value by our meaning; raises `ValueError` with the reason."""
    defaults: Conversion | None = None
    """Of a drafter's name: what was given -> what the dialect takes for granted beside it. It takes
    out of its argument what must not be passed on."""

    @property
    def is_alias(self) -> bool:
        """Whether values mean the same under both names, and for every drafter."""
        return not self.rename and self.convert is None and self.owner is None

    def keys(self, given: Any) -> Keys:
        if self.convert is not None:
            return {self.to: self.convert(given)}
        ours = (ours for ours, names in self.rename.items() if given in names)
        return {self.to: next(ours, given)}


class Into(Row):
    """Accepted as several keys of ours, or as none."""

    note: str
    """For the page: the keys."""
    cases: dict[Any, Keys | str] = Field(default_factory=dict)
    """By value: our keys, or why it is refused."""
    make: Conversion | None = None
    """Our keys by the value, where these are not few; raises `ValueError` with the reason."""

    @property
    def is_switch(self) -> bool:
        return self.switch or _are_booleans(self.cases)

    def keys(self, given: Any) -> Keys:
        if self.make is not None:
            return self.make(given)
        keys = next((keys for case, keys in self.cases.items() if is_same(case, given)), "")
        if isinstance(keys, dict):
            return keys
        allowed = (as_yaml(case) for case, keys in self.cases.items() if isinstance(keys, dict))
        raise ValueError(f"{keys}; allowed: {', '.join(allowed)}".removeprefix("; "))


class Only(Row):
    """Accepted with the values that describe what holds here anyway; others are refused."""

    only: tuple[Any, ...]
    """Those values."""
    why: str
    """The reason why others are refused."""
    nearest: str = ""
    """What to use instead of others."""

    @property
    def is_switch(self) -> bool:
        return self.switch or _are_booleans(self.only)

    def keys(self, given: Any) -> Keys:
        if any(is_same(each, given) for each in self.only):
            return {}
        allowed = " or ".join(as_yaml(each) for each in self.only)
        raise ValueError(f"{self.why}; allowed: {allowed}{hint(self)}")


class Refused(Row):
    """Refused by name."""

    refused: str
    """The reason."""
    nearest: str = ""
    """What to use instead."""

    def keys(self, given: Any) -> Keys:
        raise ValueError(f"refused: {self.refused}{hint(self)}")


class Ignored(Row):
    """Accepted with a warning: whatever its value, nothing that is generated depends on it."""

    ignored: str
    """The reason why there is nothing to set here."""
    nearest: str = ""
    """What there is to set in its place."""

    def keys(self, given: Any) -> Keys:
        return {}


Entry = To | Into | Only | Refused | Ignored


def _are_booleans(values: Iterable[Any]) -> bool:
    """Whether nothing but booleans and null is a value."""
    kinds = {type(value) for value in values}
    return bool in kinds and kinds <= {bool, type(None)}


def _rows(table: Mapping[str, Any]) -> dict[str, Any]:
    """A row per option."""
    rows: dict[str, Any] = {}
    for names, row in table.items():
        for name in names.split(", "):
            if name in rows:
                raise ValueError(f"{name} is given twice")
            rows[name] = {"to": row} if isinstance(row, str) else row
    return rows


Entries = Annotated[Mapping[str, Entry], BeforeValidator(_rows)]


class Dialect(Strict):
    """One engine's spelling."""

    name: str
    """Of the engine."""
    selectors: tuple[str, ...]
    """Keys that name the drafter."""
    methods: Annotated[Mapping[str, To | Refused], BeforeValidator(_rows)]
    """Its names of drafters; `To.to` is the `decoding_type`."""
    keys: Entries
    """Of a speculative section."""
    engine: Entries = Field(default_factory=dict)
    """Top-level keys."""
    kv_cache: Entries = Field(default_factory=dict)
    """Keys of `kv_cache_config`."""
    request: Entries = Field(default_factory=dict)
    """Fields of HTTP requests' bodies, beside OpenAI's and ours."""
    options: Mapping[str, str] = Field(default_factory=dict)
    """Options of the command line that are no keys, and our names of them."""
    short: Mapping[str, str] = Field(default_factory=dict)
    """Options of one dash, and the keys of a section or of the engine that they set."""


def _dialect(file: str, engine: Mapping[str, Entry] = MappingProxyType({})) -> Dialect:
    """A file's table, with rows of `engine` that are another's too."""
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    data = yaml.load(text, _LOADER)
    return Dialect.model_validate({**data, "engine": {**engine, **data.get("engine", {})}})


TENSORRT_LLM = _dialect("tensorrt_llm.yaml")
VLLM = _dialect("vllm.yaml")
LLAMA_CPP = _dialect("llama_cpp.yaml")
_PARSERS = ("tool_call_parser", "reasoning_parser")  # vLLM's table has SGLang's names too
SGLANG = _dialect("sglang.yaml", {key: VLLM.engine[key] for key in _PARSERS})
DIALECTS = (TENSORRT_LLM, VLLM, LLAMA_CPP, SGLANG)
# Where several engines have a name, the first of these.
ENGINE = {key: row for dialect in reversed(DIALECTS) for key, row in dialect.engine.items()}
SECTION = {key: row for dialect in reversed(DIALECTS) for key, row in dialect.keys.items()}
REQUEST = {key: row for dialect in reversed(DIALECTS) for key, row in dialect.request.items()}


def hint(entry: Only | Refused | Ignored) -> str:
    """What to use instead, as the end of a message."""
    return f"; nearest: {entry.nearest}" if entry.nearest else ""


def as_yaml(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "''"


def is_same(value: Any, other: Any) -> bool:
    """Whether two values are equal in YAML, where 1 is not `true`."""
    return type(value) is type(other) and bool(value == other)
