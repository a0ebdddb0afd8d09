"""TensorRT-LLM's keys (`tensorrt_llm/llmapi/llm_args.py`). Most of a section's are our own."""

from __future__ import annotations

from typing import Any

from .table import Dialect, Entry, Into, Keys, Name, Only, Refused, To, paths, switch, whole

_NOT_RUN = "this drafter is not implemented"
_BLOCK_DRAFTERS = "an EAGLE-3, MTP or draft-model checkpoint (Eagle3, MTP, DraftTarget)"


def _sa_defaults(given: Keys) -> Keys:
    size = given.get("max_matching_ngram_size", -1)
    if size != -1:
        return {"is_use_oldest": False, "min_matching_ngram_size": size}
    given.pop("max_matching_ngram_size", None)
    return {"is_use_oldest": False, "max_matching_ngram_size": 64}


_SEPARATE: Keys = {"placement": "separate"}
_ONE_MODEL = "false: `placement: separate`"
METHODS: dict[str, Name] = {
    "Draft_Target": To("DraftTarget"),
    "SA": To(
        "NGram",
        "the newest continuation of the longest match of up to 64 tokens",
        defaults=_sa_defaults,
    ),
    "AUTO": Refused("which drafter it means depends on the version", "NGram or Suffix"),
    "User_Provided": Refused("its drafter is a Python object", "User, with an import path"),
    "SaveState": Refused("it writes hidden states and drafts nothing", "outrider train"),
    "PARD": Refused(_NOT_RUN, _BLOCK_DRAFTERS),
    "DFlash": Refused(_NOT_RUN, _BLOCK_DRAFTERS),
    "DSpark": Refused(_NOT_RUN, _BLOCK_DRAFTERS),
}


def _suffix_automaton(value: Any) -> Keys:
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


KEYS: dict[str, Entry] = {
    "speculative_model_dir": To("speculative_model"),
    "BEGIN_THINKING_PHASE_TOKEN": To("begin_thinking_phase_token"),
    "END_THINKING_PHASE_TOKEN": To("end_thinking_phase_token"),
    "prompt_lookup_num_tokens": To("max_draft_len", "older name"),
    "eagle_choices": To(
        "eagle_choices", "also as text; a path given twice counts once", value=paths
    ),
    "medusa_choices": To("medusa_choices", "also as text", value=paths),
    "use_relaxed_acceptance_for_thinking": Into(
        switch({"verification": "relaxed", "lossy": True}), "`verification: relaxed`, `lossy: true`"
    ),
    "greedy_sampling": Into(
        switch({}, {"verification": "typical", "lossy": True}),
        "true: each request's temperature decides; false: `verification: typical`, `lossy: true`",
    ),
    "use_rejection_sampling": Into(
        switch({"verification": "rejection"}), "true: `verification: rejection`"
    ),
    "sa_config": Into(
        _suffix_automaton,
        "a `Compose` of `NGram` (matches of `threshold` tokens or more) and the head",
    ),
    "use_sa_spec": Into(_suffix_automaton, "as `sa_config` with its defaults"),
    "enable_global_pool": Into(switch({"pool_scope": "tenant"}), "SA: `pool_scope: tenant`"),
    "max_total_draft_tokens": To(
        "max_draft_len", "of drafters that draft a chain: the same as `max_draft_len`", agrees=True
    ),
    "allow_advanced_sampling": Only((True,), "requests are always sampled as they ask"),
    "eagle3_one_model": Into(switch({}, _SEPARATE), _ONE_MODEL),
    "mtp_eagle_one_model": Into(switch({}, _SEPARATE), _ONE_MODEL),
    "redrafter_greedy_search": Refused("each request's temperature decides", "temperature"),
    "is_keep_all": Only(
        (True,), "another key chooses which continuation is drafted", "is_use_oldest"
    ),
    "eagle3_model_arch": Only(("llama3",), "the layer's kind is read from the checkpoint"),
    "load_format": Only(("auto", None), "weights are read as the checkpoint has them"),
    "num_eagle_layers": Refused("it is the TensorRT engine's name", "max_draft_len"),
    "max_non_leaves_per_layer": Refused(
        "every node of a level may have children", "dynamic_tree_max_topK"
    ),
    "max_batch_size": Refused("it is the engine's, not the section's", "max_num_seqs"),
    "resource_manager": Refused("drafters own their memory", "User"),
    "output_directory": Refused("it belongs to SaveState", "outrider train"),
    "global_pool_size": Refused("pools are bounded in patterns", "pool_max_patterns"),
}

ENGINE: dict[str, Entry] = {
    "max_batch_size": To("max_num_seqs"),
    "max_num_tokens": To("max_num_batched_tokens"),
    "max_seq_len": To("max_model_len"),
    "tp_size": To("tensor_parallel_size"),
    "backend": Only(("pytorch", None), "there is one backend"),
    "enable_chunked_prefill": Only((True,), "prompts are always computed in chunks"),
    "pipeline_parallel_size": Only(
        (1,), "there is no pipeline parallelism", "tensor_parallel_size"
    ),
    "disable_overlap_scheduler": Into(
        switch({"overlap_scheduling": False}, {"overlap_scheduling": True}), "`overlap_scheduling`"
    ),
    "cuda_graph_config": Only((None,), "graphs are not configured"),
    "attn_backend": Refused("the device decides which attention runs", "device"),
    "moe_config": Refused("experts run as the model's own modules have them"),
}


# Of `kv_cache_config`. `num_kv_tokens` becomes `num_kv_blocks` once `block_size` is known.
KV_CACHE: dict[str, Entry] = {
    "enable_block_reuse": To("enable_prefix_caching"),
    "free_gpu_memory_fraction": To("kv_memory_fraction"),
    "tokens_per_block": To("block_size"),
    "max_tokens": To("num_kv_tokens", "`num_kv_blocks`, by `block_size`", value=whole),
    "dtype": Only(("auto", None), "the KV cache has the model's type", "dtype"),
}

DIALECT = Dialect("TensorRT-LLM", ("decoding_type",), METHODS, KEYS, ENGINE)
