"""Options shared by commands, generated from the fields of pydantic models.

A command takes `engine: EngineOptions`, and `expand` turns that into one option per field, so that
each option is defined once. The option is made from the field's name, type and description. An
option that is not given leaves the value to the configuration file or to the model.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ..config import SECTIONS, EngineConfig, NGramCacheConfig, NGramMapK4VConfig, Strict, parse
from ..config.compat.table import LLAMA_CPP, SECTION, To
from ..config.compat.translate import check_same_drafters, merge, translate_engine
from ..config.files import needs_folder
from ..config.strict import read_mapping
from ..errors import ConfigError, InvalidRequestError
from ..scheduler.sampling import SamplingParams
from .console import ENGINE_PANEL, SECTION_KEYS, SHOWS_ENGINE, read_section, say
from .foreign import read_keys, read_variables

if TYPE_CHECKING:
    from ..cluster.serve.args import ServeConfig

log = logging.getLogger(__name__)
SPELLINGS = {
    "json_path": ("--json",),
    "alone": ("--alone/--together",),
    "model": ("--model", "-m"),
    "url": ("--url", "--base-url"),
    "inputs": ("--input", "-i"),
    "seed": ("--seed", "-s"),
    "max_tokens": ("--max-tokens", "-n"),
    "tensor_parallel_size": ("--tensor-parallel-size", "-tp"),
    "pipeline_parallel_size": ("--pipeline-parallel-size", "-pp"),
    "max_num_seqs": ("--max-num-seqs", "-np"),
    "draft_model": ("--draft-model", "-md"),
    "lookup_cache_static": ("--lookup-cache-static", "-lcs"),
    "lookup_cache_dynamic": ("--lookup-cache-dynamic", "-lcd"),
}
_SCALARS = (bool, int, float, str, Path, Enum)
_MACHINE = ("device", "trust_remote_code", "allow_pickle", "dtype")


class Options(Strict):
    """Options of a command. A subclass sets the panel of the help for its own fields."""

    panel: ClassVar[str | None] = None

    def given(self) -> dict[str, Any]:
        """Returns the given options by field name."""
        return {name: value for name, value in self if value not in (None, [])}


def options_of(
    model: type[BaseModel],
    panel: str,
    only: Collection[str],
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Creates `Options` with the fields `only` of `model`; options that are not given are None.

    Args:
        defaults: the command's defaults that replace those of the model, for the help.
    """
    return _options(
        panel,
        {
            name: (_kind(field.annotation), _help(field, defaults.get(name, field.default)))
            for name, field in model.model_fields.items()
            if name in only
        },
    )


def _options(panel: str, kinds: Mapping[str, tuple[Any, str]]) -> Any:
    """Creates `Options` whose fields have the given types and descriptions and default to None."""
    fields: Any = {
        name: (kind | None, Field(None, description=text)) for name, (kind, text) in kinds.items()
    }
    made = create_model(f"{panel}Options", __base__=Options, **fields)
    made.panel = panel
    return made


def parameters_of(
    model: type[BaseModel],
    panel: str | None = None,
    panels: Mapping[str, str] = MappingProxyType({}),
    skip: Collection[str] = (),
) -> Iterator[inspect.Parameter]:
    """Yields one keyword parameter per field in the form that Typer reads.

    Sections and mappings have none.

    Args:
        panel: panel of the help; default: that of the class that defines the field.
        panels: panels of particular fields.
        skip: fields without an option.
    """
    for name, field in model.model_fields.items():
        kind = _kind(field.annotation)
        if name in skip or kind is None:
            continue
        owner = next(each for each in model.__mro__ if name in inspect.get_annotations(each))
        extra: Any = field.json_schema_extra or {}
        if issubclass(model, Options):
            extra = {**_bounds(field), **extra}
        option = typer.Option(
            *spelling(name, kind),
            help=_help(field, field.default),
            show_default=False,
            rich_help_panel=panels.get(name, panel or getattr(owner, "panel", None)),
            **extra,
        )
        required = field.is_required()
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if required else None,
            annotation=Annotated[kind if required else kind | None, option],
        )


def spelling(name: str, kind: Any = str) -> tuple[str, ...]:
    """Returns the options that set a field."""
    option = "--" + name.replace("_", "-")
    return SPELLINGS.get(name, (f"{option}/--no-{option[2:]}" if kind is bool else option,))


