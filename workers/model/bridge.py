"""All code that depends on transformers' internals; its private parts are imported here, and for
heads in `drafters/heads/block.py`.

Facts relied on (transformers 5.23): an attention function that is registered through
`AttentionInterface` without a mask function disables mask building; custom keyword arguments reach
it; `use_cache=False` must be passed; model forwards are wrapped by decorators that `inspect.unwrap`
removes; `_init_weights` recomputes rotary frequencies and other constants. Each architecture that
we claim to support has a test in `tests/workers/model/test_equality.py`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
)
from transformers.integrations.moe import _grouped_mm
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention, Llama4TextMoe

from ...config.files import reason
from ...drafters.heads.block import by_target, merged
from ...drafters.heads.llama import Temperature
from ...errors import CheckpointError
from ...scheduler.types import IntArray, StepInput
from ..attention import KVCache, KVShape
from ..ops import Ops, PagedStep, PlannedOps, ReferenceOps
from ..ops.protocol import AttentionSpec
from ..states import StateShape
from .checkpoint.hub import Trust
from .checkpoint.pooling import LAYER, classifies
from .checkpoint.weights import Joined, Stacked, TensorSource, Whole, whole_box
from .info import ModelInfo

LLAMA4_ATTENTION = "outrider_paged_llama4"
IMAGE_PARTS = r"^(vision_model|multi_modal_projector)\."
"""Parts of a checkpoint for text and images other than the text model."""


def adapt(model: Any) -> None:
    """Adapts a `Llama4ForCausalLM` without weights to a flat, paged batch.

    - Its layers without rotary positions scale the query by position ("temperature tuning",
      arXiv:2501.19399). They take the position from the index in the batch; here it comes from
      `position_ids`.
    - Its layers with rotary positions see only their own chunk, by a mask that is never built here;
      here it is the `chunk` of the attention.
    - Its mixture runs every expert on every token. Here only the routed experts run, on tokens
      sorted by expert. The router's score multiplies an expert's input, not its output.
    """
    model.set_attn_implementation(LLAMA4_ATTENTION)
    model._keys_to_ignore_on_load_unexpected = [IMAGE_PARTS]
    for module in model.modules():
        if isinstance(module, Llama4TextAttention):
            module.attn_temperature_tuning = False  # the configuration keeps its value
        elif isinstance(module, Llama4TextMoe):
            experts: Any = module.experts
            experts.is_transposed = experts.is_concatenated = True  # for `sharding.py`
            object.__setattr__(experts, "forward", partial(_experts, experts))
            object.__setattr__(module, "forward", partial(_mixture, module))


def llama4_attention(
    module: Any,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    attention_mask: Tensor | None,
    *,
    outrider_positions: Tensor,  # [num_tokens]
    **others: Any,
) -> tuple[Tensor, None]:
    """Implements `paged_attention` with temperatures and chunks."""
    config = module.config
    if config.attn_temperature_tuning and not module.use_rope:
        factors = Temperature(config.attn_scale, config.floor_scale).factors(outrider_positions)
        query = (query * factors[:, None]).to(query.dtype)
    is_chunked = config.layer_types[module.layer_idx] == "chunked_attention"
    chunk = config.attention_chunk_size if is_chunked else None
    return paged_attention(module, query, key, value, None, chunk=chunk, **others)


AttentionInterface.register(LLAMA4_ATTENTION, llama4_attention)


def _mixture(
    module: Any,
    states: Tensor,  # [1, num_tokens, hidden_size]
) -> tuple[Tensor, Tensor]:  # [num_tokens, hidden_size], [num_tokens, num_experts]
    flat = states.reshape(-1, module.hidden_dim)
    logits = linear(flat, module.router.weight)
    top, chosen = logits.topk(module.top_k, dim=1)
    scores = top.float().sigmoid().to(flat.dtype)
    return module.shared_expert(flat) + module.experts(flat, chosen, scores), logits


def _experts(
    module: Any,
    states: Tensor,  # [num_tokens, hidden_size]
    chosen: Tensor,  # [num_tokens, top]
    scores: Tensor,  # [num_tokens, top]
) -> Tensor:  # [num_tokens, hidden_size]
    """Returns the sum over the chosen experts, without waiting for the device."""
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    numbers = torch.arange(module.num_experts, device=pairs.device)
    ends = (pairs[:, None] == numbers).sum(0).cumsum(0).to(torch.int32)
    read = states[order // chosen.shape[1]] * scores.flatten()[order, None]
    gate, up = _grouped_mm(read, module.gate_up_proj, ends).chunk(2, dim=-1)
    given = _grouped_mm(up * module.act_fn(gate), module.down_proj, ends)
    placed = torch.empty_like(given)
    placed[order] = given
    return placed.unflatten(0, chosen.shape).sum(1)


def _with_width(model: Any) -> None:
    """Sets the attribute that `Gemma3nForCausalLM._init_weights` reads and the model lacks."""
    model.hidden_size = model.config.hidden_size


_BUILDING = threading.Lock()
ATTENTION = "outrider_paged"
ADAPTED: dict[str, Callable[[Any], None]] = {"llama4_text": adapt, "gemma3n_text": _with_width}
"""Functions that fix models of a type that would fail or return wrong results otherwise."""


def build_meta(config: Any, dtype: torch.dtype, **trust: Unpack[Trust]) -> Any:
    """Builds the model without weights, set to call `paged_attention`.

    Only one thread may do so at a time: transformers changes torch's default dtype meanwhile.
    """
    try:
        with _BUILDING, torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                deepcopy(config),
                dtype=dtype,
                attn_implementation=ATTENTION,
                trust_remote_code=trust.get("trust_remote_code", False),
            )
    except Exception as error:  # models may raise anything for invalid values
        if isinstance(error, KeyError) and error.args == (ATTENTION,):  # its classes by name
            error = ValueError("its attention cannot be replaced")
        raise _unfit(config, error) from error
    if adapt := ADAPTED.get(config.model_type):
        adapt(model)
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Makes the model compute attention itself in this context, on whole texts."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)


def refuse_state(model: Any) -> None:
    """Raises `CheckpointError` if the model keeps a state in addition to attention."""
    kinds = getattr(model.config, "layer_types", None) or ()
    if getattr(model, "_is_stateful", False) or "linear_attention" in kinds:
        raise _stateful("some layers", model)


def _stateful(which: str, model: Any) -> CheckpointError:
    return CheckpointError(
        f"{which} of this {type(model).__name__} keep a state other than keys and values; "
        "the bridge does not serve such models, and the family's decoder does not know this one"
    )


_COMPUTED = "its modules compute it themselves"


def _own_attention(module: nn.Module, why: str) -> CheckpointError:
    kind = module.config.model_type  # type: ignore[union-attr]
    return CheckpointError(f"{kind!r} is not supported: its attention cannot be replaced: {why}")


@contextlib.contextmanager
def explained(config: Any) -> Iterator[None]:
    """Converts exceptions of a model's own code on a flat batch to `CheckpointError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _unfit(config, error) from error


