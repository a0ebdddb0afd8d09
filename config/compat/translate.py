"""Translates other engines' configuration keys to Outrider's, by the dialects' tables.

    foreign spelling -> canonical keys -> `merge` of the sources -> parsed, frozen model

The drafter is named by `decoding_type` (TensorRT-LLM and Outrider), `method` (vLLM), `spec_type`
(llama.cpp) or `speculative_algorithm` (SGLang), which also selects that dialect's defaults. Every
section accepts the keys of all dialects. Keys that are in no table pass through, and the strict
check reports them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, renamed, shown_value
from ..files import stored_config
from ..section import SpeculationBase
from ..speculation import SECTIONS, ComposeConfig
from ..strict import check_foreign_names, nearest, parse, unknown_key, unknown_name
from .table import (
    DIALECTS,
    ENGINE,
    INTERIM,
    LLAMA_CPP,
    SECTION,
    SGLANG,
    TENSORRT_LLM,
    VLLM,
    Conversion,
    Dialect,
    Entry,
    Ignored,
    Keys,
    Only,
    Refused,
    To,
    hint,
)

log = logging.getLogger(__name__)
# Order in which llama.cpp asks its drafters; the first with a guess is used.
ORDER = tuple(each.to for each in LLAMA_CPP.methods.values() if isinstance(each, To))
# Top-level keys of other engines that are accepted.
FOREIGN = frozenset(
    [*(key for key, row in {**SGLANG.keys, **ENGINE}.items() if not isinstance(row, Refused)),
     *SGLANG.selectors]
)  # fmt: skip
_SELECTORS = tuple(selector for dialect in DIALECTS for selector in dialect.selectors)
_LISTS = ("method", "spec_type")  # accept names of several drafters in either dialect
_AT = "speculative_config."
_BEFORE = "before"  # a member that is asked before the others
_MODEL = "speculative_model"
LENGTH = "max_draft_len"
_PARALLEL = "parallel_drafting"
_AT_ONCE = {"DraftTarget": "PARD", "Eagle3": "PEagle"}
_MASK_KEYS = ("pard_token", "ptd_token_id")  # of `config.json` with mask tokens
_OF_MEMBERS = frozenset({LENGTH})  # each member has its own, and so may the composition
SHARED = frozenset(SpeculationBase.model_fields) - _OF_MEMBERS  # given once for all members
_ABOVE = frozenset(ComposeConfig.model_fields) - _OF_MEMBERS
_OF_ANY = frozenset(key for section in SECTIONS.values() for key in section.model_fields)
# Drafters' own names of canonical keys, where they differ.
_OTHERWISE = {
    "NGramMod": {"draft_min": "n_min", "ngram_size_n": "n_match"},
    "Eagle": {"choices": "eagle_choices"},
    "Eagle3": {"choices": "eagle_choices"},
    "PEagle": {"choices": "eagle_choices"},
    "MTP": {"choices": "mtp_choices"},
    "Medusa": {"choices": "medusa_choices"},
}
Drafter = tuple[Any, Conversion | None]  # its `decoding_type` as given, and its defaults


@dataclass(frozen=True, slots=True)
class Given:
    """A key as given, and its canonical key and value."""

    source: str
    key: str
    value: Any
    owner: str | None = None  # the only drafter that it applies to
    agrees: bool = False  # may repeat the value of another spelling


def fields_of(kind: Any) -> frozenset[str]:
    """Returns the keys of a drafter's section; empty if there is no such drafter."""
    section = SECTIONS.get(kind) if isinstance(kind, str) else None
    return frozenset(section.model_fields) if section else frozenset()


def check_placed(keys: Iterable[Any], own: Collection[str]) -> None:
    """Raises `ConfigError` for a key of a speculative section that is at the top level."""
    for key in keys:
        name = key.replace("-", "_") if isinstance(key, str) else ""
        if name in (_OF_ANY | SECTION.keys()) - FOREIGN and name not in own:
            raise ConfigError.at(key, "a key of speculative_config; put it into that section")


def own_name(kind: Any, key: str) -> str:
    """Returns a drafter's name of a canonical key."""
    return _OTHERWISE.get(kind, {}).get(key, key) if isinstance(kind, str) else key