def _help(field: FieldInfo, default: Any) -> str:
    """Returns the description with the default, unless the description states the default."""
    text = field.description or ""
    if default is None or default in (PydanticUndefined, (), [], ""):
        return text
    shown = {True: "yes", False: "no"}[default] if isinstance(default, bool) else default
    shown = f"{shown:g}" if isinstance(shown, float) else shown
    return f"{text.removesuffix('.')}; default {shown}."


def _bounds(field: FieldInfo) -> dict[str, Any]:
    """Returns the limits whose violation is a usage error, as Typer's arguments."""
    return {
        key: getattr(part, name)
        for key, name in (("min", "ge"), ("max", "le"))
        for part in field.metadata
        if hasattr(part, name)
    }


def _kind(annotation: Any) -> Any:
    """Returns the type of the option's value; None if the field has no option.

    The model checks choices.
    """
    inner = [each for each in get_args(annotation) if each is not NoneType]
    origin = get_origin(annotation)
    if origin is Literal:
        return str
    if origin in (tuple, list):
        is_section = isinstance(inner[0], type) and issubclass(inner[0], Strict)
        return list.__class_getitem__(str if is_section else inner[0])
    if origin in (Union, UnionType):
        values = [each for each in inner if get_origin(each) is not Literal]
        if not values:
            return str
        if values == [int] and len(inner) > 1:  # with names such as auto
            return str
        return _kind(values[0]) if len(values) == 1 else None
    is_scalar = isinstance(annotation, type) and issubclass(annotation, _SCALARS)
    return annotation if is_scalar else None


def numbers(field: str, text: str, kind: Any, wanted: str) -> list[Any]:
    """Parses a list of numbers such as `1,8`, without repetitions; `kind` is an item's type.

    Raises:
        ConfigError: it is not such a list; the message has `wanted`.
    """
    try:
        found = TypeAdapter(list[kind]).validate_python(text.split(","))
    except ValidationError:
        raise ConfigError.at(field, f"expected {wanted}, got {text!r}") from None
    return list(dict.fromkeys(found))


def names(text: str) -> list[str]:
    """Returns the items of a list such as `a,b`, without repetitions."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def known_names(field: str, text: str, known: Collection[str]) -> list[str]:
    """Returns the items of a list; raises `ConfigError` for an unknown one."""
    found = names(text)
    for name in found:
        if name not in known:
            raise ConfigError.at(field, f"{name!r} is none of {', '.join(known)}")
    return found


def _lookup_options() -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yields llama.cpp's options of look-up drafters: name, type and description of each.

    Options without a type in their name are the older ones.
    """
    types = {each.to: name for name, each in LLAMA_CPP.methods.items() if isinstance(each, To)}
    of_all = NGramMapK4VConfig.model_fields.keys() - {"max_draft_len"}
    for option, entry in LLAMA_CPP.keys.items():
        if not isinstance(entry, To) or not option.startswith("spec_"):
            continue
        if entry.owner is not None:
            whose, section = types[entry.owner], SECTIONS[entry.owner]
            yield option, (int, _described(whose, section, entry.to))
        elif entry.to in of_all:
            yield option, (int, _described("Every type that has it", NGramMapK4VConfig, entry.to))
    for name in ("lookup_cache_static", "lookup_cache_dynamic"):
        yield name, (str, NGramCacheConfig.model_fields[name].description or "")


def _described(whose: str, section: type[BaseModel], key: str) -> str:
    text = section.model_fields[key].description or ""
    return f"{whose}: {text[:1].lower()}{text[1:]}"


class SourceOptions(Options):
    """The model and the configuration file."""

    model: str | None = None
    """Checkpoint folder, a Hugging Face id (org/name), or an address (s3://bucket/model)."""
    config: Path | None = Field(None, description="YAML or JSON; other options override it.")


class SpeculationOptions(Options):
    """The speculative section as a whole, and its most common keys."""

    panel = "Speculation"
    speculative_config: str | None = None
    """JSON or a file, in our keys or vLLM's: '{"method": "ngram", "num_speculative_tokens": 3}'."""
    spec_type: str | None = None
    """Drafter by llama.cpp's name (ngram-simple, ngram-mod, draft-simple, ...), vLLM's (ngram,
    suffix, ...), or a decoding_type; several separated by commas: the first with a guess is
    used."""
    draft_model: str | None = None
    """Checkpoint folder of a draft model, which is asked after drafters without a model."""
    drafter: str | None = None
    """Your own drafter, package.module:Class; implies --spec-type user."""
    max_draft_len: int | None = Field(None, description="Most draft tokens per request and step.")
    spec_key: list[str] | None = None
    """KEY=VALUE of the section, in any dialect; also --speculative-config.KEY VALUE."""