def _unfit(config: Any, error: Exception) -> CheckpointError:
    if getattr(config, "index_topk", None):
        return CheckpointError(
            f"{config.model_type!r} is not supported: its attention is sparse, to tokens that an "
            "indexer chooses (index_topk)"
        )
    return CheckpointError(
        f"{config.model_type!r} is not a causal language model that can be served: "
        f"{reason(error, config.name_or_path)}"
    )


def tp_hints(model: Any) -> dict[str, str]:
    """Returns the model's own tensor-parallel plan: name pattern -> style."""
    return dict(model.tp_plan or {})


def tied_names(model: Any) -> dict[str, str]:
    """Returns state-dict names that share another's tensor: {tied: owner}."""
    return dict(model.all_tied_weights_keys)


def shrink_heads(model: Any, attentions: Sequence[str], num_heads: int, num_kv_heads: int) -> None:
    """Sets the number of this rank's heads in attention modules. After `materialise_constants`."""
    if not attentions:
        return
    counts = {
        "num_heads": num_heads,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_key_value_groups": num_heads // num_kv_heads,
    }
    modules = [model.get_submodule(name) for name in attentions]
    for owner in [*modules, *{id(m.config): m.config for m in modules}.values()]:
        for name, count in counts.items():
            if isinstance(getattr(owner, name, None), int):
                setattr(owner, name, count)