def with_model(kinds: list[str]) -> list[str]:
    """Returns the drafters of a section with a model; adds DraftTarget if none takes a model."""
    if kinds[0] in ("None", "Compose") or any(_takes_model(kind) for kind in kinds):
        return kinds
    return [*kinds, "DraftTarget"]


def compose(kinds: Sequence[Any], given: Sequence[Given], at: str) -> dict[str, Any]:
    """Builds a section of one drafter, or of several in order of precedence.

    Raises:
        ConfigError: a key belongs to another drafter or to none, or repeats another key.
    """
    if len(kinds) == 1:
        return {"decoding_type": kinds[0], **own_keys(kinds[0], given, at)}
    above, parts = spread(kinds, given, at)
    members = [{"decoding_type": kind, **part} for kind, part in zip(kinds, parts, strict=True)]
    return {"decoding_type": "Compose", **above, "members": members}


def own_keys(kind: Any, given: Sequence[Given], at: str) -> dict[str, Any]:
    """Renames `given` to the keys of one drafter; unknown keys are left to the strict check."""
    fields = fields_of(kind)
    for each in given:
        foreign = own_name(kind, each.key) not in fields and (
            each.key != each.source or each.key in _OF_ANY
        )
        if each.owner not in (None, kind) or (fields and foreign):
            raise _misplaced(each, [kind], at)
    return _joined(kind, given, at)