# Fields without a generated option: defined by hand, or set by a section of the file.
_ENGINE_SKIP = {"model", "speculative_config", "resources", "seed", "stats_interval_s"}
_ENGINE_SKIP |= {"online_adaptation", "hf_overrides"}  # foreign.py reads the latter
_ENGINE = EngineConfig.model_fields.keys() - _ENGINE_SKIP
_EngineFields: Any = options_of(EngineConfig, "Engine", _ENGINE - set(_MACHINE))
_MachineFields: Any = options_of(EngineConfig, f"{ENGINE_PANEL}: machine", _MACHINE)
_LookupFields: Any = _options(f"{ENGINE_PANEL}: speculation by look-up", dict(_lookup_options()))
_SAMPLING_DEFAULTS = {"max_tokens": 128, "temperature": 0.0}
_SamplingFields: Any = options_of(
    SamplingParams,
    "Sampling",
    (
        "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos",
    ),
    _SAMPLING_DEFAULTS,
)  # fmt: skip


class EngineOptions(
    SpeculationOptions, _LookupFields, _MachineFields, _EngineFields, SourceOptions
):
    """The model and how it runs; None: the configuration file's value, or the default."""

    enable_auto_tool_choice: bool | None = Field(None, json_schema_extra={"hidden": True})
    """Accepted for compatibility with vLLM; always on."""
    engine_key: list[str] | None = Field(None, json_schema_extra={"hidden": True})
    """KEY=VALUE of another engine's configuration."""

    def with_argument(self, field: str, value: Any) -> EngineOptions:
        """Returns the options with a command's argument; raises `ConfigError` on a
        contradiction."""
        option = getattr(self, field)
        if option is not None and str(option) != str(value):
            said = f"{spelling(field)[0]} {option}"
            raise ConfigError.at(
                field, f"{said} contradicts the argument {value}; give one of them"
            )
        return self.model_copy(update={field: value})

    def resolve(self, **forced: Any) -> EngineConfig:
        """Returns `settings` with folders instead of ids and addresses; raises alike."""
        return _with_folders(self.settings(**forced))

    def settings(self, **forced: Any) -> EngineConfig:
        """Returns the configuration: defaults, then the file, then the options, then `forced`.

        Raises:
            ConfigError: names the key, its value, and what is allowed.
        """
        data = translate_engine(self._file())
        data.pop("serve", None)  # read by `serve_section`
        options = self.given()
        keys = {key: options.pop(key) for key in [*options] if key in _SECTION_OPTIONS}
        keys = _united(keys, read_keys(options.pop("spec_key", [])), "--spec-key")
        data |= translate_engine(read_keys(options.pop("engine_key", []), ""))
        whole, spec_type = options.pop("speculative_config", None), options.pop("spec_type", None)
        options.pop("config", None)
        section = data.pop("speculative_config", None) if whole is None else whole
        if isinstance(section, str):  # also accepted in vLLM's own YAML
            section = read_section(section)
        if isinstance(section, dict | None):
            given = section if whole is not None else None
            if (spec_type is not None or keys) and given:
                check_same_drafters(given, spec_type, keys)
            said, is_whole = {**keys, **(given or {})}, bool(given)
            variables = _variables(section, said, spec_type, is_whole=is_whole)
            spec_type = variables.pop("spec_type", spec_type)
            if spec_type is not None or keys or variables:
                section = merge(section or {}, spec_type, {**variables, **keys})
        return EngineConfig.load({**data, **options, "speculative_config": section, **forced})

    def _file(self) -> dict[str, Any]:
        """The content of the configuration file."""
        if self.config is None:
            return {}
        data = read_mapping(self.config, "config")
        # A file with vLLM's JSON only is a speculative section; its model is the drafter's, and the
        # target's is given by --model. A file with keys of both is an engine's, and its check
        # reports misplaced keys of the section.
        is_target = "model" in data and (self.model is None or "decoding_type" in data)
        is_engine = is_target or data.keys() & _ENGINE_ALONE
        is_section = SECTION_KEYS & data.keys() and not is_engine
        return {"speculative_config": data} if is_section else data