def shrink_states(model: Any, recurrent: Sequence[str], size: int) -> None:
    """Sets the number of heads of each of `size` ranks in recurrent modules."""
    for name in recurrent:
        module = model.get_submodule(name)
        for count in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"):
            setattr(module, count, getattr(module, count) // size)


def fuse_norms(model: Any) -> None:
    """Replaces the six operations of Llama's RMSNorm and of its copies by one torch call.

    A copy is a class whose `forward` compiles to the same code; Gemma's does not.
    """
    reference = _code(LlamaRMSNorm)
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ and _code(type(module)) == reference:
            weight, eps = module.weight, module.variance_epsilon
            fused = partial(_rms_norm, shape=tuple(weight.shape), weight=weight, eps=eps)
            object.__setattr__(module, "forward", fused)


def _rms_norm(states: Tensor, *, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
    return rms_norm(states, shape, weight, eps)


NO_ATTENTION = AttentionSpec(0, 0, 0, 0, 0.0)
"""The spec of a layer without attention."""


def _code(cls: type) -> tuple[bytes, tuple[str, ...], tuple[Any, ...]]:
    code = inspect.unwrap(cls.forward).__code__  # type: ignore[attr-defined]
    return code.co_code, code.co_names, code.co_consts


class _LastStates(MoeModelOutputWithPast):
    """Stands in for the output of the layers; models read different fields of it."""

    cross_attentions = None


class BridgeRunner:
    """Transformers' modules as a `Runner`.

    The model is called on a flat batch, without the decorators that cost time in every step.
    Attention is computed by `ops`.

    Args:
        others: layers without attention. They are not run; the family takes them over.
        layers: layers of a stage, whose other layers return their inputs; None: all.
    """

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        ops: Ops,
        others: Collection[int] = (),
        layers: range | None = None,
    ) -> None:
        self._model = model
        self._others = others
        self._layers = range(info.num_layers) if layers is None else layers
        self.planned = PlannedOps(ops)
        outer = inspect.unwrap(type(model).forward)
        if "position_ids" not in inspect.signature(outer).parameters:
            raise _unfit(model.config, ValueError("its forward takes no positions"))
        self._outer = partial(outer, model)
        inner = getattr(model, model.base_model_prefix, None) or model.model  # Llama-4's is wrong
        decorated = inner.forward
        plain = partial(inspect.unwrap(type(inner).forward), inner)

        def forward(
            *args: Any, output_hidden_states: Any = None, outrider_states: Any = None, **kwargs: Any
        ) -> Any:
            if outrider_states is not None:
                return _LastStates(last_hidden_state=outrider_states)
            if output_hidden_states is None:
                return plain(*args, **kwargs)
            return decorated(*args, output_hidden_states=output_hidden_states, **kwargs)

        inner.forward = forward
        self.attention_specs = self._observe(info)
        """The observed arguments of each layer's attention on this rank, for any architecture."""
        self.state_shapes: tuple[StateShape | None, ...] = (None,) * info.num_layers
        self.kv_shapes = tuple(
            KVShape(spec.num_kv_heads, spec.head_dim, spec.value_dim)
            for spec in self.attention_specs
        )

    def run(
        self, step: StepInput, cache: KVCache, capture: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # [num_rows, vocab], each [num_tokens, hidden_size]
        def put(values: IntArray) -> Tensor:
            return torch.from_numpy(values).to(cache.device, torch.int64, non_blocking=True)

        rows = None if len(step.rows) == len(step.token_ids) else put(step.rows)
        plan = self.planned.plan(step, cache)
        first = self._layers.start
        attention = _Planned(self.planned, plan, cache, self.attention_specs, first)
        return self._forward(put(step.token_ids), put(step.positions), rows, attention, capture)

    def _forward(
        self,
        token_ids: Tensor,  # [num_tokens]
        positions: Tensor,  # [num_tokens]
        rows: Tensor | None,  # [num_rows]; None: every row
        attention: _Planned | _Observer,
        capture: tuple[int, ...] = (),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # [num_rows, vocab], each [num_tokens, hidden_size]
        """Returns logits and captured states.

        Hidden state i is the input of layer i; the last one is the output of the final norm.
        """
        kinds: dict[str, Any] = {"output_hidden_states": list(capture)} if capture else {}
        output = self._outer(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=None,
            past_key_values=None,
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            outrider_attention=attention,
            outrider_positions=positions,
            **kinds,
        )
        hidden = tuple(states[0] for states in output.hidden_states or () if states is not None)
        return output.logits[0], hidden

    def logits(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, vocab]
        """Applies the output layer, with the model's scales and soft caps, to `states`."""
        zeros = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        output = self._outer(
            input_ids=zeros, use_cache=False, logits_to_keep=0, outrider_states=states.unsqueeze(0)
        )
        return output.logits[0]

    @torch.inference_mode()
    def _observe(self, info: ModelInfo) -> tuple[AttentionSpec, ...]:
        """Runs one token to observe the arguments of each layer's attention."""
        observer = _Observer()
        layers = self._layers
        device = self._model.get_input_embeddings().weight.device
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        logits = self._forward(zero, zero, None, observer)[0]
        layers = self._layers
        width = info.vocab_size if layers.stop == info.num_layers else info.hidden_size
        assert logits.shape == (1, width), (logits.shape, width)
        others = [layer for layer in layers if layer not in observer.specs]
        if unknown := [layer for layer in others if layer not in self._others]:
            if not observer.specs:
                raise _own_attention(self._model, _COMPUTED)
            raise _stateful(f"layers {unknown}", self._model)
        observer.specs |= dict.fromkeys(others, NO_ATTENTION)
        return tuple(observer.specs[layer] for layer in sorted(observer.specs))


def observed_shapes(model: Any, info: ModelInfo) -> tuple[KVShape, ...] | None:
    """Returns each layer's part of a KV cache, for a model without weights.

    Returns None for models that read values, which the meta device does not have.

    Raises:
        CheckpointError: the model cannot be served, whatever its weights.
    """
    is_own = type(model).__module__.startswith("transformers.")
    fuse_norms(model)
    grouped = model.config._experts_implementation
    model.config._experts_implementation = "batched_mm"  # the grouped one requires bfloat16 there
    try:
        return BridgeRunner(model, info, ReferenceOps()).kv_shapes
    except RuntimeError:
        if is_own and not (model._supports_attention_backend or model._supports_sdpa):
            raise _own_attention(model, _COMPUTED) from None
    except (AttributeError, LookupError, TypeError) as error:
        if is_own:
            raise _unfit(model.config, error) from error
    finally:
        model.config._experts_implementation = grouped
    return None


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step's attention, layer by layer, with the observed specs."""

    planned: PlannedOps
    plan: PagedStep
    cache: KVCache
    specs: Sequence[AttentionSpec]  # of the layers that this rank has
    first: int = 0  # index of the first of these

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, **_: Any
    ) -> Tensor:
        index = layer - self.first
        place = (self.plan, self.cache, index)
        return self.planned.attend(query, key, value, *place, self.specs[index])


class _Observer:
    """Stands in for attention and records its arguments."""

    def __init__(self) -> None:
        self.specs: dict[int, AttentionSpec] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, **masks: Any
    ) -> Tensor:
        sizes = (query.shape[1], key.shape[1], key.shape[2], value.shape[2])
        if (sinks := masks["sinks"]) is not None:
            masks["sinks"] = sinks.detach().float().clone()
        self.specs[layer] = AttentionSpec(*sizes, scale, **masks)
        return value.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: Tensor | None,
    *,
    outrider_attention: _Planned | _Observer | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [num_heads], gpt-oss's sinks
    chunk: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that every layer calls instead of transformers' attention functions."""
    if outrider_attention is None:
        raise _own_attention(module, "its layers pass on no arguments to it")
    if isinstance(outrider_attention, _Observer) and not getattr(module, "is_causal", True):
        raise _own_attention(module, "a token attends to those that follow it")
    out = outrider_attention.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        chunk=chunk,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, paged_attention)