def spread(
    kinds: Sequence[str], given: Sequence[Given], at: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Splits keys into those of a composition and those of each member.

    A key goes to every member that has it. A key with a member's name goes only to that member, and
    takes precedence. A common length does not apply to a member whose shortest draft is longer.
    """
    wanting = [kind for kind in kinds if _needs_model(kind)]
    model = next((each for each in given if each.key == _MODEL), None)
    if model is not None and len(wanting) > 1:
        raise ConfigError.at(
            f"{at}{model.source}", f"{' and '.join(wanting)} want one each; give them in `members`"
        )
    parts, taken = [], set[str]()
    for kind in kinds:
        fields = fields_of(kind) - _ABOVE
        if wanting and kind not in wanting:
            fields -= {_MODEL}
        known = [each for each in given if own_name(kind, each.key) in fields]
        shared = [each for each in known if each.owner is None]
        own = [each for each in known if each.owner == kind]
        shared = [each for each in shared if not _is_too_short(kind, each, known)]
        parts.append(_joined(kind, shared, at) | _joined(kind, own, at))
        taken.update(each.source for each in (*shared, *own))
    above = [each for each in given if each.source not in taken]
    for each in above:
        if each.owner is not None or (each.key != each.source and each.key not in _ABOVE):
            raise _misplaced(each, kinds, at)
        if each.key not in _ABOVE:
            known_keys = {name for kind in kinds for name in fields_of(kind)}
            raise unknown_key(f"{at}{each.source}", each.source, sorted(known_keys | _ABOVE))
    return _joined("Compose", above, at), parts


def _is_too_short(kind: str, given: Given, keys: Sequence[Given]) -> bool:
    """Returns True if `given` is a length below the shortest draft of a drafter with `keys`."""
    field = SECTIONS[kind].model_fields.get("n_min")
    if given.key != LENGTH or field is None:
        return False
    least = next(
        (each.value for each in keys if own_name(kind, each.key) == "n_min"), field.default
    )
    return type(given.value) is int and type(least) is int and given.value < least


def _joined(kind: Any, given: Sequence[Given], at: str) -> dict[str, Any]:
    """Renames keys to the drafter's own names.

    Raises:
        ConfigError: two keys have the same meaning.
    """
    joined: dict[str, Any] = {}
    said: dict[str, Given] = {}
    for each in given:
        key = own_name(kind, each.key)
        other = said.get(key)
        if other is not None and not ((each.agrees or other.agrees) and other.value == each.value):
            raise ConfigError.at(
                f"{at}{each.source}", f"given twice; {other.source} means the same"
            )
        joined[key], said[key] = each.value, each
    return joined


def _takes_model(kind: str) -> bool:
    return _MODEL in SECTIONS[kind].model_fields


def _needs_model(kind: str) -> bool:
    return _takes_model(kind) and SECTIONS[kind].model_fields[_MODEL].is_required()


def _misplaced(given: Given, kinds: Sequence[Any], at: str) -> ConfigError:
    known = [given.owner] if given.owner else [
        kind for kind in SECTIONS if own_name(kind, given.key) in fields_of(kind)
    ]  # fmt: skip
    whose = "/".join(str(kind) for kind in known) or "no drafter"
    return ConfigError.at(
        f"{at}{given.source}",
        f"it is an option of {whose}; drafting here is {', '.join(map(str, kinds))}",
    )


def translate_engine(data: Mapping[str, Any]) -> dict[str, Any]:
    """Translates the top-level keys of other engines' configurations.

    Raises:
        ConfigError: a key is rejected, or two have the same meaning; names the key.
    """
    engine, section = heeded(data, ENGINE, ""), {}
    for key in [*engine]:
        name = key.replace("-", "_") if isinstance(key, str) else key
        if name in SGLANG.keys or name in SGLANG.selectors:
            section[name] = engine.pop(key)
    cache = engine.pop("kv_cache_config", None)
    if not isinstance(cache, dict | None):
        raise ConfigError.at("kv_cache_config", f"expected a mapping, got {shown_value(cache)}")
    for key in cache or {}:
        if key not in TENSORRT_LLM.kv_cache:
            known = [name for name, row in TENSORRT_LLM.kv_cache.items() if isinstance(row, To)]
            raise unknown_key(f"kv_cache_config.{key}", str(key), known)
    cache = heeded(cache or {}, TENSORRT_LLM.kv_cache, "kv_cache_config.")
    given = _read_all(engine, ENGINE, "")
    cached = _read_all(cache, TENSORRT_LLM.kv_cache, "kv_cache_config.")
    ours = _joined(None, given, "")
    tokens = None
    for each in cached:
        if each.key == "num_kv_tokens":
            tokens = each.value
        else:
            ours.setdefault(each.key, each.value)
    if tokens is not None:
        size = ours.get("block_size")
        ours.setdefault("num_kv_blocks", -(-tokens // (size if type(size) is int and size else 16)))
    if section:  # in SGLang, these keys are the whole section
        if ours.get("speculative_config") is not None:
            raise ConfigError.at(
                next(iter(section)), "speculative_config says it; give one of them"
            )
        ours["speculative_config"] = section
    return ours


def translate_section(data: Mapping[str, Any], at: str = "speculative_config.") -> dict[str, Any]:
    """Translates a speculative section of any dialect; `at` is the prefix of its keys in errors.

    Raises:
        ConfigError: it names no drafter or an unknown one, repeats a setting, or has a rejected
            key; names the key.
    """
    data = heeded(data, SECTION, at)
    if _is_name(data.get("method")) and "model" in data and not _is_name(data["model"]):
        del data["model"]  # as in vLLM, it is ignored
        log.warning("%smodel has no effect here: %s has no model", at, data["method"])
    drafters = _drafters(data, at)
    if data.get(_PARALLEL) is True:
        drafters = [(_at_once(kind, at), defaults) for kind, defaults in drafters]
    kinds = [kind for kind, _ in drafters]
    own = frozenset().union(*map(fields_of, kinds), fields_of("Compose"))
    if any(map(fields_of, kinds)):
        unknown = [key for key in data if key not in SECTION and key not in _OF_ANY]
        check_foreign_names(unknown, own, _spellings(own, kinds), at)
    given = read_keys(data, kinds, at)
    if "MTP" not in kinds and kinds != ["Compose"]:
        given = [each for each in given if each.key != _MODEL or not _is_name(each.value)]
    first = [each.value for each in given if each.key == _BEFORE]
    given = [each for each in given if each.key != _BEFORE]
    for kind, defaults in drafters:
        if defaults is not None:
            given = _with_defaults(kind, defaults, given, at)
    given = [each for each in given if each.key not in INTERIM]
    section = compose(kinds, given, at)
    members = section.get("members")
    if isinstance(members, list):
        section["members"] = [
            translate_section(each, f"{at}members.{index}.") if isinstance(each, dict) else each
            for index, each in enumerate(members)
        ]
    return _behind(first[0], section) if first else section


def as_given(error: ConfigError, data: Mapping[str, Any]) -> ConfigError:
    """Returns the error of a translated configuration with the keys that the user gave in `data`.

    Only keys whose values have the same meaning under both names are renamed.
    """
    section = data.get("speculative_config")
    names = _aliases(data, ENGINE, "")
    if isinstance(section, Mapping):
        names += _aliases(section, SECTION, _AT)
    found = renamed(error, names)
    found.others = [renamed(each, names) for each in error.others]
    return found


def _aliases(data: Mapping[str, Any], table: Mapping[str, Entry], at: str) -> list[tuple[str, str]]:
    """Returns a pattern of the canonical name of every alias in `data`, and the alias."""
    rows = [(key, table[key]) for key in data if key in table]
    return [
        (re.escape(at + row.to) + r"\b", at + key)
        for key, row in rows
        if isinstance(row, To) and row.is_alias and row.to not in data
    ]


def _at_once(kind: Any, at: str) -> Any:
    """Returns the drafter like `kind` that drafts all tokens at once, for `parallel_drafting`."""
    if kind in _AT_ONCE.values():
        return kind
    if kind not in _AT_ONCE:
        raise ConfigError.at(
            f"{at}{_PARALLEL}", f"{kind} does not draft so; allowed with {', '.join(_AT_ONCE)}"
        )
    return _AT_ONCE[kind]


def read_keys(data: Mapping[str, Any], kinds: Sequence[Any], at: str) -> list[Given]:
    """Translates the keys of a section of drafters of `kinds`.

    Raises:
        ConfigError: a key is rejected; has its name, the reason and an alternative.
    """
    own = frozenset().union(*map(fields_of, kinds), fields_of("Compose"))
    table = {
        key: entry
        for key, entry in SECTION.items()
        if key not in own or (isinstance(entry, To) and entry.to == key)
    }
    return _read_all(data, table, at)


def _spellings(own: frozenset[str], kinds: Sequence[Any]) -> list[str]:
    """Returns other engines' names of the keys `own` of drafters of `kinds`."""
    return [
        key
        for key, row in SECTION.items()
        if not isinstance(row, Refused | Only)
        and (
            not isinstance(row, To)
            or row.to in INTERIM
            or any(own_name(kind, row.to) in own for kind in kinds)
        )
    ]


def heeded(data: Mapping[str, Any], table: Mapping[str, Entry], at: str) -> dict[str, Any]:
    """Returns `data` without keys that have no effect; warns of each of them that is not null."""
    if not isinstance(data, Mapping):
        where = at.rstrip(".") or "config"
        raise ConfigError.at(where, f"expected a mapping, got {shown_value(data)}")
    left = dict(data)
    for key, value in data.items():
        entry = table.get(key)
        if isinstance(entry, Ignored):
            del left[key]
            if value is not None:
                log.warning("%s%s has no effect here: %s%s", at, key, entry.ignored, hint(entry))
    return left


def _read_all(data: Mapping[str, Any], table: Mapping[str, Entry], at: str) -> list[Given]:
    return [given for key, value in data.items() for given in _read(key, value, table.get(key), at)]


def _read(key: str, value: Any, entry: Entry | None, at: str) -> list[Given]:
    """Translates one key by its entry."""
    if entry is None:
        return [Given(key, key, value)]
    try:
        keys = entry.keys(value)
    except ValueError as error:
        raise ConfigError.at(f"{at}{key}", f"{error} (got {shown_value(value)})") from None
    return [Given(key, name, each, entry.owner, entry.agrees) for name, each in keys.items()]


def _drafters(data: Keys, at: str) -> list[Drafter]:
    """Removes the keys that select drafters from `data`, and returns the drafters."""
    if data.pop("spec_default", None) is True and not any(data.get(key) for key in _SELECTORS):
        data["spec_type"] = "ngram-mod"  # the meaning of llama.cpp's switch
    said = [key for key in _SELECTORS if data.get(key) is not None]
    if len(said) > 1:
        raise ConfigError.at(at + said[1], f"{said[0]} says it; give one of them")
    values = {key: data.pop(key, None) for key in _SELECTORS}
    if not said and "model" in data:  # as in vLLM, the model determines the drafter
        method = _method_of(data["model"], f"{at}model")
        return [_drafter(VLLM, "method", method, at)]
    if not said:
        for key in data:
            near = nearest(key, _SELECTORS, 0.75) if isinstance(key, str) else None
            if near is not None:
                raise unknown_key(f"{at}{key}", key, [near])
        raise ConfigError.at(
            f"{at}decoding_type",
            "this key is required (or vLLM's `method`, llama.cpp's `spec_type`, SGLang's "
            "`speculative_algorithm`)",
        )
    (key,) = said
    if key not in _LISTS:
        dialect = next(each for each in DIALECTS if key in each.selectors)
        return [_drafter(dialect, key, values[key], at)]
    found = _listed(values[key], at + key)
    keys = read_keys(data, list(found), at)
    if any(each.key == _MODEL and not _is_name(each.value) for each in keys):
        return [(kind, found.get(kind)) for kind in with_model(list(found))]
    return list(found.items())


def _drafter(dialect: Dialect, key: str, name: Any, at: str) -> Drafter:
    """Returns the drafter with a dialect's name, or with Outrider's."""
    entry = dialect.methods.get(name) if isinstance(name, str) else None
    if isinstance(entry, Refused):
        raise ConfigError.at(at + key, f"{name!r} is refused: {entry.refused}{hint(entry)}")
    if entry is not None:
        return entry.to, entry.defaults
    if dialect is SGLANG:
        raise unknown_name(at + key, "algorithm", name, _names(dialect))
    return name, None


def _names(dialect: Dialect) -> list[str]:
    """Returns a dialect's names of implemented drafters, without vLLM's names in brackets."""
    methods = dialect.methods.items()
    return [name for name, each in methods if isinstance(each, To) and not name.startswith("[")]


def _listed(names: Any, at: str) -> dict[str, Conversion | None]:
    """Returns drafters by vLLM's, llama.cpp's or Outrider's names, in the order of asking.

    llama.cpp's drafters are in llama.cpp's order; drafters with a model come last.

    Raises:
        ConfigError: a name is unknown, or excludes other drafters; names `at`.
    """
    if not isinstance(names, str):
        shown = shown_value(names)
        raise ConfigError.at(at, f"expected a name, or several with commas between, got {shown}")
    found: dict[str, Conversion | None] = {}
    for name in (each.strip() for each in names.split(",")):
        dialect = LLAMA_CPP if name in LLAMA_CPP.methods else VLLM
        kind, defaults = _drafter(dialect, "", name, at)
        if kind not in SECTIONS:
            raise unknown_name(at, "drafter", name, [*_names(VLLM), *_names(LLAMA_CPP)])
        found[kind] = defaults
    for alone, called in (("None", "none"), ("Compose", "Compose")):
        if alone in found and len(found) > 1:
            raise ConfigError.at(at, f"{called} goes with no other drafter, got {names!r}")
    places = {kind: place for place, kind in enumerate(ORDER)}
    kinds = sorted(found, key=lambda kind: (_takes_model(kind), places.get(kind, len(ORDER))))
    return {kind: found[kind] for kind in kinds}


# Method of a `model` without a `method`, by the types in its `config.json`.
_TYPES = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "peagle": "peagle",
    "dflash": "dflash",
    "dflash2": "dflash",
    "muse_glimmer_assistant": "dflash",
    "dspark": "dspark",
    "mtp": "mtp",
    "medusa": "medusa",
    "recurrent_drafting_drafter": "redrafter",
}


