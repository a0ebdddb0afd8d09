"""The tables of other engines' options: a YAML file per engine, a row per option or several.

A row's key is an option's name, or several with commas between. Its value is a row's fields, or,
for an option that is only named otherwise, our name of it. `translate.py` parses with the tables;
`docs/scripts/compatibility.py` prints them.

A row may name one of the conversions here. That of a value returns ours; one that makes several
keys returns these; a drafter's defaults are made of the keys that were given. Each raises
`ValueError` with the reason where it refuses.
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
    """A whole number above 0."""
    if type(value) is not int or value < 1:
        raise ValueError("expected a whole number above 0")
    return value


def whole_or_none(value: Any) -> int | None:
    """A whole number above 0; none is the dialect's default."""
    return None if value is None else whole(value)


def expert_ranks(value: Any) -> int:
    """Ranks that share out a mixture's experts; 1: none do."""
    return 1 if value in (None, -1) else whole(value)


def paths(value: Any) -> Any:
    """A tree of ranks; also as text, as in `"[[0], [0, 0]]"`, and with paths given twice."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value.replace(" ", ""))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError("expected a list of paths, as in [[0], [0, 0]]") from None
    if not isinstance(value, (list, tuple)) or not all(isinstance(p, (list, tuple)) for p in value):
        return value  # reported by the check
    if any(not isinstance(rank, int) for path in value for rank in path):
        return value
    return [list(path) for path in dict.fromkeys(map(tuple, value))]


# vLLM's


def ngram_sizes(given: Keys) -> Keys:
    """One size given is both; none given is 5."""
    least, most = given.get("min_matching_ngram_size"), given.get("max_matching_ngram_size")
    size = most if least is None else least
    size = 5 if size is None else size
    return {"min_matching_ngram_size": size, "max_matching_ngram_size": size}


def schedule(value: Any) -> Keys:
    """Ranges (first, last, tokens) as largest batch size -> tokens."""
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
    """What a checkpoint gives; the class that vLLM converts a reranker to is not needed."""
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
    """The newest match, of up to 64 tokens or of exactly those given."""
    size = given.get("max_matching_ngram_size", -1)
    if size != -1:
        return {"is_use_oldest": False, "min_matching_ngram_size": size}
    given.pop("max_matching_ngram_size", None)
    return {"is_use_oldest": False, "max_matching_ngram_size": 64}


def suffix_automaton(value: Any) -> Keys:
    """`sa_config`: a look-up that is asked before the head."""
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
    """A head's draft."""
    return {"max_draft_len": 3}


# SGLang's: keys that only its drafters' defaults read.
INTERIM = frozenset({"num_steps", "topk", "num_nodes"})


def without_root(value: Any) -> Any:
    """Draft tokens; none is the dialect's default."""
    if value is None:
        return None
    if type(value) is not int or value < 2:
        raise ValueError("it counts the last known token too: a whole number of at least 2")
    return value - 1


def breadth(value: Any) -> Keys:
    """One continuation of a match, or a tree of several."""
    return {"shape": "chain" if whole(value) == 1 else "tree"}


def corpora(value: Any) -> Keys:
    """The one file that SGLang takes."""
    return {} if value is None else {"corpora": [value]}


def tree_or_chain(given: Keys) -> Keys:
    """A chain of 3 by default (SGLang's default for all but Llama and Grok)."""
    steps, topk, nodes = (given.get(key) for key in ("num_steps", "topk", "num_nodes"))
    if topk in (None, 1):
        return {"max_draft_len": _length(steps, nodes)}
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": topk, "max_draft_len": steps or 5}
    return tree if nodes is None else {**tree, "max_total_draft_tokens": nodes}


def chain(given: Keys) -> Keys:
    """A draft model's."""
    if given.get("topk") not in (None, 1):
        raise ValueError("speculative_eagle_topk: a draft model drafts a chain; allowed: 1")
    return {"max_draft_len": _length(given.get("num_steps"), given.get("num_nodes"))}


def block(given: Keys) -> Keys:
    """A block drafter's, which has as many tokens as the checkpoint's block by default."""
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
    """A tree of 11 tokens by default."""
    if given.get("num_steps") is not None:
        raise ValueError(
            "speculative_num_steps: a look-up has none; use speculative_num_draft_tokens"
        )
    shape = "chain" if given.get("topk") == 1 else "tree"
    return {"max_draft_len": given.get("num_nodes") or 11, "max_tree_depth": 18, "shape": shape}


def _length(steps: int | None, nodes: int | None) -> int:
    """Of a chain, where the number of steps prevails, as in SGLang."""
    if steps and nodes and steps != nodes:
        log.warning(
            "speculative_num_draft_tokens: %d is taken as %d, because a chain of "
            "speculative_num_steps: %d has as many draft tokens, and the last known one counts too",
            *(nodes + 1, steps + 1, steps),
        )
    return steps or nodes or 3


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the second takes ten times as long
# A function of this module, by its name.
Conversion = Annotated[Callable[[Any], Any], BeforeValidator(lambda name: globals()[name])]


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
    environment: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of the command line, and the selectors and keys that they set."""
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
SECTION |= {name: SECTION[key] for name, key in LLAMA_CPP.environment.items() if key in SECTION}
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