def map_checkpoint(
    model: Any,
    stored: Mapping[str, TensorSource],
    wanted: Callable[[str], bool] = lambda name: True,  # filters the model's own names
) -> tuple[dict[str, TensorSource], list[str]]:
    """Returns sources by the model's own names, and checkpoint names that no module uses.

    Renames and merges follow transformers' conversion mapping. The common merges, of experts stored
    one by one, are lazy; any other conversion runs on whole tensors.
    """
    sources, merges, surplus = by_target(model, stored)
    if text := _text_part(stored):
        surplus = [name for name in surplus if name in text]
    if text and surplus:
        own = {name: stored[public] for public, name in text.items()}
        sources, merges, surplus = by_target(model, own)
    for target, (converter, parts) in merges.items():
        sources.update(_convert(model, target, converter, parts, is_read=wanted(target)))
    ignored = [
        *(model._keys_to_ignore_on_load_unexpected or []),
        r"rotary_emb\.inv_freq",
        *([rf"^{LAYER}$"] if classifies(model.config) else []),
        *([r"\.self_attn\.indexer\."] if hasattr(model.config, "index_topk") else []),
        *_beyond_the_last_layer(model.config),
    ]
    return sources, [name for name in surplus if not any(re.search(key, name) for key in ignored)]


_LANGUAGE = re.compile(r"(?:model\.)?language_model\.(?:(model|lm_head)\.)?(.+)")


