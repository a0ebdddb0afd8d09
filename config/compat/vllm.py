"""vLLM's `--speculative-config` (`vllm/config/speculative.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .table import Dialect, Entry, Into, Keys, Name, Only, Refused, To, one_of, paths, switch

# vLLM's and SGLang's names of the parsers of tool calls and of reasoning.

_CALLS = {
    "hermes": ("qwen", "qwen25", "qwen2_5"),
    "qwen3_coder": ("qwen3_xml",),
    "glm45": ("glm4_moe", "glm47"),
    "kimi_k2": ("kimi-k2",),
    "llama3_json": ("llama3", "llama4_json"),
    "pythonic": ("llama4_pythonic", "llama4"),
    "deepseek_v3": ("deepseekv3", "deepseek_v31", "deepseekv31"),
    "harmony": ("openai", "gpt-oss", "gpt_oss"),
}
_REASONING = {
    "deepseek_r1": ("deepseek-r1", "qwen3-thinking", "qwen3_thinking"),
    "qwen3": ("deepseek_v3", "deepseek-v3", "glm45", "glm4_moe", "kimi_k2", "hybrid"),
    "harmony": ("openai_gptoss", "gptoss", "gpt-oss", "gpt_oss"),
}
_ON = "calls are read where tool_call_parser is not none"


def _renamed(names: Mapping[str, tuple[str, ...]]) -> Callable[[Any], Any]:
    ours = {other: name for name, others in names.items() for other in others}

    def rename(value: Any) -> Any:
        """Ours; what is in no table is left to the strict check."""
        return ours.get(value, value) if isinstance(value, str) else value

    return rename


def _note(names: Mapping[str, tuple[str, ...]]) -> str:
    rows = [f"{', '.join(others)} are {name}" for name, others in names.items()]
    return f"{'; '.join(rows)}; `auto` reads the chat template"


CHAT_PARSERS: dict[str, Entry] = {
    "tool_call_parser": To("tool_call_parser", _note(_CALLS), value=_renamed(_CALLS)),
    "reasoning_parser": To("reasoning_parser", _note(_REASONING), value=_renamed(_REASONING)),
}
VLLM: dict[str, Entry] = {
    **CHAT_PARSERS,
    "enable_auto_tool_choice": Only((True,), _ON, "tool_call_parser: none"),
    "enable_reasoning": Only((True,), "reasoning is read by reasoning_parser", "none"),
}


# vLLM's keys of the engine, as `LLM(...)` and Ray Serve LLM's `engine_kwargs` have them.

_LORA = "LoRA adapters are not supported"


def _load_format(value: Any) -> dict[str, Any]:
    if value == "pt":
        return {"allow_pickle": True}
    if value not in ("auto", "safetensors"):
        raise ValueError("auto, safetensors and pt are read")
    return {}


ENGINE: dict[str, Entry] = {
    **VLLM,
    "gpu_memory_utilization": To("kv_memory_fraction"),
    "num_gpu_blocks_override": To("num_kv_blocks"),
    "async_scheduling": Into(
        switch({"overlap_scheduling": True}, {"overlap_scheduling": False}), "`overlap_scheduling`"
    ),
    "disable_custom_all_reduce": Into(
        switch({"symmetric_memory": "off"}, {"symmetric_memory": "auto"}), "`symmetric_memory`"
    ),
    "distributed_executor_backend": Only(("ray", None), "ranks are Ray actors", "executor"),
    "disable_log_stats": Only((False,), "statistics are always written", "stats_interval_s"),
    "enforce_eager": Only((False, None), "the device decides how a step is run"),
    "compilation_config": Only((None,), "kernels are not configured"),
    "quantization": To(
        "quantization",
        "null is auto; formats that are not read are refused",
        value=lambda value: "auto" if value is None else value,
    ),
    "kv_cache_dtype": Only(("auto", None), "the KV cache has the model's type", "dtype"),
    "load_format": Into(
        _load_format,
        "`auto`, `safetensors`; `pt` is `allow_pickle: true`; other formats are not read",
    ),
    "config_format": Only(("auto", "hf"), "checkpoints have a config.json"),
    "tokenizer_mode": Only(("auto", "hf"), "tokenizers are transformers' fast ones"),
    "skip_tokenizer_init": Only((False,), "the front end needs the tokenizer"),
    "task": Only(("auto", "generate"), "models generate text"),
    "runner": Only(("auto", "generate"), "models generate text"),
    "hf_overrides": Only((None, {}), "the checkpoint's config.json holds"),
    "data_parallel_size": Only((1,), "engines are replicas", "deployment_config.num_replicas"),
    "enable_expert_parallel": Only((False,), "experts are sharded by tensor parallelism"),
    "cpu_offload_gb": Only((0, None), "weights stay on the device"),
    "swap_space": Only((0, None), "preempted requests are computed again"),
    "enable_lora": Only((False,), _LORA),
    "max_loras": Refused(_LORA),
    "max_lora_rank": Refused(_LORA),
    "lora_modules": Refused(_LORA),
    "limit_mm_per_prompt": Refused("prompts are text"),
    "kv_transfer_config": Only((None,), "prompts are computed by the engine that decodes"),
    "attention_backend": Refused("the device decides which attention runs", "device"),
    "max_logprobs": Refused("the limit is that of OpenAI's API"),
    "code_revision": Refused("code comes with the checkpoint", "revision"),
    "tokenizer_revision": Refused("it is written behind the id", "tokenizer: org/name@revision"),
}


def _ngram_sizes(given: Keys) -> Keys:
    """One size given is both; none given is 5."""
    least, most = given.get("min_matching_ngram_size"), given.get("max_matching_ngram_size")
    size = most if least is None else least
    size = 5 if size is None else size
    return {"min_matching_ngram_size": size, "max_matching_ngram_size": size}


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
    "ngram": To("NGram", defaults=_ngram_sizes),
    "[ngram]": To("NGram", defaults=_ngram_sizes),
    "ngram_gpu": To("NGram", "the same matches, found on the CPU", defaults=_ngram_sizes),
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


# What drafts with a `model` without `method`, by types in its `config.json`.
_TYPES = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "medusa": "medusa",
    "recurrent_drafting_drafter": "redrafter",
}


def is_name(model: Any) -> bool:
    """Whether `model` names a look-up instead of a checkpoint."""
    return model in ("ngram", "[ngram]", "suffix")


def method_of(model: Any, at: str) -> str:
    """The method that drafts with a checkpoint, by vLLM's rules; draft_model by default.

    Raises:
        ConfigError: it is a checkpoint of a drafter that is not implemented; names `at`.
    """
    if not isinstance(model, str):
        return "draft_model"  # reported by the check
    if is_name(model):
        return model
    config = _read_config(Path(model))
    kinds = [str(config.get(key)) for key in ("speculators_model_type", "model_type")]
    for kind in kinds:
        if isinstance(METHODS.get(kind), Refused):
            raise ConfigError.at(
                at,
                f"{model!r} is a checkpoint of {kind}, which is not implemented; use an "
                "EAGLE-3, MTP, Medusa or draft-model checkpoint",
            )
    names = config.get("architectures")
    name = str(names[0]).lower() if isinstance(names, list) and names else ""
    folder = Path(model).name.lower()
    signs = (
        *((_TYPES[kind], True) for kind in kinds if kind in _TYPES),
        ("eagle3", "eagle3" in name),
        ("eagle", "eagle" in name),
        ("medusa", "medusa" in name or "medusa_num_heads" in config),
        ("mtp", kinds[1].endswith("_mtp") or name.endswith("mtpmodel")),
        ("eagle3", "eagle3" in folder or "eagle-3" in folder),
        ("eagle", "eagle" in folder),
    )
    return next((method for method, is_shown in signs if is_shown), "draft_model")


def _read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's configuration; empty where it cannot be read, which loading reports."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


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


DIALECT = Dialect("vLLM", ("method",), METHODS, KEYS, ENGINE)