def _is_name(model: Any) -> bool:
    """Returns True if `model` names a look-up instead of a checkpoint."""
    return model in ("ngram", "[ngram]", "suffix")


def _method_of(model: Any, at: str) -> str:
    """Returns the method for a checkpoint by vLLM's rules; draft_model by default.

    Raises:
        ConfigError: the checkpoint's drafter is not implemented; names `at`.
    """
    if not isinstance(model, str):
        return "draft_model"  # the strict check reports it
    if _is_name(model):
        return model
    config = stored_config(Path(model))
    kinds = [str(config.get(key)) for key in ("speculators_model_type", "model_type")]
    for kind in kinds:
        if isinstance(VLLM.methods.get(kind), Refused):
            raise ConfigError.at(
                at,
                f"{model!r} is a checkpoint of {kind}, which is not implemented; use an "
                "EAGLE-3, MTP, Medusa or draft-model checkpoint",
            )
    names = config.get("architectures")
    name = str(names[0]).lower() if isinstance(names, list) and names else ""
    folder = Path(model).name.lower()
    has_masks = any(key in config for key in _MASK_KEYS)
    signs = (
        *((_TYPES[kind], True) for kind in kinds if kind in _TYPES),
        ("dspark", "dspark" in name or "dspark_config" in config),
        ("dflash", "dflash" in name or "dflash_config" in config),
        ("peagle", "peagle" in name or (has_masks and "eagle" in name + folder)),
        ("eagle3", "eagle3" in name),
        ("eagle", "eagle" in name),
        ("medusa", "medusa" in name or "medusa_num_heads" in config),
        ("mtp", kinds[1].endswith("_mtp") or name.endswith("mtpmodel")),
        ("PARD2", config.get("pard2") is True or config.get("spd_type") == "pard2"),
        ("PARD", has_masks),
        ("eagle3", "eagle3" in folder or "eagle-3" in folder),
        ("eagle", "eagle" in folder),
    )
    return next((method for method, is_shown in signs if is_shown), "draft_model")