def _text_part(names: Collection[str]) -> dict[str, str]:
    """Returns the text model's names in a checkpoint for text and images, by stored name.

    transformers' mapping has them for some types only. Returns {} for a text model.
    """
    found = {name: match for name in names if (match := _LANGUAGE.fullmatch(name))}
    own = {name: f"{match[1] or 'model'}.{match[2]}" for name, match in found.items()}
    return own | {name: name for name in names if own and name.startswith("lm_head.")}


def _beyond_the_last_layer(config: Any) -> list[str]:
    """Returns patterns of modules that predict further tokens, which only a head may use."""
    last = config.num_hidden_layers
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    layers = "|".join(str(layer) for layer in range(last, last + count))
    return [r"^(model\.)?mtp(_layers)?\.", *([rf"^model\.layers\.({layers})\."] if layers else [])]


def _convert(
    model: Any,
    target: str,
    converter: WeightConverter,
    parts: dict[str, list[TensorSource]],
    *,
    is_read: bool,
) -> dict[str, TensorSource]:
    operations = converter.operations
    merge, joins = operations[0], operations[1:]
    lazy = isinstance(merge, MergeModulelist) and merge.dim == 0
    if lazy and len(joins) <= 1 and all(type(join) is Concatenate for join in joins):
        stacks = [Stacked(parts[key]) for key in converter.source_patterns if key in parts]
        if not joins:
            return {target: stacks[0]}
        return {target: Joined(stacks, joins[0].dim)}  # type: ignore[attr-defined]
    if not is_read:  # another stage reads and checks it
        return {target: Whole(model.state_dict()[target])}
    readers = {
        pattern: [partial(piece.read, whole_box(piece.shape)) for piece in pieces]
        for pattern, pieces in parts.items()
    }
    tensors = merged(model, target, converter, readers)
    return {name: Whole(tensor) for name, tensor in tensors.items()}
