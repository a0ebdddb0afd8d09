"""From a configuration section to its drafter. A new drafter adds one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import DraftTargetConfig, LookaheadConfig, NGramConfig, NoSpeculation, SpeculationBase
from .draft_target import DraftTarget
from .lookahead import Lookahead
from .ngram import NGram
from .none import NoDrafter
from .protocol import Drafter, DraftHost

_BUILDERS: dict[type[SpeculationBase], Callable[[Any, DraftHost], Drafter]] = {
    NoSpeculation: lambda config, host: NoDrafter(),
    LookaheadConfig: lambda config, host: Lookahead(config),
    NGramConfig: lambda config, host: NGram(config),
    DraftTargetConfig: lambda config, host: DraftTarget(config, host.draft_model(config)),
}


def build(config: SpeculationBase, host: DraftHost) -> Drafter:
    """The drafter that `config` describes, its models (if any) started on `host`.

    Raises:
        ConfigError: its model is missing or does not fit the target.
    """
    return _BUILDERS[type(config)](config, host)
