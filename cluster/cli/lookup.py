"""llama.cpp's options of the drafters that look tokens up, under its own names.

`EngineOptions` inherits them; `speculation.py` puts what was given into the drafter's section,
where a key that the drafter does not have is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

_PANEL = "Speculation by look-up"
_KEYS = {
    "spec_ngram_size_n": "ngram_size_n",
    "spec_ngram_size_m": "ngram_size_m",
    "spec_ngram_min_hits": "min_hits",
    "spec_ngram_check_rate": "check_rate",
    "spec_draft_n_min": "draft_min",
    "spec_ngram_mod_n_match": "n_match",
    "spec_ngram_mod_n_min": "n_min",
    "spec_ngram_mod_n_max": "max_draft_len",
    "lookup_cache_static": "lookup_cache_static",
    "lookup_cache_dynamic": "lookup_cache_dynamic",
}


def _number(name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=_PANEL)


@dataclass(frozen=True)
class LookupOptions:
    """Keys of the n-gram drafters' sections; `None` leaves them to the section."""

    spec_ngram_size_n: Annotated[
        int | None, _number("--spec-ngram-size-n", "Tokens of the n-gram that is looked up.")
    ] = None
    spec_ngram_size_m: Annotated[
        int | None, _number("--spec-ngram-size-m", "Tokens after it that are drafted.")
    ] = None
    spec_ngram_min_hits: Annotated[
        int | None, _number("--spec-ngram-min-hits", "Look-ups of a key before it drafts.")
    ] = None
    spec_ngram_check_rate: Annotated[
        int | None, _number("--spec-ngram-check-rate", "A look-up every so many tokens.")
    ] = None
    spec_draft_n_min: Annotated[
        int | None, _number("--spec-draft-n-min", "Shorter drafts are dropped.")
    ] = None
    spec_ngram_mod_n_match: Annotated[
        int | None, _number("--spec-ngram-mod-n-match", "ngram-mod: tokens that are looked up.")
    ] = None
    spec_ngram_mod_n_min: Annotated[
        int | None, _number("--spec-ngram-mod-n-min", "ngram-mod: shorter drafts are dropped.")
    ] = None
    spec_ngram_mod_n_max: Annotated[
        int | None, _number("--spec-ngram-mod-n-max", "ngram-mod: most tokens of a draft.")
    ] = None
    lookup_cache_static: Annotated[
        Path | None,
        typer.Option(
            "--lookup-cache-static",
            "-lcs",
            help="Table of `outrider ngram build`; implies ngram-cache.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    lookup_cache_dynamic: Annotated[
        Path | None,
        typer.Option(
            "--lookup-cache-dynamic",
            "-lcd",
            help="Past requests' table, read and written; implies ngram-cache.",
            rich_help_panel=_PANEL,
        ),
    ] = None

    def lookup_keys(self) -> dict[str, Any]:
        """What was given, by the section's keys."""
        given = {field.name: getattr(self, field.name) for field in fields(LookupOptions)}
        return {
            _KEYS[name]: str(value) if isinstance(value, Path) else value
            for name, value in given.items()
            if value is not None
        }

    def implied_type(self) -> str | None:
        """The drafter that a table's file is for."""
        has_file = self.lookup_cache_static is not None or self.lookup_cache_dynamic is not None
        return "NGramCache" if has_file else None
