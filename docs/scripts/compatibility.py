"""`docs/compatibility.md`, from the tables that `config/compat/translate.py` parses with.

`python -m outrider.docs.scripts.compatibility` writes it; a test fails where it is out of date.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ...config.compat.table import DIALECTS, Entry, Ignored, Into, Refused, To, as_yaml

PAGE = Path(__file__).resolve().parents[1] / "compatibility.md"
_HEAD = """# Compatibility

What the options of TensorRT-LLM, vLLM, llama.cpp and SGLang mean here. This page is generated from
the tables that the parser uses: `python -m outrider.docs.scripts.compatibility` writes it anew.

A speculative section may use any of these spellings, also mixed. What names its drafter decides
whose defaults hold: `decoding_type` (TensorRT-LLM's key and ours), `method` (vLLM), `spec_type`
(llama.cpp) or `speculative_algorithm` (SGLang). On the command line the same keys are options:
`--speculative-config.KEY VALUE` sets any of them, and SGLang's and llama.cpp's own spellings work
as they are, as do options of their engines (`--enforce-eager`, `-ngl 99`). A key that would change
what is generated, and cannot here, is refused: the error names it, with the reason and what to use
instead. A key on which nothing that is generated depends is accepted: a warning of one line names
it and the reason why it has no effect. The same holds for fields of requests' bodies, whose warning
is in the server's log, once for each.

A `model` without `method` is read as vLLM does: `ngram` and `[ngram]` are look-ups, the
checkpoint's `config.json` or its folder's name tells EAGLE, EAGLE-3, P-EAGLE, Medusa and MTP heads,
PARD and PARD-2, and anything else is a draft model. Lists of names (`ngram-mod,draft-simple`) are a
`Compose` in llama.cpp's order; `none` goes with no other.

Keys that are not listed and are spelled as ours: [configuration.md](configuration.md) and the
pages of the [drafters](drafters/README.md).
"""
_DEFAULTS = {
    "TensorRT-LLM": (
        "`SA`: the newest match, of up to 64 tokens or of exactly `max_matching_ngram_size`. "
        "A dynamic tree without `max_total_draft_tokens` has `dynamic_tree_max_topK` nodes to "
        "a level. `is_public_pool` is off unless asked for, since what one request drafts "
        "from another's text shows in its timing."
    ),
    "vLLM": (
        "`ngram`: one of `prompt_lookup_min` and `prompt_lookup_max` is both, neither is 5. "
        "`suffix`: `num_speculative_tokens` is `suffix_decoding_max_tree_depth`. Without "
        "`rejection_sample_method` the rule is [`coupled`](drafters/README.md), which is "
        "exact too."
    ),
    "llama.cpp": (
        "`ngram-simple`, `ngram-map-k` and `ngram-map-k4v` draft `size_m` tokens, `ngram-mod` "
        "64, `ngram-cache` 8, drafters with a model 3."
    ),
    "SGLang": (
        "Chains of 3 where neither steps, topk nor tokens are given. `NGRAM`: 11 tokens, "
        "depth 18, a tree."
    ),
}


def render() -> str:
    """The page."""
    lines = [_HEAD]
    for dialect in DIALECTS:
        lines += [f"## {dialect.name}", "", f"Defaults. {_DEFAULTS[dialect.name]}", ""]
        lines += _table(f"`{dialect.selectors[0]}`", dialect.methods)
        lines += _table("Key of a section", dialect.keys)
        if dialect.engine:
            lines += _table("Key of the engine", dialect.engine)
        if dialect.kv_cache:
            lines += _table("Key of `kv_cache_config`", dialect.kv_cache)
        if dialect.options:
            options = {f"--{name}": To(to=f"--{ours}") for name, ours in dialect.options.items()}
            lines += _table("Option of the command line", options)
        if dialect.environment:
            variables = {
                name: To(to="--" + key.replace("_", "-"))
                for name, key in dialect.environment.items()
            }
            lines += _table("Environment variable", variables)
        if dialect.request:
            lines += _table("Field of a request", dialect.request)
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(title: str, entries: Mapping[str, Entry]) -> Iterator[str]:
    yield f"| {title} | here |"
    yield "|---|---|"
    for names, meaning in _grouped(entries):
        yield f"| {names} | {meaning} |"
    yield ""


def _grouped(entries: Mapping[str, Entry]) -> list[tuple[str, str]]:
    """Keys that mean the same share a row."""
    rows: dict[str, list[str]] = {}
    for key, entry in entries.items():
        rows.setdefault(_meaning(entry), []).append(f"`{key}`")
    return [(", ".join(keys), meaning) for meaning, keys in rows.items()]


def _meaning(entry: Entry) -> str:
    if isinstance(entry, To):
        owner = f" of `{entry.owner}`" if entry.owner else ""
        names = [
            f"{', '.join(map(as_yaml, others))} {'are' if others[1:] else 'is'} {name}"
            for name, others in entry.rename.items()
        ]
        note = "; ".join([*names, entry.note]).removesuffix("; ")
        return f"`{entry.to}`{owner}" + (f": {note}" if note else "")
    if isinstance(entry, Into):
        return entry.note
    near = f"; nearest: {entry.nearest}" if entry.nearest else ""
    if isinstance(entry, Refused):
        return f"refused: {entry.refused}{near}"
    if isinstance(entry, Ignored):
        return f"no effect, with a warning: {entry.ignored}{near}"
    values = " or ".join(f"`{as_yaml(value)}`" for value in entry.only)
    return f"{values} only: {entry.why}{near}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
