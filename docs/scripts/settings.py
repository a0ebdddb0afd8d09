"""`docs/settings.md` and `docs/sampling.md`: every key of the configuration, and every field of
`SamplingParams`, from the models that check them.

`python -m outrider.docs.scripts.settings` writes both; a test fails where one is out of date.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ...cluster.app import LLMArgs, ModelLoading, PlacementGroup, ServingArgs
from ...cluster.serve.args import ServeConfig
from ...config import SECTIONS, EngineConfig, SpeculationBase, SpeculationCacheConfig
from ...config.access import AccessConfig, KeyConfig
from ...config.engine import (
    DrafterGroupConfig,
    GroupAutoscalingConfig,
    OnlineAdaptationConfig,
    ResourcesConfig,
)
from ...config.files import HfOverrides
from ...scheduler.sampling import SamplingParams, StructuredOutputs

_FOLDER = Path(__file__).resolve().parents[1]
_HEAD = """# All settings

Every key of the configuration, generated from the models that check it:
`python -m outrider.docs.scripts.settings` writes this page. [Configuration](configuration.md)
explains how keys are used together; [compatibility](compatibility.md) lists other engines' names of
these keys.
"""
_SAMPLING_HEAD = """# SamplingParams

Every field, generated from the models that check it: `python -m outrider.docs.scripts.settings`
writes this page. `SamplingParams(temperature=0, max_tokens=64)` is what `LLM.generate`, `stream`,
`chat` and `AsyncLLM` take, from the package `outrider`. Bodies of the [HTTP API](http.md) have
fields of the same names; `generate` and `chat` of the command line have options for the most used
ones. An unknown field, or a value out of range, is an `InvalidRequestError` (HTTP: 400) that names
the field.

Where a field is not given over HTTP, or `LLM.generate` gets no `sampling_params`, the model's
[`generation_config`](configuration.md) has the default of `temperature`, `top_k`, `top_p`, `min_p`
and `repetition_penalty`. `max_tokens=None` is as many as the context has room for, and 0 none, for
the prompt's log-probabilities alone. In chats, OpenAI's `logprobs: true` and `top_logprobs` stand
for `logprobs`. In which order fields apply: [notes](http.md#compatibility-notes).
"""
_STRUCTURED_HEAD = """## StructuredOutputs

What `structured_outputs` takes, also as a mapping of these fields: exactly one of `json`, `regex`,
`choice`, `grammar` and `json_object`, and what goes with it.
"""
_OTHERS: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("Engine", EngineConfig, "The top level of a configuration file."),
    ("hf_overrides", HfOverrides, "What the checkpoint gives beside text."),
    ("online_adaptation", OnlineAdaptationConfig, "A head that goes on learning while it serves."),
    ("resources", ResourcesConfig, "What each worker asks of the cluster."),
    ("serve", ServeConfig, "The Serve application: `serve` beside the engine's keys."),
    ("serve.access", AccessConfig, "Who may use the server."),
    ("serve.access.keys", KeyConfig, "One API key: an item of `keys`, also in `keys_file`."),
    (
        "serve.drafter_groups",
        DrafterGroupConfig,
        "Draft models that an application's engines share; keys of their members are the engine's.",
    ),
    ("autoscaling_config", GroupAutoscalingConfig, "Members of a drafter group by load."),
    ("Ray Serve LLM", ServingArgs, "Arguments of `outrider.serve_llm:build_openai_app`."),
    ("llm_configs", LLMArgs, "One model of Ray Serve LLM's arguments."),
    ("model_loading_config", ModelLoading, "What an entry of `llm_configs` loads."),
    ("placement_group_config", PlacementGroup, "The workers of an entry of `llm_configs`."),
)
_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "text",
    dict: "mapping",
    object: "Python object",
}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_LARGE = 2**16  # from here on, multiples of a power of two are shown as such


def render() -> str:
    """The page."""
    lines = [_HEAD]
    for title, model, text in _OTHERS:
        lines += [f"## {title}", "", text, "", *_table(model, model.model_fields), ""]
    shared = SpeculationBase.model_fields
    lines += ["## speculative_config", "", "Keys of every drafter:", "", *_table(None, shared), ""]
    for name, section in SECTIONS.items():
        own = {
            key: field
            for key, field in section.model_fields.items()
            if key not in shared or field.default != shared[key].default
        }
        text = " ".join((section.__doc__ or "").split())
        lines += [f"## {name}", "", text, "", *_table(section, own), ""]
    text = "Of the section of a separate draft model, or of a separate head that drafts chains."
    lines += ["## speculation_cache", "", text, ""]
    lines += [*_table(None, SpeculationCacheConfig.model_fields), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def render_sampling() -> str:
    """The page of what a request may ask of its tokens."""
    lines = [_SAMPLING_HEAD, *_table(SamplingParams, SamplingParams.model_fields), ""]
    lines += [
        "## StructuredOutputs",
        "",
        "Of `structured_outputs`: exactly one of `json`, `regex`,",
    ]
    lines += ["`choice`, `grammar` and `json_object`, and what goes with it;"]
    lines += ["a mapping of these fields is read as one.", ""]
    lines += _table(StructuredOutputs, StructuredOutputs.model_fields)
    return "\n".join(lines) + "\n"


PAGES = {_FOLDER / "settings.md": render, _FOLDER / "sampling.md": render_sampling}


def _table(model: type[BaseModel] | None, fields: dict[str, FieldInfo]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key, field in fields.items():
        if key == "decoding_type":  # it names the section
            continue
        kind = f"{_kind(field.annotation)}{_bounds(field.metadata)}"
        name = field.alias or key
        yield f"| `{name}` | {kind} | {_default(field)} | {field.description or _inner(field)} |"


def _inner(field: FieldInfo) -> str:
    """The description that an annotation brings along."""
    for part in field.metadata:
        text = getattr(part, "description", None)
        if text:
            return str(text)
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""  # a section of its own
    if value is None or value in ((), [], {}):
        return "" if "default:" in (field.description or "") else "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        value = value.value
    if type(value) is int and value >= _LARGE and value & (value - 1) == 0:
        return f"{value} (2^{value.bit_length() - 1})"
    return f"`{value}`" if isinstance(value, str) else f"{value}"


def _bounds(metadata: list[Any]) -> str:
    found = [
        f"{sign} {getattr(part, name)}"
        for part in metadata
        for name, sign in _BOUNDS.items()
        if getattr(part, name, None) is not None
    ]
    return f", {' and '.join(found)}" if found else ""


def _kind(annotation: Any) -> str:
    """The type in a user's words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0])
    if origin in (Union, types.UnionType):
        parts = dict.fromkeys(_kind(each) for each in inner if each is not type(None))
        return " or ".join(parts)
    if origin is Literal:
        return ", ".join(f"`{str(each).lower() if isinstance(each, bool) else each}`"
                         for each in inner)  # fmt: skip
    if origin in (list, tuple):
        return f"list of {_kind(inner[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _TYPES.get(origin or annotation, "any")


if __name__ == "__main__":
    for page, write in PAGES.items():
        page.write_text(write(), encoding="utf-8")
