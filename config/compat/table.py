"""The tables of other engines' options: one YAML file per engine.

A row's key is the name of an option, or several names separated by commas. Its value is the row's
fields or, for an option that only has another name, Outrider's name. `translate.py` parses
configurations with the tables; `docs/scripts/compatibility.py` prints them.

A row may name a conversion function of this module. The conversion of a value returns Outrider's
value; a conversion into several keys returns these; the defaults of a drafter are computed from the
keys that were given. Each raises `ValueError` with the reason if it rejects the value.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field

from ..files import HfOverrides
from ..strict import Strict

log = logging.getLogger(__name__)
Keys = dict[str, Any]


def whole(value: Any) -> int:
    """Checks an integer above 0."""
    if type(value) is not int or value < 1:
        raise ValueError("expected a whole number above 0")
    return value


def whole_or_none(value: Any) -> int | None:
    """Checks an integer above 0; None means the dialect's default."""
    return None if value is None else whole(value)


def expert_ranks(value: Any) -> int:
    """Returns the number of ranks that share a mixture's experts; 1: experts are not shared."""
    return 1 if value in (None, -1) else whole(value)


def paths(value: Any) -> Any:
    """Converts a tree of ranks: accepts text such as `"[[0], [0, 0]]"`, and repeated paths."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value.replace(" ", ""))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError("expected a list of paths, as in [[0], [0, 0]]") from None
    if not isinstance(value, (list, tuple)) or not all(isinstance(p, (list, tuple)) for p in value):
        return value  # the strict check reports it
    if any(not isinstance(rank, int) for path in value for rank in path):
        return value
    return [list(path) for path in dict.fromkeys(map(tuple, value))]


# vLLM's


def ngram_sizes(given: Keys) -> Keys:
    """Uses a single given size for both keys; the default is 5."""
    least, most = given.get("min_matching_ngram_size"), given.get("max_matching_ngram_size")
    size = most if least is None else least
    size = 5 if size is None else size
    return {"min_matching_ngram_size": size, "max_matching_ngram_size": size}


def schedule(value: Any) -> Keys:
    """Converts ranges (first, last, tokens) to a mapping from largest batch size to tokens."""
    lengths, after = {}, 1
    if value is None:
        return {}
    for each in value if isinstance(value, (list, tuple)) else [None]:
        if not isinstance(each, (list, tuple)) or [type(part) for part in each] != [int] * 3:
            raise ValueError("expected a list of [first batch size, last, tokens]")
        first, last, tokens = each
        if first != after or last < first:
            raise ValueError(f"the range [{first}, {last}] must begin at {after}: without gaps")
        lengths[last], after = tokens, last + 1
    return {"draft_len_schedule": lengths}


def overrides(value: Any) -> Keys:
    """Drops the class to which vLLM converts a reranker, which is not needed here."""
    if not isinstance(value, (dict, NoneType)):
        raise ValueError("expected a mapping of keys of config.json")
    kept = dict(value or {})
    if "classifier_from_token" in kept:
        kept.pop("is_original_qwen3_reranker", None)
        classes = kept.pop("architectures", [])
        if any(not str(name).endswith("ForSequenceClassification") for name in classes):
            raise ValueError(f"architectures: {classes!r} does not score pairs")
    if others := kept.keys() - HfOverrides.model_fields.keys():
        allowed = ", ".join(HfOverrides.model_fields)
        named = ", ".join(sorted(map(repr, others)))
        raise ValueError(f"{named} cannot be overridden; allowed: {allowed}")
    return kept


# TensorRT-LLM's


def automaton_sizes(given: Keys) -> Keys:
    """Selects the newest match, of up to 64 tokens or of exactly the given size."""
    size = given.get("max_matching_ngram_size", -1)
    if size != -1:
        return {"is_use_oldest": False, "min_matching_ngram_size": size}
    given.pop("max_matching_ngram_size", None)
    return {"is_use_oldest": False, "max_matching_ngram_size": 64}


def suffix_automaton(value: Any) -> Keys:
    """Converts `sa_config` to a look-up that is asked before the head."""
    if value is None or value is False:
        return {}
    if value is True:
        value = {}
    if not isinstance(value, dict) or value.keys() - {"threshold", "enable_global_pool"}:
        raise ValueError("expected a mapping with threshold, enable_global_pool")
    threshold = value.get("threshold", 4)
    if type(threshold) is not int or not 1 <= threshold <= 64:
        raise ValueError("threshold must be a whole number from 1 to 64")
    member = {
        "decoding_type": "NGram",
        "min_matching_ngram_size": threshold,
        "max_matching_ngram_size": 64,
        "is_use_oldest": False,
        "pool_scope": "tenant" if value.get("enable_global_pool") else "request",
    }
    return {"before": member}


# llama.cpp's


def three_tokens(given: Keys) -> Keys:
    """Returns the default length of a head's draft."""
    return {"max_draft_len": 3}


