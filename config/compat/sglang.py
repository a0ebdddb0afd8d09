"""SGLang's `--speculative-*` options (`sglang/srt/server_args.py`), by their names as keys.

They are at the top level of its configuration, and here may be in the section too. Its
`num_draft_tokens` counts the root, and a tree is EAGLE-2's.
"""

from __future__ import annotations

import logging
from typing import Any

from . import vllm
from .table import Dialect, Entry, Into, Keys, Name, Only, Refused, To, whole

log = logging.getLogger(__name__)


def _length(steps: int | None, nodes: int | None) -> int:
    """Of a chain, where the number of steps prevails, as in SGLang."""
    if steps and nodes and steps != nodes:
        log.warning(
            "speculative_num_draft_tokens: %d is taken as %d, because a chain of "
            "speculative_num_steps: %d has as many draft tokens, and the last known one counts too",
            *(nodes + 1, steps + 1, steps),
        )
    return steps or nodes or 3


def _grown(given: Keys) -> Keys:
    """A chain of 3 by default (SGLang's default for all but Llama and Grok)."""
    steps, topk, nodes = (given.get(key) for key in ("num_steps", "topk", "num_nodes"))
    if topk in (None, 1):
        return {"max_draft_len": _length(steps, nodes)}
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": topk, "max_draft_len": steps or 5}
    return tree if nodes is None else {**tree, "max_total_draft_tokens": nodes}


def _chain(given: Keys) -> Keys:
    if given.get("topk") not in (None, 1):
        raise ValueError("speculative_eagle_topk: a draft model drafts a chain; allowed: 1")
    return {"max_draft_len": _length(given.get("num_steps"), given.get("num_nodes"))}


def _lookup(given: Keys) -> Keys:
    if "num_steps" in given:
        raise ValueError(
            "speculative_num_steps: a look-up has none; use speculative_num_draft_tokens"
        )
    shape = "chain" if given.get("topk") == 1 else "tree"
    return {"max_draft_len": given.get("num_nodes", 11), "max_tree_depth": 18, "shape": shape}


_NOT_RUN = "this drafter is not implemented"
METHODS: dict[str, Name] = {
    "EAGLE": To("Eagle", defaults=_grown),
    "EAGLE3": To("Eagle3", defaults=_grown),
    "NEXTN": To("MTP", defaults=_grown),
    "MTP": To("MTP", defaults=_grown),
    "STANDALONE": To("DraftTarget", defaults=_chain),
    "NGRAM": To(
        "Suffix", "continuations by frequency, of all of a tenant's requests", defaults=_lookup
    ),
    "NONE": To("None"),
    "DFLASH": Refused(_NOT_RUN, "EAGLE3"),
    "DSPARK": Refused(_NOT_RUN, "EAGLE3"),
}


def _nodes(value: Any) -> Any:
    if type(value) is not int or value < 2:
        raise ValueError("it counts the last known token too: a whole number of at least 2")
    return value - 1


_LOSSLESS = Only((1.0, 1), "below 1 the rule is lossy", "verification: typical")
_ELSEWHERE = Refused("the device decides what a draft is computed with")
_ADAPTIVE = "adapts by a rule of our own"
_SEPARATE = Refused("drafters outside the target's workers are configured here", "placement")
_CORPUS = Refused("texts are counted beforehand", "NGramCache, lookup_cache_static")

KEYS: dict[str, Entry] = {
    "speculative_draft_model_path": To("speculative_model"),
    "speculative_draft_model": To("speculative_model"),
    "speculative_num_steps": To("num_steps", "`max_draft_len`, levels of a tree"),
    "speculative_eagle_topk": To(
        "topk", "1: a chain; more: `use_dynamic_tree` with that `dynamic_tree_max_topK`"
    ),
    "speculative_num_draft_tokens": To(
        "num_nodes",
        "`max_total_draft_tokens` plus 1, the root; of look-ups `max_draft_len` plus 1",
        value=_nodes,
    ),
    "speculative_ngram_max_trie_depth": To("max_tree_depth"),
    "speculative_ngram_branch_length": To("max_tree_depth", "older name"),
    "speculative_ngram_capacity": To("max_cached_tokens"),
    "speculative_ngram_max_bfs_breadth": Into(
        lambda value: {"shape": "chain" if whole(value) == 1 else "tree"},
        "1: `shape: chain`; more: `shape: tree`",
    ),
    "speculative_ngram_min_bfs_breadth": Only((1,), "breadth follows frequency", "min_token_prob"),
    "speculative_ngram_match_type": Only(("PROB",), "continuations are taken by frequency"),
    "speculative_ngram_min_match_window_size": Only((1,), "every match counts", "max_spec_factor"),
    "speculative_ngram_max_match_window_size": Refused(
        "match and draft share one depth", "speculative_ngram_max_trie_depth"
    ),
    "speculative_ngram_external_corpus_path": _CORPUS,
    "speculative_ngram_external_sam_budget": _CORPUS,
    "speculative_ngram_external_corpus_max_tokens": _CORPUS,
    "speculative_accept_threshold_single": _LOSSLESS,
    "speculative_accept_threshold_acc": _LOSSLESS,
    "speculative_use_rejection_sampling": Into(
        lambda value: {"verification": "rejection"} if value is True else {},
        "true: `verification: rejection`",
    ),
    "speculative_token_map": Refused(
        "a draft vocabulary is read from the head's checkpoint", "its tensor d2t"
    ),
    "speculative_adaptive": Only((False,), _ADAPTIVE, "adaptive_draft_len"),
    "speculative_adaptive_config": Only((None,), _ADAPTIVE, "adaptive_draft_len"),
    "speculative_draft_model_revision": Refused(
        "it is written behind the id", "speculative_draft_model_path: org/name@revision"
    ),
    "speculative_draft_load_format": Only((None, "auto"), "weights are read as they are stored"),
    "speculative_draft_model_quantization": Only(
        (None, "unquant"), "draft models are run in the target's type"
    ),
    "speculative_attention_mode": _ELSEWHERE,
    "speculative_draft_attention_backend": _ELSEWHERE,
    "speculative_moe_runner_backend": _ELSEWHERE,
    "speculative_moe_a2a_backend": _ELSEWHERE,
    "speculative_skip_dp_mlp_sync": _ELSEWHERE,
    "speculative_draft_window_size": Refused("heads read the whole context", "max_model_len"),
    "speculative_dflash_block_size": Refused("it belongs to DFLASH"),
    "speculative_dflash_draft_window_size": Refused("it belongs to DFLASH"),
    "enable_multi_layer_eagle": Refused("the checkpoint says how many modules there are"),
    "decoupled_spec_role": _SEPARATE,
    "decoupled_spec_mode": _SEPARATE,
    "decoupled_spec_addr": _SEPARATE,
    "decoupled_spec_port": _SEPARATE,
}


DIALECT = Dialect("SGLang", ("speculative_algorithm",), METHODS, KEYS, vllm.CHAT_PARSERS)
# Keys that only `defaults` read.
INTERIM = frozenset({"num_steps", "topk", "num_nodes"})
