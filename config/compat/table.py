"""What a table of a foreign dialect is made of: an entry per key, an entry per name of a drafter.

`translate.py` parses with the tables; `docs/scripts/compatibility.py` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Keys = dict[str, Any]
Defaults = Callable[[Keys], Keys]  # what was given -> what the dialect takes for granted beside it


@dataclass(frozen=True, slots=True)
class To:
    """Accepted as a key (or a drafter) of ours.

    Args:
        value: the value by our meaning; raises `ValueError` with the reason.
        owner: the only drafter that the key is for; None is every one that has it.
        agrees: may be given beside another spelling of the same key if both have one value.
        defaults: of a drafter's name; takes out of its argument what must not be passed on.
    """

    key: str
    note: str = ""
    value: Callable[[Any], Any] | None = None
    owner: str | None = None
    agrees: bool = False
    defaults: Defaults | None = None


@dataclass(frozen=True, slots=True)
class Into:
    """Accepted as several keys of ours, or as none: `make` returns them by name.

    `make` raises `ValueError` with the reason.
    """

    make: Callable[[Any], Keys]
    note: str


@dataclass(frozen=True, slots=True)
class Only:
    """Accepted with the values that describe what holds here anyway; others are refused."""

    values: tuple[Any, ...]
    why: str  # of other values
    nearest: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Refused by name."""

    why: str
    nearest: str = ""  # what to use instead


Entry = To | Into | Only | Refused
Name = To | Refused


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's spelling.

    Args:
        selectors: keys that name the drafter.
        methods: its names of drafters; `To.key` is the `decoding_type`.
        keys: of a speculative section.
        engine: top-level keys.
    """

    name: str
    selectors: tuple[str, ...]
    methods: Mapping[str, Name]
    keys: Mapping[str, Entry]
    engine: Mapping[str, Entry] = field(default_factory=dict)


def hint(entry: Only | Refused) -> str:
    """What to use instead, as the end of a message."""
    return f"; nearest: {entry.nearest}" if entry.nearest else ""


def as_yaml(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def one_of(**values: Any) -> Callable[[Any], Any]:
    """A conversion of names; others are refused with the list."""

    def convert(value: Any) -> Any:
        if not isinstance(value, str) or value not in values:
            raise ValueError(f"allowed: {', '.join(values)}")
        return values[value]

    return convert


def whole(value: Any) -> int:
    """A whole number above 0."""
    if type(value) is not int or value < 1:
        raise ValueError("expected a whole number above 0")
    return value


def switch(on: Keys, off: Keys | None = None) -> Callable[[Any], Keys]:
    """The keys that true (and false) are translated to."""

    def make(value: Any) -> Keys:
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
        return dict(on) if value else dict(off or {})

    return make


def paths(value: Any) -> Any:
    """A tree of ranks; also as text, as in `"[[0], [0, 0]]"`, and with paths given twice."""
    import ast

    if isinstance(value, str):
        try:
            value = ast.literal_eval(value.replace(" ", ""))
        except (ValueError, SyntaxError):
            raise ValueError("expected a list of paths, as in [[0], [0, 0]]") from None
    if not isinstance(value, (list, tuple)) or not all(isinstance(p, (list, tuple)) for p in value):
        return value  # reported by the check
    return [list(path) for path in dict.fromkeys(map(tuple, value))]
