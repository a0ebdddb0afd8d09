"""Conversions that the tables of other engines' options name.

A value's conversion returns ours; one that makes several keys returns these; a drafter's defaults
are made of the keys that were given. Each raises `ValueError` with the reason where it refuses.
"""

from __future__ import annotations

import ast
import logging
from typing import Any

log = logging.getLogger(__name__)
Keys = dict[str, Any]


def whole(value: Any) -> int:
    """A whole number above 0."""
    if type(value) is not int or value < 1:
        raise ValueError("expected a whole number above 0")
    return value


def paths(value: Any) -> Any:
    """A tree of ranks; also as text, as in `"[[0], [0, 0]]"`, and with paths given twice."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value.replace(" ", ""))
        except (ValueError, SyntaxError):
            raise ValueError("expected a list of paths, as in [[0], [0, 0]]") from None
    if not isinstance(value, (list, tuple)) or not all(isinstance(p, (list, tuple)) for p in value):
        return value  # reported by the check
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
    """Draft tokens."""
    if type(value) is not int or value < 2:
        raise ValueError("it counts the last known token too: a whole number of at least 2")
    return value - 1


def breadth(value: Any) -> Keys:
    """One continuation of a match, or a tree of several."""
    return {"shape": "chain" if whole(value) == 1 else "tree"}


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
    if "num_steps" in given:
        raise ValueError(
            "speculative_num_steps: a look-up has none; use speculative_num_draft_tokens"
        )
    shape = "chain" if given.get("topk") == 1 else "tree"
    return {"max_draft_len": given.get("num_nodes", 11), "max_tree_depth": 18, "shape": shape}


def _length(steps: int | None, nodes: int | None) -> int:
    """Of a chain, where the number of steps prevails, as in SGLang."""
    if steps and nodes and steps != nodes:
        log.warning(
            "speculative_num_draft_tokens: %d is taken as %d, because a chain of "
            "speculative_num_steps: %d has as many draft tokens, and the last known one counts too",
            *(nodes + 1, steps + 1, steps),
        )
    return steps or nodes or 3
