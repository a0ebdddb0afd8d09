"""Random requests of every kind that the HTTP API takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Reading = Literal["whole", "stream", "resumable", "slow", "abort"]
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 12}},
            "required": ["word"],
        },
    },
}
_LINES = (
    "def add(a, b):",
    "    return a + b",
    "class Stack:",
    "    def push(self, item):",
    "        self.items.append(item)",
    "for line in lines:",
    "    print(line)",
    "import os",
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, how its answer is read, and which statuses it may get."""

    kind: str
    path: str
    body: dict[str, Any]
    reading: Reading
    statuses: tuple[int, ...] = (200,)


def _code(rng: random.Random, num_lines: int) -> str:
    return "\n".join(rng.choices(_LINES, k=num_lines)) + "\n"


def _greedy(rng: random.Random) -> dict[str, Any]:
    return {"temperature": 0.0}


def _sampled(rng: random.Random) -> dict[str, Any]:
    return {
        "temperature": rng.choice((0.5, 1.0)),
        "top_p": rng.choice((0.9, 1.0)),
        "top_k": rng.choice((-1, 40)),
        "min_p": rng.choice((0.0, 0.05)),
        "seed": rng.randrange(1000),
    }


def _penalised(rng: random.Random) -> dict[str, Any]:
    return {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {str(rng.randrange(4000)): 2.0},
    }


def _with_logprobs(rng: random.Random) -> dict[str, Any]:
    return {"logprobs": rng.randrange(1, 5), "prompt_logprobs": rng.randrange(1, 3)}


def _several(rng: random.Random) -> dict[str, Any]:
    return {"n": rng.randrange(2, 5), "temperature": 1.0}


def _stopped(rng: random.Random) -> dict[str, Any]:
    return {"stop": ["return", "\n\n"], "min_tokens": 4, "bad_words": ["import"]}


def _schema(rng: random.Random) -> dict[str, Any]:
    return {"guided_json": _SCHEMA, "temperature": 1.0}


def _regex(rng: random.Random) -> dict[str, Any]:
    return {"guided_regex": "[a-z]{3,8}( [a-z]{3,8}){2,9}", "temperature": 1.0}


def _choice(rng: random.Random) -> dict[str, Any]:
    return {"guided_choice": ["yes", "no", f"maybe {rng.randrange(5)}"]}


def _grammar(rng: random.Random) -> dict[str, Any]:
    return {"guided_grammar": 'start: ("a" | "b")~5..30', "temperature": 1.0}


_COMPLETIONS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "greedy": _greedy,
    "sampled": _sampled,
    "penalised": _penalised,
    "logprobs": _with_logprobs,
    "several": _several,
    "stopped": _stopped,
    "schema": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_OTHERS = ("long", "batch", "chat", "tools", "deadline", "refused")
KINDS = (*_COMPLETIONS, *_OTHERS)


def next_exchange(rng: random.Random) -> Exchange:
    """A request, drawn from all kinds."""
    kind = rng.choice(KINDS)
    body: dict[str, Any] = {"max_tokens": rng.choice((8, 40, 120)), "ignore_eos": True}
    path = "/v1/completions"
    statuses: tuple[int, ...] = (200,)
    num_lines = rng.choice((1, 4, 20))
    if kind in _COMPLETIONS:
        settings = _COMPLETIONS[kind](rng)
        if any(key.startswith("guided") for key in settings):
            body["ignore_eos"] = False
        body |= {"prompt": _code(rng, num_lines), **settings}
    elif kind == "long":
        body |= {"prompt": _code(rng, rng.randrange(60, 160))}
    elif kind == "batch":
        body |= {"prompt": [_code(rng, num_lines) for _ in range(rng.randrange(2, 6))]}
    elif kind == "deadline":
        body |= {"prompt": _code(rng, 2), "max_tokens": 800, "timeout": rng.uniform(0.05, 1.0)}
        statuses = (200, 504)
    elif kind == "refused":
        body |= {"prompt": "x", "temperature": -1}
        statuses = (400,)
    else:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": _code(rng, num_lines)}]}
        if kind == "tools":
            body |= {"tools": [_TOOL], "tool_choice": "required", "temperature": 1.0}
            body["ignore_eos"] = False
    readings: tuple[Reading, ...] = ("whole", "stream", "slow", "abort", "abort")
    if kind not in ("deadline", "refused", "logprobs"):
        readings = (*readings, "resumable")
    reading = "whole" if kind in ("deadline", "refused") else rng.choice(readings)
    if kind == "logprobs" and reading != "whole":
        del body["prompt_logprobs"]  # not in streams
    if reading != "whole":
        body["stream"] = True
    if reading == "resumable":
        body["resumable"] = True
    return Exchange(kind, path, body, reading, statuses)