def _with_defaults(kind: Any, defaults: Conversion, given: list[Given], at: str) -> list[Given]:
    """Adds the defaults of the dialect that named a drafter to `given`."""
    own = {own_name(kind, each.key): each.value for each in given if each.owner in (None, kind)}
    known = dict(own)
    try:
        more = defaults(known)
    except ValueError as error:
        key, _, reason = str(error).partition(": ")
        raise ConfigError.at(f"{at}{key}", reason) from None
    dropped = own.keys() - known.keys()
    added = [Given(key, key, each, kind) for key, each in more.items() if known.get(key) is None]
    return [*(each for each in given if each.key not in dropped), *added]


def _behind(first: Keys, section: Keys) -> Keys:
    """Returns a composition in which `first` is asked before the section's drafter."""
    rule = {key: section.pop(key) for key in tuple(section)
            if key in ("verification", "lossy", "max_concurrency")}  # fmt: skip
    length = {"max_draft_len": section["max_draft_len"]} if "max_draft_len" in section else {}
    return {"decoding_type": "Compose", **rule, "members": [{**first, **length}, section]}


def check_same_drafters(section: Mapping[str, Any], spec_type: str | None, keys: Keys) -> None:
    """Compares a command's section with its other options that name drafters.

    Raises:
        ConfigError: they name different drafters, or one is malformed; names both.
    """
    selectors = [key for key in _SELECTORS if keys.get(key) is not None]
    named = {} if spec_type is None else {"spec_type": list(_listed(spec_type, "spec_type"))}
    named |= {key: list(dict(_drafters({key: keys[key]}, _AT))) for key in selectors}
    if not named:
        return
    parts = _parts(translate_section(section)) or []
    mine = {part["decoding_type"] for part in parts}
    own = next((key for key in _SELECTORS if section.get(key) is not None), "model")
    for key, kinds in named.items():
        same = kinds == [section.get(own)] or mine in (set(kinds), set(with_model(kinds)))
        if parts and not same:
            value = spec_type if key == "spec_type" else keys[key]
            said = f"{own}: {section.get(own)!r}"
            raise ConfigError.at(
                key,
                f"{value!r} is not the drafter of speculative_config ({said}); give one of them",
            )


