"""llama.cpp-like short options as a speculative section.

    --spec-type none|ngram|draft-simple|<decoding_type>   decoding_type
    --draft-model FOLDER                                  speculative_model (implies DraftTarget)
    --max-draft-len N                                     max_draft_len

They refine what `--speculative-config` or the file says; another type starts a section afresh.
"""

from __future__ import annotations

from typing import Any

from ...config.dialects import VLLM_METHODS, translate_speculative

# llama.cpp's `--spec-type` -> our `decoding_type`; vLLM's names and our own are accepted too.
_LLAMA_TYPES = {"draft-simple": "DraftTarget"}


def section_of(
    section: Any, spec_type: str | None, draft_model: str | None, draft_max: int | None
) -> Any:
    """`section` refined by the short options; what is no mapping is left for the check."""
    if (spec_type, draft_model, draft_max) == (None, None, None):
        return section
    if section is not None and not isinstance(section, dict):
        return section
    ours = translate_speculative(section) if section else {}
    kind = {**VLLM_METHODS, **_LLAMA_TYPES}.get(spec_type or "", spec_type)
    if kind is None and draft_model is not None:
        kind = "DraftTarget"
    if kind is not None and kind != ours.get("decoding_type"):
        ours = {"decoding_type": kind}
    if draft_model is not None:
        ours["speculative_model"] = draft_model
    if draft_max is not None:
        ours["max_draft_len"] = draft_max
    return ours
