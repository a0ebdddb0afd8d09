"""Options of other engines: other names of Outrider's options, or keys of a speculative section.

    --tp-size 2, --tp_size 2                   --tensor-parallel-size 2
    -sc JSON                                   --speculative-config JSON
    --speculative-config.method ngram          --spec-key method=ngram
    --spec-model FOLDER                        --spec-key model=FOLDER
    --speculative-num-steps 3                  --spec-key speculative_num_steps=3
    --spec-draft-p-min 0.4                     --spec-key spec_draft_p_min=0.4
    --enforce-eager                            --engine-key enforce_eager=true
    --lora-modules a=FOLDER b=FOLDER           --lora-modules a=FOLDER --lora-modules b=FOLDER

Names come from the tables in `config/compat/`, which translate or reject each of them. Options that
a command declares itself are not changed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..config.compat.table import DIALECTS, ENGINE, LLAMA_CPP, SECTION, SGLANG, To
from ..config.strict import nearest, read_yaml
from ..errors import ConfigError
from ..scheduler.sampling import SamplingParams
from .console import Command

# Options whose name differs from the key that they set.
_OPTIONS = {"draft_min": "spec-draft-n-min", "speculative_model": "draft-model"}
_OF_SECTIONS = {"max_draft_len", *_OPTIONS}


def _aliases() -> Iterator[tuple[str, str]]:
    """Yields other names of Outrider's options: keys of the engine or of a section, or no keys."""
    for dialect in DIALECTS:
        tables = [dialect.kv_cache, dialect.engine]
        if dialect is LLAMA_CPP:
            tables.append(
                {name: each for name, each in dialect.keys.items()
                 if isinstance(each, To) and each.to in _OF_SECTIONS}
            )  # fmt: skip
        for name, entry in (item for table in tables for item in table.items()):
            if isinstance(entry, To) and entry.is_alias:
                ours = _OPTIONS.get(entry.to, entry.to.replace("_", "-"))
                yield name.replace("_", "-"), ours
        yield from dialect.options.items()


ALIASES: Mapping[str, str] = dict(_aliases())
EPILOG = (
    "Names that vLLM, TensorRT-LLM and llama.cpp use for the same things are understood: "
    + ", ".join(f"--{name}" for name, ours in sorted(ALIASES.items()) if name != ours)
    + "."
)
_NESTED = "speculative-config."
_LORA = "--lora-modules"  # takes several values, as in vLLM
_FOREIGN = {*ENGINE, *SGLANG.keys, *LLAMA_CPP.keys}
_SELECTORS = {selector for dialect in DIALECTS for selector in dialect.selectors}
_KEYS = {*SGLANG.keys, *SGLANG.selectors, *LLAMA_CPP.keys, "spec_default"}


def canonical(name: str) -> str:
    """Returns Outrider's name of an option, without dashes; underscores are hyphens, as in vLLM."""
    hyphenated = name.replace("_", "-")
    return ALIASES.get(hyphenated, hyphenated)


