"""llama.cpp-like short options as a speculative section.

    --spec-type none|ngram|draft-simple|ngram-mod|...     decoding_type
    --draft-model FOLDER                                  speculative_model (implies DraftTarget)
    --max-draft-len N                                     max_draft_len
    --spec-ngram-size-n N, --lookup-cache-static FILE, ...   keys of `lookup.py`

They refine what `--speculative-config` or the file says; another type starts a section afresh.
"""

from __future__ import annotations

from typing import Any

from ...config.dialects import METHODS, translate_speculative


def section_of(
    section: Any,
    spec_type: str | None,
    draft_model: str | None,
    draft_max: int | None,
    keys: dict[str, Any],
    implied: str | None = None,
) -> Any:
    """`section` refined by the short options; what is no mapping is left for the check.

    `keys` are a section's own; `implied` is the type that they imply where none is said.
    """
    if (spec_type, draft_model, draft_max) == (None, None, None) and not keys:
        return section
    if section is not None and not isinstance(section, dict):
        return section
    ours = translate_speculative(section) if section else {}
    kind = METHODS.get(spec_type or "", spec_type)
    if kind is None and draft_model is not None:
        kind = "DraftTarget"
    if kind is None and not ours:
        kind = implied
    if kind is not None and kind != ours.get("decoding_type"):
        ours = {"decoding_type": kind}
    if draft_model is not None:
        ours["speculative_model"] = draft_model
    if draft_max is not None:
        ours["max_draft_len"] = draft_max
    ours.update(keys)
    return ours
