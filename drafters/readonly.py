"""What a user's drafter is handed: the engine's own arrays, which it can read and not write.

Called by `user.py`. The same arrays go on to the target's workers, so that a write would change
what is computed and with it what is emitted; here it raises inside the drafter.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel

T = TypeVar("T")


def readonly(value: T) -> T:
    """`value` with views for its arrays that cannot be written to; what else can be, is copied."""
    shown: Any = value
    if value is None or isinstance(value, (str, int, float)):
        return value  # most of what there is
    if isinstance(value, np.ndarray):
        shown = value.view()
        shown.flags.writeable = False
    elif isinstance(value, tuple):
        shown = tuple(map(readonly, value))
    elif isinstance(value, BaseModel):
        shown = value.model_copy(deep=True)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [readonly(getattr(value, field.name)) for field in fields(value)]
        shown = type(value)(*parts)
    return shown
