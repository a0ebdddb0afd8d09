"""llama.cpp's options (`common/arg.cpp`), by their names without dashes.

A type's own options bear its name. Those without one, which older versions had, and the lengths of
drafts are for every drafter that has them.
"""

from __future__ import annotations

from .table import Dialect, Entry, Keys, Name, Only, Refused, To


def _three(given: Keys) -> Keys:
    return {"max_draft_len": 3}


_NOT_RUN = "this drafter is not implemented"
# In the order in which llama.cpp asks them, whatever the order they are given in
# (`common/speculative.cpp`): the first with a guess wins.
METHODS: dict[str, Name] = {
    "none": To("None", "beside others too: nothing drafts"),
    "ngram-simple": To("NGramSimple"),
    "ngram-map-k": To("NGramMapK"),
    "ngram-map-k4v": To("NGramMapK4V"),
    "ngram-mod": To("NGramMod"),
    "ngram-cache": To("NGramCache"),
    "draft-simple": To("DraftTarget"),
    "draft-eagle3": To("Eagle3", defaults=_three),
    "draft-mtp": To("MTP", defaults=_three),
    "draft-mtp-adaptive": Refused(_NOT_RUN, "draft-mtp"),
    "draft-dflash": Refused(_NOT_RUN, "draft-eagle3"),
    "draft-dspark": Refused(_NOT_RUN, "draft-eagle3"),
}
ORDER = tuple(each.key for each in METHODS.values() if isinstance(each, To))

# Our key -> options that name no type.
_GENERAL = {
    "max_draft_len": ("draft", "draft_max", "draft_n", "draft_n_max", "n_max", "spec_draft_n_max"),
    "draft_min": ("draft_min", "draft_n_min", "n_min", "spec_draft_n_min"),
    "p_min": ("draft_p_min", "spec_draft_p_min"),
    "ngram_size_n": ("ngram_size_n", "size_n", "spec_ngram_size_n"),
    "ngram_size_m": ("ngram_size_m", "size_m", "spec_ngram_size_m"),
    "min_hits": ("min_hits", "ngram_min_hits", "spec_ngram_min_hits"),
    "check_rate": ("check_rate", "ngram_check_rate", "spec_ngram_check_rate"),
    "speculative_model": ("draft_model", "model_draft", "spec_draft_model"),
}
_SIZES = {"size_n": "ngram_size_n", "size_m": "ngram_size_m"}
NAMED = {
    "NGramSimple": ("simple", _SIZES),
    "NGramMapK": ("map_k", _SIZES),
    "NGramMapK4V": ("map_k4v", {**_SIZES, "min_hits": "min_hits"}),
    "NGramMod": ("mod", {"n_match": "n_match", "n_min": "n_min", "n_max": "max_draft_len"}),
}
_HARDWARE = (
    "threads", "threads_batch", "cpu_mask", "cpu_mask_batch", "cpu_range", "cpu_range_batch",
    "cpu_strict", "cpu_strict_batch", "prio", "prio_batch", "poll", "poll_batch",
    "override_tensor", "cpu_moe", "n_cpu_moe", "device", "ngl", "type_k", "type_v", "ctx_size",
    "replace",
)  # fmt: skip
_PLACED = Refused("a drafter runs where `placement` and `resources` put it", "placement")

KEYS: dict[str, Entry] = {
    **{option: To(key) for key, options in _GENERAL.items() for option in options},
    **{
        f"{spec}ngram_{name}_{end}": To(key, owner=kind)
        for kind, (name, keys) in NAMED.items()
        for end, key in keys.items()
        for spec in ("spec_", "")
    },
    **{
        f"{spec}ngram_{name}_min_hits": Only(
            (1,), "a key drafts from its first look-up on, in llama.cpp too", "ngram-map-k4v"
        )
        for name in ("simple", "map_k")
        for spec in ("spec_", "")
    },
    **{
        option: Refused("drafts are chains or the section's own tree", "use_dynamic_tree")
        for option in ("p_split", "draft_p_split", "spec_draft_p_split")
    },
    "spec_draft_sampling": Refused("drafts are drawn at the request's temperature"),
    "spec_draft_backend_sampling": Only(
        (True,), "drafts are drawn on the device that computes them"
    ),
    "spec_draft_hf": To("speculative_model", "a Hugging Face id"),
    "hf_repo_draft": To("speculative_model", "a Hugging Face id"),
    "spec_ngram_mod_n_dead_off": Refused("a pool is wiped after five bad drafts in a row"),
    "ngram_mod_n_dead_off": Refused("a pool is wiped after five bad drafts in a row"),
    **{f"spec_draft_{name}": _PLACED for name in _HARDWARE},
    **{f"{name}_draft": _PLACED for name in _HARDWARE},
    **dict.fromkeys(
        ("gpu_layers_draft", "n_gpu_layers_draft", "cache_type_k_draft", "cache_type_v_draft"),
        _PLACED,
    ),
}
SHORT = {  # options of one dash
    "-td": "threads_draft",
    "-tbd": "threads_batch_draft",
    "-ngld": "n_gpu_layers_draft",
    "-devd": "device_draft",
    "-ctkd": "cache_type_k_draft",
    "-ctvd": "cache_type_v_draft",
    "-otd": "override_tensor_draft",
    "-cmoed": "cpu_moe_draft",
    "-ncmoed": "n_cpu_moe_draft",
    "-cd": "ctx_size_draft",
    "-hfd": "hf_repo_draft",
}

DIALECT = Dialect("llama.cpp", ("spec_type",), METHODS, KEYS)
