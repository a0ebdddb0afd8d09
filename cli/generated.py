"""Options generated from the fields of pydantic models.

A field's name, type, description and default make its option; an option that is not given leaves
the value to a file or to the model, which checks all others too.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, make_dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic_core import PydanticUndefined

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

ARGUMENTS = {"target": "TARGET", "out": "OUT"}
SPELLINGS = {
    "inputs": ("--input", "-i"),
    "seed": ("--seed", "-s"),
    "max_tokens": ("--max-tokens", "-n"),
    "tensor_parallel_size": ("--tensor-parallel-size", "-tp"),
    "max_num_seqs": ("--max-num-seqs", "-np"),
}
_SCALARS = (bool, int, float, str, Path)
_PANELS: Mapping[str, Collection[str]] = {
    "Data": (
        "inputs", "window", "heldout", "heldout_file", "all_tokens", "generate", "own_share",
        "temperature",
    ),
    "Machine": (
        "device", "trust_remote_code", "allow_pickle", "dtype", "micro_batch", "num_processes",
        "threads",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option that is no field's namesake."""

    name: str
    kind: type
    help: str
    panel: str
    spelling: tuple[str, ...] = ()  # default: the name with hyphens


def made_of(name: str, parameters: Iterable[Parameter]) -> Any:
    """A dataclass of optional options, as `options.expand` reads it."""
    fields = []
    for each in parameters:
        option = typer.Option(
            *(each.spelling or (option_name(each.name),)),
            help=each.help,
            show_default=False,
            rich_help_panel=each.panel,
        )
        fields.append(
            (each.name, Annotated[each.kind | None, option], dataclass_field(default=None))
        )
    return make_dataclass(name, fields, frozen=True)


def options_of(
    model: type[BaseModel],
    panel: str,
    skip: Collection[str] = (),
    *,
    only: Collection[str] | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """A dataclass of optional options, as `options.expand` reads it.

    Args:
        only: fields with an option; default: all but `skip`.
        defaults: what the command uses in place of the model's defaults, for the help.
    """
    skip = skip if only is None else set(model.model_fields) - set(only)
    fields = [
        (each.name, each.annotation, dataclass_field(default=None))
        for each in parameters_of(model, panel, skip, defaults, {} if only else _PANELS)
    ]
    return make_dataclass(f"{model.__name__}Fields", fields, frozen=True)


def parameters_of(
    model: type[BaseModel],
    panel: str,
    skip: Collection[str] = tuple(ARGUMENTS),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    panels: Mapping[str, Collection[str]] = _PANELS,
) -> Iterator[inspect.Parameter]:
    """One keyword parameter per field, as Typer reads it; none for sections and mappings.

    Args:
        panel: where the help is shown, but for the fields of `panels`.
        skip: fields without an option.
    """
    for name, field in model.model_fields.items():
        kind = _kind(field.annotation)
        if name in skip or kind is None:
            continue
        option = typer.Option(
            *_spelling(name, field),
            help=_help(field, defaults.get(name, field.default)),
            show_default=False,
            rich_help_panel=next((key for key, names in panels.items() if name in names), panel),
        )
        required = field.is_required()
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if required else None,
            annotation=Annotated[kind if required else kind | None, option],
        )


def option_name(name: str) -> str:
    """The option, or the argument, that sets a field."""
    return ARGUMENTS.get(name) or SPELLINGS.get(name, ("--" + name.replace("_", "-"),))[0]


def _spelling(name: str, field: FieldInfo) -> tuple[str, ...]:
    if _kind(field.annotation) is bool:
        option = option_name(name)
        return (f"{option}/--no-{option[2:]}",)
    return SPELLINGS.get(name, (option_name(name),))


def _help(field: FieldInfo, default: Any) -> str:
    """The description, with the default unless that depends on others and is described there."""
    text = field.description or ""
    if default is None or default in (PydanticUndefined, ()):
        return text
    shown = {True: "yes", False: "no"}[default] if isinstance(default, bool) else default
    shown = f"{shown:g}" if isinstance(shown, float) else shown
    return f"{text.removesuffix('.')}; default {shown}."


def _kind(annotation: Any) -> Any:
    """The type of the value on the command line, None if it has none.

    Choices are checked by the model.
    """
    inner = [each for each in get_args(annotation) if each is not NoneType]
    origin = get_origin(annotation)
    if origin is Literal:
        return str
    if origin is tuple:
        return list.__class_getitem__(inner[0])
    if origin in (Union, UnionType):
        values = [each for each in inner if get_origin(each) is not Literal]  # beside names
        return _kind(values[0]) if len(values) == 1 else None
    return annotation if annotation in _SCALARS else None
