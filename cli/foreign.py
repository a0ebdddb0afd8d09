"""Options of other engines: another name of an option of ours, or a key of a speculative section.

    --tp-size 2, --tp_size 2                   --tensor-parallel-size 2
    -sc JSON                                   --speculative-config JSON
    --speculative-config.method ngram          --spec-key method=ngram
    --spec-model FOLDER                        --spec-key model=FOLDER
    --speculative-num-steps 3                  --spec-key speculative_num_steps=3
    --spec-draft-p-min 0.4                     --spec-key spec_draft_p_min=0.4

Names are those of the tables in `config/compat/`, where each is translated or refused by name.
Options that a command declares itself are left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import yaml

from ..config.compat import llama_cpp, sglang, tensorrt_llm
from ..config.compat.table import Entry, To
from ..config.compat.translate import DIALECTS
from ..errors import ConfigError
from .console import Command


def _renamed(*tables: Mapping[str, Entry]) -> dict[str, str]:
    """Keys of the tables that are another name of a key of ours, as options."""
    return {
        name.replace("_", "-"): _OPTIONS.get(entry.key, entry.key.replace("_", "-"))
        for table in tables
        for name, entry in table.items()
        if isinstance(entry, To) and entry.value is None and entry.owner is None
    }


# Options that are named otherwise than the key that they set.
_OPTIONS = {"draft_min": "spec-draft-n-min", "speculative_model": "draft-model"}
_OF_SECTIONS = {"max_draft_len", *_OPTIONS}
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **_renamed(tensorrt_llm.KV_CACHE, *(dialect.engine for dialect in DIALECTS)),
        **_renamed(
            {name: each for name, each in llama_cpp.KEYS.items()
             if isinstance(each, To) and each.key in _OF_SECTIONS}
        ),
        # vLLM's
        "num-speculative-tokens": "max-draft-len",
        "speculative-model": "draft-model",
        "spec-method": "spec-type",
        "spec-tokens": "max-draft-len",
        # llama.cpp's options that are no keys of a section
        "ctx-size": "max-model-len",
        "parallel": "max-num-seqs",
        "n-predict": "max-tokens",
        "predict": "max-tokens",
        "temp": "temperature",
        "repeat-penalty": "repetition-penalty",
        "alias": "served-model-name",
    }
)  # fmt: skip
EPILOG = (
    "Names that vLLM, TensorRT-LLM and llama.cpp use for the same things are understood: "
    + ", ".join(f"--{name}" for name, ours in sorted(ALIASES.items()) if name != ours)
    + "."
)
_NESTED = "speculative-config."
_KEYS = {*sglang.KEYS, *sglang.DIALECT.selectors, *llama_cpp.KEYS, "spec_default"}


def canonical(name: str) -> str:
    """Our name of an option, without its dashes; underscores count as hyphens, as in vLLM."""
    hyphenated = name.replace("_", "-")
    return ALIASES.get(hyphenated, hyphenated)


class ForeignCommand(Command):
    """A command that takes a section's keys in every dialect's spelling."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        native = {name.lstrip("-") for param in self.params for name in param.opts}
        native |= {name.lstrip("-") for param in self.params for name in param.secondary_opts}
        if "spec-key" in native:
            args = rewrite(args, native)
        return super().parse_args(ctx, args)


def rewrite(args: Sequence[str], native: Collection[str]) -> list[str]:
    """`args` with foreign options as `--spec-key KEY=VALUE`; `native` are a command's own."""
    done: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            return [*done, arg, *rest]
        name, equals, value = arg.partition("=")
        if name == "-sc":
            done.append("--speculative-config" + equals + value)
            continue
        key = None if equals and name in llama_cpp.SHORT else _key(name, native)
        if key is None:
            done.append(arg)
            continue
        if not equals:
            is_switch = not rest or (rest[0].startswith("-") and not _is_number(rest[0]))
            value = "true" if is_switch else rest.pop(0)
        if name.startswith("--no-"):
            value = "false"
        done += ["--spec-key", f"{key}={value}"]
    return done


def read_keys(pairs: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE`s as a mapping; values are YAML, dots in a key lead into mappings.

    Raises:
        ConfigError: one has no `=`, is not YAML, or is given twice.
    """
    keys: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        field = f"speculative_config.{key}"
        if not equals:
            raise ConfigError.at("spec_key", f"expected KEY=VALUE, got {pair!r}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError.at(field, f"{text!r} is not YAML: {error}") from None
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


def _key(name: str, native: Collection[str]) -> str | None:
    """The key of the section that an option sets; None if it sets none."""
    if name in llama_cpp.SHORT:
        return llama_cpp.SHORT[name]
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
    # llama.cpp's names without a prefix are keys of a section only; others' options begin so.
    return key if key in _KEYS and ("spec" in key or "draft" in key) else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
