"""No accepted option is ignored: every field of the configuration is read by what it configures."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from outrider.cli import options as cli_options
from outrider.cluster.serve import args as serve_args
from outrider.config import SECTIONS, EngineConfig, SpeculationBase, Strict
from outrider.config.files import HfOverrides
from outrider.config.section import RULE_KEYS
from outrider.drafters.registry import build
from outrider.tests.helpers.files import SOURCES, relative
from outrider.tests.helpers.lookups import Host, observe, propose, request_of
from outrider.training import options as training_options

# `lossy` confirms a choice, `llm_engine` and `log_engine_metrics` have one value: their checks are
# the only readers, and so do `enable_auto_tool_choice` and `mixes_tenants`. Parameters of rules are
# read by name, as are llama.cpp's options, which become keys of the section, and keys of a
# config.json.
OF_RULES = {key for keys in RULE_KEYS.values() for key in keys}
READ_OTHERWISE = {
    *("lossy", "llm_engine", "log_engine_metrics", "enable_auto_tool_choice", "spec_key"),
    "mixes_tenants",
    "engine_key",
    "spec_type",
    *cli_options._LookupFields.model_fields,
    *OF_RULES,
    *HfOverrides.model_fields,
}
LOOKUPS = ("NGram", "PromptLookup", "NGramSimple", "NGramMapK", "NGramMapK4V", "NGramMod",
           "NGramCache", "Suffix")  # fmt: skip


class Reads(ast.NodeVisitor):
    """Names of attributes that are read, except within pydantic's validators."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not any("validator" in ast.dump(each) for each in node.decorator_list):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.names.add(node.attr)
        self.generic_visit(node)


def models(kind: type[Strict]) -> set[type[Strict]]:
    return {kind}.union(*(models(each) for each in kind.__subclasses__()))


def test_every_field_is_read_outside_the_checks():
    assert serve_args
    assert training_options
    reads = Reads()
    for path in SOURCES:
        if not relative(path).startswith(("bench/", "demo/")):
            reads.visit(ast.parse(path.read_text(encoding="utf-8")))
    found = models(Strict)
    assert {EngineConfig, *SECTIONS.values()} <= found
    ignored = {
        f"{each.__name__}.{name}"
        for each in found
        for name in each.model_fields
        if each.__module__.startswith("outrider.") and ".tests." not in each.__module__
        and name not in reads.names | READ_OTHERWISE
    }  # fmt: skip
    assert not ignored


@pytest.mark.parametrize("kind", LOOKUPS)
def test_every_key_of_a_look_up_is_read_by_its_drafter(kind, monkeypatch):
    """By class: a name that another drafter reads does not count."""
    section = SECTIONS[kind]
    names: set[str] = set()
    inherited = section.__getattribute__

    def record(self: Any, name: str) -> Any:
        names.add(name)
        return inherited(self, name)

    own = set(section.model_fields) - set(SpeculationBase.model_fields) - {"decoding_type"}
    given: dict[str, Any] = {"decoding_type": kind}
    if kind == "NGram":
        given["pool_scope"] = "tenant"
    config = EngineConfig.load({"model": "m", "speculative_config": given}).speculative_config
    monkeypatch.setattr(section, "__getattribute__", record)
    drafter = build(config, Host(50))
    drafter.open([request_of("a", [1, 2, 3, 4, 5] * 30)])
    propose(drafter, ["a"], [8])
    observe(drafter, ["a"], [[1, 2, 3]])
    drafter.close(["a"])
    observe(drafter, [], [])
    assert own <= names