# Keys that select the drafter if none is named.
_MERGE_SELECTORS = frozenset({"decoding_type", "method", "speculative_algorithm", "spec_default"})
_IMPLIES = {
    "lookup_cache_static": "NGramCache",
    "lookup_cache_dynamic": "NGramCache",
    "drafter": "User",
}


def merge(
    section: Mapping[str, Any], spec_type: str | None, keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Merges `section` (of any dialect, may be empty) with the drafters of `spec_type` and `keys`.

    A drafter that `section` contains keeps its keys; other drafters start with their defaults.

    Raises:
        ConfigError: a source contradicts itself; names the key.
    """
    base = translate_section(section) if section else {}
    keys = heeded(keys, SECTION, _AT)
    if base and keys.get(_PARALLEL) is True and not _MERGE_SELECTORS & keys.keys():
        base["decoding_type"] = _at_once(base["decoding_type"], _AT)
    if _MERGE_SELECTORS & keys.keys():
        return _replaced(base, spec_type, keys)
    parts = _parts(base)
    if parts is None:
        return base  # malformed; the strict check reports it
    had = [part["decoding_type"] for part in parts]
    kinds = had
    if spec_type is not None:
        kinds = list(_listed(spec_type, "spec_type"))
    elif not had:
        kinds = list(dict.fromkeys(kind for key, kind in _IMPLIES.items() if key in keys))
    if "model" in keys and not kinds:  # as in vLLM, the model determines the drafter
        return _replaced(base, None, keys)
    if any(given.key == _MODEL for given in read_keys(keys, kinds, _AT)):
        if spec_type is None and kinds in ([], ["None"]):
            kinds = ["DraftTarget"]
        kinds = with_model(kinds)
    if not kinds:
        return {**base, **keys}
    given = read_keys(keys, kinds, _AT)
    same = sorted(kinds) == sorted(had)
    if not same:
        base = _retyped(base, parts, kinds)
    if "members" not in base:
        return {**base, **own_keys(kinds[0], given, _AT)}
    return _with_members(base, given, is_new=not same)


def _replaced(
    base: dict[str, Any], spec_type: str | None, keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Treats keys that name a drafter as a section, merged into a section of the same drafter."""
    given = keys if spec_type is None else {**keys, "spec_type": spec_type}
    own = translate_section(given)
    same = "members" not in own and own["decoding_type"] == base.get("decoding_type")
    return {**base, **own} if same else own


def _parts(base: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the sections of single drafters; None if the section is malformed."""
    if not base:
        return []
    parts = base.get("members") if base["decoding_type"] == "Compose" else [base]
    is_valid = isinstance(parts, list) and all(
        isinstance(part, dict)
        and isinstance(part["decoding_type"], str)
        and part["decoding_type"] in SECTIONS
        for part in parts
    )
    return parts if is_valid else None


def _retyped(
    base: dict[str, Any], parts: Sequence[dict[str, Any]], kinds: Sequence[str]
) -> dict[str, Any]:
    """Returns a section of drafters of `kinds`; keeps their keys and the shared keys of `base`."""
    kept = [
        {"decoding_type": kind, **{key: each[key] for key in each if key not in SHARED}}
        for kind in dict.fromkeys(kinds)
        for each in [part for part in parts if part["decoding_type"] == kind] or [{}]
    ]
    shared: dict[str, Any] = {}
    if any(part["decoding_type"] in kinds for part in parts):
        both = len(kept) > 1 and "members" in base  # still a composition, which keeps its own keys
        shared = {key: base[key] for key in base if both or key in SHARED}
    if len(kept) == 1:
        return {**shared, **kept[0]}
    return {**shared, "decoding_type": "Compose", "members": kept}


def _with_members(base: dict[str, Any], given: Sequence[Given], *, is_new: bool) -> dict[str, Any]:
    """A composition with the keys: its own, and its members'."""
    kinds = [part["decoding_type"] for part in base["members"]]
    left, whole = list(given), {}
    length = next((each for each in given if each.key == LENGTH and each.owner is None), None)
    if length is not None and (LENGTH in base or not (is_new or set(kinds) <= set(ORDER))):
        # A composition that was written as one is bounded as a whole: not every member's nodes
        # are a chain that can be shortened.
        whole = {LENGTH: length.value}
        left.remove(length)
    above, added = spread(kinds, left, _AT)
    members = [{**part, **more} for part, more in zip(base["members"], added, strict=True)]
    return {**base, **above, **whole, "members": members}


def _decoding_config(decoding_type: str) -> Callable[..., SpeculationBase]:
    """A class of TensorRT-LLM's Python API, as a function of the same keys."""

    def config(**keys: Any) -> SpeculationBase:
        """A checked `speculative_config`; raises `ConfigError` that names the key."""
        section = translate_section({"decoding_type": decoding_type, **keys}, "")
        return parse(SECTIONS[section["decoding_type"]], section)

    return config


DraftTargetDecodingConfig = _decoding_config("DraftTarget")
Eagle3DecodingConfig = _decoding_config("Eagle3")
EagleDecodingConfig = _decoding_config("Eagle")
LookaheadDecodingConfig = _decoding_config("Lookahead")
MedusaDecodingConfig = _decoding_config("Medusa")
MTPDecodingConfig = _decoding_config("MTP")
NGramDecodingConfig = _decoding_config("NGram")
UserProvidedDecodingConfig = _decoding_config("User_Provided")
