"""Other engines' spellings of our configuration, translated before it is checked.

TensorRT-LLM's keys are our own wherever they exist; vLLM's `--speculative-config` JSON (`method`,
`num_speculative_tokens`, ...) and a few top-level synonyms are mapped here. A key that is in
neither table passes through, so that the strict check reports it.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError

# TensorRT-LLM's top-level keys -> ours.
ENGINE_SYNONYMS = {
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
    "tp_size": "tensor_parallel_size",
}
KV_CACHE_SYNONYMS = {
    "enable_block_reuse": "enable_prefix_caching",
    "free_gpu_memory_fraction": "kv_memory_fraction",
    "tokens_per_block": "block_size",
}

# vLLM's `method` -> our `decoding_type`.
VLLM_METHODS = {
    "ngram": "NGram",
    "draft_model": "DraftTarget",
    "lookahead": "Lookahead",
    "medusa": "Medusa",
    "eagle": "Eagle",
    "eagle3": "Eagle3",
    "mtp": "MTP",
    "deepseek_mtp": "MTP",
    "glm4_moe_mtp": "MTP",
    "qwen3_next_mtp": "MTP",
    "redrafter": "ReDrafter",
    "suffix": "Suffix",
    "none": "None",
}
# llama.cpp's `--spec-type` -> our `decoding_type`; accepted as a `method` too.
LLAMA_METHODS = {
    "draft-simple": "DraftTarget",
    "ngram-simple": "NGramSimple",
    "ngram-map-k": "NGramMapK",
    "ngram-map-k4v": "NGramMapK4V",
    "ngram-mod": "NGramMod",
    "ngram-cache": "NGramCache",
}
METHODS = {**VLLM_METHODS, **LLAMA_METHODS}
VLLM_KEYS = {
    "model": "speculative_model",
    "num_speculative_tokens": "max_draft_len",
    "prompt_lookup_max": "max_matching_ngram_size",
    "prompt_lookup_min": "min_matching_ngram_size",
    "disable_by_batch_size": "max_concurrency",
    "rejection_sample_method": "verification",
    "suffix_decoding_max_tree_depth": "max_tree_depth",
    "suffix_decoding_max_cached_requests": "max_cached_requests",
    "suffix_decoding_max_spec_factor": "max_spec_factor",
    "suffix_decoding_min_token_prob": "min_token_prob",
    # TensorRT-LLM's, as older versions spell them
    "BEGIN_THINKING_PHASE_TOKEN": "begin_thinking_phase_token",
    "END_THINKING_PHASE_TOKEN": "end_thinking_phase_token",
    # llama.cpp's
    "draft_max": "max_draft_len",
    "n_max": "max_draft_len",
}
# Older names of one drafter's keys, which mean something else elsewhere.
OWN_KEYS = {"NGramMod": {"ngram_size_n": "n_match", "draft_min": "n_min"}}
VLLM_VERIFICATION = {"strict": "rejection", "standard": "rejection", "block": "block"}


def _rename(data: dict[str, Any], names: dict[str, str], where: str) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for key, value in data.items():
        ours = names.get(key, key)
        if ours in renamed:
            raise ConfigError(f"{where}{key}: given twice (it means {ours})", field=f"{where}{key}")
        renamed[ours] = value
    return renamed


def translate_engine(data: dict[str, Any]) -> dict[str, Any]:
    """Top-level keys of TensorRT-LLM's YAML as ours."""
    data = dict(data)
    cache = data.pop("kv_cache_config", None)
    if isinstance(cache, dict):
        for key, ours in KV_CACHE_SYNONYMS.items():
            if key in cache:
                data.setdefault(ours, cache[key])
        unknown = [key for key in cache if key not in KV_CACHE_SYNONYMS]
        if unknown:
            raise ConfigError(
                f"kv_cache_config.{unknown[0]}: unknown key; "
                f"known keys: {', '.join(KV_CACHE_SYNONYMS)}",
                field=f"kv_cache_config.{unknown[0]}",
            )
    return _rename(data, ENGINE_SYNONYMS, "")


def translate_speculative(data: dict[str, Any]) -> dict[str, Any]:
    """A speculative section in either dialect as ours."""
    data = dict(data)
    if "decoding_type" not in data:
        method = data.pop("method", None)
        if method is None and "model" in data:
            method = "draft_model"  # vLLM's own default
        if method is None:
            raise ConfigError(
                "speculative_config.decoding_type: this key is required (or vLLM's `method`)",
                field="speculative_config.decoding_type",
            )
        if method not in METHODS:
            raise ConfigError(
                f"speculative_config.method: unknown drafter {method!r}; "
                f"allowed: {', '.join(METHODS)}",
                field="speculative_config.method",
            )
        data["decoding_type"] = METHODS[method]
    data = _rename(data, VLLM_KEYS, "speculative_config.")
    own = OWN_KEYS.get(data["decoding_type"]) if isinstance(data["decoding_type"], str) else None
    data = _rename(data, own or {}, "speculative_config.")
    members = data.get("members")
    if isinstance(members, list):
        data["members"] = [
            translate_speculative(each) if isinstance(each, dict) else each for each in members
        ]
    rule = data.get("verification")
    if isinstance(rule, str):
        data["verification"] = VLLM_VERIFICATION.get(rule, rule)
    return _relaxed(data)


def _relaxed(data: dict[str, Any]) -> dict[str, Any]:
    """TensorRT-LLM's switch as the rule that it asks for; to ask by that name is to want it."""
    key = "use_relaxed_acceptance_for_thinking"
    wanted = data.pop(key, False)
    if not isinstance(wanted, bool):
        raise ConfigError(
            f"speculative_config.{key}: expected true or false, got {wanted!r}",
            field=f"speculative_config.{key}",
        )
    if not wanted:
        return data
    if data.setdefault("verification", "relaxed") != "relaxed":
        raise ConfigError(
            f"speculative_config.{key}: it means verification 'relaxed', but verification is "
            f"{data['verification']!r}",
            field=f"speculative_config.{key}",
        )
    data.setdefault("lossy", True)
    return data