class ForeignCommand(Command):
    """A command that accepts a section's keys in every dialect."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        native = {name.lstrip("-") for param in self.params for name in param.opts}
        native |= {name.lstrip("-") for param in self.params for name in param.secondary_opts}
        if "spec-key" in native:
            args = rewrite(args, native)
            for arg in args[: args.index("--") if "--" in args else None]:
                hint = _hint(arg.partition("=")[0], native)
                if hint is not None:
                    ctx.fail(f"No such option: {arg} ({hint})")
        return super().parse_args(ctx, args)


def rewrite(args: Sequence[str], native: Collection[str]) -> list[str]:
    """Rewrites foreign options to `--spec-key KEY=VALUE`, those of the engine to `--engine-key`.

    `native` are the command's own options.
    """
    done: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            return [*done, arg, *rest]
        name, equals, value = arg.partition("=")
        if name[:2] == "--" and f"--{canonical(name[2:])}" == _LORA:
            values = [value] if equals else []
            while (rest and not values) or (rest and _is_adapter(rest[0])):
                values.append(rest.pop(0))
            done += [part for each in values for part in (_LORA, each)]
            continue
        ours = "speculative-config" if name == "-sc" else _of_one_dash(name, native)
        if ours is not None:
            done.append(f"--{ours}{equals}{value}")
            continue
        key = engine_key = None
        if not equals or name not in LLAMA_CPP.short:
            key = _key(name, native)
            engine_key = _engine_key(name, native) if key is None else None
        if key is None and engine_key is None:
            done.append(arg)
            continue
        if not equals:
            value = "true" if _is_switch(name, key, engine_key, rest) else rest.pop(0)
        if name.startswith("--no-") and engine_key != _name(name):
            value = "false"
        option = "--engine-key" if key is None else "--spec-key"
        done += [option, f"{key or engine_key}={value}"]
    return done


def read_keys(pairs: Sequence[str], at: str = "speculative_config.") -> dict[str, Any]:
    """Converts `KEY=VALUE` pairs to a mapping; values are YAML, and dots in a key nest mappings.

    `at` is the prefix of the keys in messages.

    Raises:
        ConfigError: a pair has no `=`, is not YAML, or is repeated.
    """
    keys: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        field = f"{at}{key}"
        if not equals:
            option = "spec_key" if at else "engine_key"
            raise ConfigError.at(option, f"expected KEY=VALUE, got {pair!r}")
        value = read_yaml(text, field, repr(text))
        held = keys
        *above, last = key.split(".")
        for part in above:
            held = held.setdefault(part, {})
            if not isinstance(held, dict):
                raise ConfigError.at(field, f"{part} is no mapping")
        if last in held:
            raise ConfigError.at(field, "given twice")
        held[last] = value
    return keys


def read_variables(said: Collection[str]) -> dict[str, Any]:
    """Returns what llama.cpp's environment variables set of a section, by their names.

    The result also has `spec_type`.

    Args:
        said: keys and selectors given on the command line in any dialect, which take precedence.

    Raises:
        ConfigError: two variables contradict each other, or one is not a number; names it.
    """
    taken = {"spec_type" if key in _SELECTORS else _ours(key) for key in said}
    found: dict[str, Any] = {}
    first: dict[str, str] = {}  # our key -> its variable
    for variable, key in LLAMA_CPP.environment.items():
        text, ours = os.environ.get(variable, "").strip(), _ours(key)
        if not text or ours in taken:
            continue
        other = first.setdefault(ours, variable)
        if other != variable:
            if text != os.environ[other].strip():
                raise ConfigError.at(variable, f"{text!r} contradicts {other}; give one of them")
            continue
        is_number = ours in ("max_draft_len", "draft_min", "p_min")
        if is_number and not _is_number(text):
            raise ConfigError.at(variable, f"expected a number, got {text!r}")
        value = read_yaml(text, variable, repr(text)) if is_number else text
        found[ours if ours == "spec_type" else variable] = value
    return found


def _ours(key: str) -> str:
    """Returns Outrider's name of a section's key."""
    row = SECTION.get(key)
    return row.to if isinstance(row, To) else key


def _key(name: str, native: Collection[str]) -> str | None:
    """Returns the key of the section that an option sets, or None."""
    if LLAMA_CPP.short.get(name) in LLAMA_CPP.keys:
        return LLAMA_CPP.short[name]
    if not name.startswith("--"):
        return None
    option = name[2:].replace("_", "-")
    if option.startswith(_NESTED):
        return name[2 + len(_NESTED) :].replace("-", "_")
    if option == "spec-model":
        return "model"
    if canonical(option) in native:
        return None
    key = option.removeprefix("no-").replace("-", "_")
    # llama.cpp's names without a prefix are only keys of a section; others' options have a prefix.
    is_option = key in SGLANG.keys or "spec" in key or "draft" in key
    return key if key in _KEYS and is_option else None


def _is_switch(name: str, key: str | None, engine_key: str | None, rest: Sequence[str]) -> bool:
    """Returns True if an option takes no value from `rest`, except for a boolean."""
    if name.startswith("--no-") or not rest or (rest[0][:1] == "-" and not _is_number(rest[0])):
        return True
    row = SECTION.get(key or "") if engine_key is None else ENGINE[engine_key]
    has_none = key == "spec_default" or (row is not None and row.is_switch)
    return (
        has_none
        and "." not in name
        and not (rest[0].lower() in ("true", "false") or _is_number(rest[0]))
    )


def _of_one_dash(name: str, native: Collection[str]) -> str | None:
    """Returns Outrider's option for llama.cpp's option with one dash, without dashes, or None."""
    long = LLAMA_CPP.short.get(name, "").replace("_", "-")
    ours = LLAMA_CPP.options.get(long)
    return ours if ours in native and name[1:] not in native else None


def _hint(name: str, native: Collection[str]) -> str | None:
    """Returns a hint for an option that is a request's field or resembles another engine's option.

    typer itself suggests the command's own options.
    """
    if not name.startswith("--") or canonical(name[2:]) in native:
        return None
    field = canonical(name[2:]).replace("-", "_")
    if field in SamplingParams.model_fields:
        return f"each request decides: its field {field}"
    others = [alias for alias, ours in ALIASES.items() if ours in native]
    near = nearest(_name(name), {*map(_name, [*native, *others]), *_FOREIGN}, 0.8)
    option = None if near is None else near.replace("_", "-")
    return None if option is None or option in native else f"Possible options: --{option}"


def _name(option: str) -> str:
    """Returns an option's name as a key."""
    return option.removeprefix("--").replace("-", "_")


def _engine_key(name: str, native: Collection[str]) -> str | None:
    """Returns the key of another engine's configuration that an option sets, or None."""
    key = LLAMA_CPP.short.get(name) or _name(name)
    is_long = name.startswith("--")
    if (canonical(key) if is_long else name.lstrip("-")) in native:
        return None
    if not is_long:
        return key if key in LLAMA_CPP.engine else None
    return next((each for each in (key, key.removeprefix("no_")) if each in ENGINE), None)


def _is_adapter(text: str) -> bool:
    """Returns True if an argument after `--lora-modules` is another adapter."""
    return text[:1] == "{" or ("=" in text and text[:1] != "-")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
