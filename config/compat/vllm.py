"""vLLM's `--speculative-config` (`vllm/config/speculative.py`)."""

from __future__ import annotations

from typing import Any

from . import vllm_engine
from .table import Dialect, Entry, Into, Keys, Name, Only, Refused, To, one_of, paths

_NOT_RUN = "this drafter is not implemented"
_HEADS = "eagle3, mtp or draft_model"
_MTP = (
    "mtp", "deepseek_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp",
    "glm_ocr_mtp", "glm5_next_mtp", "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp",
    "exaone4_5_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "qwen4_exp_mtp", "longcat_flash_mtp",
    "bailing_hybrid_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp", "kimi_k3_mtp",
    "pangu_ultra_moe_mtp", "step3p5_mtp", "hy_v3_mtp", "hy_v4_mtp", "gemma4_mtp", "inkling_mtp",
    "dots3_note_mtp",
)  # fmt: skip
METHODS: dict[str, Name] = {
    "ngram": To("NGram"),
    "[ngram]": To("NGram"),
    "ngram_gpu": To("NGram", "the same matches, found on the CPU"),
    "draft_model": To("DraftTarget"),
    "lookahead": To("Lookahead"),
    "medusa": To("Medusa"),
    "eagle": To("Eagle"),
    "eagle3": To("Eagle3"),
    **{name: To("MTP") for name in _MTP},
    "redrafter": To("ReDrafter"),
    "suffix": To("Suffix"),
    "user": To("User"),
    "none": To("None"),
    "mlp_speculator": Refused(_NOT_RUN, "medusa or eagle3"),
    "custom_class": Refused("its class has vLLM's interface", "decoding_type User"),
    "extract_hidden_states": Refused("it drafts nothing", "outrider train"),
    **{
        name: Refused(_NOT_RUN, _HEADS)
        for name in ("dflash", "dspark", "uno", "orthrus", "fsm", "gumiho", "peagle")
    },
}


def _rejection(value: Any) -> Keys:
    rules = {"strict": "rejection", "standard": "rejection", "probabilistic": "rejection"}
    if value == "fly":
        raise ValueError(f"{value!r} accepts what the target would not; allowed: standard, block")
    rule = one_of(block="block", synthetic="synthetic", **rules)(value)
    return {"verification": rule, "lossy": True} if rule == "synthetic" else {"verification": rule}


def _acceptance(value: Any) -> Keys:
    rule = one_of(rejection_sampler="rejection", typical_acceptance_sampler="typical")(value)
    return {"verification": rule} if rule == "rejection" else {"verification": rule, "lossy": True}


def _schedule(value: Any) -> Keys:
    """Ranges (first, last, tokens) as largest batch size -> tokens."""
    schedule, after = {}, 1
    if value is None:
        return {}
    for each in value if isinstance(value, (list, tuple)) else [None]:
        if not isinstance(each, (list, tuple)) or [type(part) for part in each] != [int] * 3:
            raise ValueError("expected a list of [first batch size, last, tokens]")
        first, last, tokens = each
        if first != after or last < first:
            raise ValueError(f"the range [{first}, {last}] must begin at {after}: without gaps")
        schedule[last], after = tokens, last + 1
    return {"draft_len_schedule": schedule}


KEYS: dict[str, Entry] = {
    "model": To("speculative_model"),
    "num_speculative_tokens": To("max_draft_len"),
    "prompt_lookup_max": To("max_matching_ngram_size"),
    "prompt_lookup_min": To("min_matching_ngram_size"),
    "disable_by_batch_size": To("max_concurrency"),
    "num_speculative_tokens_per_batch_size": Into(
        _schedule, "`draft_len_schedule`; above its last range nothing is drafted"
    ),
    "speculative_token_tree": To(
        "choices", "`eagle_choices`, `mtp_choices` or `medusa_choices`", value=paths
    ),
    "rejection_sample_method": Into(
        _rejection,
        "`verification`: standard, strict, probabilistic are `rejection`; block; synthetic, with "
        "`lossy: true`",
    ),
    "acceptance_method": Into(_acceptance, "older: `verification` rejection or typical"),
    "typical_acceptance_sampler_posterior_threshold": To("posterior_threshold"),
    "typical_acceptance_sampler_posterior_alpha": To("posterior_alpha"),
    "suffix_decoding_max_tree_depth": To("max_tree_depth"),
    "suffix_decoding_max_cached_requests": To("max_cached_requests"),
    "suffix_decoding_max_spec_factor": To("max_spec_factor"),
    "suffix_decoding_min_token_prob": To("min_token_prob"),
    "draft_sample_method": Only(
        ("probabilistic",), "drafts are drawn at the request's temperature; 0 is greedy"
    ),
    "parallel_drafting": Only((False, None), "drafts are made token by token"),
    "use_heterogeneous_vocab": Only((False,), "a draft model must share the target's vocabulary"),
    "enable_adaptive_k": Only(
        (False, None), "lengths adapt by a rule of our own", "adaptive_draft_len"
    ),
    "adaptive_verification": Only((False, None), "not implemented", "adaptive_draft_len"),
    "enable_adaptive_verification": Only((False, None), "not implemented", "adaptive_draft_len"),
    "quantization": Only((None,), "draft models are run in the target's type"),
    "max_model_len": Refused("a draft model reads as far as the target", "max_model_len"),
    "revision": Refused("it is written behind the id", "model: org/name@revision"),
    "code_revision": Refused("a checkpoint's own code is not run"),
    "draft_load_config": Only((None,), "weights are read as the checkpoint has them"),
    "attention_backend": Refused("the device decides which attention runs"),
    "moe_backend": Refused("experts run as the model's own modules have them"),
    "kv_cache_dtype": Only((None, "auto"), "the KV cache has the model's type"),
    "synthetic_acceptance_rate": To(
        "synthetic_acceptance_rate",
        "the rate of each token after its accepted parent, the same at every depth; vLLM's was the "
        "mean over all drafted tokens, with rates that fell with the depth",
    ),
    **dict.fromkeys(
        ("synthetic_acceptance_rates", "synthetic_acceptance_length"),
        Refused("one rate holds at every depth", "synthetic_acceptance_rate"),
    ),
    "tensor_parallel_size": Refused("it is not the draft's", "draft_tensor_parallel_size"),
    "enforce_eager": Refused("the device decides how a step is run"),
    "disable_padded_drafter_batch": Refused("drafts of one batch have lengths of their own"),
    "dspark_draft_topk": Refused("it belongs to dspark"),
}


def _ngram_sizes(given: Keys) -> Keys:
    """One size given is both; none given is 5."""
    least, most = given.get("min_matching_ngram_size"), given.get("max_matching_ngram_size")
    size = most if least is None else least
    size = 5 if size is None else size
    return {"min_matching_ngram_size": size, "max_matching_ngram_size": size}


DIALECT = Dialect(
    "vLLM", ("method",), METHODS, KEYS, vllm_engine.ENGINE, defaults={"NGram": _ngram_sizes}
)
