"""One rank's loaded model with the interface that the worker uses, for every kind of forward."""

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
"""Rows of the steps that run at start: on both sides of the limits at which row tiles change."""


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """The forward that computes the model, and the reason if it is not the family's."""

    kind: Literal["family", "bridge"]
    reason: str = ""
    operations: str = "transformers"  # name of the operations that it calls


def known_choice(report: ModelReport | None) -> ForwardChoice | None:
    """Returns the forward choice of a model that was reported before."""
    if report is None:
        return None
    return ForwardChoice(report.forward, report.forward_reason, report.operations)


def _kernel_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions of torch and Triton for kernels that cannot be compiled or run."""
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
    """What each layer keeps per sequence; None: only keys and values."""

    attention_specs: tuple[AttentionSpec, ...]
    """Each layer's attention on this rank."""

    planned: PlannedOps
    """The operations that it runs on, also for other layers."""

    def run(
        self, step: StepInput, cache: KVCache, capture: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # [num_rows, vocab], each [num_tokens, hidden_size]
        """Logits of the step's rows, and the inputs of layers `capture`."""

    def logits(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, vocab]
        """Returns logits of states after the final norm."""


class PagedModel:
    """One rank's shard of a model. `forward` is collective: every rank must call it.

    With several stages, only the last stage's ranks get logits and states.
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
        self.adapters = adapters  # None: adapters are not supported
        self.runner = runner
        self.kv_shapes = runner.kv_shapes
        self.kv_codes: tuple[KVCode | None, ...] = (None,) * len(self.kv_shapes)
        self.info = info
        first = max(self.kv_shapes, key=lambda shape: shape.num_elements > 0)
        if first.num_elements:  # a stage may have no attention
            self.info = replace(info, num_kv_heads=first.num_kv_heads, head_dim=first.head_dim)

    @property
    def ends(self) -> tuple[nn.Module, nn.Module]:
        """Its embedding and output layer; collective if they are sharded."""
        module: Any = self.module
        return module.get_input_embeddings(), module.get_output_embeddings()

    def keep_kv_as(self, form: KVFormat, checkpoint: Checkpoint, first: int) -> None:
        """Makes caches that are created from now on store keys and values as codes.

        Args:
            checkpoint: source of the scales; missing ones are 1.
            first: index of this rank's first layer.
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
        """Returns an empty cache; a head's layers follow the target's, in the same blocks.

        Args:
            num_seats: maximum number of concurrent sequences, for layers with states.
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
        """Whether a sequence needs more on this rank than keys and values."""
        return any(self.runner.state_shapes)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states in all layers of this rank."""
        shapes = (shape for shape in self.runner.state_shapes if shape is not None)
        return sum(shape.num_bytes(self.info.dtype) for shape in shapes)

    def warm_up(self, block_size: int, max_num_tokens: int) -> None:
        """Compiles the kernels of host-planned steps for blocks of that size; collective.

        Attention's variants are listed. Other kernels depend on the number of rows, so steps of up
        to `max_num_tokens` rows run in a temporary cache. If it is 0, no step runs.
        """
        runner, forms = self.runner, {code.format for code in self.kv_codes if code is not None}
        given = (self.info.dtype, block_size, forms.pop() if forms else None)
        shows, ops = self.collective.rank == 0, runner.planned.ops
        if ops.warm_up(runner.attention_specs, *given, shows_progress=shows) and max_num_tokens:
            try:
                self._rehearse(block_size, max_num_tokens, shows_progress=shows)
            except _kernel_errors() as error:  # the actual steps may still work
                if self.collective.size > 1:  # the other ranks may be waiting in a sum
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
        """Returns the bytes per token of all layers of this rank."""
        return sum(shape.num_bytes(self.info.dtype) for shape in self.kv_shapes)

    def forward(
        self, step: StepInput, cache: KVCache
    ) -> Tensor:  # [num_rows, vocab], float32, on every rank
        """Applies moves, computes `step`, and returns the logits of its rows."""
        return self.forward_capturing(step, cache, ())[0]

    @torch.inference_mode()
    def forward_capturing(
        self, step: StepInput, cache: KVCache, capture: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Does the same as `forward`, and returns the inputs of layers `capture` too."""
        if len(step.kv_moves):
            cache.apply_moves(step.kv_moves)
        logits, hidden = self.runner.run(step, cache, capture)
        return logits.float(), hidden

    @torch.inference_mode()
    def logits(
        self,
        states: Tensor,  # [num_rows, hidden_size], the final norm's output
    ) -> Tensor:  # [num_rows, vocab], float32
        """Returns logits of states that a forward captured; collective."""
        return self.runner.logits(states).float()


# Types that lead out of a model: to the whole program, or to buffers mapped by other ranks.
_OUTSIDE = (type, ModuleType, BuiltinFunctionType, logging.Logger, Collective, str, bytes, int)


class Offloaded:
    """Copies every tensor that is reachable from `roots` to the host and frees its memory.

    Tensor objects and views stay valid: their storages are emptied, and `restore` fills them again,
    at other addresses. Until then nothing may use them, and no graph that was captured before may
    ever be replayed.

    Args:
        device_type: device type of the affected tensors.
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
        """Bytes held in host memory."""
        return sum(copy.numel() for _, copy in self._kept)

    def restore(self) -> None:
        """Restores all tensors; raises torch's error if the device lacks memory."""
        for storage, copy in self._kept:
            storage.resize_(copy.numel())
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            flat.copy_(copy)
        self._kept = []


def storages_of(roots: Any, device_type: str) -> list[torch.UntypedStorage]:
    """Returns the non-empty storages of all tensors that are reachable from `roots`, each once."""
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
        elif isinstance(each, FunctionType):  # its globals are those of a module
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
    """Makes the C library return freed memory to the system, if it supports that."""
    try:
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    except (OSError, AttributeError):  # another C library
        return
