"""What `helm template` prints, for the parts of Go's templates that `k8s/chart/` uses; any other is
an error. `tests/k8s/test_chart.py` compares both where `helm` is installed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml

from outrider.tests.helpers.kubernetes import crd

Values = dict[str, Any]

_ACTION = re.compile(r"\{\{(- )?\s*(.*?)\s*( -)?\}\}", re.DOTALL)
_TOKEN = re.compile(r'"[^"]*"|[()|]|:=|=|[^\s()|]+')


class HelmError(ValueError):
    """A template that Helm refuses, or a feature that this renderer lacks."""


def _fail(message: str) -> NoReturn:
    raise HelmError(message)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "toYaml": lambda value: yaml.safe_dump(value, width=10**6).removesuffix("\n...\n").rstrip("\n"),
    "nindent": lambda width, text: "\n" + re.sub("^", " " * width, text, flags=re.MULTILINE),
    "hasKey": lambda mapping, key: key in mapping,
    "get": lambda mapping, key: mapping.get(key, ""),
    "dict": dict,
    "and": lambda *values: next((each for each in values if not each), values[-1]),
    "not": lambda value: not value,
    "join": lambda text, values: text.join(values),
    "eq": lambda first, second: first == second,
    "gt": lambda first, second: first > second,
    "len": len,
    "fail": _fail,
    "ne": lambda first, second: first != second,
    "toString": lambda value: str(value).lower() if isinstance(value, bool) else str(value),
    "ternary": lambda yes, no, condition: yes if condition else no,
    "add": lambda *terms: sum(terms),
    "mul": lambda first, second: first * second,
    "printf": lambda form, *args: form.replace("%s", "{}").format(*args),
}


def template(chart: Path, release: str, *values: Values) -> list[dict[str, Any]]:
    """The resources of a release, with `values` over the chart's own, the last over all."""
    (merged,) = crd.load_documents((chart / "values.yaml").read_text(encoding="utf-8"))
    for each in values:
        merged = merge(merged, each)
    found = []
    for path in sorted((chart / "templates").iterdir()):
        files = {each.name: each.read_text(encoding="utf-8") for each in chart.glob("*.json")}
        scope = {"$": {"Values": merged, "Release": {"Name": release}, "Files": files}}
        text = render(path.read_text(encoding="utf-8"), scope)
        found += [each for each in crd.load_documents(text) if each is not None]
    return found


def merge(base: Values, values: Values) -> Values:
    """Mappings are merged, all else is replaced."""
    merged = copy.deepcopy(base)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else copy.deepcopy(value)
    return merged


@dataclass
class _Node:
    """An action with what it encloses, or a text."""

    action: str
    body: list[_Node | str] = field(default_factory=list)


def render(text: str, scope: dict[str, Any]) -> str:
    """A template with variables: `$` is the context of all."""
    return _run(_parse(text).body, scope["$"], dict(scope))


def _parse(text: str) -> _Node:
    """A tree of actions; dashes take the white space at their side."""
    root = _Node("")
    open_nodes, at, trim = [root], 0, False
    for found in _ACTION.finditer(text):
        before = text[at : found.start()]
        before = before.lstrip() if trim else before
        open_nodes[-1].body.append(before.rstrip() if found[1] else before)
        at, trim = found.end(), found[3] is not None
        action = found[2]
        if action.split(" ")[0] in ("if", "range"):
            node = _Node(action)
            open_nodes[-1].body.append(node)
            open_nodes.append(node)
        elif action == "end":
            open_nodes.pop()
            if not open_nodes:
                raise HelmError("an end of nothing")
        elif not re.fullmatch(r"/\*.*\*/", action, re.DOTALL):
            open_nodes[-1].body.append(_Node(action))
    if open_nodes != [root]:
        raise HelmError(f"an action without its end: {[node.action for node in open_nodes]}")
    rest = text[at:]
    root.body.append(rest.lstrip() if trim else rest)
    if any("{{" in part or "}}" in part for part in root.body if isinstance(part, str)):
        raise HelmError("a brace without its other")
    return root


def _run(body: list[_Node | str], dot: Any, variables: dict[str, Any]) -> str:
    out = []
    for node in body:
        if isinstance(node, str):
            out.append(node)
            continue
        word, _, rest = node.action.partition(" ")
        if word == "if":
            if _value(rest, dot, variables):
                out.append(_run(node.body, dot, variables))
        elif word == "range":
            out += [_run(node.body, each, variables) for each in _value(rest, dot, variables)]
        elif assigned := re.fullmatch(r"(\$\w+) (:?=) (.*)", node.action):
            if (assigned[2] == "=") != (assigned[1] in variables):
                raise HelmError(f"{node.action}: declared twice, or not at all")
            variables[assigned[1]] = _value(assigned[3], dot, variables)
        else:
            value = _value(node.action, dot, variables)
            if not isinstance(value, str):
                raise HelmError(f"{node.action}: not a text")
            out.append(value)
    return "".join(out)


def _value(expression: str, dot: Any, variables: dict[str, Any]) -> Any:
    """A pipeline."""
    tokens = _TOKEN.findall(expression)
    value, left = _pipeline(tokens, dot, variables)
    if left:
        raise HelmError(f"{expression}: does not end at {left[0]}")
    return value


def _pipeline(tokens: list[str], dot: Any, variables: dict[str, Any]) -> tuple[Any, list[str]]:
    value, tokens = _command(tokens, dot, variables, ())
    while tokens and tokens[0] == "|":
        value, tokens = _command(tokens[1:], dot, variables, (value,))
    return value, tokens


def _command(
    tokens: list[str], dot: Any, variables: dict[str, Any], last: tuple[Any, ...]
) -> tuple[Any, list[str]]:
    """A function with its arguments, or one value; `last`: what is piped into it."""
    function: Callable[..., Any] | None = None
    if tokens[0] == ".Files.Get":
        function, tokens = partial(_child, variables["$"]["Files"]), tokens[1:]
    elif re.fullmatch(r"[A-Za-z]\w*", tokens[0]) and tokens[0] not in ("true", "false"):
        function = _FUNCTIONS.get(tokens[0])
        if function is None:
            raise HelmError(f"this renderer has no function {tokens[0]}")
        tokens = tokens[1:]
    values = []
    while tokens and tokens[0] not in ("|", ")"):
        if tokens[0] == "(":
            value, tokens = _pipeline(tokens[1:], dot, variables)
            if not tokens:
                raise HelmError("a parenthesis without its other")
        else:
            value = _operand(tokens[0], dot, variables)
        values.append(value)
        tokens = tokens[1:]
    if function:
        return function(*values, *last), tokens
    if len(values) != 1 or last:
        raise HelmError(f"no function for {values}")
    return values[0], tokens


def _operand(token: str, dot: Any, variables: dict[str, Any]) -> Any:
    if token.startswith('"'):
        return token[1:-1]
    if token == ".":
        return dot
    if token in ("true", "false"):
        return token == "true"
    if token.isdigit():
        return int(token)
    start, *keys = token.split(".")
    if start and start not in variables:
        raise HelmError(f"{token}: neither a variable nor a value")
    value = variables[start] if start else dot
    for key in keys:
        value = _child(value, key)
    return value


def _child(value: Any, key: str) -> Any:
    if not isinstance(value, dict) or key not in value:
        raise HelmError(f"there is no {key}")
    return value[key]
