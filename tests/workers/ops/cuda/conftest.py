"""Triton decides at its import whether it interprets, so these files run in processes of their own.

`test_interpreter.py` starts them; by hand: `TRITON_INTERPRET=1 pytest tests/workers/ops/cuda`.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from threading import RLock

collect_ignore = []
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["test_attention.py", "test_elementwise.py", "test_experts.py",
                      "test_draw.py", "test_decoder.py", "test_edit.py", "test_linear.py",
                      "test_quantised.py", "test_invariant.py", "test_step_rows.py",
                      "test_float8.py"]  # fmt: skip
else:
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction, interpreter_builder

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

    # A third of the time: an overflow shows in the results, which are compared.
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)

    _make_type, _numpy_type = tl.block_type.__init__, interpreter._get_np_dtype
    _TYPES: dict[tuple[int, ...], dict[str, object]] = {}
    _SIZES: dict[tuple[int, ...], tuple[object, object]] = {}
    _NUMPY: dict[str, object] = {}

    def _type_once(self, element_ty, shape):
        """What a shape has to be is checked once, and nothing writes to it."""
        key = tuple(getattr(size, "value", size) for size in shape)
        if key not in _TYPES:
            _make_type(self, element_ty, shape)
            _TYPES[key] = {"shape": self.shape, "numel": self.numel, "text": str(self.shape)}
        known = _TYPES[key]
        self.element_ty, self.shape, self.numel = element_ty, known["shape"], known["numel"]
        self.name = f"<{known['text']}, {element_ty}>"

    def _tensor_once(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in _SIZES:
            _SIZES[key] = tl.tuple(map(tl.constexpr, key)), tl.constexpr(math.prod(key))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = _SIZES[key]

    def _numpy_once(kind):
        if kind.name not in _NUMPY:
            _NUMPY[kind.name] = _numpy_type(kind)
        return _NUMPY[kind.name]

    tl.block_type.__init__, tl.tensor.__init__ = _type_once, _tensor_once
    interpreter._get_np_dtype = _numpy_once
