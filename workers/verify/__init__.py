"""Verification: from the logits of a step's rows to the tokens that every sequence emits.

Pure functions. Start at `rules.verify`; this file has the table of rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...errors import ConfigError
from .lossy import Relaxed, Synthetic, Typical
from .process import DrawSettings, draw, draw_siblings
from .rejection import BlockVerification, Rejection
from .rules import Coupled, Rule, verify

__all__ = ["RULES", "DrawSettings", "Rule", "draw", "draw_siblings", "make_rule", "verify"]

RULES: Mapping[str, Callable[..., Rule]] = {
    rule.name: rule for rule in (Coupled, Rejection, BlockVerification, Typical, Relaxed, Synthetic)
}


def make_rule(name: str, **parameters: float) -> Rule:
    """Returns the rule called `name`; `parameters` are its fields.

    Raises:
        ConfigError: there is no such rule.
    """
    if name not in RULES:
        raise ConfigError.at("rule", f"{name!r} is not one of {', '.join(RULES)}")
    return RULES[name](**parameters)
