"""One rank's loaded model as the rest of the worker sees it, whichever forward computes it."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ...scheduler.types import StepInput
from ..attention import KVCache, KVCode, KVFormat, KVShape, coded_layers
from ..collective import Collective
from ..ops import PlannedOps
from ..ops.protocol import AttentionSpec
from ..seats import sample_step
from ..states import StateCache, StateShape
from .info import ModelInfo

if TYPE_CHECKING:
    from ..spec import ModelReport
    from .checkpoint.weights import Checkpoint
    from .family import Adapters


log = logging.getLogger(__name__)
_REHEARSED = (1, 2, 16, 17, 32, 33, 64, 65, 512, 2048)
"""Rows of the steps that run at start: on both sides of where tiles of rows change."""


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """Which forward serves, and why if it is not the family's."""

    kind: Literal["family", "bridge"]
    reason: str = ""
    operations: str = "transformers"  # whose operations it calls


def known_choice(report: ModelReport | None) -> ForwardChoice | None:
    """The forward that serves a model of which there is a report."""
    if report is None:
        return None
    return ForwardChoice(report.forward, report.forward_reason, report.operations)


def _kernel_errors() -> tuple[type[Exception], ...]:
    """What torch and Triton raise where a kernel cannot be compiled or run."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (RuntimeError,)
    return RuntimeError, TritonError


class Runner(Protocol):
    """A forward over a paged cache; collective."""

    kv_shapes: tuple[KVShape, ...]
    """What each layer stores for one token."""

    state_shapes: tuple[StateShape | None, ...]
    """What each layer keeps of a sequence; None: its keys and values are all."""

    attention_specs: tuple[AttentionSpec, ...]
    """Each layer's attention on this rank."""

    planned: PlannedOps
    """The operations that it runs on, for others' layers too."""

    def run(
        self, step: StepInput, cache: KVCache, capture: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # [num_rows, vocab], each [num_tokens, hidden_size]
        """Logits of the step's rows, and the inputs of layers `capture`."""

    def logits(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, vocab]
        """Logits of states behind the final norm."""


class PagedModel:
    """One rank's shard of a model. `forward` is collective: every rank calls it, in step.

    Of several stages, the last one's ranks get logits and states.
    """

    def __init__(
        self,
        info: ModelInfo,
        module: nn.Module,
        device: torch.device,
        collective: Collective,
        runner: Runner,
        forward_choice: ForwardChoice,
        adapters: Adapters | None = None,
        *,
        has_embedding: bool = True,  # False: it is in another stage
    ) -> None:
        self.has_embedding = has_embedding
        self.module = module  # with the family's forward, only its two ends still have weights
        self.device = device
        self.collective = collective
        self.forward_choice = forward_choice
        self.adapters = adapters  # None: it takes none
        self.runner = runner
        self.kv_shapes = runner.kv_shapes
        self.kv_codes: tuple[KVCode | None, ...] = (None,) * len(self.kv_shapes)
        self.info = info
        first = max(self.kv_shapes, key=lambda shape: shape.num_elements > 0)
        if first.num_elements:  # a stage may have no attention
            self.info = replace(info, num_kv_heads=first.num_kv_heads, head_dim=first.head_dim)

    @property
    def ends(self) -> tuple[nn.Module, nn.Module]:
        """Its embedding and output layer; collective where they are sharded."""
        module: Any = self.module
        return module.get_input_embeddings(), module.get_output_embeddings()

    def keep_kv_as(self, form: KVFormat, checkpoint: Checkpoint, first: int) -> None:
        """Has the caches that are made from now on keep keys and values in codes.

        Args:
            checkpoint: whose scales are taken; where it has none they are 1.
            first: the first layer that is here.
        """
        scales, shapes = checkpoint.kv_scales(), self.runner.kv_shapes
        layers = range(first, first + len(shapes))
        codes = [KVCode(form, *scales.get(layer, (1.0, 1.0))) for layer in layers]
        self.kv_shapes, self.kv_codes = coded_layers(shapes, codes)

    def new_cache(
        self,
        num_blocks: int,
        block_size: int,
        extra_layers: Sequence[KVShape] = (),
        num_seats: int = 1,
        num_checkpoints: int = 0,
    ) -> KVCache:
        """An empty cache; a colocated head's layers come after the target's, in the same blocks.

        Args:
            num_seats: sequences at once, where layers keep states.
            num_checkpoints: further states.
        """
        shapes = (*self.kv_shapes, *extra_layers)
        device, dtype = self.device, self.info.dtype
        states = None
        if self.keeps_states:
            num_slots, kept = num_blocks * block_size, self.runner.state_shapes
            states = StateCache(
                kept, num_slots, block_size, dtype, device, num_seats, num_checkpoints
            )
        return KVCache(shapes, num_blocks, block_size, dtype, device, states, self.kv_codes)

    @property
    def keeps_states(self) -> bool:
        """Whether a sequence has more on this rank than keys and values."""
        return any(self.runner.state_shapes)

    @property
    def state_bytes(self) -> int:
        """Of one sequence, all layers of this rank."""
        shapes = (shape for shape in self.runner.state_shapes if shape is not None)
        return sum(shape.num_bytes(self.info.dtype) for shape in shapes)

    def warm_up(self, block_size: int, max_num_tokens: int) -> None:
        """Compiles what steps planned on the host may need, over blocks of that size; collective.

        Attention's variants are listed. Other kernels differ by the number of rows: steps of few
        and of many, up to `max_num_tokens`, run in a cache of their own. 0: no step runs.
        """
        runner, forms = self.runner, {code.format for code in self.kv_codes if code is not None}
        given = (self.info.dtype, block_size, forms.pop() if forms else None)
        shows, ops = self.collective.rank == 0, runner.planned.ops
        if ops.warm_up(runner.attention_specs, *given, shows_progress=shows) and max_num_tokens:
            try:
                self._rehearse(block_size, max_num_tokens, shows_progress=shows)
            except _kernel_errors() as error:  # a step may fare better
                if self.collective.size > 1:  # the others are in the middle of a sum
                    raise
                reason = " ".join(str(error).split())[:300]
                log.warning("kernels are left to the first requests: %s", reason)

    @torch.inference_mode()
    def _rehearse(self, block_size: int, max_num_tokens: int, *, shows_progress: bool) -> None:
        from tqdm import tqdm

        most = min(max_num_tokens, self.info.max_model_len, _REHEARSED[-1])
        counts = [count for count in _REHEARSED if count <= most]
        num_blocks = -(-most // block_size)
        cache, begin = self.new_cache(num_blocks, block_size), time.perf_counter()
        for count in tqdm(
            counts, "Kernels of steps, by rows", disable=not shows_progress, file=sys.stderr
        ):
            step = sample_step([0] * count, 0, range(num_blocks), block_size=block_size)
            self.forward(replace(step, rows=step.rows[-1:]), cache)
        spent_s = time.perf_counter() - begin
        log.info("kernels of steps of up to %d rows are compiled, in %.1f s", counts[-1], spent_s)

    def kv_bytes_per_token(self) -> int:
        """Of this rank, all layers."""
        return sum(shape.num_bytes(self.info.dtype) for shape in self.kv_shapes)

    def forward(
        self, step: StepInput, cache: KVCache
    ) -> Tensor:  # [num_rows, vocab], float32, on every rank
        """Compact, compute `step`, and give the logits of its rows."""
        return self.forward_capturing(step, cache, ())[0]

    @torch.inference_mode()
    def forward_capturing(
        self, step: StepInput, cache: KVCache, capture: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`forward`, with the inputs of layers `capture`, each [num_tokens, hidden_size]."""
        if len(step.kv_moves):
            cache.apply_moves(step.kv_moves)
        logits, hidden = self.runner.run(step, cache, capture)
        return logits.float(), hidden

    @torch.inference_mode()
    def logits(
        self,
        states: Tensor,  # [num_rows, hidden_size], the input of the layer behind the last
    ) -> Tensor:  # [num_rows, vocab], float32
        """Logits of states that a forward captured; collective."""
        return self.runner.logits(states).float()


# What leads out of a model: to the whole program, or to buffers that other ranks have mapped.
_OUTSIDE = (type, ModuleType, BuiltinFunctionType, logging.Logger, Collective, str, bytes, int)


class Offloaded:
    """The memory of every tensor that is reached from `roots`, copied to the host and freed.

    Tensors stay the objects that they are, views and all: their storages are emptied, and filled
    again by `restore`, at other addresses. Nothing may compute with them in between, and no graph
    that was captured before may be replayed.

    Args:
        device_type: of the tensors; others stay.
    """

    def __init__(self, roots: Any, device_type: str = "cuda") -> None:
        pinned = device_type == "cuda"
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in storages_of(roots, device_type):
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            copy = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=pinned)
            self._kept.append((storage, copy.copy_(flat)))
            del flat
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """Held in host memory."""
        return sum(copy.numel() for _, copy in self._kept)

    def restore(self) -> None:
        """Brings everything back; raises torch's error where there is no room on the device."""
        for storage, copy in self._kept:
            storage.resize_(copy.numel())
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            flat.copy_(copy)
        self._kept = []


def storages_of(roots: Any, device_type: str) -> list[torch.UntypedStorage]:
    """The storages of all tensors that are reached from `roots`, each once; empty ones aside."""
    found: dict[int, torch.UntypedStorage] = {}
    seen, waiting = set[int](), [roots]
    while waiting:
        each = waiting.pop()
        if isinstance(each, _OUTSIDE) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            if storage.device.type == device_type and storage.nbytes():
                found[storage.data_ptr()] = storage
            waiting.append(each.__dict__)
        elif isinstance(each, FunctionType):  # its globals are a module's
            waiting += [cell.cell_contents for cell in each.__closure__ or () if _is_set(cell)]
        elif isinstance(each, MethodType):
            waiting += [each.__self__, each.__func__]
        else:
            waiting += gc.get_referents(each)
    return list(found.values())


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def trim() -> None:
    """Has the C library give freed memory back to the system, where it can."""
    try:
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    except (OSError, AttributeError):  # another C library
        return
