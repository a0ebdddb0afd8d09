"""Triton decides at its import whether it interprets, so these files run in processes of their own.

`test_interpreter.py` starts them; by hand: `TRITON_INTERPRET=1 pytest tests/workers/ops/cuda`.
"""

from __future__ import annotations

import os
from threading import RLock

collect_ignore = []
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["test_attention.py", "test_elementwise.py", "test_experts.py",
                      "test_draw.py", "test_decoder.py", "test_edit.py", "test_linear.py",
                      "test_quantised.py", "test_invariant.py", "test_step_rows.py",
                      "test_float8.py"]  # fmt: skip
else:
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    _launch, _ONE_AT_A_TIME = GridExecutor.__call__, RLock()

    def _launch_alone(self, *args, **kwargs):
        """The interpreter's place in the grid is global, and ranks are threads here."""
        with _ONE_AT_A_TIME:
            return _launch(self, *args, **kwargs)

    GridExecutor.__call__ = _launch_alone

    _call = InterpretedFunction.__call__
    _PATCHED: set[str] = set()

    def _call_quickly(self, *args, **kwargs):
        """The interpreter patches the language at every call of a function: once is enough."""
        module = self.fn.__module__
        if module in _PATCHED:
            return self.rewrite()(*args, **kwargs)
        _PATCHED.add(module)
        return _call(self, *args, **kwargs)

    InterpretedFunction.__call__ = _call_quickly
