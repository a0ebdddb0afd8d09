"""Records what a step dispatches, to compare it and to run it again like a captured graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_flatten, tree_map

from outrider.workers.collective import Collective


def _is_view(out: Any, args: Any) -> bool:
    """Whether all results lie in the operands' memory."""
    held = {each.untyped_storage().data_ptr() for each in _tensors(args)}
    return all(each.untyped_storage().data_ptr() in held for each in _tensors(out))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(tree)[0] if isinstance(each, torch.Tensor)]


class Tape(TorchDispatchMode):
    """Operations in order. Every tensor is kept, so no two share an address or an identity."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, tuple, dict, Any]] = []
        self._made: dict[int, int] = {}  # id of a result -> its number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.note(func, args, out, kwargs)
        return out

    def note(self, func, args, out, kwargs=None) -> None:
        """One operation that ran; those outside torch's dispatcher are noted by who runs them."""
        self.entries.append((func, args, kwargs or {}, out))
        for each in tree_flatten(out)[0]:
            if isinstance(each, torch.Tensor):
                self._made.setdefault(id(each), len(self._made))

    def signature(self) -> list[tuple]:
        """Operations with shapes, constants, and where each operand lies.

        An operand is a result of the tape, or lies at an address from before it.
        """
        return [
            (str(func), *(self._operand(each) for each in tree_flatten((args, kwargs))[0]))
            for func, args, kwargs, _ in self.entries
        ]

    def _operand(self, each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        where = ("result", self._made[id(each)]) if id(each) in self._made else each.data_ptr()
        return (tuple(each.shape), each.stride(), each.dtype, where)

    def replay(self) -> None:
        """Runs the same operations on the same addresses, as a graph does."""
        env: dict[int, torch.Tensor] = {}

        def current(each: Any) -> Any:
            return env.get(id(each), each) if isinstance(each, torch.Tensor) else each

        for func, args, kwargs, out in self.entries:
            new = func(*tree_map(current, args), **tree_map(current, kwargs))
            for old, fresh in zip(tree_flatten(out)[0], tree_flatten(new)[0], strict=True):
                if isinstance(old, torch.Tensor):
                    env[id(old)] = fresh


class WeightsOnMeta(TorchFunctionMode):
    """Replaces weights on the CPU by weights on the meta device, where nothing has values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(each.device.type == "meta" for each in _tensors((args, kwargs))):

            def moved(each: Any) -> Any:
                if isinstance(each, torch.Tensor) and each.is_floating_point() and each.is_cpu:
                    return torch.empty_like(each, device="meta")
                return each

            args, kwargs = tree_map(moved, args), tree_map(moved, kwargs)
        return func(*args, **kwargs)


class Dispatches(TorchDispatchMode):
    """Counts operations that launch work: no views. Those within `as_one` count as one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.names: Counter[str] = Counter()
        self._inside = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self._inside and (func._schema.is_mutable or not _is_view(out, args)):
            self.count += 1
            self.names[str(func)] += 1
        return out

    def as_one(self, verb):
        def counted(*args):
            self.count += not self._inside
            self._inside += 1
            try:
                return verb(*args)
            finally:
                self._inside -= 1

        return counted


class RecordedGraphs:
    """CUDA's graphs by tapes: a replay runs the operations of the recording and no other code.

    As on a GPU, a recording waits for no other rank; `collective` has to be taped for that.
    """

    def __init__(self, collective: Collective | None = None) -> None:
        self.num_replays = 0
        self._collective = collective or Collective.single()

    def warm_up(self, work):
        with torch.inference_mode():
            work()

    def capture(self, work):
        with torch.inference_mode(), self._collective.rehearsal(), Tape() as tape:
            work()

        def replay():
            self.num_replays += 1
            tape.replay()

        return replay


class TapedCollective(Collective):
    """A member of `group` whose sums and gathers are recorded and replayed as one operation each.

    Process groups bypass torch's dispatcher, so a `Tape` alone would replay a step without them.
    On the meta device, where no process group works, results have their shapes and no values.
    """

    def __init__(self, group: Collective) -> None:
        super().__init__(group.rank, group.size, group._group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._entry(super().all_reduce, tensor)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        gather = super().all_gather
        if tensor.is_meta:
            return torch.cat([tensor] * self.size, dim=dim)
        return self._entry(lambda part: gather(part, dim), tensor, "all_gather")

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return self._entry(super().all_to_all, tensor, "all_to_all")

    def _entry(
        self, work: Callable[[Tensor], Tensor], tensor: Tensor, name: str = "all_reduce"
    ) -> Tensor:
        if tensor.is_meta:
            return tensor
        tapes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Tape)]
        with _disable_current_modes():
            out = work(tensor)
        for tape in tapes:
            tape.note(_Named(name, work), (tensor,), out)
        return out


class _Named:
    """An operation whose text is its name, as the signature of a tape shows it."""

    def __init__(self, name: str, work: Callable[[Tensor], Tensor]) -> None:
        self._name, self._work = name, work

    def __call__(self, tensor: Tensor) -> Tensor:
        return self._work(tensor)

    def __str__(self) -> str:
        return self._name