# SGLang's: keys that are only read by the defaults of its drafters.
INTERIM = frozenset({"num_steps", "topk", "num_nodes"})


def without_root(value: Any) -> Any:
    """Converts a number of draft tokens; None means the dialect's default."""
    if value is None:
        return None
    if type(value) is not int or value < 2:
        raise ValueError("it counts the last known token too: a whole number of at least 2")
    return value - 1


def breadth(value: Any) -> Keys:
    """Selects one continuation of a match, or a tree of several."""
    return {"shape": "chain" if whole(value) == 1 else "tree"}


def corpora(value: Any) -> Keys:
    """Converts the single file that SGLang accepts."""
    return {} if value is None else {"corpora": [value]}


def tree_or_chain(given: Keys) -> Keys:
    """Returns the keys of a tree or chain; default: a chain of 3, as in SGLang for most models."""
    steps, topk, nodes = (given.get(key) for key in ("num_steps", "topk", "num_nodes"))
    if topk in (None, 1):
        return {"max_draft_len": _length(steps, nodes)}
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": topk, "max_draft_len": steps or 5}
    return tree if nodes is None else {**tree, "max_total_draft_tokens": nodes}


def chain(given: Keys) -> Keys:
    """Returns the keys of a draft model's chain."""
    if given.get("topk") not in (None, 1):
        raise ValueError("speculative_eagle_topk: a draft model drafts a chain; allowed: 1")
    return {"max_draft_len": _length(given.get("num_steps"), given.get("num_nodes"))}


def block(given: Keys) -> Keys:
    """Returns the keys of a block drafter; the default length is that of the checkpoint's block."""
    if given.get("topk") not in (None, 1):
        raise ValueError("speculative_eagle_topk: a block drafter drafts a chain; allowed: 1")
    if given.get("num_steps") is not None:
        raise ValueError(
            "speculative_num_steps: a block is drafted in one step; use "
            "speculative_num_draft_tokens"
        )
    nodes = given.get("num_nodes")
    return {} if nodes is None else {"max_draft_len": nodes}


def lookup(given: Keys) -> Keys:
    """Returns the keys of a look-up; default: a tree of 11 tokens."""
    if given.get("num_steps") is not None:
        raise ValueError(
            "speculative_num_steps: a look-up has none; use speculative_num_draft_tokens"
        )
    shape = "chain" if given.get("topk") == 1 else "tree"
    return {"max_draft_len": given.get("num_nodes") or 11, "max_tree_depth": 18, "shape": shape}


def _length(steps: int | None, nodes: int | None) -> int:
    """Returns the length of a chain; as in SGLang, the number of steps takes precedence."""
    if steps and nodes and steps != nodes:
        log.warning(
            "speculative_num_draft_tokens: %d is taken as %d, because a chain of "
            "speculative_num_steps: %d has as many draft tokens, and the last known one counts too",
            *(nodes + 1, steps + 1, steps),
        )
    return steps or nodes or 3


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the second one is ten times slower
# A function of this module, given by name.
Conversion = Annotated[Callable[[Any], Any], BeforeValidator(lambda name: globals()[name])]


class Row(Strict):
    """An option of another engine and its translation."""

    owner: str | None = None
    """The only drafter that the key applies to; None: every drafter that has the key."""
    switch: bool = False
    """On the command line it takes no value, although none of its values here is a boolean."""
    agrees: bool = False
    """May be given together with another spelling of the same key if both have the same value."""

    @property
    def is_switch(self) -> bool:
        """True if the option takes no value on the command line."""
        return self.switch

    def keys(self, given: Any) -> Keys:
        """Translates the value to Outrider's keys.

        Raises:
            ValueError: the value is rejected; has the reason, the allowed values and an
                alternative.
        """
        raise NotImplementedError