def _variables(
    section: dict[str, Any] | None,
    said: Mapping[str, Any],
    spec_type: str | None,
    *,
    is_whole: bool,
) -> dict[str, Any]:
    """Returns what environment variables set of `section`, except keys `said` on the command line.

    A whole section on the command line names its own drafters, and a composition its own lengths.
    """
    if "members" in said or spec_type == "none":
        return {}
    selects = ["spec_type"] if is_whole or spec_type is not None else []
    found = read_variables([*said, *selects, *(["speculative_model"] if is_whole else [])])
    chooses = {"spec_type", *(name for name in found if name.endswith(("_MODEL", "_MODEL_DRAFT")))}
    if found and not (section or said or spec_type or chooses & found.keys()):
        log.warning("%s: no effect, because there is no drafter", ", ".join(found))
        return {}
    return found


def _united(options: dict[str, Any], keys: dict[str, Any], where: str) -> dict[str, Any]:
    """Merges options and keys; raises `ConfigError` if an option and a key differ."""
    for key in options.keys() & keys.keys():
        if options[key] != keys[key]:
            raise ConfigError.at(
                key,
                f"{spelling(key)[0]} {options[key]} contradicts {where} {key}={keys[key]}; "
                "give one of them",
            )
    return options | keys


# Keys of a configuration that are in no speculative section.
_ENGINE_ALONE = {*EngineConfig.model_fields, "serve"} - {"model", *SECTION}
# Options that are keys of the speculative section.
_SECTION_OPTIONS = {*_LookupFields.model_fields, "draft_model", "drafter", "max_draft_len"}


def _with_folders(config: EngineConfig) -> EngineConfig:
    """Returns `config` with folders instead of ids, addresses and GGUF files, if there are any."""
    sources = [config.model, config.tokenizer or ""]
    sources += [
        getattr(each, "speculative_model", None) or ""
        for each in config.speculative_config.sections
    ]
    if not any(map(needs_folder, sources)):  # avoids importing what resolving needs
        return config
    from ..engine.checkpoints import resolved

    return resolved(config)


def serve_section(engine: EngineOptions, given: dict[str, Any]) -> ServeConfig:
    """Returns the file's `serve:` section with the values of `given`.

    Raises:
        ConfigError: names the key.
    """
    from ..cluster.serve.args import read_args

    section = engine._file().get("serve") or {}
    if isinstance(section, dict):
        section = {**section, **given}
    return read_args({"model": "-", "serve": section})[1]


class SamplingOptions(_SamplingFields):
    """Sampling settings."""

    def params(self) -> SamplingParams:
        """Returns the validated sampling settings.

        Raises:
            InvalidRequestError: names the field that is out of range.
        """
        params = SamplingParams(**self.given())
        if params.max_tokens == 0:  # only useful for scoring the prompt
            raise InvalidRequestError.at("max_tokens", "at least 1 (got 0)")
        return params

    def given(self) -> dict[str, Any]:
        """Returns the given settings and the commands' defaults, by `SamplingParams`' names."""
        return {**_SAMPLING_DEFAULTS, **super().given()}


def _help_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[SHOWS_ENGINE] = True
        say(ctx.get_help())
        raise typer.Exit


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all",
            callback=_help_all,
            is_eager=True,
            show_default=False,
            help="Show the engine's options too, and exit.",
        ),
    ],
)


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces every parameter of `command` that is a model of options by the model's fields.

    The help lists the command's own options first and the engine's options last.
    """
    hints = get_type_hints(command, include_extras=True)
    own: list[inspect.Parameter] = []
    engine: list[inspect.Parameter] = []
    groups: dict[str, type[Options]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if isinstance(kind, type) and issubclass(kind, Options):
            groups[name] = kind
            (engine if issubclass(kind, EngineOptions) else own).extend(parameters_of(kind))
        else:
            own.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
    if engine:
        engine.append(_HELP_ALL)

    @functools.wraps(command)
    def call(**values: Any) -> None:
        values.pop(_HELP_ALL.name, None)
        grouped = {}
        for name, kind in groups.items():
            given = {key: values.pop(key) for key in kind.model_fields if key in values}
            grouped[name] = parse(
                kind, {key: value for key, value in given.items() if value not in (None, [])}
            )
        command(**values, **grouped)

    return signed(call, own + engine)


def signed(call: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """Sets the parameters that Typer reads from `call`."""
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call