class To(Row):
    """Accepted as one of Outrider's keys or drafters."""

    to: str
    """Outrider's name."""
    note: str = ""
    """Additional remark for the page."""
    rename: Mapping[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Outrider's value -> other names of it."""
    convert: Conversion | None = None
    """Converts the value; raises `ValueError` with the reason."""
    defaults: Conversion | None = None
    """For a drafter's name: computes the dialect's defaults from the given keys. It removes keys
    from its argument that must not be passed on."""

    @property
    def is_alias(self) -> bool:
        """True if values have the same meaning under both names, for every drafter."""
        return not self.rename and self.convert is None and self.owner is None

    def keys(self, given: Any) -> Keys:
        if self.convert is not None:
            return {self.to: self.convert(given)}
        ours = (ours for ours, names in self.rename.items() if given in names)
        return {self.to: next(ours, given)}


class Into(Row):
    """Accepted as several of Outrider's keys, or as none."""

    note: str
    """The keys, for the page."""
    cases: dict[Any, Keys | str] = Field(default_factory=dict)
    """Value -> Outrider's keys, or the reason for rejecting it."""
    make: Conversion | None = None
    """Computes the keys from the value if there are many cases; raises `ValueError`."""

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
    """Accepted with values that describe Outrider's behaviour; other values are rejected."""

    only: tuple[Any, ...]
    """The accepted values."""
    why: str
    """Why other values are rejected."""
    nearest: str = ""
    """What to use instead of other values."""

    @property
    def is_switch(self) -> bool:
        return self.switch or _are_booleans(self.only)

    def keys(self, given: Any) -> Keys:
        if any(is_same(each, given) for each in self.only):
            return {}
        allowed = " or ".join(as_yaml(each) for each in self.only)
        raise ValueError(f"{self.why}; allowed: {allowed}{hint(self)}")


class Refused(Row):
    """Rejected by name."""

    refused: str
    """The reason."""
    nearest: str = ""
    """What to use instead."""

    def keys(self, given: Any) -> Keys:
        raise ValueError(f"refused: {self.refused}{hint(self)}")


class Ignored(Row):
    """Accepted with a warning; the output does not depend on its value."""

    ignored: str
    """Why there is nothing to set."""
    nearest: str = ""
    """What to set instead."""

    def keys(self, given: Any) -> Keys:
        return {}


Entry = To | Into | Only | Refused | Ignored


def _are_booleans(values: Iterable[Any]) -> bool:
    """Returns True if all values are booleans or null."""
    kinds = {type(value) for value in values}
    return bool in kinds and kinds <= {bool, type(None)}


def _rows(table: Mapping[str, Any]) -> dict[str, Any]:
    """Splits rows with several names into one row per option."""
    rows: dict[str, Any] = {}
    for names, row in table.items():
        for name in names.split(", "):
            if name in rows:
                raise ValueError(f"{name} is given twice")
            rows[name] = {"to": row} if isinstance(row, str) else row
    return rows


Entries = Annotated[Mapping[str, Entry], BeforeValidator(_rows)]


class Dialect(Strict):
    """The configuration keys of one engine."""

    name: str
    """Name of the engine."""
    selectors: tuple[str, ...]
    """Keys that select the drafter."""
    methods: Annotated[Mapping[str, To | Refused], BeforeValidator(_rows)]
    """The engine's names of drafters; `To.to` is the `decoding_type`."""
    keys: Entries
    """Keys of a speculative section."""
    engine: Entries = Field(default_factory=dict)
    """Top-level keys."""
    kv_cache: Entries = Field(default_factory=dict)
    """Keys of `kv_cache_config`."""
    request: Entries = Field(default_factory=dict)
    """Fields of HTTP request bodies other than OpenAI's and Outrider's."""
    options: Mapping[str, str] = Field(default_factory=dict)
    """Command-line options that are not keys, and Outrider's names of them."""
    environment: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables, and the selectors and keys that they set."""
    short: Mapping[str, str] = Field(default_factory=dict)
    """Options with a single dash, and the keys of a section or of the engine that they set."""


def _dialect(file: str, engine: Mapping[str, Entry] = MappingProxyType({})) -> Dialect:
    """Reads a file's table; `engine` are rows shared with another engine."""
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    data = yaml.load(text, _LOADER)
    return Dialect.model_validate({**data, "engine": {**engine, **data.get("engine", {})}})


TENSORRT_LLM = _dialect("tensorrt_llm.yaml")
VLLM = _dialect("vllm.yaml")
LLAMA_CPP = _dialect("llama_cpp.yaml")
_PARSERS = ("tool_call_parser", "reasoning_parser")  # vLLM's table also has SGLang's names
SGLANG = _dialect("sglang.yaml", {key: VLLM.engine[key] for key in _PARSERS})
DIALECTS = (TENSORRT_LLM, VLLM, LLAMA_CPP, SGLANG)
# If several engines have a name, the first one's row is used.
ENGINE = {key: row for dialect in reversed(DIALECTS) for key, row in dialect.engine.items()}
SECTION = {key: row for dialect in reversed(DIALECTS) for key, row in dialect.keys.items()}
SECTION |= {name: SECTION[key] for name, key in LLAMA_CPP.environment.items() if key in SECTION}
REQUEST = {key: row for dialect in reversed(DIALECTS) for key, row in dialect.request.items()}


def hint(entry: Only | Refused | Ignored) -> str:
    """Returns what to use instead, as the end of a message."""
    return f"; nearest: {entry.nearest}" if entry.nearest else ""


def as_yaml(value: Any) -> str:
    """Returns a value in YAML's notation."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "''"


def is_same(value: Any, other: Any) -> bool:
    """Returns True if two values are equal in YAML, in which 1 is not `true`."""
    return type(value) is type(other) and bool(value == other)
